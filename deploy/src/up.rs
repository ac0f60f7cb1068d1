//! `waybill up`: everything in one process, on one SQLite file.
//!
//! The order of a start: the log is opened and folded; the configuration becomes a catalogue batch if its hash is new; a
//! new epoch begins; what the spool holds, mostly from the life before, is sent to the log and folded; then the door opens.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use waybill_auditor::catalogue as desk;
use waybill_auditor::usage::SqliteUsage;
use waybill_events::log::{Log, Seq};
use waybill_events::shipper::{Progress, Shipper};
use waybill_events::spool::{self, Orphans, Spool};
use waybill_events::sqlite::SqliteLog;
use waybill_gateway::ledger::Ledger;
use waybill_gateway::shared::embedded::Embedded as EmbeddedState;
use waybill_gateway::vault::Shelf;
use waybill_projections::fold::Fold;
use waybill_projections::read;
use waybill_projector::embedded::{self, Start};
use waybill_schema::config::Config;
use waybill_schema::event::Epoch;
use waybill_schema::frame::Frame;
use waybill_schema::id::WriterId;
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::follow::Follower;
use crate::service::{self, Parts, Shared};
use crate::spending;
use crate::trail::Trail;
use crate::watch::{Stamp, Watch};
use crate::{DataDir, admin, check, data, demo};

/// The one gateway of an embedded instance, as a writer of its log.
const WRITER: &str = "local";
/// How long the spool may take to reach the log, at start and at the end.
const SHIP_SECONDS: u64 = 30;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 256;

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
    service::runtime()?.block_on(up(args))
}

async fn up(args: Args) -> anyhow::Result<()> {
    let data = args.data.data;
    std::fs::create_dir_all(&data).with_context(|| format!("the data folder {} cannot be made", data.display()))?;
    let stamp = args.config.as_deref().and_then(Stamp::of);
    let (config, demo) = match &args.config {
        Some(file) => (check::load(file)?, None),
        None => {
            let demo = demo::start(&data).await?;
            (demo.config.clone(), Some(demo))
        }
    };
    if config.log.is_some() {
        bail!("`log` names servers, and `up` keeps its log in one file: use `waybill gateway`, or leave it out");
    }
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    if config.state.is_some() {
        tracing::warn!("`state` is what gateways share: `up` is one, keeps its own, and does not use it");
    }
    if config.usage.is_some() {
        tracing::warn!("`usage` is for `waybill projector`: `up` keeps its rows beside its log");
    }
    let listener = service::bind(args.listen, &config).await?;
    let listen = listener.local_addr()?;

    let secret = service::secret(&config, &data)?;
    let Embedded { ledger, shipper, follower } = open(&data, &config, &secret)?;
    let watch = args.config.map(|file| watch(file, stamp, &config, &data)).transpose()?;
    let usage = SqliteUsage::new(data::open_log(&data)?);
    let more = admin::pages(&config, Some(Box::new(usage)), || Ok(Box::new(data::open_log(&data)?)))?;
    let parts = Parts {
        listener,
        config: Arc::new(config),
        secret,
        ledger,
        shipper,
        follower,
        watch,
        copy: None,
        shared: Shared::Embedded(EmbeddedState::open(&data::log_file(&data), WriterId::from(WRITER))?),
        more,
        shelf: Shelf::file(&data::vault_file(&data))?,
        spending: spending::Store::embedded(&data)?,
        ship_time: Duration::from_secs(SHIP_SECONDS),
    };
    let greeting = demo.as_ref().map(|demo| demo.greeting(listen, &data));
    service::serve(parts, &greeting.unwrap_or_else(|| format!("waybill is up at http://{listen}"))).await?;
    if let Some(demo) = &demo {
        demo.stop().await;
    }
    Ok(())
}

/// The auditor's part: whoever changes the file changes the catalogue.
fn watch(file: PathBuf, stamp: Option<Stamp>, config: &Config, data: &Path) -> anyhow::Result<Watch> {
    // The shipper's projector folds what others append.
    let log = SqliteLog::open(&data::log_file(data), Box::new(|_, _| Ok(())))?;
    Ok(Watch::start(file, stamp, config, Follower::new(log, Trail::default()))?)
}

/// The stores of an embedded instance, open and folded, with a new epoch begun.
struct Embedded {
    ledger: Ledger,
    shipper: Shipper,
    follower: Follower<SqliteLog>,
}

fn open(data: &Path, config: &Config, secret: &DeploymentSecret) -> anyhow::Result<Embedded> {
    let writer = WriterId::from(WRITER);
    // The log lies beside the spool: what costs it acknowledged facts costs the spool them too.
    let options = spool::Options { retention: Duration::ZERO, ..spool::Options::default() };
    let (mut spool, mut reader, recovered) = Spool::open(&data::spool_folder(data), options)?;
    let path = data::log_file(data);
    let (mut log, start) = embedded::open(&path)?;
    report(&start);
    let Start { mut fold, seq, handover, .. } = start;
    if let Some(batch) = desk::plan(&fold.rows, config.rows.clone(), &config.hash) {
        tracing::info!(revision = batch.revision, changes = batch.ops.len(), "the configuration changes the catalogue");
        desk::append(&mut log, batch, Time::wall_clock())?;
    }
    let orphans = Orphans::find(&reader, &mut log, &writer)?;
    let epoch = service::begin(&mut spool, &mut reader, orphans, recovered.last, secret)?;
    let shipper = Shipper::start(writer.clone(), reader, Box::new(log))?;
    catch_up(&path, shipper.progress(), Epoch { epoch, last: spool.last_number() }, seq, &mut fold)?;

    let ledger = Ledger::new(writer, epoch, spool, fold.state);
    ledger.hand_over(handover);
    let mut follower = Follower::new(SqliteLog::open_read_only(&path)?, Trail::default());
    follower.look()?;
    Ok(Embedded { ledger, shipper, follower })
}

/// What the operator should know of the log that was read.
fn report(start: &Start) {
    tracing::info!(frames = start.seq.0, rebuilt = start.rebuilt, "the log is folded");
    let (summary, n_quarantined, misfits) = (start.fold.gate.summary(), start.n_quarantined, &start.fold.misfits);
    if summary.tainted() || n_quarantined > 0 || !misfits.is_empty() {
        tracing::error!(?summary, n_quarantined, ?misfits, "the log has holes or cannot be read in full");
    }
}

/// Waits until the log has all that the spool holds, up to `place`, and folds what came after frame `seq`.
fn catch_up(path: &Path, progress: &Progress, place: Epoch, mut seq: Seq, fold: &mut Fold) -> anyhow::Result<()> {
    let standing = progress.wait_for(place, Duration::from_secs(SHIP_SECONDS));
    if !standing.covers(place) {
        bail!("what the spool holds did not reach the log: {standing:?}");
    }
    let mut log = SqliteLog::open_read_only(path)?;
    let mut written = Vec::new();
    loop {
        let frames = log.read(seq, READ_FRAMES_MAX)?;
        let Some(last) = frames.last() else { return Ok(()) };
        seq = last.seq;
        for frame in &frames {
            let header = Frame::header_of(&frame.bytes)?;
            for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent).flatten() {
                fold.apply(&fact, frame.seq.0, &mut written);
            }
            // The rows were written with the frame.
            written.clear();
        }
    }
}
