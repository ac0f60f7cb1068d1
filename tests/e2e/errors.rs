//! Errors: what a client is told, in its dialect, and what an error costs the deployments.

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, read};
use crate::dialect::{CHAT, DIALECTS, Dialect, MESSAGES, RESPONSES};
use crate::world::{Plan, World};

/// One send, short deadlines, no cooldown between the cases of a table.
const ONCE: &str = "retry: { backoff_ms: 1, max_attempts: 1, timeout_seconds: 1, first_token_seconds: 1 }\n\
                    health: { enabled: false }\n";

/// Checks that `answer` is an error of ours in `dialect`: its status, its code and whether it stops clients.
#[track_caller]
fn check(dialect: Dialect, answer: &Answer, status: u16, code: &str, stops: bool, what: &str) {
    assert_eq!(answer.status, status, "{what}: {}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"), "{what}");
    let body = answer.json();
    let error = &body["error"];
    assert_eq!(error["code"], code, "{what}: {body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{what}: {body}");
    assert!(
        error["type"].as_str().is_some_and(|kind| kind.ends_with("_error") || kind == "request_too_large"),
        "{what}: {body}"
    );
    let ours = answer.header("x-waybill-request-id").expect("every reply names its request");
    if dialect.is_anthropic() {
        assert_eq!(body["type"], "error", "{what}: {body}");
        assert_eq!(body["request_id"], ours);
        assert_eq!(answer.header("request-id"), Some(ours));
    } else {
        assert!(error.get("param").is_some(), "{what}: {body}");
        assert_eq!(answer.header("x-request-id"), Some(ours));
    }
    assert_eq!(answer.header("x-should-retry") == Some("false"), stops, "{what}");
}

/// CLIENTS 7 to 9, C12, C18, C33, D16, G12: one upstream, one send, one fault: what the client is told. The upstream's
/// own words pass unchanged (`theirs`), under a fitting status where theirs was 200, unless they are about the gateway's
/// account or no JSON.
#[tokio::test]
async fn a_client_is_told_what_happened_in_its_dialect() {
    const THEIRS: &str = "theirs";
    let page = Action::Status { status: 502, headers: Default::default(), body: json!("<html>bad gateway</html>") };
    let elsewhere = [("location".to_owned(), "http://127.0.0.1:1/".to_owned())];
    let moved = Action::Status { status: 302, headers: elsewhere.into(), body: json!({"error": {"message": "moved"}}) };
    let silent = Action::Status { status: 503, headers: Default::default(), body: json!("") };
    let faults: [(Action, u16, &str, Option<&str>); 18] = [
        (Action::status(500), 500, THEIRS, None),
        (Action::status(503), 503, THEIRS, None),
        (Action::status(529), 529, THEIRS, None),
        (Action::status_retry_after(503, 300), 503, THEIRS, Some("60")),
        (Action::status_retry_after(429, 7), 429, THEIRS, Some("7")),
        (Action::status_retry_after(429, 300), 429, THEIRS, Some("60")),
        (Action::status(429), 429, THEIRS, Some("1")),
        (Action::status(401), 503, "no_route_available", None),
        (Action::status(402), 503, "no_route_available", None),
        (Action::status(403), 503, "no_route_available", None),
        (moved, 502, "upstream_unavailable", None),
        (page, 502, "upstream_unavailable", None),
        (silent, 502, "upstream_unavailable", None),
        (Action::Html, 502, "upstream_unavailable", None),
        (Action::EmptyStream, 502, "upstream_unavailable", None),
        (Action::JsonErrorIn200 { body: Value::Null }, 500, THEIRS, None),
        (Action::Reset, 502, "upstream_unavailable", None),
        (Action::Hang, 504, "upstream_timeout", None),
    ];
    let world = World::start(Plan::of(&["a"]).settings(ONCE)).await;
    let client = world.client();
    for (does, status, code, retry_after) in faults {
        for (dialect, stream) in DIALECTS.into_iter().zip([false, true, true]) {
            let what = format!("{does:?} {}", dialect.path);
            world.upstreams[0].push(does.clone());
            let answer = client.post(dialect.path, &[("x-session-id", "s-1")], &dialect.body("Hello", stream)).await;
            if code == THEIRS {
                assert_eq!(answer.status, status, "{what}");
                assert_eq!(answer.header("x-should-retry"), Some("false"), "{what}");
                let error = &answer.json()["error"];
                assert_ne!(error["code"], "upstream_unavailable", "{what}");
                assert_eq!(answer.json()["type"] == "error", dialect.is_anthropic(), "{what}");
            } else {
                check(dialect, &answer, status, code, true, &what);
            }
            assert_eq!(answer.header("retry-after"), retry_after, "{what}");
            assert_eq!(answer.header("x-session-id"), Some("s-1"), "{what}");
            assert_eq!(answer.header("x-waybill-attempts"), Some("1"), "{what}");
        }
    }
}

/// S3.15, D02, D06, C16: a caller's mistake comes back as the upstream put it, after one call, and cools nobody.
#[tokio::test]
async fn a_callers_mistake_passes_unchanged_and_costs_nothing() {
    let settings = "health: { failure_threshold: 1 }\nretry: { backoff_ms: 1, max_attempts: 3 }\n";
    let mut world = World::start(Plan::of(&["a", "b"]).settings(settings)).await;
    let client = world.client();
    let words = r#"{"error" : {"message":"messages.0: \u00e9 odd","type":"invalid_request_error","param":"messages","code":null}}"#;
    for upstream in world.upstreams.iter() {
        let does = Action::Status { status: 400, headers: Default::default(), body: json!(words) };
        upstream.push(Step::new([does]).times(100));
    }
    for dialect in DIALECTS {
        for _ in 0..3 {
            let answer = client.post(dialect.path, &[], &dialect.body("Hello", true)).await;
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (400, words));
            assert_eq!(answer.header("x-waybill-attempts"), Some("1"));
            assert_eq!(answer.header("x-should-retry"), None);
        }
    }
    let calls: usize = world.upstreams.iter().map(|upstream| upstream.calls().len()).sum();
    assert_eq!(calls, 9);
    world.stop().await;
    assert_eq!(
        world.table("select distinct outcome, error_class, status from usage_events"),
        ["failed|caller_error|400"]
    );
}

/// C18, DESIGN 10: an upstream that refuses the gateway's credential, or is out of money, is passed over at once. Where
/// nobody is left, what an upstream says under 401, 402 or 403, or of them inside a 200, is not shown as the caller's own:
/// it comes unchanged under its class's status. A 403 about the content asked for is the caller's.
#[tokio::test]
async fn a_refused_credential_is_never_the_callers_401() {
    let members = ["priority: 1", "priority: 2"].map(str::to_owned).to_vec();
    let settings = "retry: { backoff_ms: 1, max_attempts: 3 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan { members, ..Plan::of(&["a", "b"]) }.settings(settings)).await;
    for status in [401, 402, 403] {
        for dialect in DIALECTS {
            world.upstreams[0].push(Action::status(status));
            let calls = world.upstreams[0].calls().len();
            let session = [("x-session-id", status.to_string())];
            let headers = session.each_ref().map(|(name, id)| (*name, id.as_str()));
            let answer = world.client().post(dialect.path, &headers, &dialect.body("Hello", false)).await;
            assert_eq!((answer.status.as_u16(), answer.header("x-waybill-deployment")), (200, Some("b/gpt")));
            assert_eq!(world.upstreams[0].calls().len(), calls + 1, "no second try with the same credential");
        }
    }

    let world = World::start(Plan::of(&["a"]).settings(ONCE)).await;
    let unknown = "The model `m` does not exist or you do not have access to it.";
    let in_200 = |error: Value| Action::JsonErrorIn200 { body: json!({ "error": error }) };
    let with = |status: u16, error: Value| Action::Status {
        status,
        headers: Default::default(),
        body: json!({ "error": error }),
    };
    let told = [
        (with(401, json!({"message": unknown})), 404),
        (with(403, json!({"message": unknown})), 404),
        (with(401, json!({"message": "no", "code": "unsupported_parameter"})), 400),
        (with(402, json!({"message": "wait", "code": "openrouter_in_flight_budget"})), 429),
        (with(403, json!({"message": "Content violates usage guidelines."})), 403),
        (with(403, json!({"message": "input too long", "code": "context_length_exceeded"})), 403),
        (in_200(json!({"message": unknown, "code": 401})), 404),
        (in_200(json!({"message": unknown, "type": "permission_error"})), 404),
        (in_200(json!({"message": "no", "code": "unsupported_parameter", "type": "authentication_error"})), 400),
        (in_200(json!({"message": "overloaded", "code": "engine_overloaded_error", "type": "billing_error"})), 502),
        (in_200(json!({"message": "Content violates usage guidelines.", "type": "permission_error"})), 403),
        (in_200(json!({"message": "no", "type": "not_found_error", "code": "unsupported_parameter"})), 404),
    ];
    for (does, status) in told {
        for dialect in DIALECTS {
            world.upstreams[0].push(does.clone());
            let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", false)).await;
            let (Action::Status { body, .. } | Action::JsonErrorIn200 { body }) = &does else { unreachable!() };
            let what = format!("{does:?} {}", dialect.path);
            assert_eq!((answer.status.as_u16(), &answer.json()), (status, body), "{what}");
        }
    }
}

/// CLIENTS 8, 10: what cannot be a request is refused here: right status, code, shape; nobody is called.
#[tokio::test]
async fn a_bad_request_is_refused_in_its_dialect() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let bodies: [(&[u8], u16, &str); 8] = [
        (b"{not json", 400, "invalid_body"),
        (b"", 400, "invalid_body"),
        (b"[1]", 400, "invalid_body"),
        (b"{\"model\":\"gpt\",\"messages\":\"\xff\"}", 400, "invalid_body"),
        (b"{\"messages\":[]}", 400, "invalid_body"),
        (b"{\"model\":7,\"messages\":[]}", 400, "invalid_body"),
        (b"{\"model\":\"gpt\",\"stream\":\"yes\"}", 400, "invalid_body"),
        (b"{\"model\":\"nobody\",\"messages\":[]}", 404, "model_not_found"),
    ];
    for dialect in DIALECTS {
        for (body, status, code) in bodies {
            let answer = client.post_bytes(dialect.path, &[], Bytes::from_static(body)).await;
            check(dialect, &answer, status, code, true, &format!("{} {}", dialect.path, String::from_utf8_lossy(body)));
        }
        for headers in
            [[("authorization", "Bearer sk-wrong")], [("x-api-key", "sk-wrong")], [("authorization", "Basic sk-world")]]
        {
            let answer = client.post(dialect.path, &headers, &dialect.body("Hello", false)).await;
            check(dialect, &answer, 401, "invalid_api_key", true, dialect.path);
        }
        for headers in [[("authorization", "bearer sk-world")], [("x-api-key", "sk-world")]] {
            assert_eq!(client.post(dialect.path, &headers, &dialect.body("Hello", false)).await.status, 200);
        }
    }
    assert_eq!(world.upstreams[0].calls().len(), 6);
}

/// G08: a body above the limit is refused in words, one below it passes.
#[tokio::test]
async fn a_body_above_the_limit_is_refused_in_words() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let body = |mib: usize| {
        let text = "x".repeat(mib << 20);
        Bytes::from(format!(r#"{{"model":"gpt","messages":[{{"role":"user","content":"{text}"}}]}}"#))
    };
    let large = body(65);
    for dialect in DIALECTS {
        let answer = client.post_bytes(dialect.path, &[], large.clone()).await;
        check(dialect, &answer, 413, "request_too_large", true, dialect.path);
        assert_eq!(answer.header("connection"), Some("close"), "no more may be sent behind what was not read");
    }
    let wrong = [("x-api-key", "sk-wrong")];
    let answer = client.post_bytes(CHAT.path, &wrong, body(33)).await;
    check(CHAT, &answer, 401, "invalid_api_key", true, "a refusal before the body is read");
    assert_eq!(client.post_bytes(CHAT.path, &[], body(33)).await.status, 200);
    assert_eq!(world.upstreams[0].calls().len(), 1);
}

/// S3.2: explicit sources that disagree, and ids that are none.
#[tokio::test]
async fn a_session_that_is_none_is_refused_in_every_dialect() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let long = "x".repeat(257);
    let cases: [(Option<&str>, Value, u16, &str); 13] = [
        (Some("a"), json!("b"), 400, "session_conflict"),
        (Some("a"), json!("a"), 200, ""),
        (Some(&long[..256]), Value::Null, 200, ""),
        (Some(&long), Value::Null, 400, "invalid_session_id"),
        (Some("a\tb"), Value::Null, 400, "invalid_session_id"),
        (Some(""), Value::Null, 400, "invalid_session_id"),
        (None, json!(long), 400, "invalid_session_id"),
        (None, json!("a\u{7}b"), 400, "invalid_session_id"),
        (None, json!("a\u{85}b"), 400, "invalid_session_id"),
        (None, json!(" a"), 400, "invalid_session_id"),
        (None, json!("a "), 400, "invalid_session_id"),
        (None, json!(""), 400, "invalid_session_id"),
        (None, json!(7), 400, "invalid_session_id"),
    ];
    let mut served = 0;
    for dialect in DIALECTS {
        for (header, id, status, code) in &cases {
            let headers: Vec<_> = header.map(|value| ("x-session-id", value)).into_iter().collect();
            let mut body = dialect.body("Hello", false);
            if !id.is_null() {
                body["session_id"] = id.clone();
            }
            let answer = client.post(dialect.path, &headers, &body).await;
            let what = format!("{} {header:?} {id}", dialect.path);
            if *status == 200 {
                served += 1;
                assert_eq!(answer.status, 200, "{what}");
            } else {
                check(dialect, &answer, *status, code, true, &what);
            }
        }
    }
    assert_eq!(world.upstreams[0].calls().len(), served);
}

/// S3.2, A19: so is a cache key that is none, and a conversation: neither ever becomes a session that others share.
#[tokio::test]
async fn a_cache_key_or_conversation_that_is_none_is_refused_in_the_dialect() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let long = "x".repeat(257);
    let ids = [json!("   "), json!(" abc "), json!(""), json!("a\nb"), json!(long), json!(7), json!(["a"])];
    for dialect in DIALECTS {
        let mut bodies: Vec<(&str, Value)> = ids.iter().map(|id| ("prompt_cache_key", id.clone())).collect();
        if dialect == RESPONSES {
            bodies.extend(ids.iter().map(|id| ("conversation", id.clone())));
            bodies.extend(ids.iter().map(|id| ("conversation", json!({ "id": id }))));
        }
        for (field, id) in bodies {
            let mut body = dialect.body("Hello", true);
            body[field] = id;
            let answer = client.post(dialect.path, &[], &body).await;
            check(dialect, &answer, 400, "invalid_session_id", true, &format!("{} {body}", dialect.path));
            if !dialect.is_anthropic() {
                assert_eq!(answer.json()["error"]["param"], field);
            }
        }
    }
    assert_eq!(world.upstreams[0].calls().len(), 0);
}

/// S3.3: a parent that nobody here is known to own is refused, never guessed past, with or without a session.
#[tokio::test]
async fn an_unknown_parent_is_refused() {
    let world = World::start(Plan::of(&["a"])).await;
    let mut body = RESPONSES.body("Explain more", false);
    body["previous_response_id"] = json!("resp_1");
    for headers in [&[][..], &[("x-session-id", "s-1")]] {
        let answer = world.client().post(RESPONSES.path, headers, &body).await;
        check(RESPONSES, &answer, 400, "previous_response_not_found", true, "parent");
        assert_eq!(answer.json()["error"]["param"], "previous_response_id");
    }
    assert_eq!(world.upstreams[0].calls().len(), 0);
}

/// CLIENTS 11, DESIGN 9: WebSockets, unknown paths, wrong methods, probes and lists.
#[tokio::test]
async fn other_paths_answer_as_clients_expect() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let upgrade = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let anthropic = ("anthropic-version", "2023-06-01");
    assert_eq!(client.get(RESPONSES.path, &upgrade).await.status, 426);
    for (headers, typed) in [(&[][..], false), (&[anthropic], true)] {
        let answer = client.get("/v1/nothing", headers).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (404, &json!("not_found")));
        assert_eq!(answer.json()["type"] == "error", typed);
        let wrong = client.get(CHAT.path, headers).await;
        assert_eq!((wrong.status.as_u16(), &wrong.json()["error"]["code"]), (405, &json!("method_not_allowed")));
        assert_eq!(client.get("/v1/models/nobody", headers).await.status, 404);
        let list = client.get("/v1/models", headers).await.json();
        let one = client.get("/v1/models/gpt", headers).await.json();
        assert_eq!((&list["data"][0]["id"], &one["id"]), (&json!("gpt"), &json!("gpt")));
        let mark = if typed { ("type", "model") } else { ("object", "model") };
        assert_eq!((&list["data"][0][mark.0], &one[mark.0]), (&json!(mark.1), &json!(mark.1)));
    }
    assert_eq!(client.get("/v1/models", &[("x-api-key", "sk-wrong")]).await.status, 401);
    let probe = client.open(Method::HEAD, "/", &[], Bytes::new()).await.expect("the gateway answers");
    let probe = read(probe).await;
    assert_eq!((probe.status.as_u16(), probe.body.len()), (200, 0));
    assert_eq!(world.upstreams[0].calls().len(), 0);
}

/// C13, C14, CLIENTS 7: while all cool, nobody is called; the header says when to come back, at most 60 s, the body
/// the true time.
#[tokio::test]
async fn all_cooling_is_said_truthfully() {
    let settings =
        "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1, cooldown_seconds: 300 }\n";
    let mut world = World::start(Plan::of(&["a"]).settings(settings)).await;
    world.upstreams[0].push(Action::status(503));
    assert_eq!(world.client().post(CHAT.path, &[], &CHAT.body("Hello", false)).await.status, 503);
    for dialect in DIALECTS {
        let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", true)).await;
        check(dialect, &answer, 503, "no_route_available", false, dialect.path);
        assert_eq!(answer.header("retry-after"), Some("60"));
        let message = answer.json()["error"]["message"].to_string();
        let true_times = (290..=300).map(|seconds| format!("{seconds} s"));
        assert!(true_times.into_iter().any(|time| message.contains(&time)), "{message}");
        let kind = if dialect.is_anthropic() { "overloaded_error" } else { "server_error" };
        assert_eq!(answer.json()["error"]["type"], kind);
    }
    assert_eq!(world.upstreams[0].calls().len(), 1);
    world.stop().await;
    let rows = world.table("select outcome, coalesce(code, '-'), attempts from usage_events order by started");
    assert_eq!(rows[1..], ["refused|no_route_available|0"; 3]);
}

/// E24, D05: a request ends within its time, however many sends it makes.
#[tokio::test]
async fn a_request_ends_within_its_time() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1, timeout_seconds: 2 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan::of(&["a", "b"]).settings(settings)).await;
    for upstream in world.upstreams.iter() {
        upstream.push(Step::new([Action::DelayHead { ms: 1500 }, Action::status(503)]).standing());
    }
    let client = world.client();
    for stream in [false, true] {
        let answer = client.post(MESSAGES.path, &[], &MESSAGES.body("Hello", stream)).await;
        check(MESSAGES, &answer, 504, "upstream_timeout", true, "the second send would end after three seconds");
    }
}
