//! Control over HTTP, stopping, death and revival.

use std::io::ErrorKind;

use serde_json::{Value, json};
use tokio::net::TcpStream;
use waybill_simulator::{Action, End, Settings, Simulator};

use crate::client::{Exchange, Last, get, post};

const PATH: &str = "/v1/chat/completions";

fn stream() -> Value {
    json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "Say hi"}]})
}

#[tokio::test]
async fn a_script_can_be_sent_and_the_log_read_over_http() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    let script = json!({"steps": [{"when": {"session": "s"}, "does": [{"status": {"status": 503, "headers": {"retry-after": "1"}}}]}]});
    assert_eq!(post(&sim, "/__control", "", &script).await.status, 200);
    assert_eq!(post(&sim, PATH, "", &stream()).await.status, 200);
    assert_eq!(post(&sim, PATH, "x-session-id: s\r\n", &stream()).await.status, 503);
    let calls = get(&sim, "/__calls?after=1", "").await.json();
    assert_eq!(calls.as_array().map(Vec::len), Some(1), "control is no call");
    assert_eq!(
        (&calls[0]["number"], &calls[0]["status"], &calls[0]["end"]),
        (&json!(2), &json!(503), &json!("finished"))
    );
    assert_eq!(calls[0]["body"], stream().to_string());
    assert_eq!(post(&sim, "/__control", "", &json!({"step": []})).await.status, 400);
    post(&sim, "/__control", "", &json!({"clear_calls": true})).await;
    assert!(sim.calls().is_empty());
}

#[tokio::test]
async fn a_killed_simulator_resets_its_streams_and_revives_on_its_port() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    sim.push(Action::StallAfterEvents { events: 2 });
    let mut exchange = Exchange::send(&sim, &format!("POST {PATH}"), "", &stream().to_string()).await;
    exchange.read_until("[sim]").await;
    sim.die().await.expect("the port stays ours");
    let (received, last) = exchange.finish().await;
    assert_eq!((last, received.map(|received| received.whole)), (Last::Reset, Some(false)));
    assert_eq!(sim.calls()[0].end, Some(End::Killed));
    let refused = TcpStream::connect(sim.addr).await.map_err(|error| error.kind());
    assert_eq!(refused.err(), Some(ErrorKind::ConnectionRefused));
    sim.revive().await.expect("the port is ours");
    assert_eq!(post(&sim, PATH, "", &stream()).await.status, 200);
    assert_eq!(sim.calls().len(), 2);
}

#[tokio::test]
async fn stopping_lets_the_answer_under_way_end() {
    let sim = Simulator::start(Settings::default()).await.expect("a port");
    sim.push(Action::PauseAfter { events: 1 });
    let mut exchange = Exchange::send(&sim, &format!("POST {PATH}"), "", &stream().to_string()).await;
    exchange.read_until("assistant").await;
    let rest = async {
        sim.release();
        exchange.finish().await.0.expect("a head")
    };
    let ((), received) = tokio::join!(sim.stop(), rest);
    assert_eq!(received.data().last().map(String::as_str), Some("[DONE]"));
    assert!(TcpStream::connect(sim.addr).await.is_err());
    sim.revive().await.expect("nobody has taken the port");
    assert_eq!(post(&sim, PATH, "", &stream()).await.status, 200);
}
