//! The log on NATS JetStream: one stream, a subject per writer, one message per frame.
//!
//! A frame is published expecting the sequence of its writer's last one, and one is in flight at a time: that alone
//! stores each frame once, in order, and turns away a process that was replaced, whatever answers get lost
//! (docs/adr/0023). A read asks for messages directly and leaves no consumer behind.
//!
//! The connection lives on a small runtime of its own and comes and goes in the background. No call waits for it
//! longer than its bound: the server may be away, frozen, or silent.

mod inspect;
mod link;
mod shape;
mod stream;

use std::io;

use tokio::runtime::{Builder, Runtime};
use waybill_schema::frame::Frame;
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};

pub use inspect::{Flush, Inspection, Standing, flush};
pub use link::{LinkError, STALL};
pub use shape::{MESSAGE_BYTES_MAX, OLDEST, Unsuitable};
pub use stream::{ACK_TIMEOUT, ANSWER_TIMEOUT};

/// Which stream, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The servers' URLs, such as `nats://127.0.0.1:4222`; one that answers is enough.
    pub servers: Vec<String>,
    /// The stream's name.
    pub stream: String,
    /// How many servers of a cluster hold each frame; a stream that has fewer is refused.
    pub replicas: u32,
    /// The most bytes that the stream holds, where it is made here; then appends are unavailable until there is room.
    pub bytes_max: u64,
}

/// The log in a JetStream stream. Its calls block for a bounded time, on threads that may: not on a runtime's own.
#[derive(Debug)]
pub struct JetstreamLog {
    runtime: Option<Runtime>,
    stream: stream::Stream,
}

impl JetstreamLog {
    /// Begins to connect, and fails only where the settings name no server or the system gives no thread.
    ///
    /// The stream is checked at the first call that reaches a server, and made where there is none.
    pub fn new(settings: Settings) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("nats").enable_all().build()?;
        let stream = runtime.block_on(stream::Stream::open(settings))?;
        Ok(Self { runtime: Some(runtime), stream })
    }

    /// What is known of the server and the stream: what an acknowledgement stands on. Makes no stream.
    pub fn inspect(&mut self) -> Result<Inspection, ReadError> {
        self.wait(async |stream| stream.inspect().await).map_err(ReadError::from)
    }

    fn wait<T>(&mut self, call: impl AsyncFnOnce(&mut stream::Stream) -> T) -> T {
        let runtime = self.runtime.as_ref().expect("the runtime lives as long as the log");
        runtime.block_on(call(&mut self.stream))
    }
}

impl Drop for JetstreamLog {
    fn drop(&mut self) {
        // Waits for nothing, so that a log may be dropped anywhere: what it was asked for has been answered.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Log for JetstreamLog {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        self.wait(async |stream| stream.append(frames, expected, sent).await)
    }

    fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, ReadError> {
        self.wait(async |stream| stream.last(writer).await).map_err(ReadError::from)
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.wait(async |stream| stream.read(None, after, frames_max).await).map_err(ReadError::from)
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.wait(async |stream| stream.read(Some(writer), after, frames_max).await).map_err(ReadError::from)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        self.wait(async |stream| stream.head().await).map_err(ReadError::from)
    }
}

/// Why a call to the log came to nothing.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Server(#[from] async_nats::jetstream::Error),
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    #[error(transparent)]
    Stalled(#[from] Stalled),
    #[error("the answer cannot be understood")]
    Answer(#[source] crate::log::Cause),
}

/// Reads have ended before the log does for [`STALL`]: whoever answers them does not see it grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("reads end at frame {after} though the log goes on: connecting anew")]
pub struct Stalled {
    /// Where reads end.
    pub after: Seq,
}

impl Failure {
    fn answer(cause: impl Into<crate::log::Cause>) -> Self {
        Self::Answer(cause.into())
    }
}

impl From<Failure> for ReadError {
    fn from(failure: Failure) -> Self {
        Self(failure.into())
    }
}

impl From<Failure> for AppendError {
    /// What trying again does not mend is refused; everything else, and everything unknown, may pass.
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Link(LinkError::TooLarge(_)) | Failure::Unsuitable(_) => Self::Refused(failure.into()),
            Failure::Link(_) | Failure::Server(_) | Failure::Stalled(_) | Failure::Answer(_) => {
                Self::Unavailable(failure.into())
            }
        }
    }
}
