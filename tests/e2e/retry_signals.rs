//! Retry signals: what every answer that can leave tells a client about trying again (CLIENTS 7, 8, 9; C12, C13).
//!
//! Each line of a table is an answer as `status code retry-after x-should-retry`, `-` where there is none; `theirs` is
//! an upstream's own body, byte for byte.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use waybill_simulator::Action;

use crate::client::{Answer, Client, read};
use crate::dialect::{CHAT, DIALECTS, MESSAGES, RESPONSES};
use crate::world::{EVERY_DIALECT, Plan, World};

/// The words of an upstream, spaced and escaped as no serialiser of ours would.
const THEIRS: &str = r#"{"type":"error","error" : {"message":"\u00e9 odd","type":"some_error","code":"theirs"}}"#;

/// One send, no cooldown between the lines of a table.
const ONCE: &str = "retry: { backoff_ms: 1, max_attempts: 1, retry_times: 1, timeout_seconds: 1, first_token_seconds: 1 }\n\
                    health: { enabled: false }\n";

#[track_caller]
fn check(answer: &Answer, expected: &str, what: &str) {
    let code = answer.json()["error"]["code"].as_str().unwrap_or("-").to_owned();
    let header = |name| answer.header(name).unwrap_or("-").to_owned();
    let seen = format!("{} {code} {} {}", answer.status.as_u16(), header("retry-after"), header("x-should-retry"));
    assert_eq!(seen, expected, "{what}: {}", answer.text());
    if code == "theirs" {
        assert_eq!(answer.text(), THEIRS, "{what}");
    }
}

/// An upstream's error with this code and these words.
fn said(status: u16, code: &str, message: &str) -> Action {
    let body = json!({"type": "error", "error": {"type": "t", "code": code, "message": message}});
    Action::Status { status, headers: BTreeMap::new(), body }
}

fn theirs(status: u16, headers: &[(&str, &str)]) -> Action {
    let headers: BTreeMap<_, _> = headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    Action::Status { status, headers, body: json!(THEIRS) }
}

#[tokio::test]
async fn an_upstreams_error_says_truly_whether_and_when_to_retry() {
    let table = [
        // About the request: another send cannot help, the SDKs know by the status, and the words are not ours.
        (theirs(400, &[]), "400 theirs - -"),
        (theirs(413, &[]), "413 theirs - -"),
        (theirs(422, &[("retry-after", "soon")]), "422 theirs - -"),
        (theirs(409, &[("retry-after", "5")]), "409 theirs 5 -"),
        (theirs(400, &[("x-should-retry", "true")]), "400 theirs - true"),
        (said(400, "context_length_exceeded", "m"), "400 context_length_exceeded - -"),
        (said(403, "content_filter", "m"), "403 content_filter - -"),
        // The same under a status that the SDKs retry.
        (said(500, "context_length_exceeded", "m"), "500 context_length_exceeded - false"),
        (said(429, "content_filter", "m"), "429 content_filter - false"),
        // No time comes at which it fits.
        (said(429, "c", "Request too large for gpt on tokens per min"), "429 c - false"),
        // A day is a minute to who believes no day.
        (said(429, "c", "Please retry after 86400 seconds."), "429 c 60 false"),
        // About the upstream: tried here to the end.
        (theirs(429, &[("retry-after", "7")]), "429 theirs 7 false"),
        (theirs(429, &[("retry-after", "0.5")]), "429 theirs 1 false"),
        (theirs(429, &[("retry-after", "86400")]), "429 theirs 60 false"),
        (theirs(429, &[("retry-after-ms", "2400")]), "429 theirs 3 false"),
        (theirs(429, &[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")]), "429 theirs 1 false"),
        (theirs(429, &[("retry-after", "-1")]), "429 theirs 1 false"),
        (theirs(429, &[]), "429 theirs 1 false"),
        (theirs(500, &[("x-should-retry", "true")]), "500 theirs - false"),
        (theirs(503, &[("retry-after", "9")]), "503 theirs 9 false"),
        (theirs(503, &[("retry-after", "nonsense")]), "503 theirs - false"),
        (theirs(529, &[]), "529 theirs - false"),
        (theirs(404, &[]), "404 theirs - false"),
        (said(404, "model_not_found", "m"), "404 model_not_found - false"),
        (said(503, "1305", "Please retry in 40s"), "503 1305 40 false"),
        (said(408, "c", "m"), "408 c - false"),
        (said(524, "c", "m"), "524 c - false"),
        // Inside a 200: under the status that it stands for.
        (said(200, "rate_limit_exceeded", "Please try again in 7s"), "429 rate_limit_exceeded 7 false"),
        (said(200, "server_is_overloaded", "m"), "503 server_is_overloaded - false"),
        (said(200, "context_length_exceeded", "m"), "400 context_length_exceeded - -"),
        (said(200, "invalid_api_key", "m"), "503 no_route_available - false"),
        // About the gateway's account: in our words. No money comes back by waiting (PROVIDER_ERRORS Q03).
        (theirs(401, &[]), "503 no_route_available - false"),
        (theirs(402, &[("retry-after", "30")]), "503 no_route_available - false"),
        // No answer, or none that can be read.
        (Action::Html, "502 upstream_unavailable - false"),
        (Action::Reset, "502 upstream_unavailable - false"),
        (Action::Hang, "504 upstream_timeout - false"),
    ];
    let world = World::start(Plan::of(&["a"]).settings(ONCE)).await;
    let n_sends = table.len() * DIALECTS.len();
    for (does, expected) in table {
        for dialect in DIALECTS {
            world.upstreams[0].push(does.clone());
            let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", true)).await;
            check(&answer, expected, &format!("{does:?} {}", dialect.path));
        }
    }
    assert_eq!(world.calls().len(), n_sends);
}

/// Our own refusals: another try of the same request is refused the same.
#[tokio::test]
async fn a_refusal_stops_clients_unless_time_alone_can_help() {
    let plan = Plan {
        rows: crate::world::Rows {
            routes: vec![
                "{ model: out, members: [{ channel: a, group: main, weight: 0 }] }".to_owned(),
                "{ model: off, members: [{ channel: a, group: main, status: disabled }] }".to_owned(),
            ],
            ..Default::default()
        },
        ..Plan::of(&["a"])
    };
    let settings =
        "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1, cooldown_seconds: 30 }\n";
    let world = World::start(plan.settings(settings)).await;
    let client = world.client();
    for dialect in DIALECTS {
        let send = async |headers: &[(&str, &str)], changes: Value| {
            let mut body = dialect.body("Hello", false);
            let changed = changes.as_object().expect("an object").clone();
            body.as_object_mut().expect("an object").extend(changed);
            client.post(dialect.path, headers, &body).await
        };
        let what = dialect.path;
        check(&send(&[("authorization", "Bearer no")], json!({})).await, "401 invalid_api_key - false", what);
        check(&send(&[], json!({"stream": 1})).await, "400 invalid_body - false", what);
        check(&send(&[], json!({"model": "nobody"})).await, "404 model_not_found - false", what);
        check(&send(&[("x-waybill-group", "x")], json!({})).await, "403 group_not_allowed - false", what);
        check(&send(&[("x-session-id", " ")], json!({})).await, "400 invalid_session_id - false", what);
        check(&send(&[], json!({"model": "out"})).await, "503 no_route_available - false", what);
        check(&send(&[], json!({"model": "off"})).await, "503 no_route_available - false", what);
    }
    check_pages(&client).await;
    assert_eq!(world.calls().len(), 0);

    world.upstreams[0].push(Action::status(500));
    client.post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
    for dialect in DIALECTS {
        let answer = client.post(dialect.path, &[], &dialect.body("Hello", false)).await;
        let wait: u64 = answer.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait in seconds");
        assert!((20..=30).contains(&wait), "{wait}");
        check(&answer, &format!("503 no_route_available {wait} -"), "all are cooling, and will have cooled");
    }
}

/// The pages beside the dialects.
async fn check_pages(client: &Client) {
    let upgrade = [("connection", "Upgrade"), ("upgrade", "websocket")];
    check(&client.get(RESPONSES.path, &upgrade).await, "426 websocket_not_offered - false", "a WebSocket");
    check(&client.get(CHAT.path, &[]).await, "405 method_not_allowed - false", "GET");
    check(&client.get("/v1/nothing", &[]).await, "404 not_found - false", "an unknown path");
    check(&client.get("/v1/models/nobody", &[]).await, "404 model_not_found - false", "an unknown model");
    let listed = client.get("/v1/models", &[("authorization", "Bearer no")]).await;
    check(&listed, "401 invalid_api_key - false", "models without a key");
    let digest = client.get("/debug/state-digest", &[("authorization", "Bearer no")]).await;
    check(&digest, "401 invalid_api_key - false", "a digest without a key");
}

/// No deployment counts tokens: 501, and nobody tries again (CLIENTS, "Official contract").
#[tokio::test]
async fn a_missing_count_of_tokens_is_said_once() {
    let channel = "dialects: [chat]";
    let plan = Plan::of(&["a"]);
    let world = World::start(plan).await;
    let yaml = std::fs::read_to_string(world.config()).expect("the configuration can be read");
    let yaml = yaml.replace(&format!("dialects: [{EVERY_DIALECT}]"), channel);
    std::fs::write(world.config(), yaml).expect("the configuration can be written");
    let client = world.client();
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    // The file is watched; the first refusal shows that it is in force.
    let refused = async {
        loop {
            let answer = client.post("/v1/messages/count_tokens", &[], &body).await;
            if answer.status != 200 {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(crate::world::PATIENCE, refused).await.expect("the change comes into force");
    check(&answer, "501 not_supported - false", "count_tokens");
    let answer = client.post(MESSAGES.path, &[], &MESSAGES.body("Hello", false)).await;
    check(&answer, "503 no_route_available - false", "messages");
}

/// What may have been done is not done again, by nobody: not here, and not by the client's SDK.
#[tokio::test]
async fn an_unknown_outcome_is_not_retried_by_anyone() {
    let world = World::start(Plan::of(&["a", "b"]).settings(ONCE)).await;
    let mut body = RESPONSES.body("Hello", false);
    body["background"] = json!(true);
    for upstream in world.upstreams.iter() {
        upstream.push(theirs(500, &[]));
    }
    let answer = world.client().post(RESPONSES.path, &[], &body).await;
    check(&answer, "500 theirs - false", "a background response");
    assert_eq!(world.calls().len(), 1);
}

/// A body that breaks off, or is too large, costs nobody anything.
#[tokio::test]
async fn a_body_too_large_is_refused_for_good() {
    let world = World::start(Plan::of(&["a"])).await;
    let large = Bytes::from(vec![b' '; (64 << 20) + 1]);
    let response = world.client().open(Method::POST, CHAT.path, &[], large).await.expect("the gateway answers");
    check(&read(response).await, "413 request_too_large - false", "65 MiB");
    assert_eq!(world.calls().len(), 0);
}
