//! A flight: one request on its way, and every fact it owes to the log.
//!
//! Whatever happens to a request happens through its flight, which records it once. When a flight is dropped before
//! it has landed, its client has left: that, too, is recorded, so no send stays without an end while the gateway lives.

use std::sync::Arc;

use tokio::time::Instant;
use waybill_routing::classify::Verdict;
use waybill_routing::dispatch::{self, Search};
use waybill_routing::price;
use waybill_routing::select::{self, Ask, Moment};
use waybill_routing::state::State;
use waybill_schema::catalogue::terms::Rights;
use waybill_schema::catalogue::{Place, Pool};
use waybill_schema::event::{
    Affinity, Attempt, Choice, Class, Context, Effect, Endpoint, Event, Outcome, Preference, Reason, Request,
    Selection, Usage,
};
use waybill_schema::id::{AffinityKey, DeploymentId, ModelName, RequestId, Revision};
use waybill_schema::redis::{self, CLAIM_MS, Pin};
use waybill_schema::time::Time;

use crate::continuation::{Hold, Kept, Made, Seal};
use crate::ledger::Sight;
use crate::proxy::Gateway;
use crate::serving::Serving;
use crate::shared::{Answer, Away, Question};
use crate::vault::Deposit;

/// One request under way.
#[derive(Debug)]
pub struct Flight {
    gateway: Arc<Gateway>,
    serving: Arc<Serving>,
    pool: Arc<Pool>,
    request: RequestId,
    context: Context,
    rights: Rights,
    /// What keeps the request at one owner.
    hold: Option<Hold>,
    /// What the upstream keeps of it.
    kept: Kept,
    begun: Instant,
    /// Whether gateways can see each other's records for this request; unknown before it has asked.
    view: Option<View>,
    /// The affinity revision that a switch would be based on.
    base: Option<Revision>,
    sends: u16,
    open: Option<Open>,
    last_class: Option<Class>,
    /// The `Idempotency-Key` that it has taken.
    deposit: Option<Deposit>,
    landed: bool,
}

/// Whether others' records can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// They can, or there are none.
    Clear,
    /// They cannot: what has no record goes where every gateway would send it.
    Blind,
}

/// A send that has not ended.
#[derive(Debug)]
struct Open {
    place: Place,
    sent: Instant,
    first_token_ms: Option<u64>,
}

/// What was learnt from an answer, whole or not.
#[derive(Clone, Debug, Default)]
pub struct Learnt {
    /// The upstream's HTTP status.
    pub status: Option<u16>,
    /// Tokens.
    pub usage: Usage,
    /// The model that the upstream says it served.
    pub served_model: Option<String>,
    /// The response, where the upstream gave it an id.
    pub response: Option<Seen>,
}

/// A response as its upstream spoke of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The upstream's id.
    pub id: Box<str>,
    /// Whether it has come to its end.
    pub ended: bool,
}

/// How a request ended for its client.
#[derive(Clone, Copy, Debug)]
pub struct Landing {
    /// In one word.
    pub outcome: Outcome,
    /// The status the client got.
    pub status: Option<u16>,
    /// The code of an error of ours.
    pub code: Option<&'static str>,
}

/// What a flight begins with.
#[derive(Debug)]
pub struct Departure {
    /// The gateway.
    pub gateway: Arc<Gateway>,
    /// What is in force.
    pub serving: Arc<Serving>,
    /// The deployments that may serve.
    pub pool: Arc<Pool>,
    /// Our id of the request.
    pub request: RequestId,
    /// Who asks for what.
    pub context: Context,
    /// What the caller may ask for.
    pub rights: Rights,
    /// What keeps it at one owner, where something does.
    pub hold: Option<Hold>,
    /// What the upstream keeps of it.
    pub kept: Kept,
    /// When its first byte was read.
    pub begun: Instant,
}

impl Flight {
    /// Begins.
    pub fn new(departure: Departure) -> Self {
        let Departure { gateway, serving, pool, request, context, rights, hold, kept, begun } = departure;
        gateway.metrics.in_flight.inc();
        Self {
            gateway,
            serving,
            pool,
            request,
            context,
            rights,
            // One that is held claims nothing and follows no affinity.
            view: hold.is_some().then_some(View::Clear),
            hold,
            kept,
            begun,
            base: None,
            sends: 0,
            open: None,
            last_class: None,
            deposit: None,
            landed: false,
        }
    }

    /// Our id of the request.
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// Who asks for what.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What the caller may ask for.
    pub fn rights(&self) -> &Rights {
        &self.rights
    }

    /// Takes over an `Idempotency-Key`, whose outcome is this request's.
    pub(crate) fn answers_for(&mut self, deposit: Deposit) {
        self.deposit = Some(deposit);
    }

    /// The key that waits for the whole of the answer.
    pub(crate) fn deposit(&mut self) -> Option<&mut Deposit> {
        self.deposit.as_mut()
    }

    /// Sends so far.
    pub fn sends(&self) -> u16 {
        self.sends
    }

    /// The first-token deadline of the request's route, in seconds, where it has one of its own.
    pub fn first_token_seconds(&self) -> Option<u32> {
        self.pool.route.first_token_seconds
    }

    /// Whether it may not be sent without a record of it.
    pub fn is_strict(&self) -> bool {
        self.kept.is_strict()
    }

    /// What keeps it at one owner.
    pub fn hold(&self) -> Option<&Hold> {
        self.hold.as_ref()
    }

    /// What chooses among a channel's credentials: what an upstream keeps belongs to the one that it was made with, so a
    /// response's session does; elsewhere a prompt cache does, and so what a session sticks by.
    pub fn spread(&self) -> &str {
        match (&self.hold, self.context.endpoint, &self.context.sticky) {
            (Some(hold), ..) => hold.owner.session.as_str(),
            (None, Endpoint::Responses, _) => self.context.session.as_str(),
            (None, _, Some(sticky)) => sticky.key.as_str(),
            (None, _, None) => self.request.as_str(),
        }
    }

    /// Where the open send went.
    pub fn place(&self) -> Option<&Place> {
        self.open.as_ref().map(|open| &open.place)
    }

    /// Chooses a deployment and notes the selection, as one step with the state it depends on. The first choice asks
    /// the shared state. Errors with the choice when no candidate is legal; then nothing is recorded.
    pub async fn choose(
        &mut self,
        search: Search,
        last_resort: bool,
    ) -> Result<(dispatch::Attempt, Place), Box<(Search, Choice)>> {
        let random = select::draw(uuid::Uuid::new_v4().as_u64_pair().1);
        let seen = match self.view {
            None => self.ask(random, search.exhausted(), last_resort).await,
            Some(_) => None,
        };
        let (now, draw) = (Time::wall_clock(), self.agreed().map_or(random, select::rendezvous));
        let (chosen, revision) = self.gateway.ledger.decide(now, seen.as_deref(), |state| {
            let choice = self.look(&Moment { state, now, draw }, search.exhausted(), last_resort);
            let Some((place, reason)) = self.decide(&choice) else { return (Err(choice), Vec::new()) };
            let base = base_of(&choice.affinity);
            let claim = self.claims(&choice);
            let selection = Selection { claim, ..self.selection(&place, reason, Some(choice)) };
            (Ok((place, base, claim)), vec![Event::Selection(Box::new(selection))])
        });
        let (place, base, claim) = match chosen {
            Ok(chosen) => chosen,
            Err(choice) => return Err(Box::new((search, choice))),
        };
        self.base = match () {
            // A continuation moves no session: it renews the affinity of where it goes, or makes one where there is none.
            () if self.hold.is_some() => None,
            () if claim => revision,
            () => base.or(self.base.take()),
        };
        self.opened(place.clone());
        Ok((search.take(place.deployment.clone()), place))
    }

    /// Notes that the same deployment is sent to again.
    pub fn again(&mut self, place: Place) {
        let selection = self.selection(&place, Reason::Same, None);
        self.gateway.ledger.note(Time::wall_clock(), vec![Event::Selection(Box::new(selection))]);
        self.opened(place);
    }

    /// Notes the first meaningful frame of the open send.
    pub fn first_token(&mut self) {
        if let Some(open) = &mut self.open {
            open.first_token_ms.get_or_insert(millis(open.sent));
        }
    }

    /// Notes the id of a response that is being made, so that requests about it find their way.
    pub fn saw(&mut self, id: &str) {
        let seen = Seen { id: id.into(), ended: false };
        let events = self.ownerships(Some(&seen));
        self.gateway.ledger.note(Time::wall_clock(), events);
    }

    /// What must have come about before the last bytes go out: that who owns the response is on the disk, and shown to
    /// others. Nothing where the upstream keeps nothing.
    pub fn seal(&mut self) -> Option<Seal> {
        Seal::of(self.gateway.clone(), self.kept.take_unsealed())
    }

    /// Notes that the open send failed.
    pub fn failed(&mut self, verdict: &Verdict, learnt: Learnt) {
        if let Some(attempt) = self.close(verdict, learnt) {
            self.gateway.ledger.note(Time::wall_clock(), vec![attempt]);
        }
    }

    /// Notes a complete answer: the attempt, the affinity it commits, and the end of the request. They must be flushed
    /// before its last bytes go out.
    pub fn succeeded(&mut self, class: Class, learnt: Learnt, status: u16) {
        let place = self.place().cloned();
        let ownerships = self.ownerships(learnt.response.as_ref());
        let effect = if self.is_auxiliary() { Effect::None } else { Effect::Recover };
        let verdict = Verdict::ended(class, effect);
        let mut events: Vec<Event> = self.close(&verdict, learnt).into_iter().collect();
        events.extend(place.as_ref().and_then(|place| self.preference(place)));
        events.extend(ownerships);
        self.land(events, Landing { outcome: Outcome::Success, status: Some(status), code: None });
    }

    /// Records that the open send broke off, or its client left, after its answer had begun.
    pub fn broke_off(&mut self, verdict: &Verdict, learnt: Learnt, landing: Landing) {
        let events = self.close(verdict, learnt).into_iter().collect();
        self.land(events, landing);
        self.flush();
    }

    /// Records the end of a request whose sends have all ended.
    pub fn ended(&mut self, landing: Landing) {
        self.land(Vec::new(), landing);
        self.flush();
    }

    /// Brings what was noted into the spool.
    pub fn flush(&self) {
        self.gateway.ledger.flush();
    }

    fn land(&mut self, mut events: Vec<Event>, landing: Landing) {
        if std::mem::replace(&mut self.landed, true) {
            return;
        }
        let latency_ms = millis(self.begun);
        let context = (self.sends == 0).then(|| self.context.clone());
        events.push(Event::Request(Box::new(Request {
            request: self.request.clone(),
            outcome: landing.outcome,
            class: self.last_class,
            code: landing.code.map(str::to_owned),
            status: landing.status,
            attempts: self.sends,
            fallback: false,
            latency_ms,
            context,
        })));
        self.gateway.ledger.note(Time::wall_clock(), events);
        self.gateway.metrics.request(self.context.endpoint, landing.outcome, latency_ms);
        if let Some(deposit) = self.deposit.take() {
            self.gateway.vault.settle(deposit, landing.outcome, self.last_class);
        }
    }

    /// Asks the shared state, which takes the claim on the key for what `random` would choose now.
    async fn ask(&mut self, random: u64, exhausted: &[DeploymentId], last_resort: bool) -> Option<Box<Sight>> {
        self.view = Some(View::Clear);
        let key = self.sticky_key()?;
        let now = Time::wall_clock();
        let claim = || {
            let claim = |state: &State| self.claim(&Moment { state, now, draw: random }, exhausted, last_resort);
            self.gateway.ledger.look(claim)
        };
        let answer = self.gateway.shared.read_or_claim(Question { key, claim: &claim, now }).await;
        let (view, seen, outcome) = match answer {
            Answer::Own => (View::Clear, None, None),
            Answer::Read(sight) => (View::Clear, Some(sight), Some("answered")),
            Answer::Away(Away::Unshared) => (View::Blind, None, None),
            Answer::Away(Away::Failed) => (View::Blind, None, Some("failed")),
            Answer::Away(Away::Skipped) => (View::Blind, None, Some("skipped")),
        };
        if let Some(outcome) = outcome {
            self.gateway.metrics.state_read(outcome);
        }
        self.view = Some(view);
        seen
    }

    /// The claim that this request would take; none where a record stands already.
    fn claim(&self, moment: &Moment<'_>, exhausted: &[DeploymentId], last_resort: bool) -> Option<Pin> {
        let choice = self.look(moment, exhausted, last_resort);
        let (place, _) = self.decide(&choice).filter(|_| self.claims(&choice))?;
        let Revision { writer, epoch, .. } = self.gateway.ledger.life();
        Some(Pin {
            shadow_group_id: redis::channel_of(&place.deployment),
            route_id: place.deployment,
            public_model: self.context.model.clone(),
            bound_at: moment.now,
            expires_at: moment.now.plus_ms(CLAIM_MS.cast_signed()),
            last_ok_at: None,
            fail_count: 0,
            member: place.member.id.clone(),
            incarnation: place.incarnation,
            model: place.upstream_model,
            pool: self.context.group.clone(),
            path: Vec::new(),
            revision: Revision { writer, epoch, number: 0 },
            provisional: true,
        })
    }

    fn look(&self, moment: &Moment<'_>, exhausted: &[DeploymentId], last_resort: bool) -> Choice {
        let ask = Ask {
            pool: &self.pool,
            model: &self.context.model,
            endpoint: self.context.endpoint,
            sticky: self.context.sticky.as_ref(),
            exhausted,
            has_credential: &|place| self.serving.has_credential(place),
            last_resort,
            catalogue: self.serving.catalogue.revision,
        };
        select::look(&ask, moment)
    }

    fn decide(&self, choice: &Choice) -> Option<(Place, Reason)> {
        let (index, reason) = select::decide(choice)?;
        let candidate = &choice.candidates[index];
        let place = self.pool.places.iter().find(|place| place.member.id == candidate.member).cloned();
        Some((place.expect("every candidate was made from a place of this pool"), reason))
    }

    /// The affinity key that every gateway draws from, where they cannot see each other's records.
    fn agreed(&self) -> Option<&AffinityKey> {
        self.sticky_key().filter(|_| self.view == Some(View::Blind))
    }

    /// S3.11: the first request of a key without a live record claims it. Auxiliary calls bind nothing.
    fn claims(&self, choice: &Choice) -> bool {
        let free = self.hold.is_none() && !self.is_auxiliary();
        self.sends == 0 && choice.affinity == Affinity::Absent && free
    }

    /// Counting tokens follows its session's deployment, but says nothing about health and binds nothing (PITFALLS H13);
    /// nor does a request about a response that is there.
    fn is_auxiliary(&self) -> bool {
        self.context.endpoint == Endpoint::CountTokens || self.is_errand()
    }

    fn is_errand(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.errand.is_some())
    }

    /// Who owns what the upstream keeps of the request, as of what was `seen` of the response.
    fn ownerships(&mut self, seen: Option<&Seen>) -> Vec<Event> {
        let (Some(Open { place, .. }), Some(seen)) = (&self.open, seen) else { return Vec::new() };
        let made = Made {
            secret: &self.gateway.secret,
            request: &self.request,
            context: &self.context,
            hold: self.hold.as_ref(),
            place,
            connection: self.serving.catalogue.connection(&place.channel.id).unwrap_or(0),
        };
        self.kept.facts(&made, seen).into_iter().map(|fact| Event::Ownership(Box::new(fact))).collect()
    }

    fn opened(&mut self, place: Place) {
        self.sends += 1;
        self.open = Some(Open { place, sent: Instant::now(), first_token_ms: None });
    }

    fn selection(&self, place: &Place, reason: Reason, choice: Option<Choice>) -> Selection {
        let first = self.sends == 0;
        let reason = match reason {
            Reason::Draw | Reason::Affinity if self.hold.is_some() => Reason::Owner,
            Reason::Draw if !first => Reason::Next,
            Reason::Draw if self.agreed().is_some() => Reason::Rendezvous,
            other => other,
        };
        Selection {
            request: self.request.clone(),
            attempt: self.sends + 1,
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            upstream_model: place.upstream_model.clone(),
            reason,
            claim: false,
            choice,
            context: first.then(|| self.context.clone()),
        }
    }

    fn close(&mut self, verdict: &Verdict, learnt: Learnt) -> Option<Event> {
        let open = self.open.take()?;
        self.last_class = Some(verdict.class);
        self.gateway.metrics.attempt(&open.place.channel.id, verdict.class);
        self.gateway.limits.used(&self.rights, &learnt.usage, Time::wall_clock());
        let protected = self.serving.config.health.enabled && !self.is_auxiliary();
        let thresholds = self.serving.thresholds(&self.pool.group);
        // What a response cost is on record with the request that made it.
        let usage = if self.is_errand() { Usage::default() } else { learnt.usage };
        Some(Event::Attempt(Box::new(Attempt {
            request: self.request.clone(),
            attempt: self.sends,
            member: open.place.member.id.clone(),
            deployment: open.place.deployment.clone(),
            incarnation: open.place.incarnation,
            model: self.context.model.clone(),
            class: verdict.class,
            status: learnt.status,
            latency_ms: millis(open.sent),
            first_token_ms: open.first_token_ms,
            cost_nano: cost_nano(&open.place, &usage, verdict.class),
            usage,
            retry_after_ms: verdict.retry_after_ms,
            served_model: learnt.served_model,
            effect: if protected { verdict.effect } else { Effect::None },
            thresholds,
            sticky: self.sticky_key().cloned(),
        })))
    }

    /// S1.9, S3.13: what a success commits.
    fn preference(&self, place: &Place) -> Option<Event> {
        let sticky = self.context.sticky.as_ref().filter(|_| !self.is_auxiliary())?;
        Some(Event::Preference(Box::new(Preference {
            request: self.request.clone(),
            key: sticky.key.clone(),
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            model: place.upstream_model.clone(),
            pool: self.context.group.clone(),
            path: Vec::<ModelName>::new(),
            base: self.base.clone(),
            ttl_ms: self.serving.sticky_ttl_ms(&self.pool.group, sticky.by),
        })))
    }

    fn sticky_key(&self) -> Option<&AffinityKey> {
        self.context.sticky.as_ref().map(|sticky| &sticky.key)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.gateway.metrics.in_flight.dec();
        if self.landed {
            return;
        }
        let verdict = Verdict::ended(Class::Cancelled, Effect::None);
        let landing = Landing { outcome: Outcome::Cancelled, status: None, code: None };
        self.broke_off(&verdict, Learnt::default(), landing);
    }
}

/// What a send there cost, where its price and its tokens are known.
fn cost_nano(place: &Place, usage: &Usage, class: Class) -> Option<u64> {
    let price = place.channel.prices.iter().find(|price| price.model == place.upstream_model)?;
    price::cost_nano(price, usage, class)
}

fn base_of(affinity: &Affinity) -> Option<Revision> {
    match affinity {
        Affinity::Hit(read) | Affinity::Skipped(read) => Some(read.revision.clone()),
        Affinity::None | Affinity::Absent => None,
    }
}

/// Milliseconds since `then`.
fn millis(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}
