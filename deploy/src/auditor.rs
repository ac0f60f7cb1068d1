//! `waybill auditor`: the control plane of many gateways. It brings the catalogue in the log to what its file says, at
//! start and whenever the file has changed; any number of auditors may do so side by side. Where it listens it also
//! answers the operator's questions.

use std::net::SocketAddr;
use std::path::PathBuf;

use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use waybill_events::jetstream::JetstreamLog;
use waybill_gateway::metrics;
use waybill_gateway::server::Readiness;

use crate::follow::Follower;
use crate::trail::Trail;
use crate::watch::{Stamp, Standing, Watch};
use crate::{admin, archive, audit, gateway, service};

/// Keep the catalogue of many gateways at what a file says.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Where to answer `/healthz`, `/readyz` and, with an `admin_token`, `/admin/v1`; without it, nowhere
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// A folder to archive the log into, by stretches of some thousand frames
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = service::runtime()?;
    let stamp = Stamp::of(&args.config);
    let config = service::load(&args.config)?;
    let settings = gateway::settings(&config, &args.config)?;
    let log = JetstreamLog::new(settings.clone())?;
    let archive = args.archive.map(|dir| archive::keep(dir, JetstreamLog::new(settings.clone())?)).transpose()?;
    let usage = config.usage.as_ref().map(|usage| audit::postgres(usage, &runtime)).transpose()?;
    let more = admin::pages(&config, usage, || Ok(Box::new(JetstreamLog::new(settings)?)))?;
    let watch = Watch::start(args.config, stamp, &config, Follower::new(log, Trail::default()))?;
    let (standing, watched) = (watch.standing(), watch.standing());
    let readiness = move || {
        let standing = standing.look();
        Readiness { ready: standing.is_well(), detail: standing.tell() }
    };
    let more = more.merge(service::metrics(move || figures(&watched.look())));
    let attended = runtime.block_on(service::attend("auditor", args.listen, more, readiness));
    drop(archive);
    attended
}

fn figures(standing: &Standing) -> String {
    let mut registry = Registry::with_prefix("waybill_auditor");
    let applied = ConstGauge::new(i64::from(standing.is_well()));
    registry.register("catalogue_applied", "1 while the log holds the catalogue of the file, else 0", applied);
    metrics::text_of(&registry)
}
