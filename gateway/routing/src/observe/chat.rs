//! Chat Completions: chunks with deltas, a finish reason, perhaps a usage chunk, then `[DONE]`.
//!
//! Whatever a delta holds besides its role is output: providers disagree on the names of reasoning.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::lenient::{Chars, Text};
use super::{Frame, Observer, Terminal, usage};
use crate::classify::UpstreamError;

#[derive(Deserialize, Default)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    id: Text<'a>,
    #[serde(borrow, default)]
    model: Text<'a>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// One choice of a chunk or of an answer.
#[derive(Deserialize, Default)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    delta: Chars,
    #[serde(default)]
    message: Chars,
    #[serde(default)]
    text: Chars,
    #[serde(borrow, default)]
    finish_reason: Text<'a>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

impl Choice<'_> {
    /// Characters of output.
    pub(super) fn chars(&self) -> u64 {
        self.delta.0 + self.message.0 + self.text.0
    }

    /// How this choice ended, if it did.
    pub(super) fn terminal(&self) -> Option<Terminal> {
        Some(match self.finish_reason.get()? {
            "length" => Terminal::Incomplete,
            "content_filter" => Terminal::Refused,
            _ => Terminal::Complete,
        })
    }

    /// Whether the upstream says that it failed in making this choice, whatever it had made of it.
    pub(super) fn failed(&self) -> bool {
        self.error.is_some() || self.finish_reason.get() == Some("error")
    }
}

/// The end of several choices is the worst of theirs.
pub(super) fn worst(one: Option<Terminal>, other: Option<Terminal>) -> Option<Terminal> {
    let rank = |terminal: &Terminal| match terminal {
        Terminal::Complete => 0,
        Terminal::Incomplete => 1,
        Terminal::Refused => 2,
        Terminal::Pending | Terminal::Cancelled | Terminal::Unfinished => 3,
    };
    one.into_iter().chain(other).max_by_key(rank)
}

impl Observer {
    pub(super) fn chat_chunk(&mut self, name: Option<&str>, data: &str) -> Frame {
        let Ok(chunk) = serde_json::from_str::<Chunk<'_>>(data) else { return super::unknown(name, data) };
        self.identify(chunk.id.get(), chunk.model.get());
        let usage = usage::openai(chunk.usage);
        self.usage = usage.unwrap_or(self.usage);
        if chunk.choices.is_none() && chunk.error.is_none() && usage.is_none() {
            return super::unknown(name, data);
        }
        let choices = chunk.choices.unwrap_or_default();
        if chunk.error.is_some() || choices.iter().any(Choice::failed) {
            return Frame::Error(UpstreamError::read(data.as_bytes()));
        }
        if choices.is_empty() {
            return if usage.is_some() { Frame::UsageOnly } else { Frame::Lifecycle };
        }
        let mut chars = 0;
        for choice in &choices {
            chars += choice.chars();
            self.finish = worst(self.finish, choice.terminal());
        }
        self.output(chars)
    }
}

pub(super) fn broken_stream_event(message: &str) -> Vec<u8> {
    let error = json!({
        "message": message, "type": "server_error", "param": null, "code": "upstream_stream_interrupted",
    });
    super::sse(None, &json!({ "error": error }))
}
