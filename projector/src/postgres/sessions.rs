//! The rows of sessions: those that a batch changes are taken out, merged with the changes and put back, in the batch's
//! own transaction. The lease and the checkpoint see to it that nobody else changes them meanwhile.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio_postgres::{Row as Standing, Transaction};
use waybill_projections::sessions::{Activity, Session, Sessions, Totals};
use waybill_projections::usage::Row;
use waybill_schema::time::Time;

use super::batch::Batch;
use super::store::{StoreError, columns, copy};
use super::table::{Filled, SESSIONS, USAGE_ATTEMPTS, USAGE_EVENTS, session};
use super::text::storable;

/// Which rows of requests and sends were written: all, unless it was noted that only some were.
#[derive(Default)]
pub(super) struct Written {
    only: Option<Only>,
}

#[derive(Default)]
struct Only {
    requests: BTreeSet<String>,
    sends: BTreeSet<(String, i32)>,
}

impl Written {
    /// Notes that only some rows of `filled` were written: those whose first two columns are in `rows`.
    pub(super) fn note(&mut self, filled: &Filled<'_>, rows: Vec<Standing>) {
        let only = self.only.get_or_insert_default();
        if filled.table.name == USAGE_EVENTS.name {
            only.requests = rows.iter().map(|row| row.get(0)).collect();
        } else if filled.table.name == USAGE_ATTEMPTS.name {
            only.sends = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        }
    }

    /// Whether the next row with this key was written: of two in a batch the first was.
    fn take(&mut self, row: &Row) -> bool {
        let Some(only) = &mut self.only else { return true };
        match row {
            Row::Event(row) => only.requests.remove(&*storable(row.request.as_str())),
            Row::Attempt(row) => {
                let request = storable(row.request.as_str()).into_owned();
                only.sends.remove(&(request, i32::from(row.attempt)))
            }
        }
    }
}

/// Merges what the batch changes of sessions into what stands of them.
pub(super) async fn merge_sessions(
    transaction: &Transaction<'_>,
    schema: &str,
    batch: &Batch,
    mut written: Written,
) -> Result<(), StoreError> {
    let mut sessions = Sessions::new(storable);
    batch.usage.iter().filter(|row| written.take(row)).for_each(|row| sessions.take(row));
    if sessions.is_empty() {
        return Ok(());
    }
    take_out(transaction, schema, &mut sessions).await?;
    let filled = Filled { table: &SESSIONS, rows: sessions.rows().filter_map(session).collect() };
    copy(transaction, &format!("{schema}.{SESSIONS}"), &filled).await
}

async fn take_out(transaction: &Transaction<'_>, schema: &str, sessions: &mut Sessions) -> Result<(), StoreError> {
    let (names, scopes): (Vec<&str>, Vec<&str>) =
        sessions.rows().map(|session| (session.session.as_str(), session.scope.as_str())).unzip();
    let sql = format!(
        "DELETE FROM {schema}.{SESSIONS} WHERE (session_id, scope) IN (SELECT * FROM unnest($1::text[], $2::text[]))
         RETURNING {}",
        columns(&SESSIONS)
    );
    for row in transaction.query(&sql, &[&names, &scopes]).await? {
        sessions.merge(standing(&row)?);
    }
    Ok(())
}

/// A row as [`SESSIONS`] has its columns.
fn standing(row: &Standing) -> Result<Session, tokio_postgres::Error> {
    let number = |column| row.try_get::<_, i64>(column).map(i64::unsigned_abs);
    let known = |column| row.try_get::<_, Option<i64>>(column).map(|n| n.map(i64::unsigned_abs));
    let names = |column| row.try_get::<_, Vec<String>>(column).map(|names| names.into_iter().collect());
    let activity = Activity {
        started: time(row.try_get(2)?),
        ended: time(row.try_get(3)?),
        request: row.try_get(4)?,
        source: row.try_get(5)?,
    };
    let totals = Totals {
        sends: number(10)?,
        sends_unknown: number(11)?,
        sends_estimated: number(12)?,
        input: known(13)?,
        output: known(14)?,
        cached: known(15)?,
        cache_write: known(16)?,
        reasoning: known(17)?,
        cost_nano: known(18)?,
    };
    Ok(Session {
        session: row.try_get(0)?,
        scope: row.try_get(1)?,
        activity: Some(activity),
        requests: number(6)?,
        failed: number(7)?,
        models: names(8)?,
        deployments: names(9)?,
        totals,
    })
}

/// No moment of ours lies before 1970.
fn time(moment: SystemTime) -> Time {
    let ms = moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    Time(i64::try_from(ms).unwrap_or(i64::MAX))
}
