//! Whether the log is whole.

use waybill_auditor::verify::verify;
use waybill_schema::event::{Class, Endpoint, Event, Outcome, Ownedness, Ownership, SessionSource};

use crate::House;

fn house() -> House {
    let mut house = House::new();
    let gw = &mut house.gateway;
    let facts = [
        gw.starts(0),
        gw.selects(10, "r", 1, "a"),
        gw.ends_send(60, "r", 1, Class::Success),
        gw.ends(61, "r", Outcome::Success, Class::Success, 1),
    ];
    facts.iter().for_each(|fact| house.tell(std::slice::from_ref(fact)));
    house
}

/// Spoils the file with `sql` and names what is found.
fn check(sql: &str, expected: &[&str]) {
    let house = house();
    let writer = rusqlite::Connection::open(house.path()).expect("the file opens");
    writer.execute_batch(sql).expect("the file can be spoiled");
    let verified = verify(&mut house.audit()).expect("the log can be read");
    assert_eq!(verified.n_findings as usize, expected.len(), "{:?}", verified.findings);
    for (finding, expected) in verified.findings.iter().zip(expected) {
        assert!(finding.contains(expected), "`{finding}` should say `{expected}`");
    }
}

#[test]
fn a_whole_log_has_no_findings() {
    check("", &[]);
    let verified = verify(&mut house().audit()).expect("the log can be read");
    assert_eq!((verified.n_frames, verified.n_facts, verified.duplicates), (4, 4, 0));
}

#[test]
fn a_changed_byte_is_found() {
    let sql = "UPDATE frames SET body = CAST(replace(CAST(body AS TEXT), '\"latency_ms\":50', '\"latency_ms\":51')
               AS BLOB) WHERE seq = 3";
    check(sql, &["frame 3: frame does not match its sum"]);
}

#[test]
fn a_frame_that_is_gone_is_found_twice_over() {
    let expected = ["frame 4 does not continue the chain of `gw`", "fact gw:1:4: Hole { epoch: 1, first: 3, last: 3 }"];
    check("DELETE FROM frames WHERE seq = 3", &expected);
}

#[test]
fn a_response_with_two_owners_is_found() {
    let mut house = house();
    let owns = |deployment: &str, scope: &str| {
        Event::Ownership(Box::new(Ownership {
            response: "h".into(),
            state: Ownedness::Final,
            request: "r".into(),
            scope: scope.into(),
            model: "gpt".into(),
            endpoint: Endpoint::Responses,
            deployment: deployment.into(),
            channel: "a".into(),
            incarnation: 1,
            session: "s".into(),
            source: SessionSource::Explicit,
        }))
    };
    let gw = &mut house.gateway;
    let facts = [
        gw.says(70, owns("a/gpt", "acme")),
        gw.says(71, owns("a/gpt", "acme")),
        gw.says(72, owns("b/gpt", "other")),
        gw.says(73, owns("b/gpt", "acme")),
    ];
    house.tell(&facts);
    let verified = verify(&mut house.audit()).expect("the log can be read");
    let expected = "frame 5, fact gw:1:8: response h has another owner than b/gpt";
    assert_eq!((verified.findings, verified.tainted), (vec![expected.to_owned()], false));
}
