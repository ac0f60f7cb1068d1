//! `waybill rebuild`, `verify` and `state`: the stores come back from the log as they were, whatever a hand did to them,
//! and no upstream hears of it.

use std::process::Output;

use ::redis::{Client as RedisClient, Commands};
use serde_json::Value;
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};
use waybill_servers::redis::{Options, Redis};
use waybill_simulator::{Action, Step};

use crate::client::Client;
use crate::fleet::{Fleet, ready_when};
use crate::process::Process;
use crate::projector::{Database, chat};
use crate::world::{KEY, Plan, World};

/// All tables of a generation.
const TABLES: [&str; 7] = [
    "usage_events",
    "usage_attempts",
    "response_owners",
    "health_changes",
    "catalogue_changes",
    "model_changes",
    "quarantine",
];

/// Two gateways over two upstreams, and empty stores.
struct Cluster {
    fleet: Fleet,
    redis: Redis,
    postgres: Postgres,
    _nats: Nats,
}

impl Cluster {
    async fn start() -> Self {
        let (nats, redis) = (Nats::start(&nats::Options::default()), Redis::start(&Options::default()));
        let postgres = Postgres::start(&postgres::Options::default());
        let settings = format!(
            "retry: {{ backoff_ms: 1, max_attempts: 1 }}\nstate: {{ redis: '{}', prefix: 'wb:', read_deadline_ms: 1000 }}\n",
            redis.url()
        );
        let fleet = Fleet::start(Plan::of(&["a", "b"]).settings(&settings), 2, &[nats.url()]).await;
        Self { fleet, redis, postgres, _nats: nats }
    }

    /// Chats, a few of which fail at first.
    async fn chat(&self, round: usize) {
        self.fleet.upstreams.named("a").push(Step::new([Action::status(503)]));
        chat(&self.fleet, round, 10).await;
    }

    async fn run(&self, url: &str, args: &[&str]) -> Output {
        let run = self.fleet.command(args).env("WAYBILL_USAGE_POSTGRES", url).output().await;
        run.expect("the command runs")
    }

    /// What a command that must succeed prints.
    async fn said(&self, url: &str, args: &[&str]) -> Value {
        let output = self.run(url, &[args, &["--json"]].concat()).await;
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("it prints JSON")
    }

    /// What a command that must fail prints, errors last.
    async fn refused(&self, url: &str, args: &[&str]) -> String {
        let output = self.run(url, args).await;
        assert!(!output.status.success(), "{args:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
    }

    async fn projector(&self, url: &str) -> Process {
        let mut command = self.fleet.command(&["projector", "--listen", "127.0.0.1:0"]);
        Process::start(command.env("WAYBILL_USAGE_POSTGRES", url)).await
    }

    /// Waits until `projector` has stored all of the log in generation `n` of both stores.
    async fn settled(&self, projector: &Process, n: u64) {
        for gateway in 0..2 {
            self.fleet.ready_when(gateway, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
        }
        let head = self.fleet.told().await.head.0;
        let settled = |ready: &Value| {
            ["postgres", "redis"].iter().all(|store| {
                let told = &ready["detail"][store];
                told["generation"] == n && told["checkpoint"].as_u64() >= Some(head)
            })
        };
        ready_when(&Client::new(projector.addr, KEY), settled).await;
    }

    /// The attempts in the rows are the calls of the upstreams, tokens included.
    async fn rows_are_calls(&self, database: &Database) {
        let calls = self.fleet.upstreams.calls();
        let tokens = calls.iter().filter_map(|call| call.usage.as_ref());
        let tokens: u64 = tokens.map(|usage| usage.prompt_tokens + usage.output_tokens).sum();
        let sql = "SELECT count(*), count(DISTINCT (request_id, attempt)), coalesce(sum(input + output), 0)::bigint
                   FROM waybill.usage_attempts";
        let number = |n: u64| i64::try_from(n).expect("few tokens");
        let n_calls = number(calls.len() as u64);
        assert_eq!(database.numbers(sql).await, [n_calls, n_calls, number(tokens)]);
    }
}

async fn rows(database: &Database) -> Vec<String> {
    let mut rows = Vec::new();
    for table in TABLES {
        rows.extend(database.texts(&format!("SELECT t::text FROM waybill.{table} AS t ORDER BY 1")).await);
    }
    rows
}

/// A pin in generation `n`, its key and what it holds.
fn a_pin(redis: &Redis, n: u64) -> (String, String) {
    let client = RedisClient::open(redis.url()).expect("the URL is one");
    let mut connection = client.get_connection().expect("the server answers");
    let keys: Vec<String> = connection.keys(format!("wb:g{n}:s:*")).expect("the server answers");
    let key = keys.into_iter().next().expect("there is a pin");
    let value = connection.get(&key).expect("the server answers");
    (key, value)
}

fn set(redis: &Redis, key: &str, value: &str) {
    let client = RedisClient::open(redis.url()).expect("the URL is one");
    let mut connection = client.get_connection().expect("the server answers");
    let _: () = connection.set(key, value).expect("the server answers");
}

/// Issue 4: "`rebuild` into empty stores, twice: digests equal, rows identical, zero upstream calls; a row, a pin […]
/// damaged by hand are each found and named by `verify`".
#[tokio::test]
async fn empty_stores_are_filled_twice_alike_and_what_a_hand_changes_is_named() {
    let mut cluster = Cluster::start().await;
    cluster.chat(0).await;
    cluster.fleet.stop_all().await;
    let n_calls = cluster.fleet.upstreams.calls().len();
    assert!(n_calls > 20, "some were repeated");
    let mut twice = Vec::new();
    let mut url = String::new();
    for _ in 0..2 {
        cluster.redis.flush();
        url = cluster.postgres.database();
        let told = cluster.said(&url, &["rebuild"]).await;
        let database = Database::open(&url).await;
        cluster.rows_are_calls(&database).await;
        let sums: Vec<Value> = (0..2).map(|store| told["stores"][store]["sums"].clone()).collect();
        twice.push((told["seq"].clone(), told["events"].clone(), sums, rows(&database).await));
    }
    assert_eq!(twice[0], twice[1]);
    let head = cluster.fleet.told().await;
    assert_eq!((&twice[0].0, &twice[0].1), (&head.head.0.into(), &head.facts.len().into()));
    let whole = cluster.said(&url, &["verify"]).await;
    let clean = |store: usize| &whole["stores"][store]["findings"]["n"] == 0;
    assert!(whole["n_findings"] == 0 && clean(0) && clean(1), "{whole}");

    let database = Database::open(&url).await;
    let sql = "UPDATE wb_g1.usage_attempts SET output = output + 1
               WHERE request_id = (SELECT min(request_id) FROM wb_g1.usage_events)";
    database.execute(sql).await;
    let request = database.texts("SELECT min(request_id) FROM wb_g1.usage_events").await.concat();
    let (key, pin) = a_pin(&cluster.redis, 1);
    set(&cluster.redis, &key, &pin.replacen("\"fail_count\":", "\"fail_count\":1", 1));
    let told = cluster.refused(&url, &["verify"]).await;
    assert!(told.contains(&format!("usage_attempts ({request}, ")), "{told}");
    assert!(told.contains(&format!("redis {key}: the log says another value")), "{told}");

    let told = cluster.said(&url, &["rebuild"]).await;
    let named = |store: usize| told["stores"][store]["live_before"].to_string();
    assert!(named(0).contains(&request) && named(1).contains(&key), "{told}");
    assert_eq!(told["stores"][0]["swapped"], serde_json::json!({"from": 1, "to": 2}));
    cluster.said(&url, &["verify"]).await;
    assert_eq!(rows(&database).await, twice[0].3);
    let told = cluster.refused(&url, &["rebuild", "--rollback", "--only", "postgres"]).await;
    assert!(told.contains("usage_attempts differ"), "{told}");
    assert_eq!(cluster.fleet.upstreams.calls().len(), n_calls, "no upstream was called");
}

/// DESIGN.md, section 7: beside running gateways and a projector, which follow the pointers there and back.
#[tokio::test]
async fn a_rebuild_beside_what_runs_is_followed_there_and_back() {
    let cluster = Cluster::start().await;
    let url = cluster.postgres.database();
    let projector = cluster.projector(&url).await;
    cluster.chat(0).await;
    cluster.settled(&projector, 1).await;
    let told = cluster.said(&url, &["rebuild"]).await;
    assert_eq!(told["stores"][1]["swapped"], serde_json::json!({"from": 1, "to": 2}));
    cluster.chat(1).await;
    cluster.settled(&projector, 2).await;
    let database = Database::open(&url).await;
    cluster.rows_are_calls(&database).await;
    cluster.said(&url, &["verify"]).await;

    cluster.said(&url, &["rebuild", "--rollback"]).await;
    cluster.chat(2).await;
    cluster.settled(&projector, 1).await;
    cluster.rows_are_calls(&database).await;
    cluster.said(&url, &["verify"]).await;
    let told = cluster.refused(&url, &["rebuild", "--rollback"]).await;
    assert!(told.contains("generation 1 is live, and none was before it"), "{told}");
}

/// The same of the embedded store; "a frame damaged by hand" is named by its sequence, and the state of a moment is the
/// one that the gateway had.
#[tokio::test]
async fn the_embedded_rows_come_back_and_a_damaged_frame_is_named() {
    let mut world = World::start(Plan::of(&["a"])).await;
    let body = serde_json::json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    for session in ["s-1", "s-2"] {
        let answer = world.client().post("/v1/chat/completions", &[("x-session-id", session)], &body).await;
        assert_eq!(answer.status, 200);
    }
    world.settled().await;
    let live = world.live_digest().await;
    let said: Value = serde_json::from_str(&world.command(&["state", "--json"]).await).expect("it prints JSON");
    assert_eq!((&said["digest"], said["pins"].as_array().map(Vec::len)), (&live.into(), Some(2)));
    let first: Value =
        serde_json::from_str(&world.command(&["state", "--at", "1", "--json"]).await).expect("it prints JSON");
    assert_eq!((&first["seq"], first["pins"].as_array().map(Vec::len)), (&1.into(), Some(0)));
    world.command(&["verify"]).await;

    let hand = rusqlite::Connection::open(world.data().join("waybill.db")).expect("the file opens");
    hand.busy_timeout(crate::world::PATIENCE).expect("a time-out can be set");
    let sql = "SELECT request_id, output FROM usage_attempts ORDER BY 1";
    let rows = world.table(sql);
    hand.execute_batch("UPDATE usage_attempts SET output = 12345; DELETE FROM usage_events")
        .expect("rows can be changed");
    let told = world.told_by_failing(&["verify"]).await;
    let request = rows[0].split('|').next().expect("a row has columns");
    assert!(told.contains(&format!("usage_events ({request}): is missing")), "{told}");
    assert!(told.contains(&format!("usage_attempts ({request}, 1): the log says another output")), "{told}");
    // Beside the running gateway, which goes on.
    world.command(&["rebuild"]).await;
    world.command(&["verify"]).await;
    assert_eq!((world.table(sql), world.calls().len()), (rows, 2));
    let answer = world.client().post("/v1/chat/completions", &[], &body).await;
    assert_eq!(answer.status, 200);
    world.settled().await;
    world.stop().await;
    world.command(&["verify"]).await;
    assert!(world.refused(&["rebuild", "--rollback"]).await.contains("keeps no generation to go back to"));

    let damaged = "UPDATE frames SET body = CAST(replace(CAST(body AS TEXT), '\"status\":200', '\"status\":201') AS BLOB)
                   WHERE seq = (SELECT min(seq) FROM frames WHERE CAST(body AS TEXT) LIKE '%\"status\":200%') RETURNING seq";
    let seq: i64 = hand.query_row(damaged, [], |row| row.get(0)).expect("a frame can be changed");
    let told = world.told_by_failing(&["verify"]).await;
    assert!(told.contains(&format!("frame {seq}: frame does not match its sum")), "{told}");
}
