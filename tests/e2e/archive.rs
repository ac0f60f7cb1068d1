//! `waybill archive` and `waybill verify`: what was closed as files is the log, and what a hand changes is found.

use serde_json::{Value, json};

use crate::world::{Plan, World};

async fn serve_one(world: &World) {
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    assert_eq!(world.client().post("/v1/chat/completions", &[], &body).await.status, 200);
}

async fn said(world: &World, args: &[&str]) -> Value {
    let said = world.command(&[args, &["--json"]].concat()).await;
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"))
}

#[tokio::test]
async fn the_log_is_closed_as_files_beside_a_running_gateway_and_a_changed_file_is_found() {
    let mut world = World::start(Plan::of(&["a"])).await;
    serve_one(&world).await;
    world.stop().await;
    let folder = world.folder.path().join("archive");
    let archive = folder.to_str().expect("the folder's name is text");
    let first = said(&world, &["archive", archive]).await;
    assert_eq!(first["closed"].as_array().map(Vec::len), Some(1), "{first}");

    world.restart().await;
    serve_one(&world).await;
    world.settled().await;
    let second = said(&world, &["archive", archive]).await;
    assert_eq!(second["closed"][0]["prev"], first["closed"][0]["sum"], "the files are a chain");
    let live = said(&world, &["verify"]).await;
    let whole = said(&world, &["verify", "--archive", archive]).await;
    assert_eq!((&whole["n_findings"], &whole), (&json!(0), &live), "the archive says what the log says");

    let file = std::fs::read_dir(&folder).expect("the archive is there").next().expect("it has a file");
    let path = file.expect("the file can be seen").path();
    let mut bytes = std::fs::read(&path).expect("the file can be read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&path, bytes).expect("the file can be written");
    let why = world.refused(&["verify", "--archive", archive]).await;
    assert!(why.contains(path.to_str().expect("the file's name is text")) && why.contains("damaged"), "{why}");
}
