//! The vocabulary of the log: what a fact can say.
//!
//! Events are past tense and are never edited: a new shape is a new version with an upcaster ([`crate::upcast`])
//! and a new fixture. Fields are integers, text and lists in a fixed order; there are no floats and no maps.
//! A fact carries what its decision depended on, and the thresholds in force, so that a fold needs no configuration.

use serde::{Deserialize, Serialize};

use crate::catalogue::{Row, RowKey};
use crate::id::{
    AffinityKey, ChannelId, DeploymentId, GroupId, KeyId, MemberId, ModelName, RequestId, Revision, ScopeId, SessionId,
    WriterId,
};
use crate::time::Time;

/// A numbered event: the unit that is recorded, counted and folded.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Who made it, and its number.
    pub revision: Revision,
    /// When it happened, on the log's time scale (DESIGN.md section 5, "Order").
    pub at: Time,
    /// What happened.
    pub event: Event,
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A writer claimed an epoch.
    Started(Started),
    /// A writer is still there.
    Alive(Alive),
    /// A deployment was chosen; recorded before every send.
    Selection(Box<Selection>),
    /// A send ended.
    Attempt(Box<Attempt>),
    /// A request ended.
    Request(Box<Request>),
    /// A success committed an affinity.
    Preference(Box<Preference>),
    /// A response id was seen, or became final.
    Ownership(Box<Ownership>),
    /// The catalogue changed.
    Catalogue(Box<Batch>),
    /// A recovery probe ended.
    Probe(Box<Probe>),
    /// An upstream's model list was seen, or a change of it handled.
    Models(Box<Models>),
    /// A hand intervened.
    Operator(Operator),
    /// A spool had to give up facts.
    Dropped(Dropped),
    /// The auditor declared a writer gone.
    Vanished(Vanished),
}

/// A writer claims an epoch: always its fact number 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Started {
    /// The version of the program.
    pub version: String,
    /// The public name of the deployment secret in use.
    pub secret: String,
    /// The epoch before and the last number it reached; absent for a writer's first epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous: Option<Epoch>,
}

/// An epoch and the last number reached in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// The epoch, from 1.
    pub epoch: u64,
    /// Its last number, from 1.
    pub last: u64,
}

/// A writer is still there; every 10 s.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alive {
    /// The last number the writer had given out before this fact.
    pub last: u64,
}

/// The API that a request speaks; part of every affinity key (S3.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/completions`
    Completions,
    /// `/v1/images/generations`
    ImageGenerations,
    /// `/v1/images/edits`
    ImageEdits,
    /// `/v1/audio/speech`
    Speech,
    /// `/v1/audio/transcriptions`
    Transcriptions,
    /// `/v1/audio/translations`
    Translations,
    /// `/v1/videos`
    Videos,
    /// `/v1/music`
    Music,
    /// `/v1/moderations`
    Moderations,
    /// `/v1/rerank`
    Rerank,
}

impl Endpoint {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::Chat,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Embeddings,
        Self::Completions,
        Self::ImageGenerations,
        Self::ImageEdits,
        Self::Speech,
        Self::Transcriptions,
        Self::Translations,
        Self::Videos,
        Self::Music,
        Self::Moderations,
        Self::Rerank,
    ];

    /// The word for it in the log, in keys and in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Embeddings => "embeddings",
            Self::Completions => "completions",
            Self::ImageGenerations => "image_generations",
            Self::ImageEdits => "image_edits",
            Self::Speech => "speech",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
            Self::Videos => "videos",
            Self::Music => "music",
            Self::Moderations => "moderations",
            Self::Rerank => "rerank",
        }
    }

    /// The path, after the base that ends in `/v1`.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/chat/completions",
            Self::Responses => "/responses",
            Self::Messages => "/messages",
            Self::CountTokens => "/messages/count_tokens",
            Self::Embeddings => "/embeddings",
            Self::Completions => "/completions",
            Self::ImageGenerations => "/images/generations",
            Self::ImageEdits => "/images/edits",
            Self::Speech => "/audio/speech",
            Self::Transcriptions => "/audio/transcriptions",
            Self::Translations => "/audio/translations",
            Self::Videos => "/videos",
            Self::Music => "/music",
            Self::Moderations => "/moderations",
            Self::Rerank => "/rerank",
        }
    }

    /// Whether it is one of Anthropic's.
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }

    /// Whether its request may be a form with files.
    pub fn takes_forms(self) -> bool {
        matches!(
            self,
            Self::ImageGenerations | Self::ImageEdits | Self::Transcriptions | Self::Translations | Self::Videos
        )
    }

    /// Whether its answers pass as they are, read no further than for an error and for usage.
    pub fn is_native(self) -> bool {
        match self {
            Self::Chat
            | Self::Responses
            | Self::Messages
            | Self::CountTokens
            | Self::Embeddings
            | Self::Completions => false,
            Self::ImageGenerations
            | Self::ImageEdits
            | Self::Speech
            | Self::Transcriptions
            | Self::Translations
            | Self::Videos
            | Self::Music
            | Self::Moderations
            | Self::Rerank => true,
        }
    }
}

/// Where the session identity came from (S3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionSource {
    /// Named by the client.
    Explicit,
    /// Inherited from the response that is continued.
    Parent,
    /// The hash of `prompt_cache_key`.
    CacheKey,
    /// The fingerprint of the stable beginning of the prompt.
    Prompt,
    /// A new UUID.
    Generated,
}

/// What kind of signal an affinity key was made from (S1.5), strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyType {
    /// A conversation signal.
    Conv,
    /// Any other session that can be met again.
    Sess,
    /// A stable user.
    User,
    /// One of 128 buckets.
    Bucket,
}

/// An affinity key and what it was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sticky {
    /// The key.
    pub key: AffinityKey,
    /// The signal behind it.
    pub by: KeyType,
}

/// What a request asked for and who asked: recorded once, with the first selection (or the refusal).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// The tenant.
    pub scope: ScopeId,
    /// The caller's key.
    pub key: KeyId,
    /// The group the key or the request chose.
    pub group: GroupId,
    /// The model the client named; empty where a request was refused that names none.
    pub model: ModelName,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// The session.
    pub session: SessionId,
    /// Where the session came from.
    pub source: SessionSource,
    /// The field or header that carried the signal, such as `header:x-session-id`.
    pub signal: String,
    /// The affinity key, absent where the request has no affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sticky: Option<Sticky>,
}

/// Why a deployment is not a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exclusion {
    /// The channel, group or member is not active.
    Disabled,
    /// Its weight is 0.
    ZeroWeight,
    /// Its channel does not speak the endpoint.
    Endpoint,
    /// None of its credentials could be resolved.
    Credential,
    /// It does not serve this model for now.
    Blocked,
    /// It is cooling down.
    Cooling,
    /// Its attempts in this request are used up.
    Exhausted,
}

/// A deployment as one selection saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// The member.
    pub member: MemberId,
    /// The deployment that the member stands for, for this model.
    pub deployment: DeploymentId,
    /// The member's incarnation: the catalogue revision at which it was made.
    pub incarnation: u64,
    /// Its tier, smaller first.
    pub priority: i32,
    /// Its weight in the tier.
    pub weight: u32,
    /// Why it was excluded; absent for a legal candidate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<Exclusion>,
    /// Until when, where the exclusion ends by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
    /// Consecutive retryable failures on record.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures: u32,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Candidates with one exclusion code, counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExclusionCount {
    /// The code.
    pub code: Exclusion,
    /// How many, those beyond the recorded candidates included.
    pub n: u32,
}

/// What the affinity record said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Affinity {
    /// The request has no affinity key.
    None,
    /// There was no live record.
    Absent,
    /// The record was followed.
    Hit(AffinityRead),
    /// The record names a deployment that is not legal now.
    Skipped(AffinityRead),
}

/// The affinity record that a selection read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AffinityRead {
    /// The deployment it names.
    pub deployment: DeploymentId,
    /// Its revision: what a switch must be based on.
    pub revision: Revision,
    /// Whether only a claim stood behind it.
    pub provisional: bool,
}

/// Why the chosen deployment was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The affinity record names it.
    Affinity,
    /// The draw fell on it.
    Draw,
    /// Rendezvous hashing on the affinity key named it, there being no shared state.
    Rendezvous,
    /// The same deployment again after a replayable failure.
    Same,
    /// Another deployment of the pool after a failure.
    Next,
    /// A target of a fallback chain.
    Fallback,
    /// The owner of the response that is continued.
    Owner,
    /// Every candidate is cooling, and the setting says to try the one that is free soonest.
    LastResort,
}

/// What a choice depended on: re-deciding from it gives the recorded choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// At most 32 candidates, legal ones first.
    pub candidates: Vec<Candidate>,
    /// Excluded candidates by code, all of them counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<ExclusionCount>,
    /// The draw: 53 bits, random unless the reason is rendezvous.
    pub draw: u64,
    /// What the affinity record said.
    pub affinity: Affinity,
    /// Whether a cooling candidate may be chosen where no other is left.
    #[serde(default, skip_serializing_if = "is_false")]
    pub last_resort: bool,
    /// The catalogue revision in force.
    pub catalogue: u64,
}

/// A deployment was chosen and is about to be sent to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// The request.
    pub request: RequestId,
    /// The number of this send in the request, from 1.
    pub attempt: u16,
    /// The member.
    pub member: MemberId,
    /// The deployment.
    pub deployment: DeploymentId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model name that the upstream is sent.
    pub upstream_model: ModelName,
    /// Why this one.
    pub reason: Reason,
    /// Whether it takes a provisional affinity for an hour.
    pub claim: bool,
    /// The candidates and the draw; absent where the same deployment is sent to again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
    /// Who asked for what; on the first selection of a request only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
}

/// How a send ended, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A complete answer.
    Success,
    /// A complete answer that the upstream itself cut short (`response.incomplete`, length limits).
    Incomplete,
    /// 429 and its kin.
    RateLimited,
    /// 5xx, an overload, or an error body in a 200.
    Upstream5xx,
    /// A deadline passed: connect, first token, idle or total.
    Timeout,
    /// The host could not be reached, or the connection broke before any answer.
    Unavailable,
    /// The answer was not one: empty, HTML, another protocol.
    Malformed,
    /// The stream or body was cut after it had begun.
    Interrupted,
    /// The credential was refused.
    InvalidKey,
    /// The account has no money or quota left.
    QuotaExhausted,
    /// The model, or the endpoint for it, is not served there.
    ModelUnsupported,
    /// The prompt does not fit the model's window.
    ContextLength,
    /// The provider's content policy refused.
    ContentPolicy,
    /// The caller's own mistake.
    CallerError,
    /// The client left before the end.
    Cancelled,
    /// Nobody recorded an end: the gateway died.
    Abandoned,
}

/// What an attempt does to its member's health: decided once, recorded, folded as it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Nothing.
    None,
    /// Resets counters, ends a cooldown unless an upstream deadline stands, lifts the model's block.
    Recover,
    /// Counts towards the threshold.
    Count,
    /// Cools down at once for `retry_after_ms`, and counts.
    Cool,
    /// The member does not serve this model for `block_ms`.
    Block,
}

/// The thresholds in force when an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Consecutive retryable failures that start a cooldown.
    pub failures: u32,
    /// The first cooldown, in milliseconds.
    pub cooldown_ms: u64,
    /// What each further cooldown is multiplied by, in thousandths.
    pub growth_permille: u32,
    /// No cooldown of ours is longer, nor is an upstream's deadline believed beyond it.
    pub cooldown_ms_max: u64,
    /// How long a model stays blocked on a member.
    pub block_ms: u64,
}

/// A count of tokens and how it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tokens {
    /// The upstream said so.
    Reported(u64),
    /// Worked out here; never priced on a failure.
    Estimated(u64),
    /// Nobody knows; not zero.
    #[default]
    Unknown,
}

impl Tokens {
    /// The number where there is one.
    pub fn known(self) -> Option<u64> {
        match self {
            Self::Reported(n) | Self::Estimated(n) => Some(n),
            Self::Unknown => None,
        }
    }

    /// Whether nobody knows.
    pub fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum TokensText {
    Reported(u64),
    Estimated { estimated: u64 },
}

impl Serialize for Tokens {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Reported(n) => Some(TokensText::Reported(n)),
            Self::Estimated(n) => Some(TokensText::Estimated { estimated: n }),
            Self::Unknown => None,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Option::<TokensText>::deserialize(deserializer)? {
            Some(TokensText::Reported(n)) => Self::Reported(n),
            Some(TokensText::Estimated { estimated }) => Self::Estimated(estimated),
            None => Self::Unknown,
        })
    }
}

/// Tokens of one send, in OpenAI's sense: `cached` and `cache_write` are inside `input`, `reasoning` is inside `output`.
///
/// Anthropic's `input_tokens` excludes both cache parts; the observer of its dialect adds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default, skip_serializing_if = "Tokens::is_unknown")]
    pub input: Tokens,
    /// Tokens of the answer.
    #[serde(default, skip_serializing_if = "Tokens::is_unknown")]
    pub output: Tokens,
    /// Prompt tokens read from the upstream's cache.
    #[serde(default, skip_serializing_if = "Tokens::is_unknown")]
    pub cached: Tokens,
    /// Prompt tokens written to the upstream's cache.
    #[serde(default, skip_serializing_if = "Tokens::is_unknown")]
    pub cache_write: Tokens,
    /// Answer tokens spent on reasoning.
    #[serde(default, skip_serializing_if = "Tokens::is_unknown")]
    pub reasoning: Tokens,
}

/// A send ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attempt {
    /// The request.
    pub request: RequestId,
    /// The number of the send in the request, from 1.
    pub attempt: u16,
    /// The member.
    pub member: MemberId,
    /// The deployment.
    pub deployment: DeploymentId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model the client named: what a block is about.
    pub model: ModelName,
    /// How it ended.
    pub class: Class,
    /// The upstream's HTTP status; absent where there was no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// From the send to the end, in milliseconds.
    pub latency_ms: u64,
    /// From the send to the first meaningful frame, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<u64>,
    /// Tokens.
    pub usage: Usage,
    /// Money in nano-USD; absent where no price or no reported usage is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_nano: Option<u64>,
    /// How long the upstream asked to be left alone, in milliseconds, before any cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The model that the upstream says it served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_model: Option<String>,
    /// What it does to the member's health.
    pub effect: Effect,
    /// The thresholds in force.
    pub thresholds: Thresholds,
    /// The affinity key of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sticky: Option<AffinityKey>,
}

/// How a request ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A complete answer went out.
    Success,
    /// An error answer went out.
    Failed,
    /// Refused here, nothing was sent upstream.
    Refused,
    /// The answer had begun and broke off, and the client was told.
    Interrupted,
    /// The client left before the end.
    Cancelled,
    /// Nobody recorded an end: the gateway died.
    Abandoned,
}

/// A request ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The request.
    pub request: RequestId,
    /// What the client got.
    pub outcome: Outcome,
    /// The class of the last attempt; absent where there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// The stable code of an error of ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// The HTTP status that the client got; absent where it left before one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// How many sends there were.
    pub attempts: u16,
    /// Whether a fallback chain was used.
    pub fallback: bool,
    /// From the first byte read to the last written, in milliseconds.
    pub latency_ms: u64,
    /// Who asked for what; only where no selection recorded it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
}

/// A kind of fallback chain (S3.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainKind {
    /// For any failure.
    General,
    /// For prompts that do not fit.
    Context,
    /// For refused content.
    Content,
}

/// A success committed an affinity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preference {
    /// The request.
    pub request: RequestId,
    /// The affinity key.
    pub key: AffinityKey,
    /// The member that served.
    pub member: MemberId,
    /// The deployment that served.
    pub deployment: DeploymentId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model that really served.
    pub model: ModelName,
    /// The group whose pool it came from.
    pub pool: GroupId,
    /// The fallback targets on the way, in order; empty inside the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<ModelName>,
    /// The chain that each step of the path is one of; empty in facts that were written before they said so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chains: Vec<ChainKind>,
    /// The revision of the record that was read; absent where there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<Revision>,
    /// How long it holds, in milliseconds.
    pub ttl_ms: u64,
}

/// How firmly a response is owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ownedness {
    /// Its id has appeared.
    Provisional,
    /// It ended as `completed` or `incomplete`.
    Final,
}

/// A response id belongs to a deployment and a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ownership {
    /// The keyed hash of the response id.
    pub response: String,
    /// How firmly.
    pub state: Ownedness,
    /// The request that made it.
    pub request: RequestId,
    /// The tenant.
    pub scope: ScopeId,
    /// The model the client named.
    pub model: ModelName,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// The deployment that holds it.
    pub deployment: DeploymentId,
    /// The connection that holds it.
    pub channel: ChannelId,
    /// The connection's incarnation.
    pub incarnation: u64,
    /// The session.
    pub session: SessionId,
    /// Where the session came from.
    pub source: SessionSource,
}

/// A batch of catalogue changes, applied as one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// The catalogue revision that this batch makes, dense from 1.
    pub revision: u64,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// The hash of the configuration file that it brings the catalogue to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The changes, in order.
    pub ops: Vec<Op>,
    /// The ops of earlier batches that it reverses, each by its own op in the same place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undo: Vec<OpRef>,
}

/// One row of the catalogue changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Op {
    /// Which row.
    pub row: RowKey,
    /// The row before; absent where it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Stored>,
    /// The row after; absent where it was deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Stored>,
}

/// A row and the catalogue revision at which it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// The catalogue revision at which the row was made: it tells a row from its namesake that was deleted.
    pub incarnation: u64,
    /// The row.
    pub row: Row,
}

/// Names one op of one batch; a later op is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpRef {
    /// The batch's revision.
    pub batch: u64,
    /// The op's place in it, from 0.
    pub op: u32,
}

/// A recovery probe ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// The member that was probed.
    pub member: MemberId,
    /// The deployment that was probed.
    pub deployment: DeploymentId,
    /// The member's incarnation.
    pub incarnation: u64,
    /// The model that was asked for.
    pub model: ModelName,
    /// How it ended.
    pub class: Class,
    /// The upstream's HTTP status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Milliseconds from send to end.
    pub latency_ms: u64,
    /// What it does to the member's health.
    pub effect: Effect,
    /// The thresholds in force.
    pub thresholds: Thresholds,
}

/// What became of a change in an upstream's model list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelsState {
    /// The list was seen.
    Seen,
    /// A change was confirmed by a second look.
    Confirmed,
    /// A change was ignored.
    Ignored,
    /// A change was applied to the catalogue.
    Applied,
}

/// An upstream's model list, or a change of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// The channel.
    pub channel: ChannelId,
    /// The channel's incarnation.
    pub incarnation: u64,
    /// What became of it.
    pub state: ModelsState,
    /// Models that are new, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<ModelName>,
    /// Models that are gone, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<ModelName>,
    /// Who decided; absent for what was only seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
}

/// What a hand did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// Cleared a member's counters, cooldown and blocks.
    Clear,
    /// Took a channel out.
    Disable,
    /// Put a channel back.
    Enable,
    /// Removed an affinity record.
    Unpin,
}

/// A hand intervened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operator {
    /// What it did.
    pub act: Act,
    /// The member, channel or affinity key it was done to.
    pub target: String,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
}

/// A spool had to give up facts of the epoch in which this fact is made: an honest hole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropped {
    /// The first number given up.
    pub first: u64,
    /// The last number given up.
    pub last: u64,
    /// Why, such as `spool write failed`.
    pub reason: String,
}

/// The auditor declares a writer gone with what it still owed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vanished {
    /// The writer.
    pub writer: WriterId,
    /// Its epoch.
    pub epoch: u64,
    /// The last number of it that is in the log.
    pub last: u64,
}
