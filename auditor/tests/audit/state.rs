//! The state of a moment.

use waybill_auditor::state::{At, StateAt, state};
use waybill_events::log::Seq;
use waybill_projections::story::{attempt, context, selection};
use waybill_schema::event::{Class, Context, Effect, Event, KeyType, Preference, Selection, Sticky};
use waybill_schema::time::Time;

use crate::House;

const KEY: &str = "acme:lg:main:m:gpt:chat:sess:s";

/// A session that is claimed at 10, bound at 20 to `b` and forgotten by nobody; `a` fails at 30 and rests for a second.
fn house() -> House {
    let mut house = House::new();
    let gw = &mut house.gateway;
    let sticky = Some(Sticky { key: KEY.into(), by: KeyType::Sess });
    let claim = Selection { claim: true, context: Some(Context { sticky, ..context() }), ..selection("r", 1, "a") };
    let preference = Preference {
        request: "r".into(),
        key: KEY.into(),
        member: "main/gpt/b".into(),
        deployment: "b/gpt".into(),
        incarnation: 1,
        model: "gpt-4.1".into(),
        pool: "main".into(),
        path: Vec::new(),
        chains: Vec::new(),
        base: Some(waybill_schema::id::Revision { writer: "gw".into(), epoch: 1, number: 2 }),
        ttl_ms: 5000,
    };
    let mut failed = attempt("q", 1, Class::Timeout);
    (failed.thresholds.failures, failed.effect) = (1, Effect::Count);
    let facts = [
        gw.starts(0),
        gw.says(10, Event::Selection(Box::new(claim))),
        gw.says(20, Event::Preference(Box::new(preference))),
        gw.says(30, Event::Attempt(Box::new(failed))),
        gw.starts(6000),
    ];
    facts.iter().for_each(|fact| house.tell(std::slice::from_ref(fact)));
    // The frames were stored when their facts were made.
    let writer = rusqlite::Connection::open(house.path()).expect("the file opens");
    writer
        .execute_batch(
            "UPDATE frames SET stored = CASE seq WHEN 1 THEN 0 WHEN 2 THEN 10 WHEN 3 THEN 20 WHEN 4 THEN 30 ELSE 6000 END;
             UPDATE frames SET sent = stored",
        )
        .expect("the file can be changed");
    house
}

/// Pins as `deployment until`, resting members as `member until`, and writers' last numbers.
fn check(house: &House, at: At, seq: u64, expected: [&str; 3]) -> StateAt {
    let said = state(&mut house.audit(), at, 100).expect("the log can be read");
    let pins = said.pins.iter().map(|bound| format!("{} {}", bound.pin.route_id, bound.pin.expires_at.0));
    let rests = said
        .members
        .iter()
        .filter_map(|member| member.cooldown.as_ref().map(|rest| format!("{} {}", member.member, rest.until.0)));
    let writers = said.writers.iter().map(|(writer, at)| format!("{writer} {} {}", at.epoch, at.last));
    let told = [pins.collect::<Vec<_>>(), rests.collect(), writers.collect()].map(|lines| lines.join(", "));
    assert_eq!((said.seq, told), (Seq(seq), expected.map(String::from)), "at {at:?}");
    said
}

#[test]
fn a_moment_is_what_the_log_had_said_by_then() {
    let house = house();
    check(&house, At::Seq(Seq(1)), 1, ["", "", "gw 1 1"]);
    check(&house, At::Seq(Seq(2)), 2, ["a 3600010", "", "gw 1 2"]);
    check(&house, At::Time(Time(29)), 3, ["b/gpt 5020", "", "gw 1 3"]);
    let then = check(&house, At::Time(Time(30)), 4, ["b/gpt 5020", "main/gpt/a 1030", "gw 1 4"]);
    let end = check(&house, At::End, 5, ["", "", "gw 2 1"]);
    assert_eq!((then.digest == end.digest, then.log_digest == end.log_digest), (true, false));
    assert_eq!((end.n_frames, end.n_facts, end.duplicates, end.violations), (5, 5, 0, 0));
}
