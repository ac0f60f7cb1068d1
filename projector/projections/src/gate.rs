//! The gate: what stands between the log and every fold, so that a fact counts once and a missing one is noticed.
//!
//! Per writer, numbers are dense within an epoch, and an epoch begins with `started`, number 1, which names what came
//! before. A number met again is a duplicate. A hole is honest when `dropped` or `vanished` declares it; any other is
//! a violation: it is counted, it taints the fold, and folding goes on.

use std::collections::BTreeMap;

use waybill_schema::event::{Dropped, Epoch, Event, Fact, Started};
use waybill_schema::id::{Revision, WriterId};

/// The epoch of a writer that has none: its numbers are dense from 1 and no `started` opens them (the catalogue).
pub const NO_EPOCH: u64 = 0;
/// At most this many violations are kept with their place; all are counted.
pub const VIOLATIONS_MAX: usize = 64;

/// What is to be done with a fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is the next one.
    Fold,
    /// It has been folded before.
    Duplicate,
    /// It is folded, but what should stand before it does not.
    Violation(Violation),
}

impl Verdict {
    /// Whether the fact is to be folded.
    pub fn folds(&self) -> bool {
        *self != Self::Duplicate
    }
}

/// A broken promise of a writer, and where it shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The fact at which it shows.
    pub at: Revision,
    /// What is broken.
    pub broken: Broken,
}

/// What can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Numbers of an epoch that no fact carries and no fact gives up.
    Hole {
        /// The epoch.
        epoch: u64,
        /// The first number that is missing.
        first: u64,
        /// The last number that is missing.
        last: u64,
    },
    /// An epoch does not begin with `started`, number 1.
    Start,
    /// A `started` names another past than the one seen.
    Previous {
        /// What it names.
        named: Option<Epoch>,
        /// What was seen.
        seen: Option<Epoch>,
    },
    /// A writer speaks on in an epoch that was declared vanished.
    Vanished,
}

/// What the gate has seen.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Summary {
    /// The last number of every writer.
    pub writers: BTreeMap<WriterId, Epoch>,
    /// Facts met again.
    pub duplicates: u64,
    /// Violations in all.
    pub n_violations: u64,
    /// The first [`VIOLATIONS_MAX`] of them.
    pub violations: Vec<Violation>,
}

impl Summary {
    /// Whether a writer broke a promise: what was folded may lack facts.
    pub fn tainted(&self) -> bool {
        self.n_violations > 0
    }
}

/// The gate of one log.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Gate {
    seats: BTreeMap<WriterId, Seat>,
    duplicates: u64,
    /// Violations that nothing can heal any more, and how many there were in all.
    settled: Vec<Violation>,
    n_settled: u64,
}

impl Gate {
    /// Judges the next fact of the log.
    pub fn admit(&mut self, fact: &Fact) -> Verdict {
        let verdict = self.pass(&fact.revision, Some(&fact.event));
        if let (true, Event::Vanished(vanished)) = (verdict.folds(), &fact.event)
            && let Some(seat) = self.seats.get_mut(&vanished.writer)
        {
            seat.vanished |= seat.at.epoch == vanished.epoch;
        }
        verdict
    }

    /// Passes over a fact that is there but cannot be read: it is quarantined, not missing.
    pub fn pass_over(&mut self, revision: &Revision) -> Verdict {
        self.pass(revision, None)
    }

    /// What was seen so far; a hole that is declared later is no violation any more.
    pub fn summary(&self) -> Summary {
        let open = self.seats.values().flat_map(|seat| &seat.open);
        let n_open = self.seats.values().map(|seat| seat.open.len() as u64).sum::<u64>();
        Summary {
            writers: self.seats.iter().map(|(writer, seat)| (writer.clone(), seat.at)).collect(),
            duplicates: self.duplicates,
            n_violations: self.n_settled + n_open,
            violations: self.settled.iter().chain(open).take(VIOLATIONS_MAX).cloned().collect(),
        }
    }

    fn pass(&mut self, revision: &Revision, event: Option<&Event>) -> Verdict {
        let begins = self.seats.get(&revision.writer).is_none_or(|seat| seat.at.epoch < revision.epoch);
        if begins {
            return self.begin(revision, event);
        }
        let seat = self.seats.get_mut(&revision.writer).expect("a writer that begins nothing has a seat");
        if revision.epoch < seat.at.epoch || revision.number <= seat.at.last {
            self.duplicates += 1;
            return Verdict::Duplicate;
        }
        let verdict = seat.advance(revision, event);
        if let Verdict::Violation(violation @ Violation { broken: Broken::Vanished, .. }) = &verdict {
            let violation = violation.clone();
            self.settle(violation);
        }
        verdict
    }

    /// The first fact of a writer's epoch.
    fn begin(&mut self, revision: &Revision, event: Option<&Event>) -> Verdict {
        let old = self.seats.remove(&revision.writer);
        let mut seat = Seat::at(revision.epoch);
        let mut verdict = seat.advance(revision, event);
        if revision.epoch != NO_EPOCH {
            let started = match event {
                Some(Event::Started(started)) if revision.number == 1 => Some(started),
                _ => None,
            };
            // What lies before a late first fact is part of the false start, not a hole of its own.
            seat.open.clear();
            let broken = started.map_or(Some(Broken::Start), |started| mismatch(old.as_ref(), started));
            verdict = broken.map_or(Verdict::Fold, |broken| {
                let violation = Violation { at: revision.clone(), broken };
                self.settle(violation.clone());
                Verdict::Violation(violation)
            });
        }
        for hole in old.into_iter().flat_map(|old| old.open) {
            self.settle(hole);
        }
        self.seats.insert(revision.writer.clone(), seat);
        verdict
    }

    fn settle(&mut self, violation: Violation) {
        self.n_settled += 1;
        if self.settled.len() < VIOLATIONS_MAX {
            self.settled.push(violation);
        }
    }
}

/// Where the past that `started` names departs from the one seen.
fn mismatch(old: Option<&Seat>, started: &Started) -> Option<Broken> {
    let seen = old.map(|old| old.at);
    if seen == started.previous {
        return None;
    }
    if let (Some(old), Some(named)) = (old, started.previous)
        && named.epoch == old.at.epoch
        && named.last > old.at.last
    {
        let (first, last) = (old.at.last + 1, named.last);
        let honest = old.vanished || without((first, last), &old.declared).is_empty();
        return (!honest).then_some(Broken::Hole { epoch: named.epoch, first, last });
    }
    Some(Broken::Previous { named: started.previous, seen })
}

/// Where one writer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seat {
    at: Epoch,
    /// Holes of this epoch that nothing has declared yet.
    open: Vec<Violation>,
    /// Numbers given up before a fact beyond them was seen.
    declared: Vec<(u64, u64)>,
    vanished: bool,
}

impl Seat {
    fn at(epoch: u64) -> Self {
        Self { at: Epoch { epoch, last: 0 }, open: Vec::new(), declared: Vec::new(), vanished: false }
    }

    /// Moves on to a number beyond the last one.
    fn advance(&mut self, revision: &Revision, event: Option<&Event>) -> Verdict {
        if revision.number > self.at.last + 1 {
            let gap = (self.at.last + 1, revision.number - 1);
            let holes = without(gap, &self.declared);
            self.open.extend(holes.into_iter().map(|hole| hole_at(revision, hole)));
        }
        self.at.last = revision.number;
        self.declared.retain(|(_, last)| *last > revision.number);
        if let Some(Event::Dropped(dropped)) = event {
            self.declare(dropped);
        }
        if std::mem::take(&mut self.vanished) {
            return Verdict::Violation(Violation { at: revision.clone(), broken: Broken::Vanished });
        }
        let shown = self.open.iter().find(|hole| hole.at == *revision);
        shown.map_or(Verdict::Fold, |violation| Verdict::Violation(violation.clone()))
    }

    fn declare(&mut self, dropped: &Dropped) {
        let given_up = [(dropped.first, dropped.last)];
        let open = std::mem::take(&mut self.open);
        for Violation { at, broken } in open {
            match broken {
                Broken::Hole { first, last, .. } => {
                    let left = without((first, last), &given_up);
                    self.open.extend(left.into_iter().map(|hole| hole_at(&at, hole)));
                }
                Broken::Start | Broken::Previous { .. } | Broken::Vanished => {}
            }
        }
        if dropped.last > self.at.last {
            self.declared.push((dropped.first, dropped.last));
        }
    }
}

fn hole_at(revision: &Revision, (first, last): (u64, u64)) -> Violation {
    Violation { at: revision.clone(), broken: Broken::Hole { epoch: revision.epoch, first, last } }
}

/// The parts of `range` (both ends included) that none of `covers` covers.
fn without(range: (u64, u64), covers: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = vec![range];
    for &(first, last) in covers {
        let parts = left.into_iter().flat_map(|(a, b)| {
            let below = (a, b.min(first.saturating_sub(1)));
            let above = (a.max(last.saturating_add(1)), b);
            if last < a || first > b { [Some((a, b)), None] } else { [some_range(below), some_range(above)] }
        });
        left = parts.flatten().collect();
    }
    left
}

fn some_range((first, last): (u64, u64)) -> Option<(u64, u64)> {
    (first <= last).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use waybill_schema::event::{Alive, Vanished};
    use waybill_schema::time::Time;

    use super::*;

    fn fact(at: &str, event: Event) -> Fact {
        let mut parts = at.split(':');
        let writer = parts.next().expect("a writer").into();
        let mut number = || parts.next().and_then(|part| part.parse().ok()).expect("a number");
        Fact { revision: Revision { writer, epoch: number(), number: number() }, at: Time(0), event }
    }

    fn started(at: &str, previous: Option<(u64, u64)>) -> Fact {
        let previous = previous.map(|(epoch, last)| Epoch { epoch, last });
        fact(at, Event::Started(Started { version: "1".into(), secret: "s".into(), previous }))
    }

    fn alive(at: &str) -> Fact {
        fact(at, Event::Alive(Alive { last: 0 }))
    }

    fn dropped(at: &str, first: u64, last: u64) -> Fact {
        fact(at, Event::Dropped(Dropped { first, last, reason: "test".into() }))
    }

    fn vanished(at: &str, writer: &str, epoch: u64, last: u64) -> Fact {
        fact(at, Event::Vanished(Vanished { writer: writer.into(), epoch, last }))
    }

    /// The verdicts in short (`+` fold, `=` duplicate, `!` violation), then what is still broken at the end.
    fn check(facts: &[Fact], expected: &str) {
        let mut gate = Gate::default();
        let mut text: String = facts
            .iter()
            .map(|fact| match gate.admit(fact) {
                Verdict::Fold => '+',
                Verdict::Duplicate => '=',
                Verdict::Violation(_) => '!',
            })
            .collect();
        let summary = gate.summary();
        assert_eq!(summary.n_violations as usize, summary.violations.len());
        for Violation { at, broken } in summary.violations {
            text += &match broken {
                Broken::Hole { epoch, first, last } => format!(" {at} hole {epoch}:{first}-{last}"),
                Broken::Start => format!(" {at} start"),
                Broken::Previous { .. } => format!(" {at} previous"),
                Broken::Vanished => format!(" {at} vanished"),
            };
        }
        assert_eq!(text, expected);
    }

    #[test]
    fn dense_numbers_fold_and_repeated_ones_do_not() {
        check(&[started("a:1:1", None), alive("a:1:2"), alive("a:1:2"), alive("a:1:1"), alive("a:1:3")], "++==+");
    }

    #[test]
    fn writers_are_counted_apart() {
        check(&[started("a:1:1", None), started("b:4:1", None), alive("b:4:2"), alive("a:1:2")], "++++");
    }

    #[test]
    fn an_epoch_names_the_one_before() {
        check(&[started("a:1:1", None), alive("a:1:2"), started("a:2:1", Some((1, 2))), alive("a:1:2")], "+++=");
        check(&[started("a:1:1", None), started("a:2:1", None)], "+! a:2:1 previous");
        check(&[started("a:3:1", Some((2, 9)))], "! a:3:1 previous");
        check(&[started("a:1:1", None), alive("a:1:2"), started("a:2:1", Some((1, 1)))], "++! a:2:1 previous");
    }

    #[test]
    fn an_epoch_begins_with_started() {
        check(&[alive("a:1:1"), alive("a:1:2")], "!+ a:1:1 start");
        check(&[started("a:1:1", None), alive("a:2:5"), alive("a:2:6")], "+!+ a:2:5 start");
    }

    #[test]
    fn a_hole_is_a_violation_and_folding_goes_on() {
        check(&[started("a:1:1", None), alive("a:1:4"), alive("a:1:5")], "+!+ a:1:4 hole 1:2-3");
    }

    #[test]
    fn a_dropped_hole_is_honest_whenever_it_is_declared() {
        check(&[started("a:1:1", None), dropped("a:1:4", 2, 3)], "++");
        check(&[started("a:1:1", None), dropped("a:1:2", 3, 5), alive("a:1:6")], "+++");
        check(&[started("a:1:1", None), alive("a:1:6"), dropped("a:1:7", 2, 5)], "+!+");
        check(
            &[started("a:1:1", None), alive("a:1:6"), dropped("a:1:7", 3, 4)],
            "+!+ a:1:6 hole 1:2-2 a:1:6 hole 1:5-5",
        );
    }

    #[test]
    fn a_hole_of_an_epoch_that_is_over_stays() {
        let facts = [started("a:1:1", None), alive("a:1:3"), started("a:2:1", Some((1, 3))), dropped("a:2:2", 2, 2)];
        check(&facts, "+!++ a:1:3 hole 1:2-2");
    }

    #[test]
    fn a_lost_tail_is_a_hole_unless_the_writer_was_declared_vanished() {
        check(&[started("a:1:1", None), started("a:2:1", Some((1, 4)))], "+! a:2:1 hole 1:2-4");
        let facts = [started("a:1:1", None), started("x:1:1", None), vanished("x:1:2", "a", 1, 1)];
        check(&[&facts[..], &[started("a:2:1", Some((1, 4)))]].concat(), "++++");
        check(&[&facts[..], &[alive("a:1:2"), alive("a:1:3")]].concat(), "+++!+ a:1:2 vanished");
    }

    #[test]
    fn the_catalogue_has_no_epochs() {
        check(&[alive("catalogue:0:1"), alive("catalogue:0:2"), alive("catalogue:0:2")], "++=");
        check(&[alive("catalogue:0:2")], "! catalogue:0:2 hole 0:1-1");
    }

    #[test]
    fn an_unreadable_fact_is_not_a_missing_one() {
        let mut gate = Gate::default();
        gate.admit(&started("a:1:1", None));
        assert_eq!(gate.pass_over(&alive("a:1:2").revision), Verdict::Fold);
        assert_eq!(gate.admit(&alive("a:1:3")), Verdict::Fold);
        assert!(!gate.summary().tainted());
    }
}
