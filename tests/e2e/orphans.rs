//! Two processes under one name: what the log will not take from the older one comes home with the next start on its
//! folder, each fact once.

use waybill_schema::event::Class;
use waybill_servers::nats::{Nats, Options};

use crate::fleet::Fleet;
use crate::processes::served;
use crate::world::Plan;

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
