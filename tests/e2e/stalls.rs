//! Consumers of the log that are connected and see nothing of it: they notice, say so, and connect anew until they see.

use serde_json::Value;
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};
use waybill_servers::redis::{self, Redis};

use crate::client::Client;
use crate::fleet::{Fleet, ready_when};
use crate::process::Process;
use crate::processes::served;
use crate::way::Way;
use crate::world::{KEY, Plan};

/// A figure of a process.
async fn figure(client: &Client, name: &str) -> String {
    let metrics = client.get("/metrics", &[]).await.text();
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).to_owned()
}

/// Whether the detail says that reads end before the log does.
fn stalls(trouble: &Value) -> bool {
    trouble.as_str().is_some_and(|trouble| trouble.contains("reads end at frame"))
}

/// Issue 4: "a watchdog for consumers that stall while connected".
#[tokio::test]
async fn consumers_that_are_connected_and_see_nothing_say_so_and_connect_until_they_see() {
    let nats = Nats::start(&nats::Options::default());
    let (redis, postgres) = (Redis::start(&redis::Options::default()), Postgres::start(&postgres::Options::default()));
    let way = Way::to(&nats.url()).await;
    let stores = format!("state: {{ redis: '{}' }}\nusage: {{ postgres: '{}' }}\n", redis.url(), postgres.database());
    let mut fleet = Fleet::start(Plan::of(&["a", "b"]).settings(&stores), 1, &[way.url()]).await;
    let projector = Process::start(&mut fleet.command(&["projector", "--listen", "127.0.0.1:0"])).await;
    let (gateway, projector) = (fleet.client(0), Client::new(projector.addr, KEY));
    served(&gateway, "before").await;
    let caught_up = |ready: &Value| {
        let lag = |store: &str| &ready["detail"][store]["lag_frames"];
        ready["ready"] == true && *lag("postgres") == 0 && *lag("redis") == 0
    };
    ready_when(&projector, caught_up).await;

    way.blind();
    served(&gateway, "meanwhile").await;
    // The auditor is as blind as the others, so the change comes into the log by another way.
    fleet.configure(&Plan::of(&["a"]).settings(&stores));
    let text = std::fs::read_to_string(fleet.config()).expect("the configuration can be read");
    let seeing = fleet.folder.path().join("seeing.yaml");
    std::fs::write(&seeing, text.replace(&way.url(), &nats.url())).expect("a configuration can be written");
    let applied = fleet.command(&["apply"]).arg(&seeing).env("WAYBILL_CONFIG", &seeing).output().await;
    assert!(applied.is_ok_and(|applied| applied.status.success()), "the change comes into the log");
    let all_stall = |ready: &Value| {
        let store = |name: &str| &ready["detail"][name];
        let stands = |name: &str| stalls(&store(name)["trouble"]) && store(name)["lag_frames"].as_u64() > Some(0);
        ready["ready"] == false && stands("postgres") && stands("redis")
    };
    ready_when(&projector, all_stall).await;
    for store in ["postgres", "redis"] {
        assert_eq!(figure(&projector, &format!("waybill_projection_trouble{{store=\"{store}\"}}")).await, "1");
        assert_ne!(figure(&projector, &format!("waybill_projection_lag_frames{{store=\"{store}\"}}")).await, "0");
    }
    let ready = fleet.ready_when(0, |ready| stalls(&ready["detail"]["catalogue"]["trouble"])).await;
    assert_eq!((&ready["ready"], &ready["detail"]["catalogue"]["revision"]), (&true.into(), &1.into()), "{ready}");
    assert_eq!(figure(&gateway, "waybill_catalogue_followed").await, "0");
    served(&gateway, "still").await;

    way.blind_no_more();
    ready_when(&projector, caught_up).await;
    assert_eq!(figure(&projector, "waybill_projection_trouble{store=\"postgres\"}").await, "0");
    fleet.ready_when(0, |ready| ready["detail"]["catalogue"]["revision"] == 2).await;
    assert_eq!(figure(&gateway, "waybill_catalogue_followed").await, "1");
    fleet.stop_all().await;
    assert_eq!(fleet.told().await.attempts().count(), 3);
}
