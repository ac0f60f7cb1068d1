//! Failures: what a send without an answer is recorded as, and what its client is shown.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode};
use waybill_routing::classify::{self, Transport, UpstreamError, Verdict, Work};
use waybill_routing::sse;
use waybill_schema::event::{Class, Effect, Endpoint};
use waybill_schema::time::Time;

use crate::answer;
use crate::flight::{Aside, Flight, Learnt};
use crate::gate::Filled;
use crate::refusal::Refusal;
use crate::upstream::NoAnswer;

/// The longest plain text of an upstream that is repeated to a client, in bytes.
const PLAIN_BYTES_MAX: usize = 1000;

/// A send that brought no answer, and what the client would be shown.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) verdict: Verdict,
    pub(crate) learnt: Learnt,
    pub(crate) shown: Shown,
}

/// What the client of a failed request is shown.
#[derive(Debug)]
pub(crate) enum Shown {
    /// The upstream's own error, unchanged.
    Theirs { status: StatusCode, headers: HeaderMap, body: Bytes },
    /// An error of ours.
    Ours(Refusal),
    /// An answer that a policy left empty, given as it came where nobody has a better one.
    Answer(Box<Empty>),
}

/// An answer without output, and the send that brought it.
#[derive(Debug)]
pub(crate) struct Empty {
    pub(crate) send: Aside,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Shown {
    /// The wait in whole seconds that an upstream's own error states, whatever the error means, in milliseconds.
    pub(crate) fn stated_wait_ms(&self) -> Option<u64> {
        let Self::Theirs { headers, .. } = self else { return None };
        let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
        Some(seconds.saturating_mul(1000)).filter(|ms| *ms > 0)
    }
}

impl Failure {
    /// A send without a readable answer.
    pub(crate) fn transport(transport: Transport) -> Self {
        let verdict = classify::transport(transport);
        let timed_out = verdict.class == Class::Timeout;
        let refusal = Refusal::Upstream {
            why: happened(transport).to_owned(),
            status: if timed_out { StatusCode::GATEWAY_TIMEOUT } else { StatusCode::BAD_GATEWAY },
            code: if timed_out { "upstream_timeout" } else { "upstream_unavailable" },
            retry_after_ms: None,
        };
        Self { verdict, learnt: Learnt::default(), shown: Shown::Ours(refusal) }
    }

    /// A send without any answer.
    pub(crate) fn no_answer(no_answer: NoAnswer) -> Self {
        match no_answer {
            NoAnswer::Connect => Self::transport(Transport::Connect),
            NoAnswer::Broken => Self::transport(Transport::Broken),
        }
    }

    /// An error that the upstream reported inside a 200, in our words.
    pub(crate) fn reported(endpoint: Endpoint, error: &UpstreamError) -> Self {
        let verdict = classify::upstream_error(endpoint, error, Time::wall_clock());
        let said = if error.message.is_empty() { "it reported an error" } else { &error.message };
        let shown = Shown::Ours(ours_for(&verdict, fitting_status(&verdict, error), said));
        Self { shown, verdict, learnt: Learnt::default() }
    }

    /// The same in the upstream's words, unless they are about the gateway's account there.
    pub(crate) fn in_words_of(mut self, status: StatusCode, headers: HeaderMap, body: Bytes) -> Self {
        if !about_the_gateway(self.verdict.class) {
            self.shown = Shown::Theirs { status, headers, body };
        }
        self
    }

    /// The same in the words of the event that a stream began with: its data is the body of an error with a status.
    pub(crate) fn in_words_of_event(self, error: &UpstreamError, mut headers: HeaderMap, event: Bytes) -> Self {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let status = fitting_status(&self.verdict, error);
        let body = Bytes::copy_from_slice(sse::Event::of(event).data().unwrap_or_default());
        self.in_words_of(status, headers, body)
    }

    /// An answer that the provider's policy left empty.
    pub(crate) fn refusal(flight: &Flight, headers: HeaderMap, body: Bytes) -> Self {
        let shown = Shown::Answer(Box::new(Empty { send: flight.aside(), headers, body }));
        Self { verdict: classify::refusal(), learnt: Learnt::default(), shown }
    }

    /// What the client is shown after `self` and then `later`: an answer, be it empty, goes before any error.
    pub(crate) fn then(self, later: Self) -> Self {
        let is_answer = |failure: &Self| matches!(failure.shown, Shown::Answer(_));
        if is_answer(&self) && !is_answer(&later) { self } else { later }
    }

    /// A send that was not made, since nothing could be recorded of it.
    pub(crate) fn unrecorded() -> Self {
        let verdict = Verdict { work: Work::Unsent, ..Verdict::ended(Class::Cancelled, Effect::None) };
        Self { verdict, learnt: Learnt::default(), shown: Shown::Ours(Refusal::NoRecord) }
    }

    /// The same with the upstream's HTTP status.
    pub(crate) fn with_status(mut self, status: Option<u16>) -> Self {
        self.learnt.status = status;
        self
    }

    /// The same of a send whose body was still coming from its client: what the client did is not the upstream's fault.
    pub(crate) fn of_sender(mut self, form: &Filled) -> Self {
        if let Some(refusal) = form.blame() {
            let left = matches!(refusal, Refusal::BodyUnread);
            self.verdict = Verdict::ended(if left { Class::Cancelled } else { Class::CallerError }, Effect::None);
            self.shown = Shown::Ours(refusal);
        } else if form.is_coming() && self.learnt.status.is_none() && self.verdict.work != Work::Unsent {
            self.verdict.effect = Effect::None;
        }
        self
    }

    /// The request's time is over. It says nothing about a deployment that was given only what others had left of it.
    pub(crate) fn out_of_time(flight: &Flight) -> Self {
        let mut failure = Self::transport(Transport::TotalTimeout);
        if flight.sends() > 1 {
            failure.verdict.effect = Effect::None;
        }
        failure
    }
}

fn happened(transport: Transport) -> &'static str {
    match transport {
        Transport::Connect => "it could not be reached",
        Transport::Broken => "the connection broke before it answered",
        Transport::ConnectTimeout => "connecting took too long",
        Transport::FirstTokenTimeout => "nothing meaningful came in time",
        Transport::TotalTimeout => "it took too long",
        Transport::IdleTimeout => "it fell silent",
        Transport::Cut => "its answer broke off",
        Transport::Malformed => "its answer is not of this API",
        Transport::Empty => "its answer is empty",
        Transport::Html => "it answered with a page instead of JSON",
    }
}

/// Which error answer the client is shown: the upstream's own where it is one in the client's dialect and about the
/// client's request; ours where it is about the gateway's credential, is no JSON, or is a redirection (DESIGN.md,
/// section 10).
pub(crate) fn show_error(status: StatusCode, headers: &HeaderMap, body: Bytes, verdict: &Verdict) -> Shown {
    let is_error = status.is_client_error() || status.is_server_error();
    let json = serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok();
    if is_error && json && !about_the_gateway(verdict.class) {
        let mut headers = headers.clone();
        // D04: some say that their JSON is an event stream.
        if !answer::may_be_json(&headers) {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        return Shown::Theirs { status: not_the_callers(status, verdict.class), headers, body };
    }
    let said = plain_words(&body).map_or_else(|| format!("it answered {status}"), str::to_owned);
    Shown::Ours(ours_for(verdict, status, &said))
}

/// A body that is neither JSON nor a page, where it is short enough to be a message.
fn plain_words(body: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(body).ok()?.trim();
    ((1..=PLAIN_BYTES_MAX).contains(&text.len()) && !text.starts_with(['<', '{', '['])).then_some(text)
}

/// Whether an upstream's error is about the gateway's own account there: its words are not the caller's business, and
/// may quote a credential.
pub(crate) fn about_the_gateway(class: Class) -> bool {
    matches!(class, Class::InvalidKey | Class::QuotaExhausted)
}

/// The status of an error that came inside a 200: the one that its body names, or that its type stands for, else what its
/// class usually has. The types of a 400 say nothing of other classes: providers put them on everything.
pub(crate) fn fitting_status(verdict: &Verdict, error: &UpstreamError) -> StatusCode {
    let of_class = status_and_code(verdict.class).0;
    let telling = |status: &StatusCode| error.status.is_some() || *status != StatusCode::BAD_REQUEST;
    let meant = error.status_meant().and_then(|status| StatusCode::from_u16(status).ok());
    meant.filter(telling).map_or(of_class, |meant| not_the_callers(meant, verdict.class))
}

/// The status under which an error of an upstream is shown: its own, but where a client would take it for its own
/// credential's or account's, which were accepted here. A 403 may be about what was asked for (P10, P15).
fn not_the_callers(theirs: StatusCode, class: Class) -> StatusCode {
    let forbids_the_request = theirs == StatusCode::FORBIDDEN && about_the_request(class);
    match theirs {
        StatusCode::UNAUTHORIZED | StatusCode::PAYMENT_REQUIRED | StatusCode::FORBIDDEN if !forbids_the_request => {
            status_and_code(class).0
        }
        theirs => theirs,
    }
}

/// Whether an error is about what the caller asked for.
fn about_the_request(class: Class) -> bool {
    matches!(class, Class::CallerError | Class::ContextLength | Class::ContentPolicy)
}

/// An error of ours; `theirs` is the upstream's status.
fn ours_for(verdict: &Verdict, theirs: StatusCode, said: &str) -> Refusal {
    let why = match verdict.class {
        Class::InvalidKey => "it refused the gateway's credential",
        Class::QuotaExhausted => "the gateway's account there is exhausted",
        _ => said,
    };
    let (status, code) = status_and_code(verdict.class);
    // What the request did wrong, its status tells more closely.
    let closer = about_the_request(verdict.class) && theirs.is_client_error();
    let status = if closer { not_the_callers(theirs, verdict.class) } else { status };
    Refusal::Upstream { why: why.to_owned(), status, code, retry_after_ms: verdict.retry_after_ms }
}

fn status_and_code(class: Class) -> (StatusCode, &'static str) {
    match class {
        Class::RateLimited => (StatusCode::TOO_MANY_REQUESTS, "upstream_rate_limited"),
        Class::Timeout => (StatusCode::GATEWAY_TIMEOUT, "upstream_timeout"),
        Class::InvalidKey | Class::QuotaExhausted => (StatusCode::SERVICE_UNAVAILABLE, "no_route_available"),
        Class::ContextLength => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
        Class::ContentPolicy => (StatusCode::BAD_REQUEST, "content_policy"),
        Class::CallerError => (StatusCode::BAD_REQUEST, "upstream_refused"),
        Class::ModelUnsupported => (StatusCode::NOT_FOUND, "model_not_found"),
        Class::Success
        | Class::Incomplete
        | Class::Upstream5xx
        | Class::Unavailable
        | Class::Malformed
        | Class::Interrupted
        | Class::Cancelled
        | Class::Abandoned => (StatusCode::BAD_GATEWAY, "upstream_unavailable"),
    }
}
