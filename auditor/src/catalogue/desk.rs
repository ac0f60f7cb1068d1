//! The catalogue as a writer of the log: one frame a batch, appended by expected sequence and by nothing else.
//!
//! All auditors share the writer; it has no spool and no epochs. Of two concurrent edits one gets a conflict.

use waybill_events::log::{AppendError, Log, ReadError, Seq};
use waybill_projections::gate::NO_EPOCH;
use waybill_schema::catalogue::{Row, Rows};
use waybill_schema::event::{Batch, Event};
use waybill_schema::frame::{Body, Frame, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

/// The writer of all catalogue batches.
pub const WRITER: &str = "catalogue";
/// Who is named as the actor of a batch that a configuration file brings.
pub const FILE_ACTOR: &str = "configuration file";

/// Why a batch did not get into the log.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Another edit came first: look at the catalogue again and plan anew.
    #[error("the batch makes catalogue revision {batch}, but the log already holds revision {log}")]
    Conflict {
        /// The revision that the batch makes.
        batch: u64,
        /// The last revision in the log.
        log: u64,
    },
    /// The batch is not the next one: it was planned against a catalogue that the log does not hold.
    #[error("the batch makes catalogue revision {batch}, but the log holds only revision {log}")]
    Ahead {
        /// The revision that the batch makes.
        batch: u64,
        /// The last revision in the log.
        log: u64,
    },
    /// The log did not take it, as far as is known.
    #[error("the catalogue's batch was not stored")]
    Append(#[source] AppendError),
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
pub fn append(log: &mut impl Log, batch: Batch, now: Time) -> Result<Seq, BatchError> {
    let writer = WriterId::from(WRITER);
    let last = log.last(&writer)?;
    let (revision, standing) = (batch.revision, last.as_ref().map_or(0, |last| last.header.last()));
    if revision <= standing {
        return Err(BatchError::Conflict { batch: revision, log: standing });
    }
    if revision > standing + 1 {
        return Err(BatchError::Ahead { batch: revision, log: standing });
    }
    let (expected, link) = match &last {
        Some(last) => (Some(last.seq), Link::after(&last.header)),
        None => (None, Link::start()),
    };
    let mut line = Vec::new();
    Body::of(&Event::Catalogue(Box::new(batch))).write_line(revision, now, &mut line);
    let frame = Frame::seal(writer, NO_EPOCH, link, revision, 1, &line);
    let appended = log.append(&[frame], expected, now).map_err(|error| match error {
        AppendError::Conflict { .. } => BatchError::Conflict { batch: revision, log: revision },
        error @ (AppendError::Unavailable(_) | AppendError::Refused(_)) => BatchError::Append(error),
    })?;
    Ok(appended[0].seq)
}

#[cfg(test)]
mod tests {
    use waybill_schema::catalogue::{Channel, Status};

    use super::*;

    fn channel(id: &str, base_url: &str) -> Row {
        Row::Channel(Channel {
            id: id.into(),
            status: Status::Active,
            base_url: base_url.into(),
            dialects: Vec::new(),
            api_keys: Vec::new(),
            models: Vec::new(),
            labels: Default::default(),
            internal_headers: false,
        })
    }

    #[test]
    fn a_file_is_applied_once_and_an_edit_since_then_stays() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let path = dir.path().join("waybill.db");
        let (mut log, start) = waybill_projector::embedded::open(&path).expect("a new file opens");
        let mut rows = start.fold.rows;
        let first = plan(&rows, vec![channel("a", "http://a/v1")], "hash-1").expect("a new file gives a batch");
        rows.apply(&first).expect("the batch fits");
        append(&mut log, first, Time(1)).expect("the log takes the batch");

        let edit = rows.batch_to(vec![channel("a", "http://b/v1")], "admin", "moved", None);
        append(&mut log, edit.clone(), Time(2)).expect("the log takes the edit");
        drop(log);

        let (mut log, start) = waybill_projector::embedded::open(&path).expect("the file opens again");
        assert_eq!((start.fold.rows.revision, start.fold.rows.file.as_deref()), (2, Some("hash-1")));
        assert!(start.fold.misfits.is_empty() && !start.fold.gate.summary().tainted());
        assert_eq!(plan(&start.fold.rows, vec![channel("a", "http://a/v1")], "hash-1"), None);

        let error = append(&mut log, edit, Time(3)).expect_err("the same revision cannot be made twice");
        assert!(matches!(error, BatchError::Conflict { batch: 2, log: 2 }), "{error:?}");
        let batch = plan(&start.fold.rows, Vec::new(), "hash-2").expect("another file gives a batch");
        let ahead = Batch { revision: 9, ..batch.clone() };
        let error = append(&mut log, ahead, Time(4)).expect_err("a revision cannot be left out");
        assert!(matches!(error, BatchError::Ahead { batch: 9, log: 2 }), "{error:?}");
        append(&mut log, batch, Time(5)).expect("the log takes the next revision");
    }
}
