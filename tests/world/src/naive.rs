//! The naive models: what a log means, worked out again from the sentences of the design and from nothing else.
//!
//! They are slow, small and without structure, and share no line with the folds. Where the two differ, one is wrong.

use std::collections::{BTreeMap, BTreeSet};

use waybill_projections::gate::{Broken, NO_EPOCH};
use waybill_routing::ownership::Name;
use waybill_schema::event::{
    Attempt, Class, Dropped, Effect, Event, Fact, Outcome, Ownedness, Ownership, Preference, Request, Selection,
    Started,
};
use waybill_schema::id::{AffinityKey, DeploymentId, MemberId, RequestId, Revision, WriterId};
use waybill_schema::time::Time;

use crate::invariants::{Rule, Violation, hold};
use crate::log::WorldLog;
use crate::projector::{Checkpoint, Memory, Table};
use crate::upstream::Answer;

/// A claim holds for an hour (DESIGN.md, section 10).
const CLAIM_MS: i64 = 3_600_000;

/// How a call that ended so is recorded.
pub fn class_of(answer: Answer) -> Class {
    match answer {
        Answer::Success => Class::Success,
        Answer::Fails => Class::Upstream5xx,
        Answer::Limited => Class::RateLimited,
        Answer::Cut => Class::Interrupted,
        Answer::Left => Class::Cancelled,
    }
}

/// What a log means up to a place.
#[derive(Debug, Default)]
pub struct Naive {
    at: Checkpoint,
    n_facts: usize,
    writers: BTreeMap<WriterId, Told>,
    missing: BTreeSet<(WriterId, u64, u64)>,
    n_torn: usize,
    pins: BTreeMap<AffinityKey, Pin>,
    /// By incarnation: a member that is made again has no past, one that is brought back has its own.
    rests: BTreeMap<(MemberId, u64), Rest>,
    /// Sends under way: who made them.
    sends: BTreeMap<(RequestId, u16), WriterId>,
    /// Requests under way: who serves them, and whether it is known what they asked for.
    requests: BTreeMap<RequestId, (WriterId, bool)>,
    ends: BTreeSet<(RequestId, u16)>,
    declared: BTreeSet<(WriterId, u64, u64)>,
    /// Where each response is, and whether it came to its end.
    owners: BTreeMap<String, (DeploymentId, bool)>,
    table: Table,
}

/// Where a writer stands.
#[derive(Debug, Default)]
struct Told {
    epoch: u64,
    last: u64,
}

/// Where a session is bound.
#[derive(Debug, PartialEq)]
struct Pin {
    deployment: DeploymentId,
    incarnation: u64,
    revision: Revision,
    last_ok: Option<Time>,
    expires: Time,
}

/// How a member fares.
#[derive(Debug, Default)]
struct Rest {
    failures: u32,
    level: i32,
    last_failure: Option<Time>,
    last_ok: Option<Time>,
    until: Option<Time>,
    asked: Option<Time>,
}

impl Naive {
    /// Reads `log` up to `place`: on from where it was, or again from the start where the log is another one. Gives whether
    /// there was anything to read.
    pub fn read_to(&mut self, log: &WorldLog, place: &Checkpoint) -> bool {
        let before = self.at.clone();
        if !self.at.stands(log) || self.at.seq > place.seq {
            *self = Self::default();
        }
        for kept in log.behind(self.at.seq).iter().take_while(|kept| kept.frame.seq <= place.seq) {
            kept.facts.iter().for_each(|fact| self.take(fact));
            self.at = Checkpoint::behind(kept);
        }
        self.at != before
    }

    /// The rows that the log gives.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// How many numbers are missing without a word.
    pub fn n_missing(&self) -> usize {
        self.missing.len()
    }

    /// Whether the number of `revision` was given up.
    pub fn is_declared(&self, revision: &Revision) -> bool {
        self.declared.contains(&(revision.writer.clone(), revision.epoch, revision.number))
    }

    /// Whether the number of `revision` is missing without a word.
    pub fn misses(&self, revision: &Revision) -> bool {
        self.missing.contains(&(revision.writer.clone(), revision.epoch, revision.number))
    }

    /// Whether the end of a send is in the log.
    pub fn has_end(&self, request: &RequestId, attempt: u16) -> bool {
        self.ends.contains(&(request.clone(), attempt))
    }

    /// Holds the folds of a projector at the same place against this.
    pub fn check_fold(&self, memory: &Memory) -> Result<(), Violation> {
        hold(Rule::HolesAreSeen, memory.n_facts == self.n_facts, || {
            format!("{} facts were folded, the log has {}", memory.n_facts, self.n_facts)
        })?;
        self.check_gate(memory)?;
        self.check_pins(memory)?;
        self.check_rests(memory)
    }

    /// Holds the rows of a store at the same place against this.
    pub fn check_table(&self, table: &Table) -> Result<(), Violation> {
        let seen = || format!("the store has {table:?}, the log gives {:?}", self.table);
        hold(Rule::StoreFollowsLog, *table == self.table, seen)
    }

    fn check_gate(&self, memory: &Memory) -> Result<(), Violation> {
        let summary = memory.fold.gate.summary();
        let mut missed = BTreeSet::new();
        let mut n_torn = 0;
        for violation in &summary.violations {
            match violation.broken {
                Broken::Hole { epoch, first, last } => {
                    missed.extend((first..=last).map(|number| (violation.at.writer.clone(), epoch, number)));
                }
                Broken::Start | Broken::Previous { .. } | Broken::Vanished => n_torn += 1,
            }
        }
        hold(Rule::HolesAreSeen, (&missed, n_torn) == (&self.missing, self.n_torn), || {
            format!("the gate misses {missed:?} and {n_torn} starts, not {:?} and {}", self.missing, self.n_torn)
        })
    }

    fn check_pins(&self, memory: &Memory) -> Result<(), Violation> {
        let records = memory.fold.state.records();
        hold(Rule::Pins, records.len() == self.pins.len(), || format!("{} pins stand", records.len()))?;
        for (key, record) in records {
            let found = Pin {
                deployment: record.deployment.clone(),
                incarnation: record.incarnation,
                revision: record.revision.clone(),
                last_ok: record.last_ok_at,
                expires: record.expires_at,
            };
            hold(Rule::Pins, self.pins.get(key) == Some(&found), || {
                format!("{key} is bound by {found:?}, not by {:?}", self.pins.get(key))
            })?;
        }
        Ok(())
    }

    fn check_rests(&self, memory: &Memory) -> Result<(), Violation> {
        let state = &memory.fold.state;
        let n_found = state.members().count();
        let n_due = self.rests.len();
        hold(Rule::Rests, n_found == n_due, || format!("the health of {n_found} is on record, not of {n_due}"))?;
        for (member, health) in state.members() {
            let found = (health.cooldown.as_ref().map(|cooldown| cooldown.until), health.failures);
            let rest = self.rests.get(&(member.clone(), health.incarnation));
            let due = rest.map_or((None, 0), |rest| (rest.until, rest.failures));
            hold(Rule::Rests, found == due, || {
                let incarnation = health.incarnation;
                format!("{member} of {incarnation} rests until {:?} after {} failures, not {due:?}", found.0, found.1)
            })?;
        }
        Ok(())
    }

    /// Holds the owners that a projector has folded at the same place against this.
    pub fn check_owners(&self, memory: &Memory) -> Result<(), Violation> {
        let is_alike = |name: &Name| {
            let (due, found) = (self.owners.get(&name.response)?, &memory.owners.get(name)?.owner);
            Some((&due.0, due.1) == (&found.deployment, found.state == Ownedness::Final))
        };
        let astray = memory.owners.names().find(|name| is_alike(name) != Some(true));
        let n_found = memory.owners.names().count();
        hold(Rule::Owners, astray.is_none() && n_found == self.owners.len(), || {
            format!("{astray:?} among {n_found} owners is not as in {:?}", self.owners)
        })
    }

    /// Who was first stands, and what was whole once stays so.
    fn own(&mut self, ownership: &Ownership) {
        let owner = (ownership.deployment.clone(), false);
        let (deployment, whole) = self.owners.entry(ownership.response.clone()).or_insert(owner);
        *whole |= ownership.state == Ownedness::Final && *deployment == ownership.deployment;
    }

    fn take(&mut self, fact: &Fact) {
        if !self.is_new(fact) {
            return;
        }
        self.n_facts += 1;
        let (writer, at) = (&fact.revision.writer, fact.at);
        match &fact.event {
            Event::Selection(selection) => {
                self.select(selection, writer);
                self.claim(selection, &fact.revision, at);
            }
            Event::Attempt(attempt) => {
                self.end_send(attempt);
                self.affect(attempt, at);
            }
            Event::Ownership(ownership) => self.own(ownership),
            Event::Request(request) => self.end_request(request),
            Event::Preference(preference) => self.prefer(preference, &fact.revision, at),
            Event::Dropped(dropped) => self.give_up(dropped, &fact.revision),
            Event::Started(_)
            | Event::Alive(_)
            | Event::Catalogue(_)
            | Event::Probe(_)
            | Event::Models(_)
            | Event::Operator(_)
            | Event::Vanished(_) => {}
        }
    }

    /// Whether a fact is the next of its writer; notes what is missing before it.
    fn is_new(&mut self, fact: &Fact) -> bool {
        let Revision { writer, epoch, number } = &fact.revision;
        let told = self.writers.entry(writer.clone()).or_default();
        if (*epoch, *number) <= (told.epoch, told.last) {
            return false;
        }
        let before = (told.epoch, told.last);
        (told.epoch, told.last) = (*epoch, *number);
        if *epoch == before.0 {
            self.miss(writer, *epoch, before.1 + 1, *number - 1);
        } else {
            match &fact.event {
                Event::Started(started) if *number == 1 => self.begin(writer, before, started),
                _ => self.n_torn += usize::from(*epoch != NO_EPOCH),
            }
            self.abandon(writer);
        }
        true
    }

    fn begin(&mut self, writer: &WriterId, before: (u64, u64), started: &Started) {
        let named = started.previous.map_or((0, 0), |previous| (previous.epoch, previous.last));
        if named.0 == before.0 && named.1 > before.1 {
            self.miss(writer, before.0, before.1 + 1, named.1);
        } else if named != before {
            self.n_torn += 1;
        }
    }

    fn miss(&mut self, writer: &WriterId, epoch: u64, first: u64, last: u64) {
        let numbers = (first..=last).map(|number| (writer.clone(), epoch, number));
        let missing = numbers.filter(|number| !self.declared.contains(number));
        self.missing.extend(missing);
    }

    fn give_up(&mut self, dropped: &Dropped, by: &Revision) {
        for number in dropped.first..=dropped.last {
            let number = (by.writer.clone(), by.epoch, number);
            self.missing.remove(&number);
            self.declared.insert(number);
        }
    }

    fn select(&mut self, selection: &Selection, writer: &WriterId) {
        self.sends.insert((selection.request.clone(), selection.attempt), writer.clone());
        let known = selection.context.is_some();
        self.requests.entry(selection.request.clone()).or_insert((writer.clone(), known));
    }

    fn end_send(&mut self, attempt: &Attempt) {
        let send = (attempt.request.clone(), attempt.attempt);
        self.sends.remove(&send);
        self.ends.insert(send.clone());
        // What is abandoned stays so.
        self.table.attempts.entry(send).or_insert(attempt.class);
    }

    fn end_request(&mut self, request: &Request) {
        let known = self.requests.remove(&request.request).is_some_and(|(_, known)| known);
        if known || request.context.is_some() {
            self.table.requests.insert(request.request.clone(), request.outcome);
        }
        self.abandon_where(|(of, _), _| *of == request.request);
    }

    fn abandon(&mut self, writer: &WriterId) {
        self.abandon_where(|_, by| by == writer);
        let over: Vec<_> = self.requests.extract_if(.., |_, (by, _)| by == writer).collect();
        for (request, (_, known)) in over {
            if known {
                self.table.requests.insert(request, Outcome::Abandoned);
            }
        }
    }

    fn abandon_where(&mut self, is_over: impl Fn(&(RequestId, u16), &WriterId) -> bool) {
        for (send, _) in self.sends.extract_if(.., |send, by| is_over(send, by)) {
            self.table.attempts.insert(send, Class::Abandoned);
        }
    }

    fn rests(&self, member: &MemberId, incarnation: u64, at: Time) -> bool {
        self.rests.get(&(member.clone(), incarnation)).is_some_and(|rest| rest.until > Some(at))
    }

    fn live_pin(&self, key: &AffinityKey, at: Time) -> Option<&Pin> {
        self.pins.get(key).filter(|pin| pin.expires > at)
    }

    fn claim(&mut self, selection: &Selection, revision: &Revision, at: Time) {
        let sticky = selection.context.as_ref().and_then(|context| context.sticky.as_ref());
        let Some(sticky) = sticky.filter(|_| selection.claim) else { return };
        if self.live_pin(&sticky.key, at).is_some() || self.rests(&selection.member, selection.incarnation, at) {
            return;
        }
        let pin = Pin {
            deployment: selection.deployment.clone(),
            incarnation: selection.incarnation,
            revision: revision.clone(),
            last_ok: None,
            expires: at.plus_ms(CLAIM_MS),
        };
        self.pins.insert(sticky.key.clone(), pin);
    }

    fn prefer(&mut self, preference: &Preference, revision: &Revision, at: Time) {
        if self.rests(&preference.member, preference.incarnation, at) {
            return;
        }
        if let Some(pin) = self.live_pin(&preference.key, at) {
            let renews = (&pin.deployment, pin.incarnation) == (&preference.deployment, preference.incarnation);
            let is_old = renews && pin.last_ok > Some(at);
            let switches = preference.base.as_ref() == Some(&pin.revision);
            if is_old || !(renews || switches) {
                return;
            }
        }
        let pin = Pin {
            deployment: preference.deployment.clone(),
            incarnation: preference.incarnation,
            revision: revision.clone(),
            last_ok: Some(at),
            expires: at.plus_ms(preference.ttl_ms as i64),
        };
        self.pins.insert(preference.key.clone(), pin);
    }

    fn affect(&mut self, attempt: &Attempt, at: Time) {
        if attempt.effect == Effect::None {
            return;
        }
        let rest = self.rests.entry((attempt.member.clone(), attempt.incarnation)).or_default();
        let limits = &attempt.thresholds;
        match attempt.effect {
            Effect::None | Effect::Block => {}
            Effect::Recover => {
                rest.last_ok = rest.last_ok.max(Some(at));
                if rest.last_failure <= Some(at) {
                    rest.asked = rest.asked.filter(|until| *until > at);
                    (rest.failures, rest.level, rest.until) = (0, 0, rest.asked);
                }
            }
            Effect::Count | Effect::Cool if rest.last_ok > Some(at) => {}
            Effect::Count | Effect::Cool => {
                rest.failures += 1;
                rest.last_failure = rest.last_failure.max(Some(at));
                if rest.failures >= limits.failures && rest.until <= Some(at) {
                    let grown =
                        (0..rest.level).fold(limits.cooldown_ms, |ms, _| ms * u64::from(limits.growth_permille) / 1000);
                    rest.level += 1;
                    rest.until = rest.until.max(Some(at.plus_ms(grown.min(limits.cooldown_ms_max) as i64)));
                }
                if let (Effect::Cool, Some(ms)) = (attempt.effect, attempt.retry_after_ms) {
                    rest.asked = rest.asked.max(Some(at.plus_ms(ms.min(limits.cooldown_ms_max) as i64)));
                    rest.until = rest.until.max(rest.asked);
                }
            }
        }
    }
}
