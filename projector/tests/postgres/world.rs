//! A log that writers append to, a Postgres, and projectors between them.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};
use waybill_events::archive::{Archive, Archived};
use waybill_events::log::Log;
use waybill_events::sqlite::SqliteLog;
use waybill_projections::story::Teller;
use waybill_projector::postgres::{Begin, Phase, PostgresProjector, Standing};
use waybill_schema::event::{Class, Fact, Outcome};
use waybill_schema::frame::Frame;
use waybill_schema::time::Time;
use waybill_servers::postgres::{Options, Postgres};

/// 2026-11-30 23:59:59.900 in UTC: a request begun now ends in another month.
pub(crate) const NIGHT: i64 = 1_796_083_199_900;
/// More turns than any of these tests needs.
const TURNS_MAX: usize = 2000;

pub(crate) struct World {
    dir: TempDir,
    log: SqliteLog,
    pub(crate) postgres: Postgres,
    pub(crate) url: String,
}

impl World {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let log = SqliteLog::open(&dir.path().join("log.db"), Box::new(|_, _| Ok(()))).expect("a new log opens");
        let postgres = Postgres::start(&Options::default());
        let url = postgres.database();
        Self { dir, log, postgres, url }
    }

    pub(crate) fn log_file(&self) -> PathBuf {
        self.dir.path().join("log.db")
    }

    pub(crate) fn append(&mut self, gateway: &Teller, frames: &[Frame]) {
        let last = self.log.last(&gateway.writer).expect("the log can be read").map(|last| last.seq);
        self.log.append(frames, last, Time(0)).expect("the log takes the frames");
    }

    /// Appends the facts in one frame.
    pub(crate) fn tell(&mut self, gateway: &mut Teller, facts: &[Fact]) {
        let frame = gateway.seals(facts);
        self.append(gateway, &[frame]);
    }

    pub(crate) fn sql_on_log(&mut self, sql: &str) {
        self.log.connection().execute_batch(sql).expect("the log's file takes the statement");
    }

    pub(crate) fn projector(&self) -> PostgresProjector {
        self.projector_into(&self.url, Begin::Checkpoint)
    }

    pub(crate) fn projector_into(&self, url: &str, begin: Begin) -> PostgresProjector {
        let log = SqliteLog::open_read_only(&self.log_file()).expect("the log opens for reading");
        PostgresProjector::new(Box::new(log), url, begin).expect("a projector can be made")
    }

    /// Closes all of the log as files.
    pub(crate) fn archive(&mut self) {
        let end = self.log.head().expect("the log can be read");
        let closed = self.archived().extend(&mut self.log, end, 1).map(|closed| closed.is_some());
        assert!(closed.expect("the log can be archived"));
    }

    /// A projector of the archive and, behind it, the log.
    pub(crate) fn archived_projector(&self) -> PostgresProjector {
        let log = SqliteLog::open_read_only(&self.log_file()).expect("the log opens for reading");
        let whole = Archived::new(self.archived(), Box::new(log)).expect("archive and log belong together");
        PostgresProjector::new(Box::new(whole), &self.url, Begin::Checkpoint).expect("a projector can be made")
    }

    fn archived(&self) -> Archive {
        Archive::open(&self.dir.path().join("archive")).expect("the archive opens")
    }

    pub(crate) fn database(&self) -> Database {
        Database::open(&self.url)
    }

    /// Every row, as a projector makes them that begins with an empty database.
    pub(crate) fn fresh_rows(&self) -> Vec<String> {
        let url = self.postgres.database();
        catch_up(&mut self.projector_into(&url, Begin::Checkpoint));
        Database::open(&url).everything()
    }
}

/// `n` requests of two sends each, the first of which fails: four rows and one more a pair, in frames of some ten facts.
pub(crate) fn requests(gateway: &mut Teller, n: usize) -> Vec<Frame> {
    let mut facts = vec![gateway.starts(NIGHT)];
    for request in 0..n {
        let at = NIGHT + i64::try_from(request).expect("few requests");
        let id = format!("{}-{request:05}", gateway.writer);
        facts.push(gateway.selects(at, &id, 1, "a"));
        facts.push(gateway.ends_send(at + 50, &id, 1, Class::Upstream5xx));
        facts.push(gateway.selects(at + 50, &id, 2, "b"));
        facts.push(gateway.ends_send(at + 99, &id, 2, Class::Success));
        facts.push(gateway.ends(at + 100, &id, Outcome::Success, Class::Success, 2));
    }
    facts.chunks(100).map(|facts| gateway.seals(facts)).collect()
}

/// Checks that two databases hold the same rows, and shows those that only one has.
#[track_caller]
pub(crate) fn same(left: &[String], right: &[String]) {
    let only =
        |of: &[String], other: &[String]| of.iter().filter(|row| !other.contains(row)).cloned().collect::<Vec<_>>();
    assert_eq!((only(left, right), only(right, left)), (vec![], vec![]));
    assert_eq!(left.len(), right.len());
}

/// Turns until the projector stands as it `should`.
pub(crate) fn turn_until(projector: &mut PostgresProjector, should: impl Fn(&Standing) -> bool) {
    for _ in 0..TURNS_MAX {
        let pause = projector.turn();
        if should(projector.standing()) {
            return;
        }
        thread::park_timeout(pause.min(Duration::from_millis(50)));
    }
    panic!("it does not come to that: {:?}", projector.standing());
}

/// Turns until all of the log is in the rows.
pub(crate) fn catch_up(projector: &mut PostgresProjector) {
    let mut rests = 0;
    for _ in 0..TURNS_MAX {
        let pause = projector.turn();
        let standing = projector.standing();
        rests = if standing.phase == Phase::Projecting && standing.trouble.is_none() && !pause.is_zero() {
            rests + 1
        } else {
            0
        };
        if rests > 0 && standing.lag_frames() == 0 {
            return;
        }
        thread::park_timeout(pause.min(Duration::from_millis(50)));
    }
    panic!("it does not catch up: {:?}", projector.standing());
}

/// A look into a database from outside.
pub(crate) struct Database {
    runtime: Runtime,
    client: Client,
    _connection: JoinSet<()>,
}

impl Database {
    pub(crate) fn open(url: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime can be made");
        let (client, connection) = runtime.block_on(tokio_postgres::connect(url, NoTls)).expect("postgres answers");
        let mut tasks = JoinSet::new();
        // Its end is seen by whoever uses the client.
        tasks.spawn_on(async { drop(connection.await) }, runtime.handle());
        Self { runtime, client, _connection: tasks }
    }

    pub(crate) fn execute(&self, sql: &str) {
        self.runtime.block_on(self.client.batch_execute(sql)).expect("postgres takes the statements");
    }

    /// Each row as a line, its values with a space between them and `-` for none.
    pub(crate) fn rows(&self, sql: &str) -> Vec<String> {
        let messages = self.runtime.block_on(self.client.simple_query(sql)).expect("postgres answers");
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        rows.map(|row| (0..row.len()).map(|i| row.get(i).unwrap_or("-")).collect::<Vec<_>>().join(" ")).collect()
    }

    /// Waits until the query gives a row.
    pub(crate) fn wait_for(&self, sql: &str) {
        for _ in 0..TURNS_MAX {
            if !self.rows(sql).is_empty() {
                return;
            }
            thread::park_timeout(Duration::from_millis(5));
        }
        panic!("no row comes of {sql}");
    }

    /// Every row of every table, the checkpoint included.
    pub(crate) fn everything(&self) -> Vec<String> {
        let tables = [
            "usage_events",
            "usage_attempts",
            "sessions",
            "response_owners",
            "health_changes",
            "catalogue_changes",
            "model_changes",
            "quarantine",
        ];
        let mut rows: Vec<String> = tables
            .iter()
            .flat_map(|table| self.rows(&format!("SELECT '{table}', t::text FROM waybill.{table} AS t ORDER BY 2")))
            .collect();
        rows.extend(self.rows("SELECT name, seq, frame_sum, fold_version FROM waybill.checkpoints"));
        rows
    }
}
