//! Money: what sends cost by the prices of the catalogue, against the upstream's own account of their tokens.

use serde_json::{Value, json};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Action, Call};

use crate::dialect::{CHAT, MESSAGES};
use crate::world::{Plan, World};

/// USD per million tokens: 3 in, 15 out, 0.3 read from the cache, 3.75 written to it; so nano-USD a token, by a thousand.
const PRICES: &str = "prices: { gpt: { input: 3, output: 15, cached: 0.3, cache_write: 3.75 } }";

fn tokens(usage: &Value, path: &str) -> u64 {
    usage.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

/// What the upstream's own bill says, in nano-USD.
fn billed(call: &Call) -> u64 {
    let usage = call.reported_usage.as_ref().expect("the upstream reports what it used");
    let (plain, read, written, out) = if call.path.ends_with("/messages") {
        let part = |name: &str| tokens(usage, name);
        (
            part("/input_tokens"),
            part("/cache_read_input_tokens"),
            part("/cache_creation_input_tokens"),
            part("/output_tokens"),
        )
    } else {
        let read = tokens(usage, "/prompt_tokens_details/cached_tokens");
        (tokens(usage, "/prompt_tokens") - read, read, 0, tokens(usage, "/completion_tokens"))
    };
    plain * 3_000 + read * 300 + written * 3_750 + out * 15_000
}

/// Issue 4: tokens and money of a request are those of the upstream's bill: cached prompts are cheaper, and a failed send
/// that used nothing costs nothing.
#[tokio::test]
async fn a_request_costs_what_the_upstream_bills() {
    let long = "All that was said before. ".repeat(400);
    let marked = json!([{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]);
    for (dialect, cache, content) in
        [(CHAT, CacheModel::open_ai(), json!(long)), (MESSAGES, CacheModel::anthropic(), marked)]
    {
        let mut plan = Plan { channel: PRICES.to_owned(), ..Plan::of(&["a"]) };
        plan.upstreams[0].cache = cache;
        let mut world = World::start(plan).await;
        world.upstreams[0].push(Action::status(503));
        for stream in [false, true] {
            let mut body = dialect.body("", stream);
            body["messages"][0]["content"] = content.clone();
            assert_eq!(world.client().post(dialect.path, &[("x-session-id", "s-1")], &body).await.status, 200);
        }
        let calls = world.upstreams[0].calls();
        world.stop().await;
        let bills: Vec<u64> = calls[1..].iter().map(billed).collect();
        assert!(bills[0] > bills[1], "the second prompt was cached: {bills:?}");
        let rows = world.table("select cost_nano from usage_attempts order by started, attempt");
        assert_eq!(rows, ["-".to_owned(), bills[0].to_string(), bills[1].to_string()]);
    }
}
