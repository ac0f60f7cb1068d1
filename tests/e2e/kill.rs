//! SIGKILL at random moments under load, and what the log says of every call the upstreams have seen.

use waybill_projector::embedded;
use waybill_simulator::Call;

use crate::dice::Dice;
use crate::log::{Told, told};
use crate::traffic::{self, Traffic, WORKERS};
use crate::world::World;

const KILLS: u64 = 20;
/// At most this many calls end between a start and the kill that follows.
const CALLS_MAX: u64 = 60;
/// At most this many looks at the spool (some 10 µs each) pass between a start and a kill in the middle of it.
const LOOKS_MAX: u64 = 20_000;

/// How many calls have ended, whichever way.
fn ended(calls: &[Call]) -> u64 {
    calls.iter().filter(|call| call.end.is_some()).count() as u64
}

/// ARCHITECTURE.md, "What holds": every send is on record before it is made and has one end; the live routing state is
/// the fold of the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_kills_under_load_lose_no_call_count_none_twice_and_leave_the_state_a_fold_of_the_log() {
    let mut dice = Dice::of_this_run();
    let mut world = World::start(traffic::plan(2, 1)).await;
    let mut traffic = Traffic::over(&world.upstreams);
    for kill in 1..=KILLS {
        if kill % 5 == 1 {
            rest(&world, &mut traffic, CALLS_MAX).await;
        }
        begin(&world, &mut traffic);
        let enough = ended(&world.calls()) + 1 + dice.roll(CALLS_MAX);
        world.calls_until(|calls| ended(calls) >= enough).await;
        world.kill().await;
        traffic.end().await;
        if kill % 4 == 2 {
            world.kill_while_it_starts(dice.roll(LOOKS_MAX)).await;
        }
        world.restart().await;
        at_rest(&world).await;
    }
    rest(&world, &mut traffic, CALLS_MAX).await;
    let digest = at_rest(&world).await;
    world.stop().await;
    let told = told(&world.data());
    assert_eq!(told.fold.state.digest(), digest, "seed {}", dice.seed);
    check(&told, &world, &traffic);
    check_rows(&world);
}

fn begin(world: &World, traffic: &mut Traffic) {
    traffic.lead_to(vec![world.client()]);
    traffic.begin();
}

/// A time of load that ends without a kill: the state has then been made live, not read from the log.
async fn rest(world: &World, traffic: &mut Traffic, n_calls: u64) {
    begin(world, traffic);
    let enough = ended(&world.calls()) + n_calls;
    world.calls_until(|calls| ended(calls) >= enough).await;
    traffic.end().await;
    at_rest(world).await;
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

fn check(told: &Told, world: &World, traffic: &Traffic) {
    let compared = traffic::compare(told, &world.upstreams, &traffic.chats());
    assert!(compared.n_abandoned <= WORKERS * KILLS as usize);
    let under_way = compared.n_abandoned - compared.n_without_call;
    assert!(under_way > 0, "no call was under way at any kill: this has tested little");
}

/// The rows written beside the log over all those lives, in every column, are those of one fold of its lines.
fn check_rows(world: &World) {
    let verified = embedded::verify(&world.data().join("waybill.db")).expect("the file can be read");
    assert_eq!((verified.incomparable, verified.findings.named), (None, Vec::new()));
    assert_eq!(world.table("SELECT max(seq) FROM frames"), [verified.seq.to_string()], "they cover the whole log");
}
