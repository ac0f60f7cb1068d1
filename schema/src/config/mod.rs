//! The configuration file: one YAML file, parsed once into a [`Config`] that cannot be wrong.
//!
//! All errors come at once, each with its line and field. Secrets stand in it by reference only.

mod chains;
mod fields;
mod names;
mod parse;
mod reader;
mod rows;
mod settings;
mod terms;
mod value;
mod yaml;

use std::fmt;

pub use parse::parse;

use crate::catalogue::{FailoverPolicy, Row, StickyPolicy};
use crate::secret::SecretRef;

/// Everything the file says. Settings that belong to this machine are fields; the rest is catalogue rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where to listen, `host:port`.
    pub listen: String,
    /// How long a gateway that is asked to stop still takes requests, with `/readyz` red, so that balancers leave first; in
    /// seconds.
    pub notice_seconds: u32,
    /// How long open requests get to end when the gateway is asked to stop, in seconds.
    pub drain_seconds: u32,
    /// How long a client may say nothing in the middle of its body, or take nothing of its answer, in seconds.
    pub client_idle_seconds: u32,
    /// The largest request body, packed or not, in MiB.
    pub body_mib_max: u32,
    /// The bearer token of the admin interface.
    pub admin_token: Option<SecretRef>,
    /// The key of all content hashes; absent only when embedded, where it is made on first start.
    pub deployment_secret: Option<SecretRef>,
    /// The JetStream log; absent when embedded.
    pub log: Option<LogSettings>,
    /// The shared state in Redis; absent when embedded.
    pub state: Option<StateSettings>,
    /// The usage store in Postgres; absent when embedded.
    pub usage: Option<UsageSettings>,
    /// How sessions are recognised.
    pub session: SessionSettings,
    /// The live factors of weights.
    pub routing: RoutingSettings,
    /// Whether requests stick.
    pub sticky_enabled: bool,
    /// How requests of groups without a policy of their own stick.
    pub sticky: StickyPolicy,
    /// Attempts and deadlines.
    pub retry: RetrySettings,
    /// Fault protection.
    pub health: HealthSettings,
    /// How new members are brought in.
    pub stable_first: StableFirstSettings,
    /// The catalogue's rows.
    pub rows: Vec<Row>,
    /// The hash of the catalogue part of the file: 32 hex digits.
    pub hash: String,
    /// Settings that were read but are not in force in this version, as sentences for the operator.
    pub warnings: Vec<Problem>,
}

/// Where the JetStream log is.
#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    /// Server URLs.
    pub nats: Vec<String>,
    /// The stream's name.
    pub stream: String,
    /// Replicas asked for.
    pub replicas: u32,
    /// The most MiB that the stream holds, where it is made here: the servers set them aside.
    pub mib_max: u32,
}

/// Where the shared state is.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSettings {
    /// The Redis URL.
    pub redis: String,
    /// The prefix of every key.
    pub prefix: String,
    /// The hard deadline of the one read a request makes, in milliseconds.
    pub read_deadline_ms: u32,
}

/// Where usage rows go.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageSettings {
    /// The Postgres URL.
    pub postgres: String,
}

/// Which further signals name a session.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum SessionAliases {
    /// None: only `X-Session-Id` and body `session_id`.
    #[default]
    Off,
    /// The table of known clients (CLIENTS.md, "Session signals").
    Known,
    /// These request headers, lower case, in this order.
    Headers(Vec<String>),
}

/// How sessions are recognised.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SessionSettings {
    /// Further signals.
    pub aliases: SessionAliases,
}

/// The live factors of weights (S2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingSettings {
    /// Measured latency scales weights.
    pub latency_aware: bool,
    /// The live error rate scales weights.
    pub error_aware: bool,
    /// Requests in flight scale weights.
    pub concurrency_aware: bool,
    /// Requests in flight at which a channel counts as full.
    pub concurrency_limit: u32,
}

/// What to do when every candidate is cooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllCooling {
    /// Refuse with a truthful `Retry-After`.
    Refuse,
    /// Wait for the soonest, at most this many seconds.
    Wait(u32),
    /// Send to the soonest all the same.
    BestEffort,
}

/// Attempts and deadlines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetrySettings {
    /// Sends to one deployment in one request, the first included.
    pub max_attempts: u32,
    /// Further deployments tried in one request.
    pub retry_times: u32,
    /// Whether further deployments are tried at all (S2.7).
    pub cross_channel: bool,
    /// Whether a request to `/v1/responses` is sent again only where it was refused before any work (S2.11).
    pub responses_single_send: bool,
    /// Sends of one request in all.
    pub sends_max: u32,
    /// The deadline of a whole request, in seconds.
    pub timeout_seconds: u32,
    /// The deadline of the first meaningful frame of one send, in seconds.
    pub first_token_seconds: u32,
    /// The deadline of a plain answer of one send, in seconds; the request's own where it is absent.
    pub plain_seconds: Option<u32>,
    /// The longest silence inside an answer that has begun, in seconds (clients give up after 300, CLIENTS.md).
    pub idle_seconds: u32,
    /// The deadline of a TCP and TLS connection, in milliseconds.
    pub connect_ms: u32,
    /// The pause before the same deployment is tried again, in milliseconds; doubled each time.
    pub backoff_ms: u32,
    /// What to do when every candidate is cooling.
    pub all_cooling: AllCooling,
}

/// Fault protection (S2.8-S2.14).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthSettings {
    /// All of it, as one switch.
    pub enabled: bool,
    /// When members of groups without a policy of their own cool down.
    pub failover: FailoverPolicy,
    /// What each further cooldown is multiplied by, in thousandths.
    pub growth_permille: u32,
    /// The longest cooldown, in seconds.
    pub cooldown_seconds_max: u32,
    /// Consecutive hard failures that open a channel's breaker.
    pub breaker_hard_failures: u32,
    /// How long a breaker stays open, in seconds.
    pub breaker_window_seconds: u32,
    /// Whether each upstream key has its own breaker.
    pub breaker_per_key: bool,
    /// Consecutive hard failures that, confirmed by probes, disable a channel.
    pub auto_disable_failures: u32,
    /// Whether cooled and disabled members are probed.
    pub probe_enabled: bool,
    /// Seconds between probes.
    pub probe_interval_seconds: u32,
}

/// How new members are brought in (S2.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StableFirstSettings {
    /// Whether they start small.
    pub enabled: bool,
    /// A new member gets one part in this many.
    pub denominator: u32,
    /// Successes that make it a full member.
    pub promote_requests: u32,
}

/// Something wrong in the file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file as the operator named it.
    pub file: String,
    /// The line, from 1; 0 where there are no lines, as in the environment.
    pub line: u64,
    /// The column, from 1; 0 where there are no lines.
    pub column: u64,
    /// The field, such as `catalogue.keys[2].group`, or the variable; empty for the whole file.
    pub field: String,
    /// What is wrong, with a suggestion where there is one.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: ", self.file)?,
            line => write!(f, "{}:{line}:{}: ", self.file, self.column)?,
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}
