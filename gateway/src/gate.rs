//! The gate: requests that cost something each time they are made, and bodies that pass without being read whole.
//!
//! A form is read until its model is known; what follows, mostly files, goes from the client to the upstream as it comes.
//! Such a body is gone once it is sent, so a request with one is made once. What may be repeated else is `replay`'s to
//! say. Answers that are no JSON pass as they come ([`Passage`]), their end on record before the client sees it.

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::classify::{self, Transport, Verdict};
use waybill_routing::dispatch::{Committed, Replay};
use waybill_routing::form::{Digest, Form, Sum, Watch};
use waybill_routing::request::BadBody;
use waybill_schema::event::{Class, Effect, Endpoint, Outcome};

use crate::body::{self, Bounds, Stop};
use crate::flight::{Flight, Landing, Learnt};
use crate::proxy::Arrived;
use crate::refusal::Refusal;
use crate::silence::Silence;
use crate::unpacked::Unpacked;
use crate::vault::Gathering;

/// How much of a form is read in search of its model. A form that is no longer is read whole.
pub const FORM_HEAD_BYTES_MAX: usize = 1 << 20;

/// Whether a request may be made again after a failure (S2.11; DESIGN.md section 10).
pub(crate) fn replay(endpoint: Endpoint, asked: Repeats) -> Replay {
    let unless_asked = if asked.by_key { Replay::Free } else { Replay::RefusedOnly };
    match endpoint {
        Endpoint::ImageGenerations | Endpoint::ImageEdits => Replay::Never,
        _ if asked.body_passes => Replay::UnsentOnly,
        Endpoint::Speech
        | Endpoint::Transcriptions
        | Endpoint::Translations
        | Endpoint::Videos
        | Endpoint::Music
        | Endpoint::Moderations
        | Endpoint::Rerank => unless_asked,
        _ if asked.held => Replay::RefusedOnly,
        Endpoint::Responses if asked.responses_once => unless_asked,
        Endpoint::Chat
        | Endpoint::Responses
        | Endpoint::Messages
        | Endpoint::CountTokens
        | Endpoint::Embeddings
        | Endpoint::Completions => Replay::Free,
    }
}

/// What a request and the settings say of repeating it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Repeats {
    /// The client gave an `Idempotency-Key`.
    pub(crate) by_key: bool,
    /// The body passes as it comes, and is gone once it is sent.
    pub(crate) body_passes: bool,
    /// It goes on from what one owner holds, or asks for what is made in the background.
    pub(crate) held: bool,
    /// Responses are sent once (`retry.responses_single_send`).
    pub(crate) responses_once: bool,
}

impl Repeats {
    /// Those of a request, which may be `held`.
    pub(crate) fn of(arrived: &Arrived, held: bool) -> Self {
        Self {
            by_key: arrived.headers.contains_key("idempotency-key"),
            body_passes: arrived.form.as_ref().is_some_and(Filled::passes),
            held,
            responses_once: arrived.serving.config.retry.responses_single_send,
        }
    }
}

/// The `Idempotency-Key` under which a request's outcome is kept: of what is behind the gate, but for images, which are
/// made once whatever they carry.
pub(crate) fn idempotency_key(endpoint: Endpoint, headers: &HeaderMap) -> Option<&HeaderValue> {
    let is_kept = match endpoint {
        Endpoint::Responses
        | Endpoint::Speech
        | Endpoint::Transcriptions
        | Endpoint::Translations
        | Endpoint::Videos
        | Endpoint::Music
        | Endpoint::Moderations
        | Endpoint::Rerank => true,
        Endpoint::ImageGenerations
        | Endpoint::ImageEdits
        | Endpoint::Chat
        | Endpoint::Messages
        | Endpoint::CountTokens
        | Endpoint::Embeddings
        | Endpoint::Completions => false,
    };
    headers.get("idempotency-key").filter(|_| is_kept)
}

/// The form that a request to `endpoint` is, if it is one that may be read in passing.
pub(crate) fn form_of(endpoint: Endpoint, headers: &HeaderMap) -> Option<Form> {
    let packed = headers.contains_key(CONTENT_ENCODING);
    let content_type = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Form::of(content_type).filter(|_| endpoint.takes_forms() && !packed)
}

/// A form whose model is known.
#[derive(Debug)]
pub(crate) struct Filled {
    form: Form,
    model: String,
    model_at: Range<usize>,
    /// The length of the whole, where the client says it.
    length: Option<u64>,
    upload: Arc<Mutex<Upload>>,
    passes: bool,
    /// Whether it is summed while it passes: it carries an `Idempotency-Key`.
    is_keyed: bool,
    bounds: Bounds,
}

/// What of a form comes after its beginning.
#[derive(Debug)]
struct Upload {
    /// What has not been read yet; nothing where the form was read whole, or is on its way.
    rest: Option<Incoming>,
    fate: Fate,
    /// The sum of the form, once all of it has passed.
    sum: Option<Sum>,
}

/// A form that passes, to be known by its sum once it has.
#[derive(Debug)]
pub(crate) struct Coming(Arc<Mutex<Upload>>);

impl Coming {
    /// The sum of the form, where all of it has passed.
    pub(crate) fn sum(&self) -> Option<Sum> {
        lock(&self.0).sum
    }
}

/// What became of a body on its way from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Coming,
    Sent,
    Stopped(Stop),
    Twice,
}

/// The beginning of a form, or all of it.
pub(crate) struct Gathered {
    pub(crate) bytes: Bytes,
    pub(crate) ended: bool,
}

/// Reads `body` until the model of `form` is known, or `whole`.
///
/// Errors when it does not keep to its bounds, breaks off, or names no model in its first [`FORM_HEAD_BYTES_MAX`] bytes.
pub(crate) async fn gather(body: &mut Incoming, form: &Form, bounds: Bounds, whole: bool) -> Result<Gathered, Refusal> {
    let short = body.size_hint().exact().is_some_and(|length| length <= FORM_HEAD_BYTES_MAX as u64);
    let mut bytes = BytesMut::new();
    loop {
        let Some(data) = body::next(body, bounds).await.map_err(|stop| bounds.refusal(stop))? else {
            return Ok(Gathered { bytes: bytes.freeze(), ended: true });
        };
        bytes.extend_from_slice(&data);
        if bytes.len() > bounds.bytes_max {
            return Err(bounds.refusal(Stop::TooLarge));
        }
        if whole || short {
            continue;
        }
        if model_at(form, &bytes).is_some() {
            return Ok(Gathered { bytes: bytes.freeze(), ended: false });
        }
        if bytes.len() > FORM_HEAD_BYTES_MAX {
            return Err(BadBody::ModelNotAhead(FORM_HEAD_BYTES_MAX).into());
        }
    }
}

fn model_at(form: &Form, bytes: &[u8]) -> Option<Range<usize>> {
    form.parts(bytes).find(|part| part.name == "model" && !part.is_file).map(|part| part.content)
}

impl Filled {
    /// The form that `bytes` are, or begin; `is_keyed` where its outcome is kept under a key.
    pub(crate) fn new(
        form: Form,
        bytes: &[u8],
        headers: &HeaderMap,
        is_keyed: bool,
        bounds: Bounds,
    ) -> Result<Self, BadBody> {
        let model_at = model_at(&form, bytes).ok_or(BadBody::Model)?;
        let model = std::str::from_utf8(&bytes[model_at.clone()]).map_err(BadBody::Utf8)?.to_owned();
        if Watch::new(form.clone(), "model").push(&bytes[model_at.end..]) {
            return Err(BadBody::ModelTwice);
        }
        let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let upload = Arc::new(Mutex::new(Upload { rest: None, fate: Fate::Coming, sum: None }));
        Ok(Self { form, model, model_at, length, upload, passes: false, is_keyed, bounds })
    }

    /// The same form, which goes on with `rest`.
    pub(crate) fn with_rest(mut self, rest: Incoming) -> Self {
        lock(&self.upload).rest = Some(rest);
        self.passes = true;
        self
    }

    /// The model it names.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Whether it passes as it comes: once anything of it went out, it cannot be sent again.
    pub(crate) fn passes(&self) -> bool {
        self.passes
    }

    /// Its texts as a JSON object, for guardrails; files are left out.
    pub(crate) fn texts(&self, bytes: &[u8]) -> Vec<u8> {
        let parts = self.form.parts(bytes).filter(|part| !part.is_file);
        let text = |at: Range<usize>| String::from_utf8_lossy(&bytes[at]).into_owned();
        let texts: Vec<_> = parts.map(|part| serde_json::json!([part.name, text(part.content)])).collect();
        serde_json::json!({ "form": texts }).to_string().into_bytes()
    }

    /// The body for an upstream that knows the model as `model`; `bytes` are what the form was made from.
    pub(crate) fn outgoing(&self, bytes: &Bytes, model: &str) -> Outgoing {
        let head = if self.model == model {
            bytes.clone()
        } else {
            let Range { start, end } = self.model_at;
            [&bytes[..start], model.as_bytes(), &bytes[end..]].concat().into()
        };
        if !self.passes {
            return head.into();
        }
        let rest = self.unread();
        let mut watch = Watch::new(self.form.clone(), "model");
        watch.push(&bytes[self.model_at.end..]);
        let digest = self.is_keyed.then(|| self.digest(bytes));
        Outgoing::Passing(Box::new(Passing {
            left: self.length.map(|length| length.saturating_sub(bytes.len() as u64) + head.len() as u64),
            taken: bytes.len(),
            head: Some(head),
            rest: Some(rest.expect("a body of which something went out is not sent again")),
            watch,
            digest,
            upload: self.upload.clone(),
            bounds: self.bounds,
            silence: Silence::of(self.bounds.silence),
            waits_since: None,
        }))
    }

    fn digest(&self, bytes: &[u8]) -> Digest {
        let mut digest = Digest::new(&self.form);
        digest.push(bytes);
        digest
    }

    /// What its sum will be known from, where it passes.
    pub(crate) fn coming(&self) -> Coming {
        Coming(self.upload.clone())
    }

    /// Its sum, for which what has not come yet is read and dropped; `bytes` are what the form was made from.
    pub(crate) async fn sum(&self, bytes: &[u8]) -> Result<Sum, Refusal> {
        let mut digest = self.digest(bytes);
        let Some(mut rest) = self.unread() else { return Ok(digest.finish()) };
        let mut taken = bytes.len();
        let stopped = loop {
            match body::next(&mut rest, self.bounds).await {
                Ok(Some(data)) => {
                    taken += data.len();
                    digest.push(&data);
                }
                Ok(None) => return Ok(digest.finish()),
                Err(stop) => break stop,
            }
            if taken > self.bounds.bytes_max {
                break Stop::TooLarge;
            }
        };
        lock(&self.upload).rest = Some(rest);
        Err(self.bounds.refusal(stopped))
    }

    /// What has neither been read nor sent; whoever asks takes it.
    pub(crate) fn unread(&self) -> Option<Incoming> {
        lock(&self.upload).rest.take()
    }

    /// What the client did that the send could not be made as a whole.
    pub(crate) fn blame(&self) -> Option<Refusal> {
        match lock(&self.upload).fate {
            Fate::Coming | Fate::Sent => None,
            Fate::Stopped(stop) => Some(self.bounds.refusal(stop)),
            Fate::Twice => Some(BadBody::ModelTwice.into()),
        }
    }

    /// Whether the client has not sent all of it yet.
    pub(crate) fn is_coming(&self) -> bool {
        self.passes && lock(&self.upload).fate == Fate::Coming
    }
}

fn lock(upload: &Mutex<Upload>) -> MutexGuard<'_, Upload> {
    upload.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of a request to an upstream.
#[derive(Debug)]
pub enum Outgoing {
    /// All of it.
    Whole(Full<Bytes>),
    /// As it comes from the client.
    Passing(Box<Passing>),
}

/// A body on its way from a client to an upstream.
#[derive(Debug)]
pub struct Passing {
    /// What goes first; while it is here nothing has gone out.
    head: Option<Bytes>,
    rest: Option<Incoming>,
    /// Bytes that are still to be sent, where that is known.
    left: Option<u64>,
    /// Bytes taken from the client.
    taken: usize,
    watch: Watch,
    digest: Option<Digest>,
    upload: Arc<Mutex<Upload>>,
    bounds: Bounds,
    silence: Silence,
    /// Since when nothing has come that was asked for: a client whom nobody reads is not silent.
    waits_since: Option<Instant>,
}

/// The client's body is not sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client's body ends before its end")]
pub struct Stopped;

impl From<Bytes> for Outgoing {
    fn from(bytes: Bytes) -> Self {
        Self::Whole(Full::new(bytes))
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Stopped;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Stopped>>> {
        match self.get_mut() {
            Self::Whole(whole) => Pin::new(whole).poll_frame(cx).map_err(|never| match never {}),
            Self::Passing(passing) => passing.poll_next(cx).map(|next| next.map(|bytes| bytes.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.is_end_stream(),
            Self::Passing(passing) => passing.left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(whole) => whole.size_hint(),
            Self::Passing(passing) => passing.left.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

impl Passing {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Stopped>>> {
        if let Some(head) = self.head.take() {
            return self.give(head);
        }
        loop {
            let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
            let Poll::Ready(next) = Pin::new(rest).poll_frame(cx) else {
                let since = *self.waits_since.get_or_insert_with(Instant::now);
                ready!(self.silence.poll(cx, since));
                return self.stop(Fate::Stopped(Stop::Late));
            };
            self.waits_since = None;
            let data = match next {
                None => {
                    self.sent();
                    return Poll::Ready(None);
                }
                Some(Err(_)) => return self.stop(Fate::Stopped(Stop::Broken)),
                Some(Ok(frame)) => frame.into_data(),
            };
            let Ok(data) = data else { continue };
            self.taken += data.len();
            if self.taken > self.bounds.bytes_max {
                return self.stop(Fate::Stopped(Stop::TooLarge));
            }
            if self.watch.push(&data) {
                return self.stop(Fate::Twice);
            }
            if let Some(digest) = &mut self.digest {
                digest.push(&data);
            }
            return self.give(data);
        }
    }

    fn give(&mut self, bytes: Bytes) -> Poll<Option<Result<Bytes, Stopped>>> {
        self.left = self.left.map(|left| left.saturating_sub(bytes.len() as u64));
        // Nobody asks for more than the length that was said.
        if self.left == Some(0) {
            self.sent();
        }
        Poll::Ready(Some(Ok(bytes)))
    }

    /// Notes, before the last bytes go out, that the form is whole.
    fn sent(&mut self) {
        let sum = self.digest.take().map(Digest::finish);
        let mut upload = lock(&self.upload);
        upload.fate = Fate::Sent;
        upload.sum = upload.sum.or(sum);
    }

    fn stop(&self, fate: Fate) -> Poll<Option<Result<Bytes, Stopped>>> {
        lock(&self.upload).fate = fate;
        Poll::Ready(Some(Err(Stopped)))
    }
}

impl Drop for Passing {
    /// What was not even begun can be sent elsewhere.
    fn drop(&mut self) {
        if self.head.is_some() {
            lock(&self.upload).rest = self.rest.take();
        }
    }
}

/// The body of a reply that passes as it comes.
#[derive(Debug)]
pub struct Passage {
    first: Option<Bytes>,
    body: Unpacked,
    flight: Box<Flight>,
    status: StatusCode,
    /// The answer so far, where it is to be kept.
    gathered: Option<Gathering>,
    silence: Silence,
    /// When something came last.
    last_read: Instant,
    ended: bool,
}

impl Passage {
    /// Takes over a body whose first piece is there.
    pub(crate) fn new(
        first: Bytes,
        body: Unpacked,
        mut flight: Box<Flight>,
        _committed: Committed,
        (status, headers): (StatusCode, &HeaderMap),
        idle_limit: Duration,
    ) -> Self {
        let (silence, last_read) = (Silence::of(idle_limit), Instant::now());
        // An answer that stays packed would be repeated without the word that says so.
        let keeps = !headers.contains_key(CONTENT_ENCODING);
        let content_type = headers.get(CONTENT_TYPE);
        let mut gathered = flight.deposit().filter(|_| keeps).map(|_| Gathering::new(content_type.cloned()));
        gathered.iter_mut().for_each(|gathered| gathered.add(&first));
        Self { first: Some(first), body, flight, status, gathered, silence, last_read, ended: false }
    }

    /// The next bytes for the client; an error where the upstream broke off or fell silent, so that the client's
    /// connection is broken too and never shows a clean end.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, axum::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        while !self.ended {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.last_read = Instant::now();
                    if let Ok(data) = frame.into_data() {
                        self.gathered.iter_mut().for_each(|gathered| gathered.add(&data));
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Poll::Ready(Some(Err(_))) => return self.break_off(Transport::Cut),
                Poll::Ready(None) => self.complete(),
                Poll::Pending => {
                    ready!(self.silence.poll(cx, self.last_read));
                    return self.break_off(Transport::IdleTimeout);
                }
            }
        }
        Poll::Ready(None)
    }

    fn complete(&mut self) {
        if let Some(gathered) = &mut self.gathered {
            gathered.keep_in(self.flight.deposit(), self.status);
        }
        self.flight.succeeded(Class::Success, self.learnt(), self.status.as_u16());
        self.flight.flush();
        self.ended = true;
    }

    fn break_off(&mut self, how: Transport) -> Poll<Option<Result<Bytes, axum::Error>>> {
        self.ended = true;
        self.land(&classify::transport(how), Outcome::Interrupted);
        Poll::Ready(Some(Err(axum::Error::new(Stopped))))
    }

    fn land(&mut self, verdict: &Verdict, outcome: Outcome) {
        let landing = Landing { outcome, status: Some(self.status.as_u16()), code: None };
        self.flight.broke_off(verdict, self.learnt(), landing);
    }

    fn learnt(&self) -> Learnt {
        Learnt { status: Some(self.status.as_u16()), ..Learnt::default() }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.land(&Verdict::ended(Class::Cancelled, Effect::None), Outcome::Cancelled);
        }
    }
}
