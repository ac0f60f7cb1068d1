//! The settings of one machine: their names, bounds, defaults and overrides.
//!
//! Every setting here can be overridden by `WAYBILL_<PATH>`; seed 2's names are given beside the settings they mean.

use std::ops::RangeInclusive;

use super::fields::{Field, Fields};
use super::value;
use super::{
    AllCooling, HealthSettings, LogSettings, RetrySettings, RoutingSettings, SessionAliases, SessionSettings,
    StableFirstSettings, StateSettings, UsageSettings,
};
use crate::catalogue::{FailoverPolicy, StickyMode, StickyPolicy};

/// A life of something that sticks, in seconds: to 30 days, longer than any provider keeps a prompt cache.
const TTL_SECONDS: RangeInclusive<u32> = 1..=2_592_000;

/// A deadline of a request or of a part of it, in seconds: to two hours, beyond the longest answers seen.
pub(super) const DEADLINE_SECONDS: RangeInclusive<u32> = 1..=7200;

/// A rest of a member or a channel, in seconds: to a day, after which a person should have looked.
const REST_SECONDS: RangeInclusive<u32> = 1..=86_400;

/// Failures in a row that mean something: one at least, and few enough to be reached.
const FAILURES: RangeInclusive<u32> = 1..=1000;

/// Sends to one deployment in one request (LiteLLM and the SDKs of both vendors stay below 10).
pub(super) const ATTEMPTS: RangeInclusive<u32> = 1..=10;

/// Further deployments in one request.
const RETRIES: RangeInclusive<u32> = 0..=20;

/// Sends of one request in all: what one caller may cost upstreams.
const SENDS: RangeInclusive<u32> = 1..=100;

/// A TCP and TLS handshake, in milliseconds: below 100 a healthy upstream far away fails.
const CONNECT_MS: RangeInclusive<u32> = 100..=60_000;

/// The pause before a retry, in milliseconds; it doubles, so a large one outlives the client.
const BACKOFF_MS: RangeInclusive<u32> = 0..=10_000;

/// The one read of shared state, in milliseconds; a request waits for it, so a second is already too long.
const READ_DEADLINE_MS: RangeInclusive<u32> = 1..=1000;

/// Requests in flight on one channel.
const CONCURRENCY: RangeInclusive<u32> = 1..=100_000;

/// What a cooldown is multiplied by, in thousandths: never shrinking, tenfold at most.
const GROWTH_PERMILLE: RangeInclusive<u32> = 1000..=10_000;

/// Parts of traffic and successes of stable first.
const STABLE_FIRST: RangeInclusive<u32> = 1..=1_000_000;

/// Replicas of a stream: JetStream keeps five at most.
const REPLICAS: RangeInclusive<u32> = 1..=5;

/// MiB of a stream: from a small test to 16 TiB.
const STREAM_MIB: RangeInclusive<u32> = 1..=16 << 20;

const STICKY_MODES: [(&str, StickyMode); 2] =
    [("session", StickyMode::Session), ("conversation_preferred", StickyMode::ConversationPreferred)];

/// The log's servers, where they are given.
pub(super) fn log(field: Field<'_>) -> Option<LogSettings> {
    let in_file = field.is_in_file();
    let mut log = field.section();
    let servers = log.field("nats");
    if !in_file && !servers.is_given() {
        return None;
    }
    Some(LogSettings {
        nats: nats(servers.required()),
        stream: log.field("stream").read(|text| value::id(text).map(str::to_owned)).unwrap_or("WAYBILL".to_owned()),
        replicas: log.field("replicas").number(REPLICAS, 1),
        mib_max: log.field("mib_max").number(STREAM_MIB, 10 << 10),
    })
}

/// A list of servers, or one text with commas as the environment gives it.
fn nats(field: Field<'_>) -> Vec<String> {
    const SCHEMES: [&str; 2] = ["nats", "tls"];
    if field.is_empty_list() {
        field.here().wrong("at least one server must be named");
    }
    if field.is_list() {
        let servers = field.list();
        return servers.into_iter().map(|server| server_url(server, &SCHEMES)).collect();
    }
    let in_file = !field.is_overridden();
    let servers = field.read(|text| text.split(',').map(|url| ours(url.trim(), &SCHEMES, in_file)).collect());
    servers.unwrap_or_default()
}

/// The shared state's server, where it is given.
pub(super) fn state(field: Field<'_>) -> Option<StateSettings> {
    let in_file = field.is_in_file();
    let mut state = field.section();
    let server = state.field("redis");
    let (prefix, deadline) = (state.field("prefix"), state.field("read_deadline_ms"));
    (in_file || server.is_given()).then(|| StateSettings {
        redis: server_url(server.required(), &["redis", "rediss"]),
        prefix: prefix.read(|text| value::line(text).map(str::to_owned)).unwrap_or("waybill:".to_owned()),
        read_deadline_ms: deadline.number(READ_DEADLINE_MS, 20),
    })
}

/// The usage store's server, where it is given.
pub(super) fn usage(field: Field<'_>) -> Option<UsageSettings> {
    let in_file = field.is_in_file();
    let server = field.section().field("postgres");
    (in_file || server.is_given())
        .then(|| UsageSettings { postgres: server_url(server.required(), &["postgres", "postgresql"]) })
}

fn server_url(field: Field<'_>, schemes: &[&str]) -> String {
    let in_file = !field.is_overridden();
    field.read(|text| ours(text, schemes, in_file)).unwrap_or_default()
}

/// The URL of a server of ours; a password is welcome in the environment only.
fn ours(text: &str, schemes: &[&str], in_file: bool) -> Result<String, String> {
    let url = value::server_url(text, schemes)?;
    if in_file && value::has_password(url) {
        return Err("a password does not stand in this file: give the URL in the environment instead".to_owned());
    }
    Ok(url.to_owned())
}

/// How sessions are recognised.
pub(super) fn session(mut session: Fields<'_>) -> SessionSettings {
    const WORDS: [(&str, bool); 2] = [("off", false), ("known", true)];
    let field = session.field("aliases");
    let aliases = if field.is_list() {
        let headers = field.list().into_iter().filter_map(|header| header.read(value::header));
        SessionAliases::Headers(headers.collect())
    } else if field.choice(&WORDS, false) {
        SessionAliases::Known
    } else {
        SessionAliases::Off
    };
    SessionSettings { aliases }
}

/// The live factors of weights (S2.4).
pub(super) fn routing(mut routing: Fields<'_>) -> RoutingSettings {
    RoutingSettings {
        latency_aware: routing.field("latency_aware").seed("ROUTING_LATENCY_AWARE").flag(false),
        error_aware: routing.field("error_aware").seed("ROUTING_ERROR_AWARE").flag(false),
        concurrency_aware: routing.field("concurrency_aware").seed("ROUTING_CONCURRENCY_AWARE").flag(false),
        concurrency_limit: routing.field("concurrency_limit").seed("ROUTING_CONCURRENCY_LIMIT").number(CONCURRENCY, 64),
    }
}

/// Whether and how requests stick (S1.5, S2.6). One window of seed 2 sets all lives at once.
pub(super) fn sticky(mut sticky: Fields<'_>) -> (bool, StickyPolicy) {
    const WINDOW: &str = "STICKY_TTL_MINUTES";
    let enabled = sticky.field("enabled").seed("STICKY_ENABLED").flag(true);
    let policy = StickyPolicy {
        mode: sticky.field("mode").choice(&STICKY_MODES, StickyMode::Session),
        conversation_ttl_seconds: sticky
            .field("conversation_ttl_seconds")
            .seed_minutes(WINDOW)
            .number(TTL_SECONDS, 7200),
        user_model_ttl_seconds: sticky.field("user_model_ttl_seconds").seed_minutes(WINDOW).number(TTL_SECONDS, 1800),
        bucket_ttl_seconds: sticky.field("bucket_ttl_seconds").seed_minutes(WINDOW).number(TTL_SECONDS, 600),
    };
    (enabled, policy)
}

/// A group's own way to stick; what it leaves out has S1.1's values, not this machine's, since rows are shared.
pub(super) fn sticky_policy(mut policy: Fields<'_>) -> StickyPolicy {
    StickyPolicy {
        mode: policy.field("mode").choice(&STICKY_MODES, StickyMode::ConversationPreferred),
        conversation_ttl_seconds: policy.field("conversation_ttl_seconds").number(TTL_SECONDS, 7200),
        user_model_ttl_seconds: policy.field("user_model_ttl_seconds").number(TTL_SECONDS, 1800),
        bucket_ttl_seconds: policy.field("bucket_ttl_seconds").number(TTL_SECONDS, 600),
    }
}

/// A group's, or a template's, own way to cool down; what it leaves out has S1.1's values.
pub(super) fn failover_policy(mut policy: Fields<'_>) -> FailoverPolicy {
    FailoverPolicy {
        consecutive_retryable_failures: policy.field("consecutive_retryable_failures").number(FAILURES, 2),
        cooldown_seconds: policy.field("cooldown_seconds").number(REST_SECONDS, 600),
    }
}

/// A route's own first-token deadline, in seconds.
pub(super) fn first_token(field: Field<'_>) -> Option<u32> {
    field.number_if_given(DEADLINE_SECONDS)
}

/// Attempts and deadlines (S2.7, S3.12).
pub(super) fn retry(mut retry: Fields<'_>) -> RetrySettings {
    let first_token = retry.field("first_token_seconds");
    let first_token_here = first_token.is_given().then(|| first_token.here());
    let plain = retry.field("plain_seconds");
    let plain_here = plain.is_given().then(|| plain.here());
    let settings = RetrySettings {
        max_attempts: retry.field("max_attempts").number(ATTEMPTS, 2),
        retry_times: retry.field("retry_times").seed("RETRY_TIMES").number(RETRIES, 2),
        cross_channel: retry.field("cross_channel").seed("CROSS_CHANNEL_FAILOVER_ENABLED").flag(true),
        responses_single_send: retry.field("responses_single_send").flag(false),
        sends_max: retry.field("sends_max").number(SENDS, 12),
        timeout_seconds: retry.field("timeout_seconds").number(DEADLINE_SECONDS, 600),
        first_token_seconds: first_token.number(DEADLINE_SECONDS, 60),
        plain_seconds: plain.number_if_given(DEADLINE_SECONDS),
        idle_seconds: retry.field("idle_seconds").number(DEADLINE_SECONDS, 300),
        connect_ms: retry.field("connect_ms").number(CONNECT_MS, 5000),
        backoff_ms: retry.field("backoff_ms").number(BACKOFF_MS, 100),
        all_cooling: all_cooling(retry.field("all_cooling")),
    };
    let longer = |seconds: u32| seconds > settings.timeout_seconds;
    let first_token_here = first_token_here.filter(|_| longer(settings.first_token_seconds));
    let plain_here = plain_here.filter(|_| settings.plain_seconds.is_some_and(longer));
    for here in [first_token_here, plain_here].into_iter().flatten() {
        here.wrong(format!("is longer than timeout_seconds, {}", settings.timeout_seconds));
    }
    settings
}

/// `refuse`, `best_effort`, or `wait: N`; the environment writes `wait:N`.
fn all_cooling(field: Field<'_>) -> AllCooling {
    const WORDS: [(&str, AllCooling); 2] = [("refuse", AllCooling::Refuse), ("best_effort", AllCooling::BestEffort)];
    if field.is_map() {
        let wait = field.map().map(|mut map| map.field("wait").required().number(DEADLINE_SECONDS, 1));
        return wait.map_or(AllCooling::Refuse, AllCooling::Wait);
    }
    let parse = |text: &str| match text.split_once(':') {
        Some(("wait", seconds)) => value::number(seconds.trim(), &DEADLINE_SECONDS, 1).map(AllCooling::Wait),
        _ => value::choice(text, &WORDS).map_err(|message| format!("{message} or `wait: SECONDS`")),
    };
    field.read(parse).unwrap_or(AllCooling::Refuse)
}

/// Fault protection (S2.8-S2.14).
pub(super) fn health(mut health: Fields<'_>) -> HealthSettings {
    let mut breaker = health.field("breaker").section();
    let mut probe = health.field("probe").section();
    let cooldown = health.field("cooldown_seconds").seed("COOLDOWN_SECONDS");
    let cooldown_here = cooldown.here();
    let settings = HealthSettings {
        enabled: health.field("enabled").seed("FAULT_PROTECTION_ENABLED").flag(true),
        failover: FailoverPolicy {
            consecutive_retryable_failures: health.field("failure_threshold").number(FAILURES, 2),
            cooldown_seconds: cooldown.number(REST_SECONDS, 600),
        },
        growth_permille: health.field("cooldown_growth").permille(GROWTH_PERMILLE, 2000),
        cooldown_seconds_max: health.field("cooldown_seconds_max").number(REST_SECONDS, 3600),
        breaker_hard_failures: breaker.field("hard_failures").number(FAILURES, 5),
        breaker_window_seconds: breaker.field("window_seconds").number(REST_SECONDS, 60),
        breaker_per_key: breaker.field("per_key").flag(false),
        auto_disable_failures: health
            .field("auto_disable_failures")
            .seed("CHANNEL_AUTO_DISABLE_THRESHOLD")
            .number(FAILURES, 5),
        probe_enabled: probe.field("enabled").seed("RECOVERY_PROBE_ENABLED").flag(true),
        probe_interval_seconds: probe
            .field("interval_seconds")
            .seed("RECOVERY_PROBE_INTERVAL_SECONDS")
            .number(REST_SECONDS, 600),
    };
    if settings.failover.cooldown_seconds > settings.cooldown_seconds_max {
        cooldown_here.wrong(format!("is longer than cooldown_seconds_max, {}", settings.cooldown_seconds_max));
    }
    settings
}

/// How new members are brought in (S2.5).
pub(super) fn stable_first(mut stable_first: Fields<'_>) -> StableFirstSettings {
    let mut field = |name, seed| stable_first.field(name).seed(seed);
    StableFirstSettings {
        enabled: field("enabled", "STABLE_FIRST_ENABLED").flag(true),
        denominator: field("denominator", "STABLE_FIRST_DENOMINATOR").number(STABLE_FIRST, 25),
        promote_requests: field("promote_requests", "STABLE_FIRST_PROMOTE_REQUESTS").number(STABLE_FIRST, 100),
    }
}
