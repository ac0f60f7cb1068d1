//! Each scripted fault, seen from the socket and in the call log.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use waybill_simulator::{Action, End, Running, Settings, Simulator, Step};

use crate::client::{Exchange, Last, Received, post};

const PATH: &str = "/v1/chat/completions";

/// Streams as: role, "[sim] … ", four more deltas, finish, [DONE].
fn stream() -> Value {
    json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "Say hi"}]})
}

fn whole() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "Say hi"}]})
}

async fn start() -> Running {
    Simulator::start(Settings::default()).await.expect("a port")
}

/// Asks `body` of a simulator that does `actions`.
async fn ask(actions: impl IntoIterator<Item = Action>, body: &Value) -> (Received, Running) {
    let sim = start().await;
    sim.push(Step::new(actions));
    (post(&sim, PATH, "", body).await, sim)
}

/// What a client and the log see of a stream with one fault: events, a proper end of the body, the socket's end, the log's.
#[track_caller]
fn check((received, sim): &(Received, Running), events: usize, whole: bool, last: Last, end: End) {
    assert_eq!((received.status, received.data().len(), received.whole, received.last), (200, events, whole, last));
    let call = &sim.calls()[0];
    assert_eq!((call.events as usize, call.end), (events, Some(end)));
    assert_eq!(call.terminal, received.data().iter().any(|data| data == "[DONE]"));
}

#[tokio::test]
async fn a_status_has_its_headers_and_the_dialects_body() {
    let (received, sim) = ask([Action::status_retry_after(429, 3)], &stream()).await;
    assert_eq!(received.status, 429);
    assert!(received.head.contains("\r\nretry-after: 3") && received.head.contains("content-type: application/json"));
    assert_eq!(received.json()["error"]["code"], "rate_limit_exceeded");
    assert_eq!((sim.calls()[0].status, sim.calls()[0].end), (Some(429), Some(End::Finished)));
    let raw = Action::Status { status: 502, headers: BTreeMap::new(), body: json!("<html>Bad gateway</html>") };
    let (received, _) = ask([raw], &stream()).await;
    assert_eq!(received.text(), "<html>Bad gateway</html>");
    assert!(received.head.contains("content-type: text/html"));
}

#[tokio::test]
async fn streams_break_in_every_way() {
    let after = |actions: Vec<Action>| async move { ask(actions, &stream()).await };
    check(&after(vec![]).await, 8, true, Last::Closed, End::Finished);
    check(&after(vec![Action::CutAfterEvents { events: 3 }]).await, 3, false, Last::Reset, End::Reset);
    check(&after(vec![Action::CutAfterEvents { events: 0 }]).await, 0, false, Last::Reset, End::Reset);
    check(&after(vec![Action::EndAfterEvents { events: 3 }]).await, 3, true, Last::Closed, End::Finished);
    check(&after(vec![Action::NoDone]).await, 7, true, Last::Closed, End::Finished);
    check(&after(vec![Action::EmptyStream]).await, 0, true, Last::Closed, End::Finished);
    let error = after(vec![Action::ErrorEventAfter { events: 2, body: Value::Null }]).await;
    check(&error, 3, true, Last::Closed, End::Finished);
    assert_eq!(error.0.event_from_end(0)["error"]["type"], "server_error");
}

#[tokio::test]
async fn error_events_are_those_of_the_dialect() {
    let sim = start().await;
    sim.push(Step::new([Action::ErrorEventAfter { events: 2, body: Value::Null }]).times(2));
    let messages = post(&sim, "/v1/messages", "", &stream()).await;
    assert!(
        messages
            .text()
            .contains("event: error\ndata: {\"error\":{\"message\":\"Overloaded\",\"type\":\"overloaded_error\"}")
    );
    let failed = post(&sim, "/v1/responses", "", &json!({"model": "m", "stream": true, "input": "a"})).await;
    assert!(failed.text().contains("event: response.failed\n"));
    let failed = failed.event_from_end(0);
    assert_eq!((&failed["sequence_number"], &failed["response"]["status"]), (&json!(2), &json!("failed")));
}

#[tokio::test]
async fn a_json_answer_breaks_too() {
    let (cut, _) = ask([Action::CutAfterEvents { events: 0 }], &whole()).await;
    assert_eq!((cut.whole, cut.last), (false, Last::Reset));
    let (ended, _) = ask([Action::EndAfterEvents { events: 0 }], &whole()).await;
    assert!(ended.whole && serde_json::from_str::<Value>(&ended.text()).is_err());
}

#[tokio::test]
async fn a_200_may_hold_no_answer() {
    let (html, _) = ask([Action::Html], &whole()).await;
    assert!(html.status == 200 && html.head.contains("text/html") && html.text().starts_with("<!doctype html>"));
    let (error, _) = ask([Action::JsonErrorIn200 { body: json!({"error": {"message": "no"}}) }], &stream()).await;
    assert_eq!((error.status, error.json()), (200, json!({"error": {"message": "no"}})));
    assert!(error.head.contains("content-type: application/json"));
    let (swapped, _) = ask([Action::SwapShape], &whole()).await;
    assert_eq!(swapped.data().last().map(String::as_str), Some("[DONE]"));
    let (swapped, _) = ask([Action::SwapShape], &stream()).await;
    assert_eq!(swapped.json()["object"], "chat.completion");
}

#[tokio::test]
async fn a_reset_comes_before_any_byte() {
    let sim = start().await;
    sim.push(Action::Reset);
    let exchange = Exchange::send(&sim, &format!("POST {PATH}"), "", &stream().to_string()).await;
    let (received, last) = exchange.finish().await;
    assert!(received.is_none() && last == Last::Reset);
    assert_eq!((sim.calls()[0].status, sim.calls()[0].end), (None, Some(End::Reset)));
}

/// Sends to a simulator that does `action`, reads until `text`, leaves, and compares (status, events, terminal) in the log.
async fn check_leaving(action: Action, text: &str, expected: (Option<u16>, u32, bool)) {
    let sim = start().await;
    sim.push(action);
    let mut exchange = Exchange::send(&sim, &format!("POST {PATH}"), "", &stream().to_string()).await;
    sim.wait_for(|calls| calls.iter().any(|call| call.status == expected.0 && call.events == expected.1)).await;
    exchange.read_until(text).await;
    drop(exchange);
    let calls = sim.wait_for(|calls| calls.iter().all(|call| call.end.is_some())).await;
    assert_eq!(calls[0].end, Some(End::ClientGone));
    assert_eq!((calls[0].status, calls[0].events, calls[0].terminal), expected);
}

#[tokio::test]
async fn silence_lasts_until_the_client_goes() {
    check_leaving(Action::Hang, "", (None, 0, false)).await;
    check_leaving(Action::StallAfterEvents { events: 0 }, "200 OK", (Some(200), 0, false)).await;
    check_leaving(Action::StallAfterEvents { events: 2 }, "[sim] ", (Some(200), 2, false)).await;
    check_leaving(Action::HoldAfterDone, "[DONE]", (Some(200), 8, true)).await;
}

#[tokio::test]
async fn a_paused_answer_goes_on_when_released() {
    let sim = start().await;
    sim.push(Action::PauseAfter { events: 1 });
    let mut exchange = Exchange::send(&sim, &format!("POST {PATH}"), "", &stream().to_string()).await;
    exchange.read_until("assistant").await;
    assert_eq!(sim.wait_for(|calls| calls[0].events == 1).await[0].end, None);
    sim.release();
    assert_eq!(exchange.finish().await.0.expect("a head").data().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn delays_take_their_time() {
    let settings = Settings { chunks: 3, first_token_delay_ms: 10_000, chunk_delay_ms: 1_000, ..Settings::default() };
    let sim = Simulator::start(settings).await.expect("a port");
    sim.push(Action::DelayHead { ms: 60_000 });
    let begin = tokio::time::Instant::now();
    post(&sim, PATH, "", &stream()).await;
    assert_eq!(begin.elapsed().as_secs(), Duration::from_secs(60 + 10 + 1 + 1).as_secs());
}

#[tokio::test]
async fn fragments_are_writes_of_their_own() {
    let (received, _) = ask([Action::Fragment { bytes: 7 }], &stream()).await;
    assert!(received.chunks.iter().all(|chunk| chunk.len() <= 7));
    assert_eq!(received.data().len(), 8);
    let (whole, _) = ask([], &stream()).await;
    assert_eq!(whole.chunks.len(), 8, "without a fault, one event is one write");
}

#[tokio::test]
async fn lines_end_as_scripted() {
    let (crlf, _) = ask([Action::Crlf], &stream()).await;
    assert_eq!(crlf.text().matches("\r\n\r\n").count(), 8);
    assert_eq!(crlf.text().matches('\n').count(), 16);
    let (cr, _) = ask([Action::Cr], &stream()).await;
    assert!(!cr.text().contains('\n') && cr.text().matches("\r\r").count() == 8);
}

#[tokio::test]
async fn characters_are_split_between_writes() {
    let (received, _) = ask([Action::SplitUtf8], &stream()).await;
    assert!(received.text().contains("naïve 日本語 🦀"));
    // ï, three kanji and the crab: each ends a write after its first byte.
    assert_eq!(received.chunks.iter().filter(|chunk| std::str::from_utf8(chunk).is_err()).count(), 5 + 1);
}

#[tokio::test]
async fn comments_and_pings_stand_between_events() {
    let (comments, _) = ask([Action::Comments], &stream()).await;
    assert_eq!(comments.text().matches(": SIMULATOR PROCESSING\n\n").count(), 8);
    let (pings, sim) = ask([Action::Pings], &stream()).await;
    assert_eq!(pings.text().matches(": ping\n\n").count(), 7);
    sim.push(Action::Pings);
    let messages = post(&sim, "/v1/messages", "", &stream()).await;
    assert_eq!(messages.text().matches("event: ping\ndata: {\"type\":\"ping\"}\n\n").count(), 1 + 10);
}

#[tokio::test]
async fn one_event_can_be_huge() {
    let (received, _) = ask([Action::HugeEvent { mib: 2 }], &stream()).await;
    assert_eq!(received.data().iter().filter(|data| data.len() > 2 << 20).count(), 1);
    assert!(received.whole);
}

#[tokio::test]
async fn headers_and_chunks_can_be_set() {
    let headers = BTreeMap::from([("x-ratelimit-remaining-requests".to_owned(), "0".to_owned())]);
    let (received, _) = ask([Action::Headers { headers }, Action::Chunks { chunks: 40 }], &stream()).await;
    assert!(received.head.contains("x-ratelimit-remaining-requests: 0"));
    assert_eq!(received.data().len(), 43);
}
