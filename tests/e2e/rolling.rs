//! All gateways and projectors of a cluster restarted, one after the other, under traffic: nobody notices.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use waybill_simulator::{Action, Step, When};

use crate::client::{Client, read};
use crate::cluster::{Cluster, GATEWAYS};
use crate::process::Process;
use crate::said::{DIALECTS, Ending, Said};
use crate::traffic::{self, Chat, SESSION, Traffic};
use crate::world::{PATIENCE, Plan};

/// Streams that are open when a gateway is asked to end.
const STREAMS: usize = 9;
/// Events that a long stream has had when it falls silent.
const EVENTS: u32 = 6;
/// How long those go on, for each of the gateways.
const HELD: [Duration; GATEWAYS] = [Duration::from_secs(28), Duration::from_secs(8), Duration::ZERO];
/// A gateway says for a while that it ends, and then waits longer for streams than any of them lasts.
const STOP: &str = "notice_seconds: 3\ndrain_seconds: 45\n";
const DEADLINE_MS: u32 = 100;

/// Opens long streams, each in a session of its own, and waits until all of them are in their middle.
async fn open(cluster: &Cluster, round: usize) -> JoinSet<Chat> {
    let mut streams = JoinSet::new();
    for n in 0..STREAMS {
        let session = format!("long-{round}-{n}");
        let when = When { session: Some(session.clone()), ..When::default() };
        for upstream in cluster.fleet.upstreams.iter() {
            upstream.push(Step::new([Action::PauseAfter { events: EVENTS }]).when(when.clone()).standing());
        }
        streams.spawn(stream(cluster.client(), session, DIALECTS[n % DIALECTS.len()]));
    }
    let is_open = |session: &str, round: &str| session.starts_with(round);
    let round = format!("long-{round}-");
    let all = |calls: &[waybill_simulator::Call]| {
        let ours = calls.iter().filter(|call| call.header(SESSION).is_some_and(|session| is_open(session, &round)));
        ours.filter(|call| call.events == EVENTS).count() == STREAMS
    };
    cluster.fleet.upstreams.calls_until(all).await;
    streams
}

async fn stream(client: Client, session: String, (path, field): (&str, &str)) -> Chat {
    let body = json!({
        "model": "gpt", "max_tokens": 64, "stream": true, field: [{"role": "user", "content": "Hello"}],
    });
    let (headers, began) = ([(SESSION, session.as_str())], Instant::now());
    let opened = client.open(Method::POST, path, &headers, body.to_string().into()).await;
    let ending = Said::of(&read(opened.expect("a gateway answers")).await).ending;
    Chat { session, is_scripted: false, ending, took: began.elapsed() }
}

/// Issue 4: "Rolling restart of all gateways and projectors under load (streams up to 30 s): no failed request, no lost
/// fact".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_and_projectors_restarted_one_after_the_other_fail_no_request_and_lose_no_fact() {
    let mut plan: Plan = traffic::plan(80, 20);
    plan.settings.push_str(STOP);
    let mut cluster = Cluster::start(plan, DEADLINE_MS).await;
    let mut traffic = Traffic::over(&cluster.fleet.upstreams);
    traffic.lead_to(vec![cluster.client()]);
    traffic.begin();
    let mut long = Vec::new();
    for (n, held) in HELD.into_iter().enumerate() {
        let streams = open(&cluster, n).await;
        cluster.fleet.gateway(n).signal("TERM").await;
        traffic.lasts(held).await;
        cluster.fleet.upstreams.iter().for_each(|upstream| upstream.release());
        long.extend(timeout(PATIENCE, streams.join_all()).await.expect("long streams end"));
        let ended = cluster.fleet.ended(n).await;
        assert!(ended.success(), "gateway {n} ended with {ended}");
        cluster.fleet.restart(n).await;
        serves(&cluster, n).await;
    }
    for _ in 0..cluster.projectors.len() {
        let mut projector = cluster.projectors.remove(0);
        projector.signal("TERM").await;
        assert!(projector.ended().await.success());
        let next: Process = cluster.projector().await;
        cluster.projectors.push(next);
        cluster.writer().await;
    }
    traffic.end().await;
    long.iter().for_each(|chat| assert_eq!(chat.ending, Ending::Complete, "{}", chat.session));
    let longest = long.iter().map(|chat| chat.took).max().unwrap_or_default();
    assert!(longest >= HELD[0], "a stream lasted {longest:?}");
    cluster.check(&[traffic.chats(), long].concat()).await;
}

/// Waits until HAProxy sends requests to gateway `n` again.
async fn serves(cluster: &Cluster, n: usize) {
    let client = cluster.fleet.client(n);
    let served = async { while !client.get("/metrics", &[]).await.text().contains("waybill_requests_total{") {} };
    timeout(PATIENCE, served).await.expect("the balancer sees the gateway again");
}
