//! The simulated world, lived through 500 times, and again for each rule that is broken on purpose.

use std::collections::BTreeMap;

use waybill_world::mutation::Mutation;
use waybill_world::world::World;

/// Seeds that must hold.
const SEEDS: u64 = 500;

fn hold(seeds: std::ops::Range<u64>) {
    let failed: Vec<String> =
        seeds.filter_map(|seed| World::new(seed, None).live().err()).map(|failure| failure.to_string()).collect();
    assert!(failed.is_empty(), "{} worlds failed:\n{}", failed.len(), failed[..failed.len().min(3)].join("\n"));
}

fn is_noticed(mutation: Mutation) {
    let noticed = (0..SEEDS).find_map(|seed| World::new(seed, Some(mutation)).live().err());
    let failure = noticed.unwrap_or_else(|| panic!("none of {SEEDS} worlds noticed {mutation:?}"));
    println!("{mutation:?}: {failure}");
}

#[test]
fn the_first_worlds_hold() {
    hold(0..SEEDS / 4);
}

#[test]
fn the_second_worlds_hold() {
    hold(SEEDS / 4..SEEDS / 4 * 2);
}

#[test]
fn the_third_worlds_hold() {
    hold(SEEDS / 4 * 2..SEEDS / 4 * 3);
}

#[test]
fn the_fourth_worlds_hold() {
    hold(SEEDS / 4 * 3..SEEDS);
}

#[test]
fn the_same_seed_gives_the_same_log() {
    for seed in [1, 2, 3, 499] {
        let [once, again] = [(); 2].map(|()| World::new(seed, None).live().expect("this world holds"));
        assert!(!once.log.is_empty());
        assert!(once == again, "seed {seed} gives two different worlds");
    }
}

#[test]
fn the_worlds_have_every_trouble() {
    let mut seen = BTreeMap::new();
    for seed in 0..SEEDS / 10 {
        for (what, n) in World::new(seed, None).live().expect("this world holds").seen {
            *seen.entry(what).or_default() += n;
        }
    }
    println!("{seen:?}");
    assert!(seen.values().all(|n: &usize| *n > 0), "{seen:?}");
}

#[test]
fn a_gate_that_accepts_a_hole_is_noticed() {
    is_noticed(Mutation::GateAcceptsHole);
}

#[test]
fn a_gate_that_drops_the_first_fact_of_an_epoch_is_noticed() {
    is_noticed(Mutation::GateDropsStart);
}

#[test]
fn a_preference_that_ignores_its_base_is_noticed() {
    is_noticed(Mutation::PreferenceIgnoresBase);
}

#[test]
fn a_preference_that_never_renews_an_old_revision_is_noticed() {
    is_noticed(Mutation::PreferenceNeverRenews);
}

/// S3.22
#[test]
fn an_abandoned_target_that_takes_its_session_back_is_noticed() {
    is_noticed(Mutation::AbandonedTakesBack);
}

/// DESIGN.md section 10, "success during a cooldown"
#[test]
fn a_success_that_ends_what_the_upstream_asked_for_is_noticed() {
    is_noticed(Mutation::SuccessEndsAskedRest);
}

/// DESIGN.md section 10, "success during a cooldown"
#[test]
fn a_success_that_leaves_our_own_cooldown_is_noticed() {
    is_noticed(Mutation::SuccessLeavesRest);
}

#[test]
fn time_taken_from_when_a_fact_was_stored_is_noticed() {
    is_noticed(Mutation::StoredTime);
}

#[test]
fn a_zombie_that_is_not_fenced_is_noticed() {
    is_noticed(Mutation::ZombieNotFenced);
}

#[test]
fn a_catalogue_edit_without_expected_sequence_is_noticed() {
    is_noticed(Mutation::EditWithoutExpected);
}

#[test]
fn an_undo_that_forgets_an_op_is_noticed() {
    is_noticed(Mutation::UndoForgetsOp);
}

#[test]
fn an_ignored_incarnation_is_noticed() {
    is_noticed(Mutation::IncarnationIgnored);
}

/// S3.24: "failed or unfinished streams publish no ownership"
#[test]
fn a_beginning_that_is_owned_as_a_whole_is_noticed() {
    is_noticed(Mutation::BeginningIsOwned);
}

/// S3.24: "a cursor is never handed to another provider"
#[test]
fn a_continuation_that_follows_its_session_is_noticed() {
    is_noticed(Mutation::ContinuationFollowsSession);
}

/// S3.23: "a failing ownership lookup … is never treated as a miss"
#[test]
fn a_writer_that_lags_and_is_not_waited_for_is_noticed() {
    is_noticed(Mutation::LaggardsHaveNothing);
}

#[test]
fn a_checkpoint_compared_by_sequence_only_is_noticed() {
    is_noticed(Mutation::CheckpointBySequence);
}
