//! Identity: one session over all endpoints, apart for every caller, recognised where no client names it.

use serde_json::json;
use waybill_simulator::{Action, Control, Step};

use crate::client::{Answer, Client};
use crate::dialect::{CHAT, DIALECTS, Dialect, MESSAGES, RESPONSES};
use crate::world::{Plan, Rows, World};

const CALM: &str = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";

fn upstream_of(answer: &Answer) -> usize {
    assert_eq!(answer.status, 200, "{}", answer.text());
    usize::from(answer.header("x-waybill-deployment").expect("the key may see it").as_bytes()[0] - b'a')
}

async fn served(client: &Client, dialect: Dialect, model: &str) -> usize {
    let mut body = dialect.body("Hello", false);
    body["model"] = json!(model);
    upstream_of(&client.post(dialect.path, &[("x-session-id", "s")], &body).await)
}

/// Moves what `client` calls session `s` of `model` away from `from`, if it is there.
async fn moved(world: &World, client: &Client, dialect: Dialect, model: &str, from: usize) -> usize {
    world.upstreams[from].push(Action::status(503));
    let to = served(client, dialect, model).await;
    world.upstreams[from].apply(Control { clear_steps: true, ..Control::default() });
    assert_ne!(to, from);
    to
}

/// S3.7, S3.8: a session has one id, and a place of its own for every endpoint and model; coming back finds it.
#[tokio::test]
async fn a_session_has_a_place_for_every_endpoint_and_model() {
    let routes = vec![
        "{ model: other, members: [{ channel: a, upstream_model: gpt }, { channel: b, upstream_model: gpt }] }"
            .to_owned(),
    ];
    let plan = Plan { rows: Rows { routes, ..Rows::default() }, ..Plan::of(&["a", "b"]) };
    let mut world = World::start(plan.settings(CALM)).await;
    let client = world.client();
    let chat = served(&client, CHAT, "gpt").await;
    for (dialect, model) in [(RESPONSES, "gpt"), (MESSAGES, "gpt"), (CHAT, "other")] {
        let elsewhere = moved(&world, &client, dialect, model, chat).await;
        assert_eq!(served(&client, dialect, model).await, elsewhere);
        assert_eq!(served(&client, CHAT, "gpt").await, chat);
    }
    world.stop().await;
    let rows = world.table("select distinct scope, session_id, session_source, signal from usage_events");
    assert_eq!(rows, ["tester|s|explicit|header:x-session-id"]);
}

/// S3.7, CLIENTS 4: the same id of another caller is another session.
#[tokio::test]
async fn callers_never_share_a_session() {
    let mut world = World::start(Plan::of(&["a", "b"]).settings(CALM)).await;
    let (tester, other) = (world.client(), world.client_with("sk-other"));
    let pinned = served(&tester, CHAT, "gpt").await;
    let elsewhere = moved(&world, &other, CHAT, "gpt", pinned).await;
    for _ in 0..3 {
        assert_eq!(served(&tester, CHAT, "gpt").await, pinned);
        assert_eq!(served(&other, CHAT, "gpt").await, elsewhere);
    }
    // Whatever a client says of itself, its key says whose the session is.
    let mut claims = CHAT.body("Hello", false);
    (claims["scope"], claims["user"], claims["metadata"]) =
        (json!("tester"), json!("tester"), json!({"scope": "tester", "user_id": "tester"}));
    let headers = ["x-scope", "x-waybill-scope", "openai-organization", "x-user-id"].map(|name| (name, "tester"));
    let headers: Vec<_> = headers.into_iter().chain([("x-session-id", "s")]).collect();
    let posing = other.post(&format!("{}?scope=tester", CHAT.path), &headers, &claims).await;
    assert_eq!(upstream_of(&posing), elsewhere);
    let hashed = async |client: &Client| client.post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
    let (mine, theirs) = (hashed(&tester).await, hashed(&other).await);
    assert_ne!(mine.header("x-session-id"), theirs.header("x-session-id"), "hashes of content are keyed by scope");
    world.stop().await;
    let rows = world.table("select scope, count(*) from usage_events where session_id = 's' group by 1 order by 1");
    assert_eq!(rows, ["other|5", "tester|4"]);
}

/// S3.4, H12: a session is named on the reply as the client spelled it, beyond ASCII too.
#[tokio::test]
async fn a_session_is_named_as_it_was_spelled() {
    let world = World::start(Plan::of(&["a"])).await;
    for dialect in DIALECTS {
        for id in ["größe", "会话-1", "line\u{2028}separator"] {
            let mut body = dialect.body("Hello", true);
            let by_header = world.client().post(dialect.path, &[("x-session-id", id)], &body).await;
            body["session_id"] = json!(id);
            let by_body = world.client().post(dialect.path, &[], &body).await;
            for answer in [by_header, by_body] {
                let named = answer.headers.get("x-session-id").map(|value| value.as_bytes());
                assert_eq!((answer.status.as_u16(), named), (200, Some(id.as_bytes())), "{id} {}", dialect.path);
            }
        }
    }
}

/// CLIENTS 3: vendors' headers name a session where they are known, and nothing where they are off.
#[tokio::test]
async fn vendors_headers_count_where_they_are_known() {
    let id = "0b9ed7b6-3f4a-4c6e-9d7e-0a2f1c3b5d70";
    let claude = format!("{{\"device_id\":\"{}\",\"account_uuid\":\"\",\"session_id\":\"{id}\"}}", "a".repeat(64));
    let signals: [(Dialect, Option<&str>, bool); 4] = [
        (MESSAGES, Some("x-claude-code-session-id"), false),
        (MESSAGES, None, true),
        (RESPONSES, Some("session-id"), false),
        (RESPONSES, Some("session_id"), false),
    ];
    for (setting, known) in [("off", false), ("known", true)] {
        let settings = format!("session: {{ aliases: {setting} }}\n");
        let world = World::start(Plan::of(&["a", "b"]).settings(&settings)).await;
        let client = world.client();
        for (dialect, header, metadata) in signals {
            let headers: Vec<_> = header.map(|name| (name, id)).into_iter().collect();
            let mut found = Vec::new();
            for text in ["Hello", "Good evening"] {
                let mut body = dialect.body(text, true);
                if metadata {
                    body["metadata"] = json!({"user_id": claude});
                }
                let answer = client.post(dialect.path, &headers, &body).await;
                found.push(answer.header("x-session-id").expect("every reply names its session").to_owned());
            }
            assert_eq!(found[0] == id, known, "{setting} {header:?}");
            assert_eq!(found[0] == found[1], known, "{setting} {header:?}");
            let call = world.upstreams.iter().flat_map(|upstream| upstream.calls()).next_back();
            assert!(
                call.is_some_and(|call| header.is_none_or(|name| call.sessions.iter().any(|(found, _)| found == name))
                    || call.stream)
            );
        }
    }
}

/// S3.5, S3.6: `Hello`, then the whole history: one session on one deployment, in every dialect. The increment alone is
/// another.
#[tokio::test]
async fn a_history_is_recognised_by_its_beginning() {
    let mut world = World::start(Plan::of(&["a", "b", "c"])).await;
    let client = world.client();
    let mut sessions = Vec::new();
    for dialect in DIALECTS {
        let turns = [("user", "Hello"), ("assistant", "Hi."), ("user", "Explain more")];
        let first = client.post(dialect.path, &[], &dialect.turns(&turns[..1], false)).await;
        let second = client.post(dialect.path, &[], &dialect.turns(&turns, true)).await;
        let increment = client.post(dialect.path, &[], &dialect.turns(&turns[2..], false)).await;
        assert_eq!(upstream_of(&first), upstream_of(&second));
        let [first, second, increment] = [&first, &second, &increment]
            .map(|answer| answer.header("x-session-id").expect("every reply names its session").to_owned());
        assert_eq!(first, second);
        assert_ne!(first, increment);
        assert!(first.starts_with("prompt:v1:"), "{first}");
        sessions.push(first);
    }
    sessions.dedup();
    assert_eq!(sessions.len(), 1, "neither model nor endpoint counts");
    world.stop().await;
    assert_eq!(world.table("select distinct session_source, signal from usage_events"), ["prompt|prompt"]);
}

/// S3.1: an explicit id comes before a cache key, a cache key before the prompt, and what says nothing is new each time.
#[tokio::test]
async fn the_strongest_signal_names_the_session() {
    let mut world = World::start(Plan::of(&["a", "b"])).await;
    let client = world.client();
    let mut body = RESPONSES.body("Hello", false);
    body["prompt_cache_key"] = json!("key-1");
    let session = |answer: Answer| answer.header("x-session-id").expect("every reply names its session").to_owned();
    assert_eq!(session(client.post(RESPONSES.path, &[("x-session-id", "s")], &body).await), "s");
    let by_key = session(client.post(RESPONSES.path, &[], &body).await);
    assert!(by_key.starts_with("cache:v1:") && !by_key.contains("key-1"), "{by_key}");
    body["input"] = json!("Something else");
    assert_eq!(session(client.post(RESPONSES.path, &[], &body).await), by_key);
    let silent = json!({"model": "gpt", "messages": [{"role": "user", "content": "  "}]});
    let [one, two] =
        [session(client.post(CHAT.path, &[], &silent).await), session(client.post(CHAT.path, &[], &silent).await)];
    assert_ne!(one, two);
    world.stop().await;
    let rows = world.table("select session_source, signal from usage_events order by started");
    let key = "cache_key|body:prompt_cache_key";
    assert_eq!(rows, ["explicit|header:x-session-id", key, key, "generated|generated", "generated|generated"]);
    let database = std::fs::read(world.data().join("waybill.db")).expect("the log can be read");
    let holds = |text: &[u8]| database.windows(text.len()).any(|window| window == text);
    assert!(!holds(b"Something else") && !holds(b"key-1"), "no content is stored");
}

/// S3.7: a session served twice by the same deployment leaves one row a request, each with its own id.
#[tokio::test]
async fn every_request_has_one_row() {
    let mut world = World::start(
        Plan::of(&["a"]).settings("retry: { backoff_ms: 1, max_attempts: 2 }\nhealth: { enabled: false }\n"),
    )
    .await;
    let client = world.client();
    world.upstreams[0].push(Step::new([Action::status(503)]).times(3));
    let mut ids = Vec::new();
    for _ in 0..3 {
        let answer = client.post(CHAT.path, &[("x-session-id", "s")], &CHAT.body("Hello", true)).await;
        ids.push(answer.header("x-waybill-request-id").expect("every reply names its request").to_owned());
    }
    world.stop().await;
    let rows = world.table("select request_id, outcome, attempts from usage_events order by started");
    let expected: Vec<String> =
        ids.iter().zip(["failed|2", "success|2", "success|1"]).map(|(id, rest)| format!("{id}|{rest}")).collect();
    assert_eq!(rows, expected);
}
