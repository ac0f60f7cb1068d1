//! The catalogue is followed: a changed file comes into force while requests run, and an invalid one does not.

use serde_json::{Value, json};
use tokio::task::JoinSet;
use waybill_schema::event::{Class, Event, Outcome};
use waybill_simulator::{Action, Step};

use crate::log::told;
use crate::said::{Ending, Said};
use crate::world::{PATIENCE, Plan, World};

const CHAT: &str = "/v1/chat/completions";

fn body(stream: bool) -> Value {
    json!({"model": "gpt", "stream": stream, "messages": [{"role": "user", "content": "Hello"}]})
}

/// All requests go to `b`.
fn only_b() -> Plan {
    let plan = Plan::of(&["a", "b"]);
    Plan { members: vec!["priority: 10, weight: 0".to_owned(), "priority: 10".to_owned()], ..plan }
}

/// What `/readyz` says once `holds` is true of it.
pub(crate) async fn ready_when(world: &World, holds: impl Fn(&Value) -> bool) -> Value {
    let client = world.client();
    let held = async {
        loop {
            let detail = client.get("/readyz", &[]).await.json()["detail"].take();
            if holds(&detail) {
                return detail;
            }
        }
    };
    tokio::time::timeout(PATIENCE, held).await.expect("the gateway comes to be so")
}

/// Issue 3: gateways follow without a restart; no request sees half of a batch. The live state must not depend on when
/// the deletion was followed (docs/adr/0027): `b` fails before it, and is served by after it.
#[tokio::test]
async fn a_changed_file_comes_into_force_while_a_request_goes_on_with_what_it_began_with() {
    let once = "retry: { max_attempts: 1 }\n";
    let mut world = World::start(only_b().settings(once)).await;
    let client = world.client();
    world.upstream("b").push(Step::new([Action::status(503)]));
    let failed = client.post(CHAT, &[], &body(false)).await;
    assert_eq!(failed.status, 503, "{}", failed.text());
    world.upstream("b").push(Step::new([Action::PauseAfter { events: 3 }]));
    let mut stream = JoinSet::new();
    let streaming = world.client();
    stream.spawn(async move { streaming.post(CHAT, &[("x-session-id", "s")], &body(true)).await });
    world.calls_until(|calls| calls.iter().any(|call| call.events == 3)).await;

    world.configure(&Plan::of(&["a"]).settings(once));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    let answer = client.post(CHAT, &[("x-session-id", "s")], &body(false)).await;
    assert_eq!(answer.header("x-waybill-deployment"), Some("a/gpt"), "the session's deployment is gone");
    world.upstream("b").release();
    let [answer] = &stream.join_all().await[..] else { panic!("one stream was begun") };
    assert_eq!(Said::of(answer).ending, Ending::Complete, "{}", answer.text());
    assert_eq!(answer.header("x-waybill-deployment"), Some("b/gpt"));

    let live = world.digest().await;
    world.stop().await;
    let told = told(&world.data());
    assert_eq!((told.n_attempts(Class::Success), told.fold.usage.n_open()), (2, 0));
    let requests = told.pick(|event| match event {
        Event::Request(request) => Some(&**request),
        _ => None,
    });
    let outcomes: Vec<Outcome> = requests.iter().map(|request| request.outcome).collect();
    assert_eq!(outcomes, [Outcome::Failed, Outcome::Success, Outcome::Success]);
    assert_eq!(live, told.fold.state.digest());
    world.restart().await;
    assert_eq!(world.digest().await, live, "the next life stands where this one stood");
}

/// Issue 3: the last good file stays; all errors are said.
#[tokio::test]
async fn an_invalid_file_changes_nothing_and_the_next_valid_one_counts() {
    let world = World::start(only_b()).await;
    let path = world.folder.path().join("waybill.yaml");
    std::fs::write(&path, "listen: nowhere\nretry: { backoff_ms: many }\n").expect("the file can be written");
    let detail = ready_when(&world, |detail| detail["configuration"]["invalid"].is_string()).await;
    let invalid = detail["configuration"]["invalid"].as_str().unwrap_or_default();
    assert!(invalid.contains("listen") && invalid.contains("retry.backoff_ms"), "{invalid}");
    assert_eq!(detail["catalogue"]["revision"], 1);
    assert_eq!(world.client().get("/readyz", &[]).await.status, 200, "a typing mistake keeps nobody from serving");
    let answer = world.client().post(CHAT, &[], &body(false)).await;
    assert_eq!(answer.header("x-waybill-deployment"), Some("b/gpt"));

    world.configure(&Plan::of(&["a"]));
    let detail = ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    assert_eq!(detail["configuration"]["invalid"], Value::Null);
    let answer = world.client().post(CHAT, &[], &body(false)).await;
    assert_eq!(answer.header("x-waybill-deployment"), Some("a/gpt"));
}
