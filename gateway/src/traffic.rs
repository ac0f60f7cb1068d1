//! Traffic: what this gateway alone knows of its sends, for the strategies that rank by it.
//!
//! Where splits stand, what is in flight, and how fast answers came. It is soft: a gateway that starts knows nothing,
//! and gateways do not share it. What a choice took from it stands in the choice.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use waybill_routing::policy::Rule;
use waybill_routing::split::Cursor;
use waybill_schema::catalogue::{Pool, Strategy};
use waybill_schema::event::Choice;
use waybill_schema::id::{DeploymentId, GroupId, ModelName};
use waybill_schema::time::Time;

/// At most so many splits, or deployments, are kept in mind: a pattern lets callers make names up.
const KEPT_MAX: usize = 4096;
/// For how long a latency tells of a deployment; then it is measured again.
const LATENCY_TTL_MS: i64 = 300_000;

/// The ranks of a pool's deployments.
pub type Ranks = HashMap<DeploymentId, i32>;

/// What is known.
#[derive(Debug, Default)]
pub struct Traffic {
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    cursors: HashMap<(GroupId, ModelName), Cursor>,
    loads: HashMap<DeploymentId, Load>,
}

#[derive(Debug, Default)]
struct Load {
    in_flight: u32,
    /// To the first token of a stream, and to the end of a plain answer.
    latencies: [Option<Latency>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Latency {
    ms: u64,
    at: Time,
}

/// What an answer is measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// By its first token.
    Stream,
    /// By its end.
    Plain,
}

impl Traffic {
    /// The ranks of the deployments of `pool`, asked for `model`, by the rule's strategy; smaller goes first. What was
    /// never measured ranks as the fastest, so that it is.
    pub fn ranks(&self, rule: &Rule, pool: &Pool, model: &ModelName, form: Form, now: Time) -> Ranks {
        let book = self.lock();
        let cursor = book.cursors.get(&(pool.group.id.clone(), model.clone()));
        let fresh = Cursor::default();
        let rank = |deployment: &DeploymentId, weight| match rule.strategy {
            Strategy::Priority => 0,
            Strategy::TrafficSplit => cursor.unwrap_or(&fresh).rank(deployment, weight),
            Strategy::LeastBusy => book.loads.get(deployment).map_or(0, |load| clamped(load.in_flight.into())),
            Strategy::Latency => book.loads.get(deployment).map_or(0, |load| clamped(load.latency_ms(form, now))),
        };
        let places = pool.places.iter();
        places.map(|place| (place.deployment.clone(), rank(&place.deployment, rule.weight(place)))).collect()
    }

    /// Goes on by a turn of the split in which `chosen` was chosen.
    pub fn turn(&self, pool: &Pool, model: &ModelName, choice: &Choice, chosen: &DeploymentId) {
        let mut book = self.lock();
        if book.cursors.len() >= KEPT_MAX {
            book.cursors.clear();
        }
        book.cursors.entry((pool.group.id.clone(), model.clone())).or_default().advance(choice, chosen);
    }

    /// Notes that a send begins.
    pub fn sent(&self, deployment: &DeploymentId) {
        let mut book = self.lock();
        if book.loads.len() >= KEPT_MAX {
            book.loads.retain(|_, load| load.in_flight > 0);
        }
        book.loads.entry(deployment.clone()).or_default().in_flight += 1;
    }

    /// Notes that a send ended; a success with what it took, in milliseconds.
    pub fn ended(&self, deployment: &DeploymentId, took: Option<(Form, u64)>, now: Time) {
        let mut book = self.lock();
        let Some(load) = book.loads.get_mut(deployment) else { return };
        load.in_flight = load.in_flight.saturating_sub(1);
        if let Some((form, ms)) = took {
            load.measure(form, ms, now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Load {
    fn latency_ms(&self, form: Form, now: Time) -> u64 {
        let latency = self.latencies[form as usize].filter(|latency| now < latency.at.plus_ms(LATENCY_TTL_MS));
        latency.map_or(0, |latency| latency.ms.max(1))
    }

    /// Takes a measure in: a quarter of it and three of what is known.
    fn measure(&mut self, form: Form, ms: u64, now: Time) {
        let known = self.latency_ms(form, now);
        let ms = if known == 0 { ms } else { (known.saturating_mul(3).saturating_add(ms)) / 4 };
        self.latencies[form as usize] = Some(Latency { ms, at: now });
    }
}

fn clamped(n: u64) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S3.20, `latency`: what a deployment took, as a slow mean, by form, and not for ever.
    #[test]
    fn a_latency_is_a_slow_mean_of_its_own_form_and_grows_old() {
        let mut load = Load::default();
        load.measure(Form::Stream, 100, Time(0));
        load.measure(Form::Stream, 500, Time(0));
        assert_eq!(load.latency_ms(Form::Stream, Time(0)), 200);
        assert_eq!(load.latency_ms(Form::Plain, Time(0)), 0, "never measured");
        assert_eq!(load.latency_ms(Form::Stream, Time(299_999)), 200);
        assert_eq!(load.latency_ms(Form::Stream, Time(300_000)), 0, "to be measured again");
    }

    /// S3.20, `least_busy`
    #[test]
    fn what_is_in_flight_is_counted_to_its_end() {
        let traffic = Traffic::default();
        let in_flight = || traffic.lock().loads.get("a/m").map(|load| load.in_flight);
        traffic.sent(&"a/m".into());
        traffic.sent(&"a/m".into());
        assert_eq!(in_flight(), Some(2));
        traffic.ended(&"a/m".into(), None, Time(0));
        assert_eq!(in_flight(), Some(1));
    }
}
