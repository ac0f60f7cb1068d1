//! `waybill auditor`: the control plane of many gateways. It brings the catalogue in the log to what its file says, at
//! start and whenever the file has changed; any number of auditors may do so side by side.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use waybill_events::jetstream::JetstreamLog;
use waybill_gateway::server::{self, Readiness};

use crate::follow::Follower;
use crate::trail::Trail;
use crate::watch::{Stamp, Watch};
use crate::{archive, check, gateway, service};

/// How long questions about its health get to end when it stops.
const DRAIN: Duration = Duration::from_secs(1);

/// Keep the catalogue of many gateways at what a file says.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Where to answer `/healthz` and `/readyz`; without it, nowhere
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// A folder to archive the log into, by stretches of some thousand frames
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = service::runtime()?;
    let stamp = Stamp::of(&args.config);
    let config = check::load(&args.config)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let settings = gateway::settings(&config, &args.config)?;
    let log = JetstreamLog::new(settings.clone())?;
    let archive = args.archive.map(|dir| archive::keep(dir, JetstreamLog::new(settings)?)).transpose()?;
    let watch = Watch::start(args.config, stamp, &config, Follower::new(log, Trail::default()))?;
    let audited = runtime.block_on(audit(&watch, args.listen));
    drop(archive);
    audited
}

async fn audit(watch: &Watch, listen: Option<SocketAddr>) -> anyhow::Result<()> {
    let asked = service::asked_to_stop()?;
    let Some(listen) = listen else {
        service::greet("waybill auditor is up");
        asked.await;
        return Ok(());
    };
    let listener = TcpListener::bind(listen).await.context("the listening address cannot be had")?;
    service::greet(&format!("waybill auditor is up at http://{}", listener.local_addr()?));
    let stop = async {
        asked.await;
        DRAIN
    };
    let standing = watch.standing();
    let readiness = Arc::new(move || {
        let standing = standing.look();
        let ready = standing.applied.is_some() && standing.waits.is_none() && standing.invalid.is_none();
        Readiness { ready, detail: standing.tell() }
    });
    server::serve_health(listener, readiness, stop).await;
    Ok(())
}
