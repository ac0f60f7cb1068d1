//! Counters for `/metrics`, in OpenMetrics text.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use waybill_schema::event::{Class, Endpoint, Outcome};
use waybill_schema::id::ChannelId;

/// Upper borders of the request latency histogram, in seconds: from a local refusal to the longest generation.
const LATENCY_SECONDS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 180.0, 600.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfRequest {
    endpoint: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfAttempt {
    channel: String,
    class: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfRefusal {
    code: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfRead {
    outcome: &'static str,
}

/// The data plane's counters; no label holds anything a client chose.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests on their way now.
    pub in_flight: Gauge,
    /// 1 while the catalogue in the log can be followed, else 0.
    pub catalogue_followed: Gauge,
    requests: Family<OfRequest, Counter<u64, AtomicU64>>,
    attempts: Family<OfAttempt, Counter<u64, AtomicU64>>,
    refusals: Family<OfRefusal, Counter<u64, AtomicU64>>,
    state_reads: Family<OfRead, Counter<u64, AtomicU64>>,
    unowned: Counter<u64, AtomicU64>,
    latency: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("waybill");
        let (in_flight, requests, attempts) = (Gauge::default(), Family::default(), Family::default());
        let catalogue_followed = Gauge::default();
        let (refusals, state_reads) = (Family::default(), Family::default());
        let unowned = Counter::default();
        let latency = Histogram::new(LATENCY_SECONDS);
        registry.register("requests_in_flight", "Requests on their way now", in_flight.clone());
        let followed = "1 while the catalogue in the log can be followed, else 0";
        registry.register("catalogue_followed", followed, catalogue_followed.clone());
        registry.register("requests", "Requests that ended, by endpoint and outcome", requests.clone());
        registry.register("attempts", "Sends that ended, by channel and class", attempts.clone());
        registry.register("refusals", "Requests refused here, by code", refusals.clone());
        registry.register("state_reads", "Reads of the shared state by requests, by outcome", state_reads.clone());
        registry.register(
            "responses_unowned",
            "Responses given out whose owner could not be recorded",
            unowned.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "From the first byte read to the last fact recorded",
            Unit::Seconds,
            latency.clone(),
        );
        Self { registry, in_flight, catalogue_followed, requests, attempts, refusals, state_reads, unowned, latency }
    }
}

impl Metrics {
    /// Counts a request that ended.
    pub fn request(&self, endpoint: Endpoint, outcome: Outcome, latency_ms: u64) {
        let labels = OfRequest { endpoint: endpoint.word(), outcome: outcome_name(outcome) };
        self.requests.get_or_create(&labels).inc();
        self.latency.observe(std::time::Duration::from_millis(latency_ms).as_secs_f64());
    }

    /// Counts a send that ended.
    pub fn attempt(&self, channel: &ChannelId, class: Class) {
        let labels = OfAttempt { channel: channel.as_str().to_owned(), class: class_name(class) };
        self.attempts.get_or_create(&labels).inc();
    }

    /// Counts a request refused here.
    pub fn refused(&self, code: &'static str) {
        self.refusals.get_or_create(&OfRefusal { code }).inc();
    }

    /// Counts a request's read of the shared state, or that it was spared.
    pub fn state_read(&self, outcome: &'static str) {
        self.state_reads.get_or_create(&OfRead { outcome }).inc();
    }

    /// Counts a response that was given out though its owner could not be recorded.
    pub fn unowned(&self) {
        self.unowned.inc();
    }

    /// All counters as OpenMetrics text.
    pub fn text(&self) -> String {
        text_of(&self.registry)
    }
}

/// The figures of `registry` as OpenMetrics text.
pub fn text_of(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).expect("a string takes every write");
    text
}

fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Success => "success",
        Outcome::Failed => "failed",
        Outcome::Refused => "refused",
        Outcome::Interrupted => "interrupted",
        Outcome::Cancelled => "cancelled",
        Outcome::Abandoned => "abandoned",
    }
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Success => "success",
        Class::Incomplete => "incomplete",
        Class::RateLimited => "rate_limited",
        Class::Upstream5xx => "upstream5xx",
        Class::Timeout => "timeout",
        Class::Unavailable => "unavailable",
        Class::Malformed => "malformed",
        Class::Interrupted => "interrupted",
        Class::InvalidKey => "invalid_key",
        Class::QuotaExhausted => "quota_exhausted",
        Class::ModelUnsupported => "model_unsupported",
        Class::ContextLength => "context_length",
        Class::ContentPolicy => "content_policy",
        Class::CallerError => "caller_error",
        Class::Cancelled => "cancelled",
        Class::Abandoned => "abandoned",
    }
}
