//! A chore: a thread of this process that does one thing again and again, with a pause after each turn.
//!
//! Logs and files block, so what polls them has a thread of its own instead of a place in the runtime.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A running chore; dropping it ends it after the turn under way.
pub(crate) struct Chore {
    stop: Option<SyncSender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Chore {
    /// Starts the thread `name`, which takes a `turn` now and after each `pause`.
    pub(crate) fn start(name: &str, pause: Duration, mut turn: impl FnMut() + Send + 'static) -> io::Result<Self> {
        Self::paced(name, move || {
            turn();
            pause
        })
    }

    /// Starts the thread `name`, which takes a `turn` now and after each pause that the one before asked for.
    pub(crate) fn paced(name: &str, mut turn: impl FnMut() -> Duration + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = sync_channel(0);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            loop {
                let pause = turn();
                match stopped.recv_timeout(pause) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Chore {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a chore had panicked");
        }
    }
}

/// What a chore lets others know of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared<T>(Arc<Mutex<T>>);

impl<T: Clone> Shared<T> {
    /// How it stands now.
    pub(crate) fn look(&self) -> T {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes it.
    pub(crate) fn change(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
