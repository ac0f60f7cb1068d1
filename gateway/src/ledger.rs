//! The ledger: one short lock round the spool and the routing state, so that a decision, its record and its effect
//! are one step.
//!
//! Facts are applied to the state in the order in which they are numbered, which is the order they will have in the
//! log. The state of a running gateway is therefore the fold of its log plus its own facts on the way there. Under the
//! lock happen: a selection (some microseconds), the numbering, and one `write()` to the page cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use waybill_events::spool::Spool;
use waybill_routing::state::State;
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::Body;
use waybill_schema::id::{Revision, WriterId};
use waybill_schema::time::Time;

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
        Self { writer, epoch, book: Mutex::new(Book { spool, state, takes: true }), lost: AtomicU64::new(0) }
    }

    /// Lets `make` look at the state and say what happened; records it, applies it, and returns what `make` returned
    /// with the revision of the first fact (`None` where nothing was, or could be, recorded).
    pub fn decide<T>(&self, now: Time, make: impl FnOnce(&State) -> (T, Vec<Event>)) -> (T, Option<Revision>) {
        let mut book = self.lock();
        let (made, events) = make(&book.state);
        let bodies: Vec<Body> = events.iter().map(Body::of).collect();
        let first = self.write(&mut book, now, events, &bodies);
        (made, first)
    }

    /// Records what happened and applies it; the encoding is done before the lock is taken.
    pub fn record(&self, now: Time, events: Vec<Event>) -> Option<Revision> {
        let bodies: Vec<Body> = events.iter().map(Body::of).collect();
        self.write(&mut self.lock(), now, events, &bodies)
    }

    /// Looks at the state without recording anything.
    pub fn look<T>(&self, at: impl FnOnce(&State) -> T) -> T {
        at(&self.lock().state)
    }

    /// Where the writer stands now.
    pub fn standing(&self) -> Standing {
        let book = self.lock();
        let last = Revision { writer: self.writer.clone(), epoch: self.epoch, number: book.spool.last_number() };
        Standing { last, lost: self.lost.load(Ordering::Relaxed), records: book.takes }
    }

    /// The digest of the routing state. It is worked out under the lock, which takes milliseconds where many sessions
    /// are bound: for verification, not for a path that is polled.
    pub fn digest(&self) -> String {
        self.lock().state.digest()
    }

    fn write(&self, book: &mut Book, now: Time, events: Vec<Event>, bodies: &[Body]) -> Option<Revision> {
        if events.is_empty() {
            return None;
        }
        let appended = book.spool.append(bodies, now);
        book.takes = appended.is_ok();
        let numbers = match appended {
            Ok(numbers) => numbers,
            Err(error) => {
                let lost = self.lost.fetch_add(events.len() as u64, Ordering::Relaxed);
                if lost == 0 {
                    tracing::error!(%error, "the spool takes no facts; they will be declared as dropped");
                }
                return None;
            }
        };
        let first = *numbers.start();
        for (number, event) in numbers.zip(events) {
            let revision = Revision { writer: self.writer.clone(), epoch: self.epoch, number };
            book.state.apply(&Fact { revision, at: now, event });
        }
        Some(Revision { writer: self.writer.clone(), epoch: self.epoch, number: first })
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
