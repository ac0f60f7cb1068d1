//! The state as gateways share it ([`waybill_schema::redis`]): what of it they show each other, and how one lays its own
//! facts on top of what it is shown.
//!
//! The shared record comes first, then own facts that are not in it yet, then a claim (docs/adr/0030). An own fact that
//! the log will apply on top of the shared record stands on top here, too; one that it will refuse gives way.

use waybill_schema::event::{Event, Fact};
use waybill_schema::id::{AffinityKey, MemberId, Revision, WriterId};
use waybill_schema::redis::{self, Ailing, Pin, RouteBlock, RouteCool, RouteFail, Snapshot};
use waybill_schema::time::Time;

use crate::policy::Way;

use super::{Block, Cooldown, Health, Record, State};

/// Who looks, and how much of what it has said itself is in what it sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Viewer {
    /// Its name in the log.
    pub writer: WriterId,
    /// Its life.
    pub epoch: u64,
    /// The last number of that life that is in what it sees.
    pub covered: u64,
}

impl Viewer {
    /// Whether it made the fact in this life.
    fn made(&self, revision: &Revision) -> bool {
        revision.writer == self.writer && revision.epoch == self.epoch
    }

    /// Whether it made the fact, and what it sees does not hold it yet.
    fn outruns(&self, revision: &Revision) -> bool {
        self.made(revision) && revision.number > self.covered
    }
}

/// What was read of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Shown {
    /// A record that stands.
    Record(Pin),
    /// No record, but the claim of a request on its way.
    Claim(Pin),
    /// Neither.
    Nothing,
    /// The shared state is being filled: records may be missing.
    Unfilled(Option<Pin>),
}

impl State {
    /// The record of `key` as it is shared, expired or not.
    pub fn pin(&self, key: &AffinityKey) -> Option<Pin> {
        self.affinity.get(key).map(|record| record.pin(key))
    }

    /// All members that are not healthy, in order.
    pub fn snapshot(&self) -> Snapshot {
        let ailing = self.members().filter(|(_, health)| !health.is_sound());
        Snapshot { members: ailing.map(|(member, health)| health.ailing(member)).collect() }
    }

    /// Takes in what was read of `key`.
    pub fn see(&mut self, key: &AffinityKey, shown: &Shown, viewer: &Viewer, now: Time) {
        let standing = self.record(key, now);
        let outruns = standing.is_some_and(|record| viewer.outruns(&record.revision));
        match shown {
            Shown::Record(pin) if outruns && self.stands_on(key, pin, viewer) => {}
            Shown::Record(pin) => self.adopt(key, pin),
            Shown::Claim(_) | Shown::Nothing if outruns => {}
            Shown::Claim(pin) => self.adopt(key, pin),
            Shown::Nothing => self.forget(key),
            Shown::Unfilled(Some(claim)) if standing.is_none() => self.adopt(key, claim),
            Shown::Unfilled(_) => {}
        }
    }

    /// Takes in the health of all members, and lays the facts in `own`, which it does not hold yet, on top.
    pub fn see_health<'a>(&mut self, snapshot: &Snapshot, own: impl IntoIterator<Item = &'a Fact>) {
        self.health.clear();
        for ailing in &snapshot.members {
            self.health.entry(ailing.member.clone()).or_default().insert(ailing.incarnation, Health::of(ailing));
        }
        for fact in own {
            if let Event::Attempt(attempt) = &fact.event {
                self.affect_by(attempt, fact.at);
            }
        }
    }

    /// Whether the log will apply this gateway's own record on top of `pin`: it renews it, or was based on it.
    fn stands_on(&self, key: &AffinityKey, pin: &Pin, viewer: &Viewer) -> bool {
        let renews = self
            .affinity
            .get(key)
            .is_some_and(|record| record.deployment == pin.route_id && record.incarnation == pin.incarnation);
        renews || viewer.made(&pin.revision) || self.bases.get(key) == Some(&pin.revision)
    }

    fn adopt(&mut self, key: &AffinityKey, pin: &Pin) {
        self.store(key.clone(), Record::of(pin));
        self.bases.insert(key.clone(), pin.revision.clone());
    }

    /// The health of a member's newest incarnation on record.
    pub fn newest(&self, member: &MemberId) -> Option<&Health> {
        self.health.get(member)?.values().next_back()
    }
}

impl Record {
    fn of(pin: &Pin) -> Self {
        Self {
            deployment: pin.route_id.clone(),
            member: pin.member.clone(),
            incarnation: pin.incarnation,
            model: pin.model.clone(),
            pool: pin.pool.clone(),
            way: Way { path: pin.path.clone(), chains: pin.chains.clone() },
            revision: pin.revision.clone(),
            provisional: pin.provisional,
            bound_at: pin.bound_at,
            last_ok_at: pin.last_ok_at,
            expires_at: pin.expires_at,
            fail_count: pin.fail_count,
            renewal: 0,
        }
    }

    fn pin(&self, key: &AffinityKey) -> Pin {
        Pin {
            route_id: self.deployment.clone(),
            shadow_group_id: redis::channel_of(&self.deployment),
            public_model: redis::public_model(key),
            bound_at: self.bound_at,
            expires_at: self.expires_at,
            last_ok_at: self.last_ok_at,
            fail_count: self.fail_count,
            member: self.member.clone(),
            incarnation: self.incarnation,
            model: self.model.clone(),
            pool: self.pool.clone(),
            path: self.way.path.clone(),
            chains: self.way.chains.clone(),
            revision: self.revision.clone(),
            provisional: self.provisional,
        }
    }
}

impl Health {
    fn of(ailing: &Ailing) -> Self {
        let block = |block: &redis::Block| (block.model.clone(), Block { until: block.until, reason: block.reason });
        Self {
            incarnation: ailing.incarnation,
            failures: ailing.failures,
            last_failure: ailing.last_failure,
            last_ok_at: ailing.last_ok_at,
            level: ailing.level,
            cooldown: ailing.cooldown.clone(),
            asked: ailing.asked.clone(),
            blocks: ailing.blocks.iter().map(block).collect(),
        }
    }

    /// Whether nothing keeps it from serving, or counts towards that.
    fn is_sound(&self) -> bool {
        let Self { failures, level, cooldown, asked, blocks, .. } = self;
        *failures == 0 && *level == 0 && cooldown.is_none() && asked.is_none() && blocks.is_empty()
    }

    /// `routefail:` of S1.6; nothing where it never failed.
    pub fn route_fail(&self) -> Option<RouteFail> {
        let (last_failure_at, last_error_class) = self.last_failure?;
        Some(RouteFail {
            incarnation: self.incarnation,
            consecutive_retryable_failures: self.failures,
            last_failure_at,
            last_error_class,
            last_ok_at: self.last_ok_at,
        })
    }

    /// `routecool:` of S1.6.
    pub fn route_cool(&self) -> Option<RouteCool> {
        let Cooldown { until, reason, upstream } = self.cooldown.clone()?;
        Some(RouteCool { incarnation: self.incarnation, cooldown_until: until, reason, upstream })
    }

    /// The models it does not serve.
    pub fn route_block(&self) -> Option<RouteBlock> {
        let models = self.blocks();
        (!models.is_empty()).then_some(RouteBlock { incarnation: self.incarnation, models })
    }

    fn ailing(&self, member: &MemberId) -> Ailing {
        Ailing {
            member: member.clone(),
            incarnation: self.incarnation,
            failures: self.failures,
            last_failure: self.last_failure,
            last_ok_at: self.last_ok_at,
            level: self.level,
            cooldown: self.cooldown.clone(),
            asked: self.asked.clone(),
            blocks: self.blocks(),
        }
    }

    fn blocks(&self) -> Vec<redis::Block> {
        let blocks = self.blocks.iter();
        blocks
            .map(|(model, block)| redis::Block { model: model.clone(), until: block.until, reason: block.reason })
            .collect()
    }
}
