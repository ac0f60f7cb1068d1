//! `waybill projector`: folds the shared log into the stores that people and gateways read. Any number may run side by
//! side: one writes, the others wait for it to end.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use waybill_events::archive::{Archive, Archived};
use waybill_events::jetstream::JetstreamLog;
use waybill_events::log::Log;
use waybill_gateway::server::{self, Readiness};
use waybill_projector::postgres::{Begin, Phase, PostgresProjector, Standing};
use waybill_schema::time::Time;

use crate::chore::{Chore, Shared};
use crate::{check, gateway, service};

/// How long questions about its health get to end when it stops.
const DRAIN: Duration = Duration::from_secs(1);
const MS_PER_SECOND: u64 = 1000;

/// Fold the log of many gateways into Postgres.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Where to answer `/healthz` and `/readyz`; without it, nowhere
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// The folder of the log's archive, where the log itself does not reach back to its start any more
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
    /// Begin at the start of the log, in new tables that become the live ones when they have caught up
    #[arg(long)]
    new_generation: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = service::runtime()?;
    let config = check::load(&args.config)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let Some(usage) = &config.usage else {
        bail!("{} names no `usage`, so there is nothing to project into", args.config.display());
    };
    let log = JetstreamLog::new(gateway::settings(&config, &args.config)?)?;
    let log: Box<dyn Log> = match &args.archive {
        Some(dir) => Box::new(Archived::new(Archive::open(dir)?, Box::new(log))?),
        None => Box::new(log),
    };
    let begin = if args.new_generation { Begin::NewGeneration } else { Begin::Checkpoint };
    let standing = Shared::default();
    let chore = start(PostgresProjector::new(log, &usage.postgres, begin)?, standing.clone())?;
    let served = runtime.block_on(serve(standing, args.listen));
    drop(chore);
    served
}

fn start(mut projector: PostgresProjector, standing: Shared<Standing>) -> anyhow::Result<Chore> {
    let chore = Chore::paced("postgres", move || {
        let pause = projector.turn();
        standing.change(|standing| standing.clone_from(projector.standing()));
        pause
    })?;
    Ok(chore)
}

async fn serve(standing: Shared<Standing>, listen: Option<SocketAddr>) -> anyhow::Result<()> {
    let asked = service::asked_to_stop()?;
    let Some(listen) = listen else {
        service::greet("waybill projector is up");
        asked.await;
        return Ok(());
    };
    let listener = TcpListener::bind(listen).await.context("the listening address cannot be had")?;
    service::greet(&format!("waybill projector is up at http://{}", listener.local_addr()?));
    let stop = async {
        asked.await;
        DRAIN
    };
    server::serve_health(listener, Arc::new(move || tell(&standing.look(), Time::wall_clock())), stop).await;
    Ok(())
}

/// One that waits for another to end is as ready as can be.
fn tell(standing: &Standing, now: Time) -> Readiness {
    let ready = standing.trouble.is_none() && matches!(standing.phase, Phase::Projecting | Phase::Waiting);
    let detail = serde_json::json!({
        "postgres": {
            "phase": standing.phase,
            "trouble": standing.trouble,
            "generation": standing.generation,
            "live": standing.live,
            "checkpoint": standing.seq,
            "head": standing.head,
            "lag_frames": standing.lag_frames(),
            "lag_seconds": standing.lag_ms(now) / MS_PER_SECOND,
            "quarantined": standing.quarantined,
        },
    });
    Readiness { ready, detail }
}
