//! The admin interface, asked over its router.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use http::Request;
use serde_json::{Value, json};
use tower::ServiceExt;
use waybill_auditor::admin::{Admin, Sources, router};
use waybill_auditor::usage::{PostgresUsage, SqliteUsage};

use crate::House;
use crate::sessions::house;

/// More bytes than an answer has.
const ANSWER_BYTES_MAX: usize = 1 << 20;

fn pages(house: &House) -> Router {
    let usage = Some(Box::new(SqliteUsage::new(house.audit())) as _);
    router(Arc::new(Admin::new("s3cret", Sources { usage, log: Box::new(house.audit()) })))
}

/// Asks with a token; gives status and body.
async fn ask_with(pages: &Router, authorization: &str, path: &str) -> (u16, Value) {
    let request = Request::get(format!("/admin/v1{path}")).header("authorization", authorization).body(Body::empty());
    let answer = pages.clone().oneshot(request.expect("the request is valid")).await.expect("a router answers");
    let status = answer.status().as_u16();
    let body = to_bytes(answer.into_body(), ANSWER_BYTES_MAX).await.expect("the answer is whole");
    (status, serde_json::from_slice(&body).expect("every answer is JSON"))
}

async fn ask(pages: &Router, path: &str) -> Value {
    let (status, body) = ask_with(pages, "Bearer s3cret", path).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

async fn refused(pages: &Router, path: &str) -> (u16, Value) {
    let (status, mut body) = ask_with(pages, "Bearer s3cret", path).await;
    (status, body["error"]["code"].take())
}

#[tokio::test]
async fn only_the_admin_token_opens_the_pages() {
    let house = house();
    let pages = pages(&house);
    for authorization in ["", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret"] {
        let (status, body) = ask_with(&pages, authorization, "/sessions").await;
        assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_admin_token")), "{authorization}");
    }
    ask(&pages, "/sessions").await;
}

#[tokio::test]
async fn sessions_rounds_and_requests_are_pages() {
    let house = house();
    let pages = pages(&house);
    let first = ask(&pages, "/sessions?scope=acme&limit=5").await;
    assert_eq!(first["entries"].as_array().map(Vec::len), Some(5));
    let cursor = first["next"].as_str().expect("another page follows");
    let second = ask(&pages, &format!("/sessions?scope=acme&limit=5&cursor={cursor}")).await;
    assert_eq!((&second["entries"][0]["session"], &second["next"]), (&json!("prompt:v1:77"), &Value::Null));
    assert_eq!(
        (&first["entries"][4]["session"], &first["entries"][4]["totals"]["cost_nano"]),
        (&json!("talk"), &json!(19))
    );
    let since = ask(&pages, "/sessions?since=1970-01-01T00:00:07Z&model=gpt").await;
    assert_eq!(since["entries"].as_array().map(Vec::len), Some(2));

    let talk = ask(&pages, "/sessions/talk?scope=acme").await;
    assert_eq!((&talk["session"]["requests"], &talk["entries"][1]["request"]), (&json!(2), &json!("r-3")));
    let prompt = ask(&pages, "/sessions/prompt%3Av1%3A77").await;
    assert_eq!((&prompt["session"]["inferred"], &prompt["next"]), (&json!(true), &Value::Null));

    let request = ask(&pages, "/requests/r-1").await;
    assert_eq!((&request["targets"][0]["class"], &request["totals"]["cost_nano"]), (&json!("upstream5xx"), &json!(12)));
    let explained = ask(&pages, "/requests/r-1/explain").await;
    assert_eq!((&explained["request"], &explained["sends"][1]["attempt"]), (&json!("r-1"), &json!(2)));
    let projections = ask(&pages, "/projections").await;
    assert_eq!(projections["entries"][0]["lag_frames"], 0);
}

#[tokio::test]
async fn what_cannot_be_answered_says_why_with_a_code() {
    let house = house();
    let pages = pages(&house);
    let cases = [
        ("/sessions?limit=0", 400, "invalid_limit"),
        ("/sessions?limit=501", 400, "invalid_limit"),
        ("/sessions?limit=many", 400, "invalid_query"),
        ("/sessions?cursor=6e6f", 400, "invalid_cursor"),
        ("/sessions?since=yesterday", 400, "invalid_query"),
        ("/sessions?scop=acme", 400, "invalid_query"),
        ("/sessions/talk", 400, "scope_required"),
        ("/sessions/%FF", 400, "invalid_query"),
        ("/sessions/a%00b", 404, "session_not_found"),
        ("/sessions/nobody", 404, "session_not_found"),
        ("/requests/nobody", 404, "request_not_found"),
        ("/requests/nobody/explain", 404, "request_not_found"),
        ("/nothing", 404, "not_found"),
    ];
    for (path, status, code) in cases {
        assert_eq!(refused(&pages, path).await, (status, json!(code)), "{path}");
    }
}

/// Port 9 of this machine refuses connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_is_a_503_with_a_code() {
    let house = house();
    let away = PostgresUsage::new("postgres://waybill@127.0.0.1:9/none", tokio::runtime::Handle::current());
    let usage = Some(Box::new(away.expect("the url is good")) as _);
    let with = |usage| router(Arc::new(Admin::new("s3cret", Sources { usage, log: Box::new(house.audit()) })));
    for pages in [with(usage), with(None)] {
        for path in ["/sessions", "/sessions/talk", "/requests/r-1", "/requests/r-1/explain", "/projections"] {
            assert_eq!(refused(&pages, path).await, (503, json!("usage_unavailable")), "{path}");
        }
    }
}
