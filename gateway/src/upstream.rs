//! The upstream side: one pooled client, and the request that is sent for one place.

use std::time::Duration;

use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, ORIGIN};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use waybill_schema::catalogue::{Channel, Place};
use waybill_schema::event::Endpoint;
use waybill_schema::id::GroupId;

use crate::answer::hop_by_hop;
use crate::gate::Outgoing;
use crate::serving::Credential;

/// Idle connections kept to one upstream host.
const IDLE_CONNECTIONS_MAX: usize = 256;
/// How long an idle connection is kept: below the 60 s after which common servers close theirs.
const IDLE_SECONDS: u64 = 50;

/// The client of all upstreams.
#[derive(Clone, Debug)]
pub struct Upstream {
    client: Client<HttpsConnector<HttpConnector>, Outgoing>,
}

/// Why there was no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// No connection could be made.
    Connect,
    /// The connection broke before an answer.
    Broken,
}

impl Upstream {
    /// A client that gives up a connection attempt after `connect`. Errors when no system root certificates are found.
    pub fn new(connect: Duration) -> std::io::Result<Self> {
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        http.set_connect_timeout(Some(connect));
        let provider = rustls::crypto::ring::default_provider();
        let https = hyper_rustls::HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(provider)?
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(Duration::from_secs(IDLE_SECONDS))
            .pool_timer(TokioTimer::new())
            .build(https);
        Ok(Self { client })
    }

    /// Sends and waits for the head of the answer; dropping the future cancels the call.
    pub async fn send(&self, request: Request<Outgoing>) -> Result<Response<Incoming>, NoAnswer> {
        self.client.request(request).await.map_err(|error| {
            tracing::debug!(%error, "no answer from upstream");
            if error.is_connect() { NoAnswer::Connect } else { NoAnswer::Broken }
        })
    }
}

/// What is asked of a response that an upstream keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errand {
    /// The method.
    pub method: Method,
    /// The response's id, of characters that a path takes as they are.
    pub id: String,
    /// The path behind the id, such as `/cancel`; empty for the response itself.
    pub rest: &'static str,
}

/// What one send is made of, apart from its body.
#[derive(Debug)]
pub struct Send<'a> {
    /// The API spoken.
    pub endpoint: Endpoint,
    /// What is asked of a response that is there; nothing for one that is to be made.
    pub errand: Option<&'a Errand>,
    /// Where it goes.
    pub place: &'a Place,
    /// The group it is sent for.
    pub group: &'a GroupId,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The client's query.
    pub query: Option<&'a str>,
    /// The channel's credential.
    pub credential: Option<&'a Credential>,
}

impl Send<'_> {
    /// The request for the wire; `None` where the channel's base URL makes no valid address.
    ///
    /// The client's end-to-end headers go along; its credentials, cookies and hop-by-hop headers do not. The answer is
    /// asked for without compression, so that usage can be read from it.
    pub fn request(&self, body: Outgoing) -> Option<Request<Outgoing>> {
        let mut headers = HeaderMap::with_capacity(self.headers.len() + 4);
        let ends_here = hop_by_hop(self.headers);
        for (name, value) in self.headers.iter().filter(|(name, _)| !ends_here(name) && !stays_here(name)) {
            headers.append(name.clone(), value.clone());
        }
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        if let Some(credential) = self.credential {
            if self.endpoint.is_anthropic() {
                headers.insert("x-api-key", credential.plain.clone());
            } else {
                headers.insert(AUTHORIZATION, credential.bearer.clone());
            }
        }
        if self.place.channel.internal_headers {
            self.internal(&mut headers);
        }
        let mut request = Request::new(body);
        *request.method_mut() = self.errand.map_or(Method::POST, |errand| errand.method.clone());
        *request.uri_mut() = self.uri()?;
        *request.headers_mut() = headers;
        Some(request)
    }

    fn uri(&self) -> Option<Uri> {
        let base = self.place.channel.base_url.as_str();
        let path = self.endpoint.path();
        let mut text = format!("{base}{path}");
        if let Some(Errand { id, rest, .. }) = self.errand {
            text.push_str(&format!("/{id}{rest}"));
        }
        if let Some(query) = self.query {
            text.push_str(&format!("?{query}"));
        }
        Uri::try_from(text).ok()
    }

    /// S1.10: what the channel's host may know of the route.
    fn internal(&self, headers: &mut HeaderMap) {
        let channel: &Channel = &self.place.channel;
        let marks = [
            ("x-relay-logical-group", Some(self.group.as_str())),
            ("x-relay-route-id", Some(self.place.member.id.as_str())),
            ("x-relay-shadow-group", channel.labels.get("shadow_group").map(String::as_str)),
        ];
        for (name, value) in marks {
            if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
    }
}

/// End-to-end headers that are meant for the gateway, or are made anew for the upstream.
fn stays_here(name: &HeaderName) -> bool {
    [AUTHORIZATION, COOKIE, HOST, CONTENT_LENGTH, ACCEPT_ENCODING, EXPECT, ORIGIN].contains(name)
        || matches!(name.as_str(), "x-api-key" | "api-key" | "x-goog-api-key" | "forwarded" | "via" | "x-real-ip")
        || ["x-waybill-", "x-relay-", "x-forwarded-", "sec-"].iter().any(|prefix| name.as_str().starts_with(prefix))
}
