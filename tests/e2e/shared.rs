//! Gateways that share pins and cooldowns through a real Redis: they agree, they go on while it is frozen, and what one
//! of them learnt the others follow.

use std::collections::BTreeSet;
use std::fs::File;
use std::time::Duration;

use futures_util::future::{join, join_all};
use serde_json::Value;
use tokio::time::Instant;
use waybill_auditor::redecide::{Redecision, redecide};
use waybill_events::log::Log;
use waybill_schema::event::{Event, Reason, Selection};
use waybill_servers::nats::{self, Nats};
use waybill_servers::redis::{Options, Redis};
use waybill_simulator::{Action, Step};

use crate::client::Client;
use crate::dialect::CHAT;
use crate::fallbacks;
use crate::fleet::{Fleet, ready_when};
use crate::process::Process;
use crate::world::{KEY, PATIENCE, Plan};

/// A deadline that only a server that is away misses, on a machine as busy as one that runs tests.
const PATIENT_MS: u32 = 1000;

/// Servers, a projector and gateways.
pub(crate) struct Cluster {
    pub(crate) fleet: Fleet,
    pub(crate) redis: Redis,
    pub(crate) projector: Process,
    n_gateways: usize,
    pub(crate) nats: Nats,
}

impl Cluster {
    async fn start(upstreams: &[&str], settings: &str, deadline_ms: u32) -> Self {
        Self::of(Plan::of(upstreams).settings(settings), 3, deadline_ms).await
    }

    /// Starts what `plan` says, with so many gateways that wait so long for Redis.
    pub(crate) async fn of(plan: Plan, n_gateways: usize, deadline_ms: u32) -> Self {
        let (nats, redis) = (Nats::start(&nats::Options::default()), Redis::start(&Options::default()));
        let state = format!("state: {{ redis: '{}', prefix: 'wb:', read_deadline_ms: {deadline_ms} }}\n", redis.url());
        let settings = format!("{state}{}", plan.settings);
        let fleet = Fleet::start(plan.settings(&settings), n_gateways, &[nats.url()]).await;
        let projector = Process::start(&mut fleet.command(&["projector", "--listen", "127.0.0.1:0"])).await;
        let cluster = Self { fleet, redis, projector, n_gateways, nats };
        cluster.settled().await;
        cluster
    }

    /// Waits until all that the gateways have said is in Redis.
    pub(crate) async fn settled(&self) {
        for n in 0..self.n_gateways {
            self.fleet.ready_when(n, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
        }
        let head = self.fleet.look(|log| log.head().expect("the log answers").0).await;
        let is_there =
            |ready: &Value| ready["ready"] == true && ready["detail"]["redis"]["checkpoint"].as_u64() >= Some(head);
        ready_when(&Client::new(self.projector.addr, KEY), is_there).await;
    }

    async fn served(&self, n: usize, session: &str) -> String {
        served(&self.fleet.client(n), session).await
    }

    /// How many reads of the shared state requests at gateway `n` made, by `outcome`.
    pub(crate) async fn reads(&self, n: usize, outcome: &str) -> u64 {
        let metrics = self.fleet.client(n).get("/metrics", &[]).await.text();
        let line = format!("waybill_state_reads_total{{outcome=\"{outcome}\"}} ");
        metrics.lines().find_map(|said| said.strip_prefix(&line)).map_or(0, |count| count.parse().expect("a number"))
    }

    async fn selections(&self) -> Vec<Selection> {
        let told = self.fleet.told().await;
        let selections = told.pick(|event| match event {
            Event::Selection(selection) => Some(&**selection),
            _ => None,
        });
        selections.into_iter().cloned().collect()
    }
}

async fn served(client: &Client, session: &str) -> String {
    let answer = client.post(CHAT.path, &[("x-session-id", session)], &CHAT.body("Hello", false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-waybill-deployment").expect("the key may see it").to_owned()
}

/// Issue 4: "twenty parallel first requests of one new session across three gateways reach one deployment", and weights
/// still spread the sessions (S3.22).
#[tokio::test]
async fn parallel_firsts_of_a_session_reach_one_deployment() {
    let mut cluster = Cluster::start(&["a", "b", "c", "d"], "", PATIENT_MS).await;
    let upstreams = &cluster.fleet.upstreams;
    // None is answered before all have been sent, so that a claim is all that any of them can follow.
    let held = Step::new([Action::PauseAfter { events: 0 }]).standing();
    upstreams.iter().for_each(|upstream| upstream.push(held.clone()));
    let mut used = BTreeSet::new();
    for round in 0..50 {
        let session = format!("s-{round}");
        let clients: Vec<Client> = (0..20).map(|n| cluster.fleet.client(n % 3)).collect();
        let answers = join_all(clients.iter().map(|client| served(client, &session)));
        let release = async {
            upstreams.calls_until(|calls| calls.len() == 20 * (round + 1)).await;
            upstreams.iter().for_each(|upstream| upstream.release());
        };
        let reached: BTreeSet<String> = join(answers, release).await.0.into_iter().collect();
        assert_eq!(reached.len(), 1, "{session} is at {reached:?}");
        used.extend(reached);
    }
    assert_eq!(used.len(), 4);
    for n in 0..3 {
        assert_eq!((cluster.reads(n, "failed").await, cluster.reads(n, "skipped").await), (0, 0));
    }
    cluster.settled().await;
    cluster.fleet.stop_all().await;
    let selections = cluster.selections().await;
    let claims: Vec<&Selection> = selections.iter().filter(|selection| selection.claim).collect();
    assert_eq!(claims.len(), 50, "of twenty one claims");
    assert!(claims.iter().all(|claim| claim.reason == Reason::Draw), "gateways agree by the claim, not by a hash");
    assert!(selections.iter().all(|selection| redecide(selection) == Some(Redecision::Same)));
}

/// S3.19, S3.21: a session that one gateway led to a fallback is there for the others, with the way that it went, and
/// nobody calls what has failed.
#[tokio::test]
async fn a_fallback_of_one_gateway_is_reused_by_the_others() {
    let plan = Plan { route: "fallbacks: [spare]".to_owned(), ..fallbacks::under("expose_route: true") };
    let cluster = Cluster::of(plan, 3, PATIENT_MS).await;
    let calls = |name| cluster.fleet.upstreams.named(name).calls().len();
    for name in ["a", "b"] {
        cluster.fleet.upstreams.named(name).push(Step::new([Action::status(503)]).times(2));
    }
    assert_eq!(cluster.served(0, "s").await, "spare/spare");
    cluster.settled().await;
    for n in 0..3 {
        assert_eq!(cluster.served(n, "s").await, "spare/spare", "at gateway {n}");
    }
    assert_eq!(["a", "b", "spare"].map(calls), [2, 2, 4]);
}

/// S3.13, S3.22: a switch that one gateway made is followed by the others, also when the first deployment is well again.
#[tokio::test]
async fn a_failover_seen_by_one_gateway_is_followed_by_the_others() {
    let calm = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let cluster = Cluster::start(&["a", "b"], calm, PATIENT_MS).await;
    for session in ["s-1", "s-2", "s-3"] {
        let first = cluster.served(0, session).await;
        cluster.settled().await;
        assert_eq!(cluster.served(1, session).await, first);
        cluster.settled().await;
        let failing = first.split('/').next().expect("a deployment names its channel");
        cluster.fleet.upstreams.named(failing).push(Step::new([Action::status(503)]));
        let second = cluster.served(2, session).await;
        assert_ne!(second, first);
        // The one that made the switch follows it before it is projected, the others after.
        assert_eq!(cluster.served(2, session).await, second);
        cluster.settled().await;
        for n in 0..3 {
            assert_eq!(cluster.served(n, session).await, second, "{session} at gateway {n}");
        }
    }
}

/// S1.7: a member that cools takes no new session at any gateway, within a second of the failure.
#[tokio::test]
async fn a_cooldown_that_one_gateway_raised_holds_at_the_others() {
    let quick = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1, cooldown_seconds: 600 }\n";
    let cluster = Cluster::start(&["a", "b"], quick, PATIENT_MS).await;
    cluster.fleet.upstreams.named("a").push(Step::new([Action::status(503)]).standing());
    let mut n = 0;
    while cluster.fleet.upstreams.named("a").calls().is_empty() {
        cluster.served(0, &format!("first-{n}")).await;
        n += 1;
    }
    cluster.settled().await;
    // The followers look four times a second; a request that sees another version wakes its gateway's at once.
    let before = cluster.fleet.upstreams.named("a").calls().len();
    let known = async {
        let mut n = 0;
        loop {
            let calls = cluster.fleet.upstreams.named("a").calls().len();
            for gateway in 1..3 {
                for _ in 0..8 {
                    n += 1;
                    assert_eq!(cluster.served(gateway, &format!("then-{n}")).await, "b/gpt");
                }
            }
            if cluster.fleet.upstreams.named("a").calls().len() == calls {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, known).await.expect("the others hear of it");
    let met = cluster.fleet.upstreams.named("a").calls().len() - before;
    assert!(met <= 2, "each of the others meets it once at most, before it has heard: {met}");
}

/// Issue 4, S3.23: while Redis is frozen chats are served, within the deadline, then without it; one line per change; and
/// what was decided meanwhile overwrites no pin that the others share.
#[tokio::test]
async fn while_redis_is_frozen_chats_go_on_and_afterwards_the_shared_pins_win() {
    const DEADLINE_MS: u32 = 100;
    let mut cluster = Cluster::start(&["a", "b", "c"], "", DEADLINE_MS).await;
    let said = cluster.fleet.folder.path().join("said");
    cluster.fleet.stop(0).await;
    cluster.fleet.restart_talkative(0, File::create(&said).expect("a file can be made")).await;
    let mut pinned = Vec::new();
    for n in 0..12 {
        let session = format!("s-{n}");
        pinned.push((cluster.served(1, &session).await, session));
    }
    cluster.settled().await;

    cluster.redis.stop();
    let mut astray = 0;
    for (deployment, session) in &pinned {
        let begun = Instant::now();
        astray += usize::from(cluster.served(0, session).await != *deployment);
        // The simulator answers at once; the rest is a busy machine.
        assert!(begun.elapsed() < Duration::from_millis(u64::from(DEADLINE_MS)) + Duration::from_secs(2));
    }
    assert!(astray > 0, "gateway 0 has never seen these sessions: some of them it sends elsewhere");
    let failed = cluster.reads(0, "failed").await;
    assert!((1..=3).contains(&failed), "{failed} requests waited");
    assert_eq!(cluster.reads(0, "skipped").await, 12 - failed);
    let ready = cluster.fleet.ready_when(0, |ready| ready["detail"]["state"]["reachable"] == false).await;
    assert_eq!(ready["ready"], true);

    cluster.redis.cont();
    cluster.fleet.ready_when(0, |ready| ready["detail"]["state"]["reachable"] == true).await;
    cluster.settled().await;
    for n in [0, 1, 2, 0] {
        for (deployment, session) in &pinned {
            assert_eq!(cluster.served(n, session).await, *deployment, "{session} at gateway {n}");
        }
    }
    cluster.fleet.stop_all().await;
    let selections = cluster.selections().await;
    assert!(selections.iter().all(|selection| redecide(selection) == Some(Redecision::Same)));
    let by = |reason: Reason| selections.iter().filter(|selection| selection.reason == reason).count();
    assert_eq!((by(Reason::Rendezvous), by(Reason::Draw)), (12, 12));
    let said = std::fs::read_to_string(said).expect("the gateway has said something");
    let count = |line: &str| said.lines().filter(|said| said.contains(line)).count();
    assert_eq!((count("does not answer"), count("answers again")), (1, 1), "{said}");
}

/// S3.23: while Redis is away a gateway keeps what it has learnt by itself: a session that it has moved stays moved there,
/// also where a hash of its key alone would lead it back.
#[tokio::test]
async fn while_redis_is_away_a_gateway_follows_its_own_moves() {
    let calm = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let cluster = Cluster::start(&["a", "b"], calm, 100).await;
    cluster.redis.stop();
    for session in ["s-1", "s-2", "s-3", "s-4"] {
        let first = cluster.served(0, session).await;
        let failing = first.split('/').next().expect("a deployment names its channel");
        cluster.fleet.upstreams.named(failing).push(Step::new([Action::status(503)]));
        let second = cluster.served(0, session).await;
        assert_ne!(second, first);
        for _ in 0..3 {
            assert_eq!(cluster.served(0, session).await, second, "{session}");
        }
    }
    cluster.redis.cont();
}

/// DESIGN.md, section 8: Redis that lost all it held is filled from the log by itself, and gateways that had not seen a
/// session follow its pin as before.
#[tokio::test]
async fn a_redis_that_lost_everything_is_filled_again_and_pins_are_where_they_were() {
    let mut cluster = Cluster::start(&["a", "b", "c"], "", PATIENT_MS).await;
    let sessions: Vec<String> = (0..12).map(|n| format!("s-{n}")).collect();
    let mut pinned = Vec::new();
    for session in &sessions {
        pinned.push(cluster.served(1, session).await);
    }
    cluster.settled().await;
    let reachable = |is: bool| move |ready: &Value| ready["detail"]["state"]["reachable"] == is;
    let projector = Client::new(cluster.projector.addr, KEY);

    cluster.redis.kill();
    ready_when(&projector, |ready| ready["ready"] == false).await;
    for n in 0..3 {
        cluster.fleet.ready_when(n, reachable(false)).await;
        cluster.served(n, "meanwhile").await;
    }
    cluster.redis.restart();
    for n in 0..3 {
        cluster.fleet.ready_when(n, reachable(true)).await;
    }
    cluster.settled().await;
    for n in [0, 2, 1] {
        for (session, deployment) in sessions.iter().zip(&pinned) {
            assert_eq!(cluster.served(n, session).await, *deployment, "{session} at gateway {n}");
        }
    }
}

/// S3.8, S3.21: a request without affinity asks nobody.
#[tokio::test]
async fn a_request_without_affinity_reads_no_shared_state() {
    let cluster = Cluster::start(&["a"], "sticky: { enabled: false }\n", PATIENT_MS).await;
    cluster.served(0, "s").await;
    assert_eq!(cluster.reads(0, "answered").await, 0);
}
