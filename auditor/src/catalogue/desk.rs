//! The desk: what the next batch is, and how it gets into the log, by expected sequence and by nothing else.
//!
//! A batch is one frame of a writer that all auditors share; it has no spool and no epochs. Of two concurrent edits one
//! gets a conflict. Where the log does not answer, the desk looks whether the frame is there before it sends the same
//! bytes again, so a batch is stored once or not at all.

use waybill_events::log::{AppendError, Cause, Log, ReadError, Seq, StoredFrame};
use waybill_projections::gate::NO_EPOCH;
use waybill_projections::read;
use waybill_schema::catalogue::{Row, Rows};
use waybill_schema::event::{Batch, Event};
use waybill_schema::frame::{Body, Frame, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use super::WRITER;

/// Who is named as the actor of a batch that a configuration file brings.
pub const FILE_ACTOR: &str = "configuration file";
/// How often one frame is sent, while a log does not answer; each try waits as long as the log lets it.
const SENDS_MAX: usize = 4;

/// Why a batch did not get into the log.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Another edit came first: look at the catalogue again and plan anew.
    #[error(
        "catalogue revision {log} by {actor} came before revision {batch} of this batch: look again, then try again"
    )]
    Conflict {
        /// The revision that the batch makes.
        batch: u64,
        /// The revision in its way.
        log: u64,
        /// Who made that.
        actor: String,
    },
    /// The batch is not the next one: it was planned against a catalogue that the log does not hold.
    #[error("the batch makes catalogue revision {batch}, but the log holds only revision {log}")]
    Ahead {
        /// The revision that the batch makes.
        batch: u64,
        /// The last revision in the log.
        log: u64,
    },
    /// The log will never take it.
    #[error("the log refuses the catalogue's batch")]
    Refused(#[source] Cause),
    /// The log did not say in time whether it has stored the batch. It may have.
    #[error("the log does not say whether catalogue revision {batch} is stored: look before you try again")]
    Unknown {
        /// The revision that the batch makes.
        batch: u64,
        /// What the log said last.
        #[source]
        cause: Cause,
    },
    /// The log cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// The batch that brings `rows` to what a configuration file says; `None` where that very file was the last applied.
///
/// So a restart with an unchanged file never overwrites an edit made since. A changed file without a change of rows
/// still gives a batch, without ops: it records the file as applied.
pub fn plan(rows: &Rows, file_rows: Vec<Row>, file_hash: &str) -> Option<Batch> {
    if rows.file.as_deref() == Some(file_hash) {
        return None;
    }
    Some(rows.batch_to(file_rows, FILE_ACTOR, "the file changed", Some(file_hash.to_owned())))
}

/// Appends `batch` as the catalogue's next revision; `now` is this process's clock.
pub fn append(log: &mut dyn Log, batch: Batch, now: Time) -> Result<Seq, BatchError> {
    let writer = WriterId::from(WRITER);
    let last = log.last(&writer)?;
    let (revision, standing) = (batch.revision, last.as_ref().map_or(0, |last| last.header.last()));
    if revision > standing + 1 {
        return Err(BatchError::Ahead { batch: revision, log: standing });
    }
    let (expected, link) = match &last {
        Some(last) if revision <= standing => return Err(conflict(log, revision, Seq(last.seq.0 - 1))?),
        Some(last) => (Some(last.seq), Link::after(&last.header)),
        None => (None, Link::start()),
    };
    let mut line = Vec::new();
    Body::of(&Event::Catalogue(Box::new(batch)), now).write_line(revision, &mut line);
    send(log, &Frame::seal(writer, NO_EPOCH, link, revision, 1, &line), expected, now)
}

/// Sends the frame until the log has said what became of it.
fn send(log: &mut dyn Log, frame: &Frame, expected: Option<Seq>, now: Time) -> Result<Seq, BatchError> {
    let (batch, after) = (frame.header.first, expected.unwrap_or(Seq::START));
    let mut cause = Cause::from("nothing was sent");
    for _ in 0..SENDS_MAX {
        match log.append(std::slice::from_ref(frame), expected, now) {
            Ok(appended) => return Ok(appended[0].seq),
            Err(AppendError::Refused(cause)) => return Err(BatchError::Refused(cause)),
            // An earlier try may be what stands in the way.
            Err(error @ (AppendError::Conflict { .. } | AppendError::Unavailable(_))) => cause = error.into(),
        }
        match next_of(log, after) {
            Ok(Some(next)) if next.bytes == frame.bytes => return Ok(next.seq),
            Ok(Some(_)) => return Err(conflict(log, batch, after)?),
            Ok(None) => {}
            Err(error) => cause = error.into(),
        }
    }
    Err(BatchError::Unknown { batch, cause })
}

/// The catalogue's first frame behind `after`.
fn next_of(log: &mut dyn Log, after: Seq) -> Result<Option<StoredFrame>, ReadError> {
    Ok(log.read_of(&WriterId::from(WRITER), after, 1)?.into_iter().next())
}

/// The conflict of the batch that makes revision `batch` with the catalogue's first frame behind `after`.
fn conflict(log: &mut dyn Log, batch: u64, after: Seq) -> Result<BatchError, ReadError> {
    let unknown = BatchError::Conflict { batch, log: batch, actor: "somebody".to_owned() };
    let Some(frame) = next_of(log, after)? else { return Ok(unknown) };
    let Ok(header) = Frame::header_of(&frame.bytes) else { return Ok(unknown) };
    let facts = read::facts(&header, &frame.bytes, frame.stored, frame.sent).flatten();
    let mut batches = facts.filter_map(|fact| match fact.event {
        Event::Catalogue(batch) => Some(batch),
        _ => None,
    });
    Ok(batches.next().map_or(unknown, |other| BatchError::Conflict { batch, log: other.revision, actor: other.actor }))
}
