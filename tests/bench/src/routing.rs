//! Waybill's routing core driven without a gateway: the facts that a gateway would record, folded as it folds them.
//!
//! Session recognition, selection, dispatch and state are the product's own code; what stands here is the order of
//! the facts (`gateway/src/flight.rs`) and virtual time in place of the wall clock.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use waybill_routing::classify::{self, Transport, Verdict};
use waybill_routing::dispatch::{self, Limits, Next, Replay, Search};
use waybill_routing::request::{self, Inbound};
use waybill_routing::select::{self, Ask, DRAW_BITS, Moment};
use waybill_routing::session::{self, Signals, Whose};
use waybill_routing::state::State;
use waybill_schema::catalogue::{Catalogue, Place, Pool, Rows};
use waybill_schema::config::{self, Config};
use waybill_schema::event::{
    Affinity, Attempt, Choice, Class, Context, Effect, Endpoint, Event, Fact, Outcome, Preference, Reason, Request,
    Selection, Started, Thresholds, Tokens, Usage,
};
use waybill_schema::id::{GroupId, KeyId, ModelName, RequestId, Revision, ScopeId};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::draws::Draws;

const MODEL: &str = "bench-model";
const GROUP: &str = "bench";
const WRITER: &str = "bench";
/// What every answer says of its tokens, and how long it takes.
const USAGE: Usage = Usage {
    input: Tokens::Reported(2048),
    output: Tokens::Reported(256),
    cached: Tokens::Reported(1536),
    cache_write: Tokens::Unknown,
    reasoning: Tokens::Unknown,
};
const LATENCY_MS: u64 = 1800;
const BODY: &[u8] = br#"{"model":"bench-model","messages":[]}"#;

/// A routing core over `n` equal deployments, which are named by their place from 0.
pub(crate) struct Core {
    config: Config,
    catalogue: u64,
    pool: Arc<Pool>,
    state: State,
    secret: DeploymentSecret,
    facts: u64,
    requests: u64,
    draws: Draws,
    /// The facts since they were taken last, where they are kept.
    kept: Option<Vec<Fact>>,
}

/// What became of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    /// The deployment that answered, if one did.
    pub(crate) by: Option<usize>,
    /// Sends it took.
    pub(crate) sends: u16,
}

/// One request on its way.
struct Flight {
    request: RequestId,
    context: Context,
    now: Time,
    base: Option<Revision>,
    sends: u16,
    last_class: Option<Class>,
}

impl Core {
    /// A core with the default settings, whose draws follow from `seed`.
    pub(crate) fn new(deployments: usize, seed: u64) -> anyhow::Result<Self> {
        let config = config::parse(&yaml(deployments), "bench", &|_| None);
        let config = config.map_err(|problems| anyhow!("the bench's configuration: {problems:?}"))?;
        let mut rows = Rows::default();
        rows.apply(&rows.batch_to(config.rows.clone(), "bench", "bench", None))?;
        let catalogue = Catalogue::compile(&rows);
        let pool = catalogue.pool(&GroupId::from(GROUP), MODEL).context("the bench's pool is missing")?;
        Ok(Self {
            config,
            catalogue: catalogue.revision,
            pool,
            state: State::default(),
            secret: DeploymentSecret::new(b"bench"),
            facts: 0,
            requests: 0,
            draws: Draws::new(seed),
            kept: None,
        })
    }

    /// Begins to keep facts, as a writer's log does: with `started`.
    pub(crate) fn keep(&mut self, at: Time) {
        self.kept = Some(Vec::new());
        let started = Started { version: "bench".to_owned(), secret: "bench".to_owned(), previous: None };
        self.record(at, vec![Event::Started(started)]);
    }

    /// The facts that were kept since they were taken last.
    pub(crate) fn take_kept(&mut self) -> Vec<Fact> {
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Serves one request of `session` that arrives at `now`; `answers` says whether a deployment can be reached.
    pub(crate) fn serve(
        &mut self,
        session: &str,
        now: Time,
        answers: &dyn Fn(usize) -> bool,
    ) -> anyhow::Result<Served> {
        let mut flight = self.depart(session, now)?;
        let mut search = dispatch::begin(self.limits(now));
        while let Some((attempt, place)) = self.choose(&mut flight, search) {
            match self.send_here(&mut flight, attempt, &place, answers) {
                Ok(by) => return Ok(Served { by: Some(by), sends: flight.sends }),
                Err(Next::Other(further)) => search = further,
                Err(Next::Same { .. } | Next::Spent { .. } | Next::End(_)) => break,
            }
        }
        let ended = self.ended(&flight, Outcome::Failed);
        self.record(flight.now, vec![ended]);
        Ok(Served { by: None, sends: flight.sends })
    }

    fn depart(&mut self, session: &str, now: Time) -> anyhow::Result<Flight> {
        self.requests += 1;
        let inbound = request::parse(Endpoint::Chat, BODY)?;
        let context = self.context(session, &inbound)?;
        // As long as the id of a real request, and as they do in the order of their times.
        let request = RequestId::new(format!("{:012x}-7000-8000-{:013x}", now.0, self.requests));
        Ok(Flight { request, context, now, base: None, sends: 0, last_class: None })
    }

    fn context(&self, session: &str, inbound: &Inbound<'_>) -> anyhow::Result<Context> {
        let (scope, key, group) = (ScopeId::from("bench"), KeyId::from("bench"), &self.pool.group.id);
        let headers = |name: &str| if name == "x-session-id" { vec![session.as_bytes()] } else { Vec::new() };
        let aliases = &self.config.session.aliases;
        let (secret, headers) = (&self.secret, &headers);
        let signals = Signals { scope: &scope, secret, headers, aliases, parent: None, fresh: "none" };
        let identity = session::identify(&signals, inbound, Endpoint::Chat)?;
        let whose = Whose {
            scope: &scope,
            secret: &self.secret,
            key: Some(&key),
            group,
            model: MODEL,
            endpoint: Endpoint::Chat,
            mode: self.config.sticky.mode,
            ip: None,
        };
        let sticky = session::sticky(&identity, inbound, &whose);
        Ok(Context {
            sticky,
            group: group.clone(),
            scope,
            key,
            model: ModelName::from(MODEL),
            endpoint: Endpoint::Chat,
            stream: false,
            session: identity.session,
            source: identity.source,
            signal: identity.signal.to_string(),
        })
    }

    fn limits(&self, now: Time) -> Limits {
        let retry = &self.config.retry;
        Limits {
            max_attempts: retry.max_attempts,
            retry_times: retry.retry_times,
            sends_max: retry.sends_max,
            backoff_ms: retry.backoff_ms.into(),
            deadline: now.plus_ms(i64::from(retry.timeout_seconds) * 1000),
            replay: Replay::Free,
        }
    }

    fn choose(&mut self, flight: &mut Flight, search: Search) -> Option<(dispatch::Attempt, Arc<Place>)> {
        let draw = self.draws.next() & ((1 << DRAW_BITS) - 1);
        let ask = Ask {
            pool: &self.pool,
            model: &flight.context.model,
            endpoint: Endpoint::Chat,
            sticky: flight.context.sticky.as_ref(),
            exhausted: search.exhausted(),
            has_credential: &|_| true,
            last_resort: false,
            catalogue: self.catalogue,
            path: &[],
            shares: None,
        };
        let choice = select::look(&ask, &Moment { state: &self.state, now: flight.now, draw });
        let (index, reason) = select::decide(&choice)?;
        let chosen = &choice.candidates[index].member;
        let place = self.pool.places.iter().find(|place| place.member.id == *chosen)?.clone();
        let base = match &choice.affinity {
            Affinity::Hit(read) | Affinity::Skipped(read) => Some(read.revision.clone()),
            Affinity::None | Affinity::Absent => flight.base.take(),
        };
        let claim = flight.sends == 0 && choice.affinity == Affinity::Absent;
        let selection = Selection { claim, ..flight.selection(&place, reason, Some(choice)) };
        let revision = self.record(flight.now, vec![Event::Selection(Box::new(selection))]);
        flight.base = if claim { Some(revision) } else { base };
        flight.sends += 1;
        Some((search.take(place.deployment.clone()), place))
    }

    /// Sends to one deployment until it answers or its attempts are used up.
    fn send_here(
        &mut self,
        flight: &mut Flight,
        mut attempt: dispatch::Attempt,
        place: &Place,
        answers: &dyn Fn(usize) -> bool,
    ) -> Result<usize, Next> {
        let index = place_in_fleet(place);
        loop {
            if answers(index) {
                self.succeeded(flight, place);
                return Ok(index);
            }
            let verdict = classify::transport(Transport::Connect);
            let failed = self.attempt(flight, place, verdict);
            self.record(flight.now, vec![failed]);
            match attempt.fail(&verdict, flight.now) {
                Next::Same { attempt: again, after_ms } => {
                    flight.now = flight.now.plus_ms(i64::try_from(after_ms).unwrap_or(i64::MAX));
                    let selection = flight.selection(place, Reason::Same, None);
                    self.record(flight.now, vec![Event::Selection(Box::new(selection))]);
                    flight.sends += 1;
                    attempt = again;
                }
                next @ (Next::Other(_) | Next::Spent { .. } | Next::End(_)) => return Err(next),
            }
        }
    }

    fn succeeded(&mut self, flight: &mut Flight, place: &Place) {
        let verdict = Verdict::ended(Class::Success, Effect::Recover);
        let mut events = vec![self.attempt(flight, place, verdict)];
        events.extend(flight.context.sticky.as_ref().map(|sticky| {
            Event::Preference(Box::new(Preference {
                request: flight.request.clone(),
                key: sticky.key.clone(),
                member: place.member.id.clone(),
                deployment: place.deployment.clone(),
                incarnation: place.incarnation,
                model: place.upstream_model.clone(),
                pool: flight.context.group.clone(),
                path: Vec::new(),
                chains: Vec::new(),
                base: flight.base.clone(),
                ttl_ms: u64::from(self.config.sticky.conversation_ttl_seconds) * 1000,
            }))
        }));
        events.push(self.ended(flight, Outcome::Success));
        self.record(flight.now, events);
    }

    fn attempt(&self, flight: &mut Flight, place: &Place, verdict: Verdict) -> Event {
        flight.last_class = Some(verdict.class);
        let answered = verdict.class == Class::Success;
        Event::Attempt(Box::new(Attempt {
            request: flight.request.clone(),
            attempt: flight.sends,
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            model: flight.context.model.clone(),
            class: verdict.class,
            status: answered.then_some(200),
            latency_ms: LATENCY_MS,
            first_token_ms: None,
            usage: if answered { USAGE } else { Usage::default() },
            cost_nano: None,
            retry_after_ms: verdict.retry_after_ms,
            served_model: answered.then(|| MODEL.to_owned()),
            effect: verdict.effect,
            thresholds: self.thresholds(),
            sticky: flight.context.sticky.as_ref().map(|sticky| sticky.key.clone()),
        }))
    }

    fn ended(&self, flight: &Flight, outcome: Outcome) -> Event {
        Event::Request(Box::new(Request {
            request: flight.request.clone(),
            outcome,
            class: flight.last_class,
            code: None,
            status: Some(if outcome == Outcome::Success { 200 } else { 502 }),
            attempts: flight.sends,
            fallback: false,
            latency_ms: LATENCY_MS,
            context: (flight.sends == 0).then(|| flight.context.clone()),
        }))
    }

    fn thresholds(&self) -> Thresholds {
        let health = &self.config.health;
        let cooldown_ms_max = u64::from(health.cooldown_seconds_max) * 1000;
        Thresholds {
            failures: health.failover.consecutive_retryable_failures,
            cooldown_ms: u64::from(health.failover.cooldown_seconds) * 1000,
            growth_permille: health.growth_permille,
            cooldown_ms_max,
            block_ms: cooldown_ms_max,
        }
    }

    /// Numbers and folds `events`; returns the revision of the first.
    fn record(&mut self, at: Time, events: Vec<Event>) -> Revision {
        let revision = |number| Revision { writer: WRITER.into(), epoch: 1, number };
        let first = revision(self.facts + 1);
        for event in events {
            self.facts += 1;
            let fact = Fact { revision: revision(self.facts), at, event };
            self.state.apply(&fact);
            if let Some(kept) = &mut self.kept {
                kept.push(fact);
            }
        }
        first
    }
}

impl Flight {
    fn selection(&self, place: &Place, reason: Reason, choice: Option<Choice>) -> Selection {
        let further = self.sends > 0 && reason == Reason::Draw;
        Selection {
            request: self.request.clone(),
            attempt: self.sends + 1,
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            upstream_model: place.upstream_model.clone(),
            reason: if further { Reason::Next } else { reason },
            claim: false,
            choice,
            context: (self.sends == 0).then(|| self.context.clone()),
        }
    }
}

fn place_in_fleet(place: &Place) -> usize {
    place.channel.id.as_str()[1..].parse().expect("the bench's channels are d0, d1, …")
}

fn yaml(deployments: usize) -> String {
    let mut text = String::from("catalogue:\n  channels:\n");
    for n in 0..deployments {
        writeln!(text, "    - {{ id: d{n}, base_url: 'http://127.0.0.1:9/v1', dialects: [chat] }}").expect(TAKES);
    }
    writeln!(text, "  groups:\n    - {{ id: {GROUP}, display_name: Bench, public_models: [{MODEL}] }}").expect(TAKES);
    writeln!(text, "  routes:\n    - model: {MODEL}\n      members:").expect(TAKES);
    for n in 0..deployments {
        writeln!(text, "        - {{ channel: d{n}, group: {GROUP}, priority: 10, weight: 100 }}").expect(TAKES);
    }
    text
}

const TAKES: &str = "a string takes every write";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_stays_and_leaves_a_dead_deployment_for_good() {
        let mut core = Core::new(8, 1).expect("a core");
        let mut serve = |at_s: i64, dead: Option<usize>| {
            let now = Time(at_s * 1000);
            core.serve("s", now, &|n| Some(n) != dead).expect("a well-formed request")
        };
        let home = serve(0, None).by;
        assert_eq!(serve(1, None).by, home);
        let moved = serve(2, home);
        assert_ne!(moved.by, home);
        assert_eq!(moved.sends, 3, "two sends to the dead one, one to the next");
        let stays = serve(3, None);
        assert_eq!((stays.by, stays.sends), (moved.by, 1));
    }
}
