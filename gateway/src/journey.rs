//! The journey of a request: its sends to one deployment after another, until one answers or none is left.
//!
//! Plain answers and streams take the same path: a send either becomes an `Answer` that is committed to the client,
//! or fails with a verdict that the dispatch machine turns into the next step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::classify::{self, Here, Recourse, Transport, Verdict};
use waybill_routing::dispatch::{self, End, Limits, Next, Search};
use waybill_routing::observe::{self, Frame};
use waybill_routing::request::Inbound;
use waybill_routing::select;
use waybill_schema::catalogue::Place;
use waybill_schema::config::AllCooling;
use waybill_schema::event::{Choice, Class, Effect, Endpoint, Exclusion, Outcome};
use waybill_schema::id::ModelName;
use waybill_schema::time::Time;

use crate::answer::{self, Body, Marks, full};
use crate::body::{self, Bounds};
use crate::failure::{self, Empty, Failure, Shown, show_error};
use crate::flight::{Flight, Landing, Learnt, Seen, Stuck};
use crate::gate::{self, Filled, Outgoing, Passage, Repeats};
use crate::proxy::{Arrived, Gateway};
use crate::refusal::{Refusal, retry_after};
use crate::relay::{Feed, Relay, class_of, joined};
use crate::unpacked::Unpacked;
use crate::upstream::Send;
use crate::vault::Kept;

/// The largest plain answer, in bytes: 64 MiB, above any image a provider inlines.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The largest error body that is read, in bytes.
pub const ERROR_BYTES_MAX: usize = 1 << 20;

/// The sends of one request.
pub(crate) struct Journey<'a> {
    pub(crate) gateway: &'a Gateway,
    pub(crate) arrived: &'a Arrived,
    pub(crate) inbound: Inbound<'a>,
    /// When the whole of a plain answer, or the beginning of a stream, must be there, however many sends it takes.
    pub(crate) deadline: Instant,
    /// Whether the send asks for the usage of a stream though the client does not.
    pub(crate) asks_usage: bool,
    /// The body as each upstream model wants it, and whether it asks so; most requests need one.
    pub(crate) bodies: Vec<(ModelName, bool, Bytes)>,
}

/// An answer whose first meaningful part is here.
enum Answer {
    /// All of it.
    Whole(Whole),
    /// The beginning of a stream; a terminal frame may already be among it.
    Stream { headers: HeaderMap, feed: Box<Feed>, ready: VecDeque<Bytes>, ended: Option<Class> },
    /// The beginning of one that passes as it comes.
    Passing { status: StatusCode, headers: HeaderMap, first: Bytes, body: Unpacked },
}

/// An answer of which all is here.
struct Whole {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    class: Class,
    learnt: Learnt,
}

/// Why there is nobody to send to.
enum Dead {
    /// No candidate is legal: how it stood in the pool of what was asked for, where that was looked at.
    Nobody(Option<Choice>),
    /// The caller may not go on.
    Refused(Refusal),
}

impl Journey<'_> {
    /// Sends until there is an answer or nothing left to try, and answers the client.
    ///
    /// Turns that few requests take are boxed: they would make the future of every request larger, which is moved about.
    pub(crate) async fn travel(&mut self, mut flight: Box<Flight>) -> Response<Body> {
        let mut search = dispatch::begin(self.limits(&flight));
        let mut recourse = Recourse::General;
        let mut failure: Option<Failure> = None;
        loop {
            let (attempt, place) = match self.choose(&mut flight, search, recourse).await {
                Ok(chosen) => chosen,
                Err(dead) => return Box::pin(self.without_route(flight, dead, failure)).await,
            };
            let (next, failed) = match self.send_here(&mut flight, attempt, place).await {
                Ok((attempt, answer)) => {
                    let response = self.commit(flight, attempt, answer).await;
                    together().await;
                    self.gateway.ledger.flush();
                    return response;
                }
                Err(failed) => failed,
            };
            recourse = failed.verdict.recourse;
            let shown = match failure {
                Some(before) => before.then(failed),
                None => failed,
            };
            search = match next {
                Next::Other(search) if flight.unpin() => search.enter_pool(),
                Next::Other(search) => search,
                Next::Spent { search, .. } if self.leaves(&mut flight, recourse) => search.enter_pool(),
                Next::Spent { end, .. } | Next::End(end) => return Box::pin(self.give_up(flight, shown, end)).await,
                Next::Same { .. } => unreachable!("send_here goes on while the same deployment is sent to again"),
            };
            failure = Some(shown);
        }
    }

    /// Leaves a pool that has no more to offer; tells whether there is another. A fallback model that the session's
    /// record led to stood before the pool of what was asked for, which comes after it.
    fn leaves(&self, flight: &mut Flight, recourse: Recourse) -> bool {
        (recourse == Recourse::General && flight.unpin()) || flight.fall_back(recourse)
    }

    fn limits(&self, flight: &Flight) -> Limits {
        let (held, strict) = (flight.hold().is_some(), flight.is_strict());
        let retry = &self.arrived.serving.config.retry;
        let policy = flight.policy();
        Limits {
            max_attempts: policy.and_then(|policy| policy.max_attempts).unwrap_or(retry.max_attempts),
            retry_times: if retry.cross_channel && !held { retry.retry_times } else { 0 },
            sends_max: retry.sends_max,
            backoff_ms: u64::from(retry.backoff_ms),
            deadline: Time::wall_clock().plus_ms(millis_until(self.deadline)),
            replay: gate::replay(self.arrived.endpoint, Repeats::of(self.arrived, held || strict)),
        }
    }

    /// Chooses in the pool, else in those of the chain that `recourse` leads to. Where nobody is legal in any, and the
    /// setting says so, waits for the soonest, or takes the risk with one that is cooling.
    async fn choose(
        &self,
        flight: &mut Flight,
        mut search: Search,
        recourse: Recourse,
    ) -> Result<(dispatch::Attempt, Arc<Place>), Dead> {
        // What is asked of a response is no work for its member.
        let errand = flight.is_errand();
        let mut at_home: Option<Choice> = None;
        loop {
            let was_home = flight.is_home();
            let (back, choice) = match flight.choose(search, errand).await.map_err(|stuck| *stuck) {
                Ok(chosen) => return Ok(chosen),
                Err(Stuck::Refused(refusal)) => return Err(Dead::Refused(refusal)),
                Err(Stuck::Nobody(search, choice)) => (search.enter_pool(), choice),
            };
            search = back;
            if was_home {
                at_home = Some(choice);
            }
            if !flight.fall_back(recourse) {
                break;
            }
        }
        flight.go_home();
        self.choose_cooling(flight, search, at_home).await
    }

    async fn choose_cooling(
        &self,
        flight: &mut Flight,
        search: Search,
        choice: Option<Choice>,
    ) -> Result<(dispatch::Attempt, Arc<Place>), Dead> {
        let wait = choice.as_ref().and_then(select::soonest).map(|soonest| Time::wall_clock().until(soonest));
        let last_resort = match (self.arrived.serving.config.retry.all_cooling, wait) {
            // Where there is none to look at, what was asked for has failed already.
            (AllCooling::BestEffort, _) if choice.is_some() => true,
            (AllCooling::Wait(bound), Some(wait))
                if wait <= seconds(bound) && Instant::now() + wait < self.deadline =>
            {
                tokio::time::sleep(wait + Duration::from_millis(1)).await;
                false
            }
            (AllCooling::BestEffort | AllCooling::Wait(_) | AllCooling::Refuse, _) => return Err(Dead::Nobody(choice)),
        };
        flight.choose(search, last_resort).await.map_err(|stuck| match *stuck {
            Stuck::Refused(refusal) => Dead::Refused(refusal),
            Stuck::Nobody(_, choice) => Dead::Nobody(Some(choice)),
        })
    }

    /// Sends to one deployment until it answers or its attempts are used up.
    async fn send_here(
        &mut self,
        flight: &mut Flight,
        mut attempt: dispatch::Attempt,
        place: Arc<Place>,
    ) -> Result<(dispatch::Attempt, Answer), (Next, Failure)> {
        // Who does not take it must be asked again without.
        self.asks_usage = place.channel.stream_usage && self.inbound.lacks_usage() && attempt.has_room();
        loop {
            let failure = match self.send(flight, &place).await {
                Ok(answer) => return Ok((attempt, answer)),
                Err(failure) => failure,
            };
            flight.failed(&failure.verdict, failure.learnt.clone());
            match attempt.fail(&failure.verdict, Time::wall_clock()) {
                Next::Same { attempt: again, after_ms } => {
                    tokio::time::sleep(Duration::from_millis(after_ms)).await;
                    self.asks_usage &= failure.verdict.here != Here::Repaired;
                    flight.again(place.clone());
                    attempt = again;
                }
                next @ (Next::Other(_) | Next::Spent { .. } | Next::End(_)) => return Err((next, failure)),
            }
        }
    }

    async fn send(&mut self, flight: &mut Flight, place: &Place) -> Result<Answer, Failure> {
        let errand = flight.hold().and_then(|hold| hold.errand.as_ref());
        let send = Send {
            endpoint: self.arrived.endpoint,
            errand,
            place,
            group: &flight.context().group,
            headers: &self.arrived.headers,
            query: self.arrived.query.as_deref(),
            credential: self.arrived.serving.credential(&place.channel.id, flight.spread().as_bytes()),
        };
        let body = if errand.is_some() { Bytes::new().into() } else { self.outgoing(&place.upstream_model) };
        let request = send.request(body);
        let request = request.ok_or_else(|| Failure::transport(Transport::Connect))?;
        let first_token = Instant::now() + self.first_token_limit(flight);
        let answer = async {
            together().await;
            self.gateway.ledger.flush();
            if flight.is_strict() && !self.gateway.ledger.records() {
                return Err(Failure::unrecorded());
            }
            let response = self.gateway.upstream.send(request).await.map_err(Failure::no_answer)?;
            self.read(flight, response).await
        };
        let answer = match tokio::time::timeout_at(first_token.min(self.deadline), answer).await {
            Ok(answer) => answer,
            Err(_) if first_token < self.deadline => Err(Failure::transport(Transport::FirstTokenTimeout)),
            Err(_) => Err(Failure::out_of_time(flight)),
        };
        answer.map_err(|failure| match &self.arrived.form {
            Some(form) => failure.of_sender(form),
            None => failure,
        })
    }

    fn outgoing(&mut self, model: &ModelName) -> Outgoing {
        match &self.arrived.form {
            Some(form) => form.outgoing(&self.arrived.body, model.as_str()),
            None => self.body_for(model).into(),
        }
    }

    /// The time for the first meaningful frame of a stream, or for a plain answer. One without a limit of its own has until
    /// the request's deadline; so has one to a form that passes, which waits for its client first.
    fn first_token_limit(&self, flight: &Flight) -> Duration {
        let retry = &self.arrived.serving.config.retry;
        let own = flight.first_token_seconds().unwrap_or(retry.first_token_seconds);
        let plain = retry.plain_seconds.filter(|_| !self.arrived.form.as_ref().is_some_and(Filled::passes));
        seconds(if self.inbound.stream { own } else { plain.unwrap_or(retry.timeout_seconds) })
    }

    /// What an answer that is read whole must keep to; the time for all of it is its send's.
    fn bounds(&self, bytes_max: usize) -> Bounds {
        Bounds { bytes_max, silence: seconds(self.arrived.serving.config.retry.idle_seconds), deadline: None }
    }

    /// The body with this upstream's model name; the client's own bytes where nothing changes.
    fn body_for(&mut self, model: &ModelName) -> Bytes {
        let asks = self.asks_usage;
        if let Some((.., body)) = self.bodies.iter().find(|(known, asking, _)| known == model && *asking == asks) {
            return body.clone();
        }
        let changed = self.inbound.upstream_body(&self.arrived.body, model.as_str(), asks);
        let body = changed.map_or_else(|| self.arrived.body.clone(), Bytes::from);
        self.bodies.push((model.clone(), asks, body.clone()));
        body
    }

    async fn read(&self, flight: &mut Flight, response: Response<Incoming>) -> Result<Answer, Failure> {
        let (mut head, body) = response.into_parts();
        let body = Unpacked::of(&mut head.headers, body);
        if !head.status.is_success() {
            return Err(self.read_error(flight, head, body).await);
        }
        if self.arrived.endpoint.is_native() && !answer::is_json(&head.headers) {
            return self.pass(flight, head, body).await;
        }
        let streams = answer::is_event_stream(&head.headers);
        match (self.inbound.stream, streams) {
            (_, true) if flight.is_errand() => Ok(self.follow(head.headers, body)),
            (_, false) if flight.is_errand() => self.read_kept(head, body).await,
            (true, true) => self.open_stream(flight, head.headers, body).await,
            (false, true) => Err(Failure::transport(Transport::Malformed)),
            (_, false) => self.read_whole(flight, head, body).await,
        }
    }

    /// Waits for the first bytes of an answer that passes as it comes: until then another deployment may still answer.
    async fn pass(
        &self,
        flight: &mut Flight,
        head: http::response::Parts,
        mut body: Unpacked,
    ) -> Result<Answer, Failure> {
        let fault = |transport| Failure::transport(transport).with_status(Some(head.status.as_u16()));
        if answer::is_page(&head.headers) {
            return Err(fault(Transport::Html));
        }
        loop {
            let next = body::next(&mut body, self.bounds(ANSWER_BYTES_MAX)).await;
            let first = next.map_err(|stop| fault(stop.into()))?.ok_or_else(|| fault(Transport::Empty))?;
            if !first.is_empty() {
                flight.first_token();
                return Ok(Answer::Passing { status: head.status, headers: head.headers, first, body });
            }
        }
    }

    async fn read_error(&self, flight: &Flight, head: http::response::Parts, mut body: Unpacked) -> Failure {
        let body = body::collect(&mut body, self.bounds(ERROR_BYTES_MAX)).await.unwrap_or_default();
        let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let now = Time::wall_clock();
        let mut verdict = classify::head(self.arrived.endpoint, head.status.as_u16(), &header, &body, now);
        // The model was served there: what is not found is the response, which has expired.
        if flight.hold().is_some() && head.status == StatusCode::NOT_FOUND {
            verdict = Verdict::ended(Class::CallerError, Effect::None);
        }
        // The client is told nothing of a field that it did not send.
        if self.asks_usage && classify::refuses_usage(&verdict, &body) {
            verdict.here = Here::Repaired;
        }
        Failure {
            shown: show_error(head.status, &head.headers, body, &verdict),
            learnt: Learnt { status: Some(head.status.as_u16()), ..Learnt::default() },
            verdict,
        }
    }

    async fn read_whole(
        &self,
        flight: &Flight,
        head: http::response::Parts,
        mut body: Unpacked,
    ) -> Result<Answer, Failure> {
        let status = Some(head.status.as_u16());
        let whole = body::collect(&mut body, self.bounds(ANSWER_BYTES_MAX)).await;
        let body = whole.map_err(|stop| Failure::transport(stop.into()).with_status(status))?;
        if !answer::may_be_json(&head.headers) {
            return Err(Failure::transport(Transport::Html).with_status(status));
        }
        let fault = |transport| Failure::transport(transport).with_status(status);
        let whole = match observe::json(self.arrived.endpoint, &body) {
            Ok(whole) if self.inbound.stream && !self.inbound.background && !self.arrived.endpoint.is_native() => {
                tracing::debug!(?whole.terminal, "a plain answer to a request for a stream");
                return Err(fault(Transport::Malformed));
            }
            Ok(whole) if whole.empty => return Err(fault(Transport::Empty)),
            Ok(whole) => whole,
            Err(observe::Fault::Error(error)) => {
                let failure = Failure::reported(self.arrived.endpoint, &error).with_status(status);
                let fitting = failure::fitting_status(&failure.verdict, &error);
                return Err(failure.in_words_of(fitting, head.headers, body));
            }
            Err(observe::Fault::Html) => return Err(fault(Transport::Html)),
            Err(observe::Fault::Foreign) => return Err(fault(Transport::Malformed)),
        };
        let Some(class) = class_of(whole.terminal) else { return Err(fault(Transport::Cut)) };
        let served_model = whole.served_model.map(|model| model.as_str().to_owned());
        let ended = whole.terminal.can_be_continued();
        let response = whole.response_id.map(|id| Seen { id, ended });
        let learnt = Learnt { status, usage: whole.usage, served_model, response };
        if whole.output_chars == 0 && self.may_ask_others(flight, class) {
            return Err(Failure { learnt, ..Failure::refusal(flight, head.headers, body) });
        }
        Ok(Answer::Whole(Whole { status: head.status, headers: head.headers, body, class, learnt }))
    }

    /// Reads what an upstream says of a response that it keeps, whatever that is.
    async fn read_kept(&self, head: http::response::Parts, mut body: Unpacked) -> Result<Answer, Failure> {
        let status = Some(head.status.as_u16());
        let whole = body::collect(&mut body, self.bounds(ANSWER_BYTES_MAX)).await;
        let body = whole.map_err(|stop| Failure::transport(stop.into()).with_status(status))?;
        let whole = observe::json(self.arrived.endpoint, &body).ok();
        let response = whole.and_then(|whole| {
            let ended = whole.terminal.can_be_continued();
            whole.response_id.map(|id| Seen { id, ended })
        });
        let learnt = Learnt { status, response, ..Learnt::default() };
        Ok(Answer::Whole(Whole { status: head.status, headers: head.headers, body, class: Class::Success, learnt }))
    }

    /// Whether an answer that the provider's policy left empty is asked of those who stand in for refused content.
    fn may_ask_others(&self, flight: &Flight, class: Class) -> bool {
        class == Class::ContentPolicy
            && !self.inbound.background
            && flight.hold().is_none()
            && flight.leads_on(Recourse::Content)
    }

    /// Passes on what a kept response has said, and says, from the first byte: it may be silent for long, and nobody else
    /// could answer.
    fn follow(&self, headers: HeaderMap, body: Unpacked) -> Answer {
        let feed = Box::new(Feed::new(self.arrived.endpoint, body, false));
        Answer::Stream { headers, feed, ready: VecDeque::new(), ended: None }
    }

    /// Holds the stream back until its first meaningful frame: until then another deployment may still answer.
    async fn open_stream(&self, flight: &mut Flight, headers: HeaderMap, body: Unpacked) -> Result<Answer, Failure> {
        let mut feed = Box::new(Feed::new(self.arrived.endpoint, body, !self.inbound.asks_usage()));
        let mut ready = VecDeque::new();
        let failure = loop {
            let passed = match feed.next().await {
                Ok(Some(passed)) => passed,
                Ok(None) | Err(_) => break Failure::transport(Transport::Cut),
            };
            match passed.frame {
                // What is made in the background is accepted once it has an id, and may take long to say something.
                Frame::Lifecycle if self.inbound.background && feed.response_id().is_some() => {
                    ready.push_back(passed.bytes);
                    return Ok(Answer::Stream { headers, feed, ready, ended: None });
                }
                Frame::Lifecycle | Frame::UsageOnly => ready.push_back(passed.bytes),
                Frame::Meaningful => {
                    ready.push_back(passed.bytes);
                    flight.first_token();
                    return Ok(Answer::Stream { headers, feed, ready, ended: None });
                }
                Frame::Terminal(terminal) => match class_of(terminal) {
                    Some(class) if !feed.has_output() && self.may_ask_others(flight, class) => {
                        ready.push_back(passed.bytes);
                        break Failure::refusal(flight, headers, joined(&mut ready));
                    }
                    Some(class) if !feed.is_empty() => {
                        ready.push_back(passed.bytes);
                        return Ok(Answer::Stream { headers, feed, ready, ended: Some(class) });
                    }
                    Some(_) => break Failure::transport(Transport::Empty),
                    None => break Failure::transport(Transport::Cut),
                },
                Frame::Error(error) => {
                    let failure = Failure::reported(self.arrived.endpoint, &error);
                    if self.arrived.endpoint != Endpoint::Responses {
                        break failure.in_words_of_event(&error, headers, passed.bytes);
                    }
                    // Codex goes by the code inside `response.failed`, which is no body of an error (docs/adr/0038).
                    ready.push_back(passed.bytes);
                    break failure.in_words_of(StatusCode::OK, headers, joined(&mut ready));
                }
                Frame::Foreign(error) => break Failure::reported(self.arrived.endpoint, &error),
            }
        };
        Err(Failure { learnt: feed.learnt(), ..failure })
    }

    /// From here the client has its answer, and only its end is open.
    async fn commit(&self, mut flight: Box<Flight>, attempt: dispatch::Attempt, answer: Answer) -> Response<Body> {
        let committed = attempt.commit();
        match answer {
            Answer::Whole(whole) => self.give(flight, whole).await,
            Answer::Passing { status, headers, first, body } => {
                let mut passed = answer::passed_on(headers);
                self.mark_served(&flight, &mut passed);
                let idle = seconds(self.arrived.serving.config.retry.idle_seconds);
                let passage = Passage::new(first, body, flight, committed, (status, &passed), idle);
                let mut response = Response::new(Body::Passage(Box::new(passage)));
                *response.status_mut() = status;
                *response.headers_mut() = passed;
                response
            }
            Answer::Stream { headers, feed, ready, ended } => {
                let mut passed = answer::passed_on(headers);
                self.mark_served(&flight, &mut passed);
                if let Some(id) = feed.response_id() {
                    flight.saw(id);
                }
                // What goes on in the background can be asked for, and must be found, from now on.
                let owned = if self.inbound.background { sealed(&mut flight).await } else { true };
                mark_unowned(owned, &mut passed);
                let idle = seconds(self.arrived.serving.config.retry.idle_seconds);
                let mut relay = Relay::new(*feed, flight, committed, ready, idle);
                relay.keep_copy(passed.get(CONTENT_TYPE));
                if let Some(class) = ended {
                    relay.complete_with_last(class);
                }
                let mut response = Response::new(Body::Relay(Box::new(relay)));
                *response.headers_mut() = passed;
                response
            }
        }
    }

    /// Gives the whole answer of the open send, and records its end.
    async fn give(&self, mut flight: Box<Flight>, whole: Whole) -> Response<Body> {
        let Whole { status, headers, body, class, learnt } = whole;
        if let Some(deposit) = flight.deposit() {
            deposit.keep(status, headers.get(CONTENT_TYPE), &body);
        }
        let mut response = Response::new(full(body));
        *response.status_mut() = status;
        *response.headers_mut() = answer::passed_on(headers);
        self.mark_served(&flight, response.headers_mut());
        flight.succeeded(class, learnt, status.as_u16());
        mark_unowned(sealed(&mut flight).await, response.headers_mut());
        response
    }

    async fn give_up(&self, mut flight: Box<Flight>, failure: Failure, end: End) -> Response<Body> {
        // A 429 without Retry-After ends Codex at once; one above a minute is ignored by others (CLIENTS.md, rule 7).
        // A request that fits at no time is not told one.
        let class = failure.verdict.class;
        let unsaid = (class == Class::RateLimited && failure.verdict.effect != Effect::None).then_some(1000);
        let wait_ms = failure.verdict.retry_after_ms.or_else(|| failure.shown.stated_wait_ms()).or(unsaid);
        let (mut response, code) = match failure.shown {
            Shown::Ours(refusal) => {
                (refusal.answer(Some(self.arrived.endpoint), flight.request().as_str()), Some(refusal.code()))
            }
            Shown::Theirs { status, headers, body } => {
                let mut response = Response::new(full(body));
                *response.status_mut() = status;
                *response.headers_mut() = answer::passed_on(headers);
                (response, None)
            }
            Shown::Answer(empty) => {
                let Empty { send, headers, body } = *empty;
                flight.come_back(send);
                let whole = Whole { status: StatusCode::OK, headers, body, class, learnt: failure.learnt };
                let response = self.give(flight, whole).await;
                self.gateway.ledger.flush();
                return response;
            }
        };
        let status = response.status();
        let headers = response.headers_mut();
        match wait_ms {
            Some(ms) if !status.is_success() => drop(headers.insert(RETRY_AFTER, retry_after(ms))),
            // A wait that could not be read, or is over, is no word for a client; nor is any in a stream.
            Some(_) | None => drop(headers.remove(RETRY_AFTER)),
        }
        if end != End::Final || is_retried(status) {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        self.mark(&flight, headers, None);
        let outcome = if class == Class::Cancelled { Outcome::Cancelled } else { Outcome::Failed };
        flight.ended(Landing { outcome, status: Some(response.status().as_u16()), code });
        response
    }

    /// Nobody may be sent to: an answer that was set aside, or why the caller may not go on, or the failure of the last
    /// send, if there was one, else a refusal that names the reasons.
    async fn without_route(&self, flight: Box<Flight>, dead: Dead, failure: Option<Failure>) -> Response<Body> {
        match (failure, dead) {
            (Some(failure @ Failure { shown: Shown::Answer(_), .. }), _) | (Some(failure), Dead::Nobody(_)) => {
                self.give_up(flight, failure, End::Exhausted).await
            }
            (Some(_) | None, Dead::Refused(refusal)) => self.refuse(flight, &refusal),
            (None, Dead::Nobody(Some(choice))) => {
                let refusal = match flight.hold() {
                    // Nobody knows when, or whether, the owner comes back.
                    Some(hold) if select::soonest(&choice).is_none() => hold.gone(),
                    Some(_) | None => no_route(self.arrived.endpoint, &choice),
                };
                self.refuse(flight, &refusal)
            }
            (None, Dead::Nobody(None)) => unreachable!("the first choice is made in the pool of what was asked for"),
        }
    }

    /// Gives an answer that was given before; nobody is called.
    pub(crate) fn repeat(&self, mut flight: Box<Flight>, kept: Kept) -> Response<Body> {
        let mut response = Response::new(full(kept.body));
        *response.status_mut() = kept.status;
        let headers = response.headers_mut();
        headers.extend(kept.content_type.map(|content_type| (CONTENT_TYPE, content_type)));
        headers.insert("x-waybill-repeated", HeaderValue::from_static("true"));
        self.mark(&flight, headers, None);
        flight.ended(Landing { outcome: Outcome::Success, status: Some(kept.status.as_u16()), code: None });
        response
    }

    /// Refuses here a request whose session is resolved.
    pub(crate) fn refuse(&self, mut flight: Box<Flight>, refusal: &Refusal) -> Response<Body> {
        self.gateway.metrics.refused(refusal.code());
        let mut response = refusal.answer(Some(self.arrived.endpoint), flight.request().as_str());
        self.mark(&flight, response.headers_mut(), None);
        flight.ended(Landing::refused(refusal));
        response
    }

    /// Marks an answer of the open send. The caller may know who served where its key says so, or its template.
    fn mark_served(&self, flight: &Flight, headers: &mut HeaderMap) {
        let exposes = self.arrived.key.expose_route || flight.policy().is_some_and(|policy| policy.expose_route);
        let deployment = flight.place().filter(|_| exposes).map(|place| place.deployment.as_str());
        self.mark(flight, headers, deployment);
    }

    fn mark(&self, flight: &Flight, headers: &mut HeaderMap, deployment: Option<&str>) {
        let marks = Marks {
            endpoint: self.arrived.endpoint,
            request: flight.request().as_str(),
            session: flight.context().session.as_str(),
            attempts: flight.sends(),
            fallback: flight.fell_back(),
            deployment,
        };
        marks.set(headers);
    }
}

/// Waits until who owns the response is on the disk; whether it is.
async fn sealed(flight: &mut Flight) -> bool {
    match flight.seal() {
        Some(seal) => seal.await,
        None => true,
    }
}

fn mark_unowned(owned: bool, headers: &mut HeaderMap) {
    if !owned {
        headers.insert("x-waybill-owned", HeaderValue::from_static("false"));
    }
}

/// Lets the other requests that are ready come as far as this before anything is sent. Their facts then share a write,
/// and sends that follow each other find their receivers awake: waking one costs about as much as the send (`make
/// bench`). Alone, a request goes on at once.
async fn together() {
    tokio::task::yield_now().await;
}

/// Whether clients try again by themselves on such a status (CLIENTS.md), whatever else is said. A conflict passes with
/// time.
fn is_retried(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

fn millis_until(deadline: Instant) -> i64 {
    let left = deadline.saturating_duration_since(Instant::now());
    i64::try_from(left.as_millis()).unwrap_or(i64::MAX)
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
