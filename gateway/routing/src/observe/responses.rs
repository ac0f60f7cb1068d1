//! Responses: numbered events named by their type, ended by `response.completed`, `.incomplete` or `.failed`.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::lenient::{Chars, Count, Text, part};
use super::{Frame, Observer, Terminal, usage};
use crate::classify::UpstreamError;

#[derive(Deserialize, Default)]
struct Event<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Text<'a>,
    #[serde(default)]
    sequence_number: Count,
    #[serde(default)]
    delta: Chars,
    #[serde(borrow, default)]
    item: Option<&'a RawValue>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
}

/// A response object, in an event or as the whole answer.
#[derive(Deserialize, Default)]
pub(super) struct Response<'a> {
    #[serde(borrow, default)]
    pub(super) id: Text<'a>,
    #[serde(borrow, default)]
    pub(super) model: Text<'a>,
    #[serde(borrow, default)]
    pub(super) object: Text<'a>,
    #[serde(borrow, default)]
    pub(super) status: Text<'a>,
    #[serde(default)]
    created_at: Count,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) output: Option<&'a RawValue>,
    #[serde(borrow, default)]
    incomplete_details: Option<&'a RawValue>,
}

impl Response<'_> {
    /// How the response stands; one without a status is taken as complete.
    pub(super) fn terminal(&self) -> Terminal {
        let reason = part::<Incomplete<'_>>(self.incomplete_details);
        match self.status.get() {
            Some("incomplete") if reason.reason.get() == Some("content_filter") => Terminal::Refused,
            Some("incomplete") => Terminal::Incomplete,
            Some("cancelled") => Terminal::Cancelled,
            Some("queued" | "in_progress") => Terminal::Pending,
            _ => Terminal::Complete,
        }
    }

    /// Whether it holds any output.
    pub(super) fn has_output(&self) -> bool {
        part::<Chars>(self.output).0 > 0
    }
}

#[derive(Deserialize, Default)]
struct Incomplete<'a> {
    #[serde(borrow, default)]
    reason: Text<'a>,
}

impl Observer {
    pub(super) fn responses_event(&mut self, name: Option<&str>, data: &str) -> Frame {
        let Ok(event) = serde_json::from_str::<Event<'_>>(data) else { return super::unknown(name, data) };
        self.sequence_number = event.sequence_number.0.or(self.sequence_number);
        let kind = event.kind.get().or(name).unwrap_or_default();
        if kind.ends_with(".delta") {
            return self.output(event.delta.0);
        }
        match kind {
            "response.created" => {
                self.snapshot(event.response);
                Frame::Lifecycle
            }
            "response.completed" | "response.incomplete" | "response.cancelled" => {
                let response = self.snapshot(event.response);
                self.meaningful = self.meaningful || response.has_output();
                self.finish = Some(response.terminal());
                Frame::Terminal(response.terminal())
            }
            "response.failed" => {
                self.snapshot(event.response);
                Frame::Error(UpstreamError::read(data.as_bytes()))
            }
            // Clients go by the type in the data.
            "error" if event.kind.get().is_some() => Frame::Error(UpstreamError::read(data.as_bytes())),
            // An item may come whole, without deltas: encrypted reasoning, a call.
            "response.output_item.done" if self.meaningful || part::<Chars>(event.item).0 > 0 => Frame::Meaningful,
            "response.image_generation_call.partial_image" => Frame::Meaningful,
            kind if kind.starts_with("response.") => Frame::Lifecycle,
            _ => super::unknown(name, data),
        }
    }

    /// Takes what a response object says of itself.
    fn snapshot<'a>(&mut self, response: Option<&'a RawValue>) -> Response<'a> {
        let response: Response<'_> = part(response);
        self.identify(response.id.get(), response.model.get());
        self.created_at = response.created_at.0.unwrap_or(self.created_at);
        self.usage = usage::openai(response.usage).unwrap_or(self.usage);
        response
    }

    /// `response.failed`, with every field that the models of official clients require.
    pub(super) fn responses_broken_stream_event(&self, message: &str) -> Vec<u8> {
        let response = json!({
            "id": self.response_id.as_deref().unwrap_or("resp_interrupted"),
            "object": "response",
            "created_at": self.created_at,
            "completed_at": null,
            "status": "failed",
            "background": false,
            "error": { "code": "server_error", "message": message },
            "incomplete_details": null,
            "instructions": null,
            "max_output_tokens": null,
            "max_tool_calls": null,
            "metadata": {},
            "model": self.served_model.as_ref().map_or("", |model| model.as_str()),
            "output": [],
            "parallel_tool_calls": true,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "previous_response_id": null,
            "prompt_cache_key": null,
            "reasoning": { "effort": null, "summary": null },
            "safety_identifier": null,
            "service_tier": "default",
            "store": false,
            "temperature": 1.0,
            "text": { "format": { "type": "text" } },
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": null,
            "user": null,
        });
        let sequence_number = self.sequence_number.map_or(0, |last| last + 1);
        let event = json!({ "type": "response.failed", "sequence_number": sequence_number, "response": response });
        super::sse(Some("response.failed"), &event)
    }
}
