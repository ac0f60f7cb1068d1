//! The shipper: the one thread that moves facts from a spool to the log.
//!
//! It takes what has gathered, seals it into frames chained to the writer's last one, appends them expecting the
//! sequence it knows, and lets the spool go of them. One append is in flight at a time, so order needs no care.
//!
//! Facts are safe in the spool already; the shipper may therefore wait a little to save work. A commit of the
//! embedded log costs about 100 µs of CPU whatever its size, so appends are [`GATHER`] apart unless some frames are full.

use std::any::Any;
use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use waybill_schema::event::Epoch;
use waybill_schema::frame::{FRAME_BYTES_MAX, FRAME_FACTS_MAX, Frame, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::log::{AppendError, Appended, Last, Log, Seq};
use crate::spool::{Reader, SpoolError, Stop, Stopper, Wake};

/// How long facts may gather between two appends.
pub const GATHER: Duration = Duration::from_millis(50);
/// So many facts, or bytes of them, are worth an append before that time is over: eight full frames.
const FACTS_WORTH: u64 = 8 * FRAME_FACTS_MAX as u64;
const BYTES_WORTH: u64 = 8 * FRAME_BYTES_MAX as u64;
/// At most this many frames are appended at once.
pub const FRAMES_MAX: usize = 16;
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
}

impl Progress {
    fn new() -> Self {
        let standing = Standing { shipped: None, seq: None, health: Health::Shipping };
        Self { standing: Mutex::new(standing), moved: Condvar::new() }
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
        let progress = Arc::new(Progress::new());
        let stopper = reader.stopper();
        let tail = Tail { seq: None, link: Link::start(), last: None };
        let shipping = Shipping { writer, reader, log, progress: progress.clone(), tail, delay: RETRY_MIN };
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

/// The writer's last frame as the shipper knows it.
#[derive(Debug)]
struct Tail {
    seq: Option<Seq>,
    link: Link,
    last: Option<Epoch>,
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
    tail: Tail,
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
        if let Some(last) = &last {
            // An epoch that began in this life cannot be in the log before anything was sent: it is somebody else's.
            if self.reader.begun().is_some_and(|begun| last.header.epoch >= begun) {
                return Err(End::Fenced(last.epoch()));
            }
            self.tail = Tail { seq: Some(last.seq), link: Link::after(&last.header), last: Some(last.epoch()) };
        }
        self.reader.resume_after(self.tail.last);
        self.report();
        Ok(())
    }

    /// Seals what is there, in frames that continue the chain.
    fn gathered(&mut self) -> Result<Vec<Frame>, End> {
        let mut frames: Vec<Frame> = Vec::new();
        while frames.len() < FRAMES_MAX {
            let Some(batch) = self.reader.next_batch(FRAME_FACTS_MAX, FRAME_BYTES_MAX)? else { break };
            let link = frames.last().map_or(self.tail.link.clone(), |frame| Link::after(&frame.header));
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

    /// Brings `frames` into the log, however often it takes.
    fn ship(&mut self, mut frames: Vec<Frame>) -> Result<(), End> {
        while let Some(newest) = frames.last() {
            if self.reader.stop() == Stop::Now {
                return Err(End::Stopped);
            }
            match self.log.append(&frames, self.tail.seq, Time::wall_clock()) {
                Ok(appended) => {
                    let Some(Appended { seq }) = appended.last().copied() else {
                        return Err(End::Failed("the log stored nothing and said so without an error".into()));
                    };
                    let last = Last { seq, header: newest.header.clone() };
                    self.advance(&last);
                    return Ok(());
                }
                Err(AppendError::Conflict { .. }) => self.reconcile(&mut frames)?,
                Err(error @ AppendError::Unavailable(_)) => self.back_off(&error)?,
                Err(error @ AppendError::Refused(_)) => return Err(End::Failed(chain(&error))),
            }
        }
        Ok(())
    }

    /// The log's last frame of this writer is not the one we know: finds out whose it is.
    fn reconcile(&mut self, frames: &mut Vec<Frame>) -> Result<(), End> {
        let lost =
            || End::Failed("the log's end is not where it was: frames that it acknowledged are gone or moved".into());
        let last = self.last_in_log()?.ok_or_else(lost)?;
        if let Some(place) = frames.iter().position(|frame| frame.header.sum == last.header.sum) {
            // An earlier try stored them and its answer was lost.
            frames.drain(..=place);
            self.advance(&last);
            return Ok(());
        }
        if self.tail.last.is_some_and(|known| order(last.epoch()) <= order(known)) {
            return Err(lost());
        }
        Err(End::Fenced(last.epoch()))
    }

    fn advance(&mut self, last: &Last) {
        self.tail = Tail { seq: Some(last.seq), link: Link::after(&last.header), last: Some(last.epoch()) };
        self.reader.ack(last.epoch());
        self.delay = RETRY_MIN;
        self.report();
    }

    fn report(&self) {
        let Tail { seq, last, .. } = self.tail;
        self.progress.change(|standing| *standing = Standing { shipped: last, seq, health: Health::Shipping });
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
