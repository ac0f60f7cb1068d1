//! Streams and plain answers: their bytes, their ends, the clients that leave, and the usage that is recorded.

use std::pin::pin;

use http::Method;
use serde_json::{Value, json};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Action, Call, End, Running, Settings, Simulator, Step};

use crate::client::{Answer, Client, read};
use crate::dialect::{CHAT, DIALECTS, Dialect, MESSAGES, RESPONSES};
use crate::inside_200::events;
use crate::world::{Plan, World};

/// Deadlines of a second and one send to a deployment.
const SHORT: &str = "retry: { backoff_ms: 1, max_attempts: 1, first_token_seconds: 1, plain_seconds: 1, idle_seconds: 1 }\n\
     health: { enabled: false }\n";

/// A world of one upstream, and that upstream's twin: asked the same, it writes the same bytes but for the time.
struct Twins {
    world: World,
    twin: Running,
}

impl Twins {
    async fn start(settings: &str) -> Self {
        let world = World::start(Plan::of(&["a"]).settings(settings)).await;
        let twin = Simulator::start(Settings::named("a")).await.expect("the twin starts");
        Self { world, twin }
    }

    /// What the client got through the gateway, and what the upstream wrote: the twin is asked what the upstream was
    /// asked.
    async fn ask(&self, dialect: Dialect, body: &Value, does: &[Action]) -> (Answer, Answer) {
        let upstream = &self.world.upstreams[0];
        upstream.push(Step::new(does.to_vec()));
        self.twin.push(Step::new(does.to_vec()));
        let answer = self.world.client().post(dialect.path, &[], body).await;
        let asked = upstream.calls().pop().expect("the upstream was called");
        let twin = Client::new(self.twin.addr, "sk-upstream");
        let written = twin.post_bytes(dialect.path, &[], asked.body).await;
        let told = self.twin.calls().pop().expect("the twin was called");
        assert_eq!(asked.number, told.number, "one call each");
        (timeless(answer), timeless(written))
    }
}

/// The answer without the seconds of its making: the twins speak one after the other.
fn timeless(answer: Answer) -> Answer {
    let mut text = answer.text();
    for field in ["\"created\":", "\"created_at\":", "\"completed_at\":"] {
        let undated = |piece: &str| {
            let rest = piece.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.len() == piece.len() { piece.to_owned() } else { format!("0{rest}") }
        };
        text = text.split(field).map(undated).collect::<Vec<_>>().join(field);
    }
    Answer { body: text.into(), ..answer }
}

/// E15: an upstream that refuses the question for usage, which the client did not ask, is asked again without it, beside
/// its attempts and without harm; where the channel says so, or nothing may be sent again, it is not asked at all. What the
/// client itself asks is its own.
#[tokio::test]
async fn a_stream_is_asked_for_its_usage_only_where_that_is_taken() {
    let refusals = [
        (
            400,
            json!({"error": {"message": "Unrecognized request argument supplied: stream_options",
            "type": "invalid_request_error", "param": null, "code": null}}),
        ),
        (
            422,
            json!({"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options", "include_usage"],
            "msg": "Extra inputs are not permitted"}]}),
        ),
    ];
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1 }\n";
    let plain = CHAT.body("Hello", true);
    let mut asking = plain.clone();
    asking["stream_options"] = json!({"include_usage": true});
    let mut world = World::start(Plan::of(&["a"]).settings(settings)).await;
    for (status, body) in &refusals {
        let refusal = Action::Status { status: *status, headers: Default::default(), body: body.clone() };
        world.upstreams[0].push(refusal.clone());
        let answer = world.client().post(CHAT.path, &[], &plain).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-attempts")), (200, Some("2")));
        assert!(answer.text().contains(CHAT.last), "{}", answer.text());
        world.upstreams[0].push(refusal);
        let answer = world.client().post(CHAT.path, &[], &asking).await;
        assert_eq!((answer.status.as_u16(), &answer.json()), (*status, body), "the client asked for it");
    }
    let asked = |world: &World| -> Vec<bool> {
        world.calls().iter().map(|call| String::from_utf8_lossy(&call.body).contains("include_usage")).collect()
    };
    assert_eq!(asked(&world), [true, false, true, true, false, true]);
    let calls = world.calls();
    assert_eq!(calls[1].body, plain.to_string(), "the client's own bytes");
    world.stop().await;
    let rows = world.table("select attempt, reason, class, status from usage_attempts order by started limit 2");
    assert_eq!(rows, ["1|draw|caller_error|400", "2|same|success|200"]);

    for (channel, settings) in [("stream_usage: false", ""), ("", "retry: { sends_max: 1 }\n")] {
        let plan = Plan { channel: channel.to_owned(), ..Plan::of(&["a"]) };
        let world = World::start(plan.settings(settings)).await;
        for body in [&plain, &asking] {
            assert_eq!(world.client().post(CHAT.path, &[], body).await.status, 200);
        }
        assert_eq!(asked(&world), [false, true], "{channel}{settings}");
    }
}

/// The stream without the chunk that only reports usage.
fn without_usage_chunk(stream: &str, line_end: &str) -> String {
    let blank = line_end.repeat(2);
    stream.split_inclusive(&blank).filter(|event| !event.contains(r#""choices":[]"#)).collect()
}

#[track_caller]
fn assert_same(found: &str, expected: &str, what: &str) {
    let at = found.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
    let near = |text: &str| {
        String::from_utf8_lossy(&text.as_bytes()[at.saturating_sub(40)..text.len().min(at + 80)]).into_owned()
    };
    assert!(found == expected, "{what}: differs at {at}: {:?} instead of {:?}", near(found), near(expected));
}

/// DESIGN 2, E12, CLIENTS 12: whatever the framing, the bytes at the client are the bytes of the upstream, but for the
/// usage chunk of a chat stream that the client did not ask for (E15).
#[tokio::test]
async fn the_bytes_of_a_stream_are_the_upstreams_own() {
    let twins = Twins::start("").await;
    let framings: [(&str, &str, &[Action]); 9] = [
        ("lf", "\n", &[]),
        ("crlf", "\r\n", &[Action::Crlf]),
        ("cr", "\r", &[Action::Cr]),
        ("byte by byte", "\n", &[Action::Fragment { bytes: 1 }]),
        ("crlf byte by byte", "\r\n", &[Action::Crlf, Action::Fragment { bytes: 1 }]),
        ("split characters", "\n", &[Action::SplitUtf8]),
        ("comments", "\n", &[Action::Comments]),
        ("pings", "\n", &[Action::Pings]),
        ("3 MiB", "\n", &[Action::HugeEvent { mib: 3 }]),
    ];
    for (name, line_end, does) in framings {
        for dialect in DIALECTS {
            let both: &[bool] = if dialect == CHAT { &[false, true] } else { &[true] };
            for &asks in both {
                let what = format!("{name} {} asks={asks}", dialect.path);
                let mut body = dialect.body("Hello", true);
                if dialect == CHAT && asks {
                    body["stream_options"] = json!({"include_usage": true});
                }
                let (answer, written) = twins.ask(dialect, &body, does).await;
                assert!(answer.whole && answer.status == 200, "{what}");
                assert!(written.text().contains(dialect.last), "{what}: the twin wrote a whole stream");
                let expected = if asks { written.text() } else { without_usage_chunk(&written.text(), line_end) };
                assert_eq!(expected == written.text(), asks, "{what}");
                assert_same(&answer.text(), &expected, &what);
            }
        }
    }
}

/// S3.28: a plain answer passes byte for byte.
#[tokio::test]
async fn the_bytes_of_a_plain_answer_are_the_upstreams_own() {
    let twins = Twins::start("").await;
    for dialect in DIALECTS {
        for does in [&[][..], &[Action::Fragment { bytes: 1 }], &[Action::HugeEvent { mib: 3 }], &[Action::SplitUtf8]] {
            let (answer, written) = twins.ask(dialect, &dialect.body("Hello", false), does).await;
            assert_eq!(answer.header("content-type"), written.header("content-type"));
            assert_same(&answer.text(), &written.text(), &format!("{} {does:?}", dialect.path));
        }
    }
}

/// E02: a chat stream without its last event is whole where it said how it stopped, and is given that event once; a stream
/// whose protocol has an event for its end is not, and says so (E21).
#[tokio::test]
async fn a_stream_without_its_last_event_ends_as_what_it_is() {
    let mut twins = Twins::start(SHORT).await;
    for dialect in DIALECTS {
        let (answer, written) = twins.ask(dialect, &dialect.body("Hello", true), &[Action::NoDone]).await;
        let written = without_usage_chunk(&written.text(), "\n");
        assert_same(&answer.text()[..written.len()], &written, dialect.path);
        if dialect == CHAT {
            assert_eq!(&answer.text()[written.len()..], "data: [DONE]\n\n");
        } else {
            interrupted(dialect, &answer.text());
        }
    }
    twins.world.stop().await;
    let outcomes = twins.world.table("select outcome from usage_events order by started");
    assert_eq!(outcomes, ["success", "interrupted", "interrupted"]);
}

/// E02: nothing is made of an event that was torn off behind the finish reason.
#[tokio::test]
async fn a_torn_event_stays_torn() {
    let mut world = World::start(Plan::of(&["a"])).await;
    let finish = json!({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]});
    let written = format!("data: {finish}\n\ndata: {{\"choices\":[],\"usa");
    world.upstreams[0].push(events(&written));
    let answer = world.client().post(CHAT.path, &[], &CHAT.body("Hello", true)).await;
    assert_same(&answer.text(), &written, "torn");
    world.stop().await;
    assert_eq!(world.table("select outcome from usage_events"), ["success"]);
}

/// DESIGN 2: what comes with the last event passes, too, such as the `[DONE]` that many send behind any; but for an error,
/// since the client has its whole answer.
#[tokio::test]
async fn what_comes_behind_the_last_event_passes() {
    let mut world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    for dialect in DIALECTS {
        let body = dialect.body("Hello", true);
        for (line_end, does) in [("\n", &[][..]), ("\r\n", &[Action::Crlf])] {
            world.upstreams[0].push(Step::new(does.to_vec()));
            let whole = client.post(dialect.path, &[], &body).await.text();
            let lines = |text: &str| text.replace('\n', line_end);
            let (done, comment) = (lines("data: [DONE]\n\n"), lines(": bye\n\n"));
            let error = lines("event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"late\"}}\n\n");
            let cases = [
                (format!("{done}{comment}data: torn"), format!("{done}{comment}data: torn")),
                (format!("{comment}{error}{done}"), comment),
                (error, String::new()),
            ];
            for (behind, passes) in cases {
                let what = format!("{} {behind:?}", dialect.path);
                world.upstreams[0].push(events(&format!("{whole}{behind}")));
                let answer = client.post(dialect.path, &[], &body).await;
                assert!(answer.whole, "{what}");
                assert_same(&answer.text(), &format!("{whole}{passes}"), &what);
            }
        }
    }
    world.stop().await;
    assert_eq!(world.table("select distinct outcome from usage_events"), ["success"]);
}

/// The tokens of a row as the upstream counted them: input, cached and written inclusive, and output.
fn counted(call: &Call) -> String {
    let usage = call.usage.expect("the upstream answered");
    let written = usage.written_5m_tokens + usage.written_1h_tokens;
    format!("{}|{}|{}|{}|0", usage.prompt_tokens, usage.cached_tokens, written, usage.output_tokens)
}

/// E14, F06, F07: what is recorded is what the upstream reported, in JSON and streams, with what was read from its
/// prompt cache and written to it; Anthropic's counts are made inclusive.
#[tokio::test]
async fn recorded_usage_is_what_the_upstream_reported() {
    let anthropic = CacheModel::Anthropic { min_tokens: Some(1) };
    for (cache, dialects) in [(CacheModel::open_ai(), &[CHAT, RESPONSES][..]), (anthropic, &[MESSAGES])] {
        let mut plan = Plan::of(&["a"]);
        plan.upstreams[0].cache = cache;
        let mut world = World::start(plan).await;
        let client = world.client();
        for dialect in dialects {
            for stream in [false, true] {
                for _ in 0..2 {
                    let prompt = format!("{stream} {}", "word ".repeat(1200));
                    let mut body = dialect.body("?", stream);
                    body[dialect.field][0]["content"] = json!([
                        {"type": if dialect.field == "input" { "input_text" } else { "text" }, "text": prompt, "cache_control": {"type": "ephemeral"}}
                    ]);
                    assert_eq!(client.post(dialect.path, &[], &body).await.status, 200);
                }
            }
        }
        let calls = world.upstreams[0].calls();
        let usage = |call: &Call| call.usage.expect("the upstream answered");
        assert!(calls.iter().any(|call| usage(call).cached_tokens > 0), "the cache was hit");
        let writes = calls.iter().any(|call| usage(call).written_5m_tokens > 0);
        assert_eq!(writes, dialects == [MESSAGES], "the cache was written at a price");
        world.stop().await;
        let rows = world.table(
            "select input, coalesce(cached, 0), coalesce(cache_write, 0), output, estimated from usage_attempts order by started, request_id",
        );
        assert_eq!(rows, calls.iter().map(counted).collect::<Vec<_>>());
    }
}

/// E03: the terminal event ends the reply, though the upstream holds the connection.
#[tokio::test]
async fn a_held_connection_does_not_hold_the_reply() {
    let mut world = World::start(Plan::of(&["a"])).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Action::HoldAfterDone);
        let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", true)).await;
        assert!(answer.whole && answer.text().contains(dialect.last));
    }
    world.upstreams[0].wait_for(|calls| calls.iter().all(|call| call.end == Some(End::ClientGone))).await;
    world.stop().await;
    assert_eq!(world.table("select outcome from usage_events"), ["success"; 3]);
}

/// CLIENTS 5: a client that closes once it has the last event has succeeded.
#[tokio::test]
async fn leaving_after_the_last_event_is_success() {
    let mut world = World::start(Plan::of(&["a"])).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Action::HoldAfterDone);
        let client = world.client();
        drop(dialect.read_until(&client, &dialect.body("Hello", true), dialect.last).await);
    }
    world.stop().await;
    assert_eq!(world.table("select outcome from usage_events"), ["success"; 3]);
    let rows = world.table("select class, output > 0, estimated from usage_attempts");
    assert_eq!(rows, ["success|1|0"; 3]);
}

/// F01, F03: a client that leaves in mid-stream ends the upstream's call, and one row says so.
#[tokio::test]
async fn leaving_in_mid_stream_cancels_the_upstream() {
    let mut world = World::start(Plan::of(&["a"])).await;
    for (dialect, wanted) in [(CHAT, "\"content\":\""), (RESPONSES, "output_text.delta"), (MESSAGES, "text_delta")] {
        world.upstreams[0].push(Action::PauseAfter { events: 6 });
        let client = world.client();
        drop(dialect.read_until(&client, &dialect.body("Hello", true), wanted).await);
    }
    world.upstreams[0].wait_for(|calls| calls.iter().all(|call| call.end == Some(End::ClientGone))).await;
    world.stop().await;
    assert_eq!(world.table("select outcome, status, attempts from usage_events"), ["cancelled|200|1"; 3]);
    assert_eq!(world.table("select class from usage_attempts"), ["cancelled"; 3]);
}

/// Sends and leaves as soon as the upstream's log says so.
async fn leave_when(world: &World, body: &Value, holds: impl Fn(&[Call]) -> bool) {
    let client = world.client();
    let mut asked = pin!(client.open(Method::POST, CHAT.path, &[], body.to_string().into()));
    tokio::select! {
        answer = &mut asked => panic!("answered {:?}", answer.map(|answer| answer.status())),
        _ = world.upstreams[0].wait_for(holds) => {}
    }
}

/// Asks for the metrics until they hold `wanted`.
async fn metrics_say(world: &World, wanted: &str) {
    let client = world.client();
    while !client.get("/metrics", &[]).await.text().contains(wanted) {}
}

/// F02, G11: leaving before the head ends the upstream's call, plain or streamed.
#[tokio::test]
async fn leaving_before_the_head_cancels_the_upstream() {
    let mut world = World::start(Plan::of(&["a"])).await;
    for stream in [false, true] {
        world.upstreams[0].push(Action::Hang);
        let calls = world.upstreams[0].calls().len();
        leave_when(&world, &CHAT.body("Hello", stream), |now| now.len() > calls).await;
    }
    world.upstreams[0].wait_for(|calls| calls.iter().all(|call| call.end == Some(End::ClientGone))).await;
    metrics_say(&world, "waybill_requests_in_flight 0\n").await;
    world.stop().await;
    assert_eq!(world.table("select outcome, coalesce(status, 0), attempts from usage_events"), ["cancelled|0|1"; 2]);
    assert_eq!(world.upstreams[0].calls().len(), 2);
}

/// D07: no further send is made for a client that has left between two.
#[tokio::test]
async fn a_client_that_left_is_not_retried_for() {
    let plan = Plan::of(&["a"]).settings("retry: { backoff_ms: 10000, max_attempts: 3 }\n");
    let mut world = World::start(plan).await;
    world.upstreams[0].push(Step::new([Action::status(503)]).standing());
    let (client, body) = (world.client(), CHAT.body("Hello", true));
    tokio::select! {
        answer = client.post(CHAT.path, &[], &body) => panic!("answered {answer:?}"),
        () = metrics_say(&world, "class=\"upstream5xx\"") => {}
    }
    drop(client);
    world.stop().await;
    assert_eq!(world.upstreams[0].calls().len(), 1);
    assert_eq!(world.table("select outcome, attempts from usage_events"), ["cancelled|1"]);
    assert_eq!(world.table("select status from usage_attempts"), ["503"]);
}

/// The error with which a broken stream ends, per dialect: its event and its type. A 4xx type would stop clients (E22).
fn interrupted(dialect: Dialect, stream: &str) {
    let last = stream.trim_end().rsplit("\n\n").next().unwrap_or_default();
    let (name, data) = last.split_once("data: ").expect("the last event has data");
    let data: Value = serde_json::from_str(data).expect("the data is JSON");
    let (expected_name, at, kind) = match dialect.path {
        "/v1/messages" => ("event: error\n", "/error/type", "api_error"),
        "/v1/responses" => ("event: response.failed\n", "/response/error/code", "server_error"),
        _ => ("", "/error/type", "server_error"),
    };
    assert_eq!(name, expected_name);
    assert_eq!(data.pointer(at), Some(&json!(kind)), "{data}");
    assert!(!stream.contains(dialect.last), "never a clean end");
}

/// S3.16, E07, E22, E23, CLIENTS 6: a stream that breaks after output ends in an error of its protocol; nobody else is
/// asked.
#[tokio::test]
async fn a_stream_that_breaks_after_output_says_so() {
    let breaks = [
        Action::CutAfterEvents { events: 5 },
        Action::EndAfterEvents { events: 5 },
        Action::StallAfterEvents { events: 5 },
    ];
    let mut world = World::start(Plan::of(&["a"]).settings(SHORT)).await;
    for dialect in DIALECTS {
        for does in &breaks {
            world.upstreams[0].push(does.clone());
            let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", true)).await;
            assert!(answer.whole && answer.status == 200, "{} {does:?}", dialect.path);
            interrupted(dialect, &answer.text());
        }
    }
    world.stop().await;
    assert_eq!(world.table("select outcome, status, attempts from usage_events"), ["interrupted|200|1"; 9]);
    assert_eq!(world.table("select count(*) from usage_attempts where output > 1 and estimated = 0"), ["0"]);
}

/// E07: the upstream's own error event passes as it is and ends the reply.
#[tokio::test]
async fn an_error_event_after_output_passes_unchanged() {
    let mut twins = Twins::start(SHORT).await;
    for dialect in DIALECTS {
        let does = [Action::ErrorEventAfter { events: 5, body: Value::Null }];
        let (answer, written) = twins.ask(dialect, &dialect.body("Hello", true), &does).await;
        assert_same(&answer.text(), &written.text(), dialect.path);
    }
    twins.world.stop().await;
    assert_eq!(twins.world.table("select outcome from usage_events"), ["interrupted"; 3]);
}

/// DESIGN 10: what an upstream says of the gateway's own account there is not the caller's business, in mid-stream too.
#[tokio::test]
async fn an_error_about_the_gateways_account_is_not_shown_in_mid_stream() {
    let mut twins = Twins::start(SHORT).await;
    for dialect in DIALECTS {
        let error = json!({ "code": "invalid_api_key", "message": "Incorrect API key provided: sk-upstr***" });
        let said = json!({ "type": "error", "error": error });
        let does = [Action::ErrorEventAfter { events: 5, body: said }];
        let (answer, written) = twins.ask(dialect, &dialect.body("Hello", true), &does).await;
        assert!(written.text().contains("sk-upstr"), "{}: {}", dialect.path, written.text());
        assert!(!answer.text().contains("sk-upstr"), "{}: {}", dialect.path, answer.text());
        interrupted(dialect, &answer.text());
    }
    twins.world.stop().await;
    assert_eq!(twins.world.table("select class from usage_attempts"), ["invalid_key"; 3]);
}

/// D15, E06, E18, E24, G12: what is no answer before the first output is answered by another deployment, whole and alone.
#[tokio::test]
async fn no_answer_before_output_is_answered_elsewhere() {
    let error = Action::ErrorEventAfter { events: 1, body: Value::Null };
    let faults: [(&str, Action, [bool; 2]); 10] = [
        ("error event", error, [false, true]),
        ("error in 200", Action::JsonErrorIn200 { body: Value::Null }, [true, true]),
        ("page", Action::Html, [true, true]),
        ("empty", Action::EmptyStream, [true, true]),
        ("other shape", Action::SwapShape, [true, true]),
        ("reset", Action::Reset, [true, true]),
        ("cut", Action::CutAfterEvents { events: 1 }, [true, true]),
        ("end", Action::EndAfterEvents { events: 1 }, [true, true]),
        ("silence", Action::StallAfterEvents { events: 1 }, [true, true]),
        ("no head", Action::Hang, [true, true]),
    ];
    let world = World::start(
        Plan { members: ["priority: 1", "priority: 2"].map(str::to_owned).to_vec(), ..Plan::of(&["a", "b"]) }
            .settings(SHORT),
    )
    .await;
    let client = world.client();
    for dialect in DIALECTS {
        for (name, does, shapes) in &faults {
            for (stream, applies) in [false, true].into_iter().zip(shapes) {
                if !applies {
                    continue;
                }
                let what = format!("{name} {} stream={stream}", dialect.path);
                let before = [0, 1].map(|at: usize| world.upstreams[at].calls().len());
                world.upstreams[0].push(does.clone());
                let answer =
                    client.post(dialect.path, &[("x-session-id", &what)], &dialect.body("Hello", stream)).await;
                assert_eq!(answer.status, 200, "{what}: {}", answer.text());
                assert_eq!(answer.header("x-waybill-deployment"), Some("b/gpt"), "{what}");
                assert_eq!(answer.header("x-waybill-attempts"), Some("2"), "{what}");
                assert_eq!(answer.text().contains(dialect.last), stream, "{what}: {}", answer.text());
                let after = [0, 1].map(|at: usize| world.upstreams[at].calls().len());
                assert_eq!(after, before.map(|calls| calls + 1), "{what}");
            }
        }
    }
}

/// E24: a plain answer that has begun may be silent for `idle_seconds`, whatever time is left; then another deployment
/// answers.
#[tokio::test]
async fn a_plain_answer_that_falls_silent_is_answered_elsewhere() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1, idle_seconds: 1 }\nhealth: { enabled: false }\n";
    let members = ["priority: 1", "priority: 2"].map(str::to_owned).to_vec();
    let mut world = World::start(Plan { members, ..Plan::of(&["a", "b"]) }.settings(settings)).await;
    let client = world.client();
    for dialect in DIALECTS {
        for events in [0, 1] {
            world.upstreams[0].push(Action::StallAfterEvents { events });
            let what = format!("{} {events}", dialect.path);
            let answer = client.post(dialect.path, &[("x-session-id", &what)], &dialect.body("Hello", false)).await;
            let deployment = answer.header("x-waybill-deployment");
            assert_eq!((answer.status.as_u16(), deployment), (200, Some("b/gpt")), "{what}");
        }
    }
    world.stop().await;
    assert_eq!(world.table("select class from usage_attempts where class <> 'success'"), ["timeout"; 6]);
}

/// E13: an event goes out when it comes, not when the next one does.
#[tokio::test]
async fn an_event_is_not_held_back() {
    let world = World::start(Plan::of(&["a"])).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Step::new([
            Action::Cr,
            Action::Chunks { chunks: 3 },
            Action::PauseAfter { events: 5 },
        ]));
        let client = world.client();
        let wanted = if dialect == RESPONSES { "output_text.delta" } else { "delta\":" };
        let response = dialect.read_until(&client, &dialect.body("Hello", true), wanted).await;
        world.upstreams[0].release();
        assert!(read(response).await.text().contains(dialect.last));
    }
}
