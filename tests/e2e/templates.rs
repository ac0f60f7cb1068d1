//! Templates: which policy holds for a key, how it shares a pool, and groups as models. The upstreams' logs count.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join;
use serde_json::json;
use tokio::task::JoinSet;
use waybill_auditor::redecide;
use waybill_schema::event::Event;
use waybill_simulator::{Action, Settings, Step};

use crate::client::Client;
use crate::dialect::{CHAT, DIALECTS};
use crate::follow::ready_when;
use crate::log::told;
use crate::world::{Plan, Rows, World};

/// The key that a template is bound to.
const TEMPLATED: &str = "sk-both";

/// Upstreams in tiers, and the key `bound` of a template with these fields.
fn under(template: &str, names: &[&str]) -> Plan {
    let members = (1..=names.len()).map(|priority| format!("priority: {priority}")).collect();
    let key = "{ id: bound, key: 'env:BOTH_KEY', group: main, template: t, expose_route: true }".to_owned();
    let templates = vec![format!("{{ id: t, {template} }}")];
    let rows = Rows { keys: vec![key], templates, ..Rows::default() };
    Plan { members, rows, ..Plan::of(names) }.settings("retry: { backoff_ms: 1 }\nhealth: { enabled: false }\n")
}

fn split(parts: &str) -> String {
    let parts: Vec<String> = parts
        .split(' ')
        .filter_map(|part| part.split_once('='))
        .map(|(name, weight)| format!("{{ deployment: {name}/gpt, weight: {weight} }}"))
        .collect();
    format!("model_routes: [{{ model: gpt, strategy: traffic-split, allocations: [{}] }}]", parts.join(", "))
}

/// Sends one request without a session and gives the upstream that served it.
async fn sent(client: &Client) -> String {
    served(client, &[]).await
}

async fn served(client: &Client, headers: &[(&str, &str)]) -> String {
    // No two have a prompt in common, so none has a session that another had.
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let body = CHAT.body(&format!("question {}", ASKED.fetch_add(1, Ordering::Relaxed)), false);
    let answer = client.post(CHAT.path, headers, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let deployment = answer.header("x-waybill-deployment").expect("the key may see it");
    deployment.split('/').next().expect("a deployment names its channel").to_owned()
}

fn counts(world: &World) -> Vec<usize> {
    world.upstreams.iter().map(|upstream| upstream.calls().len()).collect()
}

/// Issue 5: 7:3 and 7:2:1 are exact over 20 sequential requests, whatever the tiers say; every choice can be made again
/// from its record alone.
#[tokio::test]
async fn splits_are_exact_over_twenty_sequential_requests() {
    for (parts, expected) in [("a=7 b=3", vec![14, 6]), ("a=7 b=2 c=1", vec![14, 4, 2])] {
        let mut world = World::start(under(&split(parts), &["a", "b", "c"][..expected.len()])).await;
        let client = world.client_with(TEMPLATED);
        for _ in 0..20 {
            sent(&client).await;
        }
        assert_eq!(counts(&world), expected, "{parts}");
        world.stop().await;
        let redecided = redecide::redecide_all(&world.database()).expect("the log can be read");
        assert_eq!((redecided.n, redecided.mismatches), (20, vec![]));
        assert_eq!(world.table("select reason, count(*) from usage_attempts group by 1"), ["draw|20"]);
    }
}

/// S3.20, S3.14: a session's deployment is kept whatever the split says, and takes no turn of it; a weight of 0 in the
/// split ends it at the next request.
#[tokio::test]
async fn a_session_stays_where_it_is_until_the_split_takes_that_out() {
    let world = World::start(under(&split("a=1 b=1"), &["a", "b"])).await;
    let client = world.client_with(TEMPLATED);
    let session = [("x-session-id", "s")];
    let pinned = served(&client, &session).await;
    for _ in 0..6 {
        assert_eq!(served(&client, &session).await, pinned);
    }
    let others: Vec<String> = [sent(&client).await, sent(&client).await, sent(&client).await].to_vec();
    assert_eq!(others.iter().filter(|name| **name == pinned).count(), 1, "the other was owed the first: {others:?}");
    let heavier = if pinned == "a" { "a=1 b=1000" } else { "a=1000 b=1" };
    world.configure(&under(&split(heavier), &["a", "b"]));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    assert_eq!(served(&client, &session).await, pinned, "a positive weight moves nobody");
    world.configure(&under(&split(&format!("{pinned}=0")), &["a", "b"]));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 3).await;
    assert_ne!(served(&client, &session).await, pinned);
}

/// S3.20: the weights of a split also order those that are left when the first has failed.
#[tokio::test]
async fn a_split_orders_those_that_are_left() {
    let plan = under(&format!("{}, retry: {{ max_attempts: 1 }}", split("a=2 b=7 c=1")), &["a", "b", "c"]);
    let world = World::start(plan).await;
    for upstream in world.upstreams.iter() {
        upstream.push(Action::status(503));
    }
    let client = world.client_with(TEMPLATED);
    assert_eq!(client.post(CHAT.path, &[], &CHAT.body("Hello", false)).await.status, 503);
    let mut calls: Vec<_> = ["a", "b", "c"].map(|name| (world.upstream(name).calls()[0].at_ms, name)).to_vec();
    calls.sort();
    assert_eq!(calls.into_iter().map(|(_, name)| name).collect::<Vec<_>>(), ["b", "a", "c"]);
}

/// S3.14: a session stays with a deployment that others have outrun; where it fails, the strategy says who is next.
#[tokio::test]
async fn a_faster_deployment_moves_no_session() {
    let rule = "retry: { max_attempts: 1 }, model_routes: [{ model: gpt, strategy: latency }]";
    let mut plan = under(rule, &["a", "b", "c"]);
    let slow = |name: &str, ms| Settings { first_token_delay_ms: ms, ..Settings::named(name) };
    plan.upstreams = vec![slow("a", 400), slow("b", 0), slow("c", 800)];
    let world = World::start(plan).await;
    let client = world.client_with(TEMPLATED);
    let mut on_a = None;
    for name in ["s-1", "s-2", "s-3"] {
        if served(&client, &[("x-session-id", name)]).await == "a" {
            on_a = Some([("x-session-id", name)]);
        }
    }
    let on_a = on_a.expect("each of the three was measured once");
    for _ in 0..3 {
        assert_eq!(served(&client, &on_a).await, "a");
        assert_eq!(sent(&client).await, "b");
    }
    world.upstream("a").push(Action::status(503));
    assert_eq!(served(&client, &on_a).await, "b");
}

/// S3.14: a session stays with a deployment that is busier than others.
#[tokio::test]
async fn a_less_busy_deployment_moves_no_session() {
    let world = World::start(under("model_routes: [{ model: gpt, strategy: least-busy }]", &["a", "b"])).await;
    let client = world.client_with(TEMPLATED);
    let session = [("x-session-id", "s")];
    let pinned = served(&client, &session).await;
    world.upstream(&pinned).push(Step::new([Action::PauseAfter { events: 2 }]).when(streams()));
    let body = CHAT.body("a long story", true);
    let meanwhile = async {
        world.calls_until(|calls| calls.iter().any(|call| call.stream && call.events == 2)).await;
        for _ in 0..3 {
            assert_eq!(served(&client, &session).await, pinned);
            assert_ne!(sent(&client).await, pinned);
        }
        world.upstream(&pinned).release();
    };
    let (answer, ()) = join(client.post(CHAT.path, &session, &body), meanwhile).await;
    assert!(answer.text().contains(CHAT.last));
}

/// S3.20: the one with the fewest requests in flight goes first, whatever the tiers say.
#[tokio::test]
async fn the_least_busy_goes_first() {
    let mut world = World::start(under("model_routes: [{ model: gpt, strategy: least-busy }]", &["a", "b", "c"])).await;
    for upstream in world.upstreams.iter() {
        upstream.push(Step::new([Action::PauseAfter { events: 2 }]).when(streams()).standing());
    }
    let mut streams = JoinSet::new();
    for n in 1..=2 {
        let client = world.client_with(TEMPLATED);
        let body = CHAT.body(&format!("stream {n}"), true);
        streams.spawn(async move { client.post(CHAT.path, &[], &body).await });
        world.calls_until(|calls| calls.iter().filter(|call| call.events == 2).count() == n).await;
    }
    let busy: BTreeSet<usize> = (0..3).filter(|at| !world.upstreams[*at].calls().is_empty()).collect();
    assert_eq!(busy.len(), 2, "the second went where the first was not");
    let free = (0..3).find(|at| !busy.contains(at)).expect("one of three is left");
    let client = world.client_with(TEMPLATED);
    for _ in 0..5 {
        sent(&client).await;
    }
    assert_eq!(counts(&world)[free], 5);
    world.upstreams.iter().for_each(|upstream| upstream.release());
    streams.join_all().await;
    world.stop().await;
    let redecided = redecide::redecide_all(&world.database()).expect("the log can be read");
    assert_eq!((redecided.n, redecided.mismatches), (7, vec![]));
}

fn streams() -> waybill_simulator::When {
    waybill_simulator::When { stream: Some(true), ..Default::default() }
}

/// S3.20: everyone is measured once, then the fastest serves.
#[tokio::test]
async fn the_fastest_goes_first() {
    let mut plan = under("model_routes: [{ model: gpt, strategy: latency }]", &["a", "b", "c"]);
    let slow = |name: &str, ms| Settings { first_token_delay_ms: ms, ..Settings::named(name) };
    plan.upstreams = vec![slow("a", 400), slow("b", 0), slow("c", 400)];
    let mut world = World::start(plan).await;
    let client = world.client_with(TEMPLATED);
    for _ in 0..3 {
        sent(&client).await;
    }
    assert_eq!(counts(&world), [1, 1, 1], "what was never measured goes first");
    for _ in 0..5 {
        assert_eq!(sent(&client).await, "b");
    }
    world.stop().await;
    let redecided = redecide::redecide_all(&world.database()).expect("the log can be read");
    assert_eq!((redecided.n, redecided.mismatches), (8, vec![]));
}

/// S3.10: a template is read afresh at each request, and holds for the keys that have it and for no other.
#[tokio::test]
async fn a_changed_template_holds_from_the_next_request() {
    let max_attempts = |n: u32| under(&format!("retry: {{ max_attempts: {n} }}"), &["a"]);
    let world = World::start(max_attempts(4)).await;
    world.upstreams[0].push(Step::new([Action::status(503)]).standing());
    let attempts = async |key: &str| {
        let answer = world.client_with(key).post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
        answer.header("x-waybill-attempts").expect("every reply has it").to_owned()
    };
    assert_eq!((attempts(TEMPLATED).await.as_str(), attempts("sk-other").await.as_str()), ("4", "2"));
    world.configure(&max_attempts(1));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    assert_eq!((attempts(TEMPLATED).await.as_str(), attempts("sk-other").await.as_str()), ("1", "2"));
}

/// S3.10, S1.8: a template says how many failures rest a member, and for how long, before the group does; changed, it
/// holds from the next failure on. Who rests does so for everybody.
#[tokio::test]
async fn a_template_says_how_long_its_failures_rest() {
    let resting = |failures: u32, seconds: u32| {
        let policy = |failures: u32, seconds: u32| {
            format!("failover_policy: {{ consecutive_retryable_failures: {failures}, cooldown_seconds: {seconds} }}")
        };
        let mut plan = under(&policy(failures, seconds), &["a", "b", "c"]);
        plan.members = ["-", "-", "priority: 1"].map(str::to_owned).to_vec();
        plan.rows.routes = ["a", "b"]
            .map(|name| format!("{{ model: {name}, members: [{{ channel: {name}, group: main }}] }}"))
            .to_vec();
        Plan { group: policy(1, 600), ..plan }.settings("retry: { backoff_ms: 1, max_attempts: 1 }\n")
    };
    let world = World::start(resting(2, 1200)).await;
    for upstream in world.upstreams.iter() {
        upstream.push(Step::new([Action::status(503)]).standing());
    }
    // The seconds until somebody is free again, once nobody is sent to; until then the upstream's own error comes back.
    let rests = async |key: &str, model: &str| -> Option<u64> {
        let mut body = CHAT.body("Hello", false);
        body["model"] = json!(model);
        let answer = world.client_with(key).post(CHAT.path, &[], &body).await;
        assert_eq!(answer.status, 503, "{}", answer.text());
        let told = answer.json()["error"]["message"].as_str().expect("an error has a message").to_owned();
        let seconds = told.split_once("free again in ")?.1.split_once(" s")?.0.parse().expect("it is a number");
        Some(seconds)
    };
    let (bound, other) = (TEMPLATED, "sk-other");
    assert_eq!(rests(other, "a").await, None);
    assert!(
        rests(other, "a").await.is_some_and(|seconds| (541..=600).contains(&seconds)),
        "after one, as the group says"
    );
    assert_eq!((rests(bound, "b").await, rests(bound, "b").await), (None, None));
    assert!(
        rests(bound, "b").await.is_some_and(|seconds| (1141..=1200).contains(&seconds)),
        "after two, by the template"
    );
    assert!(rests(other, "b").await.is_some_and(|seconds| seconds > 600), "a member is one for all");
    world.configure(&resting(1, 1800));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    assert_eq!(rests(bound, "gpt").await, None);
    assert!(rests(bound, "gpt").await.is_some_and(|seconds| (1741..=1800).contains(&seconds)), "as it was changed");
    assert_eq!(counts(&world), [1, 2, 1]);
}

/// S3.11, S3.20: a group that may be asked for is a model, to those who reach it; its sessions are its own (S3.8).
#[tokio::test]
async fn a_group_may_be_asked_for_as_a_model() {
    let mut plan = under("expose_route: true", &["a", "b"]);
    plan.rows.groups = vec!["{ id: fleet, requestable: true }".to_owned(), "{ id: shut }".to_owned()];
    plan.rows.routes =
        vec!["{ model: big, members: [{ channel: b, group: fleet }, { channel: b, group: shut }] }".to_owned()];
    plan.rows.keys[0] =
        "{ id: bound, key: 'env:BOTH_KEY', group: main, groups: [fleet, shut], template: t }".to_owned();
    let mut world = World::start(plan).await;
    let client = world.client_with(TEMPLATED);
    for dialect in DIALECTS {
        let mut body = dialect.body("Hello", false);
        for (name, status) in [("fleet", 200), ("shut", 404), ("main", 404)] {
            body["model"] = json!(name);
            let answer = client.post(dialect.path, &[("x-session-id", "s")], &body).await;
            assert_eq!(answer.status, status, "{name}: {}", answer.text());
            let served = (status == 200).then_some("b/big");
            assert_eq!(answer.header("x-waybill-deployment"), served, "its template lets it be seen");
        }
        body["model"] = json!("fleet");
        let stranger = world.client_with("sk-other").post(dialect.path, &[], &body).await;
        assert_eq!(stranger.status, 404, "{}", stranger.text());
    }
    assert!(world.upstream("b").calls().iter().all(|call| call.model.as_deref() == Some("big")));
    let listed = |answer: serde_json::Value| -> Vec<String> {
        let data = answer["data"].as_array().expect("a list").clone();
        data.iter().map(|model| model["id"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!(listed(client.get("/v1/models", &[]).await.json()), ["fleet", "gpt"]);
    assert_eq!(listed(world.client_with("sk-other").get("/v1/models", &[]).await.json()), ["gpt"]);
    world.stop().await;
    let told = told(&world.data());
    let models = told.pick(|event| match event {
        Event::Selection(selection) => selection.context.as_ref(),
        _ => None,
    });
    assert_eq!(models.len(), 3);
    assert!(models.iter().all(|context| (context.model.as_str(), context.group.as_str()) == ("fleet", "fleet")));
}
