//! The requests to the stream: check, publish, last, read, head.
//!
//! What must be true to the last moment (a writer's last frame, the head) is asked of the stream's leader. Frames are
//! read directly, many in one answer, from whichever replica answers: it has no holes, but may be behind, so that the
//! leader has the last word on where they end. A reader that is told that there is nothing more asks the leader now and
//! then whether that is so ([`Stream::confirm_end`]).

use std::io;
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::RawMessage;
use async_nats::{HeaderMap, Message};
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use super::inspect::{self, Inspection};
use super::link::{Link, LinkError, STALL};
use super::shape::{self, Shape};
use super::{Failure, Settings, Stalled};
use crate::log::{AppendError, Appended, Last, Seq, StoredFrame};

/// How long an acknowledgement is awaited. The same bytes are sent again after it, which is harmless.
pub const ACK_TIMEOUT: Duration = Duration::from_millis(500);
/// How long any other answer is awaited.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// At most this many frames in one answer, and about so many bytes of them: the reader holds both in memory.
const BATCH_FRAMES: usize = 256;
const BATCH_BYTES: usize = 4 << 20;
/// How often the leader is asked whether reads that find nothing have come to the end.
const CONFIRM_EVERY: Duration = Duration::from_secs(1);
/// The header with the writer's clock at this try, in milliseconds.
const SENT: &str = "sent";
/// The header of each message of a batch that says how many are behind it; servers before 2.11 know no batches.
const PENDING: &str = "Nats-Num-Pending";
/// The header of each message of a batch with the sequence of the one before in it, 0 in the first.
const BEFORE: &str = "Nats-Last-Sequence";

/// How a read without a further message ends.
const END_OF_BATCH: u16 = 204;
const NOT_FOUND: u16 = 404;
const NO_RESPONDERS: u16 = 503;

/// The code of errors that repeating the same message does not mend, such as one that is too large for the stream.
const BAD_REQUEST: usize = 400;
/// Two writers met, or one writer's earlier try did; a cluster says it with a code of its own.
const WRONG_LAST_SEQUENCE: [ErrorCode; 2] =
    [ErrorCode::STREAM_WRONG_LAST_SEQUENCE, ErrorCode::STREAM_WRONG_LAST_SEQUENCE_CONSTANT];

/// The stream, over a connection that comes and goes.
#[derive(Debug)]
pub(super) struct Stream {
    settings: Settings,
    link: Link,
    checked: Option<Checked>,
    /// The connection over which a frame was last seen to continue what the stream holds.
    continued: Option<u64>,
    /// When the leader was last asked where the frames end.
    confirmed: Option<Instant>,
    /// Since when reads end before the frames do, over whatever connections.
    behind: Option<Instant>,
}

/// A check of the stream.
#[derive(Clone, Copy, Debug)]
struct Checked {
    /// The connection that it was made over.
    connection: u64,
    /// Whether a replica beside the leader may answer a read.
    is_replicated: bool,
}

/// What the server says of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    pub(super) config: Shape,
    pub(super) state: State,
    #[serde(default)]
    pub(super) cluster: Option<Cluster>,
}

#[derive(Debug, Deserialize)]
pub(super) struct State {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) last_seq: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Cluster {
    #[serde(default)]
    pub(super) replicas: Vec<Peer>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Peer {
    #[serde(default)]
    pub(super) current: bool,
}

/// Frames that came in one answer.
struct Batch {
    frames: Vec<StoredFrame>,
    is_end: bool,
}

impl Stream {
    pub(super) async fn open(settings: Settings) -> io::Result<Self> {
        let link = Link::open(settings.servers.clone()).await?;
        Ok(Self { settings, link, checked: None, continued: None, confirmed: None, behind: None })
    }

    /// Publishes frame by frame, each after the acknowledgement of the one before.
    pub(super) async fn append(
        &mut self,
        frames: &[Frame],
        expected: Option<Seq>,
        sent: Time,
    ) -> Result<Vec<Appended>, AppendError> {
        let mut appended: Vec<Appended> = Vec::with_capacity(frames.len());
        for frame in frames {
            let before = appended.last().map_or(expected, |last| Some(last.seq));
            self.ready().await?;
            self.continues(frame, before).await?;
            let seq = self.publish(frame, before, sent).await?;
            appended.push(Appended { seq });
        }
        Ok(appended)
    }

    /// Makes sure, once for each connection, that `frame` continues its writer's chain: a server that lost its tail gives
    /// sequences out again, and then the expected one may be that of another frame.
    async fn continues(&mut self, frame: &Frame, expected: Option<Seq>) -> Result<(), AppendError> {
        let connection = self.checked.map(|checked| checked.connection);
        if self.continued == connection {
            return Ok(());
        }
        let Header { writer, prev, .. } = &frame.header;
        let last = self.last(writer).await?;
        let actual = last.as_ref().map(|last| last.seq);
        if actual != expected || last.is_some_and(|last| last.header.sum != *prev) {
            return Err(AppendError::Conflict { expected, actual });
        }
        self.continued = connection;
        Ok(())
    }

    async fn publish(&mut self, frame: &Frame, expected: Option<Seq>, sent: Time) -> Result<Seq, AppendError> {
        let Header { writer, epoch, frame: number, .. } = &frame.header;
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", expected.map_or(0, |seq| seq.0).to_string());
        headers.insert("Nats-Msg-Id", format!("{}.{epoch}.{number}", shape::token(writer)));
        headers.insert(SENT, sent.0.to_string());
        let answer = self.link.request(shape::subject(writer), headers, frame.bytes.clone(), ACK_TIMEOUT).await;
        match self.understand::<PublishAck>(answer) {
            Ok(ack) if !ack.duplicate => {
                self.link.worked();
                Ok(Seq(ack.sequence))
            }
            // The server has seen this frame's id, as after a try whose acknowledgement was lost.
            Ok(_) => Err(self.conflict(writer, expected).await),
            Err(Failure::Server(error)) if WRONG_LAST_SEQUENCE.contains(&error.error_code()) => {
                Err(self.conflict(writer, expected).await)
            }
            Err(Failure::Server(error)) if error.code() == BAD_REQUEST => Err(AppendError::Refused(error.into())),
            Err(failure) => Err(failure.into()),
        }
    }

    /// What stands where `expected` was expected. In a cluster an earlier try may still be on its way: then the last
    /// frame is the expected one, and the next try tells.
    async fn conflict(&mut self, writer: &WriterId, expected: Option<Seq>) -> AppendError {
        match self.last(writer).await {
            Ok(last) => {
                let actual = last.map(|last| last.seq);
                if actual == expected {
                    return AppendError::Unavailable("an earlier try is still on its way".into());
                }
                AppendError::Conflict { expected, actual }
            }
            Err(failure) => AppendError::Unavailable(failure.into()),
        }
    }

    pub(super) async fn last(&mut self, writer: &WriterId) -> Result<Option<Last>, Failure> {
        self.ready().await?;
        let request = json!({ "last_by_subj": shape::subject(writer) });
        let Some(message) = self.message(&request).await? else { return Ok(None) };
        let frame = Frame::parse(message.payload.into()).map_err(Failure::answer)?;
        Ok(Some(Last { seq: Seq(message.sequence), header: frame.header }))
    }

    /// The message that the leader finds by `request`.
    async fn message(&mut self, request: &Value) -> Result<Option<StreamMessage>, Failure> {
        #[derive(Deserialize)]
        struct Found {
            message: RawMessage,
        }
        match self.api::<Found>("STREAM.MSG.GET", request).await {
            Ok(found) => StreamMessage::try_from(found.message).map(Some).map_err(Failure::Answer),
            Err(Failure::Server(error)) if error.error_code() == ErrorCode::NO_MESSAGE_FOUND => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    pub(super) async fn head(&mut self) -> Result<Seq, Failure> {
        self.ready().await?;
        Ok(Seq(self.info().await?.state.last_seq))
    }

    /// Frames behind `after`, of one writer or of all.
    pub(super) async fn read(
        &mut self,
        writer: Option<&WriterId>,
        mut after: Seq,
        frames_max: usize,
    ) -> Result<Vec<StoredFrame>, Failure> {
        self.ready().await?;
        let subject = writer.map_or(">".to_owned(), shape::subject);
        let mut frames = Vec::new();
        while frames.len() < frames_max {
            let batch = self.batch(&subject, after, frames_max - frames.len()).await?;
            after = batch.frames.last().map_or(after, |last| last.seq);
            frames.extend(batch.frames);
            if frames.len() >= frames_max || !batch.is_end {
                continue;
            }
            let Some(next) = self.next_at_leader(&subject, after).await? else { break };
            after = next.seq;
            frames.push(next);
        }
        match frames.is_empty() {
            true => self.confirm_end(writer, after).await?,
            false => self.has_read(),
        }
        Ok(frames)
    }

    fn has_read(&mut self) {
        self.link.worked();
        self.behind = None;
    }

    /// Makes sure, once in a while, that nothing is behind `after`, as a read has found. Whoever answers reads and sees the
    /// log stand still while it grows would else be believed for ever.
    async fn confirm_end(&mut self, writer: Option<&WriterId>, after: Seq) -> Result<(), Failure> {
        let is_due = self.confirmed.is_none_or(|last| last.elapsed() >= CONFIRM_EVERY);
        if !is_due && self.behind.is_none() {
            return Ok(());
        }
        let end = match writer {
            Some(writer) => self.last(writer).await?.map_or(Seq::START, |last| last.seq),
            None => Seq(self.info().await?.state.last_seq),
        };
        self.confirmed = Some(Instant::now());
        if end <= after {
            self.has_read();
            return Ok(());
        }
        self.link.came_to_nothing();
        let since = *self.behind.get_or_insert_with(Instant::now);
        // For a while it may be a replica that is behind, or a frame that has just come.
        if since.elapsed() < STALL { Ok(()) } else { Err(Stalled { after }.into()) }
    }

    /// The frame behind `after` that a replica did not have yet.
    async fn next_at_leader(&mut self, subject: &str, after: Seq) -> Result<Option<StoredFrame>, Failure> {
        if !self.checked.is_some_and(|checked| checked.is_replicated) {
            return Ok(None);
        }
        let found = self.message(&json!({ "seq": after.0 + 1, "next_by_subj": subject })).await?;
        found.map(stored_frame).transpose()
    }

    /// What a server says of itself and, where it is there, of the stream; checks and makes nothing.
    pub(super) async fn inspect(&mut self) -> Result<Inspection, Failure> {
        self.link.connected().await?;
        let account: inspect::Account = self.ask("$JS.API.INFO".to_owned(), &Value::Null).await?;
        let info = self.info_if_there().await?;
        Ok(Inspection::new(self.link.server_version(), account, info, &self.settings))
    }

    async fn batch(&mut self, subject: &str, after: Seq, frames_max: usize) -> Result<Batch, Failure> {
        let request = json!({
            "seq": after.0 + 1,
            "next_by_subj": subject,
            "batch": frames_max.min(BATCH_FRAMES),
            "max_bytes": BATCH_BYTES,
        });
        let subject = format!("$JS.API.DIRECT.GET.{}", self.settings.stream);
        let mut answers = self.link.ask(subject, request.to_string().into(), ANSWER_TIMEOUT).await?;
        let mut frames: Vec<StoredFrame> = Vec::new();
        loop {
            let next = async { answers.next().await.ok_or(LinkError::Lost) };
            let answer = self.link.within(ANSWER_TIMEOUT, next).await?;
            let status = answer.status.map(|status| status.as_u16());
            let Some(pending) = header(&answer, PENDING) else {
                let batch = without_batches(answer, status);
                self.checked = self.checked.filter(|_| !batch.as_ref().is_err_and(is_about_the_stream));
                return batch;
            };
            // Between two servers a part of an answer may get lost, which must not look like a gap.
            let before = frames.last().map_or(0, |last| last.seq.0);
            if header(&answer, BEFORE) != i64::try_from(before).ok() {
                return Err(Failure::answer("a frame in the middle of the answer is missing"));
            }
            match status {
                None => frames.push(stored_frame(StreamMessage::try_from(answer).map_err(Failure::answer)?)?),
                Some(END_OF_BATCH) => return Ok(Batch { frames, is_end: pending == 0 }),
                Some(other) => return Err(Failure::answer(format!("reading ended with status {other}"))),
            }
        }
    }

    /// Makes sure, once for each connection, that server and stream are fit for the log; makes the stream where there
    /// is none.
    async fn ready(&mut self) -> Result<(), Failure> {
        let connection = self.link.connected().await?;
        if self.checked.is_some_and(|checked| checked.connection == connection) {
            return Ok(());
        }
        let found = self.info_if_there().await?;
        shape::check_version(&self.link.server_version())?;
        let info = match found {
            Some(info) => info,
            None => self.create().await?,
        };
        info.config.check(&self.settings)?;
        self.checked = Some(Checked { connection, is_replicated: info.config.num_replicas > 1 });
        Ok(())
    }

    async fn create(&mut self) -> Result<Info, Failure> {
        tracing::info!(stream = self.settings.stream, replicas = self.settings.replicas, "making the log's stream");
        self.api("STREAM.CREATE", &shape::wanted(&self.settings)).await
    }

    async fn info(&mut self) -> Result<Info, Failure> {
        self.api("STREAM.INFO", &Value::Null).await
    }

    async fn info_if_there(&mut self) -> Result<Option<Info>, Failure> {
        match self.info().await {
            Err(Failure::Server(error)) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            found => found.map(Some),
        }
    }

    /// Asks JetStream for `what` of the stream.
    async fn api<T: DeserializeOwned>(&mut self, what: &str, request: &Value) -> Result<T, Failure> {
        let subject = format!("$JS.API.{what}.{}", self.settings.stream);
        self.ask(subject, request).await
    }

    async fn ask<T: DeserializeOwned>(&mut self, subject: String, request: &Value) -> Result<T, Failure> {
        let payload = if request.is_null() { Vec::new() } else { request.to_string().into_bytes() };
        let answer = self.link.request(subject, HeaderMap::new(), payload, ANSWER_TIMEOUT).await;
        self.understand(answer)
    }

    /// Reads an answer. Where it says that the stream is not there, the stream is checked again before its next use.
    fn understand<T: DeserializeOwned>(&mut self, answer: Result<Message, LinkError>) -> Result<T, Failure> {
        let understood =
            answer.map_err(Failure::from).and_then(|message| {
                match serde_json::from_slice::<Response<T>>(&message.payload).map_err(Failure::answer)? {
                    Response::Ok(good) => Ok(good),
                    Response::Err { error } => Err(Failure::Server(error)),
                }
            });
        if understood.as_ref().is_err_and(is_about_the_stream) {
            self.checked = None;
        }
        understood
    }
}

fn is_about_the_stream(failure: &Failure) -> bool {
    match failure {
        Failure::Link(LinkError::NoResponders) => true,
        Failure::Server(error) => error.error_code() == ErrorCode::STREAM_NOT_FOUND,
        _ => false,
    }
}

/// An answer outside of a batch: there is no frame, or the server knows no batches and this is its whole answer.
fn without_batches(answer: Message, status: Option<u16>) -> Result<Batch, Failure> {
    match status {
        None => {
            let message = StreamMessage::try_from(answer).map_err(Failure::answer)?;
            Ok(Batch { frames: vec![stored_frame(message)?], is_end: false })
        }
        Some(NOT_FOUND) => Ok(Batch { frames: Vec::new(), is_end: true }),
        Some(NO_RESPONDERS) => Err(LinkError::NoResponders.into()),
        Some(other) => Err(Failure::answer(format!("reading ended with status {other}"))),
    }
}

fn stored_frame(message: StreamMessage) -> Result<StoredFrame, Failure> {
    let stored = Time(i64::try_from(message.time.unix_timestamp_nanos() / 1_000_000).map_err(Failure::answer)?);
    // A message that is none of ours has no such header; what reads it sets it aside.
    let sent = number(&message.headers, SENT).map_or(stored, Time);
    Ok(StoredFrame { seq: Seq(message.sequence), stored, sent, bytes: message.payload.into() })
}

fn header(message: &Message, name: &str) -> Option<i64> {
    number(message.headers.as_ref()?, name)
}

fn number(headers: &HeaderMap, name: &str) -> Option<i64> {
    headers.get_last(name)?.as_str().parse().ok()
}
