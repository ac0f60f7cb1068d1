//! Answers that an upstream packs although it is asked not to (G06): they are read like any other, and the client gets
//! them as they were.

use http_body_util::BodyExt;
use serde_json::json;
use waybill_simulator::{Action, Call, Step};

use crate::dialect::{CHAT, DIALECTS, MESSAGES};
use crate::world::{Plan, Rows, World};

/// One send to a deployment, and any failure is held against it.
const STRICT: &str = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1 }\n";
const GZIP: Action = Action::Gzip { cut: false };

/// JSON and streams, in all dialects: whole, without a word of packing, and with the usage that the upstream counted.
#[tokio::test]
async fn a_packed_answer_is_read_and_given_as_it_was() {
    let mut world = World::start(Plan::of(&["a"]).settings(STRICT)).await;
    for dialect in DIALECTS {
        for stream in [false, true] {
            world.upstreams[0].push(Step::new([GZIP]));
            let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", stream)).await;
            assert_eq!((answer.status.as_u16(), answer.whole), (200, true), "{dialect:?}: {}", answer.text());
            assert_eq!(answer.header("content-encoding"), None);
            assert_eq!(answer.text().contains(dialect.last), stream, "{dialect:?}: {}", answer.text());
            assert!(stream || answer.json().is_object());
        }
    }
    let calls = world.calls();
    assert_eq!(calls.len(), 6);
    let used = |call: &Call| {
        let usage = call.usage.as_ref().expect("the upstream counts");
        format!("success|{}|{}", usage.prompt_tokens, usage.output_tokens)
    };
    world.stop().await;
    let rows = world.table("select class, input, output from usage_attempts order by started");
    assert_eq!(rows, calls.iter().map(used).collect::<Vec<_>>());
}

/// An event that was flushed passes before the next one is written.
#[tokio::test]
async fn an_event_of_a_packed_stream_is_not_held_back() {
    let world = World::start(Plan::of(&["a"]).settings(STRICT)).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Step::new([GZIP, Action::PauseAfter { events: 5 }]));
        let response = dialect.read_until(&world.client(), &dialect.body("Hello", true), "delta").await;
        world.upstreams[0].release();
        let rest = response.into_body().collect().await.expect("the stream comes to its end").to_bytes();
        assert!(String::from_utf8_lossy(&rest).contains(dialect.last), "{dialect:?}");
    }
}

/// What a 400 means stands in its body: a prompt that does not fit goes on along the chain.
#[tokio::test]
async fn a_packed_error_is_classified_by_what_it_says() {
    let rows = Rows {
        routes: vec!["{ model: large, members: [{ channel: b, group: main, upstream_model: gpt }] }".to_owned()],
        ..Rows::default()
    };
    let members = vec!["priority: 10".to_owned(), "-".to_owned()];
    let plan = Plan { rows, members, route: "fallbacks: [large]".to_owned(), ..Plan::of(&["a", "b"]) };
    let world = World::start(plan.settings(STRICT)).await;
    for dialect in DIALECTS {
        let body = if dialect == MESSAGES {
            json!({"type": "error", "error": {"type": "invalid_request_error",
                "message": "prompt is too long: 200001 tokens > 200000 maximum"}})
        } else {
            json!({"error": {"message": "m", "type": "invalid_request_error", "param": "messages",
                "code": "context_length_exceeded"}})
        };
        world.upstream("a").push(Step::new([GZIP, Action::Status { status: 400, headers: Default::default(), body }]));
        let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", false)).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-fallback")), (200, Some("true")), "{dialect:?}");
    }
    assert_eq!((world.upstream("a").calls().len(), world.upstream("b").calls().len()), (3, 3));
}

/// Two MiB of an error in two KiB: it is read to its bound and no further, and then says nothing.
#[tokio::test]
async fn an_error_that_becomes_too_large_says_nothing() {
    let world = World::start(Plan::of(&["a"]).settings(STRICT)).await;
    let body = json!({"error": {"message": "m".repeat(2 << 20), "code": "context_length_exceeded"}});
    world.upstreams[0].push(Step::new([GZIP, Action::Status { status: 400, headers: Default::default(), body }]));
    let answer = world.client().post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
    let code = answer.json()["error"]["code"].clone();
    assert_eq!((answer.status.as_u16(), &code), (400, &json!("upstream_refused")), "{}", answer.body.len());
    assert_eq!(answer.header("content-encoding"), None);
}

/// A packing that ends before its end is a failure, whatever it held: of a stream only if the stream did not end before.
#[tokio::test]
async fn a_broken_packing_is_no_answer() {
    let cut = Action::Gzip { cut: true };
    let mut world =
        World::start(Plan::of(&["a"]).settings("retry: { max_attempts: 1 }\nhealth: { enabled: false }\n")).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Step::new([cut.clone()]));
        let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", false)).await;
        assert_eq!(answer.status, 502, "{dialect:?}: {}", answer.text());
    }
    world.upstreams[0].push(Step::new([cut.clone(), Action::NoDone]));
    let answer = world.client().post(CHAT.path, &[], &CHAT.body("Hello", true)).await;
    assert!(answer.text().contains("upstream_stream_interrupted"), "{}", answer.text());
    world.upstreams[0].push(Step::new([cut]));
    let answer = world.client().post(CHAT.path, &[], &CHAT.body("Hello", true)).await;
    assert!(answer.text().contains(CHAT.last), "{}", answer.text());
    world.stop().await;
    let rows = world.table("select class from usage_attempts order by started");
    assert_eq!(rows, ["interrupted", "interrupted", "interrupted", "interrupted", "success"]);
}
