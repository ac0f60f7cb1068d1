//! Batches taken back, by hand-made histories: what comes back exactly, and what stands against it by name.

use waybill_auditor::catalogue::undo::undone;
use waybill_schema::event::{Batch, OpRef};

use crate::rows::{Past, channel, group, key, member, organization, route, team, template};

/// A group `g` that serves `m` on channel `a`; batch 1.
fn serving() -> Past {
    let mut past = Past::default();
    past.edit(&[channel("a", "one"), group("g", &[]), route("m", &[]), member("g/m/a", 1)], &[]);
    past
}

/// Undoes a batch that cannot be, and checks the lines of the refusal.
fn refused(past: &mut Past, batch: u64, expected: &[&str]) {
    let standing = past.bytes();
    let error = past.undo(batch).expect_err("the undo is refused").to_string();
    assert_eq!(error.lines().map(str::trim).collect::<Vec<_>>(), expected);
    assert_eq!(past.bytes(), standing);
}

/// Which batches have undone ops, each with what undid it.
fn undone_batches(past: &Past) -> Vec<(u64, u64)> {
    let mut batches: Vec<_> = undone(&past.batches).into_iter().map(|(op, by)| (op.batch, by)).collect();
    batches.dedup();
    batches
}

#[test]
fn an_undo_brings_rows_back_as_they_were_with_their_incarnations() {
    let mut past = serving();
    past.edit(&[channel("a", "two")], &[]);
    let before = past.bytes();
    past.edit(&[channel("b", "x"), channel("a", "three")], &[member("g/m/a", 1)]);
    past.edit(&[member("g/m/b", 1)], &[]);
    past.undo(4).expect("nothing depends on it");
    past.undo(3).expect("what depended on it is undone");
    assert_eq!(past.bytes(), before);
    let incarnations: Vec<u64> = past.rows.iter().map(|(_, stored)| stored.incarnation).collect();
    assert_eq!(incarnations, [1, 1, 1, 1]);
    let last = past.batches.last().expect("batches were made");
    assert_eq!((last.revision, last.actor.as_str(), last.reason.as_str(), &last.file), (6, "me", "undo", &None));
    let named: Vec<u32> = last.undo.iter().map(|op| op.op).collect();
    assert_eq!(named, [2, 1, 0], "in reverse order");
}

#[test]
fn a_row_that_was_changed_since_refuses_by_name() {
    let mut past = serving();
    past.edit(&[channel("a", "two"), member("g/m/a", 2)], &[]);
    past.edit(&[channel("a", "three")], &[]);
    past.edit(&[channel("a", "two")], &[]);
    past.edit(&[], &[member("g/m/a", 2)]);
    let expected = [
        "batch 2 cannot be undone:",
        "batch 3 changed channel `a` since",
        "batch 4 changed channel `a` since",
        "batch 5 changed member `g/m/a` since",
    ];
    refused(&mut past, 2, &expected);
    past.undo(5).expect("nothing depends on it");
    past.undo(4).expect("nothing depends on it");
    refused(&mut past, 2, &["batch 2 cannot be undone:", "batch 3 changed channel `a` since"]);
    past.undo(3).expect("nothing depends on it");
    past.undo(2).expect("all that changed since is undone");
}

#[test]
fn a_row_made_later_holds_what_it_refers_to() {
    let mut past = serving();
    past.edit(&[channel("b", "x"), organization("o", None), group("h", &[])], &[]);
    past.edit(&[member("g/m/b", 1), team("t", Some("o"))], &[]);
    past.edit(&[key("k", "K", "h", Some("t"))], &[]);
    let expected = [
        "batch 2 cannot be undone:",
        "member `g/m/b` needs channel `b` since batch 3, and the undo would take that away",
        "key `k` needs group `h` since batch 4, and the undo would take that away",
        "team `t` needs organization `o` since batch 3, and the undo would take that away",
    ];
    refused(&mut past, 2, &expected);
    let expected =
        ["batch 3 cannot be undone:", "key `k` needs team `t` since batch 4, and the undo would take that away"];
    refused(&mut past, 3, &expected);
    for batch in [4, 3, 2] {
        past.undo(batch).expect("what depended on it is undone");
    }
}

#[test]
fn names_that_rows_make_together_are_held_too() {
    let mut past = serving();
    past.edit(&[route("n", &[]), channel("b", "x"), member("g/n/b", 1)], &[]);
    past.edit(&[group("g", &["m", "n"]), route("m", &["n"]), template("t", "m", Some("b/n"))], &[]);
    let expected = [
        "batch 2 cannot be undone:",
        "route `m` needs a route or group for `n` since batch 3, and the undo would take that away",
        "template `t` needs a member that makes deployment `b/n` since batch 3, and the undo would take that away",
        "group `g` needs a member of group `g` that serves `n` since batch 3, and the undo would take that away",
    ];
    refused(&mut past, 2, &expected);
}

#[test]
fn a_name_that_another_row_makes_as_well_holds_nothing() {
    let mut past = serving();
    past.edit(&[route("m*", &[]), member("g/m*/a", 1)], &[]);
    past.edit(&[group("g", &["m1"]), route("x*", &["m1"]), template("t", "m2", Some("a/m3"))], &[]);
    past.edit(&[route("m1", &[]), member("g/m1/a", 1)], &[]);
    past.undo(4).expect("the pattern serves what it named");
    let n_obstacles = past.undo(2).expect_err("now only the pattern does").to_string().lines().skip(1).count();
    assert_eq!(n_obstacles, 4);
}

#[test]
fn a_row_does_not_come_back_to_what_is_gone() {
    let mut past = serving();
    past.edit(&[channel("b", "x"), member("g/m/b", 1)], &[]);
    past.edit(&[], &[member("g/m/b", 1)]);
    past.edit(&[], &[channel("b", "x")]);
    let expected = [
        "batch 3 cannot be undone:",
        "the undo would bring back member `g/m/b`, which needs channel `b`: batch 4 took that away",
    ];
    refused(&mut past, 3, &expected);
    past.undo(4).expect("nothing depends on it");
    past.undo(3).expect("the channel is back");
}

#[test]
fn a_key_does_not_come_back_to_a_secret_that_another_has() {
    let mut past = serving();
    past.edit(&[key("k", "K", "g", None)], &[]);
    past.edit(&[key("k", "NEW", "g", None)], &[]);
    past.edit(&[key("other", "K", "g", None)], &[]);
    let expected =
        ["batch 3 cannot be undone:", "the undo would bring back key `k`, whose secret batch 4 gave to key `other`"];
    refused(&mut past, 3, &expected);
}

#[test]
fn every_reason_comes_at_once() {
    let mut past = serving();
    past.edit(&[channel("b", "x"), channel("a", "two")], &[member("g/m/a", 1)]);
    past.edit(&[channel("a", "three"), member("g/m/b", 1)], &[]);
    past.edit(&[route("n", &[]), member("g/n/a", 1)], &[route("m", &[]), member("g/m/b", 1)]);
    past.edit(&[route("m", &[]), member("g/m/b", 1)], &[]);
    past.edit(&[], &[route("m", &[]), member("g/m/b", 1)]);
    past.edit(&[member("g/n/b", 1)], &[]);
    let expected = [
        "batch 2 cannot be undone:",
        "batch 3 changed channel `a` since",
        "member `g/n/b` needs channel `b` since batch 7, and the undo would take that away",
        "the undo would bring back member `g/m/a`, which needs route `m`: batch 6 took that away",
    ];
    refused(&mut past, 2, &expected);
}

#[test]
fn an_undo_can_be_undone_and_so_on() {
    let mut past = serving();
    let one = past.bytes();
    past.edit(&[channel("a", "two")], &[]);
    let two = past.bytes();
    past.undo(2).expect("nothing depends on it");
    assert_eq!((past.bytes(), undone_batches(&past)), (one.clone(), vec![(2, 3)]));
    refused(&mut past, 2, &["batch 2 is undone already, by batch 3"]);
    past.undo(3).expect("an undo is a batch");
    assert_eq!((past.bytes(), undone_batches(&past)), (two.clone(), vec![(3, 4)]));
    past.undo(2).expect("it stands again");
    assert_eq!((past.bytes(), undone_batches(&past)), (one, vec![(2, 5), (3, 4)]));
    refused(&mut past, 3, &["batch 3 is undone already, by batch 4"]);
    past.undo(5).expect("an undo is a batch");
    assert_eq!(past.bytes(), two);
}

#[test]
fn an_undo_of_something_older_is_a_change() {
    let mut past = serving();
    past.edit(&[channel("c", "one")], &[]);
    past.edit(&[channel("c", "two")], &[]);
    past.undo(3).expect("nothing depends on it");
    past.undo(2).expect("the change since is undone");
    refused(&mut past, 4, &["batch 4 cannot be undone:", "batch 5 changed channel `c` since"]);
}

#[test]
fn ops_that_are_undone_already_are_left_out() {
    let mut past = serving();
    past.edit(&[channel("b", "x"), channel("c", "x")], &[]);
    let half = past.rows.batch_to(
        past.rows.iter().filter(|(key, _)| key.id != "b").map(|(_, stored)| stored.row.clone()).collect(),
        "me",
        "half of batch 2",
        None,
    );
    past.add(Batch { undo: vec![OpRef { batch: 2, op: 0 }], ..half });
    past.undo(2).expect("nothing depends on it");
    let last = past.batches.last().expect("batches were made");
    assert_eq!(last.undo, [OpRef { batch: 2, op: 1 }]);
    assert_eq!(past.bytes(), serving().bytes());
    refused(&mut past, 2, &["batch 2 is undone already, by batch 3 and batch 4"]);
}

#[test]
fn what_is_not_there_cannot_be_undone() {
    let mut past = serving();
    past.edit(&[], &[]);
    refused(&mut past, 2, &["batch 2 changed no row: there is nothing to undo"]);
    for batch in [0, 3] {
        let expected = format!("there is no batch {batch}, the catalogue is at revision 2");
        refused(&mut past, batch, &[&expected]);
    }
    past.batches[0].ops[3].after = None;
    refused(&mut past, 1, &["the history and the catalogue's rows do not belong together"]);
}
