//! SIGKILL at random moments under load, and what the log says of every call the upstreams have seen.
//!
//! Each request carries a session of its own, which stands in the upstreams' call logs and in the rows: so calls and
//! rows can be joined send by send. Conversations (another header) are shared, so that pins are made and followed.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use http::Method;
use serde_json::json;
use tokio::task::JoinSet;
use waybill_projections::usage::UsageAttempt;
use waybill_projections::word::Word;
use waybill_schema::event::Class;
use waybill_simulator::{Action, Call, Control, Settings, Simulator, Step, When};

use crate::client::{Client, read};
use crate::log::{Told, channel_of, told};
use crate::said::{DIALECTS, Ending, Said};
use crate::world::{Plan, World};

const NAMES: [&str; 3] = ["a", "b", "c"];
const KILLS: u64 = 20;
const WORKERS: usize = 16;
const CONVERSATIONS: u64 = 40;
/// At most this many calls end between a start and the kill that follows.
const CALLS_MAX: u64 = 60;
/// At most this many looks at the spool (some 10 µs each) pass between a start and a kill in the middle of it.
const LOOKS_MAX: u64 = 20_000;
/// Sets the seed of a run that is to be seen again.
const SEED: &str = "WAYBILL_SEED";

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// What workers share.
#[derive(Clone)]
struct Load {
    upstreams: Vec<Simulator>,
    n_requests: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

impl Load {
    fn begin(&self, client: &Client) -> JoinSet<Vec<String>> {
        self.ends.store(false, Ordering::SeqCst);
        (0..WORKERS).map(|_| self.clone().work(client.clone())).collect()
    }

    /// Lets every worker finish what it does, and gives the sessions whose clients got a complete answer.
    async fn end(&self, workers: JoinSet<Vec<String>>) -> Vec<String> {
        self.ends.store(true, Ordering::SeqCst);
        workers.join_all().await.concat()
    }

    /// Sends one request after the other until it is told to end or the gateway is gone.
    async fn work(self, client: Client) -> Vec<String> {
        let mut complete = Vec::new();
        while !self.ends.load(Ordering::SeqCst) {
            let n = self.n_requests.fetch_add(1, Ordering::SeqCst);
            let session = format!("request-{n}");
            self.script(n, &session);
            let (path, field) = DIALECTS[(n % 3) as usize];
            let body = json!({
                "model": "gpt", "max_tokens": 64, "stream": n.is_multiple_of(2),
                field: [{"role": "user", "content": "Hello"}],
            });
            let conversation = format!("conversation-{}", n % CONVERSATIONS);
            let headers = [("x-session-id", session.as_str()), ("conversation_id", conversation.as_str())];
            let opened = client.open(Method::POST, path, &headers, Bytes::from(body.to_string())).await;
            let Ok(response) = opened else { break };
            let answer = read(response).await;
            if Said::of(&answer).ending == Ending::Complete {
                complete.push(session);
            }
        }
        complete
    }

    /// Lets some requests fail: once, until another deployment serves them, or in the middle of their answer.
    fn script(&self, n: u64, session: &str) {
        let (times, does) = match n % 15 {
            3 => (1, Action::status(503)),
            7 => (2, Action::status(503)),
            11 => (1, Action::CutAfterEvents { events: 6 }),
            _ => return,
        };
        let when = When { session: Some(session.to_owned()), ..When::default() };
        for upstream in self.upstreams.iter() {
            upstream.push(Step::new([does.clone()]).when(when.clone()).times(times));
        }
    }
}

fn plan() -> Plan {
    let settings = "retry: { backoff_ms: 1, all_cooling: best_effort }\nsession: { aliases: known }\n\
                    health: { failure_threshold: 3, cooldown_seconds: 1, cooldown_seconds_max: 2 }\n";
    let mut plan = Plan::of(&NAMES).settings(settings);
    for name in &mut plan.upstreams {
        *name = Settings { first_token_delay_ms: 2, chunk_delay_ms: 1, ..name.clone() };
    }
    plan
}

/// How many calls have ended, whichever way.
fn ended(calls: &[Call]) -> u64 {
    calls.iter().filter(|call| call.end.is_some()).count() as u64
}

/// ARCHITECTURE.md, "What holds": every send is on record before it is made and has one end; the live routing state is
/// the fold of the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_kills_under_load_lose_no_call_count_none_twice_and_leave_the_state_a_fold_of_the_log() {
    let seed = std::env::var(SEED).map_or_else(
        |_| RandomState::new().build_hasher().finish(),
        |seed| seed.parse().expect("the seed is a number"),
    );
    println!("{SEED}={seed}");
    let mut dice = Dice(seed);
    let mut world = World::start(plan()).await;
    let load = Load {
        upstreams: world.upstreams.iter().map(|running| Simulator::clone(running)).collect(),
        n_requests: Arc::default(),
        ends: Arc::default(),
    };
    let mut complete = Vec::new();
    for kill in 1..=KILLS {
        if kill % 5 == 1 {
            complete.extend(rest(&world, &load, CALLS_MAX).await);
        }
        let workers = load.begin(&world.client());
        let enough = ended(&world.calls()) + 1 + dice.roll(CALLS_MAX);
        world.calls_until(|calls| ended(calls) >= enough).await;
        world.kill().await;
        complete.extend(load.end(workers).await);
        world.upstreams.iter().for_each(|u| u.apply(Control { clear_steps: true, ..Control::default() }));
        if kill % 4 == 2 {
            world.kill_while_it_starts(dice.roll(LOOKS_MAX)).await;
        }
        world.restart().await;
        at_rest(&world).await;
    }
    complete.extend(rest(&world, &load, CALLS_MAX).await);
    let digest = at_rest(&world).await;
    world.stop().await;
    let told = told(&world.data());
    assert_eq!(told.fold.state.digest(), digest, "seed {seed}");
    check(&told, &world, &complete);
    check_rows(&told, &world.database());
}

/// A time of load that ends without a kill: the state has then been made live, not read from the log.
async fn rest(world: &World, load: &Load, n_calls: u64) -> Vec<String> {
    let workers = load.begin(&world.client());
    let enough = ended(&world.calls()) + n_calls;
    world.calls_until(|calls| ended(calls) >= enough).await;
    let complete = load.end(workers).await;
    at_rest(world).await;
    complete
}

/// Compares the running gateway with a fresh fold of its log; gives the digest of both.
async fn at_rest(world: &World) -> String {
    let detail = world.settled().await;
    assert_eq!(detail["spool"]["lost"], 0);
    let told = told(&world.data());
    let digest = told.fold.state.digest();
    assert_eq!(world.live_digest().await, digest, "the live state is not the fold of its log");
    assert_eq!(told.fold.usage.n_open(), 0, "what was under way in a life that is over is abandoned");
    digest
}

/// Joins calls and rows send by send.
fn check(told: &Told, world: &World, complete: &[String]) {
    let calls = NAMES.map(|name| world.upstream(name).calls());
    let mut called: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (name, calls) in NAMES.into_iter().zip(&calls) {
        for call in calls {
            let session = call.header("x-session-id").expect("every request names one");
            *called.entry((session, name)).or_default() += 1;
        }
    }
    let mut rows: BTreeMap<(&str, &str), Vec<&UsageAttempt>> = BTreeMap::new();
    let by_session = told.attempts_by_session();
    for (session, attempts) in &by_session {
        let numbers: BTreeSet<u16> = attempts.iter().map(|attempt| attempt.attempt).collect();
        assert!(numbers.into_iter().eq(1..=attempts.len() as u16), "{session} has sends {attempts:?}");
        for attempt in attempts {
            rows.entry((*session, channel_of(attempt))).or_default().push(attempt);
        }
        let abandoned = attempts.iter().filter(|attempt| attempt.class == Class::Abandoned).count();
        assert!(abandoned <= 1, "{session} had one send in flight and {abandoned} abandoned");
    }
    let mut n_without_call = 0;
    let sends: BTreeSet<_> = called.keys().chain(rows.keys()).collect();
    for send in sends {
        let n_calls = called.get(send).copied().unwrap_or_default();
        let rows = rows.get(send).map_or(&[][..], Vec::as_slice);
        let n_ended = rows.iter().filter(|row| row.class != Class::Abandoned).count();
        assert!(n_ended <= n_calls && n_calls <= rows.len(), "{send:?}: {n_calls} calls, rows {rows:?}");
        n_without_call += rows.len() - n_calls;
    }
    let n_abandoned = told.n_attempts(Class::Abandoned);
    assert!(n_without_call <= n_abandoned && n_abandoned <= WORKERS * KILLS as usize);
    for session in complete {
        let succeeded = by_session[session.as_str()].iter().filter(|row| row.class == Class::Success).count();
        assert_eq!(succeeded, 1, "{session} was answered in full");
    }
    println!(
        "{} calls, {} rows, {n_abandoned} abandoned, {n_without_call} of them without a call; {} complete answers",
        calls.iter().map(Vec::len).sum::<usize>(),
        told.attempts().count(),
        complete.len()
    );
    assert!(n_abandoned > n_without_call, "no call was under way at any kill: this has tested little");
    assert!(told.n_attempts(Class::Upstream5xx) > 0 && told.n_attempts(Class::Interrupted) > 0);
}

/// The rows written beside the log over all those lives are those of one fold.
fn check_rows(told: &Told, database: &rusqlite::Connection) {
    let mut statement =
        database.prepare("SELECT request_id, attempt, member, class FROM usage_attempts").expect("a query");
    let stored = statement.query_map([], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, u16>(1)?, row.get::<_, String>(2)?, row.get::<_, String>(3)?))
    });
    let stored: BTreeSet<_> = stored.and_then(Iterator::collect).expect("the rows can be read");
    let folded = told
        .attempts()
        .map(|row| (row.request.to_string(), row.attempt, row.member.to_string(), Word(row.class).to_string()));
    assert_eq!(stored, folded.collect());
}
