//! What both halves of a spool know: the segments, how far they are written, acknowledged and synced.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use waybill_schema::event::Dropped;
use waybill_schema::time::Time;

use super::Options;
use super::reader::Place;
use super::segment::Name;

/// Facts, and the bytes that their records take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) facts: u64,
    pub(super) bytes: u64,
}

impl Count {
    pub(super) fn plus(self, more: Self) -> Self {
        Self { facts: self.facts + more.facts, bytes: self.bytes + more.bytes }
    }

    /// Whether it is as far as `target` in either measure.
    pub(super) fn reaches(self, target: Self) -> bool {
        self.facts >= target.facts || self.bytes >= target.bytes
    }
}

/// What both halves share. It also holds the lock: as long as one half lives, the directory is taken.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) dir: PathBuf,
    pub(super) options: Options,
    _lock: File,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// In order; only the last one grows.
    pub(super) segments: VecDeque<Segment>,
    /// All that was recorded, what was found at the opening included.
    pub(super) written: Count,
    /// All that the log has acknowledged and has not lost since.
    pub(super) acked: Count,
    /// The most that was ever acknowledged: what a log loses again is held anyway and must not crowd out new facts.
    acked_bytes_most: u64,
    /// When the oldest fact that is not acknowledged was made; `None` also where it was not read yet.
    oldest: Option<Time>,
    /// Numbers of this epoch that the log lost and the spool does not hold any more, one range for each time that this
    /// happened: the next append declares them.
    pub(super) gone: Vec<Dropped>,
    /// The epoch begun in this life.
    pub(super) begun: Option<u64>,
    /// What the reader waits for, so that an append wakes it once and not each time.
    pub(super) wanted: Option<Count>,
    pub(super) stop: Stop,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) name: Name,
    /// All that lies in the segments before it.
    pub(super) before: Count,
    /// The end of its last whole record: no reader goes beyond it.
    pub(super) bytes: u64,
    /// When it was first seen closed and acknowledged as a whole.
    acked_at: Option<Time>,
    /// Whether the disk has its place in the directory.
    named: bool,
    /// Whether it is closed and the disk has all of it.
    synced: bool,
}

impl Segment {
    /// A segment of an earlier life: what of it had to be on the disk was synced then.
    pub(super) fn found(name: Name, before: Count, bytes: u64) -> Self {
        Self { name, before, bytes, acked_at: None, named: true, synced: true }
    }

    fn acked(&self, acked: Count) -> bool {
        self.before.bytes + self.bytes <= acked.bytes
    }
}

/// How urgently the reader is asked to come to an end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// Not at all.
    #[default]
    No,
    /// When nothing is left to read.
    Drained,
    /// At once.
    Now,
}

/// What waits in a spool for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// How many facts.
    pub facts: u64,
    /// How many bytes their records take.
    pub bytes: u64,
    /// When the oldest of them was made; `None` where none waits, and for a moment where it was not read yet.
    pub oldest: Option<Time>,
}

/// What a sync has to bring to the disk.
#[derive(Debug)]
pub(super) struct Unsynced {
    pub(super) segments: Vec<Name>,
    /// Whether one of them is not in the directory on the disk.
    pub(super) unnamed: bool,
    /// The segment that may still grow.
    open: Option<Name>,
}

impl State {
    /// How many bytes were never acknowledged.
    pub(super) fn held_bytes(&self) -> u64 {
        self.written.bytes - self.acked_bytes_most
    }

    /// Takes off the list, from the oldest on, what is acknowledged and `is_due`, and gives the names.
    ///
    /// The newest segment with a fact is always kept, for it tells a start without the log which epoch was the last.
    fn let_go(&mut self, is_due: impl Fn(&Segment, Count) -> bool) -> Vec<Name> {
        let mut gone = Vec::new();
        while let Some(oldest) = self.segments.front() {
            let last = self.segments.iter().skip(1).all(|later| later.bytes == 0);
            if last || !oldest.acked(self.acked) || !is_due(oldest, self.acked) {
                break;
            }
            gone.push(oldest.name);
            self.segments.pop_front();
        }
        gone
    }

    fn acknowledge(&mut self, acked: Count, oldest: Option<Time>) {
        self.acked = acked;
        self.acked_bytes_most = self.acked_bytes_most.max(acked.bytes);
        self.oldest = oldest;
    }
}

impl Shared {
    pub(super) fn new(dir: &Path, lock: File, options: Options, state: State) -> Self {
        Self { dir: dir.to_owned(), options, _lock: lock, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the spool's state panics")
    }

    pub(super) fn add_segment(&self, name: Name) {
        let mut state = self.state();
        let before = state.written;
        let segment = Segment { name, before, bytes: 0, acked_at: None, named: false, synced: false };
        state.segments.push_back(segment);
    }

    /// Counts a record whose facts were made at `made`.
    pub(super) fn grow(&self, by: Count, made: Time) {
        let mut state = self.state();
        state.oldest.get_or_insert(made);
        state.written = state.written.plus(by);
        if let Some(current) = state.segments.back_mut() {
            current.bytes += by.bytes;
        }
        if state.wanted.is_some_and(|wanted| state.written.reaches(wanted)) {
            state.wanted = None;
            self.changed.notify_all();
        }
    }

    /// Takes all before `acked` as acknowledged; the fact behind it was made at `oldest`, where that is known.
    pub(super) fn acknowledge(&self, acked: Count, oldest: Option<Time>) {
        self.state().acknowledge(acked, oldest);
    }

    /// Says when the oldest fact that waits was made.
    pub(super) fn found_oldest(&self, made: Time) {
        self.state().oldest = Some(made);
    }

    /// Goes back to the segment that holds what follows `after`, or to the oldest: what lies behind waits again.
    pub(super) fn go_back(&self, after: Option<(u64, u64)>) -> Place {
        let mut state = self.state();
        let next = after.map_or_else(Name::default, |(epoch, last)| Name { epoch, first: last + 1 });
        let start = state.segments.iter().rev().find(|segment| segment.name <= next).or(state.segments.front());
        let place = match start {
            Some(segment) => Place { segment: segment.name, offset: 0, before: segment.before },
            None => Place { before: state.written, ..Place::default() },
        };
        state.acknowledge(place.before, None);
        for segment in state.segments.iter_mut().filter(|segment| segment.name >= place.segment) {
            segment.acked_at = None;
        }
        place
    }

    /// Lets go of the segments whose retention is over, and gives their names.
    pub(super) fn expire(&self, now: Time) -> Vec<Name> {
        let mut state = self.state();
        let State { segments, acked, .. } = &mut *state;
        let n_closed = segments.len().saturating_sub(1);
        for segment in segments.iter_mut().take(n_closed).filter(|segment| segment.acked(*acked)) {
            segment.acked_at.get_or_insert(now);
        }
        state.let_go(|oldest, acked| {
            let held_ms = oldest.acked_at.map_or(0, |at| now.ms_since(at));
            u128::from(held_ms) >= self.options.retention.as_millis()
                || acked.bytes - oldest.before.bytes > self.options.retention_bytes_max
        })
    }

    /// Lets go of all that the log has acknowledged, whatever is left of its retention, and gives the names.
    pub(super) fn spare(&self) -> Vec<Name> {
        self.state().let_go(|_, _| true)
    }

    /// Takes the segments of `epoch` and of those before it off the list, and gives their names.
    pub(super) fn overtaken(&self, epoch: u64) -> Vec<Name> {
        let mut state = self.state();
        let n = state.segments.iter().take_while(|segment| segment.name.epoch <= epoch).count();
        state.segments.drain(..n).map(|segment| segment.name).collect()
    }

    /// What must be synced so that the disk has everything up to segment `upto`.
    pub(super) fn unsynced(&self, upto: Name) -> Unsynced {
        let state = self.state();
        let open = state.segments.back().map(|segment| segment.name);
        let unsynced = || state.segments.iter().filter(|segment| segment.name <= upto && !segment.synced);
        Unsynced {
            segments: unsynced().map(|segment| segment.name).collect(),
            unnamed: unsynced().any(|segment| !segment.named),
            open,
        }
    }

    /// Notes that the disk has what `unsynced` names.
    pub(super) fn synced(&self, unsynced: &Unsynced) {
        for segment in &mut self.state().segments {
            if unsynced.segments.contains(&segment.name) {
                (segment.named, segment.synced) = (true, Some(segment.name) != unsynced.open);
            }
        }
    }

    pub(super) fn wait_while(
        &self,
        timeout: Duration,
        condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.state(), timeout, condition);
        waited.expect("no holder of the spool's state panics").0
    }
}

/// Asks a spool's reader to come to an end; held by whoever owns the thread that reads.
#[derive(Clone, Debug)]
pub(crate) struct Stopper(pub(super) Arc<Shared>);

impl Stopper {
    /// Asks; a milder request than the last changes nothing.
    pub(crate) fn stop(&self, stop: Stop) {
        let mut state = self.0.state();
        state.stop = state.stop.max(stop);
        self.0.changed.notify_all();
    }
}

/// Tells what waits in a spool, without keeping its directory taken.
#[derive(Clone, Debug)]
pub(crate) struct Gauge(pub(super) Weak<Shared>);

impl Gauge {
    /// What waits now; nothing where the spool is closed.
    pub(crate) fn waiting(&self) -> Waiting {
        let Some(shared) = self.0.upgrade() else { return Waiting::default() };
        let state = shared.state();
        let facts = state.written.facts - state.acked.facts;
        let bytes = state.written.bytes - state.acked.bytes;
        Waiting { facts, bytes, oldest: state.oldest.filter(|_| facts > 0) }
    }
}
