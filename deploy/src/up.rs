//! `waybill up`: everything in one process, on one SQLite file.
//!
//! The order of a start: the log is opened and folded; what the spool still holds from the life before is sent to it;
//! the configuration becomes a catalogue batch if its hash is new; a new epoch begins; then the door opens.

use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use waybill_auditor::catalogue as desk;
use waybill_events::log::{Log, Seq};
use waybill_events::shipper::{Progress, Shipper};
use waybill_events::spool::{self, Spool};
use waybill_events::sqlite::SqliteLog;
use waybill_gateway::ledger::Ledger;
use waybill_gateway::metrics::Metrics;
use waybill_gateway::proxy::Gateway;
use waybill_gateway::server::{self, House, Readiness};
use waybill_gateway::serving::Serving;
use waybill_gateway::upstream::Upstream;
use waybill_projections::fold::Fold;
use waybill_projections::read;
use waybill_projector::embedded::{self, Start};
use waybill_schema::catalogue::{Catalogue, Rows};
use waybill_schema::config::Config;
use waybill_schema::event::{Alive, Epoch, Event, Started};
use waybill_schema::id::WriterId;
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::demo::Demo;
use crate::{DataDir, check, data, demo};

/// The one gateway of an embedded instance, as a writer of its log.
const WRITER: &str = "local";
/// Seconds between two signs of life (DESIGN.md, section 5).
const ALIVE_SECONDS: u64 = 10;
/// How long the spool may take to reach the log, at start and at the end.
const SHIP_SECONDS: u64 = 30;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 256;
/// Facts waiting for the log beyond which the instance is not ready.
const LAG_FACTS_MAX: u64 = 100_000;

/// Run everything in one process.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file; without one, a demo over two simulated providers
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    data: DataDir,
    /// Where to listen, instead of what the configuration says
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info,refinery_core=warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(up(args))
}

async fn up(args: Args) -> anyhow::Result<()> {
    let data = args.data.data;
    std::fs::create_dir_all(&data).with_context(|| format!("the data folder {} cannot be made", data.display()))?;
    let (config, demo) = match &args.config {
        Some(file) => (check::load(file)?, None),
        None => {
            let demo = demo::start(&data).await?;
            (demo.config.clone(), Some(demo))
        }
    };
    embedded_only(&config)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let listener = match args.listen {
        Some(listen) => TcpListener::bind(listen).await,
        None => TcpListener::bind(&config.listen).await,
    };
    let listener = listener.context("the listening address cannot be had (--listen chooses another)")?;
    let listen = listener.local_addr()?;

    let secret = secret(&config, &data)?;
    let Embedded { ledger, shipper, rows } = open(&data, &config, &secret)?;
    let config = Arc::new(config);
    let (serving, unresolved) = Serving::new(Catalogue::compile(&rows), config.clone(), &data::resolve);
    unresolved.iter().for_each(|missing| tracing::error!("{missing}"));
    let gateway = Arc::new(Gateway {
        ledger,
        serving: ArcSwap::from_pointee(serving),
        upstream: Upstream::new(Duration::from_millis(config.retry.connect_ms.into()))?,
        metrics: Metrics::default(),
        secret,
    });
    let house = House { gateway: gateway.clone(), readiness: readiness(&gateway, shipper.progress()) };
    // Whoever reads the greeting may ask to stop at once.
    let stop = asked_to_stop()?;
    greet(listen, demo.as_ref(), &data);
    tracing::info!(%listen, "serving");

    let mut chores = JoinSet::new();
    chores.spawn(show_life(gateway.clone()));
    server::serve(listener, house, stop).await;
    chores.shutdown().await;
    gateway.ledger.flush();
    let standing = shipper.stop(Duration::from_secs(SHIP_SECONDS));
    tracing::info!(?standing, "stopped");
    if let Some(demo) = &demo {
        demo.stop().await;
    }
    Ok(())
}

/// Servers are for many machines; until they are built, saying so beats ignoring them.
fn embedded_only(config: &Config) -> anyhow::Result<()> {
    if config.log.is_some() || config.state.is_some() || config.usage.is_some() {
        bail!("`log`, `state` and `usage` name servers, which this version does not use yet: leave all three out");
    }
    Ok(())
}

fn secret(config: &Config, data: &Path) -> anyhow::Result<DeploymentSecret> {
    let text = match &config.deployment_secret {
        Some(reference) => data::resolve(reference).map_err(|why| anyhow::anyhow!("deployment_secret: {why}"))?,
        None => data::secret(data, "deployment.secret", "")?,
    };
    Ok(DeploymentSecret::new(text.as_bytes()))
}

/// The stores of an embedded instance, open and folded, with a new epoch begun.
struct Embedded {
    ledger: Ledger,
    shipper: Shipper,
    rows: Rows,
}

fn open(data: &Path, config: &Config, secret: &DeploymentSecret) -> anyhow::Result<Embedded> {
    let writer = WriterId::from(WRITER);
    // The log lies beside the spool: what costs it acknowledged facts costs the spool them too.
    let options = spool::Options { retention: Duration::ZERO, ..spool::Options::default() };
    let (mut spool, reader, recovered) = Spool::open(&data::spool_folder(data), options)?;
    let path = data::log_file(data);
    let (mut log, start) = embedded::open(&path)?;
    report(&start);
    let Start { mut fold, seq, .. } = start;
    if let Some(batch) = desk::plan(&fold.rows, config.rows.clone(), &config.hash) {
        tracing::info!(revision = batch.revision, changes = batch.ops.len(), "the configuration changes the catalogue");
        desk::append(&mut log, batch, Time::wall_clock())?;
    }
    let logged = log.last(&writer)?.map(|last| last.epoch());
    let shipper = Shipper::start(writer.clone(), reader, Box::new(log))?;
    let spooled = recovered.last;
    catch_up(&path, shipper.progress(), spooled, seq, &mut fold)?;

    let before = [logged, spooled].into_iter().flatten().max_by_key(|place| (place.epoch, place.last));
    let epoch = before.map_or(1, |place| place.epoch + 1);
    spool.begin(epoch)?;
    let ledger = Ledger::new(writer, epoch, spool, fold.state);
    let started = Started { version: env!("CARGO_PKG_VERSION").to_owned(), secret: secret.id(), previous: before };
    ledger.record(Time::wall_clock(), vec![Event::Started(started)]).context("the spool takes no facts")?;
    Ok(Embedded { ledger, shipper, rows: fold.rows })
}

/// What the operator should know of the log that was read.
fn report(start: &Start) {
    tracing::info!(frames = start.seq.0, rebuilt = start.rebuilt, "the log is folded");
    let (summary, n_quarantined, misfits) = (start.fold.gate.summary(), start.n_quarantined, &start.fold.misfits);
    if summary.tainted() || n_quarantined > 0 || !misfits.is_empty() {
        tracing::error!(?summary, n_quarantined, ?misfits, "the log has holes or cannot be read in full");
    }
}

/// Waits until what the spool held from the life before is in the log, and folds what came after frame `seq`.
fn catch_up(
    path: &Path,
    progress: &Progress,
    spooled: Option<Epoch>,
    mut seq: Seq,
    fold: &mut Fold,
) -> anyhow::Result<()> {
    if let Some(place) = spooled {
        let standing = progress.wait_for(place, Duration::from_secs(SHIP_SECONDS));
        if !standing.covers(place) {
            bail!("the spool of the life before did not reach the log: {standing:?}");
        }
    }
    let mut log = SqliteLog::open_read_only(path)?;
    let mut written = Vec::new();
    loop {
        let frames = log.read(seq, READ_FRAMES_MAX)?;
        let Some(last) = frames.last() else { return Ok(()) };
        seq = last.seq;
        for frame in &frames {
            let header = read::header(&frame.bytes)?;
            for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent).flatten() {
                fold.apply(&fact, frame.seq.0, &mut written);
            }
            // The rows were written with the frame.
            written.clear();
        }
    }
}

fn readiness(gateway: &Arc<Gateway>, progress: &Arc<Progress>) -> Arc<dyn Fn() -> Readiness + Send + Sync> {
    let (gateway, progress) = (gateway.clone(), progress.clone());
    Arc::new(move || {
        let spooled = gateway.ledger.standing();
        let logged = progress.standing();
        let in_log = logged.shipped.filter(|place| place.epoch == spooled.last.epoch).map_or(0, |place| place.last);
        let lag = spooled.last.number.saturating_sub(in_log);
        let detail = serde_json::json!({
            "spool": {"last": spooled.last.to_string(), "lost": spooled.lost, "records": spooled.records},
            "log": {"lag_facts": lag, "health": format!("{:?}", logged.health)},
            "catalogue": {"revision": gateway.serving.load().catalogue.revision},
        });
        Readiness { ready: spooled.records && lag <= LAG_FACTS_MAX && !logged.health.is_final(), detail }
    })
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

fn greet(listen: SocketAddr, demo: Option<&Demo>, data: &Path) {
    let greeting = match demo {
        Some(demo) => demo.greeting(listen, data),
        None => format!("waybill is up at http://{listen}"),
    };
    // Nobody may be reading, which is no reason not to serve.
    if let Err(error) = writeln!(std::io::stdout(), "{greeting}") {
        tracing::warn!(%error, "the greeting could not be printed");
    }
}

/// Ready at SIGINT or SIGTERM.
fn asked_to_stop() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
