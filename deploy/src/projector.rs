//! `waybill projector`: folds the shared log into the stores that people and gateways read, each by a projection of its
//! own that no trouble of the other holds up. Any number may run side by side: for each store one writes, the others
//! wait for it to end.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::{Context, bail};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use waybill_events::archive::{Archive, Archived};
use waybill_events::jetstream::JetstreamLog;
use waybill_events::log::Log;
use waybill_gateway::metrics;
use waybill_gateway::server::Readiness;
use waybill_projector::postgres::{self, Begin, Phase, PostgresProjector};
use waybill_projector::redis::{self, Projection, RECORDS_MAX};
use waybill_schema::config::StateSettings;
use waybill_schema::time::Time;

use crate::chore::{Chore, Shared};
use crate::{gateway, service};

const MS_PER_SECOND: u64 = 1000;
/// A turn that takes longer has no end: everything that it waits for has a bound, and they come to less together.
const TURN_MS_MAX: u64 = 120_000;

/// Fold the log of many gateways into Postgres and Redis.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Where to answer `/healthz`, `/readyz` and `/metrics`; without it, nowhere
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
    let told = standings.clone();
    let readiness = move || standings.tell(Time::wall_clock());
    let more = service::metrics(move || figures(&told.look(Time::wall_clock())));
    let attended = runtime.block_on(service::attend("projector", args.listen, more, readiness));
    drop(chores);
    attended
}

/// Where the shared state of a configuration is.
pub(crate) fn shared_state(state: &StateSettings) -> redis::Settings {
    redis::Settings { url: state.redis.clone(), prefix: state.prefix.clone(), records_max: RECORDS_MAX }
}

fn into_postgres(
    mut projector: PostgresProjector,
    standing: Shared<Turned<postgres::Standing>>,
) -> std::io::Result<Chore> {
    Chore::paced("postgres", move || {
        let pause = projector.turn();
        standing.change(|turned| *turned = Turned::now(projector.standing()));
        pause
    })
}

fn into_redis(mut projection: Projection, standing: Shared<Turned<redis::Standing>>) -> std::io::Result<Chore> {
    Chore::paced("redis", move || {
        let pause = projection.turn();
        standing.change(|turned| *turned = Turned::now(projection.standing()));
        pause
    })
}

/// How a projection stood after its last turn.
#[derive(Clone, Default)]
struct Turned<T> {
    standing: T,
    /// When that was; nothing before the first.
    at: Option<Time>,
}

impl<T: Clone> Turned<T> {
    fn now(standing: &T) -> Self {
        Self { standing: standing.clone(), at: Some(Time::wall_clock()) }
    }

    /// Whether the projection no longer takes turns: it hangs, or its thread has ended.
    fn is_stuck(&self, now: Time) -> bool {
        self.at.is_some_and(|at| now.ms_since(at) > TURN_MS_MAX)
    }
}

/// How the projections stand; nothing of a store that the configuration does not name.
#[derive(Clone, Default)]
struct Standings {
    postgres: Option<Shared<Turned<postgres::Standing>>>,
    redis: Option<Shared<Turned<redis::Standing>>>,
}

/// What is told of one projection.
struct Told {
    store: &'static str,
    ready: bool,
    in_trouble: bool,
    generation: u64,
    lag_frames: u64,
    lag_ms: u64,
    quarantined: u64,
    detail: serde_json::Value,
}

impl Standings {
    fn look(&self, now: Time) -> Vec<Told> {
        let postgres = self.postgres.as_ref().map(|turned| tell_postgres(&turned.look(), now));
        let redis = self.redis.as_ref().map(|turned| tell_redis(&turned.look(), now));
        postgres.into_iter().chain(redis).collect()
    }

    /// Ready when all projections are.
    fn tell(&self, now: Time) -> Readiness {
        let told = self.look(now);
        let ready = told.iter().all(|told| told.ready);
        let detail = |store| told.iter().find(|told| told.store == store).map(|told| &told.detail);
        Readiness { ready, detail: serde_json::json!({ "postgres": detail("postgres"), "redis": detail("redis") }) }
    }
}

/// One that waits for another to end is as ready as can be.
fn tell_postgres(turned: &Turned<postgres::Standing>, now: Time) -> Told {
    let (standing, stuck) = (&turned.standing, turned.is_stuck(now));
    let in_trouble = standing.trouble.is_some() || stuck;
    let lag_ms = standing.lag_ms(now);
    let detail = serde_json::json!({
        "phase": standing.phase,
        "trouble": standing.trouble,
        "stuck": stuck,
        "generation": standing.generation,
        "live": standing.live,
        "checkpoint": standing.seq,
        "head": standing.head,
        "lag_frames": standing.lag_frames(),
        "lag_seconds": lag_ms / MS_PER_SECOND,
        "quarantined": standing.quarantined,
    });
    Told {
        store: "postgres",
        ready: !in_trouble && matches!(standing.phase, Phase::Projecting | Phase::Waiting),
        in_trouble,
        generation: standing.generation.unwrap_or_default().into(),
        lag_frames: standing.lag_frames(),
        lag_ms,
        quarantined: standing.quarantined,
        detail,
    }
}

/// The same of one that stands by. What cannot be decoded is quarantined in Postgres alone.
fn tell_redis(turned: &Turned<redis::Standing>, now: Time) -> Told {
    let (standing, stuck) = (&turned.standing, turned.is_stuck(now));
    let in_trouble = standing.trouble.is_some() || stuck;
    let lag_ms = standing.lag_ms(now);
    let detail = serde_json::json!({
        "trouble": standing.trouble,
        "stuck": stuck,
        "generation": standing.generation,
        "checkpoint": standing.seq,
        "head": standing.head,
        "lag_frames": standing.lag_frames(),
        "lag_seconds": lag_ms / MS_PER_SECOND,
        "caught_up": standing.caught_up,
        "stands_by": standing.stands_by,
    });
    Told {
        store: "redis",
        ready: !in_trouble && standing.generation > 0,
        in_trouble,
        generation: standing.generation,
        lag_frames: standing.lag_frames(),
        lag_ms,
        quarantined: 0,
        detail,
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Of {
    store: &'static str,
}

/// The projections as `/metrics` shows them.
fn figures(projections: &[Told]) -> String {
    let mut registry = Registry::with_prefix("waybill_projection");
    for (name, help, figure) in FIGURES {
        let family = Family::<Of, Gauge>::default();
        for told in projections {
            family.get_or_create(&Of { store: told.store }).set(i64::try_from(figure(told)).unwrap_or(i64::MAX));
        }
        registry.register(name, help, family);
    }
    let lag = Family::<Of, Gauge<f64, AtomicU64>>::default();
    for told in projections {
        lag.get_or_create(&Of { store: told.store }).set(Duration::from_millis(told.lag_ms).as_secs_f64());
    }
    registry.register_with_unit("lag", "How old what the store covers is, where it lags", Unit::Seconds, lag);
    metrics::text_of(&registry)
}

/// A figure by its name, with what it says.
type Figure = (&'static str, &'static str, fn(&Told) -> u64);

const FIGURES: [Figure; 4] = [
    ("lag_frames", "Frames of the log that the store does not cover yet", |told| told.lag_frames),
    ("generation", "The generation that is written", |told| told.generation),
    ("quarantined", "Lines and frames that this process could not decode", |told| told.quarantined),
    ("trouble", "1 while the projection does not go on, as /readyz explains, else 0", |told| told.in_trouble.into()),
];
