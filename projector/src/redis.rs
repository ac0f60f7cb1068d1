//! The Redis projector: the routing state of a cluster, folded from the log and written where its gateways read it.
//!
//! ```text
//! look -> fold the log to the mark, writing nothing -> take the epoch -> fold on -> write a batch with its mark -> …
//!   ^                                                                                  | the mark is another
//!   +----------------------------------------------------------------------------------+
//! ```
//! A batch holds, for every key that its frames touched, the value at its end; so a key is written once however often
//! it changed, and two projectors that write the same stretch write the same bytes. Keys and mark change in one script
//! or not at all, and only from the mark that the batch begins at. Whatever Redis loses it loses with its mark: found
//! behind, or empty, the state is folded again up to where Redis stands, and on from there. The epoch only keeps two
//! projectors from working against each other: the one with the smaller stands by until the other no longer moves.
//!
//! A generation is named as the one to read only when it has caught up with the log.

mod fold;
mod projection;
mod rebuild;
mod store;
mod verify;

use std::collections::VecDeque;

use waybill_events::log::{Log, ReadError, Seq, StoredFrame};
use waybill_schema::FOLD_VERSION;
use waybill_schema::redis::Mark;
use waybill_schema::time::Time;

pub use fold::{Fold, Write};
pub use projection::{Projection, Standing};
pub use rebuild::{Rebuild, WorkError};
use store::{Answer, Batch, Store};
pub use verify::{Verified, verify};

use crate::reader::Newer;

/// A batch is written when it has so many keys; one frame more may add some hundreds.
const BATCH_KEYS: usize = 256;
/// Frames read from the log at once.
const FRAMES_MAX: usize = 32;
/// A projector that stands by takes over when the other has not moved for so long and had reason to.
const STANDBY_MS: u64 = 10_000;
/// Affinity records kept where a configuration says nothing else: some hundred MiB.
pub const RECORDS_MAX: usize = 1 << 20;

/// Where the shared state is, and how much of it there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The server, such as `redis://127.0.0.1:6379`.
    pub url: String,
    /// What every key begins with.
    pub prefix: String,
    /// At most this many affinity records; the longest not renewed make room.
    pub records_max: usize,
}

/// Why the shared state cannot be brought forward.
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// Redis failed, or did not answer.
    #[error("the shared state in Redis cannot be reached")]
    Redis(#[from] ::redis::RedisError),
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] ReadError),
    /// A newer program wrote to the log: this one must be upgraded.
    #[error(transparent)]
    Newer(#[from] Newer),
    /// A newer program folded this generation: this one must be upgraded, or the one before be read again.
    #[error("generation {generation} was made by fold {fold}, which a newer program has: upgrade this one")]
    NewerFold {
        /// The generation.
        generation: u64,
        /// Its fold.
        fold: u32,
    },
    /// A generation that was looked at went back, or to another log.
    #[error("generation {generation} was set back while it was looked at: look again")]
    Restless {
        /// The generation.
        generation: u64,
    },
    /// What is there is no fold of this log, and it was not asked for another.
    #[error("generation {generation} is not a fold of this log")]
    AnotherLog {
        /// The generation.
        generation: u64,
    },
    /// The log ends before what was projected: an operator must say whether it comes back.
    #[error("the log ends at {head}, before {mark}, which is projected already: it has lost its end")]
    LogLost {
        /// The last frame projected.
        mark: u64,
        /// The log's last frame.
        head: u64,
    },
}

impl ProjectError {
    /// Whether trying again cannot help.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Redis(_) | Self::Log(_) | Self::Restless { .. } => false,
            Self::Newer(_) | Self::NewerFold { .. } | Self::AnotherLog { .. } | Self::LogLost { .. } => true,
        }
    }
}

/// What one turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A batch was written; there may be more.
    Wrote,
    /// Redis holds all that the log does.
    CaughtUp,
    /// Redis holds something else than was thought: the next turn looks.
    Astray,
    /// A projector with a greater epoch is at work.
    StandsBy,
}

/// Which generation a projector writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aim {
    /// To the one that is read, or to the one that will be.
    Read,
    /// To this one and no other; whoever made the projector says when it is read.
    This(u64),
}

/// A projector and what it has folded so far.
#[derive(Debug)]
pub struct RedisProjector {
    store: Store,
    aim: Aim,
    /// The last frame that it may fold.
    end: Seq,
    fold: Fold,
    /// Frames read and not folded yet.
    ahead: VecDeque<StoredFrame>,
    seat: Seat,
    generation: u64,
    epoch: u64,
    /// What Redis covers, as far as is known.
    written: Mark,
    /// The log's last frame, as last seen.
    head: u64,
    /// Whether the last batch may have been written or not: then it is sent again as it is.
    unanswered: bool,
    /// Whether the generation is the one that is read.
    published: bool,
}

/// Whether this projector is the one at work.
#[derive(Debug)]
enum Seat {
    Looking,
    Held,
    /// Another holds it; its mark, and since when it has not moved.
    Foreign {
        mark: Mark,
        since: Time,
    },
}

/// Where a fold came to that was to reach a mark.
enum Reached {
    Mark,
    /// The log has another frame there.
    AnotherLog,
}

/// What was folded for a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gathered {
    /// As much as a batch should hold.
    Full,
    /// All there is.
    All,
    /// Nothing: the log has another frame where this fold stands.
    AnotherLog,
}

impl RedisProjector {
    /// Begins to connect; fails only where the URL is none.
    pub fn new(settings: &Settings) -> Result<Self, ProjectError> {
        Self::aimed(settings, Aim::Read)
    }

    fn aimed(settings: &Settings, aim: Aim) -> Result<Self, ProjectError> {
        let store = Store::new(&settings.url, &settings.prefix)?;
        Ok(Self {
            store,
            aim,
            end: Seq(u64::MAX),
            fold: Fold::new(settings.records_max),
            ahead: VecDeque::new(),
            seat: Seat::Looking,
            generation: 1,
            epoch: 0,
            written: Mark::start(),
            head: 0,
            unanswered: false,
            published: false,
        })
    }

    /// Does the next piece of work: at most one batch.
    pub fn turn(&mut self, log: &mut dyn Log, now: Time) -> Result<Turn, ProjectError> {
        if let Seat::Foreign { mark, since } = &self.seat {
            let (mark, since) = (mark.clone(), *since);
            return self.stand_by(log, now, mark, since);
        }
        if matches!(self.seat, Seat::Looking) {
            self.take_over(log)?;
        }
        let gathered = if self.unanswered { Gathered::Full } else { self.gather(log)? };
        if gathered == Gathered::AnotherLog {
            self.seat = Seat::Looking;
            return Ok(Turn::Astray);
        }
        let caught_up = gathered == Gathered::All;
        let batch = Batch {
            epoch: self.epoch,
            generation: self.generation,
            from: &self.written,
            to: self.fold.mark(),
            writes: self.fold.writes(self.store.keys().generation(self.generation)),
            publish: caught_up && !self.published && self.aim == Aim::Read,
        };
        let moved = *batch.from != *batch.to;
        self.unanswered = true;
        let answer = self.store.write(&batch)?;
        self.unanswered = false;
        match answer {
            Answer::Done { active } => {
                self.written = self.fold.mark().clone();
                self.fold.settle();
                self.published |= caught_up && self.aim == Aim::Read;
                if self.published && active != Some(self.generation) {
                    self.seat = Seat::Looking;
                    return Ok(Turn::Astray);
                }
                Ok(if caught_up && !moved { Turn::CaughtUp } else { Turn::Wrote })
            }
            Answer::Elsewhere => {
                tracing::warn!(
                    thought = self.written.seq,
                    "Redis does not stand where it was left: folding from there"
                );
                self.seat = Seat::Looking;
                Ok(Turn::Astray)
            }
            Answer::Overtaken => {
                tracing::warn!("another projector has taken over: standing by");
                self.seat = Seat::Foreign { mark: self.written.clone(), since: now };
                Ok(Turn::StandsBy)
            }
        }
    }

    /// The generation it writes.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The last frame that Redis is known to cover.
    pub fn seq(&self) -> u64 {
        self.written.seq
    }

    /// The last frame of the log, as last seen.
    pub fn head(&self) -> u64 {
        self.head.max(self.written.seq)
    }

    /// When the last frame that was folded had been stored, by the log's clock.
    pub fn stored(&self) -> Option<Time> {
        self.fold.stored()
    }

    /// Looks how far the log goes, where a turn has failed to.
    pub fn look_ahead(&mut self, log: &mut dyn Log) {
        self.head = log.head().map_or(self.head, |head| head.0);
    }

    /// Follows the one at work in memory, and takes its place where it stays behind the log without moving.
    fn stand_by(&mut self, log: &mut dyn Log, now: Time, seen: Mark, since: Time) -> Result<Turn, ProjectError> {
        let generation = self.store.active()?.unwrap_or(self.generation);
        let mark = self.store.look(generation)?.mark.unwrap_or_else(Mark::start);
        let since = if mark == seen { since } else { now };
        self.head = log.head()?.0;
        let is_behind = self.head > mark.seq;
        self.written = mark.clone();
        self.seat = match is_behind && now.ms_since(since) >= STANDBY_MS {
            true => Seat::Looking,
            false => Seat::Foreign { mark: mark.clone(), since: if is_behind { since } else { now } },
        };
        if mark.fold == FOLD_VERSION && self.fold.mark().seq < mark.seq {
            self.fold_to(log, &mark)?;
        }
        Ok(Turn::StandsBy)
    }

    /// Looks where Redis stands, folds the log up to there, and takes the next epoch.
    fn take_over(&mut self, log: &mut dyn Log) -> Result<(), ProjectError> {
        self.ahead.clear();
        self.unanswered = false;
        let active = self.store.active()?;
        let mut generation = match self.aim {
            Aim::Read => active.unwrap_or(self.generation),
            Aim::This(generation) => generation,
        };
        loop {
            let found = self.store.look(generation)?;
            let mark = found.mark.unwrap_or_else(Mark::start);
            if mark.fold > FOLD_VERSION {
                return Err(ProjectError::NewerFold { generation, fold: mark.fold });
            }
            let suits = mark.fold == FOLD_VERSION && matches!(self.fold_to(log, &mark)?, Reached::Mark);
            if suits && self.store.take(generation, found.epoch + 1)? {
                self.published = active == Some(generation);
                (self.generation, self.epoch, self.written) = (generation, found.epoch + 1, mark);
                self.seat = Seat::Held;
                tracing::info!(generation, epoch = self.epoch, seq = self.written.seq, "projects into Redis");
                return Ok(());
            }
            if !suits && self.aim != Aim::Read {
                return Err(ProjectError::AnotherLog { generation });
            }
            if !suits {
                tracing::error!(
                    generation,
                    seq = mark.seq,
                    fold = mark.fold,
                    "not a fold of this log: a new generation begins"
                );
                generation += 1;
            }
        }
    }

    /// Brings the fold to `mark`, from its start where it is beyond.
    fn fold_to(&mut self, log: &mut dyn Log, mark: &Mark) -> Result<Reached, ProjectError> {
        if self.fold.reach_back(mark) {
            return Ok(Reached::Mark);
        }
        if self.fold.mark().seq >= mark.seq {
            self.fold.restart();
        }
        while self.fold.mark().seq < mark.seq {
            let frames = log.read(Seq(self.fold.mark().seq), FRAMES_MAX)?;
            if frames.is_empty() {
                return Err(ProjectError::LogLost { mark: mark.seq, head: log.head()?.0 });
            }
            for frame in frames.iter().take_while(|frame| frame.seq.0 <= mark.seq) {
                self.fold.take(frame)?;
            }
            if frames.last().is_some_and(|last| last.seq.0 > mark.seq) {
                break;
            }
        }
        self.fold.settle();
        Ok(if self.fold.mark() == mark { Reached::Mark } else { Reached::AnotherLog })
    }

    /// Folds frames until a batch is full.
    fn gather(&mut self, log: &mut dyn Log) -> Result<Gathered, ProjectError> {
        while self.fold.n_touched() < BATCH_KEYS {
            if self.ahead.is_empty() && !self.read_on(log)? {
                return Ok(Gathered::AnotherLog);
            }
            if self.ahead.front().is_none_or(|frame| frame.seq > self.end) {
                return Ok(Gathered::All);
            }
            let Some(frame) = self.ahead.pop_front() else { return Ok(Gathered::All) };
            self.fold.take(&frame)?;
        }
        Ok(Gathered::Full)
    }

    /// Reads the next frames, and the last one again: a log that lost its end and grew past it has another there.
    /// Says whether it is the same.
    fn read_on(&mut self, log: &mut dyn Log) -> Result<bool, ProjectError> {
        let at = self.fold.mark().clone();
        let mut frames = log.read(Seq(at.seq.saturating_sub(1)), FRAMES_MAX + 1)?;
        if let Some(index) = frames.iter().position(|frame| frame.seq.0 == at.seq) {
            let last = frames.remove(index);
            if fold::mark_of(&last)? != at {
                tracing::error!(seq = at.seq, "the log holds another frame here than was projected");
                self.fold.restart();
                return Ok(false);
            }
        } else if frames.is_empty() {
            let head = log.head()?.0;
            if head < at.seq {
                return Err(ProjectError::LogLost { mark: at.seq, head });
            }
        }
        self.head = match frames.last() {
            // There may be many more.
            Some(_) if frames.len() >= FRAMES_MAX => log.head()?.0,
            Some(last) => last.seq.0,
            None => at.seq,
        };
        self.ahead.extend(frames);
        Ok(true)
    }
}
