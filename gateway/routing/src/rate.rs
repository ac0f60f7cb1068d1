//! Rates: how much was spent in the last minute, and how long until there is room again.
//!
//! A minute is 60 slots of a second that slide with the clock, so no burst of two full limits fits round a boundary.

use waybill_schema::time::Time;

const SLOTS: usize = 60;
const SLOT_MS: i64 = 1000;

/// What was spent in the last minute, to the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Minute {
    slots: [u64; SLOTS],
    /// The second, since 1970, of the newest slot.
    newest: i64,
}

impl Default for Minute {
    fn default() -> Self {
        Self { slots: [0; SLOTS], newest: i64::MIN }
    }
}

impl Minute {
    /// Adds `n` at `now`.
    pub fn add(&mut self, n: u64, now: Time) {
        self.move_to(now);
        let slot = &mut self.slots[index(self.newest)];
        *slot = slot.saturating_add(n);
    }

    /// How long from `now` until less than `limit` is spent, in milliseconds; `None` where it is so now.
    pub fn wait_ms(&mut self, limit: u64, now: Time) -> Option<u64> {
        self.move_to(now);
        let mut spent = self.slots.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        if spent < limit {
            return None;
        }
        let oldest = self.newest.saturating_sub(SLOTS as i64 - 1);
        let leaves = (oldest..=self.newest).find(|second| {
            spent -= self.slots[index(*second)].min(spent);
            spent < limit
        });
        let free = leaves.unwrap_or(self.newest).saturating_add(SLOTS as i64).saturating_mul(SLOT_MS);
        Some(Time(free).ms_since(now).max(1))
    }

    /// Whether nothing was spent in the minute before `now`.
    pub fn is_idle(&mut self, now: Time) -> bool {
        self.move_to(now);
        self.slots.iter().all(|n| *n == 0)
    }

    /// Empties the slots whose minute is over. A clock that went back changes nothing.
    fn move_to(&mut self, now: Time) {
        let second = now.0.div_euclid(SLOT_MS);
        let passed = usize::try_from(second.saturating_sub(self.newest)).unwrap_or(0).min(SLOTS);
        for back in 0..passed {
            self.slots[index(second - back as i64)] = 0;
        }
        self.newest = self.newest.max(second);
    }
}

fn index(second: i64) -> usize {
    usize::try_from(second.rem_euclid(SLOTS as i64)).expect("a remainder of 60 is small and not negative")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The expected waits are worked out by hand: what was spent in second `s` leaves at `s + 60`.
    #[test]
    fn a_full_minute_says_when_it_has_room() {
        let mut minute = Minute::default();
        assert_eq!(minute.wait_ms(1, Time(0)), None);
        minute.add(1, Time(10_900));
        minute.add(2, Time(20_000));
        let table = [
            (4, 20_000, None),
            (3, 20_000, Some(50_000)),
            (2, 20_000, Some(60_000)),
            (1, 20_000, Some(60_000)),
            (3, 69_999, Some(1)),
            (3, 70_000, None),
            (2, 70_000, Some(10_000)),
            (1, 80_000, None),
        ];
        for (limit, now, wait) in table {
            assert_eq!(minute.wait_ms(limit, Time(now)), wait, "{limit} at {now}");
        }
        assert!(minute.is_idle(Time(80_000)));
    }

    #[test]
    fn a_clock_that_jumps_back_frees_nothing_and_breaks_nothing() {
        let mut minute = Minute::default();
        minute.add(5, Time(100_000));
        assert_eq!(minute.wait_ms(5, Time(1_000)), Some(159_000));
        minute.add(1, Time(1_000));
        assert_eq!(minute.wait_ms(6, Time(100_000)), Some(60_000));
        assert_eq!(minute.wait_ms(1, Time(i64::MAX)), None);
    }

    proptest! {
        /// In no 59 seconds is more admitted than the limit, and whoever waits as told is admitted.
        #[test]
        fn a_limit_holds_over_every_window(limit in 1..20u64, gaps in proptest::collection::vec(0..9_000i64, 1..200)) {
            let (mut minute, mut now, mut admitted) = (Minute::default(), 0, Vec::new());
            for gap in gaps {
                now += gap;
                if let Some(wait) = minute.wait_ms(limit, Time(now)) {
                    now += i64::try_from(wait).expect("a wait is short");
                    prop_assert_eq!(minute.wait_ms(limit, Time(now)), None);
                }
                minute.add(1, Time(now));
                admitted.push(now);
                let recent = admitted.iter().filter(|at| now - **at < 59_000).count();
                prop_assert!(recent as u64 <= limit, "{} of {}", recent, limit);
            }
        }
    }
}
