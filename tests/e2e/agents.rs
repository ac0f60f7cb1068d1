//! The OpenAI Agents SDK goes on from its own responses through the gateway, and starts over where their owner is gone.

use std::path::Path;

use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::program::{facts, installed, program, run};
use crate::world::{KEY, Plan, World};

/// Plays a scenario and gives what the SDK met.
async fn play(world: &World, scenario: &str, next: &Path) -> Vec<Value> {
    let mut python = program(&installed("python/bin/python"), world.folder.path());
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/agents_sdk.py")).arg(scenario);
    python.env("OPENAI_BASE_URL", format!("http://{}/v1", world.addr())).env("OPENAI_API_KEY", KEY);
    python.env("WAYBILL_CONFIG", world.config()).env("WAYBILL_NEXT", next);
    facts(&run(&mut python).await)
}

/// How many requests were refused by the gateway, by code.
async fn refusals(world: &World) -> Vec<String> {
    let metrics = world.client().get("/metrics", &[]).await.text();
    let refusals = metrics.lines().filter_map(|line| line.strip_prefix("waybill_refusals_total"));
    refusals.map(str::to_owned).collect()
}

/// Issue 5: "the OpenAI Agents SDK finishes a multi-turn tool task while a sibling deployment fails under it".
#[tokio::test]
async fn a_task_goes_on_from_response_to_response_while_a_sibling_fails() {
    for failing in ["a", "b"] {
        let world = World::start(Plan::of(&["a", "b"])).await;
        world.upstream(failing).push(Step::new([Action::status(503)]).standing());
        let met = play(&world, "task", Path::new("/nowhere")).await;
        let responses: Vec<&Value> = met.iter().map(|fact| &fact["responses"]).collect();
        assert_eq!(responses, [&json!(2), &json!(1)], "{met:?}");
        assert_eq!(refusals(&world).await, Vec::<String>::new());
        let well = if failing == "a" { "b" } else { "a" };
        let calls = world.upstream(well).calls();
        let parents: Vec<Value> = calls.iter().map(|call| call.json()["previous_response_id"].clone()).collect();
        let made: Vec<Value> = calls.iter().map(|call| json!(call.response_id)).collect();
        assert_eq!(parents, [Value::Null, made[0].clone(), made[1].clone()], "each goes on from the one before");
    }
}

/// Issue 5: "with their owner gone they get an error that makes them start over, not loop (count their requests)".
#[tokio::test]
async fn a_task_whose_owner_goes_away_is_told_once_and_starts_over() {
    let world = World::start(Plan::of(&["a", "b", "c"])).await;
    let text = std::fs::read_to_string(world.config()).expect("the configuration can be read");
    let next = world.folder.path().join("next.yaml");
    std::fs::write(&next, text.replace("env:UPSTREAM_KEY", "env:BOTH_KEY")).expect("a file can be written");
    let met = play(&world, "gone", &next).await;
    let raised = json!({"raised": "BadRequestError", "status": 400, "code": "previous_response_unavailable"});
    assert_eq!((met.len(), &met[0]), (2, &raised), "{met:?}");
    assert_eq!(met[1]["responses"], 2);
    assert_eq!(refusals(&world).await, ["{code=\"previous_response_unavailable\"} 1"], "it asked once");
    // The first of the task, and the two of the task begun anew.
    assert_eq!(world.calls().len(), 3, "what was refused reached no upstream");
}
