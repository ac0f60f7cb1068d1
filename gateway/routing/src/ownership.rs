//! Who holds a response (S3.9, S3.24): the fold of `ownership` facts, and what a lookup may conclude from what it saw.
//!
//! The first to be seen stands: an owner becomes final once and is never rewritten. Not to find one proves little, since
//! facts take some time from the gateway that made them to the store that is asked: only where every writer has been
//! heard of within seconds is a response unknown. Otherwise nobody can say, and nobody guesses.

use std::collections::{BTreeMap, VecDeque};

use waybill_schema::event::{Endpoint, Ownedness, Ownership};
use waybill_schema::id::{ScopeId, WriterId};
use waybill_schema::redis::{Owned, Owner, Place};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

/// A writer whose last projected fact is older lags behind, in milliseconds: half as long again as the time between two
/// signs of life.
pub const LAG_MS_MAX: u64 = 15_000;
/// A writer that has said nothing for so long, in milliseconds, while others have, is gone for good and waited for no
/// longer.
pub const SILENCE_MS_MAX: u64 = 600_000;

/// What an owner is known by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// The tenant.
    pub scope: ScopeId,
    /// The keyed hash of the response's id, or of a conversation's.
    pub response: String,
}

impl Name {
    /// The name of a response by the id that its upstream gave it.
    pub fn of_response(secret: &DeploymentSecret, scope: &ScopeId, id: &str) -> Self {
        Self { scope: scope.clone(), response: secret.hash(scope, "response", id.as_bytes()) }
    }

    /// The name of a conversation, which is owned as a response is.
    pub fn of_conversation(secret: &DeploymentSecret, scope: &ScopeId, id: &str) -> Self {
        Self { scope: scope.clone(), response: secret.hash(scope, "conversation", id.as_bytes()) }
    }

    /// As a store's key is made from it.
    pub fn owned(&self) -> Owned<'_> {
        Owned { scope: &self.scope, response: &self.response }
    }

    fn of(ownership: &Ownership) -> Self {
        Self { scope: ownership.scope.clone(), response: ownership.response.clone() }
    }
}

/// The owners of the latest responses.
#[derive(Clone, Debug, PartialEq)]
pub struct Owners {
    capacity: usize,
    owners: BTreeMap<Name, Held>,
    /// In the order in which they were first seen.
    order: VecDeque<Name>,
    forgotten: u64,
}

/// An owner and when it was first heard of.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// The owner.
    pub owner: Owner,
    /// When its response was first seen.
    pub seen: Time,
    /// The number of the last fact about it.
    number: u64,
}

/// What a fact of ownership changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Whose owner.
    pub name: Name,
    /// Whose owner had to make room.
    pub evicted: Option<Name>,
}

impl Owners {
    /// No owners yet, and at most `capacity`; the longest known make room.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { capacity, owners: BTreeMap::new(), order: VecDeque::new(), forgotten: 0 }
    }

    /// Folds a fact, the `number`th of its writer, that happened at `at`; `None` where it changes nothing.
    pub fn apply(&mut self, ownership: &Ownership, number: u64, at: Time) -> Option<Changed> {
        let (name, owner) = (Name::of(ownership), Owner::of(ownership));
        if let Some(held) = self.owners.get_mut(&name) {
            let firmer = owner.state == Ownedness::Final && held.owner.state == Ownedness::Provisional;
            if !firmer || held.owner.deployment != owner.deployment {
                return None;
            }
            (held.owner.state, held.number) = (Ownedness::Final, number);
            return Some(Changed { name, evicted: None });
        }
        self.owners.insert(name.clone(), Held { owner, seen: at, number });
        self.order.push_back(name.clone());
        let evicted = if self.owners.len() > self.capacity { self.evict() } else { None };
        Some(Changed { name, evicted })
    }

    /// The owner of a response.
    pub fn get(&self, name: &Name) -> Option<&Held> {
        self.owners.get(name)
    }

    /// All names, in order.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.owners.keys()
    }

    /// The last number among the facts about owners that had to make room; 0 where none had to.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Forgets an owner whose facts were lost.
    pub fn disown(&mut self, name: &Name) {
        if self.owners.remove(name).is_some() {
            self.order.retain(|known| known != name);
        }
    }

    fn evict(&mut self) -> Option<Name> {
        let oldest = self.order.pop_front()?;
        let held = self.owners.remove(&oldest)?;
        self.forgotten = self.forgotten.max(held.number);
        Some(oldest)
    }
}

/// What a store said of a response.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Sighting {
    /// Its owner.
    pub owner: Option<Owner>,
    /// How far every writer is projected, where there is no owner.
    pub writers: Vec<(WriterId, Option<Place>)>,
}

/// What one who looks knows by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Own {
    /// Its name in the log.
    pub writer: WriterId,
    /// Its life.
    pub epoch: u64,
    /// What it has recorded itself of the response.
    pub owner: Option<Owner>,
    /// See [`Owners::forgotten`].
    pub forgotten: u64,
}

/// Why a response cannot be continued, or asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unowned {
    /// There is none of this id, or it is not the caller's: the two look the same.
    #[error("no such response is known here, or this key may not use it")]
    Unknown,
    /// It has not come to its end.
    #[error("the response has not come to an end that can be continued, as far as is known here")]
    Unfinished,
    /// What holds it cannot be reached any more.
    #[error("what holds the response is gone: start over with the whole input")]
    Gone,
    /// Nobody can say who holds it.
    #[error("it cannot be told now who holds the response")]
    Unreadable,
}

impl Unowned {
    /// The stable code of an error body.
    pub fn code(self) -> &'static str {
        match self {
            Self::Unknown | Self::Unfinished => "previous_response_not_found",
            Self::Gone => "previous_response_unavailable",
            Self::Unreadable => "ownership_unavailable",
        }
    }
}

/// Concludes from what a store said, and from what is known here, who holds a response.
///
/// Own facts are known here until they make room; so of oneself the store must hold what had to, and of every other
/// writer what is older than some seconds. It is no earlier than the latest that was heard of anybody, whatever a clock
/// that is behind says; and a writer is gone once others were heard of long after it, not where nobody was.
pub fn judge(sighting: Sighting, own: Own, now: Time) -> Result<Owner, Unowned> {
    if let Some(owner) = firmer(sighting.owner, own.owner) {
        return Ok(owner);
    }
    let heard = sighting.writers.iter().filter_map(|(_, place)| Some(place.as_ref()?.at)).max().unwrap_or(now);
    let now = now.max(heard);
    let known = |(writer, place): &(WriterId, Option<Place>)| match place {
        Some(place) if *writer == own.writer => place.epoch == own.epoch && place.number >= own.forgotten,
        Some(place) => now.ms_since(place.at) <= LAG_MS_MAX || heard.ms_since(place.at) > SILENCE_MS_MAX,
        None => false,
    };
    let sees_itself = sighting.writers.iter().any(|(writer, _)| *writer == own.writer);
    let all_known = sees_itself && sighting.writers.iter().all(known);
    Err(if all_known { Unowned::Unknown } else { Unowned::Unreadable })
}

/// What is shared stands; a later fact that is not in it yet, one's own or a shown one, may make it final.
pub fn firmer(shared: Option<Owner>, later: Option<Owner>) -> Option<Owner> {
    match (shared, later) {
        (Some(shared), Some(own)) if shared.deployment == own.deployment && own.state == Ownedness::Final => Some(own),
        (Some(owner), _) | (None, Some(owner)) => Some(owner),
        (None, None) => None,
    }
}

/// Whether a request for `model` at `endpoint` may go on from a response of `owner` (S3.9).
pub fn continues(owner: &Owner, model: &str, endpoint: Endpoint) -> Result<(), Unowned> {
    if owner.model.as_str() != model || owner.endpoint != endpoint {
        return Err(Unowned::Unknown);
    }
    match owner.state {
        Ownedness::Provisional => Err(Unowned::Unfinished),
        Ownedness::Final => Ok(()),
    }
}
