//! The shared state as a value: one generation's keys with their watermark, replaced in one step; claims; and owners that
//! gateways show before they are projected.
//!
//! Nothing here is true by itself: it may be emptied at any moment, and what it holds may be old.

use std::collections::BTreeMap;

use waybill_routing::ownership::{Name, Owners, Sighting};
use waybill_routing::state::State;
use waybill_schema::event::Epoch;
use waybill_schema::id::{AffinityKey, DeploymentId, Revision, WriterId};
use waybill_schema::redis::{Owner, Place};
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
    /// Who owns which response.
    pub owners: Owners,
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
    shown: BTreeMap<Name, Owner>,
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

    /// What is to be seen of a response.
    pub fn sight(&self, name: &Name) -> Sighting {
        let projected = self.shared.as_ref().and_then(|shared| shared.owners.get(name)).map(|held| &held.owner);
        let watermark = self.shared.iter().flat_map(|shared| &shared.watermark);
        let place = |(epoch, at): &(Epoch, Time)| Place { epoch: epoch.epoch, number: epoch.last, at: *at };
        Sighting {
            owner: self.shown.get(name).or(projected).cloned(),
            writers: watermark.map(|(writer, reached)| (writer.clone(), Some(place(reached)))).collect(),
        }
    }

    /// Shows who owns a response that has come to its end, before that is projected.
    pub fn show(&mut self, name: Name, owner: Owner) {
        self.shown.entry(name).or_insert(owner);
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
