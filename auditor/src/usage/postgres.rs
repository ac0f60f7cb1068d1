//! The usage store in Postgres: the views of the live generation, over one connection that is made when it is needed and
//! made again when it is gone. It reads only, and no question may take longer than [`STATEMENT_TIMEOUT`].

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use rustls::{ClientConfig, RootCertStore};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Config, Connection, NoTls, Row};
use tokio_postgres_rustls::MakeRustlsConnect;
use waybill_projections::sessions::LATEST;
use waybill_schema::store::POSTGRES_SCHEMA;
use waybill_schema::time::Time;

use super::{Cause, Cells, StoreError, UsageStore, Value};

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long Postgres may work on a question.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may take: a server that is frozen keeps no time of its own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(7);

/// The URL is none that Postgres understands.
#[derive(Debug, thiserror::Error)]
#[error("the URL of postgres cannot be used")]
pub struct UrlError(#[from] tokio_postgres::Error);

/// The rows in a database.
pub struct PostgresUsage {
    config: Config,
    runtime: Handle,
    session: Option<Session>,
}

struct Session {
    client: Client,
    /// Drives the connection; it ends with the client.
    _connection: JoinSet<()>,
}

impl PostgresUsage {
    /// The rows in the database at `url`; connections live on `runtime`, which must have threads of its own.
    pub fn new(url: &str, runtime: Handle) -> Result<Self, UrlError> {
        let mut config: Config = url.parse()?;
        config.application_name("waybill audit");
        Ok(Self { config, runtime, session: None })
    }

    /// The session, made anew where it is gone.
    fn session(&mut self) -> Result<Session, StoreError> {
        match self.session.take().filter(|session| !session.client.is_closed()) {
            Some(session) => Ok(session),
            None => within(&self.runtime, CONNECT_TIMEOUT, connect(&self.config, &self.runtime))?,
        }
    }
}

impl UsageStore for PostgresUsage {
    fn rows(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Cells>, StoreError> {
        let values: Vec<_> = values.iter().map(|value| (value as &(dyn ToSql + Sync), kind(value))).collect();
        let session = self.session()?;
        // With the kinds known, question and answer are one round trip.
        let rows = within(&self.runtime, ANSWER_TIMEOUT, session.client.query_typed(sql, &values))?;
        // It answered, be it with an error.
        self.session = Some(session);
        let rows = rows.map_err(error)?;
        rows.iter().map(|row| cells(row).map_err(|error| StoreError::Failed(Box::new(error)))).collect()
    }

    fn holds(&self, column: &str, place: &str) -> String {
        format!("{place} = ANY({column})")
    }
}

fn within<T>(runtime: &Handle, limit: Duration, work: impl Future<Output = T>) -> Result<T, StoreError> {
    let timed = runtime.block_on(async { tokio::time::timeout(limit, work).await });
    timed.map_err(away)
}

/// Connects; with TLS, and the server's certificate verified, where the URL says `sslmode=require`.
async fn connect(config: &Config, runtime: &Handle) -> Result<Session, StoreError> {
    let mut tasks = JoinSet::new();
    let client = if config.get_ssl_mode() == SslMode::Require {
        let tls = tls().map_err(|error| StoreError::Failed(Box::new(error)))?;
        let (client, connection) = config.connect(tls).await.map_err(away)?;
        tasks.spawn_on(drive(connection), runtime);
        client
    } else {
        let (client, connection) = config.clone().ssl_mode(SslMode::Disable).connect(NoTls).await.map_err(away)?;
        tasks.spawn_on(drive(connection), runtime);
        client
    };
    let settings = format!(
        "SET search_path TO {POSTGRES_SCHEMA}; SET default_transaction_read_only = on; SET statement_timeout = {}",
        STATEMENT_TIMEOUT.as_millis()
    );
    client.batch_execute(&settings).await.map_err(away)?;
    Ok(Session { client, _connection: tasks })
}

/// Ends with the connection; whoever uses the client is told of the error.
async fn drive<S, T>(connection: Connection<S, T>)
where
    Connection<S, T>: Future<Output = Result<(), tokio_postgres::Error>>,
{
    if let Err(error) = connection.await {
        tracing::debug!(error = &error as &dyn Error, "the connection to postgres ended");
    }
}

fn tls() -> Result<MakeRustlsConnect, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = rustls::crypto::ring::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into()).with_safe_default_protocol_versions()?;
    Ok(MakeRustlsConnect::new(config.with_root_certificates(roots).with_no_client_auth()))
}

fn away(cause: impl Into<Cause>) -> StoreError {
    StoreError::Away { store: "postgres", cause: cause.into() }
}

fn error(error: tokio_postgres::Error) -> StoreError {
    let cause: Cause = match error.code().cloned() {
        Some(SqlState::UNDEFINED_TABLE) => return StoreError::NotProjected,
        // The server ends, or starts.
        Some(code) if code.code().starts_with("57") => return away(error),
        None => return away(error),
        Some(_) => Box::new(error),
    };
    StoreError::Failed(cause)
}

fn kind(value: &Value) -> Type {
    match value {
        Value::Null | Value::Text(_) => Type::TEXT,
        Value::Number(_) => Type::INT8,
        Value::Time(_) => Type::TIMESTAMPTZ,
        Value::Names(_) => Type::TEXT_ARRAY,
    }
}

fn cells(row: &Row) -> Result<Cells, tokio_postgres::Error> {
    let values: Result<Vec<Value>, _> = (0..row.len()).map(|column| value(row, column)).collect();
    values.map(Cells::new)
}

fn value(row: &Row, column: usize) -> Result<Value, tokio_postgres::Error> {
    let kind = row.columns()[column].type_();
    let value = if *kind == Type::INT8 {
        row.try_get::<_, Option<i64>>(column)?.map(Value::Number)
    } else if *kind == Type::INT4 {
        row.try_get::<_, Option<i32>>(column)?.map(|n| Value::Number(n.into()))
    } else if *kind == Type::BOOL {
        row.try_get::<_, Option<bool>>(column)?.map(|flag| Value::Number(flag.into()))
    } else if *kind == Type::TIMESTAMPTZ {
        row.try_get::<_, Option<SystemTime>>(column)?.map(|moment| Value::Time(time(moment)))
    } else if *kind == Type::TEXT_ARRAY {
        row.try_get::<_, Option<Vec<String>>>(column)?.map(Value::Names)
    } else {
        row.try_get::<_, Option<String>>(column)?.map(Value::Text)
    };
    Ok(value.unwrap_or(Value::Null))
}

/// No moment of ours lies before 1970.
fn time(moment: SystemTime) -> Time {
    let ms = moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    Time(i64::try_from(ms).unwrap_or(i64::MAX))
}

impl ToSql for Value {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Cause> {
        match self {
            Self::Null => Ok(IsNull::Yes),
            // No row holds a U+0000: a text with one is found nowhere.
            Self::Text(text) => text.replace('\0', "\u{fffd}").to_sql(kind, out),
            Self::Number(n) => n.to_sql(kind, out),
            Self::Time(time) => {
                let ms = (*time).clamp(Time(0), LATEST).0.unsigned_abs();
                (UNIX_EPOCH + Duration::from_millis(ms)).to_sql(kind, out)
            }
            Self::Names(names) => names.to_sql(kind, out),
        }
    }

    /// Every value goes as its own kind.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}
