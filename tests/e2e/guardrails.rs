//! Guardrails: what is refused before anything is sent, and that what it said is kept nowhere (S3.11, S3.15).

use std::fs::File;

use serde_json::{Value, json};
use waybill_simulator::{Action, Settings, Simulator, Step};

use crate::client::Answer;
use crate::dialect::{CHAT, DIALECTS, MESSAGES};
use crate::world::{Plan, Rows, World};

/// A world in which the key `sk-limited` has guardrails, written as the inside of a YAML map.
fn plan(guardrails: &str) -> Plan {
    let key = format!("{{ id: limited, key: 'env:LIMITED_KEY', group: main, guardrails: {{ {guardrails} }} }}");
    Plan { rows: Rows { keys: vec![key], ..Rows::default() }, ..Plan::of(&["a"]) }
}

#[track_caller]
fn check(answer: &Answer, status: u16, code: &str, retry: Option<&str>) {
    let body = answer.json();
    assert_eq!((answer.status.as_u16(), &body["error"]["code"]), (status, &json!(code)), "{body}");
    assert_eq!(answer.header("x-should-retry"), retry, "{body}");
}

/// A text that matches is refused whatever its escapes; the refusal is recorded, the text is nowhere: in no fact, no
/// row, no message of the process.
#[tokio::test]
async fn a_denied_text_is_refused_and_kept_nowhere() {
    const DENIED: &str = "Sphinx-4711";
    let mut world = World::start(plan("deny: ['(?i)sphinx-\\d+', '^$x']")).await;
    world.kill().await;
    let said = world.folder.path().join("said");
    world.restart_talkative(File::create(&said).expect("a file can be made")).await;
    let limited = world.client_with("sk-limited");
    for dialect in DIALECTS {
        for text in [DENIED, "on project SPHINX-1, today"] {
            let answer = limited.post(dialect.path, &[], &dialect.body(text, true)).await;
            check(&answer, 400, "guardrail_denied", Some("false"));
            assert!(!answer.text().to_lowercase().contains("sphinx"), "{}", answer.text());
        }
        let passes = limited.post(dialect.path, &[], &dialect.body("on project sphinx, today", false)).await;
        assert_eq!(passes.status, 200, "{}", passes.text());
    }
    let escaped = r#"{"model":"gpt","messages":[{"role":"user","content":"\u0053phin\u0078-4711"}]}"#;
    check(&limited.post_bytes(CHAT.path, &[], escaped.into()).await, 400, "guardrail_denied", Some("false"));
    let others = world.client().post(CHAT.path, &[], &CHAT.body("about Sphinx-12", false)).await;
    assert_eq!(others.status, 200, "another key has no guardrails");
    assert_eq!(world.calls().len(), 4);
    world.stop().await;
    let rows = "select outcome, code, attempts, count(*) from usage_events where outcome <> 'success'";
    assert_eq!(world.table(rows), ["refused|guardrail_denied|0|7"]);
    let database = std::fs::read(world.data().join("waybill.db")).expect("the log can be read");
    let said = std::fs::read(said).expect("what was said can be read");
    for (what, bytes) in [("the log", database), ("what was said", said)] {
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains(DENIED), "{what}");
    }
}

#[tokio::test]
async fn a_body_above_a_keys_own_size_is_refused() {
    let world = World::start(plan("request_bytes_max: 2000")).await;
    let limited = world.client_with("sk-limited");
    for dialect in DIALECTS {
        let answer = limited.post(dialect.path, &[], &dialect.body(&"x".repeat(2000), true)).await;
        check(&answer, 413, "request_too_large", Some("false"));
        assert_eq!(limited.post(dialect.path, &[], &dialect.body("short", true)).await.status, 200);
    }
    assert_eq!(world.calls().len(), 3);
}

/// A verdict as a hook gives it.
fn verdict(body: Value) -> Action {
    Action::Status { status: 200, headers: Default::default(), body }
}

/// A hook is asked about every request with its whole body, and its word holds; what it says goes to the client.
#[tokio::test]
async fn a_hook_is_asked_and_its_word_holds() {
    let hook = Simulator::start(Settings::named("hook")).await.expect("a hook can be started");
    let at = format!("hook: {{ url: 'http://{}/ask', token: 'env:OTHER_KEY', on_failure: refuse }}", hook.addr);
    let world = World::start(plan(&at)).await;
    let limited = world.client_with("sk-limited");
    let body = MESSAGES.body("May I?", true);
    hook.push(verdict(json!({"allow": true})));
    let session = [("x-session-id", "s-1")];
    assert_eq!(limited.post(MESSAGES.path, &session, &body).await.status, 200);
    hook.push(verdict(json!({"allow": false, "reason": "not on a Sunday"})));
    let answer = limited.post(MESSAGES.path, &session, &body).await;
    check(&answer, 400, "guardrail_denied", Some("false"));
    assert!(answer.text().contains("not on a Sunday"), "{}", answer.text());
    hook.push(verdict(json!({"allow": false})));
    check(&limited.post(MESSAGES.path, &session, &body).await, 400, "guardrail_denied", Some("false"));
    assert_eq!(world.calls().len(), 1);

    let asked = hook.calls();
    assert_eq!(asked.len(), 3);
    let question = asked[0].json();
    assert_eq!(question["body"], body);
    assert_eq!(
        (&question["key"], &question["model"], &question["endpoint"], &question["session"], &question["group"]),
        (&json!("limited"), &json!("gpt"), &json!("messages"), &json!("s-1"), &json!("main"))
    );
    assert_eq!(asked[0].credential.as_deref(), Some("sk-other"));
}

/// A hook that fails, answers nonsense or takes too long: the operator's choice decides, within the deadline.
#[tokio::test]
async fn a_hook_without_an_answer_refuses_or_allows_as_the_operator_chose() {
    for (choice, passes) in [("refuse", false), ("allow", true)] {
        let hook = Simulator::start(Settings::named("hook")).await.expect("a hook can be started");
        let at = format!("hook: {{ url: 'http://{}/ask', deadline_ms: 300, on_failure: {choice} }}", hook.addr);
        let mut world = World::start(plan(&at)).await;
        let limited = world.client_with("sk-limited");
        let failures = [
            Action::status(500),
            Action::Html,
            Action::Reset,
            Action::Hang,
            verdict(json!({"allow": "yes"})),
            verdict(json!("allow")),
        ];
        let n_failures = failures.len();
        for failure in failures {
            hook.push(Step::new([failure.clone()]));
            let answer = limited.post(CHAT.path, &[], &CHAT.body("May I?", false)).await;
            match passes {
                true => assert_eq!(answer.status, 200, "{failure:?}: {}", answer.text()),
                false => check(&answer, 503, "guardrail_unavailable", None),
            }
        }
        assert_eq!(world.calls().len(), if passes { n_failures } else { 0 });
        assert_eq!(hook.calls().len(), n_failures);
        world.stop().await;
        let health = "select count(*) from usage_attempts where class <> 'success'";
        assert_eq!(world.table(health), ["0"], "no deployment is blamed");
    }
}
