//! What an unscripted simulator answers.

use serde_json::{Value, json};
use waybill_simulator::{Action, End, Endpoint, Reply, Settings, Simulator};

use crate::client::{get, post};

fn chat(stream: bool) -> Value {
    json!({"model": "gpt-4o", "stream": stream, "messages": [{"role": "user", "content": "Say hi"}]})
}

fn responses(stream: bool) -> Value {
    json!({"model": "gpt-5.4", "stream": stream, "input": "Say hi"})
}

fn messages(stream: bool) -> Value {
    json!({"model": "claude-sonnet-4-5", "max_tokens": 9, "stream": stream, "messages": [{"role": "user", "content": "Say hi"}]})
}

/// Asks for JSON and for a stream; compares the number of events of the stream and its last data.
async fn check(path: &str, body: fn(bool) -> Value, events: u32, last: &str) {
    let sim = Simulator::start(Settings { chunks: 3, ..Settings::named("up-1") }).await.expect("a port");
    let whole = post(&sim, path, "", &body(false)).await;
    assert_eq!((whole.status, whole.whole), (200, true));
    assert!(whole.text().contains("[up-1] "));
    let stream = post(&sim, path, "", &body(true)).await;
    assert!(stream.head.contains("content-type: text/event-stream"), "{}", stream.head);
    assert!(stream.whole && stream.data().last().is_some_and(|data| data.contains(last)));
    let calls = sim.calls();
    assert_eq!(calls.iter().map(|call| call.events).collect::<Vec<_>>(), [1, events]);
    assert!(calls.iter().all(|call| call.terminal && call.end == Some(End::Finished) && call.status == Some(200)));
    assert_eq!(stream.data().len() as u32, events);
}

#[tokio::test]
async fn every_dialect_answers_whole_and_in_a_stream() {
    check("/v1/chat/completions", chat, 6, "[DONE]").await;
    check("/v1/responses", responses, 11, "response.completed").await;
    check("/v1/messages?beta=true", messages, 9, "message_stop").await;
}

#[tokio::test]
async fn a_tool_round_trip_ends_in_text() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let tools = json!([{"type": "function", "name": "exec_command", "parameters": {"type": "object"}}]);
    let user = json!({"role": "user", "content": [{"type": "input_text", "text": "call tool exec_command"}]});
    let first = post(&sim, "/v1/responses", "", &json!({"model": "m", "tools": tools, "input": [user]})).await.json();
    let call = &first["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("exec_command")));
    assert_eq!(call["arguments"], r#"{"cmd":"echo hi"}"#);
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "hi"});
    let second = json!({"model": "m", "tools": tools, "input": [user, call, output]});
    assert_eq!(post(&sim, "/v1/responses", "", &second).await.json()["output"][0]["type"], "message");
}

#[tokio::test]
async fn a_scripted_reply_makes_parallel_tool_calls() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let mut reply = Reply::call("f", json!({"a": 1}));
    reply.tool_calls.extend(Reply::call("g", json!({})).tool_calls);
    sim.push(Action::Reply(reply));
    let answer = post(&sim, "/v1/chat/completions", "", &chat(false)).await.json();
    let calls = &answer["choices"][0]["message"]["tool_calls"];
    assert_eq!((&calls[0]["function"]["name"], &calls[1]["function"]["name"]), (&json!("f"), &json!("g")));
    assert_ne!(calls[0]["id"], calls[1]["id"]);
}

#[tokio::test]
async fn models_embeddings_and_token_counts_are_served() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let openai = json!({"object": "list", "data": [{"id": "sim-model", "object": "model", "created": 1_767_225_600, "owned_by": "simulator"}]});
    assert_eq!(get(&sim, "/v1/models", "").await.json(), openai);
    let anthropic = get(&sim, "/v1/models", "anthropic-version: 2023-06-01\r\n").await.json();
    assert_eq!((&anthropic["first_id"], &anthropic["has_more"]), (&json!("sim-model"), &json!(false)));
    let request = json!({"model": "e", "input": "abc", "encoding_format": "base64", "dimensions": 1});
    let embedding = post(&sim, "/v1/embeddings", "", &request).await;
    assert_eq!(embedding.json()["data"][0]["embedding"], "AADoPg=="); // 0.453125 = 0x3ee80000
    let count = post(&sim, "/v1/messages/count_tokens", "", &messages(false)).await.json();
    assert_eq!(count, json!({"input_tokens": 4})); // "user: Say hi\n" is 13 characters
}

#[tokio::test]
async fn a_wrong_key_is_refused_in_the_dialect_of_the_endpoint() {
    let sim =
        Simulator::start(Settings { require_key: Some("k".into()), ..Settings::default() }).await.expect("a port");
    let refused = post(&sim, "/v1/chat/completions", "authorization: Bearer x\r\n", &chat(false)).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
    let refused = post(&sim, "/v1/messages", "", &messages(false)).await;
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (401, &json!("authentication_error")));
    for header in ["authorization: Bearer k\r\n", "x-api-key: k\r\n", "api-key: k\r\n"] {
        assert_eq!(post(&sim, "/v1/messages", header, &messages(false)).await.status, 200, "{header}");
    }
}

#[tokio::test]
async fn a_response_can_be_continued_at_its_simulator_and_credential_only() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let first = post(&sim, "/v1/responses", "authorization: Bearer a\r\n", &responses(false)).await.json();
    let next = json!({"model": "gpt-5.4", "input": "And?", "previous_response_id": first["id"]});
    let second = post(&sim, "/v1/responses", "authorization: Bearer a\r\n", &next).await;
    // "user: Say hi\n" and "user: And?\n" are 24 characters; the answer between them is "assistant: TEXT\n".
    let text = first["output"][0]["content"][0]["text"].as_str().map_or(0, |text| text.len() as u64);
    assert_eq!(second.json()["usage"]["input_tokens"], (24 + 12 + text).div_ceil(4));
    let stranger = post(&sim, "/v1/responses", "authorization: Bearer b\r\n", &next).await;
    assert_eq!((stranger.status, &stranger.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
    let other = Simulator::start(Settings::named("other")).await.expect("a port");
    assert_eq!(post(&other, "/v1/responses", "authorization: Bearer a\r\n", &next).await.status, 400);
}

#[tokio::test]
async fn the_log_keeps_the_latest_calls_and_no_bodies_when_told_so() {
    let settings = Settings { calls_max: 2, keep_bodies: false, ..Settings::default() };
    let sim = Simulator::start(settings).await.expect("a port");
    for _ in 0..3 {
        post(&sim, "/v1/messages", "", &json!({})).await;
    }
    let kept = |call: &waybill_simulator::Call| (call.number, call.body.len(), call.body_bytes, call.end);
    let expected = [(2, 0, 2, Some(End::Finished)), (3, 0, 2, Some(End::Finished))];
    assert_eq!(sim.calls().iter().map(kept).collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn an_upgrade_is_answered_426_and_an_unknown_path_404() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    assert_eq!(get(&sim, "/v1/responses", "upgrade: websocket\r\n").await.status, 426);
    assert_eq!(get(&sim, "/v1/nothing", "").await.status, 404);
    let calls = sim.calls();
    assert_eq!((calls[1].endpoint, calls[1].status), (None, Some(404)));
}

#[tokio::test]
async fn the_call_log_keeps_what_came_byte_for_byte() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let headers = "x-session-id: s-1\r\nAuthorization: Bearer key\r\n";
    crate::client::Exchange::send(&sim, "POST /v1/messages?beta=true", headers, "{}").await.finish().await;
    let call = sim.calls().remove(0);
    assert_eq!(
        (call.number, call.connection, call.method.as_str(), call.path.as_str()),
        (1, 1, "POST", "/v1/messages?beta=true")
    );
    assert_eq!((call.endpoint, call.credential.as_deref()), (Some(Endpoint::Messages), Some("key")));
    assert_eq!(call.sessions, [("x-session-id".to_owned(), "s-1".to_owned())]);
    assert_eq!((call.header("host"), &call.body[..], call.body_bytes), (Some("sim"), &b"{}"[..], 2));
    // echo -n '{}' | sha256sum
    assert_eq!(call.body_sha256, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
}
