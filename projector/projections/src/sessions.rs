//! Sessions: one row a session, so that a list need not add up every request of each (ADR 32).
//!
//! The rows of a batch become changes ([`Sessions::take`]), and a change is merged into what stands
//! ([`Sessions::merge`]). Merging is associative and commutative: a session's row is the same however the log was cut
//! into batches, and says what adding up its requests and sends would say.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use waybill_schema::event::{Context, Outcome, Tokens, Usage};
use waybill_schema::time::Time;

use crate::usage::{Row, UsageAttempt, UsageEvent};
use crate::word::Word;

/// So many models and deployments of a session are named, the first in their order; its requests name all.
pub const NAMES_MAX: usize = 64;
/// The last moment of the year 9999: nothing is later, and every store and every person can read it.
pub const LATEST: Time = Time(253_402_300_799_999);
/// The greatest number that every store holds.
const NUMBER_MAX: u64 = i64::MAX.unsigned_abs();

/// What sends used.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// How many sends there were.
    pub sends: u64,
    /// Of how many nobody knows the tokens.
    pub sends_unknown: u64,
    /// Of how many a part of the tokens was worked out here.
    pub sends_estimated: u64,
    /// Tokens of the prompts, cached ones included; absent where nobody knows any.
    pub input: Option<u64>,
    /// Tokens of the answers, reasoning included.
    pub output: Option<u64>,
    /// Prompt tokens read from upstream caches.
    pub cached: Option<u64>,
    /// Prompt tokens written to upstream caches.
    pub cache_write: Option<u64>,
    /// Answer tokens spent on reasoning.
    pub reasoning: Option<u64>,
    /// Money in nano-USD.
    pub cost_nano: Option<u64>,
}

impl Totals {
    /// What one send used.
    pub fn of(send: &UsageAttempt) -> Self {
        let Usage { input, output, cached, cache_write, reasoning } = send.usage;
        let parts = [input, output, cached, cache_write, reasoning];
        let known = |part: Tokens| part.known().map(|n| n.min(NUMBER_MAX));
        Self {
            sends: 1,
            sends_unknown: u64::from(input.known().is_none() && output.known().is_none()),
            sends_estimated: u64::from(parts.iter().any(|part| matches!(part, Tokens::Estimated(_)))),
            input: known(input),
            output: known(output),
            cached: known(cached),
            cache_write: known(cache_write),
            reasoning: known(reasoning),
            cost_nano: send.cost_nano.map(|nano| nano.min(NUMBER_MAX)),
        }
    }

    /// Adds what other sends used.
    pub fn add(&mut self, other: &Self) {
        self.sends = sum(self.sends, other.sends);
        self.sends_unknown = sum(self.sends_unknown, other.sends_unknown);
        self.sends_estimated = sum(self.sends_estimated, other.sends_estimated);
        self.input = sum_known(self.input, other.input);
        self.output = sum_known(self.output, other.output);
        self.cached = sum_known(self.cached, other.cached);
        self.cache_write = sum_known(self.cache_write, other.cache_write);
        self.reasoning = sum_known(self.reasoning, other.reasoning);
        self.cost_nano = sum_known(self.cost_nano, other.cost_nano);
    }
}

/// An upstream may say any number: the sum ends where the stores do.
fn sum(a: u64, b: u64) -> u64 {
    a.saturating_add(b).min(NUMBER_MAX)
}

fn sum_known(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(sum(a, b)),
        (known, None) | (None, known) => known,
    }
}

/// When a session was active, and by which request last.
#[derive(Clone, Debug, PartialEq)]
pub struct Activity {
    /// Its first request began.
    pub started: Time,
    /// Its latest request ended.
    pub ended: Time,
    /// That request.
    pub request: String,
    /// Where that request's identity came from.
    pub source: String,
}

/// A session, or what a batch changes of one.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Session {
    /// The tenant.
    pub scope: String,
    /// The session.
    pub session: String,
    /// Absent only in a change without a request: a send whose request's row stood already.
    pub activity: Option<Activity>,
    /// How many requests it had.
    pub requests: u64,
    /// How many of them did not end well.
    pub failed: u64,
    /// The models that were asked for, at most [`NAMES_MAX`].
    pub models: BTreeSet<String>,
    /// The deployments that were sent to, at most [`NAMES_MAX`].
    pub deployments: BTreeSet<String>,
    /// What its sends used.
    pub totals: Totals,
}

impl Session {
    fn merge(&mut self, other: Self) {
        self.activity = match (self.activity.take(), other.activity) {
            (Some(one), Some(other)) => Some(one.merge(other)),
            (activity, None) | (None, activity) => activity,
        };
        self.requests = sum(self.requests, other.requests);
        self.failed = sum(self.failed, other.failed);
        other.models.into_iter().for_each(|name| add_name(&mut self.models, name.into()));
        other.deployments.into_iter().for_each(|name| add_name(&mut self.deployments, name.into()));
        self.totals.add(&other.totals);
    }

    fn take_request(&mut self, row: &UsageEvent, text: Text) {
        self.requests = sum(self.requests, 1);
        self.failed = sum(self.failed, u64::from(row.outcome != Outcome::Success));
        let model = row.context.model.as_str();
        // A request that was refused for its body may have named none.
        if !model.is_empty() {
            add_name(&mut self.models, text(model));
        }
        row.used.deployments.iter().for_each(|name| add_name(&mut self.deployments, text(name.as_str())));
        self.totals.add(&row.used.totals);
        let activity = Activity {
            started: row.started.clamp(Time(0), LATEST),
            ended: row.ended.clamp(Time(0), LATEST),
            request: text(row.request.as_str()).into_owned(),
            source: Word(row.context.source).to_string(),
        };
        self.activity = Some(match self.activity.take() {
            Some(known) => known.merge(activity),
            None => activity,
        });
    }

    /// Takes a send whose request's row stood already.
    fn take_late(&mut self, row: &UsageAttempt, text: Text) {
        add_name(&mut self.deployments, text(row.deployment.as_str()));
        self.totals.add(&Totals::of(row));
    }
}

impl Activity {
    fn merge(self, other: Self) -> Self {
        let started = self.started.min(other.started);
        let later = if (other.ended, &other.request) > (self.ended, &self.request) { other } else { self };
        Self { started, ..later }
    }
}

/// The first in their order: the same, whichever came first.
fn add_name(names: &mut BTreeSet<String>, name: Cow<'_, str>) {
    if !names.contains(&*name) {
        names.insert(name.into_owned());
    }
    while names.len() > NAMES_MAX {
        names.pop_last();
    }
}

/// A text as a store holds it.
pub type Text = for<'a> fn(&'a str) -> Cow<'a, str>;

/// The sessions that a run of rows changes.
#[derive(Debug)]
pub struct Sessions {
    text: Text,
    /// By scope, and there by session.
    changed: BTreeMap<String, BTreeMap<String, Session>>,
}

impl Sessions {
    /// No change yet, of a store that holds texts as `text` says.
    pub fn new(text: Text) -> Self {
        Self { text, changed: BTreeMap::new() }
    }

    /// Takes a row that is written.
    pub fn take(&mut self, row: &Row) {
        let text = self.text;
        match row {
            Row::Event(row) => self.of(&row.context).take_request(row, text),
            Row::Attempt(row) => {
                if let Some(context) = &row.late_for {
                    self.of(context).take_late(row, text);
                }
            }
        }
    }

    /// Merges what stands of a session, or another change of it.
    pub fn merge(&mut self, other: Session) {
        let session = at(&mut self.changed, &other.scope, &other.session);
        session.merge(other);
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// What changes, by scope and session.
    pub fn rows(&self) -> impl Iterator<Item = &Session> {
        self.changed.values().flat_map(BTreeMap::values)
    }

    fn of(&mut self, context: &Context) -> &mut Session {
        let (scope, session) = ((self.text)(context.scope.as_str()), (self.text)(context.session.as_str()));
        at(&mut self.changed, &scope, &session)
    }
}

/// The change of a session; most have one already, which is found without a copy of its name.
fn at<'a>(changed: &'a mut BTreeMap<String, BTreeMap<String, Session>>, scope: &str, session: &str) -> &'a mut Session {
    if !changed.contains_key(scope) {
        changed.insert(scope.to_owned(), BTreeMap::new());
    }
    let of_scope = changed.get_mut(scope).expect("it was put in where it was missing");
    if !of_scope.contains_key(session) {
        let fresh = Session { scope: scope.to_owned(), session: session.to_owned(), ..Session::default() };
        of_scope.insert(session.to_owned(), fresh);
    }
    of_scope.get_mut(session).expect("it was put in where it was missing")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use waybill_schema::event::{Class, Event, Fact};

    use super::*;
    use crate::story::Teller;
    use crate::usage::UsageFold;

    /// The rows of what two lives of a gateway say, the second of which brings home what the first had not sent.
    fn rows(requests: &[(u8, u8, bool)]) -> Vec<Row> {
        let mut gw = Teller::new("gw");
        let mut facts = vec![gw.starts(0)];
        for ((session, deployment, ends), n) in requests.iter().zip(1..) {
            let (at, id) = (n * 100, format!("r{n}"));
            let mut first = gw.selects(at, &id, 1, "a");
            in_session(&mut first, &format!("s{session}"));
            let mut failed = gw.ends_send(at + 50, &id, 1, Class::Upstream5xx);
            let Event::Attempt(attempt) = &mut failed.event else { panic!("a send ends") };
            attempt.deployment = format!("d{deployment}").as_str().into();
            facts.extend([first, failed, gw.selects(at + 51, &id, 2, "b")]);
            if *ends {
                facts.push(gw.ends_send(at + 90, &id, 2, Class::Success));
                facts.push(gw.ends(at + 91, &id, Outcome::Success, Class::Success, 2));
            }
        }
        facts.push(gw.starts(90_000));
        for (_, n) in requests.iter().zip(1..).filter(|((.., ends), _)| !ends) {
            let mut third = gw.selects(90_001, &format!("r{n}"), 3, "c");
            let Event::Selection(selection) = &mut third.event else { panic!("a send is chosen") };
            selection.context = None;
            facts.extend([third, gw.ends_send(90_050, &format!("r{n}"), 3, Class::Success)]);
        }
        let (mut fold, mut rows) = (UsageFold::default(), Vec::new());
        facts.iter().for_each(|fact| fold.apply(fact, 1, &mut rows));
        rows
    }

    fn in_session(fact: &mut Fact, session: &str) {
        let Event::Selection(selection) = &mut fact.event else { panic!("a send is chosen") };
        selection.context.as_mut().expect("a first selection has a context").session = session.into();
    }

    fn folded(rows: &[Row]) -> Sessions {
        let mut sessions = Sessions::new(|text| text.into());
        rows.iter().for_each(|row| sessions.take(row));
        sessions
    }

    /// A request that was answered costs its two sends once, one that was abandoned its three: r2's second send is
    /// abandoned, and its third came home after that.
    #[test]
    fn every_send_counts_once_and_every_request_once() {
        let sessions = folded(&rows(&[(1, 1, true), (1, 2, false), (2, 1, true)]));
        let told: Vec<String> = sessions
            .rows()
            .map(|session| {
                let Session { session, activity, requests, failed, deployments, totals, .. } = session;
                let Activity { started, ended, request, source } = activity.as_ref().expect("it had requests");
                let (Totals { sends, sends_unknown, input, cost_nano, .. }, ended) = (totals, ended.0);
                format!(
                    "{session} {source} {}-{ended} {request} requests={requests} failed={failed} sends={sends} \
                     unknown={sends_unknown} in={input:?} nano={cost_nano:?} {deployments:?}",
                    started.0
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                "s1 explicit 121-251 r2 requests=2 failed=1 sends=5 unknown=3 in=Some(200) nano=Some(14) \
                 {\"a/gpt\", \"b\", \"d1\", \"d2\"}",
                "s2 explicit 321-391 r3 requests=1 failed=0 sends=2 unknown=1 in=Some(100) nano=Some(7) \
                 {\"a/gpt\", \"d1\"}",
            ]
        );
    }

    #[test]
    fn a_sum_ends_where_the_stores_do() {
        let mut totals = Totals { input: Some(NUMBER_MAX), ..Totals::default() };
        totals.add(&Totals { input: Some(7), output: Some(1), ..Totals::default() });
        assert_eq!((totals.input, totals.output, totals.cached), (Some(9_223_372_036_854_775_807), Some(1), None));
    }

    proptest! {
        #[test]
        fn a_session_is_the_same_however_its_rows_are_cut_into_batches(
            requests in prop::collection::vec((0..3u8, 0..90u8, any::<bool>()), 0..100),
            cut in any::<prop::sample::Index>(),
        ) {
            let rows = rows(&requests);
            let cut = cut.index(rows.len() + 1);
            let whole = folded(&rows);
            let (mut last, first) = (folded(&rows[cut..]), folded(&rows[..cut]));
            first.rows().cloned().for_each(|standing| last.merge(standing));
            prop_assert_eq!(last.changed, whole.changed);
        }
    }
}
