//! A deployment's prompt cache: which prefixes it has seen, and when each was last used.
//!
//! No size limit and nothing but an idle life, so that a hit ratio measures placement and nothing else. A prompt is
//! given as the chained hashes of its blocks: hash `i` names the whole prefix of `i + 1` blocks.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

/// The cache of one deployment.
#[derive(Clone, Debug)]
pub(crate) struct PrefixCache {
    ttl_ms: i64,
    used_ms: HashMap<u64, i64, BuildHasherDefault<AsItIs>>,
}

impl PrefixCache {
    /// An empty cache whose prefixes live for `ttl_ms` after their last use.
    pub(crate) fn new(ttl_ms: i64) -> Self {
        Self { ttl_ms, used_ms: HashMap::default() }
    }

    /// How many of the leading blocks are cached at `now_ms`.
    ///
    /// Every use of a prefix is a use of the shorter ones before it, so the live ones come first.
    pub(crate) fn live_blocks(&self, prefixes: &[u64], now_ms: i64) -> usize {
        let is_live = |prefix: &u64| self.used_ms.get(prefix).is_some_and(|used_ms| now_ms - used_ms <= self.ttl_ms);
        prefixes.partition_point(is_live)
    }

    /// Notes that the whole prompt was used at `now_ms`.
    pub(crate) fn store(&mut self, prefixes: &[u64], now_ms: i64) {
        self.used_ms.extend(prefixes.iter().map(|prefix| (*prefix, now_ms)));
    }
}

/// Takes a number that is a hash already as its own hash: with millions of prefixes, hashing twice is what takes time.
#[derive(Clone, Copy, Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, _: &[u8]) {
        unreachable!("prefixes are 64-bit numbers");
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The chained hashes of `blocks`; two prompts of one `scope` share as many hashes as leading blocks.
pub(crate) fn chain(scope: &str, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
    let next = |previous: &mut u64, block: u64| {
        *previous = hash(&(*previous, block));
        Some(*previous)
    };
    blocks.scan(hash(&scope), next).collect()
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses each prompt at its time and compares how many of its blocks were cached.
    #[track_caller]
    fn check(steps: &[(i64, &str, &[u64], usize)]) {
        let mut cache = PrefixCache::new(300);
        for (n, (now_ms, scope, blocks, expected)) in steps.iter().enumerate() {
            let prefixes = chain(scope, blocks.iter().copied());
            assert_eq!(cache.live_blocks(&prefixes, *now_ms), *expected, "step {n}");
            cache.store(&prefixes, *now_ms);
        }
    }

    #[test]
    fn a_prompt_hits_as_far_as_it_begins_like_an_earlier_one() {
        check(&[
            (0, "s", &[1, 2, 3], 0),
            (1, "s", &[1, 2, 3, 4], 3),
            (2, "s", &[1, 9, 3, 4], 1),
            (3, "s", &[9, 2, 3, 4], 0),
            (4, "other scope", &[1, 2, 3], 0),
        ]);
    }

    #[test]
    fn a_prefix_lives_from_its_last_use_and_longer_ones_die_before_it() {
        check(&[(0, "s", &[1, 2, 3], 0), (200, "s", &[1, 2], 2), (400, "s", &[1, 2, 3], 2), (701, "s", &[1], 0)]);
    }
}
