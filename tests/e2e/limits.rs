//! Limits: which models a key may ask for, how much of them, and how a refusal is told and recorded (S3.11, S3.15).

use serde_json::{Value, json};
use waybill_servers::nats::{self, Nats};
use waybill_servers::postgres::{self, Postgres};
use waybill_simulator::Action;

use crate::client::{Answer, Client};
use crate::dialect::{CHAT, DIALECTS, MESSAGES, RESPONSES};
use crate::fleet::Fleet;
use crate::process::Process;
use crate::world::{PATIENCE, Plan, Rows, World};

/// A world with one more key, `sk-limited`, of a team of an organization.
fn plan(key: &str, team: &str, organization: &str) -> Plan {
    let rows = Rows {
        groups: vec!["{ id: extra }".to_owned()],
        routes: vec![
            "{ model: gpt-mini, members: [{ channel: a, group: main }, { channel: a, group: extra }] }".to_owned(),
            "{ model: 'open-*', members: [{ channel: a, group: main }] }".to_owned(),
        ],
        keys: vec![
            format!("{{ id: limited, key: 'env:LIMITED_KEY', group: main, groups: [extra], team: research, {key} }}"),
            "{ id: mate, key: 'env:BOTH_KEY', group: main, team: research }".to_owned(),
        ],
        teams: vec![format!("{{ id: research, organization: acme, {team} }}")],
        organizations: vec![format!("{{ id: acme, {organization} }}")],
        ..Rows::default()
    };
    Plan { rows, ..Plan::of(&["a"]) }
}

async fn ask(client: &Client, model: &str, headers: &[(&str, &str)]) -> Answer {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "Hello"}]});
    client.post(CHAT.path, headers, &body).await
}

/// The status, and the code of an error.
fn told(answer: &Answer) -> String {
    let code = answer.json()["error"]["code"].as_str().map(|code| format!(" {code}"));
    format!("{}{}", answer.status.as_u16(), code.unwrap_or_default())
}

/// H01, H02: a permission is for the name that is asked for, holds under every spelling of it, and what a key, its
/// team and its organization permit must agree. Whether a model that is not permitted exists is not said.
#[tokio::test]
async fn a_model_is_permitted_under_any_spelling_or_none() {
    const DENIED: &str = "403 model_not_permitted";
    let plan = plan("models: [gpt, 'open-*']", "models: ['gpt*', 'open-*']", "models: ['*t*', open-b]");
    let mut world = World::start(plan).await;
    let limited = world.client_with("sk-limited");
    let extra = [("x-waybill-group", "extra")];
    let none: &[(&str, &str)] = &[];
    let table = [
        ("gpt", none, "200"),
        ("main/gpt", none, "200"),
        ("open-text", none, "200"),
        ("open-b", none, "200"),
        ("open-a", none, DENIED),
        ("gpt-mini", none, DENIED),
        ("main/gpt-mini", none, DENIED),
        ("extra/gpt-mini", none, DENIED),
        ("gpt-mini", &extra[..], DENIED),
        ("GPT", none, DENIED),
        ("a/gpt", none, DENIED),
        ("nobody", none, DENIED),
        ("open-*", none, DENIED),
    ];
    for (model, headers, expected) in table {
        assert_eq!(told(&ask(&limited, model, headers).await), expected, "{model} {headers:?}");
    }
    assert_eq!(told(&ask(&world.client_with("sk-both"), "gpt-mini", &[]).await), "200", "a mate may");
    assert_eq!(told(&ask(&world.client(), "open-a", &[]).await), "200", "a key without a team may");
    let asked: Vec<_> = world.calls().into_iter().filter_map(|call| call.model).collect();
    assert_eq!(asked, ["gpt", "gpt", "open-text", "open-b", "gpt-mini", "open-a"]);

    let names = |answer: Answer| {
        let list = answer.json()["data"].as_array().cloned().unwrap_or_default();
        list.iter().map(|model| model["id"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(limited.get("/v1/models", &[]).await), ["gpt"]);
    assert_eq!(names(world.client().get("/v1/models", &[]).await), ["gpt", "gpt-mini"]);
    assert_eq!(told(&limited.get("/v1/models/gpt-mini", &[]).await), "404 model_not_found");
    assert_eq!(limited.get("/v1/models/open-b", &[]).await.status, 200);

    // All of them are on record as refusals without a send, what has no route too.
    world.stop().await;
    let refused =
        "select model, outcome, code, status, attempts from usage_events where outcome = 'refused' order by 1";
    assert_eq!(
        world.table(refused),
        [
            "GPT|refused|model_not_permitted|403|0",
            "a/gpt|refused|model_not_permitted|403|0",
            "gpt-mini|refused|model_not_permitted|403|0",
            "gpt-mini|refused|model_not_permitted|403|0",
            "gpt-mini|refused|model_not_permitted|403|0",
            "gpt-mini|refused|model_not_permitted|403|0",
            "nobody|refused|model_not_permitted|403|0",
            "open-*|refused|model_not_permitted|403|0",
            "open-a|refused|model_not_permitted|403|0",
        ]
    );
}

/// Checks a refusal by a limit of a minute, in the dialect: how long to wait, and that waiting helps.
#[track_caller]
fn check_wait(answer: &Answer, whose: &str, anthropic: bool) {
    assert_eq!(told(answer), "429 rate_limit_exceeded");
    let wait: u64 = answer.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait in seconds");
    assert!((1..=60).contains(&wait), "{wait}");
    assert_eq!(answer.header("x-should-retry"), None);
    let error = &answer.json()["error"];
    assert_eq!(error["type"], "rate_limit_error");
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains(whose) && message.contains(&format!("{wait} s")), "{message}");
    assert_eq!(answer.json()["type"] == "error", anthropic);
}

/// Requests a minute, of a key and of its team; what is refused does not count, and nobody else is held back.
#[tokio::test]
async fn requests_a_minute_are_held_back_by_key_and_by_team() {
    let mut world = World::start(plan("requests_per_minute: 2", "requests_per_minute: 3", "")).await;
    let (limited, mate) = (world.client_with("sk-limited"), world.client_with("sk-both"));
    for _ in 0..2 {
        assert_eq!(told(&ask(&limited, "gpt", &[]).await), "200");
    }
    for dialect in DIALECTS {
        let answer = limited.post(dialect.path, &[], &dialect.body("Hello", true)).await;
        check_wait(&answer, "key `limited`", dialect.is_anthropic());
    }
    assert_eq!(told(&ask(&mate, "gpt", &[]).await), "200");
    check_wait(&ask(&mate, "gpt", &[]).await, "team `research`", false);
    assert_eq!(told(&ask(&world.client(), "gpt", &[]).await), "200");
    assert_eq!(world.calls().len(), 4);
    world.stop().await;
    let sql =
        "select key_id, outcome, coalesce(code, '-'), attempts, count(*) from usage_events group by 1, 2 order by 1, 2";
    assert_eq!(
        world.table(sql),
        [
            "limited|refused|rate_limit_exceeded|0|3",
            "limited|success|-|1|2",
            "mate|refused|rate_limit_exceeded|0|1",
            "mate|success|-|1|1",
            "tester|success|-|1|1",
        ]
    );
}

/// Tokens a minute: counted when they are known, streamed or not; a failed send that spent none counts none.
#[tokio::test]
async fn tokens_a_minute_are_held_back_once_they_are_spent() {
    let world = World::start(plan("tokens_per_minute: 50", "", "").settings("retry: { max_attempts: 1 }\n")).await;
    let limited = world.client_with("sk-limited");
    world.upstreams[0].push(Action::status(400));
    assert_eq!(ask(&limited, "gpt", &[]).await.status, 400);
    let spent = || -> u64 {
        let calls = world.calls();
        calls.iter().filter_map(|call| call.usage.as_ref()).map(|usage| usage.prompt_tokens + usage.output_tokens).sum()
    };
    while spent() < 50 {
        let answer = limited.post(CHAT.path, &[], &CHAT.body("Hello", true)).await;
        assert_eq!(answer.status, 200, "{} tokens were spent: {}", spent(), answer.text());
    }
    let calls = world.calls().len();
    check_wait(&ask(&limited, "gpt", &[]).await, "key `limited`", false);
    assert_eq!(world.calls().len(), calls);
    assert_eq!(told(&ask(&world.client_with("sk-both"), "gpt", &[]).await), "200");
}

/// H13: counting tokens is nobody's bill: it is on record as a send, and costs neither money nor tokens of any limit.
#[tokio::test]
async fn counting_tokens_spends_nothing() {
    let key = "tokens_per_minute: 100, budget: { tokens: 100, usd: 0.1, period: day }";
    let channel = "prices: { gpt: { input: 1000, output: 1000 } }".to_owned();
    let mut world = World::start(Plan { channel, ..plan(key, "", "") }).await;
    let limited = world.client_with("sk-limited");
    let session = [("x-session-id", "s-1")];
    let long = MESSAGES.body(&"All that was said before. ".repeat(100), false);
    for _ in 0..2 {
        let counted = limited.post("/v1/messages/count_tokens", &session, &long).await;
        assert!(counted.json()["input_tokens"].as_u64().is_some_and(|n| n > 100), "{}", counted.text());
    }
    let answer = limited.post(MESSAGES.path, &session, &MESSAGES.body("Hello", false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let billed = world.calls().pop().and_then(|call| call.usage).expect("the upstream counts");
    world.stop().await;
    let (input, output) = (billed.prompt_tokens, billed.output_tokens);
    let spent = format!("{input}|{output}|{}", (input + output) * 1_000_000);
    let of_sends = "select sum(input), sum(output), sum(cost_nano) from usage_attempts";
    assert_eq!(world.table(of_sends), [&*spent]);
    assert_eq!(world.table("select input, output, cost_nano from sessions"), [&*spent]);
    assert_eq!(world.table("select count(*) from usage_attempts"), ["3"]);
}

/// What a response used counts once, where it was made: to follow it, or to read it, uses nothing.
#[tokio::test]
async fn a_response_that_is_followed_counts_once() {
    let mut world = World::start(plan("", "", "")).await;
    let body = json!({"model": "gpt", "input": "Hello", "background": true, "stream": true});
    assert_eq!(world.client_with("sk-limited").post(RESPONSES.path, &[], &body).await.status, 200);
    let usage = world.calls().pop().and_then(|call| call.usage).expect("the upstream counts");
    let limit = format!("tokens_per_minute: {}", 2 * (usage.prompt_tokens + usage.output_tokens));
    world.stop().await;
    world.configure(&plan(&limit, "", ""));
    world.restart().await;
    let limited = world.client_with("sk-limited");
    assert_eq!(limited.post(RESPONSES.path, &[], &body).await.status, 200);
    let id = world.calls().pop().and_then(|call| call.response_id).expect("a response has an id");
    for query in ["?stream=true", "?stream=true", ""] {
        let answer = limited.get(&format!("/v1/responses/{id}{query}"), &[]).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(told(&ask(&limited, "gpt", &[]).await), "200");
}

/// ADR 36: what is asked of a response that is there costs nothing, and who has spent all may still fetch it, or end it.
#[tokio::test]
async fn a_spent_budget_leaves_what_was_made() {
    let world = World::start(plan("budget: { tokens: 1000, period: month }", "", "")).await;
    let limited = world.client_with("sk-limited");
    let body = json!({"model": "gpt", "input": "Hello", "background": true});
    let made = limited.post(RESPONSES.path, &[], &body).await;
    assert_eq!(made.status, 200, "{}", made.text());
    let id = made.json()["id"].as_str().expect("an id").to_owned();
    check_budget(&spend(&limited).await, "key `limited`");
    for path in [format!("/v1/responses/{id}"), format!("/v1/responses/{id}/input_items")] {
        let answer = limited.get(&path, &[]).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
    let cancelled = limited.post(&format!("/v1/responses/{id}/cancel"), &[], &json!({})).await;
    assert_ne!(told(&cancelled), "402 budget_exceeded", "{}", cancelled.text());
    check_budget(&ask(&limited, "gpt", &[]).await, "key `limited`");
}

/// Asks until the budget is reached.
pub(crate) async fn spend(client: &Client) -> Answer {
    let spend = async {
        loop {
            let answer = ask(client, "gpt", &[]).await;
            if answer.status != 200 {
                return answer;
            }
        }
    };
    tokio::time::timeout(PATIENCE, spend).await.expect("what was spent comes to be known")
}

#[track_caller]
fn check_budget(answer: &Answer, whose: &str) {
    assert_eq!(told(answer), "402 budget_exceeded");
    let error: Value = answer.json()["error"].clone();
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains(whose), "{message}");
    // The header is what clients believe at most; the body says how long the day or month still is.
    let seconds = message.split_once("free again in ").and_then(|(_, rest)| rest.split_once(" s"));
    let seconds: u64 = seconds.and_then(|(seconds, _)| seconds.parse().ok()).expect("the true time");
    assert!((1..=31 * 86_400).contains(&seconds), "{seconds}");
    assert_eq!(answer.header("retry-after"), Some(seconds.min(60).to_string().as_str()));
    assert_eq!(answer.header("x-should-retry"), Some("false"));
}

/// A budget is what the usage rows say: it is reached while the gateway runs, and still is after a restart.
#[tokio::test]
async fn a_budget_of_tokens_is_reached_and_outlives_the_gateway() {
    let mut world = World::start(plan("budget: { tokens: 100, period: day }", "", "")).await;
    let limited = world.client_with("sk-limited");
    check_budget(&spend(&limited).await, "key `limited`");
    for dialect in DIALECTS {
        let answer = limited.post(dialect.path, &[], &dialect.body("Hello", true)).await;
        check_budget(&answer, "budget of the day of key `limited`");
        let kind = if dialect.is_anthropic() { "billing_error" } else { "insufficient_quota" };
        assert_eq!(answer.json()["error"]["type"], kind);
    }
    assert_eq!(told(&ask(&world.client_with("sk-both"), "gpt", &[]).await), "200");
    world.stop().await;
    let sql = "select sum(a.input + a.output) >= 100 from usage_attempts a join usage_events e using (request_id) \
               where e.key_id = 'limited'";
    assert_eq!(world.table(sql), ["1"]);
    world.restart().await;
    check_budget(&spend(&world.client_with("sk-limited")).await, "key `limited`");
}

/// A budget of money is what sends cost by the prices of their channel: here a token costs a thousandth of a USD, so ten
/// of them are the budget.
#[tokio::test]
async fn a_budget_of_money_is_reached_by_what_sends_cost() {
    let channel = "prices: { gpt: { input: 1000, output: 1000 } }".to_owned();
    let mut world = World::start(Plan { channel, ..plan("budget: { usd: 0.01, period: day }", "", "") }).await;
    check_budget(&spend(&world.client_with("sk-limited")).await, "key `limited`");
    assert_eq!(told(&ask(&world.client_with("sk-both"), "gpt", &[]).await), "200");
    let usage = world.calls().pop().expect("the mate was answered").usage.expect("and used tokens");
    world.stop().await;
    let cost = world.table(
        "select max(a.cost_nano) from usage_attempts a join usage_events e using (request_id) where key_id = 'mate'",
    );
    assert_eq!(cost, [((usage.prompt_tokens + usage.output_tokens) * 1_000_000).to_string()]);
}

/// The budget of an organization is spent by all its keys; gateways know of each other's spending through Postgres.
#[tokio::test]
async fn a_budget_is_shared_by_gateways() {
    let (nats, postgres) = (Nats::start(&nats::Options::default()), Postgres::start(&postgres::Options::default()));
    let settings = format!("retry: {{ backoff_ms: 1 }}\nusage: {{ postgres: '{}' }}\n", postgres.database());
    let plan = plan("", "", "budget: { tokens: 200 }").settings(&settings);
    let fleet = Fleet::start(plan, 2, &[nats.url()]).await;
    let _projector = Process::start(&mut fleet.command(&["projector", "--listen", "127.0.0.1:0"])).await;
    check_budget(&spend(&fleet.client_with(0, "sk-limited")).await, "budget of the month of organization `acme`");
    check_budget(&spend(&fleet.client_with(1, "sk-both")).await, "organization `acme`");
    assert_eq!(told(&ask(&fleet.client(1), "gpt", &[]).await), "200", "a key of no organization");
}
