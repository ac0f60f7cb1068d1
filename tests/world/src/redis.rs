//! The shared state as a value: one generation's keys with their watermark, replaced in one step; and claims.
//!
//! Nothing here is true by itself: it may be emptied at any moment, and what it holds may be old.

use std::collections::BTreeMap;

use waybill_routing::state::State;
use waybill_schema::event::Epoch;
use waybill_schema::id::{AffinityKey, DeploymentId, Revision, WriterId};
use waybill_schema::time::Time;

use crate::projector::Checkpoint;

/// How long a claim holds, in milliseconds.
pub const CLAIM_MS: i64 = 30_000;

/// What a projector publishes.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The generation that it belongs to.
    pub generation: u64,
    /// The epoch of the projector that published it.
    pub epoch: u64,
    /// The log position that it covers.
    pub checkpoint: Checkpoint,
    /// The routing state there.
    pub state: State,
    /// The last number of each writer in it, and when that fact happened.
    pub watermark: BTreeMap<WriterId, (Epoch, Time)>,
}

/// A gateway's word that a session without a pin goes somewhere.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Where to.
    pub deployment: DeploymentId,
    /// The selection that made it.
    pub revision: Revision,
    until: Time,
}

/// Redis.
#[derive(Clone, Debug, Default)]
pub struct Redis {
    shared: Option<Shared>,
    claims: BTreeMap<AffinityKey, Claim>,
}

impl Redis {
    /// What was published last.
    pub fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref()
    }

    /// Replaces what is shared; refused from an older epoch, and where it would go back.
    pub fn publish(&mut self, shared: Shared) -> bool {
        let ahead = |held: &Shared| {
            held.epoch > shared.epoch
                || (held.generation, held.checkpoint.seq) > (shared.generation, shared.checkpoint.seq)
        };
        let refused = self.shared.as_ref().is_some_and(ahead);
        if !refused {
            self.shared = Some(shared);
        }
        !refused
    }

    /// The claim that stands for `key`.
    pub fn claim(&self, key: &AffinityKey, now: Time) -> Option<&Claim> {
        self.claims.get(key).filter(|claim| claim.until > now)
    }

    /// Claims `key` unless a claim stands.
    pub fn set_claim(&mut self, key: AffinityKey, deployment: DeploymentId, revision: Revision, now: Time) {
        if self.claim(&key, now).is_none() {
            self.claims.insert(key, Claim { deployment, revision, until: now.plus_ms(CLAIM_MS) });
        }
    }

    /// Loses everything.
    pub fn empty(&mut self) {
        *self = Self::default();
    }
}
