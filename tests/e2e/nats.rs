//! The log on real NATS servers under mixed traffic: left alone, and with all that may happen to a server.
//!
//! Each run ends with the same comparison: the facts in the log are the upstreams' calls, once each, in chains that
//! verify. And each outage is compared with the calm around it: nobody waits for NATS.

use std::fs::File;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::{self, stream};
use serde_json::Value;
use tokio::time::timeout;
use waybill_servers::nats::{Nats, NatsCluster, Options};

use crate::fleet::{Fleet, STREAM};
use crate::said::Ending;
use crate::traffic::{self, Chat, Traffic};
use crate::way::Way;
use crate::world::PATIENCE;

const GATEWAYS: usize = 3;
/// An upstream takes 80 or 160 ms for an answer, whole or streamed: so many chats are half a minute of traffic.
const FIRST_TOKEN_MS: u64 = 80;
const CHUNK_MS: u64 = 20;
const CHATS: usize = 4_000;
/// Chats before and after a fault, and while nothing else is waited for in it.
const SOME: usize = 200;
/// Chats between two looks at what gateways say of their log.
const BETWEEN_LOOKS: usize = 2;
/// No chat takes longer in an outage than this, or so many times the longest in the calm around it.
const LONGEST: Duration = Duration::from_secs(1);
const LONGEST_TIMES: u32 = 4;
/// Nor does half of the chats take longer than so many times what half took in the calm: noise of the machine does not reach
/// this, and a wait for an acknowledgement would.
const MEDIAN_TIMES: u32 = 3;

/// Three gateways under traffic.
struct Stage {
    fleet: Fleet,
    traffic: Traffic,
}

impl Stage {
    async fn start(servers: &[String], replicas: u32) -> Self {
        let plan = traffic::plan(FIRST_TOKEN_MS, CHUNK_MS);
        let fleet = Fleet::start_replicated(plan, GATEWAYS, servers, replicas).await;
        let mut traffic = Traffic::over(&fleet.upstreams);
        traffic.lead_to((0..GATEWAYS).map(|n| fleet.client(n)).collect());
        traffic.begin();
        Self { fleet, traffic }
    }

    /// Waits, under traffic, until `holds` has been true of what each gateway says of its log.
    async fn each(&self, holds: impl Fn(&Value) -> bool) {
        let held = async {
            for n in 0..GATEWAYS {
                while !holds(&self.fleet.ready_when(n, |_| true).await["detail"]["log"]) {
                    self.traffic.more(BETWEEN_LOOKS).await;
                }
            }
        };
        timeout(PATIENCE, held).await.expect("the gateways come to say so");
    }

    /// Lets `fault` happen in the middle of the traffic, and compares: nobody waits in it, and nothing is lost of it.
    async fn endure(self, fault: impl AsyncFnOnce(&Self)) {
        let before = self.traffic.more(SOME).await;
        let n_before = self.traffic.chats().len();
        fault(&self).await;
        let during = self.traffic.chats().split_off(n_before);
        let after = self.traffic.more(SOME).await;
        assert_no_wait([before, after].concat(), during);
        self.conclude().await;
    }

    /// Ends traffic and gateways and compares: facts = calls, once each, and nothing is wrong with the log.
    async fn conclude(mut self) {
        self.traffic.end().await;
        for n in 0..GATEWAYS {
            let ready = self.fleet.ready_when(n, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
            assert_eq!(ready["detail"]["spool"]["lost"], 0, "{ready}");
        }
        self.fleet.stop_all().await;
        let chats = self.traffic.chats();
        for chat in chats.iter().filter(|chat| !chat.is_scripted) {
            assert_eq!(chat.ending, Ending::Complete, "{}", chat.session);
        }
        let compared = traffic::compare(&self.fleet.told().await, &self.fleet.upstreams, &chats);
        let verified = self.fleet.verified().await;
        assert_eq!((verified.findings.as_slice(), verified.duplicates), (&[][..], 0));
        assert_eq!((compared.n_abandoned, compared.n_calls), (0, compared.n_sends));
    }
}

/// Lets `fault` happen to a server, with `options`, in the middle of traffic.
async fn under(options: &Options, fault: impl AsyncFnOnce(&mut Nats, &Stage)) {
    let mut nats = Nats::start(options);
    let stage = Stage::start(&[nats.url()], 1).await;
    stage.endure(async |stage| fault(&mut nats, stage).await).await;
}

/// Compares an outage with the calm around it, which has the same noise of the machine.
fn assert_no_wait(calm: Vec<Chat>, during: Vec<Chat>) {
    let sorted = |chats: Vec<Chat>| {
        let mut took: Vec<Duration> = chats.iter().map(|chat| chat.took).collect();
        took.sort();
        (took[took.len() / 2], took[took.len() - 1])
    };
    let n_during = during.len();
    let ((median_calm, longest_calm), (median, longest)) = (sorted(calm), sorted(during));
    println!("{median_calm:?} and {longest_calm:?} at most; in {n_during} of the outage {median:?} and {longest:?}");
    assert!(median <= median_calm * MEDIAN_TIMES && longest <= LONGEST.max(longest_calm * LONGEST_TIMES));
}

/// Whether a gateway says that it is cut off from the log.
fn is_cut_off(log: &Value) -> bool {
    log["reachable"] == false
}

/// Whether the oldest fact has waited for the log for so many seconds.
fn has_waited(seconds: u64) -> impl Fn(&Value) -> bool {
    move |log| log["lag_seconds"].as_u64() >= Some(seconds)
}

/// Whether the log has refused the last try, saying `what`.
fn refuses(what: &str) -> impl Fn(&Value) -> bool {
    move |log| log["health"].as_str().is_some_and(|health| health.contains(what))
}

/// Changes the stream as an operator would.
async fn reshape(nats: &Nats, change: impl FnOnce(&mut stream::Config, &stream::State)) {
    let jetstream = jetstream::new(async_nats::connect(nats.url()).await.expect("the server is there"));
    let info = jetstream.get_stream(STREAM).await.expect("the stream is there").cached_info().clone();
    let mut config = info.config;
    change(&mut config, &info.state);
    jetstream.update_stream(config).await.expect("the server takes the change");
}

/// Sends more than a stream takes in, and nothing that it would keep, for as long as it is polled.
async fn crowd(nats: &Nats) {
    const AT_ONCE: usize = 2_000;
    let crowd = async_nats::connect(nats.url()).await.expect("the server is there");
    let mut never = HeaderMap::new();
    never.insert("Nats-Expected-Last-Subject-Sequence", "1");
    loop {
        for _ in 0..AT_ONCE {
            let sent = crowd.publish_with_headers("wb.v1.crowd", never.clone(), "x".into()).await;
            sent.expect("the server is there");
        }
        crowd.flush().await.expect("the server is there");
    }
}

/// Cuts off the later half of what a dead server has stored of the stream.
fn cut_tail(nats: &Nats) {
    let folder = nats.store_dir().join("jetstream/$G/streams").join(STREAM).join("msgs");
    let files = std::fs::read_dir(folder).expect("the stream has a folder").map(|file| file.expect("a file").path());
    let number = |path: &std::path::PathBuf| path.file_stem()?.to_str()?.parse::<u64>().ok();
    let blocks = files.filter(|path| path.extension().is_some_and(|extension| extension == "blk"));
    let last = File::options().write(true).open(blocks.max_by_key(number).expect("a block")).expect("a file");
    let length = last.metadata().expect("a file").len();
    last.set_len(length / 2).expect("a file can be cut");
}

/// Issue 3: "Three gateways on one real nats-server […] 30 s of mixed traffic in three dialects: the facts in the stream
/// equal the scripted upstream's call log; per-writer chains verify".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_minute_of_traffic_over_three_gateways_is_in_the_log_as_the_upstreams_saw_it() {
    let nats = Nats::start(&Options::default());
    let stage = Stage::start(&[nats.url()], 1).await;
    stage.traffic.more(CHATS).await;
    stage.conclude().await;
}

/// Issue 3: "then on three (R3)"; and one of the three is killed in the middle and comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_minute_of_traffic_on_three_servers_is_in_the_log_though_one_of_them_is_killed() {
    let mut cluster = NatsCluster::start(3);
    let stage = Stage::start(&cluster.urls(), 3).await;
    let before = stage.traffic.more(CHATS / 3).await;
    cluster.server(1).kill();
    let during = stage.traffic.more(CHATS / 3).await;
    cluster.server(1).restart();
    let after = stage.traffic.more(CHATS / 3).await;
    assert_no_wait([before, after].concat(), during);
    stage.conclude().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_and_started_again_loses_nothing_and_delays_nobody() {
    under(&Options::default(), async |nats, stage| {
        for _ in 0..3 {
            nats.kill();
            stage.each(is_cut_off).await;
            stage.traffic.more(SOME).await;
            nats.restart();
            stage.each(|log| !is_cut_off(log)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_frozen_for_fifteen_seconds_loses_nothing_and_delays_nobody() {
    under(&Options::default(), async |nats, stage| {
        nats.stop();
        stage.each(has_waited(15)).await;
        nats.cont();
        stage.each(|log| !is_cut_off(log)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_away_longer_than_its_duplicate_window_stores_nothing_twice() {
    const WINDOW: Duration = Duration::from_secs(1);
    let mut nats = Nats::start(&Options::default());
    let way = Way::to(&nats.url()).await;
    let stage = Stage::start(&[way.url()], 1).await;
    reshape(&nats, |config, _| config.duplicate_window = WINDOW).await;
    let lost_answers = async |stage: &Stage| {
        // What every gateway sends now is stored, and it learns of that after the window alone.
        way.lose_answers();
        stage.each(has_waited(WINDOW.as_secs())).await;
        nats.kill();
        stage.each(has_waited(4 * WINDOW.as_secs())).await;
        nats.restart();
        way.lose_nothing();
        stage.each(|log| !is_cut_off(log)).await;
    };
    stage.endure(lost_answers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_server_lost_of_its_end_is_sent_again() {
    under(&Options::default(), async |nats, stage| {
        nats.kill();
        cut_tail(nats);
        stage.each(is_cut_off).await;
        stage.traffic.more(SOME).await;
        nats.restart();
        stage.each(|log| log["resent"].as_u64() >= Some(1)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_stream_delays_nobody_and_gets_every_fact_when_there_is_room() {
    const LEFT: i64 = 64 << 10;
    under(&Options::default(), async |nats, stage| {
        reshape(nats, |config, state| config.max_bytes = state.bytes as i64 + LEFT).await;
        stage.each(refuses("maximum bytes exceeded")).await;
        stage.traffic.more(SOME).await;
        reshape(nats, |config, _| config.max_bytes = -1).await;
        stage.each(|log| !is_cut_off(log)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_says_too_many_requests_delays_nobody_and_gets_every_fact_later() {
    let small = Options { jetstream: "max_buffered_msgs: 2\nsync_interval: always", ..Options::default() };
    under(&small, async |nats, stage| {
        let crowded = async {
            stage.each(refuses("too many requests")).await;
            stage.traffic.more(SOME).await;
        };
        tokio::select! {
            () = crowd(nats) => {}
            () = crowded => {}
        }
        stage.each(|log| !is_cut_off(log)).await;
    })
    .await;
}
