//! The layout of the shared state in Redis: its keys and values as text.
//!
//! ```text
//! {prefix}active                    3                             the generation that is read
//! {prefix}g3:meta                   epoch, mark, before           a hash: who projects, how far, and the way back
//! {prefix}g3:s:{hash}               {"route_id":…                 an affinity record (S1.6, S3.21)
//! {prefix}g3:routefail:{member}     {"incarnation":1,…            its failures
//! {prefix}g3:routecool:{member}     {"incarnation":1,…            the rest it takes
//! {prefix}g3:routeblock:{member}    {"incarnation":1,…            the models it does not serve
//! {prefix}g3:health                 {version} [{"member":…        all members that are not healthy
//! {prefix}g3:writer:{writer}        {epoch} {number} {time}       how far each writer is projected
//! {prefix}g3:writers                gw-a gw-b …                   the writers that live in epochs
//! {prefix}g3:o:{hash}               {"deployment":…               the owner of a response
//! {prefix}rebuilding                {who}                         a rebuild under way, for some seconds
//! {prefix}claim:{hash}              {"route_id":…                 a claim, for 30 s
//! {prefix}shown:o:{hash}            {"deployment":…               an owner that is final, for ten minutes
//! ```
//! Everything under a generation is a fold of the log, but for owners that are not projected yet. Claims and what is shown
//! stand outside, and so in no digest.
//! Deadlines are values in a record; the life of its key in Redis only tidies up. Integers that a script compares have
//! 20 digits and are compared as text, since Lua's numbers end at 2^53.

use serde::{Deserialize, Serialize};

use crate::FOLD_VERSION;
use crate::event::{ChainKind, Class, Endpoint, Ownedness, Ownership, SessionSource};
use crate::frame::CHAIN_START;
use crate::id::{
    AffinityKey, ChannelId, DeploymentId, GroupId, MemberId, ModelName, Revision, ScopeId, SessionId, WriterId,
};
use crate::secret::sum128;
use crate::time::Time;

/// How long a claim stands, in milliseconds.
pub const CLAIM_MS: u64 = 30_000;
/// How long a record stays in Redis after its deadline, in milliseconds.
pub const TIDY_AFTER_MS: i64 = 600_000;
/// How long an owner stays in Redis after its response was seen, in milliseconds: 30 days, as long as OpenAI keeps a
/// response itself.
pub const OWNER_LIFE_MS: i64 = 30 * 24 * 3_600_000;
/// How long an owner that is final is shown beside what is projected, in milliseconds: as long as a writer that is silent
/// is waited for.
pub const SHOWN_MS: u64 = 600_000;
/// A health version has so many characters.
pub const VERSION_CHARS: usize = 32;

/// The names of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// Keys that all begin with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    /// What names the generation that is read.
    pub fn active(&self) -> String {
        format!("{}active", self.prefix)
    }

    /// What only one rebuild at a time holds.
    pub fn rebuilding(&self) -> String {
        format!("{}rebuilding", self.prefix)
    }

    /// The claim on an affinity key.
    pub fn claim(&self, key: &AffinityKey) -> String {
        format!("{}claim:{}", self.prefix, hash(key))
    }

    /// The owner of a response as its gateway shows it, whatever is projected.
    pub fn shown(&self, owned: &Owned<'_>) -> String {
        format!("{}shown:{}", self.prefix, Generation::owner_within(owned))
    }

    /// What every key of every generation begins with; the generation's number and `:` follow.
    pub fn generations(&self) -> String {
        format!("{}g", self.prefix)
    }

    /// The keys of generation `n`.
    pub fn generation(&self, n: u64) -> Generation {
        Generation { prefix: format!("{}{n}:", self.generations()) }
    }
}

/// The names of one generation's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    prefix: String,
}

impl Generation {
    /// What all of them begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// An affinity record's key behind the prefix, by the [`hash`] of the affinity key.
    pub fn affinity_within(hash: &str) -> String {
        format!("s:{hash}")
    }

    /// The health snapshot's key behind the prefix.
    pub fn health_within() -> &'static str {
        "health"
    }

    /// A writer's key behind the prefix.
    pub fn writer_within(writer: &WriterId) -> String {
        format!("{}{writer}", Self::writers_begin_within())
    }

    /// What every writer's key begins with, behind the prefix.
    pub fn writers_begin_within() -> &'static str {
        "writer:"
    }

    /// The key of the writers' names behind the prefix.
    pub fn writers_within() -> &'static str {
        "writers"
    }

    /// The key of a response's owner behind the prefix.
    pub fn owner_within(owned: &Owned<'_>) -> String {
        let Owned { scope, response } = owned;
        let length = (scope.as_str().len() as u64).to_be_bytes();
        format!("o:{}", sum128(&[&length, scope.as_str().as_bytes(), response.as_bytes()]))
    }

    /// Who projects, how far, and which generation was read before: a hash of `epoch`, `mark` and `before`.
    pub fn meta(&self) -> String {
        self.named("meta")
    }

    /// An affinity record.
    pub fn affinity(&self, key: &AffinityKey) -> String {
        self.named(&Self::affinity_within(&hash(key)))
    }

    /// A member's failures.
    pub fn route_fail(&self, member: &MemberId) -> String {
        self.named(&format!("routefail:{member}"))
    }

    /// A member's rest.
    pub fn route_cool(&self, member: &MemberId) -> String {
        self.named(&format!("routecool:{member}"))
    }

    /// The models that a member does not serve.
    pub fn route_block(&self, member: &MemberId) -> String {
        self.named(&format!("routeblock:{member}"))
    }

    /// The health snapshot.
    pub fn health(&self) -> String {
        self.named(Self::health_within())
    }

    /// How far a writer is projected.
    pub fn writer(&self, writer: &WriterId) -> String {
        self.named(&Self::writer_within(writer))
    }

    /// The names of the writers that live in epochs, with a space between them.
    pub fn writers(&self) -> String {
        self.named(Self::writers_within())
    }

    /// The owner of a response.
    pub fn owner(&self, owned: &Owned<'_>) -> String {
        self.named(&Self::owner_within(owned))
    }

    /// Whether `key` is that of an owner.
    pub fn is_owner(&self, key: &str) -> bool {
        key.strip_prefix(&self.prefix).is_some_and(|within| within.starts_with("o:"))
    }

    fn named(&self, within: &str) -> String {
        format!("{}{within}", self.prefix)
    }
}

/// The short name of an affinity key, which may be long and holds what clients chose.
pub fn hash(key: &AffinityKey) -> String {
    sum128(&[key.as_str().as_bytes()])
}

/// What an owner is looked up by: a request for a response names neither model nor endpoint (S3.9).
#[derive(Clone, Copy, Debug)]
pub struct Owned<'a> {
    /// The tenant.
    pub scope: &'a ScopeId,
    /// The keyed hash of the response id.
    pub response: &'a str,
}

/// A value that is stored as one line of JSON with its fields in a fixed order.
pub trait Value: Serialize + for<'de> Deserialize<'de> {
    /// As text.
    fn encode(&self) -> String {
        serde_json::to_string(self).expect("a value of ours is representable in JSON")
    }

    /// From text; `None` where it is not such a value.
    fn decode(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// An affinity record, under the names of S1.6 where it has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The deployment.
    pub route_id: DeploymentId,
    /// Its channel.
    pub shadow_group_id: ChannelId,
    /// The model that clients ask for.
    pub public_model: ModelName,
    /// When it was bound to this deployment.
    pub bound_at: Time,
    /// From when it counts as absent.
    pub expires_at: Time,
    /// The last success on it.
    pub last_ok_at: Option<Time>,
    /// Failures of its deployment for this key since the last success.
    pub fail_count: u32,
    /// The member it was reached through.
    pub member: MemberId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model that really serves.
    pub model: ModelName,
    /// The group whose pool it came from.
    pub pool: GroupId,
    /// The fallback targets on the way; empty inside the pool.
    pub path: Vec<ModelName>,
    /// The chain that each step of the path is one of; empty where that was not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chains: Vec<ChainKind>,
    /// The fact that last changed it: what a switch must be based on. Number 0 in a claim, which no fact made yet.
    pub revision: Revision,
    /// Whether only a claim stands behind it.
    pub provisional: bool,
}

/// The channel of `deployment`.
pub fn channel_of(deployment: &DeploymentId) -> ChannelId {
    let (channel, _) = deployment.as_str().split_once('/').unwrap_or((deployment.as_str(), ""));
    channel.into()
}

/// The model that clients ask for under an affinity key of ours; empty where the key is none.
pub fn public_model(key: &AffinityKey) -> ModelName {
    let part = key.as_str().split(':').nth(4).unwrap_or_default();
    ModelName::new(part.replace("%3A", ":").replace("%25", "%"))
}

/// `routefail:` (S1.6).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteFail {
    /// The member's incarnation.
    pub incarnation: u64,
    /// Consecutive retryable failures.
    pub consecutive_retryable_failures: u32,
    /// The last failure.
    pub last_failure_at: Time,
    /// Its class.
    pub last_error_class: Class,
    /// The last success.
    pub last_ok_at: Option<Time>,
}

/// `routecool:` (S1.6).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteCool {
    /// The member's incarnation.
    pub incarnation: u64,
    /// Until when.
    pub cooldown_until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
    /// Whether the upstream itself named the deadline: then a success does not end it.
    pub upstream: bool,
}

/// The models that a member does not serve (S1.8).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteBlock {
    /// The member's incarnation.
    pub incarnation: u64,
    /// By name.
    pub models: Vec<Block>,
}

/// A model that a member does not serve for now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Which.
    pub model: ModelName,
    /// Until when.
    pub until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
}

/// A rest that a member takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cooldown {
    /// Until when.
    pub until: Time,
    /// The class of the failure behind it.
    pub reason: Class,
    /// Whether the upstream itself named the deadline: then a success does not end it.
    pub upstream: bool,
}

/// One member that is not healthy, with all that a fold knows of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ailing {
    /// Which.
    pub member: MemberId,
    /// Its incarnation.
    pub incarnation: u64,
    /// Consecutive retryable failures.
    pub failures: u32,
    /// The last failure, and its class.
    pub last_failure: Option<(Time, Class)>,
    /// The last success.
    pub last_ok_at: Option<Time>,
    /// Cooldowns since the last success.
    pub level: u32,
    /// The rest it takes.
    pub cooldown: Option<Cooldown>,
    /// The longest rest that the upstream itself asked for.
    pub asked: Option<Cooldown>,
    /// The models it does not serve.
    pub blocks: Vec<Block>,
}

/// The health snapshot: all members that are not healthy, in order.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Snapshot {
    /// The members.
    pub members: Vec<Ailing>,
}

/// Who holds a response (S3.24). A gateway writes it as soon as it knows, byte for byte as the projector will.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// The deployment that holds it.
    pub deployment: DeploymentId,
    /// The connection that holds it.
    pub channel: ChannelId,
    /// The connection's incarnation.
    pub incarnation: u64,
    /// The model the client named.
    pub model: ModelName,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// The session.
    pub session: SessionId,
    /// Where the session came from.
    pub source: SessionSource,
    /// How firmly.
    pub state: Ownedness,
}

impl Owner {
    /// What `ownership` says.
    pub fn of(ownership: &Ownership) -> Self {
        Self {
            deployment: ownership.deployment.clone(),
            channel: ownership.channel.clone(),
            incarnation: ownership.incarnation,
            model: ownership.model.clone(),
            endpoint: ownership.endpoint,
            session: ownership.session.clone(),
            source: ownership.source,
            state: ownership.state,
        }
    }
}

impl Value for Pin {}
impl Value for RouteFail {}
impl Value for RouteCool {}
impl Value for RouteBlock {}
impl Value for Owner {}

impl Snapshot {
    /// The version, which changes exactly when the members do, and they.
    pub fn encode(&self) -> String {
        let members = serde_json::to_string(self).expect("a value of ours is representable in JSON");
        format!("{} {members}", sum128(&[members.as_bytes()]))
    }

    /// The version and the members; `None` where the text is no snapshot.
    pub fn decode(text: &str) -> Option<(&str, Self)> {
        let (version, members) = text.split_at_checked(VERSION_CHARS)?;
        Some((version, serde_json::from_str(members).ok()?))
    }
}

/// How far a generation covers the log: its last frame, and the fold that made it.
///
/// A log that lost its end may hold the same bytes at the same place again, stored at another time: so that is part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The frame's sequence; 0 before the first.
    pub seq: u64,
    /// The frame's sum.
    pub sum: String,
    /// When the frame was stored, by the log's clock.
    pub stored: Time,
    /// The version of the fold.
    pub fold: u32,
}

impl Mark {
    /// Before the first frame, for today's fold.
    pub fn start() -> Self {
        Self::at(0, CHAIN_START.to_owned(), Time(0))
    }

    /// At frame `seq`, which was `stored` then, for today's fold.
    pub fn at(seq: u64, sum: String, stored: Time) -> Self {
        Self { seq, sum, stored, fold: FOLD_VERSION }
    }

    /// As text that grows with the sequence.
    pub fn encode(&self) -> String {
        format!("{} {} {} {}", digits(self.seq), self.sum, self.stored.0, self.fold)
    }

    /// From text.
    pub fn decode(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (seq, sum) = (words.next()?.parse().ok()?, words.next()?.to_owned());
        let (stored, fold) = (Time(words.next()?.parse().ok()?), words.next()?.parse().ok()?);
        words.next().is_none().then_some(Self { seq, sum, stored, fold })
    }
}

/// How far a writer is projected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Its epoch.
    pub epoch: u64,
    /// Its last number in that epoch.
    pub number: u64,
    /// When that fact happened.
    pub at: Time,
}

impl Place {
    /// As text.
    pub fn encode(&self) -> String {
        format!("{} {} {}", digits(self.epoch), digits(self.number), self.at.0)
    }

    /// From text.
    pub fn decode(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (epoch, number, at) =
            (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        words.next().is_none().then_some(Self { epoch, number, at: Time(at) })
    }
}

/// `n` as 20 digits, whose order as text is their order as numbers.
pub fn digits(n: u64) -> String {
    format!("{n:020}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin() -> Pin {
        Pin {
            route_id: "east/gpt-4.1".into(),
            shadow_group_id: "east".into(),
            public_model: "gpt".into(),
            bound_at: Time(1_796_000_000_000),
            expires_at: Time(1_796_007_200_000),
            last_ok_at: None,
            fail_count: 0,
            member: "main/gpt/east/gpt-4.1".into(),
            incarnation: 3,
            model: "gpt-4.1".into(),
            pool: "main".into(),
            path: Vec::new(),
            chains: Vec::new(),
            revision: Revision { writer: "gw-a".into(), epoch: 2, number: 17 },
            provisional: true,
        }
    }

    #[test]
    fn a_pin_has_the_names_of_the_requirement() {
        let expected = r#"{"route_id":"east/gpt-4.1","shadow_group_id":"east","public_model":"gpt","bound_at":1796000000000,"expires_at":1796007200000,"last_ok_at":null,"fail_count":0,"member":"main/gpt/east/gpt-4.1","incarnation":3,"model":"gpt-4.1","pool":"main","path":[],"revision":"gw-a:2:17","provisional":true}"#;
        assert_eq!(pin().encode(), expected);
        assert_eq!(Pin::decode(expected), Some(pin()));
        assert_eq!(Pin::decode("{}"), None);
        let led = Pin { path: vec!["mini".into()], chains: vec![ChainKind::Context], ..pin() };
        let expected = expected.replace(r#""path":[]"#, r#""path":["mini"],"chains":["context"]"#);
        assert_eq!((led.encode(), Pin::decode(&expected)), (expected, Some(led)));
    }

    #[test]
    fn a_key_names_its_generation() {
        let (keys, key) = (Keys::new("wb:"), AffinityKey::from("acme:lg:main:m:openai/gpt%3Ax:chat:sess:s"));
        let third = keys.generation(3);
        assert_eq!(keys.active(), "wb:active");
        assert_eq!(third.meta(), "wb:g3:meta");
        assert_eq!(third.route_cool(&"main/gpt/east".into()), "wb:g3:routecool:main/gpt/east");
        assert_eq!(third.writer(&"gw-a".into()), "wb:g3:writer:gw-a");
        let hash = hash(&key);
        assert_eq!((hash.len(), third.affinity(&key)), (32, format!("wb:g3:s:{hash}")));
        assert_eq!(keys.claim(&key), format!("wb:claim:{hash}"));
        assert_eq!(public_model(&key).as_str(), "openai/gpt:x");
        assert_eq!(channel_of(&"east/openai/gpt".into()).as_str(), "east");
    }

    #[test]
    fn owners_of_other_scopes_have_other_keys() {
        let generation = Keys::new("").generation(1);
        let of = |scope: &str, response: &str| generation.owner(&Owned { scope: &scope.into(), response });
        assert_eq!(of("a", "bc"), of("a", "bc"));
        assert_ne!(of("a", "bc"), of("ab", "c"));
    }

    #[test]
    fn marks_grow_as_text_and_come_back() {
        let (small, large) = (Mark::at(9, "ab".to_owned(), Time(7)), Mark::at(10, "aa".to_owned(), Time(7)));
        assert!(small.encode() < large.encode());
        assert_eq!(small.encode(), format!("00000000000000000009 ab 7 {FOLD_VERSION}"));
        assert_eq!(Mark::decode(&small.encode()), Some(small));
        assert_eq!(Mark::decode("9 ab 1"), None);
        let place = Place { epoch: 2, number: u64::MAX, at: Time(-5) };
        assert_eq!(Place::decode(&place.encode()), Some(place));
    }

    #[test]
    fn a_snapshot_has_another_version_exactly_when_its_members_change() {
        let rest = |until| Cooldown { until: Time(until), reason: Class::Timeout, upstream: false };
        let of = |until| Snapshot {
            members: vec![Ailing {
                member: "main/gpt/east".into(),
                incarnation: 1,
                failures: 3,
                last_failure: Some((Time(5), Class::Timeout)),
                last_ok_at: None,
                level: 1,
                cooldown: Some(rest(until)),
                asked: None,
                blocks: vec![Block { model: "gpt".into(), until: Time(7), reason: Class::ModelUnsupported }],
            }],
        };
        let (one, other) = (of(9).encode(), of(10).encode());
        let (version, members) = Snapshot::decode(&one).expect("a snapshot comes back");
        assert_eq!((version.len(), members), (VERSION_CHARS, of(9)));
        assert_eq!(of(9).encode(), one);
        assert_ne!(Snapshot::decode(&other).expect("a snapshot comes back").0, version);
        assert_eq!(Snapshot::decode("short"), None);
    }
}
