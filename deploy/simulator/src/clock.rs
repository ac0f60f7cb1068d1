//! Where the simulator's `now` comes from: the wall, or a hand that a test or a bench turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A source of `now` in milliseconds since 1970-01-01T00:00:00Z; clones of a manual clock share one hand.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The wall clock.
    #[default]
    Wall,
    /// A clock that stands still until it is turned.
    Manual(Arc<AtomicI64>),
}

impl Clock {
    /// A manual clock that shows `now_ms`.
    pub fn manual(now_ms: i64) -> Self {
        Self::Manual(Arc::new(AtomicI64::new(now_ms)))
    }

    /// Milliseconds since 1970 in UTC.
    #[expect(clippy::disallowed_methods, reason = "the simulator is a process of its own and reads the wall here only")]
    pub fn now_ms(&self) -> i64 {
        match self {
            Self::Wall => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
            }
            Self::Manual(hand) => hand.load(Ordering::SeqCst),
        }
    }

    /// Turns a manual clock `ms` milliseconds on; the wall clock stays as it is.
    pub fn advance_ms(&self, ms: i64) {
        if let Self::Manual(hand) = self {
            hand.fetch_add(ms, Ordering::SeqCst);
        }
    }
}
