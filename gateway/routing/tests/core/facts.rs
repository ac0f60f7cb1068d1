//! Facts as the tests write them: every member `x` serves model `m` as deployment `x/m`.

use waybill_schema::catalogue::{RowKey, RowKind};
use waybill_schema::event::{
    Act, Affinity, Attempt, Batch, Choice, Class, Context, Effect, Endpoint, Event, Fact, KeyType, Op, Operator,
    Preference, Probe, Reason, Selection, SessionSource, Sticky, Thresholds, Usage,
};
use waybill_schema::id::Revision;
use waybill_schema::time::Time;

/// Three failures cool for 10 s, doubled each time up to 60 s; a block stands for 300 s.
pub(crate) const THRESHOLDS: Thresholds =
    Thresholds { failures: 3, cooldown_ms: 10_000, growth_permille: 2000, cooldown_ms_max: 60_000, block_ms: 300_000 };

/// A member and its incarnation.
pub(crate) type Of<'a> = (&'a str, u64);

pub(crate) fn fact(number: u64, at_s: i64, event: Event) -> Fact {
    Fact { revision: revision(number), at: Time(at_s * 1000), event }
}

pub(crate) fn revision(number: u64) -> Revision {
    Revision { writer: "w".into(), epoch: 1, number }
}

/// What an attempt says beyond its member and effect.
#[derive(Clone, Copy, Default)]
pub(crate) struct Said<'a> {
    pub(crate) model: Option<&'a str>,
    pub(crate) asks_s: Option<u64>,
    pub(crate) key: Option<&'a str>,
    pub(crate) block_s: Option<u64>,
    /// Absent where it is the one that usually has the effect.
    pub(crate) class: Option<Class>,
}

pub(crate) fn attempt((member, incarnation): Of<'_>, effect: Effect, said: Said<'_>) -> Event {
    let block_ms = said.block_s.map_or(THRESHOLDS.block_ms, |s| s * 1000);
    Event::Attempt(Box::new(Attempt {
        request: "r".into(),
        attempt: 1,
        member: member.into(),
        deployment: deployment(member).as_str().into(),
        incarnation,
        model: said.model.unwrap_or("m").into(),
        class: said.class.unwrap_or(class(effect)),
        status: None,
        latency_ms: 1,
        first_token_ms: None,
        usage: Usage::default(),
        cost_nano: None,
        retry_after_ms: said.asks_s.map(|s| s * 1000),
        served_model: None,
        effect,
        thresholds: Thresholds { block_ms, ..THRESHOLDS },
        sticky: said.key.map(Into::into),
    }))
}

pub(crate) fn probe((member, incarnation): Of<'_>, effect: Effect) -> Event {
    Event::Probe(Box::new(Probe {
        member: member.into(),
        deployment: deployment(member).as_str().into(),
        incarnation,
        model: "m".into(),
        class: class(effect),
        status: None,
        latency_ms: 1,
        effect,
        thresholds: THRESHOLDS,
    }))
}

pub(crate) fn claim(key: &str, (member, incarnation): Of<'_>) -> Event {
    Event::Selection(Box::new(Selection {
        request: "r".into(),
        attempt: 1,
        member: member.into(),
        deployment: deployment(member).as_str().into(),
        incarnation,
        upstream_model: "m".into(),
        reason: Reason::Draw,
        claim: true,
        choice: Some(Choice {
            candidates: Vec::new(),
            excluded: Vec::new(),
            draw: 0,
            affinity: Affinity::Absent,
            last_resort: false,
            catalogue: 1,
        }),
        context: Some(Context {
            scope: "s".into(),
            key: "s".into(),
            group: "g".into(),
            model: "m".into(),
            endpoint: Endpoint::Chat,
            stream: false,
            session: key.into(),
            source: SessionSource::Explicit,
            signal: "header:x-session-id".to_owned(),
            sticky: Some(Sticky { key: key.into(), by: KeyType::Sess }),
        }),
    }))
}

pub(crate) fn prefer(key: &str, (member, incarnation): Of<'_>, base: Option<u64>, ttl_s: u64) -> Event {
    Event::Preference(Box::new(Preference {
        request: "r".into(),
        key: key.into(),
        member: member.into(),
        deployment: deployment(member).as_str().into(),
        incarnation,
        model: "m".into(),
        pool: "g".into(),
        path: Vec::new(),
        chains: Vec::new(),
        base: base.map(revision),
        ttl_ms: ttl_s * 1000,
    }))
}

pub(crate) fn operate(act: Act, target: &str) -> Event {
    Event::Operator(Operator { act, target: target.to_owned(), actor: "me".to_owned(), reason: "test".to_owned() })
}

pub(crate) fn delete(member: &str) -> Event {
    let row = RowKey { kind: RowKind::Member, id: member.to_owned() };
    let ops = vec![Op { row, before: None, after: None }];
    let (actor, reason) = ("me".to_owned(), "test".to_owned());
    Event::Catalogue(Box::new(Batch { revision: 2, actor, reason, file: None, ops, undo: Vec::new() }))
}

pub(crate) fn deployment(member: &str) -> String {
    format!("{member}/m")
}

fn class(effect: Effect) -> Class {
    match effect {
        Effect::None => Class::CallerError,
        Effect::Recover => Class::Success,
        Effect::Count => Class::Upstream5xx,
        Effect::Cool => Class::RateLimited,
        Effect::Block => Class::ModelUnsupported,
    }
}
