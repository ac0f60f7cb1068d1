//! The trail of the catalogue: its frames from the first one on, verified, and the rows that they fold to.
//!
//! Each frame must match its own sum and name the sum of the one before, so a trail is what the log holds or held,
//! wherever its bytes come from: the log itself, or the copy beside a gateway's spool.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use waybill_auditor::catalogue::{History, HistoryError};
use waybill_events::log::{Seq, StoredFrame};
use waybill_schema::catalogue::Rows;
use waybill_schema::frame::{Frame, Header};
use waybill_schema::time::Time;

/// Verified frames of the catalogue, and their fold.
#[derive(Debug, Default)]
pub(crate) struct Trail {
    frames: Vec<Frame>,
    history: History,
}

impl Trail {
    /// Takes the next frame, whole or not at all.
    pub(crate) fn take(&mut self, frame: StoredFrame) -> Result<(), HistoryError> {
        let (bytes, n_misfits) = (frame.bytes.clone(), self.history.misfits.len());
        self.history.take(frame)?;
        for (seq, error) in &self.history.misfits[n_misfits..] {
            tracing::error!(%seq, %error, "a batch of the catalogue does not fit and is left out");
        }
        let header = Frame::header_of(&bytes).expect("the history has read it");
        self.frames.push(Frame { header, bytes });
        Ok(())
    }

    /// What the frames fold to.
    pub(crate) fn rows(&self) -> &Rows {
        &self.history.rows
    }

    /// The sum of the last frame, which stands for all of them; `None` before the first.
    pub(crate) fn sum(&self) -> Option<&str> {
        self.frames.last().map(|frame| frame.header.sum.as_str())
    }

    /// Whether `longer` begins with this trail and goes on.
    pub(crate) fn is_start_of(&self, longer: &Self) -> bool {
        let same = longer.frames.get(self.frames.len().wrapping_sub(1)).map(|frame| frame.header.sum.as_str());
        self.frames.len() < longer.frames.len() && (self.frames.is_empty() || same == self.sum())
    }

    /// Writes the frames to `path`, in which there is at every moment the old trail or the new one, whole.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let next = path.with_extension("next");
        let mut file = File::create(&next)?;
        self.frames.iter().try_for_each(|frame| file.write_all(&frame.bytes))?;
        file.sync_all()?;
        fs::rename(&next, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    }

    /// Reads and verifies what [`Trail::write`] has written; empty where there is no such file.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        };
        let mut trail = Self::default();
        let damaged = || format!("{} is damaged", path.display());
        for frame in Frame::split(&bytes) {
            let Frame { header: Header { frame, .. }, bytes } = frame.with_context(damaged)?;
            // Where the frame lies in the log, and since when, is not kept.
            let stored = StoredFrame { seq: Seq(frame), stored: Time(0), sent: Time(0), bytes };
            trail.take(stored).with_context(damaged)?;
        }
        Ok(trail)
    }
}

#[cfg(test)]
mod tests {
    use waybill_schema::catalogue::{Group, Row, Status};
    use waybill_schema::event::{Batch, Event};
    use waybill_schema::frame::{Body, Link};

    use super::*;

    fn group(id: &str) -> Row {
        Row::Group(Group {
            id: id.into(),
            display_name: String::new(),
            description: String::new(),
            status: Status::Active,
            public_models: Vec::new(),
            requestable: false,
            sticky_policy: None,
            failover_policy: None,
        })
    }

    fn next(trail: &Trail, batch: Batch) -> StoredFrame {
        let link = trail.frames.last().map_or_else(Link::start, |last| Link::after(&last.header));
        let (mut line, revision) = (Vec::new(), batch.revision);
        Body::of(&Event::Catalogue(Box::new(batch)), Time(0)).write_line(revision, &mut line);
        stored(&Frame::seal("catalogue".into(), 0, link, revision, 1, &line))
    }

    fn stored(frame: &Frame) -> StoredFrame {
        StoredFrame { seq: Seq(frame.header.frame), stored: Time(0), sent: Time(0), bytes: frame.bytes.clone() }
    }

    /// A catalogue that has had so many revisions, each with one group.
    fn trail(n: u64) -> Trail {
        let mut trail = Trail::default();
        for revision in 1..=n {
            let batch = trail.rows().batch_to(vec![group(&format!("g-{revision}"))], "a", "r", None);
            let frame = next(&trail, batch);
            trail.take(frame).expect("the frame continues the trail");
        }
        trail
    }

    #[test]
    fn a_copy_reads_as_it_was_written_and_any_byte_changed_in_it_is_noticed() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("catalogue");
        assert_eq!(Trail::read(&path).expect("no copy is no error").sum(), None);
        let written = trail(3);
        written.write(&path).expect("the copy can be written");
        let read = Trail::read(&path).expect("the copy can be read");
        assert_eq!((read.rows(), read.sum()), (written.rows(), written.sum()));
        let bytes = fs::read(&path).expect("the copy is a file");
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).expect("the copy can be damaged");
            let same = Trail::read(&path).is_ok_and(|read| read.sum() == written.sum());
            assert!(!same, "byte {at}");
        }
        fs::write(&path, &bytes[..bytes.len() - 1]).expect("the copy can be cut");
        assert!(Trail::read(&path).is_err());
    }

    #[test]
    fn a_frame_out_of_its_place_changes_nothing() {
        let (before, longer, mut trail) = (trail(2), trail(4), trail(2));
        for other in [&longer.frames[3], &longer.frames[0]] {
            trail.take(stored(other)).expect_err("another frame is due");
        }
        assert_eq!((trail.rows(), trail.sum()), (before.rows(), before.sum()));
        assert!(trail.is_start_of(&longer) && !longer.is_start_of(&trail) && !trail.is_start_of(&before));
        assert!(Trail::default().is_start_of(&trail));
    }
}
