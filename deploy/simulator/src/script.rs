//! Scripted behaviour: a queue of steps, each with a condition and what is done when it holds.
//!
//! The first step in the queue whose condition holds for a call takes it; a step goes when it has been used `times`
//! times. The same types are the JSON of `POST /__control` and of a script file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::endpoint::Endpoint;
use crate::event::{Framing, LineEnd};
use crate::settings::Settings;

/// A message to a simulator: what to clear, then what to set. As JSON:
///
/// ```
/// let control: waybill_simulator::Control = serde_json::from_str(r#"{
///   "clear_steps": true,
///   "settings": {"name": "up-1", "chunks": 20, "cache": {"open_ai": {"max_rpm_per_key": 15}}},
///   "steps": [
///     {"does": [{"status": {"status": 429, "headers": {"retry-after": "3"}}}]},
///     {"when": {"endpoint": "messages", "session": "s-1"}, "times": 2, "does": [{"cut_after_events": {"events": 3}}]},
///     {"when": {"offers": "shell"}, "does": [{"reply": {"tool_calls": [{"name": "shell", "arguments": {"cmd": "ls"}}]}}]},
///     {"times": null, "does": ["crlf", "comments", {"fragment": {"bytes": 7}}]}
///   ]
/// }"#)?;
/// # assert_eq!(control.steps.len(), 4);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Control {
    /// Drops all steps that are left.
    pub clear_steps: bool,
    /// Empties the call log.
    pub clear_calls: bool,
    /// Forgets the prompt cache and the stored responses.
    pub forget: bool,
    /// Replaces the settings; a changed cache model begins with an empty cache.
    pub settings: Option<Settings>,
    /// Lets every call so far go on from its `pause_after`.
    pub release: bool,
    /// Steps to append to the queue.
    pub steps: Vec<Step>,
}

/// One entry of the queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Which calls it takes.
    #[serde(default)]
    pub when: When,
    /// How many calls it takes; `null` makes it a standing behaviour.
    #[serde(default = "once")]
    pub times: Option<u32>,
    /// What is done, all of it to the same call.
    pub does: Vec<Action>,
    #[serde(skip)]
    seen: u64,
}

fn once() -> Option<u32> {
    Some(1)
}

/// A condition on a call; what is left out holds for every call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct When {
    /// The endpoint called.
    pub endpoint: Option<Endpoint>,
    /// The value of any session header.
    pub session: Option<String>,
    /// The model asked for.
    pub model: Option<String>,
    /// The credential shown.
    pub credential: Option<String>,
    /// Whether a stream is asked for.
    pub stream: Option<bool>,
    /// A tool that must be on offer.
    pub offers: Option<String>,
    /// Takes calls only from the nth on, counted from 1 over those for which the rest holds.
    pub nth: Option<u64>,
}

/// What a condition looks at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traits<'a> {
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) sessions: Vec<&'a str>,
    pub(crate) model: Option<&'a str>,
    pub(crate) credential: Option<&'a str>,
    pub(crate) stream: bool,
    pub(crate) tools: Vec<&'a str>,
}

impl When {
    fn holds(&self, call: &Traits<'_>) -> bool {
        let is = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        (self.endpoint.is_none() || self.endpoint == call.endpoint)
            && self.session.as_deref().is_none_or(|session| call.sessions.contains(&session))
            && is(&self.model, call.model)
            && is(&self.credential, call.credential)
            && self.stream.is_none_or(|stream| stream == call.stream)
            && self.offers.as_deref().is_none_or(|tool| call.tools.contains(&tool))
    }
}

/// One thing to do to a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Answers with a status and a body instead of an answer.
    Status {
        /// The HTTP status.
        status: u16,
        /// Headers beside or instead of the usual ones.
        #[serde(default)]
        headers: BTreeMap<String, String>,
        /// A string is sent as it is, another value as JSON; `null` sends the dialect's own error for the status.
        #[serde(default)]
        body: Value,
    },
    /// Accepts the request and never answers.
    Hang,
    /// Resets the connection without an answer.
    Reset,
    /// Waits before the head.
    DelayHead {
        /// For how many milliseconds.
        ms: u64,
    },
    /// Resets the connection after so many events; in a JSON answer after half the body.
    CutAfterEvents {
        /// How many events are written first.
        events: u32,
    },
    /// Ends the body properly after so many events; a JSON answer ends after half.
    EndAfterEvents {
        /// How many events are written first.
        events: u32,
    },
    /// Falls silent for ever after so many events, the connection kept open; 0 sends a head and nothing else.
    StallAfterEvents {
        /// How many events are written first.
        events: u32,
    },
    /// Waits after so many events until it is released; a JSON answer waits before its body.
    PauseAfter {
        /// How many events are written first.
        events: u32,
    },
    /// Sends an error event after so many events and ends.
    ErrorEventAfter {
        /// How many events are written first.
        events: u32,
        /// The event's data; `null` sends the dialect's own "overloaded" error.
        #[serde(default)]
        body: Value,
    },
    /// Answers 200 with a page of HTML.
    Html,
    /// Answers 200 with the right content type and an empty body.
    EmptyStream,
    /// Answers 200 with an error object.
    JsonErrorIn200 {
        /// The object; `null` sends the dialect's own server error.
        #[serde(default)]
        body: Value,
    },
    /// Ends an answer of Responses as incomplete, at the limit of its output.
    Incomplete,
    /// Leaves the terminal event out and ends properly.
    NoDone,
    /// Keeps the connection open after the terminal event.
    HoldAfterDone,
    /// Streams to a request for JSON, and the other way round.
    SwapShape,
    /// Writes at most so many bytes at a time.
    Fragment {
        /// The length of a write.
        bytes: usize,
    },
    /// Ends lines in `\r\n`.
    Crlf,
    /// Ends lines in `\r`.
    Cr,
    /// Writes a comment before every event.
    Comments,
    /// Writes a ping before every event but the first: a `ping` event in Messages, a comment elsewhere.
    Pings,
    /// Makes one delta of so many MiB.
    HugeEvent {
        /// Its length in MiB.
        mib: usize,
    },
    /// Sends text beyond ASCII and ends a write inside every such character.
    SplitUtf8,
    /// Answers in another number of chunks.
    Chunks {
        /// How many.
        chunks: usize,
    },
    /// Adds headers to the answer, whatever it is.
    Headers {
        /// Name and value.
        headers: BTreeMap<String, String>,
    },
    /// Packs the body with gzip, though it was asked not to; every write is flushed.
    Gzip {
        /// Leaves out the end of the packing.
        #[serde(default)]
        cut: bool,
    },
    /// Says this instead of lorem ipsum.
    Reply(Reply),
}

/// A scripted answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reply {
    /// Its text, streamed word by word.
    pub text: Option<String>,
    /// Its tool calls, in order.
    pub tool_calls: Vec<ToolCall>,
}

/// A call of a tool in a scripted answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments.
    pub arguments: Value,
}

impl Reply {
    /// An answer of text.
    pub fn text(text: &str) -> Self {
        Self { text: Some(text.to_owned()), tool_calls: Vec::new() }
    }

    /// An answer that calls one tool.
    pub fn call(name: &str, arguments: Value) -> Self {
        Self { text: None, tool_calls: vec![ToolCall { name: name.to_owned(), arguments }] }
    }
}

impl Action {
    /// A bare status with the dialect's own error body.
    pub fn status(status: u16) -> Self {
        Self::Status { status, headers: BTreeMap::new(), body: Value::Null }
    }

    /// A status with `Retry-After` in seconds and the dialect's own error body.
    pub fn status_retry_after(status: u16, seconds: u32) -> Self {
        let headers = BTreeMap::from([("retry-after".to_owned(), seconds.to_string())]);
        Self::Status { status, headers, body: Value::Null }
    }
}

impl From<Action> for Step {
    fn from(action: Action) -> Self {
        Self::new([action])
    }
}

impl Step {
    /// A step that does all of `does` to the next call, whichever it is.
    pub fn new(does: impl IntoIterator<Item = Action>) -> Self {
        Self { when: When::default(), times: Some(1), does: does.into_iter().collect(), seen: 0 }
    }

    /// The same step for calls for which `when` holds.
    pub fn when(self, when: When) -> Self {
        Self { when, ..self }
    }

    /// The same step for calls of one endpoint.
    pub fn on(mut self, endpoint: Endpoint) -> Self {
        self.when.endpoint = Some(endpoint);
        self
    }

    /// The same step for the next `times` calls.
    pub fn times(self, times: u32) -> Self {
        Self { times: Some(times), ..self }
    }

    /// The same step for all calls to come.
    pub fn standing(self) -> Self {
        Self { times: None, ..self }
    }

    fn takes(&mut self, call: &Traits<'_>) -> bool {
        if !self.when.holds(call) {
            return false;
        }
        self.seen += 1;
        self.when.nth.is_none_or(|nth| self.seen >= nth)
    }
}

/// The steps that are left.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue(Vec<Step>);

impl Queue {
    pub(crate) fn extend(&mut self, steps: impl IntoIterator<Item = Step>) {
        self.0.extend(steps);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// What is to be done to a call; nothing when no step takes it.
    pub(crate) fn take(&mut self, call: &Traits<'_>) -> Vec<Action> {
        let Some(at) = self.0.iter_mut().position(|step| step.times != Some(0) && step.takes(call)) else {
            return Vec::new();
        };
        let step = &mut self.0[at];
        let does = step.does.clone();
        step.times = step.times.map(|times| times - 1);
        self.0.retain(|step| step.times != Some(0));
        does
    }
}

/// How a stream ends, if not in its terminal event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Break {
    Cut,
    End,
    Stall,
    Error(Value),
}

/// What stands in place of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Instead {
    Status { status: u16, headers: BTreeMap<String, String>, body: Value },
    Html,
    Empty,
    JsonError(Value),
}

/// The actions of one call, sorted by what they bear on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) hangs: bool,
    pub(crate) resets: bool,
    pub(crate) delay_head_ms: u64,
    pub(crate) instead: Option<Instead>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) breaks: Option<(u32, Break)>,
    pub(crate) pause_after: Option<u32>,
    pub(crate) incomplete: bool,
    pub(crate) no_done: bool,
    pub(crate) holds: bool,
    pub(crate) swaps_shape: bool,
    pub(crate) framing: Framing,
    pub(crate) comments: bool,
    pub(crate) pings: bool,
    pub(crate) huge_mib: Option<usize>,
    pub(crate) chunks: Option<usize>,
    pub(crate) reply: Option<Reply>,
    pub(crate) gzip: Option<Gzip>,
}

/// How a body is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gzip {
    pub(crate) is_cut: bool,
}

impl Plan {
    pub(crate) fn new(actions: &[Action]) -> Self {
        let mut plan = Self::default();
        for action in actions {
            plan.add(action.clone());
        }
        plan
    }

    fn add(&mut self, action: Action) {
        match action {
            Action::Status { status, headers, body } => self.instead = Some(Instead::Status { status, headers, body }),
            Action::Hang => self.hangs = true,
            Action::Reset => self.resets = true,
            Action::DelayHead { ms } => self.delay_head_ms = ms,
            Action::CutAfterEvents { events } => self.breaks = Some((events, Break::Cut)),
            Action::EndAfterEvents { events } => self.breaks = Some((events, Break::End)),
            Action::StallAfterEvents { events } => self.breaks = Some((events, Break::Stall)),
            Action::PauseAfter { events } => self.pause_after = Some(events),
            Action::ErrorEventAfter { events, body } => self.breaks = Some((events, Break::Error(body))),
            Action::Html => self.instead = Some(Instead::Html),
            Action::EmptyStream => self.instead = Some(Instead::Empty),
            Action::JsonErrorIn200 { body } => self.instead = Some(Instead::JsonError(body)),
            Action::Incomplete => self.incomplete = true,
            Action::NoDone => self.no_done = true,
            Action::HoldAfterDone => self.holds = true,
            Action::SwapShape => self.swaps_shape = true,
            Action::Fragment { bytes } => self.framing.fragment_bytes = Some(bytes),
            Action::Crlf => self.framing.line_end = LineEnd::Crlf,
            Action::Cr => self.framing.line_end = LineEnd::Cr,
            Action::Comments => self.comments = true,
            Action::Pings => self.pings = true,
            Action::HugeEvent { mib } => self.huge_mib = Some(mib),
            Action::SplitUtf8 => self.framing.splits_utf8 = true,
            Action::Chunks { chunks } => self.chunks = Some(chunks),
            Action::Headers { headers } => self.headers.extend(headers),
            Action::Gzip { cut } => self.gzip = Some(Gzip { is_cut: cut }),
            Action::Reply(reply) => self.reply = Some(reply),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads a script, shows it calls of (endpoint, session) and compares which status each of them got, 0 for none.
    #[track_caller]
    fn check(script: Value, calls: &[(Endpoint, &str)], expected: &[u16]) {
        let control: Control = serde_json::from_value(script).expect("a script of the documented form");
        let mut queue = Queue::default();
        queue.extend(control.steps);
        let status = |(endpoint, session): &(Endpoint, &str)| {
            let traits = Traits { endpoint: Some(*endpoint), sessions: vec![session], ..Traits::default() };
            match queue.take(&traits).first() {
                Some(Action::Status { status, .. }) => *status,
                _ => 0,
            }
        };
        assert_eq!(calls.iter().map(status).collect::<Vec<_>>(), expected);
    }

    const CHAT: (Endpoint, &str) = (Endpoint::Chat, "a");

    #[test]
    fn steps_are_used_up_in_order() {
        let script = json!({"steps": [
            {"does": [{"status": {"status": 500}}]},
            {"times": 2, "does": [{"status": {"status": 503}}]},
        ]});
        check(script, &[CHAT; 4], &[500, 503, 503, 0]);
    }

    #[test]
    fn a_standing_step_serves_for_ever() {
        check(json!({"steps": [{"times": null, "does": [{"status": {"status": 429}}]}]}), &[CHAT; 3], &[429; 3]);
    }

    #[test]
    fn a_step_waits_for_its_condition() {
        let script = json!({"steps": [
            {"when": {"endpoint": "messages"}, "does": [{"status": {"status": 529}}]},
            {"when": {"session": "b"}, "does": [{"status": {"status": 401}}]},
            {"when": {"endpoint": "chat", "nth": 2}, "does": [{"status": {"status": 400}}]},
        ]});
        let calls = [CHAT, (Endpoint::Messages, "a"), (Endpoint::Responses, "b"), CHAT, CHAT];
        check(script, &calls, &[0, 529, 401, 400, 0]);
    }

    #[test]
    fn unknown_fields_of_a_script_are_refused() {
        let script = json!({"steps": [{"does": ["hang"], "time": 3}]});
        assert!(serde_json::from_value::<Control>(script).is_err());
    }
}
