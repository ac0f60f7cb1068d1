//! The usage store that a configuration names, opened for commands and pages that answer questions.

use anyhow::bail;
use tokio::runtime::Runtime;
use waybill_auditor::usage::{PostgresUsage, SqliteUsage, UsageStore};
use waybill_schema::config::UsageSettings;

use crate::data;
use crate::logs::Place;

/// What connections of a command live on.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

/// Opens the rows in Postgres where the configuration names them, else those beside the embedded log.
pub(crate) fn usage(place: &Place, runtime: &Runtime) -> anyhow::Result<Box<dyn UsageStore>> {
    let config = place.config()?;
    match config.as_ref().map(|config| (&config.usage, &config.log)) {
        Some((Some(settings), _)) => postgres(settings, runtime),
        Some((None, Some(_))) => bail!("the configuration names a log but no `usage`: there are no rows to ask"),
        Some((None, None)) | None => Ok(Box::new(SqliteUsage::new(data::open_log(place.data())?))),
    }
}

/// The rows in Postgres, connected to when they are first asked for.
pub(crate) fn postgres(settings: &UsageSettings, runtime: &Runtime) -> anyhow::Result<Box<dyn UsageStore>> {
    Ok(Box::new(PostgresUsage::new(&settings.postgres, runtime.handle().clone())?))
}
