//! The mark: the last frame that the log acknowledged, in a small file beside the segments.
//!
//! It tells a start without the log what waits and which epoch was the last, and a start with it whether the log lost
//! its end. Nothing is lost where it cannot be read or written: an older mark, or none, only means that more is
//! compared with the log.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::log::Last;

use super::segment;

const FILE: &str = "spool.mark";
/// More than any mark has.
const BYTES_MAX: u64 = 4 << 10;

/// The mark and its file.
#[derive(Debug, Default)]
pub(super) struct MarkFile {
    /// `None` where it cannot be opened.
    file: Option<File>,
    last: Option<Last>,
    /// Whether the last write failed: it is told once.
    failing: bool,
    buffer: Vec<u8>,
}

impl MarkFile {
    pub(super) fn open(dir: &Path) -> Self {
        let (file, last) = match read(&dir.join(FILE)) {
            Ok((file, last)) => (Some(file), last),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the spool goes without its mark");
                (None, None)
            }
        };
        Self { file, last, failing: false, buffer: Vec::new() }
    }

    pub(super) fn last(&self) -> Option<&Last> {
        self.last.as_ref()
    }

    /// Moves the mark, in place and with one `write()` that stays within a block of the disk.
    pub(super) fn set(&mut self, last: &Last) {
        self.last = Some(last.clone());
        let Some(file) = &self.file else { return };
        segment::start_record(&mut self.buffer);
        serde_json::to_writer(&mut self.buffer, last).expect("a mark has only text keys");
        self.buffer.push(b'\n');
        segment::finish_record(&mut self.buffer);
        let written = file.write_all_at(&self.buffer, 0);
        if let (Err(error), false) = (&written, self.failing) {
            tracing::warn!(error = error as &dyn std::error::Error, "the spool's mark cannot be written");
        }
        self.failing = written.is_err();
    }
}

fn read(path: &Path) -> io::Result<(File, Option<Last>)> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    let mut bytes = Vec::new();
    file.by_ref().take(BYTES_MAX).read_to_end(&mut bytes)?;
    let last = segment::payload(&bytes).and_then(|payload| serde_json::from_slice(payload).ok());
    Ok((file, last))
}
