//! One request: the caller, the body, the session and the pool; the sends are a journey of their own.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::request::{self, Inbound};
use waybill_routing::session::{self, Identity, Signals, Whose};
use waybill_schema::catalogue::{Key, Pool};
use waybill_schema::event::{Context, Endpoint};
use waybill_schema::id::{GroupId, ModelName, RequestId, ScopeId, SessionId};
use waybill_schema::secret::DeploymentSecret;

use crate::answer::{self, Body};
use crate::body;
use crate::continuation::{self, Tie};
use crate::flight::{Crossing, Departure, Flight};
use crate::journey::Journey;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::serving::Serving;
use crate::shared::SharedState;
use crate::traffic::Traffic;
use crate::upstream::{Errand, Upstream};

/// The data plane.
#[derive(Debug)]
pub struct Gateway {
    /// Facts and routing state.
    pub ledger: Ledger,
    /// What is in force.
    pub serving: ArcSwap<Serving>,
    /// The client of all upstreams.
    pub upstream: Upstream,
    /// Counters for `/metrics`.
    pub metrics: Metrics,
    /// The key of content hashes.
    pub secret: DeploymentSecret,
    /// What gateways know of each other.
    pub shared: Arc<dyn SharedState>,
    /// What this gateway knows of its own sends.
    pub traffic: Traffic,
}

/// A request with its body read and its caller known.
pub(crate) struct Arrived {
    pub(crate) endpoint: Endpoint,
    pub(crate) headers: HeaderMap,
    pub(crate) query: Option<String>,
    pub(crate) body: Bytes,
    pub(crate) key: Arc<Key>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) request: RequestId,
    pub(crate) begun: Instant,
}

/// Answers one request to an endpoint of a dialect, or about a response that was made there.
pub async fn handle(
    gateway: Arc<Gateway>,
    endpoint: Endpoint,
    errand: Option<Errand>,
    request: http::Request<Incoming>,
) -> Response<Body> {
    let begun = Instant::now();
    let id = RequestId::new(uuid::Uuid::now_v7().to_string());
    let answered = match arrive(&gateway, endpoint, request, id.clone(), begun).await {
        Ok(arrived) => match errand {
            None => serve(&gateway, &arrived).await,
            Some(errand) => continuation::ask(&gateway, &arrived, errand).await,
        },
        Err(refusal) => Err(refusal),
    };
    answered.unwrap_or_else(|refusal| {
        gateway.metrics.refused(refusal.code());
        let mut response = refusal.answer(Some(endpoint), id.as_str());
        if let Ok(value) = HeaderValue::from_str(id.as_str()) {
            response.headers_mut().insert("x-waybill-request-id", value.clone());
            response.headers_mut().insert(answer::request_id_header(endpoint), value);
        }
        response
    })
}

async fn arrive(
    gateway: &Arc<Gateway>,
    endpoint: Endpoint,
    request: http::Request<Incoming>,
    id: RequestId,
    begun: Instant,
) -> Result<Arrived, Refusal> {
    let serving = gateway.serving.load_full();
    let (mut head, mut body) = request.into_parts();
    let silence = Duration::from_secs(serving.config.client_idle_seconds.into());
    let read = async {
        let key = authenticate(&serving, &head.headers)?;
        Ok((key, body::read(&mut body, &mut head.headers, silence).await?))
    };
    let (key, body) = match read.await {
        Ok(read) => read,
        Err(refusal) => {
            body::discard(body).await;
            return Err(refusal);
        }
    };
    let query = head.uri.query().map(str::to_owned);
    Ok(Arrived { endpoint, headers: head.headers, query, body, key, serving, request: id, begun })
}

/// The caller, by `Authorization: Bearer` or `x-api-key` (CLIENTS.md, rule 10).
pub fn authenticate(serving: &Serving, headers: &HeaderMap) -> Result<Arc<Key>, Refusal> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (kind, secret) = value.as_bytes().split_at_checked(7)?;
        kind.eq_ignore_ascii_case(b"bearer ").then(|| secret.trim_ascii())
    });
    let plain = headers.get("x-api-key").map(HeaderValue::as_bytes);
    let secrets = [bearer, plain];
    secrets.into_iter().flatten().find_map(|secret| serving.caller(secret)).cloned().ok_or(Refusal::InvalidApiKey)
}

async fn serve(gateway: &Arc<Gateway>, arrived: &Arrived) -> Result<Response<Body>, Refusal> {
    let inbound = request::parse(arrived.endpoint, &arrived.body)?;
    let (group, model) = destination(arrived, &inbound)?;
    let pool = arrived.serving.catalogue.asked(&arrived.key, &group, model);
    let pool = pool.ok_or_else(|| Refusal::ModelNotFound(model.to_owned()))?;
    let tie = Tie::find(gateway, arrived, &inbound, model).await?;
    let pool = tie.narrow(pool, arrived)?;
    let context = context(gateway, arrived, &inbound, &pool, model, tie.parent())?;
    let flight = Flight::new(Departure {
        gateway: gateway.clone(),
        serving: arrived.serving.clone(),
        key: arrived.key.clone(),
        pool,
        // A continuation stays at its owner (S3.16).
        crossing: if tie.hold.is_some() { Crossing::Never } else { crossing(&inbound) },
        request: arrived.request.clone(),
        context,
        hold: tie.hold,
        kept: tie.kept,
        begun: arrived.begun,
    });
    let deadline = Instant::now() + Duration::from_secs(arrived.serving.config.retry.timeout_seconds.into());
    Ok(Journey { gateway, arrived, inbound, deadline, bodies: Vec::new() }.travel(flight).await)
}

/// S3.18, S3.19: a session's fallback model is only reused for a request that may be repeated.
fn crossing(inbound: &Inbound<'_>) -> Crossing {
    match (inbound.disable_fallbacks, inbound.background) {
        (true, _) => Crossing::Never,
        (false, true) => Crossing::AfterFailure,
        (false, false) => Crossing::Free,
    }
}

/// S1.4: the group of `X-Waybill-Group` or of a model written `group/model`, where the key allows it, else the key's.
fn destination<'a>(arrived: &Arrived, inbound: &'a Inbound<'_>) -> Result<(GroupId, &'a str), Refusal> {
    let key = &arrived.key;
    let allowed = |name: &str| key.group_named(name);
    if let Some(named) = arrived.headers.get("x-waybill-group") {
        let named = named.to_str().unwrap_or_default();
        let group = allowed(named).ok_or_else(|| Refusal::GroupNotAllowed(named.to_owned()))?;
        return Ok((group.clone(), inbound.model.as_ref()));
    }
    if let Some((prefix, model)) = inbound.model.split_once('/')
        && let Some(group) = allowed(prefix)
    {
        return Ok((group.clone(), model));
    }
    Ok((key.group.clone(), inbound.model.as_ref()))
}

fn context(
    gateway: &Gateway,
    arrived: &Arrived,
    inbound: &Inbound<'_>,
    pool: &Pool,
    model: &str,
    parent: Option<&SessionId>,
) -> Result<Context, Refusal> {
    let Arrived { endpoint, key, serving, .. } = arrived;
    let scope = ScopeId::new(key.id.as_str());
    let fresh = uuid::Uuid::new_v4().to_string();
    let identity = session::identify(
        &Signals {
            scope: &scope,
            secret: &gateway.secret,
            headers: &|name| arrived.headers.get_all(name).iter().map(HeaderValue::as_bytes).collect(),
            aliases: &serving.config.session.aliases,
            parent,
            fresh: &fresh,
        },
        inbound,
        *endpoint,
    )?;
    let whose = Whose {
        scope: &scope,
        secret: &gateway.secret,
        key: Some(&key.id),
        group: &pool.group.id,
        model,
        endpoint: *endpoint,
        mode: serving.sticky_policy(&pool.group).mode,
        ip: None,
    };
    let sticks = serving.config.sticky_enabled && pool.route.sticky_session;
    let sticky = if sticks { session::sticky(&identity, inbound, &whose) } else { None };
    let Identity { session, source, signal, .. } = identity;
    Ok(Context {
        scope,
        key: key.id.clone(),
        group: pool.group.id.clone(),
        model: ModelName::new(model),
        endpoint: *endpoint,
        stream: inbound.stream,
        session,
        source,
        signal: signal.to_string(),
        sticky,
    })
}
