//! Dispatch: how many sends a request may make, and to whom, as a machine whose wrong moves do not compile.
//!
//! ```text
//! begin -> Search --take--> Attempt --commit--> Committed
//!            ^                 | fail
//!            +---- Other ------+---- Same (the same deployment again) ---- End
//!            +- enter_pool - Spent (only another pool can help) -+
//! ```
//! A [`Committed`] has no `fail`: after the first meaningful byte to the client there is no failover (DESIGN.md 2.4).

use waybill_schema::id::DeploymentId;
use waybill_schema::time::Time;

use crate::classify::{Here, Recourse, Verdict, Work};

/// What bounds the sends of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sends to one deployment, the first included (S3.12).
    pub max_attempts: u32,
    /// Further deployments tried (S2.7).
    pub retry_times: u32,
    /// Sends in all; their number never passes `u16::MAX`.
    pub sends_max: u32,
    /// The pause before the same deployment is tried again, in milliseconds; doubled each time.
    pub backoff_ms: u64,
    /// When the request as a whole must end.
    pub deadline: Time,
    /// Whether the request may be repeated.
    pub replay: Replay,
}

/// Whether a request may be repeated after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// As long as nothing was output.
    Free,
    /// Only when the upstream did no work: it refused the request, or never got it.
    RefusedOnly,
    /// Only when nothing of it went out: what went out is gone.
    UnsentOnly,
    /// Not at all.
    Never,
}

/// A request that looks for a deployment to send to.
#[derive(Debug)]
pub struct Search {
    limits: Limits,
    sends: u16,
    exhausted: Vec<DeploymentId>,
    /// How many of the exhausted were of the pool before: the bound on further deployments is for each pool.
    before: usize,
}

/// A send under way.
#[derive(Debug)]
pub struct Attempt {
    search: Search,
    deployment: DeploymentId,
    here: u32,
}

/// A send whose answer has begun to reach the client. It cannot fail over:
///
/// ```compile_fail,E0599
/// # use waybill_routing::{classify::Verdict, dispatch::{Committed, Next}};
/// # use waybill_schema::time::Time;
/// fn switch(send: Committed, verdict: &Verdict, now: Time) -> Next {
///     send.fail(verdict, now)
/// }
/// ```
/// An [`Attempt`] can; the same lines compile for it:
///
/// ```
/// # use waybill_routing::{classify::Verdict, dispatch::{Attempt, Next}};
/// # use waybill_schema::time::Time;
/// fn switch(send: Attempt, verdict: &Verdict, now: Time) -> Next {
///     send.fail(verdict, now)
/// }
/// ```
#[derive(Debug)]
pub struct Committed {
    sends: u16,
}

/// What follows a failed send.
#[derive(Debug)]
pub enum Next {
    /// The same deployment again, after a pause.
    Same {
        /// The new send.
        attempt: Attempt,
        /// The pause before it, in milliseconds.
        after_ms: u64,
    },
    /// Another deployment, if the pool still has a legal one.
    Other(Search),
    /// Another pool, where a fallback chain leads to one; the bounds on sends and time hold over all pools.
    Spent {
        /// The search, which goes on in another pool.
        search: Search,
        /// Why there is no further send where there is no other pool.
        end: End,
    },
    /// No further send.
    End(End),
}

/// Why there is no further send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The failure is not one that another send could mend.
    Final,
    /// What the upstream did is unknown, and the request may not be made twice.
    Unrepeatable,
    /// Attempts, deployments or sends are used up.
    Exhausted,
    /// The request's deadline leaves no room.
    Deadline,
}

/// Starts a request.
pub fn begin(limits: Limits) -> Search {
    Search { limits, sends: 0, exhausted: Vec::new(), before: 0 }
}

impl Search {
    /// The deployments whose attempts in this request are used up.
    pub fn exhausted(&self) -> &[DeploymentId] {
        &self.exhausted
    }

    /// How many sends there were.
    pub fn sends(&self) -> u16 {
        self.sends
    }

    /// Goes on in another pool. A deployment whose attempts are used up stays so there.
    pub fn enter_pool(mut self) -> Self {
        self.before = self.exhausted.len();
        self
    }

    /// Sends to `deployment`.
    pub fn take(mut self, deployment: DeploymentId) -> Attempt {
        self.sends += 1;
        Attempt { search: self, deployment, here: 1 }
    }
}

impl Attempt {
    /// The number of this send in the request, from 1.
    pub fn number(&self) -> u16 {
        self.search.sends
    }

    /// Whether the request may be sent once more, wherever.
    pub fn has_room(&self) -> bool {
        u32::from(self.search.sends) < self.search.limits.sends_max.min(u32::from(u16::MAX))
    }

    /// Ends the send as a failure and says what follows.
    pub fn fail(mut self, verdict: &Verdict, now: Time) -> Next {
        let limits = self.search.limits;
        let repeatable = match limits.replay {
            Replay::Free => true,
            Replay::RefusedOnly => matches!(verdict.work, Work::Unsent | Work::Refused),
            Replay::UnsentOnly => verdict.work == Work::Unsent,
            Replay::Never => false,
        };
        if !repeatable {
            return Next::End(if verdict.next { End::Unrepeatable } else { End::Final });
        }
        let room = self.has_room();
        let is_repair = verdict.here == Here::Repaired;
        let pause = self.pause_ms(verdict.here).filter(|_| (is_repair || self.here < limits.max_attempts) && room);
        let in_time = |ms: u64| now.plus_ms(i64::try_from(ms).unwrap_or(i64::MAX)) < limits.deadline;
        if let Some(after_ms) = pause.filter(|ms| in_time(*ms)) {
            self.here += u32::from(!is_repair);
            self.search.sends += 1;
            return Next::Same { attempt: self, after_ms };
        }
        if !verdict.next {
            let end = match pause {
                Some(_) => End::Deadline,
                None if verdict.here == Here::No => End::Final,
                None => End::Exhausted,
            };
            return self.leave(verdict, end, room && in_time(0));
        }
        if !in_time(0) {
            return Next::End(End::Deadline);
        }
        let further = u32::try_from(self.search.exhausted.len() - self.search.before).unwrap_or(u32::MAX);
        if further >= limits.retry_times || !room {
            return self.leave(verdict, End::Exhausted, room);
        }
        self.search.exhausted.push(self.deployment);
        Next::Other(self.search)
    }

    /// Leaves the pool for good: for another one where that may help, and the bounds allow a further send.
    fn leave(mut self, verdict: &Verdict, end: End, allowed: bool) -> Next {
        if verdict.recourse == Recourse::None || !allowed {
            return Next::End(end);
        }
        self.search.exhausted.push(self.deployment);
        Next::Spent { search: self.search, end }
    }

    /// The first meaningful byte goes out: from here the send can only succeed or be interrupted.
    pub fn commit(self) -> Committed {
        Committed { sends: self.search.sends }
    }

    fn pause_ms(&self, here: Here) -> Option<u64> {
        match here {
            Here::No => None,
            Here::Backoff => Some(self.search.limits.backoff_ms.saturating_mul(1 << (self.here - 1).min(10))),
            Here::After(ms) => Some(ms),
            Here::Repaired => Some(0),
        }
    }
}

impl Committed {
    /// How many sends there were.
    pub fn sends(&self) -> u16 {
        self.sends
    }
}
