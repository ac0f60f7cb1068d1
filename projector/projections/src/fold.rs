//! The whole of what a program that starts reads out of the log, in one pass: the gate, the usage fold, the routing
//! state and the catalogue.

use waybill_routing::state::State;
use waybill_schema::catalogue::{BatchError, Rows};
use waybill_schema::event::{Event, Fact};
use waybill_schema::id::Revision;

use crate::gate::{Gate, Verdict};
use crate::usage::{Row, UsageFold};

/// The folds of one log. Each may be taken out and carried on by its owner once the log has been read.
#[derive(Debug, PartialEq, Default)]
pub struct Fold {
    /// What each writer has said.
    pub gate: Gate,
    /// The requests under way.
    pub usage: UsageFold,
    /// The routing state.
    pub state: State,
    /// The catalogue.
    pub rows: Rows,
    /// The batches that did not fit the catalogue: left out whole, and never silently.
    pub misfits: Vec<(Revision, BatchError)>,
}

impl Fold {
    /// Folds the fact at log position `seq`, unless it is a duplicate; puts the rows it completes at the end of `rows`.
    pub fn apply(&mut self, fact: &Fact, seq: u64, rows: &mut Vec<Row>) -> Verdict {
        let verdict = self.gate.admit(fact);
        if verdict.folds() {
            self.usage.apply(fact, seq, rows);
            self.state.apply(fact);
            if let Event::Catalogue(batch) = &fact.event
                && let Err(error) = self.rows.apply(batch)
            {
                self.misfits.push((fact.revision.clone(), error));
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use waybill_schema::event::{Class, Outcome};

    use super::*;
    use crate::story::Teller;
    use crate::usage::Journal;

    /// What a writer of a made-up history does next.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Restart,
        Send(u8),
        EndSend(u8),
        End(u8),
    }

    fn step() -> impl Strategy<Value = (bool, Step)> {
        let what = prop_oneof![
            1 => Just(Step::Restart),
            6 => (0..4u8).prop_map(Step::Send),
            5 => (0..4u8).prop_map(Step::EndSend),
            4 => (0..4u8).prop_map(Step::End),
        ];
        (any::<bool>(), what)
    }

    /// What a gateway that keeps its promises would record; slots are its requests in flight.
    struct Gateway {
        teller: Teller,
        n_requests: u32,
        slots: BTreeMap<u8, (String, u16, bool)>,
        n_sends: usize,
    }

    impl Gateway {
        fn new(writer: &str) -> Self {
            Self { teller: Teller::new(writer), n_requests: 0, slots: BTreeMap::new(), n_sends: 0 }
        }

        fn does(&mut self, step: Step, at: i64) -> Option<Fact> {
            let Self { teller, n_requests, slots, n_sends } = self;
            match step {
                Step::Restart => {
                    slots.clear();
                    Some(teller.starts(at))
                }
                Step::Send(slot) => {
                    let (request, sends, under_way) = slots.entry(slot).or_insert_with(|| {
                        *n_requests += 1;
                        (format!("{}-{n_requests}", teller.writer), 0, false)
                    });
                    if std::mem::replace(under_way, true) {
                        return None;
                    }
                    *sends += 1;
                    *n_sends += 1;
                    Some(teller.selects(at, request, *sends, "a"))
                }
                Step::EndSend(slot) => {
                    let (request, sends, under_way) = slots.get_mut(&slot)?;
                    std::mem::take(under_way).then(|| teller.ends_send(at, request, *sends, Class::Success))
                }
                Step::End(slot) => {
                    let (request, sends, _) = slots.get(&slot).filter(|(_, _, under_way)| !under_way)?.clone();
                    slots.remove(&slot);
                    Some(teller.ends(at, &request, Outcome::Success, Class::Success, sends))
                }
            }
        }
    }

    /// The facts of two gateways that both restart at the end, and how many requests and sends there were.
    fn history(steps: &[(bool, Step)]) -> (Vec<Fact>, usize, usize) {
        let mut gateways = [Gateway::new("gw-a"), Gateway::new("gw-b")];
        let ends = [(false, Step::Restart), (true, Step::Restart)];
        let facts = ends
            .iter()
            .chain(steps)
            .chain(&ends)
            .zip(0..)
            .filter_map(|((second, step), at)| gateways[usize::from(*second)].does(*step, at))
            .collect();
        let n_requests = gateways.iter().map(|gateway| gateway.n_requests as usize).sum();
        (facts, n_requests, gateways.iter().map(|gateway| gateway.n_sends).sum())
    }

    fn folded(fold: &mut Fold, facts: &[Fact], seq: u64) -> Vec<Row> {
        let mut rows = Vec::new();
        for (fact, seq) in facts.iter().zip(seq..) {
            fold.apply(fact, seq, &mut rows);
        }
        rows
    }

    proptest! {
        #[test]
        fn every_send_and_every_request_has_exactly_one_row(steps in prop::collection::vec(step(), 0..120)) {
            let (facts, n_requests, n_sends) = history(&steps);
            let mut fold = Fold::default();
            let rows = folded(&mut fold, &facts, 1);
            let mut requests = BTreeSet::new();
            let mut sends = BTreeSet::new();
            for row in &rows {
                match row {
                    Row::Event(row) => prop_assert!(requests.insert(&row.request)),
                    Row::Attempt(row) => prop_assert!(sends.insert((&row.request, row.attempt))),
                }
            }
            prop_assert_eq!((requests.len(), sends.len()), (n_requests, n_sends));
            prop_assert_eq!((fold.usage.n_open(), fold.usage.orphans()), (0, 0));
            prop_assert!(!fold.gate.summary().tainted());
        }

        #[test]
        fn facts_met_again_change_nothing(
            steps in prop::collection::vec(step(), 0..80),
            cut in any::<prop::sample::Index>(),
            back in any::<prop::sample::Index>(),
        ) {
            let (facts, ..) = history(&steps);
            let cut = cut.index(facts.len() + 1);
            let back = back.index(cut + 1);
            let (mut once, mut again) = (Fold::default(), Fold::default());
            let expected = folded(&mut once, &facts, 1);
            let mut rows = folded(&mut again, &facts[..cut], 1);
            rows.extend(folded(&mut again, &facts[back..cut], 1));
            rows.extend(folded(&mut again, &facts[cut..], 1 + cut as u64));
            prop_assert_eq!(rows, expected);
            prop_assert_eq!(again.state.digest(), once.state.digest());
            prop_assert_eq!(again.usage, once.usage);
            prop_assert_eq!(again.gate.summary().duplicates, (cut - back) as u64);
        }

        #[test]
        fn a_run_taken_back_leaves_no_trace(
            steps in prop::collection::vec(step(), 0..80),
            cut in any::<prop::sample::Index>(),
        ) {
            let (facts, ..) = history(&steps);
            let cut = cut.index(facts.len() + 1);
            let mut usage = UsageFold::default();
            let mut rows = Vec::new();
            facts[..cut].iter().for_each(|fact| usage.apply(fact, 1, &mut rows));
            let before = usage.clone();
            let mut journal = Journal::behind(1);
            facts[cut..].iter().for_each(|fact| usage.apply_noting(fact, 2, &mut rows, &mut journal));
            usage.take_back(journal);
            prop_assert_eq!(usage, before);
        }

        #[test]
        fn a_prefix_folded_again_at_start_and_then_the_rest_is_the_whole(
            steps in prop::collection::vec(step(), 0..80),
            cut in any::<prop::sample::Index>(),
        ) {
            let (facts, ..) = history(&steps);
            let cut = cut.index(facts.len() + 1);
            let (mut whole, mut before, mut after) = (Fold::default(), Fold::default(), Fold::default());
            let expected = folded(&mut whole, &facts, 1);
            let mut rows = folded(&mut before, &facts[..cut], 1);
            folded(&mut after, &facts[..cut], 1);
            rows.extend(folded(&mut after, &facts[cut..], 1 + cut as u64));
            prop_assert_eq!(rows, expected);
            prop_assert_eq!(after, whole);
        }
    }
}
