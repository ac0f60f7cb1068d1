//! The shipper: the one thread that moves facts from a spool to the log.
//!
//! It takes what has gathered, seals it into frames chained to the writer's last one, appends them expecting the
//! sequence it knows, and lets the spool go of them. One append is in flight at a time, so order needs no care.
//!
//! A log may lose its end, be it that its server lost power: where its last frame is older than the one that it had
//! acknowledged, the shipper goes back to what the spool still holds behind that frame and sends it again.
//!
//! Facts are safe in the spool already; the shipper may therefore wait a little to save work. A commit of the
//! embedded log costs about 100 µs of CPU whatever its size, and more where its rows lie on many pages, so appends are
//! [`GATHER`] apart unless some frames are full.

use std::any::Any;
use std::cmp::Ordering;
use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use waybill_schema::event::Epoch;
use waybill_schema::frame::{FRAME_BYTES_MAX, FRAME_FACTS_MAX, Frame, Header, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::log::{AppendError, Cause, Last, Log, Seq};
use crate::spool::{FindError, Gauge, Orphans, Reader, SpoolError, Stop, Stopper, Waiting, Wake, is_held};

/// How long facts may gather between two appends.
pub const GATHER: Duration = Duration::from_millis(100);
/// At most this many frames are appended at once.
pub const FRAMES_MAX: usize = 16;
/// So many facts, or bytes of them, are worth an append before that time is over: as many as one takes.
const FACTS_WORTH: u64 = FRAMES_MAX as u64 * FRAME_FACTS_MAX as u64;
const BYTES_WORTH: u64 = FRAMES_MAX as u64 * FRAME_BYTES_MAX as u64;
/// The first wait after the log was unavailable; it doubles with each failure.
pub const RETRY_MIN: Duration = Duration::from_millis(10);
/// The longest wait before the log is tried again.
pub const RETRY_MAX: Duration = Duration::from_secs(2);

/// How the shipper fares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The last append succeeded, or there was none yet.
    Shipping,
    /// The log is unavailable and will be tried again.
    Waiting {
        /// What it said last.
        error: String,
    },
    /// Another process writes under this writer's name: nothing more is sent, and this process must end.
    Fenced {
        /// What the log has of that process.
        by: Epoch,
    },
    /// Something is wrong that trying again does not mend; the facts stay in the spool.
    Failed {
        /// What.
        error: String,
    },
    /// It was asked to stop and has.
    Stopped,
}

impl Health {
    /// Whether the shipper has come to its end.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Shipping | Self::Waiting { .. } => false,
            Self::Fenced { .. } | Self::Failed { .. } | Self::Stopped => true,
        }
    }
}

/// How far the shipper has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The last fact of the writer in the log, as far as is known.
    pub shipped: Option<Epoch>,
    /// The sequence of the writer's last frame, as far as is known.
    pub seq: Option<Seq>,
    /// How often the log had lost what it had acknowledged, and it was sent again as far as it was held.
    pub resent: u64,
    /// How it fares.
    pub health: Health,
}

impl Standing {
    /// Whether the log has everything up to `place`.
    pub fn covers(&self, place: Epoch) -> bool {
        self.shipped.is_some_and(|shipped| (shipped.epoch, shipped.last) >= (place.epoch, place.last))
    }
}

/// The shipper's standing, for whoever wants to wait for it.
#[derive(Debug)]
pub struct Progress {
    standing: Mutex<Standing>,
    moved: Condvar,
    gauge: Gauge,
}

impl Progress {
    fn new(gauge: Gauge) -> Self {
        let standing = Standing { shipped: None, seq: None, resent: 0, health: Health::Shipping };
        Self { standing: Mutex::new(standing), moved: Condvar::new(), gauge }
    }

    /// What waits in the spool now; nothing once the spool is closed.
    pub fn waiting(&self) -> Waiting {
        self.gauge.waiting()
    }

    /// The standing now.
    pub fn standing(&self) -> Standing {
        self.lock().clone()
    }

    /// Waits until the log has everything up to `place`, the shipper has ended, or `timeout` has passed.
    pub fn wait_for(&self, place: Epoch, timeout: Duration) -> Standing {
        self.wait_until(timeout, |standing| standing.covers(place) || standing.health.is_final())
    }

    /// Waits until `reached`, for `timeout` at most, and gives the standing then.
    pub fn wait_until(&self, timeout: Duration, mut reached: impl FnMut(&Standing) -> bool) -> Standing {
        let waited = self.moved.wait_timeout_while(self.lock(), timeout, |standing| !reached(standing));
        waited.expect("no holder of the standing panics").0.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().expect("no holder of the standing panics")
    }

    fn change(&self, change: impl FnOnce(&mut Standing)) {
        change(&mut self.lock());
        self.moved.notify_all();
    }
}

/// A running shipper; dropping it stops it at once.
#[derive(Debug)]
pub struct Shipper {
    progress: Arc<Progress>,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Shipper {
    /// Starts the thread that moves what `reader` gives to `log`, under the name of `writer`.
    pub fn start(writer: WriterId, reader: Reader, log: Box<dyn Log>) -> io::Result<Self> {
        let progress = Arc::new(Progress::new(reader.gauge()));
        let stopper = reader.stopper();
        let shipping = Shipping { writer, reader, log, progress: progress.clone(), tail: None, delay: RETRY_MIN };
        let thread = thread::Builder::new().name("shipper".into()).spawn(move || shipping.run_to_end())?;
        Ok(Self { progress, stopper, thread: Some(thread) })
    }

    /// How far it has come; outlives the shipper.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Sends what the spool holds, gives up after `timeout`, and waits for the thread (and its append under way).
    pub fn stop(mut self, timeout: Duration) -> Standing {
        self.stopper.stop(Stop::Drained);
        self.progress.wait_until(timeout, |standing| standing.health.is_final());
        self.end();
        self.progress.standing()
    }

    fn end(&mut self) {
        self.stopper.stop(Stop::Now);
        if let Some(thread) = self.thread.take() {
            // A panic was caught in the thread and stands in its health.
            let _ = thread.join();
        }
    }
}

impl Drop for Shipper {
    fn drop(&mut self) {
        self.end();
    }
}

/// Why the shipper ends.
#[derive(Debug)]
enum End {
    Stopped,
    Fenced(Epoch),
    Failed(String),
}

impl From<SpoolError> for End {
    fn from(error: SpoolError) -> Self {
        Self::Failed(chain(&error))
    }
}

/// What the thread owns.
struct Shipping {
    writer: WriterId,
    reader: Reader,
    log: Box<dyn Log>,
    progress: Arc<Progress>,
    /// The writer's last frame in the log, as far as is known.
    tail: Option<Last>,
    delay: Duration,
}

impl Shipping {
    fn run_to_end(mut self) {
        // The fold of an embedded log runs here and is not ours: its panic must not leave others waiting.
        let end = match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Err(end)) => end,
            Err(panic) => End::Failed(panic_text(&*panic)),
        };
        let health = match end {
            End::Stopped => Health::Stopped,
            End::Fenced(by) => Health::Fenced { by },
            End::Failed(error) => Health::Failed { error },
        };
        match &health {
            Health::Stopped => tracing::debug!("shipper stopped"),
            other => tracing::error!(health = ?other, "shipper ended, facts stay in the spool"),
        }
        self.progress.change(|standing| standing.health = health);
    }

    fn run(&mut self) -> Result<Infallible, End> {
        self.take_up()?;
        loop {
            let frames = self.gathered()?;
            if frames.is_empty() {
                self.wait_for_more()?;
                continue;
            }
            let more = frames.len() == FRAMES_MAX;
            self.ship(frames)?;
            if !more {
                self.reader.wait(FACTS_WORTH, BYTES_WORTH, GATHER);
            }
        }
    }

    /// Finds where the log stands, so that what it has is not sent again.
    fn take_up(&mut self) -> Result<(), End> {
        let last = self.last_in_log()?;
        // An epoch that began in this life cannot be in the log before anything was sent: it is somebody else's.
        if let (Some(last), Some(begun)) = (&last, self.reader.begun())
            && last.header.epoch >= begun
        {
            return Err(End::Fenced(last.epoch()));
        }
        if let Some(last) = &last
            && self.has_orphans()?
        {
            tracing::error!("the log will not take facts of the spool as they are: the next start records them again");
            return Err(End::Fenced(last.epoch()));
        }
        match self.reader.mark().map(|mark| Found::of(last.as_ref(), mark)) {
            None | Some(Found::Known | Found::Newer) => self.go_on_behind(last),
            Some(Found::Older) => self.send_again(last)?,
            Some(Found::Other) => self.go_on_if_ours(last)?,
        }
        Ok(())
    }

    /// Whether facts would be passed over that the log does not have: the start was made without asking it.
    fn has_orphans(&mut self) -> Result<bool, End> {
        self.compare(|shipping| {
            let orphans = Orphans::find(&shipping.reader, &mut *shipping.log, &shipping.writer)?;
            Ok(!orphans.is_empty())
        })
    }

    /// The log's last frame is not the one that it had acknowledged there, but may say the same: where the log lost its
    /// end, what was sent again lies in fuller frames, and the life that sent them may have ended before it heard that
    /// they were stored. Anybody else's frame is left alone.
    fn go_on_if_ours(&mut self, last: Option<Last>) -> Result<(), End> {
        if let Some(found) = &last
            && self.compare(|shipping| is_held(&shipping.reader, &mut *shipping.log, found))?
        {
            self.go_on_behind(last);
            return Ok(());
        }
        Err(diverged())
    }

    /// Compares the spool with the log, however often it takes until the log answers.
    fn compare(&mut self, compare: impl Fn(&mut Self) -> Result<bool, FindError>) -> Result<bool, End> {
        loop {
            match compare(self) {
                Ok(result) => return Ok(result),
                Err(FindError::Log(error)) => self.back_off(&error)?,
                Err(FindError::Spool(error)) => return Err(error.into()),
            }
        }
    }

    fn go_on_behind(&mut self, last: Option<Last>) {
        self.reader.resume_after(last.as_ref().map(Last::epoch));
        self.tail = last;
        self.report();
    }

    /// The log's last frame is `last`, although it had acknowledged later ones: these are gone there.
    fn send_again(&mut self, last: Option<Last>) -> Result<(), End> {
        let (acknowledged, found) = (self.reader.mark().map(Last::epoch), last.as_ref().map(Last::epoch));
        tracing::error!(?acknowledged, ?found, "the log lost facts that it had acknowledged; they are sent again");
        if let Some(missing) = self.reader.go_back(found)? {
            tracing::error!(?missing, "facts that the log lost are not held any more");
        }
        self.tail = last;
        self.progress.change(|standing| standing.resent += 1);
        self.report();
        Ok(())
    }

    /// Seals what is there, in frames that continue the chain.
    fn gathered(&mut self) -> Result<Vec<Frame>, End> {
        let mut frames: Vec<Frame> = Vec::new();
        while frames.len() < FRAMES_MAX {
            let Some(batch) = self.reader.next_batch(FRAME_FACTS_MAX, FRAME_BYTES_MAX)? else { break };
            let before = frames.last().map(|frame| &frame.header).or(self.tail.as_ref().map(|last| &last.header));
            let link = before.map_or_else(Link::start, Link::after);
            let writer = self.writer.clone();
            frames.push(Frame::seal(writer, batch.epoch, link, batch.first, batch.count, &batch.lines));
        }
        Ok(frames)
    }

    fn wait_for_more(&self) -> Result<(), End> {
        match self.reader.wait(1, 1, Duration::MAX) {
            Wake::Ready | Wake::TimedOut => Ok(()),
            Wake::Stopping => Err(End::Stopped),
        }
    }

    /// Brings `frames` into the log, however often it takes, or gives them up where others have to go before.
    fn ship(&mut self, mut frames: Vec<Frame>) -> Result<(), End> {
        while let Some(newest) = frames.last() {
            if self.reader.stop() == Stop::Now {
                return Err(End::Stopped);
            }
            match self.log.append(&frames, self.tail.as_ref().map(|last| last.seq), Time::wall_clock()) {
                Ok(appended) => {
                    let Some(stored) = appended.last() else {
                        return Err(End::Failed("the log stored nothing and said so without an error".into()));
                    };
                    let last = Last { seq: stored.seq, header: newest.header.clone() };
                    self.advance(last);
                    return Ok(());
                }
                Err(AppendError::Conflict { .. }) => self.reconcile(&mut frames)?,
                Err(error @ AppendError::Unavailable(_)) => self.back_off(&error)?,
                Err(error @ AppendError::Refused(_)) => return Err(End::Failed(chain(&error))),
            }
        }
        Ok(())
    }

    /// The log's last frame of this writer is not where we know ours: finds out which it is.
    fn reconcile(&mut self, frames: &mut Vec<Frame>) -> Result<(), End> {
        let last = self.last_in_log()?;
        let is_last = |header: &Header| last.as_ref().is_some_and(|last| last.header.sum == header.sum);
        if let Some(place) = frames.iter().position(|frame| is_last(&frame.header)) {
            // An earlier try stored them, and perhaps only them, and its answer was lost.
            frames.drain(..=place);
            last.into_iter().for_each(|last| self.advance(last));
            return Ok(());
        }
        let found = match (&self.tail, &last) {
            (None, None) => Found::Known,
            (None, Some(_)) => Found::Newer,
            (Some(tail), last) => Found::of(last.as_ref(), tail),
        };
        match found {
            Found::Known if last == self.tail => {
                return self.back_off(&*Cause::from("the log contradicts what it says of the writer's last frame"));
            }
            // It has moved, as in a log that was restored elsewhere.
            Found::Known => self.tail = last,
            Found::Newer if self.reader.mark().is_some_and(|mark| is_last(&mark.header)) => {
                // The log was believed to have lost it, by an answer that was old.
                self.go_on_behind(last);
                frames.clear();
            }
            Found::Newer if self.is_of_an_earlier_life(last.as_ref()) => {
                // What the life before sent at its end has come to the log only now.
                self.take_up()?;
                frames.clear();
            }
            Found::Newer => return Err(last.map_or_else(diverged, |last| End::Fenced(last.epoch()))),
            Found::Older => {
                self.send_again(last)?;
                frames.clear();
            }
            Found::Other => {
                self.go_on_if_ours(last)?;
                frames.clear();
            }
        }
        Ok(())
    }

    fn is_of_an_earlier_life(&self, last: Option<&Last>) -> bool {
        last.zip(self.reader.begun()).is_some_and(|(last, begun)| last.header.epoch < begun)
    }

    fn advance(&mut self, last: Last) {
        self.reader.ack(&last, Time::wall_clock());
        self.tail = Some(last);
        self.delay = RETRY_MIN;
        self.report();
    }

    fn report(&self) {
        let (shipped, seq) = (self.tail.as_ref().map(Last::epoch), self.tail.as_ref().map(|last| last.seq));
        self.progress.change(|standing| {
            (standing.shipped, standing.seq, standing.health) = (shipped, seq, Health::Shipping);
        });
    }

    fn last_in_log(&mut self) -> Result<Option<Last>, End> {
        loop {
            match self.log.last(&self.writer) {
                Ok(last) => return Ok(last),
                Err(error) => self.back_off(&error)?,
            }
        }
    }

    fn back_off(&mut self, error: &(dyn std::error::Error + 'static)) -> Result<(), End> {
        tracing::warn!(error, delay = ?self.delay, "log unavailable, facts wait in the spool");
        let text = chain(error);
        self.progress.change(|standing| standing.health = Health::Waiting { error: text });
        let stop = self.reader.pause(self.delay);
        self.delay = (self.delay * 2).min(RETRY_MAX);
        if stop == Stop::Now { Err(End::Stopped) } else { Ok(()) }
    }
}

/// What the writer's last frame in the log is, seen from the last one that we know it to have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The same.
    Known,
    /// One behind it.
    Newer,
    /// One before it, or none: the log lost its end.
    Older,
    /// Another in its place: somebody else's, or the same facts in other frames.
    Other,
}

impl Found {
    fn of(last: Option<&Last>, known: &Last) -> Self {
        let Some(last) = last else { return Self::Older };
        if last.header.sum == known.header.sum {
            return Self::Known;
        }
        match (order(last.epoch()).cmp(&order(known.epoch())), last.header.frame < known.header.frame) {
            (Ordering::Greater, _) => Self::Newer,
            (Ordering::Less, true) => Self::Older,
            (Ordering::Less, false) | (Ordering::Equal, _) => Self::Other,
        }
    }
}

fn diverged() -> End {
    End::Failed("the log has another frame in the place of one that it had acknowledged".into())
}

fn order(epoch: Epoch) -> (u64, u64) {
    (epoch.epoch, epoch.last)
}

/// An error and its causes on one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("shipper panicked: {}", said.unwrap_or("no message"))
}
