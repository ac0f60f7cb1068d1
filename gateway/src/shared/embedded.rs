//! The state of a gateway that is alone: its records are all in its ledger, and the owners of its responses in the one
//! SQLite file, which is read on a thread where it may wait.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::types::Type;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, params};
use serde::de::DeserializeOwned;
use waybill_routing::ownership::{Name, Sighting};
use waybill_schema::id::WriterId;
use waybill_schema::redis::{Owner, Place};
use waybill_schema::time::Time;

use super::{Answer, Asked, Away, Known, Question, SharedState, Showing, Sought};

/// How long a read waits for a file that is held.
const BUSY_TIMEOUT: Duration = Duration::from_millis(500);

const OWNER: &str = "SELECT deployment, channel, incarnation, model, endpoint, session_id, session_source, state
                     FROM response_owners WHERE scope = ?1 AND response = ?2";
const LAST: &str = "SELECT epoch, last, sent FROM frames WHERE writer = ?1 ORDER BY frame DESC LIMIT 1";

/// The state of the only gateway.
#[derive(Clone, Debug)]
pub struct Embedded {
    connection: Arc<Mutex<Connection>>,
    writer: WriterId,
}

impl Embedded {
    /// Opens the file at `path`, which must have been migrated, for reading beside the log of `writer`.
    pub fn open(path: &Path, writer: WriterId) -> rusqlite::Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), writer })
    }

    /// The owner, and how far the log has come, in one view of the file.
    fn look(&self, name: &Name) -> rusqlite::Result<Sighting> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let view = connection.transaction()?;
        let named = params![name.scope.as_str(), name.response];
        let owner = view.prepare_cached(OWNER)?.query_row(named, owner).optional()?;
        let last = view.prepare_cached(LAST)?.query_row([self.writer.as_str()], place).optional()?;
        Ok(Sighting { owner, writers: vec![(self.writer.clone(), last)] })
    }
}

impl SharedState for Embedded {
    fn read_or_claim<'a>(&'a self, _: Question<'a>) -> Asked<'a> {
        Box::pin(std::future::ready(Answer::Own))
    }

    fn owner<'a>(&'a self, name: &'a Name) -> Sought<'a> {
        let (this, name) = (self.clone(), name.clone());
        Box::pin(async move {
            match tokio::task::spawn_blocking(move || this.look(&name)).await {
                Ok(Ok(sighting)) => Known::Own(sighting),
                Ok(Err(error)) => {
                    tracing::error!(%error, "the owners of responses cannot be read");
                    Known::Away(Away::Failed)
                }
                Err(_) => Known::Away(Away::Failed),
            }
        })
    }

    fn show<'a>(&'a self, _: &'a Name, _: &'a Owner, _: Time) -> Showing<'a> {
        Box::pin(std::future::ready(()))
    }
}

fn owner(row: &Row<'_>) -> rusqlite::Result<Owner> {
    Ok(Owner {
        deployment: text(row, 0)?.as_str().into(),
        channel: text(row, 1)?.as_str().into(),
        incarnation: row.get::<_, i64>(2)?.unsigned_abs(),
        model: text(row, 3)?.as_str().into(),
        endpoint: word(row, 4)?,
        session: text(row, 5)?.as_str().into(),
        source: word(row, 6)?,
        state: word(row, 7)?,
    })
}

fn place(row: &Row<'_>) -> rusqlite::Result<Place> {
    let count = |column| row.get::<_, i64>(column).map(i64::unsigned_abs);
    Ok(Place { epoch: count(0)?, number: count(1)?, at: Time(row.get(2)?) })
}

fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    row.get(column)
}

/// One of our kinds, spelled as in the log.
fn word<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let word = serde_json::Value::String(text(row, column)?);
    serde_json::from_value(word)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error)))
}
