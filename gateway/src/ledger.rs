//! The ledger: one short lock round the spool and the routing state, so that a decision, its record and its effect
//! are one step.
//!
//! Facts are applied to the state in the order in which they are numbered, which is the order they will have in the
//! log. The state of a running gateway is therefore the fold of its log plus its own facts on the way there. Under the
//! lock happen: a selection (some microseconds), the numbering, and one `write()` to the page cache.
//!
//! A fact that must be in the spool before something is sent is noted at once and flushed just before the send, so that
//! requests which are ready together share a write. Should the spool refuse them then, they are declared as dropped;
//! the live state has moved already and is ahead of the log until the next start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use waybill_events::spool::Spool;
use waybill_routing::state::State;
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::Body;
use waybill_schema::id::{Revision, WriterId};
use waybill_schema::time::Time;

/// At most about so many facts are noted before they are written.
const NOTED_MAX: usize = 256;

/// The gateway's facts and what follows from them.
#[derive(Debug)]
pub struct Ledger {
    writer: WriterId,
    epoch: u64,
    book: Mutex<Book>,
    lost: AtomicU64,
}

#[derive(Debug)]
struct Book {
    spool: Spool,
    state: State,
    /// Whether the spool took the last facts.
    takes: bool,
    noted: Noted,
}

/// Facts that are numbered and applied, but not in the spool yet.
#[derive(Debug, Default)]
struct Noted {
    /// When all of them were made.
    made: Time,
    bodies: Vec<Body>,
}

/// Where a writer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The last fact that was recorded.
    pub last: Revision,
    /// Facts that could not be recorded since the start.
    pub lost: u64,
    /// Whether the last facts could be recorded.
    pub records: bool,
}

impl Ledger {
    /// Takes over a spool in which `epoch` has begun, and the state that the log folds to.
    pub fn new(writer: WriterId, epoch: u64, spool: Spool, state: State) -> Self {
        Self {
            writer,
            epoch,
            book: Mutex::new(Book { spool, state, takes: true, noted: Noted::default() }),
            lost: AtomicU64::new(0),
        }
    }

    /// Lets `make` look at the state and say what happened; notes it, applies it, and returns what `make` returned with
    /// the revision of the first fact (`None` where nothing was, or could be, noted).
    pub fn decide<T>(&self, now: Time, make: impl FnOnce(&State) -> (T, Vec<Event>)) -> (T, Option<Revision>) {
        let mut book = self.lock();
        let (made, events) = make(&book.state);
        let bodies = events.iter().map(Body::of).collect();
        let first = self.take(&mut book, now, events, bodies);
        (made, first)
    }

    /// Notes what happened and applies it; the encoding is done before the lock is taken.
    pub fn note(&self, now: Time, events: Vec<Event>) -> Option<Revision> {
        let bodies = events.iter().map(Body::of).collect();
        self.take(&mut self.lock(), now, events, bodies)
    }

    /// Notes what happened, and brings it and all that was noted before into the spool.
    pub fn record(&self, now: Time, events: Vec<Event>) -> Option<Revision> {
        let bodies = events.iter().map(Body::of).collect();
        let mut book = self.lock();
        let first = self.take(&mut book, now, events, bodies);
        self.write(&mut book);
        first.filter(|_| book.takes)
    }

    /// Brings all that was noted into the spool. Nothing may be sent before.
    pub fn flush(&self) {
        self.write(&mut self.lock());
    }

    /// Brings all that was noted into the spool, and what was lost on record: nothing is recorded after a clean stop.
    pub fn close(&self, now: Time) {
        let mut book = self.lock();
        self.write(&mut book);
        if let Err(error) = book.spool.declare_lost(now) {
            tracing::error!(%error, "facts were lost and are not declared");
        }
    }

    /// Where the writer stands now.
    pub fn standing(&self) -> Standing {
        let mut book = self.lock();
        self.write(&mut book);
        let last = Revision { writer: self.writer.clone(), epoch: self.epoch, number: book.spool.last_number() };
        Standing { last, lost: self.lost.load(Ordering::Relaxed), records: book.takes }
    }

    /// The digest of the routing state. It is worked out under the lock, which takes milliseconds where many sessions
    /// are bound: for verification, not for a path that is polled.
    pub fn digest(&self) -> String {
        self.lock().state.digest()
    }

    fn take(&self, book: &mut Book, now: Time, events: Vec<Event>, bodies: Vec<Body>) -> Option<Revision> {
        if events.is_empty() {
            return None;
        }
        // What is written together has one time, and an end.
        if book.noted.made != now || book.noted.bodies.len() >= NOTED_MAX {
            self.write(book);
        }
        let first = if book.takes {
            let first = book.spool.last_number() + book.noted.bodies.len() as u64 + 1;
            book.noted.made = now;
            book.noted.bodies.extend(bodies);
            first
        } else {
            // After a loss the spool puts a declaration before the next facts, so only it knows their numbers.
            self.append(book, now, &bodies)?
        };
        let revision = |number| Revision { writer: self.writer.clone(), epoch: self.epoch, number };
        for (number, event) in (first..).zip(events) {
            book.state.apply(&Fact { revision: revision(number), at: now, event });
        }
        Some(revision(first))
    }

    fn write(&self, book: &mut Book) {
        if !book.noted.bodies.is_empty() {
            let Noted { made, bodies } = std::mem::take(&mut book.noted);
            self.append(book, made, &bodies);
        }
    }

    /// Appends to the spool and gives the number of the first fact; counts the facts where the spool takes none.
    fn append(&self, book: &mut Book, made: Time, bodies: &[Body]) -> Option<u64> {
        let appended = book.spool.append(bodies, made);
        book.takes = appended.is_ok();
        match appended {
            Ok(numbers) => Some(*numbers.start()),
            Err(error) => {
                if self.lost.fetch_add(bodies.len() as u64, Ordering::Relaxed) == 0 {
                    tracing::error!(%error, "the spool takes no facts; they will be declared as dropped");
                }
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use waybill_events::spool::Options;
    use waybill_schema::event::Alive;

    use super::*;

    /// DESIGN.md section 8, "disk full under the spool, log away too": a gateway that loses facts is not ready.
    #[test]
    fn a_ledger_whose_spool_is_full_says_so() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let options = Options { spool_bytes_max: 1, ..Options::default() };
        let (mut spool, _reader, _) = Spool::open(dir.path(), options).expect("a new spool opens");
        spool.begin(1).expect("a first epoch begins");
        let ledger = Ledger::new("gw".into(), 1, spool, State::default());
        let standing = ledger.standing();
        assert_eq!((standing.lost, standing.records), (0, true));
        assert_eq!(ledger.record(Time(0), vec![Event::Alive(Alive { last: 0 })]), None);
        let standing = ledger.standing();
        assert_eq!((standing.lost, standing.records), (1, false));
    }
}
