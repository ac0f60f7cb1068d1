//! The reading half of a spool: follows the segments, lets go of what the log has acknowledged long enough ago, and goes
//! back where the log lost it.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::time::Duration;

use waybill_schema::event::{Dropped, Epoch, Event};
use waybill_schema::frame::Line;
use waybill_schema::time::Time;

use crate::log::Last;

use super::mark::MarkFile;
use super::segment::{self, HEAD_BYTES, Name};
use super::{Count, Gauge, Shared, SpoolError, Stop, Stopper, Waiting};

/// The reason that is given for facts which neither the log nor the spool has any more.
const GONE: &str = "the log lost facts that are no longer held";

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

/// Facts that neither the log nor the spool has any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The last fact before them; `None` where the log has none of the writer.
    pub after: Option<Epoch>,
    /// The first fact behind them, as its epoch and number; `None` where the spool holds none.
    pub before: Option<Epoch>,
}

/// Takes facts out of a spool in order; usable on another thread than the [`super::Spool`].
///
/// What [`Reader::next_batch`] has given stays on disk until [`Reader::ack`] and the retention behind it;
/// [`Reader::resume_after`] gives it again.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    /// What the log has anyway: not given out.
    after: Option<(u64, u64)>,
    place: Place,
    source: Option<Source>,
    head: Option<Record>,
    given: VecDeque<Given>,
    mark: MarkFile,
}

/// A border between records, and all that lies before it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) segment: Name,
    pub(super) offset: u64,
    pub(super) before: Count,
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
pub(super) struct Record {
    pub(super) epoch: u64,
    pub(super) first: u64,
    count: u64,
    /// When its first fact was made.
    pub(super) made: Time,
    lines: Vec<u8>,
    start: Place,
}

/// A batch that was given out: once it is acknowledged, all before `end` is.
#[derive(Debug)]
struct Given {
    last: (u64, u64),
    end: Place,
    /// When its first fact was made.
    made: Time,
}

fn order(epoch: Epoch) -> (u64, u64) {
    (epoch.epoch, epoch.last)
}

impl Reader {
    /// Stands behind what `mark` says that the log has.
    pub(super) fn new(shared: Arc<Shared>, mark: MarkFile) -> Result<Self, SpoolError> {
        let (place, given) = Default::default();
        let mut reader = Self { shared, after: None, place, source: None, head: None, given, mark };
        reader.resume_after(reader.mark().map(Last::epoch));
        reader.head = reader.next_record()?;
        if let Some(head) = &reader.head {
            reader.shared.found_oldest(head.made);
        }
        Ok(reader)
    }

    /// Another reader, of all that is held: with [`Reader::next_record`] alone it lets go of nothing.
    pub(super) fn walk(&self) -> Self {
        let (place, mark, given) = Default::default();
        Self { shared: self.shared.clone(), after: None, place, source: None, head: None, given, mark }
    }

    /// The last frame that the log has acknowledged, in this life or, as far as could be noted, an earlier one.
    pub fn mark(&self) -> Option<&Last> {
        self.mark.last()
    }

    /// Goes back to the oldest fact held that is behind `last`, which is what the log has; `None` for nothing.
    pub fn resume_after(&mut self, last: Option<Epoch>) {
        self.after = last.map(order);
        self.place = self.shared.go_back(self.after);
        (self.source, self.head) = (None, None);
        self.given.clear();
    }

    /// As [`Reader::resume_after`], where the log has lost what it had behind `last`; says what cannot be given again.
    ///
    /// The part of it that lies in the epoch under way will be declared by the next append.
    pub(crate) fn go_back(&mut self, last: Option<Epoch>) -> Result<Option<Missing>, SpoolError> {
        self.resume_after(last);
        let next = last.map_or_else(Name::default, |last| Name { epoch: last.epoch, first: last.last + 1 });
        let oldest = self.shared.state().segments.front().map(|segment| segment.name);
        if oldest.is_some_and(|oldest| oldest <= next) || self.begins_after(last)? {
            return Ok(None);
        }
        let before = oldest.map(|oldest| Epoch { epoch: oldest.epoch, last: oldest.first });
        self.give_up(last, before);
        Ok(Some(Missing { after: last, before }))
    }

    /// Whether the next fact is the `started` that follows `last`.
    fn begins_after(&mut self, last: Option<Epoch>) -> Result<bool, SpoolError> {
        self.head = self.next_record()?;
        let line = self.head.as_ref().and_then(|record| record.lines.split(|byte| *byte == b'\n').next());
        let event = line.and_then(|line| Line::parse(line).ok()).map(|line| line.event);
        Ok(matches!(event, Some(Event::Started(started)) if started.previous == last))
    }

    fn give_up(&self, last: Option<Epoch>, before: Option<Epoch>) {
        let mut state = self.shared.state();
        let Some(before) = before.filter(|before| state.begun == Some(before.epoch)) else { return };
        let first = last.filter(|last| last.epoch == before.epoch).map_or(1, |last| last.last + 1);
        if first < before.last {
            state.gone.push(Dropped { first, last: before.last - 1, reason: GONE.to_owned() });
        }
    }

    /// The next facts, at most `facts_max` and at most `bytes_max` of lines, or one fact where that is larger.
    ///
    /// `None` where all has been given out. Records stay whole, except one that is larger than a batch can be.
    pub fn next_batch(&mut self, facts_max: u32, bytes_max: usize) -> Result<Option<Batch>, SpoolError> {
        let mut batch: Option<Batch> = None;
        let mut made = Time::default();
        while let Some(mut record) = self.next_record()? {
            let batch = match &mut batch {
                None => {
                    made = record.made;
                    // It mostly ends with what was read ahead.
                    let lines = Vec::with_capacity(bytes_max.min(record.lines.len() + self.read_ahead()));
                    batch.insert(Batch { epoch: record.epoch, first: record.first, count: 0, lines })
                }
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
            if self.given.is_empty() {
                self.shared.found_oldest(made);
            }
            self.given.push_back(Given { last: order(batch.last()), end, made });
        }
        Ok(batch)
    }

    /// Takes it that the log has everything up to its frame `last`; segments that hold nothing else are deleted when
    /// their retention is over.
    pub fn ack(&mut self, last: &Last, now: Time) {
        let mut end = None;
        while self.given.front().is_some_and(|given| given.last <= order(last.epoch())) {
            end = self.given.pop_front().map(|given| given.end);
        }
        if let Some(end) = end {
            let oldest = self.given.front().map(|given| given.made).or(self.head.as_ref().map(|head| head.made));
            self.shared.acknowledge(end.before, oldest);
        }
        self.mark.set(last);
        for name in self.shared.expire(now) {
            self.remove(name);
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

    /// What waits for the log now.
    pub fn waiting(&self) -> Waiting {
        self.gauge().waiting()
    }

    pub(crate) fn gauge(&self) -> Gauge {
        Gauge(Arc::downgrade(&self.shared))
    }

    /// The epoch that has begun in this life of the spool.
    pub(crate) fn begun(&self) -> Option<u64> {
        self.shared.state().begun
    }

    /// The next record that is not behind `after`, or what is left of it.
    pub(super) fn next_record(&mut self) -> Result<Option<Record>, SpoolError> {
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
                self.shared.acknowledge(self.place.before, None);
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
            let first = segment::first_head(&lines)?;
            Some(Record { epoch, first: first.number, count, made: first.made, lines, start })
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

    /// How many bytes were read and not given out.
    fn read_ahead(&self) -> usize {
        self.source.as_ref().map_or(0, |source| source.buffer.len() - source.at)
    }

    fn remove(&self, name: Name) {
        let path = name.path(&self.shared.dir);
        if let Err(error) = fs::remove_file(&path) {
            // It is read and skipped once more at the next start.
            tracing::warn!(error = &error as &dyn std::error::Error, path = %path.display(), "cannot delete segment");
        }
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
    /// Its lines, without their ends.
    pub(super) fn each_line(&self) -> impl Iterator<Item = &[u8]> {
        self.lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
    }

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
