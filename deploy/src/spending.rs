//! What budgets know: a chore that reads what keys have spent from the usage store, once a second, and tells the limits.
//!
//! No request waits for it. While the store cannot be read, the last sums stand.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rusqlite::{Connection, OpenFlags};
use waybill_gateway::limits::{Amount, Spending, Spent};
use waybill_gateway::proxy::Gateway;
use waybill_projector::spending::{self, PostgresSpending};
use waybill_schema::catalogue::terms::Period;
use waybill_schema::catalogue::{Catalogue, RowKey};
use waybill_schema::config::UsageSettings;
use waybill_schema::time::Time;

use crate::chore::Chore;
use crate::data;

/// The time between two reads.
const READ_EVERY: Duration = Duration::from_secs(1);

/// Where spending is read from.
pub(crate) enum Store {
    /// The embedded file.
    File(Connection, spending::Spending),
    /// Postgres.
    Postgres(Box<PostgresSpending>),
    /// None is named: budgets are not enforced.
    Nowhere,
}

impl Store {
    /// The embedded store of a data folder.
    pub(crate) fn embedded(data: &Path) -> anyhow::Result<Self> {
        let file = Connection::open_with_flags(data::log_file(data), OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        Ok(Self::File(file, spending::Spending::default()))
    }

    /// The store that a configuration names, if it does.
    pub(crate) fn named(usage: Option<&UsageSettings>) -> anyhow::Result<Self> {
        match usage {
            Some(usage) => {
                Ok(Self::Postgres(Box::new(PostgresSpending::new(&usage.postgres).context("usage.postgres")?)))
            }
            None => Ok(Self::Nowhere),
        }
    }

    fn read(&mut self, now: Time) -> anyhow::Result<&spending::Spending> {
        match self {
            Self::File(file, spending) => {
                spending.read(file, now)?;
                Ok(spending)
            }
            Self::Postgres(reader) => Ok(reader.read(now)?),
            Self::Nowhere => anyhow::bail!("there are budgets, and no `usage` store that says what was spent of them"),
        }
    }
}

/// Starts the chore for `gateway`.
pub(crate) fn follow(gateway: Arc<Gateway>, mut store: Store) -> std::io::Result<Chore> {
    let mut trouble: Option<String> = None;
    Chore::start("spending", READ_EVERY, move || {
        let serving = gateway.serving.load();
        if !has_budgets(&serving.catalogue) {
            return;
        }
        let now = Time::wall_clock();
        match store.read(now) {
            Ok(spending) => {
                gateway.limits.see(by_row(&serving.catalogue, spending, now));
                trouble = None;
            }
            Err(error) => {
                let told = format!("{error:#}");
                if trouble.as_ref() != Some(&told) {
                    tracing::warn!(trouble = told, "what was spent of budgets cannot be read; the last sums stand");
                }
                trouble = Some(told);
            }
        }
    })
}

fn has_budgets(catalogue: &Catalogue) -> bool {
    catalogue.keys.values().any(|key| catalogue.rights(key).terms().any(|(_, _, terms)| terms.budget.is_some()))
}

/// The sums of keys, and those of their teams and organizations as they stand now.
fn by_row(catalogue: &Catalogue, spending: &spending::Spending, now: Time) -> Spending {
    let mut spent: HashMap<RowKey, Spent> = HashMap::new();
    for period in [Period::Day, Period::Month] {
        for (key, used) in spending.of(period, now) {
            let Some(key) = catalogue.keys.get(key) else { continue };
            let used = Amount { tokens: used.tokens, cost_nano: used.cost_nano };
            for (kind, id, _) in catalogue.rights(key).terms() {
                let spent = spent.entry(RowKey { kind, id: id.to_owned() }).or_default();
                match period {
                    Period::Day => spent.day += used,
                    Period::Month => spent.month += used,
                }
            }
        }
    }
    Spending { as_of: now, spent }
}
