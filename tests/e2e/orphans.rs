//! Two processes under one name: what the log will not take from the older one comes home with the next start on its
//! folder, each fact once.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;
use waybill_projections::usage::UsageAttempt;
use waybill_schema::event::{Attempt, Class, Event};
use waybill_servers::nats::{Nats, Options};

use crate::fleet::Fleet;
use crate::log::{Told, told_after_losses};
use crate::processes::served;
use crate::traffic::{self, Chat, Traffic, WORKERS, compare};
use crate::world::Plan;

/// How soon a gateway has ended whose name was taken: it learns of it with its next fact, looks at that five times a
/// second, and gives open requests half a second. The rest is for a slow machine.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// A folder (gateway 0) whose last call the log does not have, because a process on another folder (gateway 1) has taken
/// its name since. Both processes have ended; three calls were made.
async fn overtaken() -> (Nats, Fleet) {
    let mut nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a"]), 1, &[nats.url()]).await;
    served(&fleet.client(0), "shipped").await;
    fleet.ready_when(0, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
    nats.kill();
    served(&fleet.client(0), "kept").await;
    fleet.kill(0).await;
    nats.restart();
    fleet.start_as(1, 0).await;
    served(&fleet.client(1), "overtakes").await;
    fleet.stop(1).await;
    assert_eq!(fleet.told().await.n_attempts(Class::Success), 2);
    (nats, fleet)
}

/// Issue 3: after any of these a gateway's facts in the log equal the upstreams' calls.
#[tokio::test]
async fn facts_that_a_successor_overtook_come_home_with_the_next_start_on_their_folder() {
    let (_nats, mut fleet) = overtaken().await;
    fleet.restart(0).await;
    served(&fleet.client(0), "home").await;
    fleet.stop(0).await;
    // Nothing is left to come.
    fleet.restart(0).await;
    fleet.stop(0).await;
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Success), told.attempts().count()), (4, 4));
    assert_eq!((fleet.upstreams.calls().len(), told.fold.usage.n_open()), (4, 0));
    assert_eq!(told.fold.gate.summary().writers["gw-0"].epoch, 4);
}

/// ADR 24: "A start without the log cannot look for orphans; its shipper does when the log answers, and ends as fenced".
#[tokio::test]
async fn a_start_without_the_log_ends_once_it_sees_that_it_was_overtaken_and_the_next_one_brings_all_home() {
    let (mut nats, mut fleet) = overtaken().await;
    nats.kill();
    fleet.restart(0).await;
    served(&fleet.client(0), "blind").await;
    nats.restart();
    assert!(!fleet.ended(0).await.success());
    fleet.restart(0).await;
    fleet.stop(0).await;
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Success), told.attempts().count()), (4, 4));
    assert_eq!((fleet.upstreams.calls().len(), told.fold.usage.n_open()), (4, 0));
}

/// Issue 3: a gateway that slept while another took its name "must stop serving", and what it had done is not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_wakes_up_under_a_name_that_was_taken_ends_and_its_calls_come_home() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(traffic::plan(40, 10), 2, &[nats.url()]).await;
    let mut traffic = Traffic::over(&fleet.upstreams);
    traffic.lead_to(vec![fleet.client(0)]);
    traffic.begin();
    traffic.more(2 * WORKERS).await;
    // Those that it has accepted wait with it; others go on.
    traffic.lead_to(vec![fleet.client(1)]);
    fleet.freeze(0).await;
    fleet.start_as(2, 0).await;
    traffic.lead_to(vec![fleet.client(1), fleet.client(2)]);
    traffic.begin();
    traffic.more(3 * WORKERS).await;
    fleet.thaw(0).await;
    let woke = Instant::now();
    assert!(!fleet.ended(0).await.success());
    let took = woke.elapsed();
    println!("it took {took:?} to end");
    assert!(took < ENDS_WITHIN, "{took:?}");

    traffic.more(WORKERS).await;
    traffic.lead_to(vec![fleet.client(1)]);
    fleet.stop(2).await;
    fleet.restart(0).await;
    traffic.lead_to(vec![fleet.client(0), fleet.client(1)]);
    traffic.more(3 * WORKERS).await;
    traffic.end().await;
    fleet.stop_all().await;
    // The fold counts what it hears of a request that it had given up.
    let told = fleet.look(|log| told_after_losses(log)).await;
    assert_eq!(told.fold.usage.n_open(), 0);
    let late = late_ends(&told);
    println!("{} sends ended after their writer's name was taken", late.len());
    let chats: Vec<Chat> = traffic.chats().into_iter().filter(|chat| !late.contains(&chat.session)).collect();
    let compared = compare(&told, &fleet.upstreams, &chats);
    assert_eq!((compared.n_abandoned, compared.n_calls), (late.len(), compared.n_sends));
}

/// The sessions of sends whose end came home when their row had been written as abandoned (ADR 24): each of those ends is
/// in the log once, and nothing else of them is missing.
fn late_ends(told: &Told) -> BTreeSet<String> {
    let ends: Vec<&Attempt> = told.pick(|event| match event {
        Event::Attempt(attempt) => Some(&**attempt),
        _ => None,
    });
    let ends: BTreeSet<(&str, u16)> = ends.iter().map(|end| (end.request.as_str(), end.attempt)).collect();
    let is_late =
        |row: &&UsageAttempt| row.class == Class::Abandoned && ends.contains(&(row.request.as_str(), row.attempt));
    let late = told.attempts_by_session().into_iter().filter(|(_, rows)| rows.iter().any(is_late));
    late.map(|(session, _)| session.to_owned()).collect()
}
