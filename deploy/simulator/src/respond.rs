//! From a call to a reply: the one place that knows settings, script, cache and dialects together. No IO.

use std::collections::{HashMap, VecDeque};

use http::{HeaderMap, Method, Uri};
use serde_json::{Value, json};

use crate::answer::{Answer, Question, Usage};
use crate::cache::{Hit, Prompt, PromptCache};
use crate::calls::SESSION_HEADERS;
use crate::endpoint::{About, Endpoint};
use crate::event::{Event, Place};
use crate::program::{self, Op, Pace};
use crate::prompt::{Piece, blocks};
use crate::script::{Action, Break, Control, Instead, Plan, Queue, Traits};
use crate::settings::Settings;
use crate::{chat, embeddings, messages, refusal, responses};

/// Responses kept for `previous_response_id`; the oldest goes first.
const RESPONSES_MAX: usize = 10_000;

const JSON: &str = "application/json";
const SSE: &str = "text/event-stream; charset=utf-8";

/// A call as it arrived.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) credential: Option<String>,
    pub(crate) sessions: Vec<(String, String)>,
    /// The body read by its dialect; none when it is no JSON or has no prompt.
    pub(crate) question: Option<Question>,
    about: Option<About>,
    is_upgrade: bool,
    speaks_anthropic: bool,
}

impl Arrival {
    pub(crate) fn read(method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let bearer = text("authorization").and_then(|value| value.strip_prefix("Bearer ").map(str::to_owned));
        let sessions = SESSION_HEADERS.into_iter().filter_map(|name| Some((name.to_owned(), text(name)?)));
        let endpoint = Endpoint::of(method, uri);
        let body: Option<Value> = serde_json::from_slice(body).ok().filter(Value::is_object);
        Self {
            endpoint,
            credential: bearer.or_else(|| text("x-api-key")).or_else(|| text("api-key")),
            sessions: sessions.collect(),
            question: endpoint.and_then(|endpoint| question(endpoint, body?)),
            about: About::of(method, uri),
            is_upgrade: headers.contains_key("upgrade"),
            speaks_anthropic: headers.contains_key("anthropic-version"),
        }
    }

    pub(crate) fn model(&self) -> Option<&str> {
        self.question.as_ref().map(|question| question.model.as_str()).filter(|model| !model.is_empty())
    }

    pub(crate) fn wants_stream(&self) -> bool {
        self.question.as_ref().is_some_and(|question| question.stream)
    }

    fn traits(&self) -> Traits<'_> {
        let tools = self.question.iter().flat_map(|question| &question.tools);
        Traits {
            endpoint: self.endpoint,
            sessions: self.sessions.iter().map(|(_, value)| value.as_str()).collect(),
            model: self.model(),
            credential: self.credential.as_deref(),
            stream: self.wants_stream(),
            tools: tools.map(|tool| tool.name.as_str()).collect(),
        }
    }
}

fn question(endpoint: Endpoint, body: Value) -> Option<Question> {
    match endpoint {
        Endpoint::Chat => Some(chat::read(body)),
        Endpoint::Responses => Some(responses::read(body)),
        Endpoint::Messages | Endpoint::CountTokens => Some(messages::read(body)),
        Endpoint::Embeddings => {
            let model = body["model"].as_str().unwrap_or_default().to_owned();
            Some(Question { model, body, ..Question::default() })
        }
        Endpoint::Models | Endpoint::Response => None,
    }
}

/// A reply, ready to be carried out.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    /// The `Content-Length`; none sends chunks.
    pub(crate) length: Option<usize>,
    pub(crate) ops: VecDeque<Op>,
    /// What the cache is to store when the response begins.
    pub(crate) hit: Option<Hit>,
    pub(crate) usage: Option<Usage>,
    pub(crate) reported_usage: Option<Value>,
    pub(crate) response_id: Option<String>,
}

impl Reply {
    fn new(status: u16, content_type: &str, length: Option<usize>, ops: VecDeque<Op>) -> Self {
        Self {
            status,
            headers: vec![("content-type".to_owned(), content_type.to_owned())],
            length,
            ops,
            hit: None,
            usage: None,
            reported_usage: None,
            response_id: None,
        }
    }

    fn whole(status: u16, content_type: &str, body: &str) -> Self {
        Self::new(status, content_type, Some(body.len()), program::whole(body))
    }

    fn object(status: u16, body: &Value) -> Self {
        Self::whole(status, JSON, &body.to_string())
    }

    /// Puts a header in, in place of one of the same name.
    fn set(&mut self, name: &str, value: &str) {
        let name = name.to_ascii_lowercase();
        self.headers.retain(|(found, _)| *found != name);
        self.headers.push((name, value.to_owned()));
    }
}

/// All that a simulator remembers, beside its call log.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    cache: PromptCache,
    queue: Queue,
    conversations: Conversations,
}

impl State {
    pub(crate) fn new(settings: Settings) -> Self {
        let cache = PromptCache::new(settings.cache.clone());
        Self { settings, cache, queue: Queue::default(), conversations: Conversations::default() }
    }

    /// Does what a control message says of the state.
    pub(crate) fn apply(&mut self, control: Control) {
        if control.clear_steps {
            self.queue.clear();
        }
        if control.forget {
            self.cache.clear();
            self.conversations = Conversations::default();
        }
        if let Some(settings) = control.settings {
            if settings.cache != self.settings.cache {
                self.cache = PromptCache::new(settings.cache.clone());
            }
            self.settings = settings;
        }
        self.queue.extend(control.steps);
    }

    /// What the script does to a call.
    pub(crate) fn take_actions(&mut self, arrival: &Arrival) -> Vec<Action> {
        self.queue.take(&arrival.traits())
    }

    /// Notes that a response has begun: what it wrote to the cache can be read.
    pub(crate) fn begin(&mut self, hit: &Hit) {
        self.cache.store(hit);
    }

    /// The reply to call `number`.
    pub(crate) fn respond(&mut self, arrival: &Arrival, plan: &Plan, number: u64, now_ms: i64) -> Reply {
        let mut reply = match &plan.instead {
            Some(instead) => replaced(arrival, instead),
            None => self.honest(arrival, plan, number, now_ms),
        };
        let id_header =
            if arrival.endpoint.is_some_and(Endpoint::is_anthropic) { "request-id" } else { "x-request-id" };
        if !reply.headers.iter().any(|(name, _)| name == id_header) {
            reply.set(id_header, &format!("req_{}_{number}", self.settings.name));
        }
        for (name, value) in &plan.headers {
            reply.set(name, value);
        }
        if let Some(gzip) = plan.gzip {
            reply.set("content-encoding", "gzip");
            reply.length = None;
            reply.ops = program::packed(reply.ops, gzip);
        }
        reply
    }

    fn honest(&mut self, arrival: &Arrival, plan: &Plan, number: u64, now_ms: i64) -> Reply {
        let endpoint = match arrival.endpoint {
            Some(endpoint) => endpoint,
            // The official server answers so where WebSockets are not on offer; clients fall back to POST.
            None if arrival.is_upgrade => return refused(arrival, 426, "Upgrade is not supported."),
            None => return refused(arrival, 404, "Unknown request URL."),
        };
        if self.settings.require_key.is_some() && self.settings.require_key != arrival.credential {
            return refused(arrival, 401, refusal::message(401));
        }
        if endpoint == Endpoint::Models {
            return Reply::object(200, &models(&self.settings.models, arrival.speaks_anthropic));
        }
        if let Some(about) = &arrival.about {
            let credential = arrival.credential.clone().unwrap_or_default();
            return match about {
                About::Follow(id, after) => self.follow(&credential, id, *after, plan),
                _ => self.conversations.answer(credential, about),
            };
        }
        let Some(question) = &arrival.question else {
            return refused(arrival, 400, "We could not parse the JSON body of your request.");
        };
        match endpoint {
            Endpoint::Embeddings => {
                let (object, prompt_tokens) = embeddings::object(&question.body);
                let usage = Usage { prompt_tokens, ..Usage::default() };
                let reported_usage = Some(object["usage"].clone());
                Reply { usage: Some(usage), reported_usage, ..Reply::object(200, &object) }
            }
            Endpoint::CountTokens => {
                let tokens: u64 = blocks(&question.pieces, &self.settings.cache).iter().map(|block| block.tokens).sum();
                Reply::object(200, &json!({"input_tokens": tokens}))
            }
            Endpoint::Messages if messages::fault(question).is_some() => {
                refused(arrival, 400, &messages::fault(question).unwrap_or_default())
            }
            Endpoint::Chat | Endpoint::Responses | Endpoint::Response | Endpoint::Messages | Endpoint::Models => {
                self.generate(endpoint, arrival, question, plan, Moment { number, now_ms })
            }
        }
    }

    fn generate(
        &mut self,
        endpoint: Endpoint,
        arrival: &Arrival,
        question: &Question,
        plan: &Plan,
        moment: Moment,
    ) -> Reply {
        let credential = arrival.credential.clone().unwrap_or_default();
        let mut pieces = question.pieces.clone();
        if let Some(previous) = question.body["previous_response_id"].as_str() {
            let Some(earlier) = self.conversations.find(&credential, previous) else {
                return unknown_previous(previous);
            };
            pieces.splice(question.preamble..question.preamble, earlier.pieces.iter().cloned());
        }
        let blocks = blocks(&pieces, &self.settings.cache);
        let prompt = Prompt {
            credential: credential.clone(),
            model: question.model.clone(),
            key: question.cache_key.clone(),
            blocks,
        };
        let hit = self.cache.lookup(&prompt, moment.now_ms);
        let answer = Answer::compose(&self.settings, plan, question, moment.number, moment.now_ms).with_hit(&hit);
        let reported_usage = self.reported_usage(endpoint, &answer.usage);
        let streams = question.stream != plan.swaps_shape;
        let mut reply = if streams {
            self.stream(endpoint, question, &answer, &reported_usage, plan)
        } else {
            self.object(endpoint, question, &answer, &reported_usage, plan)
        };
        if endpoint == Endpoint::Responses {
            reply.response_id = Some(responses::id(&answer));
            if question.body["store"] != false {
                let conversation = pieces.into_iter().skip(question.preamble).chain(responses::pieces(&answer));
                let kept = Kept {
                    pieces: conversation.collect(),
                    object: responses::object(&answer, &reported_usage, &question.body, plan.incomplete),
                    input: question.body["input"].clone(),
                    events: (question.body["background"] == true && question.stream)
                        .then(|| responses::events(&answer, &reported_usage, &question.body, plan.incomplete)),
                };
                self.conversations.keep(credential, responses::id(&answer), kept);
            }
        }
        Reply { hit: Some(hit), usage: Some(answer.usage), reported_usage: Some(reported_usage), ..reply }
    }

    fn reported_usage(&self, endpoint: Endpoint, usage: &Usage) -> Value {
        match endpoint {
            Endpoint::Responses => responses::usage(usage),
            Endpoint::Messages | Endpoint::CountTokens => messages::usage(usage),
            Endpoint::Chat | Endpoint::Embeddings | Endpoint::Models | Endpoint::Response => {
                chat::usage(usage, &self.settings.cache)
            }
        }
    }

    fn object(&self, endpoint: Endpoint, question: &Question, answer: &Answer, usage: &Value, plan: &Plan) -> Reply {
        let object = match endpoint {
            Endpoint::Responses if question.body["background"] == true => responses::queued(answer, &question.body),
            Endpoint::Responses => responses::object(answer, usage, &question.body, plan.incomplete),
            Endpoint::Messages | Endpoint::CountTokens => messages::object(answer, usage),
            Endpoint::Chat | Endpoint::Embeddings | Endpoint::Models | Endpoint::Response => {
                chat::object(answer, usage)
            }
        };
        let body = object.to_string();
        // A body that ends too early ends properly only when it comes in chunks.
        let ends_early = matches!(plan.breaks, Some((_, Break::End | Break::Error(_))));
        let length = (!ends_early).then_some(body.len());
        Reply::new(200, JSON, length, program::json(&body, self.pace(), plan))
    }

    fn stream(&self, endpoint: Endpoint, question: &Question, answer: &Answer, usage: &Value, plan: &Plan) -> Reply {
        let events = match endpoint {
            Endpoint::Responses => responses::events(answer, usage, &question.body, plan.incomplete),
            Endpoint::Messages | Endpoint::CountTokens => messages::events(answer, usage),
            Endpoint::Chat | Endpoint::Embeddings | Endpoint::Models | Endpoint::Response => {
                chat::events(answer, usage, question.wants_usage_chunk)
            }
        };
        let ping = endpoint.is_anthropic().then(|| Event::typed(&json!({"type": "ping"}), Place::Frame));
        let error = error_event(endpoint, question, answer, plan);
        let mut reply = Reply::new(200, SSE, None, program::stream(events, error, ping, self.pace(), plan));
        reply.set("cache-control", "no-cache");
        reply
    }

    /// The events of a response once more, which is offered of one that was made in the background as a stream.
    fn follow(&self, credential: &str, id: &str, after: Option<u64>, plan: &Plan) -> Reply {
        let Some(kept) = self.conversations.find(credential, id) else { return no_such_response(id) };
        let Some(events) = &kept.events else {
            let message = "This response cannot be streamed: it was not created with stream=true in the background.";
            let error = json!({"message": message, "type": "invalid_request_error", "param": "stream", "code": null});
            return Reply::object(400, &json!({"error": error}));
        };
        let passed = after.map_or(0, |number| usize::try_from(number).map_or(events.len(), |number| number + 1));
        let rest: Vec<Event> = events.iter().skip(passed).cloned().collect();
        let error = match &plan.breaks {
            Some((_, Break::Error(body))) if !body.is_null() => body.clone(),
            _ => json!({"type": "error", "code": "server_error", "message": refusal::message(500), "param": null}),
        };
        let error = Event::typed(&error, Place::Frame);
        Reply::new(200, SSE, None, program::stream(rest, error, None, self.pace(), plan))
    }

    fn pace(&self) -> Pace {
        Pace { first_ms: self.settings.first_token_delay_ms, next_ms: self.settings.chunk_delay_ms }
    }
}

#[derive(Clone, Copy)]
struct Moment {
    number: u64,
    now_ms: i64,
}

/// A response that is kept: the conversation up to its end, the object, and what was put in for it.
#[derive(Debug)]
struct Kept {
    pieces: Vec<Piece>,
    object: Value,
    input: Value,
    /// Its events, where they can be followed again.
    events: Option<Vec<Event>>,
}

/// The conversations behind response ids, by credential.
#[derive(Debug, Default)]
struct Conversations {
    kept: HashMap<(String, String), Kept>,
    order: VecDeque<(String, String)>,
}

impl Conversations {
    fn find(&self, credential: &str, id: &str) -> Option<&Kept> {
        self.kept.get(&(credential.to_owned(), id.to_owned()))
    }

    fn keep(&mut self, credential: String, id: String, kept: Kept) {
        self.order.push_back((credential.clone(), id.clone()));
        self.kept.insert((credential, id), kept);
        if self.order.len() > RESPONSES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.kept.remove(&oldest);
        }
    }

    /// The answer to what is asked about a response.
    fn answer(&mut self, credential: String, about: &About) -> Reply {
        let key = (credential, about.id().to_owned());
        let Some(kept) = self.kept.get_mut(&key) else { return no_such_response(about.id()) };
        let answer = match about {
            About::Get(_) | About::Follow(..) => kept.object.clone(),
            About::Cancel(_) => {
                kept.object["status"] = json!("cancelled");
                kept.object.clone()
            }
            About::InputItems(_) => responses::input_items(&kept.input),
            About::Delete(id) => {
                self.kept.remove(&key);
                json!({"id": id, "object": "response.deleted", "deleted": true})
            }
        };
        Reply::object(200, &answer)
    }
}

fn refused(arrival: &Arrival, status: u16, message: &str) -> Reply {
    Reply::object(status, &refusal::body(arrival.endpoint, status, message))
}

fn no_such_response(id: &str) -> Reply {
    let message = format!("Response with id '{id}' not found.");
    let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
    Reply::object(404, &json!({"error": error}))
}

fn unknown_previous(id: &str) -> Reply {
    let message = format!("Previous response with id '{id}' not found.");
    let error = json!({
        "message": message, "type": "invalid_request_error",
        "param": "previous_response_id", "code": "previous_response_not_found"
    });
    Reply::object(400, &json!({"error": error}))
}

fn replaced(arrival: &Arrival, instead: &Instead) -> Reply {
    match instead {
        Instead::Status { status, headers, body } => {
            let mut reply = match body {
                Value::Null => refused(arrival, *status, refusal::message(*status)),
                Value::String(text) => Reply::whole(*status, content_type_of(text), text),
                body => Reply::object(*status, body),
            };
            for (name, value) in headers {
                reply.set(name, value);
            }
            reply
        }
        Instead::Html => Reply::whole(200, "text/html", "<!doctype html><html><body><h1>It works!</h1></body></html>"),
        Instead::Empty => {
            let content_type = if arrival.wants_stream() { SSE } else { JSON };
            Reply::whole(200, content_type, "")
        }
        Instead::JsonError(Value::Null) => {
            Reply::object(200, &refusal::body(arrival.endpoint, 500, refusal::message(500)))
        }
        Instead::JsonError(body) => Reply::object(200, body),
    }
}

fn content_type_of(text: &str) -> &'static str {
    match text.trim_start().chars().next() {
        Some('{' | '[') => JSON,
        Some('<') => "text/html",
        _ => "text/plain",
    }
}

fn error_event(endpoint: Endpoint, question: &Question, answer: &Answer, plan: &Plan) -> Event {
    let events = plan.breaks.as_ref().map_or(0, |(events, _)| *events as usize);
    let data = match (&plan.breaks, endpoint) {
        (Some((_, Break::Error(body))), _) if !body.is_null() => body.clone(),
        (_, Endpoint::Responses) => responses::failed(answer, &question.body, events),
        _ if endpoint.is_anthropic() => refusal::body(Some(endpoint), 529, refusal::message(529)),
        _ => refusal::body(Some(endpoint), 500, refusal::message(500)),
    };
    match endpoint {
        Endpoint::Chat => Event::unnamed(&data, Place::Frame),
        _ => Event::typed(&data, Place::Frame),
    }
}

fn models(models: &[String], speaks_anthropic: bool) -> Value {
    if speaks_anthropic {
        let entry = |id| json!({"type": "model", "id": id, "display_name": id, "created_at": "2026-01-01T00:00:00Z"});
        let data: Vec<Value> = models.iter().map(entry).collect();
        return json!({"data": data, "has_more": false, "first_id": models.first(), "last_id": models.last()});
    }
    let entry = |id| json!({"id": id, "object": "model", "created": 1_767_225_600, "owned_by": "simulator"});
    json!({"object": "list", "data": models.iter().map(entry).collect::<Vec<_>>()})
}
