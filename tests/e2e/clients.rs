//! The vendors' Python SDKs hold conversations through the gateway. What they tell is held against the upstreams' logs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Action, Call, End, Endpoint, Step, When};

use crate::program::{facts, installed, program, run};
use crate::world::{KEY, Plan, World};

/// The upstreams of these worlds.
const NAMES: [&str; 3] = ["a", "b", "c"];
/// Calls of one conversation: the question, the tool's result, another question.
const CALLS: usize = 3;

/// One of the SDKs, by its program in `tests/clients`.
#[derive(Clone, Copy)]
enum Sdk {
    OpenAi,
    Anthropic,
}

impl Sdk {
    /// Plays a scenario against a world and gives what the SDK met.
    async fn play(self, world: &World, scenario: &str) -> Vec<Value> {
        let gateway = format!("http://{}", world.addr());
        let (script, prefix, base_url) = match self {
            Self::OpenAi => ("openai_sdk.py", "OPENAI", format!("{gateway}/v1")),
            Self::Anthropic => ("anthropic_sdk.py", "ANTHROPIC", gateway),
        };
        let mut python = program(&installed("python/bin/python"), world.folder.path());
        python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(script)).arg(scenario);
        python.env(format!("{prefix}_BASE_URL"), base_url).env(format!("{prefix}_API_KEY"), KEY);
        facts(&run(&mut python).await)
    }
}

async fn world(cache: CacheModel) -> World {
    let mut plan = Plan::of(&NAMES);
    plan.upstreams.iter_mut().for_each(|settings| settings.cache = cache.clone());
    World::start(plan).await
}

#[tokio::test]
async fn conversations_of_the_openai_sdk_stay_on_their_deployments() {
    check_conversations(Sdk::OpenAi, CacheModel::open_ai()).await;
}

#[tokio::test]
async fn conversations_of_the_anthropic_sdk_stay_on_their_deployments() {
    check_conversations(Sdk::Anthropic, CacheModel::anthropic()).await;
}

/// Sixteen conversations at once, half of them streamed, none of them with an id of its session.
async fn check_conversations(sdk: Sdk, cache: CacheModel) {
    let world = world(cache).await;
    let mut conversations: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for turn in sdk.play(&world, "converse").await {
        let name = turn["conversation"].as_str().expect("a turn names its conversation").to_owned();
        conversations.entry(name).or_default().push(turn);
    }
    assert_eq!(conversations.len(), 16);
    let homes: BTreeSet<&str> = conversations.iter().map(|(name, turns)| home(&world, name, turns)).collect();
    assert!(homes.len() > 1, "sixteen conversations all went to {homes:?}");
    let calls: usize = world.upstreams.iter().map(|upstream| upstream.calls().len()).sum();
    assert_eq!(calls, 16 * CALLS, "an upstream was asked something that no conversation asked");
}

/// The one upstream that saw a conversation, after all that its client told has been found in that upstream's log.
fn home(world: &World, name: &str, turns: &[Value]) -> &'static str {
    let (home, calls) = the_one_upstream(world, &format!("I am {name}:"));
    assert_eq!((calls.len(), turns.len()), (CALLS, CALLS), "{name}");
    for (call, turn) in calls.iter().zip(turns) {
        let usage = call.usage.expect("an answer has a usage");
        assert_eq!(turn["usage"], json!([usage.prompt_tokens, usage.cached_tokens, usage.output_tokens]), "{name}");
        assert_eq!(call.stream, name.contains("stream"), "{name}");
        assert!(call.terminal, "{name} was not answered in full");
    }
    let asked = &turns[0]["calls"][0];
    assert_eq!((&asked["name"], &asked["arguments"]), (&json!("weather"), &json!({"city": "Riga"})), "{name}");
    let id = asked["id"].as_str().expect("a call of a tool has an id");
    for (call, turn) in calls.iter().zip(turns).skip(1) {
        let body = String::from_utf8_lossy(&call.body);
        assert!(body.contains(id) && body.contains(&format!("12 degrees for {name}")), "the tool's result: {body}");
        assert!(turn["usage"][1].as_u64() > Some(0), "{name} found nothing in the prompt cache: {turn}");
        let text = turn["text"].as_str().expect("an answer has a text");
        assert!(text.starts_with(&format!("[{home}] ")), "{name} is at home at {home} and was told {text}");
    }
    home
}

/// Where the calls whose body has `mark` in it went, in their order.
fn the_one_upstream(world: &World, mark: &str) -> (&'static str, Vec<Call>) {
    let mut served: Vec<(&str, Vec<Call>)> = Vec::new();
    for (name, upstream) in NAMES.into_iter().zip(world.upstreams.iter()) {
        let marked = |call: &Call| String::from_utf8_lossy(&call.body).contains(mark);
        let calls: Vec<Call> = upstream.calls().into_iter().filter(marked).collect();
        if !calls.is_empty() {
            served.push((name, calls));
        }
    }
    let names: Vec<&str> = served.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), 1, "the calls with {mark:?} went to {names:?}");
    served.remove(0)
}

#[tokio::test]
async fn the_openai_sdk_raises_its_own_errors_for_our_refusals() {
    let rows = [
        ("bad key", "AuthenticationError", 401, "invalid_api_key"),
        ("unknown model", "NotFoundError", 404, "model_not_found"),
        ("session conflict", "BadRequestError", 400, "session_conflict"),
        ("previous response", "BadRequestError", 400, "previous_response_not_found"),
        ("previous response, streamed", "BadRequestError", 400, "previous_response_not_found"),
        ("response", "NotFoundError", 404, "previous_response_not_found"),
    ];
    check_refusals(Sdk::OpenAi, &rows).await;
}

#[tokio::test]
async fn the_anthropic_sdk_raises_its_own_errors_for_our_refusals() {
    let rows = [
        ("bad key", "AuthenticationError", 401, "invalid_api_key"),
        ("unknown model", "NotFoundError", 404, "model_not_found"),
        ("session conflict", "BadRequestError", 400, "session_conflict"),
    ];
    check_refusals(Sdk::Anthropic, &rows).await;
}

async fn check_refusals(sdk: Sdk, rows: &[(&str, &str, u16, &str)]) {
    let world = world(CacheModel::Off).await;
    let mut met = sdk.play(&world, "refusals").await;
    for fact in &mut met {
        let id = fact.as_object_mut().and_then(|fields| fields.remove("id"));
        assert!(id.is_some_and(|id| id.is_string()), "the SDK finds no request id in {fact}");
    }
    let row = |(case, raised, status, code): &(&str, &str, u16, &str)| json!({"case": case, "raised": raised, "status": status, "code": code});
    assert_eq!(met, rows.iter().map(row).collect::<Vec<_>>());
    let calls: usize = world.upstreams.iter().map(|upstream| upstream.calls().len()).sum();
    assert_eq!(calls, 0, "a refused request reached an upstream");
}

/// What an upstream reports inside a 200 before any output reaches the programmer in its own words, as the error that its
/// status stands for, streamed or not; in a Responses stream as the event that it is. Each case is one upstream call: nothing is tried again in vain.
#[tokio::test]
async fn the_openai_sdk_raises_what_an_upstream_reports_inside_a_200() {
    let error = json!({"message": "Slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded"});
    let failed = json!({"id": "resp_1", "object": "response", "status": "failed", "output": [], "error": error});
    let steps = [
        (Endpoint::Chat, [json!({"error": error}), json!({"error": error})]),
        (
            Endpoint::Responses,
            [failed.clone(), json!({"type": "response.failed", "sequence_number": 0, "response": failed})],
        ),
    ];
    let rows = [
        ("chat", "RateLimitError", json!(429), "rate_limit_exceeded"),
        ("chat, streamed", "RateLimitError", json!(429), "rate_limit_exceeded"),
        ("responses", "RateLimitError", json!(429), "rate_limit_exceeded"),
        ("responses, streamed", "", Value::Null, "response.failed"),
    ];
    check_failures(Sdk::OpenAi, &steps, &rows).await;
}

#[tokio::test]
async fn the_anthropic_sdk_raises_what_an_upstream_reports_inside_a_200() {
    let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
    let rows = [
        ("messages", "OverloadedError", json!(529), "overloaded_error"),
        ("messages, streamed", "OverloadedError", json!(529), "overloaded_error"),
    ];
    check_failures(Sdk::Anthropic, &[(Endpoint::Messages, [error.clone(), error])], &rows).await;
}

/// Per case: what is raised, its status, and its code, message or last event.
async fn check_failures(sdk: Sdk, steps: &[(Endpoint, [Value; 2])], rows: &[(&str, &str, Value, &str)]) {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan::of(&["a"]).settings(settings)).await;
    for (endpoint, [whole, streamed]) in steps {
        let does = [
            Action::JsonErrorIn200 { body: whole.clone() },
            Action::ErrorEventAfter { events: 0, body: streamed.clone() },
        ];
        for (does, stream) in does.into_iter().zip([false, true]) {
            let when = When { endpoint: Some(*endpoint), stream: Some(stream), ..When::default() };
            world.upstreams[0].push(Step::new([does]).when(when).standing());
        }
    }
    let met = sdk.play(&world, "failures").await;
    assert_eq!(met.len(), rows.len(), "{met:#?}");
    for (fact, (case, raised, status, said)) in met.iter().zip(rows) {
        let raises = fact["raised"].as_str().unwrap_or_default();
        assert_eq!((&fact["case"], raises, &fact["status"]), (&json!(case), *raised, status), "{fact}");
        let last = fact["kinds"].as_array().and_then(|kinds| kinds.last());
        let told = last.or(fact.get("code")).filter(|told| !told.is_null()).unwrap_or(&fact["message"]);
        assert!(told.as_str().is_some_and(|told| told.contains(said)), "{case}: {told}");
    }
    assert_eq!(world.calls().len(), rows.len(), "a failure was asked for again");
}

/// Raw Responses streams raise nothing for the protocol's own `response.failed`: their reader sees it as an event.
#[tokio::test]
async fn a_stream_that_is_cut_after_output_is_no_success_in_the_openai_sdk() {
    let rows = [
        ("chat", "APIError", "chat.completion.chunk"),
        ("chat helper", "APIError", "content.delta"),
        ("responses", "", "response.failed"),
        ("responses helper", "", "response.failed"),
    ];
    check_cuts(Sdk::OpenAi, &rows).await;
}

/// The SDK names its errors after the status, which was 200.
#[tokio::test]
async fn a_stream_that_is_cut_after_output_raises_in_the_anthropic_sdk() {
    let rows = [("messages", "APIStatusError", "content_block_delta"), ("messages helper", "APIStatusError", "text")];
    check_cuts(Sdk::Anthropic, &rows).await;
}

/// Per case: what is raised, and the last event before it. Each case is one upstream call: nothing was tried again.
async fn check_cuts(sdk: Sdk, rows: &[(&str, &str, &str)]) {
    let world = world(CacheModel::Off).await;
    for upstream in world.upstreams.iter() {
        // The second piece of text is the last thing written.
        for (endpoint, events) in [(Endpoint::Chat, 3), (Endpoint::Responses, 6), (Endpoint::Messages, 5)] {
            upstream.push(Step::new([Action::CutAfterEvents { events }]).on(endpoint).standing());
        }
    }
    let met = sdk.play(&world, "cut").await;
    let row = |fact: &Value| {
        let last = fact["kinds"].as_array().and_then(|kinds| kinds.last());
        [&fact["case"], &fact["raised"], last.unwrap_or(&Value::Null)]
            .map(|field| field.as_str().unwrap_or_default().to_owned())
    };
    let expected: Vec<_> =
        rows.iter().map(|(case, raised, last)| [case, raised, last].map(|s| (*s).to_owned())).collect();
    assert_eq!(met.iter().map(row).collect::<Vec<_>>(), expected, "{met:#?}");
    let calls: Vec<Call> = world.upstreams.iter().flat_map(|upstream| upstream.calls()).collect();
    assert!(calls.iter().all(|call| call.end == Some(End::Reset)), "a call was not cut");
    assert_eq!(calls.len(), rows.len(), "a broken stream was asked for again");
}

#[tokio::test]
async fn the_openai_sdk_lists_models_and_embeds() {
    let world = world(CacheModel::Off).await;
    let met = Sdk::OpenAi.play(&world, "rest").await;
    assert_eq!(met[0], json!({"models": ["gpt"], "model": "gpt"}));
    assert_eq!(met[1]["vectors"], met[1]["as_numbers"], "base64 was not read as the numbers it stands for");
    let calls: Vec<Call> = world.upstreams.iter().flat_map(|upstream| upstream.calls()).collect();
    assert!(calls.iter().any(|call| call.json()["encoding_format"] == "base64"), "the SDK asks for base64 by itself");
    for call in calls {
        let usage = call.usage.expect("embeddings have a usage");
        assert_eq!((call.endpoint, &met[1]["tokens"]), (Some(Endpoint::Embeddings), &json!(usage.prompt_tokens)));
    }
}

#[tokio::test]
async fn the_anthropic_sdk_lists_models_and_counts_tokens() {
    let world = world(CacheModel::Off).await;
    // "user: Hello" and a line end are twelve characters, four of which are a token to the simulator.
    let expected = [json!({"models": ["gpt"], "model": "gpt"}), json!({"input_tokens": 3})];
    assert_eq!(Sdk::Anthropic.play(&world, "rest").await, expected);
    let calls: Vec<Call> = world.upstreams.iter().flat_map(|upstream| upstream.calls()).collect();
    assert_eq!(calls.iter().map(|call| call.endpoint).collect::<Vec<_>>(), [Some(Endpoint::CountTokens)]);
}
