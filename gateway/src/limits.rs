//! Limits: what a caller has left of its requests and tokens a minute, and of its budget.
//!
//! All of it is soft. A minute is counted by each gateway for itself, tokens when they are known, which is after the
//! request was admitted; what was spent of a budget is what the usage store shows, which lags by a second or two.
//! Nothing here waits for anything, and a refusal says truly when there is room again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use waybill_routing::rate::Minute;
use waybill_schema::catalogue::terms::{Budget, Period, Rights, Terms};
use waybill_schema::catalogue::{RowKey, RowKind};
use waybill_schema::event::Usage;
use waybill_schema::time::Time;

use crate::refusal::Refusal;

/// So many idle minutes are kept before they are swept out.
const METERS_MAX: usize = 4096;

/// The meters of all keys, teams and organizations.
#[derive(Debug, Default)]
pub struct Limits {
    meters: Mutex<HashMap<RowKey, Meter>>,
    spending: ArcSwap<Spending>,
}

/// One minute of a key, a team or an organization.
#[derive(Debug, Default)]
struct Meter {
    requests: Minute,
    tokens: Minute,
}

/// What keys, teams and organizations had spent by some moment, as the usage store showed it.
#[derive(Debug, Default)]
pub struct Spending {
    /// The moment.
    pub as_of: Time,
    /// What each had spent of its day and of its month.
    pub spent: HashMap<RowKey, Spent>,
}

/// What was spent in the day and in the month of a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// In the day, in UTC.
    pub day: Amount,
    /// In the calendar month, in UTC.
    pub month: Amount,
}

/// An amount of usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Tokens of prompts and answers, as far as anybody knows.
    pub tokens: u64,
    /// Money in nano-USD, as far as there are prices.
    pub cost_nano: u64,
}

/// Which limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Requests a minute.
    Requests,
    /// Tokens a minute.
    Tokens,
    /// The budget of a period.
    Budget(Period),
}

impl Limits {
    /// Admits a request of a caller with these rights and counts it, or says which limit it has reached; one that is
    /// refused does not count.
    pub fn admit(&self, rights: &Rights, now: Time) -> Result<(), Refusal> {
        self.afford(rights, now)?;
        let metered: Vec<_> = rights.terms().filter(|(_, _, terms)| is_metered(terms)).collect();
        if metered.is_empty() {
            return Ok(());
        }
        let mut meters = self.lock();
        let reached = metered.iter().flat_map(|(kind, id, terms)| {
            let whose = row(*kind, id);
            let waits = meters.get_mut(&whose).map(|meter| meter.waits(terms, now)).unwrap_or_default();
            waits.into_iter().flatten().map(move |(wait_ms, limit)| (wait_ms, limit, whose.clone()))
        });
        refuse_longest(reached)?;
        if meters.len() > METERS_MAX {
            meters.retain(|_, meter| !(meter.requests.is_idle(now) && meter.tokens.is_idle(now)));
        }
        for (kind, id, _) in metered {
            meters.entry(row(kind, id)).or_default().requests.add(1, now);
        }
        Ok(())
    }

    /// Whether a caller with these rights has something left of every budget it stands under; asked again before each
    /// further deployment of a request (S3.18).
    pub fn afford(&self, rights: &Rights, now: Time) -> Result<(), Refusal> {
        let reached = rights.terms().filter_map(|(kind, id, terms)| {
            let (budget, whose) = (terms.budget.as_ref()?, row(kind, id));
            let spent = self.spent(&whose, budget.period, now);
            let wait_ms = budget.period.end(now).ms_since(now);
            spent.reaches(budget).then_some((wait_ms, Limit::Budget(budget.period), whose))
        });
        refuse_longest(reached)
    }

    /// Counts the tokens of a send that has ended.
    pub fn used(&self, rights: &Rights, usage: &Usage, now: Time) {
        let tokens = usage.input.known().unwrap_or(0).saturating_add(usage.output.known().unwrap_or(0));
        let limited = rights.terms().filter(|(_, _, terms)| terms.tokens_per_minute.is_some());
        for (kind, id, _) in limited.filter(|_| tokens > 0) {
            self.lock().entry(row(kind, id)).or_default().tokens.add(tokens, now);
        }
    }

    /// Takes in what the usage store shows now.
    pub fn see(&self, spending: Spending) {
        self.spending.store(spending.into());
    }

    /// What was spent of the period that `now` is in; what is known of an earlier one is over.
    fn spent(&self, whose: &RowKey, period: Period, now: Time) -> Amount {
        let spending = self.spending.load();
        if spending.as_of < period.begin(now) {
            return Amount::default();
        }
        let spent = spending.spent.get(whose).copied().unwrap_or_default();
        match period {
            Period::Day => spent.day,
            Period::Month => spent.month,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RowKey, Meter>> {
        self.meters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Meter {
    /// How long each limit that is reached stands, in milliseconds.
    fn waits(&mut self, terms: &Terms, now: Time) -> [Option<(u64, Limit)>; 2] {
        let wait = |minute: &mut Minute, limit: Option<u32>| minute.wait_ms(limit?.into(), now);
        [
            wait(&mut self.requests, terms.requests_per_minute).map(|ms| (ms, Limit::Requests)),
            wait(&mut self.tokens, terms.tokens_per_minute).map(|ms| (ms, Limit::Tokens)),
        ]
    }
}

impl Amount {
    /// Whether nothing is left of `budget`.
    fn reaches(self, budget: &Budget) -> bool {
        budget.tokens.is_some_and(|tokens| self.tokens >= tokens)
            || budget.usd_milli.is_some_and(|milli| self.cost_nano >= milli.saturating_mul(1_000_000))
    }
}

impl std::ops::AddAssign for Amount {
    fn add_assign(&mut self, more: Self) {
        self.tokens = self.tokens.saturating_add(more.tokens);
        self.cost_nano = self.cost_nano.saturating_add(more.cost_nano);
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requests => "limit of requests a minute",
            Self::Tokens => "limit of tokens a minute",
            Self::Budget(Period::Day) => "budget of the day",
            Self::Budget(Period::Month) => "budget of the month",
        })
    }
}

/// Refuses by the limit that stands longest: no other try can help before.
fn refuse_longest(reached: impl Iterator<Item = (u64, Limit, RowKey)>) -> Result<(), Refusal> {
    match reached.max_by_key(|(wait_ms, ..)| *wait_ms) {
        Some((wait_ms, limit, whose)) => Err(Refusal::LimitReached { whose, limit, wait_ms }),
        None => Ok(()),
    }
}

fn is_metered(terms: &Terms) -> bool {
    terms.requests_per_minute.is_some() || terms.tokens_per_minute.is_some()
}

fn row(kind: RowKind, id: &str) -> RowKey {
    RowKey { kind, id: id.to_owned() }
}
