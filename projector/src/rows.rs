//! The rows of the embedded store, as SQL.

use std::collections::BTreeSet;

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Statement, params};
use waybill_events::log::StoredFrame;
use waybill_events::sqlite::integer;
use waybill_projections::read::Unread;
use waybill_projections::sessions::{Activity, Session, Sessions, Totals};
use waybill_projections::usage::{Row, UsageAttempt, UsageEvent};
use waybill_projections::word::Word;
use waybill_schema::FOLD_VERSION;
use waybill_schema::event::{Ownership, Tokens, Usage};
use waybill_schema::frame::FrameError;
use waybill_schema::time::Time;

/// The log position that the rows cover.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Checkpoint {
    pub(crate) seq: u64,
    /// The sum of the frame there; empty before the first.
    pub(crate) sum: String,
    pub(crate) fold_version: u32,
}

/// The name of the usage projection's checkpoint.
const NAME: &str = "usage";

impl Checkpoint {
    /// The checkpoint in the database `schema`, `main` where there is but one.
    pub(crate) fn read(connection: &Connection, schema: &str) -> Result<Option<Self>, rusqlite::Error> {
        let sql = format!("SELECT seq, frame_sum, fold_version FROM {schema}.checkpoints WHERE name = ?1");
        let mut statement = connection.prepare_cached(&sql)?;
        let checkpoint = statement.query_row([NAME], |row| {
            let seq = row.get::<_, i64>(0)?.unsigned_abs();
            Ok(Self { seq, sum: row.get(1)?, fold_version: row.get(2)? })
        });
        checkpoint.optional()
    }

    /// What a checkpoint of today's fold at frame `seq` says; without a sum where the log has no such frame.
    pub(crate) fn at(connection: &Connection, seq: u64) -> Result<Self, rusqlite::Error> {
        let mut statement = connection.prepare_cached("SELECT sum FROM frames WHERE seq = ?1")?;
        let sum: Option<String> = statement.query_row([integer(seq)], |row| row.get(0)).optional()?;
        Ok(Self::of(seq, sum.unwrap_or_default()))
    }

    /// A checkpoint of today's fold at frame `seq`, whose sum is `sum`.
    pub(crate) fn of(seq: u64, sum: String) -> Self {
        Self { seq, sum, fold_version: FOLD_VERSION }
    }

    pub(crate) fn write(&self, connection: &Connection) -> Result<(), rusqlite::Error> {
        let sql = "INSERT INTO checkpoints (name, seq, frame_sum, fold_version) VALUES (?1, ?2, ?3, ?4)
                   ON CONFLICT (name) DO UPDATE SET seq = ?2, frame_sum = ?3, fold_version = ?4";
        let mut statement = connection.prepare_cached(sql)?;
        statement.execute(params![NAME, integer(self.seq), self.sum, self.fold_version])?;
        Ok(())
    }
}

/// Removes every row of the usage projection, its checkpoint included.
pub(crate) fn clear(connection: &Connection) -> Result<(), rusqlite::Error> {
    connection.execute_batch(
        "DELETE FROM usage_events; DELETE FROM usage_attempts; DELETE FROM sessions; DELETE FROM quarantine;
         DELETE FROM response_owners;
         DELETE FROM checkpoints WHERE name = 'usage';",
    )
}

/// Writes `rows` and the sessions that they change; a row whose key stands already is left out, and counted in what is
/// returned.
pub(crate) fn insert(connection: &Connection, rows: &[Row]) -> Result<usize, rusqlite::Error> {
    if rows.is_empty() {
        return Ok(0);
    }
    let mut events = connection.prepare_cached(INSERT_EVENT)?;
    let mut attempts = connection.prepare_cached(INSERT_ATTEMPT)?;
    let mut sessions = Sessions::new(|text| text.into());
    let mut n_left_out = 0;
    for row in rows {
        let n_written = match row {
            Row::Event(row) => insert_event(&mut events, row)?,
            Row::Attempt(row) => insert_attempt(&mut attempts, row)?,
        };
        if n_written == 0 {
            n_left_out += 1;
        } else {
            sessions.take(row);
        }
    }
    merge_sessions(connection, sessions)?;
    Ok(n_left_out)
}

/// Merges what changes of sessions into what stands of them.
fn merge_sessions(connection: &Connection, mut sessions: Sessions) -> Result<(), rusqlite::Error> {
    let mut standing = connection.prepare_cached(SELECT_SESSION)?;
    let mut stand = Vec::new();
    for Session { session, scope, .. } in sessions.rows() {
        stand.extend(standing.query_row([session, scope], standing_session).optional()?);
    }
    stand.into_iter().for_each(|session| sessions.merge(session));
    let mut put = connection.prepare_cached(PUT_SESSION)?;
    sessions.rows().try_for_each(|session| put_session(&mut put, session))
}

/// Writes who made a response: the first to be seen stands, and becomes final where the same deployment says so.
pub(crate) fn own(connection: &Connection, ownership: &Ownership, seen: Time) -> Result<(), rusqlite::Error> {
    connection.prepare_cached(INSERT_OWNER)?.execute(params![
        ownership.scope.as_str(),
        ownership.response,
        ownership.model.as_str(),
        Word(ownership.endpoint).to_string(),
        Word(ownership.state).to_string(),
        seen.0,
        ownership.request.as_str(),
        ownership.deployment.as_str(),
        ownership.channel.as_str(),
        integer(ownership.incarnation),
        ownership.session.as_str(),
        Word(ownership.source).to_string(),
    ])?;
    Ok(())
}

/// Keeps a line that cannot be decoded.
pub(crate) fn quarantine(connection: &Connection, seq: u64, unread: &Unread<'_>) -> Result<(), rusqlite::Error> {
    keep(connection, seq, unread.line, &unread.why.to_string(), unread.bytes)
}

/// Keeps a frame without a header that can be read, as line 0.
pub(crate) fn quarantine_frame(
    connection: &Connection,
    frame: &StoredFrame,
    why: &FrameError,
) -> Result<(), rusqlite::Error> {
    keep(connection, frame.seq.0, 0, &why.to_string(), &frame.bytes)
}

fn keep(connection: &Connection, seq: u64, line: u32, why: &str, bytes: &[u8]) -> Result<(), rusqlite::Error> {
    let sql = "INSERT INTO quarantine (seq, line, why, bytes) VALUES (?1, ?2, ?3, ?4)";
    connection.prepare_cached(sql)?.execute(params![integer(seq), line, why, bytes])?;
    Ok(())
}

const SELECT_SESSION: &str =
    "SELECT session_id, scope, started, ended, last_request, session_source, requests, failed, models,
                   deployments, sends, sends_unknown, sends_estimated, input, output, cached, cache_write, reasoning,
                   cost_nano
               FROM sessions WHERE session_id = ?1 AND scope = ?2";

const PUT_SESSION: &str =
    "INSERT OR REPLACE INTO sessions (session_id, scope, started, ended, last_request, session_source, requests,
                   failed, models, deployments, sends, sends_unknown, sends_estimated, input, output, cached,
                   cache_write, reasoning, cost_nano)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)";

fn standing_session(row: &rusqlite::Row<'_>) -> Result<Session, rusqlite::Error> {
    let number = |column| row.get::<_, i64>(column).map(i64::unsigned_abs);
    let known = |column| row.get::<_, Option<i64>>(column).map(|n| n.map(i64::unsigned_abs));
    let activity =
        Activity { started: Time(row.get(2)?), ended: Time(row.get(3)?), request: row.get(4)?, source: row.get(5)? };
    let totals = Totals {
        sends: number(10)?,
        sends_unknown: number(11)?,
        sends_estimated: number(12)?,
        input: known(13)?,
        output: known(14)?,
        cached: known(15)?,
        cache_write: known(16)?,
        reasoning: known(17)?,
        cost_nano: known(18)?,
    };
    Ok(Session {
        session: row.get(0)?,
        scope: row.get(1)?,
        activity: Some(activity),
        requests: number(6)?,
        failed: number(7)?,
        models: names(row, 8)?,
        deployments: names(row, 9)?,
        totals,
    })
}

fn names(row: &rusqlite::Row<'_>, column: usize) -> Result<BTreeSet<String>, rusqlite::Error> {
    let text: String = row.get(column)?;
    let odd = |error| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error));
    serde_json::from_str(&text).map_err(odd)
}

/// A change without any activity finds a session that has some: the row of its request came before.
fn put_session(statement: &mut Statement<'_>, session: &Session) -> Result<(), rusqlite::Error> {
    let Some(activity) = &session.activity else { return Ok(()) };
    let list = |names| serde_json::to_string(names).expect("names are plain text");
    let Totals { sends, sends_unknown, sends_estimated, .. } = session.totals;
    let Totals { input, output, cached, cache_write, reasoning, cost_nano, .. } = session.totals;
    statement.execute(params![
        session.session,
        session.scope,
        activity.started.0,
        activity.ended.0,
        activity.request,
        activity.source,
        integer(session.requests),
        integer(session.failed),
        list(&session.models),
        list(&session.deployments),
        integer(sends),
        integer(sends_unknown),
        integer(sends_estimated),
        input.map(integer),
        output.map(integer),
        cached.map(integer),
        cache_write.map(integer),
        reasoning.map(integer),
        cost_nano.map(integer),
    ])?;
    Ok(())
}

const INSERT_EVENT: &str =
    "INSERT INTO usage_events (request_id, started, ended, scope, key_id, group_id, model, endpoint, stream,
                   session_id, session_source, signal, sticky_type, sticky_hit, fallback, outcome, error_class, code,
                   status, attempts, deployment, latency_ms, seq_first, seq_last)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21,
                   ?22, ?23, ?24)
               ON CONFLICT DO NOTHING";

const INSERT_OWNER: &str =
    "INSERT INTO response_owners (scope, response, model, endpoint, state, seen, request_id, deployment, channel,
                   incarnation, session_id, session_source)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
               ON CONFLICT (scope, response) DO UPDATE SET state = excluded.state
                   WHERE excluded.state = 'final' AND excluded.deployment = response_owners.deployment";

const INSERT_ATTEMPT: &str =
    "INSERT INTO usage_attempts (request_id, attempt, started, ended, member, deployment, upstream_model,
                   reason, class, status, latency_ms, first_token_ms, input, output, cached, cache_write, reasoning,
                   estimated, cost_nano, served_model)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)
               ON CONFLICT DO NOTHING";

fn insert_event(statement: &mut Statement<'_>, row: &UsageEvent) -> Result<usize, rusqlite::Error> {
    let context = &row.context;
    statement.execute(params![
        row.request.as_str(),
        row.started.0,
        row.ended.0,
        context.scope.as_str(),
        context.key.as_str(),
        context.group.as_str(),
        context.model.as_str(),
        Word(context.endpoint).to_string(),
        context.stream,
        context.session.as_str(),
        Word(context.source).to_string(),
        context.signal,
        context.sticky.as_ref().map(|sticky| Word(sticky.by).to_string()),
        row.sticky_hit,
        row.fallback,
        Word(row.outcome).to_string(),
        row.error_class.map(|class| Word(class).to_string()),
        row.code,
        row.status,
        row.attempts,
        row.deployment.as_ref().map(|deployment| deployment.as_str()),
        row.latency_ms.map(integer),
        integer(row.seq_first),
        integer(row.seq_last),
    ])
}

fn insert_attempt(statement: &mut Statement<'_>, row: &UsageAttempt) -> Result<usize, rusqlite::Error> {
    let Usage { input, output, cached, cache_write, reasoning } = row.usage;
    statement.execute(params![
        row.request.as_str(),
        row.attempt,
        row.started.0,
        row.ended.map(|ended| ended.0),
        row.member.as_str(),
        row.deployment.as_str(),
        row.upstream_model.as_ref().map(|model| model.as_str()),
        row.reason.map(|reason| Word(reason).to_string()),
        Word(row.class).to_string(),
        row.status,
        row.latency_ms.map(integer),
        row.first_token_ms.map(integer),
        input.known().map(integer),
        output.known().map(integer),
        cached.known().map(integer),
        cache_write.known().map(integer),
        reasoning.known().map(integer),
        estimated(&row.usage),
        row.cost_nano.map(integer),
        row.served_model,
    ])
}

/// The bit set of the token columns that were worked out here: the order is the migration's.
pub(crate) fn estimated(usage: &Usage) -> u8 {
    let parts = [usage.input, usage.output, usage.cached, usage.cache_write, usage.reasoning];
    let bits = parts.iter().zip(0..).map(|(part, bit)| u8::from(matches!(part, Tokens::Estimated(_))) << bit);
    bits.sum()
}
