//! The OpenAI Agents SDK goes on from its own responses through the gateway, and starts over where their owner is gone.

use std::path::Path;

use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::program::{facts, installed, program, run};
use crate::wiretap::Wiretap;
use crate::world::{KEY, Plan, World};

const POSTED: &str = "POST /v1/responses HTTP/1.1 -> HTTP/1.1 200 OK";
const REFUSED: &str = "POST /v1/responses HTTP/1.1 -> HTTP/1.1 400 Bad Request";

/// Plays a scenario and gives what the SDK met, and what went over the wire.
async fn play(world: &World, scenario: &str, next: &Path) -> (Vec<Value>, Vec<String>) {
    let wire = Wiretap::on(world.addr()).await;
    let mut python = program(&installed("python/bin/python"), world.folder.path());
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/agents_sdk.py")).arg(scenario);
    python.env("OPENAI_BASE_URL", format!("http://{}/v1", wire.addr)).env("OPENAI_API_KEY", KEY);
    python.env("WAYBILL_CONFIG", world.config()).env("WAYBILL_NEXT", next);
    let met = facts(&run(&mut python).await);
    let posts = wire.notes().into_iter().filter(|note| note.starts_with("POST")).collect();
    (met, posts)
}

/// Issue 5: "the OpenAI Agents SDK finishes a multi-turn tool task while a sibling deployment fails under it".
#[tokio::test]
async fn a_task_goes_on_from_response_to_response_while_a_sibling_fails() {
    for failing in ["a", "b"] {
        let world = World::start(Plan::of(&["a", "b"])).await;
        world.upstream(failing).push(Step::new([Action::status(503)]).standing());
        let (met, posts) = play(&world, "task", Path::new("/nowhere")).await;
        let responses: Vec<&Value> = met.iter().map(|fact| &fact["responses"]).collect();
        assert_eq!(responses, [&json!(2), &json!(1)], "{met:?}");
        assert_eq!(posts, [POSTED; 3]);
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
    let (met, posts) = play(&world, "gone", &next).await;
    let raised = json!({"raised": "BadRequestError", "status": 400, "code": "previous_response_unavailable"});
    assert_eq!((met.len(), &met[0]), (2, &raised), "{met:?}");
    assert_eq!(met[1]["responses"], 2);
    // The first of the task, the one refused, and the two of the task begun anew.
    assert_eq!(posts, [POSTED, REFUSED, POSTED, POSTED]);
    assert_eq!(world.calls().len(), 3, "what was refused reached no upstream");
}
