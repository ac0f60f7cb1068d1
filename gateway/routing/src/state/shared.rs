//! The state as the values that gateways share ([`waybill_schema::redis`]).

use waybill_schema::id::{AffinityKey, MemberId};
use waybill_schema::redis::{self, Ailing, Pin, Rest, RouteBlock, RouteCool, RouteFail, Snapshot};

use super::{Cooldown, Health, Record, State};

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

    /// The health of a member's newest incarnation on record.
    pub fn newest(&self, member: &MemberId) -> Option<&Health> {
        self.health.get(member)?.values().next_back()
    }
}

impl Record {
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
            path: self.path.clone(),
            revision: self.revision.clone(),
            provisional: self.provisional,
        }
    }
}

impl Health {
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
            cooldown: self.cooldown.clone().map(Rest::from),
            asked: self.asked.clone().map(Rest::from),
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

impl From<Cooldown> for Rest {
    fn from(cooldown: Cooldown) -> Self {
        let Cooldown { until, reason, upstream } = cooldown;
        Self { until, reason, upstream }
    }
}
