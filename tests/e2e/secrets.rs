//! Promise 6: no secret and no content of a user in the log, the spool, the rows, the metrics or the process's own words.

use std::fs::File;
use std::path::Path;

use serde_json::json;
use waybill_simulator::{Action, Reply, Step};

use crate::world::{KEY, Plan, World};

/// What must be found nowhere: keys, what the user said, what was answered, what identifies content, and a cookie.
const NOWHERE: [&str; 9] = [
    KEY,
    "sk-upstream",
    "sk-wrong-key",
    "my-secret-question",
    "a-secret-answer",
    "secret-cache-key",
    "secret-user-name",
    "secret-cookie",
    "secret-failure",
];

#[tokio::test]
async fn no_secret_and_no_content_rests_anywhere() {
    let mut world = World::start(Plan::of(&["a", "b"])).await;
    world.stop().await;
    let said = world.folder.path().join("said");
    world.restart_talkative(File::create(&said).expect("a file can be made")).await;

    for stream in [false, true] {
        for upstream in world.upstreams.iter() {
            upstream.push(Step::new([Action::Reply(Reply::text("a-secret-answer"))]));
        }
        let body = json!({
            "model": "gpt", "stream": stream, "prompt_cache_key": "secret-cache-key", "user": "secret-user-name",
            "messages": [{"role": "user", "content": "my-secret-question"}],
        });
        let answer = world.client().post("/v1/chat/completions", &[("cookie", "id=secret-cookie")], &body).await;
        assert_eq!((answer.status.as_u16(), answer.text().contains("a-secret-answer")), (200, true));
        // The answer of the first upstream was taken from one of the two.
        for upstream in world.upstreams.iter() {
            upstream.apply(waybill_simulator::Control { clear_steps: true, ..Default::default() });
        }
    }
    let unnamed = json!({"model": "gpt", "messages": [{"role": "user", "content": "my-secret-question"}]});
    assert_eq!(world.client().post("/v1/chat/completions", &[], &unnamed).await.status, 200);
    for upstream in world.upstreams.iter() {
        let failure = Action::Status {
            status: 500,
            headers: Default::default(),
            body: json!({"error": {"message": "secret-failure"}}),
        };
        upstream.push(Step::new([failure]).times(2));
    }
    world.client().post("/v1/chat/completions", &[], &unnamed).await;
    for (field, bad, status) in
        [("model", json!("nobody"), 404), ("stream", json!("?"), 400), ("session_id", json!(" "), 400)]
    {
        let mut refused = unnamed.clone();
        refused[field] = bad;
        assert_eq!(world.client().post("/v1/chat/completions", &[], &refused).await.status, status);
    }
    assert_eq!(world.client_with("sk-wrong-key").post("/v1/chat/completions", &[], &unnamed).await.status, 401);
    let metrics = world.client().get("/metrics", &[]).await.text();
    world.stop().await;

    check("the metrics", metrics.as_bytes());
    check("what the process said", &std::fs::read(&said).expect("the file can be read"));
    check_folder(&world.data());
}

fn check_folder(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("the data folder can be read") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() {
            check_folder(&path);
        } else {
            check(&path.display().to_string(), &std::fs::read(&path).expect("a data file can be read"));
        }
    }
}

fn check(place: &str, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let found: Vec<&str> = NOWHERE.into_iter().filter(|secret| text.contains(secret)).collect();
    assert!(found.is_empty(), "{place} holds {found:?}");
}
