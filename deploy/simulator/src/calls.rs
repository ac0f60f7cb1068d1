//! The call log: what a simulator was asked and what it did, the oracle of every test above it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde::{Serialize, Serializer};
use serde_json::Value;
use tokio::sync::watch;

use crate::answer::Usage;
use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::script::Action;
use crate::socket::Line;

/// Headers by which clients name their session.
pub const SESSION_HEADERS: [&str; 9] = [
    "x-session-id",
    "x-session-affinity",
    "x-parent-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "conversation_id",
    "x-grok-conv-id",
];

/// One request and what became of it.
#[derive(Clone, Debug, Serialize)]
pub struct Call {
    /// Counted from 1 over the life of the simulator.
    pub number: u64,
    /// When its head had arrived, in milliseconds since 1970.
    pub at_ms: i64,
    /// The connection it came on, counted from 1.
    pub connection: u64,
    /// The HTTP method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The bytes as they came; empty when the settings do not keep them.
    #[serde(serialize_with = "as_text")]
    pub body: Bytes,
    /// The length of the body in bytes.
    pub body_bytes: usize,
    /// The SHA-256 of the body in hex.
    pub body_sha256: String,
    /// The API; none for an unknown path.
    pub endpoint: Option<Endpoint>,
    /// The `model` of the body.
    pub model: Option<String>,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// The bearer token or API key.
    pub credential: Option<String>,
    /// The session headers among the headers.
    pub sessions: Vec<(String, String)>,
    /// What a script step did to it; empty without a step.
    pub did: Vec<Action>,
    /// The status, once a head was sent.
    pub status: Option<u16>,
    /// Events written whole and flushed; a JSON body is one.
    pub events: u32,
    /// Whether the terminal event, or the whole of a JSON body, was written.
    pub terminal: bool,
    /// The tokens of the answer, whether or not it came to report them.
    pub usage: Option<Usage>,
    /// The usage object of the dialect, as the whole answer has it.
    pub reported_usage: Option<Value>,
    /// The id of a Responses answer.
    pub response_id: Option<String>,
    /// How it ended; none while it is under way.
    pub end: Option<End>,
    /// When it ended, in milliseconds since 1970.
    pub ended_at_ms: Option<i64>,
}

fn as_text<S: Serializer>(body: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&String::from_utf8_lossy(body))
}

impl Call {
    /// The value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// All that was to be written was written.
    Finished,
    /// The simulator reset the connection, by its script.
    Reset,
    /// The client went away before.
    ClientGone,
    /// The simulator was killed.
    Killed,
}

/// The log of one simulator.
#[derive(Debug)]
pub(crate) struct CallLog {
    kept: Mutex<Kept>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    calls: VecDeque<Call>,
    count: u64,
}

impl CallLog {
    pub(crate) fn new() -> Self {
        Self { kept: Mutex::default(), changes: watch::Sender::new(0) }
    }

    /// Enters a call under the next number; the oldest goes when there are more than `calls_max`.
    pub(crate) fn enter(&self, mut call: Call, calls_max: usize) -> u64 {
        let mut kept = self.kept();
        kept.count += 1;
        call.number = kept.count;
        kept.calls.push_back(call);
        if kept.calls.len() > calls_max {
            kept.calls.pop_front();
        }
        let number = kept.count;
        drop(kept);
        self.changed();
        number
    }

    pub(crate) fn all(&self) -> Vec<Call> {
        self.kept().calls.iter().cloned().collect()
    }

    pub(crate) fn after(&self, number: u64) -> Vec<Call> {
        self.kept().calls.iter().filter(|call| call.number > number).cloned().collect()
    }

    pub(crate) fn clear(&self) {
        self.kept().calls.clear();
        self.changed();
    }

    pub(crate) async fn wait_for(&self, holds: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(calls) = self.if_holds(&holds) {
                return calls;
            }
            changes.changed().await.expect("the log owns the sender and is borrowed here");
        }
    }

    fn if_holds(&self, holds: impl Fn(&[Call]) -> bool) -> Option<Vec<Call>> {
        let mut kept = self.kept();
        let calls = kept.calls.make_contiguous();
        holds(calls).then(|| calls.to_vec())
    }

    fn update(&self, number: u64, change: impl FnOnce(&mut Call)) {
        let mut kept = self.kept();
        let first = kept.calls.front().map_or(0, |call| call.number);
        let at = number.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(call) = at.and_then(|at| kept.calls.get_mut(at)).filter(|call| call.number == number) {
            change(call);
        }
        drop(kept);
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|n| *n += 1);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes one call's further fate; dropped before the end, it says who broke off.
pub(crate) struct Recorder {
    pub(crate) log: Arc<CallLog>,
    pub(crate) clock: Clock,
    pub(crate) line: Arc<Line>,
    pub(crate) number: u64,
    pub(crate) has_ended: bool,
}

impl Recorder {
    pub(crate) fn update(&self, change: impl FnOnce(&mut Call)) {
        self.log.update(self.number, change);
    }

    pub(crate) fn wrote(&self, terminal: bool) {
        self.update(|call| {
            call.events += 1;
            call.terminal |= terminal;
        });
    }

    pub(crate) fn end(&mut self, end: End) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let now_ms = self.clock.now_ms();
        self.update(|call| {
            call.end = Some(end);
            call.ended_at_ms = Some(now_ms);
        });
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end(if self.line.is_resetting() { End::Killed } else { End::ClientGone });
    }
}
