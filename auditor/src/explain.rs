//! Explain: why a request went where it went, told from its own facts and from nothing else.
//!
//! Every choice is made again from its record, so that an explanation proves itself or says that it cannot.

mod text;

use memchr::memmem::Finder;
use serde::Serialize;
use waybill_events::log::{Log, ReadError, Seq};
use waybill_projections::read::{self, Unread};
use waybill_projections::usage::request_of;
use waybill_projections::word::Word;
use waybill_schema::event::{
    Attempt, Candidate, Class, Context, Event, Fact, Outcome, Ownership, Preference, Request, Selection,
};
use waybill_schema::frame::Frame;
use waybill_schema::id::{RequestId, Revision};
use waybill_schema::time::Time;

use crate::redecide::{Redecision, redecide};
use crate::sessions::inferred;
use crate::usage::{StoreError, UsageStore};

/// A request that has no row yet is looked for in this many frames from the log's end.
pub const SCAN_FRAMES_MAX: u64 = 100_000;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 256;

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// No fact names the request.
    #[error(
        "request `{0}` is not in the log: no usage row names it, nor does any of the last {SCAN_FRAMES_MAX} frames"
    )]
    Unknown(RequestId),
    /// The rows that say where its facts are cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] ReadError),
}

/// Everything the log says of one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The request.
    pub request: RequestId,
    /// Who asked for what; absent where the fact that says so cannot be read.
    pub context: Option<Context>,
    /// Whether the session was inferred from the prompt rather than named (S3.26).
    pub inferred: bool,
    /// What was sent, in order.
    pub sends: Vec<Send>,
    /// The affinity that a success committed, or why there is none.
    pub preference: Committed,
    /// The responses that it came to own.
    pub ownerships: Vec<Noted<Ownership>>,
    /// How it ended.
    pub end: End,
    /// Places in the log that name the request and cannot be read.
    pub unread: Vec<Place>,
}

/// Something said by a fact: which one, and when.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Noted<T> {
    /// The fact.
    pub revision: Revision,
    /// When it happened.
    pub at: Time,
    /// What it says.
    pub says: T,
}

/// One send, from decision to end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Send {
    /// Its number in the request, from 1.
    pub attempt: u16,
    /// The decision; absent where it cannot be read.
    pub selection: Option<Noted<Selection>>,
    /// What comes of deciding again; absent where nothing was chosen.
    pub redecided: Option<Redecision>,
    /// The end; absent while it is under way, and for ever where it was abandoned.
    pub end: Option<Noted<Attempt>>,
}

/// Whether an affinity was committed.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Committed {
    /// It was, with this fact.
    By(Box<Noted<Preference>>),
    /// It was not.
    Not(NotCommitted),
}

/// Why no affinity was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NotCommitted {
    /// The request has no affinity key.
    NoKey,
    /// Nothing has succeeded yet.
    UnderWay,
    /// No send succeeded.
    NoSuccess,
    /// A send succeeded, and the gateway recorded no preference for it.
    NotRecorded,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// As this fact says.
    Ended(Box<Noted<Request>>),
    /// Its gateway died, and nobody recorded an end.
    Abandoned,
    /// It is under way.
    UnderWay,
}

/// A place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The frame's sequence.
    pub seq: u64,
    /// The line in it, from 1.
    pub line: u32,
}

/// Explains `request` from `log`; the rows of `store` say in which of its frames the facts are.
pub fn explain(
    log: &mut dyn Log,
    store: &mut dyn UsageStore,
    request: &RequestId,
) -> Result<Explanation, ExplainError> {
    let row = bounds(store, request)?;
    let abandoned = row.as_ref().is_some_and(|row| row.abandoned);
    let (first, last) = match row {
        Some(row) => (row.first, row.last),
        None => (log.head()?.0.saturating_sub(SCAN_FRAMES_MAX), u64::MAX),
    };
    let trail = trail(log, request, first, last)?;
    if trail.is_empty() {
        return Err(ExplainError::Unknown(request.clone()));
    }
    Ok(trail.explanation(request, abandoned))
}

/// Reads what the frames from `first` to `last` say of the request.
fn trail(log: &mut dyn Log, request: &RequestId, first: u64, last: u64) -> Result<Trail, ReadError> {
    let mut trail = Trail::default();
    let named = Finder::new(request.as_str());
    let mut at = Seq(first.saturating_sub(1));
    loop {
        let frames = log.read(at, READ_FRAMES_MAX)?;
        let Some(newest) = frames.last() else { return Ok(trail) };
        at = newest.seq;
        let within = frames.iter().take_while(|frame| frame.seq.0 <= last);
        for frame in within.filter(|frame| named.find(&frame.bytes).is_some()) {
            let Ok(header) = Frame::header_of(&frame.bytes) else { continue };
            for read in read::facts(&header, &frame.bytes, frame.stored, frame.sent) {
                trail.follow(request, frame.seq, read);
            }
        }
        if at.0 >= last {
            return Ok(trail);
        }
    }
}

struct Row {
    first: u64,
    last: u64,
    abandoned: bool,
}

fn bounds(store: &mut dyn UsageStore, request: &RequestId) -> Result<Option<Row>, StoreError> {
    let sql = "SELECT seq_first, seq_last, outcome FROM usage_events WHERE request_id = $1";
    let Some(mut cells) = store.rows(sql, &[request.as_str().into()])?.into_iter().next() else { return Ok(None) };
    let (first, last) = (cells.count()?, cells.count()?);
    Ok(Some(Row { first, last, abandoned: cells.text()? == "abandoned" }))
}

/// The facts of one request as they are found.
#[derive(Default)]
struct Trail {
    context: Option<Context>,
    sends: Vec<Send>,
    preference: Option<Noted<Preference>>,
    ownerships: Vec<Noted<Ownership>>,
    end: Option<Noted<Request>>,
    unread: Vec<Place>,
}

impl Trail {
    fn follow(&mut self, request: &RequestId, seq: Seq, read: Result<Fact, Unread<'_>>) {
        match read {
            Ok(fact) if request_of(&fact.event) == Some(request) => self.take(fact),
            Ok(_) => {}
            Err(unread) => {
                let name = request.as_str().as_bytes();
                if unread.bytes.windows(name.len().max(1)).any(|window| window == name) {
                    self.unread.push(Place { seq: seq.0, line: unread.line });
                }
            }
        }
    }

    fn take(&mut self, fact: Fact) {
        let Fact { revision, at, event } = fact;
        match event {
            Event::Selection(selection) => {
                let mut says = *selection;
                self.context = self.context.take().or_else(|| says.context.take());
                let redecided = redecide(&says);
                let send = self.send(says.attempt);
                (send.redecided, send.selection) = (redecided, Some(Noted { revision, at, says }));
            }
            Event::Attempt(attempt) => {
                let number = attempt.attempt;
                self.send(number).end = Some(Noted { revision, at, says: *attempt });
            }
            Event::Request(request) => {
                let mut says = *request;
                self.context = self.context.take().or_else(|| says.context.take());
                self.end = Some(Noted { revision, at, says });
            }
            Event::Preference(preference) => self.preference = Some(Noted { revision, at, says: *preference }),
            Event::Ownership(ownership) => self.ownerships.push(Noted { revision, at, says: *ownership }),
            Event::Started(_)
            | Event::Alive(_)
            | Event::Catalogue(_)
            | Event::Probe(_)
            | Event::Models(_)
            | Event::Operator(_)
            | Event::Dropped(_)
            | Event::Vanished(_) => {}
        }
    }

    fn send(&mut self, attempt: u16) -> &mut Send {
        let index = match self.sends.binary_search_by_key(&attempt, |send| send.attempt) {
            Ok(index) => index,
            Err(index) => {
                self.sends.insert(index, Send { attempt, selection: None, redecided: None, end: None });
                index
            }
        };
        &mut self.sends[index]
    }

    fn is_empty(&self) -> bool {
        self.sends.is_empty()
            && self.end.is_none()
            && self.preference.is_none()
            && self.ownerships.is_empty()
            && self.unread.is_empty()
    }

    fn explanation(self, request: &RequestId, abandoned: bool) -> Explanation {
        let why_not = self.why_not_committed(abandoned);
        let end = match self.end {
            Some(end) => End::Ended(Box::new(end)),
            None if abandoned => End::Abandoned,
            None => End::UnderWay,
        };
        Explanation {
            request: request.clone(),
            inferred: self.context.as_ref().is_some_and(|context| inferred(&Word(context.source).to_string())),
            context: self.context,
            sends: self.sends,
            preference: self.preference.map_or(Committed::Not(why_not), |noted| Committed::By(Box::new(noted))),
            ownerships: self.ownerships,
            end,
            unread: self.unread,
        }
    }

    fn why_not_committed(&self, abandoned: bool) -> NotCommitted {
        let succeeded = self.sends.iter().any(Send::succeeded);
        if self.context.as_ref().is_some_and(|context| context.sticky.is_none()) {
            NotCommitted::NoKey
        } else if self.end.is_none() && !abandoned && !succeeded {
            NotCommitted::UnderWay
        } else if succeeded {
            NotCommitted::NotRecorded
        } else {
            NotCommitted::NoSuccess
        }
    }
}

impl Send {
    fn succeeded(&self) -> bool {
        self.end.as_ref().is_some_and(|end| matches!(end.says.class, Class::Success | Class::Incomplete))
    }

    /// The member's health as the decision saw it; absent where nothing was chosen.
    pub fn seen(&self) -> Option<&Candidate> {
        let selection = &self.selection.as_ref()?.says;
        let chosen = (&selection.member, &selection.deployment);
        let mut candidates = selection.choice.as_ref()?.candidates.iter();
        candidates.find(|candidate| (&candidate.member, &candidate.deployment) == chosen)
    }
}

impl End {
    /// What the client got.
    pub fn outcome(&self) -> Option<Outcome> {
        match self {
            Self::Ended(end) => Some(end.says.outcome),
            Self::Abandoned => Some(Outcome::Abandoned),
            Self::UnderWay => None,
        }
    }
}
