//! Reads a frame for a projector: facts, what cannot be decoded, and what a newer program wrote, which nobody passes over.

use waybill_events::log::StoredFrame;
use waybill_projections::gate::Verdict;
use waybill_projections::read::{self, Unread};
use waybill_schema::event::Fact;
use waybill_schema::frame::{Frame, FrameError, Header};

/// A newer program wrote to the log: this one must be upgraded before it can go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Newer {
    /// An event.
    #[error("frame {seq} holds event `{kind}` version {version}, which a newer program wrote: upgrade this one")]
    Event {
        /// The frame.
        seq: u64,
        /// The event's kind.
        kind: String,
        /// Its version.
        version: u16,
    },
    /// A frame.
    #[error("frame {seq} has format {format}, which a newer program wrote: upgrade this one")]
    Frame {
        /// The frame.
        seq: u64,
        /// Its format.
        format: u16,
    },
}

/// What was read of a frame.
pub(crate) enum Read<'a> {
    Fact(Fact),
    Unread(&'a Unread<'a>),
    /// Not even a header.
    NoFrame(FrameError),
}

/// Hands everything in a frame to `take`, in order; stops at what a newer program wrote. Gives the frame's sum where
/// its header can be read.
pub(crate) fn each_fact<E: From<Newer>>(
    frame: &StoredFrame,
    take: impl FnMut(Read<'_>) -> Result<(), E>,
) -> Result<Option<String>, E> {
    each_fact_or_line(frame, |_| None, take)
}

/// The same, where `made` may have the facts of the frame under a header as they were made.
pub(crate) fn each_fact_or_line<E: From<Newer>>(
    frame: &StoredFrame,
    made: impl FnOnce(&Header) -> Option<Vec<Fact>>,
    mut take: impl FnMut(Read<'_>) -> Result<(), E>,
) -> Result<Option<String>, E> {
    let seq = frame.seq.0;
    let header = match Frame::header_of(&frame.bytes) {
        Ok(header) => header,
        Err(FrameError::Newer(format)) => return Err(Newer::Frame { seq, format }.into()),
        Err(error @ (FrameError::Header | FrameError::Sum)) => {
            tracing::error!(seq, "frame cannot be read: quarantined");
            take(Read::NoFrame(error))?;
            return Ok(None);
        }
    };
    if let Some(facts) = made(&header) {
        facts.into_iter().try_for_each(|fact| take(Read::Fact(fact)))?;
        return Ok(Some(header.sum));
    }
    for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent) {
        match fact {
            Ok(fact) => take(Read::Fact(fact))?,
            Err(unread) => {
                if let Some((kind, version)) = unread.why.newer() {
                    return Err(Newer::Event { seq, kind: kind.to_owned(), version }.into());
                }
                tracing::error!(seq, line = unread.line, why = %unread.why, "line cannot be decoded: quarantined");
                take(Read::Unread(&unread))?;
            }
        }
    }
    Ok(Some(header.sum))
}

/// Says what is remarkable about a fact.
pub(crate) fn tell(verdict: &Verdict) {
    match verdict {
        Verdict::Fold => {}
        Verdict::Duplicate => tracing::debug!("fact met again: ignored"),
        Verdict::Violation(violation) => {
            tracing::error!(at = %violation.at, broken = ?violation.broken, "a writer broke a promise of the log");
        }
    }
}
