//! Continuations go to the owner of what they go on from, over its connection, or nowhere: the table of issue 5, on one
//! file and on a fleet that shares Redis. What went where is read from the upstreams' own logs.
//!
//! Each test below makes its parents as JSON and as a stream, and goes on from both. Most ask both kinds of world the same;
//! a frozen store and a lagging writer are other things on one file than among many gateways (docs/sessions.md), and so
//! have tests of their own for each.

use http::Method;
use serde_json::{Value, json};
use waybill_simulator::{Action, Control, Running, Step};

use crate::background::background;
use crate::client::{Answer, Client, read};
use crate::dialect::{CHAT, DIALECTS, MESSAGES, RESPONSES};
use crate::fleet::ready_when;
use crate::monitor::Monitor;
use crate::shared::Cluster;
use crate::upstreams::Upstreams;
use crate::world::{KEY, PATIENCE, Plan, World};

/// The secret of a key that owns none of these responses.
pub(crate) const FOREIGN: &str = "sk-other";
pub(crate) const SERVED: Expected = Expected { status: 200, code: "", calls: 1, waits: false };
pub(crate) const UNKNOWN: Expected = refused(400, "previous_response_not_found");
pub(crate) const GONE: Expected = refused(400, "previous_response_unavailable");
pub(crate) const UNREADABLE: Expected = Expected { waits: true, ..refused(503, "ownership_unavailable") };

/// What a continuation comes to: its status, our code or the upstream's, the calls at the owner (elsewhere there are
/// none), and whether it is told when to come again.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) status: u16,
    pub(crate) code: &'static str,
    pub(crate) calls: usize,
    pub(crate) waits: bool,
}

pub(crate) const fn refused(status: u16, code: &'static str) -> Expected {
    Expected { status, code, calls: 0, waits: false }
}

/// The two ways to run Waybill.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Embedded,
    Distributed,
}

pub(crate) enum Stage {
    Embedded(Box<World>),
    Distributed(Box<Cluster>),
}

/// A response that was made, and who made it.
#[derive(Clone, Debug)]
pub(crate) struct Parent {
    /// Its id, or that of the conversation it is in.
    pub(crate) id: String,
    pub(crate) owner: String,
    pub(crate) stream: bool,
}

/// How a continuation is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) key: &'static str,
    pub(crate) path: &'static str,
    pub(crate) model: &'static str,
    pub(crate) session: Option<&'static str>,
    /// An id instead of the parent's.
    pub(crate) id: Option<&'static str>,
    pub(crate) by: By,
}

/// What names what is gone on from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum By {
    /// `previous_response_id`.
    Response,
    /// `conversation`, as a text.
    Conversation,
    /// The same as an object.
    Object,
}

pub(crate) const PLAINLY: Ask =
    Ask { key: KEY, path: RESPONSES.path, model: "gpt", session: None, id: None, by: By::Response };

/// What can be asked of a response.
pub(crate) const ERRANDS: [(Method, &str); 5] = [
    (Method::GET, ""),
    (Method::GET, "?stream=true"),
    (Method::GET, "/input_items"),
    (Method::POST, "/cancel"),
    (Method::DELETE, ""),
];

/// Three upstreams, and a second model at the same three.
pub(crate) fn plan(settings: &str) -> Plan {
    let mut plan =
        Plan::of(&["a", "b", "c"]).settings(&format!("retry: {{ backoff_ms: 1, max_attempts: 1 }}\n{settings}"));
    let members: Vec<String> = ["a", "b", "c"]
        .iter()
        .map(|name| format!("{{ channel: {name}, group: main, priority: 10, upstream_model: gpt }}"))
        .collect();
    plan.rows.routes.push(format!("{{ model: gpt-2, members: [{}] }}", members.join(", ")));
    plan
}

impl Stage {
    pub(crate) async fn start(kind: Kind, plan: Plan) -> Self {
        match kind {
            Kind::Embedded => Self::Embedded(Box::new(World::start(plan).await)),
            Kind::Distributed => Self::Distributed(Box::new(Cluster::of(plan, 2, 1000).await)),
        }
    }

    /// What a distributed stage is.
    pub(crate) fn cluster(&mut self) -> &mut Cluster {
        match self {
            Self::Embedded(_) => panic!("an embedded stage has no cluster"),
            Self::Distributed(cluster) => cluster,
        }
    }

    pub(crate) fn upstreams(&self) -> &Upstreams {
        match self {
            Self::Embedded(world) => &world.upstreams,
            Self::Distributed(cluster) => &cluster.fleet.upstreams,
        }
    }

    pub(crate) fn upstream(&self, name: &str) -> &Running {
        self.upstreams().named(name)
    }

    /// Where responses are made.
    pub(crate) fn maker(&self) -> Client {
        match self {
            Self::Embedded(world) => world.client(),
            Self::Distributed(cluster) => cluster.fleet.client(0),
        }
    }

    /// Where they are continued: at another gateway, where there is one.
    pub(crate) fn other(&self) -> Client {
        match self {
            Self::Embedded(world) => world.client(),
            Self::Distributed(cluster) => cluster.fleet.client(1),
        }
    }

    pub(crate) fn other_with(&self, key: &str) -> Client {
        self.other().with_key(key)
    }

    /// Waits until all that was said is where the others look.
    pub(crate) async fn settled(&self) {
        match self {
            Self::Embedded(world) => drop(world.settled().await),
            Self::Distributed(cluster) => cluster.settled().await,
        }
    }

    /// Changes the text of the configuration, and waits until every gateway serves by it.
    pub(crate) async fn edit(&self, edit: impl Fn(&str) -> String) {
        let (file, clients) = match self {
            Self::Embedded(world) => (world.config().into(), vec![world.client()]),
            Self::Distributed(cluster) => {
                (cluster.fleet.config(), vec![cluster.fleet.client(0), cluster.fleet.client(1)])
            }
        };
        let revision = |ready: &Value| ready["detail"]["catalogue"]["revision"].as_u64();
        let before = revision(&clients[0].get("/readyz", &[]).await.json());
        let text = std::fs::read_to_string(&file).expect("the configuration can be read");
        std::fs::write(&file, edit(&text)).expect("the configuration can be written");
        for client in &clients {
            ready_when(client, |ready| revision(ready) > before).await;
        }
    }

    /// Makes a response, in a session that goes to one upstream.
    pub(crate) async fn make(&self, stream: bool) -> Parent {
        let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
        self.make_of(&self.maker(), body).await
    }

    pub(crate) async fn make_of(&self, client: &Client, body: Value) -> Parent {
        let answer = client.post(RESPONSES.path, &[("x-session-id", "s")], &body).await;
        self.parent_in(&answer, body["stream"] == true)
    }

    /// The response in an answer.
    pub(crate) fn parent_in(&self, answer: &Answer, stream: bool) -> Parent {
        assert_eq!(answer.status, 200, "{}", answer.text());
        let owner = answer.header("x-waybill-deployment").expect("the key may see it");
        let owner = owner.split('/').next().expect("a deployment names its channel").to_owned();
        Parent { id: id_in(answer), owner, stream }
    }

    pub(crate) async fn go_on(&self, client: &Client, parent: &Parent, ask: Ask) -> Answer {
        let id = ask.id.unwrap_or(&parent.id);
        let dialect = DIALECTS.into_iter().find(|dialect| dialect.path == ask.path).expect("it is one of them");
        let mut body = dialect.body("And?", parent.stream);
        body["model"] = json!(ask.model);
        match ask.by {
            By::Response => body["previous_response_id"] = json!(id),
            By::Conversation => body["conversation"] = json!(id),
            By::Object => body["conversation"] = json!({"id": id}),
        }
        let headers: Vec<(&str, &str)> = ask.session.iter().map(|session| ("x-session-id", *session)).collect();
        client.post(ask.path, &headers, &body).await
    }

    /// Goes on from a parent, and holds what comes of it against what is expected.
    pub(crate) async fn check(&self, parent: &Parent, ask: Ask, expected: Expected) -> Answer {
        let client = self.other_with(ask.key);
        self.check_at(&client, parent, ask, expected).await
    }

    /// What is asked of a response whose owner is gone is refused as well, and asked of nobody.
    async fn check_gone(&self, parent: &Parent) {
        let before = self.upstreams().calls().len();
        for (method, rest) in ERRANDS {
            let answer = ask(&self.other(), method, &format!("{}{rest}", page(parent))).await;
            assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (404, &json!(GONE.code)), "{rest}");
        }
        assert_eq!(self.upstreams().calls().len(), before);
    }

    pub(crate) async fn check_at(&self, client: &Client, parent: &Parent, ask: Ask, expected: Expected) -> Answer {
        let (before, at_owner) = (self.upstreams().calls().len(), self.upstream(&parent.owner).calls().len());
        let answer = self.go_on(client, parent, ask).await;
        let said = format!("{parent:?}: {}", answer.text());
        assert_eq!(answer.status.as_u16(), expected.status, "{said}");
        let calls = self.upstream(&parent.owner).calls();
        assert_eq!(calls.len() - at_owner, expected.calls, "calls at the owner: {said}");
        assert_eq!(self.upstreams().calls().len() - before, expected.calls, "calls in all: {said}");
        if expected.status == 200 {
            let sent = calls.last().expect("there was a call").json();
            match ask.by {
                By::Response => {
                    assert_eq!(sent["previous_response_id"], parent.id.as_str());
                    assert_eq!(answer.header("x-session-id"), Some("s"), "the parent's session is inherited");
                }
                By::Conversation => assert_eq!(sent["conversation"], parent.id.as_str()),
                By::Object => assert_eq!(sent["conversation"], json!({"id": parent.id})),
            }
            assert!(answer.text().contains("completed"), "{said}");
        } else {
            assert_eq!(answer.json()["error"]["code"], expected.code, "{said}");
            assert_eq!(answer.header("retry-after").is_some(), expected.waits, "{said}");
            let retry = (expected.calls == 0 && !expected.waits).then_some("false");
            assert_eq!(answer.header("x-should-retry"), retry, "{said}");
        }
        answer
    }
}

/// The id of the response in an answer, JSON or SSE.
pub(crate) fn id_in(answer: &Answer) -> String {
    let text = answer.text();
    let at = text.find("resp_").unwrap_or_else(|| panic!("a response has an id: {text}"));
    text[at..].chars().take_while(|char| char.is_ascii_alphanumeric() || *char == '_').collect()
}

/// Makes a response as JSON and one as a stream in every kind of world, lets `happen` what may, and goes on from both.
async fn table(settings: &str, happen: impl AsyncFn(&mut Stage, &str), ask: Ask, expected: Expected) {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let mut stage = Stage::start(kind, plan(settings)).await;
        let parents = [stage.make(false).await, stage.make(true).await];
        assert_eq!(parents[0].owner, parents[1].owner);
        happen(&mut stage, &parents[0].owner).await;
        for parent in &parents {
            stage.check(parent, ask, expected).await;
            if expected.code == GONE.code {
                stage.check_gone(parent).await;
            }
        }
    }
}

pub(crate) async fn nothing(_: &mut Stage, _: &str) {}

/// S3.9, S3.16, S3.24, PITFALLS B01
#[tokio::test]
async fn a_continuation_goes_to_its_owner_whatever_the_weights_say() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let parent = stage.make(stream).await;
            // Right at once, at another gateway, though nothing need be projected yet; and again, on and on.
            for _ in 0..8 {
                stage.check(&parent, PLAINLY, SERVED).await;
            }
        }
    }
}

/// S3.3, S3.9: a chain of continuations, each from the answer before.
#[tokio::test]
async fn a_chain_of_continuations_stays_in_its_session_and_at_its_owner() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let mut parent = stage.make(false).await;
        for turn in 0..6 {
            let parent_of_next = Parent { stream: turn % 2 == 1, ..parent.clone() };
            let answer = stage.check(&parent_of_next, PLAINLY, SERVED).await;
            parent.id = id_in(&answer);
        }
    }
}

/// Issue 5: "when the writers are not lagging, a continuation costs one shared-state read": by the gateway's count, and by
/// Redis's own, for whatever is gone on from and asked about.
#[tokio::test]
async fn a_continuation_costs_one_read_of_the_shared_state() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let background = stage.make_of(&stage.maker(), background(true)).await;
    stage.settled().await;
    // Every script has been called once by now, so that Redis knows it.
    stage.check(&parents[0], PLAINLY, SERVED).await;
    let cluster = stage.cluster();
    cluster.projector.signal("STOP").await;
    let mut monitor = Monitor::on(&cluster.redis).await;
    monitor.commands().await;
    let mut n_reads = 1;
    let mut one_read = async |stage: &Stage, what: &str| {
        n_reads += 1;
        let commands = monitor.commands().await;
        assert_eq!(commands.len(), 1, "{what}: {commands:?}");
        let Stage::Distributed(cluster) = stage else { unreachable!("it was started so") };
        for (outcome, n) in [("answered", n_reads), ("failed", 0), ("skipped", 0)] {
            assert_eq!(cluster.reads(1, outcome).await, n, "{what}: {outcome}");
        }
    };
    for parent in &parents {
        for id in [&parent.id[..], "resp_none"] {
            // What is not stored is shown to nobody, which would be a write.
            let body = json!({"model": "gpt", "previous_response_id": id, "input": "And?", "store": false, "stream": parent.stream});
            stage.other().post(RESPONSES.path, &[], &body).await;
            one_read(&stage, &format!("{body}")).await;
        }
    }
    stage.check(&parents[0], Ask { key: FOREIGN, ..PLAINLY }, UNKNOWN).await;
    one_read(&stage, "another's").await;
    for (parent, rest) in [(&parents[0], ""), (&parents[0], "/input_items"), (&background, "?stream=true")] {
        assert_eq!(stage.about(parent, Method::GET, rest).await.status, 200);
        one_read(&stage, rest).await;
    }
}

pub(crate) const COOLS: &str = "health: { failure_threshold: 1, cooldown_seconds: 600, cooldown_seconds_max: 600 }\n";

impl Stage {
    /// Lets the gateway that made a response meet a failure of its owner, which then cools: the upstream itself says for
    /// how long, so no success ends it.
    async fn cool(&self, owner: &str) {
        let owner = self.upstream(owner);
        owner.push(Step::new([Action::status_retry_after(503, 600)]));
        let mut n = 0;
        while owner.calls().iter().all(|call| call.status != Some(503)) {
            n += 1;
            let session = format!("n-{n}");
            let answer = self.maker().post(CHAT.path, &[("x-session-id", &session)], &CHAT.body("Hello", false)).await;
            assert_eq!(answer.status, 200, "another stands in for a chat");
        }
    }
}

/// S1.7, S3.24: the owner rests, and nobody else can stand in; at the gateway that met the failure, and at another.
#[tokio::test]
async fn a_continuation_waits_for_an_owner_that_cools() {
    let expected = Expected { waits: true, ..refused(503, "no_route_available") };
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan(COOLS)).await;
        let parents = [stage.make(false).await, stage.make(true).await];
        stage.cool(&parents[0].owner).await;
        let check = |answer: Answer| {
            assert_eq!(answer.header("retry-after"), Some("60"), "clients ignore more");
            let message = answer.json()["error"]["message"].to_string();
            let said = (590..=600).any(|seconds| message.contains(&format!("{seconds} s")));
            assert!(said, "the true time is another: {message}");
        };
        for parent in &parents {
            check(stage.check_at(&stage.maker(), parent, PLAINLY, expected).await);
        }
        // Others meet the owner as before until they have heard of it. What they are served counts as later than the failure
        // only where that was folded first.
        stage.settled().await;
        until(async || stage.go_on(&stage.other(), &parents[0], PLAINLY).await.status == 503).await;
        for parent in &parents {
            check(stage.check(parent, PLAINLY, expected).await);
            let about = stage.other().get(&page(parent), &[]).await;
            assert_eq!(about.status, 200, "to be asked about a response is no work that an owner must rest from");
        }
    }
}

/// DESIGN.md section 10, "all candidates cooling": a setting may send to the owner all the same.
#[tokio::test]
async fn a_continuation_goes_to_an_owner_that_cools_where_the_setting_says_so() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let retry = "retry: { backoff_ms: 1, max_attempts: 1, all_cooling: best_effort }\n";
        let stage = Stage::start(kind, plan("").settings(&format!("{retry}{COOLS}"))).await;
        let parents = [stage.make(false).await, stage.make(true).await];
        stage.cool(&parents[0].owner).await;
        for parent in &parents {
            stage.check_at(&stage.maker(), parent, PLAINLY, SERVED).await;
            stage.check(parent, PLAINLY, SERVED).await;
        }
    }
}

pub(crate) async fn disable(stage: &mut Stage, owner: &str) {
    let channel = format!("{{ id: {owner}, ");
    stage.edit(|text| text.replace(&channel, &format!("{channel}status: disabled, "))).await;
}

pub(crate) async fn delete(stage: &mut Stage, owner: &str) {
    let marks = [format!("- {{ id: {owner}, "), format!("- {{ channel: {owner}, ")];
    // Its own line, or one of several in a line.
    let other = ["priority: 10, upstream_model: gpt", "upstream_model: large"];
    let others = other.map(|fields| format!("{{ channel: {owner}, group: main, {fields} }}"));
    let without = |text: &str| {
        let lines = text.lines().filter(|line| !marks.iter().any(|mark| line.trim_start().starts_with(mark)));
        let text = lines.collect::<Vec<_>>().join("\n");
        others
            .iter()
            .fold(text, |text, other| text.replace(&format!("{other}, "), "").replace(&format!(", {other}"), ""))
    };
    stage.edit(without).await;
}

/// Lets the owner's channel lead to another upstream.
pub(crate) async fn redirect(stage: &mut Stage, owner: &str) {
    let away = ["a", "b", "c"].into_iter().find(|name| *name != owner).expect("there are three");
    let [from, to] = [owner, away].map(|name| stage.upstream(name).addr.to_string());
    stage.edit(|text| text.replace(&from, &to)).await;
}

/// Gives the owner's channel another credential.
pub(crate) async fn exchange_key(stage: &mut Stage, owner: &str) {
    let channel = format!("{{ id: {owner}, ");
    let with_other = |line: &str| match line.contains(&channel) {
        true => line.replace("env:UPSTREAM_KEY", "env:OTHER_KEY"),
        false => line.to_owned(),
    };
    stage.edit(|text| text.lines().map(with_other).collect::<Vec<_>>().join("\n")).await;
}

/// S3.24
#[tokio::test]
async fn a_continuation_of_a_disabled_owner_is_refused() {
    table("", disable, PLAINLY, GONE).await;
}

/// S3.24
#[tokio::test]
async fn a_continuation_of_a_deleted_owner_is_refused() {
    table("", delete, PLAINLY, GONE).await;
}

/// S3.24, S3.30: where the connection leads elsewhere, nothing is sent there.
#[tokio::test]
async fn a_continuation_over_a_changed_connection_is_refused() {
    table("", redirect, PLAINLY, GONE).await;
    table("", exchange_key, PLAINLY, GONE).await;
}

/// S3.24, PROVIDER_ERRORS S03: the upstream's own words, and nothing is held against it.
#[tokio::test]
async fn a_context_that_expired_upstream_is_told_in_the_upstreams_words() {
    let forget = async |stage: &mut Stage, owner: &str| {
        stage.upstream(owner).apply(Control { forget: true, ..Control::default() });
    };
    table("", forget, PLAINLY, Expected { calls: 1, ..refused(400, "previous_response_not_found") }).await;
    let forget_as_404 = async |stage: &mut Stage, owner: &str| {
        let error = json!({"error": {"message": "No response found", "type": "invalid_request_error", "code": "gone"}});
        let headers = Default::default();
        let step = Step::new([Action::Status { status: 404, headers, body: error }]);
        stage.upstream(owner).push(step.times(2));
    };
    table("health: { failure_threshold: 1 }\n", forget_as_404, PLAINLY, Expected { calls: 1, ..refused(404, "gone") })
        .await;
}

/// S3.3, S3.9: what is not there and what is another's look the same.
#[tokio::test]
async fn unknown_and_foreign_responses_look_the_same() {
    table("", nothing, Ask { id: Some("resp_none"), ..PLAINLY }, UNKNOWN).await;
    table("", nothing, Ask { key: FOREIGN, ..PLAINLY }, UNKNOWN).await;
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let parent = stage.make(stream).await;
            let unknown = stage.check(&parent, Ask { id: Some("resp_none"), ..PLAINLY }, UNKNOWN).await;
            let foreign = stage.check(&parent, Ask { key: FOREIGN, ..PLAINLY }, UNKNOWN).await;
            assert_eq!(look(&unknown), look(&foreign));
            let before = stage.upstreams().calls().len();
            for (method, rest) in ERRANDS {
                let none = Parent { id: "resp_none".to_owned(), ..parent.clone() };
                let asks =
                    [(KEY, &none), (FOREIGN, &parent)].map(|(key, parent)| (stage.other_with(key), page(parent)));
                let [unknown, foreign] =
                    asks.map(async |(client, page)| ask(&client, method.clone(), &format!("{page}{rest}")).await);
                let (unknown, foreign) = (unknown.await, foreign.await);
                assert_eq!((unknown.status.as_u16(), &unknown.json()["error"]["code"]), (404, &json!(UNKNOWN.code)));
                assert_eq!(look(&unknown), look(&foreign), "{method} {rest}");
            }
            assert_eq!(stage.upstreams().calls().len(), before);
        }
    }
}

/// All that a client can tell of an answer, but for what names the one request and its moment.
fn look(answer: &Answer) -> (u16, Vec<(String, String)>, String) {
    let names = ["date", "x-request-id", "x-waybill-request-id"];
    assert!(names.iter().all(|name| answer.header(name).is_some()), "{:?}", answer.headers);
    let told = answer.headers.iter().filter(|(name, _)| !names.contains(&name.as_str()));
    let told = told.map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    (answer.status.as_u16(), told.collect(), answer.text())
}

/// DESIGN.md section 4, step 1: who may not use the model is told that and nothing else, whatever it goes on from and
/// whoever could tell; what it has made stays its own to be asked about (S3.9: "need only scope + id").
#[tokio::test]
async fn a_caller_without_the_model_learns_nothing_of_what_is_owned() {
    const FORBIDDEN: Expected = refused(403, "model_not_permitted");
    for kind in [Kind::Embedded, Kind::Distributed] {
        let mut plan = plan("");
        plan.rows.keys.push("{ id: limited, key: 'env:LIMITED_KEY', group: main, expose_route: true }".to_owned());
        let mut stage = Stage::start(kind, plan).await;
        let limited = Ask { key: "sk-limited", ..PLAINLY };
        let foreign = [stage.make(false).await, stage.make(true).await];
        let mut own = Vec::new();
        for stream in [false, true] {
            let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
            own.push(stage.make_of(&stage.maker().with_key(limited.key), body).await);
        }
        stage.check(&own[0], limited, SERVED).await;
        stage.edit(|text| text.replace("'env:LIMITED_KEY', ", "'env:LIMITED_KEY', models: [gpt-2], ")).await;
        let reads = async |stage: &Stage| match stage {
            Stage::Embedded(_) => 0,
            Stage::Distributed(cluster) => cluster.reads(1, "answered").await + cluster.reads(1, "failed").await,
        };
        let before = reads(&stage).await;
        let check = async |stage: &Stage| {
            let mut said = Vec::new();
            for parent in foreign.iter().chain(&own) {
                said.push(stage.check(parent, limited, FORBIDDEN).await.json());
                said.push(stage.check(parent, Ask { id: Some("resp_none"), ..limited }, FORBIDDEN).await.json());
            }
            assert!(said.iter().all(|answer| *answer == said[0]), "{said:?}");
        };
        check(&stage).await;
        assert_eq!(reads(&stage).await, before, "nobody was asked");
        for parent in &own {
            assert_eq!(ask(&stage.other_with(limited.key), Method::GET, &page(parent)).await.status, 200);
        }
        if let Stage::Distributed(cluster) = &mut stage {
            cluster.redis.stop();
            check(&stage).await;
        }
    }
}

/// S3.9: "a continuation that names others is refused as unknown".
#[tokio::test]
async fn a_continuation_that_names_another_model_or_endpoint_is_refused_as_unknown() {
    table("", nothing, Ask { model: "gpt-2", ..PLAINLY }, UNKNOWN).await;
    table("", nothing, Ask { path: CHAT.path, ..PLAINLY }, UNKNOWN).await;
    table("", nothing, Ask { path: MESSAGES.path, ..PLAINLY }, UNKNOWN).await;
}

/// S3.3
#[tokio::test]
async fn an_explicit_session_must_be_the_parents() {
    table("", nothing, Ask { session: Some("other"), ..PLAINLY }, refused(400, "session_conflict")).await;
    table("", nothing, Ask { session: Some("s"), ..PLAINLY }, SERVED).await;
}

/// DESIGN.md section 8, S3.23: "continuations refused (503), not guessed".
#[tokio::test]
async fn while_the_shared_state_is_frozen_continuations_are_refused_and_chats_are_not() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    let parents = [stage.make(false).await, stage.make(true).await];
    stage.settled().await;
    stage.cluster().redis.stop();
    for parent in &parents {
        stage.check(parent, PLAINLY, UNREADABLE).await;
        stage.check_at(&stage.maker(), parent, PLAINLY, UNREADABLE).await;
        let answer = stage.other().post(CHAT.path, &[("x-session-id", "s")], &CHAT.body("Hello", false)).await;
        assert_eq!(answer.status, 200);
        let about = stage.other().get(&page(parent), &[]).await;
        assert_eq!((about.status.as_u16(), &about.json()["error"]["code"]), (503, &json!("ownership_unavailable")));
    }
    let cluster = stage.cluster();
    cluster.redis.cont();
    cluster.fleet.ready_when(1, |ready| ready["detail"]["state"]["reachable"] == true).await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
}

/// The one file is held by another process: nothing can be written, and what the gateway knows is all there is.
#[tokio::test]
async fn while_the_file_is_held_an_embedded_instance_knows_its_own_responses() {
    let stage = Stage::start(Kind::Embedded, plan("")).await;
    let before = [stage.make(false).await, stage.make(true).await];
    stage.settled().await;
    let Stage::Embedded(world) = &stage else { unreachable!("it was started so") };
    let held = world.holds_the_log();
    let meanwhile = [stage.make(false).await, stage.make(true).await];
    for parent in before.iter().chain(&meanwhile) {
        stage.check(parent, PLAINLY, SERVED).await;
        stage.check(parent, Ask { id: Some("resp_none"), ..PLAINLY }, UNKNOWN).await;
    }
    drop(held);
}

/// Embedded, the one store is the file. Where it cannot be read nobody guesses, and chats go on.
#[tokio::test]
async fn while_the_file_cannot_be_read_continuations_are_refused_and_chats_are_not() {
    let stage = Stage::start(Kind::Embedded, plan("")).await;
    let parents = [stage.make(false).await, stage.make(true).await];
    stage.settled().await;
    let Stage::Embedded(world) = &stage else { unreachable!("it was started so") };
    let hand = world.holds_the_log();
    let rename = |from: &str, to: &str| {
        hand.execute_batch(&format!("ALTER TABLE {from} RENAME TO {to}; COMMIT")).expect("a table can be renamed");
    };
    rename("response_owners", "hidden");
    for parent in &parents {
        stage.check(parent, PLAINLY, UNREADABLE).await;
        stage.check(parent, Ask { id: Some("resp_none"), ..PLAINLY }, UNREADABLE).await;
        let about = stage.other().get(&page(parent), &[]).await;
        assert_eq!((about.status.as_u16(), &about.json()["error"]["code"]), (503, &json!("ownership_unavailable")));
        let answer = stage.other().post(CHAT.path, &[("x-session-id", "s")], &CHAT.body("Hello", false)).await;
        assert_eq!(answer.status, 200);
    }
    hand.execute_batch("BEGIN IMMEDIATE").expect("the file can be held");
    rename("hidden", "response_owners");
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
}

/// Embedded, the one writer is the gateway itself, and lags where the file cannot be written. What its life before had not
/// brought there is there before a new life answers anybody (what a life has made more of than it remembers, while the
/// file lags: `ledger.rs` of the gateway).
#[tokio::test]
async fn what_the_file_lacked_when_its_gateway_died_is_there_when_it_answers_again() {
    let mut stage = Stage::start(Kind::Embedded, plan("")).await;
    stage.settled().await;
    let Stage::Embedded(world) = &stage else { unreachable!("it was started so") };
    let held = world.holds_the_log();
    let parents = [stage.make(false).await, stage.make(true).await];
    let Stage::Embedded(world) = &mut stage else { unreachable!("it was started so") };
    assert_eq!(world.table("SELECT count(*) FROM response_owners"), ["0"]);
    world.kill().await;
    drop(held);
    world.restart().await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
        stage.check(parent, Ask { id: Some("resp_none"), ..PLAINLY }, UNKNOWN).await;
    }
}

/// An embedded instance knows its responses after a restart, however it ended.
#[tokio::test]
async fn responses_can_be_continued_after_a_restart() {
    let mut stage = Stage::start(Kind::Embedded, plan("")).await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let Stage::Embedded(world) = &mut stage else { unreachable!("it was started so") };
    world.kill().await;
    world.restart().await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
    let Stage::Embedded(world) = &mut stage else { unreachable!("it was started so") };
    world.stop().await;
    assert_eq!(world.table("SELECT state, count(*) FROM response_owners GROUP BY 1"), ["final|4"]);
}

impl Stage {
    /// Takes back what the upstreams were told to do.
    pub(crate) fn clear(&self) {
        let clear = || Control { clear_steps: true, ..Control::default() };
        self.upstreams().iter().for_each(|upstream| upstream.apply(clear()));
    }

    /// Asks something of a response at another gateway than the one that made it: the owner is asked it, once, in the same
    /// words, and nobody else is asked anything.
    pub(crate) async fn about(&self, parent: &Parent, method: Method, rest: &str) -> Answer {
        let path = format!("{}{rest}", page(parent));
        let before = self.upstreams().calls().len();
        let answer = ask(&self.other(), method.clone(), &path).await;
        assert_eq!(self.upstreams().calls().len() - before, 1, "{method} {path}: {}", answer.text());
        let call = self.upstream(&parent.owner).calls().pop().expect("the owner was asked");
        assert_eq!((call.method.as_str(), call.path.as_str(), call.body_bytes), (method.as_str(), path.as_str(), 0));
        assert_eq!(call.credential.as_deref(), Some("sk-upstream"));
        answer
    }
}

/// S3.9: "`GET`, `DELETE`, `cancel` need only scope + id".
#[tokio::test]
async fn what_is_asked_of_a_response_is_asked_of_its_owner() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let parent = stage.make(false).await;
        let asks = [
            (Method::GET, "", "completed"),
            (Method::GET, "/input_items?limit=2", "Hello"),
            (Method::DELETE, "", "response.deleted"),
        ];
        for (method, rest, holds) in asks {
            for (key, id) in [(FOREIGN, &parent.id[..]), (KEY, "resp_none")] {
                let path = format!("{}/{id}{rest}", RESPONSES.path);
                let answer = ask(&stage.other_with(key), method.clone(), &path).await;
                let code = answer.json()["error"]["code"].clone();
                assert_eq!((answer.status.as_u16(), code), (404, json!("previous_response_not_found")), "{path}");
            }
            let answer = stage.about(&parent, method, rest).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(answer.text().contains(holds), "{rest}: {}", answer.text());
            assert_eq!(answer.header("x-session-id"), Some("s"));
        }
        // Deleted, it stays its owner's, who knows nothing of it any more.
        let gone = stage.about(&parent, Method::GET, "").await;
        assert_eq!((gone.status.as_u16(), &gone.json()["error"]["code"]), (404, &Value::Null));
        let again = Expected { calls: 1, ..refused(400, "previous_response_not_found") };
        stage.check(&parent, PLAINLY, again).await;
    }
}

/// A request about a response is on record as any send is, costs no tokens, and says nothing about health.
#[tokio::test]
async fn what_is_asked_of_a_response_is_on_record_without_tokens() {
    let mut stage = Stage::start(Kind::Embedded, plan("health: { failure_threshold: 1 }\n")).await;
    let parent = stage.make(false).await;
    stage.upstream(&parent.owner).push(Step::new([Action::status(500)]));
    assert_eq!(stage.about(&parent, Method::GET, "").await.status, 500);
    assert_eq!(stage.about(&parent, Method::GET, "").await.status, 200);
    stage.check(&parent, PLAINLY, SERVED).await;
    let Stage::Embedded(world) = &mut stage else { unreachable!("it was started so") };
    world.stop().await;
    let sql = "SELECT session_source, signal, outcome, attempts, reason, input IS NULL
               FROM usage_events JOIN usage_attempts USING (request_id) ORDER BY usage_events.started, request_id";
    let expected = [
        "explicit|header:x-session-id|success|1|draw|0",
        "parent|path:response_id|failed|1|owner|1",
        "parent|path:response_id|success|1|owner|1",
        "parent|body:previous_response_id|success|1|owner|0",
    ];
    assert_eq!(world.table(sql), expected);
}

/// The path of a response.
pub(crate) fn page(parent: &Parent) -> String {
    format!("{}/{}", RESPONSES.path, parent.id)
}

pub(crate) async fn ask(client: &Client, method: Method, path: &str) -> Answer {
    read(client.open(method, path, &[], Default::default()).await.expect("the gateway answers")).await
}

/// Asks again and again until it is so.
pub(crate) async fn until(holds: impl AsyncFn() -> bool) {
    let held = async { while !holds().await {} };
    tokio::time::timeout(PATIENCE, held).await.expect("it comes to be so");
}
