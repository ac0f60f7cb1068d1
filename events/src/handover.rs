//! What a gateway has just recorded, handed in memory to the projector of the same process.
//!
//! A fact goes through the spool and the log as its line, and whoever folds the log reads lines. The projector of an
//! embedded instance folds facts that its own process made a moment ago: to read each out of its line again took 7 % of
//! all that a chat costs (ADR 40). Only the facts of a whole frame are handed over; what is not held any more is read
//! from the frame, as by everybody else.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use waybill_schema::event::Fact;
use waybill_schema::frame::Header;

/// At most so many facts are held, about 1 KB each: what four thousand requests leave.
pub const HELD_MAX: usize = 16 << 10;

/// The latest facts of one writer in one epoch, in the order of their numbers.
#[derive(Debug, Default)]
pub struct Handover {
    held: Mutex<VecDeque<Fact>>,
}

impl Handover {
    /// Holds `facts`, whose numbers are greater than all before. The oldest go where that is more than [`HELD_MAX`].
    pub fn put(&self, facts: impl IntoIterator<Item = Fact>) {
        let mut held = self.lock();
        held.extend(facts);
        let surplus = held.len().saturating_sub(HELD_MAX);
        held.drain(..surplus);
    }

    /// Lets go of the facts of the frame under `header`, in order, and of all before them; `None` where one of them is
    /// not held.
    pub fn take(&self, header: &Header) -> Option<Vec<Fact>> {
        let mut held = self.lock();
        let is_before = |fact: &Fact| (fact.revision.epoch, fact.revision.number) < (header.epoch, header.first);
        let n_before = held.partition_point(is_before);
        held.drain(..n_before);
        let count = header.count as usize;
        let ends = [held.front()?, held.get(count.checked_sub(1)?)?].map(|fact| &fact.revision);
        // Numbers only grow: between two ends so far apart there is one for each place.
        let whole = ends.map(|end| end.number) == [header.first, header.last()]
            && ends.iter().all(|end| end.epoch == header.epoch && end.writer == header.writer);
        whole.then(|| held.drain(..count).collect())
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Fact>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use waybill_schema::event::{Alive, Event};
    use waybill_schema::frame::{Frame, Link};
    use waybill_schema::id::Revision;
    use waybill_schema::time::Time;

    use super::*;

    fn fact(epoch: u64, number: u64) -> Fact {
        let event = Event::Alive(Alive { last: number });
        Fact { revision: Revision { writer: "gw".into(), epoch, number }, at: Time(0), event }
    }

    /// The numbers that are handed over for a frame of `writer` and `epoch` with `count` facts from `first`.
    fn taken(handover: &Handover, (writer, epoch): (&str, u64), first: u64, count: u32) -> Option<Vec<u64>> {
        let header = Frame::seal(writer.into(), epoch, Link::start(), first, count, b"").header;
        let facts = handover.take(&header)?;
        Some(facts.iter().map(|fact| fact.revision.number).collect())
    }

    #[test]
    fn a_frame_whose_facts_are_all_held_gets_them_once() {
        let handover = Handover::default();
        handover.put((2..=9).map(|number| fact(1, number)));
        assert_eq!(taken(&handover, ("gw", 1), 2, 3), Some(vec![2, 3, 4]));
        assert_eq!(taken(&handover, ("gw", 1), 2, 3), None, "the same frame comes again after a failure");
        assert_eq!(taken(&handover, ("gw", 1), 7, 3), Some(vec![7, 8, 9]), "5 and 6 are let go");
        assert_eq!(taken(&handover, ("gw", 1), 10, 1), None);
    }

    #[test]
    fn a_frame_of_which_a_fact_is_missing_gets_none() {
        let handover = Handover::default();
        handover.put([2, 3, 5, 6].map(|number| fact(1, number)));
        assert_eq!(taken(&handover, ("gw", 1), 1, 2), None, "1 was never held");
        assert_eq!(taken(&handover, ("gw", 1), 2, 4), None, "4 was declared lost");
        assert_eq!(taken(&handover, ("gw", 1), 5, 3), None, "7 is not made yet");
        assert_eq!(taken(&handover, ("gw", 1), 5, 2), Some(vec![5, 6]));
    }

    #[test]
    fn a_frame_of_another_life_or_writer_gets_none() {
        let handover = Handover::default();
        handover.put((1..=2).map(|number| fact(2, number)));
        assert_eq!(taken(&handover, ("gw", 1), 1, 2), None);
        assert_eq!(taken(&handover, ("auditor", 2), 1, 2), None);
        assert_eq!(taken(&handover, ("gw", 2), 1, 2), Some(vec![1, 2]));
    }

    #[test]
    fn no_more_than_the_bound_are_held() {
        let handover = Handover::default();
        handover.put((1..=HELD_MAX as u64 + 1).map(|number| fact(1, number)));
        assert_eq!(taken(&handover, ("gw", 1), 1, 1), None);
        assert_eq!(taken(&handover, ("gw", 1), 2, 1), Some(vec![2]));
    }
}
