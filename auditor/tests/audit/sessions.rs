//! Sessions by scope, their rounds, and what they used.

use waybill_auditor::sessions::{Page, Session, rounds, sessions};
use waybill_projections::story::Teller;
use waybill_schema::event::{Class, Event, Fact, Outcome, SessionSource, Tokens};

use crate::House;

/// A request of `scope`'s `session` that ends at `at` after a failure on `a` and an answer from `b`.
fn round(gw: &mut Teller, at: i64, request: &str, scope: &str, session: &str, source: SessionSource) -> Vec<Fact> {
    let mut facts = vec![
        gw.selects(at - 100, request, 1, "a"),
        gw.ends_send(at - 60, request, 1, Class::Upstream5xx),
        gw.selects(at - 59, request, 2, "b"),
        gw.ends_send(at - 1, request, 2, Class::Success),
        gw.ends(at, request, Outcome::Success, Class::Success, 2),
    ];
    let Event::Selection(selection) = &mut facts[0].event else { panic!("the first fact selects") };
    let context = selection.context.as_mut().expect("a first selection has a context");
    (context.scope, context.session, context.source) = (scope.into(), session.into(), source);
    let Event::Attempt(attempt) = &mut facts[3].event else { panic!("the fourth fact ends a send") };
    attempt.deployment = "b/gpt".into();
    facts
}

/// Three sessions of two tenants; both call one of theirs `talk`.
fn house() -> House {
    let mut house = House::new();
    let gw = &mut house.gateway;
    let facts = [
        vec![gw.starts(0)],
        round(gw, 1000, "r-1", "acme", "talk", SessionSource::Explicit),
        round(gw, 2000, "r-2", "acme", "prompt:v1:77", SessionSource::Prompt),
        round(gw, 3000, "r-3", "acme", "talk", SessionSource::Explicit),
        round(gw, 4000, "r-4", "rival", "talk", SessionSource::Explicit),
    ];
    house.tell(&facts.concat());
    house.settle()
}

fn in_text(session: &Session) -> String {
    let Session { scope, session, source, inferred, started, ended, requests, failed, totals, .. } = session;
    let used = (totals.sends, totals.sends_unknown, totals.input, totals.output, totals.cached, totals.cost_nano);
    let (started, ended) = (started.0, ended.0);
    format!(
        "{scope}/{session} {source} inferred={inferred} {started}-{ended} requests={requests} failed={failed} {used:?}"
    )
}

/// S3.7, S3.25, S3.26: groups by scope and session, marked where inferred, summed from the sends alone.
#[test]
fn sessions_are_listed_by_latest_activity_and_count_every_send_once() {
    let house = house();
    let audit = house.audit();
    let all = sessions(audit.connection(), None, &Page::default()).expect("the rows can be read");
    let text: Vec<String> = all.entries.iter().map(in_text).collect();
    assert_eq!(
        text,
        [
            "rival/talk explicit inferred=false 3930-4000 requests=1 failed=0 \
             (2, 1, Some(100), Some(20), None, Some(7))",
            "acme/talk explicit inferred=false 930-3000 requests=2 failed=0 \
             (4, 2, Some(200), Some(40), None, Some(14))",
            "acme/prompt:v1:77 prompt inferred=true 1930-2000 requests=1 failed=0 \
             (2, 1, Some(100), Some(20), None, Some(7))",
        ],
    );
    assert_eq!((all.next, &all.entries[1].models), (None, &vec!["gpt".to_owned()]));
    assert_eq!(all.entries[1].deployments, ["a/gpt", "b/gpt"]);
}

#[test]
fn a_scope_sees_its_own_sessions_only_and_pages_by_cursor() {
    let house = house();
    let audit = house.audit();
    let mut page = Page { limit: 1, after: None };
    let mut seen = Vec::new();
    loop {
        let paged = sessions(audit.connection(), Some(&"acme".into()), &page).expect("the rows can be read");
        seen.extend(paged.entries.iter().map(|session| session.session.to_string()));
        let Some(next) = paged.next else { break };
        page.after = Some(next.to_string().parse().expect("a cursor survives its text"));
    }
    assert_eq!(seen, ["talk", "prompt:v1:77"]);
    assert!("6e6f".parse::<waybill_auditor::sessions::Cursor>().is_err());
}

/// S3.26: each round's real target and failures.
#[test]
fn rounds_show_where_they_really_went_and_what_failed() {
    let house = house();
    let audit = house.audit();
    let mut page = Page { limit: 1, after: None };
    let first = rounds(audit.connection(), &"acme".into(), &"talk".into(), &page).expect("the rows can be read");
    page.after = first.next.clone();
    let second = rounds(audit.connection(), &"acme".into(), &"talk".into(), &page).expect("the rows can be read");
    assert_eq!((first.entries[0].request.as_str(), second.entries[0].request.as_str()), ("r-1", "r-3"));
    assert_eq!(second.next, None);
    let targets: Vec<String> = first.entries[0]
        .targets
        .iter()
        .map(|target| format!("{} {} {:?} {:?}", target.deployment, target.class, target.status, target.totals.input))
        .collect();
    assert_eq!(targets, ["a/gpt upstream5xx Some(502) None", "b/gpt success Some(200) Some(100)"]);
    let none = rounds(audit.connection(), &"rival".into(), &"prompt:v1:77".into(), &Page::default());
    assert_eq!(none.expect("the rows can be read").entries, []);
}

#[test]
fn tokens_that_were_worked_out_are_told_from_reported_ones() {
    let mut house = House::new();
    let gw = &mut house.gateway;
    let mut facts = vec![gw.starts(0)];
    facts.extend(round(gw, 1000, "r-1", "acme", "talk", SessionSource::Explicit));
    let Event::Attempt(attempt) = &mut facts[4].event else { panic!("the fact ends a send") };
    (attempt.usage.output, attempt.usage.reasoning) = (Tokens::Estimated(30), Tokens::Reported(0));
    house.tell(&facts);
    let audit = house.audit();
    let listed = sessions(audit.connection(), None, &Page::default()).expect("the rows can be read");
    let totals = &listed.entries[0].totals;
    assert_eq!((totals.sends_estimated, totals.output, totals.reasoning), (1, Some(30), Some(0)));
    let sql = "SELECT estimated FROM usage_attempts WHERE attempt = 2";
    let estimated: i64 = audit.connection().query_row(sql, [], |row| row.get(0)).expect("the row can be read");
    assert_eq!(estimated, 2);
}
