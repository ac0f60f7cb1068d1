//! Where sealed outcomes lie: one SQLite file of this machine, or the Redis that gateways share.
//!
//! A shelf knows no content. It takes what is absent in one step, so of two requests with one key one is the first.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use ::redis::{Client, RedisError, RedisResult};
use rusqlite::{Connection, OptionalExtension};
use waybill_schema::config::StateSettings;
use waybill_schema::time::Time;

use super::KEPT_MS;

/// How long Redis may take: a request with a key waits for it, as its client asked.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// What the keys of outcomes begin with, after the deployment's prefix.
const KEYS: &str = "vault:";

/// Where sealed outcomes lie.
#[derive(Debug)]
pub enum Shelf {
    /// In a file of this machine.
    File(Mutex<Connection>),
    /// In Redis, under a prefix.
    Redis {
        /// The connection.
        connection: ConnectionManager,
        /// What the keys begin with.
        prefix: String,
    },
}

/// Why an outcome cannot be had or kept.
#[derive(Debug, thiserror::Error)]
pub enum ShelfError {
    /// The file failed.
    #[error("the vault's file failed")]
    File(#[from] rusqlite::Error),
    /// Redis failed, or did not answer.
    #[error("the vault's redis failed")]
    Redis(#[from] RedisError),
}

impl Shelf {
    /// The shelf in the file at `path`, which is made where it is missing.
    pub fn file(path: &Path) -> Result<Self, ShelfError> {
        Self::of(Connection::open(path)?)
    }

    /// The shelf in the Redis of `settings`; begins to connect on the runtime that it is called on.
    pub fn redis(settings: &StateSettings) -> RedisResult<Self> {
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_connection_timeout(Some(ANSWER_TIMEOUT))
            .set_response_timeout(Some(ANSWER_TIMEOUT));
        let client = Client::open(settings.redis.as_str())?;
        let connection = ConnectionManager::new_lazy_with_config(client, config)?;
        Ok(Self::Redis { connection, prefix: format!("{}{KEYS}", settings.prefix) })
    }

    #[cfg(test)]
    pub(super) fn in_memory() -> Self {
        Self::of(Connection::open_in_memory().expect("memory can be had")).expect("the table can be made")
    }

    fn of(connection: Connection) -> Result<Self, ShelfError> {
        connection.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA secure_delete = ON;
             CREATE TABLE IF NOT EXISTS vault (id TEXT PRIMARY KEY, expires INTEGER NOT NULL, sealed BLOB NOT NULL);
             CREATE INDEX IF NOT EXISTS vault_expires ON vault (expires);",
        )?;
        Ok(Self::File(Mutex::new(connection)))
    }

    /// Puts `sealed` there for a day where nothing is, else gives what is.
    pub(super) async fn put_if_absent(
        &self,
        id: &str,
        sealed: &[u8],
        now: Time,
    ) -> Result<Option<Vec<u8>>, ShelfError> {
        match self {
            Self::File(file) => {
                let file = lock(file);
                file.execute("DELETE FROM vault WHERE expires <= ?1", [now.0])?;
                let put = "INSERT INTO vault VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";
                if file.execute(put, (id, now.plus_ms(KEPT_MS).0, sealed))? == 1 {
                    return Ok(None);
                }
                Ok(file.query_row("SELECT sealed FROM vault WHERE id = ?1", [id], |row| row.get(0)).optional()?)
            }
            Self::Redis { connection, prefix } => {
                let (mut connection, key) = (connection.clone(), format!("{prefix}{id}"));
                let mut set = ::redis::cmd("SET");
                set.arg(&key).arg(sealed).arg("NX").arg("PX").arg(KEPT_MS);
                let mut get = ::redis::cmd("GET");
                get.arg(&key);
                // What expires between the two is taken at the second try.
                for _ in 0..2 {
                    if set.query_async::<Option<String>>(&mut connection).await?.is_some() {
                        return Ok(None);
                    }
                    if let Some(standing) = get.query_async::<Option<Vec<u8>>>(&mut connection).await? {
                        return Ok(Some(standing));
                    }
                }
                Ok(Some(Vec::new()))
            }
        }
    }

    /// Puts `sealed` there for a day, whatever is there.
    pub(super) async fn put(&self, id: &str, sealed: &[u8], now: Time) -> Result<(), ShelfError> {
        match self {
            Self::File(file) => {
                let put = "INSERT OR REPLACE INTO vault VALUES (?1, ?2, ?3)";
                lock(file).execute(put, (id, now.plus_ms(KEPT_MS).0, sealed))?;
            }
            Self::Redis { connection, prefix } => {
                let mut set = ::redis::cmd("SET");
                set.arg(format!("{prefix}{id}")).arg(sealed).arg("PX").arg(KEPT_MS);
                set.query_async::<()>(&mut connection.clone()).await?;
            }
        }
        Ok(())
    }

    /// Removes what is there.
    pub(super) async fn remove(&self, id: &str) -> Result<(), ShelfError> {
        match self {
            Self::File(file) => drop(lock(file).execute("DELETE FROM vault WHERE id = ?1", [id])?),
            Self::Redis { connection, prefix } => {
                ::redis::cmd("DEL").arg(format!("{prefix}{id}")).query_async::<()>(&mut connection.clone()).await?;
            }
        }
        Ok(())
    }
}

fn lock(file: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}
