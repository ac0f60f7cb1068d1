//! Failover and stickiness: who is sent to, how often, and where a session is afterwards. The upstreams' logs count.

use futures_util::future::{join, join_all};
use serde_json::json;
use waybill_simulator::{Action, End, Step};

use crate::client::Client;
use crate::dialect::{CHAT, DIALECTS, Dialect, MESSAGES};
use crate::world::{Plan, Rows, World};

/// Nobody cools, so that what is seen is the session's own doing.
const CALM: &str = "retry: { backoff_ms: 1, max_attempts: 2 }\nhealth: { enabled: false }\n";

fn tiers(names: &[&str]) -> Plan {
    let members = (1..=names.len()).map(|priority| format!("priority: {priority}")).collect();
    Plan { members, ..Plan::of(names) }
}

/// Sends one request of a session and gives the number of the upstream that served it.
async fn served(client: &Client, dialect: Dialect, session: &str) -> usize {
    let answer = client.post(dialect.path, &[("x-session-id", session)], &dialect.body("Hello", true)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let deployment = answer.header("x-waybill-deployment").expect("the key may see it");
    usize::from(deployment.as_bytes()[0] - b'a')
}

fn counts(world: &World) -> Vec<usize> {
    world.upstreams.iter().map(|upstream| upstream.calls().len()).collect()
}

/// S3.12, S3.13, S3.14, A04: two 503s are two sends to the pinned deployment and one to another; the session moves once
/// and stays there when the first recovers.
#[tokio::test]
async fn a_session_moves_once_and_stays() {
    let mut world = World::start(Plan::of(&["a", "b"]).settings(CALM)).await;
    let client = world.client();
    for dialect in DIALECTS {
        let pinned = served(&client, dialect, "s").await;
        let before = counts(&world);
        world.upstreams[pinned].push(Step::new([Action::status(503)]).times(2));
        assert_eq!(served(&client, dialect, "s").await, 1 - pinned);
        let mut expected = before;
        expected[pinned] += 2;
        expected[1 - pinned] += 1;
        assert_eq!(counts(&world), expected);
        for _ in 0..5 {
            assert_eq!(served(&client, dialect, "s").await, 1 - pinned, "no way back");
        }
    }
    world.stop().await;
    let rows = world.table("select a.attempt, a.reason, a.class from usage_attempts a join usage_events e using (request_id) where e.attempts = 3 order by e.started, a.attempt");
    let one = ["1|affinity|upstream5xx", "2|same|upstream5xx", "3|next|success"];
    assert_eq!(rows, [one, one, one].concat());
}

/// S3.12, S3.17: one failure is answered by the same deployment; a cooldown that it raises cuts none of its attempts, and
/// its success ends the cooldown (S1.9).
#[tokio::test]
async fn a_failure_is_first_tried_again_where_it_happened() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 3 }\nhealth: { failure_threshold: 1 }\n";
    let world = World::start(Plan::of(&["a", "b"]).settings(settings)).await;
    let client = world.client();
    let pinned = served(&client, CHAT, "s").await;
    world.upstreams[pinned].push(Step::new([Action::status(503)]).times(2));
    assert_eq!(served(&client, CHAT, "s").await, pinned);
    assert_eq!(world.upstreams[pinned].calls().len(), 4);
    assert_eq!(served(&client, CHAT, "s").await, pinned);
}

/// S2.7, S3.12, S3.17, C19, D05: sends are exactly as many as attempts, further deployments and the sum allow.
#[tokio::test]
async fn sends_are_bounded_exactly() {
    for (retry, expected) in [
        ("max_attempts: 1, retry_times: 0", vec![1, 0, 0, 0]),
        ("max_attempts: 3, retry_times: 0", vec![3, 0, 0, 0]),
        ("max_attempts: 2, retry_times: 2", vec![2, 2, 2, 0]),
        ("max_attempts: 2, retry_times: 9", vec![2, 2, 2, 2]),
        ("max_attempts: 3, retry_times: 9, sends_max: 5", vec![3, 2, 0, 0]),
        ("max_attempts: 2, retry_times: 9, cross_channel: false", vec![2, 0, 0, 0]),
    ] {
        let settings = format!("retry: {{ backoff_ms: 1, {retry} }}\nhealth: {{ enabled: false }}\n");
        let world = World::start(tiers(&["a", "b", "c", "d"]).settings(&settings)).await;
        for upstream in world.upstreams.iter() {
            upstream.push(Step::new([Action::status(503)]).standing());
        }
        let answer = world.client().post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
        assert_eq!(answer.status, 503, "{retry}");
        assert_eq!(counts(&world), expected, "{retry}");
        assert_eq!(answer.header("x-waybill-attempts"), Some(expected.iter().sum::<usize>().to_string().as_str()));
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
}

/// S3.13, A: when everybody fails nothing is committed: the session is where it was.
#[tokio::test]
async fn failures_never_move_a_session() {
    let world = World::start(Plan::of(&["a", "b", "c"]).settings(CALM)).await;
    let client = world.client();
    for session in ["s-1", "s-2", "s-3", "s-4"] {
        let pinned = served(&client, CHAT, session).await;
        for upstream in world.upstreams.iter() {
            upstream.push(Step::new([Action::status(503)]).times(2));
        }
        let answer = client.post(CHAT.path, &[("x-session-id", session)], &CHAT.body("Hello", true)).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-attempts")), (503, Some("6")));
        assert_eq!(served(&client, CHAT, session).await, pinned);
    }
}

/// S3.13: where all fail at a session's first request, nothing is committed but what it claimed at first, and that is
/// where the next one goes.
#[tokio::test]
async fn a_claim_outlives_the_request_that_failed() {
    let mut world = World::start(Plan::of(&["a", "b", "c"]).settings(CALM)).await;
    let client = world.client();
    for session in ["s-1", "s-2", "s-3", "s-4", "s-5"] {
        let begun = counts(&world);
        for upstream in world.upstreams.iter() {
            upstream.push(Step::new([Action::status(503)]).times(2));
        }
        let answer = client.post(CHAT.path, &[("x-session-id", session)], &CHAT.body("Hello", true)).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-attempts")), (503, Some("6")));
        let first = |at: &usize| world.upstreams[*at].calls()[begun[*at]].at_ms;
        assert_eq!(Some(served(&client, CHAT, session).await), (0..3).min_by_key(first), "{session}");
    }
    world.stop().await;
    assert_eq!(world.table("select count(distinct session_id), count(*) from usage_events"), ["5|10"]);
}

/// S3.22, PITFALLS A12: an answer that comes late from where its session was does not take the session back.
#[tokio::test]
async fn a_late_success_moves_no_session_back() {
    let world = World::start(Plan::of(&["a", "b"]).settings(CALM)).await;
    let client = world.client();
    for dialect in DIALECTS {
        let pinned = served(&client, dialect, "s").await;
        let begun = world.upstreams[pinned].calls().len();
        world.upstreams[pinned].push(Step::new([Action::PauseAfter { events: 3 }]));
        let meanwhile = async {
            world.upstreams[pinned].wait_for(|calls| calls[begun..].iter().any(|call| call.events == 3)).await;
            world.upstreams[pinned].push(Step::new([Action::status(503)]).times(2));
            assert_eq!(served(&client, dialect, "s").await, 1 - pinned);
            world.upstreams[pinned].release();
        };
        let (late, ()) = join(served(&client, dialect, "s"), meanwhile).await;
        assert_eq!(late, pinned);
        for _ in 0..3 {
            assert_eq!(served(&client, dialect, "s").await, 1 - pinned, "{}", dialect.path);
        }
    }
}

/// S3.12, E24: a route's own deadline for the first token sends the request on; comments and an opening are no token.
#[tokio::test]
async fn a_late_first_token_sends_the_request_on() {
    let member =
        |channel| format!("{{ channel: {channel}, upstream_model: gpt, priority: {} }}", u8::from(channel == 'b'));
    let route = format!("{{ model: quick, first_token_seconds: 1, members: [{}, {}] }}", member('a'), member('b'));
    let world =
        World::start(Plan { rows: Rows { routes: vec![route], ..Rows::default() }, ..Plan::of(&["a", "b"]) }).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Step::new([Action::Comments, Action::StallAfterEvents { events: 1 }]));
        let mut body = dialect.body("Hello", true);
        body["model"] = json!("quick");
        let answer = world.client().post(dialect.path, &[], &body).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-waybill-deployment")), (200, Some("b/gpt")));
        assert!(answer.text().contains(dialect.last));
    }
    world.upstreams[0].wait_for(|calls| calls.iter().all(|call| call.end == Some(End::ClientGone))).await;
}

/// C21, C22, S1.7: a host that refuses connections serves nobody, and the first to notice is served by another.
#[tokio::test]
async fn a_dead_host_is_passed_over() {
    let world = World::start(tiers(&["a", "b"])).await;
    let client = world.client();
    assert_eq!(served(&client, CHAT, "s").await, 0);
    world.upstreams[0].die().await.expect("an upstream can die");
    for session in ["s", "t", "u"] {
        assert_eq!(served(&client, CHAT, session).await, 1);
    }
}

/// G13: a pooled connection that its peer has closed costs neither the client nor the deployment anything.
#[tokio::test]
async fn a_closed_pooled_connection_costs_nothing() {
    let mut world = World::start(
        tiers(&["a", "b"]).settings("retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1 }\n"),
    )
    .await;
    let client = world.client();
    for _ in 0..5 {
        assert_eq!(served(&client, CHAT, "s").await, 0);
        world.upstreams[0].stop().await;
        world.upstreams[0].revive().await.expect("an upstream can come back");
    }
    world.stop().await;
    assert_eq!(world.table("select class, count(*) from usage_attempts group by 1"), ["success|5"]);
}

/// S1.8, C10, C12, D14: a 429 that names a long wait sends the request on at once, and cools its deployment for others.
#[tokio::test]
async fn a_rate_limit_with_a_wait_sends_the_request_on_and_cools() {
    let world = World::start(tiers(&["a", "b"]).settings("retry: { backoff_ms: 1, max_attempts: 3 }\n")).await;
    let client = world.client();
    world.upstreams[0].push(Action::status_retry_after(429, 30));
    for session in ["s", "t", "u"] {
        assert_eq!(served(&client, CHAT, session).await, 1);
    }
    assert_eq!(counts(&world), [1, 3]);
}

/// DESIGN 10: where all cool and the setting says so, a request waits for the soonest, and calls nobody before.
#[tokio::test]
async fn a_request_may_wait_for_the_soonest() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1, all_cooling: { wait: 10 } }\n";
    let world = World::start(Plan::of(&["a"]).settings(settings)).await;
    let client = world.client();
    world.upstreams[0].push(Action::status_retry_after(429, 2));
    let answer = client.post(CHAT.path, &[], &CHAT.body("Hello", false)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, Some("2")));
    let sessions = ["s", "t", "u"];
    let all = join_all(sessions.map(|session| served(&client, CHAT, session))).await;
    assert_eq!(all, [0; 3]);
    let calls = world.upstreams[0].calls();
    assert_eq!(calls.len(), 4);
    let refused = calls[0].ended_at_ms.expect("the first call has ended");
    assert!(calls[1..].iter().all(|call| call.at_ms - refused >= 1990), "nobody is called while it cools");
}

/// S2.14, S3.17, C01, C03, S1.7: failures below the threshold cool nobody; at the threshold the next request goes elsewhere.
#[tokio::test]
async fn the_threshold_decides_what_later_requests_see() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 2 }\n";
    let world = World::start(tiers(&["a", "b"]).settings(settings)).await;
    let client = world.client();
    let fail = || world.upstreams[0].push(Action::status(500));
    fail();
    assert_eq!(served(&client, CHAT, "s").await, 1);
    assert_eq!(served(&client, CHAT, "t").await, 0, "one failure is none");
    for session in ["u", "v"] {
        fail();
        assert_eq!(served(&client, CHAT, session).await, 1);
    }
    assert_eq!(served(&client, CHAT, "t").await, 1, "two in a row cool, for old sessions too");
    assert_eq!(counts(&world), [4, 4]);
}

/// S3.14, S2.3: a disabled or deleted deployment or one of weight 0 loses its sessions at the next request; they do not
/// return.
#[tokio::test]
async fn disabled_deleted_and_weightless_deployments_lose_their_sessions() {
    for off in ["priority: 10, weight: 0", "priority: 10, status: disabled", "-"] {
        let plan = Plan::of(&["a", "b"]);
        let mut world = World::start(plan).await;
        let pinned = served(&world.client(), CHAT, "s").await;
        let mut plan = Plan::of(&["a", "b"]);
        plan.members[pinned] = off.to_owned();
        for plan in [plan, Plan::of(&["a", "b"])] {
            world.stop().await;
            world.configure(&plan);
            world.restart().await;
            assert_eq!(served(&world.client(), CHAT, "s").await, 1 - pinned, "{off}");
        }
    }
}

/// S2.3, S3.20: weights spread new sessions; a changed weight moves none of them (S3.14).
#[tokio::test]
async fn weights_spread_new_sessions_and_move_no_old_one() {
    let weighted = |a: u32, b: u32| Plan {
        members: vec![format!("weight: {a}"), format!("weight: {b}")],
        ..Plan::of(&["a", "b"])
    };
    let mut world = World::start(weighted(1, 3)).await;
    let sessions: Vec<String> = (0..200).map(|n| format!("s-{n}")).collect();
    let client = world.client();
    let first = join_all(sessions.iter().map(|session| served(&client, CHAT, session))).await;
    let to_a = first.iter().filter(|upstream| **upstream == 0).count();
    // 50 are expected; 20 and 80 are five standard deviations away.
    assert!((20..=80).contains(&to_a), "{to_a} of 200");
    world.stop().await;
    world.configure(&weighted(100, 1));
    world.restart().await;
    let client = world.client();
    let second = join_all(sessions.iter().map(|session| served(&client, CHAT, session))).await;
    assert_eq!(second, first);
}

/// S2.3: a lower tier serves only when the higher has nobody.
#[tokio::test]
async fn tiers_are_strict() {
    let world = World::start(tiers(&["a", "b", "c"])).await;
    let client = world.client();
    let sessions: Vec<String> = (0..20).map(|n| format!("s-{n}")).collect();
    for tier in 0..3 {
        for session in &sessions {
            assert_eq!(served(&client, MESSAGES, session).await, tier);
        }
        world.upstreams[tier].die().await.expect("an upstream can die");
    }
}

/// S3.22, S3.11: the first requests of a session, all at once, go to one deployment.
#[tokio::test]
async fn concurrent_firsts_of_a_session_go_to_one_deployment() {
    let mut plan = Plan::of(&["a", "b", "c"]);
    for upstream in &mut plan.upstreams {
        upstream.first_token_delay_ms = 50;
    }
    let world = World::start(plan).await;
    let client = world.client();
    let sessions: Vec<String> = (0..200).map(|n| format!("s-{}", n % 10)).collect();
    let all = join_all(sessions.iter().map(|session| served(&client, CHAT, session))).await;
    for session in 0..10 {
        let mut own: Vec<usize> = all.iter().skip(session).step_by(10).copied().collect();
        own.dedup();
        assert_eq!(own.len(), 1, "s-{session} was served by {own:?}");
    }
}

/// C5, S3.21: what a session is pinned to outlives the gateway, whether it is stopped or killed.
#[tokio::test]
async fn affinity_survives_a_restart_and_a_kill() {
    let mut world = World::start(Plan::of(&["a", "b", "c"])).await;
    let sessions: Vec<String> = (0..12).map(|n| format!("s-{n}")).collect();
    let client = world.client();
    let first = join_all(sessions.iter().map(|session| served(&client, CHAT, session))).await;
    for kills in [false, true] {
        if kills {
            world.kill().await
        } else {
            world.stop().await
        }
        world.restart().await;
        let client = world.client();
        assert_eq!(join_all(sessions.iter().map(|session| served(&client, CHAT, session))).await, first);
    }
}

/// H13: counting tokens asks the session's deployment; its failures cool nobody and move no session.
#[tokio::test]
async fn counting_tokens_follows_the_session_and_touches_no_health() {
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { failure_threshold: 1 }\n";
    let world = World::start(Plan::of(&["a", "b", "c"]).settings(settings)).await;
    let client = world.client();
    let count = async |session: &str| {
        let headers = [("x-session-id", session)];
        let answer = client.post("/v1/messages/count_tokens", &headers, &MESSAGES.body("Hello", false)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.json()["input_tokens"].is_u64());
        usize::from(answer.header("x-waybill-deployment").expect("the key may see it").as_bytes()[0] - b'a')
    };
    for session in ["s-1", "s-2", "s-3", "s-4", "s-5", "s-6"] {
        let pinned = served(&client, MESSAGES, session).await;
        assert_eq!(count(session).await, pinned);
        world.upstreams[pinned].push(Step::new([Action::status(503)]).on(waybill_simulator::Endpoint::CountTokens));
        assert_ne!(count(session).await, pinned);
        assert_eq!(count(session).await, pinned, "no cooldown, no move");
        assert_eq!(served(&client, MESSAGES, session).await, pinned);
    }
}

/// D20: every send is built anew: address, model and credential of its own deployment.
#[tokio::test]
async fn every_send_speaks_to_its_own_deployment() {
    let members =
        vec!["priority: 1, upstream_model: one".to_owned(), "priority: 2, upstream_model: another-name".to_owned()];
    let world = World::start(Plan { members, ..Plan::of(&["a", "b"]) }.settings(CALM)).await;
    for dialect in DIALECTS {
        world.upstreams[0].push(Step::new([Action::status(503)]).times(2));
        let answer = world.client().post(dialect.path, &[], &dialect.body("Hello", false)).await;
        assert_eq!(answer.status, 200);
        let models = world.upstreams.iter().flat_map(|upstream| upstream.calls()).map(|call| call.model);
        let mut models: Vec<_> = models.collect();
        models.dedup();
        assert_eq!(json!(models), json!(["one", "another-name"]));
    }
}
