//! The generations in Postgres: one dedicated connection that holds a lease, and the transaction that moves the rows.
//!
//! Two projectors never write side by side to one generation, and a rebuild fills a new one beside them. The lease of a
//! generation is an advisory lock of the session, which goes with the connection; and whoever holds it writes its own
//! epoch into the checkpoint, so a batch of one that was overtaken without noticing finds another epoch and is refused.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use chrono::{DateTime, Datelike};
use refinery::{Migration, Runner};
use rustls::ClientConfig;
use tokio::task::JoinSet;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Transaction};
use tokio_postgres_rustls::MakeRustlsConnect;
use waybill_events::log::Seq;
use waybill_projections::usage::Row;
use waybill_schema::FOLD_VERSION;
use waybill_schema::store::{
    GENERATION_MIGRATIONS, GENERATION_TABLES, POSTGRES_MIGRATIONS, POSTGRES_SCHEMA, generation_schema,
};
use waybill_schema::time::Time;

use super::batch::{Batch, Place};
use super::generation::{Known, NewerFold, NoWayBack, Plan, Wanted, plan, way_back};
use super::sessions::{Written, merge_sessions};
use super::table::{Filled, Table, fill};

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long anything may take on a connection before it is given up: a batch takes a fraction of a second.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The advisory locks of those who write to a generation, whose number is the second half: any number that nobody else
/// takes in this database.
const LEASE: i32 = 0x7762_0001;
/// The advisory lock round migrations and round the choice of a generation.
const MIGRATING: i64 = 0x7762_0002;
/// The advisory lock of the rebuild under way.
const REBUILDING: i64 = 0x7762_0003;
/// The name of this projection's checkpoint.
pub(super) const NAME: &str = "usage";
/// The years that get monthly partitions; what lies outside was said by a clock that is wrong.
const YEARS: std::ops::Range<i32> = 2000..2100;

/// Why the store cannot be worked with.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    #[error("postgres failed")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("the tables in postgres cannot be brought to this program's version")]
    Migrate(#[from] refinery::Error),
    #[error("postgres did not answer in time")]
    Silent,
    #[error("the certificates of this machine cannot be used")]
    Certificates(#[from] rustls::Error),
    #[error("another projector has taken over")]
    Overtaken,
    #[error("another rebuild is under way")]
    Rebuilding,
    #[error("the database's encoding is {0}, and only UTF8 can hold every text: make another database")]
    Encoding(String),
    #[error(transparent)]
    NewerFold(#[from] NewerFold),
    #[error(transparent)]
    NoWayBack(#[from] NoWayBack),
}

impl StoreError {
    /// Whether trying again cannot help.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::Encoding(_) | Self::NewerFold(_))
    }
}

/// A connection, before and after it has a lease.
pub(super) struct Store {
    pub(super) client: Client,
    /// Drives the connection; it ends with the client.
    connection: JoinSet<()>,
}

/// A generation that is written to, by whoever has its lease.
pub(super) struct Generation {
    pub(super) number: u32,
    /// The one that is live, as last seen.
    pub(super) live: Option<u32>,
    /// The place that its rows cover.
    pub(super) at: Place,
    pub(super) schema: String,
    epoch: i64,
    /// Months whose partitions are there, as months since the year 0.
    months: BTreeSet<i32>,
}

impl Generation {
    pub(super) fn is_live(&self) -> bool {
        self.live == Some(self.number)
    }
}

/// Ends what takes longer than `limit`.
pub(super) async fn within<T, E: Into<StoreError>>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(limit, work).await.map_err(|_| StoreError::Silent)?.map_err(Into::into)
}

impl Store {
    /// Connects under `name`; with TLS, and the server's certificate verified, where the URL says `sslmode=require`.
    pub(super) async fn connect(config: &Config, name: &str) -> Result<Self, StoreError> {
        let mut config = config.clone();
        config.application_name(name);
        let mut tasks = JoinSet::new();
        let client = if config.get_ssl_mode() == SslMode::Require {
            let (client, connection) = within(CONNECT_TIMEOUT, config.connect(tls()?)).await?;
            tasks.spawn(drive(connection));
            client
        } else {
            config.ssl_mode(SslMode::Disable);
            let (client, connection) = within(CONNECT_TIMEOUT, config.connect(NoTls)).await?;
            tasks.spawn(drive(connection));
            client
        };
        Ok(Self { client, connection: tasks })
    }

    /// Whether the connection still stands, as far as is known.
    pub(super) fn stands(&self) -> bool {
        !self.client.is_closed() && !self.connection.is_empty()
    }

    /// Takes the right to rebuild, which goes with the connection.
    pub(super) async fn lease_rebuild(&self) -> Result<(), StoreError> {
        let asked = self.client.query_one("SELECT pg_try_advisory_lock($1)", &[&REBUILDING]);
        if within(ANSWER_TIMEOUT, asked).await?.get(0) { Ok(()) } else { Err(StoreError::Rebuilding) }
    }

    /// Brings the tables to this program's version and opens the generation to write to: `wanted`, or what [`plan`]
    /// says; none where another projector writes to that one.
    pub(super) async fn take_over(&mut self, wanted: Wanted) -> Result<Option<Generation>, StoreError> {
        within(ANSWER_TIMEOUT, self.open(wanted)).await
    }

    async fn open(&mut self, wanted: Wanted) -> Result<Option<Generation>, StoreError> {
        let encoding: String = self.client.query_one("SHOW server_encoding", &[]).await?.get(0);
        if encoding != "UTF8" {
            return Err(StoreError::Encoding(encoding));
        }
        self.lock(MIGRATING).await?;
        migrate(&mut self.client, POSTGRES_SCHEMA, POSTGRES_MIGRATIONS).await?;
        let known = self.known().await?;
        let (Plan::Use(number) | Plan::Make(number)) = plan(&known, wanted, FOLD_VERSION)?;
        let sql = format!("INSERT INTO {POSTGRES_SCHEMA}.generations (generation) VALUES ($1) ON CONFLICT DO NOTHING");
        self.client.execute(&sql, &[&int4(number)]).await?;
        self.unlock(MIGRATING).await?;
        if !self.try_lease(number).await? {
            return Ok(None);
        }
        let schema = generation_schema(number);
        migrate(&mut self.client, &schema, GENERATION_MIGRATIONS).await?;
        let live = known.iter().find(|known| known.live).map(|known| known.number);
        let mut generation =
            Generation { number, live, at: Place::default(), schema, epoch: 0, months: BTreeSet::new() };
        self.claim(&mut generation).await?;
        if live.is_none() && wanted == Wanted::Resume {
            self.go_live(&mut generation).await?;
        }
        Ok(Some(generation))
    }

    /// Takes the lease of a generation, unless another one has it.
    async fn try_lease(&self, generation: u32) -> Result<bool, StoreError> {
        let sql = "SELECT pg_try_advisory_lock($1, $2)";
        Ok(self.client.query_one(sql, &[&LEASE, &int4(generation)]).await?.get(0))
    }

    async fn lock(&self, lock: i64) -> Result<(), StoreError> {
        self.client.execute("SELECT pg_advisory_lock($1)", &[&lock]).await?;
        Ok(())
    }

    async fn unlock(&self, lock: i64) -> Result<(), StoreError> {
        self.client.execute("SELECT pg_advisory_unlock($1)", &[&lock]).await?;
        Ok(())
    }

    /// The generation that is live.
    pub(super) async fn live(&self) -> Result<Option<u32>, StoreError> {
        let sql = format!("SELECT generation FROM {POSTGRES_SCHEMA}.generations WHERE live");
        let row = within(ANSWER_TIMEOUT, self.client.query_opt(&sql, &[])).await?;
        Ok(row.map(|row| row.get::<_, i32>(0).unsigned_abs()))
    }

    /// The generations, and the fold that each was made with.
    async fn known(&self) -> Result<Vec<Known>, StoreError> {
        let sql = format!("SELECT generation, live FROM {POSTGRES_SCHEMA}.generations ORDER BY generation");
        let mut known = Vec::new();
        for row in self.client.query(&sql, &[]).await? {
            let number = row.get::<_, i32>(0).unsigned_abs();
            let checkpoints = format!("{}.checkpoints", generation_schema(number));
            let sql = format!("SELECT fold_version FROM {checkpoints} WHERE name = $1");
            let version =
                if self.has_table(&checkpoints).await? { self.client.query_opt(&sql, &[&NAME]).await? } else { None };
            let fold_version = version.map(|row| u32::try_from(row.get::<_, i64>(0)).unwrap_or(u32::MAX));
            known.push(Known { number, live: row.get(1), fold_version });
        }
        Ok(known)
    }

    /// Writes an epoch of our own into the checkpoint, and reads where it stands.
    async fn claim(&self, generation: &mut Generation) -> Result<(), StoreError> {
        let sql = format!(
            "INSERT INTO {0}.checkpoints AS standing (name, seq, frame_sum, frame_stored, fold_version, epoch)
             VALUES ($1, 0, '', 0, $2, 1)
             ON CONFLICT (name) DO UPDATE SET epoch = standing.epoch + 1
             RETURNING seq, frame_sum, frame_stored, epoch",
            generation.schema
        );
        let row = self.client.query_one(&sql, &[&NAME, &i64::from(FOLD_VERSION)]).await?;
        generation.at = place(&row);
        generation.epoch = row.get(3);
        Ok(())
    }

    /// Makes `generation` the live one; the one before is its way back.
    pub(super) async fn go_live(&mut self, generation: &mut Generation) -> Result<(), StoreError> {
        let number = generation.number;
        let way_back = format!(
            "UPDATE {POSTGRES_SCHEMA}.generations
             SET before = (SELECT generation FROM {POSTGRES_SCHEMA}.generations WHERE live)
             WHERE generation = {number} AND NOT live;"
        );
        self.point_to(number, &way_back).await?;
        generation.live = Some(number);
        Ok(())
    }

    /// Points the views and the pointer to `generation`, in one transaction that begins with `first`. What was granted
    /// on the views stays.
    pub(super) async fn point_to(&mut self, generation: u32, first: &str) -> Result<(), StoreError> {
        let schema = generation_schema(generation);
        let views = GENERATION_TABLES.iter().map(|table| {
            format!("CREATE OR REPLACE VIEW {POSTGRES_SCHEMA}.{table} AS SELECT * FROM {schema}.{table};\n")
        });
        let pointer = format!(
            "UPDATE {POSTGRES_SCHEMA}.generations SET live = false WHERE live;
             UPDATE {POSTGRES_SCHEMA}.generations SET live = true, since = now() WHERE generation = {generation};"
        );
        let swap = format!("BEGIN;\n{first}\n{}{pointer}\nCOMMIT;", views.collect::<String>());
        within(ANSWER_TIMEOUT, self.client.batch_execute(&swap)).await
    }

    /// The generation before the live one, where it can be gone back to.
    pub(super) async fn way_back(&self) -> Result<u32, StoreError> {
        within(ANSWER_TIMEOUT, async {
            if !self.has_table(&format!("{POSTGRES_SCHEMA}.generations")).await? {
                return Err(NoWayBack::NoLive.into());
            }
            let sql = format!("SELECT before FROM {POSTGRES_SCHEMA}.generations WHERE live");
            let row = self.client.query_opt(&sql, &[]).await?;
            let before = row.and_then(|row| row.get::<_, Option<i32>>(0)).map(i32::unsigned_abs);
            Ok::<_, StoreError>(way_back(&self.known().await?, before, FOLD_VERSION)?)
        })
        .await
    }

    /// Whether there is such a table, named with its schema.
    pub(super) async fn has_table(&self, name: &str) -> Result<bool, StoreError> {
        Ok(self.client.query_one("SELECT to_regclass($1) IS NOT NULL", &[&name]).await?.get(0))
    }

    /// Drops generations that a killed rebuild left behind: those that never were live and that nobody writes to.
    pub(super) async fn drop_abandoned(&mut self) -> Result<(), StoreError> {
        if !within(ANSWER_TIMEOUT, self.has_table(&format!("{POSTGRES_SCHEMA}.generations"))).await? {
            return Ok(());
        }
        let sql = format!(
            "SELECT generation FROM {POSTGRES_SCHEMA}.generations
             WHERE since IS NULL AND pg_try_advisory_xact_lock({LEASE}, generation)"
        );
        let rows = within(ANSWER_TIMEOUT, self.client.query(&sql, &[])).await?;
        for row in rows {
            self.drop_generation(row.get::<_, i32>(0).unsigned_abs()).await?;
        }
        Ok(())
    }

    /// Drops a generation that is not live.
    pub(super) async fn drop_generation(&mut self, generation: u32) -> Result<(), StoreError> {
        let schema = generation_schema(generation);
        let sql = format!(
            "BEGIN; DROP SCHEMA IF EXISTS {schema} CASCADE;
             DELETE FROM {POSTGRES_SCHEMA}.generations WHERE generation = {generation} AND NOT live; COMMIT;"
        );
        within(ANSWER_TIMEOUT, self.client.batch_execute(&sql)).await
    }

    /// Stores a batch with its checkpoint. A row whose key stands already is a broken promise: the batch is stored
    /// without it, and an alarm is raised.
    pub(super) async fn commit(&mut self, generation: &mut Generation, batch: &Batch) -> Result<(), StoreError> {
        within(ANSWER_TIMEOUT, self.make_months(generation, batch)).await?;
        let copied = within(ANSWER_TIMEOUT, self.write(generation, batch, How::Copy)).await;
        match copied {
            Err(StoreError::Postgres(error)) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                let violated = error.as_db_error().and_then(|error| error.constraint());
                tracing::error!(violated, from = %batch.from.seq, to = %batch.to.seq, "rows stand already: the first ones stay");
                within(ANSWER_TIMEOUT, self.write(generation, batch, How::Merge)).await?;
            }
            other => other?,
        }
        generation.at = batch.to.clone();
        Ok(())
    }

    async fn write(&mut self, generation: &Generation, batch: &Batch, how: How) -> Result<(), StoreError> {
        let schema = &generation.schema;
        let transaction = self.client.transaction().await?;
        let moved = move_checkpoint(&transaction, generation, batch).await?;
        if !moved {
            return Err(StoreError::Overtaken);
        }
        let (filled, owners) = fill(batch);
        let mut written = Written::default();
        for filled in filled.iter().filter(|filled| !filled.rows.is_empty()) {
            match how {
                How::Copy => copy(&transaction, &format!("{schema}.{}", filled.table), filled).await?,
                How::Merge => written.note(filled, merge(&transaction, schema, filled).await?),
            }
        }
        merge_sessions(&transaction, schema, batch, written).await?;
        if !owners.rows.is_empty() {
            merge(&transaction, schema, &owners).await?;
            transaction.execute(&make_final(schema), &[]).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Makes the partitions that the batch's rows need, and those of the months after.
    async fn make_months(&self, generation: &mut Generation, batch: &Batch) -> Result<(), StoreError> {
        let started = batch.usage.iter().filter_map(|row| month_of(started(row)));
        let needed: BTreeSet<i32> = started.flat_map(|month| [month, month + 1]).collect();
        for month in needed {
            if !generation.months.contains(&month) {
                self.client.batch_execute(&partitions(&generation.schema, month)).await?;
                generation.months.insert(month);
            }
        }
        Ok(())
    }
}

/// How rows get into their tables.
#[derive(Clone, Copy)]
enum How {
    /// As they are: a key that stands already fails the transaction.
    Copy,
    /// By way of a temporary table: a row whose key stands already is left out.
    Merge,
}

/// Ends with the connection; whoever uses the client is told of the error.
async fn drive<S, T>(connection: tokio_postgres::Connection<S, T>)
where
    tokio_postgres::Connection<S, T>: Future<Output = Result<(), tokio_postgres::Error>>,
{
    if let Err(error) = connection.await {
        tracing::debug!(error = &error as &dyn std::error::Error, "the connection to postgres ended");
    }
}

fn tls() -> Result<MakeRustlsConnect, StoreError> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = rustls::crypto::ring::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into()).with_safe_default_protocol_versions()?;
    Ok(MakeRustlsConnect::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// Migrates one schema, which is made where it is missing. refinery takes no lock of its own.
async fn migrate(client: &mut Client, schema: &str, migrations: &[(&str, &str)]) -> Result<(), StoreError> {
    client.execute("SELECT pg_advisory_lock($1)", &[&MIGRATING]).await?;
    client.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path TO {schema}")).await?;
    let migrations: Result<Vec<_>, _> = migrations.iter().map(|(name, sql)| Migration::unapplied(name, sql)).collect();
    Runner::new(&migrations?).run_async(client).await?;
    client.batch_execute("RESET search_path").await?;
    client.execute("SELECT pg_advisory_unlock($1)", &[&MIGRATING]).await?;
    Ok(())
}

/// Moves the checkpoint over the batch, if it stands where the batch begins and is still ours to move.
async fn move_checkpoint(
    transaction: &Transaction<'_>,
    generation: &Generation,
    batch: &Batch,
) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE {}.checkpoints SET seq = $1, frame_sum = $2, frame_stored = $3
         WHERE name = $4 AND seq = $5 AND frame_sum = $6 AND frame_stored = $7 AND fold_version = $8 AND epoch = $9",
        generation.schema
    );
    let (from, to, version) = (&batch.from, &batch.to, i64::from(FOLD_VERSION));
    let (from_seq, to_seq) = (integer(from.seq), integer(to.seq));
    let (from_stored, to_stored, epoch) = (from.stored.0, to.stored.0, generation.epoch);
    let values: [&(dyn ToSql + Sync); 9] =
        [&to_seq, &to.sum, &to_stored, &NAME, &from_seq, &from.sum, &from_stored, &version, &epoch];
    Ok(transaction.execute(&sql, &values).await? == 1)
}

pub(super) async fn copy(transaction: &Transaction<'_>, target: &str, filled: &Filled<'_>) -> Result<(), StoreError> {
    let sink = transaction.copy_in(&format!("COPY {target} ({}) FROM STDIN BINARY", columns(filled.table))).await?;
    let types: Vec<Type> = filled.table.columns.iter().map(|(_, kind)| kind.clone()).collect();
    let mut writer = pin!(BinaryCopyInWriter::new(sink, &types));
    for row in &filled.rows {
        writer.as_mut().write_raw(row).await?;
    }
    writer.finish().await?;
    Ok(())
}

/// Gives the first two columns of the rows that were written.
async fn merge(
    transaction: &Transaction<'_>,
    schema: &str,
    filled: &Filled<'_>,
) -> Result<Vec<tokio_postgres::Row>, StoreError> {
    let (table, columns) = (filled.table, columns(filled.table));
    let temporary = format!("fresh_{table}");
    let make = format!("CREATE TEMPORARY TABLE {temporary} (LIKE {schema}.{table}) ON COMMIT DROP");
    transaction.batch_execute(&make).await?;
    copy(transaction, &temporary, filled).await?;
    let [first, second] = [0, 1].map(|column: usize| filled.table.columns[column].0);
    let insert = format!(
        "INSERT INTO {schema}.{table} ({columns}) SELECT {columns} FROM {temporary} ON CONFLICT DO NOTHING
         RETURNING {first}, {second}"
    );
    Ok(transaction.query(&insert, &[]).await?)
}

/// An owner becomes final where a later fact of the same deployment says so.
fn make_final(schema: &str) -> String {
    format!(
        "UPDATE {schema}.response_owners AS standing SET state = 'final' FROM fresh_response_owners AS fresh
         WHERE (standing.scope, standing.response) = (fresh.scope, fresh.response)
           AND standing.deployment = fresh.deployment AND fresh.state = 'final' AND standing.state <> 'final'"
    )
}

/// The place that a checkpoint names in its first three columns.
pub(super) fn place(row: &tokio_postgres::Row) -> Place {
    Place { seq: Seq(row.get::<_, i64>(0).unsigned_abs()), sum: row.get(1), stored: Time(row.get(2)) }
}

pub(super) fn columns(table: &Table) -> String {
    let names: Vec<&str> = table.columns.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

fn started(row: &Row) -> Time {
    match row {
        Row::Event(row) => row.started,
        Row::Attempt(row) => row.started,
    }
}

/// The month of `time` in UTC, as months since the year 0; none for a time that no sane clock says.
fn month_of(time: Time) -> Option<i32> {
    let date = DateTime::from_timestamp_millis(time.0)?;
    let month = i32::try_from(date.month0()).expect("a year has twelve months");
    YEARS.contains(&date.year()).then(|| date.year() * 12 + month)
}

fn partitions(schema: &str, month: i32) -> String {
    let first = |month: i32| format!("{:04}-{:02}-01 00:00:00+00", month.div_euclid(12), month.rem_euclid(12) + 1);
    let name = format!("{:04}_{:02}", month.div_euclid(12), month.rem_euclid(12) + 1);
    let (from, to) = (first(month), first(month + 1));
    let partition = |table: &str| {
        format!(
            "CREATE TABLE IF NOT EXISTS {schema}.{table}_{name} PARTITION OF {schema}.{table}
             FOR VALUES FROM ('{from}') TO ('{to}');\n"
        )
    };
    partition("usage_events") + &partition("usage_attempts")
}

fn int4(generation: u32) -> i32 {
    i32::try_from(generation).unwrap_or(i32::MAX)
}

fn integer(seq: Seq) -> i64 {
    i64::try_from(seq.0).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_ends_where_the_next_one_begins() {
        let december = month_of(Time(1_796_083_200_000)).expect("the first moment of December 2026");
        let sql = partitions("wb_g1", december);
        assert!(sql.contains("wb_g1.usage_events_2026_12 PARTITION OF wb_g1.usage_events\n"), "{sql}");
        assert!(sql.contains("FROM ('2026-12-01 00:00:00+00') TO ('2027-01-01 00:00:00+00')"), "{sql}");
        assert_eq!(month_of(Time(1_796_083_199_999)), Some(december - 1));
    }

    #[test]
    fn a_time_beyond_all_years_has_no_month() {
        let times = [i64::MIN, 0, 946_684_799_999, 4_102_444_800_000, i64::MAX];
        assert_eq!(times.map(|ms| month_of(Time(ms))), [None; 5]);
    }
}
