//! What must hold, stated apart from the code that is held to it: the rules, and the naive models behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use waybill_auditor::catalogue::WRITER;
use waybill_events::log::Seq;
use waybill_projections::chain::Chains;
use waybill_routing::ownership::LAG_MS_MAX;
use waybill_schema::event::{Batch, Class, Event, Fact, Ownedness, Ownership};
use waybill_schema::id::{Revision, WriterId};
use waybill_schema::time::Time;

use crate::auditor::Reading;
use crate::gateway::Gateway;
use crate::log::{Kept, LEADER_SKEW_MS_MAX, Life, TRANSIT_MS_MAX, WorldLog};
use crate::naive::{Naive, class_of};
use crate::projector::{Memory, Store};
use crate::spool::Spooled;
use crate::upstream::{Answer, Call, Upstreams};

/// So long, in milliseconds, what a writer has made may be unknown to others: what a lookup takes for just heard, and
/// what the log's time may be wrong by.
const UNSEEN_MS_MAX: u64 = LAG_MS_MAX + (TRANSIT_MS_MAX + 2 * LEADER_SKEW_MS_MAX).unsigned_abs();

/// A rule of the house.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Every call has its own selection in its gateway's spool before it is made, and goes where that excludes nothing.
    Announced,
    /// Every call whose selection is in the log has one row, which tells its recorded end or calls it abandoned; and
    /// no row is without a call.
    RowsAreCalls,
    /// A store holds the rows that the log gives at its checkpoint, each once.
    StoreFollowsLog,
    /// What stands in the log was made once, and is what was made.
    FactsAsMade,
    /// A writer's epochs never go back, and its frames form one chain.
    OneWriter,
    /// Every number is in the log, declared, or reported: the gate misses exactly what is missing.
    HolesAreSeen,
    /// However long a fact waited, it counts from when it happened.
    AgeIsKept,
    /// A pin moves only by a success that is based on it, and every success on it renews it.
    Pins,
    /// A member rests as long as its own failures since it was made say, and no longer.
    Rests,
    /// A response is where it was made. Who continues it is sent there and nowhere else, once it has come to its end; one
    /// that was cut has no owner to continue it. What the disk of a known writer holds is never called unknown, but for the
    /// last seconds.
    Owners,
    /// The catalogue is its batches one after the other; no acknowledged edit is lost; an undo restores exactly.
    Catalogue,
    /// When all is well again, everything recorded is in the log.
    NothingIsLost,
    /// All who have folded the same log stand in the same state.
    SameDigest,
    /// When all is well again, all work comes to its end.
    ComesToRest,
}

/// A rule that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// What was seen.
    pub seen: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.seen)
    }
}

/// Fails with `rule` where `holds` is not so.
pub fn hold(rule: Rule, holds: bool, seen: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { rule, seen: seen() }) }
}

/// What was made, by whoever made it.
#[derive(Debug, Default)]
pub struct Book {
    /// A number may be made twice as long as the log has it from neither: by a life that ended before it was heard.
    made: BTreeMap<Revision, Vec<Made>>,
    /// Batches that an auditor was told are stored.
    pub acknowledged: Vec<Batch>,
    /// Continuations that were refused.
    pub n_refused: usize,
    /// Responses that were called unknown.
    pub denials: Vec<Denial>,
}

/// A response was called unknown.
#[derive(Debug)]
pub struct Denial {
    /// The call that made it.
    pub parent: usize,
    /// When.
    pub at: Time,
    /// The writers of which the shared state knew.
    pub known: Vec<WriterId>,
}

#[derive(Debug)]
struct Made {
    truly: Time,
    event: Event,
}

impl Book {
    /// Notes a fact and the true time at which it was made.
    pub fn note(&mut self, fact: &Fact, truly: Time) {
        self.made.entry(fact.revision.clone()).or_default().push(Made { truly, event: fact.event.clone() });
    }
}

/// Watches a world.
#[derive(Debug, Default)]
pub struct Watch {
    checked: Seq,
    n_calls: usize,
    n_denials: usize,
    chains: Chains,
    places: BTreeMap<WriterId, (u64, u64)>,
    catalogue: Reading,
    naive: [Naive; 2],
}

impl Watch {
    /// Forgets what it followed in a log that has lost its tail, to follow it again from the start.
    pub fn log_was_cut(&mut self) {
        let naive = std::mem::take(&mut self.naive);
        *self = Self { n_calls: self.n_calls, n_denials: self.n_denials, naive, ..Self::default() };
    }

    /// How many numbers are missing without a word.
    pub fn n_missing(&self) -> usize {
        self.naive[0].n_missing()
    }

    /// Checks the frames that have come to the log.
    pub fn log(&mut self, log: &WorldLog, book: &Book) -> Result<(), Violation> {
        for kept in log.behind(self.checked) {
            let header = &kept.header;
            let followed = self.chains.follow(header);
            hold(Rule::OneWriter, followed.is_ok(), || format!("{header:?} breaks its chain: {followed:?}"))?;
            let place = self.places.entry(header.writer.clone()).or_default();
            hold(Rule::OneWriter, place.0 <= header.epoch && *place < (header.epoch, header.first), || {
                format!("{header:?} follows {place:?}")
            })?;
            *place = (header.epoch, header.last());
            if header.writer.as_str() == WRITER {
                self.batch(kept)?;
            } else {
                kept.facts.iter().try_for_each(|fact| made(fact, book))?;
            }
        }
        self.checked = log.end();
        let holds = |batch: &Batch| self.catalogue.history.get(batch.revision as usize - 1) == Some(batch);
        let lost = book.acknowledged.last().filter(|batch| !holds(batch));
        hold(Rule::Catalogue, lost.is_none(), || format!("the acknowledged {lost:?} is not in the log"))
    }

    /// A batch in the log fits what stands there; one that undoes another gives back what stood before that.
    fn batch(&mut self, kept: &Kept) -> Result<(), Violation> {
        for fact in &kept.facts {
            let Event::Catalogue(batch) = &fact.event else { continue };
            let applied = self.catalogue.rows.apply(batch);
            hold(Rule::Catalogue, applied.is_ok(), || format!("{} does not fit: {applied:?}", fact.revision))?;
            self.catalogue.history.push((**batch).clone());
            let Some(target) = batch.reason.strip_prefix("undo ").and_then(|target| target.parse::<usize>().ok())
            else {
                continue;
            };
            for op in &self.catalogue.history[target - 1].ops {
                let now = self.catalogue.rows.iter().find(|(key, _)| **key == op.row).map(|(_, stored)| stored);
                hold(Rule::Catalogue, now == op.before.as_ref(), || {
                    format!("{} leaves {now:?} of {:?}, not {:?}", fact.revision, op.row, op.before)
                })?;
            }
        }
        Ok(())
    }

    /// Checks the calls that were made.
    pub fn calls(&mut self, upstreams: &Upstreams, gateways: &[Gateway]) -> Result<(), Violation> {
        for call in &upstreams.calls[self.n_calls..] {
            let held = gateways[call.life.gateway].spool.at((call.selection.epoch, call.selection.number));
            let announced = held.is_some_and(|held| announces(&held.fact.event, call));
            hold(Rule::Announced, announced, || format!("{call:?} was not announced"))?;
            let goes_home = call.parent.is_none_or(|parent| {
                upstreams.calls.get(parent).is_some_and(|made| is_whole(made) && made.deployment == call.deployment)
            });
            hold(Rule::Owners, goes_home, || format!("{call:?} does not go to where its parent was made"))?;
        }
        self.n_calls = upstreams.calls.len();
        Ok(())
    }

    /// Checks what was called unknown.
    pub fn denials(&mut self, book: &Book, upstreams: &Upstreams, gateways: &[Gateway]) -> Result<(), Violation> {
        for denial in &book.denials[self.n_denials..] {
            let Some(call) = upstreams.calls.get(denial.parent) else { continue };
            let maker = &gateways[call.life.gateway];
            let is_old = call.ended.is_some_and(|(ended, _)| denial.at.ms_since(ended) > UNSEEN_MS_MAX);
            let is_known = !maker.superseded && denial.known.contains(&maker.writer);
            let is_it = |held: &Spooled| {
                whole(&held.fact.event).is_some_and(|ownership| ownership.response == denial.parent.to_string())
            };
            let wronged = is_old && is_known && maker.spool.facts().iter().any(is_it);
            hold(Rule::Owners, !wronged, || format!("{call:?} was called unknown at {:?}", denial.at))?;
        }
        self.n_denials = book.denials.len();
        Ok(())
    }

    /// Checks what the projector at `index` has folded, and the store where the two stand at the same place.
    pub fn projection(
        &mut self,
        index: usize,
        memory: &Memory,
        store: &Store,
        log: &WorldLog,
    ) -> Result<(), Violation> {
        if !memory.at.stands(log) {
            return Ok(());
        }
        let naive = &mut self.naive[index];
        if naive.read_to(log, &memory.at) {
            naive.check_owners(memory)?;
        }
        naive.check_fold(memory)?;
        if store.checkpoint == memory.at { naive.check_table(&store.table) } else { Ok(()) }
    }

    /// Checks the whole when all is well again and nothing is under way between the machines.
    pub fn at_rest(&mut self, log: &WorldLog, upstreams: &Upstreams, gateways: &[Gateway]) -> Result<(), Violation> {
        let in_log: BTreeMap<&Revision, &Event> =
            log.frames().iter().flat_map(|kept| &kept.facts).map(|fact| (&fact.revision, &fact.event)).collect();
        for gateway in gateways.iter().filter(|gateway| !gateway.superseded) {
            let mut facts = gateway.spool.facts().iter().map(|held| &held.fact.revision);
            let lost = facts.find(|revision| !in_log.contains_key(revision));
            hold(Rule::NothingIsLost, lost.is_none(), || format!("{lost:?} is not in the log"))?;
        }
        for ownership in in_log.values().filter_map(|event| whole(event)) {
            let made = ownership.response.parse().ok().and_then(|call: usize| upstreams.calls.get(call));
            let true_owner = made.is_some_and(|made| is_whole(made) && made.deployment == ownership.deployment);
            hold(Rule::Owners, true_owner, || format!("{ownership:?} is of {made:?}"))?;
        }
        let naive = &self.naive[0];
        let mut known = BTreeSet::new();
        for call in &upstreams.calls {
            known.insert((call.request.clone(), call.attempt));
            let row = naive.table().attempts.get(&(call.request.clone(), call.attempt)).copied();
            let is_its =
                |event: &&&Event| matches!(event, Event::Selection(selection) if selection.request == call.request);
            if in_log.get(&call.selection).filter(is_its).is_none() {
                let gateway = &gateways[call.life.gateway];
                let let_go = gateway.spool.has_released((call.selection.epoch, call.selection.number));
                let excused =
                    gateway.superseded || naive.is_declared(&call.selection) || let_go && naive.misses(&call.selection);
                hold(Rule::RowsAreCalls, excused, || format!("the selection of {call:?} is nowhere"))?;
                continue;
            }
            check_row(call, row, &gateways[call.life.gateway].life(), naive)?;
        }
        let stray = naive.table().attempts.keys().find(|key| !known.contains(*key));
        hold(Rule::RowsAreCalls, stray.is_none(), || format!("no call belongs to the row {stray:?}"))
    }
}

fn is_whole(call: &Call) -> bool {
    matches!(call.ended, Some((_, Answer::Success)))
}

/// What an event says of a response that came to its end.
fn whole(event: &Event) -> Option<&Ownership> {
    match event {
        Event::Ownership(ownership) if ownership.state == Ownedness::Final => Some(ownership),
        _ => None,
    }
}

fn announces(event: &Event, call: &Call) -> bool {
    let Event::Selection(selection) = event else { return false };
    let excluded = selection.choice.as_ref().is_some_and(|choice| {
        let mut candidates = choice.candidates.iter();
        !candidates.any(|candidate| candidate.deployment == call.deployment && candidate.excluded.is_none())
    });
    (&selection.request, selection.attempt, &selection.deployment) == (&call.request, call.attempt, &call.deployment)
        && !excluded
}

/// A call's row tells how it ended where that was recorded; else the call is abandoned, once its life is over.
fn check_row(call: &Call, row: Option<Class>, life: &Life, naive: &Naive) -> Result<(), Violation> {
    let ended = call.ended.map(|(_, answer)| class_of(answer));
    let recorded = naive.has_end(&call.request, call.attempt);
    let right = match row {
        Some(Class::Abandoned) => !recorded,
        Some(class) => recorded && ended == Some(class),
        None => !recorded && call.life == *life,
    };
    hold(Rule::RowsAreCalls, right, || format!("{call:?} has the row {row:?}"))
}

/// A fact in the log is the one that was made, and counts from when it was made: at most its way to the log later.
fn made(fact: &Fact, book: &Book) -> Result<(), Violation> {
    let alike: Vec<i64> = book
        .made
        .get(&fact.revision)
        .into_iter()
        .flatten()
        .filter(|made| made.event == fact.event)
        .map(|made| fact.at.0 - made.truly.0)
        .collect();
    hold(Rule::FactsAsMade, !alike.is_empty(), || format!("{fact:?} was never made"))?;
    let in_time = |late_ms: &i64| (-LEADER_SKEW_MS_MAX..=TRANSIT_MS_MAX + LEADER_SKEW_MS_MAX).contains(late_ms);
    hold(Rule::AgeIsKept, alike.iter().any(in_time), || format!("{} counts {alike:?} ms late", fact.revision))
}
