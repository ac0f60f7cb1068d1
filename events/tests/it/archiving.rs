//! The archive: stretches of a real log as files, damaged and misplaced by hand.

use std::path::Path;

use waybill_events::archive::{Archive, ArchiveError, Archived};
use waybill_events::log::{Log, Seq, StoredFrame};
use waybill_events::sqlite::SqliteLog;
use waybill_schema::frame::{Frame, Link};

use super::conformance::SENT;
use super::line;

/// A log of `n` frames, written by `gw-a` and `gw-b` in turn.
fn log(dir: &Path, n: u64) -> SqliteLog {
    let mut log = SqliteLog::open(&dir.join("log.sqlite"), Box::new(|_, _| Ok(()))).unwrap();
    grow(&mut log, n);
    log
}

fn grow(log: &mut SqliteLog, n: u64) {
    for _ in 0..n {
        let writer = if log.head().unwrap().0.is_multiple_of(2) { "gw-a" } else { "gw-b" };
        let last = log.last(&writer.into()).unwrap();
        let link = last.as_ref().map_or(Link::start(), |last| Link::after(&last.header));
        let number = last.as_ref().map_or(0, |last| last.header.last()) + 1;
        let frame = Frame::seal(writer.into(), 1, link, number, 1, line(number, writer).as_bytes());
        log.append(&[frame], last.map(|last| last.seq), SENT).unwrap();
    }
}

fn all(log: &mut dyn Log) -> Vec<StoredFrame> {
    let mut frames: Vec<StoredFrame> = Vec::new();
    loop {
        let read = log.read(frames.last().map_or(Seq::START, |last| last.seq), 3).unwrap();
        if read.is_empty() {
            return frames;
        }
        frames.extend(read);
    }
}

fn file(dir: &Path, first: u64, last: u64) -> std::path::PathBuf {
    dir.join(format!("{first:020}-{last:020}.frames.zst"))
}

#[test]
fn archive_and_log_read_as_one_also_when_the_log_was_trimmed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("archive");
    let mut log = log(dir.path(), 10);
    let (whole, of_b) = (all(&mut log), log.read_of(&"gw-b".into(), Seq::START, 100).unwrap());
    let mut archive = Archive::open(&folder).unwrap();
    assert_eq!(archive.extend(&mut log, Seq(4), 1).unwrap().map(|stretch| (stretch.first, stretch.last)), Some((1, 4)));
    assert_eq!(archive.extend(&mut log, Seq(7), 1).unwrap().map(|stretch| (stretch.first, stretch.last)), Some((5, 7)));
    assert_eq!(archive.extend(&mut log, Seq(7), 1).unwrap(), None);
    assert_eq!(archive.extend(&mut log, Seq(10), 4).unwrap(), None, "three frames are no stretch of four");

    log.connection().execute("DELETE FROM frames WHERE seq <= 6", []).unwrap();
    let archive = Archive::open(&folder).unwrap();
    archive.verify().unwrap();
    assert_eq!(archive.last(), Seq(7));
    let mut both = Archived::new(archive, Box::new(log)).unwrap();
    assert_eq!(all(&mut both), whole);
    assert_eq!(both.head().unwrap(), Seq(10));
    assert_eq!(both.read_of(&"gw-b".into(), Seq::START, 100).unwrap(), of_b);
    assert_eq!(both.read_of(&"gw-b".into(), Seq(2), 3).unwrap(), of_b[1..4]);
}

#[test]
fn a_file_is_text_that_any_zstd_unpacks() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = log(dir.path(), 2);
    Archive::open(dir.path()).unwrap().extend(&mut log, Seq(2), 1).unwrap();
    let text = zstd::stream::decode_all(&std::fs::read(file(dir.path(), 1, 2)).unwrap()[..]).unwrap();
    let text = String::from_utf8(text).unwrap();
    let bytes = all(&mut log).remove(0).bytes;
    let second = format!(r#"{{"seq":1,"stored":{SENT},"sent":{SENT},"bytes":{}}}"#, bytes.len(), SENT = SENT.0);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with(r#"{"archive":1,"first":1,"last":2,"frames":2,"prev":"0000"#), "{}", lines[0]);
    assert_eq!(lines[1], second);
    assert_eq!(lines[2..4].join("\n") + "\n", String::from_utf8(bytes).unwrap());
}

#[test]
fn what_is_no_frame_is_archived_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = log(dir.path(), 3);
    log.connection().execute("UPDATE frames SET body = x'0a00ff0a' WHERE seq = 2", []).unwrap();
    let mut archive = Archive::open(&dir.path().join("archive")).unwrap();
    archive.extend(&mut log, Seq(3), 1).unwrap();
    assert_eq!(archive.read(Seq(1), 1).unwrap()[0].bytes, b"\n\x00\xff\n");
}

#[test]
fn a_log_that_lost_its_tail_and_grew_again_is_not_archived_further() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = log(dir.path(), 4);
    let mut archive = Archive::open(&dir.path().join("archive")).unwrap();
    archive.extend(&mut log, Seq(4), 1).unwrap();
    log.connection().execute_batch("DELETE FROM frames WHERE seq = 4; UPDATE sqlite_sequence SET seq = 3").unwrap();
    let error = archive.extend(&mut log, Seq(9), 1).unwrap_err();
    assert!(matches!(error, ArchiveError::Diverged(Seq(4))), "{error:?}");
    let sealed = Frame::seal("gw-c".into(), 1, Link::start(), 1, 1, line(1, "other").as_bytes());
    log.append(&[sealed], None, SENT).unwrap();
    let error = archive.extend(&mut log, Seq(9), 1).unwrap_err();
    assert!(matches!(error, ArchiveError::Diverged(Seq(4))), "{error:?}");
}

#[test]
fn a_damaged_or_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("archive");
    let mut log = log(dir.path(), 6);
    let mut archive = Archive::open(&folder).unwrap();
    for end in [2, 4, 6] {
        archive.extend(&mut log, Seq(end), 1).unwrap();
    }
    std::fs::write(folder.join("unfinished"), b"a crash left this").unwrap();
    Archive::open(&folder).expect("what is unfinished is no part of it");

    let second = file(&folder, 3, 4);
    let good = std::fs::read(&second).unwrap();
    let mut bad = good.clone();
    let place = bad.len() - 10;
    bad[place] ^= 1;
    std::fs::write(&second, &bad).unwrap();
    match Archive::open(&folder).and_then(|archive| archive.verify()) {
        Err(ArchiveError::Damaged { path, .. }) => assert_eq!(path, second),
        other => panic!("the damage is not found: {other:?}"),
    }
    std::fs::remove_file(&second).unwrap();
    match Archive::open(&folder) {
        Err(ArchiveError::Astray { path, after: Seq(2) }) => assert_eq!(path, file(&folder, 5, 6)),
        other => panic!("the gap is not found: {other:?}"),
    }
}
