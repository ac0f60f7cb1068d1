//! The same sums from Postgres, over a connection of their own that only reads.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio_postgres::Config;
use waybill_schema::store::POSTGRES_SCHEMA;
use waybill_schema::time::Time;

use super::{DAY_MS, Spending};
use crate::postgres::{MakeError, Reader, ReaderError};

/// How long a read may take: it waits for nobody, and nobody waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the sums could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No connection could be made.
    #[error(transparent)]
    Connect(#[from] ReaderError),
    /// Postgres refused.
    #[error("postgres failed")]
    Postgres(#[from] tokio_postgres::Error),
    /// It did not answer.
    #[error("postgres did not answer in time")]
    Silent,
}

/// Reads what keys have used from the usage store in Postgres.
pub struct PostgresSpending {
    config: Config,
    runtime: Runtime,
    reader: Option<Reader>,
    spending: Spending,
}

impl PostgresSpending {
    /// Will read from the database at `url`; it connects with its first read.
    pub fn new(url: &str) -> Result<Self, MakeError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = url.parse().map_err(MakeError::Url)?;
        Ok(Self { config, runtime, reader: None, spending: Spending::default() })
    }

    /// Reads what is new. Blocks for as long as that takes.
    pub fn read(&mut self, now: Time) -> Result<&Spending, ReadError> {
        let Self { config, runtime, reader, spending } = self;
        let read = runtime.block_on(async {
            let open = match reader.take().filter(Reader::stands) {
                Some(open) => open,
                None => Reader::connect(config, "waybill gateway").await?,
            };
            let open = reader.insert(open);
            tokio::time::timeout(READ_TIMEOUT, read(open, spending, now)).await.map_err(|_| ReadError::Silent)?
        });
        if read.is_err() {
            self.reader = None;
        }
        read.map(|()| &self.spending)
    }
}

async fn read(reader: &mut Reader, spending: &mut Spending, now: Time) -> Result<(), ReadError> {
    let transaction = reader.client().transaction().await?;
    transaction.batch_execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
    let live = format!(
        "SELECT g.generation, coalesce((SELECT max(seq) FROM {POSTGRES_SCHEMA}.checkpoints), 0),
                EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('{POSTGRES_SCHEMA}.usage_events')
                                                   AND attname = 'seq_written')
         FROM {POSTGRES_SCHEMA}.generations g WHERE g.live"
    );
    let Some(live) = transaction.query_opt(&live, &[]).await? else { return Ok(()) };
    let (generation, head): (i32, i64) = (live.get(0), live.get(1));
    // Rows of before this column stay live while those of today are being made: by them late rows are missed until then.
    let written = if live.get(2) { "seq_written" } else { "seq_last" };
    let begin = spending.begin_read(head, generation, now);
    // `started` chooses the partitions: no request lasts for a day.
    let sums = format!(
        "SELECT e.key_id, floor(extract(epoch FROM e.ended) / 86400)::bigint,
                sum(coalesce(a.input, 0) + coalesce(a.output, 0))::bigint, sum(coalesce(a.cost_nano, 0))::bigint
         FROM {POSTGRES_SCHEMA}.usage_events e JOIN {POSTGRES_SCHEMA}.usage_attempts a USING (request_id)
         WHERE e.{written} > $1 AND e.{written} <= $2
           AND e.started >= to_timestamp($3::bigint) AND a.started >= to_timestamp($3::bigint)
           AND e.ended >= to_timestamp($4::bigint)
         GROUP BY 1, 2"
    );
    let (started, ended) = ((begin.0 - DAY_MS) / 1000, begin.0 / 1000);
    let rows = transaction.query(&sums, &[&spending.after.0, &head, &started, &ended]).await?;
    spending.take(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect(), head);
    Ok(())
}
