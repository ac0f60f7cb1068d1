//! Failures: what a send without an answer is recorded as, and what its client is shown.

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use waybill_routing::classify::{self, Transport, UpstreamError, Verdict};
use waybill_schema::event::{Class, Effect, Endpoint};
use waybill_schema::time::Time;

use crate::answer;
use crate::flight::{Flight, Learnt};
use crate::refusal::Refusal;
use crate::upstream::NoAnswer;

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

    /// An error that the upstream reported inside a 200.
    pub(crate) fn reported(endpoint: Endpoint, error: &UpstreamError) -> Self {
        let verdict = classify::upstream_error(endpoint, error, Time::wall_clock());
        let said = if error.message.is_empty() { "it reported an error" } else { &error.message };
        Self { shown: Shown::Ours(ours_for(&verdict, said)), verdict, learnt: Learnt::default() }
    }

    /// A send that was not made, since nothing could be recorded of it.
    pub(crate) fn unrecorded() -> Self {
        let verdict = Verdict::ended(Class::Cancelled, Effect::None);
        Self { verdict, learnt: Learnt::default(), shown: Shown::Ours(Refusal::NoRecord) }
    }

    /// The same with the upstream's HTTP status.
    pub(crate) fn with_status(mut self, status: Option<u16>) -> Self {
        self.learnt.status = status;
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
    let json = answer::may_be_json(headers) && serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok();
    if is_error && json && !about_the_gateway(verdict.class) {
        return Shown::Theirs { status, headers: headers.clone(), body };
    }
    Shown::Ours(ours_for(verdict, &format!("it answered {status}")))
}

/// Whether an upstream's error is about the gateway's own account there: its words are not the caller's business, and
/// may quote a credential.
pub(crate) fn about_the_gateway(class: Class) -> bool {
    matches!(class, Class::InvalidKey | Class::QuotaExhausted)
}

fn ours_for(verdict: &Verdict, said: &str) -> Refusal {
    let why = match verdict.class {
        Class::InvalidKey => "it refused the gateway's credential",
        Class::QuotaExhausted => "the gateway's account there is exhausted",
        _ => said,
    };
    let (status, code) = match verdict.class {
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
    };
    Refusal::Upstream { why: why.to_owned(), status, code, retry_after_ms: verdict.retry_after_ms }
}
