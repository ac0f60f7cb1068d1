//! `waybill projector`: folds the shared log into the stores that people and gateways read, each by a projection of its
//! own that no trouble of the other holds up. Any number may run side by side: for each store one writes, the others
//! wait for it to end.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use axum::Router;
use waybill_events::archive::{Archive, Archived};
use waybill_events::jetstream::JetstreamLog;
use waybill_events::log::Log;
use waybill_gateway::server::Readiness;
use waybill_projector::postgres::{self, Begin, Phase, PostgresProjector};
use waybill_projector::redis::{self, Projection, RECORDS_MAX};
use waybill_schema::config::StateSettings;
use waybill_schema::time::Time;

use crate::chore::{Chore, Shared};
use crate::{gateway, service};

const MS_PER_SECOND: u64 = 1000;

/// Fold the log of many gateways into Postgres and Redis.
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
    /// Begin at the start of the log, in new tables of Postgres that become the live ones when they have caught up
    #[arg(long)]
    new_generation: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = service::runtime()?;
    let config = service::load(&args.config)?;
    if config.usage.is_none() && config.state.is_none() {
        bail!("{} names neither `usage` nor `state`, so there is nothing to project into", args.config.display());
    }
    let settings = gateway::settings(&config, &args.config)?;
    let log = || -> anyhow::Result<Box<dyn Log>> {
        let log = JetstreamLog::new(settings.clone())?;
        Ok(match &args.archive {
            Some(dir) => Box::new(Archived::new(Archive::open(dir)?, Box::new(log))?),
            None => Box::new(log),
        })
    };
    let begin = if args.new_generation { Begin::NewGeneration } else { Begin::Checkpoint };
    let mut chores = Vec::new();
    let mut standings = Standings::default();
    if let Some(usage) = &config.usage {
        let standing = standings.postgres.insert(Shared::default());
        chores.push(into_postgres(PostgresProjector::new(log()?, &usage.postgres, begin)?, standing.clone())?);
    }
    if let Some(state) = &config.state {
        let projection =
            Projection::new(log()?, &shared_state(state)).context("state.redis is no server to project into")?;
        chores.push(into_redis(projection, standings.redis.insert(Shared::default()).clone())?);
    }
    let readiness = move || standings.tell(Time::wall_clock());
    let attended = runtime.block_on(service::attend("projector", args.listen, Router::new(), readiness));
    drop(chores);
    attended
}

/// Where the shared state of a configuration is.
pub(crate) fn shared_state(state: &StateSettings) -> redis::Settings {
    redis::Settings { url: state.redis.clone(), prefix: state.prefix.clone(), records_max: RECORDS_MAX }
}

fn into_postgres(mut projector: PostgresProjector, standing: Shared<postgres::Standing>) -> anyhow::Result<Chore> {
    let chore = Chore::paced("postgres", move || {
        let pause = projector.turn();
        standing.change(|standing| standing.clone_from(projector.standing()));
        pause
    })?;
    Ok(chore)
}

fn into_redis(mut projection: Projection, standing: Shared<redis::Standing>) -> anyhow::Result<Chore> {
    let chore = Chore::paced("redis", move || {
        let pause = projection.turn();
        standing.change(|standing| standing.clone_from(projection.standing()));
        pause
    })?;
    Ok(chore)
}

/// How the projections stand; nothing of a store that the configuration does not name.
#[derive(Clone, Default)]
struct Standings {
    postgres: Option<Shared<postgres::Standing>>,
    redis: Option<Shared<redis::Standing>>,
}

impl Standings {
    /// Ready when all projections are.
    fn tell(&self, now: Time) -> Readiness {
        let postgres = self.postgres.as_ref().map(|standing| tell_postgres(&standing.look(), now));
        let redis = self.redis.as_ref().map(|standing| tell_redis(&standing.look()));
        let ready = [&postgres, &redis].into_iter().flatten().all(|told| told.ready);
        let detail = |told: Option<Readiness>| told.map(|told| told.detail);
        Readiness { ready, detail: serde_json::json!({ "postgres": detail(postgres), "redis": detail(redis) }) }
    }
}

/// One that waits for another to end is as ready as can be.
fn tell_postgres(standing: &postgres::Standing, now: Time) -> Readiness {
    let ready = standing.trouble.is_none() && matches!(standing.phase, Phase::Projecting | Phase::Waiting);
    let detail = serde_json::json!({
        "phase": standing.phase,
        "trouble": standing.trouble,
        "generation": standing.generation,
        "live": standing.live,
        "checkpoint": standing.seq,
        "head": standing.head,
        "lag_frames": standing.lag_frames(),
        "lag_seconds": standing.lag_ms(now) / MS_PER_SECOND,
        "quarantined": standing.quarantined,
    });
    Readiness { ready, detail }
}

/// The same of one that stands by.
fn tell_redis(standing: &redis::Standing) -> Readiness {
    let ready = standing.trouble.is_none() && (standing.generation > 0);
    let detail = serde_json::json!({
        "trouble": standing.trouble,
        "generation": standing.generation,
        "checkpoint": standing.seq,
        "caught_up": standing.caught_up,
        "stands_by": standing.stands_by,
    });
    Readiness { ready, detail }
}
