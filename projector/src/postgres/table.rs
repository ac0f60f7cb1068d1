//! The tables of a generation as COPY fills them: their columns, and a row of ours as cells.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use serde::Serialize;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use waybill_projections::changes::{CatalogueChange, Change, HealthChange, ModelChange, Owner};
use waybill_projections::sessions::{Activity, LATEST, Session, Totals};
use waybill_projections::usage::{Row, UsageAttempt, UsageEvent};
use waybill_projections::word::Word;
use waybill_schema::event::Stored;
use waybill_schema::id::Revision;
use waybill_schema::time::Time;

use super::batch::{Batch, Quarantined};
use super::text::storable;
use crate::rows::estimated;

/// A table and the columns that are filled, in order.
pub(super) struct Table {
    pub(super) name: &'static str,
    /// So many of the columns, the first ones, are its key.
    pub(super) n_key: usize,
    pub(super) columns: &'static [(&'static str, Type)],
}

impl Table {
    /// The place of a column.
    pub(super) fn column(&self, name: &str) -> usize {
        self.columns.iter().position(|(column, _)| *column == name).expect("the table has the column")
    }
}

/// Rows for one table.
pub(super) struct Filled<'a> {
    pub(super) table: &'static Table,
    pub(super) rows: Vec<Vec<Cell<'a>>>,
}

/// A value of a row.
#[derive(Debug)]
pub(super) enum Cell<'a> {
    Null,
    Text(Cow<'a, str>),
    Number(i64),
    Flag(bool),
    Moment(Time),
    Bytes(&'a [u8]),
    Names(&'a BTreeSet<String>),
}

macro_rules! columns {
    ($($name:ident $kind:ident),* $(,)?) => { &[$((stringify!($name), Type::$kind)),*] };
}

pub(super) static USAGE_EVENTS: Table = Table {
    name: "usage_events",
    n_key: 2,
    columns: columns![
        request_id TEXT, started TIMESTAMPTZ, ended TIMESTAMPTZ, scope TEXT, key_id TEXT, group_id TEXT, model TEXT,
        endpoint TEXT, stream BOOL, session_id TEXT, session_source TEXT, signal TEXT, sticky_type TEXT,
        sticky_hit BOOL, fallback BOOL, outcome TEXT, error_class TEXT, code TEXT, status INT4, attempts INT4,
        deployment TEXT, latency_ms INT8, seq_first INT8, seq_last INT8, seq_written INT8,
    ],
};

pub(super) static USAGE_ATTEMPTS: Table = Table {
    name: "usage_attempts",
    n_key: 3,
    columns: columns![
        request_id TEXT, attempt INT4, started TIMESTAMPTZ, ended TIMESTAMPTZ, member TEXT, deployment TEXT,
        upstream_model TEXT, reason TEXT, class TEXT, status INT4, latency_ms INT8, first_token_ms INT8, input INT8,
        output INT8, cached INT8, cache_write INT8, reasoning INT8, estimated INT4, cost_nano INT8, served_model TEXT,
    ],
};

pub(super) static SESSIONS: Table = Table {
    name: "sessions",
    n_key: 2,
    columns: columns![
        session_id TEXT, scope TEXT, started TIMESTAMPTZ, ended TIMESTAMPTZ, last_request TEXT, session_source TEXT,
        requests INT8, failed INT8, models TEXT_ARRAY, deployments TEXT_ARRAY, sends INT8, sends_unknown INT8,
        sends_estimated INT8, input INT8, output INT8, cached INT8, cache_write INT8, reasoning INT8, cost_nano INT8,
    ],
};

static HEALTH_CHANGES: Table = Table {
    name: "health_changes",
    n_key: 3,
    columns: columns![
        writer TEXT, epoch INT8, number INT8, at TIMESTAMPTZ, target TEXT, incarnation INT8, change TEXT, class TEXT,
        model TEXT, until TIMESTAMPTZ, failures INT8, actor TEXT, reason TEXT,
    ],
};

static CATALOGUE_CHANGES: Table = Table {
    name: "catalogue_changes",
    n_key: 4,
    columns: columns![
        writer TEXT, epoch INT8, number INT8, op INT4, revision INT8, applied BOOL, at TIMESTAMPTZ, actor TEXT,
        reason TEXT, kind TEXT, row_id TEXT, before JSON, after JSON, undoes_batch INT8, undoes_op INT4,
    ],
};

static MODEL_CHANGES: Table = Table {
    name: "model_changes",
    n_key: 4,
    columns: columns![
        writer TEXT, epoch INT8, number INT8, item INT4, at TIMESTAMPTZ, channel TEXT, incarnation INT8, model TEXT,
        change TEXT, state TEXT, actor TEXT,
    ],
};

pub(super) static RESPONSE_OWNERS: Table = Table {
    name: "response_owners",
    n_key: 4,
    columns: columns![
        scope TEXT, model TEXT, endpoint TEXT, response TEXT, state TEXT, seen TIMESTAMPTZ, request_id TEXT,
        deployment TEXT, channel TEXT, incarnation INT8, session_id TEXT, session_source TEXT,
    ],
};

static QUARANTINE: Table =
    Table { name: "quarantine", n_key: 2, columns: columns![seq INT8, line INT8, why TEXT, bytes BYTEA] };

/// All tables that rows are put in.
pub(super) static TABLES: [&Table; 8] = [
    &USAGE_EVENTS,
    &USAGE_ATTEMPTS,
    &SESSIONS,
    &RESPONSE_OWNERS,
    &HEALTH_CHANGES,
    &CATALOGUE_CHANGES,
    &MODEL_CHANGES,
    &QUARANTINE,
];

/// The rows of a batch, table by table: those that are only ever put in, and the owners, which may become final.
pub(super) fn fill(batch: &Batch) -> (Vec<Filled<'_>>, Filled<'_>) {
    let (mut events, mut attempts) = (Vec::new(), Vec::new());
    for row in &batch.usage {
        match row {
            Row::Event(row) => events.push(event(row)),
            Row::Attempt(row) => attempts.push(attempt(row)),
        }
    }
    let (mut health, mut catalogue, mut models, mut owners) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for change in &batch.changes {
        match change {
            Change::Health(change) => health.push(health_change(change)),
            Change::Catalogue(change) => catalogue.push(catalogue_change(change)),
            Change::Model(change) => models.push(model_change(change)),
            Change::Owner(change) => owners.push(owner(change)),
        }
    }
    let filled = vec![
        Filled { table: &USAGE_EVENTS, rows: events },
        Filled { table: &USAGE_ATTEMPTS, rows: attempts },
        Filled { table: &HEALTH_CHANGES, rows: health },
        Filled { table: &CATALOGUE_CHANGES, rows: catalogue },
        Filled { table: &MODEL_CHANGES, rows: models },
        Filled { table: &QUARANTINE, rows: batch.quarantined.iter().map(quarantined).collect() },
    ];
    (filled, Filled { table: &RESPONSE_OWNERS, rows: owners })
}

fn event(row: &UsageEvent) -> Vec<Cell<'_>> {
    let context = &row.context;
    vec![
        text(row.request.as_str()),
        Cell::Moment(row.started),
        Cell::Moment(row.ended),
        text(context.scope.as_str()),
        text(context.key.as_str()),
        text(context.group.as_str()),
        text(context.model.as_str()),
        word(context.endpoint),
        Cell::Flag(context.stream),
        text(context.session.as_str()),
        word(context.source),
        text(&context.signal),
        maybe(context.sticky.as_ref(), |sticky| word(sticky.by)),
        Cell::Flag(row.sticky_hit),
        Cell::Flag(row.fallback),
        word(row.outcome),
        maybe(row.error_class, word),
        maybe(row.code.as_deref(), text),
        maybe(row.status, number),
        number(row.attempts),
        maybe(row.deployment.as_ref(), |deployment| text(deployment.as_str())),
        maybe(row.latency_ms, number),
        number(row.seq_first),
        number(row.seq_last),
        number(row.seq_written),
    ]
}

fn attempt(row: &UsageAttempt) -> Vec<Cell<'_>> {
    let usage = &row.usage;
    vec![
        text(row.request.as_str()),
        number(row.attempt),
        Cell::Moment(row.started),
        maybe(row.ended, Cell::Moment),
        text(row.member.as_str()),
        text(row.deployment.as_str()),
        maybe(row.upstream_model.as_ref(), |model| text(model.as_str())),
        maybe(row.reason, word),
        word(row.class),
        maybe(row.status, number),
        maybe(row.latency_ms, number),
        maybe(row.first_token_ms, number),
        maybe(usage.input.known(), number),
        maybe(usage.output.known(), number),
        maybe(usage.cached.known(), number),
        maybe(usage.cache_write.known(), number),
        maybe(usage.reasoning.known(), number),
        number(estimated(usage)),
        maybe(row.cost_nano, number),
        maybe(row.served_model.as_deref(), text),
    ]
}

/// A session that was active at some time; its texts are storable by then.
pub(super) fn session(session: &Session) -> Option<Vec<Cell<'_>>> {
    let Activity { started, ended, request, source } = session.activity.as_ref()?;
    let totals: &Totals = &session.totals;
    Some(vec![
        text(&session.session),
        text(&session.scope),
        Cell::Moment(*started),
        Cell::Moment(*ended),
        text(request),
        text(source),
        number(session.requests),
        number(session.failed),
        Cell::Names(&session.models),
        Cell::Names(&session.deployments),
        number(totals.sends),
        number(totals.sends_unknown),
        number(totals.sends_estimated),
        maybe(totals.input, number),
        maybe(totals.output, number),
        maybe(totals.cached, number),
        maybe(totals.cache_write, number),
        maybe(totals.reasoning, number),
        maybe(totals.cost_nano, number),
    ])
}

fn health_change(change: &HealthChange) -> Vec<Cell<'_>> {
    let mut cells = key(&change.revision);
    cells.extend([
        Cell::Moment(change.at),
        text(&change.target),
        maybe(change.incarnation, number),
        word(change.kind),
        maybe(change.class, word),
        maybe(change.model.as_ref(), |model| text(model.as_str())),
        maybe(change.until, Cell::Moment),
        maybe(change.failures, number),
        maybe(change.actor.as_deref(), text),
        maybe(change.reason.as_deref(), text),
    ]);
    cells
}

fn catalogue_change(change: &CatalogueChange) -> Vec<Cell<'_>> {
    let mut cells = key(&change.revision);
    cells.extend([
        number(change.op),
        number(change.catalogue),
        Cell::Flag(change.applied),
        Cell::Moment(change.at),
        text(&change.actor),
        text(&change.reason),
        Cell::Text(change.row.kind.to_string().into()),
        text(&change.row.id),
        maybe(change.before.as_ref(), json),
        maybe(change.after.as_ref(), json),
        maybe(change.undoes, |undoes| number(undoes.batch)),
        maybe(change.undoes, |undoes| number(undoes.op)),
    ]);
    cells
}

fn model_change(change: &ModelChange) -> Vec<Cell<'_>> {
    let mut cells = key(&change.revision);
    cells.extend([
        number(change.item),
        Cell::Moment(change.at),
        text(change.channel.as_str()),
        number(change.incarnation),
        text(change.model.as_str()),
        text(if change.is_new { "added" } else { "removed" }),
        word(change.state),
        maybe(change.actor.as_deref(), text),
    ]);
    cells
}

fn owner(owner: &Owner) -> Vec<Cell<'_>> {
    vec![
        text(owner.scope.as_str()),
        text(owner.model.as_str()),
        word(owner.endpoint),
        text(&owner.response),
        word(owner.state),
        Cell::Moment(owner.seen),
        text(owner.request.as_str()),
        text(owner.deployment.as_str()),
        text(owner.channel.as_str()),
        number(owner.incarnation),
        text(owner.session.as_str()),
        word(owner.source),
    ]
}

fn quarantined(quarantined: &Quarantined) -> Vec<Cell<'_>> {
    let Quarantined { seq, line, why, bytes } = quarantined;
    vec![number(seq.0), number(*line), text(why), Cell::Bytes(bytes)]
}

fn key(revision: &Revision) -> Vec<Cell<'_>> {
    vec![text(revision.writer.as_str()), number(revision.epoch), number(revision.number)]
}

fn text(text: &str) -> Cell<'_> {
    Cell::Text(storable(text))
}

fn word<T: Serialize>(kind: T) -> Cell<'static> {
    Cell::Text(Word(kind).to_string().into())
}

/// Numbers of ours that count things never come near the border.
fn number(n: impl TryInto<i64>) -> Cell<'static> {
    Cell::Number(n.try_into().unwrap_or(i64::MAX))
}

/// The type `json` holds the text as it stands, an escaped U+0000 included, which `jsonb` would refuse.
fn json(stored: &Stored) -> Cell<'static> {
    Cell::Text(serde_json::to_string(stored).expect("rows are plain data").into())
}

fn maybe<'a, T>(value: Option<T>, cell: impl FnOnce(T) -> Cell<'a>) -> Cell<'a> {
    value.map_or(Cell::Null, cell)
}

impl ToSql for Cell<'_> {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Self::Null => Ok(IsNull::Yes),
            Self::Text(text) => text.to_sql(kind, out),
            Self::Number(n) if *kind == Type::INT4 => i32::try_from(*n).unwrap_or(i32::MAX).to_sql(kind, out),
            Self::Number(n) => n.to_sql(kind, out),
            Self::Flag(flag) => flag.to_sql(kind, out),
            Self::Moment(time) => moment(*time).to_sql(kind, out),
            Self::Bytes(bytes) => bytes.to_sql(kind, out),
            Self::Names(names) => names.iter().collect::<Vec<_>>().to_sql(kind, out),
        }
    }

    /// The cells of a row are written in the order of its table's columns, which name their types.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

fn moment(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(time.clamp(Time(0), LATEST).0.unsigned_abs())
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
