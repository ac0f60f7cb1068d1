//! The disk under the spool is full, and the log takes nothing at the same time: what is served then, what is said of
//! it, and that what was lost is declared.

use futures_util::future::join3;
use serde_json::{Value, json};
use waybill_auditor::verify::verify;
use waybill_events::log::Log;
use waybill_schema::event::{Class, Event, Ownedness};
use waybill_servers::disk::Disk;
use waybill_servers::nats::{Nats, Options};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, Client};
use crate::continuation;
use crate::dialect::RESPONSES;
use crate::fleet::{Fleet, ready_when};
use crate::log::{Told, open, told_after_losses};
use crate::processes::served;
use crate::shared::Cluster;
use crate::world::{Plan, World};

/// Chats in each part of a run.
const CHATS: usize = 40;
/// What a chat that needs one send says: `selection`, `attempt`, `preference`, `request`.
const FACTS_PER_CHAT: u64 = 4;
/// A writer says every ten seconds that it is there, and a sign of life may be among what is lost: one a minute of a
/// slow run's patience.
const ALIVE_MAX: u64 = 12;

async fn chats(client: &Client) {
    for n in 0..CHATS {
        served(client, &format!("s-{n}")).await;
    }
}

/// What `/readyz` says of the spool and of the log: whether the gateway is ready, records, and reaches the log.
fn vitals(ready: &Value) -> [&Value; 3] {
    [&ready["ready"], &ready["detail"]["spool"]["records"], &ready["detail"]["log"]["reachable"]]
}

fn no_loss_since(ready: &Value) -> bool {
    vitals(ready) == [&json!(true); 3] && ready["detail"]["log"]["lag_facts"] == 0
}

/// How many facts of chats the log has, and how many it says are lost.
fn kept_and_declared(told: &Told) -> (u64, u64) {
    let of_a_chat = |event: &Event| {
        matches!(event, Event::Selection(_) | Event::Attempt(_) | Event::Preference(_) | Event::Request(_))
    };
    let kept = told.facts.iter().filter(|fact| of_a_chat(&fact.event)).count();
    let declared = told.facts.iter().map(|fact| match &fact.event {
        Event::Dropped(dropped) => dropped.last + 1 - dropped.first,
        _ => 0,
    });
    (kept as u64, declared.sum())
}

/// Checks that what was kept and what is declared come to all of `n_chats`, and that no auditor finds a fault with it.
fn check(log: &mut dyn Log, n_chats: usize, lost: &Value) -> Told {
    let told = told_after_losses(log);
    let (kept, declared) = kept_and_declared(&told);
    println!("{kept} facts of {n_chats} chats are kept, {declared} are declared as lost");
    let (all, of_chats) = (kept + declared, FACTS_PER_CHAT * n_chats as u64);
    assert!((of_chats..=of_chats + ALIVE_MAX).contains(&all), "{kept} kept, {declared} declared of {of_chats}");
    assert_eq!(Some(declared), lost.as_u64(), "as many are declared as /readyz said");
    let verified = verify(log).expect("the log can be read");
    assert_eq!((verified.findings, verified.duplicates), (Vec::new(), 0));
    told
}

/// Issue 3; DESIGN.md, section 8: "disk full under the spool, log away too".
#[tokio::test]
async fn a_gateway_on_a_full_disk_without_the_log_serves_and_declares_what_it_loses() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::prepare(&Plan::of(&["a"]), &[nats.url()], 1).await;
    let disk = Disk::over(&fleet.data(0), 512);
    fleet.start_auditor().await;
    fleet.restart(0).await;
    let client = fleet.client(0);
    chats(&client).await;
    fleet.ready_when(0, no_loss_since).await;

    nats.stop();
    chats(&client).await;
    disk.fill();
    chats(&client).await;
    let red = fleet.ready_when(0, |ready| vitals(ready) == [&json!(false); 3]).await;
    assert_ne!(red["detail"]["spool"]["lost"], 0, "{red}");
    assert_ne!(red["detail"]["log"]["lag_facts"], 0, "{red}");

    disk.make_room();
    chats(&client).await;
    let on_disk = fleet.ready_when(0, |ready| vitals(ready) == [&json!(true), &json!(true), &json!(false)]).await;
    nats.cont();
    let ready = fleet.ready_when(0, no_loss_since).await;
    assert_eq!(ready["detail"]["spool"]["lost"], on_disk["detail"]["spool"]["lost"], "nothing was lost any more");
    fleet.stop(0).await;
    // What of a chat is open because its end was lost is abandoned by the next life.
    fleet.restart(0).await;
    fleet.stop(0).await;
    let lost = ready["detail"]["spool"]["lost"].clone();
    assert_eq!(fleet.upstreams.calls().len(), 4 * CHATS);
    let told = fleet.look(move |log| check(log, 4 * CHATS, &lost)).await;
    assert_eq!(told.fold.usage.n_open(), 0);
    assert!(told.n_attempts(Class::Success) >= 3 * CHATS);
}

/// DESIGN.md, section 8: "stateless chats served, stateful ones refused"; section 4: an answer whose owner cannot be
/// recorded is delivered and marked, and cannot be continued.
#[tokio::test]
async fn on_a_full_disk_what_needs_a_record_is_refused_and_what_is_made_is_marked_unowned() {
    let mut world = World::start(Plan::of(&["a"])).await;
    world.stop().await;
    let disk = Disk::over(&world.data(), 4096);
    world.restart().await;
    let client = world.client();
    let make = async || client.post(RESPONSES.path, &[], &RESPONSES.body("Hello", false)).await;
    let owned = make().await;
    assert_eq!((owned.status.as_u16(), owned.header("x-waybill-owned")), (200, None));

    disk.fill();
    while ready_now(&client).await["detail"]["spool"]["records"] == true {
        chats(&client).await;
    }
    let before = world.calls().len();
    let go_on = |parent: &Answer| json!({"model": "gpt", "input": "And?", "previous_response_id": parent.json()["id"]});
    let stateful = [
        go_on(&owned),
        json!({"model": "gpt", "input": "Hello", "conversation": "conv_1"}),
        json!({"model": "gpt", "input": "Hello", "background": true}),
    ];
    for body in &stateful {
        let answer = client.post(RESPONSES.path, &[], body).await;
        let code = answer.json()["error"]["code"].clone();
        assert_eq!((answer.status.as_u16(), code), (503, json!("ownership_unavailable")), "{body}");
        assert!(answer.header("retry-after").is_some(), "{body}");
    }
    assert_eq!(world.calls().len(), before, "nothing stateful was sent");
    let unowned = make().await;
    assert_eq!((unowned.status.as_u16(), unowned.header("x-waybill-owned")), (200, Some("false")));

    disk.make_room();
    while ready_now(&client).await["detail"]["spool"]["records"] == false {
        chats(&client).await;
    }
    let refused = client.post(RESPONSES.path, &[], &go_on(&unowned)).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (400, &json!("previous_response_not_found"))
    );
    for body in &stateful {
        assert_eq!(client.post(RESPONSES.path, &[], body).await.status, 200, "{body}");
    }
    let metrics = client.get("/metrics", &[]).await.text();
    assert!(metrics.contains("waybill_responses_unowned_total 1\n"), "{metrics}");
}

/// Issue 5, "a cut owns nothing"; DESIGN.md, sections 4 and 8: what ends while neither the disk nor the log takes anything
/// is delivered, and nothing says then or later, at any gateway, that it can be continued.
#[tokio::test]
async fn what_ends_on_a_full_disk_without_the_log_is_shown_to_nobody_as_owned() {
    let mut cluster = Cluster::of(Plan::of(&["a"]), 2, 1000).await;
    cluster.fleet.stop(0).await;
    let disk = Disk::over(&cluster.fleet.data(0), 512);
    cluster.fleet.restart(0).await;
    let [maker, other] = [0, 1].map(|n| cluster.fleet.client(n));
    let upstream = &cluster.fleet.upstreams[0];
    upstream.push(Step::new([Action::PauseAfter { events: 6 }]).times(2));
    let make = async |stream| maker.post(RESPONSES.path, &[], &RESPONSES.body("Hello", stream)).await;
    let happen = async {
        // The stream has said its id by then, so that it is known as one that has not ended.
        upstream.wait_for(|calls| calls.iter().any(|call| call.events == 6) && calls.len() == 2).await;
        cluster.settled().await;
        cluster.nats.stop();
        disk.fill();
        while ready_now(&maker).await["detail"]["spool"]["records"] == true {
            chats(&maker).await;
        }
        upstream.release();
    };
    let (plain, streamed, ()) = join3(make(false), make(true), happen).await;
    assert_eq!((plain.status.as_u16(), plain.header("x-waybill-owned")), (200, Some("false")));
    assert_eq!((streamed.status.as_u16(), streamed.whole), (200, true));
    assert!(streamed.text().contains(RESPONSES.last));
    let ids = [&plain, &streamed].map(continuation::id_in);

    let refused = async |client: &Client, id: &str| {
        let calls = upstream.calls().len();
        let body = json!({"model": "gpt", "input": "And?", "previous_response_id": id});
        let answer = client.post(RESPONSES.path, &[], &body).await;
        assert_eq!(upstream.calls().len(), calls, "nothing is sent: {}", answer.text());
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str().map(str::to_owned))
    };
    for id in &ids {
        for client in [&maker, &other] {
            let (status, _) = refused(client, id).await;
            assert!([400, 503].contains(&status), "{status}");
        }
    }
    disk.make_room();
    while ready_now(&maker).await["detail"]["spool"]["records"] == false {
        chats(&maker).await;
    }
    cluster.nats.cont();
    cluster.settled().await;
    for id in &ids {
        for client in [&maker, &other] {
            assert_eq!(refused(client, id).await, (400, Some("previous_response_not_found".to_owned())));
        }
    }
    let owned = make(false).await;
    let go_on = json!({"model": "gpt", "input": "And?", "previous_response_id": owned.json()["id"]});
    assert_eq!(other.post(RESPONSES.path, &[], &go_on).await.status, 200);
    cluster.settled().await;
    let told = cluster.fleet.look(|log| told_after_losses(log)).await;
    let is_final = |event: &Event| matches!(event, Event::Ownership(fact) if fact.state == Ownedness::Final);
    let finals = told.facts.iter().filter(|fact| is_final(&fact.event)).count();
    assert_eq!(finals, 2, "of the last two, and no others");
    let metrics = maker.get("/metrics", &[]).await.text();
    assert!(metrics.contains("waybill_responses_unowned_total 2\n"), "{metrics}");
}

async fn ready_now(client: &Client) -> Value {
    client.get("/readyz", &[]).await.json()
}

/// The log of an embedded instance lies on the same disk.
#[tokio::test]
async fn an_embedded_instance_on_a_full_disk_serves_and_declares_what_it_loses() {
    let mut world = World::start(Plan::of(&["a"])).await;
    world.stop().await;
    let disk = Disk::over(&world.data(), 4096);
    world.restart().await;
    let client = world.client();
    chats(&client).await;
    world.settled().await;

    disk.fill();
    chats(&client).await;
    let red = ready_when(&client, |ready| vitals(ready)[..2] == [&json!(false); 2]).await;
    assert_ne!(red["detail"]["spool"]["lost"], 0, "{red}");

    disk.make_room();
    chats(&client).await;
    let ready = ready_when(&client, no_loss_since).await;
    world.stop().await;
    world.restart().await;
    world.stop().await;
    assert_eq!(world.calls().len(), 3 * CHATS);
    let told = check(&mut open(&world.data()), 3 * CHATS, &ready["detail"]["spool"]["lost"]);
    assert_eq!(told.fold.usage.n_open(), 0);
}
