//! What goes back to a client: the body type, and the headers that every reply carries.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, SET_COOKIE, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::{Frame, SizeHint};
use waybill_schema::event::Endpoint;

use crate::gate::Passage;
use crate::relay::Relay;

// Made by the compiler: a name that is given as text is read at each reply.
pub(crate) const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const ATTEMPTS: HeaderName = HeaderName::from_static("x-waybill-attempts");
const FALLBACK: HeaderName = HeaderName::from_static("x-waybill-fallback");
const DEPLOYMENT: HeaderName = HeaderName::from_static("x-waybill-deployment");
const OUR_REQUEST_ID: HeaderName = HeaderName::from_static("x-waybill-request-id");
const OPENAI_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The body of a reply: whole, a relayed stream, or a page of axum's.
#[derive(Debug)]
pub enum Body {
    /// All of it at once.
    Whole(http_body_util::Full<Bytes>),
    /// As it comes from the upstream.
    Relay(Box<Relay>),
    /// As it comes, unread.
    Passage(Box<Passage>),
    /// A page beside the proxy.
    Page(axum::body::Body),
}

/// A reply body that is all there.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Body::Whole(http_body_util::Full::new(bytes.into()))
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.get_mut() {
            Self::Whole(whole) => Pin::new(whole).poll_frame(cx).map_err(|never| match never {}),
            Self::Page(page) => Pin::new(page).poll_frame(cx),
            Self::Passage(passage) => passage.poll_next(cx).map(|bytes| bytes.map(|bytes| bytes.map(Frame::data))),
            Self::Relay(relay) => relay.poll_next(cx).map(|bytes| bytes.map(|bytes| bytes.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.is_end_stream(),
            Self::Page(page) => page.is_end_stream(),
            Self::Relay(_) | Self::Passage(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(whole) => whole.size_hint(),
            Self::Page(page) => page.size_hint(),
            Self::Relay(_) | Self::Passage(_) => SizeHint::default(),
        }
    }
}

/// Names who served the request, to the client; set on every reply whose session was resolved.
#[derive(Debug)]
pub struct Marks<'a> {
    /// The API spoken.
    pub endpoint: Endpoint,
    /// Our id of the request.
    pub request: &'a str,
    /// The session.
    pub session: &'a str,
    /// Sends so far.
    pub attempts: u16,
    /// Whether a fallback chain led to who served, or failed last.
    pub fallback: bool,
    /// The deployment that served, where the caller may know it.
    pub deployment: Option<&'a str>,
}

impl Marks<'_> {
    /// Sets the headers of DESIGN.md section 9.
    pub fn set(&self, headers: &mut HeaderMap) {
        mark_request(self.endpoint, self.request, headers);
        let mut set = |name: HeaderName, value: Option<HeaderValue>| {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        };
        // A session may be named beyond ASCII, which `from_str` refuses.
        set(SESSION_ID, HeaderValue::from_bytes(self.session.as_bytes()).ok());
        set(ATTEMPTS, Some(HeaderValue::from(self.attempts)));
        set(FALLBACK, Some(HeaderValue::from_static(if self.fallback { "true" } else { "false" })));
        set(DEPLOYMENT, self.deployment.and_then(|name| HeaderValue::from_str(name).ok()));
    }
}

/// Names a request on its reply: in the dialect's way, and in ours.
pub fn mark_request(endpoint: Endpoint, request: &str, headers: &mut HeaderMap) {
    if let Ok(request) = HeaderValue::from_str(request) {
        headers.insert(request_id_header(endpoint), request.clone());
        headers.insert(OUR_REQUEST_ID, request);
    }
}

/// The header in which a dialect names its request id.
fn request_id_header(endpoint: Endpoint) -> HeaderName {
    if endpoint.is_anthropic() { ANTHROPIC_REQUEST_ID } else { OPENAI_REQUEST_ID }
}

/// The upstream's reply headers that may reach the client: no hop-by-hop header, no cookie, no quota of the
/// upstream's organisation, no mark that is ours to set, and no framing of a body that is framed anew.
pub fn passed_on(mut upstream: HeaderMap) -> HeaderMap {
    let kept_back: Vec<HeaderName> = {
        let ends_here = hop_by_hop(&upstream);
        upstream.keys().filter(|name| ends_here(name) || is_private(name)).cloned().collect()
    };
    for name in kept_back {
        upstream.remove(name);
    }
    upstream
}

/// Tells which of `headers` concern one connection only: the known ones, and those that `Connection` names (RFC 9110,
/// section 7.6.1).
pub fn hop_by_hop(headers: &HeaderMap) -> impl Fn(&HeaderName) -> bool {
    let named: Vec<&str> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .collect();
    move |name| is_hop_by_hop(name) || named.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
}

fn is_hop_by_hop(name: &HeaderName) -> bool {
    *name == CONNECTION
        || *name == TRANSFER_ENCODING
        || matches!(
            name.as_str(),
            "keep-alive"
                | "proxy-connection"
                | "proxy-authenticate"
                | "proxy-authorization"
                | "te"
                | "trailer"
                | "upgrade"
        )
}

fn is_private(name: &HeaderName) -> bool {
    // Quota: OpenAI's and most others', Anthropic's, the IETF draft's (Mistral's too), Codex's.
    const PREFIXES: [&str; 7] =
        ["x-ratelimit", "x-rate-limit", "anthropic-ratelimit-", "ratelimit", "x-codex-", "x-relay-", "x-waybill-"];
    *name == CONTENT_LENGTH
        || *name == SET_COOKIE
        || matches!(name.as_str(), "openai-organization" | "openai-project" | "anthropic-organization-id")
        || matches!(name.as_str(), "x-request-id" | "request-id")
        || matches!(name.as_str(), "retry-after-ms" | "x-session-id" | "alt-svc" | "strict-transport-security")
        || PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
}

/// Whether the reply is an event stream.
pub fn is_event_stream(headers: &HeaderMap) -> bool {
    media_type(headers).is_some_and(|media| media.eq_ignore_ascii_case("text/event-stream"))
}

/// Whether the reply says that it is JSON.
pub fn is_json(headers: &HeaderMap) -> bool {
    media_type(headers).is_some() && may_be_json(headers)
}

/// Whether the reply is a web page.
pub fn is_page(headers: &HeaderMap) -> bool {
    media_type(headers).is_some_and(|media| media.eq_ignore_ascii_case("text/html"))
}

/// Whether the reply is JSON, or does not say what it is.
pub fn may_be_json(headers: &HeaderMap) -> bool {
    media_type(headers).is_none_or(|media| media.eq_ignore_ascii_case("application/json") || media.ends_with("+json"))
}

fn media_type(headers: &HeaderMap) -> Option<&str> {
    headers.get(CONTENT_TYPE)?.to_str().ok()?.split(';').next().map(str::trim)
}
