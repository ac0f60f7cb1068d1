//! The embedded projector: usage rows written in the very transaction that appends their frame.
//!
//! What it keeps in memory (the gate, the requests under way) is a fold of the log too: [`open`] builds it again in
//! one pass that also gives the routing state and the catalogue, so a start decodes every fact once. Where an append
//! fails after its frames were folded, their effect in memory is taken back before the next one.
//!
//! The frames of an append are folded together: a session that many of them change is read and written once. Facts that
//! this process has just made need not be read out of their lines ([`Handover`]).

mod verify;

use std::path::Path;
use std::sync::Arc;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use waybill_events::handover::Handover;
use waybill_events::log::{Seq, StoredFrame};
use waybill_events::sqlite::{self, SqliteLog, integer, stored_frame};
use waybill_projections::fold::Fold;
use waybill_projections::gate::Gate;
use waybill_projections::usage::{Journal, Row, UsageFold};
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::Header;

pub use verify::{TableSum, Verified, verify};

use crate::reader::{Newer, Read, each_fact, each_fact_or_line, tell};
use crate::rows::{self, Checkpoint};

/// Why a frame cannot be projected.
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// A newer program wrote to the log.
    #[error(transparent)]
    Newer(#[from] Newer),
    /// SQLite failed.
    #[error("the embedded store failed")]
    Sqlite(#[from] rusqlite::Error),
}

impl From<ProjectError> for rusqlite::Error {
    fn from(error: ProjectError) -> Self {
        match error {
            ProjectError::Sqlite(error) => error,
            other => Self::ToSqlConversionFailure(Box::new(other)),
        }
    }
}

/// Why the embedded store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The log cannot.
    #[error(transparent)]
    Log(#[from] sqlite::OpenError),
    /// Its frames cannot be projected.
    #[error(transparent)]
    Project(#[from] ProjectError),
}

/// What a program that starts has read out of the log.
#[derive(Debug)]
pub struct Start {
    /// The gate, the routing state and the catalogue, to be carried on; the requests under way stay with the projector.
    pub fold: Fold,
    /// Lines and frames in quarantine.
    pub n_quarantined: u64,
    /// The last frame.
    pub seq: Seq,
    /// Whether all rows were made anew: the fold's version or the log under the checkpoint had changed.
    pub rebuilt: bool,
    /// Where the projector looks for the facts of a frame before it reads their lines.
    pub handover: Arc<Handover>,
}

/// Opens the embedded log at `path` with its projector, and folds what it holds.
///
/// Refuses to where a newer program has written to it: a program that cannot read the log cannot serve by it.
pub fn open(path: &Path) -> Result<(SqliteLog, Start), OpenError> {
    let log = SqliteLog::open(path, Box::new(|_, _| Ok(())))?;
    let (mut projector, start) = EmbeddedProjector::resume(log.connection())?;
    drop(log);
    let log = SqliteLog::open(path, Box::new(move |transaction, frames| projector.fold(transaction, frames)))?;
    Ok((log, start))
}

/// What making the rows anew came to.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Rebuilt {
    /// The last frame.
    pub seq: Seq,
    /// The digest of the routing state, as 64 hex digits.
    pub state: String,
    /// Its tables.
    pub tables: Vec<TableSum>,
    /// The tables as they were.
    pub before: Vec<TableSum>,
}

/// Makes all rows of the file at `path` anew from its frames, in one transaction.
///
/// Whoever appends meanwhile waits, and its projector goes on behind the new rows.
pub fn rebuild(path: &Path) -> Result<Rebuilt, OpenError> {
    let log = SqliteLog::open(path, Box::new(|_, _| Ok(())))?;
    Ok(anew(log.connection())?)
}

fn anew(connection: &Connection) -> Result<Rebuilt, ProjectError> {
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    let before = verify::sums(&transaction, "main")?;
    rows::clear(&transaction)?;
    let mut replay = Replay::default();
    replay.run(&transaction, 0, u64::MAX)?;
    let tables = verify::sums(&transaction, "main")?;
    transaction.commit()?;
    Ok(Rebuilt { seq: Seq(replay.seq), state: replay.fold.state.digest(), tables, before })
}

/// Projects frames into the rows of the file that holds them.
#[derive(Debug, Default)]
pub struct EmbeddedProjector {
    gate: Gate,
    usage: UsageFold,
    /// The last frame folded.
    at: Checkpoint,
    /// What the frames of the last transaction changed, in order: it may have failed.
    steps: Vec<Step>,
    handover: Arc<Handover>,
}

/// How to go back to before a run of frames.
#[derive(Debug)]
struct Step {
    at: Checkpoint,
    gate: Gate,
    journal: Journal,
}

impl EmbeddedProjector {
    /// A projector at the start of an empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Folds the whole log behind `connection` in one pass, and writes rows for what no checkpoint covers yet.
    ///
    /// A checkpoint of another fold version, or one whose frame the log does not hold, is worth nothing: then all
    /// rows are made anew. The rows and their checkpoint change in one transaction or not at all.
    pub fn resume(connection: &Connection) -> Result<(Self, Start), ProjectError> {
        let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
        let standing = Checkpoint::read(&transaction, "main")?;
        let kept = match standing.clone() {
            Some(checkpoint) if Checkpoint::at(&transaction, checkpoint.seq)? == checkpoint => Some(checkpoint),
            _ => None,
        };
        if kept.is_none() {
            rows::clear(&transaction)?;
        }
        let rebuilt = standing.is_some() && kept.is_none();
        let mut replay = Replay::default();
        replay.run(&transaction, kept.unwrap_or_default().seq, u64::MAX)?;
        let n_quarantined = transaction.query_row("SELECT count(*) FROM quarantine", [], |row| row.get::<_, i64>(0))?;
        let at = Checkpoint::at(&transaction, replay.seq)?;
        transaction.commit()?;
        let mut fold = replay.fold;
        let (gate, usage, seq) = (fold.gate.clone(), std::mem::take(&mut fold.usage), Seq(replay.seq));
        let n_quarantined = n_quarantined.unsigned_abs();
        let handover = Arc::<Handover>::default();
        let start = Start { fold, n_quarantined, seq, rebuilt, handover: handover.clone() };
        Ok((Self { gate, usage, at, steps: Vec::new(), handover }, start))
    }

    /// Projects frames that are being appended, in the transaction that appends them.
    ///
    /// Frames that were appended past this projector since its last ones are folded first.
    pub fn fold(&mut self, transaction: &Transaction<'_>, frames: &[StoredFrame]) -> Result<(), rusqlite::Error> {
        let Some(first) = frames.first() else { return Ok(()) };
        let covered = Checkpoint::read(transaction, "main")?.unwrap_or_default();
        self.go_back_to(&covered, transaction)?;
        if self.at.seq + 1 < first.seq.0 {
            let missed = frames_between(transaction, self.at.seq, first.seq.0)?;
            self.step(transaction, &missed, covered.seq)?;
        }
        Ok(self.step(transaction, frames, covered.seq)?)
    }

    /// Folds a run of frames, and writes the rows of those that are not `covered` yet.
    fn step(
        &mut self,
        transaction: &Transaction<'_>,
        frames: &[StoredFrame],
        covered: u64,
    ) -> Result<(), ProjectError> {
        let journal = Journal::behind(self.at.seq);
        self.steps.push(Step { at: self.at.clone(), gate: self.gate.clone(), journal });
        let mut rows = Vec::new();
        for frame in frames {
            self.project(transaction, frame, covered, &mut rows)?;
        }
        if self.at.seq > covered {
            write(transaction, &rows)?;
            self.at.write(transaction)?;
        }
        Ok(())
    }

    /// Brings the fold in memory back to what the transaction holds: frames beyond it were not kept.
    fn go_back_to(&mut self, covered: &Checkpoint, transaction: &Transaction<'_>) -> Result<(), ProjectError> {
        let astray = |at: &Checkpoint| at.seq > covered.seq || (at.seq == covered.seq && at.sum != covered.sum);
        while astray(&self.at)
            && let Some(step) = self.steps.pop()
        {
            self.usage.take_back(step.journal);
            (self.gate, self.at) = (step.gate, step.at);
        }
        self.steps.clear();
        if astray(&self.at) {
            let mut replay = Replay::default();
            replay.run(transaction, covered.seq, covered.seq)?;
            (self.gate, self.usage, self.at) = (replay.fold.gate, replay.fold.usage, covered.clone());
        }
        Ok(())
    }

    /// Folds one frame, and puts its rows at the end of `rows` where they are not `covered` yet.
    fn project(
        &mut self,
        transaction: &Transaction<'_>,
        stored: &StoredFrame,
        covered: u64,
        rows: &mut Vec<Row>,
    ) -> Result<(), ProjectError> {
        let Self { gate, usage, at, steps, handover } = self;
        let journal = &mut steps.last_mut().expect("a step was begun").journal;
        let seq = stored.seq.0;
        *at = Checkpoint::of(seq, String::new());
        let fresh = seq > covered;
        // The file has no clock of its own, so that a fact happened when it was made.
        let made = |header: &Header| handover.take(header).filter(|_| stored.stored == stored.sent);
        let sum = each_fact_or_line::<ProjectError>(stored, made, |read| {
            match read {
                Read::Fact(fact) => {
                    let verdict = gate.admit(&fact);
                    if verdict.folds() {
                        usage.apply_noting(&fact, seq, rows, journal);
                    }
                    if verdict.folds() && fresh {
                        own(transaction, &fact)?;
                    }
                    tell(&verdict);
                }
                Read::Unread(unread) => {
                    tell(&gate.pass_over(&unread.revision));
                    if fresh {
                        rows::quarantine(transaction, seq, unread)?;
                    }
                }
                Read::NoFrame(error) if fresh => rows::quarantine_frame(transaction, stored, &error)?,
                Read::NoFrame(_) => {}
            }
            Ok(())
        })?;
        if !fresh {
            rows.clear();
        }
        self.at = match sum {
            Some(sum) => Checkpoint::of(seq, sum),
            None => Checkpoint::at(transaction, seq)?,
        };
        Ok(())
    }
}

/// A fold of the log from its start that writes only what is not covered yet.
#[derive(Default)]
struct Replay {
    fold: Fold,
    seq: u64,
}

impl Replay {
    /// Folds the frames up to `end`, and writes rows and checkpoint for those beyond `covered`.
    fn run(&mut self, connection: &Connection, covered: u64, end: u64) -> Result<(), ProjectError> {
        let mut statement =
            connection.prepare("SELECT seq, stored, sent, body FROM frames WHERE seq <= ?1 ORDER BY seq")?;
        let mut frames = statement.query([integer(end)])?;
        let mut rows = Vec::new();
        while let Some(row) = frames.next()? {
            let frame = stored_frame(row)?;
            self.take(connection, &frame, covered, &mut rows)?;
            self.seq = frame.seq.0;
            if self.seq > covered {
                write(connection, &rows)?;
            }
            rows.clear();
        }
        if self.seq > covered {
            Checkpoint::at(connection, self.seq)?.write(connection)?;
        }
        Ok(())
    }

    fn take(
        &mut self,
        connection: &Connection,
        frame: &StoredFrame,
        covered: u64,
        rows: &mut Vec<Row>,
    ) -> Result<(), ProjectError> {
        let (seq, fold) = (frame.seq.0, &mut self.fold);
        let fresh = seq > covered;
        each_fact::<ProjectError>(frame, |read| {
            match read {
                Read::Fact(fact) => {
                    let verdict = fold.apply(&fact, seq, rows);
                    if verdict.folds() && fresh {
                        own(connection, &fact)?;
                    }
                    tell(&verdict);
                }
                Read::Unread(unread) => {
                    tell(&fold.gate.pass_over(&unread.revision));
                    if fresh {
                        rows::quarantine(connection, seq, unread)?;
                    }
                }
                Read::NoFrame(error) if fresh => rows::quarantine_frame(connection, frame, &error)?,
                Read::NoFrame(_) => {}
            }
            Ok(())
        })?;
        Ok(())
    }
}

fn frames_between(connection: &Connection, after: u64, before: u64) -> Result<Vec<StoredFrame>, rusqlite::Error> {
    let sql = "SELECT seq, stored, sent, body FROM frames WHERE seq > ?1 AND seq < ?2 ORDER BY seq";
    let mut statement = connection.prepare_cached(sql)?;
    let frames = statement.query_map([integer(after), integer(before)], stored_frame)?;
    frames.collect()
}

/// Writes what `fact` says of a response's owner, if it does.
fn own(connection: &Connection, fact: &Fact) -> Result<(), rusqlite::Error> {
    match &fact.event {
        Event::Ownership(ownership) => rows::own(connection, ownership, fact.at),
        _ => Ok(()),
    }
}

fn write(connection: &Connection, rows: &[Row]) -> Result<(), rusqlite::Error> {
    let n_left_out = rows::insert(connection, rows)?;
    if n_left_out > 0 {
        tracing::error!(n_left_out, "rows stand already: the first ones stay");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rusqlite::types::Value;
    use tempfile::TempDir;
    use waybill_events::log::{AppendError, Log};
    use waybill_projections::story::Teller;
    use waybill_schema::FOLD_VERSION;
    use waybill_schema::event::{Class, Endpoint, Epoch, Outcome, Ownedness, Ownership, SessionSource};
    use waybill_schema::frame::Frame;
    use waybill_schema::time::Time;

    use super::*;

    /// A file with a projector and one gateway that writes to it.
    struct Store {
        dir: TempDir,
        log: SqliteLog,
        start: Start,
        gateway: Teller,
    }

    impl Store {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a temporary directory can be made");
            let (log, start) = open(&dir.path().join("waybill.db")).expect("a new file opens");
            Self { dir, log, start, gateway: Teller::new("gw") }
        }

        /// Ends the process and begins the next one.
        fn reopen(self) -> Result<Self, OpenError> {
            let Self { dir, log, gateway, .. } = self;
            drop(log);
            let (log, start) = open(&dir.path().join("waybill.db"))?;
            Ok(Self { dir, log, start, gateway })
        }

        fn append(&mut self, frames: &[Frame]) -> Result<(), AppendError> {
            let last = self.log.last(&self.gateway.writer).expect("the log can be read");
            self.log.append(frames, last.map(|last| last.seq), Time(0)).map(drop)
        }

        fn tell(&mut self, facts: &[Fact]) {
            let frame = self.gateway.seals(facts);
            self.append(&[frame]).expect("the log takes the frame");
        }

        /// All rows of a query as text.
        fn rows(&self, sql: &str) -> Vec<String> {
            let mut statement = self.log.connection().prepare(sql).expect("the query is good");
            let n = statement.column_count();
            let rows = statement.query_map([], |row| {
                let columns: Result<Vec<String>, _> = (0..n).map(|i| row.get::<_, Value>(i).map(in_text)).collect();
                Ok(columns?.join(" "))
            });
            rows.and_then(Iterator::collect).expect("the rows can be read")
        }

        /// The digest of the routing state that a start would have.
        fn reopened_state(&self) -> String {
            let (_, start) = EmbeddedProjector::resume(self.log.connection()).expect("the log can be folded");
            start.fold.state.digest()
        }

        fn everything(&self) -> Vec<String> {
            let tables = ["usage_events", "usage_attempts", "sessions", "response_owners", "quarantine", "checkpoints"];
            tables.iter().flat_map(|table| self.rows(&format!("SELECT * FROM {table} ORDER BY 1, 2"))).collect()
        }
    }

    fn in_text(value: Value) -> String {
        match value {
            Value::Null => "-".to_owned(),
            Value::Integer(n) => n.to_string(),
            Value::Real(x) => x.to_string(),
            Value::Text(text) => text,
            Value::Blob(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        }
    }

    const ATTEMPTS: &str = "SELECT request_id, attempt, deployment, reason, class, status, latency_ms, first_token_ms,
                            input, output, cached, estimated, cost_nano FROM usage_attempts ORDER BY 1, 2";
    const EVENTS: &str = "SELECT request_id, scope, key_id, group_id, model, endpoint, stream, session_id,
                          session_source, signal, sticky_type, sticky_hit, fallback, outcome, error_class, status,
                          attempts, deployment, latency_ms, seq_first, seq_last FROM usage_events ORDER BY 1";

    /// A request that fails over from `a` to `b`.
    fn fails_over(gw: &mut Teller) -> [Fact; 6] {
        [
            gw.starts(0),
            gw.selects(10, "r", 1, "a"),
            gw.ends_send(60, "r", 1, Class::Upstream5xx),
            gw.selects(61, "r", 2, "b"),
            gw.ends_send(111, "r", 2, Class::Success),
            gw.ends(112, "r", Outcome::Success, Class::Success, 2),
        ]
    }

    /// The same, told one fact a frame.
    fn failed_over(store: &mut Store) {
        let facts = fails_over(&mut store.gateway);
        facts.iter().for_each(|fact| store.tell(std::slice::from_ref(fact)));
    }

    /// S1.11, S3.25: who asked for what, where it went, by what signal, and how each send ended.
    #[test]
    fn an_append_leaves_the_rows_of_what_ended() {
        let mut store = Store::new();
        failed_over(&mut store);
        assert_eq!(
            store.rows(ATTEMPTS),
            ["r 1 a/gpt affinity upstream5xx 502 50 - - - - 0 -", "r 2 a/gpt next success 200 50 9 100 20 - 0 7"],
        );
        assert_eq!(
            store.rows(EVENTS),
            ["r acme acme main gpt responses 1 s-1 explicit header:x-session-id conv 1 0 success - 200 2 b 70 2 6"],
        );
    }

    /// S3.9, S3.24
    #[test]
    fn the_first_owner_of_a_response_stands_and_becomes_final_once() {
        let mut store = Store::new();
        let gw = &mut store.gateway;
        let owns = |response: &str, deployment: &str, state| {
            Event::Ownership(Box::new(Ownership {
                response: response.into(),
                state,
                request: "r".into(),
                scope: "acme".into(),
                model: "gpt".into(),
                endpoint: Endpoint::Responses,
                deployment: deployment.into(),
                channel: "a".into(),
                incarnation: 3,
                session: "s-1".into(),
                source: SessionSource::Parent,
            }))
        };
        let (provisional, ended) = (Ownedness::Provisional, Ownedness::Final);
        let facts = [
            gw.starts(0),
            gw.says(1, owns("h1", "a", provisional)),
            gw.says(2, owns("h1", "a", ended)),
            gw.says(3, owns("h2", "a", provisional)),
            gw.says(4, owns("h2", "b", ended)),
            gw.says(5, owns("h3", "c", ended)),
            gw.says(6, owns("h3", "c", provisional)),
        ];
        facts.iter().for_each(|fact| store.tell(std::slice::from_ref(fact)));
        let expected = [
            "acme h1 gpt responses final 1 r a a 3 s-1 parent",
            "acme h2 gpt responses provisional 3 r a a 3 s-1 parent",
            "acme h3 gpt responses final 5 r c a 3 s-1 parent",
        ];
        assert_eq!(store.rows("SELECT * FROM response_owners ORDER BY response"), expected);
        store.log.connection().execute_batch("UPDATE checkpoints SET fold_version = 0").expect("a row can be changed");
        let store = store.reopen().expect("the file opens");
        assert!(store.start.rebuilt);
        assert_eq!(store.rows("SELECT * FROM response_owners ORDER BY response"), expected);
    }

    #[test]
    fn a_killed_process_leaves_its_requests_abandoned_once() {
        let mut store = Store::new();
        let facts = [store.gateway.starts(0), store.gateway.selects(10, "r", 1, "a")];
        store.tell(&facts);
        let mut store = store.reopen().expect("the file opens again");
        assert_eq!(store.rows(EVENTS), [""; 0]);
        assert_eq!(store.start.fold.gate.summary().writers["gw"], Epoch { epoch: 1, last: 2 });
        let started = store.gateway.starts(500);
        store.tell(&[started]);
        let expected = store.everything();
        assert_eq!(store.rows("SELECT class, ended FROM usage_attempts"), ["abandoned -"]);
        assert_eq!(store.rows("SELECT outcome, latency_ms, seq_last FROM usage_events"), ["abandoned - 1"]);
        let store = store.reopen().expect("the file opens a third time");
        assert_eq!((store.everything(), store.start.rebuilt), (expected, false));
    }

    /// S3.25: each send counts once, whichever frame says what of it.
    #[test]
    fn a_session_is_what_its_requests_and_sends_add_up_to() {
        let mut store = Store::new();
        failed_over(&mut store);
        let gw = &mut store.gateway;
        let facts = [
            gw.selects(200, "q", 1, "a"),
            gw.starts(300),
            gw.ends_send(310, "q", 2, Class::Success),
            gw.selects(400, "p", 1, "a"),
            gw.ends_send(450, "p", 1, Class::Success),
            gw.ends(451, "p", Outcome::Success, Class::Success, 1),
        ];
        facts.iter().for_each(|fact| store.tell(std::slice::from_ref(fact)));
        // r failed over; q was abandoned, and a send of it came home later; p was answered at once.
        let sql =
            "SELECT session_id, scope, last_request, session_source, requests, failed, models, deployments, sends,
                       sends_unknown, sends_estimated, input, output, cached, cost_nano FROM sessions";
        let expected = r#"s-1 acme p explicit 3 1 ["gpt"] ["a","a/gpt"] 5 2 0 300 60 - 21"#;
        assert_eq!(store.rows(sql), [expected]);
    }

    #[test]
    fn a_damaged_line_is_quarantined_and_its_neighbours_live() {
        let mut store = Store::new();
        let gw = &mut store.gateway;
        let facts = [
            gw.starts(0),
            gw.selects(10, "r", 1, "a"),
            gw.ends_send(60, "r", 1, Class::Success),
            gw.ends(61, "r", Outcome::Success, Class::Success, 1),
        ];
        let whole = Teller::new("gw").seals(&facts);
        let mut lines: Vec<&[u8]> = whole.lines().collect();
        let damaged = b"{\"k\":\"attempt\",\"v\":1,\"n\":3,\"t\":60,\"b\":{\"reque\xff";
        lines[2] = damaged;
        let mut bytes = lines.join(&b'\n');
        bytes.push(b'\n');
        let frame = gw.seals_lines(&facts[0].revision, 4, &bytes);
        store.append(&[frame]).expect("the log takes a frame with a damaged line");
        assert_eq!(store.rows("SELECT class FROM usage_attempts"), ["abandoned"]);
        assert_eq!(store.rows("SELECT outcome FROM usage_events"), ["success"]);
        let kept: Vec<u8> = store
            .log
            .connection()
            .query_row("SELECT bytes FROM quarantine WHERE seq = 1 AND line = 3", [], |row| row.get(0))
            .expect("the line is kept");
        assert_eq!(kept, damaged);
        let store = store.reopen().expect("the file opens again");
        assert_eq!((store.start.n_quarantined, store.start.fold.gate.summary().tainted()), (1, false));
    }

    #[test]
    fn what_a_newer_program_wrote_stops_the_append_and_the_start() {
        let mut store = Store::new();
        let started = store.gateway.starts(0);
        store.tell(&[started]);
        let fact = store.gateway.starts(1);
        let line = b"{\"k\":\"attempt\",\"v\":99,\"n\":1,\"t\":1,\"b\":{}}\n";
        let frame = store.gateway.seals_lines(&fact.revision, 1, line);
        let before = store.everything();
        store.append(std::slice::from_ref(&frame)).expect_err("the append is refused");
        assert_eq!((store.everything(), store.rows("SELECT count(*) FROM frames")), (before, vec!["1".to_owned()]));
        let path = store.dir.path().join("waybill.db");
        let mut newer = SqliteLog::open(&path, Box::new(|_, _| Ok(()))).expect("the file opens");
        newer.append(&[frame], Some(Seq(1)), Time(0)).expect("a newer program appends");
        drop(newer);
        let error = store.reopen().map(drop).expect_err("the start is refused");
        let expected = "frame 2 holds event `attempt` version 99, which a newer program wrote: upgrade this one";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn rows_made_anew_are_the_rows_that_were_there() {
        let mut store = Store::new();
        failed_over(&mut store);
        let facts = [store.gateway.selects(200, "q", 1, "a"), store.gateway.starts(300)];
        store.tell(&facts[..1]);
        store.tell(&facts[1..]);
        let expected = store.everything();
        let spoils = [
            "UPDATE checkpoints SET fold_version = 0; UPDATE usage_attempts SET cost_nano = 1",
            "UPDATE checkpoints SET frame_sum = 'other'; DELETE FROM usage_events",
            "DELETE FROM checkpoints",
            "UPDATE checkpoints SET seq = 99",
        ];
        for spoil in spoils {
            store.log.connection().execute_batch(spoil).expect("the rows can be spoiled");
            store = store.reopen().expect("the file opens again");
            assert_eq!(store.everything(), expected, "after {spoil}");
        }
        assert!(store.start.rebuilt);
    }

    fn damage(store: &Store) {
        let sql = "UPDATE usage_attempts SET cost_nano = 8, input = NULL WHERE attempt = 2; DELETE FROM usage_events;
                   INSERT INTO quarantine VALUES (9, 1, 'by hand', x'')";
        store.log.connection().execute_batch(sql).expect("the rows can be damaged");
    }

    #[test]
    fn rows_changed_by_hand_are_named_and_nothing_is_changed_by_looking() {
        let mut store = Store::new();
        failed_over(&mut store);
        let looked = |store: &Store| verify(&store.dir.path().join("waybill.db")).expect("the file can be read");
        let whole = looked(&store);
        assert_eq!((whole.seq, whole.incomparable, whole.findings.n), (Seq(6), None, 0));
        damage(&store);
        let before = store.everything();
        let damaged = looked(&store);
        let named: Vec<String> = damaged.findings.named.iter().map(ToString::to_string).collect();
        let expected = [
            "usage_events (r): is missing",
            "usage_attempts (r, 2): the log says another input, cost_nano",
            "quarantine (9, 1): the log says nothing of it",
        ];
        assert_eq!((named, damaged.findings.n), (expected.map(String::from).to_vec(), 3));
        assert_eq!(store.everything(), before);
        store.log.connection().execute_batch("UPDATE checkpoints SET fold_version = 0").expect("it can be changed");
        let why = looked(&store).incomparable;
        assert_eq!(why, Some(format!("fold 0 made them, this program has {FOLD_VERSION}")));
    }

    #[test]
    fn rows_are_made_anew_beside_the_process_that_appends_and_it_goes_on() {
        let mut store = Store::new();
        failed_over(&mut store);
        let expected = store.everything();
        damage(&store);
        let path = store.dir.path().join("waybill.db");
        let (first, second) = (rebuild(&path).expect("it can be made"), rebuild(&path).expect("it can be made"));
        assert_eq!((first.seq, &first.state, &first.tables), (second.seq, &second.state, &second.tables));
        assert_eq!((second.before == second.tables, first.before == first.tables), (true, false));
        assert_eq!(first.state, store.reopened_state());
        assert_eq!(store.everything(), expected);
        let facts = [store.gateway.selects(200, "q", 1, "a"), store.gateway.starts(300)];
        facts.iter().for_each(|fact| store.tell(std::slice::from_ref(fact)));
        assert_eq!(store.rows("SELECT request_id, outcome FROM usage_events ORDER BY 1"), ["q abandoned", "r success"]);
    }

    #[test]
    fn a_newer_event_keeps_the_rows_from_being_made_anew_and_leaves_those_that_are_there() {
        let mut store = Store::new();
        failed_over(&mut store);
        let fact = store.gateway.starts(1);
        let line = b"{\"k\":\"attempt\",\"v\":99,\"n\":1,\"t\":1,\"b\":{}}\n";
        let frame = store.gateway.seals_lines(&fact.revision, 1, line);
        let path = store.dir.path().join("waybill.db");
        let mut newer = SqliteLog::open(&path, Box::new(|_, _| Ok(()))).expect("the file opens");
        newer.append(&[frame], Some(Seq(6)), Time(0)).expect("a newer program appends");
        let before = store.everything();
        let error = rebuild(&path).expect_err("this program cannot read it");
        assert!(error.to_string().contains("event `attempt` version 99"), "{error}");
        assert_eq!(store.everything(), before);
    }

    #[test]
    fn frames_whose_transaction_failed_are_folded_anew() {
        let mut again = Teller::new("gw");
        let facts = [again.starts(0), again.selects(10, "r", 1, "a"), again.ends_send(60, "r", 1, Class::Success)];
        let frames: Vec<Frame> = facts.iter().map(|fact| again.seals(std::slice::from_ref(fact))).collect();
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let path = dir.path().join("waybill.db");
        let mut log = SqliteLog::open(&path, Box::new(|_, _| Ok(()))).expect("a new file opens");
        log.append(&frames, None, Time(0)).expect("the log takes the frames");
        let stored = log.read(Seq::START, 9).expect("the log can be read");
        let mut projector = EmbeddedProjector::new();
        projector.handover.put(facts);
        for n in [1, 3, 2, 3] {
            let transaction = Transaction::new_unchecked(log.connection(), TransactionBehavior::Immediate)
                .expect("a transaction can begin");
            projector.fold(&transaction, &stored[..n]).expect("the frames can be folded");
            transaction.rollback().expect("the transaction can be rolled back");
        }
        let transaction = Transaction::new_unchecked(log.connection(), TransactionBehavior::Immediate)
            .expect("a transaction can begin");
        projector.fold(&transaction, &stored).expect("the frames can be folded");
        transaction.commit().expect("the transaction can be committed");
        let n: i64 = log
            .connection()
            .query_row("SELECT count(*) FROM usage_attempts WHERE class = 'success'", [], |row| row.get(0))
            .expect("the rows can be read");
        assert_eq!((n, projector.gate.summary().duplicates), (1, 0));
    }

    /// ADR 40
    #[test]
    fn facts_that_are_handed_over_leave_the_rows_that_their_lines_leave() {
        let (mut read, mut handed) = (Store::new(), Store::new());
        failed_over(&mut read);
        let facts = fails_over(&mut handed.gateway);
        handed.start.handover.put(facts.clone());
        facts.iter().for_each(|fact| handed.tell(std::slice::from_ref(fact)));
        assert_eq!(handed.everything(), read.everything());
    }

    /// ADR 40: of these rows only the cost is not what the line says.
    #[test]
    fn a_fact_that_is_handed_over_is_not_read_from_its_line() {
        let mut store = Store::new();
        let facts = fails_over(&mut store.gateway);
        let mut other = facts.clone();
        let Event::Attempt(attempt) = &mut other[4].event else { panic!("the fifth fact ends a send") };
        attempt.cost_nano = Some(8);
        store.start.handover.put(other);
        facts.iter().for_each(|fact| store.tell(std::slice::from_ref(fact)));
        let costs = "SELECT cost_nano FROM usage_attempts ORDER BY attempt";
        assert_eq!(store.rows(costs), ["-", "8"]);
        let rebuilt = rebuild(&store.dir.path().join("waybill.db")).expect("the rows can be made anew");
        assert_ne!(rebuilt.before, rebuilt.tables);
        assert_eq!(store.rows(costs), ["-", "7"]);
    }

    /// Two handles on one file, as a process has that ships its own facts and edits the catalogue.
    #[test]
    fn frames_that_another_handle_appended_are_folded_first() {
        let mut store = Store::new();
        let (mut second, _) = open(&store.dir.path().join("waybill.db")).expect("the file opens twice");
        failed_over(&mut store);
        let mut other = Teller::new("other");
        let facts = [other.starts(0), other.selects(10, "o", 1, "a"), other.starts(20)];
        let frames: Vec<Frame> = facts.iter().map(|fact| other.seals(std::slice::from_ref(fact))).collect();
        let appended = second.append(&frames[..2], None, Time(0)).expect("the log takes the frames");
        let facts = [store.gateway.selects(200, "q", 1, "a"), store.gateway.starts(300)];
        store.tell(&facts[..1]);
        second.append(&frames[2..], appended.last().map(|frame| frame.seq), Time(0)).expect("the log takes the frame");
        store.tell(&facts[1..]);
        let outcomes = store.rows("SELECT request_id, outcome FROM usage_events ORDER BY 1");
        assert_eq!(outcomes, ["o abandoned", "q abandoned", "r success"]);
        let expected = store.everything();
        let store = store.reopen().expect("the file opens again");
        assert_eq!((store.everything(), store.start.rebuilt), (expected, false));
    }

    #[test]
    fn rows_that_somebody_removed_are_made_anew_from_the_log() {
        let mut store = Store::new();
        failed_over(&mut store);
        let expected = store.everything();
        let (mut projector, _) = EmbeddedProjector::resume(store.log.connection()).expect("the log can be folded");
        let fact = store.gateway.starts(300);
        store.tell(&[fact]);
        let stored = store.log.read(Seq(6), 1).expect("the log can be read");
        let connection = store.log.connection();
        rows::clear(connection).expect("the rows can be removed");
        let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate);
        let transaction = transaction.expect("a transaction can begin");
        projector.fold(&transaction, &stored).expect("the frames can be folded");
        transaction.commit().expect("the transaction can be committed");
        let but_checkpoint = |rows: Vec<String>| rows.split_last().map(|(_, rows)| rows.to_vec());
        assert_eq!(but_checkpoint(store.everything()), but_checkpoint(expected));
    }

    #[test]
    fn a_start_hands_over_what_the_log_means() {
        let mut store = Store::new();
        failed_over(&mut store);
        let store = store.reopen().expect("the file opens again");
        assert_eq!((store.start.seq, store.start.fold.gate.summary().tainted()), (Seq(6), false));
        let health = store.start.fold.state.health(&"main/gpt/a".into(), 1).expect("the member is on record");
        assert_eq!((health.failures, health.last_ok_at.is_some()), (0, true));
    }
}
