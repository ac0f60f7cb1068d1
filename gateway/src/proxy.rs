//! One request: authenticate, identify, choose, send, and answer.
//!
//! Plain answers and streams take the same path: a send either becomes an [`Answer`] that is committed to the client,
//! or fails with a verdict that the dispatch machine turns into the next step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::{AUTHORIZATION, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::classify::{self, Transport, UpstreamError, Verdict};
use waybill_routing::dispatch::{self, End, Limits, Next, Replay, Search};
use waybill_routing::observe::{self, Frame};
use waybill_routing::request::{self, Inbound};
use waybill_routing::select;
use waybill_routing::session::{self, Identity, Signals, Whose};
use waybill_schema::catalogue::{Key, Place, Pool};
use waybill_schema::config::AllCooling;
use waybill_schema::event::{Choice, Class, Context, Effect, Endpoint, Exclusion, Outcome};
use waybill_schema::id::{GroupId, ModelName, RequestId, ScopeId};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::answer::{self, Body, Marks, full};
use crate::flight::{Departure, Flight, Landing, Learnt};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::refusal::{Refusal, retry_after};
use crate::relay::{Feed, Relay, class_of};
use crate::serving::Serving;
use crate::upstream::{NoAnswer, Send, Upstream};

/// The largest request body, in bytes: 64 MiB, twice what the largest provider takes (PROVIDER_ERRORS L09).
pub const REQUEST_BYTES_MAX: usize = 64 << 20;
/// The largest plain answer, in bytes: 64 MiB, above any image a provider inlines.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The largest error body that is read, in bytes.
pub const ERROR_BYTES_MAX: usize = 1 << 20;

/// How long the rest of a refused body is read.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(10);

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
}

/// A request with its body read and its caller known.
struct Arrived {
    endpoint: Endpoint,
    headers: HeaderMap,
    query: Option<String>,
    body: Bytes,
    key: Arc<Key>,
    serving: Arc<Serving>,
    request: RequestId,
    begun: Instant,
}

/// Answers one request to an endpoint of a dialect.
pub async fn handle(gateway: Arc<Gateway>, endpoint: Endpoint, request: http::Request<Incoming>) -> Response<Body> {
    let begun = Instant::now();
    let id = RequestId::new(uuid::Uuid::now_v7().to_string());
    let answered = match arrive(&gateway, endpoint, request, id.clone(), begun).await {
        Ok(arrived) => serve(&gateway, &arrived).await,
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
    let (head, mut body) = request.into_parts();
    let read = async {
        let key = authenticate(&serving, &head.headers)?;
        Ok((key, read_body(&mut body).await?))
    };
    let (key, body) = match read.await {
        Ok(read) => read,
        Err(refusal) => {
            let _ = tokio::time::timeout(DISCARD_TIME_MAX, discard(body)).await;
            return Err(refusal);
        }
    };
    let query = head.uri.query().map(str::to_owned);
    Ok(Arrived { endpoint, headers: head.headers, query, body, key, serving, request: id, begun })
}

async fn read_body(body: &mut Incoming) -> Result<Bytes, Refusal> {
    match Limited::new(body, REQUEST_BYTES_MAX).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::TooLarge { limit_bytes: REQUEST_BYTES_MAX }),
        Err(_) => Err(Refusal::BodyUnread),
    }
}

/// Reads on past a refusal, within bounds: a client that is still sending when its connection is closed gets a reset
/// instead of the answer.
async fn discard(mut body: Incoming) {
    let mut left = REQUEST_BYTES_MAX;
    while let Some(Ok(frame)) = body.frame().await
        && left > 0
    {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
    }
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
    let pool = arrived.serving.catalogue.pool(&group, model).ok_or_else(|| Refusal::ModelNotFound(model.to_owned()))?;
    let context = context(gateway, arrived, &inbound, &pool, model)?;
    let flight = Flight::new(Departure {
        gateway: gateway.clone(),
        serving: arrived.serving.clone(),
        pool,
        request: arrived.request.clone(),
        context,
        begun: arrived.begun,
    });
    let deadline = Instant::now() + seconds(arrived.serving.config.retry.timeout_seconds);
    Ok(Journey { gateway, arrived, inbound, deadline, bodies: Vec::new() }.travel(flight).await)
}

/// S1.4: the group of `X-Waybill-Group` or of a model written `group/model`, where the key allows it, else the key's.
fn destination<'a>(arrived: &Arrived, inbound: &'a Inbound<'_>) -> Result<(GroupId, &'a str), Refusal> {
    let key = &arrived.key;
    let allowed = |name: &str| std::iter::once(&key.group).chain(&key.groups).find(|group| group.as_str() == name);
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

/// The sends of one request.
struct Journey<'a> {
    gateway: &'a Gateway,
    arrived: &'a Arrived,
    inbound: Inbound<'a>,
    /// When the whole of a plain answer, or the beginning of a stream, must be there, however many sends it takes.
    deadline: Instant,
    /// The body as each upstream model wants it; most requests need one.
    bodies: Vec<(ModelName, Bytes)>,
}

/// An answer whose first meaningful part is here.
enum Answer {
    /// All of it.
    Whole { status: StatusCode, headers: HeaderMap, body: Bytes, class: Class, learnt: Learnt },
    /// The beginning of a stream; a terminal frame may already be among it.
    Stream { headers: HeaderMap, feed: Box<Feed>, ready: VecDeque<Bytes>, ended: Option<Class> },
}

/// A send that brought no answer, and what the client would be shown.
struct Failure {
    verdict: Verdict,
    learnt: Learnt,
    shown: Shown,
}

enum Shown {
    /// The upstream's own error, unchanged.
    Theirs { status: StatusCode, headers: HeaderMap, body: Bytes },
    /// An error of ours.
    Ours(Refusal),
}

impl Journey<'_> {
    async fn travel(mut self, mut flight: Flight) -> Response<Body> {
        let mut search = dispatch::begin(self.limits());
        let mut failure: Option<Failure> = None;
        loop {
            let (attempt, place) = match self.choose(&mut flight, search).await {
                Ok(chosen) => chosen,
                Err(choice) => return self.without_route(flight, &choice, failure),
            };
            match self.send_here(&mut flight, attempt, place).await {
                Ok((attempt, answer)) => return self.commit(flight, attempt, answer),
                Err((next, failed)) => match next {
                    Next::Other(further) => {
                        search = further;
                        failure = Some(failed);
                    }
                    Next::End(end) => return self.give_up(flight, failed, end),
                    Next::Same { .. } => unreachable!("send_here goes on while the same deployment is sent to again"),
                },
            }
        }
    }

    fn limits(&self) -> Limits {
        let retry = &self.arrived.serving.config.retry;
        Limits {
            max_attempts: retry.max_attempts,
            retry_times: if retry.cross_channel { retry.retry_times } else { 0 },
            sends_max: retry.sends_max,
            backoff_ms: u64::from(retry.backoff_ms),
            deadline: Time::wall_clock().plus_ms(millis_until(self.deadline)),
            replay: if self.inbound.background { Replay::RefusedOnly } else { Replay::Free },
        }
    }

    /// Chooses; where every candidate cools and the setting says so, waits for the soonest and chooses once more.
    async fn choose(&self, flight: &mut Flight, search: Search) -> Result<(dispatch::Attempt, Place), Choice> {
        let all_cooling = self.arrived.serving.config.retry.all_cooling;
        let (search, choice) = match flight.choose(search, all_cooling == AllCooling::BestEffort) {
            Ok(chosen) => return Ok(chosen),
            Err(refused) => *refused,
        };
        let wait = select::soonest(&choice).map(|soonest| Time::wall_clock().until(soonest));
        match (all_cooling, wait) {
            (AllCooling::Wait(bound), Some(wait))
                if wait <= seconds(bound) && Instant::now() + wait < self.deadline =>
            {
                tokio::time::sleep(wait + Duration::from_millis(1)).await;
                flight.choose(search, false).map_err(|refused| refused.1)
            }
            _ => Err(choice),
        }
    }

    /// Sends to one deployment until it answers or its attempts are used up.
    async fn send_here(
        &mut self,
        flight: &mut Flight,
        mut attempt: dispatch::Attempt,
        place: Place,
    ) -> Result<(dispatch::Attempt, Answer), (Next, Failure)> {
        loop {
            let failure = match self.send(flight, &place).await {
                Ok(answer) => return Ok((attempt, answer)),
                Err(failure) => failure,
            };
            flight.failed(&failure.verdict, failure.learnt.clone());
            match attempt.fail(&failure.verdict, Time::wall_clock()) {
                Next::Same { attempt: again, after_ms } => {
                    tokio::time::sleep(Duration::from_millis(after_ms)).await;
                    flight.again(place.clone());
                    attempt = again;
                }
                next @ (Next::Other(_) | Next::End(_)) => return Err((next, failure)),
            }
        }
    }

    async fn send(&mut self, flight: &mut Flight, place: &Place) -> Result<Answer, Failure> {
        let spread = flight.context().sticky.as_ref().map_or(flight.request().as_str(), |sticky| sticky.key.as_str());
        let send = Send {
            endpoint: self.arrived.endpoint,
            place,
            group: &flight.context().group,
            headers: &self.arrived.headers,
            query: self.arrived.query.as_deref(),
            credential: self.arrived.serving.credential(&place.channel.id, spread.as_bytes()),
        };
        let request = send.request(self.body_for(&place.upstream_model));
        let request = request.ok_or_else(|| Failure::transport(Transport::Connect))?;
        let first_token = Instant::now() + self.first_token_limit(flight);
        let answer = async {
            let response = self.gateway.upstream.send(request).await.map_err(Failure::no_answer)?;
            self.read(flight, response).await
        };
        match tokio::time::timeout_at(first_token.min(self.deadline), answer).await {
            Ok(answer) => answer,
            Err(_) if first_token < self.deadline => Err(Failure::transport(Transport::FirstTokenTimeout)),
            Err(_) => Err(out_of_time(flight)),
        }
    }

    /// The time for the first meaningful frame of a stream; a plain answer has until the request's deadline.
    fn first_token_limit(&self, flight: &Flight) -> Duration {
        let retry = &self.arrived.serving.config.retry;
        let own = flight.first_token_seconds().unwrap_or(retry.first_token_seconds);
        seconds(if self.inbound.stream { own } else { retry.timeout_seconds })
    }

    /// The body with this upstream's model name; the client's own bytes where nothing changes.
    fn body_for(&mut self, model: &ModelName) -> Bytes {
        if let Some((_, body)) = self.bodies.iter().find(|(known, _)| known == model) {
            return body.clone();
        }
        let changed = self.inbound.upstream_body(&self.arrived.body, model.as_str(), true);
        let body = changed.map_or_else(|| self.arrived.body.clone(), Bytes::from);
        self.bodies.push((model.clone(), body.clone()));
        body
    }

    async fn read(&self, flight: &mut Flight, response: Response<Incoming>) -> Result<Answer, Failure> {
        let (head, body) = response.into_parts();
        if !head.status.is_success() {
            return Err(self.read_error(head, body).await);
        }
        let streams = answer::is_event_stream(&head.headers);
        match (self.inbound.stream, streams) {
            (true, true) => self.open_stream(flight, head.headers, body).await,
            (false, true) => Err(Failure::transport(Transport::Malformed)),
            (_, false) => self.read_whole(head, body).await,
        }
    }

    async fn read_error(&self, head: http::response::Parts, body: Incoming) -> Failure {
        let body =
            Limited::new(body, ERROR_BYTES_MAX).collect().await.map(|whole| whole.to_bytes()).unwrap_or_default();
        let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let now = Time::wall_clock();
        let verdict = classify::head(self.arrived.endpoint, head.status.as_u16(), &header, &body, now);
        Failure {
            shown: show_error(head.status, &head.headers, body, &verdict),
            learnt: Learnt { status: Some(head.status.as_u16()), ..Learnt::default() },
            verdict,
        }
    }

    async fn read_whole(&self, head: http::response::Parts, body: Incoming) -> Result<Answer, Failure> {
        let status = Some(head.status.as_u16());
        let whole = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = whole.map_err(|_| Failure::transport(Transport::Cut).with_status(status))?.to_bytes();
        if !answer::may_be_json(&head.headers) {
            return Err(Failure::transport(Transport::Html).with_status(status));
        }
        let fault = |transport| Failure::transport(transport).with_status(status);
        let whole = match observe::json(self.arrived.endpoint, &body) {
            Ok(whole) if self.inbound.stream && !self.inbound.background => {
                tracing::debug!(?whole.terminal, "a plain answer to a request for a stream");
                return Err(fault(Transport::Malformed));
            }
            Ok(whole) if whole.empty => return Err(fault(Transport::Empty)),
            Ok(whole) => whole,
            Err(observe::Fault::Error(error)) => {
                return Err(Failure::reported(self.arrived.endpoint, &error).with_status(status));
            }
            Err(observe::Fault::Html) => return Err(fault(Transport::Html)),
            Err(observe::Fault::Foreign) => return Err(fault(Transport::Malformed)),
        };
        let Some(class) = class_of(whole.terminal) else { return Err(fault(Transport::Cut)) };
        let served_model = whole.served_model.map(|model| model.as_str().to_owned());
        let learnt = Learnt { status, usage: whole.usage, served_model };
        Ok(Answer::Whole { status: head.status, headers: head.headers, body, class, learnt })
    }

    /// Holds the stream back until its first meaningful frame: until then another deployment may still answer.
    async fn open_stream(&self, flight: &mut Flight, headers: HeaderMap, body: Incoming) -> Result<Answer, Failure> {
        let mut feed = Box::new(Feed::new(self.arrived.endpoint, body, !self.inbound.asks_usage()));
        let mut ready = VecDeque::new();
        let failure = loop {
            let passed = match feed.next().await {
                Ok(Some(passed)) => passed,
                Ok(None) => match feed.at_eof().and_then(class_of) {
                    Some(class) if !feed.is_empty() => {
                        return Ok(Answer::Stream { headers, feed, ready, ended: Some(class) });
                    }
                    Some(_) => break Failure::transport(Transport::Empty),
                    None => break Failure::transport(Transport::Cut),
                },
                Err(_) => break Failure::transport(Transport::Cut),
            };
            match passed.frame {
                Frame::Lifecycle | Frame::UsageOnly => ready.push_back(passed.bytes),
                Frame::Meaningful => {
                    ready.push_back(passed.bytes);
                    flight.first_token();
                    return Ok(Answer::Stream { headers, feed, ready, ended: None });
                }
                Frame::Terminal(terminal) => match class_of(terminal) {
                    Some(class) if !feed.is_empty() => {
                        ready.push_back(passed.bytes);
                        return Ok(Answer::Stream { headers, feed, ready, ended: Some(class) });
                    }
                    Some(_) => break Failure::transport(Transport::Empty),
                    None => break Failure::transport(Transport::Cut),
                },
                Frame::Error(error) => break Failure::reported(self.arrived.endpoint, &error),
            }
        };
        Err(Failure { learnt: feed.learnt(), ..failure })
    }

    /// From here the client has its answer, and only its end is open.
    fn commit(&self, mut flight: Flight, attempt: dispatch::Attempt, answer: Answer) -> Response<Body> {
        let committed = attempt.commit();
        let place = flight.place().cloned();
        let marks = |flight: &Flight, headers: &mut HeaderMap| {
            let exposed = place.as_ref().filter(|_| self.arrived.key.expose_route);
            self.mark(flight, headers, exposed.map(|place| place.deployment.as_str()));
        };
        match answer {
            Answer::Whole { status, headers, body, class, learnt } => {
                flight.succeeded(class, learnt, status.as_u16());
                let mut response = Response::new(full(body));
                *response.status_mut() = status;
                *response.headers_mut() = answer::passed_on(&headers);
                marks(&flight, response.headers_mut());
                response
            }
            Answer::Stream { headers, feed, ready, ended } => {
                let mut passed = answer::passed_on(&headers);
                marks(&flight, &mut passed);
                let idle = seconds(self.arrived.serving.config.retry.idle_seconds);
                let mut relay = Relay::new(*feed, flight, committed, ready, idle);
                if let Some(class) = ended {
                    relay.complete(class);
                }
                let mut response = Response::new(Body::Relay(Box::new(relay)));
                *response.headers_mut() = passed;
                response
            }
        }
    }

    fn give_up(&self, mut flight: Flight, failure: Failure, end: End) -> Response<Body> {
        // A 429 without Retry-After ends Codex at once; one above a minute is ignored by others (CLIENTS.md, rule 7).
        let unsaid = (failure.verdict.class == Class::RateLimited).then_some(1000);
        let wait_ms = failure.verdict.retry_after_ms.or(unsaid);
        let (mut response, code) = match failure.shown {
            Shown::Ours(refusal) => {
                (refusal.answer(Some(self.arrived.endpoint), flight.request().as_str()), Some(refusal.code()))
            }
            Shown::Theirs { status, headers, body } => {
                let mut response = Response::new(full(body));
                *response.status_mut() = status;
                *response.headers_mut() = answer::passed_on(&headers);
                (response, None)
            }
        };
        let headers = response.headers_mut();
        if let Some(ms) = wait_ms {
            headers.insert(RETRY_AFTER, retry_after(ms));
        }
        if end != End::Final {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        self.mark(&flight, headers, None);
        let outcome = Outcome::Failed;
        flight.ended(Landing { outcome, status: Some(response.status().as_u16()), code });
        response
    }

    /// Nobody may be sent to: the failure of the last send, if there was one, else a refusal that names the reasons.
    fn without_route(&self, mut flight: Flight, choice: &Choice, failure: Option<Failure>) -> Response<Body> {
        if let Some(failure) = failure {
            return self.give_up(flight, failure, End::Exhausted);
        }
        let refusal = no_route(self.arrived.endpoint, choice);
        self.gateway.metrics.refused(refusal.code());
        let mut response = refusal.answer(Some(self.arrived.endpoint), flight.request().as_str());
        self.mark(&flight, response.headers_mut(), None);
        let (status, code) = (Some(refusal.status().as_u16()), Some(refusal.code()));
        flight.ended(Landing { outcome: Outcome::Refused, status, code });
        response
    }

    fn mark(&self, flight: &Flight, headers: &mut HeaderMap, deployment: Option<&str>) {
        let marks = Marks {
            endpoint: self.arrived.endpoint,
            request: flight.request().as_str(),
            session: flight.context().session.as_str(),
            attempts: flight.sends(),
            deployment,
        };
        marks.set(headers);
    }
}

impl Failure {
    fn transport(transport: Transport) -> Self {
        let verdict = classify::transport(transport);
        let timed_out = verdict.class == Class::Timeout;
        let refusal = Refusal::Upstream {
            why: happened(transport).to_owned(),
            status: if timed_out { StatusCode::GATEWAY_TIMEOUT } else { StatusCode::BAD_GATEWAY },
            code: if timed_out { "upstream_timeout" } else { "upstream_unavailable" },
            retry_after_ms: None,
        };
        Self { verdict, learnt: Learnt::default(), shown: Shown::Ours(refusal) }
    }

    fn no_answer(no_answer: NoAnswer) -> Self {
        match no_answer {
            NoAnswer::Connect => Self::transport(Transport::Connect),
            NoAnswer::Broken => Self::transport(Transport::Broken),
        }
    }

    /// An error that the upstream reported inside a 200.
    fn reported(endpoint: Endpoint, error: &UpstreamError) -> Self {
        let verdict = classify::upstream_error(endpoint, error, Time::wall_clock());
        let said = if error.message.is_empty() { "it reported an error" } else { &error.message };
        Self { shown: Shown::Ours(ours_for(&verdict, said)), verdict, learnt: Learnt::default() }
    }

    fn with_status(mut self, status: Option<u16>) -> Self {
        self.learnt.status = status;
        self
    }
}

/// The request's time is over. It says nothing about a deployment that was given only what others had left of it.
fn out_of_time(flight: &Flight) -> Failure {
    let mut failure = Failure::transport(Transport::TotalTimeout);
    if flight.sends() > 1 {
        failure.verdict.effect = Effect::None;
    }
    failure
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

fn millis_until(deadline: Instant) -> i64 {
    let left = deadline.saturating_duration_since(Instant::now());
    i64::try_from(left.as_millis()).unwrap_or(i64::MAX)
}

fn happened(transport: Transport) -> &'static str {
    match transport {
        Transport::Connect => "it could not be reached",
        Transport::Broken => "the connection broke before it answered",
        Transport::ConnectTimeout => "connecting took too long",
        Transport::FirstTokenTimeout => "nothing meaningful came in time",
        Transport::TotalTimeout => "it took too long",
        Transport::IdleTimeout => "it fell silent",
        Transport::Cut => "its answer broke off",
        Transport::Malformed => "its answer is not of this API",
        Transport::Empty => "its answer is empty",
        Transport::Html => "it answered with a page instead of JSON",
    }
}

/// Which error answer the client is shown: the upstream's own where it is one in the client's dialect and about the
/// client's request; ours where it is about the gateway's credential, is no JSON, or is a redirection (DESIGN.md,
/// section 10).
fn show_error(status: StatusCode, headers: &HeaderMap, body: Bytes, verdict: &Verdict) -> Shown {
    let is_error = status.is_client_error() || status.is_server_error();
    let json = answer::may_be_json(headers) && serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok();
    if is_error && json && !about_the_gateway(verdict.class) {
        return Shown::Theirs { status, headers: headers.clone(), body };
    }
    Shown::Ours(ours_for(verdict, &format!("it answered {status}")))
}

/// Whether an upstream's error is about the gateway's own account there: its words are not the caller's business, and
/// may quote a credential.
pub(crate) fn about_the_gateway(class: Class) -> bool {
    matches!(class, Class::InvalidKey | Class::QuotaExhausted)
}

fn ours_for(verdict: &Verdict, said: &str) -> Refusal {
    let why = match verdict.class {
        Class::InvalidKey => "it refused the gateway's credential",
        Class::QuotaExhausted => "the gateway's account there is exhausted",
        _ => said,
    };
    let (status, code) = match verdict.class {
        Class::RateLimited => (StatusCode::TOO_MANY_REQUESTS, "upstream_rate_limited"),
        Class::Timeout => (StatusCode::GATEWAY_TIMEOUT, "upstream_timeout"),
        Class::InvalidKey | Class::QuotaExhausted => (StatusCode::SERVICE_UNAVAILABLE, "no_route_available"),
        Class::ContextLength => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
        Class::ContentPolicy => (StatusCode::BAD_REQUEST, "content_policy"),
        Class::CallerError => (StatusCode::BAD_REQUEST, "upstream_refused"),
        Class::ModelUnsupported => (StatusCode::NOT_FOUND, "model_not_found"),
        Class::Success
        | Class::Incomplete
        | Class::Upstream5xx
        | Class::Unavailable
        | Class::Malformed
        | Class::Interrupted
        | Class::Cancelled
        | Class::Abandoned => (StatusCode::BAD_GATEWAY, "upstream_unavailable"),
    };
    Refusal::Upstream { why: why.to_owned(), status, code, retry_after_ms: verdict.retry_after_ms }
}

fn no_route(endpoint: Endpoint, choice: &Choice) -> Refusal {
    // By the counts, which cover all: of the candidates only the first are kept.
    let speaks = choice.excluded.iter().any(|count| count.code != Exclusion::Endpoint);
    if endpoint == Endpoint::CountTokens && !speaks {
        return Refusal::NotSupported;
    }
    let now = Time::wall_clock();
    let reasons: Vec<String> =
        choice.excluded.iter().map(|count| format!("{} {}", count.n, word(count.code))).collect();
    let soonest_ms = select::soonest(choice).map(|soonest| soonest.ms_since(now));
    Refusal::NoRoute { why: reasons.join(", "), soonest_ms }
}

fn word(code: Exclusion) -> &'static str {
    match code {
        Exclusion::Disabled => "disabled",
        Exclusion::ZeroWeight => "with weight 0",
        Exclusion::Endpoint => "without this endpoint",
        Exclusion::Credential => "without a credential",
        Exclusion::Blocked => "not serving this model",
        Exclusion::Cooling => "cooling down",
        Exclusion::Exhausted => "tried in vain",
    }
}
