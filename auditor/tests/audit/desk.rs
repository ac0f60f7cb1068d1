//! Batches into the log: a file once, one of two edits, and a log that loses what was said to it or what it answers.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Barrier;
use std::thread;

use waybill_auditor::catalogue::{BatchError, append, history, plan};
use waybill_events::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::story::Teller;
use waybill_projector::embedded;
use waybill_schema::catalogue::Row;
use waybill_schema::event::{Batch, Class, Fact};
use waybill_schema::frame::Frame;
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::rows::channel;

/// What happens to the next append on its way.
enum Fault {
    /// The log never hears of it.
    RequestLost,
    /// The log stores it, and its answer is lost.
    AnswerLost,
    /// The log stores it, and another auditor's batch after it; the answer is lost.
    AnswerLostAndMore(Box<Batch>),
    /// Another auditor's batch comes first, and the log never hears of this one.
    RivalFirst(Box<Batch>),
}

/// A log at the end of a bad line.
struct Line {
    log: SqliteLog,
    faults: VecDeque<Fault>,
}

impl Log for Line {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        let Some(fault) = self.faults.pop_front() else { return self.log.append(frames, expected, sent) };
        let heard = matches!(fault, Fault::AnswerLost | Fault::AnswerLostAndMore(_));
        if heard {
            self.log.append(frames, expected, sent).expect("the log takes the frame");
        }
        if let Fault::AnswerLostAndMore(batch) | Fault::RivalFirst(batch) = fault {
            append(&mut self.log, *batch, sent).expect("the log takes the other batch");
        }
        Err(AppendError::Unavailable("the line is bad".into()))
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        self.log.last(writer)
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.log.read(after, frames_max)
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.log.read_of(writer, after, frames_max)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        self.log.head()
    }
}

/// A batch of `actor` that makes channel `id`, planned against what the log holds.
fn planned(log: &mut dyn Log, actor: &str, id: &str) -> Batch {
    let rows = history(log).expect("the log can be read").rows;
    let standing = rows.iter().map(|(_, stored)| stored.row.clone());
    rows.batch_to(standing.chain([channel(id, "x")]).collect(), actor, "edit", None)
}

fn open(path: &Path) -> SqliteLog {
    SqliteLog::open(path, Box::new(|_, _| Ok(()))).expect("the file opens")
}

/// The actors of the log's batches, in order.
fn actors(log: &mut dyn Log) -> Vec<String> {
    let history = history(log).expect("the log can be read");
    assert!(history.misfits.is_empty(), "{:?}", history.misfits);
    history.batches.into_iter().map(|batch| batch.actor).collect()
}

/// Appends a batch of `me` after one of `first` over a line with `faults`; gives how it ended and who is in the log.
fn over_a_bad_line(faults: impl FnOnce(&Batch) -> Vec<Fault>) -> (Result<Seq, BatchError>, Vec<String>) {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let mut line = Line { log: open(&folder.path().join("waybill.db")), faults: VecDeque::new() };
    let first = planned(&mut line, "first", "a");
    append(&mut line, first, Time(1)).expect("the log takes the first batch");
    let batch = planned(&mut line, "me", "b");
    line.faults.extend(faults(&batch));
    let ended = append(&mut line, batch, Time(2));
    (ended, actors(&mut line))
}

#[test]
fn a_batch_whose_answer_was_lost_is_found_and_not_made_twice() {
    let (ended, actors) = over_a_bad_line(|_| vec![Fault::AnswerLost]);
    assert_eq!((ended.expect("it is stored"), actors), (Seq(2), vec!["first".to_owned(), "me".to_owned()]));

    let (ended, actors) = over_a_bad_line(|batch| {
        let more = Batch { revision: 3, actor: "other".to_owned(), ops: Vec::new(), ..batch.clone() };
        vec![Fault::AnswerLostAndMore(Box::new(more))]
    });
    assert_eq!((ended.expect("it is stored"), actors.join(" ")), (Seq(2), "first me other".to_owned()));
}

#[test]
fn a_batch_that_was_lost_on_its_way_is_sent_again() {
    let (ended, actors) = over_a_bad_line(|_| vec![Fault::RequestLost, Fault::RequestLost]);
    assert_eq!((ended.expect("it is stored"), actors.join(" ")), (Seq(2), "first me".to_owned()));
}

#[test]
fn a_batch_that_another_one_overtook_is_a_conflict_and_never_stored() {
    let (ended, actors) = over_a_bad_line(|batch| {
        vec![Fault::RivalFirst(Box::new(Batch { actor: "rival".to_owned(), ..batch.clone() }))]
    });
    let error = ended.expect_err("another batch came first").to_string();
    let expected = "catalogue revision 2 by rival came before revision 2 of this batch: look again, then try again";
    assert_eq!((error.as_str(), actors.join(" ")), (expected, "first rival".to_owned()));
}

#[test]
fn a_log_that_stays_silent_leaves_it_open() {
    let (ended, actors) = over_a_bad_line(|_| (0..100).map(|_| Fault::RequestLost).collect());
    assert!(matches!(ended, Err(BatchError::Unknown { batch: 2, .. })), "{ended:?}");
    assert_eq!(actors, ["first"]);
}

#[test]
fn a_log_that_refuses_is_asked_once() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("waybill.db");
    let batch = planned(&mut open(&path), "me", "a");
    let mut reader = SqliteLog::open_read_only(&path).expect("the file opens for reading");
    let error = append(&mut reader, batch, Time(1)).expect_err("a reader cannot append");
    assert!(matches!(error, BatchError::Refused(_)), "{error:?}");
}

#[test]
fn a_file_is_applied_once_and_an_edit_since_then_stays() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("waybill.db");
    let (mut log, start) = embedded::open(&path).expect("a new file opens");
    let mut rows = start.fold.rows;
    let first = plan(&rows, vec![channel("a", "http://a/v1")], "hash-1").expect("a new file gives a batch");
    rows.apply(&first).expect("the batch fits");
    append(&mut log, first, Time(1)).expect("the log takes the batch");

    let edit = rows.batch_to(vec![channel("a", "http://b/v1")], "admin", "moved", None);
    append(&mut log, edit.clone(), Time(2)).expect("the log takes the edit");
    drop(log);

    let (mut log, start) = embedded::open(&path).expect("the file opens again");
    let rows = start.fold.rows;
    assert_eq!((rows.revision, rows.file.as_deref()), (2, Some("hash-1")));
    assert!(start.fold.misfits.is_empty() && !start.fold.gate.summary().tainted());
    assert_eq!(plan(&rows, vec![channel("a", "http://a/v1")], "hash-1"), None);

    let error = append(&mut log, edit, Time(3)).expect_err("the same revision cannot be made twice");
    assert!(matches!(&error, BatchError::Conflict { batch: 2, log: 2, actor } if actor == "admin"), "{error:?}");
    let batch = plan(&rows, Vec::new(), "hash-2").expect("another file gives a batch");
    let ahead = Batch { revision: 9, ..batch.clone() };
    let error = append(&mut log, ahead, Time(4)).expect_err("a revision cannot be left out");
    assert!(matches!(error, BatchError::Ahead { batch: 9, log: 2 }), "{error:?}");
    append(&mut log, batch, Time(5)).expect("the log takes the next revision");
}

fn tell(log: &mut SqliteLog, gateway: &mut Teller, facts: &[Fact]) {
    let last = log.last(&gateway.writer).expect("the log can be read");
    log.append(&[gateway.seals(facts)], last.map(|last| last.seq), Time(0)).expect("the log takes the frame");
}

/// Both auditors look, plan, and append at once, beside a gateway's process that folds what it meets.
#[test]
fn of_two_edits_at_once_one_is_a_conflict_and_none_is_half() {
    const ROUNDS: usize = 25;
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("waybill.db");
    let (mut log, _) = embedded::open(&path).expect("a new file opens");
    let mut gateway = Teller::new("gw");
    let facts = [gateway.starts(0), gateway.selects(1, "r", 1, "a")];
    tell(&mut log, &mut gateway, &facts);

    for round in 0..ROUNDS {
        let barrier = Barrier::new(2);
        let race = |actor: &str| {
            let mut log = open(&path);
            let rows = history(&mut log).expect("the log can be read").rows;
            let target = ["x", "y"].map(|id| channel(id, &format!("{actor} {round}")));
            let batch = rows.batch_to(target.into(), actor, "edit", None);
            barrier.wait();
            append(&mut log, batch, Time(1))
        };
        let [one, two] = thread::scope(|scope| {
            ["one", "two"].map(|actor| scope.spawn(move || race(actor))).map(|thread| thread.join().expect("no panic"))
        });
        let (winner, loser) = if one.is_ok() { ("one", two) } else { ("two", one) };
        let error = loser.expect_err("one of the two is a conflict");
        let revision = round as u64 + 1;
        assert!(
            matches!(&error, BatchError::Conflict { batch, log, actor }
                if (*batch, *log, actor.as_str()) == (revision, revision, winner)),
            "{error:?}"
        );
        let rows = history(&mut log).expect("the log can be read").rows;
        let standing: Vec<Row> = rows.iter().map(|(_, stored)| stored.row.clone()).collect();
        assert_eq!(standing, ["x", "y"].map(|id| channel(id, &format!("{winner} {round}"))));
    }

    let facts = [gateway.ends_send(2, "r", 1, Class::Success)];
    tell(&mut log, &mut gateway, &facts);
    drop(log);
    let (_, start) = embedded::open(&path).expect("the file opens again");
    assert_eq!((start.fold.rows.revision, start.rebuilt, start.n_quarantined), (ROUNDS as u64, false, 0));
    assert!(start.fold.misfits.is_empty() && !start.fold.gate.summary().tainted());
}
