//! Refusals: every error answer that Waybill itself gives, in the dialect of the endpoint.
//!
//! One exhaustive match turns a refusal into its status, code and type; a client sees which field is wrong and whether
//! trying again can help. An upstream's own error body is not made here: it passes unchanged.

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;
use waybill_routing::ownership::Unowned;
use waybill_routing::request::BadBody;
use waybill_routing::session::SessionError;
use waybill_schema::event::Endpoint;

use crate::answer::{Body, full};

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
    /// The body stopped coming.
    #[error("the request body stopped coming before its end")]
    BodySilent,
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
            retry: None,
        };
        match self {
            Self::InvalidApiKey => Shape {
                anthropic_type: "authentication_error",
                retry: Some(false),
                ..caller(StatusCode::UNAUTHORIZED, "invalid_api_key")
            },
            Self::TooLarge { .. } => Shape {
                anthropic_type: "request_too_large",
                ..caller(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large")
            },
            Self::BodyUnread => caller(StatusCode::BAD_REQUEST, "body_unread"),
            Self::BodySilent => caller(StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            Self::UnknownCoding(_) => caller(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding"),
            Self::BodyPacked => caller(StatusCode::BAD_REQUEST, "invalid_body"),
            Self::BadBody(_) => caller(StatusCode::BAD_REQUEST, "invalid_body"),
            Self::Session(error) => caller(StatusCode::BAD_REQUEST, error.code()),
            Self::Parent(Unowned::Unreadable) | Self::Response(Unowned::Unreadable) | Self::NoRecord => Shape {
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                ..caller(StatusCode::SERVICE_UNAVAILABLE, "ownership_unavailable")
            },
            Self::Parent(why) => Shape { retry: Some(false), ..caller(StatusCode::BAD_REQUEST, why.code()) },
            Self::Response(why) => Shape {
                anthropic_type: "not_found_error",
                retry: Some(false),
                ..caller(StatusCode::NOT_FOUND, why.code())
            },
            Self::GroupNotAllowed(_) => {
                Shape { anthropic_type: "permission_error", ..caller(StatusCode::FORBIDDEN, "group_not_allowed") }
            }
            Self::ModelNotFound(_) => {
                Shape { anthropic_type: "not_found_error", ..caller(StatusCode::NOT_FOUND, "model_not_found") }
            }
            Self::NoRoute { .. } => Shape {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "no_route_available",
                openai_type: "server_error",
                anthropic_type: "overloaded_error",
                retry: None,
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
            Self::NotSupported => Shape {
                anthropic_type: "not_supported",
                retry: Some(false),
                ..caller(StatusCode::NOT_IMPLEMENTED, "not_supported")
            },
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
            Self::ModelNotFound(_) => Some("model"),
            Self::InvalidApiKey
            | Self::TooLarge { .. }
            | Self::BodyUnread
            | Self::BodySilent
            | Self::UnknownCoding(_)
            | Self::BodyPacked
            | Self::NoRecord
            | Self::GroupNotAllowed(_)
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
            Some(Endpoint::Messages | Endpoint::CountTokens) => json!({
                "type": "error",
                "error": {"type": shape.anthropic_type, "message": message, "code": shape.code},
                "request_id": request_id,
            }),
            Some(Endpoint::Chat | Endpoint::Responses | Endpoint::Embeddings) | None => json!({
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
        response
    }
}

/// `Retry-After` in whole seconds, at least 1, capped at what clients honour.
pub fn retry_after(ms: u64) -> HeaderValue {
    HeaderValue::from(ms.div_ceil(1000).clamp(1, RETRY_AFTER_MAX))
}
