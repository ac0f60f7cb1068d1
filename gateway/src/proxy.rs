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
use waybill_routing::request::{self, BadBody, Inbound};
use waybill_routing::session::{self, Identity, SessionError, Signals, Whose};
use waybill_schema::catalogue::{Key, Pool};
use waybill_schema::event::{Context, Endpoint, SessionSource};
use waybill_schema::id::{GroupId, ModelName, RequestId, ScopeId, SessionId};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::answer::{self, Body, Marks};
use crate::body::{self, Bounds};
use crate::continuation::{self, Tie};
use crate::flight::{self, Crossing, Departure, Flight, Landing};
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
use crate::vault::{Asked, Claim, Vault};

/// How long a stream under an `Idempotency-Key` is taken to be under way beyond the time to its beginning, in milliseconds:
/// an hour. One that takes longer has, until it ends, an unknown outcome for who asks again (docs/adr/0039).
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
    /// The tenant that the key is of.
    pub(crate) scope: ScopeId,
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
    let serving = gateway.serving.load_full();
    let (head, body) = request.into_parts();
    let key = match authenticate(&serving, &head.headers) {
        Ok(key) => key,
        Err(refusal) => {
            body::leave(body, &head.headers, bounds(&serving, begun)).await;
            return turn_away(&gateway, endpoint, &id, &refusal);
        }
    };
    let mut arrived = Arrived {
        endpoint,
        query: head.uri.query().map(str::to_owned),
        headers: head.headers,
        body: Bytes::new(),
        form: None,
        scope: ScopeId::new(key.id.as_str()),
        key,
        serving,
        request: id,
        begun,
    };
    let answered = match arrived.read(body).await {
        Ok(()) => match errand {
            None => serve(&gateway, &arrived).await,
            // Boxed as in `Journey::travel`: few requests are about a response.
            Some(errand) => Box::pin(continuation::ask(&gateway, &arrived, errand)).await,
        },
        Err(refusal) => Err(refusal),
    };
    if let Some(unread) = arrived.form.as_ref().and_then(Filled::unread) {
        body::discard(unread, bounds(&arrived.serving, begun)).await;
    }
    answered.unwrap_or_else(|refusal| refuse(&gateway, &arrived, &refusal))
}

impl Arrived {
    /// Reads the body, or the beginning of a form that passes.
    async fn read(&mut self, mut body: Incoming) -> Result<(), Refusal> {
        let bounds = bounds(&self.serving, self.begun);
        let coding = match body::admit(&body, &self.headers, bounds) {
            Ok(coding) => coding,
            Err(refusal) => {
                body::leave(body, &self.headers, bounds).await;
                return Err(refusal);
            }
        };
        let form = gate::form_of(self.endpoint, &self.headers);
        let read = async {
            match &form {
                Some(form) => gate::gather(&mut body, form, bounds, is_guarded(&self.serving, &self.key)).await,
                None => {
                    let bytes = body::read(&mut body, &mut self.headers, coding, bounds).await?;
                    Ok(Gathered { bytes, ended: true })
                }
            }
        };
        let Gathered { bytes, ended } = match read.await {
            Ok(read) => read,
            Err(refusal) => {
                body::discard(body, bounds).await;
                return Err(refusal);
            }
        };
        let is_keyed = gate::idempotency_key(self.endpoint, &self.headers).is_some();
        let form = form.map(|form| Filled::new(form, &bytes, &self.headers, is_keyed, bounds));
        self.form = match form.transpose() {
            Ok(form) if ended => form,
            Ok(form) => form.map(|form| form.with_rest(body)),
            Err(bad) => {
                body::discard(body, bounds).await;
                return Err(bad.into());
            }
        };
        self.body = bytes;
        Ok(())
    }

    /// What is asked, as far as routing needs it.
    fn inbound(&self) -> Result<Inbound<'_>, BadBody> {
        match &self.form {
            Some(form) => request::of_form(self.endpoint, form.model()),
            None => request::parse(self.endpoint, &self.body),
        }
    }
}

/// Refuses a stranger, who leaves no fact: nobody may fill the log without a key.
fn turn_away(gateway: &Gateway, endpoint: Endpoint, id: &RequestId, refusal: &Refusal) -> Response<Body> {
    gateway.metrics.refused(refusal.code());
    let mut response = refusal.answer(Some(endpoint), id.as_str());
    answer::mark_request(endpoint, id.as_str(), response.headers_mut());
    response
}

/// Refuses a caller's request before anybody could be chosen to serve it. It leaves the fact that others leave (S1.11).
fn refuse(gateway: &Gateway, arrived: &Arrived, refusal: &Refusal) -> Response<Body> {
    gateway.metrics.refused(refusal.code());
    let mut response = refusal.answer(Some(arrived.endpoint), arrived.request.as_str());
    let context = context_of_refused(gateway, arrived);
    let marks = Marks {
        endpoint: arrived.endpoint,
        request: arrived.request.as_str(),
        session: context.session.as_str(),
        attempts: 0,
        fallback: false,
        deployment: None,
    };
    marks.set(response.headers_mut());
    // A session that was made for the record alone is nobody's to come back to.
    if context.source == SessionSource::Generated {
        response.headers_mut().remove(answer::SESSION_ID);
    }
    flight::grounded(gateway, &arrived.request, context, Landing::refused(refusal), arrived.begun);
    response
}

/// What the body of a request that began at `begun` must keep to: it has as long as the request itself.
fn bounds(serving: &Serving, begun: Instant) -> Bounds {
    let config = &serving.config;
    Bounds {
        bytes_max: (config.body_mib_max as usize) << 20,
        silence: Duration::from_secs(config.client_idle_seconds.into()),
        deadline: Some(begun + Duration::from_secs(config.retry.timeout_seconds.into())),
    }
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
    let inbound = arrived.inbound()?;
    let (group, model) = destination(arrived, &inbound)?;
    let rights = arrived.serving.catalogue.rights(&arrived.key);
    // Whether there is such a model is not said to who may not use it, nor is anybody asked what such a request goes on from.
    if !rights.may(model) {
        return Err(Refusal::ModelNotPermitted(model.to_owned()));
    }
    let pool = arrived.serving.catalogue.asked(&arrived.key, &group, model);
    let pool = pool.ok_or_else(|| Refusal::ModelNotFound(model.to_owned()))?;
    let tie = Tie::find(gateway, arrived, &inbound, model).await?;
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
    let mut journey = Journey { gateway, arrived, inbound, deadline, asks_usage: false, bodies: Vec::new() };
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

/// Takes the `Idempotency-Key` of a request whose outcome is kept under it.
async fn claim(gateway: &Gateway, arrived: &Arrived, flight: &Flight) -> Result<Option<Claim>, Refusal> {
    let Some(key) = gate::idempotency_key(arrived.endpoint, &arrived.headers) else { return Ok(None) };
    let timeout_ms = i64::from(arrived.serving.config.retry.timeout_seconds) * 1000;
    let stream_ms = if flight.context().stream { STREAM_MS } else { 0 };
    let until = Time::wall_clock().plus_ms(timeout_ms + stream_ms);
    let scope = &flight.context().scope;
    let asked = match &arrived.form {
        Some(form) => Asked::Form(form, &arrived.body),
        None => Asked::Bytes(&arrived.body),
    };
    gateway.vault.claim(scope, arrived.endpoint, key, asked, until).await.map(Some)
}

/// DESIGN.md section 4, step 1: what is refused here touches no deployment's health and no chain. What costs nothing is
/// asked first, and only what passes counts for the caller's limits.
async fn admit(gateway: &Gateway, arrived: &Arrived, flight: &Flight) -> Result<(), Refusal> {
    let (rights, context) = (flight.rights(), flight.context());
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
        Replay::RefusedOnly | Replay::UnsentOnly => Crossing::AfterFailure,
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
    let identity = identify(gateway, arrived, inbound, parent)?;
    let whose = Whose {
        scope: &arrived.scope,
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
    Ok(Context { sticky, ..context_without_affinity(arrived, inbound, pool.group.id.clone(), model, identity) })
}

/// Who asked for what, as far as a request says that is refused before that is settled. What it goes on from is not
/// believed, and nobody can meet a session that it names badly.
fn context_of_refused(gateway: &Gateway, arrived: &Arrived) -> Context {
    let inbound = arrived.inbound().unwrap_or_else(|_| Inbound::without_fields(arrived.endpoint, ""));
    let asked = destination(arrived, &inbound);
    let (group, model) = asked.unwrap_or_else(|_| (arrived.key.group.clone(), inbound.model.as_ref()));
    let identity = identify(gateway, arrived, &inbound, None);
    let identity = identity.unwrap_or_else(|_| Identity::generated(&uuid::Uuid::new_v4().to_string()));
    context_without_affinity(arrived, &inbound, group, model, identity)
}

fn context_without_affinity(
    arrived: &Arrived,
    inbound: &Inbound<'_>,
    group: GroupId,
    model: &str,
    identity: Identity,
) -> Context {
    let Identity { session, source, signal, .. } = identity;
    Context {
        scope: arrived.scope.clone(),
        key: arrived.key.id.clone(),
        group,
        model: ModelName::new(model),
        endpoint: arrived.endpoint,
        stream: inbound.stream,
        session,
        source,
        signal: signal.to_string(),
        sticky: None,
    }
}

fn identify(
    gateway: &Gateway,
    arrived: &Arrived,
    inbound: &Inbound<'_>,
    parent: Option<&SessionId>,
) -> Result<Identity, SessionError> {
    let signals = Signals {
        scope: &arrived.scope,
        secret: &gateway.secret,
        headers: &|name| arrived.headers.get_all(name).iter().map(HeaderValue::as_bytes).collect(),
        aliases: &arrived.serving.config.session.aliases,
        parent,
        fresh: &uuid::Uuid::new_v4().to_string(),
    };
    session::identify(&signals, inbound, arrived.endpoint)
}
