//! The log that a configuration names, opened for commands that write to it.

use std::path::Path;

use anyhow::bail;
use waybill_events::log::Log;
use waybill_events::sqlite::SqliteLog;
use waybill_schema::config::Config;

use crate::data;

/// Opens the log: the servers of `log`, or the embedded file in the data folder, beside a running `up`.
///
/// Rows are not folded here: the embedded projector folds frames appended past it with its next one, or at its start.
pub(crate) fn open(config: Option<&Config>, data: &Path) -> anyhow::Result<Box<dyn Log>> {
    if config.is_some_and(|config| config.log.is_some()) {
        bail!("`log` names servers, which this version does not use yet");
    }
    let path = data::existing_log_file(data)?;
    Ok(Box::new(SqliteLog::open(&path, Box::new(|_, _| Ok(())))?))
}
