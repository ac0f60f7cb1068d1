//! The archive: closed stretches of the log as files, each verified before it counts, and the log read on behind them.
//!
//! ```text
//! 00000000000000000001-00000000000000004096.frames.zst:
//! {"archive":1,"first":1,"last":4096,"frames":4096,"prev":"…","sum":"…"}
//! {"seq":1,"stored":1798000000123,"sent":1798000000120,"bytes":871}
//! …871 bytes, the frame as it was sealed…
//! {"seq":2,…
//! ```
//! A file is zstd over text. `sum` covers its other header fields and all that follows, `prev` is the sum of the file
//! before: a second hash chain, over the files, beside the chains of the writers, which are inside. A stretch goes to
//! a temporary name, to the disk, is read back and compared with the log, and only then gets its own name; so what has
//! the name can be trusted, and nothing may be trimmed from the log that has not got that far.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use waybill_schema::frame::{CHAIN_START, Frame};
use waybill_schema::id::WriterId;
use waybill_schema::secret::sum128;
use waybill_schema::time::Time;

use crate::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};

/// A stretch of so many bytes of frames is closed: what a reader holds in memory at once.
pub const STRETCH_BYTES_MAX: usize = 32 << 20;
/// Frames read from the log at once.
const READ_FRAMES_MAX: usize = 256;
/// Written once and kept for years: zstd's default level.
const ZSTD_LEVEL: i32 = 3;
const SUFFIX: &str = ".frames.zst";
const UNFINISHED: &str = "unfinished";

/// Why a stretch cannot be archived, or the archive not be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// A file or the folder cannot be worked with.
    #[error("cannot use {}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is not what was written.
    #[error("archive file {} is damaged: {what}", .path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// In what way.
        what: &'static str,
    },
    /// A file between two others is missing, or does not belong to this archive.
    #[error("archive file {} does not follow the one before, which ends at {after}", .path.display())]
    Astray {
        /// Which.
        path: PathBuf,
        /// The last sequence of the file before.
        after: Seq,
    },
    /// The log holds another frame than the archive at the archive's end: it has lost its tail and grown again.
    #[error("the log's frame {0} is not the archived one: the log has lost frames that the archive holds")]
    Diverged(Seq),
    /// The log cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl ArchiveError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

impl From<ArchiveError> for ReadError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Read(error) => error,
            other => Self(other.into()),
        }
    }
}

/// One file's place: its header line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// The format: 1.
    archive: u16,
    /// The sequence of its first frame.
    pub first: u64,
    /// The sequence of its last frame.
    pub last: u64,
    /// How many frames.
    pub frames: u64,
    /// The sum of the file before, 32 hex digits.
    pub prev: String,
    /// The sum of this file, 32 hex digits.
    pub sum: String,
}

impl Stretch {
    fn of(frames: &[StoredFrame], prev: &str, body: &[u8]) -> Option<Self> {
        let (first, last) = (frames.first()?.seq.0, frames.last()?.seq.0);
        let prev = prev.to_owned();
        let mut stretch = Self { archive: 1, first, last, frames: frames.len() as u64, prev, sum: String::new() };
        stretch.sum = stretch.sum_over(body);
        Some(stretch)
    }

    fn sum_over(&self, body: &[u8]) -> String {
        let head = format!("{}:{}:{}:{}\n", self.first, self.last, self.frames, self.prev);
        sum128(&[head.as_bytes(), body])
    }

    fn path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{:020}-{:020}{SUFFIX}", self.first, self.last))
    }
}

/// The line before a frame.
#[derive(Serialize, Deserialize)]
struct Entry {
    seq: u64,
    stored: i64,
    sent: i64,
    bytes: usize,
}

/// A folder of closed stretches, in order and without a gap between their files.
#[derive(Debug)]
pub struct Archive {
    dir: PathBuf,
    stretches: Vec<Stretch>,
    /// The stretch that was read last, unpacked.
    open: Option<(usize, Vec<StoredFrame>)>,
}

impl Archive {
    /// Opens the archive in `dir`, which is made where it is missing, and checks that its files follow each other.
    pub fn open(dir: &Path) -> Result<Self, ArchiveError> {
        fs::create_dir_all(dir).map_err(ArchiveError::io(dir))?;
        let mut paths = Vec::new();
        for entry in fs::read_dir(dir).map_err(ArchiveError::io(dir))? {
            let path = entry.map_err(ArchiveError::io(dir))?.path();
            let named = path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.ends_with(SUFFIX));
            paths.extend(named.then_some(path));
        }
        // The numbers in the names have one width.
        paths.sort();
        let mut archive = Self { dir: dir.to_owned(), stretches: Vec::new(), open: None };
        for path in paths {
            let stretch = header(&path)?;
            if stretch.prev != archive.sum() || stretch.first <= archive.last().0 || path != stretch.path(dir) {
                return Err(ArchiveError::Astray { path, after: archive.last() });
            }
            archive.stretches.push(stretch);
        }
        Ok(archive)
    }

    /// The sequence of the last archived frame; [`Seq::START`] in an empty archive.
    pub fn last(&self) -> Seq {
        self.stretches.last().map_or(Seq::START, |stretch| Seq(stretch.last))
    }

    /// The files, in order.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Closes the next stretch of `log`: its frames behind the archive's last one, to [`STRETCH_BYTES_MAX`] bytes or to
    /// `end`. `None` where the log holds fewer than `frames_min` of them.
    pub fn extend(&mut self, log: &mut dyn Log, end: Seq, frames_min: usize) -> Result<Option<&Stretch>, ArchiveError> {
        self.agrees_with(log)?;
        let frames = gather(log, self.last(), end)?;
        if frames.len() < frames_min.max(1) {
            return Ok(None);
        }
        let body = body_of(&frames);
        let Some(stretch) = Stretch::of(&frames, self.sum(), &body) else { return Ok(None) };
        let path = stretch.path(&self.dir);
        let unfinished = self.dir.join(UNFINISHED);
        write(&unfinished, &stretch, &body).map_err(ArchiveError::io(&unfinished))?;
        if read(&unfinished, &stretch)? != frames {
            return Err(ArchiveError::Damaged { path: unfinished, what: "it does not read back as it was written" });
        }
        fs::rename(&unfinished, &path).map_err(ArchiveError::io(&path))?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(ArchiveError::io(&self.dir))?;
        self.stretches.push(stretch);
        Ok(self.stretches.last())
    }

    /// At most `frames_max` archived frames behind `after`, in order; empty where all archived frames are before it.
    pub fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ArchiveError> {
        let index = self.stretches.partition_point(|stretch| stretch.last <= after.0);
        if index == self.stretches.len() {
            return Ok(Vec::new());
        }
        let frames = self.unpacked(index)?;
        let start = frames.partition_point(|frame| frame.seq <= after);
        Ok(frames[start..].iter().take(frames_max).cloned().collect())
    }

    /// Reads every file in full and checks it against its sum.
    pub fn verify(&self) -> Result<(), ArchiveError> {
        self.stretches.iter().try_for_each(|stretch| read(&stretch.path(&self.dir), stretch).map(drop))
    }

    fn unpacked(&mut self, index: usize) -> Result<&[StoredFrame], ArchiveError> {
        let opened = match self.open.take() {
            Some(opened) if opened.0 == index => opened,
            _ => (index, read(&self.stretches[index].path(&self.dir), &self.stretches[index])?),
        };
        Ok(&self.open.insert(opened).1)
    }

    fn sum(&self) -> &str {
        self.stretches.last().map_or(CHAIN_START, |stretch| &stretch.sum)
    }

    /// Whether the log still holds the last archived frame as it was archived, or holds nothing so old any more.
    fn agrees_with(&mut self, log: &mut dyn Log) -> Result<(), ArchiveError> {
        let last = self.last();
        if last == Seq::START {
            return Ok(());
        }
        let before = Seq(last.0 - 1);
        let archived = self.read(before, 1)?;
        match log.read(before, 1)?.first() {
            Some(frame) if frame.seq == last && archived.first() != Some(frame) => Err(ArchiveError::Diverged(last)),
            None if log.head()? < last => Err(ArchiveError::Diverged(last)),
            Some(_) | None => Ok(()),
        }
    }
}

/// The frames behind `after` up to `end`, as many as a stretch holds.
fn gather(log: &mut dyn Log, mut after: Seq, end: Seq) -> Result<Vec<StoredFrame>, ReadError> {
    let (mut frames, mut bytes) = (Vec::new(), 0);
    loop {
        let read = log.read(after, READ_FRAMES_MAX)?;
        let Some(newest) = read.last() else { return Ok(frames) };
        after = newest.seq;
        for frame in read {
            if frame.seq > end || bytes >= STRETCH_BYTES_MAX {
                return Ok(frames);
            }
            bytes += frame.bytes.len();
            frames.push(frame);
        }
    }
}

fn body_of(frames: &[StoredFrame]) -> Vec<u8> {
    let mut body = Vec::new();
    for frame in frames {
        let (stored, sent) = (frame.stored.0, frame.sent.0);
        let entry = Entry { seq: frame.seq.0, stored, sent, bytes: frame.bytes.len() };
        serde_json::to_writer(&mut body, &entry).expect("a vector takes every write");
        body.push(b'\n');
        body.extend_from_slice(&frame.bytes);
    }
    body
}

fn write(path: &Path, stretch: &Stretch, body: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut packer = zstd::stream::write::Encoder::new(file, ZSTD_LEVEL)?;
    packer.include_checksum(true)?;
    serde_json::to_writer(&mut packer, stretch)?;
    packer.write_all(b"\n")?;
    packer.write_all(body)?;
    packer.finish()?.sync_all()
}

fn unpack(path: &Path) -> Result<impl BufRead, ArchiveError> {
    let file = File::open(path).map_err(ArchiveError::io(path))?;
    Ok(BufReader::new(zstd::stream::read::Decoder::new(file).map_err(ArchiveError::io(path))?))
}

fn header_of(path: &Path, text: &mut impl BufRead) -> Result<Stretch, ArchiveError> {
    let damaged = |what| ArchiveError::Damaged { path: path.to_owned(), what };
    let mut line = Vec::new();
    text.read_until(b'\n', &mut line).map_err(|_| damaged("it cannot be unpacked"))?;
    let stretch: Stretch = serde_json::from_slice(&line).map_err(|_| damaged("it has no header line"))?;
    if stretch.archive != 1 {
        return Err(damaged("a newer program wrote it"));
    }
    Ok(stretch)
}

/// The header line of the file at `path`.
fn header(path: &Path) -> Result<Stretch, ArchiveError> {
    header_of(path, &mut unpack(path)?)
}

/// The frames in the file at `path`, which must be that of `stretch`.
fn read(path: &Path, stretch: &Stretch) -> Result<Vec<StoredFrame>, ArchiveError> {
    let damaged = |what| ArchiveError::Damaged { path: path.to_owned(), what };
    let mut text = unpack(path)?;
    if header_of(path, &mut text)? != *stretch {
        return Err(damaged("its header is another one"));
    }
    let mut body = Vec::new();
    text.read_to_end(&mut body).map_err(|_| damaged("it cannot be unpacked"))?;
    if stretch.sum_over(&body) != stretch.sum {
        return Err(damaged("it does not match its sum"));
    }
    frames_of(&body)
        .filter(|frames| frames.len() as u64 == stretch.frames)
        .ok_or_else(|| damaged("its frames are torn"))
}

fn frames_of(mut body: &[u8]) -> Option<Vec<StoredFrame>> {
    let mut frames = Vec::new();
    while !body.is_empty() {
        let end = memchr::memchr(b'\n', body)?;
        let entry: Entry = serde_json::from_slice(&body[..end]).ok()?;
        let (bytes, rest) = body[end + 1..].split_at_checked(entry.bytes)?;
        let (stored, sent) = (Time(entry.stored), Time(entry.sent));
        frames.push(StoredFrame { seq: Seq(entry.seq), stored, sent, bytes: bytes.to_vec() });
        body = rest;
    }
    Some(frames)
}

/// Archive and log read as one: what the archive holds comes from it, and the rest from the log.
pub struct Archived {
    archive: Archive,
    log: Box<dyn Log>,
}

impl Archived {
    /// Puts `archive` before `log`; fails where the two do not belong together.
    pub fn new(mut archive: Archive, mut log: Box<dyn Log>) -> Result<Self, ArchiveError> {
        archive.agrees_with(&mut *log)?;
        Ok(Self { archive, log })
    }
}

impl Log for Archived {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        self.log.append(frames, expected, sent)
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        self.log.last(writer)
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        match after < self.archive.last() {
            true => Ok(self.archive.read(after, frames_max)?),
            false => self.log.read(after, frames_max),
        }
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        let (mut found, mut at) = (Vec::new(), after);
        while at < self.archive.last() && found.len() < frames_max {
            let frames = self.archive.read(at, READ_FRAMES_MAX)?;
            at = frames.last().map_or(self.archive.last(), |frame| frame.seq);
            found.extend(frames.into_iter().filter(|frame| writes(writer, frame)));
        }
        found.truncate(frames_max);
        if found.len() < frames_max {
            found.extend(self.log.read_of(writer, at.max(self.archive.last()), frames_max - found.len())?);
        }
        Ok(found)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        Ok(self.log.head()?.max(self.archive.last()))
    }
}

/// Whether the frame names `writer`; what is no frame names nobody.
fn writes(writer: &WriterId, frame: &StoredFrame) -> bool {
    Frame::header_of(&frame.bytes).is_ok_and(|header| header.writer == *writer)
}
