//! The state fold against hand-made tables, and against a naive model of it.
//!
//! A script line is `TIMEs VERB WHAT…`; its number is the number of its fact, from 1. `look` prints what stands then.

use std::fmt::Write;

use proptest::prelude::*;
use waybill_routing::state::{AFFINITY_RECORDS_MAX, BLOCKS_MAX, State};
use waybill_schema::event::{Act, Class, Effect, Event, Fact};
use waybill_schema::id::AffinityKey;
use waybill_schema::time::Time;

use crate::facts::{self, Of, Said};

fn check(script: &str, expected: &str) {
    let mut state = State::default();
    let mut printed = String::new();
    let lines = script.lines().map(str::trim).filter(|line| !line.is_empty());
    for (line, number) in lines.zip(1..) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = seconds(words[0]);
        match words[1] {
            "look" => look(&state, at, &mut printed),
            _ => state.apply(&facts::fact(number, at, event(&words[1..]))),
        }
    }
    let expected: Vec<&str> = expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected, "{script}");
}

fn seconds(word: &str) -> i64 {
    word.strip_suffix('s').expect("a time ends in s").parse().expect("a time is a number")
}

fn event(words: &[&str]) -> Event {
    let after = |word: &str| words.iter().position(|w| *w == word).map(|at| words[at + 1]);
    let whole = |word: &str| after(word).map(|text| u64::try_from(seconds(text)).expect("a length"));
    match *words {
        ["claim", key, who, ..] => facts::claim(key, of(who)),
        ["prefer", key, who, ..] => {
            let base = after("from").map(|n| n.parse().expect("a fact's number"));
            facts::prefer(key, of(who), base, whole("ttl").unwrap_or(1000))
        }
        ["attempt", who, what, ..] => {
            let class = words.contains(&"busy").then_some(Class::Upstream5xx);
            let said =
                Said { model: after("on"), asks_s: whole("asks"), key: after("for"), block_s: whole("lasting"), class };
            facts::attempt(of(who), effect(what), said)
        }
        ["probe", who, what] => facts::probe(of(who), effect(what)),
        ["clear", member] => facts::operate(Act::Clear, member),
        ["unpin", key] => facts::operate(Act::Unpin, key),
        ["delete", member] => facts::delete(member),
        _ => panic!("unknown words: {words:?}"),
    }
}

fn of(word: &str) -> Of<'_> {
    match word.split_once('@') {
        Some((member, incarnation)) => (member, incarnation.parse().expect("an incarnation is a number")),
        None => (word, 1),
    }
}

fn effect(word: &str) -> Effect {
    match word {
        "nothing" => Effect::None,
        "ok" => Effect::Recover,
        "fails" => Effect::Count,
        "cools" => Effect::Cool,
        "blocks" => Effect::Block,
        _ => panic!("unknown effect {word}"),
    }
}

fn look(state: &State, at: i64, out: &mut String) {
    let now = Time(at * 1000);
    for (member, health) in state.members() {
        let (n, incarnation) = (health.failures, health.incarnation);
        write!(out, "{at}s {}@{incarnation}: {n} failed", member.as_str()).expect("text");
        if let Some(cooldown) = health.cooling(now) {
            let whose = if cooldown.upstream { "upstream's" } else { "ours" };
            write!(out, ", cooling until {}s, {whose}", cooldown.until.0 / 1000).expect("text");
        }
        for model in health.blocks.keys() {
            if let Some(block) = health.blocked(model.as_str(), now) {
                let how = if block.reason == Class::Upstream5xx { "busy with" } else { "no" };
                write!(out, ", {how} {model} until {}s", block.until.0 / 1000).expect("text");
            }
        }
        out.push('\n');
    }
    for key in state.records().into_keys() {
        let Some(record) = state.record(key, now) else { continue };
        let how = if record.provisional { "claimed" } else { "proven" };
        let (number, until) = (record.revision.number, record.expires_at.0 / 1000);
        write!(out, "{at}s {key}: {} #{number} {how} until {until}s", record.deployment).expect("text");
        if record.fail_count > 0 {
            write!(out, ", {} failed", record.fail_count).expect("text");
        }
        out.push('\n');
    }
}

/// S2.8, PITFALLS C01, C02
#[test]
fn the_threshold_starts_a_cooldown_and_its_end_is_its_deadline() {
    check(
        "1s attempt a fails
         2s attempt a fails
         2s look
         3s attempt a fails
         3s look
         12s look
         13s look",
        "2s a@1: 2 failed
         3s a@1: 3 failed, cooling until 13s, ours
         12s a@1: 3 failed, cooling until 13s, ours
         13s a@1: 3 failed",
    );
}

/// S2.8, PITFALLS C07: 10, 20, 40, then 60 s at the cap, each from one failure after the rest.
#[test]
fn each_further_cooldown_is_longer_up_to_the_cap() {
    check(
        "0s attempt a fails
         0s attempt a fails
         0s attempt a fails
         0s look
         10s attempt a fails
         10s look
         30s attempt a fails
         30s look
         70s attempt a fails
         70s look
         130s attempt a fails
         130s look",
        "0s a@1: 3 failed, cooling until 10s, ours
         10s a@1: 4 failed, cooling until 30s, ours
         30s a@1: 5 failed, cooling until 70s, ours
         70s a@1: 6 failed, cooling until 130s, ours
         130s a@1: 7 failed, cooling until 190s, ours",
    );
}

/// PITFALLS C05
#[test]
fn failures_during_a_cooldown_do_not_escalate_it() {
    check(
        "0s attempt a fails
         0s attempt a fails
         0s attempt a fails
         4s attempt a fails
         5s attempt a fails
         6s attempt a fails
         6s look
         10s attempt a fails
         10s look",
        "6s a@1: 6 failed, cooling until 10s, ours
         10s a@1: 7 failed, cooling until 30s, ours",
    );
}

/// S1.9, PITFALLS C25
#[test]
fn a_success_resets_counter_level_and_cooldown() {
    check(
        "0s attempt a fails
         0s attempt a fails
         1s attempt a ok
         2s attempt a fails
         2s attempt a fails
         2s look
         3s attempt a fails
         4s attempt a ok
         4s look
         5s attempt a fails
         5s attempt a fails
         5s attempt a fails
         5s look",
        "2s a@1: 2 failed
         4s a@1: 0 failed
         5s a@1: 3 failed, cooling until 15s, ours",
    );
}

/// S1.9: "a success ends its member's cooldown, unless an upstream deadline still stands".
#[test]
fn a_success_does_not_end_the_deadline_of_the_upstream() {
    check(
        "0s attempt a cools asks 30s
         0s look
         5s attempt a ok
         5s look
         30s look",
        "0s a@1: 1 failed, cooling until 30s, upstream's
         5s a@1: 0 failed, cooling until 30s, upstream's
         30s a@1: 0 failed",
    );
}

/// S1.9: our rest until 10 s hides the upstream's until 5 s.
#[test]
fn a_success_leaves_the_upstreams_deadline_that_a_longer_rest_of_ours_hid() {
    check(
        "0s attempt a fails
         0s attempt a fails
         0s attempt a cools asks 5s
         0s look
         2s attempt a ok
         2s look
         6s attempt a ok
         6s look",
        "0s a@1: 3 failed, cooling until 10s, ours
         2s a@1: 0 failed, cooling until 5s, upstream's
         6s a@1: 0 failed",
    );
}

/// PITFALLS C09
#[test]
fn an_upstream_is_not_believed_beyond_the_cap() {
    check("0s attempt a cools asks 86400s\n 0s look", "0s a@1: 1 failed, cooling until 60s, upstream's");
}

/// DESIGN.md section 10: "the later of what stands and what is new".
#[test]
fn the_later_deadline_stands() {
    check(
        "0s attempt a cools asks 40s
         1s attempt a cools asks 5s
         1s look
         2s attempt a cools asks 50s
         2s look",
        "1s a@1: 2 failed, cooling until 40s, upstream's
         2s a@1: 3 failed, cooling until 52s, upstream's",
    );
}

/// PITFALLS C10
#[test]
fn a_refusal_without_a_deadline_counts() {
    check(
        "0s attempt a cools
         0s look
         1s probe a fails
         2s attempt a cools
         2s look",
        "0s a@1: 1 failed
         2s a@1: 3 failed, cooling until 12s, ours",
    );
}

/// DESIGN.md section 5, "Order"
#[test]
fn a_failure_older_than_the_last_success_counts_for_nothing() {
    check(
        "20s attempt a ok
         19s attempt a fails
         19s attempt a cools asks 30s
         19s attempt a blocks
         20s look
         20s attempt a fails
         20s look",
        "20s a@1: 0 failed
         20s a@1: 1 failed",
    );
}

/// PITFALLS C30: the success at 11 s is older than the failure at 12 s, though newer than the one folded last.
#[test]
fn a_success_older_than_the_last_failure_ends_no_cooldown() {
    check(
        "10s attempt a fails
         10s attempt a fails
         12s attempt a fails
         9s attempt a fails
         11s attempt a ok
         12s look",
        "12s a@1: 4 failed, cooling until 22s, ours",
    );
}

/// S1.8, PITFALLS C23
#[test]
fn a_block_is_for_one_model_and_ends() {
    check(
        "0s attempt a blocks on x
         5s attempt a blocks on y
         5s look
         300s look
         301s attempt a ok on y
         301s look",
        "5s a@1: 0 failed, no x until 300s, no y until 305s
         300s a@1: 0 failed, no y until 305s
         301s a@1: 0 failed",
    );
}

/// Of two blocks the one that ends later stands, with its reason: what is only busy may be a last resort.
#[test]
fn the_later_block_stands_with_its_reason() {
    check(
        "0s attempt a blocks on x lasting 600s
         0s attempt a blocks on y lasting 60s busy
         1s attempt a blocks on x lasting 60s busy
         1s attempt a blocks on y lasting 600s
         1s look
         590s attempt a blocks on x lasting 60s busy
         590s look",
        "1s a@1: 0 failed, no x until 600s, no y until 601s
         590s a@1: 0 failed, busy with x until 650s, no y until 601s",
    );
}

/// A caller of a route by pattern may ask for any number of models that an upstream does not have.
#[test]
fn the_block_that_ends_first_gives_way_beyond_the_bound() {
    let n = BLOCKS_MAX as i64;
    let blocks: String = (0..=n).map(|at| format!("{at}s attempt a blocks on m{at:03}\n")).collect();
    let kept: String = (1..=n).map(|at| format!(", no m{at:03} until {}s", at + 300)).collect();
    check(&format!("{blocks}{n}s look"), &format!("{n}s a@1: 0 failed{kept}"));
}

/// S1.8: a success of another model says nothing about the blocked one.
#[test]
fn a_block_outlives_the_success_of_another_model() {
    check("0s attempt a blocks on x\n 1s attempt a ok on y\n 1s look", "1s a@1: 0 failed, no x until 300s");
}

/// PITFALLS C16
#[test]
fn a_callers_mistake_leaves_no_trace() {
    check("0s attempt a nothing\n 0s look", "");
}

/// DESIGN.md section 5: "one that was deleted and made again does not inherit the old one's".
#[test]
fn an_incarnation_inherits_nothing_and_takes_nothing_from_the_dead() {
    check(
        "0s attempt a@1 fails
         0s attempt a@1 fails
         1s attempt a@4 fails
         1s look
         2s attempt a@1 fails
         2s look
         3s delete a
         3s look",
        "1s a@1: 2 failed
         1s a@4: 1 failed
         2s a@1: 3 failed, cooling until 12s, ours
         2s a@4: 1 failed
         3s a@1: 3 failed, cooling until 12s, ours
         3s a@4: 1 failed",
    );
    let mut state = State::default();
    state.apply(&facts::fact(1, 0, facts::attempt(("a", 1), Effect::Count, Said::default())));
    assert!(state.health(&"a".into(), 1).is_some());
    assert!(state.health(&"a".into(), 2).is_none());
}

/// S3.11, S3.21, S3.22
#[test]
fn the_first_claim_wins_and_stands_for_an_hour() {
    check(
        "0s claim k a
         1s claim k b
         1s look
         3599s look
         3600s look
         3600s claim k b
         3600s look",
        "1s k: a/m #1 claimed until 3600s
         3599s k: a/m #1 claimed until 3600s
         3600s k: b/m #6 claimed until 7200s",
    );
}

/// S1.7: "a cooling route takes no new sticky".
#[test]
fn a_cooling_member_takes_no_sticky() {
    check(
        "0s attempt a cools asks 30s
         1s claim k a
         1s prefer k a
         1s look
         30s claim k a
         30s look",
        "1s a@1: 1 failed, cooling until 30s, upstream's
         30s a@1: 1 failed
         30s k: a/m #5 claimed until 3630s",
    );
}

/// S3.13, DESIGN.md section 5: "a success on the deployment that the record names always renews".
#[test]
fn a_success_renews_even_from_an_old_base() {
    check(
        "0s claim k a
         1s prefer k a from 1
         2s prefer k a from 1
         3s prefer k a
         3s look",
        "3s k: a/m #4 proven until 1003s",
    );
}

/// S1.9: the late one would end it at 1005 s.
#[test]
fn an_older_success_does_not_shorten_a_record() {
    check(
        "50s prefer k a
         5s prefer k a
         50s look",
        "50s k: a/m #1 proven until 1050s",
    );
}

/// S3.13
#[test]
fn a_switch_applies_at_the_revision_it_was_based_on() {
    check(
        "0s prefer k a
         1s prefer k b from 1
         1s look
         2s prefer k c from 1
         3s prefer k c
         3s look
         4s prefer k c from 2
         4s look",
        "1s k: b/m #2 proven until 1001s
         3s k: b/m #2 proven until 1001s
         4s k: c/m #7 proven until 1004s",
    );
}

/// S3.22, PITFALLS A12: request 1 is slow on a; a fails, request 2 moves to b; then request 1 ends well.
#[test]
fn a_late_success_does_not_take_the_session_back() {
    check(
        "0s claim k a
         2s attempt a fails for k
         3s attempt b ok for k
         3s prefer k b from 1
         5s attempt a ok for k
         5s prefer k a from 1
         5s look",
        "5s a@1: 0 failed
         5s b@1: 0 failed
         5s k: b/m #4 proven until 1003s",
    );
}

/// S1.9, S3.22, PITFALLS A13
#[test]
fn a_failure_neither_extends_nor_deletes_a_record() {
    check(
        "0s prefer k a ttl 100s
         50s attempt a fails for k
         60s attempt b fails for k
         60s look
         90s attempt a blocks for k on x
         99s look
         100s look",
        "60s a@1: 1 failed
         60s b@1: 1 failed
         60s k: a/m #1 proven until 100s, 1 failed
         99s a@1: 1 failed, no x until 390s
         99s b@1: 1 failed
         99s k: a/m #1 proven until 100s, 2 failed
         100s a@1: 1 failed, no x until 390s
         100s b@1: 1 failed",
    );
}

/// S1.9: the attempt ends our cooldown, so its preference renews; under the upstream's deadline it does not.
#[test]
fn a_success_renews_unless_the_upstream_asked_for_rest() {
    check(
        "0s prefer k a ttl 100s
         10s attempt a fails for k
         10s attempt a fails for k
         10s attempt a fails for k
         12s attempt a ok for k
         12s prefer k a from 1 ttl 100s
         12s look
         20s attempt a cools for k asks 30s
         22s attempt a ok for k
         22s prefer k a from 6 ttl 100s
         22s look",
        "12s a@1: 0 failed
         12s k: a/m #6 proven until 112s
         22s a@1: 0 failed, cooling until 50s, upstream's
         22s k: a/m #6 proven until 112s, 1 failed",
    );
}

/// DESIGN.md section 5: the record of a dead incarnation is switched like any other.
#[test]
fn a_new_incarnation_of_the_deployment_is_a_switch() {
    check(
        "0s prefer k a@1
         1s prefer k a@5
         1s look
         2s prefer k a@5 from 1
         2s look",
        "1s k: a/m #1 proven until 1000s
         2s k: a/m #4 proven until 1002s",
    );
}

/// S3.21: "expiry or loss only means ordinary selection".
#[test]
fn an_expired_record_stops_nobody() {
    check(
        "0s prefer k a ttl 10s
         10s prefer k b
         10s look",
        "10s k: b/m #2 proven until 1010s",
    );
}

/// PITFALLS A17, C09: on command.
#[test]
fn an_operator_clears_a_member_and_unpins_a_session() {
    check(
        "0s prefer k a
         0s prefer l a
         0s attempt a cools asks 30s
         0s attempt a blocks on x
         1s clear a
         1s unpin k
         1s look",
        "1s l: a/m #2 proven until 1000s",
    );
}

/// S3.21
#[test]
fn beyond_8192_records_the_longest_not_renewed_goes() {
    assert_eq!(AFFINITY_RECORDS_MAX, 8192);
    let mut state = State::default();
    for number in 0..8192 {
        state.apply(&facts::fact(number, 0, facts::prefer(&format!("k{number}"), ("a", 1), None, 1000)));
    }
    state.apply(&facts::fact(9000, 1, facts::prefer("k0", ("a", 1), None, 1000)));
    state.apply(&facts::fact(9001, 1, facts::claim("new", ("a", 1))));
    let held = |key: &str| state.record(&AffinityKey::from(key), Time(1000)).is_some();
    assert_eq!([held("k0"), held("k1"), held("k2"), held("new")], [true, false, true, true]);
    assert_eq!(state.records().len(), 8192);
}

/// S3.21: a record that was unpinned leaves no trace that could evict another.
#[test]
fn an_unpinned_record_evicts_nobody() {
    let mut state = State::with_capacity(2);
    let events = [
        facts::prefer("a", ("a", 1), None, 1000),
        facts::prefer("b", ("a", 1), None, 1000),
        facts::operate(Act::Unpin, "a"),
        facts::prefer("a", ("a", 1), None, 1000),
        facts::prefer("c", ("a", 1), None, 1000),
    ];
    for (event, number) in events.into_iter().zip(1..) {
        state.apply(&facts::fact(number, 0, event));
    }
    let keys: Vec<&str> = state.records().into_keys().map(AffinityKey::as_str).collect();
    assert_eq!(keys, ["a", "c"]);
}

/// DESIGN.md promise 8
#[test]
fn the_digest_knows_the_next_renewal() {
    let mut state = State::default();
    let fresh = state.digest();
    state.apply(&facts::fact(1, 0, facts::prefer("k", ("a", 1), None, 1000)));
    state.apply(&facts::fact(2, 0, facts::operate(Act::Unpin, "k")));
    assert_ne!(state, State::default());
    assert_ne!(state.digest(), fresh);
    assert_ne!(State::with_capacity(1).digest(), State::with_capacity(2).digest());
}

/// A fold written another way: rows in lists, deadlines as plain numbers, 0 for none.
#[derive(Default)]
struct Naive {
    capacity: usize,
    /// The longest not renewed first.
    records: Vec<NaiveRecord>,
    members: Vec<NaiveMember>,
}

#[derive(Clone, Debug, PartialEq)]
struct NaiveRecord {
    key: String,
    member: String,
    incarnation: u64,
    number: u64,
    provisional: bool,
    ok_at: i64,
    expires_at: i64,
    failed: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct NaiveMember {
    id: String,
    incarnation: u64,
    failures: u32,
    rests: u32,
    failed_at: i64,
    ok_at: i64,
    ours: i64,
    asked: i64,
    blocks: Vec<(String, i64)>,
}

impl Naive {
    fn apply(&mut self, number: u64, at: i64, move_: &Move) {
        match *move_ {
            Move::Claim(key, who) => {
                let (key, (id, incarnation)) = (KEYS[key], who.of());
                if self.live(key, at).is_none() && !self.rests(id, incarnation, at) {
                    let expires_at = at + 3_600_000;
                    self.put(key, who, NaiveRecord { number, provisional: true, expires_at, ..blank() });
                }
            }
            Move::Prefer(key, who, base) => self.prefer((number, at), KEYS[key], who, base),
            Move::Attempt(who, effect, asks_s, key) => {
                self.affect(who, effect, at, Some(asks_s));
                let failed = [Effect::Count, Effect::Cool, Effect::Block].contains(&effect);
                for record in &mut self.records {
                    if failed && record.key == KEYS[key] && record.member == who.of().0 && record.ok_at <= at {
                        record.failed += 1;
                    }
                }
            }
            Move::Probe(who, effect) => self.affect(who, effect, at, None),
            Move::Unpin(key) => self.records.retain(|record| record.key != KEYS[key]),
            Move::Clear(who) => self.members.retain(|member| member.id != who.of().0),
            Move::Delete(_) => {}
        }
    }

    fn live(&self, key: &str, at: i64) -> Option<&NaiveRecord> {
        self.records.iter().find(|record| record.key == key && at < record.expires_at)
    }

    fn rests(&self, id: &str, incarnation: u64, at: i64) -> bool {
        let mut same = self.members.iter().filter(|member| member.id == id && member.incarnation == incarnation);
        same.any(|member| member.ours > at || member.asked > at)
    }

    fn put(&mut self, key: &str, who: Who, record: NaiveRecord) {
        let (member, incarnation) = who.of();
        self.records.retain(|old| old.key != key);
        self.records.push(NaiveRecord { key: key.to_owned(), member: member.to_owned(), incarnation, ..record });
        if self.records.len() > self.capacity {
            self.records.remove(0);
        }
    }

    fn prefer(&mut self, (number, at): (u64, i64), key: &str, who: Who, base: u64) {
        let (id, incarnation) = who.of();
        if self.rests(id, incarnation, at) {
            return;
        }
        if let Some(old) = self.live(key, at) {
            let same = old.member == id && old.incarnation == incarnation;
            if same && old.ok_at > at || !same && old.number != base {
                return;
            }
        }
        let expires_at = at + TTL_S * 1000;
        self.put(key, who, NaiveRecord { number, ok_at: at, expires_at, ..blank() });
    }

    fn affect(&mut self, who: Who, effect: Effect, at: i64, asks_s: Option<u64>) {
        let (id, incarnation) = who.of();
        if effect == Effect::None {
            return;
        }
        let same = |member: &NaiveMember| member.id == id && member.incarnation == incarnation;
        if !self.members.iter().any(same) {
            self.members.push(NaiveMember { id: id.to_owned(), incarnation, ..NaiveMember::default() });
        }
        let member = self.members.iter_mut().find(|member| same(member)).expect("it was put there");
        if effect == Effect::Recover {
            member.ok_at = member.ok_at.max(at);
            if member.failed_at <= at {
                (member.failures, member.rests, member.ours) = (0, 0, 0);
                member.blocks.retain(|(model, _)| model != "m");
                member.asked = if member.asked > at { member.asked } else { 0 };
            }
        } else if member.ok_at <= at {
            member.failed_at = member.failed_at.max(at);
            member.fail(effect, at, asks_s);
        }
    }
}

impl NaiveMember {
    fn fail(&mut self, effect: Effect, at: i64, asks_s: Option<u64>) {
        if effect == Effect::Block {
            let known = self.blocks.iter().map(|(_, until)| *until).max().unwrap_or(0);
            self.blocks = vec![("m".to_owned(), known.max(at + 300_000))];
            return;
        }
        self.failures += 1;
        if self.failures >= 3 && self.ours <= at && self.asked <= at {
            self.ours = at + [10_000, 20_000, 40_000].get(self.rests as usize).unwrap_or(&60_000);
            self.rests += 1;
        }
        if let (Effect::Cool, Some(asks_s)) = (effect, asks_s) {
            self.asked = self.asked.max(at + i64::try_from(asks_s.min(60)).expect("small") * 1000);
        }
    }
}

fn blank() -> NaiveRecord {
    let (key, member) = Default::default();
    NaiveRecord { key, member, incarnation: 0, number: 0, provisional: false, ok_at: 0, expires_at: 0, failed: 0 }
}

const KEYS: [&str; 5] = ["k0", "k1", "k2", "k3", "k4"];
const TTL_S: i64 = 40;

#[derive(Clone, Copy, Debug)]
struct Who(usize, u64);

impl Who {
    fn of(self) -> Of<'static> {
        (["a", "b"][self.0], self.1)
    }
}

#[derive(Clone, Debug)]
enum Move {
    Claim(usize, Who),
    Prefer(usize, Who, u64),
    Attempt(Who, Effect, u64, usize),
    Probe(Who, Effect),
    Unpin(usize),
    Clear(Who),
    Delete(Who),
}

impl Move {
    fn event(&self) -> Event {
        match *self {
            Self::Claim(key, who) => facts::claim(KEYS[key], who.of()),
            Self::Prefer(key, who, base) => facts::prefer(KEYS[key], who.of(), Some(base), TTL_S.unsigned_abs()),
            Self::Attempt(who, effect, asks_s, key) => {
                let said = Said { asks_s: Some(asks_s), key: Some(KEYS[key]), ..Said::default() };
                facts::attempt(who.of(), effect, said)
            }
            Self::Probe(who, effect) => facts::probe(who.of(), effect),
            Self::Unpin(key) => facts::operate(Act::Unpin, KEYS[key]),
            Self::Clear(who) => facts::operate(Act::Clear, who.of().0),
            Self::Delete(who) => facts::delete(who.of().0),
        }
    }
}

/// Moves with their times in seconds: mostly forward, some late.
fn moves() -> impl Strategy<Value = Vec<(i64, Move)>> {
    let who = || (0..2usize, 1..3u64).prop_map(|(member, incarnation)| Who(member, incarnation));
    let effect = || {
        let all = [Effect::None, Effect::Recover, Effect::Count, Effect::Count, Effect::Cool, Effect::Block];
        proptest::sample::select(all.to_vec())
    };
    let key = || 0..KEYS.len();
    let one = prop_oneof![
        3 => (key(), who()).prop_map(|(key, who)| Move::Claim(key, who)),
        6 => (key(), who(), 1..80u64).prop_map(|(key, who, base)| Move::Prefer(key, who, base)),
        8 => (who(), effect(), 0..90u64, key()).prop_map(|(who, e, asks, key)| Move::Attempt(who, e, asks, key)),
        1 => (who(), effect()).prop_map(|(who, effect)| Move::Probe(who, effect)),
        1 => key().prop_map(Move::Unpin),
        1 => who().prop_map(Move::Clear),
        1 => who().prop_map(Move::Delete),
    ];
    let timed = proptest::collection::vec((0..6i64, 0..15i64, one), 1..80);
    timed.prop_map(|steps| {
        let mut clock = 20;
        let at = |(step, late, one): (i64, i64, Move)| {
            clock += step;
            (if late > 10 { clock - late } else { clock }, one)
        };
        steps.into_iter().map(at).collect()
    })
}

fn as_facts(moves: &[(i64, Move)]) -> Vec<Fact> {
    moves.iter().zip(1..).map(|((at, one), number)| facts::fact(number, *at, one.event())).collect()
}

fn fold(mut state: State, facts: &[Fact]) -> State {
    facts.iter().for_each(|fact| state.apply(fact));
    state
}

proptest! {
    /// DESIGN.md promise 8: the state is a fold of the log and nothing else.
    #[test]
    fn prefix_and_suffix_make_the_whole_and_replay_makes_it_again(moves in moves(), cut in 0..80usize) {
        let facts = as_facts(&moves);
        let (prefix, suffix) = facts.split_at(cut.min(facts.len()));
        let whole = fold(State::with_capacity(3), &facts);
        let resumed = fold(fold(State::with_capacity(3), prefix).clone(), suffix);
        prop_assert_eq!(&whole, &resumed);
        prop_assert_eq!(whole.digest(), resumed.digest());
        prop_assert_eq!(whole.digest(), fold(State::with_capacity(3), &facts).digest());
    }

    /// DESIGN.md promise 8
    #[test]
    fn digests_agree_exactly_when_states_do(a in moves(), b in moves(), cut in 0..80usize) {
        let (a, b) = (as_facts(&a), as_facts(&b));
        let shorter = &a[..cut.min(a.len())];
        for other in [&b[..], shorter] {
            let (left, right) = (fold(State::with_capacity(3), &a), fold(State::with_capacity(3), other));
            prop_assert_eq!(left == right, left.digest() == right.digest());
        }
    }

    /// docs/adr/0027: a gateway that follows the catalogue late stands where the fold of the log stands.
    #[test]
    fn it_does_not_matter_when_a_deletion_is_followed(moves in moves(), late in 0..80usize) {
        let facts = as_facts(&moves);
        let mut followed = facts.clone();
        if let Some(first) = moves.iter().position(|(_, one)| matches!(one, Move::Delete(_))) {
            let batch = followed.remove(first);
            followed.insert(late.clamp(first, followed.len()), batch);
        }
        let (log, live) = (fold(State::default(), &facts), fold(State::default(), &followed));
        prop_assert_eq!(log.digest(), live.digest());
    }

    /// S3.22: whatever has happened, a late success, which was based on an earlier record of its session, moves it nowhere.
    #[test]
    fn a_late_success_never_moves_a_pin_back(moves in moves(), base in 1..80u64) {
        let facts = as_facts(&moves);
        let state = fold(State::default(), &facts);
        let now = 1000 + facts.iter().map(|fact| fact.at.0).max().unwrap_or(0);
        for key in KEYS {
            let Some(record) = state.record(&key.into(), Time(now)).cloned() else { continue };
            for member in ["a", "b"].into_iter().filter(|name| record.deployment.as_str() != facts::deployment(name)) {
                let late = facts::fact(1000, now / 1000, facts::prefer(key, (member, 1), Some(base), 60));
                let after = fold(state.clone(), &[late]);
                let moved = after.record(&key.into(), Time(now)) != Some(&record);
                prop_assert!(!moved || record.revision.number == base, "{key} was moved to {member}");
            }
        }
    }

    /// DESIGN.md section 10: a success during a cooldown ends it down to what the upstream itself still asks for.
    #[test]
    fn a_success_ends_all_of_a_rest_that_the_upstream_did_not_ask_for(moves in moves()) {
        let facts = as_facts(&moves);
        let state = fold(State::default(), &facts);
        let now = 1000 + facts.iter().map(|fact| fact.at.0).max().unwrap_or(0);
        for (member, incarnation) in [("a", 1), ("a", 2), ("b", 1), ("b", 2)] {
            let Some(health) = state.health(&member.into(), incarnation) else { continue };
            let asked = health.asked.as_ref().map(|asked| asked.until).filter(|until| *until > Time(now));
            let success = facts::attempt((member, incarnation), Effect::Recover, Said::default());
            let after = fold(state.clone(), &[facts::fact(1000, now / 1000, success)]);
            let after = after.health(&member.into(), incarnation).expect("it is on record");
            prop_assert_eq!(after.cooling(Time(now)).map(|cooldown| cooldown.until), asked);
            prop_assert_eq!((after.failures, after.level), (0, 0));
        }
    }

    /// S3.21, S1.9, S2.8: after every fact the fold and the naive model agree, and the capacity holds.
    #[test]
    fn the_fold_agrees_with_a_naive_model(moves in moves(), capacity in 1..5usize) {
        let mut naive = Naive { capacity, ..Naive::default() };
        let mut state = State::with_capacity(capacity);
        for (((at, one), fact), number) in moves.iter().zip(as_facts(&moves)).zip(1..) {
            naive.apply(number, *at * 1000, one);
            state.apply(&fact);
            prop_assert!(state.records().len() <= capacity);
            prop_assert_eq!(records_of(&state), sorted(naive.records.clone(), |record| record.key.clone()));
            prop_assert_eq!(health_of(&state), health_of_naive(&naive));
        }
    }
}

fn sorted<T, K: Ord>(mut rows: Vec<T>, key: impl FnMut(&T) -> K) -> Vec<T> {
    rows.sort_by_key(key);
    rows
}

fn records_of(state: &State) -> Vec<NaiveRecord> {
    let records = state.records().into_iter().map(|(key, record)| NaiveRecord {
        key: key.as_str().to_owned(),
        member: record.member.as_str().to_owned(),
        incarnation: record.incarnation,
        number: record.revision.number,
        provisional: record.provisional,
        ok_at: record.last_ok_at.map_or(0, |at| at.0),
        expires_at: record.expires_at.0,
        failed: record.fail_count,
    });
    records.collect()
}

/// Member, incarnation, failures, rests, deadline, block.
type Healthy = (String, u64, u32, u32, i64, i64);

fn health_of(state: &State) -> Vec<Healthy> {
    let rows = state.members().map(|(id, health)| {
        let until = health.cooldown.as_ref().map_or(0, |cooldown| cooldown.until.0);
        let block = health.blocks.get("m").map_or(0, |block| block.until.0);
        (id.as_str().to_owned(), health.incarnation, health.failures, health.level, until, block)
    });
    rows.collect()
}

fn health_of_naive(naive: &Naive) -> Vec<Healthy> {
    let rows = naive.members.iter().map(|member| {
        let until = member.ours.max(member.asked);
        let block = member.blocks.first().map_or(0, |(_, until)| *until);
        (member.id.clone(), member.incarnation, member.failures, member.rests, until, block)
    });
    sorted(rows.collect(), |row: &Healthy| (row.0.clone(), row.1))
}
