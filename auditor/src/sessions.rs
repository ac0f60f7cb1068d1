//! Sessions: what was talked about with whom, by `scope + session` (S3.7), from the usage rows.
//!
//! Tokens and money stand at the sends and are summed from there alone, so that no request counts twice (S3.25).

use rusqlite::{Connection, Row, ToSql, params};
use serde::{Deserialize, Serialize};
use waybill_events::sqlite::integer;
use waybill_schema::id::{ScopeId, SessionId};
use waybill_schema::time::Time;

/// At most this many entries on a page.
pub const PAGE_MAX: u32 = 200;

/// Which part of a list is wanted.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// How many entries, at most [`PAGE_MAX`]; 0 stands for 50.
    pub limit: u32,
    /// Behind which entry; absent for the beginning.
    pub after: Option<Cursor>,
}

/// A place in a list: opaque text for whoever holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(Place);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    at: i64,
    key: (String, String),
}

/// The text is not a cursor that was given out here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor of this list")]
pub struct CursorError;

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(serde_json::to_vec(&self.0).expect("a place has only text keys")))
    }
}

impl std::str::FromStr for Cursor {
    type Err = CursorError;

    fn from_str(text: &str) -> Result<Self, CursorError> {
        let bytes = hex::decode(text).map_err(|_| CursorError)?;
        serde_json::from_slice(&bytes).map(Self).map_err(|_| CursorError)
    }
}

impl Serialize for Cursor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Paged<T> {
    /// The entries.
    pub entries: Vec<T>,
    /// Where the next page begins; absent on the last one.
    pub next: Option<Cursor>,
}

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
    /// The models that were asked for, sorted.
    pub models: Vec<String>,
    /// The deployments that were sent to, sorted.
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
    /// The deployment.
    pub deployment: String,
    /// The model name that the upstream was sent.
    pub upstream_model: Option<String>,
    /// Why this one.
    pub reason: Option<String>,
    /// How it ended.
    pub class: String,
    /// The upstream's HTTP status.
    pub status: Option<u16>,
    /// Milliseconds from send to end.
    pub latency_ms: Option<u64>,
    /// What it used.
    pub totals: Totals,
}

/// The sessions of `scope`, or of every scope, by latest activity, the latest first.
pub fn sessions(
    connection: &Connection,
    scope: Option<&ScopeId>,
    page: &Page,
) -> Result<Paged<Session>, rusqlite::Error> {
    // With a single max(), SQLite takes the bare column `session_source` from the row that holds it.
    let sql = "SELECT scope, session_id, session_source, min(started), max(ended) AS latest, count(*),
                   count(*) FILTER (WHERE outcome <> 'success')
               FROM usage_events WHERE (?1 IS NULL OR scope = ?1) GROUP BY scope, session_id
               HAVING ?2 IS NULL OR (latest, scope, session_id) < (?2, ?3, ?4)
               ORDER BY latest DESC, scope DESC, session_id DESC LIMIT ?5";
    let (at, first, second) = page.place();
    let scope = scope.map(ScopeId::as_str);
    let mut statement = connection.prepare_cached(sql)?;
    let rows = statement.query_map(params![scope, at, first, second, page.fetched()], |row| {
        let source: String = row.get(2)?;
        Ok(Session {
            scope: ScopeId::new(row.get::<_, String>(0)?),
            session: SessionId::new(row.get::<_, String>(1)?),
            inferred: inferred(&source),
            source,
            started: Time(row.get(3)?),
            ended: Time(row.get(4)?),
            requests: count(row, 5)?,
            failed: count(row, 6)?,
            models: Vec::new(),
            deployments: Vec::new(),
            totals: Totals::default(),
        })
    })?;
    let sessions = rows.collect::<Result<Vec<_>, _>>()?;
    let mut paged = page.cut(sessions, |session| Place {
        at: session.ended.0,
        key: (session.scope.to_string(), session.session.to_string()),
    });
    paged.entries.iter_mut().try_for_each(|session| fill(connection, session))?;
    Ok(paged)
}

/// The scopes that have a session of this name, in order: a client's session id alone names no tenant.
pub fn scopes(connection: &Connection, session: &SessionId) -> Result<Vec<ScopeId>, rusqlite::Error> {
    let sql = "SELECT DISTINCT scope FROM usage_events WHERE session_id = ?1 ORDER BY scope";
    let mut statement = connection.prepare_cached(sql)?;
    let scopes = statement.query_map([session.as_str()], |row| Ok(ScopeId::new(row.get::<_, String>(0)?)))?;
    scopes.collect()
}

/// The rounds of one session in the order in which they ended.
pub fn rounds(
    connection: &Connection,
    scope: &ScopeId,
    session: &SessionId,
    page: &Page,
) -> Result<Paged<Round>, rusqlite::Error> {
    let sql = "SELECT request_id, started, ended, model, endpoint, group_id, session_source, sticky_hit, fallback,
                   outcome, error_class, status, latency_ms
               FROM usage_events
               WHERE scope = ?1 AND session_id = ?2 AND (?3 IS NULL OR (ended, request_id) > (?3, ?4))
               ORDER BY ended, request_id LIMIT ?5";
    let (at, request, _) = page.place();
    let mut statement = connection.prepare_cached(sql)?;
    let rows = statement.query_map(params![scope.as_str(), session.as_str(), at, request, page.fetched()], |row| {
        let source: String = row.get(6)?;
        Ok(Round {
            request: row.get(0)?,
            started: Time(row.get(1)?),
            ended: Time(row.get(2)?),
            model: row.get(3)?,
            endpoint: row.get(4)?,
            group: row.get(5)?,
            inferred: inferred(&source),
            source,
            sticky_hit: row.get(7)?,
            fallback: row.get(8)?,
            outcome: row.get(9)?,
            error_class: row.get(10)?,
            status: row.get(11)?,
            latency_ms: some_count(row, 12)?,
            targets: Vec::new(),
        })
    })?;
    let rounds = rows.collect::<Result<Vec<_>, _>>()?;
    let mut paged = page.cut(rounds, |round| Place { at: round.ended.0, key: (round.request.clone(), String::new()) });
    for round in &mut paged.entries {
        round.targets = targets(connection, &round.request)?;
    }
    Ok(paged)
}

impl Page {
    fn limit(&self) -> u32 {
        if self.limit == 0 { 50 } else { self.limit.min(PAGE_MAX) }
    }

    /// One more than asked for, to see whether another page follows.
    fn fetched(&self) -> i64 {
        integer(u64::from(self.limit()) + 1)
    }

    fn place(&self) -> (Option<i64>, Option<&str>, Option<&str>) {
        let place = self.after.as_ref().map(|cursor| &cursor.0);
        let key = place.map(|place| &place.key);
        (place.map(|place| place.at), key.map(|key| key.0.as_str()), key.map(|key| key.1.as_str()))
    }

    fn cut<T>(&self, mut entries: Vec<T>, place: impl Fn(&T) -> Place) -> Paged<T> {
        let limit = self.limit() as usize;
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| Cursor(place(last)));
        Paged { entries, next }
    }
}

/// The sums over sends, in the order in which [`totals`] reads them.
const TOTALS: &str = "count(*), count(*) FILTER (WHERE input IS NULL AND output IS NULL),
    count(*) FILTER (WHERE estimated <> 0), sum(input), sum(output), sum(cached), sum(cache_write), sum(reasoning),
    sum(cost_nano)";

fn fill(connection: &Connection, session: &mut Session) -> Result<(), rusqlite::Error> {
    let key: [&dyn ToSql; 2] = [&session.scope.as_str(), &session.session.as_str()];
    let own = "usage_events WHERE scope = ?1 AND session_id = ?2";
    let sends = format!("usage_attempts WHERE request_id IN (SELECT request_id FROM {own})");
    let names = |sql: &str| {
        let mut statement = connection.prepare_cached(sql)?;
        let names = statement.query_map(key, |row| row.get(0))?;
        names.collect::<Result<Vec<String>, _>>()
    };
    session.models = names(&format!("SELECT DISTINCT model FROM {own} ORDER BY 1"))?;
    session.deployments = names(&format!("SELECT DISTINCT deployment FROM {sends} ORDER BY 1"))?;
    let mut statement = connection.prepare_cached(&format!("SELECT {TOTALS} FROM {sends}"))?;
    session.totals = statement.query_row(key, |row| totals(row, 0))?;
    Ok(())
}

fn targets(connection: &Connection, request: &str) -> Result<Vec<Target>, rusqlite::Error> {
    let sql = format!(
        "SELECT attempt, deployment, upstream_model, reason, class, status, latency_ms, {TOTALS}
         FROM usage_attempts WHERE request_id = ?1 GROUP BY attempt ORDER BY attempt"
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let targets = statement.query_map([request], |row| {
        Ok(Target {
            attempt: row.get(0)?,
            deployment: row.get(1)?,
            upstream_model: row.get(2)?,
            reason: row.get(3)?,
            class: row.get(4)?,
            status: row.get(5)?,
            latency_ms: some_count(row, 6)?,
            totals: totals(row, 7)?,
        })
    })?;
    targets.collect()
}

fn totals(row: &Row<'_>, first: usize) -> Result<Totals, rusqlite::Error> {
    Ok(Totals {
        sends: count(row, first)?,
        sends_unknown: count(row, first + 1)?,
        sends_estimated: count(row, first + 2)?,
        input: some_count(row, first + 3)?,
        output: some_count(row, first + 4)?,
        cached: some_count(row, first + 5)?,
        cache_write: some_count(row, first + 6)?,
        reasoning: some_count(row, first + 7)?,
        cost_nano: some_count(row, first + 8)?,
    })
}

/// A session that nobody named: its identity is the fingerprint of a prompt.
fn inferred(source: &str) -> bool {
    source == "prompt"
}

fn count(row: &Row<'_>, column: usize) -> Result<u64, rusqlite::Error> {
    Ok(row.get::<_, i64>(column)?.unsigned_abs())
}

fn some_count(row: &Row<'_>, column: usize) -> Result<Option<u64>, rusqlite::Error> {
    Ok(row.get::<_, Option<i64>>(column)?.map(i64::unsigned_abs))
}
