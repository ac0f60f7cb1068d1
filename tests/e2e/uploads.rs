//! Clients that are slow, stuck or packed: what they send is bounded, and what they do not take is not held for ever.

use std::time::Duration;

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

/// The whole of a body has its time, too: one that comes byte by byte holds no connection for ever. A form that passes has
/// the request's time, and its client may not be silent; neither is the upstream's fault.
#[tokio::test]
async fn a_body_that_takes_too_long_is_refused() {
    let settings = "client_idle_seconds: 60\nretry: { timeout_seconds: 1, first_token_seconds: 1 }\n";
    let world = World::start(Plan::of(&["a"]).settings(settings)).await;
    let mut connection = begin(&world, CHAT.path, "", 1 << 20, b"{").await;
    assert!(told_while_sending(&mut connection).await.starts_with(b"HTTP/1.1 408"));
    assert!(world.upstreams[0].calls().is_empty());

    let head = b"--XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\ngpt\r\n\
                 --XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
    let (path, form) = ("/v1/audio/transcriptions", "content-type: multipart/form-data; boundary=XX\r\n");
    let silent = "client_idle_seconds: 1\n";
    for (settings, drips, status, class) in [(settings, true, "504", "timeout"), (silent, false, "408", "caller_error")]
    {
        let mut world = World::start(Plan::of(&["a"]).settings(settings)).await;
        let mut connection = begin(&world, path, form, 4 << 20, head).await;
        let told = if drips { told_while_sending(&mut connection).await } else { told(&mut connection).await };
        assert_eq!(told, format!("HTTP/1.1 {status}").as_bytes(), "{settings}");
        world.stop().await;
        assert_eq!(world.table("select class from usage_attempts"), [class], "{settings}");
    }
}

/// Sends a head, and the beginning of a body of `length` bytes.
async fn begin(world: &World, path: &str, headers: &str, length: usize, body: &[u8]) -> TcpStream {
    let mut connection = TcpStream::connect(world.addr()).await.expect("the gateway accepts");
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\n{headers}content-length: {length}\r\n\r\n");
    connection.write_all(&[head.as_bytes(), body].concat()).await.expect("a head can be sent");
    connection
}

/// The first bytes of the answer.
async fn told(connection: &mut TcpStream) -> Vec<u8> {
    let mut answer = [0; 12];
    let told = tokio::time::timeout(PATIENCE, connection.read_exact(&mut answer)).await;
    told.expect("the gateway answers").expect("before it closes");
    answer.to_vec()
}

/// The same to a client that goes on sending a byte now and then.
async fn told_while_sending(connection: &mut TcpStream) -> Vec<u8> {
    let (mut answer, mut drip) = ([0; 12], tokio::time::interval(Duration::from_millis(20)));
    let (mut reader, mut writer) = connection.split();
    let drips = async {
        loop {
            drip.tick().await;
            // Once it is refused the gateway may have closed.
            if writer.write_all(b" ").await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let told = tokio::time::timeout(PATIENCE, async {
        tokio::select! {
            read = reader.read_exact(&mut answer) => read,
            () = drips => unreachable!("it goes on"),
        }
    });
    told.await.expect("the gateway answers").expect("before it closes");
    answer.to_vec()
}

/// G07, G08: a body above the limit, which is a setting, is refused by its head: a client that asks whether to go on is
/// not told to, and one that sends all the same is told why. One within the limit is asked for.
#[tokio::test]
async fn a_body_above_the_limit_is_not_asked_for() {
    let mut world = World::start(Plan::of(&["a"]).settings("body_mib_max: 1\n")).await;
    let form = "content-type: multipart/form-data; boundary=XX\r\n";
    for (path, headers) in [(CHAT.path, ""), ("/v1/audio/transcriptions", form)] {
        let expects = format!("expect: 100-continue\r\n{headers}");
        let mut asks = begin(&world, path, &expects, (1 << 20) + 1, b"").await;
        assert_eq!(told(&mut asks).await, b"HTTP/1.1 413", "{path}");
    }
    let refused: [(&str, usize); 2] = [("x-waybill-a: b\r\n", 1 << 21), ("content-encoding: gzip\r\n", 10)];
    for ((headers, length), status) in refused.into_iter().zip(["413", "415"]) {
        let mut asks = begin(&world, CHAT.path, &format!("expect: 100-continue\r\n{headers}"), length, b"").await;
        assert_eq!(told(&mut asks).await, format!("HTTP/1.1 {status}").as_bytes());
    }
    let fits = CHAT.body("Hello", false).to_string();
    let mut asks = begin(&world, CHAT.path, "expect: 100-continue\r\n", fits.len(), b"").await;
    assert_eq!(told(&mut asks).await, b"HTTP/1.1 100");
    asks.write_all(fits.as_bytes()).await.expect("the body can be sent");
    let mut rest = Vec::new();
    let reads = async {
        while !String::from_utf8_lossy(&rest).contains("HTTP/1.1 200") {
            assert_ne!(asks.read_buf(&mut rest).await.expect("the gateway answers"), 0, "it answers");
        }
    };
    tokio::time::timeout(PATIENCE, reads).await.expect("the gateway answers");

    let client = world.client();
    let large = |length: usize| Bytes::from(CHAT.body(&"x".repeat(length), false).to_string());
    assert_eq!(client.post_bytes(CHAT.path, &[], large(1 << 20)).await.status, 413);
    assert_eq!(client.post_bytes(CHAT.path, &[], large(1 << 19)).await.status, 200);
    let bomb = zstd::bulk::compress(&vec![b' '; (1 << 20) + 1], 3).expect("spaces can be packed");
    let answer = client.post_bytes(CHAT.path, &[("content-encoding", "zstd")], bomb.into()).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (413, &Value::from("request_too_large")));
    assert_eq!(world.upstreams[0].calls().len(), 2);
    world.stop().await;
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
