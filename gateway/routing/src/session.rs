//! Which session a request belongs to (S3.1), and the affinity key that its placement is remembered by (S1.5).
//!
//! A session is recognised once per request, by the strongest signal there is: an id the client names, a conversation,
//! a cache key, the fingerprint of the prompt's beginning, and at last a new id that nobody will ever name again.
//! Ids are chosen by clients and mean nothing outside their authenticated scope; what is made from content is a
//! keyed hash. A client that sends back an id which a reply named, `prompt:v1:…` included, meets that same session.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use waybill_schema::catalogue::StickyMode;
use waybill_schema::config::SessionAliases;
use waybill_schema::event::{Endpoint, KeyType, SessionSource, Sticky};
use waybill_schema::id::{AffinityKey, GroupId, KeyId, ScopeId, SessionId};
use waybill_schema::secret::DeploymentSecret;

use crate::fingerprint::fingerprint;
use crate::request::{Inbound, Text, text};

/// The longest signal, in bytes (S3.2).
pub const SIGNAL_BYTES_MAX: usize = 256;

/// How many buckets there are where nothing better is known (S1.5).
pub const BUCKETS: u64 = 128;

/// Headers in which known clients send their session (CLIENTS.md, "Session signals"), in the order they are believed.
/// `x-client-request-id` is never one: its name says request, whatever Codex and pi put into it.
const KNOWN_HEADERS: [(&str, &str); 4] = [
    ("x-claude-code-session-id", "header:x-claude-code-session-id"),
    ("session-id", "header:session-id"),
    ("session_id", "header:session_id"),
    ("x-session-affinity", "header:x-session-affinity"),
];

/// The header in which Codex of about 0.58 names its conversation.
const KNOWN_CONVERSATION: &str = "conversation_id";

/// The values of a header by its lower-case name, one for each line in which it was sent.
pub type Headers<'a> = dyn Fn(&str) -> Vec<&'a [u8]> + 'a;

/// What a session is recognised by, besides the body.
#[derive(Clone, Copy)]
pub struct Signals<'a> {
    /// The authenticated tenant.
    pub scope: &'a ScopeId,
    /// The key of hashes made from content.
    pub secret: &'a DeploymentSecret,
    /// The request's headers.
    pub headers: &'a Headers<'a>,
    /// Which further signals count as explicit.
    pub aliases: &'a SessionAliases,
    /// The session of the response that is continued, where that could be verified.
    pub parent: Option<&'a SessionId>,
    /// A new UUID, used where no signal is found.
    pub fresh: &'a str,
}

/// The session of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The session.
    pub session: SessionId,
    /// The kind of signal it came from.
    pub source: SessionSource,
    /// The very signal: `header:x-session-id`, `body:prompt_cache_key`, `prompt`, `generated` …
    pub signal: Cow<'static, str>,
    /// The conversation that the client names, beside the session or as the session.
    pub conversation: Option<String>,
}

impl Identity {
    /// A session that nobody will name again: `fresh` is a new UUID.
    pub fn generated(fresh: &str) -> Self {
        let (source, signal) = (SessionSource::Generated, "generated".into());
        Self { session: SessionId::new(fresh), source, signal, conversation: None }
    }
}

/// Why a request's session could not be settled; all are 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Two explicit sources name different sessions.
    #[error("X-Session-Id and session_id name different sessions")]
    Conflict,
    /// A signal is not a well-formed id.
    #[error("{signal} {why}")]
    Invalid {
        /// The header or field, as a client writes it.
        signal: &'static str,
        /// What is wrong with it.
        why: Malformed,
    },
    /// The explicit session is not that of the response that is continued.
    #[error("the session named is not that of the response that is continued")]
    OtherParent,
    /// The request continues a response that was not verified.
    #[error("previous_response_id names a response that cannot be continued here")]
    Parent,
}

impl SessionError {
    /// The stable code of an error body.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Conflict | Self::OtherParent => "session_conflict",
            Self::Invalid { .. } => "invalid_session_id",
            Self::Parent => "previous_response_not_found",
        }
    }

    /// The header or field to blame, for the `param` of an error body.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::Conflict | Self::OtherParent => Some("session_id"),
            Self::Invalid { signal, .. } => Some(signal),
            Self::Parent => Some("previous_response_id"),
        }
    }
}

/// What is wrong with a signal (S3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It is no string, or not text in UTF-8.
    #[error("must be a string")]
    NotText,
    /// It is empty.
    #[error("must not be empty")]
    Empty,
    /// It is longer than [`SIGNAL_BYTES_MAX`].
    #[error("must be at most 256 bytes long")]
    TooLong,
    /// It holds control characters.
    #[error("must not contain control characters")]
    Control,
    /// It begins or ends with a space.
    #[error("must not begin or end with a space")]
    Padded,
}

/// Recognises the session of a request (S3.1, S3.2).
///
/// A Responses `conversation` is a signal of its own: it is the session too where no explicit id or alias is given.
/// A parent is the session whatever else is given, and an explicit id must agree with it; one that was not verified is
/// refused, and never replaced by a guess (S3.3).
pub fn identify(signals: &Signals<'_>, inbound: &Inbound<'_>, endpoint: Endpoint) -> Result<Identity, SessionError> {
    let explicit = explicit(signals, inbound)?;
    if inbound.previous_response_id.is_some() {
        return inherited(signals, explicit.as_ref());
    }
    let conversation = conversation(signals, inbound, endpoint)?;
    let named = explicit.or_else(|| alias(signals, inbound)).or_else(|| conversation.clone());
    let (session, source, signal) = match named {
        Some(Named { id, signal }) => (id, SessionSource::Explicit, signal),
        None => recognised(signals, inbound, endpoint)?,
    };
    let conversation = conversation.map(|named| named.id);
    Ok(Identity { session: SessionId::new(session), source, signal, conversation })
}

/// The session of a verified parent.
fn inherited(signals: &Signals<'_>, explicit: Option<&Named>) -> Result<Identity, SessionError> {
    let session = signals.parent.ok_or(SessionError::Parent)?;
    if explicit.is_some_and(|named| named.id != session.as_str()) {
        return Err(SessionError::OtherParent);
    }
    let (source, signal) = (SessionSource::Parent, "body:previous_response_id".into());
    Ok(Identity { session: session.clone(), source, signal, conversation: None })
}

/// An id that the client names, and where.
#[derive(Clone)]
struct Named {
    id: String,
    signal: Cow<'static, str>,
}

fn explicit(signals: &Signals<'_>, inbound: &Inbound<'_>) -> Result<Option<Named>, SessionError> {
    let mut found: Option<Named> = None;
    let headers = (signals.headers)("x-session-id").into_iter().map(|value| {
        let id = header_id(value).map_err(|why| SessionError::Invalid { signal: "X-Session-Id", why })?;
        Ok((id.to_owned(), "header:x-session-id"))
    });
    let body = inbound.session_id.map(|raw| Ok((body_id("session_id", raw)?.into_owned(), "body:session_id")));
    for named in headers.chain(body) {
        let (id, signal) = named?;
        match &found {
            Some(first) if first.id != id => return Err(SessionError::Conflict),
            Some(_) => {}
            None => found = Some(Named { id, signal: signal.into() }),
        }
    }
    Ok(found)
}

/// The first well-formed alias. They are vendors' private fields: one that we cannot read is none.
fn alias(signals: &Signals<'_>, inbound: &Inbound<'_>) -> Option<Named> {
    match signals.aliases {
        SessionAliases::Off => None,
        SessionAliases::Known => KNOWN_HEADERS
            .iter()
            .find_map(|(name, signal)| alias_header(signals, name, (*signal).into()))
            .or_else(|| metadata_session(inbound)),
        SessionAliases::Headers(names) => {
            names.iter().find_map(|name| alias_header(signals, name, format!("header:{name}").into()))
        }
    }
}

fn alias_header(signals: &Signals<'_>, name: &str, signal: Cow<'static, str>) -> Option<Named> {
    let values = (signals.headers)(name);
    let (first, rest) = values.split_first()?;
    let id = header_id(first).ok().filter(|_| rest.iter().all(|other| other == first))?;
    Some(Named { id: id.to_owned(), signal })
}

/// The session part of Claude Code's `metadata.user_id`.
fn metadata_session(inbound: &Inbound<'_>) -> Option<Named> {
    let user_id = metadata_user_id(inbound)?;
    let session = match claude_user(&user_id) {
        Some(user) => user.session_id.as_ref().map(|id| id.0.clone().into_owned()),
        None => older_claude_user(&user_id).map(|(_, session)| session.to_owned()),
    };
    let id = session.filter(|id| well_formed(id).is_ok())?;
    Some(Named { id, signal: "body:metadata.user_id".into() })
}

fn conversation(
    signals: &Signals<'_>,
    inbound: &Inbound<'_>,
    endpoint: Endpoint,
) -> Result<Option<Named>, SessionError> {
    if let (Endpoint::Responses, Some(raw)) = (endpoint, inbound.conversation) {
        let id = body_id("conversation", conversation_id(raw))?.into_owned();
        return Ok(Some(Named { id, signal: "body:conversation".into() }));
    }
    Ok(match signals.aliases {
        SessionAliases::Known => alias_header(signals, KNOWN_CONVERSATION, "header:conversation_id".into()),
        SessionAliases::Off | SessionAliases::Headers(_) => None,
    })
}

/// The id of the conversation at the upstream that a Responses request is a part of, where it names one.
pub fn conversation_object<'a>(inbound: &Inbound<'a>) -> Option<Cow<'a, str>> {
    text(conversation_id(inbound.conversation?))
}

/// The id within `conversation`, which is the id itself or an object around it.
fn conversation_id(raw: &RawValue) -> &RawValue {
    #[derive(Deserialize)]
    struct Conversation<'a> {
        #[serde(borrow)]
        id: Option<&'a RawValue>,
    }
    match raw.get().starts_with('{').then(|| serde_json::from_str::<Conversation<'_>>(raw.get())) {
        Some(Ok(Conversation { id: Some(id) })) => id,
        Some(Ok(Conversation { id: None }) | Err(_)) | None => raw,
    }
}

/// A session that the client does not name: by cache key, by prompt, or new.
fn recognised(
    signals: &Signals<'_>,
    inbound: &Inbound<'_>,
    endpoint: Endpoint,
) -> Result<(String, SessionSource, Cow<'static, str>), SessionError> {
    let Signals { scope, secret, .. } = signals;
    if let Some(raw) = inbound.prompt_cache_key {
        let hash = secret.hash(scope, "cache_key", body_id("prompt_cache_key", raw)?.as_bytes());
        return Ok((format!("cache:v1:{hash}"), SessionSource::CacheKey, "body:prompt_cache_key".into()));
    }
    Ok(match fingerprint(inbound, endpoint) {
        Some(digest) => {
            let hash = secret.hash(scope, "prompt", &digest);
            (format!("prompt:v1:{hash}"), SessionSource::Prompt, "prompt".into())
        }
        None => (signals.fresh.to_owned(), SessionSource::Generated, "generated".into()),
    })
}

fn header_id(value: &[u8]) -> Result<&str, Malformed> {
    let id = std::str::from_utf8(value).map_err(|_| Malformed::NotText)?;
    well_formed(id).map(|()| id)
}

fn body_id<'a>(signal: &'static str, raw: &'a RawValue) -> Result<Cow<'a, str>, SessionError> {
    let id = text(raw).ok_or(Malformed::NotText).and_then(|id| well_formed(&id).map(|()| id));
    id.map_err(|why| SessionError::Invalid { signal, why })
}

fn well_formed(id: &str) -> Result<(), Malformed> {
    match id {
        "" => Err(Malformed::Empty),
        _ if id.len() > SIGNAL_BYTES_MAX => Err(Malformed::TooLong),
        _ if id.contains(char::is_control) => Err(Malformed::Control),
        _ if id.trim() != id => Err(Malformed::Padded),
        _ => Ok(()),
    }
}

/// Who asks for what, as far as an affinity key needs it.
#[derive(Clone, Copy)]
pub struct Whose<'a> {
    /// The authenticated tenant.
    pub scope: &'a ScopeId,
    /// The key of hashes made from content.
    pub secret: &'a DeploymentSecret,
    /// The caller's key; absent only where callers need none.
    pub key: Option<&'a KeyId>,
    /// The group that serves.
    pub group: &'a GroupId,
    /// The model the client named.
    pub model: &'a str,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// What a generated session sticks by.
    pub mode: StickyMode,
    /// The client's address.
    pub ip: Option<&'a str>,
}

/// The affinity key of a request (S1.5, S3.8): by conversation, else by a session that can be met again, else as the
/// group's mode says. `None` where the request has no affinity.
///
/// A bucket is reached only by a caller without a key whose body names no user; it is chosen by the client's address.
pub fn sticky(identity: &Identity, inbound: &Inbound<'_>, whose: &Whose<'_>) -> Option<Sticky> {
    let (by, id) = match (&identity.conversation, identity.source, whose.mode) {
        (Some(conversation), _, _) => (KeyType::Conv, conversation.clone()),
        (
            None,
            SessionSource::Explicit | SessionSource::Parent | SessionSource::CacheKey | SessionSource::Prompt,
            _,
        ) => (KeyType::Sess, identity.session.as_str().to_owned()),
        (None, SessionSource::Generated, StickyMode::Session) => return None,
        (None, SessionSource::Generated, StickyMode::ConversationPreferred) => user_or_bucket(inbound, whose)?,
    };
    Some(Sticky { key: whose.key_of(by, &id), by })
}

fn user_or_bucket(inbound: &Inbound<'_>, whose: &Whose<'_>) -> Option<(KeyType, String)> {
    if let Some(user) = stable_user(inbound) {
        return Some((KeyType::User, whose.secret.hash(whose.scope, "user", user.as_bytes())));
    }
    if let Some(key) = whose.key {
        return Some((KeyType::User, key.as_str().to_owned()));
    }
    whose.ip.map(|ip| (KeyType::Bucket, bucket(ip).to_string()))
}

impl Whose<'_> {
    /// `{scope}:lg:{group}:m:{model}:{endpoint}:{kind}:{id}`, with `:` and `%` inside a part escaped.
    fn key_of(&self, by: KeyType, id: &str) -> AffinityKey {
        // Counting tokens is a part of talking: it asks the deployment that will be talked to.
        let endpoint = match self.endpoint {
            Endpoint::CountTokens => Endpoint::Messages,
            own => own,
        };
        let endpoint = endpoint.word();
        let kind = match by {
            KeyType::Conv => "conv",
            KeyType::Sess => "sess",
            KeyType::User => "user",
            KeyType::Bucket => "bucket",
        };
        let (scope, group) = (part(self.scope.as_str()), part(self.group.as_str()));
        let (model, id) = (part(self.model), part(id));
        AffinityKey::new([&scope, ":lg:", &group, ":m:", &model, ":", endpoint, ":", kind, ":", &id].concat())
    }
}

/// A part of a key: no two sequences of parts give one key.
fn part(text: &str) -> Cow<'_, str> {
    if text.contains([':', '%']) { text.replace('%', "%25").replace(':', "%3A").into() } else { text.into() }
}

/// The first 64 bits of SHA-256, modulo [`BUCKETS`]: the same on every instance and in every version.
fn bucket(of: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(of).into();
    let (first, _) = digest.split_first_chunk().expect("a digest has 32 bytes");
    u64::from_be_bytes(*first) % BUCKETS
}

/// The user that the body names: `metadata.user_id` without its session part, else `user`, else `safety_identifier`.
fn stable_user(inbound: &Inbound<'_>) -> Option<String> {
    let usable = |user: &String| well_formed(user).is_ok();
    let named = |raw: Option<&RawValue>| raw.and_then(text).map(Cow::into_owned).filter(usable);
    let of_metadata = || metadata_user_id(inbound).and_then(|user_id| user_part(&user_id)).filter(usable);
    of_metadata().or_else(|| named(inbound.user)).or_else(|| named(inbound.safety_identifier))
}

fn user_part(user_id: &str) -> Option<String> {
    match claude_user(user_id) {
        Some(user) => [user.account_uuid, user.device_id]
            .into_iter()
            .flatten()
            .map(|id| id.0.into_owned())
            .find(|id| !id.is_empty()),
        None => Some(older_claude_user(user_id).map_or(user_id, |(user, _)| user).to_owned()),
    }
}

fn metadata_user_id<'a>(inbound: &Inbound<'a>) -> Option<Cow<'a, str>> {
    #[derive(Deserialize)]
    struct Metadata<'a> {
        #[serde(borrow)]
        user_id: Option<Text<'a>>,
    }
    let metadata: Metadata<'a> = serde_json::from_str(inbound.metadata?.get()).ok()?;
    metadata.user_id.map(|user_id| user_id.0)
}

/// `metadata.user_id` as Claude Code has written it since about 2.1: JSON within a string.
#[derive(Deserialize)]
struct ClaudeUser<'a> {
    #[serde(borrow)]
    device_id: Option<Text<'a>>,
    #[serde(borrow)]
    account_uuid: Option<Text<'a>>,
    #[serde(borrow)]
    session_id: Option<Text<'a>>,
}

fn claude_user(user_id: &str) -> Option<ClaudeUser<'_>> {
    user_id.starts_with('{').then(|| serde_json::from_str(user_id).ok()).flatten()
}

/// The user and the session in the older form, `user_…_session_<uuid>`.
fn older_claude_user(user_id: &str) -> Option<(&str, &str)> {
    let (user, session) = user_id.rsplit_once("_session_")?;
    let is_uuid = session.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
    (user.starts_with("user_") && is_uuid).then_some((user, session))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::parse;

    const SCOPE: &str = "team:a";
    const WEATHER: &str = r#"{"model":"m","messages":[{"role":"system","content":"You are a test."},{"role":"user","content":"Weather?"}]}"#;

    /// Aliases as in the configuration file; headers as `name: value` lines.
    struct Case<'a> {
        endpoint: Endpoint,
        aliases: SessionAliases,
        headers: &'a [(&'a str, &'a [u8])],
        /// Whether the parent was verified; its session is `of-parent`.
        parent: bool,
        body: Value,
    }

    impl Case<'_> {
        fn identify(&self) -> Result<Identity, SessionError> {
            let headers =
                |name: &str| self.headers.iter().filter(|(at, _)| *at == name).map(|(_, value)| *value).collect();
            let body = self.body.to_string();
            let inbound = parse(self.endpoint, body.as_bytes()).expect("a good body");
            let parent = SessionId::from("of-parent");
            let signals = Signals {
                parent: self.parent.then_some(&parent),
                scope: &SCOPE.into(),
                secret: &DeploymentSecret::new(b"secret"),
                headers: &headers,
                aliases: &self.aliases,
                fresh: "fresh-1",
            };
            identify(&signals, &inbound, self.endpoint)
        }
    }

    /// What is expected is written `session | source | signal | conversation`, or `code | param | message`.
    fn check(case: Case<'_>, expected: &str) {
        let seen = match case.identify() {
            Ok(Identity { session, source, signal, conversation }) => {
                let source = json!(source);
                let source = source.as_str().expect("a source is written as text");
                format!("{session} | {source} | {signal} | {}", conversation.as_deref().unwrap_or("-"))
            }
            Err(error) => format!("{} | {} | {error}", error.code(), error.param().unwrap_or("-")),
        };
        assert_eq!(seen, expected, "{} {:?}", case.body, case.headers);
    }

    fn chat<'a>(headers: &'a [(&'a str, &'a [u8])], fields: Value) -> Case<'a> {
        let mut body: Value = serde_json::from_str(WEATHER).expect("JSON");
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        Case { endpoint: Endpoint::Chat, aliases: SessionAliases::Off, headers, parent: false, body }
    }

    fn known<'a>(headers: &'a [(&'a str, &'a [u8])], fields: Value) -> Case<'a> {
        Case { aliases: SessionAliases::Known, ..chat(headers, fields) }
    }

    fn responses<'a>(headers: &'a [(&'a str, &'a [u8])], fields: Value) -> Case<'a> {
        Case { endpoint: Endpoint::Responses, ..chat(headers, fields) }
    }

    // HMAC-SHA256 under `secret`, computed by another program.
    const OF_PROMPT: &str = "prompt:v1:1f5b2acb938acae0bad35b358b6d1055 | prompt | prompt | -";
    const OF_CACHE_KEY: &str = "cache:v1:79f9b2f83513af443ccd9a7e13b87a03 | cache_key | body:prompt_cache_key | -";

    /// S3.1
    #[test]
    fn the_strongest_signal_names_the_session() {
        let blank = json!({"messages": [{"role": "user", "content": " "}]});
        check(chat(&[], blank), "fresh-1 | generated | generated | -");
        check(chat(&[], json!({})), OF_PROMPT);
        check(chat(&[], json!({"prompt_cache_key": "k1"})), OF_CACHE_KEY);
        check(chat(&[], json!({"prompt_cache_key": "k1", "session_id": "s"})), "s | explicit | body:session_id | -");
        let header: &[(&str, &[u8])] = &[("x-session-id", b"s")];
        check(chat(header, json!({"prompt_cache_key": "k1"})), "s | explicit | header:x-session-id | -");
    }

    /// S3.2
    #[test]
    fn equal_explicit_sources_merge_and_different_ones_conflict() {
        const CONFLICT: &str = "session_conflict | session_id | X-Session-Id and session_id name different sessions";
        let header: &[(&str, &[u8])] = &[("x-session-id", b"s")];
        check(chat(header, json!({"session_id": "s"})), "s | explicit | header:x-session-id | -");
        check(chat(header, json!({"session_id": null})), "s | explicit | header:x-session-id | -");
        check(chat(header, json!({"session_id": "S"})), CONFLICT);
        let same: &[(&str, &[u8])] = &[("x-session-id", b"s"), ("x-session-id", b"s")];
        check(chat(same, json!({})), "s | explicit | header:x-session-id | -");
        let differing: &[(&str, &[u8])] = &[("x-session-id", b"s"), ("x-session-id", b"t")];
        check(chat(differing, json!({})), CONFLICT);
    }

    /// S3.2
    #[test]
    fn a_malformed_signal_is_refused() {
        let long = "é".repeat(129);
        let cases = [
            (json!(""), "must not be empty"),
            (json!(long), "must be at most 256 bytes long"),
            (json!("a\u{7}"), "must not contain control characters"),
            (json!("a\u{85}b"), "must not contain control characters"),
            (json!(" a"), "must not begin or end with a space"),
            (json!("a\u{a0}"), "must not begin or end with a space"),
            (json!(7), "must be a string"),
            (json!({}), "must be a string"),
            (json!(false), "must be a string"),
        ];
        for (value, why) in &cases {
            for field in ["session_id", "prompt_cache_key"] {
                check(chat(&[], json!({field: value})), &format!("invalid_session_id | {field} | {field} {why}"));
            }
            check(
                responses(&[], json!({"conversation": value})),
                &format!("invalid_session_id | conversation | conversation {why}"),
            );
        }
        let invalid = |value: &[u8], why: &str| {
            let header = [("x-session-id", value)];
            check(chat(&header, json!({})), &format!("invalid_session_id | X-Session-Id | X-Session-Id {why}"));
        };
        invalid(b"", "must not be empty");
        invalid(b"\xff", "must be a string");
        invalid(b"a\tb", "must not contain control characters");
        let longest = "é".repeat(128);
        check(chat(&[], json!({"session_id": longest})), &format!("{longest} | explicit | body:session_id | -"));
        check(chat(&[], json!({"session_id": "a b"})), "a b | explicit | body:session_id | -");
    }

    /// S3.3
    #[test]
    fn a_parent_that_was_not_verified_is_refused_and_never_replaced_by_a_guess() {
        const REFUSED: &str = "previous_response_not_found | previous_response_id | \
            previous_response_id names a response that cannot be continued here";
        let header: &[(&str, &[u8])] = &[("x-session-id", b"s")];
        check(responses(header, json!({"input": "more", "previous_response_id": "resp_1"})), REFUSED);
        check(responses(&[], json!({"input": "more", "previous_response_id": 7, "prompt_cache_key": "k1"})), REFUSED);
        check(responses(&[], json!({"prompt_cache_key": "k1", "previous_response_id": null})), OF_CACHE_KEY);
    }

    /// S3.3
    #[test]
    fn a_verified_parent_hands_its_session_down_and_an_explicit_one_must_agree() {
        const INHERITED: &str = "of-parent | parent | body:previous_response_id | -";
        let continuing = |headers, fields: Value| {
            let mut case = Case { parent: true, ..responses(headers, fields) };
            case.body["previous_response_id"] = json!("resp_1");
            case
        };
        let same: &[(&str, &[u8])] = &[("x-session-id", b"of-parent")];
        let other: &[(&str, &[u8])] = &[("x-session-id", b"s")];
        check(continuing(&[], json!({})), INHERITED);
        check(continuing(&[], json!({"prompt_cache_key": "k1", "conversation": "cv"})), INHERITED);
        check(continuing(same, json!({})), INHERITED);
        const CONFLICT: &str = "session_conflict | session_id | \
            the session named is not that of the response that is continued";
        check(continuing(other, json!({})), CONFLICT);
        check(continuing(&[], json!({"session_id": "s"})), CONFLICT);
        let alias: &[(&str, &[u8])] = &[("session-id", b"b")];
        check(Case { aliases: SessionAliases::Known, ..continuing(alias, json!({})) }, INHERITED);
    }

    /// DESIGN.md section 10, "explicit session signals"
    #[test]
    fn aliases_rank_just_below_the_two_explicit_signals() {
        let both: &[(&str, &[u8])] = &[("session-id", b"b"), ("x-claude-code-session-id", b"a")];
        check(chat(both, json!({})), OF_PROMPT);
        check(known(both, json!({})), "a | explicit | header:x-claude-code-session-id | -");
        check(known(both, json!({"session_id": "s"})), "s | explicit | body:session_id | -");
        check(known(both, json!({"prompt_cache_key": "k1"})), "a | explicit | header:x-claude-code-session-id | -");
        let broken: &[(&str, &[u8])] = &[("session-id", b" "), ("session_id", b"c"), ("x-claude-code-session-id", b"")];
        check(known(broken, json!({})), "c | explicit | header:session_id | -");
        let differing: &[(&str, &[u8])] = &[("session-id", b"a"), ("session-id", b"b"), ("x-session-affinity", b"d")];
        check(known(differing, json!({})), "d | explicit | header:x-session-affinity | -");
        check(known(&[("x-client-request-id", b"a")], json!({})), OF_PROMPT);
        let listed = SessionAliases::Headers(vec!["x-amp-thread-id".into(), "session-id".into()]);
        let headers: &[(&str, &[u8])] = &[("session-id", b"b"), ("x-amp-thread-id", b"T-1")];
        let case = Case { aliases: listed, ..chat(headers, json!({})) };
        check(case, "T-1 | explicit | header:x-amp-thread-id | -");
    }

    const UUID: &str = "0f0e0d0c-0000-4000-8000-000000000001";

    #[test]
    fn claude_codes_user_id_holds_a_session() {
        let with = |user_id: Value| known(&[], json!({"metadata": {"user_id": user_id}}));
        let expected = format!("{UUID} | explicit | body:metadata.user_id | -");
        check(with(json!(json!({"device_id": "d", "account_uuid": "", "session_id": UUID}).to_string())), &expected);
        check(with(json!(format!("user_ab_account_x_session_{UUID}"))), &expected);
        for other in
            [json!("ada"), json!("user_ab_session_7"), json!("{\"session_id\":7}"), json!("{"), json!(7), json!(null)]
        {
            check(with(other), OF_PROMPT);
        }
    }

    #[test]
    fn a_conversation_is_the_session_where_nothing_else_is_explicit() {
        let cv = "cv | explicit | body:conversation | cv";
        check(responses(&[], json!({"conversation": "cv", "prompt_cache_key": "k1"})), cv);
        check(responses(&[], json!({"conversation": {"id": "cv"}})), cv);
        check(responses(&[], json!({"conversation": "cv", "session_id": "s"})), "s | explicit | body:session_id | cv");
        check(chat(&[], json!({"conversation": "cv"})), OF_PROMPT);
        check(
            responses(&[], json!({"conversation": {"id": null}})),
            "invalid_session_id | conversation | conversation must be a string",
        );
        let codex: &[(&str, &[u8])] = &[("conversation_id", b"c"), ("session_id", b"s")];
        check(known(codex, json!({})), "s | explicit | header:session_id | c");
        check(known(&codex[..1], json!({})), "c | explicit | header:conversation_id | c");
        check(chat(codex, json!({})), OF_PROMPT);
    }

    struct Asked<'a> {
        model: &'a str,
        endpoint: Endpoint,
        mode: StickyMode,
        key: Option<&'a str>,
        ip: Option<&'a str>,
    }

    const ASKED: Asked<'static> = Asked {
        model: "m",
        endpoint: Endpoint::Chat,
        mode: StickyMode::Session,
        key: Some("key-1"),
        ip: Some("192.0.2.7"),
    };

    fn key(asked: &Asked<'_>, identity: &Identity, fields: Value) -> Option<String> {
        let mut body = json!({"model": "m"});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let body = body.to_string();
        let inbound = parse(asked.endpoint, body.as_bytes()).expect("a good body");
        let key = asked.key.map(KeyId::from);
        let whose = Whose {
            scope: &SCOPE.into(),
            secret: &DeploymentSecret::new(b"secret"),
            key: key.as_ref(),
            group: &"g%1".into(),
            model: asked.model,
            endpoint: asked.endpoint,
            mode: asked.mode,
            ip: asked.ip,
        };
        sticky(identity, &inbound, &whose).map(|sticky| format!("{:?} {}", sticky.by, sticky.key))
    }

    fn identity(session: &str, source: SessionSource, conversation: Option<&str>) -> Identity {
        let conversation = conversation.map(str::to_owned);
        Identity { session: session.into(), source, signal: "".into(), conversation }
    }

    fn check_key(asked: &Asked<'_>, identity: &Identity, fields: Value, expected: &str) {
        assert_eq!(key(asked, identity, fields).as_deref(), (expected != "-").then_some(expected));
    }

    /// S3.8, S1.5: scope, group, model and endpoint are part of every key.
    #[test]
    fn a_key_is_scope_group_model_endpoint_and_session() {
        let explicit = identity("s:1", SessionSource::Explicit, None);
        check_key(&ASKED, &explicit, json!({}), "Sess team%3Aa:lg:g%251:m:m:chat:sess:s%3A1");
        let other = Asked { model: "openai/gpt:x", endpoint: Endpoint::Responses, ..ASKED };
        check_key(&other, &explicit, json!({}), "Sess team%3Aa:lg:g%251:m:openai/gpt%3Ax:responses:sess:s%3A1");
        let prompt = identity("prompt:v1:ab", SessionSource::Prompt, None);
        check_key(&ASKED, &prompt, json!({}), "Sess team%3Aa:lg:g%251:m:m:chat:sess:prompt%3Av1%3Aab");
        let embeddings = Asked { endpoint: Endpoint::Embeddings, ..ASKED };
        check_key(&embeddings, &explicit, json!({}), "Sess team%3Aa:lg:g%251:m:m:embeddings:sess:s%3A1");
    }

    #[test]
    fn counting_tokens_asks_where_the_conversation_is() {
        let explicit = identity("s", SessionSource::Explicit, None);
        for endpoint in [Endpoint::Messages, Endpoint::CountTokens] {
            let asked = Asked { endpoint, ..ASKED };
            check_key(&asked, &explicit, json!({}), "Sess team%3Aa:lg:g%251:m:m:messages:sess:s");
        }
    }

    /// S1.5
    #[test]
    fn a_conversation_goes_before_the_session() {
        let both = identity("s", SessionSource::Explicit, Some("cv:1"));
        check_key(&ASKED, &both, json!({}), "Conv team%3Aa:lg:g%251:m:m:chat:conv:cv%3A1");
    }

    /// S1.5: hashes and buckets were computed by another program.
    #[test]
    fn a_generated_session_sticks_by_user_or_bucket_or_not_at_all() {
        let new = identity("fresh-1", SessionSource::Generated, None);
        let mode = StickyMode::ConversationPreferred;
        let asked = Asked { mode, ..ASKED };
        check_key(&ASKED, &new, json!({"user": "ada"}), "-");
        let user = |id: &str| format!("User team%3Aa:lg:g%251:m:m:chat:user:{id}");
        let ada = user("3af03fb9714c9c026ab535151961d4e5");
        check_key(&asked, &new, json!({"user": "ada"}), &ada);
        check_key(&asked, &new, json!({"safety_identifier": "ada"}), &ada);
        check_key(&asked, &new, json!({"user": "bob", "metadata": {"user_id": "ada"}}), &ada);
        check_key(&asked, &new, json!({"user": "ada", "metadata": {"user_id": 7}}), &ada);
        let claude = json!({"metadata": {"user_id": r#"{"device_id":"d","account_uuid":"acc-1","session_id":"s"}"#}});
        check_key(&asked, &new, claude, &user("8853c5157f87684c38db2ae06a10e887"));
        let older = json!({"metadata": {"user_id": format!("user_ab_account_x_session_{UUID}")}});
        check_key(&asked, &new, older, &user("8d8d434fc906c049b45da2d07c336dab"));
        check_key(&asked, &new, json!({"user": " "}), &user("key-1"));
        let open = Asked { key: None, ..asked };
        check_key(&open, &new, json!({"user": "ada"}), &ada);
        check_key(&open, &new, json!({}), "Bucket team%3Aa:lg:g%251:m:m:chat:bucket:23");
        check_key(
            &Asked { ip: Some("2001:db8::1"), ..open },
            &new,
            json!({}),
            "Bucket team%3Aa:lg:g%251:m:m:chat:bucket:13",
        );
        check_key(&Asked { ip: None, ..Asked { mode, key: None, ..ASKED } }, &new, json!({}), "-");
    }
}
