//! `waybill projector` between a real nats-server and a real Postgres: the rows are the upstreams' own calls.

use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::NoTls;
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};

use crate::client::Client;
use crate::fleet::{Fleet, ready_when};
use crate::process::Process;
use crate::world::{KEY, PATIENCE, Plan};

/// Sends `n` chats through each gateway, every one in a session of its own.
pub(crate) async fn chat(fleet: &Fleet, round: usize, n: usize) {
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

/// A look into the database from outside.
pub(crate) struct Database {
    client: tokio_postgres::Client,
    _connection: JoinSet<()>,
}

impl Database {
    pub(crate) async fn open(url: &str) -> Self {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("postgres answers");
        let mut tasks = JoinSet::new();
        // Its end is seen by whoever uses the client.
        tasks.spawn(async { drop(connection.await) });
        Self { client, _connection: tasks }
    }

    pub(crate) async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.expect("postgres takes the statements");
    }

    /// All rows that `sql` gives.
    pub(crate) async fn rows(&self, sql: &str) -> Vec<tokio_postgres::Row> {
        self.client.query(sql, &[]).await.expect("postgres answers")
    }

    pub(crate) async fn numbers(&self, sql: &str) -> Vec<i64> {
        let row = self.client.query_one(sql, &[]).await.expect("postgres answers");
        (0..row.len()).map(|i| row.get(i)).collect()
    }

    /// The first column of every row, which is text.
    pub(crate) async fn texts(&self, sql: &str) -> Vec<String> {
        let rows = self.client.query(sql, &[]).await.expect("postgres answers");
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Waits until a projector is held at a lock.
    pub(crate) async fn holds_a_projector(&self) {
        let sql = "SELECT count(*) FROM pg_stat_activity
                   WHERE application_name = 'waybill projector' AND wait_event_type = 'Lock'";
        let held = async { while self.numbers(sql).await != [1] {} };
        tokio::time::timeout(PATIENCE, held).await.expect("a projector comes to the lock");
    }
}

/// Ends the gateways, lets `last` store the rest, and compares the rows with the calls of the upstreams.
async fn settle(mut fleet: Fleet, mut last: Process, database: &Database, n_requests: i64) {
    fleet.stop_all().await;
    let head = fleet.told().await.head.0;
    let caught_up = move |ready: &serde_json::Value| {
        ready["ready"] == true && ready["detail"]["postgres"]["checkpoint"].as_u64() >= Some(head)
    };
    ready_when(&Client::new(last.addr, KEY), caught_up).await;
    last.signal("TERM").await;
    assert!(last.ended().await.success());

    let calls = fleet.upstreams.calls();
    let usage = || calls.iter().filter_map(|call| call.usage.as_ref());
    let input: u64 = usage().map(|usage| usage.prompt_tokens).sum();
    let output: u64 = usage().map(|usage| usage.output_tokens).sum();
    let number = |n: u64| i64::try_from(n).expect("few tokens");
    let sql = "SELECT count(*), count(DISTINCT request_id), sum(input)::bigint, sum(output)::bigint
               FROM waybill.usage_attempts WHERE class = 'success'";
    let expected = [number(calls.len() as u64), n_requests, number(input), number(output)];
    assert_eq!(database.numbers(sql).await, expected);
    let sql = "SELECT count(*), count(DISTINCT session_id), count(*) FILTER (WHERE session_source = 'explicit')
               FROM waybill.usage_events WHERE outcome = 'success'";
    assert_eq!(database.numbers(sql).await, [n_requests; 3]);
}

/// Issue 4: rows in Postgres equal the scripted upstream's own call log, tokens included, whatever projector is killed.
#[tokio::test]
async fn the_rows_are_the_upstreams_calls_though_projectors_are_killed() {
    let (nats, postgres) = (Nats::start(&nats::Options::default()), Postgres::start(&postgres::Options::default()));
    let url = postgres.database();
    let fleet = Fleet::start(Plan::of(&["a", "b"]), 2, &[nats.url()]).await;
    let mut writes = projector(&fleet, &url).await;
    for round in 0..3 {
        comes_to(&writes, "projecting").await;
        let waits = projector(&fleet, &url).await;
        comes_to(&waits, "waiting").await;
        tokio::join!(chat(&fleet, round, 10), writes.kill());
        writes = waits;
    }
    settle(fleet, writes, &Database::open(&url).await, 60).await;
}

/// Issue 4: SIGKILL of a projector in the middle of a batch, ten times.
#[tokio::test]
async fn projectors_killed_in_the_middle_of_a_batch_cost_and_double_nothing() {
    let (nats, postgres) = (Nats::start(&nats::Options::default()), Postgres::start(&postgres::Options::default()));
    let url = postgres.database();
    let fleet = Fleet::start(Plan::of(&["a", "b"]), 2, &[nats.url()]).await;
    let first = projector(&fleet, &url).await;
    comes_to(&first, "projecting").await;
    chat(&fleet, 0, 1).await;
    let database = Database::open(&url).await;
    let counted = "SELECT count(*) FROM wb_g1.usage_events";
    while database.numbers(counted).await != [2] {}
    first.kill().await;
    chat(&fleet, 1, 10).await;
    for kill in 0..10 {
        // A batch writes to the events first and to the attempts then.
        let blocker = Database::open(&url).await;
        blocker.execute("BEGIN; LOCK TABLE wb_g1.usage_attempts IN ACCESS EXCLUSIVE MODE").await;
        let projector = projector(&fleet, &url).await;
        database.holds_a_projector().await;
        projector.kill().await;
        blocker.execute("ROLLBACK").await;
        assert_eq!(database.numbers(counted).await, [2], "after kill {kill}");
    }
    let last = projector(&fleet, &url).await;
    settle(fleet, last, &database, 22).await;
}
