//! The shipper of a gateway as a value: one append in flight, and what follows from each answer, or from none.
//!
//! The rules of the real one: an unknown answer is settled by reading the writer's last frame. Is it the one in flight,
//! it was stored; is it the one before, it was not; is it an older one of ours, the log has lost its tail and what was
//! acknowledged is sent again; is it anybody else's, this process is fenced.

use waybill_events::log::Seq;
use waybill_schema::frame::{CHAIN_START, Frame, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::log::{Kept, Says, WorldLog};
use crate::spool::Spool;

/// How long an answer is waited for, in milliseconds.
pub const PATIENCE_MS: u64 = 1_000;
/// At most this many facts in a frame.
pub const FRAME_FACTS_MAX: usize = 8;

/// The writer's last frame, as its shipper knows it.
#[derive(Clone, Debug)]
struct Tail {
    seq: Option<Seq>,
    link: Link,
}

/// A frame on its way.
#[derive(Clone, Debug)]
struct InFlight {
    frame: Frame,
    tried: Time,
    doubted: bool,
}

/// What reading the writer's last frame showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// All is as it was, or has gone on as it should.
    Ours,
    /// The log has lost frames that it had acknowledged, or has late ones of an earlier life.
    Moved,
    /// Another process writes under this name.
    Foreign,
}

/// The shipper of one life.
#[derive(Clone, Debug)]
pub struct Shipper {
    writer: WriterId,
    epoch: u64,
    tail: Option<Tail>,
    /// The place of the last fact in the log.
    pub known: (u64, u64),
    in_flight: Option<InFlight>,
    /// Whether the connection is a new one: then the log may be another one, too.
    reconnected: bool,
}

impl Shipper {
    /// The shipper of a life that writes in `epoch`.
    pub fn new(writer: WriterId, epoch: u64) -> Self {
        Self { writer, epoch, tail: None, known: (0, 0), in_flight: None, reconnected: false }
    }

    /// Names the epoch, once it is known from what was found.
    pub fn write_in(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Whether everything in `spool` is in the log, as far as is known.
    pub fn is_done(&self, spool: &Spool) -> bool {
        self.tail.is_some() && spool.behind(self.known).is_empty()
    }

    /// Finds where the log stands, before anything is sent.
    pub fn take_up(&mut self, log: &WorldLog) -> Found {
        let last = log.last_of(&self.writer);
        if last.is_some_and(|last| last.header.epoch >= self.epoch) {
            return Found::Foreign;
        }
        self.stand_at(last);
        Found::Ours
    }

    /// Whether it has found where the log stands.
    pub fn has_taken_up(&self) -> bool {
        self.tail.is_some()
    }

    /// Hears that its connection was lost.
    pub fn reconnect(&mut self) {
        self.reconnected = true;
    }

    /// Whether it must look before it sends: an answer is overdue or says that something is wrong, or the connection is
    /// new. A log that has lost its tail gives sequences out again, and an expected one may be anybody's by then.
    pub fn in_doubt(&self, now: Time) -> bool {
        let doubtful = |sent: &InFlight| sent.doubted || now.ms_since(sent.tried) > PATIENCE_MS;
        self.reconnected || self.in_flight.as_ref().is_some_and(doubtful)
    }

    /// Settles what became of the frame in flight, by the writer's last frame in the log.
    pub fn reconcile(&mut self, log: &WorldLog, spool: &Spool) -> Found {
        self.reconnected = false;
        let last = log.last_of(&self.writer);
        let sum = last.map_or(CHAIN_START, |last| &last.header.sum);
        let sent = self.in_flight.take();
        let tail = self.tail.as_ref().expect("a shipper takes up before it sends");
        let is_unchanged = tail.link.prev == sum;
        let is_stored = sent.as_ref().is_some_and(|sent| sent.frame.header.sum == sum);
        let is_foreign = last.is_some_and(|last| reached(last) > self.known && !is_held(last, spool));
        self.in_flight = sent.filter(|_| is_unchanged);
        if is_unchanged || is_stored {
            self.stand_at(last);
            return Found::Ours;
        }
        if is_foreign {
            return Found::Foreign;
        }
        self.stand_at(last);
        Found::Moved
    }

    /// The broken rule of a zombie: goes on behind whatever is there.
    pub fn send_on_behind(&mut self, log: &WorldLog) {
        let known = self.known;
        self.stand_at(log.last_of(&self.writer));
        self.known = known;
    }

    /// What to send now: the frame in flight again if its answer is overdue, else the next facts, `facts_max` at most.
    pub fn next(&mut self, spool: &Spool, facts_max: usize, now: Time, sent: Time) -> Option<Says> {
        let tail = self.tail.as_ref()?;
        let waiting =
            self.in_flight.as_ref().is_some_and(|sent| now.ms_since(sent.tried) <= PATIENCE_MS && !sent.doubted);
        if waiting {
            return None;
        }
        let frame = match self.in_flight.take() {
            Some(sent) => sent.frame,
            None => seal(&self.writer, tail.link.clone(), self.known, spool, facts_max.min(FRAME_FACTS_MAX))?,
        };
        self.in_flight = Some(InFlight { frame: frame.clone(), tried: now, doubted: false });
        Some(Says::Append { frame, expected: tail.seq, sent })
    }

    /// Hears that the frame with `sum` is stored; gives whether that was waited for.
    pub fn stored(&mut self, sum: &str, seq: Seq) -> bool {
        let Some(sent) = self.in_flight.take_if(|sent| sent.frame.header.sum == sum) else { return false };
        let header = &sent.frame.header;
        self.known = (header.epoch, header.last());
        self.tail = Some(Tail { seq: Some(seq), link: Link::after(header) });
        true
    }

    /// Hears that the frame with `sum` is not stored, because the log does not stand where it was thought to.
    pub fn conflict(&mut self, sum: &str) {
        if let Some(sent) = self.in_flight.as_mut().filter(|sent| sent.frame.header.sum == sum) {
            sent.doubted = true;
        }
    }

    fn stand_at(&mut self, last: Option<&Kept>) {
        let (seq, link) = match last {
            Some(last) => (Some(last.frame.seq), Link::after(&last.header)),
            None => (None, Link::start()),
        };
        self.known = last.map_or((0, 0), reached);
        self.tail = Some(Tail { seq, link });
        if let Some(sent) = &mut self.in_flight {
            sent.doubted = true;
        }
    }
}

/// The place of the last fact in `kept`.
fn reached(kept: &Kept) -> (u64, u64) {
    (kept.header.epoch, kept.header.last())
}

/// Whether every line of `kept` stands in `spool`, byte for byte.
fn is_held(kept: &Kept, spool: &Spool) -> bool {
    let lines = kept.frame.bytes.split_inclusive(|byte| *byte == b'\n').skip(1);
    lines.zip(kept.header.first..).all(|(line, number)| {
        let place = (kept.header.epoch, number);
        spool.at(place).map_or(spool.has_released(place), |held| held.line == line)
    })
}

/// Seals the next consecutive facts behind `known`.
fn seal(writer: &WriterId, link: Link, known: (u64, u64), spool: &Spool, facts_max: usize) -> Option<Frame> {
    let due = spool.behind(known);
    let (epoch, first) = due.first()?.place();
    let run = due.iter().zip(first..).take(facts_max).take_while(|(held, number)| held.place() == (epoch, *number));
    let lines: Vec<&[u8]> = run.map(|(held, _)| held.line.as_slice()).collect();
    let count = u32::try_from(lines.len()).expect("a frame holds few facts");
    Some(Frame::seal(writer.clone(), epoch, link, first, count, &lines.concat()))
}
