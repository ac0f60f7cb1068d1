//! What the projector holds in memory: the fold so far, and the rows that wait for their transaction.

use std::time::Duration;

use waybill_events::log::{Seq, StoredFrame};
use waybill_projections::changes::{Change, ChangesFold};
use waybill_projections::gate::Gate;
use waybill_projections::usage::{Row, UsageFold};
use waybill_schema::event::Fact;
use waybill_schema::frame::Frame;
use waybill_schema::id::Revision;
use waybill_schema::secret::sum128;
use waybill_schema::time::Time;

use super::spent::{Spent, timed};
use crate::reader::{Newer, Read, each_fact, tell};

/// Rows with which a batch goes to the store; more come with the frames that were read at once. One that waits for
/// Postgres is held in memory.
pub(super) const ROWS: usize = 2000;
/// The same for a generation that nobody reads yet: the more, the more of a session's requests change its row together.
pub(super) const ROWS_UNSEEN: usize = 16_000;
/// Frames with which it goes even without rows, so that the checkpoint follows.
const FRAMES_MIN: usize = 4096;
/// Bytes of quarantined lines with which it goes.
const QUARANTINED_BYTES_MIN: usize = 8 << 20;

/// A place in the log: what a checkpoint names.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Place {
    pub(super) seq: Seq,
    /// The sum of the frame there; empty before the first.
    pub(super) sum: String,
    /// When that frame was stored, by the log's clock: a log that lost its end may hold the same bytes there again, and
    /// their facts happened at another time.
    pub(super) stored: Time,
}

impl Place {
    /// The place of `frame`: its own sum where it has a header, else that of its bytes.
    pub(super) fn of(frame: &StoredFrame) -> Self {
        let header = Frame::header_of(&frame.bytes);
        let sum = header.map_or_else(|_| sum128(&[&frame.bytes]), |header| header.sum);
        Self { seq: frame.seq, sum, stored: frame.stored }
    }
}

/// What could not be decoded.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub(super) seq: Seq,
    /// The line in its frame, from 1; 0 for a whole frame.
    pub(super) line: u32,
    pub(super) why: String,
    pub(super) bytes: Vec<u8>,
}

/// Rows and the stretch of the log that they come from; they are stored together or not at all.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) usage: Vec<Row>,
    pub(super) changes: Vec<Change>,
    pub(super) quarantined: Vec<Quarantined>,
    /// What decoding and folding it took.
    pub(super) spent: Spent,
    n_frames: usize,
}

impl Batch {
    /// An empty batch behind `place`.
    pub(super) fn behind(place: &Place) -> Self {
        Self { from: place.clone(), to: place.clone(), ..Self::default() }
    }

    /// Whether it covers no frame.
    pub(super) fn is_empty(&self) -> bool {
        self.n_frames == 0
    }

    /// Whether it is worth a transaction, however much more the log holds: with so many rows it is.
    pub(super) fn is_full(&self, rows: usize) -> bool {
        let n_bytes: usize = self.quarantined.iter().map(|quarantined| quarantined.bytes.len()).sum();
        let n_rows = self.usage.len() + self.changes.len() + self.quarantined.len();
        n_rows >= rows || self.n_frames >= FRAMES_MIN || n_bytes >= QUARANTINED_BYTES_MIN
    }
}

/// The fold of the log up to a place.
#[derive(Debug, Default)]
pub(super) struct Fold {
    gate: Gate,
    usage: UsageFold,
    changes: ChangesFold,
    pub(super) at: Place,
}

/// Something in a frame.
enum Item {
    Fact(Fact),
    Unread(Revision, Quarantined),
    NoFrame(Quarantined),
}

impl Fold {
    /// Folds the next frame into `batch`; of a frame that a newer program wrote to, nothing.
    pub(super) fn take(&mut self, frame: &StoredFrame, batch: &mut Batch) -> Result<(), Newer> {
        let items = timed(&mut batch.spent.decode, || items(frame))?;
        let mut folding = Duration::ZERO;
        timed(&mut folding, || items.into_iter().for_each(|item| self.item(item, frame.seq, batch)));
        batch.spent.fold += folding;
        self.at = Place::of(frame);
        batch.to = self.at.clone();
        batch.n_frames += 1;
        Ok(())
    }

    fn item(&mut self, item: Item, seq: Seq, batch: &mut Batch) {
        match item {
            Item::Fact(fact) => self.fact(&fact, seq, batch),
            Item::Unread(revision, quarantined) => {
                tell(&self.gate.pass_over(&revision));
                batch.quarantined.push(quarantined);
            }
            Item::NoFrame(quarantined) => batch.quarantined.push(quarantined),
        }
    }

    fn fact(&mut self, fact: &Fact, seq: Seq, batch: &mut Batch) {
        let verdict = self.gate.admit(fact);
        if verdict.folds() {
            self.usage.apply(fact, seq.0, &mut batch.usage);
            self.changes.apply(fact, &mut batch.changes);
        }
        tell(&verdict);
    }
}

fn items(frame: &StoredFrame) -> Result<Vec<Item>, Newer> {
    let mut items = Vec::new();
    each_fact::<Newer>(frame, |read| {
        let quarantined = |line, why, bytes: &[u8]| Quarantined { seq: frame.seq, line, why, bytes: bytes.to_vec() };
        items.push(match read {
            Read::Fact(fact) => Item::Fact(fact),
            Read::Unread(unread) => {
                Item::Unread(unread.revision.clone(), quarantined(unread.line, unread.why.to_string(), unread.bytes))
            }
            Read::NoFrame(why) => Item::NoFrame(quarantined(0, why.to_string(), &frame.bytes)),
        });
        Ok(())
    })?;
    Ok(items)
}
