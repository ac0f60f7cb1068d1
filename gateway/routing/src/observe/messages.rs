//! Anthropic Messages: `message_start`, blocks, `message_delta` with the stop reason, `message_stop`.
//!
//! Usage comes in two parts whose counts only grow, and its input leaves out what the cache gave and took.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::lenient::{Chars, Text, part};
use super::{Frame, Observer, Terminal, usage};
use crate::classify::UpstreamError;

#[derive(Deserialize, Default)]
struct Event<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content_block: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

/// A message object, in `message_start` or as the whole answer.
#[derive(Deserialize, Default)]
pub(super) struct Message<'a> {
    #[serde(borrow, default)]
    pub(super) id: Text<'a>,
    #[serde(borrow, default)]
    pub(super) model: Text<'a>,
    #[serde(borrow, rename = "type", default)]
    pub(super) kind: Text<'a>,
    #[serde(borrow, default)]
    pub(super) stop_reason: Text<'a>,
    #[serde(borrow, default)]
    pub(super) content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
struct Stop<'a> {
    #[serde(borrow, default)]
    stop_reason: Text<'a>,
}

/// How a stop reason ends a message.
pub(super) fn terminal(stop_reason: &str) -> Terminal {
    match stop_reason {
        "max_tokens" | "model_context_window_exceeded" => Terminal::Incomplete,
        "refusal" => Terminal::Refused,
        _ => Terminal::Complete,
    }
}

impl Observer {
    pub(super) fn messages_event(&mut self, name: Option<&str>, data: &str) -> Frame {
        let Ok(event) = serde_json::from_str::<Event<'_>>(data) else { return super::unknown(name, data) };
        let kind = event.kind.get().or(name).unwrap_or_default();
        match kind {
            // Anything in a delta, or in a block from its beginning (a call's name, redacted thinking), is output.
            "content_block_delta" => self.output(part::<Chars>(event.delta).0),
            "content_block_start" => self.output(part::<Chars>(event.content_block).0),
            "message_start" => {
                let message: Message<'_> = part(event.message);
                self.identify(message.id.get(), message.model.get());
                self.usage = usage::anthropic(self.usage, message.usage);
                Frame::Lifecycle
            }
            "message_delta" => {
                self.usage = usage::anthropic(self.usage, event.usage);
                self.finish = part::<Stop<'_>>(event.delta).stop_reason.get().map(terminal).or(self.finish);
                Frame::Lifecycle
            }
            "message_stop" => Frame::Terminal(self.finish.unwrap_or(Terminal::Unfinished)),
            // Clients go by the event's name.
            "error" if name == Some("error") => Frame::Error(UpstreamError::read(data.as_bytes())),
            "content_block_stop" | "ping" => Frame::Lifecycle,
            _ => super::unknown(name, data),
        }
    }
}

pub(super) fn broken_stream_event(message: &str) -> Vec<u8> {
    let error = json!({ "type": "error", "error": { "type": "api_error", "message": message } });
    super::sse(Some("error"), &error)
}
