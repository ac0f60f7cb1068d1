//! The operator's questions: `/admin/v1` of `up` and of an auditor beside Postgres, and `waybill sessions` on both stores.

use serde_json::{Value, json};
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};
use waybill_simulator::Call;

use crate::client::Client;
use crate::fleet::Fleet;
use crate::process::Process;
use crate::world::{ADMIN_TOKEN, PATIENCE, Plan, World};

const SETTINGS: &str = "admin_token: env:ADMIN_TOKEN\nretry: { backoff_ms: 1 }\n";

/// Sends a chat of the session `talk`, and gives our id of the request.
async fn chat(client: &Client) -> String {
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    let answer = client.post("/v1/chat/completions", &[("x-session-id", "talk")], &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-waybill-request-id").expect("the reply names the request").to_owned()
}

/// What the upstreams say that their answers used.
fn tokens(calls: &[Call]) -> (u64, u64) {
    let usage = || calls.iter().filter_map(|call| call.usage.as_ref());
    (usage().map(|usage| usage.prompt_tokens).sum(), usage().map(|usage| usage.output_tokens).sum())
}

/// Checks that the one session is what the upstreams were called for.
fn is_called_for(session: &Value, calls: &[Call], n_requests: usize) {
    let (input, output) = tokens(calls);
    let totals = &session["totals"];
    assert_eq!((&session["session"], &session["scope"]), (&json!("talk"), &json!("tester")));
    assert_eq!((&session["requests"], &totals["sends"]), (&json!(n_requests), &json!(calls.len())));
    assert_eq!((&totals["input"], &totals["output"]), (&json!(input), &json!(output)));
}

/// S3.25, S3.26.
#[tokio::test]
async fn up_answers_the_operator_at_its_own_address() {
    let world = World::start(Plan::of(&["a", "b"]).settings(SETTINGS)).await;
    let first = chat(&world.client()).await;
    chat(&world.client()).await;
    world.settled().await;
    let operator = world.client_with(ADMIN_TOKEN);
    let listed = operator.get("/admin/v1/sessions", &[]).await.json();
    is_called_for(&listed["entries"][0], &world.calls(), 2);
    let rounds = operator.get("/admin/v1/sessions/talk?limit=1", &[]).await.json();
    assert_eq!((&rounds["entries"][0]["request"], rounds["next"].is_string()), (&json!(first), true));
    let trail = operator.get(&format!("/admin/v1/requests/{first}"), &[]).await.json();
    assert_eq!((&trail["scope"], &trail["targets"][0]["class"]), (&json!("tester"), &json!("success")));
    let explained = operator.get(&format!("/admin/v1/requests/{first}/explain"), &[]).await.json();
    assert_eq!((&explained["request"], explained["sends"][0]["redecided"].is_null()), (&json!(first), false));

    let told: Value = serde_json::from_str(&world.command(&["sessions", "--json"]).await).expect("it prints JSON");
    assert_eq!(told, listed);
    let tenant = world.client().get("/admin/v1/sessions", &[]).await;
    assert_eq!((tenant.status.as_u16(), &tenant.json()["error"]["code"]), (401, &json!("invalid_admin_token")));
}

#[tokio::test]
async fn without_a_token_there_is_no_admin_interface() {
    let world = World::start(Plan::of(&["a"])).await;
    for key in ["", ADMIN_TOKEN] {
        assert_eq!(world.client_with(key).get("/admin/v1/sessions", &[]).await.status, 404);
    }
}

/// Issue 4: audit queries say so while Postgres is away, and no chat waits for it.
#[tokio::test]
async fn an_auditor_answers_from_postgres_and_says_when_it_is_away() {
    let (nats, mut postgres) = (Nats::start(&nats::Options::default()), Postgres::start(&postgres::Options::default()));
    let url = postgres.database();
    let fleet = Fleet::start(Plan::of(&["a"]).settings(SETTINGS), 1, &[nats.url()]).await;
    let beside = |args: &[&str]| {
        let mut command = fleet.command(args);
        command.env("WAYBILL_USAGE_POSTGRES", &url);
        command
    };
    let _projector = Process::start(&mut beside(&["projector", "--listen", "127.0.0.1:0"])).await;
    let auditor = Process::start(&mut beside(&["auditor", "--listen", "127.0.0.1:0"])).await;
    let first = chat(&fleet.client(0)).await;
    chat(&fleet.client(0)).await;
    let operator = Client::new(auditor.addr, ADMIN_TOKEN);
    let listed = async {
        loop {
            let answer = operator.get("/admin/v1/sessions", &[]).await;
            if answer.status == 200 && answer.json()["entries"][0]["requests"] == 2 {
                return answer.json();
            }
        }
    };
    let listed = tokio::time::timeout(PATIENCE, listed).await.expect("the rows come to postgres");
    is_called_for(&listed["entries"][0], &fleet.upstreams.calls(), 2);
    let explained = operator.get(&format!("/admin/v1/requests/{first}/explain"), &[]).await.json();
    assert_eq!((&explained["request"], &explained["sends"][0]["attempt"]), (&json!(first), &json!(1)));
    let told = beside(&["sessions", "--json"]).output().await.expect("the command runs");
    assert_eq!(serde_json::from_slice::<Value>(&told.stdout).expect("it prints JSON"), listed);

    postgres.kill();
    let away = operator.get("/admin/v1/sessions", &[]).await;
    assert_eq!((away.status.as_u16(), &away.json()["error"]["code"]), (503, &json!("usage_unavailable")));
    let told = beside(&["sessions"]).output().await.expect("the command runs");
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(!told.status.success() && errors.contains("waybill: postgres is away"), "{errors}");
    chat(&fleet.client(0)).await;
}
