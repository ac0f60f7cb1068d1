//! A plain HTTP client for tests: it sees heads, bytes and broken connections as they are.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pooled;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// A client of one gateway, with one key.
#[derive(Clone)]
pub(crate) struct Client {
    addr: SocketAddr,
    key: String,
    pooled: Pooled<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Whether the body came to its proper end.
    pub(crate) whole: bool,
}

impl Client {
    pub(crate) fn new(addr: SocketAddr, key: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { addr, key: key.to_owned(), pooled: Pooled::builder(TokioExecutor::new()).build(connector) }
    }

    /// The same client with another key.
    pub(crate) fn with_key(&self, key: &str) -> Self {
        Self { key: key.to_owned(), ..self.clone() }
    }

    /// Sends a request and waits for the head.
    pub(crate) async fn open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        if !headers.iter().any(|(name, _)| ["authorization", "x-api-key"].contains(name)) {
            request = request.header("authorization", format!("Bearer {}", self.key));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.pooled.request(request.body(Full::new(body)).expect("test requests are valid")).await
    }

    /// Posts JSON and waits for the whole answer.
    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.post_bytes(path, headers, Bytes::from(body.to_string())).await
    }

    /// Posts bytes and waits for the whole answer.
    pub(crate) async fn post_bytes(&self, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        let response = self.open(Method::POST, path, headers, body).await.expect("the gateway answers");
        read(response).await
    }

    /// Gets a page.
    pub(crate) async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        read(self.open(Method::GET, path, headers, Bytes::new()).await.expect("the gateway answers")).await
    }
}

/// Reads an answer to its end, or to where it broke.
pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let (head, mut body) = response.into_parts();
    let mut bytes = BytesMut::new();
    let mut whole = true;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
            Err(_) => {
                whole = false;
                break;
            }
        }
    }
    Answer { status: head.status, headers: head.headers, body: bytes.freeze(), whole }
}

impl Answer {
    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A header as text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}
