//! Gateways of a fleet that are killed or stopped under load, and what the log says of every call afterwards.

use serde_json::{Value, json};
use waybill_schema::event::{Class, Event, Started};
use waybill_servers::nats::{Nats, Options};
use waybill_simulator::{Action, Step};

use crate::client::Client;
use crate::dice::Dice;
use crate::fleet::Fleet;
use crate::said::{DIALECTS, Ending, Said};
use crate::traffic::{self, Traffic, WORKERS, compare};
use crate::world::Plan;

const GATEWAYS: usize = 3;
const KILLS: usize = 8;
/// At most so many chats end between a start and the kill that follows.
const CHATS_MAX: u64 = 100;

impl Fleet {
    /// Clients of all gateways but `gone`.
    fn others(&self, gone: usize) -> Vec<Client> {
        (0..GATEWAYS).filter(|n| *n != gone).map(|n| self.client(n)).collect()
    }
}

/// Whether a gateway says of itself that all is well and the log has all that it has to say.
fn at_rest(ready: &Value) -> bool {
    let Value::Object(detail) = &ready["detail"] else { return false };
    ready["ready"] == true
        && (&detail["spool"]["records"], &detail["spool"]["lost"]) == (&json!(true), &json!(0))
        && (&detail["log"]["reachable"], &detail["log"]["lag_facts"]) == (&json!(true), &json!(0))
        && (&detail["catalogue"]["source"], &detail["catalogue"]["trouble"]) == (&json!("log"), &Value::Null)
}

/// Issue 3: "gateways killed under load: facts in the log equal the upstreams' calls, each once".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_killed_under_load_lose_no_call_and_count_none_twice() {
    let mut dice = Dice::of_this_run();
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(traffic::plan(2, 1), GATEWAYS, &[nats.url()]).await;
    let mut traffic = Traffic::over(&fleet.upstreams);
    traffic.lead_to(fleet.others(GATEWAYS));
    traffic.begin();
    for _ in 0..KILLS {
        traffic.more(1 + dice.roll(CHATS_MAX) as usize).await;
        let n = dice.roll(GATEWAYS as u64) as usize;
        fleet.kill(n).await;
        traffic.lead_to(fleet.others(n));
        fleet.restart(n).await;
        traffic.lead_to(fleet.others(GATEWAYS));
    }
    traffic.more(CHATS_MAX as usize).await;
    traffic.end().await;
    for n in 0..GATEWAYS {
        fleet.ready_when(n, at_rest).await;
    }
    fleet.stop_all().await;
    let told = fleet.told().await;
    let compared = compare(&told, &fleet.upstreams, &traffic.chats());
    assert!(compared.n_abandoned > compared.n_without_call, "no call was under way at any kill: {compared:?}");
    assert!(compared.n_abandoned <= WORKERS * KILLS && told.fold.usage.n_open() == 0, "seed {}", dice.seed);
    let epochs: u64 = told.fold.gate.summary().writers.values().map(|last| last.epoch).sum();
    assert_eq!(epochs, (GATEWAYS + KILLS) as u64, "each start is one epoch");
}

/// Issue 3, a rolling restart: no answer is cut, and each gateway leaves nothing in its spool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_restarted_one_after_the_other_under_load_finish_what_they_have_and_ship_it() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(traffic::plan(20, 5), GATEWAYS, &[nats.url()]).await;
    let mut traffic = Traffic::over(&fleet.upstreams);
    traffic.lead_to(fleet.others(GATEWAYS));
    traffic.begin();
    for n in 0..GATEWAYS {
        traffic.more(3 * WORKERS).await;
        traffic.lead_to(fleet.others(n));
        fleet.stop(n).await;
        fleet.restart(n).await;
        fleet.ready_when(n, |ready| ready["ready"] == true).await;
        traffic.lead_to(fleet.others(GATEWAYS));
    }
    traffic.end().await;
    fleet.stop_all().await;
    let told = fleet.told().await;
    let compared = compare(&told, &fleet.upstreams, &traffic.chats());
    assert_eq!((compared.n_abandoned, compared.n_cancelled, compared.n_calls), (0, 0, compared.n_sends));
    let known = told.attempts_by_session();
    for chat in traffic.chats().iter().filter(|chat| !chat.is_scripted && chat.ending != Ending::Complete) {
        // It met the door at the moment of its close, which HTTP/1.1 leaves to clients: nobody had read it.
        assert!(chat.ending == Ending::Broken && !known.contains_key(chat.session.as_str()), "{chat:?}");
    }
}

/// A stream that never ends is cut at the end of the drain, and that it was is in the log before the process ends.
#[tokio::test]
async fn a_gateway_cuts_a_stream_that_outlives_its_drain_and_ships_its_end() {
    let nats = Nats::start(&Options::default());
    let mut fleet = Fleet::start(Plan::of(&["a"]).settings("drain_seconds: 1\n"), 1, &[nats.url()]).await;
    fleet.upstreams[0].push(Step::new([Action::StallAfterEvents { events: 6 }]));
    let client = fleet.client(0);
    let (path, field) = DIALECTS[0];
    let body = json!({"model": "gpt", "stream": true, field: [{"role": "user", "content": "Hello"}]});
    let stream = async { client.post(path, &[], &body).await };
    let stop = async {
        fleet.upstreams.calls_until(|calls| calls.iter().any(|call| call.events == 6)).await;
        fleet.stop(0).await;
    };
    let (answer, ()) = tokio::join!(stream, stop);
    assert_eq!(Said::of(&answer).ending, Ending::Broken, "{}", answer.text());
    let told = fleet.told().await;
    assert_eq!((told.n_attempts(Class::Cancelled), told.fold.usage.n_open()), (1, 0));
    fleet.restart(0).await;
    fleet.stop(0).await;
    let after = fleet.told().await;
    let starts: Vec<&Started> = after.pick(|event| match event {
        Event::Started(started) => Some(started),
        _ => None,
    });
    assert_eq!(after.facts.len(), told.facts.len() + 1, "the spool held facts that the log had not");
    assert_eq!(starts.last().and_then(|start| start.previous), Some(told.fold.gate.summary().writers["gw-0"]));
}
