//! What an answer says: each event of a stream as it passes, or a JSON answer as a whole, in the endpoint's dialect.
//!
//! An [`Observer`] reads events and changes none. It tells what may still be failed over (lifecycle frames are not
//! output), when the answer has ended and how, and collects what is recorded: usage, model, response id. It runs for
//! every event of every stream, so it builds no tree of a delta and allocates nothing for one.
//!
//! Providers add fields and send odd types; a field that is not what it should be counts as absent.

mod chat;
mod foreign;
mod lenient;
mod messages;
mod responses;
mod usage;
mod whole;

use waybill_schema::event::{Endpoint, Usage};
use waybill_schema::id::ModelName;

use crate::classify::UpstreamError;

pub use whole::{Fault, Whole, json};

/// The longest name that an upstream may give its model or its response, in bytes: names go on record, and a fact that
/// is too large for its record is lost.
const NAME_BYTES_MAX: usize = 512;

/// What one event of a stream is.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// No output: a comment, a ping, a role, `response.created`, a finish reason, an event that nobody knows.
    Lifecycle,
    /// Output: text, reasoning, a refusal's text, a tool call.
    Meaningful,
    /// A Chat chunk without choices that carries the usage: clients that did not ask for it must not see it.
    UsageOnly,
    /// The last event of the answer.
    Terminal(Terminal),
    /// The upstream says that it failed.
    Error(UpstreamError),
    /// The same in words that a client of the dialect would not understand.
    Foreign(UpstreamError),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terminal {
    /// It is complete.
    Complete,
    /// The upstream stopped at a limit of length.
    Incomplete,
    /// The provider's content policy ended it.
    Refused,
    /// It is accepted and worked on in the background.
    Pending,
    /// A client had it stopped.
    Cancelled,
    /// The end marker came without the reason that belongs before it: a cut that a relay dressed as an end.
    Unfinished,
}

impl Terminal {
    /// Whether a response that ended so can be gone on from (DESIGN.md section 10, "ended streams").
    pub fn can_be_continued(self) -> bool {
        match self {
            Self::Complete | Self::Incomplete | Self::Refused => true,
            Self::Pending | Self::Cancelled | Self::Unfinished => false,
        }
    }

    /// Whether there is a reason that such an answer holds nothing.
    fn excuses(self) -> bool {
        match self {
            Self::Incomplete | Self::Refused | Self::Pending | Self::Cancelled => true,
            Self::Complete | Self::Unfinished => false,
        }
    }
}

/// How a stream's events are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Responses,
    Messages,
    /// They are not: its answers come in one piece, or pass as they are.
    Unread,
}

impl Kind {
    fn of(endpoint: Endpoint) -> Self {
        match endpoint {
            Endpoint::Chat | Endpoint::Completions => Self::Chat,
            Endpoint::Responses => Self::Responses,
            Endpoint::Messages => Self::Messages,
            Endpoint::CountTokens | Endpoint::Embeddings => Self::Unread,
            Endpoint::ImageGenerations
            | Endpoint::ImageEdits
            | Endpoint::Speech
            | Endpoint::Transcriptions
            | Endpoint::Translations
            | Endpoint::Videos
            | Endpoint::Music
            | Endpoint::Moderations
            | Endpoint::Rerank => Self::Unread,
        }
    }
}

/// Reads the events of one stream.
#[derive(Debug)]
pub struct Observer {
    kind: Kind,
    usage: Usage,
    served_model: Option<ModelName>,
    response_id: Option<Box<str>>,
    created_at: u64,
    sequence_number: Option<u64>,
    /// How the answer will have ended once its end marker comes.
    finish: Option<Terminal>,
    ended: bool,
    meaningful: bool,
    output_chars: u64,
}

impl Observer {
    /// An observer at the beginning of a stream of `endpoint`'s dialect.
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            kind: Kind::of(endpoint),
            usage: Usage::default(),
            served_model: None,
            response_id: None,
            created_at: 0,
            sequence_number: None,
            finish: None,
            ended: false,
            meaningful: false,
            output_chars: 0,
        }
    }

    /// Reads one event by its name and its data, which is empty for an event without.
    pub fn event(&mut self, name: Option<&str>, data: &[u8]) -> Frame {
        // Checked once here; a reader of bytes would check every text in them again.
        let Ok(data) = std::str::from_utf8(data) else { return Frame::Lifecycle };
        let frame = match self.kind {
            _ if data.trim_ascii() == "[DONE]" => self.done(),
            Kind::Chat => self.chat_chunk(name, data),
            Kind::Responses => self.responses_event(name, data),
            Kind::Messages => self.messages_event(name, data),
            Kind::Unread => Frame::Lifecycle,
        };
        self.meaningful |= matches!(frame, Frame::Meaningful);
        self.ended |= matches!(frame, Frame::Terminal(_));
        frame
    }

    /// Reads what stands in a stream and is no event: some upstreams send their errors as plain JSON.
    pub fn stray(&self, raw: &[u8]) -> Frame {
        std::str::from_utf8(raw).map_or(Frame::Lifecycle, |raw| unknown(None, raw))
    }

    /// The end that the stream has come to if it closes here; `None` where that would be a cut.
    ///
    /// Chat streams may close after a finish reason without `[DONE]`.
    pub fn at_eof(&self) -> Option<Terminal> {
        match self.kind {
            _ if self.ended => Some(self.finish.unwrap_or(Terminal::Unfinished)),
            Kind::Chat => self.finish,
            Kind::Responses | Kind::Messages | Kind::Unread => None,
        }
    }

    /// Whether the stream is whole without its last event, Chat's `[DONE]`, which has not come.
    pub fn lacks_done(&self) -> bool {
        self.kind == Kind::Chat && !self.ended && self.finish.is_some()
    }

    /// Whether a stream that ended without an error held nothing: no output, no tokens of output, and no reason for it.
    pub fn is_empty(&self) -> bool {
        let excused = self.finish.is_some_and(Terminal::excuses);
        !self.meaningful && !excused && self.usage.output.known().unwrap_or(0) == 0
    }

    /// Whether any output has come.
    pub fn has_output(&self) -> bool {
        self.meaningful
    }

    /// Tokens as the upstream reported them so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The model that the upstream named.
    pub fn served_model(&self) -> Option<&ModelName> {
        self.served_model.as_ref()
    }

    /// The id that the upstream gave the response.
    pub fn response_id(&self) -> Option<&str> {
        self.response_id.as_deref()
    }

    /// The last sequence number of a Responses stream.
    pub fn sequence_number(&self) -> Option<u64> {
        self.sequence_number
    }

    /// Characters of output so far, to estimate tokens by where none were reported.
    pub fn output_chars(&self) -> u64 {
        self.output_chars
    }

    /// The event that tells the client, in its dialect, that the stream broke off: of a type that clients retry.
    pub fn broken_stream_event(&self, message: &str) -> Vec<u8> {
        match self.kind {
            Kind::Chat | Kind::Unread => chat::broken_stream_event(message),
            Kind::Responses => self.responses_broken_stream_event(message),
            Kind::Messages => messages::broken_stream_event(message),
        }
    }

    /// The marker that ends Chat streams; other dialects' streams are not ended by it.
    fn done(&mut self) -> Frame {
        match self.kind {
            _ if self.ended => Frame::Lifecycle,
            Kind::Chat => Frame::Terminal(self.finish.unwrap_or(Terminal::Unfinished)),
            Kind::Responses | Kind::Messages => Frame::Terminal(Terminal::Unfinished),
            Kind::Unread => Frame::Lifecycle,
        }
    }

    fn output(&mut self, chars: u64) -> Frame {
        self.output_chars += chars;
        if chars > 0 { Frame::Meaningful } else { Frame::Lifecycle }
    }

    /// Keeps the first model and id that say something: some upstreams begin with empty ones.
    fn identify(&mut self, id: Option<&str>, model: Option<&str>) {
        if self.response_id.is_none() {
            self.response_id = id.filter(|id| is_name(id)).map(Into::into);
        }
        if self.served_model.is_none() {
            self.served_model = model.filter(|model| is_name(model)).map(Into::into);
        }
    }
}

/// An event of no kind that the dialect knows: an error of another, or nothing.
fn unknown(name: Option<&str>, data: &str) -> Frame {
    foreign::error(name, data).map_or(Frame::Lifecycle, Frame::Foreign)
}

fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

/// An event as it goes over the wire.
fn sse(name: Option<&str>, data: &serde_json::Value) -> Vec<u8> {
    let name = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    format!("{name}data: {data}\n\n").into_bytes()
}

#[cfg(test)]
mod tests;
