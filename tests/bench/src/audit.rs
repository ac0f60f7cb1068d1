//! How long the operator's questions take over a million requests in a hundred thousand sessions, on both stores, and by
//! which plan.
//!
//! The rows are made in SQL, in the tables that a real projector has made. They are skewed: every tenth request belongs to
//! one session. They spread over two years, so every session lies in every monthly partition, which is the worst case.

use std::path::Path;

use anyhow::{Context, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tokio_postgres::NoTls;
use waybill_auditor::paging::{Page, Paged};
use waybill_auditor::sessions::{Filter, rounds, sessions};
use waybill_auditor::usage::{Cells, PostgresUsage, SqliteUsage, StoreError, UsageStore, Value};
use waybill_events::sqlite::SqliteLog;
use waybill_projector::embedded;
use waybill_projector::postgres::{Begin, Phase, PostgresProjector};
use waybill_servers::postgres::{Options, Postgres};

use crate::gate::{Gate, Limit};

const REQUESTS: usize = 1_000_000;
const SESSIONS: usize = 100_000;
/// The first moment of 2026 in UTC, in milliseconds.
const START_MS: i64 = 1_767_225_600_000;
/// Two years in milliseconds, shared out over the requests.
const GAP_MS: i64 = 730 * 86_400_000 / REQUESTS as i64;
const MONTHS: i32 = 24;
/// The session with every tenth request, and its scope.
const LONG: (&str, &str) = ("tenant-0", "long");
/// The deep page: the thousandth of fifty entries.
const DEEP: usize = 1000;
/// How often the first and the deep page are asked for.
const PASSES: usize = 21;
/// Milliseconds that a page may take (issue 4).
const PAGE_MS_MAX: f64 = 50.0;
/// More turns than a projector needs to make its tables.
const TURNS_MAX: usize = 1000;

/// Runs the whole part and returns its gates.
pub(crate) fn run() -> anyhow::Result<Vec<Gate>> {
    println!("Audit: pages of 50 over {REQUESTS} requests in {SESSIONS} sessions, one of them with a tenth of all");
    let mut gates = in_postgres()?;
    gates.extend(in_sqlite()?);
    Ok(gates)
}

fn in_postgres() -> anyhow::Result<Vec<Gate>> {
    let server = Postgres::start(&Options { server: "shared_buffers = 256MB\nmax_wal_size = 4GB\nautovacuum = off" });
    let (url, folder) = (server.database(), tempfile::tempdir()?);
    make_tables(&url, folder.path())?;
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let begun = Instant::now();
    let partitions: String = (0..MONTHS).map(partition).collect();
    execute(&runtime, &url, &format!("SET search_path TO wb_g1; {partitions}"))?;
    for fill in fills(|ms| format!("to_timestamp(({ms}) / 1000.0)"), |names| format!("ARRAY[{names}]")) {
        execute(&runtime, &url, &format!("SET search_path TO wb_g1; {fill}"))?;
    }
    execute(&runtime, &url, "VACUUM ANALYZE")?;
    println!("  postgres filled in {:.0} s, {MONTHS} monthly partitions", begun.elapsed().as_secs_f64());
    let usage = PostgresUsage::new(&url, runtime.handle().clone())?;
    let explain = Explain { word: "EXPLAIN", numbers: 0, is_bad: reads_all_in_postgres };
    measure("postgres", usage, explain, ["audit/postgres-first-page-ms", "audit/postgres-deep-page-ms"])
}

fn in_sqlite() -> anyhow::Result<Vec<Gate>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("waybill.db");
    let (log, _) = embedded::open(&path)?;
    let begun = Instant::now();
    for fill in fills(str::to_owned, |names| format!("json_array({names})")) {
        log.connection().execute_batch(&fill)?;
    }
    log.connection().execute_batch("ANALYZE")?;
    println!("  embedded file filled in {:.0} s", begun.elapsed().as_secs_f64());
    let usage = SqliteUsage::new(SqliteLog::open_read_only(&path)?);
    let explain = Explain { word: "EXPLAIN QUERY PLAN", numbers: 3, is_bad: reads_all_in_sqlite };
    measure("embedded", usage, explain, ["audit/embedded-first-page-ms", "audit/embedded-deep-page-ms"])
}

/// Lets a projector of an empty log make its tables.
fn make_tables(url: &str, folder: &Path) -> anyhow::Result<()> {
    let log = SqliteLog::open(&folder.join("empty.db"), Box::new(|_, _| Ok(())))?;
    let mut projector = PostgresProjector::new(Box::new(log), url, Begin::Checkpoint)?;
    let made = (0..TURNS_MAX).any(|_| {
        projector.turn();
        projector.standing().phase == Phase::Projecting
    });
    ensure!(made, "the projector makes no tables: {:?}", projector.standing());
    Ok(())
}

fn execute(runtime: &Runtime, url: &str, sql: &str) -> anyhow::Result<()> {
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        let executed = async move {
            client.batch_execute(sql).await?;
            drop(client);
            anyhow::Ok(())
        };
        let (executed, driven) = tokio::join!(executed, connection);
        driven.map_err(anyhow::Error::from).and(executed).with_context(|| sql.chars().take(200).collect::<String>())
    })
}

fn partition(month: i32) -> String {
    let first = |month: i32| format!("{:04}-{:02}-01 00:00:00+00", 2026 + month / 12, month % 12 + 1);
    let (name, from, to) = (format!("{:04}_{:02}", 2026 + month / 12, month % 12 + 1), first(month), first(month + 1));
    ["usage_events", "usage_attempts"]
        .map(|table| {
            format!("CREATE TABLE {table}_{name} PARTITION OF {table} FOR VALUES FROM ('{from}') TO ('{to}');\n")
        })
        .concat()
}

/// The statements that fill the tables, of a store that writes milliseconds as `moment` does and lists as `list` does.
fn fills(moment: impl Fn(&str) -> String, list: impl Fn(&str) -> String) -> [String; 3] {
    let (scope, long) = LONG;
    // The rest is spread so that each of the other sessions has about nine requests, all over the two years.
    let requests = format!(
        "WITH RECURSIVE numbers(n) AS (SELECT CAST(1 AS BIGINT) UNION ALL SELECT n + 1 FROM numbers WHERE n < {REQUESTS}),
         requests AS (
            SELECT n, 'r' || (10000000 + n) AS request_id,
                CASE WHEN n % 10 = 0 THEN '{long}' ELSE 's-' || (n % {0}) END AS session_id,
                CASE WHEN n % 10 = 0 THEN '{scope}' ELSE 'tenant-' || (n % {0} % 20) END AS scope,
                CASE WHEN n % 5 = 0 THEN 2 ELSE 1 END AS attempts,
                {1} AS started, {2} AS ended, {3} AS failed_at
            FROM numbers)",
        SESSIONS - 1,
        moment(&format!("{START_MS} + n * {GAP_MS}")),
        moment(&format!("{START_MS} + n * {GAP_MS} + 2000")),
        moment(&format!("{START_MS} + n * {GAP_MS} + 500")),
    );
    let events = format!(
        "INSERT INTO usage_events (request_id, started, ended, scope, key_id, group_id, model, endpoint, stream,
            session_id, session_source, signal, sticky_type, sticky_hit, fallback, outcome, status, attempts, deployment,
            latency_ms, seq_first, seq_last)
         {requests}
         SELECT request_id, started, ended, scope, scope, 'main', 'gpt', 'chat', TRUE, session_id, 'explicit',
            'header:x-session-id', 'conv', TRUE, FALSE, 'success', 200, attempts, 'a/gpt', 2000, n, n FROM requests"
    );
    let send = "request_id, attempt, started, ended, member, deployment, upstream_model, reason, class, status,
            latency_ms, input, output, cached, estimated, cost_nano";
    let sends = format!(
        "INSERT INTO usage_attempts ({send})
         {requests}
         SELECT request_id, attempts, started, ended, 'main/gpt/a', 'a/gpt', 'gpt', 'affinity', 'success', 200, 2000,
            1000, 100, 900, 0, 7000 FROM requests
         UNION ALL
         SELECT request_id, 1, started, failed_at, 'main/gpt/b', 'b/gpt', 'gpt', 'affinity', 'upstream5xx', 502, 500,
            NULL, NULL, NULL, 0, NULL FROM requests WHERE attempts = 2"
    );
    let (models, deployments) = (list("'gpt'"), list("'a/gpt', 'b/gpt'"));
    let sums = format!(
        "INSERT INTO sessions (session_id, scope, started, ended, last_request, session_source, requests, failed, models,
            deployments, sends, sends_unknown, sends_estimated, input, output, cached, cost_nano)
         SELECT session_id, scope, min(started), max(ended), max(request_id), 'explicit', count(*), 0, {models},
            {deployments}, sum(attempts), sum(attempts - 1), 0, 1000 * count(*), 100 * count(*), 900 * count(*),
            7000 * count(*)
         FROM usage_events GROUP BY session_id, scope"
    );
    [events, sends, sums]
}

/// How a store explains its plans.
#[derive(Clone, Copy)]
struct Explain {
    word: &'static str,
    /// Columns of numbers before the text.
    numbers: usize,
    is_bad: fn(&str) -> bool,
}

/// A sequential scan of the default partition reads nothing: it is empty.
fn reads_all_in_postgres(line: &str) -> bool {
    let node = line.trim_start().trim_start_matches("->").trim_start();
    node.starts_with("Sort  (") || (node.starts_with("Seq Scan") && !node.contains("_default"))
}

fn reads_all_in_sqlite(line: &str) -> bool {
    line.contains("TEMP B-TREE") || (line.starts_with("SCAN") && !line.contains("INDEX"))
}

/// A store that tells by which plan it answers each question.
struct Explained<'a> {
    store: &'a mut dyn UsageStore,
    explain: Explain,
    lines: Vec<String>,
}

impl UsageStore for Explained<'_> {
    fn rows(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Cells>, StoreError> {
        self.lines.push(sql.split_whitespace().collect::<Vec<_>>().join(" "));
        for mut cells in self.store.rows(&format!("{} {sql}", self.explain.word), values)? {
            for _ in 0..self.explain.numbers {
                cells.count()?;
            }
            self.lines.push(cells.text()?);
        }
        self.store.rows(sql, values)
    }

    fn holds(&self, column: &str, place: &str) -> String {
        self.store.holds(column, place)
    }
}

/// What is asked for, page by page.
#[derive(Clone, Copy)]
enum Question {
    All,
    OfScope,
    LongSession,
}

impl Question {
    const EACH: [(Self, &str); 3] = [
        (Self::All, "all sessions"),
        (Self::OfScope, "sessions of a scope"),
        (Self::LongSession, "rounds of the long session"),
    ];

    /// A page: how many entries it has, and the cursor of the next one.
    fn ask(self, store: &mut dyn UsageStore, after: Option<&str>) -> anyhow::Result<(usize, Option<String>)> {
        fn told<T>(paged: &Paged<T>) -> (usize, Option<String>) {
            (paged.entries.len(), paged.next.as_ref().map(ToString::to_string))
        }
        let page = Page::new(None, after)?;
        let of_scope = Filter { scope: Some(LONG.0.into()), ..Filter::default() };
        Ok(match self {
            Self::All => told(&sessions(store, &Filter::default(), &page)?),
            Self::OfScope => told(&sessions(store, &of_scope, &page)?),
            Self::LongSession => told(&rounds(store, &LONG.0.into(), &LONG.1.into(), &page)?),
        })
    }

    /// The cursor of the page so many pages behind the first, or of the last one, and the longest wait on the way.
    fn walk(self, store: &mut dyn UsageStore, n_pages: usize) -> anyhow::Result<(usize, Option<String>, f64)> {
        let (mut at, mut longest, mut n) = (None, 0.0_f64, 1);
        while n < n_pages {
            let (ms, (_, next)) = timed(|| self.ask(store, at.as_deref()))?;
            longest = longest.max(ms);
            let Some(next) = next else { break };
            (at, n) = (Some(next), n + 1);
        }
        Ok((n, at, longest))
    }
}

fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(f64, T)> {
    let begun = Instant::now();
    let done = work()?;
    Ok((begun.elapsed().as_secs_f64() * 1000.0, done))
}

fn measure(
    name: &str,
    mut store: impl UsageStore,
    explain: Explain,
    gates: [&'static str; 2],
) -> anyhow::Result<Vec<Gate>> {
    let mut slowest = [0.0_f64; 2];
    let mut plans = Vec::new();
    for (question, what) in Question::EACH {
        let (n, deep, longest) = question.walk(&mut store, DEEP)?;
        let first_ms = median_ms(&mut store, question, None)?;
        let deep_ms = median_ms(&mut store, question, deep.as_deref())?;
        println!(
            "  {name:<9} {what:<27} first page {first_ms:>6.2} ms, page {n:>4} {deep_ms:>6.2} ms, longest {longest:>6.2} ms"
        );
        slowest = [slowest[0].max(first_ms), slowest[1].max(deep_ms)];
        for (page, at) in [("the first page", None), ("a deep page", deep.as_deref())] {
            plans.push((format!("{page} of {what}"), plan(&mut store, explain, question, at)?));
        }
    }
    let mut n_bad = 0;
    for (what, lines) in &plans {
        println!("  {name}, {what}:");
        lines.iter().take(PLAN_LINES_MAX).for_each(|line| println!("    {line}"));
        n_bad += lines.iter().filter(|line| (explain.is_bad)(line)).count();
    }
    ensure!(n_bad == 0, "{n_bad} steps of the plans read or sort a whole table: {plans:#?}");
    let gates = gates.into_iter().zip(slowest);
    Ok(gates.map(|(gate, ms)| Gate::new(gate, ms, Limit::AtMost(PAGE_MS_MAX))).collect())
}

/// Lines of a plan that are printed: of two dozen partitions the first ones tell enough.
const PLAN_LINES_MAX: usize = 8;

/// The median of some passes, in milliseconds.
fn median_ms(store: &mut dyn UsageStore, question: Question, after: Option<&str>) -> anyhow::Result<f64> {
    let passes: Result<Vec<f64>, _> =
        (0..PASSES).map(|_| timed(|| question.ask(store, after)).map(|(ms, _)| ms)).collect();
    Ok(crate::stand::median(passes?))
}

/// The questions to the store behind a page, and by which plan it answers each.
fn plan(
    store: &mut dyn UsageStore,
    explain: Explain,
    question: Question,
    after: Option<&str>,
) -> anyhow::Result<Vec<String>> {
    let mut explained = Explained { store, explain, lines: Vec::new() };
    question.ask(&mut explained, after)?;
    Ok(explained.lines)
}
