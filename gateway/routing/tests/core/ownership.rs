//! Owners of responses: the first stands, and not to find one is believed only where everybody has been heard of.

use std::collections::BTreeMap;

use proptest::prelude::*;
use waybill_routing::ownership::{self, Name, Own, Owners, Sighting, Unowned};
use waybill_schema::event::{Endpoint, Ownedness, Ownership, SessionSource};
use waybill_schema::redis::{Owner, Place};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

const NOW: Time = Time(1_796_000_000_000);

fn owns(response: &str, deployment: &str, state: Ownedness) -> Ownership {
    Ownership {
        response: response.into(),
        state,
        request: "r".into(),
        scope: "acme".into(),
        model: "gpt".into(),
        endpoint: Endpoint::Responses,
        deployment: deployment.into(),
        channel: "east".into(),
        incarnation: 1,
        session: "s".into(),
        source: SessionSource::Explicit,
    }
}

fn owner(deployment: &str, state: Ownedness) -> Owner {
    Owner::of(&owns("h", deployment, state))
}

fn name(response: &str) -> Name {
    Name { scope: "acme".into(), response: response.into() }
}

/// The fold of so many facts, each `response deployment state`, as `response deployment state` of what stands.
fn folded(capacity: usize, facts: &[&str]) -> Vec<String> {
    let mut owners = Owners::with_capacity(capacity);
    for (fact, number) in facts.iter().zip(1..) {
        let [response, deployment, state] = fact.split(' ').collect::<Vec<_>>()[..] else { panic!("{fact}") };
        let state = if state == "final" { Ownedness::Final } else { Ownedness::Provisional };
        owners.apply(&owns(response, deployment, state), number, NOW);
    }
    let held = owners.names().map(|name| (name, owners.get(name).expect("a name has an owner")));
    let word = |state| if state == Ownedness::Final { "final" } else { "provisional" };
    held.map(|(name, held)| format!("{} {} {}", name.response, held.owner.deployment, word(held.owner.state))).collect()
}

/// S3.9, S3.24: "affinity changes never rewrite ownership", and nothing else does.
#[test]
fn the_first_owner_stands_and_becomes_final_once() {
    let facts = ["h1 a provisional", "h1 a final", "h2 a provisional", "h2 b final", "h3 b final", "h3 b provisional"];
    assert_eq!(folded(8, &facts), ["h1 a final", "h2 a provisional", "h3 b final"]);
}

#[test]
fn the_longest_known_makes_room() {
    assert_eq!(
        folded(2, &["h1 a final", "h2 a provisional", "h3 a final", "h2 a final"]),
        ["h2 a final", "h3 a final"]
    );
    let mut owners = Owners::with_capacity(1);
    owners.apply(&owns("h1", "a", Ownedness::Final), 7, NOW);
    assert_eq!(owners.forgotten(), 0);
    let changed = owners.apply(&owns("h2", "a", Ownedness::Final), 9, NOW).expect("a new owner is a change");
    assert_eq!((changed.name, changed.evicted, owners.forgotten()), (name("h2"), Some(name("h1")), 7));
    owners.disown(&name("h2"));
    assert_eq!(owners.names().count(), 0);
}

#[test]
fn scopes_and_kinds_have_names_of_their_own() {
    let secret = DeploymentSecret::new(b"secret");
    let of = |scope: &str| Name::of_response(&secret, &scope.into(), "resp_1");
    assert_eq!(of("a"), of("a"));
    assert_ne!(of("a").response, of("b").response);
    assert_ne!(of("a"), Name::of_conversation(&secret, &"a".into(), "resp_1"));
}

/// What is seen of a response: each writer as `name epoch number seconds-ago`, or `name` where its place is missing.
fn check(shared: Option<Owner>, own: Option<Owner>, forgotten: u64, writers: &[&str], expected: Result<&str, Unowned>) {
    let place = |words: &[&str]| {
        let [epoch, number, ago] = words else { return None };
        let [epoch, number, ago] = [epoch, number, ago].map(|word| word.parse::<u64>().expect("a number"));
        Some(Place { epoch, number, at: NOW.plus_ms(-(ago as i64) * 1000) })
    };
    let writers = writers.iter().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].into(), place(&words[1..]))
    });
    let sighting = Sighting { owner: shared, writers: writers.collect() };
    let own = Own { writer: "me".into(), epoch: 3, owner: own, forgotten };
    let judged = ownership::judge(sighting, own, NOW);
    let said = judged.map(|owner| format!("{} {:?}", owner.deployment, owner.state));
    assert_eq!(said, expected.map(str::to_owned));
}

/// DESIGN.md section 6: "an ownership miss means unknown only while every known writer is alive and projected to within
/// seconds; otherwise it is unavailable".
#[test]
fn a_response_is_unknown_only_where_every_writer_has_been_heard_of() {
    let miss = |forgotten, writers: &[&str], why| check(None, None, forgotten, writers, Err(why));
    use Unowned::{Unknown, Unreadable};
    miss(0, &["me 3 1 0", "gw-b 7 40 15"], Unknown);
    miss(0, &["me 3 1 0", "gw-b 7 40 16"], Unreadable);
    // Ten minutes of silence are the end of a writer.
    miss(0, &["me 3 1 0", "gw-b 7 40 600"], Unreadable);
    miss(0, &["me 3 1 0", "gw-b 7 40 601"], Unknown);
    // Where nobody has been heard of since, it is not they who are gone: nothing is projected.
    miss(0, &["me 3 1 660", "gw-b 7 40 661"], Unreadable);
    miss(0, &["me 3 1 1260", "gw-b 7 40 661", "gw-c 1 1 660"], Unreadable);
    miss(0, &["me 3 1 1260", "gw-b 7 40 661"], Unreadable);
    // One's own facts are known, however old, except those that made room, or were made in a life before.
    miss(0, &["me 3 1 300"], Unknown);
    miss(9, &["me 3 9 300"], Unknown);
    miss(10, &["me 3 9 0"], Unreadable);
    miss(0, &["me 2 900 0"], Unreadable);
    // A store that does not know the one who asks, or holds a name without a place, is not filled.
    miss(0, &[], Unreadable);
    miss(0, &["gw-b 7 40 0"], Unreadable);
    miss(0, &["me 3 1 0", "gw-b"], Unreadable);
}

/// Time is the log's (DESIGN.md, section 5): `gw-b` has said nothing for a minute, as `me` knows by its own last fact,
/// whatever its clock says.
#[test]
fn a_clock_that_is_behind_takes_nobody_for_alive() {
    let place = |epoch, ago_s: i64| Some(Place { epoch, number: 1, at: NOW.plus_ms(-ago_s * 1000) });
    let sighting = Sighting { owner: None, writers: vec![("me".into(), place(3, 0)), ("gw-b".into(), place(7, 60))] };
    let own = Own { writer: "me".into(), epoch: 3, owner: None, forgotten: 0 };
    for behind_s in [0, 60, 3600] {
        let judged = ownership::judge(sighting.clone(), own.clone(), NOW.plus_ms(-behind_s * 1000));
        assert_eq!(judged.err(), Some(Unowned::Unreadable), "{behind_s}");
    }
}

#[test]
fn what_is_shared_stands_and_own_facts_make_it_firmer_only() {
    let (provisional, ended) = (Ownedness::Provisional, Ownedness::Final);
    check(Some(owner("a", ended)), None, 0, &[], Ok("a Final"));
    check(Some(owner("a", provisional)), Some(owner("a", ended)), 0, &[], Ok("a Final"));
    check(Some(owner("a", ended)), Some(owner("a", provisional)), 0, &[], Ok("a Final"));
    check(Some(owner("a", provisional)), Some(owner("b", ended)), 0, &[], Ok("a Provisional"));
    check(None, Some(owner("b", ended)), 0, &["me 3 1 0", "gw-b 7 40 300"], Ok("b Final"));
}

/// S3.9: "a continuation that names others is refused as unknown".
#[test]
fn a_continuation_names_the_model_and_the_endpoint_of_its_parent() {
    let ended = owner("a", Ownedness::Final);
    assert_eq!(ownership::continues(&ended, "gpt", Endpoint::Responses), Ok(()));
    assert_eq!(ownership::continues(&ended, "gpt-2", Endpoint::Responses), Err(Unowned::Unknown));
    assert_eq!(ownership::continues(&ended, "gpt", Endpoint::Chat), Err(Unowned::Unknown));
    let open = owner("a", Ownedness::Provisional);
    assert_eq!(ownership::continues(&open, "gpt", Endpoint::Responses), Err(Unowned::Unfinished));
}

proptest! {
    /// Against a model of two lines: the first fact of a response, made final by any later final one of its deployment.
    #[test]
    fn a_fold_of_any_facts_is_what_the_first_ones_say(
        facts in prop::collection::vec((0..4u8, 0..2u8, any::<bool>()), 0..40)
    ) {
        let mut owners = Owners::with_capacity(100);
        let mut naive: BTreeMap<String, (String, bool)> = BTreeMap::new();
        for ((response, deployment, ended), number) in facts.iter().zip(1..) {
            let (response, deployment) = (format!("h{response}"), format!("d{deployment}"));
            let state = if *ended { Ownedness::Final } else { Ownedness::Provisional };
            owners.apply(&owns(&response, &deployment, state), number, NOW);
            let standing = naive.entry(response).or_insert((deployment.clone(), *ended));
            standing.1 |= *ended && standing.0 == deployment;
        }
        for (response, (deployment, ended)) in &naive {
            let held = owners.get(&name(response)).expect("what was seen is known");
            prop_assert_eq!(held.owner.deployment.as_str(), deployment);
            prop_assert_eq!(held.owner.state == Ownedness::Final, *ended);
        }
        prop_assert_eq!(owners.names().count(), naive.len());
    }
}
