//! The vault: outcomes of requests that carry an `Idempotency-Key`, so that the same request gets the same answer.
//!
//! It is the one place where content rests: encrypted under the deployment secret with a key and a place of the caller's
//! scope, for a day, in no digest, no rebuild and no log. A request takes its key before anything is sent. What is known
//! of its end is kept, or frees the key where nothing was done; where a send may have done its work and nobody knows,
//! the key stays taken, and nothing is made again under it.

mod shelf;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, StatusCode};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::sync::mpsc::{self, Receiver, Sender};
use waybill_routing::form::Sum;
use waybill_schema::event::{Endpoint, Outcome};
use waybill_schema::id::ScopeId;
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::gate::{Coming, Filled};
use crate::refusal::Refusal;

pub use shelf::{Shelf, ShelfError};

/// How long an outcome is kept, in milliseconds: a day, as the field has it.
pub const KEPT_MS: i64 = 86_400_000;
/// The largest body that is kept, in bytes; a larger answer is given once.
pub const KEPT_BYTES_MAX: usize = 8 << 20;
/// The longest `Idempotency-Key`, in bytes.
const KEY_BYTES_MAX: usize = 255;
/// Ends that wait to be kept; beyond them a key stays taken, which repeats nothing.
const WAITING_MAX: usize = 256;
/// When to ask again about a request under way, in milliseconds.
const ASK_AGAIN_MS: u64 = 2000;

/// The vault of one gateway.
#[derive(Debug)]
pub struct Vault {
    shelf: Shelf,
    secret: DeploymentSecret,
    ends: Sender<(Place, Option<String>, End)>,
    waiting: Mutex<Receiver<(Place, Option<String>, End)>>,
}

/// Where an outcome lies, and how it is sealed.
#[derive(Clone, Debug)]
struct Place {
    id: String,
    key: [u8; 32],
}

/// What a request asks for under a key, as far as it tells one request from another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked<'a> {
    /// All of its bytes.
    Bytes(&'a [u8]),
    /// A form, and what of it has come: the same whatever its boundary.
    Form(&'a Filled, &'a [u8]),
}

/// A key that a request has taken, until its end is known.
#[derive(Debug)]
pub struct Deposit {
    place: Place,
    body: Mark,
    kept: Option<Kept>,
}

/// What the body of a taken key is known by.
#[derive(Debug)]
enum Mark {
    /// Its keyed hash.
    Known(String),
    /// That of what still comes, for this caller.
    Coming(ScopeId, Coming),
}

/// An answer as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its status.
    pub status: StatusCode,
    /// What it is.
    pub content_type: Option<HeaderValue>,
    /// Its body.
    pub body: Bytes,
}

/// What becomes of a taken key.
#[derive(Debug)]
enum End {
    Keep(Kept),
    Free,
    Unknown,
}

/// What a key holds, beside the body of an answer.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// The keyed hash of the request's body; none of a form that passes, until it has, and for ever where it never did.
    body: Option<String>,
    state: State,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// A request is under way until then at the latest.
    Begun(Time),
    /// Nobody knows what became of it, or it is too large to be kept.
    Unknown,
    /// It was answered.
    Done { status: u16, content_type: Option<String> },
}

/// What is done with a request that carries a key.
#[derive(Debug)]
pub enum Claim {
    /// It is the first: it goes on, and its end is kept.
    Taken(Deposit),
    /// It was answered before.
    Done(Kept),
}

impl Vault {
    /// A vault on `shelf`.
    pub fn new(shelf: Shelf, secret: DeploymentSecret) -> Self {
        let (ends, waiting) = mpsc::channel(WAITING_MAX);
        Self { shelf, secret, ends, waiting: Mutex::new(waiting) }
    }

    /// Keeps what ends, for ever.
    pub async fn run(&self) {
        let mut waiting = self.waiting.lock().await;
        while let Some((place, body, end)) = waiting.recv().await {
            if let Err(error) = self.end(&place, body, end).await {
                tracing::warn!(%error, "an outcome could not be kept; it will not be repeated");
            }
        }
    }

    /// Takes the key of a request of `scope` that asks for this, unless it is taken or has its answer. `until` is when the
    /// request will have ended. A form that passes is read to its end only to be told from the one that was answered.
    pub(crate) async fn claim(
        &self,
        scope: &ScopeId,
        endpoint: Endpoint,
        key: &HeaderValue,
        asked: Asked<'_>,
        until: Time,
    ) -> Result<Claim, Refusal> {
        let key = key.as_bytes();
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(Refusal::InvalidIdempotencyKey);
        }
        let place = self.place(scope, endpoint, key);
        let mark = match asked {
            Asked::Form(form, _) if form.passes() => Mark::Coming(scope.clone(), form.coming()),
            Asked::Form(..) | Asked::Bytes(_) => Mark::Known(self.body(scope, asked).await?),
        };
        let now = Time::wall_clock();
        let begun = place.seal(&Note { body: mark.known().cloned(), state: State::Begun(until) }, &[]);
        let standing = self.shelf.put_if_absent(&place.id, &begun, now).await.map_err(|_| Refusal::VaultAway)?;
        let Some(standing) = standing else { return Ok(Claim::Taken(Deposit { place, body: mark, kept: None })) };
        let (note, kept) = place.open(standing).ok_or(Refusal::OutcomeUnknown)?;
        if mark.known().zip(note.body.as_ref()).is_some_and(|(asked, standing)| asked != standing) {
            return Err(Refusal::IdempotencyKeyReused);
        }
        match note.state {
            State::Done { status, content_type } => {
                let body = match mark {
                    Mark::Known(body) => body,
                    Mark::Coming(..) => self.body(scope, asked).await?,
                };
                if note.body != Some(body) {
                    return Err(Refusal::IdempotencyKeyReused);
                }
                Ok(Claim::Done(Kept {
                    status: StatusCode::from_u16(status).unwrap_or(StatusCode::OK),
                    content_type: content_type.and_then(|text| HeaderValue::from_str(&text).ok()),
                    body: kept,
                }))
            }
            State::Begun(until) if until > now => Err(Refusal::InProgress { wait_ms: ASK_AGAIN_MS }),
            State::Begun(_) | State::Unknown => Err(Refusal::OutcomeUnknown),
        }
    }

    /// Ends what `deposit` has taken, by how its request ended, and whether any of its sends may have done its work. An
    /// answer that came before the end of the form that it answers is not kept: nobody could say what it was given to.
    pub(crate) fn settle(&self, deposit: Deposit, outcome: Outcome, may_be_done: bool) {
        let body = match deposit.body {
            Mark::Known(body) => Some(body),
            Mark::Coming(scope, form) => form.sum().map(|sum| self.of_form(&scope, &sum)),
        };
        let end = match (outcome, deposit.kept) {
            (Outcome::Success, Some(kept)) if body.is_some() => End::Keep(kept),
            (Outcome::Refused | Outcome::Failed | Outcome::Cancelled, _) if !may_be_done => End::Free,
            (Outcome::Success | Outcome::Interrupted | Outcome::Abandoned, _)
            | (Outcome::Refused | Outcome::Failed | Outcome::Cancelled, _) => End::Unknown,
        };
        if self.ends.try_send((deposit.place, body, end)).is_err() {
            tracing::warn!("an outcome could not be kept; it will not be repeated");
        }
    }

    async fn end(&self, place: &Place, mark: Option<String>, end: End) -> Result<(), ShelfError> {
        let now = Time::wall_clock();
        let (state, body) = match end {
            End::Free => return self.shelf.remove(&place.id).await,
            End::Unknown => (State::Unknown, Bytes::new()),
            End::Keep(Kept { status, content_type, body }) => {
                let content_type = content_type.and_then(|value| value.to_str().ok().map(str::to_owned));
                (State::Done { status: status.as_u16(), content_type }, body)
            }
        };
        let sealed = place.seal(&Note { body: mark, state }, &body);
        self.shelf.put(&place.id, &sealed, now).await
    }

    /// The keyed hash by which the whole of what is asked for is known.
    async fn body(&self, scope: &ScopeId, asked: Asked<'_>) -> Result<String, Refusal> {
        match asked {
            Asked::Bytes(bytes) => Ok(self.secret.hash(scope, "idempotency-body", bytes)),
            Asked::Form(form, bytes) => Ok(self.of_form(scope, &form.sum(bytes).await?)),
        }
    }

    fn of_form(&self, scope: &ScopeId, sum: &Sum) -> String {
        self.secret.hash(scope, "idempotency-form", sum)
    }

    fn place(&self, scope: &ScopeId, endpoint: Endpoint, key: &[u8]) -> Place {
        let hash = |purpose, content: &[u8]| self.secret.hash(scope, purpose, content);
        let id = hash("idempotency-key", &[endpoint.path().as_bytes(), b"\x1f", key].concat());
        let mut sealing = [0; 32];
        // Two halves of 128 bits each make a key of 256.
        for (half, purpose) in sealing.chunks_mut(16).zip(["vault-key-1", "vault-key-2"]) {
            hex::decode_to_slice(hash(purpose, id.as_bytes()), half).expect("a hash is 32 hex digits");
        }
        Place { id, key: sealing }
    }
}

impl Mark {
    fn known(&self) -> Option<&String> {
        match self {
            Self::Known(body) => Some(body),
            Self::Coming(..) => None,
        }
    }
}

impl Place {
    /// Encrypts a note and a body, bound to this place: a random nonce, then the text.
    fn seal(&self, note: &Note, body: &[u8]) -> Vec<u8> {
        let note = serde_json::to_vec(note).expect("a note is plain data");
        let length = u32::try_from(note.len()).expect("a note is short").to_be_bytes();
        let mut text = [&length[..], &note, body].concat();
        let nonce: [u8; NONCE_LEN] = uuid::Uuid::new_v4().as_bytes()[..NONCE_LEN].try_into().expect("a UUID is longer");
        let sealed = self.cipher().seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(self.id.as_bytes()),
            &mut text,
        );
        sealed.expect("a text of some megabytes can be sealed");
        [&nonce[..], &text].concat()
    }

    /// Decrypts what was sealed for this place; `None` where it was not, such as under another secret.
    fn open(&self, mut sealed: Vec<u8>) -> Option<(Note, Bytes)> {
        let (nonce, text) = sealed.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let text = self.cipher().open_in_place(nonce, Aad::from(self.id.as_bytes()), text).ok()?;
        let (length, rest) = text.split_at_checked(4)?;
        let length = usize::try_from(u32::from_be_bytes(length.try_into().ok()?)).ok()?;
        let (note, body) = rest.split_at_checked(length)?;
        Some((serde_json::from_slice(note).ok()?, Bytes::copy_from_slice(body)))
    }

    fn cipher(&self) -> LessSafeKey {
        LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &self.key).expect("the key has the cipher's length"))
    }
}

impl Deposit {
    /// Gives the whole of an answer to keep.
    pub(crate) fn keep(&mut self, status: StatusCode, content_type: Option<&HeaderValue>, body: &Bytes) {
        if body.len() <= KEPT_BYTES_MAX {
            self.kept = Some(Kept { status, content_type: content_type.cloned(), body: body.clone() });
        }
    }
}

/// An answer that is gathered while it passes; one that grows too large is not.
#[derive(Debug)]
pub(crate) struct Gathering {
    bytes: Option<BytesMut>,
    content_type: Option<HeaderValue>,
}

impl Gathering {
    pub(crate) fn new(content_type: Option<HeaderValue>) -> Self {
        Self { bytes: Some(BytesMut::new()), content_type }
    }

    pub(crate) fn add(&mut self, data: &[u8]) {
        let room = self.bytes.as_ref().is_some_and(|bytes| bytes.len() + data.len() <= KEPT_BYTES_MAX);
        match &mut self.bytes {
            Some(bytes) if room => bytes.extend_from_slice(data),
            bytes => *bytes = None,
        }
    }

    /// Gives the whole of it to keep, once.
    pub(crate) fn keep_in(&mut self, deposit: Option<&mut Deposit>, status: StatusCode) {
        let whole = self.bytes.take().map(BytesMut::freeze);
        if let (Some(whole), Some(deposit)) = (whole, deposit) {
            deposit.keep(status, self.content_type.as_ref(), &whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn claim(vault: &Vault, scope: &str, body: &str, until: Time) -> String {
        let key = HeaderValue::from_static("k-1");
        match vault.claim(&scope.into(), Endpoint::Speech, &key, Asked::Bytes(body.as_bytes()), until).await {
            Ok(Claim::Taken(_)) => "taken".to_owned(),
            Ok(Claim::Done(kept)) => format!("{} {}", kept.status.as_u16(), String::from_utf8_lossy(&kept.body)),
            Err(refusal) => refusal.code().to_owned(),
        }
    }

    fn vault() -> Vault {
        Vault::new(Shelf::in_memory(), DeploymentSecret::new(b"secret"))
    }

    async fn end(vault: &Vault, scope: &str, body: &str, end: End) {
        let (scope, asked) = (scope.into(), Asked::Bytes(body.as_bytes()));
        let place = vault.place(&scope, Endpoint::Speech, b"k-1");
        let body = vault.body(&scope, asked).await.expect("all of it is here");
        vault.end(&place, Some(body), end).await.expect("the shelf takes it");
    }

    #[tokio::test]
    async fn a_key_is_one_request_of_one_caller() {
        let (vault, later) = (vault(), Time::wall_clock().plus_ms(60_000));
        assert_eq!(claim(&vault, "a", "one", later).await, "taken");
        assert_eq!(claim(&vault, "a", "one", later).await, "idempotency_in_progress");
        assert_eq!(claim(&vault, "a", "two", later).await, "idempotency_key_reused");
        assert_eq!(claim(&vault, "b", "two", later).await, "taken", "another caller's key is another");
        let kept = Kept { status: StatusCode::OK, content_type: None, body: "Hi".into() };
        end(&vault, "a", "one", End::Keep(kept)).await;
        assert_eq!(claim(&vault, "a", "one", later).await, "200 Hi");
        assert_eq!(claim(&vault, "a", "two", later).await, "idempotency_key_reused");
        end(&vault, "b", "two", End::Free).await;
        assert_eq!(claim(&vault, "b", "three", later).await, "taken");
    }

    #[tokio::test]
    async fn what_nobody_knows_is_not_made_again() {
        let vault = vault();
        assert_eq!(claim(&vault, "a", "one", Time(0)).await, "taken");
        assert_eq!(claim(&vault, "a", "one", Time(0)).await, "idempotency_outcome_unknown", "its gateway died");
        end(&vault, "b", "one", End::Unknown).await;
        assert_eq!(claim(&vault, "b", "one", Time(0)).await, "idempotency_outcome_unknown");
    }

    #[test]
    fn what_is_sealed_opens_in_its_place_alone() {
        let vault = vault();
        let place = vault.place(&"a".into(), Endpoint::Speech, b"k-1");
        let other = vault.place(&"b".into(), Endpoint::Speech, b"k-1");
        let note = Note { body: Some("h".to_owned()), state: State::Unknown };
        let sealed = place.seal(&note, b"sphinx");
        assert!(!sealed.windows(6).any(|six| six == b"sphinx"));
        assert_ne!(sealed, place.seal(&note, b"sphinx"), "no two nonces are one");
        assert_eq!(place.open(sealed.clone()).expect("it opens").1, "sphinx");
        assert!(other.open(sealed.clone()).is_none());
        let moved = Place { id: other.id, ..place.clone() };
        assert!(moved.open(sealed.clone()).is_none());
        let mut bent = sealed;
        bent[20] ^= 1;
        assert!(place.open(bent).is_none());
    }
}
