//! A gateway in this process, from the first request to the last fact: what `up` and `gateway` have in common.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use axum::Router;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use waybill_events::log::Log;
use waybill_events::shipper::{Health, Progress, Shipper};
use waybill_events::spool::{Orphans, Reader, SPOOL_BYTES_MAX, Spool};
use waybill_gateway::ledger::Ledger;
use waybill_gateway::limits::Limits;
use waybill_gateway::metrics::Metrics;
use waybill_gateway::proxy::Gateway;
use waybill_gateway::server::{self, House, Readiness, Ready};
use waybill_gateway::shared::embedded::Embedded;
use waybill_gateway::shared::redis::RedisState;
use waybill_gateway::shared::{SharedState, Unshared};
use waybill_gateway::traffic::Traffic;
use waybill_gateway::upstream::Upstream;
use waybill_gateway::vault::{Shelf, Vault};
use waybill_schema::config::Config;
use waybill_schema::event::{Alive, Epoch, Event, Started};
use waybill_schema::frame::Body;
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::chore;
use crate::follow::{self, Follower, Following, Sight};
use crate::spending;
use crate::watch::{self, Watch};
use crate::{check, data};

/// Seconds between two signs of life (DESIGN.md, section 5).
const ALIVE_SECONDS: u64 = 10;
/// The time between two looks at the shipper.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long open requests get to end in a gateway whose name another process has taken over.
const FENCED_DRAIN: Duration = Duration::from_millis(500);
/// Bytes waiting for the log beyond which a gateway is not ready: the spool is nearly full.
const WAITING_BYTES_MAX: u64 = SPOOL_BYTES_MAX / 8 * 7;
/// How long questions about its health get to end when a process without callers stops.
const HEALTH_DRAIN: Duration = Duration::from_secs(1);
const MS_PER_SECOND: u64 = 1000;

/// What a gateway is made of.
pub(crate) struct Parts<L> {
    pub(crate) listener: TcpListener,
    pub(crate) config: Arc<Config>,
    pub(crate) secret: DeploymentSecret,
    pub(crate) ledger: Ledger,
    pub(crate) shipper: Shipper,
    pub(crate) follower: Follower<L>,
    /// The watch over the configuration file, where this process keeps it.
    pub(crate) watch: Option<Watch>,
    /// Where every catalogue that comes into force is kept.
    pub(crate) copy: Option<PathBuf>,
    pub(crate) shared: Shared,
    /// Further pages at the same address.
    pub(crate) more: Router,
    /// Where outcomes under an `Idempotency-Key` lie.
    pub(crate) shelf: Shelf,
    /// Where it is read what was spent of budgets.
    pub(crate) spending: spending::Store,
    /// How long the last facts may take to reach the log; what has not stays in the spool.
    pub(crate) ship_time: Duration,
}

/// What the gateway knows of others.
pub(crate) enum Shared {
    /// There is no other.
    Embedded(Embedded),
    /// There are others, of which it knows nothing.
    Unshared,
    Redis(Arc<RedisState>),
}

/// Writes the process's own messages to standard error, and makes what it runs on.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info,refinery_core=warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// Reads the configuration, and says what of it is not in force.
pub(crate) fn load(file: &Path) -> anyhow::Result<Config> {
    let config = check::load(file)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(config)
}

/// Lets a process without callers run until it is asked to stop, and answers `/healthz`, `/readyz` and the pages of `more`
/// where it `listen`s.
pub(crate) async fn attend(
    name: &str,
    listen: Option<SocketAddr>,
    more: Router,
    readiness: impl Fn() -> Readiness + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let asked = asked_to_stop()?;
    let Some(listen) = listen else {
        greet(&format!("waybill {name} is up"));
        asked.await;
        return Ok(());
    };
    let listener = TcpListener::bind(listen).await.context("the listening address cannot be had")?;
    greet(&format!("waybill {name} is up at http://{}", listener.local_addr()?));
    let stop = async {
        asked.await;
        HEALTH_DRAIN
    };
    server::serve_pages(listener, Arc::new(readiness), more, stop).await;
    Ok(())
}

/// The page `/metrics` of a process that tells its `figures`.
pub(crate) fn metrics(figures: impl Fn() -> String + Clone + Send + Sync + 'static) -> Router {
    Router::new().route("/metrics", get(move || std::future::ready(server::open_metrics(figures()))))
}

/// Binds `listen`, or else what the configuration says.
pub(crate) async fn bind(listen: Option<SocketAddr>, config: &Config) -> anyhow::Result<TcpListener> {
    let listener = match listen {
        Some(listen) => TcpListener::bind(listen).await,
        None => TcpListener::bind(&config.listen).await,
    };
    listener.context("the listening address cannot be had (--listen chooses another)")
}

/// The key of content hashes: the configuration's, or the one that the first start made in the data folder.
pub(crate) fn secret(config: &Config, data: &Path) -> anyhow::Result<DeploymentSecret> {
    let text = match &config.deployment_secret {
        Some(reference) => data::resolve(reference).map_err(|why| anyhow::anyhow!("deployment_secret: {why}"))?,
        None => data::secret(data, "deployment.secret", "")?,
    };
    Ok(DeploymentSecret::new(text.as_bytes()))
}

/// Begins the writer's next epoch, behind what the log and the spool (`spooled`) have of it, and gives its number: first
/// `started`, then the `orphans`, which the log will not take in any other way (ADR 24).
pub(crate) fn begin(
    spool: &mut Spool,
    reader: &mut Reader,
    orphans: Orphans,
    spooled: Option<Epoch>,
    secret: &DeploymentSecret,
) -> anyhow::Result<u64> {
    let previous = orphans.previous(spooled);
    let epoch = previous.map_or(1, |place| place.epoch + 1);
    spool.begin(epoch)?;
    let started = Started { version: env!("CARGO_PKG_VERSION").to_owned(), secret: secret.id(), previous };
    let started = Body::of(&Event::Started(started), Time::wall_clock());
    spool.append(&[started]).context("the spool takes no facts")?;
    orphans.adopt(spool, reader)?;
    Ok(epoch)
}

/// Serves until the process is asked to stop or another has taken over its name, which is an error.
pub(crate) async fn serve<L: Log + 'static>(parts: Parts<L>, greeting: &str) -> anyhow::Result<()> {
    let Parts { config, shipper, follower, .. } = parts;
    let (shared, redis): (Arc<dyn SharedState>, _) = match parts.shared {
        Shared::Embedded(state) => (Arc::new(state), None),
        Shared::Unshared => (Arc::new(Unshared), None),
        Shared::Redis(state) => (state.clone(), Some(state)),
    };
    let gateway = Arc::new(Gateway {
        ledger: parts.ledger,
        serving: ArcSwap::from_pointee(follow::serving(follower.trail(), config.clone())),
        upstream: Upstream::new(Duration::from_millis(config.retry.connect_ms.into()))?,
        metrics: Metrics::default(),
        secret: parts.secret.clone(),
        shared,
        limits: Limits::default(),
        vault: Vault::new(parts.shelf, parts.secret),
        traffic: Traffic::default(),
    });
    let following = Following::start(gateway.clone(), follower, parts.copy)?;
    let spending = spending::follow(gateway.clone(), parts.spending)?;
    let progress = shipper.progress().clone();
    let draining = Arc::new(AtomicBool::new(false));
    let vitals = Vitals {
        gateway: gateway.clone(),
        progress: progress.clone(),
        draining: draining.clone(),
        sight: following.sight(),
        watch: parts.watch.as_ref().map(Watch::standing),
        redis: redis.clone(),
    };
    let house = House { gateway: gateway.clone(), readiness: ready(vitals), more: parts.more };
    // Whoever reads the greeting may ask to stop at once.
    let asked = asked_to_stop()?;
    greet(greeting);
    tracing::info!(listen = %parts.listener.local_addr()?, "serving");

    let mut chores = JoinSet::new();
    chores.spawn(show_life(gateway.clone()));
    let keeps = gateway.clone();
    chores.spawn(async move { keeps.vault.run().await });
    if let Some(redis) = redis {
        gateway.ledger.share();
        let gateway = gateway.clone();
        chores.spawn(async move { redis.follow(&gateway.ledger).await });
    }
    let stop = async {
        let (notice, drain) = tokio::select! {
            () = asked => (config.notice_seconds, Duration::from_secs(config.drain_seconds.into())),
            () = fenced(&progress) => (0, FENCED_DRAIN),
        };
        draining.store(true, Ordering::Relaxed);
        // A balancer that has not looked yet still sends requests here, and a closed door would fail them.
        tokio::time::sleep(Duration::from_secs(notice.into())).await;
        drain
    };
    server::serve(parts.listener, house, stop).await;
    chores.shutdown().await;
    drop((following, spending, parts.watch));
    gateway.ledger.close(Time::wall_clock());
    let standing = shipper.stop(parts.ship_time);
    if let Health::Fenced { by } = standing.health {
        bail!("another process writes under the name of this one and has begun epoch {}: give each its own", by.epoch);
    }
    tracing::info!(?standing, "stopped");
    Ok(())
}

/// Ready at SIGINT or SIGTERM.
pub(crate) fn asked_to_stop() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Says `greeting` on standard output.
pub(crate) fn greet(greeting: &str) {
    // Nobody may be reading, which is no reason not to serve.
    if let Err(error) = writeln!(std::io::stdout(), "{greeting}") {
        tracing::warn!(%error, "the greeting could not be printed");
    }
}

/// Ready when another process writes under this one's name.
async fn fenced(progress: &Progress) {
    let mut look = tokio::time::interval(LOOK_EVERY);
    while !matches!(progress.standing().health, Health::Fenced { .. }) {
        look.tick().await;
    }
}

async fn show_life(gateway: Arc<Gateway>) {
    let mut beat = tokio::time::interval(Duration::from_secs(ALIVE_SECONDS));
    beat.tick().await;
    loop {
        beat.tick().await;
        let last = gateway.ledger.standing().last.number;
        gateway.ledger.record(Time::wall_clock(), vec![Event::Alive(Alive { last })]);
    }
}

/// What `/readyz` is made of.
struct Vitals {
    gateway: Arc<Gateway>,
    progress: Arc<Progress>,
    draining: Arc<AtomicBool>,
    sight: chore::Shared<Sight>,
    watch: Option<chore::Shared<watch::Standing>>,
    redis: Option<Arc<RedisState>>,
}

fn ready(vitals: Vitals) -> Ready {
    Arc::new(move || vitals.tell(Time::wall_clock()))
}

impl Vitals {
    /// A log that is away is told of but keeps nobody from serving, as long as the facts find room.
    fn tell(&self, now: Time) -> Readiness {
        let spooled = self.gateway.ledger.standing();
        let shipped = self.progress.standing();
        let health = shipped.health;
        let waiting = self.progress.waiting();
        let draining = self.draining.load(Ordering::Relaxed);
        let sight = self.sight.look();
        let reachable = sight.seen.is_some() && sight.trouble.is_none() && health == Health::Shipping;
        let detail = serde_json::json!({
            "draining": draining,
            "spool": {
                "last": spooled.last.to_string(),
                "lost": spooled.lost,
                "records": spooled.records,
                "waiting_bytes": waiting.bytes,
            },
            "log": {
                "reachable": reachable,
                "lag_facts": waiting.facts,
                "lag_seconds": waiting.oldest.map_or(0, |oldest| seconds_between(oldest, now)),
                "resent": shipped.resent,
                "health": format!("{health:?}"),
            },
            "catalogue": {
                "revision": self.gateway.serving.load().catalogue.revision,
                "source": if sight.seen.is_some() { "log" } else { "copy" },
                "seen_seconds_ago": sight.seen.map(|seen| seconds_between(seen, now)),
                "trouble": sight.trouble,
            },
            "state": self.redis.as_ref().map(|redis| serde_json::json!({ "reachable": redis.answers() })),
            "configuration": self.watch.as_ref().map(|watch| watch.look().tell()),
        });
        let ready = spooled.records && !draining && !health.is_final() && waiting.bytes <= WAITING_BYTES_MAX;
        Readiness { ready, detail }
    }
}

fn seconds_between(then: Time, now: Time) -> u64 {
    u64::try_from(now.0.saturating_sub(then.0)).unwrap_or(0) / MS_PER_SECOND
}
