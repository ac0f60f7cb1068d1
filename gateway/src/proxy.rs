//! One request: the caller, the body, the session and the pool; the sends are a journey of their own.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::dispatch::Replay;
use waybill_routing::request::{self, Inbound};
use waybill_routing::session::{self, Identity, Signals, Whose};
use waybill_schema::catalogue::terms::Rights;
use waybill_schema::catalogue::{Key, Pool};
use waybill_schema::event::{Context, Endpoint};
use waybill_schema::id::{GroupId, ModelName, RequestId, ScopeId, SessionId};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::answer::{self, Body};
use crate::body;
use crate::continuation::{self, Tie};
use crate::flight::{Crossing, Departure, Flight};
use crate::gate::{self, Filled, Gathered, Repeats};
use crate::guardrail::Subject;
use crate::journey::Journey;
use crate::ledger::Ledger;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::serving::Serving;
use crate::shared::SharedState;
use crate::traffic::Traffic;
use crate::upstream::{Errand, Upstream};
use crate::vault::{Claim, Vault};

/// How long a stream under an `Idempotency-Key` is taken to be under way once it has begun, in milliseconds: an hour, more
/// than any answer takes.
const STREAM_MS: i64 = 3_600_000;

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
    /// What callers have left.
    pub limits: Limits,
    /// What was answered under an `Idempotency-Key`.
    pub vault: Vault,
    /// What this gateway knows of its own sends.
    pub traffic: Traffic,
}

/// A request with its body read and its caller known.
pub(crate) struct Arrived {
    pub(crate) endpoint: Endpoint,
    pub(crate) headers: HeaderMap,
    pub(crate) query: Option<String>,
    /// All of it, or the beginning of a form that passes.
    pub(crate) body: Bytes,
    /// The form that it is, where it was read as one.
    pub(crate) form: Option<Filled>,
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
        Ok(arrived) => {
            let answered = match errand {
                None => serve(&gateway, &arrived).await,
                Some(errand) => continuation::ask(&gateway, &arrived, errand).await,
            };
            if let Some(unread) = arrived.form.as_ref().and_then(Filled::unread) {
                body::discard(unread).await;
            }
            answered
        }
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
    let form = gate::form_of(endpoint, &head.headers);
    let read = async {
        let key = authenticate(&serving, &head.headers)?;
        let gathered = match &form {
            Some(form) => gate::gather(&mut body, form, silence, is_guarded(&serving, &key)).await?,
            None => Gathered { bytes: body::read(&mut body, &mut head.headers, silence).await?, ended: true },
        };
        Ok((key, gathered))
    };
    let (key, Gathered { bytes, ended }) = match read.await {
        Ok(read) => read,
        Err(refusal) => {
            body::discard(body).await;
            return Err(refusal);
        }
    };
    let rest = (!ended).then_some(body);
    let form = form.map(|form| Filled::new(form, &bytes, &head.headers, rest)).transpose()?;
    let query = head.uri.query().map(str::to_owned);
    Ok(Arrived { endpoint, headers: head.headers, query, body: bytes, form, key, serving, request: id, begun })
}

/// Whether guardrails must see the whole of what holders of `key` send.
fn is_guarded(serving: &Serving, key: &Arc<Key>) -> bool {
    serving.guards(&serving.catalogue.rights(key)).iter().any(|guard| guard.looks())
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
    let inbound = match &arrived.form {
        Some(form) => request::of_form(arrived.endpoint, form.model())?,
        None => request::parse(arrived.endpoint, &arrived.body)?,
    };
    let (group, model) = destination(arrived, &inbound)?;
    let rights = arrived.serving.catalogue.rights(&arrived.key);
    let pool = arrived.serving.catalogue.asked(&arrived.key, &group, model).ok_or_else(|| unknown(&rights, model))?;
    let tie = tie(gateway, arrived, &inbound, &rights, model).await?;
    let pool = tie.narrow(pool, arrived)?;
    let context = context(gateway, arrived, &inbound, &pool, model, tie.parent())?;
    let mut flight = Flight::new(Departure {
        gateway: gateway.clone(),
        serving: arrived.serving.clone(),
        pool,
        crossing: crossing(arrived, &inbound, &tie),
        request: arrived.request.clone(),
        context,
        rights,
        hold: tie.hold,
        kept: tie.kept,
        begun: arrived.begun,
    });
    let deadline = Instant::now() + Duration::from_secs(arrived.serving.config.retry.timeout_seconds.into());
    let admitted = admit(gateway, arrived, &flight).await;
    let journey = Journey { gateway, arrived, inbound, deadline, bodies: Vec::new() };
    let claimed = match admitted {
        Ok(()) => claim(gateway, arrived, &flight).await,
        Err(refusal) => Err(refusal),
    };
    match claimed {
        Ok(None) => {}
        Ok(Some(Claim::Taken(deposit))) => flight.answers_for(deposit),
        Ok(Some(Claim::Done(kept))) => return Ok(journey.repeat(flight, kept)),
        Err(refusal) => return Ok(journey.refuse(flight, &refusal)),
    }
    Ok(journey.travel(flight).await)
}

/// What the request goes on from. Nobody is asked that for a caller who may not use the model: it is refused here where
/// only the answer would name its session, without which nothing is recorded, and else by [`admit`], on record.
async fn tie(
    gateway: &Gateway,
    arrived: &Arrived,
    inbound: &Inbound<'_>,
    rights: &Rights,
    model: &str,
) -> Result<Tie, Refusal> {
    match inbound.previous_response_id {
        _ if rights.may(model) => Tie::find(gateway, arrived, inbound, model).await,
        Some(_) => Err(Refusal::ModelNotPermitted(model.to_owned())),
        None => Ok(Tie::default()),
    }
}

/// Takes the `Idempotency-Key` of a request whose outcome is kept under it.
async fn claim(gateway: &Gateway, arrived: &Arrived, flight: &Flight) -> Result<Option<Claim>, Refusal> {
    let Some(key) = gate::idempotency_key(arrived) else { return Ok(None) };
    let timeout_ms = i64::from(arrived.serving.config.retry.timeout_seconds) * 1000;
    let stream_ms = if flight.context().stream { STREAM_MS } else { 0 };
    let until = Time::wall_clock().plus_ms(timeout_ms + stream_ms);
    let scope = &flight.context().scope;
    gateway.vault.claim(scope, arrived.endpoint, key, &arrived.body, until).await.map(Some)
}

/// A model that nobody serves here; whether it is one elsewhere is not said to who may not use it.
fn unknown(rights: &Rights, model: &str) -> Refusal {
    let refusal = if rights.may(model) { Refusal::ModelNotFound } else { Refusal::ModelNotPermitted };
    refusal(model.to_owned())
}

/// DESIGN.md section 4, step 1: what is refused here touches no deployment's health and no chain. What costs nothing is
/// asked first, and only what passes counts for the caller's limits.
async fn admit(gateway: &Gateway, arrived: &Arrived, flight: &Flight) -> Result<(), Refusal> {
    let (rights, context) = (flight.rights(), flight.context());
    if !rights.may(context.model.as_str()) {
        return Err(Refusal::ModelNotPermitted(context.model.as_str().to_owned()));
    }
    let guards = arrived.serving.guards(rights);
    let texts = arrived.form.as_ref().filter(|_| !guards.is_empty()).map(|form| form.texts(&arrived.body));
    let body = texts.as_deref().unwrap_or(&arrived.body);
    guards.iter().try_for_each(|guard| guard.inspect(arrived.body.len(), body))?;
    gateway.limits.admit(rights, Time::wall_clock())?;
    for guard in guards {
        let subject = Subject { request: &arrived.request, context, body };
        guard.ask(&gateway.upstream, subject).await?;
    }
    Ok(())
}

/// S3.18, S3.19: a session's fallback model is only reused for a request that may be repeated. A continuation stays at its
/// owner (S3.16).
fn crossing(arrived: &Arrived, inbound: &Inbound<'_>, tie: &Tie) -> Crossing {
    if tie.hold.is_some() || inbound.disable_fallbacks {
        return Crossing::Never;
    }
    match gate::replay(arrived.endpoint, Repeats::of(arrived, tie.kept.is_strict())) {
        Replay::Free => Crossing::Free,
        Replay::RefusedOnly => Crossing::AfterFailure,
        Replay::Never => Crossing::Never,
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
