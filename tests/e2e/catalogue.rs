//! The catalogue's commands beside a running gateway: what they say is what the log holds.

use std::path::Path;

use serde_json::{Value, json};
use waybill_schema::event::{Batch, Event};

use crate::log::told;
use crate::world::{Plan, World};

/// A world, and another file for it: with another weight, and one more group. It does not lie where the gateway looks, which
/// would apply it by itself.
async fn changed_world() -> (World, String) {
    let world = World::start(Plan::of(&["a", "b"])).await;
    let mut plan = Plan::of(&["a", "b"]);
    plan.members[0] = "priority: 10, weight: 7".to_owned();
    plan.rows.groups = vec!["{ id: more, display_name: More }".to_owned()];
    let changed = Path::new(world.config()).with_extension("changed");
    world.write(&plan, &changed);
    (world, changed.to_str().expect("a temporary folder has a plain name").to_owned())
}

async fn said(world: &World, args: &[&str]) -> Value {
    let said = world.command(&[args, &["--json"]].concat()).await;
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"))
}

/// The batches in the log: revision, actor and number of ops, each.
fn batches(world: &World) -> Vec<(u64, String, usize)> {
    let batch = |event: &Event| match event {
        Event::Catalogue(batch) => Some((**batch).clone()),
        _ => None,
    };
    let told = told(&world.data());
    let batches = told.facts.iter().filter_map(|fact| batch(&fact.event));
    batches.map(|Batch { revision, actor, ops, .. }| (revision, actor, ops.len())).collect()
}

#[tokio::test]
async fn a_file_is_applied_and_undone_beside_a_running_gateway() {
    let (mut world, file) = changed_world().await;
    let (apply, alice) = (["apply", file.as_str()], ["--actor", "alice"]);
    let before = batches(&world);
    assert_eq!(before.len(), 1);

    let dry = said(&world, &[&apply[..], &alice, &["--dry-run"]].concat()).await;
    let changes = json!([
        {"change": "made", "row": {"kind": "group", "id": "more"}, "fields": [
            {"field": "display_name", "after": "More"}, {"field": "id", "after": "more"},
            {"field": "requestable", "after": false}, {"field": "status", "after": "active"},
        ]},
        {"change": "changed", "row": {"kind": "member", "id": "main/gpt/a"}, "fields": [
            {"field": "weight", "before": 100, "after": 7},
        ]},
    ]);
    assert_eq!(dry, json!({"revision": 2, "applied": false, "changes": changes}));
    assert_eq!(batches(&world), before);

    let done = said(&world, &[&apply[..], &alice].concat()).await;
    assert_eq!(done, json!({"revision": 2, "applied": true, "changes": changes}));
    let undone = world.command(&["catalogue", "undo", "2", "--actor", "bob"]).await;
    assert!(undone.contains("weight: 7 → 100") && undone.contains("catalogue revision 3"), "{undone}");
    let again = said(&world, &apply).await;
    assert_eq!(again, json!({"revision": 3, "applied": false, "changes": []}));

    let answer = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    assert_eq!(world.client().post("/v1/chat/completions", &[], &answer).await.status, 200);
    world.stop().await;
    std::fs::copy(&file, world.config()).expect("the file can be copied");
    world.restart().await;
    assert_eq!(world.settled().await["catalogue"]["revision"], 3, "an unchanged file is not applied over the undo");
    let forced = said(&world, &["apply", &file, "--actor", "carol", "--force"]).await;
    assert_eq!((&forced["revision"], &forced["applied"]), (&json!(4), &json!(true)));

    let made = [before[0].clone(), (2, "alice".to_owned(), 2), (3, "bob".to_owned(), 2), (4, "carol".to_owned(), 2)];
    assert_eq!(batches(&world), made);
    let listed = said(&world, &["catalogue", "log"]).await;
    let listed: Vec<Value> = listed
        .as_array()
        .expect("a list")
        .iter()
        .map(|batch| json!([batch["revision"], batch["actor"], batch["n_ops"], batch["undone_by"], batch["undoes"]]))
        .collect();
    let expected = [
        json!([4, "carol", 2, [], []]),
        json!([3, "bob", 2, [], [2]]),
        json!([2, "alice", 2, [3], []]),
        json!([1, "configuration file", before[0].2, [], []]),
    ];
    assert_eq!(listed, expected);
}

#[tokio::test]
async fn what_is_wrong_is_said_whole_and_changes_nothing() {
    let (world, file) = changed_world().await;
    let before = batches(&world);
    let right = std::fs::read_to_string(&file).expect("the file can be read");
    let wrong = right.replace("channel: b", "channel: nowhere").replace("weight: 7", "weight: heavy");
    std::fs::write(&file, wrong).expect("the file can be written");
    let errors = world.refused(&["apply", &file]).await;
    assert!(errors.contains("unknown channel `nowhere`") && errors.contains("weight"), "{errors}");

    std::fs::write(&file, right).expect("the file can be written");
    world.command(&["apply", &file]).await;
    let errors = world.refused(&["catalogue", "undo", "1"]).await;
    assert!(errors.contains("batch 2 changed member `main/gpt/a` since"), "{errors}");
    let errors = world.refused(&["catalogue", "undo", "9"]).await;
    assert!(errors.contains("there is no batch 9, the catalogue is at revision 2"), "{errors}");
    assert_eq!(batches(&world)[..before.len()], before);
    assert_eq!(batches(&world).len(), 2);
}
