//! A split: a smooth weighted round-robin, exact over every full period.
//!
//! Every legal deployment earns its weight at each turn, and the one that is chosen pays what all of them earned. So the
//! debts of a turn add up to nothing, none ever owes as much as all weights together, and after as many turns as the
//! weights have units, reduced to lowest terms, each was chosen as often as its weight says, however ties were broken.

use std::collections::BTreeMap;

use waybill_schema::event::Choice;
use waybill_schema::id::DeploymentId;

/// Where a gateway stands in one split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    due: BTreeMap<DeploymentId, Due>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    weight: u32,
    credit: i64,
}

impl Cursor {
    /// The rank of a deployment that weighs `weight`, in its turn: the smaller, the more it is owed.
    pub fn rank(&self, deployment: &DeploymentId, weight: u32) -> i32 {
        let credit = self.due.get(deployment).filter(|due| due.weight == weight).map_or(0, |due| due.credit);
        let owed = credit.saturating_add(i64::from(weight));
        i32::try_from(owed.saturating_neg()).unwrap_or(if owed > 0 { i32::MIN } else { i32::MAX })
    }

    /// Goes on by a turn in which `chosen` was taken from the legal candidates of `choice`. Another weight than at the
    /// last turn makes another split, which begins anew.
    pub fn advance(&mut self, choice: &Choice, chosen: &DeploymentId) {
        let legal = || choice.candidates.iter().filter(|candidate| candidate.excluded.is_none());
        let known = |candidate: &waybill_schema::event::Candidate| {
            self.due.get(&candidate.deployment).is_none_or(|due| due.weight == candidate.weight)
        };
        if !legal().all(known) {
            self.due.clear();
        }
        let mut earned = 0;
        for candidate in legal() {
            let weight = candidate.weight;
            let due = self.due.entry(candidate.deployment.clone()).or_insert(Due { weight, credit: 0 });
            due.credit += i64::from(weight);
            earned += i64::from(weight);
        }
        if let Some(due) = self.due.get_mut(chosen) {
            due.credit -= earned;
        }
    }
}
