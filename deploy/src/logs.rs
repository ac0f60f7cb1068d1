//! The log that a configuration names, opened for commands that write to it.

use std::path::Path;

use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::log::Log;
use waybill_events::sqlite::SqliteLog;
use waybill_schema::config::{Config, LogSettings};

use crate::data;

/// Opens the log: the servers of `log`, or the embedded file in the data folder, beside a running `up`.
///
/// Rows are not folded here: the embedded projector folds frames appended past it with its next one, or at its start.
pub(crate) fn open(config: Option<&Config>, data: &Path) -> anyhow::Result<Box<dyn Log>> {
    if let Some(log) = config.and_then(|config| config.log.as_ref()) {
        return Ok(Box::new(JetstreamLog::new(settings(log))?));
    }
    let path = data::existing_log_file(data)?;
    Ok(Box::new(SqliteLog::open(&path, Box::new(|_, _| Ok(())))?))
}

/// The stream that a configuration names.
pub(crate) fn settings(log: &LogSettings) -> Settings {
    let LogSettings { nats, stream, replicas, mib_max } = log.clone();
    Settings { servers: nats, stream, replicas, bytes_max: u64::from(mib_max) << 20 }
}
