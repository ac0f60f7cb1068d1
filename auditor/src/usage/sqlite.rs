//! The usage store in the embedded file, read beside the process that writes it.

use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{ErrorCode, ToSql, params_from_iter};
use waybill_events::sqlite::SqliteLog;

use super::{Cells, StoreError, UsageStore, Value};

/// The rows beside an embedded log.
pub struct SqliteUsage(SqliteLog);

impl SqliteUsage {
    /// The rows in the file of `log`.
    pub fn new(log: SqliteLog) -> Self {
        Self(log)
    }
}

impl UsageStore for SqliteUsage {
    fn rows(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Cells>, StoreError> {
        let mut statement = self.0.connection().prepare_cached(&sql.replace('$', "?")).map_err(error)?;
        let width = statement.column_count();
        let rows = statement.query_map(params_from_iter(values), |row| {
            let values: Result<Vec<Value>, _> = (0..width).map(|column| row.get_ref(column).map(value)).collect();
            values.map(Cells::new)
        });
        rows.and_then(Iterator::collect).map_err(error)
    }

    fn holds(&self, column: &str, place: &str) -> String {
        format!("EXISTS (SELECT 1 FROM json_each({column}) WHERE value = {place})")
    }
}

fn value(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Integer(n) => Value::Number(n),
        ValueRef::Text(text) | ValueRef::Blob(text) => Value::Text(String::from_utf8_lossy(text).into_owned()),
        // No column holds a fraction.
        ValueRef::Null | ValueRef::Real(_) => Value::Null,
    }
}

fn error(error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            StoreError::Away { store: "the embedded file", cause: Box::new(error) }
        }
        _ if error.to_string().contains("no such table") => StoreError::NotProjected,
        _ => StoreError::Failed(Box::new(error)),
    }
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Self::Null => rusqlite::types::Null.to_sql(),
            Self::Text(text) => text.to_sql(),
            Self::Number(n) => n.to_sql(),
            Self::Time(time) => Ok(time.0.into()),
            Self::Names(names) => Ok(serde_json::to_string(names).expect("names are plain text").into()),
        }
    }
}
