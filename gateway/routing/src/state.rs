//! The routing state as a fold of facts: who is bound where, and who is healthy.
//!
//! [`State::apply`] is the only way it changes. It reads no clock and no configuration: deadlines come from a fact's
//! own time, thresholds from the fact. The same facts in the same order give the same state and the same digest, so a
//! gateway that applies its own facts as it records them stands where a fresh fold of the log would.
//!
//! Batches of the catalogue change nothing here. A gateway follows them some moments after they were stored, so it could
//! not apply them in the log's order among its own facts; the incarnation that every fact about a member carries keeps a
//! member that was deleted and made again apart from the one before (docs/adr/0027).

pub mod shared;

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};
use waybill_schema::event::{Act, Attempt, Class, Effect, Event, Fact, Operator, Preference, Selection, Thresholds};
use waybill_schema::id::{AffinityKey, DeploymentId, GroupId, MemberId, ModelName, Revision};
pub use waybill_schema::redis::Cooldown;
use waybill_schema::time::Time;

use crate::policy::Way;

/// At most this many affinity records in process (S3.21).
pub const AFFINITY_RECORDS_MAX: usize = 8192;
/// How long a provisional claim stands, in milliseconds: one hour (S3.21).
pub const CLAIM_TTL_MS: i64 = 3_600_000;
/// At most this many models are blocked at a member at one time: a route by pattern lets callers make names up.
pub const BLOCKS_MAX: usize = 64;

/// A session's binding to a deployment (S1.6, S3.21).
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The deployment it names.
    pub deployment: DeploymentId,
    /// The member it was reached through.
    pub member: MemberId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model that really serves.
    pub model: ModelName,
    /// The group whose pool it came from.
    pub pool: GroupId,
    /// How the session came there; empty inside the pool.
    pub way: Way,
    /// The fact that last changed it: what a switch must be based on.
    pub revision: Revision,
    /// Whether only a claim stands behind it.
    pub provisional: bool,
    /// When it was bound to this deployment.
    pub bound_at: Time,
    /// The last success on it.
    pub last_ok_at: Option<Time>,
    /// From when it counts as absent.
    pub expires_at: Time,
    /// Failures of its deployment for this key since the last success.
    pub fail_count: u32,
    /// Its place in the order of renewal.
    renewal: u64,
}

/// A model that a member does not serve for now.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Until when.
    pub until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
}

/// The health of one member (S1.6 `routefail:`, `routecool:`; S1.8 blocks).
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Health {
    /// The incarnation it is about.
    pub incarnation: u64,
    /// Consecutive retryable failures.
    pub failures: u32,
    /// The last failure, and its class.
    pub last_failure: Option<(Time, Class)>,
    /// The last success.
    pub last_ok_at: Option<Time>,
    /// Cooldowns since the last success: each is longer than the one before.
    pub level: u32,
    /// The rest it takes; it may lie in the past.
    pub cooldown: Option<Cooldown>,
    /// The longest rest that the upstream itself asked for; a longer one of ours may hide it in `cooldown`.
    pub asked: Option<Cooldown>,
    /// The models it does not serve; their ends may lie in the past.
    pub blocks: BTreeMap<ModelName, Block>,
}

impl Health {
    /// The cooldown that stands at `now`.
    pub fn cooling(&self, now: Time) -> Option<&Cooldown> {
        self.cooldown.as_ref().filter(|cooldown| cooldown.until > now)
    }

    /// The block of `model` that stands at `now`.
    pub fn blocked(&self, model: &str, now: Time) -> Option<&Block> {
        self.blocks.get(model).filter(|block| block.until > now)
    }
}

/// What a fact may have changed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Touched {
    /// The key whose record it may have changed.
    pub key: Option<AffinityKey>,
    /// The key whose record it evicted.
    pub evicted: Option<AffinityKey>,
    /// The member whose health it may have changed.
    pub member: Option<MemberId>,
}

/// The routing state.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    capacity: usize,
    affinity: HashMap<AffinityKey, Record>,
    /// Keys by their place in the order of renewal, the longest not renewed first.
    renewals: BTreeMap<u64, AffinityKey>,
    next_renewal: u64,
    /// What own records stand on, where they were laid on others' (`shared.rs`); empty in a fold.
    bases: HashMap<AffinityKey, Revision>,
    /// By incarnation: one takes nothing from another.
    health: BTreeMap<MemberId, BTreeMap<u64, Health>>,
}

impl Default for State {
    fn default() -> Self {
        Self::with_capacity(AFFINITY_RECORDS_MAX)
    }
}

impl State {
    /// An empty state that keeps at most `capacity` affinity records; the capacity is part of the fold.
    pub fn with_capacity(capacity: usize) -> Self {
        let (affinity, renewals, bases, health) = Default::default();
        Self { capacity, affinity, renewals, next_renewal: 0, bases, health }
    }

    /// The record of `key`, absent where it has expired at `now`.
    pub fn record(&self, key: &AffinityKey, now: Time) -> Option<&Record> {
        self.affinity.get(key).filter(|record| record.expires_at > now)
    }

    /// All records by key, expired ones included.
    pub fn records(&self) -> BTreeMap<&AffinityKey, &Record> {
        self.affinity.iter().collect()
    }

    /// The health of a member's `incarnation`; absent where nothing is on record.
    pub fn health(&self, member: &MemberId, incarnation: u64) -> Option<&Health> {
        self.health.get(member)?.get(&incarnation)
    }

    /// The health of every incarnation of every member on record, of those that are deleted by now, too.
    pub fn members(&self) -> impl Iterator<Item = (&MemberId, &Health)> {
        self.health.iter().flat_map(|(member, incarnations)| incarnations.values().map(move |health| (member, health)))
    }

    /// Folds one fact.
    pub fn apply(&mut self, fact: &Fact) {
        self.fold(fact);
    }

    /// Folds one fact, and says what it touched.
    pub fn apply_telling(&mut self, fact: &Fact) -> Touched {
        let mut touched = touched_by(&fact.event);
        touched.evicted = self.fold(fact);
        touched
    }

    /// Folds one fact, and gives the key whose record had to make room.
    fn fold(&mut self, fact: &Fact) -> Option<AffinityKey> {
        match &fact.event {
            Event::Selection(selection) => return self.claim(selection, &fact.revision, fact.at),
            Event::Preference(preference) => return self.prefer(preference, &fact.revision, fact.at),
            Event::Attempt(attempt) => self.attempt(attempt, fact.at),
            Event::Probe(probe) => {
                let effect = Effected {
                    class: probe.class,
                    effect: probe.effect,
                    thresholds: &probe.thresholds,
                    model: &probe.model,
                    retry_after_ms: None,
                };
                self.affect(&probe.member, probe.incarnation, &effect, fact.at);
            }
            Event::Operator(operator) => self.operate(operator),
            Event::Started(_)
            | Event::Alive(_)
            | Event::Request(_)
            | Event::Catalogue(_)
            | Event::Ownership(_)
            | Event::Models(_)
            | Event::Dropped(_)
            | Event::Vanished(_) => {}
        }
        None
    }

    /// The digest of everything in the state, as 64 hex digits: two folds agree exactly when their digests do.
    pub fn digest(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("capacity {}, next renewal {}\n", self.capacity, self.next_renewal);
        for (key, record) in self.records() {
            writeln!(text, "{key:?} {record:?}").expect("a string takes every write");
        }
        for (member, health) in self.members() {
            writeln!(text, "{member:?} {health:?}").expect("a string takes every write");
        }
        Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// S3.11, S3.22: the first selection of a key without a live record claims it for an hour. A cooling member takes
    /// no new sticky (S1.7), though a last resort may be sent to it.
    fn claim(&mut self, selection: &Selection, revision: &Revision, at: Time) -> Option<AffinityKey> {
        let context = selection.context.as_ref().filter(|_| selection.claim)?;
        let sticky = context.sticky.as_ref()?;
        if self.record(&sticky.key, at).is_some() || self.rests(&selection.member, selection.incarnation, at) {
            return None;
        }
        let record = Record {
            deployment: selection.deployment.clone(),
            member: selection.member.clone(),
            incarnation: selection.incarnation,
            model: selection.upstream_model.clone(),
            pool: context.group.clone(),
            way: Way::default(),
            revision: revision.clone(),
            provisional: true,
            bound_at: at,
            last_ok_at: None,
            expires_at: at.plus_ms(CLAIM_TTL_MS),
            fail_count: 0,
            renewal: 0,
        };
        self.store(sticky.key.clone(), record)
    }

    fn affect_by(&mut self, attempt: &Attempt, at: Time) {
        let effect = Effected {
            class: attempt.class,
            effect: attempt.effect,
            thresholds: &attempt.thresholds,
            model: &attempt.model,
            retry_after_ms: attempt.retry_after_ms,
        };
        self.affect(&attempt.member, attempt.incarnation, &effect, at);
    }

    fn attempt(&mut self, attempt: &Attempt, at: Time) {
        self.affect_by(attempt, at);
        let failed = matches!(attempt.effect, Effect::Count | Effect::Cool | Effect::Block);
        let record = attempt.sticky.as_ref().and_then(|key| self.affinity.get_mut(key));
        let current = |record: &&mut Record| record.deployment == attempt.deployment && record.last_ok_at <= Some(at);
        if let Some(record) = record.filter(|record| failed && current(record)) {
            record.fail_count = record.fail_count.saturating_add(1);
        }
    }

    /// S1.9, S3.13: a success renews the record it followed; a switch applies only if the record is absent, expired,
    /// or still at the revision the switch was based on. A member that is still cooling renews nothing, nor does a
    /// success that is older than the last one: it would shorten the life of the record.
    fn prefer(&mut self, preference: &Preference, revision: &Revision, at: Time) -> Option<AffinityKey> {
        if self.rests(&preference.member, preference.incarnation, at) {
            return None;
        }
        let standing = self.record(&preference.key, at);
        let same = standing.filter(|record| {
            record.deployment == preference.deployment && record.incarnation == preference.incarnation
        });
        let applies = match standing {
            None => true,
            Some(_) if same.is_some_and(|record| record.last_ok_at > Some(at)) => false,
            Some(record) => same.is_some() || preference.base.as_ref() == Some(&record.revision),
        };
        if !applies {
            return None;
        }
        let record = Record {
            deployment: preference.deployment.clone(),
            member: preference.member.clone(),
            incarnation: preference.incarnation,
            model: preference.model.clone(),
            pool: preference.pool.clone(),
            way: Way { path: preference.path.clone(), chains: preference.chains.clone() },
            revision: revision.clone(),
            provisional: false,
            bound_at: same.map_or(at, |record| record.bound_at),
            last_ok_at: Some(at),
            expires_at: at.plus_ms(i64::try_from(preference.ttl_ms).unwrap_or(i64::MAX)),
            fail_count: 0,
            renewal: 0,
        };
        self.store(preference.key.clone(), record)
    }

    fn rests(&self, member: &MemberId, incarnation: u64, at: Time) -> bool {
        self.health(member, incarnation).is_some_and(|health| health.cooling(at).is_some())
    }

    /// Stores a record as the latest renewed, and evicts the longest not renewed beyond the capacity: one, since there
    /// are never more.
    fn store(&mut self, key: AffinityKey, mut record: Record) -> Option<AffinityKey> {
        record.renewal = self.next_renewal;
        self.next_renewal += 1;
        self.renewals.insert(record.renewal, key.clone());
        if let Some(old) = self.affinity.insert(key, record) {
            self.renewals.remove(&old.renewal);
        }
        if self.affinity.len() <= self.capacity {
            return None;
        }
        let (_, oldest) = self.renewals.pop_first()?;
        self.affinity.remove(&oldest);
        self.bases.remove(&oldest);
        Some(oldest)
    }

    fn forget(&mut self, key: &AffinityKey) {
        self.bases.remove(key);
        if let Some(record) = self.affinity.remove(key) {
            self.renewals.remove(&record.renewal);
        }
    }

    fn affect(&mut self, member: &MemberId, incarnation: u64, effected: &Effected<'_>, at: Time) {
        if effected.effect == Effect::None {
            return;
        }
        let incarnations = self.health.entry(member.clone()).or_default();
        let health = incarnations.entry(incarnation).or_insert_with(|| Health { incarnation, ..Health::default() });
        health.affect(effected, at);
    }

    fn operate(&mut self, operator: &Operator) {
        match operator.act {
            Act::Clear => drop(self.health.remove(operator.target.as_str())),
            Act::Unpin => self.forget(&operator.target.as_str().into()),
            Act::Disable | Act::Enable => {}
        }
    }
}

/// The key and the member that a fact is about; an operator's target may be either.
fn touched_by(event: &Event) -> Touched {
    let (key, member) = match event {
        Event::Selection(selection) => {
            let context = selection.context.as_ref().filter(|_| selection.claim);
            (context.and_then(|context| context.sticky.as_ref()).map(|sticky| sticky.key.clone()), None)
        }
        Event::Attempt(attempt) => (attempt.sticky.clone(), Some(attempt.member.clone())),
        Event::Preference(preference) => (Some(preference.key.clone()), None),
        Event::Probe(probe) => (None, Some(probe.member.clone())),
        Event::Operator(operator) => match operator.act {
            Act::Clear => (None, Some(operator.target.as_str().into())),
            Act::Unpin => (Some(operator.target.as_str().into()), None),
            Act::Disable | Act::Enable => (None, None),
        },
        Event::Started(_)
        | Event::Alive(_)
        | Event::Request(_)
        | Event::Catalogue(_)
        | Event::Ownership(_)
        | Event::Models(_)
        | Event::Dropped(_)
        | Event::Vanished(_) => (None, None),
    };
    Touched { key, evicted: None, member }
}

/// What a fact says about a member's health.
struct Effected<'a> {
    class: Class,
    effect: Effect,
    thresholds: &'a Thresholds,
    model: &'a ModelName,
    retry_after_ms: Option<u64>,
}

impl Health {
    /// A failure older than the last success counts for nothing: it tells of a state that has passed.
    fn affect(&mut self, effected: &Effected<'_>, at: Time) {
        if effected.effect != Effect::Recover && self.last_ok_at > Some(at) {
            return;
        }
        match effected.effect {
            Effect::None => {}
            Effect::Recover => self.recover(effected.model, at),
            Effect::Count => self.fail(effected, at),
            Effect::Cool => self.cool(effected, at),
            Effect::Block => self.block(effected, at),
        }
    }

    /// A success resets the counters and ends the cooldown, down to what the upstream itself still asks for. One
    /// that is older than the last failure says nothing about what came after it.
    fn recover(&mut self, model: &ModelName, at: Time) {
        self.last_ok_at = self.last_ok_at.max(Some(at));
        if self.last_failure.is_some_and(|(failed_at, _)| failed_at > at) {
            return;
        }
        self.failures = 0;
        self.level = 0;
        self.blocks.remove(model);
        self.asked = self.asked.take().filter(|asked| asked.until > at);
        self.cooldown = self.asked.clone();
    }

    /// Counts a failure; at the threshold a cooldown starts, longer each time. A failure during a cooldown does not
    /// lengthen the next (PITFALLS C05).
    fn fail(&mut self, effected: &Effected<'_>, at: Time) {
        self.failures = self.failures.saturating_add(1);
        self.note(effected.class, at);
        if self.failures >= effected.thresholds.failures && self.cooling(at).is_none() {
            let until = later(at, effected.thresholds.cooldown_ms_at(self.level));
            self.level = self.level.saturating_add(1);
            rest(&mut self.cooldown, Cooldown { until, reason: effected.class, upstream: false });
        }
    }

    /// Counts, and rests for as long as the upstream asks, within the cap.
    fn cool(&mut self, effected: &Effected<'_>, at: Time) {
        self.fail(effected, at);
        let Some(asked_ms) = effected.retry_after_ms else { return };
        let until = later(at, asked_ms.min(effected.thresholds.cooldown_ms_max));
        let asked = Cooldown { until, reason: effected.class, upstream: true };
        rest(&mut self.asked, asked.clone());
        rest(&mut self.cooldown, asked);
    }

    fn block(&mut self, effected: &Effected<'_>, at: Time) {
        self.note(effected.class, at);
        let block = Block { until: later(at, effected.thresholds.block_ms), reason: effected.class };
        // The later deadline stands, with its reason: a model that is not there does not become a busy one.
        if self.blocks.get(effected.model).is_none_or(|standing| standing.until < block.until) {
            self.blocks.insert(effected.model.clone(), block);
        }
        while self.blocks.len() > BLOCKS_MAX {
            let soonest = self.blocks.iter().min_by_key(|(_, block)| block.until).map(|(model, _)| model.clone());
            self.blocks.remove(&soonest.expect("more blocks than the bound are not none"));
        }
    }

    /// Notes a failure as the last, unless a later one is known already.
    fn note(&mut self, class: Class, at: Time) {
        if self.last_failure.is_none_or(|(failed_at, _)| failed_at <= at) {
            self.last_failure = Some((at, class));
        }
    }
}

/// The later deadline stands.
fn rest(standing: &mut Option<Cooldown>, new: Cooldown) {
    if standing.as_ref().is_none_or(|standing| standing.until < new.until) {
        *standing = Some(new);
    }
}

fn later(at: Time, ms: u64) -> Time {
    at.plus_ms(i64::try_from(ms).unwrap_or(i64::MAX))
}

/// The length of the cooldown after `level` earlier ones.
trait Progressive {
    fn cooldown_ms_at(&self, level: u32) -> u64;
}

impl Progressive for Thresholds {
    fn cooldown_ms_at(&self, level: u32) -> u64 {
        let mut ms = self.cooldown_ms;
        for _ in 0..level {
            ms = ms.saturating_mul(u64::from(self.growth_permille)) / 1000;
            if ms >= self.cooldown_ms_max {
                break;
            }
        }
        ms.min(self.cooldown_ms_max)
    }
}
