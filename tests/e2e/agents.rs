//! The OpenAI Agents SDK goes on from its own responses through the gateway, and starts over where their owner is gone.

use std::path::Path;

use futures_util::future::join;
use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::program::{facts, installed, program, run};
use crate::wiretap::Wiretap;
use crate::world::{KEY, Plan, World};

/// What the SDK told of a scenario, and the statuses of what it asked for, in the order of the answers.
struct Played {
    told: Vec<Value>,
    statuses: Vec<u16>,
}

async fn play(world: &World, scenario: &str, next: &Path) -> Played {
    let wire = Wiretap::on(world.addr()).await;
    let mut python = program(&installed("python/bin/python"), world.folder.path());
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/agents_sdk.py")).arg(scenario);
    python.env("OPENAI_BASE_URL", format!("http://{}/v1", wire.addr)).env("OPENAI_API_KEY", KEY);
    python.env("WAYBILL_CONFIG", world.config()).env("WAYBILL_NEXT", next);
    let told = facts(&run(&mut python).await);
    let status = |note: String| {
        let (_, answer) = note.strip_prefix("POST /v1/responses HTTP/1.1 -> ")?.split_once(' ')?;
        Some(answer[..3].parse().expect("a status is a number"))
    };
    Played { told, statuses: wire.notes().into_iter().filter_map(status).collect() }
}

/// Issue 5: "the OpenAI Agents SDK finishes a multi-turn tool task while a sibling deployment fails under it": the one that
/// is asked first fails throughout, another begins to fail once the task has an owner. The SDK asks once a step.
#[tokio::test]
async fn a_task_goes_on_from_response_to_response_while_a_sibling_fails() {
    for [failing, owner, sibling] in [["a", "b", "c"], ["b", "a", "c"]] {
        let priority = |name: &str| match name {
            name if name == failing => "priority: 1".to_owned(),
            name if name == owner => "priority: 2".to_owned(),
            _ => "priority: 3".to_owned(),
        };
        let members = ["a", "b", "c"].map(priority).to_vec();
        let world = World::start(Plan { members, ..Plan::of(&["a", "b", "c"]) }).await;
        let fails = || Step::new([Action::status(503)]).standing();
        world.upstream(failing).push(fails());
        let between = async {
            world.calls_until(|calls| calls.iter().any(|call| call.terminal)).await;
            world.upstream(sibling).push(fails());
        };
        let (met, ()) = join(play(&world, "task", Path::new("/nowhere")), between).await;
        let responses: Vec<&Value> = met.told.iter().map(|fact| &fact["responses"]).collect();
        assert_eq!(responses, [&json!(2), &json!(1)], "{:?}", met.told);
        assert_eq!(met.statuses, [200; 3], "one request a step, and none again");
        // `max_attempts` at the first step; what has an owner is asked of nobody else.
        assert_eq!([failing, sibling].map(|name| world.upstream(name).calls().len()), [2, 0]);
        let calls = world.upstream(owner).calls();
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
    assert_eq!((met.told.len(), &met.told[0]), (2, &raised), "{:?}", met.told);
    assert_eq!(met.told[1]["responses"], 2);
    // The first of the task, its continuation, which is asked for once, and the two of the task begun anew.
    assert_eq!(met.statuses, [200, 400, 200, 200]);
    assert_eq!(world.calls().len(), 3, "what was refused reached no upstream");
}
