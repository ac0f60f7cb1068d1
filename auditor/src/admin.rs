//! The admin interface over HTTP: `/admin/v1`, for whoever holds the `admin_token`, which is the operator: it sees every
//! scope.
//!
//! Stores and logs block, so a question is answered on a thread of its own; at most [`QUESTIONS_MAX`] are under way or
//! wait, and no request to a model ever waits for one.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Semaphore;
use waybill_events::log::{Log, ReadError};
use waybill_schema::id::{RequestId, ScopeId, SessionId};
use waybill_schema::secret::sum128;

use crate::explain::{ExplainError, explain};
use crate::moment::{MomentError, moment};
use crate::paging::{Page, PageError};
use crate::projections::projections;
use crate::sessions::{Filter, ListError, named, request, rounds, sessions};
use crate::usage::{StoreError, UsageStore};

/// So many questions are under way or wait at once; one more is told to come again.
pub const QUESTIONS_MAX: usize = 16;

/// What the answers come from.
pub struct Sources {
    /// The rows; absent where the configuration names no store for them.
    pub usage: Option<Box<dyn UsageStore>>,
    /// The log.
    pub log: Box<dyn Log>,
}

/// The admin interface of a process.
pub struct Admin {
    /// The sum of the token: comparing sums tells nothing of a token by the time that it takes.
    token: String,
    sources: Mutex<Sources>,
    free: Arc<Semaphore>,
}

impl Admin {
    /// An interface for whoever holds `token`.
    pub fn new(token: &str, sources: Sources) -> Self {
        let free = Arc::new(Semaphore::new(QUESTIONS_MAX));
        Self { token: sum128(&[token.as_bytes()]), sources: Mutex::new(sources), free }
    }
}

/// The pages of the interface.
pub fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/admin/v1/sessions", get(list_sessions))
        .route("/admin/v1/sessions/{*session}", get(list_rounds))
        .route("/admin/v1/requests/{request}", get(show_request))
        .route("/admin/v1/requests/{request}/explain", get(explain_request))
        .route("/admin/v1/projections", get(list_projections))
        .route("/admin/v1/{*page}", get(nothing_here))
        .method_not_allowed_fallback(no_such_method)
        .route_layer(from_fn_with_state(admin.clone(), admit))
        .with_state(admin)
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the admin token is missing or wrong: send it as `Authorization: Bearer …`")]
    Unauthorized,
    #[error("{0}")]
    Query(String),
    #[error(transparent)]
    Moment(#[from] MomentError),
    #[error(transparent)]
    Page(#[from] PageError),
    #[error("no session `{0}` is in the rows")]
    NoSession(String),
    #[error("several scopes have a session `{session}`: choose with `scope` ({scopes})")]
    WhichScope { session: String, scopes: String },
    #[error("no row names the request `{0}` (yet): `explain` looks in the log, too")]
    NoRequest(String),
    #[error("there is no such page here")]
    NotFound,
    #[error("this page is only to be read (GET)")]
    Method,
    #[error("{QUESTIONS_MAX} questions are under way: ask again")]
    Busy,
    #[error("the configuration names no usage store")]
    NoStore,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Log(#[from] ReadError),
    #[error("the request is not in the log")]
    NotInLog(#[source] ExplainError),
    #[error("the question could not be answered")]
    Broken(#[from] tokio::task::JoinError),
}

impl Failure {
    fn shape(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "invalid_admin_token"),
            Self::Query(_) | Self::Moment(_) => (StatusCode::BAD_REQUEST, "invalid_query"),
            Self::Page(PageError::Limit(_)) => (StatusCode::BAD_REQUEST, "invalid_limit"),
            Self::Page(PageError::Cursor) => (StatusCode::BAD_REQUEST, "invalid_cursor"),
            Self::WhichScope { .. } => (StatusCode::BAD_REQUEST, "scope_required"),
            Self::NoSession(_) => (StatusCode::NOT_FOUND, "session_not_found"),
            Self::NoRequest(_) | Self::NotInLog(_) => (StatusCode::NOT_FOUND, "request_not_found"),
            Self::NotFound => (StatusCode::NOT_FOUND, "not_found"),
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Self::NoStore | Self::Store(StoreError::Away { .. } | StoreError::NotProjected) => {
                (StatusCode::SERVICE_UNAVAILABLE, "usage_unavailable")
            }
            Self::Store(StoreError::Failed(_)) => (StatusCode::INTERNAL_SERVER_ERROR, "usage_failed"),
            Self::Log(_) => (StatusCode::SERVICE_UNAVAILABLE, "log_unavailable"),
            Self::Broken(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        }
    }
}

impl From<ListError> for Failure {
    fn from(error: ListError) -> Self {
        match error {
            ListError::Page(error) => Self::Page(error),
            ListError::Store(error) => Self::Store(error),
        }
    }
}

impl From<ExplainError> for Failure {
    fn from(error: ExplainError) -> Self {
        match error {
            ExplainError::Store(error) => Self::Store(error),
            ExplainError::Log(error) => Self::Log(error),
            ExplainError::Unknown(_) => Self::NotInLog(error),
        }
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Self {
        Self::Query(rejection.body_text())
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Self {
        Self::Query(rejection.body_text())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, code) = self.shape();
        if status.is_server_error() {
            tracing::warn!(error = &self as &dyn std::error::Error, code, "an admin question is not answered");
        }
        json_response(status, &json!({"error": {"code": code, "message": self.to_string()}}))
    }
}

fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    let body = serde_json::to_vec(value).expect("answers are plain data");
    let mut response = (status, body).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn admit(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    if bearer(request.headers()).is_some_and(|token| sum128(&[token.as_bytes()]) == admin.token) {
        return next.run(request).await;
    }
    Failure::Unauthorized.into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

type Answer = Result<Response, Failure>;

impl Admin {
    /// Answers a question on a thread that may block.
    async fn ask<T: Serialize + Send + 'static>(
        self: Arc<Self>,
        question: impl FnOnce(&mut Sources) -> Result<T, Failure> + Send + 'static,
    ) -> Answer {
        let permit = self.free.clone().try_acquire_owned().map_err(|_| Failure::Busy)?;
        let answered = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            question(&mut self.sources.lock().unwrap_or_else(PoisonError::into_inner))
        });
        Ok(json_response(StatusCode::OK, &answered.await??))
    }
}

impl Sources {
    fn usage(&mut self) -> Result<&mut dyn UsageStore, Failure> {
        match &mut self.usage {
            Some(usage) => Ok(usage.as_mut()),
            None => Err(Failure::NoStore),
        }
    }
}

/// What a list of sessions is asked with.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sought {
    scope: Option<String>,
    model: Option<String>,
    since: Option<String>,
    until: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

async fn list_sessions(State(admin): State<Arc<Admin>>, query: Result<Query<Sought>, QueryRejection>) -> Answer {
    let Query(Sought { scope, model, since, until, limit, cursor }) = query?;
    let page = Page::new(limit, cursor.as_deref())?;
    let [since, until] = [since, until].map(|text| text.as_deref().map(moment).transpose());
    let wanted = Filter { scope: scope.map(ScopeId::new), model, since: since?, until: until? };
    admin.ask(move |sources| Ok(sessions(sources.usage()?, &wanted, &page)?)).await
}

/// What the rounds of a session are asked with.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Within {
    scope: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

async fn list_rounds(
    State(admin): State<Arc<Admin>>,
    session: Result<Path<String>, PathRejection>,
    query: Result<Query<Within>, QueryRejection>,
) -> Answer {
    let (Path(session), Query(Within { scope, limit, cursor })) = (session?, query?);
    let page = Page::new(limit, cursor.as_deref())?;
    admin
        .ask(move |sources| {
            let store = sources.usage()?;
            let mut found = named(store, &SessionId::new(session.as_str()))?;
            found.retain(|found| scope.as_deref().is_none_or(|scope| found.scope.as_str() == scope));
            let [found] = found.as_slice() else { return Err(not_one(session, &found)) };
            let paged = rounds(store, &found.scope, &found.session, &page)?;
            Ok(json!({"session": found, "entries": paged.entries, "next": paged.next}))
        })
        .await
}

fn not_one(session: String, found: &[crate::sessions::Session]) -> Failure {
    if found.is_empty() {
        return Failure::NoSession(session);
    }
    let scopes: Vec<&str> = found.iter().map(|session| session.scope.as_str()).collect();
    Failure::WhichScope { session, scopes: scopes.join(", ") }
}

async fn show_request(State(admin): State<Arc<Admin>>, id: Result<Path<String>, PathRejection>) -> Answer {
    let Path(id) = id?;
    let found = move |sources: &mut Sources| {
        let found = request(sources.usage()?, &RequestId::new(id.as_str()))?;
        found.ok_or(Failure::NoRequest(id))
    };
    admin.ask(found).await
}

async fn explain_request(State(admin): State<Arc<Admin>>, id: Result<Path<String>, PathRejection>) -> Answer {
    let Path(id) = id?;
    let explained = move |sources: &mut Sources| {
        let Sources { usage, log } = sources;
        let usage = usage.as_mut().ok_or(Failure::NoStore)?;
        Ok(explain(log.as_mut(), usage.as_mut(), &RequestId::new(id))?)
    };
    admin.ask(explained).await
}

async fn list_projections(State(admin): State<Arc<Admin>>) -> Answer {
    let listed = |sources: &mut Sources| {
        let head = sources.log.head()?;
        Ok(json!({"head": head, "entries": projections(sources.usage()?, head)?}))
    };
    admin.ask(listed).await
}

async fn nothing_here() -> Failure {
    Failure::NotFound
}

async fn no_such_method() -> Failure {
    Failure::Method
}
