//! Every choice of a long and troubled run, made again from its record alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::task::JoinSet;
use waybill_auditor::redecide;
use waybill_routing::select;
use waybill_schema::event::{Affinity, Event, Exclusion, Reason, Selection};
use waybill_simulator::{Action, Settings, Step, When};

use crate::client::Client;
use crate::log::{Told, facts_after, told};
use crate::said::DIALECTS;
use crate::world::{Plan, World};

const REQUESTS: usize = 10_000;
const WORKERS: usize = 24;
const SESSIONS: usize = 300;

/// Two tiers, weights, one member out of rotation, and rests of a second.
fn plan() -> Plan {
    let mut plan = Plan::of(&["a", "b", "c", "d", "e"]).settings(
        "retry: { backoff_ms: 0, all_cooling: best_effort }\n\
         health: { failure_threshold: 2, cooldown_seconds: 1, cooldown_seconds_max: 2 }\n",
    );
    let members = ["priority: 10, weight: 70", "priority: 10, weight: 30", "priority: 20, weight: 5"];
    let members = members.into_iter().chain(["priority: 20, weight: 1", "priority: 10, weight: 0"]);
    plan.members = members.map(str::to_owned).collect();
    for settings in &mut plan.upstreams {
        *settings = Settings { chunks: 1, keep_bodies: false, ..settings.clone() };
    }
    plan
}

/// What troubled requests are known by to the upstreams; the gateway does not read it unless aliases are on.
const MARK: &str = "x-session-affinity";

/// Requests that fail in the first tier and at `c`: some in a way that counts, others in one that names a deadline.
fn trouble(world: &World) {
    for (mark, does) in [("broken", Action::status(503)), ("limited", Action::status_retry_after(429, 1))] {
        for name in ["a", "b", "c"] {
            let when = When { session: Some(mark.to_owned()), ..When::default() };
            world.upstream(name).push(Step::new([does.clone()]).when(when).standing());
        }
    }
}

fn mark(n: usize) -> &'static str {
    match n % 97 {
        37 => "broken",
        83 => "limited",
        _ => "none",
    }
}

/// Sends requests until there were enough; every fourth names no session and has a prompt of its own.
async fn work(client: Client, next: Arc<AtomicUsize>) {
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= REQUESTS {
            return;
        }
        let (path, field) = DIALECTS[n % DIALECTS.len()];
        let text = if n.is_multiple_of(4) { format!("Hello {n}") } else { "Hello".to_owned() };
        let body = json!({
            "model": "gpt", "max_tokens": 8, "stream": n.is_multiple_of(8),
            field: [{"role": "user", "content": text}],
        });
        let session = format!("session-{}", n % SESSIONS);
        let headers = [(MARK, mark(n)), ("x-session-id", session.as_str())];
        let headers = if n.is_multiple_of(4) { &headers[..1] } else { &headers[..] };
        let answer = client.post(path, headers, &body).await;
        assert!(answer.whole, "{}", answer.text());
    }
}

/// S2.3, S3.14; ARCHITECTURE.md, "What holds": a recorded choice can be made again from its record alone. And asking
/// where a request would go changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_are_decided_again_as_they_were_and_asking_changes_nothing() {
    let mut world = World::start(plan()).await;
    trouble(&world);
    let next = Arc::new(AtomicUsize::new(0));
    let workers: JoinSet<()> = (0..WORKERS).map(|_| work(world.client(), next.clone())).collect();
    workers.join_all().await;
    let digest = world.digest().await;
    let told = told(&world.data());
    assert_eq!(told.fold.state.digest(), digest);
    check_choices(&told, &world);
    check_explanations(&told, &world).await;
    check_route(&told, &world).await;
    world.stop().await;
}

fn selections(told: &Told) -> Vec<&Selection> {
    told.pick(|event| match event {
        Event::Selection(selection) => Some(&**selection),
        _ => None,
    })
}

fn check_choices(told: &Told, world: &World) {
    let selections = selections(told);
    let (mut n_choices, mut n_requests, mut sends) = (0, 0, BTreeMap::<&str, usize>::new());
    for selection in &selections {
        let channel = selection.member.as_str().rsplit('/').next().unwrap_or_default();
        *sends.entry(channel).or_default() += 1;
        n_requests += usize::from(selection.attempt == 1);
        let Some(choice) = &selection.choice else {
            assert_eq!(selection.reason, Reason::Same);
            continue;
        };
        n_choices += 1;
        let (index, reason) = select::decide(choice).expect("a recorded choice can be made");
        let candidate = &choice.candidates[index];
        assert_eq!((&candidate.member, &candidate.deployment), (&selection.member, &selection.deployment));
        assert_eq!(candidate.incarnation, selection.incarnation);
        let further = selection.attempt > 1 && reason == Reason::Draw;
        assert_eq!(selection.reason, if further { Reason::Next } else { reason });
    }
    assert_eq!(n_requests, REQUESTS, "no request was refused without a send");
    for name in ["a", "b", "c", "d", "e"] {
        let calls = world.upstream(name).calls().len();
        assert_eq!(sends.get(name).copied().unwrap_or_default(), calls, "sends to {name}");
    }
    let again = redecide::redecide_all(&world.database()).expect("the log can be read");
    assert_eq!((again.n, again.mismatches), (n_choices, Vec::new()));
    check_variety(&selections);
}

/// The run has met what it is about.
fn check_variety(selections: &[&Selection]) {
    let count = |holds: &dyn Fn(&Selection) -> bool| selections.iter().filter(|selection| holds(selection)).count();
    let cooled = |selection: &Selection| {
        let mut excluded = selection.choice.iter().flat_map(|choice| &choice.excluded);
        excluded.any(|count| count.code == Exclusion::Cooling)
    };
    let skipped = |selection: &Selection| {
        selection.choice.as_ref().is_some_and(|choice| matches!(choice.affinity, Affinity::Skipped(_)))
    };
    let reason = |reason| count(&move |selection: &Selection| selection.reason == reason);
    let met = [
        reason(Reason::Affinity),
        reason(Reason::Draw),
        reason(Reason::Same),
        reason(Reason::Next),
        count(&cooled),
        count(&skipped),
        count(&|selection| selection.claim),
    ];
    println!("affinity, draw, same, next, with one cooling, affinity skipped, claims: {met:?}");
    assert!(met.into_iter().all(|n| n > 0));
}

/// `waybill explain` says the same of a request that failed over, one that followed its session, and one drawn anew.
async fn check_explanations(told: &Told, world: &World) {
    for reason in [Reason::Next, Reason::Affinity, Reason::Draw] {
        let selections = selections(told);
        let selection = selections.iter().find(|selection| selection.reason == reason).expect("the run has met it");
        let explained = world.command(&["explain", selection.request.as_str(), "--json"]).await;
        let explained: Value = serde_json::from_str(&explained).expect("`--json` gives JSON");
        let text = explained.to_string();
        assert!(text.contains(selection.deployment.as_str()) && text.contains("\"same\""), "{text}");
        assert!(!text.contains("mismatch"), "{text}");
    }
}

/// `waybill route` names the deployment that a session is bound to, and leaves no trace.
async fn check_route(told: &Told, world: &World) {
    let n_calls = world.calls().len();
    let args = ["route", "--model", "gpt", "--key", "tester", "--session", "session-3", "--json"];
    let route: Value = serde_json::from_str(&world.command(&args).await).expect("`--json` gives JSON");
    assert_eq!(world.digest().await, told.fold.state.digest());
    let traces = facts_after(&world.data(), told.head);
    assert!(traces.iter().all(|fact| matches!(fact.event, Event::Alive(_))), "asking has left {traces:?}");
    assert_eq!(world.calls().len(), n_calls);

    assert_eq!(route["reason"], "affinity", "{route}");
    let (path, field) = DIALECTS[0];
    let body = json!({"model": "gpt", "max_tokens": 8, field: [{"role": "user", "content": "Hello"}]});
    let answer = world.client().post(path, &[("x-session-id", "session-3")], &body).await;
    assert_eq!(route["deployment"].as_str(), answer.header("x-waybill-deployment"));
}
