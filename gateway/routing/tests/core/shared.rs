//! What a gateway holds of a key after it has looked at the shared state, and how health is laid under its own facts.

use waybill_routing::state::State;
use waybill_routing::state::shared::{Shown, Viewer};
use waybill_schema::event::{Effect, Event};
use waybill_schema::id::{AffinityKey, Revision};
use waybill_schema::redis::Pin;
use waybill_schema::time::Time;

use crate::facts::{self, Said};

const KEY: &str = "k";
const NOW: Time = Time(5_000);

/// A record of `deployment`'s member, last changed by `writer`'s fact `number`.
fn pin(member: &str, writer: &str, number: u64) -> Pin {
    let mut state = State::default();
    state.apply(&facts::fact(1, 4, facts::prefer(KEY, (member, 1), None, 60)));
    let pin = state.pin(&AffinityKey::from(KEY)).expect("a success binds");
    Pin { revision: Revision { writer: writer.into(), epoch: 1, number }, ..pin }
}

/// The gateway `w` sees `shown` while its own facts up to `covered` are in it; gives where the key is bound then, and by
/// which fact.
fn check(mut state: State, shown: &Shown, covered: u64, expected: Option<(&str, &str)>) {
    let key = AffinityKey::from(KEY);
    state.see(&key, shown, &Viewer { writer: "w".into(), epoch: 1, covered }, NOW);
    let record = state.record(&key, NOW).map(|record| (record.member.to_string(), record.revision.to_string()));
    let expected = expected.map(|(member, revision)| (member.to_owned(), revision.to_owned()));
    assert_eq!(record, expected, "{shown:?}, covered to {covered}");
}

/// A gateway that has bound the key to `a` by its own fact 7, based on what it had read.
fn own(base: Option<&Pin>) -> State {
    let mut state = State::default();
    if let Some(pin) = base {
        let viewer = Viewer { writer: "w".into(), epoch: 1, covered: 0 };
        state.see(&KEY.into(), &Shown::Record(pin.clone()), &viewer, NOW);
    }
    let mut event = facts::prefer(KEY, ("a", 1), None, 60);
    if let Event::Preference(preference) = &mut event {
        preference.base = base.map(|pin| pin.revision.clone());
    }
    state.apply(&facts::fact(7, 4, event));
    state
}

#[test]
fn a_shared_record_comes_before_everything_that_the_log_would_refuse() {
    let theirs = Shown::Record(pin("b", "other", 3));
    check(State::default(), &theirs, 0, Some(("b", "other:1:3")));
    // Made without knowing of it: the log refuses the switch.
    check(own(None), &theirs, 0, Some(("b", "other:1:3")));
    check(own(None), &theirs, 7, Some(("b", "other:1:3")));
}

#[test]
fn an_own_fact_on_its_way_stands_on_the_record_it_renews_or_was_based_on() {
    let based = own(Some(&pin("b", "other", 3)));
    check(based.clone(), &Shown::Record(pin("b", "other", 3)), 6, Some(("a", "w:1:7")));
    // In the meantime another gateway has moved the key: the switch that was based on 3 will be refused.
    check(based.clone(), &Shown::Record(pin("c", "other", 4)), 6, Some(("c", "other:1:4")));
    check(based, &Shown::Record(pin("b", "other", 3)), 7, Some(("b", "other:1:3")));
    // The same deployment: whoever is later renews.
    check(own(None), &Shown::Record(pin("a", "other", 3)), 6, Some(("a", "w:1:7")));
    // An own earlier fact is the record: own facts stand on each other.
    check(own(None), &Shown::Record(pin("b", "w", 5)), 5, Some(("a", "w:1:7")));
}

#[test]
fn a_claim_is_followed_where_there_is_nothing_firmer() {
    let claim = Shown::Claim(pin("b", "other", 0));
    check(State::default(), &claim, 0, Some(("b", "other:1:0")));
    check(own(None), &claim, 6, Some(("a", "w:1:7")));
    check(own(None), &claim, 7, Some(("b", "other:1:0")));
}

#[test]
fn a_record_that_is_gone_is_gone_here_too_unless_it_is_not_there_yet() {
    check(own(None), &Shown::Nothing, 7, None);
    check(own(None), &Shown::Nothing, 6, Some(("a", "w:1:7")));
    let mut adopted = State::default();
    let viewer = Viewer { writer: "w".into(), epoch: 1, covered: 0 };
    adopted.see(&KEY.into(), &Shown::Record(pin("b", "other", 3)), &viewer, NOW);
    check(adopted.clone(), &Shown::Nothing, 0, None);
    // While the shared state is filled, what was seen before holds.
    check(adopted, &Shown::Unfilled(Some(pin("c", "other", 0))), 0, Some(("b", "other:1:3")));
    check(State::default(), &Shown::Unfilled(Some(pin("c", "other", 0))), 0, Some(("c", "other:1:0")));
    check(State::default(), &Shown::Unfilled(None), 0, None);
}

#[test]
fn own_failures_count_on_top_of_those_of_others() {
    let count = |number| facts::fact(number, 4, facts::attempt(("a", 1), Effect::Count, Said::default()));
    let mut others = State::default();
    others.apply(&count(1));
    others.apply(&count(2));
    let mut state = State::default();
    state.see_health(&others.snapshot(), &[count(3)]);
    let health = state.health(&"a".into(), 1).expect("it is on record");
    assert_eq!((health.failures, health.cooling(NOW).is_some()), (3, true));
    // The same as one fold of all three.
    others.apply(&count(3));
    assert_eq!(state.snapshot(), others.snapshot());
    state.see_health(&State::default().snapshot(), &[]);
    assert_eq!(state.snapshot().members, []);
}

#[test]
fn a_shared_snapshot_comes_back_whole() {
    let mut state = State::default();
    let said = Said { asks_s: Some(9), ..Said::default() };
    state.apply(&facts::fact(1, 4, facts::attempt(("a", 1), Effect::Cool, said)));
    state.apply(&facts::fact(2, 4, facts::attempt(("b", 2), Effect::Block, Said::default())));
    state.apply(&facts::fact(3, 4, facts::attempt(("c", 1), Effect::Recover, Said::default())));
    let snapshot = state.snapshot();
    assert_eq!(snapshot.members.iter().map(|ailing| ailing.member.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let mut other = State::default();
    other.see_health(&snapshot, &[]);
    for (member, incarnation) in [("a", 1), ("b", 2)] {
        assert_eq!(other.health(&member.into(), incarnation), state.health(&member.into(), incarnation));
    }
}
