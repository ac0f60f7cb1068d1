//! The log that a configuration names, opened for commands that read it or write to it.

use std::path::{Path, PathBuf};

use waybill_events::archive::{Archive, Archived};
use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::log::Log;
use waybill_events::sqlite::SqliteLog;
use waybill_schema::config::{Config, LogSettings};

use crate::{DataDir, check, data};

/// Which log, and how to print what a command finds there.
#[derive(clap::Args, Debug)]
pub(crate) struct Place {
    /// The configuration file, where it names the log's servers
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    data: DataDir,
}

impl Place {
    /// The configuration, where one is given.
    pub(crate) fn config(&self) -> anyhow::Result<Option<Config>> {
        self.config.as_deref().map(check::load).transpose()
    }

    /// The data folder.
    pub(crate) fn data(&self) -> &Path {
        &self.data.data
    }

    /// Opens the log, see [`open`].
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn Log>> {
        open(self.config()?.as_ref(), self.data())
    }

    /// Opens the log beside its writers, for reading.
    pub(crate) fn read(&self) -> anyhow::Result<Box<dyn Log>> {
        match self.config()?.as_ref().and_then(|config| config.log.as_ref()) {
            Some(log) => Ok(Box::new(JetstreamLog::new(settings(log))?)),
            None => Ok(Box::new(data::open_log(self.data())?)),
        }
    }
}

/// The whole of a log: what it holds, and the archive before it.
#[derive(clap::Args, Debug)]
pub(crate) struct Whole {
    /// The folder of the archive, read before the log
    #[arg(long, value_name = "DIR")]
    pub(crate) archive: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) place: Place,
}

impl Whole {
    /// Opens the log behind its archive, every file of which is checked first.
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn Log>> {
        let log = self.place.open()?;
        let Some(dir) = &self.archive else { return Ok(log) };
        let archive = Archive::open(dir)?;
        archive.verify()?;
        Ok(Box::new(Archived::new(archive, log)?))
    }
}

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
