//! Chance in tests: one seed a run, printed, and taken from the environment where a run is to be seen again.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// Sets the seed of a run that is to be seen again.
const SEED: &str = "WAYBILL_SEED";

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) struct Dice {
    /// What the run began with.
    pub(crate) seed: u64,
    state: u64,
}

impl Dice {
    /// Those of a new run, or of the one whose seed is set.
    pub(crate) fn of_this_run() -> Self {
        let seed = std::env::var(SEED).map_or_else(
            |_| RandomState::new().build_hasher().finish(),
            |seed| seed.parse().expect("the seed is a number"),
        );
        println!("{SEED}={seed}");
        Self { seed, state: seed }
    }

    /// A number below `sides`.
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}
