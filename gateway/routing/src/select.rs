//! Selection: which deployment a request is sent to.
//!
//! [`look`] gathers what the choice depends on into a [`Choice`] that is recorded; [`decide`] makes the choice from
//! the record alone. So every past decision can be made again, and `explain` shows exactly what was weighed.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use waybill_schema::catalogue::{Place, Pool, Status, Strategy};
use waybill_schema::event::{
    Affinity, AffinityRead, Candidate, Choice, Class, Endpoint, Exclusion, ExclusionCount, Reason, Sticky,
};
use waybill_schema::id::{AffinityKey, DeploymentId, ModelName};
use waybill_schema::time::Time;

use crate::policy::Rule;
use crate::state::State;

/// At most this many candidates are recorded with a choice (DESIGN.md, section 4).
pub const CANDIDATES_MAX: usize = 32;
/// A draw has this many random bits, so that every JSON reader keeps it exactly.
pub const DRAW_BITS: u32 = 53;

/// When and in what state a choice is made, and the dice for it.
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    /// The routing state.
    pub state: &'a State,
    /// The time.
    pub now: Time,
    /// [`DRAW_BITS`] random bits, or those of [`rendezvous`].
    pub draw: u64,
}

/// What is to be chosen.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The deployments there are.
    pub pool: &'a Pool,
    /// The model that was asked for.
    pub model: &'a ModelName,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// The affinity key, if the request has one.
    pub sticky: Option<&'a Sticky>,
    /// Deployments whose attempts in this request are used up.
    pub exhausted: &'a [DeploymentId],
    /// Whether a place's channel has a credential to send with.
    pub has_credential: &'a dyn Fn(&Place) -> bool,
    /// Whether a cooling candidate may be chosen where no other is left.
    pub last_resort: bool,
    /// The catalogue revision in force.
    pub catalogue: u64,
    /// The fallback targets that led to this pool; none leads to the model's own.
    pub path: &'a [ModelName],
    /// How the template shares the pool; absent shares it by the members' tiers and weights.
    pub shares: Option<Shares<'a>>,
}

/// How a pool is shared.
#[derive(Clone, Copy)]
pub struct Shares<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The rank that a strategy other than `priority` gives a deployment, smaller first: its place at the split's
    /// cursor, its requests in flight, or its latency in milliseconds. It is recorded as the candidate's tier.
    pub rank: &'a dyn Fn(&Place) -> i32,
}

impl Shares<'_> {
    fn tier(&self, place: &Place) -> i32 {
        match self.rule.strategy {
            Strategy::Priority => place.member.priority,
            Strategy::TrafficSplit | Strategy::LeastBusy | Strategy::Latency => (self.rank)(place),
        }
    }
}

impl Ask<'_> {
    fn weight(&self, place: &Place) -> u32 {
        self.shares.map_or(place.member.weight, |shares| shares.rule.weight(place))
    }

    fn tier(&self, place: &Place) -> i32 {
        self.shares.map_or(place.member.priority, |shares| shares.tier(place))
    }
}

/// Cuts random bits to a draw.
pub fn draw(random: u64) -> u64 {
    random & ((1 << DRAW_BITS) - 1)
}

/// The draw that all gateways make for an affinity key: where they have no shared state, they agree by it on where a new
/// session goes. [`DRAW_BITS`] of SHA-256 of the key.
pub fn rendezvous(key: &AffinityKey) -> u64 {
    let digest = Sha256::digest(key.as_str());
    draw(u64::from_be_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes")))
}

/// Gathers what the choice depends on, the candidate to be chosen first: so what is cut off changes no decision.
pub fn look(ask: &Ask<'_>, moment: &Moment<'_>) -> Choice {
    let mut candidates: Vec<Candidate> = ask.pool.places.iter().map(|place| candidate(place, ask, moment)).collect();
    let affinity = read_affinity(ask, moment, &candidates);
    let mut excluded: BTreeMap<Exclusion, u32> = BTreeMap::new();
    for code in candidates.iter().filter_map(|candidate| candidate.excluded) {
        *excluded.entry(code).or_default() += 1;
    }
    candidates.sort_by_cached_key(|candidate| importance(candidate, moment.draw));
    let mut choice = Choice {
        candidates,
        excluded: excluded.into_iter().map(|(code, n)| ExclusionCount { code, n }).collect(),
        draw: moment.draw,
        affinity,
        last_resort: ask.last_resort,
        catalogue: ask.catalogue,
    };
    if let Some((index, _)) = decide(&choice) {
        choice.candidates[..=index].rotate_right(1);
    }
    choice.candidates.truncate(CANDIDATES_MAX);
    choice
}

/// Makes the choice: the place in `choice.candidates`, and why; `None` when nothing is legal.
///
/// A legal affinity goes first, whatever the weights (S3.14). Else the best tier that has a legal candidate, and in it
/// a weighted draw (S2.3). What a tier is, a strategy has said already. A function of the record alone.
pub fn decide(choice: &Choice) -> Option<(usize, Reason)> {
    let legal = || choice.candidates.iter().enumerate().filter(|(_, candidate)| candidate.excluded.is_none());
    if let Affinity::Hit(read) = &choice.affinity {
        let held = legal().find(|(_, candidate)| candidate.deployment == read.deployment);
        if let Some((index, _)) = held {
            return Some((index, Reason::Affinity));
        }
    }
    let Some(tier) = legal().map(|(_, candidate)| candidate.priority).min() else {
        return last_resort(choice).map(|index| (index, Reason::LastResort));
    };
    let key = choice.draw.to_be_bytes();
    let in_tier = legal().filter(|(_, candidate)| candidate.priority == tier);
    let scored = in_tier.map(|(index, candidate)| (score(&key, &candidate.deployment, candidate.weight), index));
    scored.max_by(|(a, i), (b, j)| a.total_cmp(b).then(j.cmp(i))).map(|(_, index)| (index, Reason::Draw))
}

/// The soonest moment at which an excluded candidate may serve again; `None` where no exclusion ends by itself.
pub fn soonest(choice: &Choice) -> Option<Time> {
    choice.candidates.iter().filter_map(|candidate| candidate.until).min()
}

/// The weighted rendezvous score of `deployment` for `key`: the highest wins, in proportion to the weights, and a
/// change of members moves only the keys of those that changed (DESIGN.md, section 10).
///
/// `-weight / ln(u)`, `u` from the first 8 bytes of SHA-256(key, 0x1F, deployment id), moved into (0, 1) by taking
/// the upper 52 bits plus a half over 2^52: with one bit more the half would round up to 1, whose score is -inf.
pub fn score(key: &[u8], deployment: &DeploymentId, weight: u32) -> f64 {
    let digest = Sha256::new().chain_update(key).chain_update([0x1f]).chain_update(deployment.as_str()).finalize();
    let bits = u64::from_be_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"));
    let u = ((bits >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    -f64::from(weight) / u.ln()
}

fn candidate(place: &Place, ask: &Ask<'_>, moment: &Moment<'_>) -> Candidate {
    let health = moment.state.health(&place.member.id, place.incarnation);
    let (excluded, until) = match exclusion(place, ask, moment) {
        None => (None, None),
        Some((code, until)) => (Some(code), until),
    };
    Candidate {
        member: place.member.id.clone(),
        deployment: place.deployment.clone(),
        incarnation: place.incarnation,
        priority: ask.tier(place),
        weight: ask.weight(place),
        excluded,
        until,
        failures: health.map_or(0, |health| health.failures),
    }
}

/// Why a place is not a candidate, and until when where that ends by itself. The lasting reasons come first.
fn exclusion(place: &Place, ask: &Ask<'_>, moment: &Moment<'_>) -> Option<(Exclusion, Option<Time>)> {
    let inactive = [ask.pool.group.status, place.member.status, place.channel.status].contains(&Status::Disabled);
    if inactive {
        return Some((Exclusion::Disabled, None));
    }
    if !place.channel.dialects.contains(&ask.endpoint.dialect()) {
        return Some((Exclusion::Endpoint, None));
    }
    if ask.weight(place) == 0 {
        return Some((Exclusion::ZeroWeight, None));
    }
    if !(ask.has_credential)(place) {
        return Some((Exclusion::Credential, None));
    }
    if ask.exhausted.contains(&place.deployment) {
        return Some((Exclusion::Exhausted, None));
    }
    let health = moment.state.health(&place.member.id, place.incarnation)?;
    let (block, cooldown) = (health.blocked(ask.model.as_str(), moment.now), health.cooling(moment.now));
    // What is only overloaded with the model has it, and may be a last resort like whoever cools.
    let code = match block {
        Some(block) if block.reason != Class::Upstream5xx => Exclusion::Blocked,
        Some(_) | None => Exclusion::Cooling,
    };
    let until = block.map(|block| block.until).max(cooldown.map(|cooldown| cooldown.until))?;
    Some((code, Some(until)))
}

fn read_affinity(ask: &Ask<'_>, moment: &Moment<'_>, candidates: &[Candidate]) -> Affinity {
    let Some(sticky) = ask.sticky else { return Affinity::None };
    let Some(record) = moment.state.record(&sticky.key, moment.now) else { return Affinity::Absent };
    let read = AffinityRead {
        deployment: record.deployment.clone(),
        revision: record.revision.clone(),
        provisional: record.provisional,
    };
    // A record holds for the way it was made: one that a chain led to ends with the chain (S3.19).
    let legal = record.way.path == ask.path
        && candidates.iter().any(|candidate| {
            candidate.excluded.is_none()
                && candidate.deployment == record.deployment
                && candidate.incarnation == record.incarnation
        });
    if legal { Affinity::Hit(read) } else { Affinity::Skipped(read) }
}

/// Sorts what matters to the choice first: legal candidates by tier and score, then the excluded by when they may serve
/// again, so that [`soonest`] stays true of those that are cut off.
fn importance(candidate: &Candidate, draw: u64) -> (bool, bool, Option<Time>, i32, u64) {
    let score = score(&draw.to_be_bytes(), &candidate.deployment, candidate.weight);
    let rank = u64::MAX - score.to_bits();
    (candidate.excluded.is_some(), candidate.until.is_none(), candidate.until, candidate.priority, rank)
}

fn last_resort(choice: &Choice) -> Option<usize> {
    let cooling = choice
        .candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| choice.last_resort && candidate.excluded == Some(Exclusion::Cooling));
    cooling.min_by_key(|(_, candidate)| (candidate.until, candidate.priority)).map(|(index, _)| index)
}
