//! The reading half of a spool: follows the segments, and lets go of what the log has acknowledged.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::time::Duration;

use waybill_schema::event::Epoch;

use super::segment::{self, HEAD_BYTES, Name};
use super::{Count, Shared, SpoolError, Stop, Stopper};

/// How much is read ahead from a segment.
const READ_BYTES: usize = 256 * 1024;

/// Consecutive facts of one epoch, as their lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Their epoch.
    pub epoch: u64,
    /// The number of the first.
    pub first: u64,
    /// How many, from 1.
    pub count: u32,
    /// The lines, each ended by `\n`.
    pub lines: Vec<u8>,
}

impl Batch {
    /// The epoch and the number of the last fact.
    pub fn last(&self) -> Epoch {
        Epoch { epoch: self.epoch, last: self.first + u64::from(self.count) - 1 }
    }
}

/// Why a wait for facts ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// There are as many as were asked for.
    Ready,
    /// The time has passed.
    TimedOut,
    /// There are not, and the reader is asked to come to an end.
    Stopping,
}

/// Takes facts out of a spool in order; usable on another thread than the [`super::Spool`].
///
/// What [`Reader::next_batch`] has given stays on disk until [`Reader::ack`]; [`Reader::resume_after`] gives it again.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    /// What the log has anyway: not given out.
    after: Option<(u64, u64)>,
    place: Place,
    acked: Place,
    source: Option<Source>,
    head: Option<Record>,
    given: VecDeque<Given>,
}

/// A border between records, and all that lies before it.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    segment: Name,
    offset: u64,
    before: Count,
}

/// An open segment and what was read ahead from it.
#[derive(Debug)]
struct Source {
    file: File,
    buffer: Vec<u8>,
    at: usize,
}

/// A record, or what is left of it: always at least one line.
#[derive(Debug)]
struct Record {
    epoch: u64,
    first: u64,
    count: u64,
    lines: Vec<u8>,
    start: Place,
}

/// A batch that was given out: once it is acknowledged, all before `end` is.
#[derive(Debug)]
struct Given {
    last: (u64, u64),
    end: Place,
}

fn order(epoch: Epoch) -> (u64, u64) {
    (epoch.epoch, epoch.last)
}

impl Reader {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (place, acked) = Default::default();
        Self { shared, after: None, place, acked, source: None, head: None, given: VecDeque::new() }
    }

    /// Goes back to the oldest fact held that is behind `last`, which is what the log has; `None` for nothing.
    pub fn resume_after(&mut self, last: Option<Epoch>) {
        self.after = last.map(order);
        self.place = self.acked;
        (self.source, self.head) = (None, None);
        self.given.clear();
    }

    /// The next facts, at most `facts_max` and at most `bytes_max` of lines, or one fact where that is larger.
    ///
    /// `None` where all has been given out. Records stay whole, except one that is larger than a batch can be.
    pub fn next_batch(&mut self, facts_max: u32, bytes_max: usize) -> Result<Option<Batch>, SpoolError> {
        let mut batch: Option<Batch> = None;
        while let Some(mut record) = self.next_record()? {
            let batch = match &mut batch {
                None => batch.insert(Batch { epoch: record.epoch, first: record.first, count: 0, lines: Vec::new() }),
                Some(batch) if record.follows(batch) => batch,
                Some(_) => {
                    self.head = Some(record);
                    break;
                }
            };
            let facts_left = u64::from(facts_max - batch.count);
            let bytes_left = bytes_max.saturating_sub(batch.lines.len());
            let whole = record.count <= facts_left && record.lines.len() <= bytes_left;
            if !whole && batch.count > 0 {
                self.head = Some(record);
                break;
            }
            let facts = if whole { record.count } else { record.fitting(facts_left, bytes_left) };
            batch.lines.extend(record.take(facts));
            batch.count += u32::try_from(facts).expect("a batch has at most `facts_max` facts");
            if !whole {
                self.head = Some(record).filter(|record| record.count > 0);
                break;
            }
        }
        if let Some(batch) = &batch {
            let end = self.head.as_ref().map_or(self.place, |head| head.start);
            self.given.push_back(Given { last: order(batch.last()), end });
        }
        Ok(batch)
    }

    /// Takes it that the log has everything up to `last`: segments that hold nothing else are deleted.
    ///
    /// The newest segment with a fact is always kept, for it tells a start without the log which epoch was the last.
    pub fn ack(&mut self, last: Epoch) {
        let mut end = None;
        while self.given.front().is_some_and(|given| given.last <= order(last)) {
            end = self.given.pop_front().map(|given| given.end);
        }
        if let Some(end) = end {
            self.release(end);
        }
    }

    /// Waits until `facts` or `bytes` more than were read are there, for `timeout` at most.
    ///
    /// `bytes` counts records as they rest. Call it when [`Reader::next_batch`] has given all there was.
    pub fn wait(&self, facts: u64, bytes: u64, timeout: Duration) -> Wake {
        let wanted = self.place.before.plus(Count { facts, bytes });
        let mut state = self.shared.wait_while(timeout, |state| {
            let waits = state.stop == Stop::No && !state.written.reaches(wanted);
            state.wanted = waits.then_some(wanted);
            waits
        });
        state.wanted = None;
        match state.stop {
            _ if state.written.reaches(wanted) => Wake::Ready,
            Stop::No => Wake::TimedOut,
            Stop::Drained | Stop::Now => Wake::Stopping,
        }
    }

    /// Waits for `delay`, or until the reader is asked to end at once; says how urgently it is asked to end.
    pub(crate) fn pause(&self, delay: Duration) -> Stop {
        self.shared.wait_while(delay, |state| state.stop < Stop::Now).stop
    }

    /// How urgently the reader is asked to come to an end.
    pub(crate) fn stop(&self) -> Stop {
        self.shared.state().stop
    }

    pub(crate) fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// The epoch that has begun in this life of the spool.
    pub(crate) fn begun(&self) -> Option<u64> {
        self.shared.state().begun
    }

    /// The next record that is not behind `after`, or what is left of it.
    fn next_record(&mut self) -> Result<Option<Record>, SpoolError> {
        if let Some(head) = self.head.take() {
            return Ok(Some(head));
        }
        while let Some(mut record) = self.read_record()? {
            let known = match self.after {
                Some((epoch, last)) if record.epoch == epoch => (last + 1).saturating_sub(record.first),
                Some((epoch, _)) if record.epoch < epoch => record.count,
                _ => 0,
            };
            if known < record.count {
                record.take(known);
                return Ok(Some(record));
            }
            // Only the beginning of a spool is skipped, and nothing that was given out lies before it.
            if self.given.is_empty() {
                self.release(self.place);
            }
        }
        Ok(None)
    }

    fn read_record(&mut self) -> Result<Option<Record>, SpoolError> {
        let available = self.seek();
        if available == 0 {
            return Ok(None);
        }
        let start = self.place;
        let payload = match self.payload(available) {
            Ok(payload) => payload,
            Err(error) => return Err(SpoolError::io(&start.segment.path(&self.shared.dir))(error)),
        };
        let record = payload.and_then(|lines| {
            let (epoch, count) = (start.segment.epoch, segment::count_lines(&lines));
            Some(Record { epoch, first: segment::first_number(&lines)?, count, lines, start })
        });
        let damaged = || SpoolError::Damaged { file: start.segment.path(&self.shared.dir), offset: start.offset };
        let record = record.ok_or_else(damaged)?;
        let bytes = (HEAD_BYTES + record.lines.len()) as u64;
        self.place.offset += bytes;
        self.place.before = start.before.plus(Count { facts: record.count, bytes });
        Ok(Some(record))
    }

    /// Goes on to the next segment where this one is read through; gives how many unread bytes the segment has.
    fn seek(&mut self) -> u64 {
        let (state, from) = (self.shared.state(), self.place.segment);
        for segment in state.segments.iter().skip_while(|segment| segment.name < from) {
            if segment.name != self.place.segment {
                (self.place.segment, self.place.offset, self.source) = (segment.name, 0, None);
            }
            if segment.bytes > self.place.offset {
                return segment.bytes - self.place.offset;
            }
        }
        0
    }

    /// The payload of the record at the reader's place; `None` where it is no record.
    fn payload(&mut self, available: u64) -> io::Result<Option<Vec<u8>>> {
        let available = usize::try_from(available).unwrap_or(usize::MAX);
        let source = match &mut self.source {
            Some(source) => source,
            None => self.source.insert(Source::open(&self.shared, self.place)?),
        };
        let Some(len) = segment::payload_len(source.peek(HEAD_BYTES, available)?) else { return Ok(None) };
        let payload = segment::payload(source.peek(HEAD_BYTES + len, available)?).map(<[u8]>::to_vec);
        source.at += HEAD_BYTES + len;
        Ok(payload)
    }

    fn release(&mut self, place: Place) {
        self.acked = place;
        for name in self.shared.release(place) {
            let path = name.path(&self.shared.dir);
            if let Err(error) = fs::remove_file(&path) {
                // It is read and skipped once more at the next start.
                tracing::warn!(error = &error as &dyn std::error::Error, path = %path.display(), "cannot delete segment");
            }
        }
    }
}

impl Shared {
    /// Takes all before `place` as acknowledged and gives the segments that nobody needs any more.
    fn release(&self, place: Place) -> Vec<Name> {
        let mut state = self.state();
        state.acked = place.before;
        let mut released = Vec::new();
        while let Some(oldest) = state.segments.front() {
            let done = oldest.name < place.segment || (oldest.name == place.segment && oldest.bytes == place.offset);
            if !done || state.segments.iter().skip(1).all(|later| later.bytes == 0) {
                break;
            }
            released.push(oldest.name);
            state.segments.pop_front();
        }
        released
    }
}

impl Source {
    fn open(shared: &Shared, place: Place) -> io::Result<Self> {
        let mut file = File::open(place.segment.path(&shared.dir))?;
        file.seek(SeekFrom::Start(place.offset))?;
        Ok(Self { file, buffer: Vec::new(), at: 0 })
    }

    /// The next `need` bytes, or fewer where fewer are `available` (never more: an append may be under way behind).
    fn peek(&mut self, need: usize, available: usize) -> io::Result<&[u8]> {
        if self.buffer.len() - self.at < need {
            self.buffer.drain(..self.at);
            self.at = 0;
            let want = need.max(READ_BYTES).min(available).saturating_sub(self.buffer.len());
            self.file.by_ref().take(want as u64).read_to_end(&mut self.buffer)?;
        }
        let end = self.buffer.len().min(self.at + need);
        Ok(&self.buffer[self.at..end])
    }
}

impl Record {
    fn follows(&self, batch: &Batch) -> bool {
        self.epoch == batch.epoch && self.first == batch.first + u64::from(batch.count)
    }

    /// How many lines from the beginning fit into a batch of these bounds; at least one.
    fn fitting(&self, facts_max: u64, bytes_max: usize) -> u64 {
        let ends = self.lines.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(place, _)| place + 1);
        let fitting = ends.take_while(|end| *end <= bytes_max).count() as u64;
        fitting.clamp(1, facts_max.max(1))
    }

    /// Takes `facts` lines from the beginning.
    fn take(&mut self, facts: u64) -> Vec<u8> {
        if facts == 0 {
            return Vec::new();
        }
        if facts == self.count {
            (self.first, self.count) = (self.first + facts, 0);
            return std::mem::take(&mut self.lines);
        }
        let mut end = 0;
        for _ in 0..facts {
            end += self.lines[end..].iter().position(|byte| *byte == b'\n').map_or(0, |place| place + 1);
        }
        (self.first, self.count) = (self.first + facts, self.count - facts);
        let rest = self.lines.split_off(end);
        std::mem::replace(&mut self.lines, rest)
    }
}
