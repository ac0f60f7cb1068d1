//! The embedded log: frames in the one SQLite file that also holds what is folded from them.
//!
//! Appending and folding are one transaction, so rows never know more or less than the log beside them.
//!
//! The file has no clock but its writer's, so a frame is stored when it was sent, and a fact happened when it was made:
//! the state that the writer folds as it records stands at the same times as every fold of the log.
//!
//! Frames of more than [`PLAIN_BYTES_MAX`] rest compressed: their facts repeat each other's names, so they shrink to a
//! tenth, and with them what is written to the WAL, moved into the file and read at a start (ADR 28).
//!
//! WAL with `synchronous = NORMAL`: a commit survives the end of the process at any moment. A power cut may cost the
//! last commits; frames that the spool still holds are then sent again, and those it has let go are a break in the
//! writer's chain that is noticed.

use std::path::Path;
use std::time::Duration;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::WriterId;
use waybill_schema::store::SQLITE_MIGRATIONS;
use waybill_schema::time::Time;
use zstd::bulk::Compressor;

use crate::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};

/// The size of a page of a new file, in bytes. Every request of a commit touches another page of the index of sessions,
/// and a page is written whole, first into the write-ahead log and then into the file: larger ones cost more CPU there.
/// Smaller ones cost more where rows come one after the other.
const PAGE_BYTES: u32 = 8 << 10;
/// Pages in the write-ahead log (64 MiB of them) after which they are moved into the file, which waits for the disk.
const WAL_PAGES: u32 = 8 << 10;
/// A frame of at most so many bytes rests as its own text, for people with nothing but SQLite.
pub const PLAIN_BYTES_MAX: usize = 4 << 10;
/// What a compressed frame begins with (RFC 8878, section 3.1.1); a frame's own text begins with `{`.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The fastest of zstd's usual levels: at level 3 frames are hardly smaller and cost twice as much.
const ZSTD_LEVEL: i32 = 1;
/// No frame is larger when it is unpacked: one fact fills a record of the spool at most.
const FRAME_BYTES_MAX: usize = 2 * crate::spool::RECORD_BYTES_MAX;
/// How long a statement waits for another process that holds the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Folds frames into rows, inside the transaction that appends them.
///
/// Where that transaction fails afterwards, the same frames come again: what a fold keeps outside the transaction
/// must bear this.
pub type Fold = Box<dyn FnMut(&Transaction<'_>, &[StoredFrame]) -> Result<(), rusqlite::Error> + Send>;

/// Why the file cannot be opened as a log.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// SQLite cannot use it.
    #[error("cannot open the log's file")]
    Sqlite(#[from] rusqlite::Error),
    /// Its tables cannot be brought to this program's version.
    #[error("cannot migrate the log's file")]
    Migrate(#[from] refinery::Error),
    /// There is no memory to compress with.
    #[error("cannot make ready to compress frames")]
    Compress(#[source] std::io::Error),
}

/// The log in a SQLite file.
pub struct SqliteLog {
    connection: Connection,
    fold: Fold,
    packer: Packer,
}

/// Compresses into one buffer, which is large and is used again.
struct Packer {
    compressor: Compressor<'static>,
    packed: Vec<u8>,
}

impl SqliteLog {
    /// Opens the log at `path`, made where it is missing and migrated where it is older. One process does this.
    pub fn open(path: &Path, fold: Fold) -> Result<Self, OpenError> {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "page_size", PAGE_BYTES)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "wal_autocheckpoint", WAL_PAGES)?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        migrate(&mut connection)?;
        Self::over(connection, fold)
    }

    /// Opens the log at `path` for reading beside the process that writes it; an append is refused.
    pub fn open_read_only(path: &Path) -> Result<Self, OpenError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        Self::over(connection, Box::new(|_, _| Ok(())))
    }

    fn over(connection: Connection, fold: Fold) -> Result<Self, OpenError> {
        let compressor = Compressor::new(ZSTD_LEVEL).map_err(OpenError::Compress)?;
        Ok(Self { connection, fold, packer: Packer { compressor, packed: Vec::new() } })
    }

    /// The connection, for queries over the rows that are folded beside the log.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl Packer {
    fn pack(&mut self, bytes: &[u8]) -> std::io::Result<&[u8]> {
        self.packed.clear();
        self.packed.reserve(zstd::zstd_safe::compress_bound(bytes.len()));
        self.compressor.compress_to_buffer(bytes, &mut self.packed)?;
        Ok(&self.packed)
    }
}

impl std::fmt::Debug for SqliteLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteLog").field("path", &self.connection.path()).finish_non_exhaustive()
    }
}

impl Log for SqliteLog {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        let Some(first) = frames.first() else { return Ok(Vec::new()) };
        debug_assert!(frames.iter().all(|frame| frame.header.writer == first.header.writer));
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let actual = last_seq(&transaction, &first.header.writer).map_err(failed)?;
        if actual != expected {
            return Err(AppendError::Conflict { expected, actual });
        }
        let mut appended = Vec::with_capacity(frames.len());
        for frame in frames {
            let seq = insert(&transaction, frame, &mut self.packer, sent)?;
            appended.push(StoredFrame { seq, stored: sent, sent, bytes: frame.bytes.clone() });
        }
        (self.fold)(&transaction, &appended).map_err(failed)?;
        transaction.commit().map_err(failed)?;
        Ok(appended.into_iter().map(|frame| Appended { seq: frame.seq }).collect())
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        let sql = "SELECT seq, body FROM frames WHERE writer = ?1 ORDER BY frame DESC LIMIT 1";
        let mut statement = self.connection.prepare_cached(sql).map_err(unreadable)?;
        let row = statement.query_row([writer.as_str()], |row| Ok((seq(row)?, body(row)?)));
        let Some((seq, body)) = row.optional().map_err(unreadable)? else { return Ok(None) };
        let header: Header = Frame::parse(body).map_err(|error| ReadError(error.into()))?.header;
        Ok(Some(Last { seq, header }))
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        let sql = "SELECT seq, stored, sent, body FROM frames WHERE seq > ?1 ORDER BY seq LIMIT ?2";
        let mut statement = self.connection.prepare_cached(sql).map_err(unreadable)?;
        let rows = statement.query_map(params![integer(after.0), integer(frames_max as u64)], stored_frame);
        rows.and_then(Iterator::collect).map_err(unreadable)
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        // By the index of the writer's frames, whose order is that of their sequences.
        let sql = "SELECT seq, stored, sent, body FROM frames WHERE writer = ?1 AND +seq > ?2 ORDER BY frame LIMIT ?3";
        let mut statement = self.connection.prepare_cached(sql).map_err(unreadable)?;
        let params = params![writer.as_str(), integer(after.0), integer(frames_max as u64)];
        let rows = statement.query_map(params, stored_frame);
        rows.and_then(Iterator::collect).map_err(unreadable)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        let mut statement = self.connection.prepare_cached("SELECT max(seq) FROM frames").map_err(unreadable)?;
        let head: Option<i64> = statement.query_row([], |row| row.get(0)).map_err(unreadable)?;
        Ok(head.map_or(Seq::START, |head| Seq(head.unsigned_abs())))
    }
}

fn migrate(connection: &mut Connection) -> Result<(), refinery::Error> {
    let migrations: Result<Vec<_>, _> =
        SQLITE_MIGRATIONS.iter().map(|(name, sql)| refinery::Migration::unapplied(name, sql)).collect();
    refinery::Runner::new(&migrations?).run(connection)?;
    Ok(())
}

fn last_seq(connection: &Connection, writer: &WriterId) -> Result<Option<Seq>, rusqlite::Error> {
    let sql = "SELECT seq FROM frames WHERE writer = ?1 ORDER BY frame DESC LIMIT 1";
    connection.prepare_cached(sql)?.query_row([writer.as_str()], seq).optional()
}

fn insert(transaction: &Transaction<'_>, frame: &Frame, packer: &mut Packer, sent: Time) -> Result<Seq, AppendError> {
    let Frame { header, bytes } = frame;
    let stored = sent;
    let body = match bytes.len() {
        ..=PLAIN_BYTES_MAX => &bytes[..],
        _ => packer.pack(bytes).map_err(|error| AppendError::Unavailable(error.into()))?,
    };
    let sql = "INSERT INTO frames (writer, epoch, frame, first, last, sum, sent, stored, body)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
    let (epoch, number) = (integer(header.epoch), integer(header.frame));
    let (first, last) = (integer(header.first), integer(header.last()));
    let mut statement = transaction.prepare_cached(sql).map_err(failed)?;
    let row = params![header.writer.as_str(), epoch, number, first, last, header.sum, sent.0, stored.0, body];
    statement.execute(row).map_err(failed)?;
    Ok(Seq(transaction.last_insert_rowid().unsigned_abs()))
}

/// The frame in a row of `frames` that has `seq`, `stored`, `sent` and `body`.
pub fn stored_frame(row: &Row<'_>) -> Result<StoredFrame, rusqlite::Error> {
    let (stored, sent) = (Time(row.get("stored")?), Time(row.get("sent")?));
    Ok(StoredFrame { seq: seq(row)?, stored, sent, bytes: body(row)? })
}

/// The frame's bytes as they were sealed. What looks compressed and is not, is damage: it is given as it rests, and
/// whoever reads frames finds that it is none.
fn body(row: &Row<'_>) -> Result<Vec<u8>, rusqlite::Error> {
    let rests = match row.get_ref("body")? {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => &[],
    };
    let packed = rests.starts_with(&ZSTD_MAGIC);
    let unpacked = packed.then(|| zstd::bulk::decompress(rests, FRAME_BYTES_MAX).ok()).flatten();
    Ok(unpacked.unwrap_or_else(|| rests.to_vec()))
}

fn seq(row: &Row<'_>) -> Result<Seq, rusqlite::Error> {
    row.get::<_, i64>("seq").map(|seq| Seq(seq.unsigned_abs()))
}

/// SQLite's integers are signed; numbers of ours that count things never come near the border.
pub fn integer(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// What would fail again in the same way is refused; everything else (busy, disk full, I/O) may pass.
fn failed(error: rusqlite::Error) -> AppendError {
    match error.sqlite_error_code() {
        Some(
            ErrorCode::ConstraintViolation
            | ErrorCode::ReadOnly
            | ErrorCode::TypeMismatch
            | ErrorCode::TooBig
            | ErrorCode::DatabaseCorrupt
            | ErrorCode::NotADatabase,
        ) => AppendError::Refused(error.into()),
        _ => AppendError::Unavailable(error.into()),
    }
}

fn unreadable(error: rusqlite::Error) -> ReadError {
    ReadError(error.into())
}
