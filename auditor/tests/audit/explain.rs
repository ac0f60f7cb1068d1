//! Why a request went there.

use waybill_auditor::explain::{Committed, End, ExplainError, Explanation, NotCommitted, explain};
use waybill_auditor::usage::SqliteUsage;
use waybill_projections::story::{attempt, context, selection};
use waybill_schema::event::{
    Affinity, AffinityRead, Candidate, Choice, Class, Effect, Event, Exclusion, ExclusionCount, Fact, Outcome,
    Preference, Reason, Selection,
};
use waybill_schema::id::Revision;
use waybill_schema::time::Time;

use crate::House;

/// 2026-12-23T05:46:40.000Z, by `date -u -d @1798004800`.
const START: i64 = 1_798_004_800_000;

fn explained(house: &House, request: &str) -> Result<Explanation, ExplainError> {
    explain(&mut house.audit(), &mut SqliteUsage::new(house.audit()), &request.into())
}

fn candidate(channel: &str, priority: i32) -> Candidate {
    Candidate {
        member: format!("main/gpt/{channel}").as_str().into(),
        deployment: format!("{channel}/gpt").as_str().into(),
        incarnation: 1,
        priority,
        weight: 100,
        excluded: None,
        until: None,
        failures: 0,
    }
}

fn chosen(attempt: u16, channel: &str, reason: Reason, affinity: Affinity, candidates: Vec<Candidate>) -> Selection {
    let excluded = candidates.iter().filter_map(|candidate| candidate.excluded);
    let choice = Choice {
        excluded: excluded.map(|code| ExclusionCount { code, n: 1 }).collect(),
        candidates,
        draw: 42,
        affinity,
        last_resort: false,
        catalogue: 7,
    };
    let deployment = format!("{channel}/gpt").as_str().into();
    let member = format!("main/gpt/{channel}").as_str().into();
    Selection { member, deployment, reason, choice: Some(choice), ..selection("r-1", attempt, channel) }
}

/// A session that was bound to `asxs` and was moved to `codex2api` by a 429.
fn moved(house: &mut House) -> Vec<Fact> {
    let base = Revision { writer: "gw".into(), epoch: 1, number: 1 };
    let read = AffinityRead { deployment: "asxs/gpt".into(), revision: base.clone(), provisional: false };
    let mut cooling = candidate("asxs", 10);
    (cooling.excluded, cooling.until, cooling.failures) = (Some(Exclusion::Cooling), Some(Time(START + 30_050)), 1);
    let mut first = attempt("r-1", 1, Class::RateLimited);
    (first.member, first.deployment) = ("main/gpt/asxs".into(), "asxs/gpt".into());
    (first.status, first.effect, first.retry_after_ms) = (Some(429), Effect::Cool, Some(30_000));
    let mut second = attempt("r-1", 2, Class::Success);
    (second.member, second.deployment) = ("main/gpt/codex2api".into(), "codex2api/gpt".into());
    let preference = Preference {
        request: "r-1".into(),
        key: "acme|s-1".into(),
        member: "main/gpt/codex2api".into(),
        deployment: "codex2api/gpt".into(),
        incarnation: 1,
        model: "gpt".into(),
        pool: "main".into(),
        path: Vec::new(),
        chains: Vec::new(),
        base: Some(base),
        ttl_ms: 7_200_000,
    };
    let both = vec![candidate("asxs", 10), candidate("codex2api", 20)];
    let left = vec![candidate("codex2api", 20), cooling];
    let first_choice = chosen(1, "asxs", Reason::Affinity, Affinity::Hit(read.clone()), both);
    let second_choice = chosen(2, "codex2api", Reason::Next, Affinity::Skipped(read), left);
    let gw = &mut house.gateway;
    vec![
        gw.starts(START - 1000),
        gw.says(START, Event::Selection(Box::new(first_choice))),
        gw.selects(START + 1, "r-2", 1, "other"),
        gw.says(START + 50, Event::Attempt(Box::new(first))),
        gw.says(START + 51, Event::Selection(Box::new(second_choice))),
        gw.says(START + 101, Event::Attempt(Box::new(second))),
        gw.says(START + 102, Event::Preference(Box::new(preference))),
        gw.ends(START + 103, "r-1", Outcome::Success, Class::Success, 2),
    ]
}

/// S1.11: "why did this go to codex2api and not asxs".
#[test]
fn an_explanation_tells_why_it_went_to_codex2api_and_not_asxs() {
    let mut house = House::new();
    let facts = moved(&mut house);
    facts.iter().for_each(|fact| house.tell(std::slice::from_ref(fact)));
    let house = house.settle();
    let explanation = explained(&house, "r-1").expect("the request is known");
    let expected = "\
request r-1
  scope acme, key acme, group main, model gpt, responses, streamed
  session s-1 (explicit) from header:x-session-id
  affinity key acme|s-1 by conv
send 1 at 2026-12-23T05:46:40.000Z: asxs/gpt because the affinity record names it
  member main/gpt/asxs (incarnation 1), model gpt
  affinity: asxs/gpt (revision gw:1:1), followed
  catalogue revision 7, draw 42
  - asxs/gpt (main/gpt/asxs): tier 10, weight 100, failures 0, legal
  - codex2api/gpt (main/gpt/codex2api): tier 20, weight 100, failures 0, legal
  re-decided: same
  ended rate_limited, status 429, after 50 ms, at 2026-12-23T05:46:40.050Z
  usage: input unknown, output unknown, cached unknown, not priced
  health: cools down for the 30000 ms that the upstream asked for
send 2 at 2026-12-23T05:46:40.051Z: codex2api/gpt because the one before failed and this is the next of the pool
  member main/gpt/codex2api (incarnation 1), model gpt
  affinity: asxs/gpt (revision gw:1:1), not legal now
  catalogue revision 7, draw 42
  - codex2api/gpt (main/gpt/codex2api): tier 20, weight 100, failures 0, legal
  - asxs/gpt (main/gpt/asxs): tier 10, weight 100, failures 1, excluded: cooling until 2026-12-23T05:47:10.050Z
  re-decided: same
  ended success, status 200, after 50 ms, first token after 9 ms, at 2026-12-23T05:46:40.101Z
  usage: input 100, output 20, cached unknown, 7 nano-USD
  health: recovered
affinity committed: acme|s-1 to codex2api/gpt for 7200000 ms, based on gw:1:1: a switch stands only if the record had not moved on
outcome success, status 200, 2 send(s), 70 ms, at 2026-12-23T05:46:40.103Z
";
    assert_eq!(explanation.to_string(), expected);
    let json = serde_json::to_value(&explanation).expect("an explanation has only text keys");
    assert_eq!(json["sends"][1]["selection"]["says"]["choice"]["candidates"][1]["excluded"], "cooling");
    assert_eq!(json["sends"][1]["redecided"], "same");
}

#[test]
fn a_request_in_a_frame_that_rests_compressed_is_explained_as_any_other() {
    let [small, mut large] = [House::new(), House::new()].map(|mut house| {
        let facts = moved(&mut house);
        (house, facts)
    });
    let (mut house, facts) = small;
    house.tell(&facts);
    let expected = explained(&house, "r-1").expect("the request is known").to_string();
    large.1.extend((0..200).map(|n| large.0.gateway.selects(START, &format!("q-{n}"), 1, "asxs/gpt")));
    large.0.tell(&large.1);
    let packed: i64 = large
        .0
        .audit()
        .connection()
        .query_row("SELECT hex(substr(body, 1, 4)) = '28B52FFD' FROM frames WHERE seq = 1", [], |row| row.get(0))
        .expect("the frame is there");
    assert_eq!(packed, 1, "the frame is large enough to be compressed");
    let explained = explained(&large.0, "r-1").expect("the request is known");
    assert_eq!(explained.to_string(), expected);
}

#[test]
fn a_request_under_way_is_explained_from_what_is_there() {
    let mut house = House::new();
    let facts = moved(&mut house);
    house.tell(&facts[..2]);
    let explanation = explained(&house, "r-1").expect("the request is known");
    assert_eq!((explanation.end, explanation.sends.len()), (End::UnderWay, 1));
    assert_eq!(explanation.preference, Committed::Not(NotCommitted::UnderWay));
}

#[test]
fn an_abandoned_request_says_so() {
    let mut house = House::new();
    let facts = moved(&mut house);
    house.tell(&facts[..4]);
    // The epoch before ended at number 4.
    house.gateway.last = 4;
    let started = house.gateway.starts(START + 5000);
    house.tell(&[started]);
    let explanation = explained(&house, "r-1").expect("the request is known");
    assert_eq!((&explanation.end, explanation.end.outcome()), (&End::Abandoned, Some(Outcome::Abandoned)));
    assert_eq!(explanation.preference, Committed::Not(NotCommitted::NoSuccess));
}

#[test]
fn a_choice_that_cannot_be_made_again_is_flagged() {
    let mut house = House::new();
    let both = vec![candidate("asxs", 10), candidate("codex2api", 20)];
    let forged = chosen(1, "codex2api", Reason::Draw, Affinity::Absent, both);
    let facts = [house.gateway.starts(START - 1000), house.gateway.says(START, Event::Selection(Box::new(forged)))];
    house.tell(&facts);
    let explanation = explained(&house, "r-1").expect("the request is known");
    assert!(explanation.to_string().contains("re-decided: MISMATCH, main/gpt/asxs"), "{explanation}");
}

#[test]
fn a_refused_request_was_sent_nowhere() {
    let mut house = House::new();
    let mut refused = house.gateway.ends(START, "r-1", Outcome::Refused, Class::CallerError, 0);
    let Event::Request(request) = &mut refused.event else { panic!("the fact ends a request") };
    (request.class, request.status, request.code) = (None, Some(503), Some("no_route_available".into()));
    (request.context, refused.revision.number, house.gateway.last) = (Some(context()), 2, 0);
    let facts = [house.gateway.starts(START - 1000), Fact { revision: revision(2), ..refused }];
    house.tell(&facts);
    let text = explained(&house, "r-1").expect("the request is known").to_string();
    assert!(text.contains("nothing was sent upstream\n"), "{text}");
    assert!(text.contains("outcome refused, status 503, code no_route_available, 0 send(s)"), "{text}");
}

fn revision(number: u64) -> Revision {
    Revision { writer: "gw".into(), epoch: 1, number }
}

#[test]
fn an_unknown_request_is_an_error_that_says_so() {
    let house = House::new();
    let error = explained(&house, "nobody").expect_err("nobody asked");
    assert!(matches!(error, ExplainError::Unknown(_)));
    assert!(error.to_string().starts_with("request `nobody` is not in the log"), "{error}");
}
