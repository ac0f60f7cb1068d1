//! Spending: what each key has used, by day, summed up from the usage rows as they come.
//!
//! Rows are written once and in the order of the log, so what was read is never read again. Where the rows begin anew
//! (another generation, a log that lost its end), so does the sum.

mod postgres;

use std::collections::BTreeMap;

use rusqlite::Connection;
use waybill_schema::catalogue::terms::Period;
use waybill_schema::id::KeyId;
use waybill_schema::time::Time;

pub use postgres::{PostgresSpending, ReadError};

const DAY_MS: i64 = 86_400_000;

/// What each key has used since the month began.
#[derive(Debug, Default)]
pub struct Spending {
    /// How far rows were read, and the generation they were read from: by the frames that wrote them in Postgres, by
    /// their own order in the embedded store.
    after: (i64, i32),
    days: BTreeMap<(KeyId, i64), Used>,
}

/// An amount of usage, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Tokens of prompts and answers.
    pub tokens: u64,
    /// Money in nano-USD.
    pub cost_nano: u64,
}

impl Spending {
    /// What each key used in the period that `now` is in.
    pub fn of(&self, period: Period, now: Time) -> impl Iterator<Item = (&KeyId, Used)> {
        let first = period.begin(now).0 / DAY_MS;
        self.days.iter().filter(move |((_, day), _)| *day >= first).map(|((key, _), used)| (key, *used))
    }

    /// Reads what is new in the embedded store.
    pub fn read(&mut self, connection: &Connection, now: Time) -> Result<(), rusqlite::Error> {
        let transaction = connection.unchecked_transaction()?;
        let head = "SELECT coalesce(max(rowid), 0) FROM usage_events";
        let head = transaction.query_row(head, [], |row| row.get(0))?;
        let begin = self.begin_read(head, 0, now);
        let mut statement = transaction.prepare_cached(
            "SELECT e.key_id, e.ended / 86400000, sum(coalesce(a.input, 0) + coalesce(a.output, 0)),
                    sum(coalesce(a.cost_nano, 0))
             FROM usage_events e JOIN usage_attempts a ON a.request_id = e.request_id
             WHERE e.rowid > ?1 AND e.rowid <= ?2 AND e.ended >= ?3 GROUP BY 1, 2",
        )?;
        let mut rows = statement.query((self.after.0, head, begin.0))?;
        let mut read = Vec::new();
        while let Some(row) = rows.next()? {
            read.push((row.get::<_, String>(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
        }
        self.take(read, head);
        Ok(())
    }

    /// Forgets what is over, and everything where the rows have begun anew; gives the beginning of the month.
    fn begin_read(&mut self, head: i64, generation: i32, now: Time) -> Time {
        if head < self.after.0 || generation != self.after.1 {
            *self = Self { after: (0, generation), days: BTreeMap::new() };
        }
        let begin = Period::Month.begin(now);
        self.days.retain(|(_, day), _| *day >= begin.0 / DAY_MS);
        begin
    }

    fn take(&mut self, rows: Vec<(String, i64, i64, i64)>, head: i64) {
        for (key, day, tokens, cost_nano) in rows {
            let used = self.days.entry((key.as_str().into(), day)).or_default();
            used.tokens = used.tokens.saturating_add(tokens.unsigned_abs());
            used.cost_nano = used.cost_nano.saturating_add(cost_nano.unsigned_abs());
        }
        self.after.0 = head;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2024-02-29T12:00:00Z, by `date -u -d … +%s`.
    const NOON: i64 = 1_709_208_000_000;

    fn store() -> Connection {
        let connection = Connection::open_in_memory().expect("a store in memory can be had");
        for (_, sql) in waybill_schema::store::SQLITE_MIGRATIONS {
            connection.execute_batch(sql).expect("the tables can be made");
        }
        connection
    }

    fn ended(connection: &Connection, seq: i64, key: &str, at: i64, sends: &[(Option<i64>, Option<i64>)]) {
        let request = format!("{seq}");
        let event =
            "INSERT INTO usage_events VALUES (?1, ?2, ?2, ?3, ?3, 'g', 'm', 'chat', 0, 's', 'explicit', 'x', NULL,
                     0, 0, 'success', NULL, NULL, 200, 1, 'd', 1, ?4, ?4)";
        connection.execute(event, (&request, at, key, seq)).expect("the row fits");
        for (n, (tokens, cost)) in (1i64..).zip(sends) {
            let send =
                "INSERT INTO usage_attempts VALUES (?1, ?2, 0, 0, 'm', 'd', 'u', 'draw', 'success', 200, 1, NULL,
                        ?3, ?3, NULL, NULL, NULL, 0, ?4, NULL)";
            connection.execute(send, (&request, n, tokens, cost)).expect("the row fits");
        }
    }

    fn told(spending: &Spending, period: Period, at: i64) -> String {
        let sums = spending.of(period, Time(at)).map(|(key, used)| format!("{key} {} {}", used.tokens, used.cost_nano));
        sums.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn what_keys_use_is_summed_up_by_day_as_it_comes() {
        let (connection, mut spending) = (store(), Spending::default());
        let read =
            |spending: &mut Spending, at: i64| spending.read(&connection, Time(at)).expect("the rows can be read");
        read(&mut spending, NOON);
        assert_eq!(told(&spending, Period::Month, NOON), "");
        ended(&connection, 1, "a", NOON - DAY_MS, &[(Some(1), Some(7))]);
        ended(&connection, 2, "a", NOON, &[(Some(10), None), (None, None), (Some(5), Some(2))]);
        ended(&connection, 3, "b", NOON, &[(Some(100), None)]);
        for _ in 0..2 {
            read(&mut spending, NOON);
            assert_eq!(told(&spending, Period::Day, NOON), "a 30 2, b 200 0");
            assert_eq!(told(&spending, Period::Month, NOON), "a 2 7, a 30 2, b 200 0");
        }
        ended(&connection, 4, "a", NOON + 1, &[(Some(1), None)]);
        read(&mut spending, NOON);
        assert_eq!(told(&spending, Period::Day, NOON), "a 32 2, b 200 0");
        read(&mut spending, NOON + DAY_MS);
        assert_eq!(told(&spending, Period::Month, NOON + DAY_MS), "", "March begins");
    }

    /// The row of an abandoned request is written when its writer's end is known, and bears the frame of its last sign.
    #[test]
    fn a_row_that_comes_late_counts() {
        let (connection, mut spending) = (store(), Spending::default());
        for seq in [7, 3, 8] {
            ended(&connection, seq, "a", NOON, &[(Some(5), Some(1))]);
            spending.read(&connection, Time(NOON)).expect("the rows can be read");
        }
        assert_eq!(told(&spending, Period::Month, NOON), "a 30 3");
    }

    #[test]
    fn a_log_that_begins_anew_is_summed_up_anew() {
        let (connection, mut spending) = (store(), Spending::default());
        ended(&connection, 8, "a", NOON, &[(Some(50), None)]);
        ended(&connection, 9, "a", NOON, &[(Some(50), None)]);
        spending.read(&connection, Time(NOON)).expect("the rows can be read");
        connection.execute_batch("DELETE FROM usage_events; DELETE FROM usage_attempts;").expect("rows can be deleted");
        ended(&connection, 2, "a", NOON, &[(Some(1), None)]);
        spending.read(&connection, Time(NOON)).expect("the rows can be read");
        assert_eq!(told(&spending, Period::Month, NOON), "a 2 0");
    }
}
