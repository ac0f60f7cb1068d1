//! A cluster under mixed traffic, left alone and with all that may happen to its stores and projectors.
//!
//! Every run ends alike: no client was failed, the rows are the upstreams' own calls, once each, and the shared state is
//! a fresh fold of the log. And what a process held in memory for the time of a fault it has given back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use waybill_simulator::Call;

use crate::cluster::{Cluster, GATEWAYS};
use crate::projector::Database;
use crate::traffic::{self, Traffic, WORKERS};
use crate::world::Plan;

/// How long an upstream takes to begin an answer and to go on with it: 80 or 160 ms in all, and five times that where
/// projectors begin again and again at the start of the log.
const QUICK: [u64; 2] = [80, 20];
const SLOW: [u64; 2] = [400, 100];
/// Chats before and after a fault.
const SOME: usize = 100;
/// How long a server is frozen.
const FROZEN: Duration = Duration::from_secs(15);
/// A deadline that only a server that is away misses, on a machine as busy as one that runs tests.
const PATIENT_MS: u32 = 1000;
/// The deadline of gateways whose Redis has faults.
const DEADLINE_MS: u32 = 100;
/// What a process may hold more after a fault than before it.
const KEPT_KIB_MAX: u64 = 16 << 10;

/// A cluster under traffic.
struct Stage {
    cluster: Cluster,
    traffic: Traffic,
}

impl Stage {
    async fn start([first_token_ms, chunk_ms]: [u64; 2]) -> Self {
        let cluster = Cluster::start(traffic::plan(first_token_ms, chunk_ms), DEADLINE_MS).await;
        let traffic = Traffic::over(&cluster.fleet.upstreams);
        traffic.lead_to(vec![cluster.client()]);
        Self { cluster, traffic }
    }

    /// Lets `fault` happen in the middle of traffic, and compares.
    async fn endure(&mut self, what: &str, fault: impl AsyncFnOnce(&mut Cluster, &Traffic)) {
        let began = Instant::now();
        self.traffic.begin();
        self.traffic.more(SOME).await;
        let before = self.cluster.memory_kib();
        fault(&mut self.cluster, &self.traffic).await;
        self.traffic.more(SOME).await;
        self.traffic.end().await;
        let compared = self.cluster.check(&self.traffic.chats()).await;
        let after = self.cluster.memory_kib();
        println!("{what}: {compared:?} after {:?}; KiB {before:?}, then {after:?}", began.elapsed());
        for (process, kib) in &before {
            // One that the fault has ended has given back all it had.
            let now = after.get(process).copied().unwrap_or_default();
            assert!(now <= kib + KEPT_KIB_MAX, "{what}: process {process} held {kib} KiB and now {now}");
        }
    }
}

/// The places of every conversation and endpoint, as the upstreams saw them.
fn places(calls: &[(&'static str, Vec<Call>)]) -> BTreeMap<(String, String), BTreeSet<&'static str>> {
    let mut places: BTreeMap<(String, String), BTreeSet<&'static str>> = BTreeMap::new();
    for (name, calls) in calls {
        for call in calls {
            let conversation = call.header("conversation_id").expect("every request is of one").to_owned();
            places.entry((conversation, call.path.clone())).or_default().insert(name);
        }
    }
    places
}

/// Issue 4: "Three gateways behind the balancer, 60 s of mixed traffic: every session stayed on one deployment across
/// gateways; rows in Postgres equal the scripted upstream's own call log".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minute_of_traffic_behind_a_balancer_is_in_the_rows_and_no_conversation_moves() {
    let [first_token_ms, chunk_ms] = QUICK;
    let plan = traffic::plan(first_token_ms, chunk_ms);
    let settings = "retry: { backoff_ms: 1 }\nsession: { aliases: known }\nhealth: { enabled: false }\n";
    let cluster = Cluster::start(Plan { settings: settings.to_owned(), ..plan }, PATIENT_MS).await;
    let mut traffic = Traffic::that_stays(&cluster.fleet.upstreams);
    traffic.lead_to(vec![cluster.client()]);
    traffic.begin();
    traffic.lasts(Duration::from_secs(60)).await;
    traffic.end().await;
    cluster.check(&traffic.chats()).await;

    let calls: Vec<(&str, Vec<Call>)> =
        traffic::NAMES.map(|name| (name, cluster.fleet.upstreams.named(name).calls())).into();
    assert!(calls.iter().all(|(_, calls)| !calls.is_empty()), "conversations are spread");
    let places = places(&calls);
    assert!(places.len() > 100, "{} conversations and endpoints", places.len());
    places.iter().for_each(|(of, at)| assert_eq!(at.len(), 1, "{of:?} is at {at:?}"));
    for n in 0..GATEWAYS {
        assert_ne!(requests(&cluster, n).await, 0, "gateway {n} has served");
    }
}

/// How many requests gateway `n` has served.
async fn requests(cluster: &Cluster, n: usize) -> u64 {
    count(cluster, n, "waybill_requests_total{").await
}

/// The sum of the counters of gateway `n` that begin so.
async fn count(cluster: &Cluster, n: usize, begins: &str) -> u64 {
    let metrics = cluster.fleet.client(n).get("/metrics", &[]).await.text();
    let counters = metrics.lines().filter(|line| line.starts_with(begins));
    let number = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<u64>().ok());
    counters.map(|line| number(line).expect("a counter has a number")).sum()
}

/// The calls to Redis that requests at gateway `n` made, and those that they were spared.
async fn reads(cluster: &Cluster, n: usize) -> (u64, u64) {
    let of =
        async |outcome: &str| count(cluster, n, &format!("waybill_state_reads_total{{outcome=\"{outcome}\"")).await;
    (of("answered").await + of("failed").await, of("skipped").await)
}

async fn redis_is(cluster: &Cluster, reachable: bool) {
    for n in 0..GATEWAYS {
        cluster.fleet.ready_when(n, |ready| ready["detail"]["state"]["reachable"] == reachable).await;
    }
}

/// Issue 4: SIGKILL and SIGSTOP of redis-server, Redis flushed, with its append file cut, connections killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_redis_no_client_is_failed_and_its_state_is_a_fold() {
    let mut stage = Stage::start(QUICK).await;
    stage
        .endure("redis killed", async |cluster, traffic| {
            cluster.redis.kill();
            redis_is(cluster, false).await;
            traffic.more(SOME).await;
            cluster.redis.restart();
            redis_is(cluster, true).await;
        })
        .await;
    stage
        .endure("redis frozen", async |cluster, traffic| {
            cluster.redis.stop();
            redis_is(cluster, false).await;
            // Those that had asked before the breaker opened.
            traffic.more(2 * WORKERS).await;
            let mut before = Vec::new();
            for n in 0..GATEWAYS {
                before.push(reads(cluster, n).await);
            }
            traffic.lasts(FROZEN).await;
            for (n, (asked, spared)) in before.into_iter().enumerate() {
                let (asked_then, spared_then) = reads(cluster, n).await;
                assert_eq!(asked_then, asked, "gateway {n} asks a server that it knows to be away");
                assert!(spared_then > spared, "gateway {n} serves");
            }
            cluster.redis.cont();
            redis_is(cluster, true).await;
        })
        .await;
    stage.endure("redis flushed", async |cluster, _| cluster.redis.flush()).await;
    stage
        .endure("redis robbed of half its file", async |cluster, _| {
            cluster.redis.kill();
            cluster.redis.cut_append_file(cluster.redis.append_file_bytes() / 2);
            cluster.redis.restart();
        })
        .await;
    stage.endure("connections of redis killed", async |cluster, _| cluster.redis.drop_clients()).await;
}

/// Issue 4: SIGKILL and SIGSTOP of postgres, pooled connections killed, Postgres down 60 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_postgres_no_client_is_failed_and_its_rows_are_the_calls() {
    let mut stage = Stage::start(QUICK).await;
    stage
        .endure("postgres killed", async |cluster, traffic| {
            cluster.postgres.kill();
            traffic.more(SOME).await;
            cluster.postgres.restart();
        })
        .await;
    stage
        .endure("postgres frozen", async |cluster, traffic| {
            cluster.postgres.stop();
            traffic.lasts(FROZEN).await;
            cluster.postgres.cont();
        })
        .await;
    stage
        .endure("connections of postgres killed", async |cluster, traffic| {
            for _ in 0..3 {
                let database = Database::open(&cluster.url).await;
                let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                           WHERE application_name = 'waybill projector'";
                assert!(database.numbers(sql).await[0] > 0, "projectors are connected");
                traffic.more(SOME).await;
            }
        })
        .await;
    stage
        .endure("postgres down for a minute", async |cluster, traffic| {
            cluster.postgres.kill();
            traffic.lasts(Duration::from_secs(60)).await;
            cluster.postgres.restart();
        })
        .await;
}

/// Issue 4: SIGKILL of a projector in the middle of a batch, ten times, and SIGSTOP; two of them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_projectors_no_call_is_lost_or_counted_twice() {
    let mut stage = Stage::start(SLOW).await;
    stage
        .endure("projectors killed in the middle of a batch", async |cluster, _| {
            let database = Database::open(&cluster.url).await;
            for _ in 0..10 {
                let writer = cluster.writer().await;
                // A batch writes to the events first and to the attempts then.
                let blocker = Database::open(&cluster.url).await;
                blocker.execute("BEGIN; LOCK TABLE wb_g1.usage_attempts IN ACCESS EXCLUSIVE MODE").await;
                database.holds_a_projector().await;
                cluster.projectors.remove(writer).kill().await;
                blocker.execute("ROLLBACK").await;
                let next = cluster.projector().await;
                cluster.projectors.push(next);
            }
        })
        .await;
    stage
        .endure("the projector at work frozen", async |cluster, traffic| {
            let writer = cluster.writer().await;
            cluster.projectors[writer].signal("STOP").await;
            traffic.lasts(FROZEN).await;
            cluster.projectors[writer].signal("CONT").await;
        })
        .await;
    stage
        .endure("both projectors killed", async |cluster, traffic| {
            for projector in cluster.projectors.drain(..) {
                projector.kill().await;
            }
            traffic.more(SOME).await;
            for _ in 0..2 {
                let next = cluster.projector().await;
                cluster.projectors.push(next);
            }
        })
        .await;
}
