//! What it costs to fold a log anew into Postgres, beside reading, decoding and copying without a fold.
//!
//! The log holds three million facts that the routing core made of sessions in virtual time, in full frames of one
//! writer. The projector reads it from its start into a new generation. The baseline goes over the same frames, makes
//! facts of them, and gives tables without an index as many rows as the projector made, each a copy of one of these: no
//! projection can cost less. Both run in this process, and Postgres, which is another, is not counted.

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::{BufMut, BytesMut};
use tokio::time::Instant;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, NoTls};
use waybill_events::log::{Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::read;
use waybill_projector::postgres::{Begin, Phase, PostgresProjector, Spent};
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::{Body, FRAME_FACTS_MAX, Frame, Link};
use waybill_schema::id::Revision;
use waybill_schema::time::Time;
use waybill_servers::postgres::{Options, Postgres};

use crate::draws::Draws;
use crate::gate::{Gate, Limit};
use crate::process::own_cpu;
use crate::routing::Core;

/// Facts in the log (issue 4).
const FACTS: u64 = 3_000_000;
/// What a fact may cost, in baselines (issue 4).
const RATIO_MAX: f64 = 2.0;
/// Deployments; one request in so many finds one of them away.
const DEPLOYMENTS: usize = 4;
const AWAY_ONE_IN: u64 = 50;
/// So many sessions are open at once; when so many requests have come, others take their place.
const SESSIONS: u64 = 2000;
const ROUND: u64 = 16_000;
/// When the first request came (1 January 2026), and how long after it the next one: the log is of about a month.
const BEGUN: Time = Time(1_767_225_600_000);
const STEP_MS: i64 = 3500;
/// Frames appended, and read, at once.
const FRAMES_MAX: usize = 32;
/// Rows in a transaction of the baseline: about as many as the projector commits.
const ROWS: usize = 16_000;
const US_PER_SECOND: f64 = 1e6;
const TABLES: [&str; 2] = ["usage_events", "usage_attempts"];

/// What going over the log once took.
struct Pass {
    facts: u64,
    cpu: f64,
    time: Duration,
}

/// Runs the whole part and returns its gates.
pub(crate) async fn run() -> anyhow::Result<Vec<Gate>> {
    tokio::task::spawn_blocking(measure).await?
}

fn measure() -> anyhow::Result<Vec<Gate>> {
    println!("Rebuild: a log of {FACTS} facts into Postgres");
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("waybill.db");
    let begun = Instant::now();
    let facts = write_log(&path)?;
    println!("  the log was made in {:.0} s", begun.elapsed().as_secs_f64());

    let postgres = Postgres::start(&Options::default());
    let (rebuilt, spent) = rebuild(&path, &postgres.url(), facts)?;
    print_pass("rebuild", &rebuilt);
    print_stages(&spent);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let baseline = runtime.block_on(baseline(&path, &postgres.url()))?;
    print_pass("baseline", &baseline);
    ensure!(baseline.facts == facts, "the log holds {} facts, and {facts} were written", baseline.facts);
    Ok(vec![Gate::new("rebuild/cpu-over-baseline", rebuilt.cpu / baseline.cpu, Limit::AtMost(RATIO_MAX))])
}

fn print_pass(what: &str, Pass { facts, cpu, time }: &Pass) {
    let (facts, seconds) = (*facts as f64, time.as_secs_f64());
    let us = cpu * US_PER_SECOND / facts;
    println!("  {what:<8} {us:>5.2} CPU us a fact, {:>7.0} facts/s ({seconds:.1} s)", facts / seconds);
}

fn print_stages(spent: &Spent) {
    let Spent { read, decode, fold, store } = spent;
    let stages = [("read", read), ("decode", decode), ("fold", fold), ("encode and wait for COPY", store)];
    let told: Vec<_> = stages.iter().map(|(name, time)| format!("{name} {:.1} s", time.as_secs_f64())).collect();
    println!("    its stages: {}", told.join(", "));
}

/// Makes the log at `path`; gives how many facts it holds.
fn write_log(path: &Path) -> anyhow::Result<u64> {
    let mut log = SqliteLog::open(path, Box::new(|_, _| Ok(())))?;
    let (mut core, mut draws) = (Core::new(DEPLOYMENTS, 1)?, Draws::new(2));
    let (mut link, mut tail, mut written) = (Link::start(), None, 0);
    let mut facts = Vec::new();
    core.keep(BEGUN);
    for n in 0u64.. {
        let session = format!("session-{}", n / ROUND * SESSIONS + draws.next() % SESSIONS);
        let now = BEGUN.plus_ms(i64::try_from(n)? * STEP_MS);
        let away = draws.next().is_multiple_of(AWAY_ONE_IN).then(|| draws.next() % DEPLOYMENTS as u64);
        core.serve(&session, now, &|deployment| away != Some(deployment as u64))?;
        facts.extend(core.take_kept());
        let is_last = written + facts.len() as u64 >= FACTS;
        if facts.len() < FRAMES_MAX * FRAME_FACTS_MAX as usize && !is_last {
            continue;
        }
        let frames: Vec<Frame> = facts.chunks(FRAME_FACTS_MAX as usize).map(|some| seal(some, &mut link)).collect();
        let appended = log.append(&frames, tail, now)?;
        tail = appended.last().map(|last| last.seq);
        written += facts.len() as u64;
        facts.clear();
        if is_last {
            break;
        }
    }
    Ok(written)
}

fn seal(facts: &[Fact], link: &mut Link) -> Frame {
    let mut lines = Vec::new();
    for fact in facts {
        Body::of(&fact.event, fact.at).write_line(fact.revision.number, &mut lines);
    }
    let Revision { writer, epoch, number } = facts[0].revision.clone();
    let count = u32::try_from(facts.len()).expect("a frame holds few facts");
    let frame = Frame::seal(writer, epoch, link.clone(), number, count, &lines);
    *link = Link::after(&frame.header);
    frame
}

/// Projects the log, which holds `facts`, to its end.
fn rebuild(path: &Path, url: &str, facts: u64) -> anyhow::Result<(Pass, Spent)> {
    let mut log = SqliteLog::open_read_only(path)?;
    let head = log.head()?;
    let (before, begun) = (own_cpu()?, Instant::now());
    let mut projector = PostgresProjector::new(Box::new(log), url, Begin::NewGeneration)?;
    loop {
        projector.turn();
        let standing = projector.standing();
        ensure!(standing.trouble.is_none() && standing.phase != Phase::Stopped, "{standing:?}");
        if standing.live && standing.seq == head {
            let cpu = own_cpu()?.since(before).total();
            return Ok((Pass { facts, cpu, time: begun.elapsed() }, standing.spent));
        }
    }
}

/// Decodes the log and copies a row for each that was projected.
async fn baseline(path: &Path, url: &str) -> anyhow::Result<Pass> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    let mut connections = tokio::task::JoinSet::new();
    connections.spawn(connection);
    let mut copies = Vec::new();
    for table in TABLES {
        copies.push(Copies::of(&client, table).await?);
    }
    let mut log = SqliteLog::open_read_only(path)?;
    let (before, begun) = (own_cpu()?, Instant::now());
    let (mut after, mut facts) = (Seq::START, 0);
    loop {
        let frames = log.read(after, FRAMES_MAX)?;
        let Some(newest) = frames.last() else { break };
        after = newest.seq;
        for frame in &frames {
            let header = Frame::header_of(&frame.bytes)?;
            for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent) {
                facts += 1;
                match fact.map_err(|unread| anyhow::anyhow!("{}", unread.why))?.event {
                    Event::Request(_) => copies[0].due += 1,
                    Event::Attempt(_) => copies[1].due += 1,
                    _ => {}
                }
            }
        }
        if copies.iter().map(|copies| copies.due).sum::<usize>() >= ROWS {
            store(&client, &mut copies).await?;
        }
    }
    store(&client, &mut copies).await?;
    let (cpu, time) = (own_cpu()?.since(before).total(), begun.elapsed());
    for copies in &copies {
        copies.check(&client).await?;
    }
    Ok(Pass { facts, cpu, time })
}

async fn store(client: &Client, copies: &mut [Copies]) -> anyhow::Result<()> {
    client.batch_execute("BEGIN").await?;
    for copies in copies {
        copies.store(client).await?;
    }
    Ok(client.batch_execute("COMMIT").await?)
}

/// A table like one that was projected, without its indexes, and a row of that one.
struct Copies {
    table: &'static str,
    row: Vec<Option<Value>>,
    types: Vec<Type>,
    due: usize,
}

impl Copies {
    async fn of(client: &Client, table: &'static str) -> anyhow::Result<Self> {
        client.batch_execute(&format!("CREATE TABLE baseline_{table} (LIKE waybill.{table})")).await?;
        // Where nothing went wrong, which is nearly everywhere, all rows are as wide.
        let sql = format!("SELECT * FROM waybill.{table} WHERE status = 200 ORDER BY request_id OFFSET 1000 LIMIT 1");
        let row = client.query_opt(&sql, &[]).await?.context("nothing was projected")?;
        let values = (0..row.len()).map(|n| row.try_get(n)).collect::<Result<_, _>>()?;
        let types = row.columns().iter().map(|column| column.type_().clone()).collect();
        Ok(Self { table, row: values, types, due: 0 })
    }

    /// Copies as many rows as are due.
    async fn store(&mut self, client: &Client) -> anyhow::Result<()> {
        let sink = client.copy_in(&format!("COPY baseline_{} FROM STDIN BINARY", self.table)).await?;
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &self.types));
        for _ in 0..std::mem::take(&mut self.due) {
            writer.as_mut().write_raw(&self.row).await?;
        }
        writer.finish().await?;
        Ok(())
    }

    /// Whether there are as many rows as were projected.
    async fn check(&self, client: &Client) -> anyhow::Result<()> {
        let table = self.table;
        let sql = format!("SELECT (SELECT count(*) FROM baseline_{table}), (SELECT count(*) FROM waybill.{table})");
        let counts = client.query_one(&sql, &[]).await?;
        let (copied, projected): (i64, i64) = (counts.get(0), counts.get(1));
        ensure!(copied == projected, "{copied} rows of {table} stand beside {projected}");
        println!("  {projected} rows of {table}");
        Ok(())
    }
}

/// A value of any type, as the server sends and takes it.
#[derive(Debug)]
struct Value(Vec<u8>);

impl<'a> FromSql<'a> for Value {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(raw.to_vec()))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

impl ToSql for Value {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.put_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}
