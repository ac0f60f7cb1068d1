//! Whether the log is whole.

use waybill_auditor::verify::verify;
use waybill_schema::event::{Class, Outcome};

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
