//! Whether the rows of the embedded file are what its frames say: beside the file, which is only read, its frames are
//! folded into a database of our own that is gone afterwards, and the two are compared by SQL.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, Row};
use serde::Serialize;
use waybill_events::log::Seq;
use waybill_schema::FOLD_VERSION;
use waybill_schema::secret::sum128;
use waybill_schema::store::SQLITE_MIGRATIONS;

use super::{ProjectError, Replay};
use crate::finding::{Fault, Finding, Findings};
use crate::rows::Checkpoint;

/// The tables, and how many of their columns, the first ones, are the key.
const TABLES: [(&str, usize); 4] = [("usage_events", 1), ("usage_attempts", 2), ("sessions", 2), ("quarantine", 2)];

/// A table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableSum {
    /// Its name.
    pub table: &'static str,
    /// Its rows.
    pub rows: u64,
    /// The digest of them, whatever their order, as 32 hex digits.
    pub digest: String,
}

/// What a look at the rows found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The last frame that the rows cover.
    pub seq: Seq,
    /// Why they were not compared, where they were not.
    pub incomparable: Option<String>,
    /// The tables as they are.
    pub tables: Vec<TableSum>,
    /// The rows that differ.
    pub findings: Findings,
}

/// Compares the rows in the file at `path` with a fresh fold of its frames; a process that writes there is not disturbed.
pub fn verify(path: &Path) -> Result<Verified, ProjectError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_URI;
    // A database without a name lies in a file of SQLite's own, and ends with the connection.
    let mut connection = Connection::open_with_flags("", flags)?;
    for (_, sql) in SQLITE_MIGRATIONS {
        connection.execute_batch(sql)?;
    }
    connection.execute_batch("DROP TABLE frames")?;
    connection.execute("ATTACH DATABASE ?1 AS live", [uri(path)])?;
    // What is read of the file is of one moment.
    let transaction = connection.transaction()?;
    let tables = sums(&transaction, "live")?;
    let checkpoint = Checkpoint::read(&transaction, "live")?.unwrap_or_default();
    let (seq, findings) = (Seq(checkpoint.seq), Findings::default());
    let mut verified = Verified { seq, incomparable: None, tables, findings };
    if checkpoint.fold_version != FOLD_VERSION {
        verified.incomparable =
            Some(format!("fold {} made them, this program has {FOLD_VERSION}", checkpoint.fold_version));
    } else if checkpoint != Checkpoint::at(&transaction, checkpoint.seq)? {
        verified.incomparable = Some(format!("the log holds another frame {seq} than was projected"));
    } else {
        Replay::default().run(&transaction, 0, checkpoint.seq)?;
        for (table, n_key) in TABLES {
            verified.findings.extend(differences(&transaction, table, n_key)?);
        }
    }
    Ok(verified)
}

/// Every table of the database `schema`.
pub(super) fn sums(connection: &Connection, schema: &str) -> Result<Vec<TableSum>, rusqlite::Error> {
    let sum = |(table, _): &(&'static str, usize)| {
        let line = columns(connection, table)?.iter().map(|name| format!("quote({name})")).collect::<Vec<_>>();
        let mut statement =
            connection.prepare(&format!("SELECT {} FROM {schema}.{table}", line.join(" || ',' || ")))?;
        let (mut n, mut sum, mut rows) = (0, 0u128, statement.query([])?);
        while let Some(row) = rows.next()? {
            let line: String = row.get(0)?;
            let own = u128::from_str_radix(&sum128(&[line.as_bytes()]), 16).expect("a sum is hexadecimal");
            (n, sum) = (n + 1, sum.wrapping_add(own));
        }
        Ok(TableSum { table, rows: n, digest: format!("{sum:032x}") })
    };
    TABLES.iter().map(sum).collect()
}

fn columns(connection: &Connection, table: &str) -> Result<Vec<String>, rusqlite::Error> {
    let mut statement = connection.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let names = statement.query_map([table], |row| row.get(0))?;
    names.collect()
}

fn differences(connection: &Connection, table: &'static str, n_key: usize) -> Result<Vec<Finding>, rusqlite::Error> {
    let names = columns(connection, table)?;
    let (key, others) = names.split_at(n_key);
    let each = |form: fn(&String) -> String, between: &str| key.iter().map(form).collect::<Vec<_>>().join(between);
    let (own, same) = (each(|name| format!("a.{name}"), ", "), each(|name| format!("a.{name} = b.{name}"), " AND "));
    let only = |left: &str, right: &str| {
        format!(
            "SELECT {own} FROM {left}.{table} AS a WHERE NOT EXISTS (SELECT 1 FROM {right}.{table} AS b WHERE {same})
             ORDER BY {own}"
        )
    };
    let apart = others.iter().map(|name| format!("a.{name} IS NOT b.{name}")).collect::<Vec<_>>();
    let changed = format!(
        "SELECT {own}, {} FROM main.{table} AS a JOIN live.{table} AS b ON {same} WHERE {} ORDER BY {own}",
        apart.join(", "),
        apart.join(" OR ")
    );
    let columns_apart = |row: &Row<'_>| {
        let flags = others.iter().enumerate().map(|(index, name)| Ok((row.get(n_key + index)?, name.clone())));
        let flags: Result<Vec<(bool, String)>, rusqlite::Error> = flags.collect();
        Ok(Fault::Changed(flags?.into_iter().filter_map(|(apart, name)| apart.then_some(name)).collect()))
    };
    let look = |sql: &str, fault: &dyn Fn(&Row<'_>) -> Result<Fault, rusqlite::Error>| {
        let mut statement = connection.prepare(sql)?;
        let found = statement.query_map([], |row| {
            Ok(Finding { place: table.to_owned(), key: key_text(row, n_key)?, fault: fault(row)? })
        })?;
        found.collect::<Result<Vec<Finding>, rusqlite::Error>>()
    };
    let mut findings = look(&only("main", "live"), &|_| Ok(Fault::Missing))?;
    findings.extend(look(&only("live", "main"), &|_| Ok(Fault::Extra))?);
    findings.extend(look(&changed, &columns_apart)?);
    Ok(findings)
}

fn key_text(row: &Row<'_>, n_key: usize) -> Result<String, rusqlite::Error> {
    use rusqlite::types::ValueRef;
    let text = |index| {
        Ok(match row.get_ref(index)? {
            ValueRef::Text(text) | ValueRef::Blob(text) => String::from_utf8_lossy(text).into_owned(),
            ValueRef::Integer(n) => n.to_string(),
            ValueRef::Real(x) => x.to_string(),
            ValueRef::Null => String::new(),
        })
    };
    let texts: Result<Vec<String>, rusqlite::Error> = (0..n_key).map(text).collect();
    Ok(format!("({})", texts?.join(", ")))
}

/// The file for reading only, as SQLite takes it in place of a path.
fn uri(path: &Path) -> String {
    let mut uri = String::from("file:");
    for c in path.to_string_lossy().chars() {
        match c {
            '%' | '?' | '#' => uri.push_str(&format!("%{:02X}", u32::from(c))),
            _ => uri.push(c),
        }
    }
    uri + "?mode=ro"
}
