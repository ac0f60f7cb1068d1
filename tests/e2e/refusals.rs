//! Refusals before anybody could be chosen: what a caller's request leaves behind that never got as far as a pool.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::client::Answer;
use crate::dialect::{DIALECTS, Dialect};
use crate::world::{Plan, World};

/// What is sent, and the code and status that it is refused with.
type Refused<'a> = (Vec<(&'a str, &'a str)>, Bytes, &'a str, u16);

fn refused_in(dialect: Dialect) -> Vec<Refused<'static>> {
    let with = |field: &str, value: Value| {
        let mut body = dialect.body("Hello", true);
        body[field] = value;
        Bytes::from(body.to_string())
    };
    let plain = || Bytes::from(dialect.body("Hello", true).to_string());
    vec![
        (vec![("x-session-id", "s")], "{not json".into(), "invalid_body", 400),
        (vec![], with("model", Value::Null), "invalid_body", 400),
        (vec![], with("model", json!("x".repeat(513))), "invalid_body", 400),
        (vec![("content-encoding", "br")], plain(), "unsupported_content_encoding", 415),
        (vec![("x-session-id", "s")], with("model", json!("nobody")), "model_not_found", 404),
        (vec![("x-waybill-group", "theirs")], plain(), "group_not_allowed", 403),
        (vec![("x-session-id", "s")], with("session_id", json!("t")), "session_conflict", 400),
        (vec![], with("session_id", json!(" s")), "invalid_session_id", 400),
        (vec![], with("prompt_cache_key", json!("   ")), "invalid_session_id", 400),
        (
            vec![("x-session-id", "s")],
            with("previous_response_id", json!("resp_1")),
            "previous_response_not_found",
            400,
        ),
    ]
}

/// S1.11, F16, C14: whatever a caller is refused for is on record under the id that it was told, in its session where it
/// names one; nobody is called, and neither health nor a pin hears of it. What a stranger sends is not.
#[tokio::test]
async fn every_refusal_of_a_caller_is_on_record_and_none_of_a_stranger() {
    let mut world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let digest = async || client.get("/debug/state-digest", &[]).await.text();
    let before = digest().await;
    let mut expected = Vec::new();
    let mut told = |answer: &Answer, path: &str, code: &'static str, status: u16| {
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (status, &json!(code)), "{path}");
        assert_eq!(answer.header("x-waybill-attempts"), Some("0"), "{path} {code}");
        let request = answer.header("x-waybill-request-id").expect("every reply names its request").to_owned();
        // One that was made for the record alone is not named.
        let session = answer.header("x-session-id").unwrap_or("-").to_owned();
        expected.push((request, session, code, status));
    };
    for dialect in DIALECTS {
        for (headers, body, code, status) in refused_in(dialect) {
            let answer = client.post_bytes(dialect.path, &headers, body.clone()).await;
            told(&answer, dialect.path, code, status);
            let stranger = [headers, vec![("x-api-key", "sk-wrong")]].concat();
            assert_eq!(client.post_bytes(dialect.path, &stranger, body).await.status, 401);
        }
    }
    let unknown = client.get("/v1/responses/resp_1", &[]).await;
    told(&unknown, "/v1/responses/resp_1", "previous_response_not_found", 404);
    assert_eq!(digest().await, before);
    assert_eq!(world.calls().len(), 0);
    let metrics = client.get("/metrics", &[]).await.text();
    assert!(metrics.contains("waybill_refusals_total{code=\"invalid_api_key\"} 30\n"), "{metrics}");
    world.stop().await;

    let rows = world.table(
        "select request_id, iif(session_source = 'generated', '-', session_id), code, status, outcome, attempts, scope, key_id, group_id from usage_events order by 1",
    );
    let row = |(request, session, code, status): &(String, String, &str, u16)| {
        format!("{request}|{session}|{code}|{status}|refused|0|tester|tester|main")
    };
    let mut wanted: Vec<String> = expected.iter().map(row).collect();
    wanted.sort();
    assert_eq!(rows, wanted);
    let named = world.table(
        "select code, session_source, signal, count(*) from usage_events where session_id = 's' group by 1, 2, 3",
    );
    assert_eq!(
        named,
        ["invalid_body|explicit|header:x-session-id|3", "model_not_found|explicit|header:x-session-id|3"]
    );
    assert_eq!(world.table("select count(*) from usage_attempts"), ["0"]);
    for (request, session, code, status) in &expected {
        let said = world.command(&["explain", request]).await;
        assert!(said.contains(&format!("outcome refused, status {status}, code {code}, 0 send(s)")), "{said}");
        assert!(said.contains("nothing was sent upstream"), "{said}");
        assert!(session == "-" || said.contains(&format!("session {session} ")), "{said}");
    }
}
