//! The projection as a process runs it: turn after turn, through outages of Redis and of the log.

use std::time::Duration;

use waybill_events::log::Log;
use waybill_schema::time::Time;

use super::{ProjectError, RedisProjector, Settings, Turn};

/// The pause where there is nothing to do.
const IDLE: Duration = Duration::from_millis(50);
/// The pause after a failure, and while another is at work.
const RETRY: Duration = Duration::from_millis(250);
/// The pause where trying again helps only after somebody did something.
const STOPPED: Duration = Duration::from_secs(5);

/// How a projection stands.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Standing {
    /// The generation it writes.
    pub generation: u64,
    /// The last frame that Redis is known to cover.
    pub seq: u64,
    /// The last frame of the log, as last seen.
    pub head: u64,
    /// When the last frame that was folded had been stored, by the log's clock.
    pub stored: Option<Time>,
    /// Whether that is the whole log, as of the last turn.
    pub caught_up: bool,
    /// Whether another projector is at work instead.
    pub stands_by: bool,
    /// What keeps it from its work.
    pub trouble: Option<String>,
}

impl Standing {
    /// Frames of the log that Redis does not cover yet, where its sequence has no holes.
    pub fn lag_frames(&self) -> u64 {
        self.head.saturating_sub(self.seq)
    }

    /// How far Redis is behind at `now`, in milliseconds; 0 where it is not.
    pub fn lag_ms(&self, now: Time) -> u64 {
        match self.stored {
            Some(stored) if self.lag_frames() > 0 => now.ms_since(stored),
            Some(_) | None => 0,
        }
    }
}

/// A projector and its log.
pub struct Projection {
    projector: RedisProjector,
    log: Box<dyn Log>,
    standing: Standing,
}

impl Projection {
    /// Begins to connect; fails only where the URL is none.
    pub fn new(log: Box<dyn Log>, settings: &Settings) -> Result<Self, ProjectError> {
        Ok(Self { projector: RedisProjector::new(settings)?, log, standing: Standing::default() })
    }

    /// How it stands after the last turn.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Does the next piece of work, and says how long to wait before the one after.
    pub fn turn(&mut self) -> Duration {
        let turned = self.projector.turn(&mut *self.log, Time::wall_clock());
        if turned.is_err() {
            self.projector.look_ahead(&mut *self.log);
        }
        let before = self.standing.trouble.take();
        let (pause, trouble) = match &turned {
            Ok(Turn::Wrote) => (Duration::ZERO, None),
            Ok(Turn::CaughtUp) => (IDLE, None),
            Ok(Turn::Astray | Turn::StandsBy) => (RETRY, None),
            Err(error) => (if error.is_final() { STOPPED } else { RETRY }, Some(told(error))),
        };
        match (&before, &trouble) {
            (None, Some(trouble)) => tracing::error!("the shared state is not brought forward: {trouble}"),
            (Some(_), None) => tracing::info!("the shared state is brought forward again"),
            (None, None) | (Some(_), Some(_)) => {}
        }
        self.standing = Standing {
            generation: self.projector.generation(),
            seq: self.projector.seq(),
            head: self.projector.head(),
            stored: self.projector.stored(),
            caught_up: matches!(turned, Ok(Turn::CaughtUp)),
            stands_by: matches!(turned, Ok(Turn::StandsBy)),
            trouble,
        };
        pause
    }
}

/// An error with its causes, on one line.
fn told(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"))
}
