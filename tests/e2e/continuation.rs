//! Continuations go to the owner of what they go on from, over its connection, or nowhere: the table of issue 5, on one
//! file and on a fleet that shares Redis. What went where is read from the upstreams' own logs.

use http::Method;
use serde_json::{Value, json};
use waybill_simulator::{Action, Call, Control, Running, Step};

use crate::client::{Answer, Client, read};
use crate::dialect::{CHAT, RESPONSES};
use crate::fleet::ready_when;
use crate::shared::Cluster;
use crate::upstreams::Upstreams;
use crate::world::{KEY, PATIENCE, Plan, World};

/// The secret of a key that owns none of these responses.
const FOREIGN: &str = "sk-other";
const SERVED: Expected = Expected { status: 200, code: "", calls: 1, waits: false };
const UNKNOWN: Expected = refused(400, "previous_response_not_found");
const GONE: Expected = refused(400, "previous_response_unavailable");
const UNREADABLE: Expected = Expected { waits: true, ..refused(503, "ownership_unavailable") };

/// What a continuation comes to: its status, our code or the upstream's, the calls at the owner (elsewhere there are
/// none), and whether it is told when to come again.
#[derive(Clone, Copy)]
struct Expected {
    status: u16,
    code: &'static str,
    calls: usize,
    waits: bool,
}

const fn refused(status: u16, code: &'static str) -> Expected {
    Expected { status, code, calls: 0, waits: false }
}

/// The two ways to run Waybill.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Embedded,
    Distributed,
}

enum Stage {
    Embedded(Box<World>),
    Distributed(Box<Cluster>),
}

/// A response that was made, and who made it.
#[derive(Clone, Debug)]
struct Parent {
    id: String,
    owner: String,
    stream: bool,
}

/// How a continuation is asked for.
#[derive(Clone, Copy)]
struct Ask {
    key: &'static str,
    path: &'static str,
    model: &'static str,
    session: Option<&'static str>,
    /// An id instead of the parent's.
    id: Option<&'static str>,
}

const PLAINLY: Ask = Ask { key: KEY, path: RESPONSES.path, model: "gpt", session: None, id: None };

/// Three upstreams, and a second model at the same three.
fn plan(settings: &str) -> Plan {
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
    async fn start(kind: Kind, plan: Plan) -> Self {
        match kind {
            Kind::Embedded => Self::Embedded(Box::new(World::start(plan).await)),
            Kind::Distributed => Self::Distributed(Box::new(Cluster::of(plan, 2, 1000).await)),
        }
    }

    fn upstreams(&self) -> &Upstreams {
        match self {
            Self::Embedded(world) => &world.upstreams,
            Self::Distributed(cluster) => &cluster.fleet.upstreams,
        }
    }

    fn upstream(&self, name: &str) -> &Running {
        self.upstreams().named(name)
    }

    /// Where responses are made.
    fn maker(&self) -> Client {
        match self {
            Self::Embedded(world) => world.client(),
            Self::Distributed(cluster) => cluster.fleet.client(0),
        }
    }

    /// Where they are continued: at another gateway, where there is one.
    fn other(&self) -> Client {
        match self {
            Self::Embedded(world) => world.client(),
            Self::Distributed(cluster) => cluster.fleet.client(1),
        }
    }

    fn other_with(&self, key: &str) -> Client {
        self.other().with_key(key)
    }

    /// Waits until all that was said is where the others look.
    async fn settled(&self) {
        match self {
            Self::Embedded(world) => drop(world.settled().await),
            Self::Distributed(cluster) => cluster.settled().await,
        }
    }

    /// Changes the text of the configuration, and waits until every gateway serves by it.
    async fn edit(&self, edit: impl Fn(&str) -> String) {
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
    async fn make(&self, stream: bool) -> Parent {
        let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
        self.make_of(&self.maker(), body).await
    }

    async fn make_of(&self, client: &Client, body: Value) -> Parent {
        let answer = client.post(RESPONSES.path, &[("x-session-id", "s")], &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let owner = answer.header("x-waybill-deployment").expect("the key may see it");
        let owner = owner.split('/').next().expect("a deployment names its channel").to_owned();
        Parent { id: id_in(&answer), owner, stream: body["stream"] == true }
    }

    async fn go_on(&self, client: &Client, parent: &Parent, ask: Ask) -> Answer {
        let id = ask.id.unwrap_or(&parent.id);
        let mut body = json!({"model": ask.model, "previous_response_id": id, "stream": parent.stream});
        let prompt = if ask.path == CHAT.path { json!([{"role": "user", "content": "And?"}]) } else { json!("And?") };
        body[if ask.path == CHAT.path { "messages" } else { "input" }] = prompt;
        let headers: Vec<(&str, &str)> = ask.session.iter().map(|session| ("x-session-id", *session)).collect();
        client.post(ask.path, &headers, &body).await
    }

    /// Goes on from a parent, and holds what comes of it against what is expected.
    async fn check(&self, parent: &Parent, ask: Ask, expected: Expected) -> Answer {
        let client = self.other_with(ask.key);
        self.check_at(&client, parent, ask, expected).await
    }

    async fn check_at(&self, client: &Client, parent: &Parent, ask: Ask, expected: Expected) -> Answer {
        let (before, at_owner) = (self.upstreams().calls().len(), self.upstream(&parent.owner).calls().len());
        let answer = self.go_on(client, parent, ask).await;
        let said = format!("{parent:?}: {}", answer.text());
        assert_eq!(answer.status.as_u16(), expected.status, "{said}");
        let calls = self.upstream(&parent.owner).calls();
        assert_eq!(calls.len() - at_owner, expected.calls, "calls at the owner: {said}");
        assert_eq!(self.upstreams().calls().len() - before, expected.calls, "calls in all: {said}");
        if expected.status == 200 {
            assert_eq!(calls.last().expect("there was a call").json()["previous_response_id"], parent.id.as_str());
            assert_eq!(answer.header("x-session-id"), Some("s"), "the parent's session is inherited");
            assert!(answer.text().contains("completed"), "{said}");
        } else {
            assert_eq!(answer.json()["error"]["code"], expected.code, "{said}");
            assert_eq!(answer.header("retry-after").is_some(), expected.waits, "{said}");
            let retry =
                (expected.calls == 0 && !expected.waits && expected.code != "session_conflict").then_some("false");
            assert_eq!(answer.header("x-should-retry"), retry, "{said}");
        }
        answer
    }
}

/// The id of the response in an answer, JSON or SSE.
fn id_in(answer: &Answer) -> String {
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
        }
    }
}

async fn nothing(_: &mut Stage, _: &str) {}

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

/// Issue 5: "when the writers are not lagging, a continuation costs one shared-state read".
#[tokio::test]
async fn a_continuation_costs_one_read_of_the_shared_state() {
    let stage = Stage::start(Kind::Distributed, plan("")).await;
    let parent = stage.make(false).await;
    stage.settled().await;
    let Stage::Distributed(cluster) = &stage else { unreachable!("it was started so") };
    for n in 1..=5 {
        stage.check(&parent, PLAINLY, SERVED).await;
        let reads =
            [cluster.reads(1, "answered").await, cluster.reads(1, "failed").await, cluster.reads(1, "skipped").await];
        assert_eq!(reads, [n, 0, 0]);
    }
}

/// S1.7, S3.24: the owner rests, and nobody else can stand in.
#[tokio::test]
async fn a_continuation_waits_for_an_owner_that_cools() {
    let expected = Expected { waits: true, ..refused(503, "no_route_available") };
    for kind in [Kind::Embedded, Kind::Distributed] {
        let settings = "health: { failure_threshold: 1, cooldown_seconds: 600, cooldown_seconds_max: 600 }\n";
        let stage = Stage::start(kind, plan(settings)).await;
        let parents = [stage.make(false).await, stage.make(true).await];
        let owner = stage.upstream(&parents[0].owner);
        owner.push(Step::new([Action::status(503)]));
        let mut n = 0;
        while owner.calls().iter().all(|call| call.status != Some(503)) {
            n += 1;
            let session = format!("n-{n}");
            let answer = stage.maker().post(CHAT.path, &[("x-session-id", &session)], &CHAT.body("Hello", false)).await;
            assert_eq!(answer.status, 200, "another stands in for a chat");
        }
        for parent in &parents {
            // By the gateway that has met the failure: the others hear of it by and by (see `shared.rs`).
            stage.check_at(&stage.maker(), parent, PLAINLY, expected).await;
        }
    }
}

/// S3.24
#[tokio::test]
async fn a_continuation_of_a_disabled_owner_is_refused() {
    let disable = async |stage: &mut Stage, owner: &str| {
        let channel = format!("{{ id: {owner}, ");
        stage.edit(|text| text.replace(&channel, &format!("{channel}status: disabled, "))).await;
    };
    table("", disable, PLAINLY, GONE).await;
}

/// S3.24
#[tokio::test]
async fn a_continuation_of_a_deleted_owner_is_refused() {
    let delete = async |stage: &mut Stage, owner: &str| {
        let marks = [format!("id: {owner}, "), format!("{{ channel: {owner}, group: main, priority: 10 }}")];
        let second = format!("{{ channel: {owner}, group: main, priority: 10, upstream_model: gpt }}");
        let without = |text: &str| {
            let lines = text.lines().filter(|line| !marks.iter().any(|mark| line.contains(mark)));
            let text = lines.collect::<Vec<_>>().join("\n");
            text.replace(&format!("{second}, "), "").replace(&format!(", {second}"), "")
        };
        stage.edit(without).await;
    };
    table("", delete, PLAINLY, GONE).await;
}

/// S3.24, S3.30: where the connection leads elsewhere, nothing is sent there.
#[tokio::test]
async fn a_continuation_over_a_changed_connection_is_refused() {
    let redirect = async |stage: &mut Stage, owner: &str| {
        let away = ["a", "b", "c"].into_iter().find(|name| *name != owner).expect("there are three");
        let [from, to] = [owner, away].map(|name| stage.upstream(name).addr.to_string());
        stage.edit(|text| text.replace(&from, &to)).await;
    };
    table("", redirect, PLAINLY, GONE).await;
    let other_key = async |stage: &mut Stage, owner: &str| {
        let channel = format!("{{ id: {owner}, ");
        let with_other = |line: &str| match line.contains(&channel) {
            true => line.replace("env:UPSTREAM_KEY", "env:OTHER_KEY"),
            false => line.to_owned(),
        };
        stage.edit(|text| text.lines().map(with_other).collect::<Vec<_>>().join("\n")).await;
    };
    table("", other_key, PLAINLY, GONE).await;
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
        let parent = stage.make(false).await;
        let unknown = stage.check(&parent, Ask { id: Some("resp_none"), ..PLAINLY }, UNKNOWN).await;
        let foreign = stage.check(&parent, Ask { key: FOREIGN, ..PLAINLY }, UNKNOWN).await;
        assert_eq!(unknown.json(), foreign.json());
    }
}

/// S3.9: "a continuation that names others is refused as unknown".
#[tokio::test]
async fn a_continuation_that_names_another_model_or_endpoint_is_refused_as_unknown() {
    table("", nothing, Ask { model: "gpt-2", ..PLAINLY }, UNKNOWN).await;
    table("", nothing, Ask { path: CHAT.path, ..PLAINLY }, UNKNOWN).await;
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
    let Stage::Distributed(cluster) = &mut stage else { unreachable!("it was started so") };
    cluster.redis.stop();
    for parent in &parents {
        stage.check(parent, PLAINLY, UNREADABLE).await;
        stage.check_at(&stage.maker(), parent, PLAINLY, UNREADABLE).await;
        let answer = stage.other().post(CHAT.path, &[("x-session-id", "s")], &CHAT.body("Hello", false)).await;
        assert_eq!(answer.status, 200);
        let about = stage.other().get(&format!("{}/{}", RESPONSES.path, parent.id), &[]).await;
        assert_eq!((about.status.as_u16(), &about.json()["error"]["code"]), (503, &json!("ownership_unavailable")));
    }
    let Stage::Distributed(cluster) = &mut stage else { unreachable!("it was started so") };
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

/// DESIGN.md section 6: a response is shown to other gateways before it is projected, and one that is not found is
/// unknown only while every writer has been heard of within seconds.
#[tokio::test]
async fn while_a_writer_lags_what_is_not_found_is_not_unknown() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    stage.settled().await;
    let Stage::Distributed(cluster) = &mut stage else { unreachable!("it was started so") };
    cluster.projector.signal("STOP").await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let none = Ask { id: Some("resp_none"), ..PLAINLY };
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
    // It takes some seconds until nothing has been heard of for too long.
    until(async || stage.go_on(&stage.other(), &parents[0], none).await.status == 503).await;
    for parent in &parents {
        stage.check(parent, none, UNREADABLE).await;
        stage.check(parent, PLAINLY, SERVED).await;
    }
    let Stage::Distributed(cluster) = &mut stage else { unreachable!("it was started so") };
    cluster.projector.signal("CONT").await;
    stage.settled().await;
    for parent in &parents {
        stage.check(parent, none, UNKNOWN).await;
        stage.check(parent, PLAINLY, SERVED).await;
    }
}

/// S3.24: "failed or unfinished streams publish no ownership".
#[tokio::test]
async fn an_answer_that_was_cut_cannot_be_continued() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let owner = stage.make(stream).await.owner;
            stage.upstream(&owner).push(Step::new([Action::CutAfterEvents { events: 6 }]));
            let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
            stage.maker().post(RESPONSES.path, &[("x-session-id", "s")], &body).await;
            let cut = |call: &Call| call.did.contains(&Action::CutAfterEvents { events: 6 });
            let id = stage.upstream(&owner).calls().into_iter().rfind(cut).and_then(|call| call.response_id);
            let parent = Parent { id: id.expect("the upstream gave it an id"), owner, stream };
            stage.check(&parent, PLAINLY, UNKNOWN).await;
            stage.settled().await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
        }
    }
}

/// DESIGN.md section 10, "ended streams": `incomplete` is owned as `completed` is.
#[tokio::test]
async fn an_incomplete_answer_can_be_continued() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            stage.upstreams().iter().for_each(|upstream| upstream.push(Step::new([Action::Incomplete])));
            let parent = stage.make(stream).await;
            stage
                .upstreams()
                .iter()
                .for_each(|upstream| upstream.apply(Control { clear_steps: true, ..Control::default() }));
            stage.check(&parent, PLAINLY, SERVED).await;
        }
    }
}

/// What the API is asked not to store cannot be continued by its id, by nobody.
#[tokio::test]
async fn an_answer_that_is_not_stored_is_owned_by_nobody() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let body = json!({"model": "gpt", "input": "Hello", "stream": stream, "store": false});
            let parent = stage.make_of(&stage.maker(), body).await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
        }
    }
}

/// S3.9: a response in the background is found by its id from the beginning, and can be continued once it has ended.
#[tokio::test]
async fn a_background_response_is_asked_for_at_its_owner_and_continued_once_it_has_ended() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let body = json!({"model": "gpt", "input": "Hello", "background": true});
        let parent = stage.make_of(&stage.maker(), body.clone()).await;
        stage.check(&parent, PLAINLY, UNKNOWN).await;
        let page = format!("{}/{}", RESPONSES.path, parent.id);
        let got = stage.other().get(&page, &[]).await;
        assert_eq!((got.status.as_u16(), &got.json()["status"]), (200, &json!("completed")));
        stage.check(&parent, PLAINLY, SERVED).await;

        let streamed = stage
            .make_of(&stage.maker(), json!({"model": "gpt", "input": "Hello", "background": true, "stream": true}))
            .await;
        stage.check(&streamed, PLAINLY, SERVED).await;

        let cancelled = stage.make_of(&stage.maker(), body).await;
        let page = format!("{}/{}/cancel", RESPONSES.path, cancelled.id);
        let answer = stage.other().post(&page, &[], &json!({})).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["status"]), (200, &json!("cancelled")));
        let asked = stage.upstream(&cancelled.owner).calls().pop().expect("the owner was asked");
        assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", page.as_str()));
    }
}

/// PITFALLS: a stream in the background may take minutes to its first word; its id is passed on at once.
#[tokio::test]
async fn a_background_stream_names_its_response_before_it_says_anything() {
    let world = World::start(plan("")).await;
    world.upstreams.iter().for_each(|upstream| upstream.push(Step::new([Action::PauseAfter { events: 1 }]).standing()));
    let body = json!({"model": "gpt", "input": "Hello", "background": true, "stream": true});
    let client = world.client();
    let asked = RESPONSES.read_until(&client, &body, "response.created");
    let answer = tokio::time::timeout(PATIENCE, asked).await.expect("the first event is passed on");
    world.upstreams.iter().for_each(|upstream| upstream.release());
    drop(answer);
}

/// S3.9: "`GET`, `DELETE`, `cancel` need only scope + id".
#[tokio::test]
async fn what_is_asked_of_a_response_is_asked_of_its_owner() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let parent = stage.make(false).await;
        let page = format!("{}/{}", RESPONSES.path, parent.id);
        let asks = [
            (Method::GET, page.clone(), "completed"),
            (Method::GET, format!("{page}/input_items?limit=2"), "Hello"),
            (Method::DELETE, page.clone(), "response.deleted"),
        ];
        for (method, path, holds) in asks {
            for (key, id) in [(FOREIGN, &parent.id[..]), (KEY, "resp_none")] {
                let path = path.replace(&parent.id, id);
                let answer = ask(&stage.other_with(key), method.clone(), &path).await;
                let code = answer.json()["error"]["code"].clone();
                assert_eq!((answer.status.as_u16(), code), (404, json!("previous_response_not_found")), "{path}");
            }
            let before = stage.upstreams().calls().len();
            let answer = ask(&stage.other(), method.clone(), &path).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(answer.text().contains(holds), "{method} {path}: {}", answer.text());
            assert_eq!(answer.header("x-session-id"), Some("s"));
            assert_eq!(stage.upstreams().calls().len() - before, 1);
            let call = stage.upstream(&parent.owner).calls().pop().expect("the owner was asked");
            assert_eq!(
                (call.method.as_str(), call.path.as_str(), call.body_bytes),
                (method.as_str(), path.as_str(), 0)
            );
            assert_eq!(call.credential.as_deref(), Some("sk-upstream"));
        }
        // Deleted, it stays its owner's, who knows nothing of it any more.
        let gone = ask(&stage.other(), Method::GET, &page).await;
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
    let page = format!("{}/{}", RESPONSES.path, parent.id);
    stage.upstream(&parent.owner).push(Step::new([Action::status(500)]));
    assert_eq!(ask(&stage.other(), Method::GET, &page).await.status, 500);
    assert_eq!(ask(&stage.other(), Method::GET, &page).await.status, 200);
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

/// Conversations are made elsewhere; who answers the first request of one has it.
#[tokio::test]
async fn a_conversation_stays_with_the_connection_that_has_it() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let body = |model: &str| json!({"model": model, "input": "Hello", "conversation": "conv_1"});
        let first = stage.make_of(&stage.maker(), body("gpt")).await;
        for n in 0..6 {
            // Neither another session nor another model moves it.
            let session = format!("other-{n}");
            let model = if n % 2 == 0 { "gpt" } else { "gpt-2" };
            let answer = stage.other().post(RESPONSES.path, &[("x-session-id", &session)], &body(model)).await;
            let served = answer.header("x-waybill-deployment").expect("the key may see it");
            assert_eq!(served.split('/').next(), Some(first.owner.as_str()));
        }
        stage.upstream(&first.owner).push(Step::new([Action::status(503)]));
        let before = stage.upstreams().calls().len();
        let failed = stage.other().post(RESPONSES.path, &[], &body("gpt")).await;
        assert_eq!((failed.status.as_u16(), stage.upstreams().calls().len() - before), (503, 1), "nobody stands in");
    }
}

/// S3.16: a continuation is sent again only where nothing was done, and only to its owner.
#[tokio::test]
async fn a_continuation_is_sent_again_to_its_owner_only_where_nothing_was_done() {
    let retry = "retry: { backoff_ms: 1, max_attempts: 3 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan::of(&["a", "b", "c"]).settings(retry)).await;
    let stage = Stage::Embedded(Box::new(world));
    let parent = stage.make(false).await;
    let check = async |action: Action, calls: usize, status: u16| {
        stage.upstream(&parent.owner).push(Step::new([action]));
        let before = stage.upstreams().calls().len();
        let answer = stage.go_on(&stage.other(), &parent, PLAINLY).await;
        let at_owner = stage.upstream(&parent.owner).calls().len();
        assert_eq!((answer.status.as_u16(), stage.upstreams().calls().len() - before), (status, calls));
        assert_eq!(at_owner, stage.upstreams().calls().len(), "all calls are the owner's");
        stage.upstream(&parent.owner).apply(Control { clear_steps: true, ..Control::default() });
    };
    check(Action::status(429), 2, 200).await;
    check(Action::status(500), 1, 500).await;
    check(Action::Reset, 1, 502).await;
    check(Action::CutAfterEvents { events: 1 }, 1, 502).await;
}

async fn ask(client: &Client, method: Method, path: &str) -> Answer {
    read(client.open(method, path, &[], Default::default()).await.expect("the gateway answers")).await
}

/// Asks again and again until it is so.
async fn until(holds: impl AsyncFn() -> bool) {
    let held = async { while !holds().await {} };
    tokio::time::timeout(PATIENCE, held).await.expect("it comes to be so");
}
