//! Gateways and auditors as processes of their own, on a real nats-server.

use serde_json::{Value, json};
use waybill_schema::event::Class;
use waybill_servers::nats::{Nats, Options};

use crate::client::Client;
use crate::fleet::Fleet;
use crate::world::Plan;

const CHAT: &str = "/v1/chat/completions";

/// Where a request of `session` is served.
pub(crate) async fn served(client: &Client, session: &str) -> String {
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    let answer = client.post(CHAT, &[("x-session-id", session)], &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-waybill-deployment").expect("the key may see it").to_owned()
}

fn revision(n: u64) -> impl Fn(&Value) -> bool {
    move |ready| ready["detail"]["catalogue"]["revision"] == n
}

/// Issue 3: a batch reaches all gateways; facts in the stream equal the upstreams' calls. DESIGN.md, section 8: they agree
/// on where a session goes without seeing each other's records.
#[tokio::test]
async fn two_gateways_serve_agree_and_follow_the_file() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a", "b"]), 2, &[nats.url()]).await;
    let mut by_deployment = [0, 0];
    for n in 0..20 {
        let session = format!("s-{n}");
        let first = served(&fleet.client(0), &session).await;
        assert_eq!(served(&fleet.client(1), &session).await, first, "{session}");
        by_deployment[usize::from(first == "b/gpt")] += 1;
    }
    assert!(by_deployment.iter().all(|n| *n > 0), "{by_deployment:?}");

    // Two auditors meet the change; it is one batch.
    fleet.start_auditor().await;
    fleet.configure(&Plan::of(&["a"]));
    for n in 0..2 {
        let ready = fleet.ready_when(n, revision(2)).await;
        assert_eq!(ready["detail"]["catalogue"]["source"], "log");
        assert_eq!(served(&fleet.client(n), "s-new").await, "a/gpt");
    }
    fleet.stop_all().await;
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Success), told.attempts().count()), (42, 42));
    assert_eq!((fleet.upstreams.calls().len(), told.fold.usage.n_open()), (42, 0));
    assert_eq!(told.fold.rows.revision, 2);
}

/// Issue 3: "a gateway started while NATS is away serves from its local catalogue and reconciles afterwards".
#[tokio::test]
async fn a_gateway_that_starts_while_nats_is_away_serves_by_its_copy_and_reconciles() {
    let mut nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a"]), 1, &[nats.url()]).await;
    assert_eq!(served(&fleet.client(0), "s").await, "a/gpt");
    fleet.stop(0).await;
    nats.kill();
    fleet.restart(0).await;
    assert_eq!(served(&fleet.client(0), "s").await, "a/gpt");
    let ready = fleet.ready_when(0, |_| true).await;
    assert_eq!((&ready["ready"], &ready["detail"]["log"]["reachable"]), (&json!(true), &json!(false)), "{ready}");
    assert_eq!(
        (&ready["detail"]["catalogue"]["source"], ready["detail"]["log"]["lag_facts"].as_u64()),
        (&json!("copy"), Some(5))
    );

    // A stop does not wait for NATS, and the next life ships what this one recorded.
    fleet.stop(0).await;
    fleet.restart(0).await;
    fleet.configure(&Plan { members: vec!["priority: 20".to_owned()], ..Plan::of(&["a"]) });
    nats.restart();
    let reconciled = |ready: &Value| revision(2)(ready) && ready["detail"]["log"]["lag_facts"] == 0;
    let ready = fleet.ready_when(0, reconciled).await;
    assert_eq!(
        (&ready["detail"]["catalogue"]["source"], &ready["detail"]["log"]["reachable"]),
        (&json!("log"), &json!(true))
    );
    fleet.stop_all().await;
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Success), fleet.upstreams.calls().len()), (2, 2));
}

/// Issue 3: "without any catalogue it refuses, saying why".
#[tokio::test]
async fn a_gateway_without_any_catalogue_refuses_and_says_why() {
    let mut nats = Nats::start(&Options::default());
    let fleet = Fleet::prepare(&Plan::of(&["a"]), &[nats.url()], 1).await;
    let said = |output: std::process::Output| {
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("the message is text")
    };
    let empty = said(fleet.refused(0).await);
    assert!(empty.contains("the log holds no catalogue yet") && empty.contains("waybill auditor"), "{empty}");
    nats.kill();
    let away = said(fleet.refused(0).await);
    assert!(away.contains("is away") && away.contains("holds no copy"), "{away}");
}

/// DESIGN.md, section 8: with the auditor down chats are unaffected; of a gateway that is killed nothing is lost.
#[tokio::test]
async fn others_serve_on_while_a_gateway_and_the_auditor_are_dead() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a"]), 2, &[nats.url()]).await;
    served(&fleet.client(0), "s").await;
    fleet.kill_auditors().await;
    fleet.kill(0).await;
    served(&fleet.client(1), "s").await;
    fleet.restart(0).await;
    served(&fleet.client(0), "s").await;
    fleet.freeze(1).await;
    served(&fleet.client(0), "s").await;
    fleet.thaw(1).await;
    served(&fleet.client(1), "s").await;
    fleet.stop_all().await;
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Success), fleet.upstreams.calls().len()), (5, 5));
    assert_eq!(told.fold.gate.summary().writers["gw-0"].epoch, 2);
}

#[tokio::test]
async fn each_way_to_run_a_gateway_says_which_configuration_it_is_for() {
    let fleet = Fleet::prepare(&Plan::of(&["a"]), &["nats://127.0.0.1:4222".to_owned()], 1).await;
    let said = async |command: &str| {
        let mut command = fleet.command(&[command, "--listen", "127.0.0.1:0", "--data"]);
        let output = command.arg(fleet.data(0)).output().await.expect("the binary can be run");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("the message is text")
    };
    assert!(said("up").await.contains("use `waybill gateway`"));
    std::fs::write(fleet.config(), "listen: 127.0.0.1:1\n").expect("the configuration can be written");
    assert!(said("gateway").await.contains("use `waybill up`"));
}

/// DESIGN.md, section 5: of two processes under one name the newer one writes, and the older one ends.
#[tokio::test]
async fn a_gateway_whose_name_another_has_taken_over_stops_serving_and_says_so() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a"]), 1, &[nats.url()]).await;
    served(&fleet.client(0), "before").await;
    fleet.ready_when(0, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
    fleet.freeze(0).await;
    let (client, mut old) = (fleet.client(0), fleet.take(0));
    // The same name on another machine: another data folder.
    std::fs::rename(fleet.data(0), fleet.folder.path().join("old-machine")).expect("the folder can be moved");
    fleet.restart(0).await;
    served(&fleet.client(0), "after").await;
    old.signal("CONT").await;
    // It notices at its next fact.
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]}).to_string();
    drop(client.open(http::Method::POST, CHAT, &[], body.into()).await);
    assert!(!old.ended().await.success());
    served(&fleet.client(0), "still").await;
}
