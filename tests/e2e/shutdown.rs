//! The end of a life: asked to stop while streams run, or killed before the log has what the spool has.

use serde_json::{Value, json};
use tokio::task::JoinSet;
use waybill_schema::event::{Class, Epoch, Event, Outcome, Request, Started};
use waybill_simulator::{Action, Step};

use crate::client::Answer;
use crate::log::{Told, told};
use crate::said::{DIALECTS, Ending, Said};
use crate::world::{PATIENCE, Plan, World};

const STREAMS: usize = 12;

fn body(dialect: usize, stream: bool) -> (&'static str, Value) {
    let (path, field) = DIALECTS[dialect % DIALECTS.len()];
    let body = json!({
        "model": "gpt", "max_tokens": 64, "stream": stream,
        field: [{"role": "user", "content": "Hello"}],
    });
    (path, body)
}

fn ends(told: &Told) -> Vec<&Request> {
    told.pick(|event| match event {
        Event::Request(request) => Some(&**request),
        _ => None,
    })
}

fn starts(told: &Told) -> Vec<&Started> {
    told.pick(|event| match event {
        Event::Started(started) => Some(started),
        _ => None,
    })
}

/// A connection on which the gateway would read a request is a door that is still open.
async fn door_closes(world: &World) {
    let addr = world.addr();
    let closed = async { while tokio::net::TcpStream::connect(addr).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, closed).await.expect("the door closes");
}

/// DESIGN.md, section 10: a stop lets open streams end, and leaves nothing in the spool that the log has not.
#[tokio::test]
async fn a_gateway_that_is_asked_to_stop_finishes_its_streams_and_ships_every_fact() {
    let mut world = World::start(Plan::of(&["a", "b", "c"])).await;
    for upstream in world.upstreams.iter() {
        upstream.push(Step::new([Action::PauseAfter { events: 6 }]).standing());
    }
    let client = world.client();
    let streams: JoinSet<Answer> = (0..STREAMS)
        .map(|n| {
            let client = client.clone();
            async move {
                let (path, body) = body(n, n % 4 != 3);
                client.post(path, &[("x-session-id", &format!("s-{n}"))], &body).await
            }
        })
        .collect();
    world.calls_until(|calls| calls.len() == STREAMS && calls.iter().all(|call| call.status.is_some())).await;
    world.ask_to_stop().await;
    door_closes(&world).await;
    world.upstreams.iter().for_each(|upstream| upstream.release());
    for answer in tokio::time::timeout(PATIENCE, streams.join_all()).await.expect("every stream ends") {
        assert_eq!(Said::of(&answer).ending, Ending::Complete, "{}", answer.text());
    }
    world.stopped().await;

    let before = told(&world.data());
    assert_eq!((before.n_attempts(Class::Success), before.attempts().count()), (STREAMS, STREAMS));
    assert!(ends(&before).iter().all(|request| request.outcome == Outcome::Success));
    assert_eq!((ends(&before).len(), before.fold.usage.n_open()), (STREAMS, 0));
    world.restart().await;
    let digest = world.digest().await;
    let after = told(&world.data());
    assert_eq!(after.facts.len(), before.facts.len() + 1, "the spool held facts that the log had not");
    let last = before.fold.gate.summary().writers["local"];
    assert_eq!(starts(&after).last().and_then(|started| started.previous), Some(last));
    assert_eq!(digest, before.fold.state.digest());
}

/// A stream that never ends is cut, and that it was is in the log before the process ends.
#[tokio::test]
async fn a_stream_that_outlives_the_drain_is_cut_and_its_end_is_in_the_log() {
    let mut world = World::start(Plan::of(&["a"]).settings("drain_seconds: 1\n")).await;
    world.upstreams[0].push(Step::new([Action::StallAfterEvents { events: 6 }]));
    let (path, body) = body(0, true);
    let client = world.client();
    let stream = async { client.post(path, &[], &body).await };
    let stop = async {
        world.calls_until(|calls| calls.iter().any(|call| call.events == 6)).await;
        world.ask_to_stop().await;
    };
    let (answer, ()) = tokio::join!(stream, stop);
    assert_eq!(Said::of(&answer).ending, Ending::Broken, "{}", answer.text());
    world.stopped().await;
    let told = told(&world.data());
    assert_eq!((told.n_attempts(Class::Cancelled), told.fold.usage.n_open()), (1, 0));
}

/// DESIGN.md, section 5: what an answer's end has promised is in the spool, and the next life brings it to the log.
#[tokio::test]
async fn facts_that_the_log_had_not_taken_when_the_gateway_was_killed_come_with_the_next_start() {
    let mut world = World::start(Plan::of(&["a", "b"])).await;
    world.settled().await;
    let head = told(&world.data()).head;
    let holder = world.holds_the_log();
    let mut answered = Vec::new();
    for n in 0..2 * DIALECTS.len() {
        let (path, body) = body(n, n.is_multiple_of(2));
        let answer = world.client().post(path, &[("x-session-id", "s")], &body).await;
        assert_eq!(Said::of(&answer).ending, Ending::Complete, "{}", answer.text());
        answered.push(answer.header("x-waybill-request-id").expect("every answer names its request").to_owned());
    }
    let detail = world.client().get("/readyz", &[]).await.json()["detail"].take();
    assert_ne!(detail["log"]["lag_facts"], 0);
    let live = world.live_digest().await;
    world.kill().await;
    assert_eq!(told(&world.data()).head, head, "the log was held and has nothing of this");
    drop(holder);

    world.restart().await;
    let digest = world.digest().await;
    let told = told(&world.data());
    let ended: Vec<&str> = ends(&told).iter().map(|request| request.request.as_str()).collect();
    assert_eq!(ended, answered);
    assert_eq!((told.n_attempts(Class::Success), told.attempts().count()), (answered.len(), answered.len()));
    // One `started`, and four facts of each request: selection, attempt, preference, request. Of the two responses one
    // came whole and was owned at once, the other was owned when its id was seen and at its end.
    let last = Epoch { epoch: 1, last: 1 + 4 * answered.len() as u64 + 3 };
    assert_eq!(starts(&told).last().and_then(|started| started.previous), Some(last));
    assert_eq!(digest, told.fold.state.digest(), "the new life stands where the old one stood");
    assert_eq!(digest, live);
}
