//! Fallbacks: which models stand in for one that fails, in what order, for whom, and for how long. The upstreams' logs
//! count.
//!
//! `gpt` has the upstreams `a` and `b`; each of `spare`, `large` and `mild` has one of its own, of the same name.

use futures_util::future::join;
use serde_json::{Value, json};
use waybill_auditor::redecide;
use waybill_simulator::{Action, Settings, Simulator, Step};

use crate::client::{Answer, Client};
use crate::dialect::{CHAT, DIALECTS, Dialect, RESPONSES};
use crate::follow::ready_when;
use crate::limits;
use crate::world::{Plan, Rows, World};

pub(crate) const NAMES: [&str; 5] = ["a", "b", "spare", "large", "mild"];
/// The key of the template.
pub(crate) const TEMPLATED: &str = "sk-both";
const CALM: &str = "retry: { backoff_ms: 1, max_attempts: 2 }\nhealth: { enabled: false }\n";
pub(crate) const CHAINS: &str = "fallbacks: [{ gpt: [spare] }], context_window_fallbacks: [{ gpt: [large] }], \
                      content_policy_fallbacks: [{ gpt: [mild] }]";

/// Two tiers for `gpt`, and a template with these fields for the key.
pub(crate) fn under(template: &str) -> Plan {
    let members = ["priority: 1", "priority: 2", "-", "-", "-"].map(str::to_owned).to_vec();
    let routes = ["spare", "large", "mild"]
        .map(|name| format!("{{ model: {name}, members: [{{ channel: {name}, group: main }}] }}"))
        .to_vec();
    let keys = vec!["{ id: bound, key: 'env:BOTH_KEY', group: main, template: t, expose_route: true }".to_owned()];
    let templates = vec![format!("{{ id: t, {template} }}")];
    Plan { members, rows: Rows { routes, keys, templates, ..Rows::default() }, ..Plan::of(&NAMES) }.settings(CALM)
}

/// The calls of every upstream, in the order of [`NAMES`].
pub(crate) fn counts(world: &World) -> [usize; 5] {
    NAMES.map(|name| world.upstream(name).calls().len())
}

/// What was called since `before`.
pub(crate) fn since(world: &World, before: [usize; 5]) -> [usize; 5] {
    let now = counts(world);
    std::array::from_fn(|at| now[at] - before[at])
}

pub(crate) async fn ask(client: &Client, dialect: Dialect, session: &str, stream: bool) -> Answer {
    client.post(dialect.path, &[("x-session-id", session)], &dialect.body("Hello", stream)).await
}

/// Who served, whether a chain led there, and after how many sends.
pub(crate) fn served(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let header = |name: &str| answer.header(name).unwrap_or("-").to_owned();
    format!("{} {} {}", header("x-waybill-deployment"), header("x-waybill-fallback"), header("x-waybill-attempts"))
}

fn fails(world: &World, names: &[&str], does: &Action, times: u32) {
    for name in names {
        world.upstream(name).push(Step::new([does.clone()]).times(times));
    }
}

/// An error of this class, before anything was output: a JSON body under 400, or an event in a 200.
pub(crate) fn error(dialect: Dialect, code: &str, message: &str, in_stream: bool) -> Action {
    let error = json!({"type": "invalid_request_error", "code": code, "message": message});
    let body = match (dialect, in_stream) {
        (RESPONSES, true) => json!({"type": "response.failed", "response": {"status": "failed", "error": error}}),
        (dialect, _) if dialect.is_anthropic() => json!({"type": "error", "error": error}),
        _ => json!({"error": error}),
    };
    match in_stream {
        true => Action::ErrorEventAfter { events: 0, body },
        false => Action::Status { status: 400, headers: Default::default(), body },
    }
}

/// S3.12, S3.15, S3.18: a general failure is retried where it happened, then elsewhere in the pool, then the general chain
/// follows; the next turn goes there at once, under the name that was asked for, and all of it is on record.
#[tokio::test]
async fn a_spent_pool_leads_to_the_general_chain_and_the_session_stays_there() {
    let mut world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    for (dialect, stream) in DIALECTS.into_iter().zip([false, true, true]) {
        fails(&world, &["a", "b"], &Action::status(503), 2);
        let before = counts(&world);
        let first = ask(&client, dialect, "s", stream).await;
        assert_eq!((served(&first).as_str(), since(&world, before)), ("spare/spare true 5", [2, 2, 1, 0, 0]));
        let before = counts(&world);
        for _ in 0..3 {
            assert_eq!(served(&ask(&client, dialect, "s", stream).await), "spare/spare true 1", "{}", dialect.path);
        }
        assert_eq!(since(&world, before), [0, 0, 3, 0, 0]);
        assert_eq!(served(&ask(&client, dialect, "another", stream).await), "a/gpt false 1");
    }
    world.stop().await;
    let rows =
        world.table("select model, fallback, attempts, count(*) from usage_events group by 1, 2, 3 order by 2, 3");
    assert_eq!(rows, ["gpt|0|1|3", "gpt|1|1|9", "gpt|1|5|3"]);
    let reasons =
        world.table("select reason, count(*) from usage_attempts where deployment = 'spare/spare' group by 1");
    assert_eq!(reasons, ["affinity|9", "fallback|3"]);
    let redecided = redecide::redecide_all(&world.database()).expect("the log can be read");
    assert_eq!(redecided.mismatches, vec![]);
}

/// S3.12, S3.15: whatever general failure it is, the same deployment is tried first, then the other, then the chain.
#[tokio::test]
async fn every_general_failure_takes_the_same_way() {
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    let ways = [429, 500, 502, 529].map(Action::status).into_iter();
    let ways = ways.chain([Action::Reset, Action::EmptyStream, Action::CutAfterEvents { events: 0 }]);
    for (n, does) in ways.enumerate() {
        fails(&world, &["a", "b"], &does, 2);
        let before = counts(&world);
        let answer = ask(&client, CHAT, &format!("s-{n}"), true).await;
        assert_eq!(
            (served(&answer).as_str(), since(&world, before)),
            ("spare/spare true 5", [2, 2, 1, 0, 0]),
            "{does:?}"
        );
    }
}

/// S3.15, JSON and in-stream: a prompt that does not fit goes to its own chain after one call, refused content to its
/// own, and a caller's mistake nowhere.
#[tokio::test]
async fn special_failures_go_straight_to_their_own_chains() {
    let cases = [
        ("context_length_exceeded", "the prompt is too long", Some("large/large true 2"), [1, 0, 0, 1, 0]),
        ("content_filter", "the content is refused", Some("mild/mild true 2"), [1, 0, 0, 0, 1]),
        ("string_above_max_length", "one field is too long", None, [1, 0, 0, 0, 0]),
    ];
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    for (code, message, expected, calls) in cases {
        for dialect in DIALECTS {
            for in_stream in [false, true] {
                let what = format!("{code} {} {in_stream}", dialect.path);
                fails(&world, &["a"], &error(dialect, code, message, in_stream), 1);
                let before = counts(&world);
                let answer = ask(&client, dialect, &what, true).await;
                match expected {
                    Some(expected) => assert_eq!(served(&answer), expected, "{what}"),
                    None => {
                        let as_it_came = in_stream && dialect == RESPONSES;
                        assert_eq!(answer.status, if as_it_came { 200 } else { 400 }, "{what}");
                        assert!(answer.text().contains(message), "{what}: {}", answer.text());
                    }
                }
                assert_eq!(since(&world, before), calls, "{what}");
            }
        }
    }
}

/// S3.12: without a chain of its own a prompt that does not fit falls back as anything does, refused content not at all
/// (PITFALLS D11), and what may be mapped to nothing is disabled for its kind alone (S3.18).
#[tokio::test]
async fn a_kind_without_a_chain_inherits_and_a_disabled_one_ends() {
    let context = |dialect| error(dialect, "context_length_exceeded", "too long", false);
    let content = |dialect| error(dialect, "content_filter", "refused", false);
    let route = |template: &str| Plan { route: "fallbacks: [spare]".to_owned(), ..under(template) };
    for (template, general, overflow, refused) in [
        ("expose_route: true", [1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]),
        ("fallbacks: []", [1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]),
        ("fallbacks: [{ gpt: [large] }]", [1, 1, 0, 1, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 0]),
        ("fallbacks: [{ gpt: [] }]", [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        ("context_window_fallbacks: [{ gpt: [] }]", [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        ("context_window_fallbacks: [{ gpt: [mild] }]", [1, 1, 1, 0, 0], [1, 0, 0, 0, 1], [1, 0, 0, 0, 0]),
        ("content_policy_fallbacks: [{ gpt: [mild] }]", [1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 0, 1]),
    ] {
        let world = World::start(route(template).settings(&CALM.replace("max_attempts: 2", "max_attempts: 1"))).await;
        let client = world.client_with(TEMPLATED);
        for (what, does, on, expected) in [
            ("general", Action::status(503), &["a", "b"][..], general),
            ("overflow", context(CHAT), &["a"], overflow),
            ("refused", content(CHAT), &["a"], refused),
        ] {
            fails(&world, on, &does, 1);
            let before = counts(&world);
            ask(&client, CHAT, what, false).await;
            assert_eq!(since(&world, before), expected, "{template}: {what}");
        }
    }
}

/// S3.12: a pool without a candidate falls back before anybody is called.
#[tokio::test]
async fn a_pool_without_a_candidate_falls_back_at_once() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1 }\n";
    let world = World::start(under(CHAINS).settings(settings)).await;
    let client = world.client_with(TEMPLATED);
    fails(&world, &["a", "b"], &Action::status(503), 1);
    assert_eq!(served(&ask(&client, CHAT, "s", false).await), "spare/spare true 3");
    let before = counts(&world);
    assert_eq!(served(&ask(&client, CHAT, "t", true).await), "spare/spare true 1");
    assert_eq!(since(&world, before), [0, 0, 1, 0, 0]);
    let untemplated = ask(&world.client(), CHAT, "u", false).await;
    assert_eq!(untemplated.status, 503, "another key has no chain: {}", untemplated.text());
    assert_eq!(untemplated.header("x-waybill-fallback"), Some("false"));
}

/// S3.18, S3.19, PITFALLS H01, H03: what a key may ask for holds over its chains however the model is written: a target
/// that it may not ask for is passed over, and a kept one that it may not ask for any more is refused to it.
#[tokio::test]
async fn a_right_holds_at_a_target_under_every_spelling() {
    let permitted = |models: &str| {
        let mut plan = under("fallbacks: [{ gpt: [spare, mild] }]");
        plan.rows.groups = vec!["{ id: extra }".to_owned()];
        plan.rows.routes[0] =
            "{ model: spare, members: [{ channel: spare, group: main }, { channel: spare, group: extra }] }".to_owned();
        let key = "{ id: narrow, key: 'env:LIMITED_KEY', group: main, groups: [extra], template: t, expose_route: true";
        plan.rows.keys.push(format!("{key}, models: [{models}] }}"));
        plan
    };
    let world = World::start(permitted("gpt, mild")).await;
    let client = world.client_with("sk-limited");
    let group = ("x-waybill-group", "main");
    let spelt = async |session: &str, model: &str, header: Option<(&str, &str)>| {
        let mut body = CHAT.body("Hello", false);
        body["model"] = json!(model);
        let headers: Vec<_> = [("x-session-id", session)].into_iter().chain(header).collect();
        client.post(CHAT.path, &headers, &body).await
    };
    let spellings = [("gpt", None), ("main/gpt", None), ("gpt", Some(group))];
    for (n, (model, header)) in spellings.into_iter().enumerate() {
        fails(&world, &["a", "b"], &Action::status(503), 2);
        let session = format!("s-{n}");
        assert_eq!(served(&spelt(&session, model, header).await), "mild/mild true 5", "`spare` is passed over");
        assert_eq!(served(&spelt(&session, model, header).await), "mild/mild true 1");
    }
    world.configure(&permitted("gpt, spare"));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    let before = counts(&world);
    for (model, header) in spellings {
        for n in 0..spellings.len() {
            let answer = spelt(&format!("s-{n}"), model, header).await;
            assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (403, &json!("model_not_permitted")));
        }
    }
    assert_eq!(since(&world, before), [0; 5]);
    assert_eq!(served(&spelt("new", "gpt", None).await), "a/gpt false 1");
}

/// S3.18: a target is sent to only over a channel that has a credential and speaks the endpoint; others are passed over,
/// and a kept one ends with its deployment.
#[tokio::test]
async fn a_target_needs_a_credential_and_the_endpoint() {
    let mut plan = under("fallbacks: [{ gpt: [deaf, keyless, spare] }]");
    // Nobody listens there: a send would count as a failed one.
    let channel = |id: &str, rest: &str| format!("{{ id: {id}, base_url: 'http://127.0.0.1:1/v1', {rest} }}");
    plan.rows.channels = vec![
        channel("deaf", "dialects: [embeddings], api_keys: ['env:UPSTREAM_KEY']"),
        channel("keyless", "dialects: [chat, responses, messages], api_keys: ['env:NOWHERE_SET']"),
    ];
    for name in ["deaf", "keyless"] {
        plan.rows.routes.push(format!("{{ model: {name}, members: [{{ channel: {name}, group: main }}] }}"));
    }
    let world = World::start(plan).await;
    let client = world.client_with(TEMPLATED);
    for dialect in DIALECTS {
        fails(&world, &["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&ask(&client, dialect, "s", false).await), "spare/spare true 5");
        assert_eq!(served(&ask(&client, dialect, "s", false).await), "spare/spare true 1");
    }
    let mut plan = under("fallbacks: [{ gpt: [spare] }]");
    plan.rows.routes[0] = "{ model: spare, members: [{ channel: spare, group: main, status: disabled }] }".to_owned();
    world.configure(&plan);
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    for dialect in DIALECTS {
        assert_eq!(served(&ask(&client, dialect, "s", false).await), "a/gpt false 1");
    }
}

/// S3.18, S3.15: what is left of a budget is looked at before every further target, in the pool as along a chain. What
/// another request has spent since the first send is refused as it is at once, and nobody more is called.
#[tokio::test]
async fn a_budget_spent_between_two_sends_is_refused() {
    let overflow =
        json!({"error": {"type": "invalid_request_error", "code": "context_length_exceeded", "message": "-"}});
    for failure in [Value::Null, overflow] {
        let mut plan = under(CHAINS).settings(&CALM.replace("max_attempts: 2", "max_attempts: 1"));
        let key =
            "{ id: limited, key: 'env:LIMITED_KEY', group: main, template: t, budget: { tokens: 1, period: day } }";
        plan.rows.keys.push(key.to_owned());
        let mut world = World::start(plan).await;
        let client = world.client_with("sk-limited");
        let held = [Action::PauseAfter { events: 0 }, Action::ErrorEventAfter { events: 0, body: failure.clone() }];
        world.upstream("a").push(Step::new(held));
        let meanwhile = async {
            world.calls_until(|calls| calls.len() == 1).await;
            let spent = limits::spend(&client).await;
            let before = counts(&world);
            world.upstream("a").release();
            (spent, before)
        };
        let (answer, (spent, before)) = join(ask(&client, CHAT, "held", true), meanwhile).await;
        for (answer, attempts) in [(&spent, "0"), (&answer, "1")] {
            let code = answer.json()["error"]["code"].clone();
            assert_eq!((answer.status.as_u16(), code), (402, json!("budget_exceeded")), "{failure}");
            assert_eq!(answer.header("x-waybill-attempts"), Some(attempts));
            assert_eq!(answer.header("x-should-retry"), Some("false"));
        }
        assert_eq!(since(&world, before), [0; 5], "{failure}");
        world.stop().await;
        let row = "select outcome, code, status, attempts, fallback from usage_events where session_id = 'held'";
        assert_eq!(world.table(row), ["refused|budget_exceeded|402|1|0"]);
    }
}

/// S3.15: what is refused here is returned as it is, whatever chains there are, and calls nobody.
#[tokio::test]
async fn no_local_refusal_leads_along_a_chain() {
    let hook = Simulator::start(Settings::named("hook")).await.expect("a hook can be started");
    let mut plan = under(CHAINS);
    let key = "{ id: guarded, key: 'env:LIMITED_KEY', group: main, template: t, models: [gpt], guardrails: { deny: [sphinx], \
               request_bytes_max: 2000 } }";
    let hooked = format!(
        "{{ id: hooked, key: 'env:UPSTREAM_KEY', group: main, template: t, guardrails: {{ hook: {{ url: \
         'http://{}/ask', on_failure: refuse }} }} }}",
        hook.addr
    );
    plan.rows.keys.extend([key.to_owned(), hooked]);
    let world = World::start(plan).await;
    for dialect in DIALECTS {
        let (known, guarded) = (world.client_with(TEMPLATED), world.client_with("sk-limited"));
        let hooked = world.client_with("sk-upstream");
        let asking = |model: &str| {
            let mut body = dialect.body("Hello", true);
            body["model"] = json!(model);
            body
        };
        // What the hook says to the last two.
        let denial = Action::Status { status: 200, headers: Default::default(), body: json!({"allow": false}) };
        hook.push(Step::new([denial]));
        hook.push(Step::new([Action::status(500)]));
        for (client, headers, body, status) in [
            (&known.with_key("sk-wrong"), &[][..], dialect.body("Hello", true), 401),
            (&guarded, &[], dialect.body("about a sphinx", true), 400),
            (&guarded, &[], dialect.body(&"x".repeat(2000), true), 413),
            (&guarded, &[], asking("spare"), 403),
            (&known, &[], json!({"model": "gpt", "stream": "perhaps"}), 400),
            (&known, &[("x-session-id", "")], dialect.body("Hello", true), 400),
            (&known, &[("x-waybill-group", "elsewhere")], dialect.body("Hello", true), 403),
            (&known, &[], asking("nobody"), 404),
            (&hooked, &[], dialect.body("Hello", true), 400),
            (&hooked, &[], dialect.body("Hello", true), 503),
        ] {
            let answer = client.post(dialect.path, headers, &body).await;
            assert_eq!(answer.status, status, "{} {body}: {}", dialect.path, answer.text());
            assert_ne!(answer.header("x-waybill-fallback"), Some("true"), "{} {body}", dialect.path);
        }
    }
    assert_eq!(counts(&world), [0; 5]);
    assert_eq!(hook.calls().len(), 2 * DIALECTS.len());
}

/// S3.15, S3.18: a budget that is spent refuses before anybody is called, whatever chains there are.
#[tokio::test]
async fn a_spent_budget_leads_along_no_chain() {
    let mut plan = under(CHAINS);
    let key = "{ id: limited, key: 'env:LIMITED_KEY', group: main, template: t, budget: { tokens: 1, period: day } }";
    plan.rows.keys.push(key.to_owned());
    let world = World::start(plan).await;
    let client = world.client_with("sk-limited");
    limits::spend(&client).await;
    let before = counts(&world);
    for dialect in DIALECTS {
        let answer = ask(&client, dialect, "s", true).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (402, &json!("budget_exceeded")));
        assert_eq!(answer.header("x-waybill-fallback"), Some("false"));
    }
    assert_eq!(since(&world, before), [0; 5]);
}

/// S3.8, S3.18, S3.19: a group that is asked for as a model has chains of its own name; what stood in for it is kept under
/// that name and no other.
#[tokio::test]
async fn a_groups_fallback_is_kept_under_the_groups_name() {
    let mut plan = under("fallbacks: [{ fleet: [spare] }]");
    plan.rows.groups = vec!["{ id: fleet, requestable: true }".to_owned()];
    plan.rows
        .routes
        .push("{ model: big, members: [{ channel: large, upstream_model: gpt, group: fleet }] }".to_owned());
    plan.rows.keys = vec![
        "{ id: bound, key: 'env:BOTH_KEY', group: main, groups: [fleet], template: t, expose_route: true }".to_owned(),
    ];
    let world = World::start(plan).await;
    let client = world.client_with(TEMPLATED);
    let asked = async |model: &str| {
        let mut body = CHAT.body("Hello", false);
        body["model"] = json!(model);
        client.post(CHAT.path, &[("x-session-id", "s")], &body).await
    };
    fails(&world, &["large"], &Action::status(503), 2);
    assert_eq!(served(&asked("fleet").await), "spare/spare true 3");
    assert_eq!(served(&asked("fleet").await), "spare/spare true 1");
    assert_eq!(served(&asked("gpt").await), "a/gpt false 1");
    assert_eq!(served(&asked("fleet/big").await), "large/gpt false 1");
    fails(&world, &["a", "b"], &Action::status(503), 2);
    assert_eq!(asked("gpt").await.status, 503, "the group's chain is not its members'");
}

/// S3.18: a group may stand in, to those who reach it and under no other name: the right is the caller's.
#[tokio::test]
async fn a_group_stands_in_for_those_who_reach_it() {
    let mut plan = under("fallbacks: [{ gpt: [fleet] }]");
    plan.rows.groups = vec!["{ id: fleet }".to_owned()];
    plan.rows.routes[0] = "{ model: spare, members: [{ channel: spare, group: fleet }] }".to_owned();
    let key = |id: &str, secret: &str, groups: &str| {
        format!("{{ id: {id}, key: 'env:{secret}', group: main, {groups} template: t, expose_route: true }}")
    };
    plan.rows.keys = vec![key("bound", "BOTH_KEY", "groups: [fleet],"), key("alone", "UPSTREAM_KEY", "")];
    let world = World::start(plan).await;
    fails(&world, &["a", "b"], &Action::status(503), 2);
    let answer = ask(&world.client_with(TEMPLATED), CHAT, "s", false).await;
    assert_eq!(served(&answer), "spare/spare true 5");
    fails(&world, &["a", "b"], &Action::status(503), 2);
    let answer = ask(&world.client_with("sk-upstream"), CHAT, "s", false).await;
    assert_eq!((answer.status.as_u16(), counts(&world)), (503, [4, 4, 1, 0, 0]));
}

/// S3.12, S3.18, PITFALLS D01, D05, C32: chains may go on from a target, none is tried twice, the sends of all of them
/// count together, and what fails in a chain is counted as any failure.
#[tokio::test]
async fn the_bound_on_sends_holds_over_all_chains() {
    let chains = "fallbacks: [{ gpt: [spare, mild] }, { spare: [large] }]";
    for (sends_max, expected) in [(12, [1, 1, 1, 1, 1]), (4, [1, 1, 1, 1, 0]), (2, [1, 1, 0, 0, 0])] {
        let settings = format!(
            "retry: {{ backoff_ms: 1, max_attempts: 1, sends_max: {sends_max} }}\nhealth: {{ enabled: false }}\n"
        );
        let world = World::start(under(chains).settings(&settings)).await;
        fails(&world, &NAMES, &Action::status(503), 1);
        let answer = ask(&world.client_with(TEMPLATED), CHAT, "s", false).await;
        assert_eq!((answer.status.as_u16(), counts(&world)), (503, expected), "{sends_max}");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
}

/// S3.19: `waybill route` shows a session's kept fallback and what becomes of it, as the next request then finds.
#[tokio::test]
async fn asking_for_the_route_shows_a_kept_fallback() {
    const SPEECH: &str = "/v1/audio/speech";
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    let args = |endpoint: &'static str| {
        ["route", "--model", "gpt", "--key", "bound", "--session", "s", "--endpoint", endpoint]
    };
    let route = async |endpoint| -> Value {
        world.settled().await;
        let told = world.command(&[&args(endpoint)[..], &["--json"]].concat()).await;
        let told: Value = serde_json::from_str(&told).expect("`--json` gives JSON");
        json!([told["deployment"], told["reason"], told["fallback"]["path"], told["fallback"]["standing"]])
    };
    assert_eq!(route("chat").await, json!(["a/gpt", "draw", null, null]));
    fails(&world, &["a", "b"], &Action::status(503), 2);
    assert_eq!(served(&ask(&client, CHAT, "s", false).await), "spare/spare true 5");
    assert_eq!(route("chat").await, json!(["spare/spare", "affinity", ["spare"], "followed"]));
    let text = world.command(&args("chat")).await;
    assert!(
        text.contains("spare/spare (affinity)") && text.contains("fallback spare at spare/spare: is followed"),
        "{text}"
    );
    assert_eq!(route("messages").await, json!(["a/gpt", "draw", null, null]), "each endpoint has its own");

    fails(&world, &["a", "b"], &Action::status(429), 2);
    let headers = [("content-type".to_owned(), "audio/mpeg".to_owned())].into();
    world.upstream("spare").push(Action::Status { status: 200, headers, body: json!("ID3") });
    let speech = client.post(SPEECH, &[("x-session-id", "s")], &json!({"model": "gpt", "input": "Hello"})).await;
    assert_eq!(served(&speech), "spare/spare true 5");
    assert_eq!(route("speech").await, json!(["a/gpt", "draw", ["spare"], "not_repeatable"]));

    let narrow = Plan {
        rows: Rows {
            keys: vec!["{ id: bound, key: 'env:BOTH_KEY', group: main, template: t, models: [gpt] }".to_owned()],
            ..under(CHAINS).rows
        },
        ..under(CHAINS)
    };
    world.configure(&narrow);
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    assert_eq!(route("chat").await, json!([null, null, ["spare"], "refused"]));
    let text = world.command(&args("chat")).await;
    assert!(text.starts_with("nowhere: the key may not use what its session was served by"), "{text}");
    assert_eq!(ask(&client, CHAT, "s", false).await.status, 403);
    let refused = world.refused(&["route", "--model", "spare", "--key", "bound"]).await;
    assert!(refused.contains("may not ask for `spare`"), "{refused}");
    // The chain still names it, and the group shows it no more.
    world.configure(&Plan { group: "public_models: [gpt, mild]".to_owned(), ..under(CHAINS) });
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 3).await;
    assert_eq!(route("chat").await, json!([null, null, ["spare"], "not_shown"]));
    let text = world.command(&args("chat")).await;
    assert!(text.starts_with("nowhere: no group of the key shows what its session was served by"), "{text}");
    assert!(text.contains("fallback spare at spare/spare: is shown by no group of the key"), "{text}");
    assert_eq!(ask(&client, CHAT, "s", false).await.status, 404);
    // It is there, and its deployment serves nobody.
    let mut plan = under(CHAINS);
    plan.rows.routes[0] = "{ model: spare, members: [{ channel: spare, group: main, status: disabled }] }".to_owned();
    world.configure(&plan);
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 4).await;
    assert_eq!(route("chat").await, json!(["a/gpt", "draw", ["spare"], "not_legal"]));
    let text = world.command(&args("chat")).await;
    assert!(text.contains("fallback spare at spare/spare: is not legal now"), "{text}");
    world.configure(&under("fallbacks: [{ gpt: [mild] }]"));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 5).await;
    assert_eq!(route("chat").await, json!(["a/gpt", "draw", ["spare"], "chain_gone"]));
    assert_eq!(served(&ask(&client, CHAT, "s", false).await), "a/gpt false 1");
    assert_eq!(route("chat").await, json!(["a/gpt", "affinity", null, null]));
}

/// S3.16: what has reached the client is not spliced with another model's answer; and a response that may have been made
/// in the background is not made again elsewhere.
#[tokio::test]
async fn nothing_falls_back_once_output_or_work_may_be_there() {
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    for dialect in DIALECTS {
        world.upstream("a").push(Step::new([Action::CutAfterEvents { events: 6 }]));
        let before = counts(&world);
        let answer = ask(&client, dialect, "cut", true).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-fallback")), (200, Some("false")));
        assert_eq!(since(&world, before), [1, 0, 0, 0, 0], "{}", dialect.path);
    }
    let mut body = RESPONSES.body("Hello", false);
    body["background"] = json!(true);
    world.upstream("a").push(Step::new([Action::status(503)]));
    let before = counts(&world);
    assert_eq!(client.post(RESPONSES.path, &[], &body).await.status, 503);
    assert_eq!(since(&world, before), [1, 0, 0, 0, 0]);
}

/// S3.19, S3.24: a response of the model that stood in is continued, and asked for, where it was made; nothing stands in
/// for its owner then.
#[tokio::test]
async fn a_response_of_a_fallback_is_continued_where_it_was_made() {
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    fails(&world, &["a", "b"], &Action::status(503), 2);
    let first = client.post(RESPONSES.path, &[], &RESPONSES.body("Hello", false)).await;
    assert_eq!(served(&first), "spare/spare true 5");
    let id = first.json()["id"].as_str().expect("a response has an id").to_owned();
    let before = counts(&world);
    let mut body = RESPONSES.body("And then?", false);
    body["previous_response_id"] = json!(id);
    assert_eq!(served(&client.post(RESPONSES.path, &[], &body).await), "spare/spare false 1");
    let kept = client.get(&format!("{}/{id}", RESPONSES.path), &[]).await;
    assert_eq!((kept.status.as_u16(), &kept.json()["id"]), (200, &json!(id)));
    fails(&world, &["spare"], &Action::status(500), 1);
    assert_eq!(client.post(RESPONSES.path, &[], &body).await.status, 500);
    assert_eq!(since(&world, before), [0, 0, 3, 0, 0]);
}

/// S3.15, S3.18, S2.11: a caller's terms hold over its chains: what it may not ask for does not stand in, and what is
/// refused here leads nowhere. What may not be made twice is made by nobody else either.
#[tokio::test]
async fn a_callers_terms_hold_over_its_chains() {
    let mut plan = under(CHAINS);
    let narrow =
        "{ id: narrow, key: 'env:LIMITED_KEY', group: main, template: t, models: [gpt], requests_per_minute: 1 }";
    plan.rows.keys.push(narrow.to_owned());
    let world = World::start(plan).await;
    let narrow = world.client_with("sk-limited");
    fails(&world, &["a", "b"], &Action::status(503), 2);
    assert_eq!(ask(&narrow, CHAT, "s", false).await.status, 503);
    assert_eq!(ask(&narrow, CHAT, "s", false).await.status, 429);
    assert_eq!(counts(&world), [2, 2, 0, 0, 0]);

    let templated = world.client_with(TEMPLATED);
    fails(&world, &["a", "b"], &Action::status(503), 2);
    assert_eq!(served(&ask(&templated, CHAT, "t", false).await), "spare/spare true 5");
    let before = counts(&world);
    fails(&world, &["a"], &Action::status(500), 1);
    let body = json!({"model": "gpt", "prompt": "a lighthouse"});
    let answer = templated.post("/v1/images/generations", &[("x-session-id", "t")], &body).await;
    assert_eq!((answer.status.as_u16(), since(&world, before)), (500, [1, 0, 0, 0, 0]));
}
