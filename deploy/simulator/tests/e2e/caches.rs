//! Prompt caches as a client sees them in the usage it is told.

use serde_json::{Value, json};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Action, Clock, Running, Settings, Simulator};

use crate::client::{Exchange, post};

/// A text that makes `role: TEXT\n` exactly `tokens` long.
fn text(role: &str, tokens: usize) -> String {
    "x".repeat(tokens * 4 - role.len() - 3)
}

async fn start(cache: CacheModel, clock: &Clock) -> Running {
    let simulator = Simulator::with_clock(Settings { cache, ..Settings::default() }, clock.clone());
    simulator.start_at(([127, 0, 0, 1], 0).into()).await.expect("a port")
}

#[tokio::test]
async fn openai_cached_tokens_are_inside_the_prompt_in_every_frame_that_tells_usage() {
    let clock = Clock::manual(0);
    let sim = start(CacheModel::open_ai(), &clock).await;
    let messages =
        json!([{"role": "system", "content": text("system", 1000)}, {"role": "user", "content": text("user", 200)}]);
    let body = json!({"model": "m", "messages": messages});
    let usage =
        |answer: &Value| (answer["prompt_tokens"].clone(), answer["prompt_tokens_details"]["cached_tokens"].clone());
    let cold = post(&sim, "/v1/chat/completions", "", &body).await.json();
    assert_eq!(usage(&cold["usage"]), (json!(1200), json!(0)));
    let warm = post(&sim, "/v1/chat/completions", "", &body).await.json();
    assert_eq!(usage(&warm["usage"]), (json!(1200), json!(1152))); // 1,024 + 128
    let streamed =
        json!({"model": "m", "messages": messages, "stream": true, "stream_options": {"include_usage": true}});
    let stream = post(&sim, "/v1/chat/completions", "", &streamed).await;
    assert_eq!(usage(&stream.event_from_end(1)["usage"]), (json!(1200), json!(1152)));
    // The same text by Responses is the same prompt.
    let streamed =
        json!({"model": "m", "stream": true, "instructions": text("system", 1000), "input": text("user", 200)});
    let completed = post(&sim, "/v1/responses", "", &streamed).await.event_from_end(0);
    let details = json!({"cached_tokens": 1152, "cache_write_tokens": 0});
    assert_eq!(completed["response"]["usage"]["input_tokens_details"], details);
    clock.advance_ms(300_000);
    let cold = post(&sim, "/v1/chat/completions", "", &body).await.json();
    assert_eq!(usage(&cold["usage"]), (json!(1200), json!(0)));
    let log: Vec<u64> = sim.calls().iter().filter_map(|call| Some(call.usage?.cached_tokens)).collect();
    assert_eq!(log, [0, 1152, 1152, 1152, 0]);
}

fn marked(stream: bool) -> Value {
    let mark = json!({"type": "ephemeral"});
    let system = json!([{"type": "text", "text": text("system", 2000), "cache_control": mark}]);
    let user = json!([{"role": "user", "content": text("user", 100)}]);
    json!({"model": "claude-sonnet-4-5", "max_tokens": 9, "stream": stream, "system": system, "messages": user})
}

/// (input, created, read)
fn anthropic(usage: &Value) -> [u64; 3] {
    ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
        .map(|name| usage[name].as_u64().expect("a number"))
}

#[tokio::test]
async fn anthropic_usage_excludes_the_cache_from_input_tokens() {
    let clock = Clock::manual(0);
    let sim = start(CacheModel::anthropic(), &clock).await;
    let cold = post(&sim, "/v1/messages", "x-api-key: a\r\n", &marked(false)).await.json();
    assert_eq!(anthropic(&cold["usage"]), [100, 2000, 0]);
    let warm = post(&sim, "/v1/messages", "x-api-key: a\r\n", &marked(true)).await;
    let start: Value = serde_json::from_str(&warm.data()[0]).expect("JSON");
    assert_eq!(anthropic(&start["message"]["usage"]), [100, 0, 2000]);
    assert_eq!(anthropic(&warm.event_from_end(1)["usage"]), [100, 0, 2000], "message_delta");
    let other = post(&sim, "/v1/messages", "x-api-key: b\r\n", &marked(false)).await.json();
    assert_eq!(anthropic(&other["usage"]), [100, 2000, 0], "another workspace");
}

#[tokio::test]
async fn a_parallel_request_misses_until_the_first_response_has_begun() {
    let sim = start(CacheModel::anthropic(), &Clock::manual(0)).await;
    sim.push(Action::PauseAfter { events: 0 });
    let first = Exchange::send(&sim, "POST /v1/messages", "", &marked(true).to_string()).await;
    sim.wait_for(|calls| calls.iter().any(|call| call.status.is_some())).await;
    let parallel = sim.calls().len();
    sim.push(Action::PauseAfter { events: 0 });
    let second = Exchange::send(&sim, "POST /v1/messages", "", &marked(true).to_string()).await;
    sim.wait_for(|calls| calls.len() > parallel && calls.iter().all(|call| call.status.is_some())).await;
    sim.release();
    let (first, second) = (first.finish().await.0, second.finish().await.0);
    for received in [first, second] {
        let start: Value = serde_json::from_str(&received.expect("a head").data()[0]).expect("JSON");
        assert_eq!(anthropic(&start["message"]["usage"]), [100, 2000, 0]);
    }
    let third = post(&sim, "/v1/messages", "", &marked(false)).await.json();
    assert_eq!(anthropic(&third["usage"]), [100, 0, 2000]);
}

#[tokio::test]
async fn forgetting_makes_the_cache_cold() {
    let sim = start(CacheModel::deepseek(), &Clock::manual(0)).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text("user", 100)}]});
    let hit = |usage: Value| {
        (usage["usage"]["prompt_cache_hit_tokens"].clone(), usage["usage"]["prompt_cache_miss_tokens"].clone())
    };
    assert_eq!(hit(post(&sim, "/v1/chat/completions", "", &body).await.json()), (json!(0), json!(100)));
    assert_eq!(hit(post(&sim, "/v1/chat/completions", "", &body).await.json()), (json!(64), json!(36)));
    sim.apply(waybill_simulator::Control { forget: true, ..Default::default() });
    assert_eq!(hit(post(&sim, "/v1/chat/completions", "", &body).await.json()), (json!(0), json!(100)));
}
