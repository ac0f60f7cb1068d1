//! The main road: three dialects, JSON and SSE, one conversation on one deployment.

use serde_json::{Value, json};
use waybill_simulator::Call;

use crate::world::{Plan, World};

/// One request of each dialect, and where its text is.
const DIALECTS: [(&str, &str); 3] =
    [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")];

fn body(prompt_field: &str, text: &str, stream: bool) -> Value {
    json!({"model": "gpt", "max_tokens": 64, "stream": stream, prompt_field: [{"role": "user", "content": text}]})
}

/// S3.4, S3.28: in every dialect and shape the reply names the session, and the session stays on one deployment.
#[tokio::test]
async fn a_session_stays_on_its_deployment_in_every_dialect_and_shape() {
    let world = World::start(Plan::of(&["a", "b", "c"])).await;
    let client = world.client();
    for (path, field) in DIALECTS {
        for session in 0..8 {
            let session = format!("s-{session}");
            let mut served = Vec::new();
            for stream in [false, true, false, true] {
                let answer = client.post(path, &[("x-session-id", &session)], &body(field, "Hello", stream)).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(answer.header("x-session-id"), Some(session.as_str()));
                served.push(answer.header("x-waybill-deployment").expect("the key may see it").to_owned());
            }
            served.dedup();
            assert_eq!(served.len(), 1, "{path} {session} was served by {served:?}");
        }
    }
    let calls: Vec<Call> = world.upstreams.iter().flat_map(|upstream| upstream.calls()).collect();
    assert_eq!(calls.len(), DIALECTS.len() * 8 * 4);
    assert!(world.upstreams.iter().all(|upstream| !upstream.calls().is_empty()), "new sessions are spread");
}
