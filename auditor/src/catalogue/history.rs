//! The history: the catalogue's batches as they stand in a log, verified frame by frame, and the rows they give.
//!
//! A frame whose sum or chain is wrong, or that a newer program wrote, stops the reading where it stands: what came
//! before it stays good. A log that lost its tail and grew again shows as a broken chain; then begin anew with
//! `History::default()`.

use waybill_events::log::{Log, ReadError, Seq, StoredFrame};
use waybill_projections::chain::{Break, Chains};
use waybill_projections::read;
use waybill_schema::catalogue::{BatchError, Rows};
use waybill_schema::event::{Batch, Event};
use waybill_schema::frame::{Frame, FrameError};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use super::WRITER;

/// Frames read at once.
const FRAMES_MAX: usize = 256;

/// Why the catalogue cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The log cannot be read now; trying again is right.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The frame is damaged, or its format is newer than this program.
    #[error("the catalogue's frame {seq} cannot be read")]
    Frame {
        /// Its place.
        seq: Seq,
        /// What is wrong with it.
        #[source]
        source: FrameError,
    },
    /// The frame does not continue the one before it.
    #[error("the catalogue's frame {seq} does not continue the chain: {broken:?}")]
    Chain {
        /// Its place.
        seq: Seq,
        /// How it does not.
        broken: Break,
    },
    /// A newer program wrote the batch: this one must be upgraded before it can go on.
    #[error("the catalogue's frame {seq} holds event `{kind}` version {version}: upgrade this program")]
    Newer {
        /// Its place.
        seq: Seq,
        /// The event's kind.
        kind: String,
        /// The event's version.
        version: u16,
    },
    /// The frame holds a line that is no fact.
    #[error("the catalogue's frame {seq} holds a line that cannot be decoded: {why}")]
    Line {
        /// Its place.
        seq: Seq,
        /// What is wrong with it.
        why: String,
    },
}

/// The catalogue as far as a log has been read.
#[derive(Debug, Default)]
pub struct History {
    /// The rows that the batches give.
    pub rows: Rows,
    /// The batches that make the rows, the first first: batch `n` makes revision `n` and stands at `n - 1`.
    pub batches: Vec<Batch>,
    /// When each batch was made, on the log's time scale.
    pub made: Vec<Time>,
    /// The frames whose batch did not fit the rows: left out whole, and never silently.
    pub misfits: Vec<(Seq, BatchError)>,
    /// The last frame read.
    pub seq: Seq,
    chains: Chains,
}

/// Reads the catalogue's history out of `log` from its first frame.
pub fn history(log: &mut dyn Log) -> Result<History, HistoryError> {
    let mut history = History::default();
    history.follow(log)?;
    Ok(history)
}

impl History {
    /// Reads what the log holds behind the last frame read; says whether anything came. Without news it asks once.
    ///
    /// After an error, what came before the frame in question is folded, and the next call meets that frame again.
    pub fn follow(&mut self, log: &mut dyn Log) -> Result<bool, HistoryError> {
        let (writer, before) = (WriterId::from(WRITER), self.seq);
        loop {
            let frames = log.read_of(&writer, self.seq, FRAMES_MAX)?;
            if frames.is_empty() {
                return Ok(self.seq != before);
            }
            frames.into_iter().try_for_each(|frame| self.take(frame))?;
        }
    }

    /// Folds the catalogue's next frame, whole or not at all.
    pub fn take(&mut self, stored: StoredFrame) -> Result<(), HistoryError> {
        let StoredFrame { seq, stored, sent, bytes } = stored;
        let Frame { header, bytes } = Frame::parse(bytes).map_err(|source| HistoryError::Frame { seq, source })?;
        let mut chains = self.chains.clone();
        chains.follow(&header).map_err(|broken| HistoryError::Chain { seq, broken })?;
        let facts: Result<Vec<_>, _> = read::facts(&header, &bytes, stored, sent).collect();
        let facts = facts.map_err(|unread| match unread.why.newer() {
            Some((kind, version)) => HistoryError::Newer { seq, kind: kind.to_owned(), version },
            None => HistoryError::Line { seq, why: unread.why.to_string() },
        })?;
        for fact in facts {
            if let Event::Catalogue(batch) = fact.event {
                self.fold(*batch, fact.at).unwrap_or_else(|error| self.misfits.push((seq, error)));
            }
        }
        (self.chains, self.seq) = (chains, seq);
        Ok(())
    }

    fn fold(&mut self, batch: Batch, made: Time) -> Result<(), BatchError> {
        self.rows.apply(&batch)?;
        self.batches.push(batch);
        self.made.push(made);
        Ok(())
    }
}
