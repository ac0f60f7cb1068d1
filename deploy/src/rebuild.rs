//! `waybill rebuild`: what the stores hold made anew from archive and log, beside all that runs, and swapped in.
//!
//! The shared stores get a new generation each: filled, brought to one frame, compared there with what was folded, brought
//! to the log's end, and made live by one pointer each. `--rollback` does the same with the generation that was live
//! before. The embedded file is made anew in one transaction. No upstream is called.

use anyhow::{Context, bail};
use serde::Serialize;
use waybill_events::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};
use waybill_projector::embedded;
use waybill_projector::postgres::{self, Swapped};
use waybill_projector::redis;
use waybill_schema::config::Config;
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::logs::Whole;
use crate::progress::Progress;
use crate::verify::Look;
use crate::{data, projector, table};

/// Make what the stores hold anew.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only this store
    #[arg(long, value_name = "STORE")]
    only: Option<Store>,
    /// Go back to the generation that was live before, brought to the log's end
    #[arg(long)]
    rollback: bool,
    #[command(flatten)]
    whole: Whole,
}

/// A store of many gateways.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Redis,
    Postgres,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match args.whole.place.config()? {
        Some(config) if config.log.is_some() => shared(args, &config),
        Some(_) | None => embedded(args),
    }
}

fn embedded(args: &Args) -> anyhow::Result<()> {
    if args.rollback {
        bail!("the embedded store keeps no generation to go back to: what is made anew is the same");
    }
    if args.only.is_some() || args.whole.archive.is_some() {
        bail!("the embedded store is one file with all its frames: --only and --archive are for shared stores");
    }
    let rebuilt = embedded::rebuild(&data::existing_log_file(args.whole.place.data())?)?;
    if args.whole.place.json {
        return table::json(&rebuilt);
    }
    let rows = rebuilt.tables.iter().zip(&rebuilt.before).map(|(sum, before)| {
        let was = if sum == before { "the same".to_owned() } else { format!("{} {}", before.rows, before.digest) };
        vec![sum.table.to_owned(), sum.rows.to_string(), sum.digest.clone(), was]
    });
    table::print(&["table", "rows", "digest", "was"], rows)?;
    table::say(format_args!("at frame {}; digest of the routing state {}", rebuilt.seq, rebuilt.state))
}

fn shared(args: &Args, config: &Config) -> anyhow::Result<()> {
    let mut work = Work { log: Counted::new(args.whole.open()?), stages: Vec::new() };
    let mut targets = begin(args, config)?;
    let done = work.prepare(&mut targets, args.rollback);
    let (seq, stores) = match done {
        Ok(done) => done,
        Err(error) => {
            for target in targets {
                if let Err(error) = target.give_up() {
                    tracing::warn!("what was begun is still there: {error:#}");
                }
            }
            return Err(error);
        }
    };
    let mut summary = Summary { seq, events: work.log.events, stores, stages: work.stages };
    for (target, told) in targets.into_iter().zip(&mut summary.stores) {
        told.swapped = Some(target.swap().with_context(|| format!("{} keeps the generation it had", told.store))?);
    }
    match args.whole.place.json {
        true => table::json(&summary),
        false => summary.print(),
    }
}

/// Takes up a generation in every store that is meant.
fn begin(args: &Args, config: &Config) -> anyhow::Result<Vec<Target>> {
    let meant = |store| args.only.is_none_or(|only| only == store);
    let mut targets = Vec::new();
    if let Some(usage) = config.usage.as_ref().filter(|_| meant(Store::Postgres)) {
        let begun = match args.rollback {
            true => postgres::Rebuild::go_back(&usage.postgres),
            false => postgres::Rebuild::begin(&usage.postgres),
        };
        targets.push(Target::Postgres(Box::new(begun.context("postgres")?)));
    }
    if let Some(state) = config.state.as_ref().filter(|_| meant(Store::Redis)) {
        let (settings, who) = (projector::shared_state(state), uuid::Uuid::new_v4().to_string());
        let begun = match args.rollback {
            true => redis::Rebuild::go_back(&settings, &who),
            false => redis::Rebuild::begin(&settings, &who),
        };
        match begun.context("redis") {
            Ok(begun) => targets.push(Target::Redis(Box::new(begun))),
            Err(error) => {
                targets.into_iter().try_for_each(Target::give_up)?;
                return Err(error);
            }
        }
    }
    if targets.is_empty() {
        bail!("the configuration names no store that could be made anew");
    }
    Ok(targets)
}

/// A generation on its way.
enum Target {
    Postgres(Box<postgres::Rebuild>),
    Redis(Box<redis::Rebuild>),
}

impl Target {
    fn name(&self) -> &'static str {
        match self {
            Self::Postgres(_) => "postgres",
            Self::Redis(_) => "redis",
        }
    }

    /// What is live beside a fresh fold.
    fn look(&self, log: &mut dyn Log, progress: &mut dyn FnMut(Seq)) -> anyhow::Result<Look> {
        let missing = self.name();
        Ok(match self {
            Self::Postgres(rebuild) => {
                rebuild.verify_live(log, progress)?.map_or(Look::None { missing }, Look::Postgres)
            }
            Self::Redis(rebuild) => rebuild.verify_read(log, progress)?.map_or(Look::None { missing }, Look::Redis),
        })
    }

    fn fill_to(&mut self, log: &mut dyn Log, end: Seq, progress: &mut dyn FnMut(Seq)) -> anyhow::Result<()> {
        match self {
            Self::Postgres(rebuild) => rebuild.fill_to(log, end, progress)?,
            Self::Redis(rebuild) => rebuild.fill_to(log, end, progress)?,
        }
        Ok(())
    }

    /// Compares what is stored with what was folded.
    fn compare(&mut self, log: &mut dyn Log) -> anyhow::Result<Vec<Sum>> {
        Ok(match self {
            Self::Postgres(rebuild) => {
                let sums = rebuild.compare()?.into_iter();
                sums.map(|sum| Sum { of: sum.table, count: sum.rows, digest: sum.digest }).collect()
            }
            Self::Redis(rebuild) => {
                let verified = rebuild.compare(log)?;
                vec![Sum { of: "keys", count: verified.keys, digest: verified.digest }]
            }
        })
    }

    fn swap(self) -> anyhow::Result<Swapped> {
        Ok(match self {
            Self::Postgres(rebuild) => rebuild.swap()?,
            Self::Redis(rebuild) => rebuild.swap()?,
        })
    }

    fn give_up(self) -> anyhow::Result<()> {
        match self {
            Self::Postgres(rebuild) => rebuild.give_up()?,
            Self::Redis(rebuild) => rebuild.give_up()?,
        }
        Ok(())
    }
}

/// What all stores are brought through.
struct Work {
    log: Counted,
    stages: Vec<Stage>,
}

impl Work {
    /// Brings all generations to the log's end; gives the one frame at which all were compared, and what they hold there.
    fn prepare(&mut self, targets: &mut [Target], is_rollback: bool) -> anyhow::Result<(Seq, Vec<Told>)> {
        let mut before = Vec::new();
        for target in targets.iter_mut().filter(|_| !is_rollback) {
            before.push(self.stage(target, "verify what is live", |target, log, tell| target.look(log, tell))?);
        }
        let head = self.log.head()?;
        for target in targets.iter_mut() {
            self.stage(target, "fill", |target, log, tell| target.fill_to(log, head, tell))?;
        }
        let seq = self.log.head()?;
        let mut told = Vec::new();
        for (index, target) in targets.iter_mut().enumerate() {
            self.stage(target, "catch up", |target, log, tell| target.fill_to(log, seq, tell))?;
            let sums = self.stage(target, "compare", |target, log, _| target.compare(log))?;
            let live_before = before.get(index).filter(|look| !look.is_none()).map(Look::faults);
            told.push(Told { store: target.name(), sums, live_before, swapped: None });
        }
        let head = self.log.head()?;
        for target in targets {
            target.fill_to(&mut self.log, head, &mut |_| {})?;
        }
        Ok((seq, told))
    }

    fn stage<T>(
        &mut self,
        target: &mut Target,
        stage: &'static str,
        work: impl FnOnce(&mut Target, &mut dyn Log, &mut dyn FnMut(Seq)) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let (store, began) = (target.name(), Time::wall_clock());
        let mut progress = Progress::of(format!("{store}, {stage}"));
        self.log.begin();
        let done = work(target, &mut self.log, &mut |seq| progress.reach(seq)).context(store)?;
        let (ms, events) = (Time::wall_clock().ms_since(began), self.log.events_of_stage);
        let events_per_second = events.saturating_mul(1000).checked_div(ms);
        self.stages.push(Stage { store, stage, ms, events, events_per_second });
        Ok(done)
    }
}

/// What a store holds now.
#[derive(Serialize)]
struct Told {
    store: &'static str,
    /// What it held at the frame of the summary, as the fold says.
    sums: Vec<Sum>,
    /// How the generation that was live differed from the log; nothing where that was not looked at.
    live_before: Option<Vec<String>>,
    swapped: Option<Swapped>,
}

#[derive(Serialize)]
struct Sum {
    of: &'static str,
    count: u64,
    digest: String,
}

#[derive(Serialize)]
struct Stage {
    store: &'static str,
    stage: &'static str,
    ms: u64,
    events: u64,
    /// Nothing where it took no time.
    events_per_second: Option<u64>,
}

#[derive(Serialize)]
struct Summary {
    /// The frame at which all stores were compared with the fold.
    seq: Seq,
    /// Facts in the log.
    events: u64,
    stores: Vec<Told>,
    stages: Vec<Stage>,
}

impl Summary {
    fn print(&self) -> anyhow::Result<()> {
        let rate = |stage: &Stage| stage.events_per_second.map(|rate| rate.to_string()).unwrap_or_default();
        let stages = self.stages.iter().map(|stage| {
            let took = format!("{}.{:03} s", stage.ms / 1000, stage.ms % 1000);
            vec![stage.store.to_owned(), stage.stage.to_owned(), took, stage.events.to_string(), rate(stage)]
        });
        table::print(&["store", "stage", "took", "events", "events/s"], stages)?;
        let sums = self.stores.iter().flat_map(|told| {
            let row =
                |sum: &Sum| vec![told.store.to_owned(), sum.of.to_owned(), sum.count.to_string(), sum.digest.clone()];
            told.sums.iter().map(row)
        });
        table::print(&["store", "of", "count", "digest"], sums)?;
        for told in &self.stores {
            for fault in told.live_before.iter().flatten() {
                table::say(format_args!("{} as it was: {fault}", told.store))?;
            }
            if let Some(Swapped { from, to }) = told.swapped {
                let from = from.map(|from| format!(", in place of {from}, which stays")).unwrap_or_default();
                table::say(format_args!("{}: generation {to} is live{from}", told.store))?;
            }
        }
        table::say(format_args!("{} events, compared at frame {}", self.events, self.seq))
    }
}

/// A log that counts the facts read from it.
struct Counted {
    log: Box<dyn Log>,
    /// Up to where they are counted, and how many there are.
    counted: Seq,
    events: u64,
    /// The same of the stage under way.
    counted_of_stage: Seq,
    events_of_stage: u64,
}

impl Counted {
    fn new(log: Box<dyn Log>) -> Self {
        let (counted, counted_of_stage) = (Seq::START, Seq::START);
        Self { log, counted, events: 0, counted_of_stage, events_of_stage: 0 }
    }

    fn begin(&mut self) {
        (self.counted_of_stage, self.events_of_stage) = (Seq::START, 0);
    }

    fn count(&mut self, frame: &StoredFrame) {
        let count = Frame::header_of(&frame.bytes).map_or(0, |Header { count, .. }| u64::from(count));
        if frame.seq > self.counted {
            (self.counted, self.events) = (frame.seq, self.events + count);
        }
        if frame.seq > self.counted_of_stage {
            (self.counted_of_stage, self.events_of_stage) = (frame.seq, self.events_of_stage + count);
        }
    }
}

impl Log for Counted {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        self.log.append(frames, expected, sent)
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        self.log.last(writer)
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        let frames = self.log.read(after, frames_max)?;
        frames.iter().for_each(|frame| self.count(frame));
        Ok(frames)
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.log.read_of(writer, after, frames_max)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        self.log.head()
    }
}
