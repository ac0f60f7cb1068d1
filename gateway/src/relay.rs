//! The relay: a stream on its way from an upstream to a client, event by event, byte for byte.
//!
//! A [`Feed`] reads an upstream's event stream and says what each event means. Before the first meaningful frame the
//! proxy reads it and may still fail over; from then on a [`Relay`], the reply's body, reads the same feed. It is
//! polled by the connection, so a client that leaves drops it, and with it the upstream call.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use http_body::Body;
use tokio::time::Instant;
use waybill_routing::classify::{self, Transport, UpstreamError, Verdict};
use waybill_routing::dispatch::Committed;
use waybill_routing::observe::{Frame, Observer, Terminal};
use waybill_routing::sse::{self, Decoder};
use waybill_schema::event::{Class, Effect, Endpoint, Outcome, Tokens};
use waybill_schema::time::Time;

use crate::continuation::Seal;
use crate::failure::about_the_gateway;
use crate::flight::{Flight, Landing, Learnt, Seen};
use crate::silence::Silence;
use crate::unpacked::Unpacked;
use crate::vault::Gathering;

/// Characters of text that make about one token, where nobody reported a count (the common rule of thumb).
const CHARS_PER_TOKEN: u64 = 4;

/// What a client is told of a stream that broke off.
const INTERRUPTED: &str = "the upstream's stream was interrupted";

/// Events are joined in one write up to about this many bytes: a TCP segment on loopback.
const TOGETHER_BYTES: usize = 16 << 10;

/// At most so many bytes behind the last event are passed on.
const REST_BYTES_MAX: usize = 16 << 10;

/// Polls without anything new after which the events that wait go out: hyper polls a body twice in one turn of its
/// connection, so the third follows a turn of the upstream's.
const TURNS: u8 = 3;

/// An upstream's event stream, read and understood.
#[derive(Debug)]
pub struct Feed {
    endpoint: Endpoint,
    body: Unpacked,
    decoder: Option<Decoder>,
    observer: Observer,
    /// Keeps the usage chunk, which only Waybill asked for, from the client.
    hides_usage: bool,
    /// Whether a LF that comes alone is kept back: the event before was, or was given one already.
    hides_rest: bool,
    /// Whether the body ended within an event.
    torn: bool,
    /// Whether any event has said something.
    spoke: bool,
    /// When bytes last came, whole events or not.
    last_read: Instant,
}

/// An event of a feed and what it means.
#[derive(Debug)]
pub struct Passed {
    /// Its bytes for the client; empty where it is kept back.
    pub bytes: Bytes,
    /// What it means.
    pub frame: Frame,
}

/// How a feed ended without saying that it was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the upstream's stream broke off")]
pub struct Cut;

impl Feed {
    /// Reads `body`, which speaks the dialect of `endpoint`.
    pub fn new(endpoint: Endpoint, body: Unpacked, hides_usage: bool) -> Self {
        let (decoder, observer) = (Some(Decoder::default()), Observer::new(endpoint));
        let (hides_rest, torn, spoke) = (false, false, false);
        Self { endpoint, body, decoder, observer, hides_usage, hides_rest, torn, spoke, last_read: Instant::now() }
    }

    /// The next event, supplied where only the last one lacks; `Ok(None)` at the end of the stream, `Err` where the
    /// connection broke.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Passed>, Cut>> {
        loop {
            let Some(decoder) = &mut self.decoder else { return Poll::Ready(Ok(self.supplied())) };
            match decoder.next() {
                Some(Ok(event)) => return Poll::Ready(Ok(Some(self.understand(event)))),
                Some(Err(_)) => return Poll::Ready(Err(Cut)),
                None => {}
            }
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    self.last_read = Instant::now();
                    if let Ok(chunk) = frame.into_data() {
                        decoder.push(chunk);
                    }
                }
                Some(Err(_)) => return Poll::Ready(Err(Cut)),
                None => {
                    if let Some(tail) = self.decoder.take().and_then(Decoder::finish) {
                        self.torn = true;
                        return Poll::Ready(Ok(Some(self.understand(tail))));
                    }
                }
            }
        }
    }

    /// The last event of a stream that is whole and closed without it (PITFALLS E02), once. Behind a torn event it would
    /// make one of that.
    fn supplied(&mut self) -> Option<Passed> {
        if !self.observer.lacks_done() {
            return None;
        }
        let frame = self.observer.event(None, b"[DONE]");
        let bytes = if self.torn { Bytes::new() } else { Bytes::from_static(b"data: [DONE]\n\n") };
        Some(Passed { bytes, frame })
    }

    /// The next event, awaited.
    pub async fn next(&mut self) -> Result<Option<Passed>, Cut> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// How the answer has ended if the stream closes here; `None` where that would be a cut.
    pub fn at_eof(&self) -> Option<Terminal> {
        self.observer.at_eof()
    }

    /// Whether an answer that ended without an error held nothing at all.
    pub fn is_empty(&self) -> bool {
        self.observer.is_empty()
    }

    /// Whether any output has come.
    pub fn has_output(&self) -> bool {
        self.observer.has_output()
    }

    /// What was learnt so far; a count that nobody reported is estimated from the output.
    pub fn learnt(&self) -> Learnt {
        let mut usage = self.observer.usage();
        if usage.output.is_unknown() && self.observer.output_chars() > 0 {
            usage.output = Tokens::Estimated(self.observer.output_chars().div_ceil(CHARS_PER_TOKEN));
        }
        let served_model = self.observer.served_model().map(|model| model.as_str().to_owned());
        let ended = self.at_eof().is_some_and(Terminal::can_be_continued);
        let response = self.response_id().map(|id| Seen { id: id.into(), ended });
        Learnt { status: Some(200), usage, served_model, response }
    }

    /// The id that the upstream gave the response, once it has been seen.
    pub fn response_id(&self) -> Option<&str> {
        self.observer.response_id()
    }

    fn understand(&mut self, event: sse::Event) -> Passed {
        self.spoke |= event.data().is_some();
        let frame = match event.data() {
            Some(data) => self.observer.event(event.name(), data),
            None => self.observer.stray(event.raw()),
        };
        // An event that ends in CR LF is given out at its CR; a LF that comes alone belongs to the event before it.
        let is_rest = event.raw().as_ref() == b"\n";
        self.hides_rest = if is_rest { self.hides_rest } else { self.hides_usage && matches!(frame, Frame::UsageOnly) };
        let raw = event.into_raw();
        let bytes = match frame {
            _ if self.hides_rest => Bytes::new(),
            // What ends the answer is not held back for the LF of its CR LF.
            Frame::Terminal(_) | Frame::Error(_) | Frame::Foreign(_) if raw.ends_with(b"\n\r") => {
                self.hides_rest = true;
                [&raw, &b"\n"[..]].concat().into()
            }
            _ => raw,
        };
        Passed { bytes, frame }
    }
}

/// The body of a streamed reply.
#[derive(Debug)]
pub struct Relay {
    feed: Feed,
    flight: Box<Flight>,
    /// What has been read and not yet handed on.
    ready: VecDeque<Bytes>,
    /// What must have come about before the last event goes out, and that event.
    seal: Option<Seal>,
    last: Bytes,
    /// What has passed so far, where it is to be kept.
    copy: Option<Box<Gathering>>,
    silence: Silence,
    /// When the client last took something: a feed that nobody reads is not silent.
    last_taken: Instant,
    ended: bool,
    /// How many bytes behind the last event may still go on; none behind a failure.
    rest: usize,
    /// Whether the client's connection is to be broken off, too.
    broken: bool,
    /// The bytes that waited when the upstream's connection last handed something over, and the turns since then.
    gathered: usize,
    turns: u8,
}

impl Relay {
    /// Takes over a feed whose first meaningful frame, and all before it, wait in `ready`.
    pub fn new(
        feed: Feed,
        flight: Box<Flight>,
        _committed: Committed,
        ready: VecDeque<Bytes>,
        idle_limit: Duration,
    ) -> Self {
        Self {
            feed,
            flight,
            ready,
            seal: None,
            last: Bytes::new(),
            copy: None,
            silence: Silence::of(idle_limit),
            last_taken: Instant::now(),
            ended: false,
            rest: 0,
            broken: false,
            gathered: 0,
            turns: 0,
        }
    }

    /// Gathers what passes, so that it can be kept under an `Idempotency-Key`, where the request has one.
    pub(crate) fn keep_copy(&mut self, content_type: Option<&HeaderValue>) {
        let mut copy = self.flight.deposit().map(|_| Box::new(Gathering::new(content_type.cloned())));
        copy.iter_mut().for_each(|copy| self.ready.iter().for_each(|bytes| copy.add(bytes)));
        self.copy = copy;
    }

    /// The next bytes for the client, always whole events; `None` at the end, an error where the client's connection is
    /// to be broken off.
    ///
    /// Events that came together go out together: a write costs more than copying many of them, and more than the turn
    /// that the upstream's connection needs to hand over what it has read already.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, axum::Error>>> {
        let mut waiting: usize = self.ready.iter().map(Bytes::len).sum();
        while !self.ended && waiting < TOGETHER_BYTES {
            match self.feed.poll_next(cx) {
                Poll::Ready(read) => self.take(read),
                Poll::Pending if waiting > 0 && self.takes_turn(waiting) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Pending if waiting > 0 => break,
                Poll::Pending => std::task::ready!(self.poll_idle(cx)),
            }
            waiting = self.ready.iter().map(Bytes::len).sum();
        }
        if self.poll_seal(cx).is_ready() && !self.last.is_empty() {
            waiting += self.last.len();
            self.ready.push_back(std::mem::take(&mut self.last));
        }
        if waiting > 0 {
            (self.gathered, self.turns) = (0, 0);
            return Poll::Ready(Some(Ok(joined(&mut self.ready))));
        }
        if self.broken {
            std::task::ready!(self.poll_turns(cx));
            self.broken = false;
            return Poll::Ready(Some(Err(axum::Error::new(Cut))));
        }
        if self.seal.is_some() {
            return Poll::Pending;
        }
        self.poll_rest(cx).map(|bytes| bytes.map(Ok))
    }

    /// Waits for what the last event waits for.
    fn poll_seal(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(seal) = &mut self.seal {
            std::task::ready!(Pin::new(seal).poll(cx));
            self.seal = None;
        }
        Poll::Ready(())
    }

    /// Whether the upstream's connection gets another turn to hand over more, before what waits goes out.
    fn takes_turn(&mut self, waiting: usize) -> bool {
        if waiting > self.gathered {
            (self.gathered, self.turns) = (waiting, 0);
        }
        self.turns += 1;
        self.turns <= TURNS
    }

    /// Waits for a turn of the client's connection: hyper drops what it has not written yet when a body breaks.
    fn poll_turns(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.turns >= TURNS {
            return Poll::Ready(());
        }
        self.turns += 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Gives the upstream some turns to end its body: what ends it usually waits right behind the last event, and only a
    /// connection that was read to there can be used again. One that goes on holding is not waited for (PITFALLS E03).
    /// What comes in those turns goes on to the client, such as `[DONE]` behind `response.completed`, but for what would
    /// make a failure of an answer that is whole.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            let Passed { bytes, frame } = match self.feed.poll_next(cx) {
                Poll::Ready(Ok(Some(passed))) => passed,
                Poll::Ready(Ok(None) | Err(Cut)) => return Poll::Ready(None),
                Poll::Pending => return self.poll_turns(cx).map(|()| None),
            };
            let fails = matches!(frame, Frame::Error(_) | Frame::Foreign(_));
            self.rest = if fails { 0 } else { self.rest.saturating_sub(bytes.len()) };
            if self.rest > 0 && !bytes.is_empty() {
                return Poll::Ready(Some(bytes));
            }
        }
    }

    fn take(&mut self, read: Result<Option<Passed>, Cut>) {
        self.last_taken = Instant::now();
        match read {
            Ok(Some(passed)) => self.pass(passed),
            // What is asked for behind a response's last event is nothing.
            Ok(None) if self.flight.is_errand() && !self.feed.spoke => self.complete(Class::Success),
            Ok(None) => self.cut(Transport::Cut),
            Err(Cut) => self.cut(Transport::Cut),
        }
    }

    fn pass(&mut self, Passed { bytes, frame }: Passed) {
        if let Some(copy) = &mut self.copy {
            copy.add(&bytes);
        }
        match frame {
            Frame::Lifecycle | Frame::Meaningful | Frame::UsageOnly => self.ready.push_back(bytes),
            Frame::Terminal(terminal) => match class_of(terminal) {
                Some(class) => {
                    self.complete(class);
                    self.last = bytes;
                }
                None => self.cut(Transport::Cut),
            },
            Frame::Error(error) => self.fail(&error, Some(bytes)),
            Frame::Foreign(error) => self.fail(&error, None),
        }
    }

    /// Ends as a success. The facts are in the spool before the terminal bytes go out, and who owns the response is on
    /// the disk (DESIGN.md, section 4, step 8).
    fn complete(&mut self, class: Class) {
        if let Some(copy) = &mut self.copy {
            copy.keep_in(self.flight.deposit(), StatusCode::OK);
        }
        self.flight.succeeded(class, self.feed.learnt(), 200);
        self.flight.flush();
        self.seal = self.flight.seal();
        (self.ended, self.rest) = (true, REST_BYTES_MAX);
    }

    /// The same where the last event has been read already: it is the last of what waits.
    pub fn complete_with_last(&mut self, class: Class) {
        self.complete(class);
        self.last = self.ready.pop_back().unwrap_or_default();
    }

    /// The upstream itself reports an error in mid-stream: its own event goes on to the client, where that is one that
    /// clients understand, unless it is about the gateway's account there. In words that are none of the dialect nothing
    /// is said of the response.
    fn fail(&mut self, error: &UpstreamError, event: Option<Bytes>) {
        let verdict = classify::upstream_error(self.feed.endpoint, error, Time::wall_clock());
        if event.is_none() && self.flight.outlasts_its_stream() {
            return self.break_off(&verdict);
        }
        if self.flight.is_errand() {
            // How the response ended was the question, and the send that made it has the failure on record.
            self.flight.succeeded(Class::Success, self.feed.learnt(), 200);
            self.flight.flush();
        } else {
            self.land(&verdict);
        }
        let bytes = match event {
            _ if about_the_gateway(verdict.class) => self.interruption(INTERRUPTED),
            Some(bytes) => bytes,
            None if error.message.is_empty() => self.interruption(INTERRUPTED),
            None => self.interruption(&error.message),
        };
        self.end_with(bytes);
    }

    /// The stream was cut or fell silent: the client is told so in its protocol, never shown a clean end.
    fn cut(&mut self, how: Transport) {
        let verdict = classify::transport(how);
        if self.flight.outlasts_its_stream() {
            return self.break_off(&verdict);
        }
        self.land(&verdict);
        let bytes = self.interruption(INTERRUPTED);
        self.end_with(bytes);
    }

    /// Of a response that goes on elsewhere it would be wrong to say that it failed: the connection breaks.
    fn break_off(&mut self, verdict: &Verdict) {
        self.land(verdict);
        (self.ended, self.broken) = (true, true);
    }

    fn interruption(&self, message: &str) -> Bytes {
        self.feed.observer.broken_stream_event(message).into()
    }

    fn land(&mut self, verdict: &Verdict) {
        let landing = Landing { outcome: Outcome::Interrupted, status: Some(200), code: None };
        self.flight.broke_off(verdict, self.feed.learnt(), landing);
    }

    fn end_with(&mut self, bytes: Bytes) {
        self.ended = true;
        self.ready.push_back(bytes);
    }

    /// Waits until the feed has been silent for too long.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        std::task::ready!(self.silence.poll(cx, self.feed.last_read.max(self.last_taken)));
        self.cut(Transport::IdleTimeout);
        Poll::Ready(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if let Some(class) = self.feed.at_eof().and_then(class_of) {
            // The client left between the last content and the protocol's last word: it has the whole answer.
            self.flight.succeeded(class, self.feed.learnt(), 200);
            self.flight.flush();
            return;
        }
        let verdict = Verdict::ended(Class::Cancelled, Effect::None);
        let landing = Landing { outcome: Outcome::Cancelled, status: Some(200), code: None };
        self.flight.broke_off(&verdict, self.feed.learnt(), landing);
    }
}

/// All of `ready` as one piece.
pub(crate) fn joined(ready: &mut VecDeque<Bytes>) -> Bytes {
    ready.retain(|bytes| !bytes.is_empty());
    match ready.len() {
        1 => ready.pop_front().unwrap_or_default(),
        _ => ready.drain(..).collect::<Vec<Bytes>>().concat().into(),
    }
}

/// How an answer that came to its end is recorded; `None` for an end that is a cut in disguise.
pub fn class_of(terminal: Terminal) -> Option<Class> {
    match terminal {
        Terminal::Complete | Terminal::Pending => Some(Class::Success),
        Terminal::Incomplete | Terminal::Cancelled => Some(Class::Incomplete),
        Terminal::Refused => Some(Class::ContentPolicy),
        Terminal::Unfinished => None,
    }
}
