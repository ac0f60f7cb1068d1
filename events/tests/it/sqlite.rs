//! The embedded log: the conformance suite, and what is its own.

use std::path::Path;
use std::sync::mpsc::sync_channel;

use refinery::{Migration, Runner};
use waybill_events::log::{AppendError, Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_schema::frame::{Frame, Link};
use waybill_schema::store::SQLITE_MIGRATIONS;
use waybill_schema::time::Time;

use super::conformance::SENT;
use super::{MADE, line, reading};

fn open(dir: &Path) -> SqliteLog {
    SqliteLog::open(&dir.join("log.sqlite"), Box::new(|_, _| Ok(()))).unwrap()
}

super::conformance::suite!(conforms, {
    let dir = tempfile::tempdir().unwrap();
    move || open(dir.path())
});

fn frame(link: Link, number: u64) -> Frame {
    Frame::seal("gw-a".into(), 1, link, number, 1, line(number, "x").as_bytes())
}

/// A file that an earlier program left, whichever of its layouts: the log is the only one there is.
#[test]
fn a_file_of_an_earlier_layout_opens_with_all_it_holds_and_goes_on() {
    for n in 1..=SQLITE_MIGRATIONS.len() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.sqlite");
        let first = frame(Link::start(), 1);
        {
            let mut earlier = rusqlite::Connection::open(&path).unwrap();
            let migrations = SQLITE_MIGRATIONS[..n].iter().map(|(name, sql)| Migration::unapplied(name, sql).unwrap());
            Runner::new(&migrations.collect::<Vec<_>>()).run(&mut earlier).unwrap();
            let row = "INSERT INTO frames (writer, epoch, frame, first, last, sum, sent, stored, body)
                       VALUES ('gw-a', 1, 1, 1, 1, ?1, 5, 5, ?2)";
            earlier.execute(row, (&first.header.sum, &first.bytes)).unwrap();
            for (request, seq) in [("a", 9), ("b", 7), ("c", 8)] {
                let row = "INSERT INTO usage_events VALUES (?1, 1, 2, 's', 'k', 'g', 'm', 'chat', 0, 's', 'explicit',
                           'x', NULL, 0, 0, 'success', NULL, NULL, 200, 1, 'd', 1, ?2, ?2)";
                earlier.execute(row, (request, seq)).unwrap();
            }
        }
        for _ in 0..2 {
            let mut log = open(dir.path());
            assert_eq!(log.read(Seq::START, 1).unwrap()[0].bytes, first.bytes, "layout {n}");
            let sql = "SELECT group_concat(request_id || seq_last) FROM (SELECT * FROM usage_events ORDER BY rowid)";
            let rows: String = log.connection().query_row(sql, [], |row| row.get(0)).unwrap();
            let laid = if n == SQLITE_MIGRATIONS.len() { "a9,b7,c8" } else { "b7,c8,a9" };
            assert_eq!(rows, laid, "layout {n}");
            let head = log.head().unwrap();
            let last = log.last(&"gw-a".into()).unwrap().unwrap();
            let next = frame(Link::after(&last.header), last.header.last() + 1);
            assert_eq!(log.append(&[next], Some(head), Time(6)).unwrap()[0].seq, Seq(head.0 + 1));
        }
    }
}

#[test]
fn the_fold_sees_all_frames_in_the_transaction_that_stores_them() {
    let dir = tempfile::tempdir().unwrap();
    let (tell, told) = sync_channel(10);
    let fold = move |transaction: &rusqlite::Transaction<'_>, stored: &[waybill_events::log::StoredFrame]| {
        let seq: i64 = transaction.query_row("SELECT max(seq) FROM frames", [], |row| row.get(0))?;
        tell.send((seq, stored.to_vec())).unwrap();
        Ok(())
    };
    let mut log = SqliteLog::open(&dir.path().join("log.sqlite"), Box::new(fold)).unwrap();
    let first = frame(Link::start(), 1);
    let second = frame(Link::after(&first.header), 2);
    log.append(&[first, second], None, Time(5)).unwrap();
    let read = log.read(Seq::START, 10).unwrap();
    let seen: Vec<_> = told.try_iter().collect();
    assert_eq!(seen, [(2, read)]);
}

#[test]
fn a_fold_that_fails_stores_neither_frames_nor_rows() {
    let dir = tempfile::tempdir().unwrap();
    let fold = |transaction: &rusqlite::Transaction<'_>, stored: &[waybill_events::log::StoredFrame]| {
        let row = "INSERT INTO quarantine (seq, line, why, bytes) VALUES (?1, 0, 'test', x'')";
        transaction.execute(row, [i64::try_from(stored[0].seq.0).unwrap()])?;
        if stored.len() == 2 { Err(rusqlite::Error::InvalidQuery) } else { Ok(()) }
    };
    let mut log = SqliteLog::open(&dir.path().join("log.sqlite"), Box::new(fold)).unwrap();
    let first = frame(Link::start(), 1);
    let second = frame(Link::after(&first.header), 2);
    let error = log.append(&[first.clone(), second], None, Time(5)).unwrap_err();
    assert!(matches!(error, AppendError::Unavailable(_)), "{error:?}");
    let rows: i64 = log.connection().query_row("SELECT count(*) FROM quarantine", [], |row| row.get(0)).unwrap();
    assert_eq!((log.head().unwrap(), rows), (Seq::START, 0));
    log.append(&[first], None, Time(5)).expect("the log is as usable as before");
}

#[test]
fn a_reader_beside_the_writer_sees_its_frames_and_cannot_append() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    let first = frame(Link::start(), 1);
    let second = frame(Link::after(&first.header), 2);
    let seq = log.append(std::slice::from_ref(&first), None, Time(5)).unwrap()[0].seq;
    let mut reader = SqliteLog::open_read_only(&dir.path().join("log.sqlite")).unwrap();
    assert_eq!(reader.head().unwrap(), seq);
    let error = reader.append(std::slice::from_ref(&second), Some(seq), Time(5)).unwrap_err();
    assert!(matches!(error, AppendError::Refused(_)), "{error:?}");
    let seq = log.append(&[second], Some(seq), Time(5)).unwrap()[0].seq;
    assert_eq!(reader.head().unwrap(), seq);
}

#[test]
fn a_fact_happened_when_its_writer_made_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    log.append(&[frame(Link::start(), 1)], None, SENT).unwrap();
    let stored = log.read(Seq::START, 1).unwrap().remove(0);
    assert_eq!(stored.stored, SENT);
    let fact = reading::facts(&stored).1.remove(0).expect("a good line");
    assert_eq!(fact.at, MADE);
}

#[test]
fn a_frame_that_breaks_the_numbering_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    let first = frame(Link::start(), 1);
    let seq = log.append(std::slice::from_ref(&first), None, Time(5)).unwrap()[0].seq;
    let error = log.append(&[first], Some(seq), Time(5)).unwrap_err();
    assert!(matches!(error, AppendError::Refused(_)), "{error:?}");
}

#[test]
fn a_large_frame_rests_as_zstd_and_a_small_one_as_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    let small = frame(Link::start(), 1);
    let lines: String = (2..102).map(|number| line(number, "the same words again")).collect();
    let large = Frame::seal("gw-a".into(), 1, Link::after(&small.header), 2, 100, lines.as_bytes());
    log.append(&[small.clone(), large.clone()], None, SENT).unwrap();
    let rests = |seq| {
        let sql = "SELECT body FROM frames WHERE seq = ?1";
        log.connection().query_row(sql, [seq], |row| row.get::<_, Vec<u8>>(0)).unwrap()
    };
    assert_eq!(rests(1), small.bytes);
    let packed = rests(2);
    assert_eq!(zstd::stream::decode_all(&packed[..]).expect("any zstd can unpack it"), large.bytes);
    assert!(packed.len() * 5 < large.bytes.len(), "{} bytes of {}", packed.len(), large.bytes.len());
}

#[test]
fn a_damaged_compressed_frame_is_given_as_it_rests() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    let lines: String = (1..101).map(|number| line(number, "words")).collect();
    log.append(&[Frame::seal("gw-a".into(), 1, Link::start(), 1, 100, lines.as_bytes())], None, SENT).unwrap();
    log.connection().execute("UPDATE frames SET body = substr(body, 1, 40)", []).unwrap();
    let read = log.read(Seq::START, 1).unwrap().remove(0);
    assert_eq!(read.bytes.len(), 40);
    assert!(Frame::parse(read.bytes).is_err(), "it is no frame, which its reader finds");
}
