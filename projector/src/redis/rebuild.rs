//! The shared state made anew: a generation filled from the log's start beside the one that is read, compared with the
//! fold key by key, and named as the one to read in one step. Gateways and projectors go on meanwhile, and follow.

use waybill_events::log::{Log, ReadError, Seq};
use waybill_schema::FOLD_VERSION;
use waybill_schema::time::Time;

use super::store::Store;
use super::verify::{Mirror, Verified, verify};
use super::{Aim, ProjectError, RedisProjector, Settings};
use crate::postgres::Swapped;

/// Why the shared state cannot be made anew.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// It cannot be projected.
    #[error(transparent)]
    Project(#[from] ProjectError),
    /// Another one is at it.
    #[error("another rebuild is under way; if it was killed, it is out of the way in a minute")]
    Rebuilding,
    /// Somebody else writes to the new generation, or has named another one to be read.
    #[error("somebody else has changed the generations meanwhile")]
    Overtaken,
    /// What was stored is not what was folded.
    #[error("the generation does not hold what the log says: {0} keys differ")]
    Differs(u64),
    /// No generation is read.
    #[error("no generation is read, so there is none before it")]
    NoneRead,
    /// There is no generation to go back to.
    #[error("generation {0} is read, and none was before it")]
    First(u64),
    /// The one before cannot be gone on with.
    #[error("generation {before}, which was read before {read}, is not there or was made by another fold")]
    OtherFold {
        /// The one that is read.
        read: u64,
        /// The one before.
        before: u64,
    },
}

impl From<::redis::RedisError> for WorkError {
    fn from(error: ::redis::RedisError) -> Self {
        Self::Project(error.into())
    }
}

impl From<ReadError> for WorkError {
    fn from(error: ReadError) -> Self {
        Self::Project(error.into())
    }
}

/// A generation that is being brought to the log's end, to become the one that is read.
#[derive(Debug)]
pub struct Rebuild {
    settings: Settings,
    store: Store,
    projector: RedisProjector,
    /// The generation that was read when this began.
    read: Option<u64>,
    generation: u64,
    /// Whether it was begun for this, and not found.
    begun: bool,
    who: String,
}

impl Rebuild {
    /// Begins a new generation, known as `who` among those who may want to; one at a time does.
    pub fn begin(settings: &Settings, who: &str) -> Result<Self, WorkError> {
        let mut store = lease(settings, who)?;
        let read = store.active()?;
        let generations = store.generations()?;
        // What a killed rebuild left behind.
        for (generation, _) in
            generations.iter().filter(|(generation, was_read)| !was_read && Some(*generation) != read)
        {
            store.remove(*generation)?;
        }
        let generation = generations.iter().map(|(generation, _)| *generation).chain(read).max().unwrap_or(0) + 1;
        Self::over(settings, store, who, read, generation, true)
    }

    /// Takes up the generation that was read before the one that is.
    pub fn go_back(settings: &Settings, who: &str) -> Result<Self, WorkError> {
        let mut store = lease(settings, who)?;
        let Some(read) = store.active()? else { return Err(WorkError::NoneRead) };
        let Some(before) = store.before(read)? else { return Err(WorkError::First(read)) };
        match store.look(before)?.mark {
            Some(mark) if mark.fold == FOLD_VERSION => {}
            Some(_) | None => return Err(WorkError::OtherFold { read, before }),
        }
        Self::over(settings, store, who, Some(read), before, false)
    }

    fn over(
        settings: &Settings,
        store: Store,
        who: &str,
        read: Option<u64>,
        generation: u64,
        begun: bool,
    ) -> Result<Self, WorkError> {
        let projector = RedisProjector::aimed(settings, Aim::This(generation))?;
        let (settings, who) = (settings.clone(), who.to_owned());
        Ok(Self { settings, store, projector, read, generation, begun, who })
    }

    /// The generation that it fills.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What the generation that is read looks like beside a fresh fold; nothing where there is none.
    pub fn verify_read(&self, log: &mut dyn Log, progress: &mut dyn FnMut(Seq)) -> Result<Option<Verified>, WorkError> {
        Ok(verify(log, &self.settings, progress)?)
    }

    /// Folds `log` up to frame `end`, and writes what the generation does not hold yet.
    pub fn fill_to(&mut self, log: &mut dyn Log, end: Seq, progress: &mut dyn FnMut(Seq)) -> Result<(), WorkError> {
        self.projector.end = end;
        while self.projector.seq() < end.0 {
            if !self.store.lease_rebuild(&self.who)? {
                return Err(WorkError::Overtaken);
            }
            match self.projector.turn(log, Time::wall_clock())? {
                super::Turn::Wrote => progress(Seq(self.projector.seq())),
                super::Turn::CaughtUp => break,
                super::Turn::Astray | super::Turn::StandsBy => return Err(WorkError::Overtaken),
            }
        }
        match self.projector.seq() {
            seq if seq < end.0 => Err(ProjectError::LogLost { mark: end.0, head: seq }.into()),
            _ => Ok(()),
        }
    }

    /// Compares what is stored with what was folded, key by key, at the place that both have come to.
    pub fn compare(&mut self, log: &mut dyn Log) -> Result<Verified, WorkError> {
        let mirror = Mirror::new(self.projector.fold.clone(), self.store.keys(), self.generation);
        let verified = mirror.compare(&mut self.store, log, &mut |_| {})?;
        match verified.findings.n {
            0 => Ok(verified),
            n => Err(WorkError::Differs(n)),
        }
    }

    /// Names the generation as the one to read. The one that was stays, and is the way back from one that is new.
    pub fn swap(mut self) -> Result<Swapped, WorkError> {
        let back = self.read.filter(|_| self.begun);
        if !self.store.point(self.read, self.generation, back)? {
            return Err(WorkError::Overtaken);
        }
        self.store.end_rebuild(&self.who)?;
        Ok(Swapped { from: self.read, to: self.generation })
    }

    /// Removes what was begun.
    pub fn give_up(mut self) -> Result<(), WorkError> {
        if self.begun {
            self.store.remove(self.generation)?;
        }
        Ok(self.store.end_rebuild(&self.who)?)
    }
}

fn lease(settings: &Settings, who: &str) -> Result<Store, WorkError> {
    let mut store = Store::new(&settings.url, &settings.prefix).map_err(ProjectError::Redis)?;
    match store.lease_rebuild(who)? {
        true => Ok(store),
        false => Err(WorkError::Rebuilding),
    }
}
