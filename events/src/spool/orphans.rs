//! Orphans: facts that the log will not take as they are, because a later epoch of their writer stands there already.
//!
//! They are left when a process sleeps while another takes its writer's name, or begins without the log. They describe
//! real calls, so the next start on their folder records them again in its own epoch: after its `started`, before
//! anything new, with the time at which they were made.
//!
//! A fact is known by all that it says but its number. So nothing must be noted for this to happen once: an orphan is
//! what neither the log nor a later epoch of the spool says, and its segment is removed only when the disk has its new
//! record. A start that is killed in between finds fewer orphans the next time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use waybill_schema::event::Epoch;
use waybill_schema::frame::{FRAME_FACTS_MAX, Frame, LineHead, renumber};
use waybill_schema::id::WriterId;
use waybill_schema::secret::sum128;

use crate::log::{Last, Log, ReadError, Seq, StoredFrame};

use super::{AppendError, Reader, Spool, SpoolError};

/// So many frames of the log are read at once.
const FRAMES_MAX: usize = 64;

/// Why orphans cannot be looked for.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The log cannot be read now.
    #[error(transparent)]
    Log(#[from] ReadError),
    /// The spool cannot be read.
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

/// Why orphans could not be recorded again; none is lost, and trying again at another start doubles none.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The spool cannot be read.
    #[error(transparent)]
    Spool(#[from] SpoolError),
    /// The spool does not take them.
    #[error("orphaned facts cannot be recorded again")]
    Append(#[from] AppendError),
    /// The disk does not take them, or does not let go of their old segments.
    #[error("orphaned facts cannot be moved")]
    Disk(#[from] io::Error),
}

/// What a spool holds that has to be recorded again, as found before its next epoch begins.
#[derive(Debug, Default)]
pub struct Orphans {
    /// The writer's last frame in the log.
    last: Option<Last>,
    /// Whether that frame is somebody else's.
    overtaken: bool,
    /// What the orphans say.
    contents: BTreeSet<String>,
}

impl Orphans {
    /// Compares what `reader`'s spool holds with the frames of `writer` in the log.
    ///
    /// Where the log's last frame is from this spool, which nearly always shows at once, so is all before it.
    pub fn find(reader: &Reader, log: &mut dyn Log, writer: &WriterId) -> Result<Self, FindError> {
        let Some(last) = log.last(writer)? else { return Ok(Self::default()) };
        if is_ours(reader, log, &last)? {
            return Ok(Self { last: Some(last), ..Self::default() });
        }
        let contents = Search::begin(reader, log, &last)?.run(log)?;
        Ok(Self { last: Some(last), overtaken: true, contents })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.contents.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// What the next epoch's `started` names as the one before, where `spooled` is the last fact that the spool held;
    /// the next epoch is one more. Facts that were overtaken will never stand in the log under their numbers.
    pub fn previous(&self, spooled: Option<Epoch>) -> Option<Epoch> {
        let logged = self.last.as_ref().map(Last::epoch);
        let spooled = spooled.filter(|spooled| !self.overtaken || logged.is_none_or(|last| spooled.epoch > last.epoch));
        [logged, spooled].into_iter().flatten().max_by_key(|place| order(*place))
    }

    /// Records them again in the epoch that has begun in `spool` and removes what the log has overtaken; gives how many
    /// there were. To be called once `started` is recorded, and before a shipper has `reader`.
    pub fn adopt(mut self, spool: &mut Spool, reader: &mut Reader) -> Result<u64, AdoptError> {
        let Some(last) = self.last.take_if(|_| self.overtaken) else { return Ok(0) };
        let mut adopted = 0;
        let mut walk = reader.walk();
        while let Some(record) = walk.next_record()?.filter(|record| record.epoch <= last.header.epoch) {
            let mut is_orphan = |line: &&[u8]| content(line).is_some_and(|content| self.contents.remove(&content));
            let lines: Vec<&[u8]> = record.each_line().filter(|line| is_orphan(line)).collect();
            for lines in lines.chunks(FRAME_FACTS_MAX as usize) {
                spool.append_again(lines, record.made)?;
                adopted += lines.len() as u64;
            }
        }
        spool.sync()?;
        for name in spool.shared.overtaken(last.header.epoch) {
            fs::remove_file(name.path(&spool.shared.dir))?;
        }
        reader.resume_after(None);
        if adopted > 0 {
            tracing::warn!(adopted, by = ?last.epoch(), "facts of an overtaken epoch are recorded again");
        }
        Ok(adopted)
    }
}

/// Whether the log's last frame came from this spool: the log had acknowledged it or a later one, or its last fact is
/// the one held under that number.
fn is_ours(reader: &Reader, log: &mut dyn Log, last: &Last) -> Result<bool, FindError> {
    if reader.mark().is_some_and(|mark| order(last.epoch()) <= order(mark.epoch())) {
        return Ok(true);
    }
    is_held(reader, log, last)
}

/// Whether the last fact of the log's frame `last` is the one that the spool holds under that number.
pub(crate) fn is_held(reader: &Reader, log: &mut dyn Log, last: &Last) -> Result<bool, FindError> {
    let mut ours = None;
    let mut walk = reader.walk();
    while let (None, Some(record)) = (&ours, walk.next_record()?) {
        let mut lines = record.each_line().zip(record.first..);
        let found = lines.find(|(_, number)| order(last.epoch()) == (record.epoch, *number));
        ours = found.map(|(line, _)| line.to_vec());
    }
    let Some(ours) = ours else { return Ok(false) };
    let frame = frame_at(log, &last.header.writer, last.seq)?;
    Ok(frame.is_some_and(|frame| frame.lines().last() == Some(&ours)))
}

/// Facts that may be orphans, until the log or a later epoch turns out to have them.
struct Search {
    writer: WriterId,
    mark: Option<Last>,
    /// The log's frames behind this one have to be looked at.
    from: Seq,
    /// What they say, and whether the mark covers them.
    contents: BTreeMap<String, bool>,
}

impl Search {
    fn begin(reader: &Reader, log: &mut dyn Log, last: &Last) -> Result<Self, FindError> {
        let writer = last.header.writer.clone();
        let mark = reader.mark().cloned();
        let kept = match &mark {
            Some(mark) => frame_at(log, &writer, mark.seq)?.filter(|frame| frame.header.sum == mark.header.sum),
            None => None,
        };
        let from = mark.as_ref().filter(|_| kept.is_some()).map_or(Seq::START, |mark| mark.seq);
        let covers = |place| mark.as_ref().is_some_and(|mark| place <= order(mark.epoch()));
        let mut contents = BTreeMap::new();
        let mut walk = reader.walk();
        while let Some(record) = walk.next_record()? {
            for (line, number) in record.each_line().zip(record.first..) {
                let Some(content) = content(line) else { continue };
                match covers((record.epoch, number)) {
                    // An earlier start has got as far as this one.
                    _ if record.epoch > last.header.epoch => contents.remove(&content),
                    true if kept.is_some() => None,
                    covered => contents.insert(content, covered),
                };
            }
        }
        Ok(Self { writer, mark, from, contents })
    }

    /// Takes away what the log has.
    fn run(mut self, log: &mut dyn Log) -> Result<BTreeSet<String>, FindError> {
        let mut has_mark = self.from != Seq::START;
        while !self.contents.is_empty() {
            let stored = log.read_of(&self.writer, self.from, FRAMES_MAX)?;
            let Some(newest) = stored.last() else { break };
            let first = self.from == Seq::START;
            self.from = newest.seq;
            // A frame that cannot be read has none of our lines: we know ours to be good.
            let frames: Vec<Frame> = stored.into_iter().filter_map(parsed).collect();
            has_mark |= self.mark.as_ref().is_some_and(|mark| {
                let trimmed = first && frames.first().is_some_and(|frame| frame.header.frame > mark.header.frame);
                trimmed || frames.iter().any(|frame| frame.header.sum == mark.header.sum)
            });
            for content in frames.iter().flat_map(Frame::lines).filter_map(content) {
                self.contents.remove(&content);
            }
        }
        let lost = |covered: &bool| !(has_mark && *covered);
        Ok(self.contents.into_iter().filter(|(_, covered)| lost(covered)).map(|(content, _)| content).collect())
    }
}

fn frame_at(log: &mut dyn Log, writer: &WriterId, seq: Seq) -> Result<Option<Frame>, ReadError> {
    let stored = log.read_of(writer, Seq(seq.0.saturating_sub(1)), 1)?;
    Ok(stored.into_iter().find(|stored| stored.seq == seq).and_then(parsed))
}

fn parsed(stored: StoredFrame) -> Option<Frame> {
    Frame::parse(stored.bytes).ok()
}

/// The sum of what a fact says, its number aside; `None` for one that speaks of its own epoch only.
fn content(line: &[u8]) -> Option<String> {
    let kind = LineHead::parse(line).ok()?.kind;
    if matches!(&*kind, "started" | "alive" | "dropped") {
        return None;
    }
    let mut text = Vec::with_capacity(line.len());
    renumber(line, 0, &mut text).ok()?;
    Some(sum128(&[&text]))
}

fn order(epoch: Epoch) -> (u64, u64) {
    (epoch.epoch, epoch.last)
}
