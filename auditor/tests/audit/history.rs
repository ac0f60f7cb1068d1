//! The catalogue read out of a log: in steps, verified, and stopped by what cannot be trusted.

use tempfile::TempDir;
use waybill_auditor::catalogue::{History, HistoryError, WRITER, append, history};
use waybill_events::log::{Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::gate::NO_EPOCH;
use waybill_schema::event::Batch;
use waybill_schema::frame::{Frame, Link};
use waybill_schema::time::Time;

use crate::rows::channel;

/// A log with `n` batches, batch `i` made at time `i`.
fn log(n: u64) -> (TempDir, SqliteLog) {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("waybill.db");
    let mut log = SqliteLog::open(&path, Box::new(|_, _| Ok(()))).expect("a new file opens");
    edit(&mut log, n);
    (folder, log)
}

fn edit(log: &mut SqliteLog, n: u64) {
    let mut rows = history(log).expect("the log can be read").rows;
    for _ in 0..n {
        let revision = rows.revision + 1;
        let batch = rows.batch_to(vec![channel("a", &revision.to_string())], "me", "edit", None);
        rows.apply(&batch).expect("the batch fits");
        let now = i64::try_from(revision).expect("few batches");
        append(log, batch, Time(now)).expect("the log takes the batch");
    }
}

/// Appends a line, whatever it holds, as the catalogue's next frame.
fn append_line(log: &mut SqliteLog, line: &str) {
    let last = log.last(&WRITER.into()).expect("the log can be read").expect("the log has batches");
    let first = last.header.last() + 1;
    let frame = Frame::seal(WRITER.into(), NO_EPOCH, Link::after(&last.header), first, 1, line.as_bytes());
    log.append(&[frame], Some(last.seq), Time(9)).expect("the log takes the frame");
}

fn change(log: &SqliteLog, sql: &str) {
    log.connection().execute_batch(sql).expect("the file can be changed");
}

/// Reads on from revision 2 until the log cannot be trusted, twice; gives the error in words.
fn stopped(log: &mut SqliteLog) -> String {
    let mut history = History::default();
    let errors = [(); 2].map(|()| history.follow(log).expect_err("the log cannot be trusted"));
    assert_eq!((history.rows.revision, history.batches.len(), history.misfits.len()), (2, 2, 0));
    let [first, again] = errors.map(|error| error.to_string());
    assert_eq!(first, again);
    first
}

#[test]
fn the_history_grows_by_what_is_new() {
    let (_folder, mut log) = log(0);
    let mut history = History::default();
    assert!(!history.follow(&mut log).expect("the log can be read"));
    // More than are read at once.
    edit(&mut log, 300);
    assert!(history.follow(&mut log).expect("the log can be read"));
    assert!(!history.follow(&mut log).expect("the log can be read"));
    assert_eq!((history.rows.revision, history.seq, history.batches.len()), (300, Seq(300), 300));
    assert_eq!((history.batches[299].revision, history.made[299]), (300, Time(300)));
}

#[test]
fn a_damaged_frame_stops_the_reading_there() {
    let (_folder, mut log) = log(4);
    change(&log, "UPDATE frames SET body = CAST(replace(CAST(body AS TEXT), 'edit', 'EDIT') AS BLOB) WHERE seq = 3");
    assert_eq!(stopped(&mut log), "the catalogue's frame 3 cannot be read");
}

#[test]
fn a_frame_left_out_stops_the_reading_there() {
    let (_folder, mut log) = log(4);
    change(&log, "DELETE FROM frames WHERE seq = 3");
    let why = stopped(&mut log);
    assert_eq!(why, "the catalogue's frame 4 does not continue the chain: Number { due: 3, came: 4 }");
}

#[test]
fn what_a_newer_program_wrote_stops_the_reading_there() {
    let (_folder, mut log) = log(2);
    append_line(&mut log, "{\"k\":\"catalogue\",\"v\":99,\"n\":3,\"t\":1,\"b\":{}}\n");
    assert_eq!(stopped(&mut log), "the catalogue's frame 3 holds event `catalogue` version 99: upgrade this program");
}

#[test]
fn a_line_that_is_no_fact_stops_the_reading_there() {
    let (_folder, mut log) = log(2);
    append_line(&mut log, "{\"k\":\"catalogue\",\"v\":1,\"n\":3,\"t\":1,\"b\":{}}\n");
    let why = stopped(&mut log);
    assert!(why.starts_with("the catalogue's frame 3 holds a line that cannot be decoded:"), "{why}");
}

#[test]
fn a_batch_that_does_not_fit_is_left_out_and_told() {
    let (_folder, mut log) = log(2);
    let rows = history(&mut log).expect("the log can be read").rows;
    let mut wrong = rows.batch_to(Vec::new(), "me", "edit", None);
    wrong.ops[0].before = None;
    append(&mut log, Batch { revision: 3, ..wrong }, Time(3)).expect("the log does not look into it");
    let history = history(&mut log).expect("the log can be read");
    let misfits: Vec<String> = history.misfits.iter().map(|(seq, why)| format!("{seq}: {why}")).collect();
    assert_eq!(misfits, ["3: the before-image of channel `a` is not what the catalogue holds"]);
    assert_eq!((history.rows.revision, history.seq), (2, Seq(3)));
}

#[test]
fn a_log_that_lost_its_tail_and_grew_again_is_noticed() {
    let (_folder, mut log) = log(3);
    let mut history = history(&mut log).expect("the log can be read");
    change(&log, "DELETE FROM frames WHERE seq >= 2");
    change(&log, "UPDATE sqlite_sequence SET seq = 1 WHERE name = 'frames'");
    assert!(!history.follow(&mut log).expect("nothing is behind the last frame read"));
    let late = |log: &mut SqliteLog| {
        let rows = waybill_auditor::catalogue::history(log).expect("the log can be read").rows;
        let batch = rows.batch_to(vec![channel("other", "x")], "me", "edit", None);
        append(log, batch, Time(7)).expect("the log takes the batch");
    };
    (0..3).for_each(|_| late(&mut log));
    let error = history.follow(&mut log).expect_err("frame 4 is of another chain");
    assert!(matches!(error, HistoryError::Chain { seq: Seq(4), .. }), "{error:?}");
}
