//! Seeded dice: the same seed gives the same bench on any machine.

/// A row of pseudo-random numbers (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Draws(u64);

impl Draws {
    /// The row of `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the reference implementation for seed 1234567 (Vigna, splitmix64.c).
    #[test]
    fn the_row_is_that_of_the_reference() {
        let mut draws = Draws::new(1_234_567);
        assert_eq!([draws.next(), draws.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
