//! Usage: one row a send and one row a request, each written once, when its end is known.
//!
//! What is under way is held in memory ([`UsageFold`]) and is rebuilt at start by folding the log again. When a writer
//! begins a new epoch, or is declared vanished, what it still had under way becomes `abandoned`: nothing else can. Its end
//! may come to the log after that, recorded again in a later epoch (ADR 24): the row stands by then and is not doubled.

use std::collections::BTreeMap;
use std::sync::Arc;

use waybill_schema::event::{
    Affinity, Attempt, Class, Context, Event, Fact, Outcome, Reason, Request, Selection, Usage, Vanished,
};
use waybill_schema::id::{DeploymentId, MemberId, ModelName, RequestId, Revision, WriterId};
use waybill_schema::time::Time;

use crate::sessions::Totals;

/// Of so many requests of a writer, the latest, it is remembered that they were abandoned.
pub const ABANDONED_MAX: usize = 4096;

/// A row for the usage tables.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A request ended.
    Event(Box<UsageEvent>),
    /// A send ended.
    Attempt(Box<UsageAttempt>),
}

/// One request (S1.11, S3.25).
#[derive(Clone, Debug, PartialEq)]
pub struct UsageEvent {
    /// The request.
    pub request: RequestId,
    /// When its first byte was read; for an abandoned one, when it was first sent upstream.
    pub started: Time,
    /// When its last byte was written; for an abandoned one, the last sign of it.
    pub ended: Time,
    /// Who asked for what.
    pub context: Arc<Context>,
    /// Whether its first selection followed an affinity record.
    pub sticky_hit: bool,
    /// Whether a fallback chain was used.
    pub fallback: bool,
    /// What the client got.
    pub outcome: Outcome,
    /// The class of the last send where that was no success.
    pub error_class: Option<Class>,
    /// The stable code of an error of ours.
    pub code: Option<String>,
    /// The HTTP status that the client got.
    pub status: Option<u16>,
    /// How many sends there were.
    pub attempts: u16,
    /// The deployment that was sent to last.
    pub deployment: Option<DeploymentId>,
    /// Milliseconds from the first byte read to the last written; absent for an abandoned request.
    pub latency_ms: Option<u64>,
    /// The log position of its first fact.
    pub seq_first: u64,
    /// The log position of its last fact.
    pub seq_last: u64,
    /// The log position of the fact that completed this row: for an abandoned request, of the one that told its writer's
    /// end.
    pub seq_written: u64,
    /// What its sends used: those whose rows came before this one.
    pub used: Used,
}

/// What the sends of a request used.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Used {
    /// Tokens and money.
    pub totals: Totals,
    /// Where they went, send by send.
    pub deployments: Vec<DeploymentId>,
}

/// One send.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageAttempt {
    /// The request.
    pub request: RequestId,
    /// Its number in the request, from 1.
    pub attempt: u16,
    /// When it was sent.
    pub started: Time,
    /// When it ended; absent for an abandoned one.
    pub ended: Option<Time>,
    /// The member.
    pub member: MemberId,
    /// The deployment.
    pub deployment: DeploymentId,
    /// The model name that the upstream was sent; absent where the selection could not be read.
    pub upstream_model: Option<ModelName>,
    /// Why this deployment; absent where the selection could not be read.
    pub reason: Option<Reason>,
    /// How it ended.
    pub class: Class,
    /// The upstream's HTTP status.
    pub status: Option<u16>,
    /// Milliseconds from the send to the end.
    pub latency_ms: Option<u64>,
    /// Milliseconds from the send to the first meaningful frame.
    pub first_token_ms: Option<u64>,
    /// Tokens.
    pub usage: Usage,
    /// Money in nano-USD.
    pub cost_nano: Option<u64>,
    /// The model that the upstream says it served.
    pub served_model: Option<String>,
    /// Where the row of its request was written before this one, as for an abandoned request: who had asked for what.
    pub late_for: Option<Arc<Context>>,
}

/// The fold from facts to rows.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct UsageFold {
    writers: BTreeMap<WriterId, Writer>,
    orphans: u64,
}

/// What a run of facts changed in a [`UsageFold`]: enough to take it back where the rows could not be kept.
#[derive(Debug, Default)]
pub struct Journal {
    /// The log position behind which it begins.
    behind: u64,
    changes: Vec<Change>,
    n_orphans: u64,
}

impl Journal {
    /// An empty journal for the facts of the frames behind log position `seq`, up to where it is taken back.
    pub fn behind(seq: u64) -> Self {
        Self { behind: seq, ..Self::default() }
    }
}

/// Something as it stood before it changed.
#[derive(Debug)]
enum Change {
    Writer(WriterId, Option<Writer>),
    Request(WriterId, RequestId, Option<Open>),
}

impl UsageFold {
    /// Folds a fact that passed the gate and stands at log position `seq`; puts the rows it completes at the end of
    /// `rows`.
    pub fn apply(&mut self, fact: &Fact, seq: u64, rows: &mut Vec<Row>) {
        let seen = Seen { at: fact.at, seq };
        let writer = self.writer(&fact.revision, seq, rows);
        let known = match &fact.event {
            Event::Selection(selection) => writer.select(selection, seen),
            Event::Attempt(attempt) => writer.end_send(attempt, seen, rows),
            Event::Request(request) => writer.end_request(request, seen, rows),
            Event::Preference(preference) => writer.note(&preference.request, seen),
            Event::Ownership(ownership) => writer.note(&ownership.request, seen),
            Event::Vanished(vanished) => {
                self.vanish(vanished, seq, rows);
                true
            }
            Event::Started(_)
            | Event::Alive(_)
            | Event::Catalogue(_)
            | Event::Probe(_)
            | Event::Models(_)
            | Event::Operator(_)
            | Event::Dropped(_) => true,
        };
        self.orphans += u64::from(!known);
    }

    /// Like [`Self::apply`], and notes in `journal` what it changes.
    pub fn apply_noting(&mut self, fact: &Fact, seq: u64, rows: &mut Vec<Row>, journal: &mut Journal) {
        let orphans = self.orphans;
        self.note_before(fact, journal);
        self.apply(fact, seq, rows);
        journal.n_orphans += self.orphans - orphans;
    }

    /// Takes back everything that `journal` notes, which must be the last that was applied.
    pub fn take_back(&mut self, journal: Journal) {
        self.orphans -= journal.n_orphans;
        for change in journal.changes.into_iter().rev() {
            match change {
                Change::Writer(id, Some(writer)) => drop(self.writers.insert(id, writer)),
                Change::Writer(id, None) => drop(self.writers.remove(&id)),
                Change::Request(id, request, open) => {
                    let writer = self.writers.entry(id).or_default();
                    match open {
                        Some(open) => drop(writer.open.insert(request, open)),
                        None => drop(writer.open.remove(&request)),
                    }
                }
            }
        }
    }

    fn note_before(&self, fact: &Fact, journal: &mut Journal) {
        let id = &fact.revision.writer;
        let writer = self.writers.get(id);
        if writer.is_none_or(|writer| writer.epoch < fact.revision.epoch) {
            journal.changes.push(Change::Writer(id.clone(), writer.cloned()));
        }
        if let Event::Vanished(vanished) = &fact.event {
            let gone = self.writers.get(&vanished.writer).cloned();
            journal.changes.push(Change::Writer(vanished.writer.clone(), gone));
        }
        if let Some(request) = request_of(&fact.event) {
            let open = writer.and_then(|writer| writer.open.get(request));
            // What began behind the journal's place was not there before, which was noted then.
            if open.is_none_or(|open| open.first.seq <= journal.behind) {
                journal.changes.push(Change::Request(id.clone(), request.clone(), open.cloned()));
            }
        }
    }

    /// How many requests are under way.
    pub fn n_open(&self) -> usize {
        self.writers.values().map(|writer| writer.open.len()).sum()
    }

    /// Facts about requests of which nothing is known: their selections could not be read, or they were already
    /// abandoned.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }

    /// The writer of a fact, after whatever it had under way in an earlier epoch was abandoned.
    fn writer(&mut self, revision: &Revision, seq: u64, rows: &mut Vec<Row>) -> &mut Writer {
        if !self.writers.contains_key(&revision.writer) {
            self.writers.insert(revision.writer.clone(), Writer::default());
        }
        let writer = self.writers.get_mut(&revision.writer).expect("the writer was put in where it was missing");
        if writer.epoch < revision.epoch {
            writer.abandon(seq, rows);
            writer.epoch = revision.epoch;
            writer.vanished = false;
        }
        writer
    }

    fn vanish(&mut self, vanished: &Vanished, seq: u64, rows: &mut Vec<Row>) {
        let writer = self.writers.get_mut(&vanished.writer).filter(|writer| writer.epoch == vanished.epoch);
        if let Some(writer) = writer {
            writer.abandon(seq, rows);
            writer.vanished = true;
        }
    }
}

/// The request that an event is about.
pub fn request_of(event: &Event) -> Option<&RequestId> {
    match event {
        Event::Selection(selection) => Some(&selection.request),
        Event::Attempt(attempt) => Some(&attempt.request),
        Event::Request(request) => Some(&request.request),
        Event::Preference(preference) => Some(&preference.request),
        Event::Ownership(ownership) => Some(&ownership.request),
        Event::Started(_)
        | Event::Alive(_)
        | Event::Catalogue(_)
        | Event::Probe(_)
        | Event::Models(_)
        | Event::Operator(_)
        | Event::Dropped(_)
        | Event::Vanished(_) => None,
    }
}

/// Where and when a fact stands.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    at: Time,
    seq: u64,
}

/// What one writer has under way.
#[derive(Clone, Debug, PartialEq, Default)]
struct Writer {
    epoch: u64,
    /// Whether its epoch was declared vanished: what it says of requests that were abandoned then comes too late.
    vanished: bool,
    open: BTreeMap<RequestId, Open>,
    /// Requests whose rows say that they were abandoned; their ids sort as time does.
    abandoned: BTreeMap<RequestId, Abandoned>,
}

/// What is remembered of an abandoned request.
#[derive(Clone, Debug, PartialEq, Default)]
struct Abandoned {
    context: Option<Arc<Context>>,
    /// Its sends whose rows say the same.
    sends: Vec<u16>,
}

/// A request under way.
#[derive(Clone, Debug, PartialEq)]
struct Open {
    /// Shared with the journals that may bring it back.
    context: Option<Arc<Context>>,
    sticky_hit: bool,
    fallback: bool,
    n_sends: u16,
    deployment: DeploymentId,
    sends: Vec<Send>,
    used: Used,
    /// Set where this is the rest of a request whose row stands.
    late_for: Option<Arc<Context>>,
    first: Seen,
    last: Seen,
}

/// A send under way.
#[derive(Clone, Debug, PartialEq)]
struct Send {
    attempt: u16,
    at: Time,
    member: MemberId,
    deployment: DeploymentId,
    upstream_model: ModelName,
    reason: Reason,
}

impl Writer {
    fn select(&mut self, selection: &Selection, seen: Seen) -> bool {
        if !self.open.contains_key(&selection.request) {
            if self.vanished && selection.context.is_none() {
                return false;
            }
            let mut open = Open::new(selection, seen);
            if open.context.is_none() {
                open.late_for = self.late_for(&selection.request);
            }
            self.open.insert(selection.request.clone(), open);
        }
        let open = self.open.get_mut(&selection.request).expect("the request was put in where it was missing");
        open.send(selection, seen);
        true
    }

    fn note(&mut self, request: &RequestId, seen: Seen) -> bool {
        let open = self.open.get_mut(request);
        open.map(|open| open.last = seen).is_some()
    }

    fn end_send(&mut self, attempt: &Attempt, seen: Seen, rows: &mut Vec<Row>) -> bool {
        let known = self.note(&attempt.request, seen);
        if !known && self.vanished {
            return false;
        }
        let open = self.open.get_mut(&attempt.request);
        let send = open.and_then(|open| {
            let index = open.sends.iter().position(|send| send.attempt == attempt.attempt)?;
            Some(open.sends.remove(index))
        });
        let was_abandoned = |gone: &Abandoned| gone.sends.contains(&attempt.attempt);
        if send.is_none() && self.abandoned.get(&attempt.request).is_some_and(was_abandoned) {
            return false;
        }
        let row = ended(attempt, send, seen.at);
        rows.push(match self.open.get_mut(&attempt.request) {
            Some(open) => open.count(row),
            None => Row::Attempt(Box::new(UsageAttempt { late_for: self.late_for(&attempt.request), ..row })),
        });
        known
    }

    fn late_for(&self, request: &RequestId) -> Option<Arc<Context>> {
        self.abandoned.get(request)?.context.clone()
    }

    fn end_request(&mut self, request: &Request, seen: Seen, rows: &mut Vec<Row>) -> bool {
        let Some(mut open) = self.open.remove(&request.request) else {
            let refused = request.context.clone().map(|context| closed(request, Arc::new(context), None, seen));
            let known = refused.is_some();
            rows.extend(refused);
            return known;
        };
        open.abandon_sends(&request.request, rows);
        let context = open.context.take().or_else(|| request.context.clone().map(Arc::new));
        let row = context.map(|context| closed(request, context, Some(open), seen));
        let known = row.is_some();
        rows.extend(row);
        known
    }

    fn abandon(&mut self, seq: u64, rows: &mut Vec<Row>) {
        for (request, mut open) in std::mem::take(&mut self.open) {
            let gone = self.abandoned.entry(request.clone()).or_default();
            gone.sends.extend(open.sends.iter().map(|send| send.attempt));
            open.abandon_sends(&request, rows);
            if let Some(context) = open.context.take() {
                gone.context = Some(context.clone());
                rows.push(open.abandoned(request, context, seq));
            }
        }
        while self.abandoned.len() > ABANDONED_MAX {
            self.abandoned.pop_first();
        }
    }
}

impl Open {
    fn new(selection: &Selection, seen: Seen) -> Self {
        let affinity = selection.choice.as_ref().map(|choice| &choice.affinity);
        Self {
            context: selection.context.clone().map(Arc::new),
            sticky_hit: matches!(affinity, Some(Affinity::Hit(_))),
            fallback: false,
            n_sends: 0,
            deployment: selection.deployment.clone(),
            sends: Vec::new(),
            used: Used::default(),
            late_for: None,
            first: seen,
            last: seen,
        }
    }

    fn send(&mut self, selection: &Selection, seen: Seen) {
        self.n_sends = self.n_sends.max(selection.attempt);
        self.fallback |= selection.reason == Reason::Fallback;
        self.deployment = selection.deployment.clone();
        self.last = seen;
        self.sends.push(Send {
            attempt: selection.attempt,
            at: seen.at,
            member: selection.member.clone(),
            deployment: selection.deployment.clone(),
            upstream_model: selection.upstream_model.clone(),
            reason: selection.reason,
        });
    }

    fn abandon_sends(&mut self, request: &RequestId, rows: &mut Vec<Row>) {
        for send in std::mem::take(&mut self.sends) {
            rows.push(self.count(send.abandoned(request.clone())));
        }
    }

    /// A row of the request, once: with the request's own row, or by itself where that one stands already.
    fn count(&mut self, row: UsageAttempt) -> Row {
        let late_for = self.late_for.clone();
        if late_for.is_none() {
            self.used.totals.add(&Totals::of(&row));
            self.used.deployments.push(row.deployment.clone());
        }
        Row::Attempt(Box::new(UsageAttempt { late_for, ..row }))
    }

    fn abandoned(self, request: RequestId, context: Arc<Context>, seq_written: u64) -> Row {
        Row::Event(Box::new(UsageEvent {
            request,
            started: self.first.at,
            ended: self.last.at,
            context,
            sticky_hit: self.sticky_hit,
            fallback: self.fallback,
            outcome: Outcome::Abandoned,
            error_class: Some(Class::Abandoned),
            code: None,
            status: None,
            attempts: self.n_sends,
            deployment: Some(self.deployment),
            latency_ms: None,
            seq_first: self.first.seq,
            seq_last: self.last.seq,
            seq_written,
            used: self.used,
        }))
    }
}

impl Send {
    fn abandoned(self, request: RequestId) -> UsageAttempt {
        UsageAttempt {
            request,
            attempt: self.attempt,
            started: self.at,
            ended: None,
            member: self.member,
            deployment: self.deployment,
            upstream_model: Some(self.upstream_model),
            reason: Some(self.reason),
            class: Class::Abandoned,
            status: None,
            latency_ms: None,
            first_token_ms: None,
            usage: Usage::default(),
            cost_nano: None,
            served_model: None,
            late_for: None,
        }
    }
}

/// The row of a send that ended; without its selection, the send is dated back from its end.
fn ended(attempt: &Attempt, send: Option<Send>, at: Time) -> UsageAttempt {
    let (started, upstream_model, reason) = match send {
        Some(send) => (send.at, Some(send.upstream_model), Some(send.reason)),
        None => (before(at, attempt.latency_ms), None, None),
    };
    UsageAttempt {
        request: attempt.request.clone(),
        attempt: attempt.attempt,
        started,
        ended: Some(at),
        member: attempt.member.clone(),
        deployment: attempt.deployment.clone(),
        upstream_model,
        reason,
        class: attempt.class,
        status: attempt.status,
        latency_ms: Some(attempt.latency_ms),
        first_token_ms: attempt.first_token_ms,
        usage: attempt.usage,
        cost_nano: attempt.cost_nano,
        served_model: attempt.served_model.clone(),
        late_for: None,
    }
}

fn closed(request: &Request, context: Arc<Context>, open: Option<Open>, seen: Seen) -> Row {
    let seq_first = open.as_ref().map_or(seen.seq, |open| open.first.seq);
    Row::Event(Box::new(UsageEvent {
        request: request.request.clone(),
        started: before(seen.at, request.latency_ms),
        ended: seen.at,
        context,
        sticky_hit: open.as_ref().is_some_and(|open| open.sticky_hit),
        fallback: request.fallback,
        outcome: request.outcome,
        error_class: request.class.filter(|class| *class != Class::Success),
        code: request.code.clone(),
        status: request.status,
        attempts: request.attempts,
        deployment: open.as_ref().map(|open| open.deployment.clone()),
        latency_ms: Some(request.latency_ms),
        seq_first,
        seq_last: seen.seq,
        seq_written: seen.seq,
        used: open.map(|open| open.used).unwrap_or_default(),
    }))
}

fn before(at: Time, ms: u64) -> Time {
    at.plus_ms(i64::try_from(ms).map_or(i64::MIN, |ms| -ms))
}

#[cfg(test)]
mod tests {
    use waybill_schema::event::{Endpoint, Ownedness, Ownership, Preference, SessionSource};

    use super::*;
    use crate::story::{Teller, context};

    /// Folds `facts` (each at the position of its place, from 1) and writes every row as one line.
    fn check(facts: &[Fact], expected: &str) -> UsageFold {
        let mut fold = UsageFold::default();
        let mut rows = Vec::new();
        for (fact, seq) in facts.iter().zip(1..) {
            fold.apply(fact, seq, &mut rows);
        }
        let text: Vec<String> = rows.iter().map(in_text).collect();
        let expected: Vec<&str> = expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        assert_eq!(text, expected);
        fold
    }

    fn in_text(row: &Row) -> String {
        match row {
            Row::Event(row) => format!(
                "{} {}-{} {:?} {:?} hit={} fallback={} n={} at={:?} {:?}ms seq={}-{}@{}",
                row.request,
                row.started.0,
                row.ended.0,
                row.outcome,
                row.error_class,
                row.sticky_hit,
                row.fallback,
                row.attempts,
                row.deployment,
                row.latency_ms,
                row.seq_first,
                row.seq_last,
                row.seq_written,
            ),
            Row::Attempt(row) => format!(
                "{}/{} {}-{:?} {} {:?} {:?} {:?} in={:?} nano={:?}",
                row.request,
                row.attempt,
                row.started.0,
                row.ended.map(|at| at.0),
                row.member,
                row.reason,
                row.class,
                row.status,
                row.usage.input.known(),
                row.cost_nano,
            ),
        }
    }

    /// S1.11: a request that failed over leaves one row a send and one row for itself.
    #[test]
    fn a_request_leaves_one_row_a_send_and_one_for_itself() {
        let mut gw = Teller::new("gw");
        let facts = [
            gw.starts(1000),
            gw.selects(2000, "r", 1, "a"),
            gw.ends_send(2050, "r", 1, Class::Upstream5xx),
            gw.selects(2051, "r", 2, "b"),
            gw.ends_send(2101, "r", 2, Class::Success),
            gw.ends(2102, "r", Outcome::Success, Class::Success, 2),
        ];
        let fold = check(
            &facts,
            r#"
            r/1 2000-Some(2050) main/gpt/a Some(Affinity) Upstream5xx Some(502) in=None nano=None
            r/2 2051-Some(2101) main/gpt/a Some(Next) Success Some(200) in=Some(100) nano=Some(7)
            r 2032-2102 Success None hit=true fallback=false n=2 at=Some("b") Some(70)ms seq=2-6@6
            "#,
        );
        assert_eq!((fold.n_open(), fold.orphans()), (0, 0));
    }

    #[test]
    fn what_a_dead_writer_had_under_way_is_abandoned_once() {
        let (mut gw, mut other) = (Teller::new("gw"), Teller::new("other"));
        let facts = [
            gw.starts(1000),
            other.starts(1000),
            gw.selects(2000, "r", 1, "a"),
            gw.ends_send(2050, "r", 1, Class::Timeout),
            gw.selects(2060, "r", 2, "b"),
            other.selects(2070, "q", 1, "a"),
            gw.starts(9000),
            gw.starts(9500),
        ];
        let fold = check(
            &facts,
            r#"
            r/1 2000-Some(2050) main/gpt/a Some(Affinity) Timeout Some(502) in=None nano=None
            r/2 2060-None main/gpt/b Some(Next) Abandoned None in=None nano=None
            r 2000-2060 Abandoned Some(Abandoned) hit=true fallback=false n=2 at=Some("b") Nonems seq=3-5@7
            "#,
        );
        assert_eq!(fold.n_open(), 1);
    }

    #[test]
    fn what_a_vanished_writer_had_under_way_is_abandoned_and_stays_so() {
        let (mut gw, mut auditor) = (Teller::new("gw"), Teller::new("auditor"));
        let vanished = Vanished { writer: "gw".into(), epoch: 1, last: 2 };
        let facts = [
            gw.starts(1000),
            gw.selects(2000, "r", 1, "a"),
            auditor.starts(8000),
            auditor.says(8001, Event::Vanished(vanished)),
            gw.ends_send(9000, "r", 1, Class::Success),
            gw.ends(9001, "r", Outcome::Success, Class::Success, 1),
            gw.starts(9500),
        ];
        let fold = check(
            &facts,
            r#"
            r/1 2000-None main/gpt/a Some(Affinity) Abandoned None in=None nano=None
            r 2000-2000 Abandoned Some(Abandoned) hit=true fallback=false n=1 at=Some("a") Nonems seq=2-2@4
            "#,
        );
        assert_eq!(fold.orphans(), 2);
    }

    /// A gateway that was fenced records again, in its next epoch, what it had not sent: of `r` the end of a send that
    /// is abandoned by then and another send, of `q` everything.
    #[test]
    fn what_comes_home_after_its_request_was_abandoned_costs_no_row_and_doubles_none() {
        let mut gw = Teller::new("gw");
        let mut facts = vec![gw.starts(1000), gw.selects(2000, "r", 1, "a"), gw.starts(8000), gw.starts(9000)];
        let mut second = gw.selects(2060, "r", 2, "b");
        let Event::Selection(selection) = &mut second.event else { panic!("the second send is chosen") };
        selection.context = None;
        facts.extend([gw.ends_send(2050, "r", 1, Class::Timeout), second]);
        facts.extend([gw.ends_send(2090, "r", 2, Class::Success)]);
        facts.push(gw.ends(2091, "r", Outcome::Success, Class::Success, 2));
        facts.extend([gw.selects(3000, "q", 1, "a"), gw.ends_send(3050, "q", 1, Class::Success)]);
        facts.push(gw.ends(3051, "q", Outcome::Success, Class::Success, 1));
        let fold = check(
            &facts,
            r#"
            r/1 2000-None main/gpt/a Some(Affinity) Abandoned None in=None nano=None
            r 2000-2000 Abandoned Some(Abandoned) hit=true fallback=false n=1 at=Some("a") Nonems seq=2-2@3
            r/2 2060-Some(2090) main/gpt/a Some(Next) Success Some(200) in=Some(100) nano=Some(7)
            q/1 3000-Some(3050) main/gpt/a Some(Affinity) Success Some(200) in=Some(100) nano=Some(7)
            q 2981-3051 Success None hit=true fallback=false n=1 at=Some("a") Some(70)ms seq=9-11@11
            "#,
        );
        assert_eq!((fold.n_open(), fold.orphans()), (0, 2));
    }

    #[test]
    fn a_refused_request_brings_its_own_context() {
        let mut gw = Teller::new("gw");
        let mut facts = vec![gw.starts(1000), gw.ends(2000, "r", Outcome::Refused, Class::CallerError, 0)];
        let Event::Request(request) = &mut facts[1].event else { panic!("the second fact ends a request") };
        (request.context, request.class) = (Some(context()), None);
        check(&facts, r#"r 1930-2000 Refused None hit=false fallback=false n=0 at=None Some(70)ms seq=2-2@2"#);
    }

    #[test]
    fn a_send_whose_selection_is_unreadable_still_counts_its_money() {
        let mut gw = Teller::new("gw");
        let facts = [
            gw.starts(1000),
            gw.ends_send(2050, "r", 1, Class::Success),
            gw.ends(2060, "r", Outcome::Success, Class::Success, 1),
        ];
        let fold = check(&facts, "r/1 2000-Some(2050) main/gpt/a None Success Some(200) in=Some(100) nano=Some(7)");
        assert_eq!(fold.orphans(), 2);
    }

    #[test]
    fn a_request_that_ends_before_its_send_leaves_the_send_abandoned() {
        let mut gw = Teller::new("gw");
        let facts = [
            gw.starts(1000),
            gw.selects(2000, "r", 1, "a"),
            gw.ends(2070, "r", Outcome::Cancelled, Class::Cancelled, 1),
        ];
        check(
            &facts,
            r#"
            r/1 2000-None main/gpt/a Some(Affinity) Abandoned None in=None nano=None
            r 2000-2070 Cancelled Some(Cancelled) hit=true fallback=false n=1 at=Some("a") Some(70)ms seq=2-3@3
            "#,
        );
    }

    #[test]
    fn every_fact_of_a_request_lies_between_its_bounds() {
        let mut gw = Teller::new("gw");
        let preference = Preference {
            request: "r".into(),
            key: "k".into(),
            member: "m".into(),
            deployment: "a".into(),
            incarnation: 1,
            model: "gpt".into(),
            pool: "main".into(),
            path: Vec::new(),
            chains: Vec::new(),
            base: None,
            ttl_ms: 1,
        };
        let ownership = Ownership {
            response: "h".into(),
            state: Ownedness::Provisional,
            request: "r".into(),
            scope: "acme".into(),
            model: "gpt".into(),
            endpoint: Endpoint::Responses,
            deployment: "a".into(),
            channel: "a".into(),
            incarnation: 1,
            session: "s-1".into(),
            source: SessionSource::Explicit,
        };
        let facts = [
            gw.starts(1000),
            gw.selects(2000, "r", 1, "a"),
            gw.says(2001, Event::Preference(Box::new(preference))),
            gw.says(2002, Event::Ownership(Box::new(ownership))),
            gw.starts(3000),
        ];
        check(
            &facts,
            r#"
            r/1 2000-None main/gpt/a Some(Affinity) Abandoned None in=None nano=None
            r 2000-2002 Abandoned Some(Abandoned) hit=true fallback=false n=1 at=Some("a") Nonems seq=2-4@5
            "#,
        );
    }
}
