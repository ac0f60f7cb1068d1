//! `waybill projector` between a real nats-server and a real Postgres: the rows are the upstreams' own calls.

use serde_json::json;
use tokio_postgres::NoTls;
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};

use crate::client::Client;
use crate::fleet::{Fleet, ready_when};
use crate::process::Process;
use crate::world::{KEY, Plan};

/// Sends `n` chats through each gateway, every one in a session of its own.
async fn chat(fleet: &Fleet, round: usize, n: usize) {
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    for gateway in 0..2 {
        for request in 0..n {
            let session = format!("s-{gateway}-{round}-{request}");
            let headers = [("x-session-id", session.as_str())];
            let answer = fleet.client(gateway).post("/v1/chat/completions", &headers, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
}

async fn projector(fleet: &Fleet, url: &str) -> Process {
    let mut command = fleet.command(&["projector", "--listen", "127.0.0.1:0"]);
    Process::start(command.env("WAYBILL_USAGE_POSTGRES", url)).await
}

async fn comes_to(projector: &Process, phase: &str) {
    ready_when(&Client::new(projector.addr, KEY), |ready| ready["detail"]["postgres"]["phase"] == phase).await;
}

async fn numbers(url: &str, sql: &str) -> Vec<i64> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("postgres answers");
    let ask = async {
        let row = client.query_one(sql, &[]).await.expect("postgres answers the query");
        (0..row.len()).map(|i| row.get(i)).collect()
    };
    tokio::select! {
        numbers = ask => numbers,
        ended = connection => panic!("the connection ended: {ended:?}"),
    }
}

/// Issue 4: rows in Postgres equal the scripted upstream's own call log, tokens included, whatever projector is killed.
#[tokio::test]
async fn the_rows_are_the_upstreams_calls_though_projectors_are_killed() {
    let (nats, postgres) = (Nats::start(&nats::Options::default()), Postgres::start(&postgres::Options::default()));
    let url = postgres.database();
    let mut fleet = Fleet::start(Plan::of(&["a", "b"]), 2, &[nats.url()]).await;
    let mut writes = projector(&fleet, &url).await;
    for round in 0..3 {
        comes_to(&writes, "projecting").await;
        let waits = projector(&fleet, &url).await;
        comes_to(&waits, "waiting").await;
        tokio::join!(chat(&fleet, round, 10), writes.kill());
        writes = waits;
    }
    fleet.stop_all().await;
    let head = fleet.told().await.head.0;
    let caught_up =
        move |ready: &serde_json::Value| ready["ready"] == true && ready["detail"]["postgres"]["checkpoint"] == head;
    ready_when(&Client::new(writes.addr, KEY), caught_up).await;
    writes.signal("TERM").await;
    assert!(writes.ended().await.success());

    let calls = fleet.upstreams.calls();
    let usage = || calls.iter().filter_map(|call| call.usage.as_ref());
    let (input, output): (u64, u64) =
        (usage().map(|usage| usage.prompt_tokens).sum(), usage().map(|usage| usage.output_tokens).sum());
    let sql = "SELECT count(*), count(DISTINCT request_id), sum(input)::bigint, sum(output)::bigint
               FROM waybill.usage_attempts WHERE class = 'success'";
    let expected = [calls.len() as u64, 60, input, output].map(|n| i64::try_from(n).expect("few tokens"));
    assert_eq!(numbers(&url, sql).await, expected);
    let sql = "SELECT count(*), count(DISTINCT session_id), count(*) FILTER (WHERE session_source = 'explicit')
               FROM waybill.usage_events WHERE outcome = 'success'";
    assert_eq!(numbers(&url, sql).await, [60, 60, 60]);
}
