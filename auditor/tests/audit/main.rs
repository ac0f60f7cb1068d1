//! The audit queries against a log that a real projector has folded.

mod admin;
mod desk;
mod explain;
mod health;
mod history;
mod redecide;
mod rows;
mod sessions;
mod state;
mod undo;
mod undo_any;
mod verify;

use std::path::PathBuf;

use tempfile::TempDir;
use waybill_events::log::Log;
use waybill_events::sqlite::SqliteLog;
use waybill_projections::story::Teller;
use waybill_projector::embedded;
use waybill_schema::event::Fact;
use waybill_schema::frame::FRAME_FACTS_MAX;
use waybill_schema::time::Time;

/// A file that a gateway writes to and an auditor reads.
pub(crate) struct House {
    dir: TempDir,
    log: SqliteLog,
    pub(crate) gateway: Teller,
}

impl House {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let (log, _) = embedded::open(&dir.path().join("waybill.db")).expect("a new file opens");
        Self { dir, log, gateway: Teller::new("gw") }
    }

    /// Appends facts of the gateway, in as many frames as they need.
    pub(crate) fn tell(&mut self, facts: &[Fact]) {
        let frames: Vec<_> = facts.chunks(FRAME_FACTS_MAX as usize).map(|facts| self.gateway.seals(facts)).collect();
        let last = self.log.last(&self.gateway.writer).expect("the log can be read");
        self.log.append(&frames, last.map(|last| last.seq), Time(0)).expect("the log takes the frames");
    }

    /// Makes every fact's time the one it was told with, as if it had been stored at once, and projects anew.
    pub(crate) fn settle(self) -> Self {
        let Self { dir, log, gateway } = self;
        log.connection()
            .execute_batch("UPDATE frames SET stored = sent; DELETE FROM checkpoints")
            .expect("the file can be changed");
        drop(log);
        let (log, _) = embedded::open(&dir.path().join("waybill.db")).expect("the file opens again");
        Self { dir, log, gateway }
    }

    /// A read-only look at the file beside the process that writes it.
    pub(crate) fn audit(&self) -> SqliteLog {
        SqliteLog::open_read_only(&self.path()).expect("the file opens for reading")
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("waybill.db")
    }
}
