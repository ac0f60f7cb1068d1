//! The projector into Postgres: reads a log from its own checkpoint, folds it, and stores rows in batches, each in one
//! transaction with the checkpoint that it moves.
//!
//! It takes one [`turn`](PostgresProjector::turn) after the other, each a batch at most, so whoever runs it can stop it
//! between two at any time. A process that dies in the middle of a batch has stored nothing of it; one that dies after
//! finds its place in the checkpoint. What it keeps in memory (the gate, the requests under way) is folded again from the
//! start of the log when it begins. While Postgres is away it holds the batch that is due and reads no further.
//!
//! A checkpoint that the log does not hold means that the log has lost its end: the rows know more than the truth does.
//! It says so and stops, and leaves it to the operator to bring the log back or to start over in a new generation
//! ([`Begin::NewGeneration`]).

mod batch;
mod generation;
mod reader;
mod rebuild;
mod sessions;
mod snapshot;
mod spent;
mod store;
mod table;
mod tally;
mod text;
mod verify;

pub(crate) use reader::Reader;
pub use reader::ReaderError;

use std::error::Error;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio_postgres::Config;
use waybill_events::log::{Log, ReadError, Seq, StoredFrame};
use waybill_schema::time::Time;

pub use rebuild::{Rebuild, Swapped};
pub use verify::{TableSum, Verified, WorkError, verify};

use crate::reader::Newer;
use batch::{Batch, Fold, Place, ROWS, ROWS_UNSEEN};
use generation::Wanted;
pub use spent::Spent;
use spent::timed;
use store::{Generation, Store, StoreError};

/// Frames read from the log at once.
const READ_FRAMES_MAX: usize = 32;
/// Reads of one turn while what lies before the checkpoint is folded again.
const REPLAY_READS_MAX: usize = 32;
/// The pause of one that has caught up.
const CAUGHT_UP: Duration = Duration::from_millis(100);
/// The pause of one that waits for another projector to end.
const WAITING: Duration = Duration::from_millis(500);
/// The pauses after failures, each twice the one before.
const RETRY: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(5);
/// The pause of one that has stopped.
const STOPPED: Duration = Duration::from_secs(5);

/// Where a projector begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Begin {
    /// At the checkpoint of the live generation, or at the start of the log where there is none.
    #[default]
    Checkpoint,
    /// At the start of the log, in a new generation that becomes the live one when it has caught up.
    NewGeneration,
}

/// Why a projector cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The URL is none that Postgres understands.
    #[error("the URL of postgres cannot be used")]
    Url(#[source] tokio_postgres::Error),
    /// The system gives no runtime.
    #[error("cannot make a runtime")]
    Runtime(#[from] std::io::Error),
}

/// What a projector is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It has no connection to Postgres.
    #[default]
    Connecting,
    /// Another projector writes; it waits for that one to end.
    Waiting,
    /// It folds again what lies before the checkpoint.
    Replaying,
    /// It reads and writes.
    Projecting,
    /// It has stopped until somebody acts; [`Standing::trouble`] says on what.
    Stopped,
}

/// How a projector stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it does.
    pub phase: Phase,
    /// What is wrong now.
    pub trouble: Option<String>,
    /// The generation that it writes to.
    pub generation: Option<u32>,
    /// Whether that one is live.
    pub live: bool,
    /// The last frame whose rows are stored.
    pub seq: Seq,
    /// The last frame of the log, as last seen.
    pub head: Seq,
    /// When the last frame that was folded had been stored, by the log's clock.
    pub stored: Option<Time>,
    /// Lines and frames that this process has put into quarantine.
    pub quarantined: u64,
    /// Where its time went.
    pub spent: Spent,
}

impl Standing {
    /// Frames of the log that are not in the rows yet, where its sequence has no holes.
    pub fn lag_frames(&self) -> u64 {
        self.head.0.saturating_sub(self.seq.0)
    }

    /// How far the rows are behind at `now`, in milliseconds; 0 where they are not.
    pub fn lag_ms(&self, now: Time) -> u64 {
        match self.stored {
            Some(stored) if self.lag_frames() > 0 => now.ms_since(stored),
            Some(_) | None => 0,
        }
    }
}

/// Why a turn came to nothing.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Log(#[from] ReadError),
    #[error(transparent)]
    Newer(#[from] Newer),
    #[error(
        "the log does not hold frame {0} as it was projected: it has lost its end. Bring it back, or start over with \
         --new-generation"
    )]
    LogLost(Seq),
}

impl Trouble {
    /// Whether only another program can go on.
    fn is_final(&self) -> bool {
        match self {
            Self::Store(error) => error.is_final(),
            Self::Newer(_) => true,
            Self::Log(_) | Self::LogLost(_) => false,
        }
    }

    /// The error and its causes in one line.
    fn tell(&self) -> String {
        let mut text = self.to_string();
        let mut source = self.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.ends_with(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        text
    }
}

/// A projector of one log into one database.
pub struct PostgresProjector {
    log: Box<dyn Log>,
    config: Config,
    wanted: Wanted,
    runtime: Runtime,
    store: Option<(Store, Option<Generation>)>,
    fold: Fold,
    /// The checkpoint up to which the fold must come before anything is written.
    goal: Place,
    /// The batch that is due.
    pending: Option<Batch>,
    /// What a newer program wrote behind the last frame that was folded.
    newer: Option<Newer>,
    /// Whether nothing helps but another program.
    is_over: bool,
    retry: Duration,
    standing: Standing,
}

impl PostgresProjector {
    /// A projector of `log` into the database at `url`; it connects with its first turn.
    pub fn new(log: Box<dyn Log>, url: &str, begin: Begin) -> Result<Self, MakeError> {
        let wanted = match begin {
            Begin::Checkpoint => Wanted::Resume,
            Begin::NewGeneration => Wanted::New,
        };
        Ok(Self {
            log,
            config: url.parse().map_err(MakeError::Url)?,
            wanted,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            store: None,
            fold: Fold::default(),
            goal: Place::default(),
            pending: None,
            newer: None,
            is_over: false,
            retry: *RETRY.start(),
            standing: Standing::default(),
        })
    }

    /// How it stands.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Goes one step on, and says how long to pause before the next. Blocks for a batch at most, or until a server
    /// that does not answer is given up.
    pub fn turn(&mut self) -> Duration {
        if self.is_over {
            return STOPPED;
        }
        match self.step() {
            Ok(pause) => {
                self.retry = *RETRY.start();
                if self.standing.trouble.take().is_some() {
                    tracing::info!(seq = %self.standing.seq, "the projection goes on");
                }
                pause
            }
            Err(trouble) => self.bear(&trouble),
        }
    }

    fn bear(&mut self, trouble: &Trouble) -> Duration {
        let told = trouble.tell();
        if self.standing.trouble.as_ref() != Some(&told) {
            tracing::error!(seq = %self.standing.seq, trouble = told, "the projection does not go on");
        }
        self.standing.trouble = Some(told);
        self.is_over = trouble.is_final();
        match trouble {
            Trouble::Store(_) => {
                self.store = None;
                self.standing.phase = Phase::Connecting;
                // The log goes on meanwhile, and it is told how far.
                self.standing.head = self.log.head().unwrap_or(self.standing.head);
            }
            Trouble::LogLost(_) => {
                // Somebody may bring it back.
                self.standing.phase = Phase::Stopped;
                return STOPPED;
            }
            Trouble::Log(_) => self.standing.head = self.log.head().unwrap_or(self.standing.head),
            Trouble::Newer(_) => {}
        }
        if self.is_over {
            self.store = None;
            self.standing.phase = Phase::Stopped;
            return STOPPED;
        }
        let pause = self.retry;
        self.retry = (pause * 2).min(*RETRY.end());
        pause
    }

    fn step(&mut self) -> Result<Duration, Trouble> {
        if !self.take_over()? {
            self.standing.phase = Phase::Waiting;
            return Ok(WAITING);
        }
        if self.fold.at.seq < self.goal.seq {
            self.standing.phase = Phase::Replaying;
            return self.replay();
        }
        self.standing.phase = Phase::Projecting;
        if self.pending.is_none() {
            self.pending = self.gather()?;
        }
        let Some(batch) = &self.pending else { return self.rest() };
        let Some((store, Some(generation))) = &mut self.store else { return Ok(Duration::ZERO) };
        let spent = &mut self.standing.spent;
        timed(&mut spent.store, || self.runtime.block_on(store.commit(generation, batch)))?;
        spent.decode += batch.spent.decode;
        spent.fold += batch.spent.fold;
        self.standing.quarantined += batch.quarantined.len() as u64;
        self.pending = None;
        self.note_place();
        Ok(Duration::ZERO)
    }

    /// What is left to do where the log holds nothing more.
    fn rest(&mut self) -> Result<Duration, Trouble> {
        if let Some(newer) = &self.newer {
            return Err(newer.clone().into());
        }
        if let Some((store, Some(generation))) = &mut self.store
            && !generation.is_live()
        {
            self.runtime.block_on(store.go_live(generation))?;
            tracing::info!(generation = generation.number, "the new generation has caught up and is live");
            self.wanted = Wanted::Resume;
        }
        self.note_place();
        Ok(CAUGHT_UP)
    }

    fn note_place(&mut self) {
        let generation = self.store.as_ref().and_then(|(_, generation)| generation.as_ref());
        self.standing.generation = generation.map(|generation| generation.number);
        self.standing.live = generation.is_some_and(Generation::is_live);
        self.standing.seq = generation.map_or(self.standing.seq, |generation| generation.at.seq);
        self.standing.head = self.standing.head.max(self.standing.seq);
        self.standing.stored = (self.fold.at.seq > Seq::START).then_some(self.fold.at.stored);
    }

    /// Connects where there is no connection, and takes the lease where it is to be had; `false` where it is not.
    fn take_over(&mut self) -> Result<bool, Trouble> {
        if self.store.as_ref().is_some_and(|(store, _)| !store.stands()) || self.has_moved()? {
            self.store = None;
        }
        if self.store.is_none() {
            self.store = Some((self.runtime.block_on(Store::connect(&self.config, "waybill projector"))?, None));
        }
        let Some((store, taken @ None)) = &mut self.store else { return Ok(true) };
        let Some(generation) = self.runtime.block_on(store.take_over(self.wanted))? else { return Ok(false) };
        tracing::info!(generation = generation.number, seq = %generation.at.seq, "projecting into postgres");
        let at = generation.at.clone();
        if self.wanted == Wanted::New {
            self.wanted = Wanted::This(generation.number);
        }
        *taken = Some(generation);
        self.meet(at);
        self.note_place();
        Ok(true)
    }

    /// Whether another generation has become live since this one was taken: then it is the one to go on with.
    fn has_moved(&self) -> Result<bool, Trouble> {
        let Some((store, Some(generation))) = &self.store else { return Ok(false) };
        let live = self.runtime.block_on(store.live())?;
        if live != generation.live {
            tracing::info!(was = generation.live, live, "another generation is live now");
        }
        Ok(live != generation.live)
    }

    /// Brings memory and checkpoint together: a batch whose transaction ended unseen may be stored, or not.
    fn meet(&mut self, at: Place) {
        let due = self.pending.as_ref().map_or(&self.fold.at, |batch| &batch.from);
        if *due == at && self.goal.seq <= at.seq {
            return;
        }
        if self.pending.take().is_some_and(|batch| batch.to == at) {
            return;
        }
        // Nothing folded yet, or another projector has been here.
        (self.fold, self.newer, self.goal) = (Fold::default(), None, at);
    }

    /// Folds some of what lies before the checkpoint, and writes nothing.
    fn replay(&mut self) -> Result<Duration, Trouble> {
        for _ in 0..REPLAY_READS_MAX {
            let frames = self.read(self.fold.at.seq)?;
            if frames.is_empty() {
                return if self.reaches(self.goal.seq)? { Ok(CAUGHT_UP) } else { self.lost() };
            }
            for frame in frames.iter().take_while(|frame| frame.seq <= self.goal.seq) {
                self.fold.take(frame, &mut Batch::default())?;
            }
            if frames.last().is_some_and(|last| last.seq >= self.goal.seq) {
                return if self.fold.at == self.goal { Ok(Duration::ZERO) } else { self.lost() };
            }
        }
        Ok(Duration::ZERO)
    }

    /// What was folded of a log that does not hold the checkpoint's frame is worth nothing.
    fn lost(&mut self) -> Result<Duration, Trouble> {
        self.fold = Fold::default();
        Err(Trouble::LogLost(self.goal.seq))
    }

    /// The next batch; none where the log holds nothing more, or only what a newer program wrote.
    fn gather(&mut self) -> Result<Option<Batch>, Trouble> {
        let rows = if self.standing.live { ROWS } else { ROWS_UNSEEN };
        let mut batch = Batch::behind(&self.fold.at);
        while self.newer.is_none() && !batch.is_full(rows) {
            let frames = match self.next_frames() {
                Ok(frames) => frames,
                Err(trouble) if batch.is_empty() => return Err(trouble),
                // What was folded so far is due all the same; the next turn meets this again.
                Err(_) => break,
            };
            if frames.is_empty() {
                break;
            }
            self.newer = frames.iter().find_map(|frame| self.fold.take(frame, &mut batch).err());
        }
        Ok((!batch.is_empty()).then_some(batch))
    }

    /// The frames behind the one at which the fold is; that one is read with them, and must be the one that was folded.
    fn next_frames(&mut self) -> Result<Vec<StoredFrame>, Trouble> {
        let at = self.fold.at.seq;
        if at == Seq::START {
            return Ok(self.read(at)?);
        }
        let mut frames = self.read(Seq(at.0 - 1))?;
        match frames.first() {
            // An answer may end anywhere, as where an archive does.
            Some(frame) if Place::of(frame) == self.fold.at && frames.len() == 1 => Ok(self.read(at)?),
            Some(frame) if Place::of(frame) == self.fold.at => {
                frames.remove(0);
                Ok(frames)
            }
            None if self.reaches(at)? => Ok(frames),
            Some(_) | None => Err(Trouble::LogLost(at)),
        }
    }

    /// Whether the log goes as far as `seq`: a read that gives less may come from a replica that is behind.
    fn reaches(&mut self, seq: Seq) -> Result<bool, ReadError> {
        self.standing.head = self.log.head()?;
        Ok(self.standing.head >= seq)
    }

    fn read(&mut self, after: Seq) -> Result<Vec<StoredFrame>, ReadError> {
        let frames = timed(&mut self.standing.spent.read, || self.log.read(after, READ_FRAMES_MAX))?;
        if frames.len() == READ_FRAMES_MAX {
            self.standing.head = self.log.head()?;
        } else if let Some(last) = frames.last() {
            self.standing.head = self.standing.head.max(last.seq);
        }
        Ok(frames)
    }
}

impl std::fmt::Debug for PostgresProjector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresProjector").field("standing", &self.standing).finish_non_exhaustive()
    }
}
