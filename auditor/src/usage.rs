//! The usage store: the rows that a projection writes, in Postgres or in the embedded file.
//!
//! The tables have the same names and columns in both (`schema/migrations`), and texts sort by their bytes in both. So
//! a question is put in SQL once, and whatever a store answers the other one answers, too.

mod postgres;
mod sqlite;

use std::error::Error;
use std::vec::IntoIter;

use waybill_schema::time::Time;

pub use postgres::{PostgresUsage, UrlError};
pub use sqlite::SqliteUsage;

/// An error of whatever stands behind a store.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Why a store gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be reached, or did not answer in time.
    #[error("{store} is away")]
    Away {
        /// What it is.
        store: &'static str,
        /// What happened.
        #[source]
        cause: Cause,
    },
    /// It has no rows of this version: no projector of it has been there yet.
    #[error("the usage store holds no rows of this version: its projector has not been there yet")]
    NotProjected,
    /// It does not answer this question, or not as this program expects.
    #[error("the usage store fails")]
    Failed(#[source] Cause),
}

/// A place where rows are. All calls block.
pub trait UsageStore: Send {
    /// The rows of a query in which `$1`, `$2` … stand for `values`.
    fn rows(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Cells>, StoreError>;

    /// The condition that the list of names in `column` has the value at `place`, such as `$3`.
    fn holds(&self, column: &str, place: &str) -> String;
}

/// A value in a row or a query.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// None.
    Null,
    /// A text.
    Text(String),
    /// A number, or a flag as 0 or 1.
    Number(i64),
    /// A moment.
    Time(Time),
    /// A list of names.
    Names(Vec<String>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Time> for Value {
    fn from(time: Time) -> Self {
        Self::Time(time)
    }
}

/// A row, read from its first column to its last.
#[derive(Debug)]
pub struct Cells(IntoIter<Value>);

/// A column holds something else than the query expects.
#[derive(Debug, thiserror::Error)]
#[error("a column that should be {expected} holds {found:?}")]
struct Odd {
    expected: &'static str,
    found: Option<Value>,
}

impl Cells {
    /// A row of these values.
    pub fn new(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }

    /// The next column, a text.
    pub fn text(&mut self) -> Result<String, StoreError> {
        self.maybe_text()?.ok_or_else(|| odd("a text", None))
    }

    /// The next column, a text or none.
    pub fn maybe_text(&mut self) -> Result<Option<String>, StoreError> {
        match self.0.next() {
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(Value::Null) => Ok(None),
            found => Err(odd("a text", found)),
        }
    }

    /// The next column, a count.
    pub fn count(&mut self) -> Result<u64, StoreError> {
        self.maybe_count()?.ok_or_else(|| odd("a number", None))
    }

    /// The next column, a count or none.
    pub fn maybe_count(&mut self) -> Result<Option<u64>, StoreError> {
        match self.0.next() {
            Some(Value::Number(n)) => Ok(Some(n.unsigned_abs())),
            Some(Value::Null) => Ok(None),
            found => Err(odd("a number", found)),
        }
    }

    /// The next column, a count or none that fits 16 bits: a status or the number of a send.
    pub fn maybe_small(&mut self) -> Result<Option<u16>, StoreError> {
        Ok(self.maybe_count()?.map(|n| u16::try_from(n).unwrap_or(u16::MAX)))
    }

    /// The next column, a flag.
    pub fn flag(&mut self) -> Result<bool, StoreError> {
        Ok(self.count()? != 0)
    }

    /// The next column, a moment.
    pub fn time(&mut self) -> Result<Time, StoreError> {
        self.maybe_time()?.ok_or_else(|| odd("a moment", None))
    }

    /// The next column, a moment or none. The embedded file holds moments as numbers.
    pub fn maybe_time(&mut self) -> Result<Option<Time>, StoreError> {
        match self.0.next() {
            Some(Value::Time(time)) => Ok(Some(time)),
            Some(Value::Number(ms)) => Ok(Some(Time(ms))),
            Some(Value::Null) => Ok(None),
            found => Err(odd("a moment", found)),
        }
    }

    /// The next column, a list of names. The embedded file holds lists as JSON.
    pub fn names(&mut self) -> Result<Vec<String>, StoreError> {
        match self.0.next() {
            Some(Value::Names(names)) => Ok(names),
            Some(Value::Text(text)) => serde_json::from_str(&text).map_err(|error| StoreError::Failed(Box::new(error))),
            found => Err(odd("a list of names", found)),
        }
    }
}

fn odd(expected: &'static str, found: Option<Value>) -> StoreError {
    StoreError::Failed(Box::new(Odd { expected, found }))
}
