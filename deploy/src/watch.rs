//! The watch over the configuration file: whoever audits applies it once at start and again when it has changed, as one
//! batch, and only where its catalogue is not the one that was applied last.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use waybill_auditor::catalogue::{self as desk, BatchError};
use waybill_events::log::Log;
use waybill_schema::catalogue::Row;
use waybill_schema::config::Config;
use waybill_schema::time::Time;

use crate::check;
use crate::chore::{Chore, Shared};
use crate::follow::Follower;

/// The time between two looks at the file. One that has changed is read at the next look, unless it changed again:
/// somebody is still writing it.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often a batch is planned anew because another one came first.
const PLANS_MAX: u32 = 8;

/// The catalogue that a configuration file asks for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    rows: Vec<Row>,
    hash: String,
}

impl Wanted {
    /// What `config` asks for.
    pub(crate) fn of(config: &Config) -> Self {
        Self { rows: config.rows.clone(), hash: config.hash.clone() }
    }
}

/// Brings the catalogue in the follower's log to `wanted`, unless that was applied last.
pub(crate) fn apply<L: Log>(follower: &mut Follower<L>, wanted: &Wanted) -> anyhow::Result<()> {
    for _ in 0..PLANS_MAX {
        follower.look()?;
        let Some(batch) = desk::plan(follower.trail().rows(), wanted.rows.clone(), &wanted.hash) else { return Ok(()) };
        let (revision, changes) = (batch.revision, batch.ops.len());
        match desk::append(&mut follower.log, batch, Time::wall_clock()) {
            Ok(_) => {
                tracing::info!(revision, changes, "the configuration file changes the catalogue");
                return Ok(());
            }
            Err(BatchError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bail!("others change the catalogue all the time");
}

/// What tells a file from its next version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    modified: (i64, i64),
    bytes: u64,
    inode: u64,
}

impl Stamp {
    /// That of `file` now; `None` where it cannot be had.
    pub(crate) fn of(file: &Path) -> Option<Self> {
        let data = std::fs::metadata(file).ok()?;
        Some(Self { modified: (data.mtime(), data.mtime_nsec()), bytes: data.size(), inode: data.ino() })
    }
}

/// How the last file fared, for `/readyz`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    /// What is wrong with the file as it is.
    pub(crate) invalid: Option<String>,
    /// Why the last valid one is not applied yet.
    pub(crate) waits: Option<String>,
    /// When the log had the last valid one.
    pub(crate) applied: Option<Time>,
}

impl Standing {
    /// Whether the log holds what the file says.
    pub(crate) fn is_well(&self) -> bool {
        self.applied.is_some() && self.waits.is_none() && self.invalid.is_none()
    }

    /// The same as `/readyz` shows it.
    pub(crate) fn tell(&self) -> serde_json::Value {
        serde_json::json!({"invalid": self.invalid, "waits": self.waits, "applied": self.applied.is_some()})
    }
}

/// The chore that watches the file.
pub(crate) struct Watch {
    standing: Shared<Standing>,
    _chore: Chore,
}

impl Watch {
    /// Watches the file that `config` was read from when it had `stamp`, and applies it by way of `follower`.
    pub(crate) fn start(
        file: PathBuf,
        stamp: Option<Stamp>,
        config: &Config,
        follower: Follower<impl Log + 'static>,
    ) -> std::io::Result<Self> {
        let standing = Shared::default();
        let mut turn = Turn {
            file,
            read: stamp,
            seen: stamp,
            settings: settings(config),
            wanted: Some(Wanted::of(config)),
            follower,
            standing: standing.clone(),
        };
        let chore = Chore::start("configuration", LOOK_EVERY, move || turn.take())?;
        Ok(Self { standing, _chore: chore })
    }

    /// How the file fares, to be asked at any time.
    pub(crate) fn standing(&self) -> Shared<Standing> {
        self.standing.clone()
    }
}

struct Turn<L> {
    file: PathBuf,
    /// The version that was read, and the one that was seen last.
    read: Option<Stamp>,
    seen: Option<Stamp>,
    /// What this process was started with.
    settings: Config,
    /// What is not applied yet.
    wanted: Option<Wanted>,
    follower: Follower<L>,
    standing: Shared<Standing>,
}

impl<L: Log> Turn<L> {
    fn take(&mut self) {
        let stamp = Stamp::of(&self.file);
        let at_rest = std::mem::replace(&mut self.seen, stamp) == stamp;
        if at_rest && self.read != stamp {
            self.read = stamp;
            self.read();
        }
        if let Some(wanted) = &self.wanted {
            match apply(&mut self.follower, wanted) {
                Ok(()) => self.applied(),
                Err(error) => self.waits(format!("{error:#}")),
            }
        }
    }

    /// Reads the file; the last good one stays where it is invalid.
    fn read(&mut self) {
        let invalid = match check::load(&self.file) {
            Ok(config) => {
                if settings(&config) != self.settings {
                    tracing::warn!("settings outside `catalogue` have changed: they wait for a restart");
                }
                self.wanted = Some(Wanted::of(&config));
                None
            }
            Err(error) => {
                let why = format!("{error:#}");
                tracing::error!("the configuration file is not applied: {why}");
                Some(why)
            }
        };
        self.standing.change(|standing| standing.invalid = invalid);
    }

    fn applied(&mut self) {
        self.wanted = None;
        self.standing.change(|standing| (standing.applied, standing.waits) = (Some(Time::wall_clock()), None));
    }

    fn waits(&mut self, why: String) {
        // A log that has lost its end has another catalogue than the one followed so far.
        self.follower.forget();
        if self.standing.look().waits.is_none() {
            tracing::warn!(why, "the configuration file cannot be applied yet; trying again");
        }
        self.standing.change(|standing| standing.waits = Some(why));
    }
}

/// The configuration without its catalogue.
fn settings(config: &Config) -> Config {
    Config { rows: Vec::new(), hash: String::new(), warnings: Vec::new(), ..config.clone() }
}
