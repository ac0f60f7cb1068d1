//! Sessions: what was talked about with whom, by `scope + session` (S3.7), from the rows of a usage store.
//!
//! A list reads one row a session, which its projection keeps (ADR 32). Tokens and money stand at the sends and are
//! summed from there alone, so that no request counts twice (S3.25).

use serde::Serialize;
use waybill_schema::id::{RequestId, ScopeId, SessionId};
use waybill_schema::time::Time;

use crate::paging::{List, Page, PageError, Paged, Place};
use crate::usage::{Cells, StoreError, UsageStore, Value};

pub use waybill_projections::sessions::Totals;

/// Why there is no list.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The page cannot be asked for.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The store gives no answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Which sessions are wanted; by default all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Those of one tenant.
    pub scope: Option<ScopeId>,
    /// Those that asked for this model.
    pub model: Option<String>,
    /// Those whose latest activity was not before this moment.
    pub since: Option<Time>,
    /// Those whose latest activity was before this moment.
    pub until: Option<Time>,
}

/// A session in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Session {
    /// The tenant.
    pub scope: ScopeId,
    /// The session.
    pub session: SessionId,
    /// Where its identity came from at its latest request.
    pub source: String,
    /// Whether it was inferred from the prompt rather than named (S3.26).
    pub inferred: bool,
    /// Its first request began.
    pub started: Time,
    /// Its latest activity.
    pub ended: Time,
    /// How many requests it had.
    pub requests: u64,
    /// How many of them did not end well.
    pub failed: u64,
    /// The request that was active last.
    pub last_request: String,
    /// The models that were asked for, sorted; at most
    /// [`NAMES_MAX`](waybill_projections::sessions::NAMES_MAX) of them.
    pub models: Vec<String>,
    /// The deployments that were sent to, likewise.
    pub deployments: Vec<String>,
    /// What its sends used.
    pub totals: Totals,
}

/// A request of a session.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Round {
    /// The request.
    pub request: String,
    /// When it began.
    pub started: Time,
    /// When it ended.
    pub ended: Time,
    /// The model that was asked for.
    pub model: String,
    /// The API spoken.
    pub endpoint: String,
    /// The group.
    pub group: String,
    /// Where the session identity came from.
    pub source: String,
    /// Whether it was inferred from the prompt rather than named.
    pub inferred: bool,
    /// Whether its first selection followed an affinity record.
    pub sticky_hit: bool,
    /// Whether a fallback chain was used.
    pub fallback: bool,
    /// What the client got.
    pub outcome: String,
    /// The class of the last failure.
    pub error_class: Option<String>,
    /// The stable code of an error of ours.
    pub code: Option<String>,
    /// The HTTP status that the client got.
    pub status: Option<u16>,
    /// Milliseconds from first to last byte.
    pub latency_ms: Option<u64>,
    /// Where it was really sent, in order; empty where no upstream was called.
    pub targets: Vec<Target>,
}

/// A send of a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Its number in the request, from 1.
    pub attempt: u16,
    /// When it was sent.
    pub started: Time,
    /// When it ended; absent for an abandoned one.
    pub ended: Option<Time>,
    /// The member.
    pub member: String,
    /// The deployment.
    pub deployment: String,
    /// The model name that the upstream was sent.
    pub upstream_model: Option<String>,
    /// The model that the upstream says it served.
    pub served_model: Option<String>,
    /// Why this one.
    pub reason: Option<String>,
    /// How it ended.
    pub class: String,
    /// The upstream's HTTP status.
    pub status: Option<u16>,
    /// Milliseconds from send to end.
    pub latency_ms: Option<u64>,
    /// Milliseconds from send to the first meaningful frame.
    pub first_token_ms: Option<u64>,
    /// What it used.
    pub totals: Totals,
}

/// A request with all that its row says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trail {
    /// The tenant.
    pub scope: ScopeId,
    /// The session.
    pub session: SessionId,
    /// The key that asked.
    pub key: String,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// What named the session.
    pub signal: String,
    /// What its affinity key was made of; absent where it had none.
    pub sticky_type: Option<String>,
    /// What its sends used together.
    pub totals: Totals,
    /// The log position of its first fact.
    pub seq_first: u64,
    /// The log position of its last fact.
    pub seq_last: u64,
    /// The rest, as in the list of its session's rounds.
    #[serde(flatten)]
    pub round: Round,
}

/// The sessions that are wanted by latest activity, the latest first.
///
/// Rows that come meanwhile move to the front: going on, a reader meets each session that did not change once.
pub fn sessions(store: &mut dyn UsageStore, wanted: &Filter, page: &Page) -> Result<Paged<Session>, ListError> {
    let mut query = Query::of(format!("SELECT {SESSION} FROM sessions"));
    let order = match &wanted.scope {
        Some(scope) => {
            let place = query.put(scope.as_str());
            query.only(format!("scope = {place}"));
            ["ended", "session_id"].as_slice()
        }
        None => &["ended", "scope", "session_id"],
    };
    if let Some(place) = page.place(List::Sessions)? {
        let (scope, session) = (place.key.0.as_str(), place.key.1.as_str());
        let mut places = vec![query.put(Time(place.at))];
        if wanted.scope.is_none() {
            places.push(query.put(scope));
        }
        places.push(query.put(session));
        query.only(format!("({}) < ({})", order.join(", "), places.join(", ")));
    }
    if let Some(since) = wanted.since {
        let place = query.put(since);
        query.only(format!("ended >= {place}"));
    }
    if let Some(until) = wanted.until {
        let place = query.put(until);
        query.only(format!("ended < {place}"));
    }
    if let Some(model) = &wanted.model {
        let place = query.put(model.as_str());
        query.only(store.holds("models", &place));
    }
    query.page(&order.iter().map(|column| format!("{column} DESC")).collect::<Vec<_>>().join(", "), page);
    let sessions = query.ask(store)?.into_iter().map(session).collect::<Result<Vec<_>, _>>()?;
    Ok(page.cut(sessions, |session| Place {
        list: List::Sessions,
        at: session.ended.0,
        key: (session.scope.to_string(), session.session.to_string()),
    }))
}

/// The sessions of this name, by scope: a client's session id alone names no tenant.
pub fn named(store: &mut dyn UsageStore, session_id: &SessionId) -> Result<Vec<Session>, StoreError> {
    let sql = format!("SELECT {SESSION} FROM sessions WHERE session_id = $1 ORDER BY scope");
    store.rows(&sql, &[session_id.as_str().into()])?.into_iter().map(session).collect()
}

/// The rounds of one session in the order in which they ended.
pub fn rounds(
    store: &mut dyn UsageStore,
    scope: &ScopeId,
    session: &SessionId,
    page: &Page,
) -> Result<Paged<Round>, ListError> {
    let mut query = Query::of(format!("SELECT {ROUND} FROM usage_events"));
    let (scope, session) = (query.put(scope.as_str()), query.put(session.as_str()));
    query.only(format!("scope = {scope}"));
    query.only(format!("session_id = {session}"));
    if let Some(place) = page.place(List::Rounds)? {
        let (at, request) = (query.put(Time(place.at)), query.put(place.key.0.as_str()));
        query.only(format!("(ended, request_id) > ({at}, {request})"));
    }
    query.page("ended, request_id", page);
    let rounds = query.ask(store)?.iter_mut().map(round).collect::<Result<Vec<_>, _>>()?;
    let place =
        |round: &Round| Place { list: List::Rounds, at: round.ended.0, key: (round.request.clone(), String::new()) };
    let mut paged = page.cut(rounds, place);
    fill(store, &mut paged.entries)?;
    Ok(paged)
}

/// All that the rows say of a request; none where it has no row yet.
pub fn request(store: &mut dyn UsageStore, request: &RequestId) -> Result<Option<Trail>, StoreError> {
    let sql = format!("SELECT {ROUND}, {TRAIL} FROM usage_events WHERE request_id = $1");
    let Some(mut cells) = store.rows(&sql, &[request.as_str().into()])?.into_iter().next() else { return Ok(None) };
    let mut rounds = [round(&mut cells)?];
    fill(store, &mut rounds)?;
    let [round] = rounds;
    let mut totals = Totals::default();
    round.targets.iter().for_each(|target| totals.add(&target.totals));
    Ok(Some(Trail {
        scope: ScopeId::new(cells.text()?),
        session: SessionId::new(cells.text()?),
        key: cells.text()?,
        stream: cells.flag()?,
        signal: cells.text()?,
        sticky_type: cells.maybe_text()?,
        totals,
        seq_first: cells.count()?,
        seq_last: cells.count()?,
        round,
    }))
}

/// A query as it grows.
struct Query {
    sql: String,
    n_conditions: usize,
    values: Vec<Value>,
}

impl Query {
    fn of(sql: String) -> Self {
        Self { sql, n_conditions: 0, values: Vec::new() }
    }

    /// Adds a value, and gives the name of its place.
    fn put(&mut self, value: impl Into<Value>) -> String {
        self.values.push(value.into());
        format!("${}", self.values.len())
    }

    fn only(&mut self, condition: String) {
        let word = if self.n_conditions == 0 { "WHERE" } else { "AND" };
        self.n_conditions += 1;
        self.sql += &format!(" {word} {condition}");
    }

    fn page(&mut self, order: &str, page: &Page) {
        let limit = self.put(Value::Number(page.fetched()));
        self.sql += &format!(" ORDER BY {order} LIMIT {limit}");
    }

    fn ask(&self, store: &mut dyn UsageStore) -> Result<Vec<Cells>, StoreError> {
        store.rows(&self.sql, &self.values)
    }
}

/// What [`session`] reads; the sums last, as [`totals`] does.
const SESSION: &str = "scope, session_id, session_source, started, ended, last_request, requests, failed, models,
    deployments, sends, sends_unknown, sends_estimated, input, output, cached, cache_write, reasoning, cost_nano";

fn session(mut cells: Cells) -> Result<Session, StoreError> {
    let (scope, session, source) = (cells.text()?, cells.text()?, cells.text()?);
    Ok(Session {
        scope: ScopeId::new(scope),
        session: SessionId::new(session),
        inferred: inferred(&source),
        source,
        started: cells.time()?,
        ended: cells.time()?,
        last_request: cells.text()?,
        requests: cells.count()?,
        failed: cells.count()?,
        models: cells.names()?,
        deployments: cells.names()?,
        totals: totals(&mut cells)?,
    })
}

fn totals(cells: &mut Cells) -> Result<Totals, StoreError> {
    Ok(Totals {
        sends: cells.count()?,
        sends_unknown: cells.count()?,
        sends_estimated: cells.count()?,
        input: cells.maybe_count()?,
        output: cells.maybe_count()?,
        cached: cells.maybe_count()?,
        cache_write: cells.maybe_count()?,
        reasoning: cells.maybe_count()?,
        cost_nano: cells.maybe_count()?,
    })
}

const ROUND: &str =
    "request_id, started, ended, model, endpoint, group_id, session_source, sticky_hit, fallback, outcome,
    error_class, code, status, latency_ms";

fn round(cells: &mut Cells) -> Result<Round, StoreError> {
    let (request, started, ended) = (cells.text()?, cells.time()?, cells.time()?);
    let (model, endpoint, group, source) = (cells.text()?, cells.text()?, cells.text()?, cells.text()?);
    Ok(Round {
        request,
        started,
        ended,
        model,
        endpoint,
        group,
        inferred: inferred(&source),
        source,
        sticky_hit: cells.flag()?,
        fallback: cells.flag()?,
        outcome: cells.text()?,
        error_class: cells.maybe_text()?,
        code: cells.maybe_text()?,
        status: cells.maybe_small()?,
        latency_ms: cells.maybe_count()?,
        targets: Vec::new(),
    })
}

/// What [`Trail`] has beside its round.
const TRAIL: &str = "scope, session_id, key_id, stream, signal, sticky_type, seq_first, seq_last";

const TARGET: &str =
    "request_id, attempt, started, ended, member, deployment, upstream_model, served_model, reason, class,
    status, latency_ms, first_token_ms, 1, CASE WHEN input IS NULL AND output IS NULL THEN 1 ELSE 0 END,
    CASE WHEN estimated <> 0 THEN 1 ELSE 0 END, input, output, cached, cache_write, reasoning, cost_nano";

/// Puts the sends of these rounds into them.
fn fill(store: &mut dyn UsageStore, rounds: &mut [Round]) -> Result<(), StoreError> {
    if rounds.is_empty() {
        return Ok(());
    }
    let values: Vec<Value> = rounds.iter().map(|round| round.request.as_str().into()).collect();
    let places: Vec<String> = (1..=values.len()).map(|n| format!("${n}")).collect();
    let sql = format!("SELECT {TARGET} FROM usage_attempts WHERE request_id IN ({})", places.join(", "));
    for mut cells in store.rows(&sql, &values)? {
        let (request, target) = (cells.text()?, target(&mut cells)?);
        if let Some(round) = rounds.iter_mut().find(|round| round.request == request) {
            round.targets.push(target);
        }
    }
    rounds.iter_mut().for_each(|round| round.targets.sort_by_key(|target| target.attempt));
    Ok(())
}

fn target(cells: &mut Cells) -> Result<Target, StoreError> {
    Ok(Target {
        attempt: cells.maybe_small()?.unwrap_or_default(),
        started: cells.time()?,
        ended: cells.maybe_time()?,
        member: cells.text()?,
        deployment: cells.text()?,
        upstream_model: cells.maybe_text()?,
        served_model: cells.maybe_text()?,
        reason: cells.maybe_text()?,
        class: cells.text()?,
        status: cells.maybe_small()?,
        latency_ms: cells.maybe_count()?,
        first_token_ms: cells.maybe_count()?,
        totals: totals(cells)?,
    })
}

/// Whether a session of this source was neither named by its client nor inherited: what it is was worked out here.
pub(crate) fn inferred(source: &str) -> bool {
    !matches!(source, "explicit" | "parent")
}
