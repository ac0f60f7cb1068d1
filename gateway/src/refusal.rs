//! Refusals: every error answer that Waybill itself gives, in the dialect of the endpoint.
//!
//! One exhaustive match turns a refusal into its status, code and type; a client sees which field is wrong and whether
//! trying again can help. An upstream's own error body is not made here: it passes unchanged.

use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;
use waybill_routing::ownership::Unowned;
use waybill_routing::request::BadBody;
use waybill_routing::session::SessionError;
use waybill_schema::catalogue::RowKey;
use waybill_schema::event::Endpoint;

use crate::answer::{Body, full};
use crate::limits::Limit;

/// The longest `Retry-After` that clients honour, in seconds (CLIENTS.md, rule 7).
pub const RETRY_AFTER_MAX: u64 = 60;

/// How long to wait where nobody can say who owns a response, in milliseconds: as long as a projection takes to catch up.
const OWNERSHIP_WAIT_MS: u64 = 2_000;

/// Why Waybill answers with an error of its own.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No key, or one that nobody holds.
    #[error("no valid API key was given: send it as `Authorization: Bearer …` or `x-api-key`")]
    InvalidApiKey,
    /// The body is larger than this gateway takes.
    #[error("the request body is larger than {limit_bytes} bytes")]
    TooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The body broke off.
    #[error("the request body could not be read to its end")]
    BodyUnread,
    /// The body stopped coming, or took too long as a whole.
    #[error("the request body did not come in time")]
    BodyLate,
    /// The body is packed in a way that is not known here.
    #[error("a body in `content-encoding: {0}` is not understood: send it plain or as `zstd`")]
    UnknownCoding(String),
    /// The body is no zstd.
    #[error("the request body is not the zstd that its `content-encoding` says")]
    BodyPacked,
    /// The body is not a request.
    #[error(transparent)]
    BadBody(#[from] BadBody),
    /// The session signals are malformed or disagree.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The request goes on from a response that cannot be continued.
    #[error(transparent)]
    Parent(Unowned),
    /// The request is about a response that cannot be reached.
    #[error(transparent)]
    Response(Unowned),
    /// The request would leave something behind at an upstream, and nobody could tell later where.
    #[error("nothing can be recorded now, and this request needs a record")]
    NoRecord,
    /// The key does not reach the group.
    #[error("the key may not use the group `{0}`")]
    GroupNotAllowed(String),
    /// No route shows the model to this key.
    #[error("the model `{0}` does not exist or this key may not use it")]
    ModelNotFound(String),
    /// The caller's key, team or organization does not permit the model.
    #[error("this key may not use the model `{0}`")]
    ModelNotPermitted(String),
    /// The caller has used up a limit of its minute, or its budget.
    #[error("the {limit} of {whose} is reached")]
    LimitReached {
        /// The row that sets the limit.
        whose: RowKey,
        /// The limit.
        limit: Limit,
        /// How long it stands, in milliseconds.
        wait_ms: u64,
    },
    /// A guardrail refuses the request.
    #[error("a guardrail of {whose} refuses this request{reason}")]
    GuardrailDenied {
        /// The row whose guardrail it is.
        whose: RowKey,
        /// What its hook says of it, after `: `; may be empty.
        reason: String,
    },
    /// A guardrail's hook gave no answer, and nothing passes without one.
    #[error("a guardrail of {whose} could not be asked about this request")]
    GuardrailSilent {
        /// The row whose guardrail it is.
        whose: RowKey,
    },
    /// The `Idempotency-Key` cannot be one.
    #[error("the Idempotency-Key must be 1 to 255 bytes long")]
    InvalidIdempotencyKey,
    /// The key was given to a request with another body.
    #[error("this Idempotency-Key was given to a request with another body")]
    IdempotencyKeyReused,
    /// The request with this key is under way.
    #[error("the request with this Idempotency-Key is still under way")]
    InProgress {
        /// When to ask again, in milliseconds.
        wait_ms: u64,
    },
    /// A request with this key was made, and what became of it is not known or not kept.
    #[error("a request with this Idempotency-Key was made, and its outcome is not known: it is not made again")]
    OutcomeUnknown,
    /// The store of outcomes does not answer.
    #[error("the store of outcomes does not answer, so nothing is made under an Idempotency-Key")]
    VaultAway,
    /// There are deployments, but none may be sent to.
    #[error("no deployment can serve this request now: {why}")]
    NoRoute {
        /// The exclusions, counted, in words.
        why: String,
        /// When the soonest candidate is free again, in milliseconds from now.
        soonest_ms: Option<u64>,
    },
    /// The upstreams could not be reached or gave no usable answer.
    #[error("the upstream failed: {why}")]
    Upstream {
        /// What happened, without content.
        why: String,
        /// 502, 503 or 504.
        status: StatusCode,
        /// The stable code.
        code: &'static str,
        /// How long to wait, in milliseconds, where known.
        retry_after_ms: Option<u64>,
    },
    /// A WebSocket was asked for.
    #[error("WebSocket is not offered here: send the request by POST")]
    UpgradeRequired,
    /// No deployment of the model counts tokens.
    #[error("no deployment of this model counts tokens")]
    NotSupported,
    /// The path is one, the method is not.
    #[error("this path is not offered with this method")]
    MethodNotAllowed,
    /// No such path.
    #[error("there is no `{0}` here")]
    NotFound(String),
}

/// How a refusal is put to the client.
#[derive(Debug, Clone, Copy)]
struct Shape {
    status: StatusCode,
    code: &'static str,
    openai_type: &'static str,
    anthropic_type: &'static str,
    /// `false` where trying again cannot help or has been exhausted here (CLIENTS.md, rule 8).
    retry: Option<bool>,
}

impl Refusal {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.shape().code
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.shape().status
    }

    fn shape(&self) -> Shape {
        let caller = |status, code| Shape {
            status,
            code,
            openai_type: "invalid_request_error",
            anthropic_type: "invalid_request_error",
            retry: Some(false),
        };
        match self {
            Self::InvalidApiKey => {
                Shape { anthropic_type: "authentication_error", ..caller(StatusCode::UNAUTHORIZED, "invalid_api_key") }
            }
            Self::TooLarge { .. } => Shape {
                anthropic_type: "request_too_large",
                ..caller(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large")
            },
            Self::BodyUnread => Shape { retry: None, ..caller(StatusCode::BAD_REQUEST, "body_unread") },
            Self::BodyLate => Shape { retry: None, ..caller(StatusCode::REQUEST_TIMEOUT, "body_timeout") },
            Self::UnknownCoding(_) => caller(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding"),
            Self::BodyPacked => caller(StatusCode::BAD_REQUEST, "invalid_body"),
            Self::BadBody(_) => caller(StatusCode::BAD_REQUEST, "invalid_body"),
            Self::Session(error) => caller(StatusCode::BAD_REQUEST, error.code()),
            Self::Parent(Unowned::Unreadable) | Self::Response(Unowned::Unreadable) | Self::NoRecord => Shape {
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                retry: None,
                ..caller(StatusCode::SERVICE_UNAVAILABLE, "ownership_unavailable")
            },
            Self::Parent(why) => caller(StatusCode::BAD_REQUEST, why.code()),
            Self::Response(why) => {
                Shape { anthropic_type: "not_found_error", ..caller(StatusCode::NOT_FOUND, why.code()) }
            }
            Self::GroupNotAllowed(_) => {
                Shape { anthropic_type: "permission_error", ..caller(StatusCode::FORBIDDEN, "group_not_allowed") }
            }
            Self::ModelNotFound(_) => {
                Shape { anthropic_type: "not_found_error", ..caller(StatusCode::NOT_FOUND, "model_not_found") }
            }
            Self::ModelNotPermitted(_) => {
                Shape { anthropic_type: "permission_error", ..caller(StatusCode::FORBIDDEN, "model_not_permitted") }
            }
            Self::LimitReached { limit: Limit::Requests | Limit::Tokens, .. } => Shape {
                status: StatusCode::TOO_MANY_REQUESTS,
                code: "rate_limit_exceeded",
                openai_type: "rate_limit_error",
                anthropic_type: "rate_limit_error",
                retry: None,
            },
            // 402, not 429: a budget is not waited for, and a client that waits a minute and asks again only asks in vain.
            Self::LimitReached { limit: Limit::Budget(_), .. } => Shape {
                openai_type: "insufficient_quota",
                anthropic_type: "billing_error",
                ..caller(StatusCode::PAYMENT_REQUIRED, "budget_exceeded")
            },
            Self::GuardrailDenied { .. } => caller(StatusCode::BAD_REQUEST, "guardrail_denied"),
            Self::GuardrailSilent { .. } => Shape {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "guardrail_unavailable",
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                retry: None,
            },
            Self::InvalidIdempotencyKey => caller(StatusCode::BAD_REQUEST, "invalid_idempotency_key"),
            Self::IdempotencyKeyReused => caller(StatusCode::CONFLICT, "idempotency_key_reused"),
            Self::InProgress { .. } => Shape { retry: None, ..caller(StatusCode::CONFLICT, "idempotency_in_progress") },
            Self::OutcomeUnknown => caller(StatusCode::CONFLICT, "idempotency_outcome_unknown"),
            Self::VaultAway => Shape {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "vault_unavailable",
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                retry: None,
            },
            Self::NoRoute { soonest_ms, .. } => Shape {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "no_route_available",
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                // Where no rest ends by itself, only an operator can help.
                retry: if soonest_ms.is_some() { None } else { Some(false) },
            },
            Self::Upstream { status, code, .. } => Shape {
                status: *status,
                code,
                openai_type: "server_error",
                anthropic_type: "api_error",
                retry: Some(false),
            },
            Self::UpgradeRequired => caller(StatusCode::UPGRADE_REQUIRED, "websocket_not_offered"),
            Self::MethodNotAllowed => caller(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::NotSupported => {
                Shape { anthropic_type: "not_supported", ..caller(StatusCode::NOT_IMPLEMENTED, "not_supported") }
            }
            Self::NotFound(_) => {
                Shape { anthropic_type: "not_found_error", ..caller(StatusCode::NOT_FOUND, "not_found") }
            }
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::BadBody(error) => error.param(),
            Self::Session(error) => error.param(),
            Self::Parent(_) => Some("previous_response_id"),
            Self::Response(_) => Some("response_id"),
            Self::ModelNotFound(_) | Self::ModelNotPermitted(_) => Some("model"),
            Self::InvalidApiKey
            | Self::TooLarge { .. }
            | Self::BodyUnread
            | Self::BodyLate
            | Self::UnknownCoding(_)
            | Self::BodyPacked
            | Self::NoRecord
            | Self::GroupNotAllowed(_)
            | Self::LimitReached { .. }
            | Self::GuardrailDenied { .. }
            | Self::GuardrailSilent { .. }
            | Self::InvalidIdempotencyKey
            | Self::IdempotencyKeyReused
            | Self::InProgress { .. }
            | Self::OutcomeUnknown
            | Self::VaultAway
            | Self::NoRoute { .. }
            | Self::Upstream { .. }
            | Self::UpgradeRequired
            | Self::NotSupported
            | Self::MethodNotAllowed
            | Self::NotFound(_) => None,
        }
    }

    /// How long to wait, in milliseconds, where that is known.
    fn wait_ms(&self) -> Option<u64> {
        match self {
            Self::NoRoute { soonest_ms, .. } => *soonest_ms,
            Self::LimitReached { wait_ms, .. } | Self::InProgress { wait_ms } => Some(*wait_ms),
            Self::Upstream { retry_after_ms, .. } => *retry_after_ms,
            Self::Parent(Unowned::Unreadable) | Self::Response(Unowned::Unreadable) | Self::NoRecord => {
                Some(OWNERSHIP_WAIT_MS)
            }
            _ => None,
        }
    }

    /// The answer, in the dialect of `endpoint`; the true waiting time stands in the body where the header is capped.
    pub fn answer(&self, endpoint: Option<Endpoint>, request_id: &str) -> Response<Body> {
        let shape = self.shape();
        let message = match self.wait_ms() {
            Some(ms) => format!("{self} (free again in {} s)", ms.div_ceil(1000)),
            None => self.to_string(),
        };
        let body = match endpoint {
            Some(endpoint) if endpoint.is_anthropic() => json!({
                "type": "error",
                "error": {"type": shape.anthropic_type, "message": message, "code": shape.code},
                "request_id": request_id,
            }),
            Some(_) | None => json!({
                "error": {"message": message, "type": shape.openai_type, "param": self.param(), "code": shape.code},
            }),
        };
        let mut response = Response::new(full(body.to_string()));
        *response.status_mut() = shape.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(ms) = self.wait_ms() {
            headers.insert(RETRY_AFTER, retry_after(ms));
        }
        if shape.retry == Some(false) {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if matches!(self, Self::TooLarge { .. }) {
            // The body was not read to its end, so the connection ends here: the client must not send more on it.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// `Retry-After` in whole seconds, at least 1, capped at what clients honour.
pub fn retry_after(ms: u64) -> HeaderValue {
    HeaderValue::from(ms.div_ceil(1000).clamp(1, RETRY_AFTER_MAX))
}
