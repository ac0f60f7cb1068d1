//! Health: who rests, until when and why, as the log has it.

use serde::Serialize;
use waybill_routing::state::{Health, State};
use waybill_schema::event::Class;
use waybill_schema::id::{MemberId, ModelName};
use waybill_schema::time::Time;

/// The health of one member at a moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemberHealth {
    /// The member.
    pub member: MemberId,
    /// The incarnation that it is about.
    pub incarnation: u64,
    /// Consecutive retryable failures.
    pub failures: u32,
    /// Cooldowns since the last success.
    pub level: u32,
    /// The last failure.
    pub last_failure: Option<Failure>,
    /// The last success.
    pub last_ok_at: Option<Time>,
    /// The rest it takes now.
    pub cooldown: Option<Rest>,
    /// The models that it does not serve now.
    pub blocks: Vec<Blocked>,
}

/// A failure on record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// When.
    pub at: Time,
    /// What.
    pub class: Class,
}

/// A cooldown that stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rest {
    /// Until when.
    pub until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
    /// Whether the upstream itself named the deadline.
    pub upstream: bool,
}

/// A block that stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Blocked {
    /// The model.
    pub model: ModelName,
    /// Until when.
    pub until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
}

/// How every member on record stands at `now`, by member.
pub fn health(state: &State, now: Time) -> Vec<MemberHealth> {
    state.members().map(|(member, health)| at(member, health, now)).collect()
}

/// How one member stands at `now`: what has passed is left out.
pub fn at(member: &MemberId, health: &Health, now: Time) -> MemberHealth {
    let cooldown = health.cooling(now);
    let blocks = health.blocks.iter().filter(|(_, block)| block.until > now);
    MemberHealth {
        member: member.clone(),
        incarnation: health.incarnation,
        failures: health.failures,
        level: health.level,
        last_failure: health.last_failure.map(|(at, class)| Failure { at, class }),
        last_ok_at: health.last_ok_at,
        cooldown: cooldown.map(|rest| Rest { until: rest.until, reason: rest.reason, upstream: rest.upstream }),
        blocks: blocks
            .map(|(model, block)| Blocked { model: model.clone(), until: block.until, reason: block.reason })
            .collect(),
    }
}
