//! The log as a value, and the wire to it, on which messages are late, doubled and lost.
//!
//! It keeps the contract of [`Log`]: an append stores nothing unless the writer's last frame is where it was expected.
//! Beyond that it does what a real one may do on a bad day: lose its last frames, give their sequences out again, and
//! move its clock with its leader.

use waybill_events::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};
use waybill_projections::read;
use waybill_schema::event::Fact;
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::schedule::Dice;

/// A message that was under way for longer never arrives: its connection is given up, in milliseconds.
pub const TRANSIT_MS_MAX: i64 = 2_000;
/// The log's clock is at most this far from the true time, in milliseconds.
pub const LEADER_SKEW_MS_MAX: i64 = 150;

/// A frame in the log, and what it says.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The frame.
    pub frame: StoredFrame,
    /// Its header.
    pub header: Header,
    /// Its facts, as the real reader reads them.
    pub facts: Vec<Fact>,
}

/// The log. A frame's sequence is its place, from 1.
#[derive(Clone, Debug, Default)]
pub struct WorldLog {
    /// The true time.
    pub now: Time,
    /// How far its clock is ahead of that, in milliseconds.
    pub skew_ms: i64,
    frames: Vec<Kept>,
}

impl WorldLog {
    /// The frames behind `after`.
    pub fn behind(&self, after: Seq) -> &[Kept] {
        self.frames.get(after.0 as usize..).unwrap_or_default()
    }

    /// The frame at `seq`.
    pub fn at(&self, seq: Seq) -> Option<&Kept> {
        self.frames.get((seq.0 as usize).checked_sub(1)?)
    }

    /// All frames in order.
    pub fn frames(&self) -> &[Kept] {
        &self.frames
    }

    /// The sequence of the last frame.
    pub fn end(&self) -> Seq {
        Seq(self.frames.len() as u64)
    }

    /// Loses the last `n` frames; their sequences are given out again.
    pub fn lose(&mut self, n: usize) {
        self.frames.truncate(self.frames.len() - n);
    }

    /// The last frame of `writer`.
    pub fn last_of(&self, writer: &WriterId) -> Option<&Kept> {
        self.frames.iter().rev().find(|kept| kept.header.writer == *writer)
    }

    fn store(&mut self, frame: &Frame, sent: Time) -> Seq {
        let seq = Seq(self.frames.len() as u64 + 1);
        let stored = self.now.plus_ms(self.skew_ms);
        let facts = read::facts(&frame.header, &frame.bytes, stored, sent).map(|fact| fact.expect("our facts decode"));
        let facts = facts.collect();
        let stored = StoredFrame { seq, stored, sent, bytes: frame.bytes.clone() };
        self.frames.push(Kept { frame: stored, header: frame.header.clone(), facts });
        seq
    }
}

impl Log for WorldLog {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        let Some(first) = frames.first() else { return Ok(Vec::new()) };
        let actual = self.last_of(&first.header.writer).map(|kept| kept.frame.seq);
        if actual != expected {
            return Err(AppendError::Conflict { expected, actual });
        }
        Ok(frames.iter().map(|frame| Appended { seq: self.store(frame, sent) }).collect())
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        Ok(self.last_of(writer).map(|kept| Last { seq: kept.frame.seq, header: kept.header.clone() }))
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        Ok(self.behind(after).iter().take(frames_max).map(|kept| kept.frame.clone()).collect())
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        let of_writer = self.behind(after).iter().filter(|kept| kept.header.writer == *writer);
        Ok(of_writer.take(frames_max).map(|kept| kept.frame.clone()).collect())
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        Ok(Seq(self.frames.len() as u64))
    }
}

/// Names one life of one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The gateway's place among all.
    pub gateway: usize,
    /// Its how-manieth life.
    pub number: u64,
}

/// A message.
#[derive(Clone, Debug)]
pub struct Message {
    /// The life that sends or gets it.
    pub life: Life,
    /// When it left, in true time.
    pub left: Time,
    /// What it says.
    pub says: Says,
}

/// What a message says.
#[derive(Clone, Debug)]
pub enum Says {
    /// Append this.
    Append {
        /// The frame.
        frame: Frame,
        /// Where the writer's last frame must be.
        expected: Option<Seq>,
        /// The writer's clock at this try.
        sent: Time,
    },
    /// It is stored.
    Stored {
        /// Its sum.
        sum: String,
        /// Its place.
        seq: Seq,
    },
    /// It is not stored.
    Conflict {
        /// Its sum.
        sum: String,
    },
}

/// The messages under way.
#[derive(Clone, Debug, Default)]
pub struct Wire {
    messages: Vec<Message>,
}

impl Wire {
    /// Sends `message` on its way.
    pub fn send(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Loses everything under way: no connection outlives the server that it leads to.
    pub fn break_connections(&mut self) {
        self.messages.clear();
    }

    /// Loses everything under way for one life, which goes on with a new connection.
    pub fn reconnect(&mut self, life: Life) {
        self.messages.retain(|message| message.life != life);
    }

    /// Takes one message off the wire, in no order; it may be left there to come again. `None` where it is lost.
    pub fn take(&mut self, dice: &mut Dice, now: Time) -> Option<Message> {
        self.messages.retain(|message| now.ms_since(message.left) <= TRANSIT_MS_MAX as u64);
        if self.messages.is_empty() {
            return None;
        }
        let index = dice.below(self.messages.len());
        match dice.below(100) {
            0..6 => {
                self.messages.swap_remove(index);
                None
            }
            6..14 => Some(self.messages[index].clone()),
            _ => Some(self.messages.swap_remove(index)),
        }
    }
}
