//! What crosses the gateway and what does not: bodies byte for byte, headers, credentials, queries, groups.

use std::collections::BTreeMap;

use bytes::Bytes;
use waybill_simulator::{Action, Call, Step};

use crate::client::{Answer, Client};
use crate::dialect::{CHAT, DIALECTS, MESSAGES, RESPONSES};
use crate::world::{Plan, Rows, World};

const ODD: &str = r#"{ "model" : "gpt",
	"messages":[{"role":"user","content":"caf\u00e9 \ud83d\ude00 \/ é\u0000"}], "input": [ ] ,"seed":123456789012345678901234567890,
 "x":1,"x":{"x":[1.0e0,1E+2,-0]},"prompt_cache_key":"k-1","unknown":null, "max_tokens":8 }
 "#;

/// Posts `body` and compares the bytes that the upstream got with `expected`.
#[track_caller]
fn check(call: &Call, expected: &str) {
    assert_eq!(String::from_utf8_lossy(&call.body), expected);
    assert_eq!(call.header("content-length"), Some(expected.len().to_string().as_str()), "framed once and rightly");
}

async fn last_call(world: &World, client: &Client, path: &str, headers: &[(&str, &str)], body: &str) -> (Call, Answer) {
    let answer = client.post_bytes(path, headers, Bytes::from(body.to_owned())).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let call = world.upstreams[0].calls().pop().expect("the upstream was called");
    (call, answer)
}

/// S1.10, A21, A23: whitespace, escapes, duplicate and unknown fields, huge numbers and the cache key reach the upstream
/// as they came.
#[tokio::test]
async fn a_body_reaches_the_upstream_byte_for_byte() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    for dialect in DIALECTS {
        let (call, _) = last_call(&world, &client, dialect.path, &[], ODD).await;
        check(&call, ODD);
    }
}

/// S1.3, S1.10: only the model's name is exchanged, and only where it stands as the model.
#[tokio::test]
async fn only_the_mapped_model_name_changes() {
    let plan = Plan { members: vec!["priority: 10, upstream_model: gpt-real-2026".to_owned()], ..Plan::of(&["a"]) };
    let world = World::start(plan).await;
    let client = world.client();
    for dialect in DIALECTS {
        let body = ODD.replace(r#""unknown":null"#, r#""unknown":{"model":"gpt"},"user":"gpt""#);
        let (call, _) = last_call(&world, &client, dialect.path, &[], &body).await;
        check(&call, &body.replacen(r#""gpt""#, r#""gpt-real-2026""#, 1));
        assert_eq!(call.model.as_deref(), Some("gpt-real-2026"));
    }
}

/// E15: the usage chunk is asked for in chat streams, in place; the other dialects report usage by themselves.
#[tokio::test]
async fn a_stream_asks_for_usage_and_changes_nothing_else() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let stream = ODD.replace(r#""unknown":null"#, r#""stream":true"#);
    for dialect in [RESPONSES, MESSAGES] {
        let (call, _) = last_call(&world, &client, dialect.path, &[], &stream).await;
        check(&call, &stream);
    }
    let asking = r#","stream_options":{"include_usage":true}}"#;
    let (call, _) = last_call(&world, &client, CHAT.path, &[], &stream).await;
    check(&call, &stream.replace("8 }", &format!("8 {asking}")));
    for (given, sent) in [
        (r#"{"include_usage":true }"#, r#"{"include_usage":true }"#),
        (r#"{ "include_usage" : false }"#, r#"{ "include_usage" : true }"#),
        (r#"{"include_obfuscation":false}"#, r#"{"include_usage":true,"include_obfuscation":false}"#),
        (r#"{ }"#, r#"{"include_usage":true }"#),
        (r#"null"#, r#"{"include_usage":true}"#),
    ] {
        let with = |options: &str| stream.replace(r#""x":1"#, &format!(r#""x":1,"stream_options":{options}"#));
        let (call, _) = last_call(&world, &client, CHAT.path, &[], &with(given)).await;
        check(&call, &with(sent));
    }
}

/// S1.10, G02, G04, PITFALLS G: features and ids cross; credentials, cookies and what belongs to one connection do not.
#[tokio::test]
async fn request_headers_cross_but_for_secrets_and_hops() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let crossing = [
        ("anthropic-version", "2026-10-21"),
        ("anthropic-beta", "one,two"),
        ("openai-beta", "responses=v1"),
        ("x-session-id", "s-1"),
        ("x-client-request-id", "r-1"),
        ("idempotency-key", "i-1"),
        ("user-agent", "agent/1"),
        ("accept", "text/event-stream"),
    ];
    let staying = [
        ("cookie", "a=b"),
        ("connection", "x-hop, keep-alive"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic x"),
        ("api-key", "sk-azure"),
        ("x-goog-api-key", "sk-google"),
        ("x-forwarded-for", "10.0.0.1"),
        ("forwarded", "for=10.0.0.1"),
        ("x-waybill-group", "main"),
        ("x-relay-route-id", "forged"),
    ];
    for dialect in DIALECTS {
        let key = if dialect.is_anthropic() { ("x-api-key", "sk-world") } else { ("authorization", "Bearer sk-world") };
        let headers = [&crossing[..], &staying[..], &[key, ("accept-encoding", "gzip, br")]].concat();
        let path = format!("{}?beta=true&a=%20b", dialect.path);
        let (call, _) = last_call(&world, &client, &path, &headers, ODD).await;
        assert_eq!(call.path, path);
        for (name, value) in crossing {
            let found: Vec<_> = call.headers.iter().filter(|(found, _)| found == name).collect();
            assert_eq!(found, [&(name.to_owned(), value.to_owned())], "{name} crosses once");
        }
        for (name, value) in staying {
            assert_ne!(call.header(name), Some(value), "{name} stays");
        }
        assert_eq!(call.header("accept-encoding"), Some("identity"));
        let (authorization, x_api_key) = (call.header("authorization"), call.header("x-api-key"));
        let expected =
            if dialect.is_anthropic() { (None, Some("sk-upstream")) } else { (Some("Bearer sk-upstream"), None) };
        assert_eq!((authorization, x_api_key), expected);
        assert!(!format!("{:?}", call.headers).contains("sk-world"), "the caller's key stays here");
    }
}

/// CLIENTS: the quota of the organisation, cookies, routes and another gateway's marks do not reach the client; what
/// tells of the model does. S3.4: pages may read the session.
#[tokio::test]
async fn reply_headers_cross_but_for_what_is_private() {
    let world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    let private = [
        "x-ratelimit-remaining-requests",
        "anthropic-ratelimit-tokens-remaining",
        "ratelimit-remaining",
        "x-ratelimitbysize-remaining-minute",
        "set-cookie",
        "openai-organization",
        "openai-project",
        "x-relay-route-id",
        "x-waybill-history-mode",
    ];
    let ours = ["x-session-id", "x-request-id", "request-id", "x-waybill-deployment"];
    let headers: BTreeMap<String, String> = private
        .iter()
        .chain(&ours)
        .map(|name| (*name, "theirs"))
        .chain([("openai-processing-ms", "12"), ("x-hop", "1"), ("connection", "x-hop")])
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    for dialect in DIALECTS {
        for stream in [false, true] {
            world.upstreams[0].push(Step::new([Action::Headers { headers: headers.clone() }]));
            let body = dialect.body("Hello", stream).to_string();
            let (_, answer) = last_call(&world, &client, dialect.path, &[("x-session-id", "s-1")], &body).await;
            for name in private.iter().chain(&["x-hop"]) {
                assert_eq!(answer.header(name), None, "{name} stays");
            }
            for name in ours {
                assert_ne!(answer.header(name), Some("theirs"), "{name} is ours");
            }
            assert_eq!(answer.header("openai-processing-ms"), Some("12"));
            assert_eq!(answer.header("x-session-id"), Some("s-1"));
            assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
            let exposed = answer.header("access-control-expose-headers").expect("pages may read headers of ours");
            assert!(exposed.to_ascii_lowercase().contains("x-session-id"));
        }
    }
}

/// S3.4: an id that is not ASCII comes back as it was sent.
#[tokio::test]
async fn a_session_in_any_script_is_named_in_the_reply() {
    let world = World::start(Plan::of(&["a"])).await;
    let mut body = CHAT.body("Hello", false);
    body["session_id"] = "会话-1".into();
    let answer = world.client().post(CHAT.path, &[], &body).await;
    assert_eq!(answer.headers["x-session-id"].as_bytes(), "会话-1".as_bytes());
}

/// S1.10: the route is named to a host that asks for it, and to nobody else.
#[tokio::test]
async fn internal_headers_go_only_to_channels_that_ask() {
    for (channel, expected) in [
        ("internal_headers: true, labels: { shadow_group: gpt__a }", [Some("main"), Some("gpt__a")]),
        ("labels: { shadow_group: gpt__a }", [None, None]),
    ] {
        let world = World::start(Plan { channel: channel.to_owned(), ..Plan::of(&["a"]) }).await;
        let (call, answer) = last_call(&world, &world.client(), CHAT.path, &[], ODD).await;
        assert_eq!([call.header("x-relay-logical-group"), call.header("x-relay-shadow-group")], expected);
        assert_eq!(call.header("x-relay-route-id").is_some(), expected[0].is_some());
        assert!(answer.headers.keys().all(|name| !name.as_str().starts_with("x-relay-")));
    }
}

/// S1.4: a header or a prefix of the model chooses among the groups of the key; other groups are not reached.
#[tokio::test]
async fn the_request_may_choose_a_group_that_its_key_allows() {
    let rows = Rows {
        groups: vec!["{ id: side }".to_owned(), "{ id: closed }".to_owned()],
        routes: vec![
            "{ model: gpt-side, members: [{ channel: a, group: side, upstream_model: gpt }] }".to_owned(),
            "{ model: gpt-closed, members: [{ channel: a, group: closed, upstream_model: gpt }] }".to_owned(),
        ],
        keys: vec!["{ id: both, key: 'env:BOTH_KEY', group: main, groups: [side] }".to_owned()],
        ..Rows::default()
    };
    let world = World::start(Plan { rows, ..Plan::of(&["a"]) }).await;
    let client = world.client_with("sk-both");
    let body = |model: &str| CHAT.body("Hello", false).to_string().replacen("\"gpt\"", &format!("\"{model}\""), 1);
    let post = async |group: Option<&str>, model: &str| {
        let headers: Vec<_> = group.map(|group| ("x-waybill-group", group)).into_iter().collect();
        client.post_bytes(CHAT.path, &headers, body(model).into()).await
    };
    for (group, model) in [(Some("side"), "gpt-side"), (None, "side/gpt-side"), (None, "main/gpt"), (None, "gpt")] {
        let answer = post(group, model).await;
        assert_eq!(answer.status, 200, "{group:?} {model}: {}", answer.text());
        assert_eq!(world.upstreams[0].calls().last().and_then(|call| call.model.clone()).as_deref(), Some("gpt"));
    }
    for (group, model, status, code) in [
        (Some("closed"), "gpt-closed", 403, "group_not_allowed"),
        (Some("nowhere"), "gpt", 403, "group_not_allowed"),
        (None, "closed/gpt-closed", 404, "model_not_found"),
        (None, "gpt-side", 404, "model_not_found"),
        (Some("side"), "gpt", 404, "model_not_found"),
    ] {
        let answer = post(group, model).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["code"]),
            (status, &code.into()),
            "{group:?} {model}"
        );
    }
    assert_eq!(world.upstreams[0].calls().len(), 4, "a refusal calls nobody");
}
