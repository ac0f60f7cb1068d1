//! The spool over real files: what is found again, what is cut off, what is refused, what is declared.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use waybill_events::spool::{
    AppendError, Batch, Options, RECORD_BYTES_MAX, RETENTION, Reader, Recovered, Spool, SpoolError, Waiting, Wake,
};
use waybill_schema::event::Epoch;
use waybill_schema::frame::Body;
use waybill_servers::disk::Disk;

use super::{MADE, body, event, line, logged};

const LONG: Duration = Duration::from_secs(60);

fn open(dir: &Path) -> (Spool, Reader, Recovered) {
    Spool::open(dir, Options::default()).unwrap()
}

fn append(spool: &mut Spool, texts: &[&str]) -> (u64, u64) {
    let bodies: Vec<_> = texts.iter().map(|text| body(text)).collect();
    let numbers = spool.append(&bodies).unwrap();
    (*numbers.start(), *numbers.end())
}

fn batch(epoch: u64, first: u64, texts: &[&str]) -> Batch {
    let lines: String = texts.iter().zip(first..).map(|(text, number)| line(number, text)).collect();
    Batch { epoch, first, count: u32::try_from(texts.len()).unwrap(), lines: lines.into_bytes() }
}

/// All that the reader gives, in batches of at most 100 facts.
fn batches(reader: &mut Reader) -> Vec<Batch> {
    std::iter::from_fn(|| reader.next_batch(100, usize::MAX).unwrap()).collect()
}

/// The log takes what `batch` gave.
fn ack(reader: &mut Reader, batch: &Batch) {
    reader.ack(&logged(batch.epoch, batch.last().last), MADE);
}

fn text(batches: &[Batch]) -> String {
    batches.iter().map(|batch| String::from_utf8_lossy(&batch.lines)).collect()
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> = paths.filter(|path| path.extension() == Some(OsStr::new("seg"))).collect();
    segments.sort();
    segments
}

/// A spool with three records in one segment; gives the segment's bytes and where the second and third record begin.
fn three_records(dir: &Path) -> (Vec<u8>, [usize; 2]) {
    let (mut spool, ..) = open(dir);
    spool.begin(1).unwrap();
    let mut lengths = Vec::new();
    for texts in [&["one"][..], &["two", "three"], &["four", "five"]] {
        append(&mut spool, texts);
        lengths.push(usize::try_from(fs::metadata(&segments(dir)[0]).unwrap().len()).unwrap());
    }
    (fs::read(&segments(dir)[0]).unwrap(), [lengths[0], lengths[1]])
}

#[test]
fn facts_are_numbered_densely_in_each_epoch_and_given_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, recovered) = open(dir.path());
    assert_eq!(recovered, Recovered { last: None, facts: 0, bytes: 0, torn_bytes: 0 });
    spool.begin(4).unwrap();
    assert_eq!(append(&mut spool, &["one", "two"]), (1, 2));
    assert_eq!(append(&mut spool, &["three"]), (3, 3));
    spool.begin(9).unwrap();
    assert_eq!(append(&mut spool, &["four"]), (1, 1));
    assert_eq!(batches(&mut reader), [batch(4, 1, &["one", "two", "three"]), batch(9, 1, &["four"])]);
    assert_eq!(reader.next_batch(100, 1000).unwrap(), None);
}

#[test]
fn an_epoch_must_begin_and_must_be_greater_than_all_before() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, ..) = open(dir.path());
    assert!(matches!(spool.append(&[body("x")]), Err(AppendError::NoEpoch)));
    spool.begin(3).unwrap();
    append(&mut spool, &["one"]);
    drop(spool);
    let (mut spool, ..) = open(dir.path());
    assert!(matches!(spool.begin(3), Err(SpoolError::Epoch { epoch: 3, last: 3 })));
    spool.begin(4).unwrap();
}

#[test]
fn all_is_found_again_after_a_death_without_a_farewell() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, ..) = open(dir.path());
    spool.begin(1).unwrap();
    append(&mut spool, &["one", "two"]);
    drop(spool);
    let (mut spool, mut reader, recovered) = open(dir.path());
    assert_eq!((recovered.last, recovered.facts), (Some(Epoch { epoch: 1, last: 2 }), 2));
    spool.begin(2).unwrap();
    append(&mut spool, &["three"]);
    assert_eq!(batches(&mut reader), [batch(1, 1, &["one", "two"]), batch(2, 1, &["three"])]);
}

#[test]
fn a_torn_last_record_is_cut_off_wherever_it_was_torn() {
    let made = tempfile::tempdir().unwrap();
    let (bytes, [_, third]) = three_records(made.path());
    for length in third..bytes.len() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("spool-000001-000000000001.seg"), &bytes[..length]).unwrap();
        let (mut spool, mut reader, recovered) = open(dir.path());
        let torn_bytes = (length - third) as u64;
        let last = Some(Epoch { epoch: 1, last: 3 });
        assert_eq!(recovered, Recovered { last, facts: 3, bytes: third as u64, torn_bytes }, "torn at {length}");
        spool.begin(2).unwrap();
        append(&mut spool, &["next"]);
        assert_eq!(batches(&mut reader), [batch(1, 1, &["one", "two", "three"]), batch(2, 1, &["next"])]);
        drop((spool, reader));
        assert_eq!(open(dir.path()).2.torn_bytes, 0, "what was cut off is gone for good");
    }
}

#[test]
fn a_tail_of_zeros_is_torn() {
    let dir = tempfile::tempdir().unwrap();
    let (mut bytes, _) = three_records(dir.path());
    let whole = bytes.len() as u64;
    bytes.extend([0; 4096]);
    fs::write(&segments(dir.path())[0], &bytes).unwrap();
    let (.., recovered) = open(dir.path());
    assert_eq!((recovered.bytes, recovered.torn_bytes), (whole, 4096));
}

#[test]
fn damage_before_a_good_record_is_reported_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, [second, third]) = three_records(dir.path());
    let segment = segments(dir.path()).remove(0);
    for place in 0..third {
        let mut damaged = bytes.clone();
        damaged[place] ^= 0x40;
        fs::write(&segment, &damaged).unwrap();
        let expected = if place < second { 0 } else { second as u64 };
        match Spool::open(dir.path(), Options::default()) {
            Err(SpoolError::Damaged { file, offset }) => assert_eq!((file, offset), (segment.clone(), expected)),
            other => panic!("byte {place}: {other:?}"),
        }
        assert_eq!(fs::read(&segment).unwrap(), damaged, "a damaged segment is left as it is");
    }
}

#[test]
fn a_segment_that_is_not_the_last_cannot_be_torn() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, [_, third]) = three_records(dir.path());
    let (mut spool, ..) = open(dir.path());
    spool.begin(2).unwrap();
    append(&mut spool, &["next"]);
    drop(spool);
    let segment = segments(dir.path()).remove(0);
    fs::write(&segment, &bytes[..bytes.len() - 1]).unwrap();
    match Spool::open(dir.path(), Options::default()) {
        Err(SpoolError::Damaged { file, offset }) => assert_eq!((file, offset), (segment, third as u64)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_opener_is_refused_as_long_as_a_half_lives() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, reader, _) = open(dir.path());
    let refused = || match Spool::open(dir.path(), Options::default()) {
        Err(error @ SpoolError::Locked(_)) => assert!(error.to_string().contains(dir.path().to_str().unwrap())),
        other => panic!("{other:?}"),
    };
    refused();
    drop(spool);
    refused();
    drop(reader);
    open(dir.path());
}

#[test]
fn records_stay_whole_while_they_fit_and_are_split_at_lines_where_they_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    append(&mut spool, &["a", "b"]);
    append(&mut spool, &["c", "d"]);
    append(&mut spool, &["e", "f", "g", "h", "i"]);
    append(&mut spool, &["j"]);
    let given: Vec<_> = std::iter::from_fn(|| reader.next_batch(3, usize::MAX).unwrap()).collect();
    let expected = [
        batch(1, 1, &["a", "b"]),
        batch(1, 3, &["c", "d"]),
        batch(1, 5, &["e", "f", "g"]),
        batch(1, 8, &["h", "i", "j"]),
    ];
    assert_eq!(given, expected);
    reader.resume_after(None);
    let bytes_max = 2 * line(1, "a").len();
    let given: Vec<_> = std::iter::from_fn(|| reader.next_batch(100, bytes_max).unwrap()).collect();
    assert_eq!(given.iter().map(|batch| batch.count).collect::<Vec<_>>(), [2, 2, 2, 2, 1, 1]);
    reader.resume_after(None);
    assert_eq!(
        reader.next_batch(100, 1).unwrap(),
        Some(batch(1, 1, &["a"])),
        "a fact larger than the bound goes alone"
    );
}

#[test]
fn what_the_log_has_is_not_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    append(&mut spool, &["a", "b", "c"]);
    append(&mut spool, &["d"]);
    spool.begin(2).unwrap();
    append(&mut spool, &["e"]);
    for (after, expected) in [
        (None, vec![batch(1, 1, &["a", "b", "c", "d"]), batch(2, 1, &["e"])]),
        (Some((1, 2)), vec![batch(1, 3, &["c", "d"]), batch(2, 1, &["e"])]),
        (Some((1, 4)), vec![batch(2, 1, &["e"])]),
        (Some((2, 1)), vec![]),
    ] {
        reader.resume_after(after.map(|(epoch, last)| Epoch { epoch, last }));
        assert_eq!(batches(&mut reader), expected, "after {after:?}");
    }
}

#[test]
fn acknowledged_segments_are_deleted_but_the_newest_tells_the_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { segment_bytes_max: 1, retention: Duration::ZERO, ..Options::default() };
    let (mut spool, mut reader, _) = Spool::open(dir.path(), options).unwrap();
    spool.begin(1).unwrap();
    for text in ["a", "b", "c", "d"] {
        append(&mut spool, &[text]);
    }
    assert_eq!(segments(dir.path()).len(), 4);
    assert_eq!(reader.next_batch(2, usize::MAX).unwrap(), Some(batch(1, 1, &["a", "b"])));
    reader.ack(&logged(1, 1), MADE);
    assert_eq!(segments(dir.path()).len(), 4, "a batch is acknowledged whole");
    reader.ack(&logged(1, 2), MADE);
    assert_eq!(segments(dir.path()).len(), 2, "what was read ahead is not acknowledged");
    spool.begin(2).unwrap();
    assert_eq!(reader.next_batch(2, usize::MAX).unwrap(), Some(batch(1, 3, &["c", "d"])));
    reader.ack(&logged(1, 4), MADE);
    drop((spool, reader));
    let (.., recovered) = Spool::open(dir.path(), options).unwrap();
    assert_eq!(recovered.last, Some(Epoch { epoch: 1, last: 4 }), "epoch 2 never had a fact");
}

/// Four facts, each in a segment of its own, of which the log takes the first three at [`MADE`].
fn three_of_four_acknowledged(dir: &Path, options: Options) -> (Spool, Reader) {
    let (mut spool, mut reader, _) = Spool::open(dir, Options { segment_bytes_max: 1, ..options }).unwrap();
    spool.begin(1).unwrap();
    for text in ["a", "b", "c", "d"] {
        append(&mut spool, &[text]);
    }
    reader.next_batch(3, usize::MAX).unwrap().unwrap();
    reader.ack(&logged(1, 3), MADE);
    (spool, reader)
}

#[test]
fn acknowledged_facts_stay_for_the_retention_and_can_be_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_spool, mut reader) = three_of_four_acknowledged(dir.path(), Options::default());
    let almost = MADE.plus_ms(RETENTION.as_millis() as i64 - 1);
    reader.ack(&logged(1, 3), almost);
    assert_eq!(segments(dir.path()).len(), 4);
    reader.resume_after(Some(Epoch { epoch: 1, last: 1 }));
    assert_eq!(batches(&mut reader), [batch(1, 2, &["b", "c", "d"])]);
    reader.ack(&logged(1, 1), almost.plus_ms(1));
    assert_eq!(segments(dir.path()).len(), 3, "of what was given again, nothing is acknowledged");
    reader.ack(&logged(1, 4), almost.plus_ms(1));
    reader.ack(&logged(1, 4), almost.plus_ms(RETENTION.as_millis() as i64));
    assert_eq!(segments(dir.path()).len(), 3, "their retention began anew");
    reader.ack(&logged(1, 4), almost.plus_ms(1 + RETENTION.as_millis() as i64));
    assert_eq!(segments(dir.path()).len(), 1, "the newest one stays");
}

#[test]
fn no_more_acknowledged_bytes_stay_than_may() {
    let dir = tempfile::tempdir().unwrap();
    let segment = 8 + line(1, "a").len() as u64;
    let options = Options { retention_bytes_max: 2 * segment, ..Options::default() };
    let (_spool, _reader) = three_of_four_acknowledged(dir.path(), options);
    let left: Vec<u64> = segments(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).collect();
    assert_eq!(left, [segment; 3], "two that are acknowledged and one that is not");
}

#[test]
fn a_start_without_the_log_knows_what_waits_and_which_epoch_was_the_last() {
    let dir = tempfile::tempdir().unwrap();
    drop(three_of_four_acknowledged(dir.path(), Options::default()));
    let (_spool, mut reader, recovered) = open(dir.path());
    assert_eq!((recovered.last, recovered.facts), (Some(Epoch { epoch: 1, last: 4 }), 4));
    assert_eq!(reader.mark(), Some(&logged(1, 3)));
    let bytes = 8 + line(4, "d").len() as u64;
    assert_eq!(reader.waiting(), Waiting { facts: 1, bytes, oldest: Some(MADE) });
    assert_eq!(batches(&mut reader), [batch(1, 4, &["d"])]);
    drop((_spool, reader));
    segments(dir.path()).iter().for_each(|path| fs::remove_file(path).unwrap());
    let (mut spool, reader, recovered) = open(dir.path());
    assert_eq!(recovered.last, Some(Epoch { epoch: 1, last: 3 }), "the mark alone tells");
    assert_eq!(reader.waiting(), Waiting::default());
    assert!(matches!(spool.begin(1), Err(SpoolError::Epoch { epoch: 1, last: 1 })));
}

#[test]
fn what_waits_is_as_old_as_its_oldest_fact() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    for (text, ms) in [("a", 0), ("b", 10), ("c", 20)] {
        spool.append(&[Body::of(&event(text), MADE.plus_ms(ms))]).unwrap();
    }
    let oldest = |reader: &Reader| (reader.waiting().facts, reader.waiting().oldest.map(|oldest| oldest.0 - MADE.0));
    assert_eq!(oldest(&reader), (3, Some(0)));
    let given: Vec<_> = std::iter::from_fn(|| reader.next_batch(1, usize::MAX).unwrap()).collect();
    ack(&mut reader, &given[0]);
    assert_eq!(oldest(&reader), (2, Some(10)));
    ack(&mut reader, &given[2]);
    assert_eq!(oldest(&reader), (0, None));
}

#[test]
fn a_mark_that_cannot_be_written_or_read_loses_nothing() {
    for device in ["/dev/full", "/dev/null", "/nowhere/spool.mark"] {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(device, dir.path().join("spool.mark")).unwrap();
        drop(three_of_four_acknowledged(dir.path(), Options::default()));
        let (mut spool, mut reader, recovered) = open(dir.path());
        assert_eq!((recovered.last, reader.mark()), (Some(Epoch { epoch: 1, last: 4 }), None), "{device}");
        spool.begin(2).unwrap();
        append(&mut spool, &["e"]);
        reader.resume_after(Some(Epoch { epoch: 1, last: 3 }));
        assert_eq!(batches(&mut reader), [batch(1, 4, &["d"]), batch(2, 1, &["e"])]);
    }
}

#[test]
fn a_mark_that_is_cut_anywhere_is_none() {
    let dir = tempfile::tempdir().unwrap();
    drop(three_of_four_acknowledged(dir.path(), Options::default()));
    let path = dir.path().join("spool.mark");
    let mark = fs::read(&path).unwrap();
    for length in 0..mark.len() {
        fs::write(&path, &mark[..length]).unwrap();
        let (_spool, mut reader, _) = open(dir.path());
        assert_eq!(reader.mark(), None, "cut at {length}");
        assert_eq!(batches(&mut reader), [batch(1, 1, &["a", "b", "c", "d"])]);
    }
}

/// What is not a file of the spool any more cannot be synced: the kernel refuses it for a device.
#[test]
fn a_sync_reaches_the_segments_that_were_closed_since_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { segment_bytes_max: 1, ..Options::default() };
    let (mut spool, ..) = Spool::open(dir.path(), options).unwrap();
    assert!(spool.syncer().is_none());
    spool.begin(1).unwrap();
    append(&mut spool, &["a"]);
    let first = spool.syncer().unwrap();
    for text in ["b", "c"] {
        append(&mut spool, &[text]);
    }
    let all = spool.syncer().unwrap();
    let closed = segments(dir.path()).remove(1);
    fs::remove_file(&closed).unwrap();
    std::os::unix::fs::symlink("/dev/null", &closed).unwrap();
    first.sync().unwrap();
    assert!(all.sync().is_err(), "the second segment was closed unsynced");
    fs::remove_file(&closed).unwrap();
    all.sync().unwrap();
    std::os::unix::fs::symlink("/dev/null", &closed).unwrap();
    append(&mut spool, &["d"]);
    spool.sync().unwrap();
}

#[test]
fn a_split_record_is_taken_up_again_where_the_log_has_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    append(&mut spool, &["a", "b", "c", "d", "e"]);
    let beginning = reader.next_batch(3, usize::MAX).unwrap().unwrap();
    ack(&mut reader, &beginning);
    reader.resume_after(Some(beginning.last()));
    assert_eq!(batches(&mut reader), [batch(1, 4, &["d", "e"])]);
}

#[test]
fn a_waiting_reader_wakes_when_there_is_as_much_as_it_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, mut reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    assert_eq!(reader.wait(1, u64::MAX / 2, Duration::ZERO), Wake::TimedOut);
    let waiting = thread::spawn(move || {
        assert_eq!(reader.wait(3, u64::MAX / 2, LONG), Wake::Ready);
        batches(&mut reader)
    });
    append(&mut spool, &["a", "b"]);
    append(&mut spool, &["c"]);
    let given = waiting.join().unwrap();
    assert_eq!(given, [batch(1, 1, &["a", "b", "c"])]);
}

/// Numbers 2 and 3 are lost, 4 declares it: the text is written by hand.
const DECLARED: &str =
    concat!(r#"{"k":"dropped","v":1,"n":4,"t":1798000000000,"b":{"first":2,"last":3,"reason":"REASON"}}"#, "\n");

/// One good fact, one failed append of two facts, and a good one again: in the spool now, and after another opening.
fn check_declared(dir: &Path, spool: Spool, mut reader: Reader, reason: &str) {
    let expected = line(1, "before") + &DECLARED.replace("REASON", reason) + &line(5, "after");
    let given = batches(&mut reader);
    assert_eq!(text(&given), expected);
    assert_eq!(given.iter().map(|batch| (batch.first, batch.count)).collect::<Vec<_>>(), [(1, 1), (4, 2)]);
    drop((spool, reader));
    let (_spool, mut reader, recovered) = open(dir);
    assert_eq!((recovered.last, recovered.torn_bytes), (Some(Epoch { epoch: 1, last: 5 }), 0));
    assert_eq!(text(&batches(&mut reader)), expected);
}

#[test]
fn what_is_too_large_for_a_record_is_declared_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, reader, _) = open(dir.path());
    spool.begin(1).unwrap();
    append(&mut spool, &["before"]);
    let large = "x".repeat(RECORD_BYTES_MAX);
    let error = spool.append(&[body("small"), body(&large)]).unwrap_err();
    assert!(matches!(error, AppendError::TooLarge { .. }), "{error:?}");
    assert_eq!(append(&mut spool, &["after"]), (5, 5));
    check_declared(dir.path(), spool, reader, "record too large");
}

#[test]
fn a_full_spool_takes_facts_again_when_the_log_has_caught_up_and_declares_the_hole() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { spool_bytes_max: 500, ..Options::default() };
    let (mut spool, mut reader, _) = Spool::open(dir.path(), options).unwrap();
    spool.begin(1).unwrap();
    append(&mut spool, &["x".repeat(200).as_str()]);
    for text in ["y".repeat(200), "z".repeat(300)] {
        let error = spool.append(&[body(&text)]).unwrap_err();
        assert!(matches!(error, AppendError::Full { held: 300..400 }), "{error:?}");
    }
    let first = reader.next_batch(100, usize::MAX).unwrap().unwrap();
    ack(&mut reader, &first);
    assert_eq!(append(&mut spool, &["after"]), (5, 5));
    // One number for each fact that was lost, though the second failed append would have declared the first.
    let declared = DECLARED.replace("REASON", "spool is full");
    assert_eq!(text(&batches(&mut reader)), declared + &line(5, "after"));
}

/// Copies of what the log has are no reason to lose what it has not.
#[test]
fn a_full_disk_costs_the_retention_before_it_costs_facts() {
    let dir = tempfile::tempdir().unwrap();
    let _disk = Disk::over(dir.path(), 64);
    let options = Options { segment_bytes_max: 8 << 10, ..Options::default() };
    let (mut spool, mut reader, _) = Spool::open(dir.path(), options).unwrap();
    spool.begin(1).unwrap();
    let long = "x".repeat(1000);
    for number in 1..=200 {
        assert_eq!(append(&mut spool, &[&long]), (number, number));
        let batch = reader.next_batch(1, usize::MAX).unwrap().unwrap();
        ack(&mut reader, &batch);
    }
    let refused = (201..).find(|_| spool.append(&[body(&long)]).is_err()).unwrap();
    // Two pages of 4 KiB hold seven facts; of the sixteen one is the mark's, and two may hold what is acknowledged.
    assert!(refused > 200 + 6 * 7, "{refused}");
    let kept: String = (201..refused).map(|number| line(number, &long)).collect();
    assert_eq!(text(&batches(&mut reader)), kept);
}

#[test]
fn facts_that_need_a_segment_which_cannot_be_made_are_declared() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, elsewhere) = (dir.path().join("spool"), dir.path().join("elsewhere"));
    let options = Options { segment_bytes_max: 1, ..Options::default() };
    let (mut spool, reader, _) = Spool::open(&folder, options).unwrap();
    spool.begin(1).unwrap();
    append(&mut spool, &["before"]);
    fs::rename(&folder, &elsewhere).unwrap();
    let error = spool.append(&[body("x"), body("y")]).unwrap_err();
    assert!(matches!(error, AppendError::Write(_)), "{error:?}");
    fs::rename(&elsewhere, &folder).unwrap();
    assert_eq!(append(&mut spool, &["after"]), (5, 5));
    check_declared(&folder, spool, reader, "spool write failed");
}

#[test]
fn what_was_lost_just_before_a_stop_is_declared_at_the_stop_even_in_a_full_spool() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { spool_bytes_max: 150, ..Options::default() };
    let (mut spool, mut reader, _) = Spool::open(dir.path(), options).unwrap();
    spool.declare_lost(MADE).unwrap();
    spool.begin(1).unwrap();
    append(&mut spool, &["before"]);
    spool.append(&[body("x"), body("y")]).unwrap_err();
    spool.declare_lost(MADE).unwrap();
    spool.declare_lost(MADE).unwrap();
    assert_eq!(text(&batches(&mut reader)), line(1, "before") + &DECLARED.replace("REASON", "spool is full"));
}

/// Runs itself again as a process that appends and says so, and kills it.
#[test]
fn what_an_append_has_returned_survives_a_sigkill() {
    const DIR: &str = "SPOOL_UNTIL_KILLED";
    if let Some(dir) = std::env::var_os(DIR) {
        let (mut spool, ..) = open(Path::new(&dir));
        spool.begin(1).unwrap();
        loop {
            println!("{}", append(&mut spool, &["one", "two", "three"]).1);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let test = "spooling::what_an_append_has_returned_survives_a_sigkill";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DIR, dir.path()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().filter_map(|line| line.unwrap().parse().ok());
    let mut returned: u64 = said.find(|last| *last >= 1000).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    returned = said.last().unwrap_or(returned);
    let (.., recovered) = open(dir.path());
    let last = recovered.last.unwrap().last;
    assert!(last >= returned && last % 3 == 0, "{last} found, {returned} returned");
    assert_eq!(recovered.facts, last);
}

/// Runs itself again under a limit on the size of files: past it, the kernel writes what fits and fails the rest.
#[test]
fn a_full_disk_costs_facts_that_are_then_declared() {
    const DIR: &str = "SPOOL_ON_A_FULL_DISK";
    if let Some(dir) = std::env::var_os(DIR) {
        return on_a_full_disk(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let limited = r#"trap '' XFSZ && ulimit -f 16 && exec "$0" "$@""#;
    let test = "spooling::a_full_disk_costs_facts_that_are_then_declared";
    let mut command = Command::new("sh");
    command.args(["-c", limited]).arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
    let output = command.env(DIR, dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn on_a_full_disk(dir: &Path) {
    let (mut spool, reader, _) = open(dir);
    spool.begin(1).unwrap();
    append(&mut spool, &["before"]);
    let whole = fs::metadata(&segments(dir)[0]).unwrap().len();
    let error = spool.append(&[body("small"), body(&"x".repeat(100_000))]).unwrap_err();
    assert!(matches!(error, AppendError::Write(_)), "{error:?}");
    assert_eq!(fs::metadata(&segments(dir)[0]).unwrap().len(), whole, "what was written of the record is cut off");
    assert_eq!(append(&mut spool, &["after"]), (5, 5));
    check_declared(dir, spool, reader, "spool write failed");
}
