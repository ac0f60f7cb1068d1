//! Clients that are slow, stuck or packed: what they send is bounded, and what they do not take is not held for ever.

use bytes::Bytes;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use waybill_simulator::{Action, End, Step};

use crate::dialect::{CHAT, DIALECTS};
use crate::world::{KEY, PATIENCE, Plan, World};

/// CLIENTS.md: Codex packs its bodies with zstd. The upstream gets what was meant, byte for byte; what is no zstd, too
/// large when unpacked, or packed otherwise is refused, and nobody is called for it.
#[tokio::test]
async fn a_packed_body_reaches_the_upstream_plain() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    for dialect in DIALECTS {
        let plain = dialect.body("Hello, hello, hello", false).to_string();
        let packed = zstd::bulk::compress(plain.as_bytes(), 3).expect("text can be packed");
        let answer = client.post_bytes(dialect.path, &[("content-encoding", "zstd")], packed.into()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let call = world.upstreams[0].calls().pop().expect("the upstream was called");
        assert_eq!((&call.body[..], call.header("content-encoding")), (plain.as_bytes(), None));
    }
    let huge = vec![b' '; (64 << 20) + 1];
    let bomb = zstd::bulk::compress(&huge, 3).expect("spaces can be packed");
    let cut = &bomb[..bomb.len() / 2];
    let refused: [(&str, &[u8], u16, &str); 5] = [
        ("zstd", b"{}", 400, "invalid_body"),
        ("zstd", cut, 400, "invalid_body"),
        ("zstd", &bomb, 413, "request_too_large"),
        ("gzip", b"{}", 415, "unsupported_content_encoding"),
        ("zstd, gzip", b"{}", 415, "unsupported_content_encoding"),
    ];
    for (coding, body, status, code) in refused {
        let headers = [("content-encoding", coding)];
        let answer = client.post_bytes(CHAT.path, &headers, Bytes::copy_from_slice(body)).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (status, &Value::from(code)), "{coding}");
    }
    assert_eq!(world.upstreams[0].calls().len(), 3);
}

/// G05: a body that comes in chunks, whatever length its head names beside them, reaches every upstream whole and framed
/// once, under the name that each knows the model by.
#[tokio::test]
async fn a_body_in_chunks_reaches_every_upstream_framed_once() {
    let names = ["g", "gpt-of-another-name"];
    let members = [1, 2].map(|tier| format!("priority: {tier}, upstream_model: {}", names[tier - 1])).to_vec();
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan { members, ..Plan::of(&["a", "b"]) }.settings(settings)).await;
    for length in ["", "content-length: 3\r\n"] {
        world.upstreams[0].push(Action::status(503));
        let body = CHAT.body("Hello", false).to_string();
        let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        let (one, other) = body.split_at(20);
        let request = format!(
            "POST {} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\nconnection: close\r\n{length}transfer-encoding: chunked\r\n\r\n{}{}{}",
            CHAT.path,
            chunk(one),
            chunk(other),
            chunk("")
        );
        let mut connection = TcpStream::connect(world.addr()).await.expect("the gateway accepts");
        connection.write_all(request.as_bytes()).await.expect("a request can be sent");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.expect("the gateway answers and closes");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        for (upstream, name) in world.upstreams.iter().zip(names) {
            let call = upstream.calls().pop().expect("both were called");
            let expected = body.replace("\"gpt\"", &format!("\"{name}\""));
            assert_eq!(String::from_utf8_lossy(&call.body), expected);
            let framing =
                call.headers.iter().filter(|(name, _)| ["content-length", "transfer-encoding"].contains(&&**name));
            let framing: Vec<_> = framing.cloned().collect();
            assert_eq!(framing, [("content-length".to_owned(), expected.len().to_string())]);
        }
    }
}

/// A body that stops coming is given up: the client is told, and no connection waits for it for ever.
#[tokio::test]
async fn a_body_that_stops_coming_is_refused() {
    let world = World::start(Plan::of(&["a"]).settings("client_idle_seconds: 1\n")).await;
    let mut connection = TcpStream::connect(world.addr()).await.expect("the gateway accepts");
    let head = format!("POST {} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\ncontent-length: 99\r\n\r\n{{", CHAT.path);
    connection.write_all(head.as_bytes()).await.expect("a head can be sent");
    let mut answer = [0; 12];
    let told = tokio::time::timeout(PATIENCE, connection.read_exact(&mut answer)).await;
    told.expect("the gateway answers").expect("before it closes");
    assert_eq!(&answer, b"HTTP/1.1 408");
    assert!(world.upstreams[0].calls().is_empty());
}

/// E19: a client that takes nothing more of its answer gives its upstream's call free.
#[tokio::test]
async fn an_answer_that_nobody_takes_ends_the_upstreams_call() {
    let mut world = World::start(Plan::of(&["a"]).settings("client_idle_seconds: 1\n")).await;
    // The role, a word, the 32 MiB that no socket buffer takes; and nothing that would end it.
    let does = [Action::Chunks { chunks: 1 }, Action::HugeEvent { mib: 32 }, Action::StallAfterEvents { events: 3 }];
    world.upstreams[0].push(Step::new(does));
    let unread = CHAT.read_until(&world.client(), &CHAT.body("Hello", true), "\"content\":\"").await;
    let gone = world.upstreams[0].wait_for(|calls| calls.iter().all(|call| call.end == Some(End::ClientGone)));
    tokio::time::timeout(PATIENCE, gone).await.expect("the upstream's call ends");
    drop(unread);
    world.stop().await;
    assert_eq!(world.table("select outcome, status, attempts from usage_events"), ["cancelled|200|1"]);
}
