//! The spool of a gateway as a value: what survives a kill.
//!
//! The rules of the real one: a fact is numbered once; what a full disk does not take keeps its numbers and is declared
//! by the next fact that is taken; acknowledged facts are kept for a while, since a log may lose its tail.

use waybill_schema::event::{Dropped, Epoch, Event, Fact};
use waybill_schema::frame::Body;
use waybill_schema::id::{Revision, WriterId};
use waybill_schema::time::Time;

use crate::invariants::Book;

/// When something is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// In true time.
    pub truly: Time,
    /// By the clock of the gateway.
    pub made: Time,
    /// On the log's time scale, as the gateway knows it.
    pub at: Time,
}

/// A fact in a spool.
#[derive(Clone, Debug)]
pub struct Spooled {
    /// The fact, its time as its gateway takes it.
    pub fact: Fact,
    /// When it was made, by the clock of its gateway.
    pub made: Time,
    /// Its line.
    pub line: Vec<u8>,
}

impl Spooled {
    /// Its place among the facts of its writer.
    pub fn place(&self) -> (u64, u64) {
        (self.fact.revision.epoch, self.fact.revision.number)
    }
}

/// The place that `epoch` has reached.
pub fn place_of(epoch: Epoch) -> (u64, u64) {
    (epoch.epoch, epoch.last)
}

/// The spool.
#[derive(Clone, Debug)]
pub struct Spool {
    writer: WriterId,
    epoch: u64,
    /// The last number given out.
    number: u64,
    facts: Vec<Spooled>,
    /// Numbers that a full disk cost since the last fact: known to the process only.
    owed: Option<(u64, u64)>,
    /// Acknowledged facts that are not kept any more: their epoch, the first and the last.
    released: Vec<(u64, u64, u64)>,
    /// Whether the disk is full.
    pub full: bool,
}

impl Spool {
    /// An empty spool.
    pub fn new(writer: WriterId) -> Self {
        Self { writer, epoch: 0, number: 0, facts: Vec::new(), owed: None, released: Vec::new(), full: false }
    }

    /// Begins an epoch. What the one before still owed is known to nobody any more.
    pub fn begin(&mut self, epoch: u64) {
        self.owed = None;
        (self.epoch, self.number) = (epoch, 0);
    }

    /// Records `events` and gives the revision of the first; `None` where the disk takes none.
    pub fn append(&mut self, events: Vec<Event>, stamp: Stamp, book: &mut Book) -> Option<Revision> {
        if self.full {
            let first = self.owed.map_or(self.number + 1, |(first, _)| first);
            self.number += events.len() as u64;
            self.owed = Some((first, self.number));
            return None;
        }
        if let Some((first, last)) = self.owed.take() {
            self.push(Event::Dropped(Dropped { first, last, reason: "disk full".into() }), stamp, book);
        }
        let mut revisions =
            events.into_iter().map(|event| self.push(event, stamp, book)).collect::<Vec<_>>().into_iter();
        revisions.next()
    }

    fn push(&mut self, event: Event, stamp: Stamp, book: &mut Book) -> Revision {
        self.number += 1;
        let revision = Revision { writer: self.writer.clone(), epoch: self.epoch, number: self.number };
        let mut line = Vec::new();
        Body::of(&event, stamp.made).write_line(self.number, &mut line);
        let fact = Fact { revision: revision.clone(), at: stamp.at, event };
        book.note(&fact, stamp.truly);
        self.facts.push(Spooled { fact, made: stamp.made, line });
        revision
    }

    /// The last fact held.
    pub fn last(&self) -> Option<Epoch> {
        self.facts.last().map(|held| Epoch { epoch: held.fact.revision.epoch, last: held.fact.revision.number })
    }

    /// All facts held.
    pub fn facts(&self) -> &[Spooled] {
        &self.facts
    }

    /// The facts held behind `place`.
    pub fn behind(&self, place: (u64, u64)) -> &[Spooled] {
        &self.facts[self.facts.partition_point(|held| held.place() <= place)..]
    }

    /// The fact at `place`, if it is held.
    pub fn at(&self, place: (u64, u64)) -> Option<&Spooled> {
        let index = self.facts.binary_search_by_key(&place, Spooled::place).ok()?;
        Some(&self.facts[index])
    }

    /// Whether the fact at `place` is held, or can be declared as given up: in its own epoch only.
    pub fn answers_for(&self, place: (u64, u64)) -> bool {
        self.at(place).is_some() || (place.0 == self.epoch && self.has_released(place))
    }

    /// Whether the fact at `place` was let go of.
    pub fn has_released(&self, (epoch, number): (u64, u64)) -> bool {
        self.released.iter().any(|(of, first, last)| *of == epoch && (*first..=*last).contains(&number))
    }

    /// Lets go of acknowledged facts of this epoch: `count` of them at most, from `from` on.
    pub fn release(&mut self, from: u64, count: u64, acknowledged: (u64, u64)) {
        let end = (from..from + count).take_while(|number| {
            let place = (self.epoch, *number);
            let kept = |held: &Spooled| !matches!(held.fact.event, Event::Started(_) | Event::Dropped(_));
            place <= acknowledged && self.at(place).is_some_and(kept)
        });
        if let Some(last) = end.last() {
            let epoch = self.epoch;
            self.released.push((epoch, from, last));
            self.facts.retain(|held| !((epoch, from)..=(epoch, last)).contains(&held.place()));
        }
    }

    /// Declares the facts of this epoch behind `place` that are not held any more.
    pub fn declare_released(&mut self, place: (u64, u64), stamp: Stamp, book: &mut Book) {
        let epoch = self.epoch;
        let is_lost = |range: &mut (u64, u64, u64)| range.0 == epoch && (epoch, range.2) > place;
        let lost: Vec<_> = self.released.extract_if(.., is_lost).collect();
        for (_, first, last) in lost {
            self.push(Event::Dropped(Dropped { first, last, reason: "not kept".into() }), stamp, book);
        }
    }

    /// Loses one fact behind `place` that says only that its writer is there. Nothing is left to tell of it.
    pub fn damage(&mut self, place: (u64, u64)) {
        let is_lost = |held: &Spooled| held.place() > place && matches!(held.fact.event, Event::Alive(_));
        if let Some(index) = self.facts.iter().position(is_lost) {
            self.facts.remove(index);
        }
    }
}
