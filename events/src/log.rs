//! The log: frames in one order, appended by compare-and-set on their writer's last frame.
//!
//! Expecting a sequence gives exactly-once without a window of time: a repeated append conflicts instead of storing
//! twice, and so does a process that was thought dead and comes back. There are two: the embedded log
//! ([`crate::sqlite`]) and the one on JetStream ([`crate::jetstream`]). What any must hold is written as the conformance
//! tests of this crate.

use std::error::Error;
use std::fmt;

use serde::{Deserialize, Serialize};
use waybill_schema::event::Epoch;
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

/// A frame's place in the log: growing, from 1, not necessarily dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seq(pub u64);

impl Seq {
    /// Before the first frame.
    pub const START: Self = Self(0);
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An error of whatever stands behind a log.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Why frames were not stored, as far as is known.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The writer's last frame is not at the expected sequence; nothing was stored.
    #[error("the writer's last frame is at {actual:?}, not at {expected:?}")]
    Conflict {
        /// What was expected.
        expected: Option<Seq>,
        /// What is there; `None` where the log does not say or has none.
        actual: Option<Seq>,
    },
    /// The log is away, busy or full, or did not answer: frames may have been stored, and trying again is right.
    #[error("the log is unavailable")]
    Unavailable(#[source] Cause),
    /// The log will never take this.
    #[error("the log refuses the frames")]
    Refused(#[source] Cause),
}

/// Why the log cannot be read now.
#[derive(Debug, thiserror::Error)]
#[error("the log cannot be read")]
pub struct ReadError(#[source] pub Cause);

/// What the log says of a frame that it has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Its sequence.
    pub seq: Seq,
}

/// A writer's last frame in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// Its sequence.
    pub seq: Seq,
    /// Its header.
    pub header: Header,
}

impl Last {
    /// The epoch and the number of its last fact.
    pub fn epoch(&self) -> Epoch {
        Epoch { epoch: self.header.epoch, last: self.header.last() }
    }
}

/// Appends and reads frames. All calls block; errors of a connection end with the next call that succeeds.
pub trait Log: Send {
    /// Appends `frames`, all of one writer, whose last frame must be at `expected` (`None`: it has no frame).
    ///
    /// `sent` is the writer's clock at this try. A conflict on the first frame stores nothing; a log that stores
    /// frames one by one may have stored some of them when it fails later.
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError>;

    /// The last frame of `writer`; `None` where it has none.
    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError>;

    /// At most `frames_max` frames behind `after`, in order.
    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError>;

    /// At most `frames_max` frames of `writer` behind `after`, in order.
    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError>;

    /// The sequence of the last frame; [`Seq::START`] in an empty log.
    fn head(&mut self) -> Result<Seq, ReadError>;
}

/// A frame as it rests in the log.
///
/// A fact in it happened at `stored - (sent - made)`: it keeps its age however long it waited, and the writer's clock
/// only measures a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFrame {
    /// Its place.
    pub seq: Seq,
    /// When it was stored, by the log's clock.
    pub stored: Time,
    /// When it was sent, by the writer's clock.
    pub sent: Time,
    /// Its bytes.
    pub bytes: Vec<u8>,
}
