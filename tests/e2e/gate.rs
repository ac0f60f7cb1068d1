//! The gate: endpoints whose requests cost something each time, and bodies that pass without being read whole (S2.11).

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, read};
use crate::world::{KEY, PATIENCE, Plan, Rows, World};

/// The endpoints behind the gate, and how often the request is sent where the first upstream fails with 500, refuses with
/// 429, breaks off, or takes no connection: without an `Idempotency-Key`, then with one. A second send is answered.
const GATED: [(&str, [usize; 4], [usize; 4]); 9] = [
    ("/v1/images/generations", [1, 1, 1, 1], [1, 1, 1, 1]),
    ("/v1/images/edits", [1, 1, 1, 1], [1, 1, 1, 1]),
    ("/v1/audio/speech", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/audio/transcriptions", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/audio/translations", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/videos", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/music", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/moderations", [1, 2, 1, 2], [2, 2, 2, 2]),
    ("/v1/rerank", [1, 2, 1, 2], [2, 2, 2, 2]),
];

fn says(content_type: &str, text: &str) -> Action {
    let headers = [("content-type".to_owned(), content_type.to_owned())];
    Action::Status { status: 200, headers: headers.into(), body: json!(text) }
}

/// Two upstreams, the second for what the first does not do; no cooldown between the lines of a table.
fn plan() -> Plan {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let members = ["priority: 1", "priority: 2"].map(str::to_owned).to_vec();
    Plan { members, ..Plan::of(&["a", "b"]) }.settings(settings)
}

/// S2.11, D12, DESIGN 10: what may be made twice, by endpoint, failure and key; nobody's SDK is told to make it again.
#[tokio::test]
async fn a_gated_request_is_made_once_unless_its_client_or_the_failure_allows_more() {
    let world = World::start(plan()).await;
    world.upstreams[1].push(Step::new([says("application/json", "{\"id\":1}")]).standing());
    let failures = [Action::status(500), Action::status(429), Action::Reset];
    for (path, without, with) in GATED {
        for (has_key, expected) in [(false, without), (true, with)] {
            for (failure, n_calls) in failures.iter().zip(expected) {
                // A key of its own, since the same one would get the same answer.
                let key = format!("{failure:?}");
                let headers = if has_key { &[("idempotency-key", key.as_str())][..] } else { &[] };
                let what = format!("{path} {headers:?} {failure:?}");
                let calls = || world.calls().iter().filter(|call| call.path == path).count();
                let before = calls();
                world.upstreams[0].push(failure.clone());
                let answer = world.client().post(path, headers, &json!({"model": "gpt", "input": "Hello"})).await;
                assert_eq!(calls() - before, n_calls, "{what}");
                assert_eq!(answer.header("x-waybill-attempts"), Some(n_calls.to_string().as_str()), "{what}");
                assert_eq!(answer.status == 200, n_calls == 2, "{what}: {}", answer.text());
                assert_eq!(answer.header("x-should-retry") == Some("false"), n_calls == 1, "{what}");
            }
        }
    }
}

/// S2.11, DESIGN 10, C12: where no connection could be made nothing was done, so another deployment is asked by all but
/// images: a form that passes too, of which nothing went out; a response that is sent once or goes on in the background.
#[tokio::test]
async fn a_dead_host_is_passed_over() {
    let settings =
        "retry: { responses_single_send: true, backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let mut world = World::start(plan().settings(settings)).await;
    let client = world.client();
    // Before any connection to it could be kept.
    world.upstreams[0].die().await.expect("an upstream can die");
    for background in [false, true] {
        let body = json!({"model": "gpt", "input": "Hello", "background": background});
        let session = [("x-session-id", if background { "s-1" } else { "s-2" })];
        let answer = client.post("/v1/responses", &session, &body).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-attempts")), (200, Some("2")), "{background}");
    }
    world.upstreams[1].push(Step::new([says("application/json", "{\"id\":1}")]).standing());
    let check = async |path: &str, headers: &[(&str, &str)], body: Bytes, n_sends: usize| {
        let before = world.calls().len();
        let answer = client.post_bytes(path, headers, body.clone()).await;
        let what = format!("{path} {headers:?}: {}", answer.text());
        assert_eq!(answer.header("x-waybill-attempts"), Some(n_sends.to_string().as_str()), "{what}");
        assert_eq!(answer.status == 200, n_sends == 2, "{what}");
        assert_eq!(world.calls().len() - before, n_sends - 1, "{what}");
        assert!(n_sends == 1 || world.upstreams[1].calls().pop().is_some_and(|call| call.body == body), "{what}");
    };
    let json = Bytes::from(json!({"model": "gpt", "input": "Hello"}).to_string());
    for (path, without, with) in GATED {
        check(path, &[], json.clone(), without[3]).await;
        check(path, &[("idempotency-key", "k-1")], json.clone(), with[3]).await;
        if ["images/edits", "transcriptions", "translations", "videos"].iter().any(|end| path.ends_with(end)) {
            check(path, &[FORM], form("gpt", 2 << 20, true), without[3]).await;
        }
    }
    world.stop().await;
    let blamed = "select class, count(*) from usage_attempts where class <> 'success' group by 1";
    assert_eq!(world.table(blamed), ["unavailable|24"]);
}

/// S2.11: `responses_single_send` is the strict reading, which an `Idempotency-Key` lifts.
#[tokio::test]
async fn responses_are_sent_once_where_the_setting_says_so() {
    for (setting, n_calls) in [("", [2, 2, 2]), ("responses_single_send: true, ", [1, 2, 2])] {
        let settings = format!("retry: {{ {setting}backoff_ms: 1, max_attempts: 1 }}\nhealth: {{ enabled: false }}\n");
        let world = World::start(plan().settings(&settings)).await;
        let asks = [(500, ("x-a", "b")), (429, ("x-a", "b")), (500, ("idempotency-key", "k-1"))];
        for ((n, (status, header)), n_calls) in asks.into_iter().enumerate().zip(n_calls) {
            let before = world.calls().len();
            world.upstreams[0].push(Action::status(status));
            let session = format!("s-{n}");
            let headers = [("x-session-id", session.as_str()), header];
            world.client().post("/v1/responses", &headers, &json!({"model": "gpt", "input": "Hello"})).await;
            assert_eq!(world.calls().len() - before, n_calls, "{settings} {status}");
        }
    }
}

/// S1.10, G05: requests and answers pass byte for byte, whatever they are; each leaves its facts and its usage.
#[tokio::test]
async fn what_passes_the_gate_is_unchanged_and_on_record() {
    const ODD: &str = r#"{ "input":"caf\u00e9", "model" : "gpt" ,"x":1,"x":[1.0e0] }"#;
    const USAGE: &str = r#"{"data":[ ],"usage":{"input_tokens":7,"output_tokens":5,"total_tokens":12}}"#;
    let table = [
        ("/v1/images/generations", "application/json", USAGE, "image_generations"),
        ("/v1/audio/speech", "audio/mpeg", "ID3 not really", "speech"),
        ("/v1/audio/transcriptions", "text/vtt", "WEBVTT\n\n00:01 --> 00:02\nHi", "transcriptions"),
        ("/v1/audio/translations", "text/event-stream", "data: {\"text\":\"Hi\"}\n\ndata: [DONE]\n\n", "translations"),
        ("/v1/videos", "application/json", r#"{"id":"video_1", "status":"queued","error":null}"#, "videos"),
        ("/v1/music", "audio/wav", "RIFF", "music"),
        ("/v1/moderations", "application/json", r#"{"id":"modr-1","results":[]}"#, "moderations"),
        ("/v1/rerank", "application/json; charset=utf-8", r#"{"results":[{"index":1}]}"#, "rerank"),
        (
            "/v1/completions",
            "application/json",
            r#"{"object":"text_completion","choices":[{"text":" Hi","finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}"#,
            "completions",
        ),
    ];
    let mut plan = plan();
    plan.members[0] = "priority: 1, upstream_model: real".to_owned();
    let mut world = World::start(plan).await;
    for (path, content_type, text, _) in table {
        world.upstreams[0].push(says(content_type, text));
        let answer = world.client().post_bytes(path, &[("x-session-id", "s-1")], ODD.into()).await;
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, text), "{path}");
        assert_eq!(answer.header("content-type"), Some(content_type));
        assert_eq!(
            (answer.header("x-session-id"), answer.header("x-waybill-deployment")),
            (Some("s-1"), Some("a/real"))
        );
        let call = world.upstreams[0].calls().pop().expect("the upstream was called");
        assert_eq!((call.path.as_str(), call.body), (path, Bytes::from(ODD.replace("\"gpt\"", "\"real\""))));
        assert_eq!(call.credential.as_deref(), Some("sk-upstream"));
    }
    world.stop().await;
    let sql = "select e.endpoint, e.session_id, e.outcome, a.class, coalesce(a.input, '-'), coalesce(a.output, '-') \
               from usage_events e join usage_attempts a using (request_id) order by e.started, e.request_id";
    let expected = table.map(|(path, _, _, endpoint)| {
        let usage = if path.contains("images") || path.ends_with("completions") { "7|5" } else { "-|-" };
        format!("{endpoint}|s-1|success|success|{usage}")
    });
    assert_eq!(world.table(sql), expected);
}

/// A stream of the older completions is read like a chat's.
#[tokio::test]
async fn a_stream_of_completions_is_held_back_and_read() {
    const STREAM: &str = "data: {\"choices\":[{\"text\":\" Hi\",\"finish_reason\":null}]}\n\n\
                          data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    const CUT: &str = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":null}]}\n\n";
    let world = World::start(plan()).await;
    world.upstreams[0].push(says("text/event-stream", CUT));
    world.upstreams[1].push(says("text/event-stream", STREAM));
    let body = json!({"model": "gpt", "prompt": "Say", "stream": true});
    let answer = world.client().post("/v1/completions", &[], &body).await;
    assert_eq!((answer.status.as_u16(), answer.text().as_str(), answer.whole), (200, STREAM, true));
    assert_eq!(answer.header("x-waybill-attempts"), Some("2"), "a stream without a word may go elsewhere");
}

/// A form with the model first or last; the file is not text.
pub(crate) fn form(model: &str, size: usize, model_first: bool) -> Bytes {
    let model = format!("--XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n");
    let mut file = b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\n\r\n".to_vec();
    file.extend((0..size).map(|i| (i % 251) as u8));
    file.extend_from_slice(b"\r\n");
    let parts = if model_first { [model.as_bytes(), &file] } else { [&file[..], model.as_bytes()] };
    [&parts.concat()[..], b"--XX--\r\n"].concat().into()
}

pub(crate) const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=XX");

#[track_caller]
fn check(answer: &Answer, status: u16, code: &str, param: &str) {
    let error = &answer.json()["error"];
    assert_eq!((answer.status.as_u16(), &error["code"]), (status, &json!(code)), "{error}");
    assert_eq!(error["param"], param, "{error}");
}

/// G05: a form reaches the upstream with its model exchanged, framed once and rightly, small or large. One that hides
/// its model behind a large file, or names two, is refused in words and never arrives as a whole.
#[tokio::test]
async fn a_form_arrives_with_its_model_exchanged_and_nothing_else() {
    const MIB: usize = 1 << 20;
    let mut plan = plan();
    plan.members = vec!["priority: 1, upstream_model: a-longer-name".to_owned(), "priority: 2".to_owned()];
    let mut world = World::start(plan).await;
    let client = world.client();
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/videos"] {
        for (size, model_first) in [(100, true), (100, false), (MIB / 2, false), (2 * MIB, true)] {
            world.upstreams[0].push(says("application/json", "{\"text\":\"Hi\"}"));
            let answer = client.post_bytes(path, &[FORM], form("gpt", size, model_first)).await;
            assert_eq!(answer.status, 200, "{path} {size} {model_first}: {}", answer.text());
            let call = world.upstreams[0].calls().pop().expect("the upstream was called");
            let expected = form("a-longer-name", size, model_first);
            assert!(call.body == expected, "{path} {size} {model_first}");
            assert_eq!(call.header("content-length"), Some(expected.len().to_string().as_str()));
            assert_eq!((call.header("content-type"), call.header("transfer-encoding")), (Some(FORM.1), None));
        }
    }
    let n_calls = world.calls().len();
    let path = "/v1/audio/transcriptions";
    check(&client.post_bytes(path, &[FORM], form("gpt", 2 * MIB, false)).await, 400, "invalid_body", "model");
    check(&client.post_bytes(path, &[FORM], form("", 10, true)).await, 400, "invalid_body", "model");
    check(&client.post_bytes(path, &[FORM], form("nobody", 10, true)).await, 404, "model_not_found", "model");
    check(&client.post_bytes(path, &[FORM], "--XX--\r\n".into()).await, 400, "invalid_body", "model");
    let twice = |size| {
        let (one, two) = (form("gpt", size, true), form("other", 10, true));
        Bytes::from([&one[..one.len() - 8], &two[..]].concat())
    };
    check(&client.post_bytes(path, &[FORM], twice(10)).await, 400, "invalid_body", "model");
    check(&client.post_bytes(path, &[FORM], twice(2 * MIB)).await, 400, "invalid_body", "model");
    let answer = client.post_bytes(path, &[FORM], form("gpt", 65 * MIB, true)).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (413, &json!("request_too_large")));
    assert_eq!(world.calls().len(), n_calls, "nothing arrived as a whole");
    world.stop().await;
    let blamed = "select class, count(*) from usage_attempts where class <> 'success' group by 1";
    assert_eq!(world.table(blamed), ["caller_error|1"]);
}

/// An upstream that answers by hand, in place of a scripted one.
pub(crate) async fn by_hand(world: &mut World) -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let addr: SocketAddr = listener.local_addr().expect("it is bound");
    world.kill().await;
    let yaml = std::fs::read_to_string(world.config()).expect("the configuration can be read");
    let yaml = yaml.replace(&world.upstreams[0].addr.to_string(), &addr.to_string());
    std::fs::write(world.config(), yaml).expect("the configuration can be written");
    world.restart().await;
    listener
}

pub(crate) async fn read_at_least(stream: &mut TcpStream, size: usize) -> BytesMut {
    let mut read = BytesMut::new();
    let reads = async {
        while read.len() < size {
            assert_ne!(stream.read_buf(&mut read).await.expect("the peer is there"), 0, "the peer goes on");
        }
    };
    tokio::time::timeout(PATIENCE, reads).await.expect("the bytes come");
    read
}

/// Reads until the peer has left.
pub(crate) async fn read_to_end(stream: &mut TcpStream) {
    let left = async { while stream.read_buf(&mut BytesMut::new()).await.is_ok_and(|n| n > 0) {} };
    tokio::time::timeout(PATIENCE, left).await.expect("the peer leaves");
}

pub(crate) async fn send_form(world: &World, headers: &str, body: &[u8]) -> TcpStream {
    let mut client = TcpStream::connect(world.addr()).await.expect("the gateway accepts");
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\n{headers}{}: {}\r\ncontent-length: {}\r\n\r\n",
        FORM.0,
        FORM.1,
        body.len()
    );
    client.write_all(head.as_bytes()).await.expect("a head can be sent");
    client
}

/// A large form reaches the upstream while its client still sends it.
#[tokio::test]
async fn a_large_form_passes_while_it_comes() {
    let mut world = World::start(plan()).await;
    let upstream = by_hand(&mut world).await;
    let body = form("gpt", 4 << 20, true);
    let mut client = send_form(&world, "", &body).await;
    client.write_all(&body[..2 << 20]).await.expect("half can be sent");
    let (mut call, _) = upstream.accept().await.expect("the gateway calls");
    let mut came = read_at_least(&mut call, 1 << 20).await;
    client.write_all(&body[2 << 20..]).await.expect("the rest can be sent");
    let head = came.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
    let rest = read_at_least(&mut call, head + body.len() - came.len()).await;
    came.extend_from_slice(&rest);
    assert!(came[head..] == body[..]);
    let answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nHi";
    call.write_all(answer).await.expect("the gateway reads");
    let answer = read_at_least(&mut client, 12).await;
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
}

/// A client that leaves in the middle of its form is nobody's failure; an answer that breaks off is shown as one.
#[tokio::test]
async fn a_client_that_leaves_blames_nobody_and_a_cut_is_no_end() {
    let mut world = World::start(plan()).await;
    let upstream = by_hand(&mut world).await;
    let body = form("gpt", 4 << 20, true);
    let mut client = send_form(&world, "", &body).await;
    client.write_all(&body[..2 << 20]).await.expect("half can be sent");
    let (mut call, _) = upstream.accept().await.expect("the gateway calls");
    read_at_least(&mut call, 1 << 20).await;
    drop(client);
    read_to_end(&mut call).await;

    let asked = json!({"model": "gpt", "input": "Hello"});
    let client = world.client();
    let ask = client.open(Method::POST, "/v1/audio/speech", &[], asked.to_string().into());
    let begin = async {
        let (mut call, _) = upstream.accept().await.expect("the gateway calls");
        read_at_least(&mut call, 100).await;
        let part = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 100\r\n\r\nhalf of it";
        call.write_all(part).await.expect("the gateway reads");
        call
    };
    let (response, call) = tokio::join!(ask, begin);
    let response = response.expect("the gateway answers");
    drop(call);
    let answer = read(response).await;
    assert_eq!((answer.status.as_u16(), answer.text().as_str(), answer.whole), (200, "half of it", false));
    world.stop().await;
    let sql =
        "select e.endpoint, e.outcome, a.class from usage_events e join usage_attempts a using (request_id) order by 1";
    assert_eq!(world.table(sql), ["speech|interrupted|interrupted", "transcriptions|cancelled|cancelled"]);
}

/// Guardrails see the texts of a form wherever they stand in it.
#[tokio::test]
async fn a_form_has_no_way_past_a_guardrail() {
    let key = "{ id: limited, key: 'env:LIMITED_KEY', group: main, guardrails: { deny: [sphinx] } }".to_owned();
    let plan = Plan { rows: Rows { keys: vec![key], ..Rows::default() }, ..plan() };
    let world = World::start(plan).await;
    let client = world.client_with("sk-limited");
    let path = "/v1/audio/transcriptions";
    let large = form("gpt", 3 << 20, true);
    let prompt = b"--XX\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nthe sphinx\r\n--XX--\r\n";
    let hidden = Bytes::from([&large[..large.len() - 8], prompt].concat());
    let answer = client.post_bytes(path, &[FORM], hidden).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (400, &json!("guardrail_denied")));
    assert_eq!(world.calls().len(), 0);
    world.upstreams[0].push(says("text/plain", "Hi"));
    assert_eq!(client.post_bytes(path, &[FORM], large).await.status, 200);
}
