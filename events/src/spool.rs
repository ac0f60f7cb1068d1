//! The spool: the local, ordered, checksummed store of one writer's facts until the log has acknowledged them, and for
//! a while longer.
//!
//! A fact is numbered here, once, and `write()`n at once: the page cache survives the end of the process, so what
//! [`Spool::append`] has returned is not lost to a SIGKILL. (A power cut may cost what was not synced; [`Spool::sync`].)
//! What is recorded together is one record and is found again whole or not at all.
//!
//! A failed append costs its facts, not the spool: their numbers stay used, and the next append that succeeds begins
//! with a `dropped` fact that names them. So numbers are dense within an epoch, except where a fact says so.
//!
//! What the log has acknowledged stays for the retention, because a log may lose its end; the mark beside the segments
//! names the last acknowledged fact (ADR 24).

mod mark;
mod orphans;
mod reader;
mod segment;
mod state;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use waybill_schema::event::{Dropped, Epoch, Event};
use waybill_schema::frame::{Body, renumber};
use waybill_schema::time::Time;

use crate::log::Last;
use mark::MarkFile;
pub(crate) use orphans::is_held;
pub use orphans::{AdoptError, FindError, Orphans};
pub use reader::{Batch, Missing, Reader, Wake};
use segment::{Name, Rest};
pub use state::Waiting;
use state::{Count, Segment, Shared, State};
pub(crate) use state::{Gauge, Stop, Stopper};

/// A segment that has reached this many bytes is closed and another one begun.
pub const SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// At most this many bytes wait for the log's acknowledgement.
pub const SPOOL_BYTES_MAX: u64 = 512 << 20;
/// Facts stay at least this long after their acknowledgement (EVENTLOG.md, E.8) …
pub const RETENTION: Duration = Duration::from_secs(600);
/// … unless more than this many bytes of them are held.
pub const RETENTION_BYTES_MAX: u64 = 256 << 20;
/// No record is larger: a length beyond it is damage.
pub const RECORD_BYTES_MAX: usize = 16 << 20;

const LOCK_FILE: &str = "spool.lock";

/// The bounds of a spool.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// See [`SEGMENT_BYTES_MAX`].
    pub segment_bytes_max: u64,
    /// See [`SPOOL_BYTES_MAX`].
    pub spool_bytes_max: u64,
    /// See [`RETENTION`]; shorter where the disk is full, zero for a log that does not lose what it has acknowledged.
    pub retention: Duration,
    /// See [`RETENTION_BYTES_MAX`].
    pub retention_bytes_max: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes_max: SEGMENT_BYTES_MAX,
            spool_bytes_max: SPOOL_BYTES_MAX,
            retention: RETENTION,
            retention_bytes_max: RETENTION_BYTES_MAX,
        }
    }
}

/// What an opened spool held already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// The last epoch with a fact in it, and that fact's number; `None` in a new spool. Known even where the log has
    /// acknowledged all.
    pub last: Option<Epoch>,
    /// How many facts are held, acknowledged ones included.
    pub facts: u64,
    /// How many bytes they take.
    pub bytes: u64,
    /// How many bytes of a torn last record were cut off.
    pub torn_bytes: u64,
}

/// Why a spool cannot be opened or given an epoch.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// Another process has it.
    #[error("spool {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// A record is bad although good ones follow, or in a segment that is not the last: a hand must decide.
    #[error("spool segment {} is damaged at byte {offset}", .file.display())]
    Damaged {
        /// The segment.
        file: PathBuf,
        /// Where the bad record begins.
        offset: u64,
    },
    /// The epoch is not greater than one that the spool has seen.
    #[error("epoch {epoch} does not follow epoch {last} of the spool")]
    Epoch {
        /// The epoch asked for.
        epoch: u64,
        /// The spool's last.
        last: u64,
    },
    /// A file or the directory cannot be worked with.
    #[error("cannot use {}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl SpoolError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Why facts were not recorded. Except for [`AppendError::NoEpoch`] their numbers are used up and will be declared.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// [`Spool::begin`] was not called.
    #[error("no epoch has begun")]
    NoEpoch,
    /// Too much waits for the log.
    #[error("spool is full: {held} bytes wait for the log")]
    Full {
        /// How many bytes wait.
        held: u64,
    },
    /// The facts are larger than a record can be.
    #[error("record of {bytes} bytes is larger than {RECORD_BYTES_MAX}")]
    TooLarge {
        /// How large they are.
        bytes: usize,
    },
    /// The disk refused.
    #[error("spool write failed")]
    Write(#[source] io::Error),
}

impl AppendError {
    /// The reason that a `dropped` fact gives: one of a few fixed texts.
    fn reason(&self) -> &'static str {
        match self {
            Self::NoEpoch => "no epoch has begun",
            Self::Full { .. } => "spool is full",
            Self::TooLarge { .. } => "record too large",
            Self::Write(_) => "spool write failed",
        }
    }
}

/// The writing half: appends facts. One [`Reader`] takes them out again.
#[derive(Debug)]
pub struct Spool {
    shared: Arc<Shared>,
    /// The greatest epoch that a fact was recorded in, or that has begun.
    epoch_last: u64,
    current: Option<Current>,
    lost: Option<Dropped>,
    buffer: Vec<u8>,
}

/// The segment that is written to, and the last number given out.
#[derive(Debug)]
struct Current {
    name: Name,
    file: File,
    /// The end of the last whole record.
    bytes: u64,
    /// Whether a failed write left bytes behind that could not be cut off yet.
    torn: bool,
    number: u64,
}

impl Spool {
    /// Opens the spool in `dir`, which is made where it is missing: locks it and cuts off a torn last record.
    pub fn open(dir: &Path, options: Options) -> Result<(Self, Reader, Recovered), SpoolError> {
        fs::create_dir_all(dir).map_err(SpoolError::io(dir))?;
        let lock = lock(dir)?;
        let mut state = State::default();
        let mut recovered = Recovered { last: None, facts: 0, bytes: 0, torn_bytes: 0 };
        let names = segment_names(dir).map_err(SpoolError::io(dir))?;
        let newest = names.last().copied().unwrap_or_default();
        for name in names {
            let before = Count { facts: recovered.facts, bytes: recovered.bytes };
            let bytes = recover(dir, name, newest, &mut recovered)?;
            state.segments.extend(bytes.map(|bytes| Segment::found(name, before, bytes)));
        }
        state.written = Count { facts: recovered.facts, bytes: recovered.bytes };
        let mark = MarkFile::open(dir);
        let places = [recovered.last, mark.last().map(Last::epoch)];
        recovered.last = places.into_iter().flatten().max_by_key(|place| (place.epoch, place.last));
        let shared = Arc::new(Shared::new(dir, lock, options, state));
        let reader = Reader::new(shared.clone(), mark)?;
        let epoch_last = recovered.last.map_or(0, |last| last.epoch);
        Ok((Self { shared, epoch_last, current: None, lost: None, buffer: Vec::new() }, reader, recovered))
    }

    /// Begins `epoch`, which must be greater than all before in the spool and in the log; its first number is 1.
    pub fn begin(&mut self, epoch: u64) -> Result<(), SpoolError> {
        if epoch <= self.epoch_last {
            return Err(SpoolError::Epoch { epoch, last: self.epoch_last });
        }
        let name = Name { epoch, first: 1 };
        let current = self.create(name, 0).map_err(SpoolError::io(&name.path(&self.shared.dir)))?;
        self.shared.state().begun = Some(epoch);
        (self.epoch_last, self.current, self.lost) = (epoch, Some(current), None);
        Ok(())
    }

    /// Numbers the facts in `bodies` (at least one) and records them together, with one `write()`: whole or not at all.
    ///
    /// Gives their numbers. After an error the spool is as usable as before, and the numbers that the facts would
    /// have had are declared `dropped` by the next append that succeeds. What the log has lost for good is declared
    /// behind the facts, which keeps their numbers what the caller expects.
    pub fn append(&mut self, bodies: &[Body]) -> Result<RangeInclusive<u64>, AppendError> {
        let made = bodies.first().expect("an append has at least one fact").made();
        let number = self.current.as_ref().ok_or(AppendError::NoEpoch)?.number;
        let gone = std::mem::take(&mut self.shared.state().gone);
        let declared = u64::from(self.lost.is_some());
        let (first, last) = (number + declared + 1, number + declared + bodies.len() as u64);
        self.encode(number + 1, bodies, &gone, made);
        let end = last + gone.len() as u64;
        let written = self.write(number + 1..=end, made, self.shared.options.spool_bytes_max);
        if let Err(error) = written {
            self.shared.state().gone.splice(..0, gone);
            // One number for each fact: a declaration that was not written needs none.
            let last = number + bodies.len() as u64;
            self.take_number(last);
            self.lose(number + 1, last, &error);
            return Err(error);
        }
        self.lost = None;
        Ok(first..=last)
    }

    /// Records at once what is still to be declared `dropped`, beyond the spool's bound if need be: for a clean stop,
    /// after which no append would do it. Does nothing where nothing is to be declared.
    pub fn declare_lost(&mut self, made: Time) -> Result<(), AppendError> {
        let Some(number) = self.current.as_ref().map(|current| current.number) else { return Ok(()) };
        let gone = std::mem::take(&mut self.shared.state().gone);
        let facts = u64::from(self.lost.is_some()) + gone.len() as u64;
        if facts == 0 {
            return Ok(());
        }
        self.encode(number + 1, &[], &gone, made);
        if let Err(error) = self.write(number + 1..=number + facts, made, u64::MAX) {
            self.shared.state().gone.splice(..0, gone);
            return Err(error);
        }
        self.lost = None;
        Ok(())
    }

    /// Records facts of an earlier epoch once more, beyond the spool's bound if need be. After an error no number is used.
    fn append_again(&mut self, lines: &[&[u8]], made: Time) -> Result<(), AppendError> {
        let number = self.current.as_ref().ok_or(AppendError::NoEpoch)?.number;
        segment::start_record(&mut self.buffer);
        for (number, line) in (number + 1..).zip(lines) {
            renumber(line, number, &mut self.buffer).expect("a line whose head was read is well formed");
        }
        self.write(number + 1..=number + lines.len() as u64, made, u64::MAX)
    }

    /// The last number given out in this epoch; 0 before the first.
    pub fn last_number(&self) -> u64 {
        self.current.as_ref().map_or(0, |current| current.number)
    }

    /// Waits until the disk has every fact appended so far. To wait without holding the spool, see [`Spool::syncer`].
    pub fn sync(&self) -> io::Result<()> {
        self.syncer().map_or(Ok(()), |syncer| syncer.sync())
    }

    /// What syncs the facts appended so far, also those in segments that were closed since: take it under the lock of
    /// the append, and wait outside that lock. `None` before an epoch has begun.
    pub fn syncer(&self) -> Option<Syncer> {
        self.current.as_ref().map(|current| Syncer { shared: self.shared.clone(), upto: current.name })
    }

    fn encode(&mut self, number: u64, bodies: &[Body], gone: &[Dropped], made: Time) {
        segment::start_record(&mut self.buffer);
        let declare = |dropped: &Dropped| Body::of(&Event::Dropped(dropped.clone()), made);
        let (before, after) = (self.lost.as_ref().map(declare), gone.iter().map(declare).collect::<Vec<_>>());
        for (number, body) in (number..).zip(before.iter().chain(bodies).chain(&after)) {
            body.write_line(number, &mut self.buffer);
        }
    }

    /// Writes the record in the buffer, which holds the facts `numbers`, unless more than `bytes_max` would wait.
    fn write(&mut self, numbers: RangeInclusive<u64>, made: Time, bytes_max: u64) -> Result<(), AppendError> {
        let payload = self.buffer.len() - segment::HEAD_BYTES;
        if payload > RECORD_BYTES_MAX {
            return Err(AppendError::TooLarge { bytes: payload });
        }
        let bytes = self.buffer.len() as u64;
        let held = self.shared.state().held_bytes();
        if held + bytes > bytes_max {
            return Err(AppendError::Full { held });
        }
        segment::finish_record(&mut self.buffer);
        self.put(*numbers.start()).map_err(AppendError::Write)?;
        self.take_number(*numbers.end());
        self.shared.grow(Count { facts: numbers.end() + 1 - numbers.start(), bytes }, made);
        Ok(())
    }

    /// Puts the record in the buffer on the disk. New facts are worth more than copies of what the log has.
    fn put(&mut self, first: u64) -> io::Result<()> {
        match self.try_to_put(first) {
            Err(error) if is_full(&error) && self.make_room() => self.try_to_put(first),
            put => put,
        }
    }

    fn try_to_put(&mut self, first: u64) -> io::Result<()> {
        self.rotate(first, self.buffer.len() as u64)?;
        self.current.as_mut().map_or(Ok(()), |current| current.write(&self.buffer))
    }

    /// Removes what is held only in case that the log loses it; says whether there was anything.
    fn make_room(&self) -> bool {
        let spared = self.shared.spare();
        let removed = spared.iter().filter(|name| fs::remove_file(name.path(&self.shared.dir)).is_ok()).count();
        if removed > 0 {
            tracing::warn!(removed, "the disk is full: acknowledged segments are let go before their time");
        }
        removed > 0
    }

    fn take_number(&mut self, number: u64) {
        if let Some(current) = &mut self.current {
            current.number = number;
        }
    }

    /// Goes on to a new segment where the current one has no room for a record of `bytes` bytes.
    fn rotate(&mut self, first: u64, bytes: u64) -> io::Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        if current.bytes == 0 || current.bytes + bytes <= self.shared.options.segment_bytes_max {
            return Ok(());
        }
        let (name, number) = (Name { epoch: current.name.epoch, first }, current.number);
        self.current = Some(self.create(name, number)?);
        Ok(())
    }

    fn create(&self, name: Name, number: u64) -> io::Result<Current> {
        // A torn end would look like damage once its segment is no longer the newest.
        if let Some(current) = self.current.as_ref().filter(|current| current.torn) {
            current.file.set_len(current.bytes)?;
        }
        let path = name.path(&self.shared.dir);
        let file = OpenOptions::new().append(true).create_new(true).open(path)?;
        self.shared.add_segment(name);
        Ok(Current { name, file, bytes: 0, torn: false, number })
    }

    fn lose(&mut self, first: u64, last: u64, error: &AppendError) {
        let lost = self.lost.get_or_insert_with(|| Dropped { first, last, reason: error.reason().to_owned() });
        lost.last = last;
        if lost.first == first {
            tracing::error!(error = error as &dyn std::error::Error, first, "spool gives up facts");
        }
    }
}

impl Current {
    fn write(&mut self, record: &[u8]) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.bytes)?;
            self.torn = false;
        }
        if let Err(error) = self.file.write_all(record) {
            self.torn = self.file.set_len(self.bytes).is_err();
            return Err(error);
        }
        self.bytes += record.len() as u64;
        Ok(())
    }
}

/// Brings facts to the disk: its segment, and those before it that no sync has reached since they were closed.
#[derive(Clone, Debug)]
pub struct Syncer {
    shared: Arc<Shared>,
    upto: Name,
}

impl Syncer {
    /// Waits until the disk has every fact that was in these segments at the call.
    pub fn sync(&self) -> io::Result<()> {
        let unsynced = self.shared.unsynced(self.upto);
        for name in &unsynced.segments {
            match File::open(name.path(&self.shared.dir)) {
                Ok(file) => file.sync_data()?,
                // It was acknowledged and has been let go.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        if unsynced.unnamed {
            File::open(&self.shared.dir)?.sync_all()?;
        }
        self.shared.synced(&unsynced);
        Ok(())
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn lock(dir: &Path) -> Result<File, SpoolError> {
    let path = dir.join(LOCK_FILE);
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(SpoolError::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(SpoolError::Locked(dir.to_owned())),
        Err(TryLockError::Error(source)) => Err(SpoolError::Io { path, source }),
    }
}

fn segment_names(dir: &Path) -> io::Result<Vec<Name>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.extend(entry?.file_name().to_str().and_then(Name::parse));
    }
    names.sort();
    Ok(names)
}

/// Takes up one segment: cuts off a torn end where it is the newest, removes it where it holds nothing, and gives how
/// many bytes it has.
fn recover(dir: &Path, name: Name, newest: Name, found: &mut Recovered) -> Result<Option<u64>, SpoolError> {
    let path = name.path(dir);
    let io_error = || SpoolError::io(&path);
    let scan = segment::scan(&path).map_err(io_error())?;
    match scan.rest {
        Rest::Nothing => {}
        Rest::Torn(bytes) if name == newest => {
            let file = OpenOptions::new().write(true).open(&path).map_err(io_error())?;
            file.set_len(scan.bytes).map_err(io_error())?;
            found.torn_bytes += bytes;
        }
        Rest::Torn(_) | Rest::Damaged => return Err(SpoolError::Damaged { file: path, offset: scan.bytes }),
    }
    if scan.bytes == 0 {
        fs::remove_file(&path).map_err(io_error())?;
        return Ok(None);
    }
    let number = scan.last.ok_or_else(|| SpoolError::Damaged { file: path.clone(), offset: 0 })?;
    found.last = Some(Epoch { epoch: name.epoch, last: number });
    found.facts += scan.facts;
    found.bytes += scan.bytes;
    Ok(Some(scan.bytes))
}
