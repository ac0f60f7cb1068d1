//! The corpus of provider errors, each sent by a whole pool: what it is taken for, how often the pool is called, who
//! answers then, what it does to health, and what the client is told.
//!
//! What is expected is the page's: its columns `here | next | chain | health`
//! (`gateway/routing/fixtures/provider_actions.txt`) and the class that people gave each row. The upstreams' logs count
//! the calls, and the gateway's log tells the rest.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use waybill_schema::event::{Attempt, Class, Effect, Event};
use waybill_simulator::{Action, Step, When};

use crate::client::Answer;
use crate::dialect::{CHAT, Dialect, MESSAGES, RESPONSES};
use crate::fallbacks::{NAMES, TEMPLATED, under};
use crate::log::facts_after;
use crate::world::{KEY, Plan, World};

/// Every row in a pool of its own name. A failure that counts never adds up to a cooldown here.
pub(crate) const SETTINGS: &str = "retry: { backoff_ms: 1, max_attempts: 2 }\nhealth: { failure_threshold: 1000 }\n";
/// How long a model is blocked where neither the upstream nor the page says: `health.cooldown_seconds_max`.
const BLOCK_MS: u64 = 3_600_000;
/// The rows under way at one time.
const AT_ONCE: usize = 24;

/// Rows that are no event of a stream: one says all by its status and one its wait by a header, two are bare texts.
const NO_EVENTS: [&str; 4] = ["L27", "R05", "C14", "Q11"];

/// What an upstream sent, and how long it asked to be left alone, as people read it.
#[derive(Clone)]
struct Row {
    id: String,
    /// The row of the page that says what follows.
    like: String,
    class: String,
    /// Absent where the source does not show it; 200 where the error came inside an answer.
    status: Option<u64>,
    headers: BTreeMap<String, String>,
    body: Option<Value>,
    text: String,
    wait_ms: Option<u64>,
}

/// How a row comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// With its status.
    Http,
    /// As the body of a 200.
    Json,
    /// As the first event of a stream.
    Stream,
}

/// A row on its way.
#[derive(Clone)]
struct Case {
    row: Row,
    form: Form,
    /// Whether other models may stand in.
    chained: bool,
}

impl Row {
    /// All rows; those that no body can tell as the rows that docs/errors.md takes them for.
    fn all() -> Vec<Self> {
        let lines = include_str!("../../gateway/routing/fixtures/provider_errors.jsonl").lines();
        let lines: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect(line)).collect();
        let rows = lines.iter().map(|line| match line.get("taken_for") {
            None => Self::of(line),
            Some(like) => {
                let taken = lines.iter().find(|line| line["id"] == *like).map(Self::of).expect("the row is there");
                Self { like: taken.like, class: taken.class, ..Self::of(line) }
            }
        });
        rows.collect()
    }

    fn of(line: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let headers = line["headers"].as_object().into_iter().flatten();
        let like = line["as"].as_str().unwrap_or(&text(&line["id"])[..3]).to_owned();
        Self {
            id: text(&line["id"]),
            // The page knows it of the vendor.
            wait_ms: line["wait_ms"].as_u64().or((like == "R15").then_some(60_000)),
            like,
            class: text(&line["class"]),
            status: line["status"].as_u64(),
            headers: headers.map(|(name, value)| (name.clone(), text(value))).collect(),
            body: line.get("body").cloned(),
            text: text(&line["text"]),
        }
    }

    fn dialect(&self) -> Dialect {
        let body = self.body.as_ref();
        let kind = body.and_then(|body| body["type"].as_str()).unwrap_or_default();
        match kind {
            // OpenAI's are numbered, or name the status that they would have had.
            "error"
                if body.is_some_and(|body| {
                    ["sequence_number", "status_code"].iter().any(|key| body.get(*key).is_some())
                }) =>
            {
                RESPONSES
            }
            "error" => MESSAGES,
            kind if kind.starts_with("response.") => RESPONSES,
            _ => CHAT,
        }
    }

    /// The forms that it can have, without those in which its meaning is lost.
    fn forms(&self) -> Vec<Form> {
        let first = if self.status == Some(200) { Form::Json } else { Form::Http };
        let streams = self.body.is_some() && !NO_EVENTS.contains(&self.id.as_str());
        [Some(first), streams.then_some(Form::Stream)].into_iter().flatten().collect()
    }
}

impl Case {
    fn all() -> Vec<Self> {
        let rows = Row::all().into_iter().filter(|row| row.like != "E09");
        let forms = rows.flat_map(|row| row.forms().into_iter().map(move |form| (row.clone(), form)));
        forms.flat_map(|(row, form)| [true, false].map(|chained| Self { row: row.clone(), form, chained })).collect()
    }

    /// The model that it is asked for by, which is also its session.
    fn name(&self) -> String {
        let pool = if self.chained { "chained" } else { "alone" };
        format!("row-{}-{:?}-{pool}", self.row.id, self.form)
    }

    /// The bytes of the upstream's answer.
    fn said(&self) -> String {
        let Some(body) = &self.row.body else { return self.row.text.clone() };
        match self.form {
            Form::Http => body.to_string(),
            Form::Json => as_object(body).to_string(),
            Form::Stream if self.row.headers.contains_key("x-amzn-errortype") => {
                let name = self.row.headers["x-amzn-errortype"].split(':').next().unwrap_or_default();
                format!("event: {name}\ndata: {body}\n\n")
            }
            Form::Stream if self.row.dialect() == CHAT => format!("data: {body}\n\n"),
            Form::Stream => format!("event: {}\ndata: {body}\n\n", body["type"].as_str().expect("it has a type")),
        }
    }

    /// The bytes that a client is shown of it: an error that a stream begins with comes as a body, but for Responses.
    fn shown(&self) -> String {
        match &self.row.body {
            Some(body) if self.form == Form::Stream && self.row.dialect() != RESPONSES => body.to_string(),
            Some(_) | None => self.said(),
        }
    }

    fn does(&self) -> Action {
        let status = match self.form {
            Form::Http => self.row.status.map_or(400, |status| u16::try_from(status).expect("a status is small")),
            Form::Json | Form::Stream => 200,
        };
        let mut headers = if self.form == Form::Http { self.row.headers.clone() } else { BTreeMap::new() };
        if self.form == Form::Stream {
            headers.insert("content-type".to_owned(), "text/event-stream".to_owned());
        }
        Action::Status { status, headers, body: json!(self.said()) }
    }

    /// The wait that is stated in this form.
    fn wait_ms(&self) -> Option<u64> {
        // A moment that is named by its date has passed by now; a stream's event has no headers.
        let dated = self.row.headers.keys().any(|name| name.ends_with("-reset"));
        let in_header = self.row.headers.contains_key("retry-after") && self.row.id != "R01";
        let lost = (dated && !in_header) || (in_header && self.form != Form::Http);
        self.row.wait_ms.filter(|_| !lost)
    }

    fn cools(&self, page: &[&str]) -> bool {
        page[3].starts_with("cool") && (self.wait_ms().is_some() || page[3] == "cool to next day")
    }
}

/// A failed response as a plain answer has it.
fn as_object(body: &Value) -> Value {
    let mut object = body.clone();
    if body["type"] == "response.failed" {
        object = body["response"].clone();
        object["object"] = json!("response");
    }
    object
}

fn page() -> BTreeMap<&'static str, Vec<&'static str>> {
    let lines = include_str!("../../gateway/routing/fixtures/provider_actions.txt").lines();
    lines.map(|line| (&line[..3], line.split(" | ").skip(1).collect())).collect()
}

/// What the page says of a case, in one line: calls of each upstream, class, effect, and what the client is told.
fn expected(case: &Case, page: &[&str]) -> String {
    let [here, next, chain, ..] = page[..] else { panic!("{page:?}") };
    let short = case.wait_ms().is_none_or(|ms| ms <= 2000);
    let a = match here {
        "wait" if !short => 1,
        here if here.starts_with("wait") || here.starts_with("backoff") || here.starts_with("if nothing sent") => 2,
        _ => 1,
    };
    let b = if next == "yes" || next.starts_with("if nothing sent") { a } else { 0 };
    let chains = match chain {
        _ if !case.chained => [0, 0, 0],
        "general" => [1, 0, 0],
        "ctx" | "ctx, then general" => [0, 1, 0],
        "policy" => [0, 0, 1],
        _ => [0, 0, 0],
    };
    let effect = match page[3] {
        "none" | "remember dialect" => "none".to_owned(),
        "block-model short" => "block 60000".to_owned(),
        "block-model, short" | "block-model (few minutes)" => "block 180000".to_owned(),
        "block-model to the delay" => format!("block {}", case.row.wait_ms.expect("a delay is stated")),
        health if health.starts_with("count") => "count".to_owned(),
        _ if case.cools(page) => "cool".to_owned(),
        health if health.starts_with("cool") => "count".to_owned(),
        _ => format!("block {BLOCK_MS}"),
    };
    let class = if case.row.class == "MODEL/DOWN" { "DOWN" } else { &case.row.class };
    let told = if chains == [0, 0, 0] { told(case, b > 0) } else { "200 served".to_owned() };
    format!("{a} {b} {chains:?} {} {effect} {told}", class.replace("STATE", "CALLER"))
}

/// What the client of a spent pool is told: `status whose retry-after x-should-retry`.
fn told(case: &Case, spread: bool) -> String {
    let class = case.row.class.as_str();
    let is_ours = matches!(class, "AUTH" | "QUOTA") || case.row.body.is_none() || is_foreign(case);
    let about_the_request = matches!(class, "CTX" | "POLICY" | "CALLER" | "STATE");
    let by_class = match class {
        "AUTH" | "QUOTA" => 503,
        "RATE" => 429,
        "MODEL" => 404,
        "DOWN" | "MODEL/DOWN" => 502,
        _ => 400,
    };
    let status = match (case.form, case.row.id.as_str()) {
        (Form::Stream, _) if !is_ours && case.row.dialect() == RESPONSES => 200,
        // Inside a 200: the status that the body names, or that the vendor's list of errors gives its type.
        (Form::Json | Form::Stream, "D01" | "E01" | "E01b") => 529,
        (Form::Json | Form::Stream, "D02" | "D04" | "D11" | "E02c" | "M13") => 503,
        (Form::Json | Form::Stream, "D13" | "D13b" | "D13c" | "D13d" | "D19" | "E02b" | "E04" | "E15") => 500,
        (Form::Json | Form::Stream, "P11" | "P15") => 403,
        (Form::Json, "E08c") => 503,
        (Form::Json, "E08d") => 500,
        (Form::Json, "E08b") => 424,
        (Form::Http, "D16") | (Form::Stream, "D05c" | "D15") => 504,
        (Form::Http, "L11" | "L20" | "C34b") => 413,
        // M02, Q13b: a client would take these for its own credential's.
        (Form::Http, _) if matches!(case.row.status, Some(401..=403)) && !about_the_request => by_class,
        (Form::Http, _) if !is_ours => case.row.status.unwrap_or(400),
        _ => by_class,
    };
    let wait = match case.row.like.as_str() {
        _ if status == 200 || matches!(class, "AUTH" | "QUOTA") => None,
        "R08" | "R09" => None,
        "R12" => Some(60),
        _ => case.wait_ms().map(|ms| ms.div_ceil(1000).min(60)).or((class == "RATE").then_some(1)),
    };
    let wait = wait.map_or("-".to_owned(), |seconds| seconds.to_string());
    let stops = is_ours || spread || !about_the_request;
    format!("{status} {} {wait} {}", if is_ours { "ours" } else { "theirs" }, if stops { "false" } else { "-" })
}

/// Whether an event is none of its stream's dialect.
fn is_foreign(case: &Case) -> bool {
    let body = case.row.body.as_ref();
    case.form == Form::Stream && case.row.dialect() == CHAT && body.is_some_and(|body| body.get("error").is_none())
}

fn word(class: Class) -> &'static str {
    match class {
        Class::ContextLength => "CTX",
        Class::ContentPolicy => "POLICY",
        Class::RateLimited => "RATE",
        Class::QuotaExhausted => "QUOTA",
        Class::InvalidKey => "AUTH",
        Class::ModelUnsupported => "MODEL",
        Class::Upstream5xx | Class::Timeout => "DOWN",
        Class::CallerError => "CALLER",
        _ => "another",
    }
}

/// What a send does to health, in words of the page.
pub(crate) fn effect(attempt: &Attempt) -> String {
    match attempt.effect {
        Effect::None => "none".to_owned(),
        Effect::Recover => "recover".to_owned(),
        Effect::Count => "count".to_owned(),
        Effect::Cool => "cool".to_owned(),
        Effect::Block => format!("block {}", attempt.thresholds.block_ms),
    }
}

/// A pool that every case shares, and one of its own for each that cools a member.
fn plan(cases: &[Case], page: &BTreeMap<&str, Vec<&str>>) -> Plan {
    let cooling = cases.iter().filter(|case| case.cools(&page[case.row.like.as_str()]));
    let mut models: Vec<String> = cooling.map(Case::name).collect();
    models.push("row-*".to_owned());
    let chain = |to: &str| models.iter().map(|model| format!("{{ '{model}': [{to}] }}")).collect::<Vec<_>>().join(", ");
    let mut plan = under(&format!(
        "fallbacks: [{}], context_window_fallbacks: [{}], content_policy_fallbacks: [{}]",
        chain("spare"),
        chain("large"),
        chain("mild"),
    ));
    let member = |name: &str, priority: u8| format!("{{ channel: {name}, group: main, priority: {priority} }}");
    let route = |model: &String| format!("{{ model: '{model}', members: [{}, {}] }}", member("a", 1), member("b", 2));
    plan.rows.routes.extend(models.iter().map(route));
    plan.settings(SETTINGS)
}

async fn ask<'a>(world: &World, case: &'a Case) -> (&'a Case, Answer) {
    let (client, dialect) = (world.client_with(if case.chained { TEMPLATED } else { KEY }), case.row.dialect());
    let mut body = dialect.body("Hello", case.form == Form::Stream);
    body["model"] = json!(case.name());
    (case, client.post(dialect.path, &[("x-session-id", &case.name())], &body).await)
}

/// The calls of each upstream, by their session.
pub(crate) fn calls(world: &World) -> BTreeMap<String, [usize; 5]> {
    let mut counts: BTreeMap<String, [usize; 5]> = BTreeMap::new();
    for (at, name) in NAMES.iter().enumerate() {
        for call in world.upstream(name).calls() {
            let (_, session) = call.sessions.into_iter().next().expect("a session id goes upstream");
            counts.entry(session).or_default()[at] += 1;
        }
    }
    counts
}

/// S3.12, S3.15, issue 5: every row, as an answer with its status, as the body of a 200, as the first event of a stream:
/// class, sends, next target, chain and health as the page says; what no chain makes up for comes back unchanged.
#[tokio::test]
async fn every_provider_error_leads_where_the_page_says() {
    let (page, cases) = (page(), Case::all());
    assert!(cases.len() > 800, "{} cases", cases.len());
    let mut world = World::start(plan(&cases, &page)).await;
    for case in &cases {
        let when = When { model: Some(case.name()), ..When::default() };
        for name in ["a", "b"] {
            world.upstream(name).push(Step::new([case.does()]).when(when.clone()).standing());
        }
    }
    let asked = cases.iter().map(|case| ask(&world, case));
    let answers: Vec<(&Case, Answer)> = stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    let calls = calls(&world);
    world.stop().await;
    let mut attempts: BTreeMap<String, Vec<Attempt>> = BTreeMap::new();
    for fact in facts_after(&world.data(), waybill_events::log::Seq::START) {
        if let Event::Attempt(attempt) = fact.event {
            attempts.entry(attempt.request.as_str().to_owned()).or_default().push(*attempt);
        }
    }
    let mut wrong = Vec::new();
    for (case, answer) in answers {
        let [a, b, chains @ ..] = calls[&case.name()];
        let request = answer.header("x-waybill-request-id").expect("every reply names its request");
        let (first, failed) = (&attempts[request][0], &attempts[request][..a + b]);
        assert!(failed.iter().all(|attempt| attempt.class == first.class && attempt.effect == first.effect));
        let header = |name: &str| answer.header(name).unwrap_or("-").to_owned();
        let whose = if answer.text() == case.shown() { "theirs" } else { "ours" };
        let told = match chains {
            [0, 0, 0] => format!("{whose} {} {}", header("retry-after"), header("x-should-retry")),
            _ => "served".to_owned(),
        };
        let (class, effect, status) = (word(first.class), effect(first), answer.status.as_u16());
        let seen = format!("{a} {b} {chains:?} {class} {effect} {status} {told}");
        let expected = expected(case, &page[case.row.like.as_str()]);
        if whose == "theirs" && status != 200 {
            assert_eq!(answer.header("content-type"), Some("application/json"), "{}", case.name());
        }
        if seen != expected {
            wrong.push(format!("{}: {seen}, not {expected}", case.name()));
        }
    }
    wrong.sort();
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), cases.len());
}

/// D07, PITFALLS C23: who is overloaded with one model is passed over for that model, and serves the others.
#[tokio::test]
async fn a_busy_model_rests_alone() {
    let mut plan = under("fallbacks: []").settings(SETTINGS);
    let members = "{ channel: a, group: main, priority: 1 }, { channel: b, group: main, priority: 2 }";
    plan.rows.routes.push(format!("{{ model: 'many-*', members: [{members}] }}"));
    let world = World::start(plan).await;
    let when = When { model: Some("many-x".to_owned()), ..When::default() };
    let busy = json!({"error": {"code": "1305", "message": "busy"}});
    let does = Action::Status { status: 429, headers: BTreeMap::new(), body: busy };
    world.upstream("a").push(Step::new([does]).when(when).standing());
    let client = world.client();
    let ask = async |model: &str, session: &str| {
        let mut body = CHAT.body("Hello", false);
        body["model"] = json!(model);
        let answer = client.post(CHAT.path, &[("x-session-id", session)], &body).await;
        answer.header("x-waybill-deployment").map(str::to_owned)
    };
    assert_eq!(ask("many-x", "1").await.as_deref(), Some("b/many-x"));
    assert_eq!(ask("many-x", "2").await.as_deref(), Some("b/many-x"));
    assert_eq!(ask("many-y", "3").await.as_deref(), Some("a/many-y"));
    let calls = calls(&world);
    assert_eq!((calls["1"], calls["2"], calls["3"]), ([2, 1, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]));
}
