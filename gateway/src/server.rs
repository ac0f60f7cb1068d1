//! The door: accepts connections and leads each request to its handler.
//!
//! The accept loop is our own: `axum::serve` sets neither TCP_NODELAY (44 ms on a 200-chunk stream) nor a header timer
//! (DEPENDENCIES.md, section 1).

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{any, get, options};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, CONTENT_TYPE,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use serde_json::json;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower::ServiceExt;
use waybill_schema::event::Endpoint;

use crate::answer::{Body, full};
use crate::models;
use crate::proxy::{self, Gateway};
use crate::refusal::Refusal;
use crate::upstream::Errand;

/// How long a client may take to send its request head, in seconds.
const HEAD_SECONDS: u64 = 30;

/// How long a client of the health pages may leave an answer unread.
const HEALTH_CLIENT_IDLE: Duration = Duration::from_secs(60);

/// What `/readyz` says.
#[derive(Clone, Debug)]
pub struct Readiness {
    /// Whether requests should be sent here.
    pub ready: bool,
    /// The parts and how they stand.
    pub detail: serde_json::Value,
}

/// Tells how ready a process is; called at each `/readyz`.
pub type Ready = Arc<dyn Fn() -> Readiness + Send + Sync>;

/// Everything the door leads to.
pub struct House {
    /// The data plane.
    pub gateway: Arc<Gateway>,
    /// Tells how ready the house is.
    pub readiness: Ready,
    /// Further pages, of another service in the same process.
    pub more: Router,
}

/// Serves `listener` until `stop` is ready, then lets open requests end within the time that it gives.
pub async fn serve(listener: TcpListener, house: House, stop: impl Future<Output = Duration>) {
    let idle = Duration::from_secs(house.gateway.serving.load().config.client_idle_seconds.into());
    let door = Arc::new(Door { gateway: house.gateway.clone(), pages: pages(Arc::new(house)) });
    accept(listener, idle, move |request| lead(door.clone(), request), stop).await;
}

/// Serves `/healthz`, `/readyz` and the pages of `more`, for a process without a data plane, until `stop` is ready.
pub async fn serve_pages(listener: TcpListener, readiness: Ready, more: Router, stop: impl Future<Output = Duration>) {
    let pages: Router = health_pages(readiness).merge(more);
    let lead = move |request: Request<Incoming>| {
        let pages = pages.clone();
        async move {
            let Ok(page) = pages.oneshot(request.map(axum::body::Body::new)).await;
            Ok(page.map(Body::Page))
        }
    };
    accept(listener, HEALTH_CLIENT_IDLE, lead, stop).await;
}

async fn accept<F>(
    listener: TcpListener,
    client_idle: Duration,
    lead: impl Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    stop: impl Future<Output = Duration>,
) where
    F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
{
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    let drain = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let lead = service_fn(lead.clone());
                    connections.spawn(graceful.watch(builder(&stream, client_idle).serve_connection(TokioIo::new(stream), lead)));
                }
                Err(error) => refuse_for_now(&error).await,
            },
            Some(_) = connections.join_next() => {}
            drain = &mut stop => break drain,
        }
    };
    drop(listener);
    let drained = tokio::time::timeout(drain, graceful.shutdown()).await;
    if drained.is_err() {
        tracing::warn!("open requests were cut off at shutdown");
    }
    // Waits until those that were cut off have recorded their end.
    connections.shutdown().await;
}

/// Out of file descriptors, for example: the connection waits in the kernel's queue while others end.
async fn refuse_for_now(error: &std::io::Error) {
    tracing::warn!(%error, "a connection could not be accepted");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// A client that takes nothing of its answer for `client_idle` loses its connection, and so its upstream call: the
/// kernel ends a connection whose window has been closed for that long (tcp(7), TCP_USER_TIMEOUT).
fn builder(stream: &TcpStream, client_idle: Duration) -> http1::Builder {
    let patience = SockRef::from(stream).set_tcp_user_timeout(Some(client_idle));
    if let Err(error) = stream.set_nodelay(true).and(patience) {
        tracing::debug!(%error, "a connection's options could not be set");
    }
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(Duration::from_secs(HEAD_SECONDS));
    builder
}

/// What a request meets: the proxy, or one of the pages beside it.
struct Door {
    gateway: Arc<Gateway>,
    pages: Router,
}

/// Leads a request on. Those to a dialect, which are nearly all, go straight to the proxy; axum leads to the rest.
async fn lead(door: Arc<Door>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let mut response = match dialect(&request) {
        Some((endpoint, errand)) => proxy::handle(door.gateway.clone(), endpoint, errand, request).await,
        None => {
            let Ok(page) = door.pages.clone().oneshot(request.map(axum::body::Body::new)).await;
            page.map(Body::Page)
        }
    };
    open_to_pages(response.headers_mut());
    Ok(response)
}

/// The endpoint that a request is for, and what it asks of a response that was made there.
fn dialect(request: &Request<Incoming>) -> Option<(Endpoint, Option<Errand>)> {
    let path = request.uri().path();
    if let Some(response) = path.strip_prefix(RESPONSES).and_then(|path| path.strip_prefix('/')) {
        return Some((Endpoint::Responses, Some(Errand::read(request.method(), response)?)));
    }
    let endpoint = match (request.method(), path) {
        (&Method::POST, CHAT) => Endpoint::Chat,
        (&Method::POST, RESPONSES) => Endpoint::Responses,
        (&Method::POST, MESSAGES) => Endpoint::Messages,
        (&Method::POST, COUNT_TOKENS) => Endpoint::CountTokens,
        (&Method::POST, EMBEDDINGS) => Endpoint::Embeddings,
        _ => return None,
    };
    Some((endpoint, None))
}

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
const EMBEDDINGS: &str = "/v1/embeddings";

/// Everything but the dialects themselves.
fn pages(house: Arc<House>) -> Router {
    Router::new()
        .route(CHAT, options(preflight))
        .route(RESPONSES, options(preflight).get(no_websocket))
        .route("/v1/responses/{*response}", options(preflight))
        .route(MESSAGES, options(preflight))
        .route(COUNT_TOKENS, options(preflight))
        .route(EMBEDDINGS, options(preflight))
        .route("/v1/models", get(list_models).options(preflight))
        .route("/v1/models/{*model}", get(one_model).options(preflight))
        .route("/debug/state-digest", get(state_digest))
        .route("/metrics", get(metrics))
        .route("/", any(|| async { "waybill\n" }))
        .merge(health_pages(house.readiness.clone()))
        .fallback(nothing_here)
        .method_not_allowed_fallback(no_such_method)
        .with_state(house.clone())
        .merge(house.more.clone())
}

fn health_pages<S: Clone + Send + Sync + 'static>(readiness: Ready) -> Router<S> {
    Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(move || readyz(readiness.clone())))
}

/// CORS: keys travel in headers the page sets itself, so any origin may ask, and read its session (S3.4).
fn open_to_pages(headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    let exposed = HeaderValue::from_static("x-session-id, x-waybill-request-id");
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
}

async fn preflight() -> Response<axum::body::Body> {
    let mut response = Response::new(axum::body::Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE, OPTIONS"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
    response
}

async fn list_models(State(house): State<Arc<House>>, headers: HeaderMap) -> Response<axum::body::Body> {
    answer(&headers, models::answer(&house.gateway.serving.load(), &headers, None))
}

async fn one_model(
    State(house): State<Arc<House>>,
    Path(model): Path<String>,
    headers: HeaderMap,
) -> Response<axum::body::Body> {
    answer(&headers, models::answer(&house.gateway.serving.load(), &headers, Some(&model)))
}

/// Codex tries a WebSocket first; 426 sends it to POST within 75 ms (CLIENTS.md, rule 11).
async fn no_websocket(headers: HeaderMap) -> Response<axum::body::Body> {
    answer(&headers, Err(Refusal::UpgradeRequired))
}

async fn nothing_here(headers: HeaderMap, uri: Uri) -> Response<axum::body::Body> {
    answer(&headers, Err(Refusal::NotFound(uri.path().to_owned())))
}

async fn no_such_method(headers: HeaderMap) -> Response<axum::body::Body> {
    answer(&headers, Err(Refusal::MethodNotAllowed))
}

async fn readyz(readiness: Ready) -> Response<axum::body::Body> {
    let Readiness { ready, detail } = readiness();
    let mut response = Response::new(full(json!({"ready": ready, "detail": detail}).to_string()));
    *response.status_mut() = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.map(axum::body::Body::new)
}

/// What a fresh fold of the log must come to. For callers only: it keeps requests waiting for some milliseconds.
async fn state_digest(State(house): State<Arc<House>>, headers: HeaderMap) -> Response<axum::body::Body> {
    let caller = proxy::authenticate(&house.gateway.serving.load(), &headers);
    answer(&headers, caller.map(|_| Response::new(full(house.gateway.ledger.digest()))))
}

async fn metrics(State(house): State<Arc<House>>) -> Response<axum::body::Body> {
    open_metrics(house.gateway.metrics.text())
}

/// Figures in OpenMetrics text as a page.
pub fn open_metrics(text: String) -> Response<axum::body::Body> {
    let mut response = Response::new(full(text));
    let openmetrics = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, openmetrics);
    response.map(axum::body::Body::new)
}

fn answer(headers: &HeaderMap, answer: Result<Response<Body>, Refusal>) -> Response<axum::body::Body> {
    let answer = answer.unwrap_or_else(|refusal| {
        let id = uuid::Uuid::now_v7().to_string();
        refusal.answer(models::dialect(headers), &id)
    });
    answer.map(axum::body::Body::new)
}
