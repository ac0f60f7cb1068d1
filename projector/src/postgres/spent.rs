//! Where a projection's time goes: what a rebuild of millions of facts waits for.

use std::time::Duration;

use tokio::time::Instant;

/// Time by stage, of what has been stored since the projector was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Reading frames from the log.
    pub read: Duration,
    /// Making facts of their bytes.
    pub decode: Duration,
    /// Making rows of facts.
    pub fold: Duration,
    /// Encoding a batch of rows and waiting until Postgres has taken it.
    pub store: Duration,
}

/// Does `work` and adds the time that it takes to `total`.
pub(super) fn timed<T>(total: &mut Duration, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    *total += begun.elapsed();
    done
}
