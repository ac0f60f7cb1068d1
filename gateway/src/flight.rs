//! A flight: one request on its way, and every fact it owes to the log.
//!
//! Whatever happens to a request happens through its flight, which records it once. When a flight is dropped before
//! it has landed, its client has left: that, too, is recorded, so no send stays without an end while the gateway lives.

use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use waybill_routing::classify::{Recourse, Verdict, Work};
use waybill_routing::dispatch::{self, Search};
use waybill_routing::policy::{Policy, Rule, Subject, Walk, Way};
use waybill_routing::price;
use waybill_routing::select::{self, Ask, Moment, Shares};
use waybill_routing::state::State;
use waybill_schema::catalogue::terms::Rights;
use waybill_schema::catalogue::{Place, Pool, Strategy};
use waybill_schema::event::{
    Affinity, Attempt, Candidate, Choice, Class, Context, Effect, Endpoint, Event, Outcome, Preference, Reason,
    Request, Selection, Usage,
};
use waybill_schema::id::{AffinityKey, DeploymentId, ModelName, RequestId, Revision};
use waybill_schema::redis::{self, CLAIM_MS, Pin};
use waybill_schema::time::Time;

use crate::continuation::{Hold, Kept, Made, Seal};
use crate::ledger::Sight;
use crate::proxy::Gateway;
use crate::refusal::Refusal;
use crate::serving::Serving;
use crate::shared::{Answer, Away, Question};
use crate::traffic::{Form, Ranks};
use crate::vault::Deposit;

/// One request under way.
#[derive(Debug)]
pub struct Flight {
    gateway: Arc<Gateway>,
    serving: Arc<Serving>,
    policy: Option<Arc<Policy>>,
    /// The pool of what was asked for.
    home: Arc<Pool>,
    /// The pool that is sent to.
    leg: Leg,
    crossing: Crossing,
    walk: Walk,
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
    /// Whether a chain led to any of the sends.
    fallback: bool,
    open: Option<Open>,
    last_class: Option<Class>,
    /// Whether any of its sends may have done its work.
    may_be_done: bool,
    /// The `Idempotency-Key` that it has taken.
    deposit: Option<Deposit>,
    landed: bool,
}

/// A pool, and how the request came to it.
#[derive(Clone, Debug)]
struct Leg {
    pool: Arc<Pool>,
    /// None leads home.
    way: Way,
    /// Whether the session's record led here before anything had failed.
    pinned: bool,
}

/// Whether other models may stand in for the one that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// After a failure, and where the session's last answer came from one.
    Free,
    /// After a failure only.
    AfterFailure,
    /// They may not.
    Never,
}

/// Why nothing was chosen.
#[derive(Debug)]
pub enum Stuck {
    /// No candidate of the pool is legal.
    Nobody(Search, Choice),
    /// The caller may not go on: the model of its session's fallback is refused to it (S3.19), or its budget was spent
    /// since it was admitted (S3.18).
    Refused(Refusal),
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
#[derive(Clone, Debug)]
struct Open {
    place: Arc<Place>,
    sent: Instant,
    first_token_ms: Option<u64>,
    /// Whether its end is on record already.
    recorded: bool,
}

/// A send whose answer waits while others are asked for a better one.
#[derive(Debug)]
pub struct Aside {
    leg: Leg,
    open: Option<Open>,
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
    /// Whether it has come to an end that can be gone on from.
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
    /// Whether other models may stand in.
    pub crossing: Crossing,
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
    /// Begins. On the heap, because it goes through many hands and is large.
    pub fn new(departure: Departure) -> Box<Self> {
        let Departure { gateway, serving, pool, crossing, request, context, rights, hold, kept, begun } = departure;
        gateway.metrics.in_flight.inc();
        Box::new(Self {
            policy: serving.policy(&context.key).cloned(),
            gateway,
            serving,
            leg: Leg::home(&pool),
            home: pool,
            crossing,
            walk: Walk::default(),
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
            fallback: false,
            open: None,
            last_class: None,
            may_be_done: false,
            deposit: None,
            landed: false,
        })
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

    /// The caller's policy, where a template is bound to its key.
    pub fn policy(&self) -> Option<&Policy> {
        self.policy.as_deref()
    }

    /// Sends so far.
    pub fn sends(&self) -> u16 {
        self.sends
    }

    /// Whether a chain led to any of the sends.
    pub fn fell_back(&self) -> bool {
        self.fallback
    }

    /// The first-token deadline of the route that is sent to, in seconds, where it has one of its own.
    pub fn first_token_seconds(&self) -> Option<u32> {
        self.leg.pool.route.first_token_seconds
    }

    /// Whether it may not be sent without a record of it.
    pub fn is_strict(&self) -> bool {
        self.kept.is_strict()
    }

    /// What keeps it at one owner.
    pub fn hold(&self) -> Option<&Hold> {
        self.hold.as_ref()
    }

    /// Whether it asks something of a response that is there.
    pub fn is_errand(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.errand.is_some())
    }

    /// Whether the response goes on, and can be asked for, when the stream that shows it breaks.
    pub fn outlasts_its_stream(&self) -> bool {
        self.is_errand() || self.kept.in_background()
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
    pub fn place(&self) -> Option<&Arc<Place>> {
        self.open.as_ref().map(|open| &open.place)
    }

    /// Chooses a deployment and notes the selection, as one step with the state it depends on. The first choice asks
    /// the shared state, every further one what is left of the caller's budget. Where nothing is chosen, nothing is
    /// recorded.
    pub async fn choose(
        &mut self,
        search: Search,
        last_resort: bool,
    ) -> Result<(dispatch::Attempt, Arc<Place>), Box<Stuck>> {
        // Others may have spent the budget while earlier sends failed, or while nobody could be sent to; the first choice
        // follows its admission at once. What is asked of a response costs nothing.
        if !self.is_errand() && (self.sends > 0 || self.view.is_some()) {
            let affords = self.gateway.limits.afford(&self.rights, Time::wall_clock());
            affords.map_err(|refusal| Box::new(Stuck::Refused(refusal)))?;
        }
        let random = select::draw(uuid::Uuid::new_v4().as_u64_pair().1);
        let promised = OnceLock::new();
        let seen = match self.view {
            None => self.ask(random, search.exhausted(), last_resort, &promised).await,
            Some(_) => None,
        };
        let (now, draw) = (Time::wall_clock(), self.agreed().map_or(random, select::rendezvous));
        let (chosen, revision) = self.gateway.ledger.decide(now, seen.as_deref(), |state| {
            let moment = Moment { state, now, draw };
            let (leg, choice) = match self.look_where_pinned(&moment, &search, last_resort, promised.get()) {
                Ok(seen) => seen,
                Err(refusal) => return (Err(Err(refusal)), Vec::new()),
            };
            let Some((place, reason)) = decide(&leg, &choice) else { return (Err(Ok(choice)), Vec::new()) };
            self.turn(&leg, &choice, reason, &place);
            let base = base_of(&choice.affinity);
            let claim = self.claims(&leg, &choice);
            let selection = Selection { claim, ..self.selection(&leg, &place, reason, Some(choice)) };
            (Ok((leg, place, base, claim)), vec![Event::Selection(Box::new(selection))])
        });
        let (leg, place, base, claim) = match chosen {
            Ok(chosen) => chosen,
            Err(Ok(choice)) => return Err(Box::new(Stuck::Nobody(search, choice))),
            Err(Err(refusal)) => return Err(Box::new(Stuck::Refused(refusal))),
        };
        self.leg = leg;
        self.base = match () {
            // A continuation moves no session: it renews the affinity of where it goes, or makes one where there is none.
            () if self.hold.is_some() => None,
            () if claim => revision,
            () => base.or(self.base.take()),
        };
        self.opened(place.clone());
        Ok((search.take(place.deployment.clone()), place))
    }

    /// Goes on in the pool of the next target that stands in after a failure with this recourse; tells whether there is
    /// one. A target that the caller may not use is passed over (S3.18).
    pub fn fall_back(&mut self, recourse: Recourse) -> bool {
        if self.crossing == Crossing::Never {
            return false;
        }
        let mut walk = std::mem::take(&mut self.walk);
        walk.turn(&self.context.model, &self.leg.way, &self.subject(&self.leg).targets(recourse));
        let leads = |way: Way| Some(Leg { pool: self.admitted(way.path.last()?).ok()?, way, pinned: false });
        let leg = std::iter::from_fn(|| walk.step()).find_map(leads);
        self.walk = walk;
        let Some(leg) = leg else { return false };
        self.leg = leg;
        true
    }

    /// Whether a chain leads on from here after a failure with this recourse.
    pub fn leads_on(&self, recourse: Recourse) -> bool {
        self.crossing != Crossing::Never && !self.subject(&self.leg).targets(recourse).is_empty()
    }

    /// Goes back to the pool of what was asked for, where the session's record had led elsewhere; tells whether it had.
    pub fn unpin(&mut self) -> bool {
        let pinned = self.leg.pinned;
        if pinned {
            self.go_home();
        }
        pinned
    }

    /// Goes back to the pool of what was asked for.
    pub fn go_home(&mut self) {
        self.leg = Leg::home(&self.home);
    }

    /// Whether the pool is that of what was asked for.
    pub fn is_home(&self) -> bool {
        self.leg.way.path.is_empty()
    }

    /// Notes that the same deployment is sent to again.
    pub fn again(&mut self, place: Arc<Place>) {
        let selection = self.selection(&self.leg, &place, Reason::Same, None);
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

    /// The open send, to come back to when nobody has a better answer.
    pub fn aside(&self) -> Aside {
        let open = self.open.as_ref().map(|open| Open { recorded: true, ..open.clone() });
        Aside { leg: self.leg.clone(), open }
    }

    /// Comes back to a send that was recorded as failed: its answer is the request's after all.
    pub fn come_back(&mut self, Aside { leg, open }: Aside) {
        (self.leg, self.open) = (leg, open);
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
            fallback: self.fallback,
            latency_ms,
            context,
        })));
        self.gateway.ledger.note(Time::wall_clock(), events);
        self.gateway.metrics.request(self.context.endpoint, landing.outcome, latency_ms);
        if let Some(deposit) = self.deposit.take() {
            self.gateway.vault.settle(deposit, landing.outcome, self.may_be_done);
        }
    }

    /// Asks the shared state, which takes the claim on the key for what `random` would choose now.
    /// The ranks that the choice stood on are `promised`: what is chosen afterwards must be what was claimed.
    async fn ask(
        &mut self,
        random: u64,
        exhausted: &[DeploymentId],
        last_resort: bool,
        promised: &OnceLock<Ranks>,
    ) -> Option<Box<Sight>> {
        self.view = Some(View::Clear);
        let key = self.sticky_key()?;
        let now = Time::wall_clock();
        let claim = || {
            let ranks = self.ranks(&self.leg, now).map(|ranks| promised.get_or_init(|| ranks));
            let claim = |state: &State| self.claim(&Moment { state, now, draw: random }, exhausted, last_resort, ranks);
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
    fn claim(
        &self,
        moment: &Moment<'_>,
        exhausted: &[DeploymentId],
        last_resort: bool,
        ranks: Option<&Ranks>,
    ) -> Option<Pin> {
        let choice = self.look(&self.leg, moment, exhausted, last_resort, ranks);
        let (place, _) = decide(&self.leg, &choice).filter(|_| self.claims(&self.leg, &choice))?;
        let Revision { writer, epoch, .. } = self.gateway.ledger.life();
        Some(Pin {
            shadow_group_id: redis::channel_of(&place.deployment),
            route_id: place.deployment.clone(),
            public_model: self.context.model.clone(),
            bound_at: moment.now,
            expires_at: moment.now.plus_ms(CLAIM_MS.cast_signed()),
            last_ok_at: None,
            fail_count: 0,
            member: place.member.id.clone(),
            incarnation: place.incarnation,
            model: place.upstream_model.clone(),
            pool: self.context.group.clone(),
            path: Vec::new(),
            chains: Vec::new(),
            revision: Revision { writer, epoch, number: 0 },
            provisional: true,
        })
    }

    /// Looks where the session's last answer came from, if that was a fallback model and may be followed; else where the
    /// request is now. Errors where the caller may not use that model any more: it is not widened (S3.19).
    fn look_where_pinned(
        &self,
        moment: &Moment<'_>,
        search: &Search,
        last_resort: bool,
        promised: Option<&Ranks>,
    ) -> Result<(Leg, Choice), Refusal> {
        if let Some(leg) = self.pinned(moment)? {
            let choice = self.look(&leg, moment, search.exhausted(), false, self.ranks(&leg, moment.now).as_ref());
            if matches!(choice.affinity, Affinity::Hit(_)) {
                return Ok((leg, choice));
            }
        }
        let fresh = if promised.is_none() { self.ranks(&self.leg, moment.now) } else { None };
        let choice = self.look(&self.leg, moment, search.exhausted(), last_resort, promised.or(fresh.as_ref()));
        Ok((self.leg.clone(), choice))
    }

    /// The pool to which the session's record leads by way of fallback chains, as long as they still lead there.
    fn pinned(&self, moment: &Moment<'_>) -> Result<Option<Leg>, Refusal> {
        let key = self.sticky_key().filter(|_| self.sends == 0 && self.crossing == Crossing::Free && self.is_home());
        let record = key.and_then(|key| moment.state.record(key, moment.now));
        let Some(way) = record.map(|record| &record.way).filter(|way| !way.path.is_empty()) else { return Ok(None) };
        let pool = self.subject(&self.leg).follow(way, |target| self.admitted(target))?;
        Ok(pool.map(|pool| Leg { pool, way: way.clone(), pinned: true }))
    }

    /// The pool of a fallback target, where the caller may use it, under whatever name.
    fn admitted(&self, target: &ModelName) -> Result<Arc<Pool>, Refusal> {
        let target = target.as_str();
        if !self.rights.may(target) {
            return Err(Refusal::ModelNotPermitted(target.to_owned()));
        }
        let pool = self.serving.catalogue.target(self.rights.key(), &self.context.group, target);
        pool.ok_or_else(|| Refusal::ModelNotFound(target.to_owned()))
    }

    fn subject<'a>(&'a self, leg: &'a Leg) -> Subject<'a> {
        Subject { policy: self.policy(), pool: &leg.pool, model: self.model(leg) }
    }

    /// What is asked of the pool: the last target on the way to it, else what the client named.
    fn model<'a>(&'a self, leg: &'a Leg) -> &'a ModelName {
        leg.way.path.last().unwrap_or(&self.context.model)
    }

    /// The rule by which the pool ranks its deployments, where it does. Where gateways cannot see each other, all must
    /// choose alike, and what one of them knows of its own traffic counts for nothing.
    fn ranking<'a>(&'a self, leg: &'a Leg) -> Option<&'a Rule> {
        let rule = self.subject(leg).rule().filter(|rule| rule.strategy != Strategy::Priority)?;
        self.agreed().is_none().then_some(rule)
    }

    fn ranks(&self, leg: &Leg, now: Time) -> Option<Ranks> {
        let rule = self.ranking(leg)?;
        Some(self.gateway.traffic.ranks(rule, &leg.pool, self.model(leg), self.form(), now))
    }

    /// Goes on at the split's cursor where the choice was its turn.
    fn turn(&self, leg: &Leg, choice: &Choice, reason: Reason, place: &Place) {
        let splits = self.ranking(leg).is_some_and(|rule| rule.strategy == Strategy::TrafficSplit);
        if splits && reason == Reason::Draw {
            self.gateway.traffic.turn(&leg.pool, self.model(leg), choice, &place.deployment);
        }
    }

    fn form(&self) -> Form {
        if self.context.stream { Form::Stream } else { Form::Plain }
    }

    fn look(
        &self,
        leg: &Leg,
        moment: &Moment<'_>,
        exhausted: &[DeploymentId],
        last_resort: bool,
        ranks: Option<&Ranks>,
    ) -> Choice {
        let rank = |place: &Place| ranks.and_then(|ranks| ranks.get(&place.deployment)).copied().unwrap_or(0);
        let ask = Ask {
            pool: &leg.pool,
            model: self.model(leg),
            endpoint: self.context.endpoint,
            sticky: self.context.sticky.as_ref(),
            exhausted,
            has_credential: &|place| self.serving.has_credential(place),
            last_resort,
            catalogue: self.serving.catalogue.revision,
            path: &leg.way.path,
            shares: self.subject(leg).rule().map(|rule| Shares { rule, rank: &rank }),
        };
        select::look(&ask, moment)
    }

    /// The affinity key that every gateway draws from, where they cannot see each other's records.
    fn agreed(&self) -> Option<&AffinityKey> {
        self.sticky_key().filter(|_| self.view == Some(View::Blind))
    }

    /// S3.11: the first request of a key without a live record claims it. Auxiliary calls bind nothing.
    fn claims(&self, leg: &Leg, choice: &Choice) -> bool {
        let free = self.hold.is_none() && !self.is_auxiliary() && leg.way.path.is_empty();
        self.sends == 0 && choice.affinity == Affinity::Absent && free
    }

    /// Counting tokens follows its session's deployment, but says nothing about health, binds nothing and uses nothing
    /// (PITFALLS H13); nor does a request about a response that is there.
    fn is_auxiliary(&self) -> bool {
        self.context.endpoint == Endpoint::CountTokens || self.is_errand()
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

    fn opened(&mut self, place: Arc<Place>) {
        self.sends += 1;
        self.fallback |= !self.leg.way.path.is_empty();
        if self.serving.watches_load {
            self.gateway.traffic.sent(&place.deployment);
        }
        self.open = Some(Open { place, sent: Instant::now(), first_token_ms: None, recorded: false });
    }

    fn selection(&self, leg: &Leg, place: &Place, reason: Reason, choice: Option<Choice>) -> Selection {
        let first = self.sends == 0;
        let reason = match reason {
            Reason::Draw | Reason::Affinity if self.hold.is_some() => Reason::Owner,
            Reason::Draw if !leg.way.path.is_empty() => Reason::Fallback,
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
        // What an upstream itself answers with an error, it has not done.
        let turned_down =
            verdict.work == Work::Refused || matches!(verdict.class, Class::CallerError | Class::Upstream5xx);
        self.may_be_done |= verdict.work != Work::Unsent && !(learnt.status.is_some() && turned_down);
        if open.recorded {
            return None;
        }
        let latency_ms = millis(open.sent);
        self.gateway.metrics.attempt(&open.place.channel.id, verdict.class);
        // What an auxiliary call counts is nobody's bill; what a response used is on record with the request that made it.
        let usage = if self.is_auxiliary() { Usage::default() } else { learnt.usage };
        self.gateway.limits.used(&self.rights, &usage, Time::wall_clock());
        self.measure(&open, verdict.class, latency_ms);
        let protected = self.serving.config.health.enabled && !self.is_auxiliary();
        let mut thresholds = self.serving.thresholds(&self.leg.pool.group, self.policy());
        thresholds.block_ms = verdict.block_ms.map_or(thresholds.block_ms, |ms| ms.min(thresholds.block_ms));
        Some(Event::Attempt(Box::new(Attempt {
            request: self.request.clone(),
            attempt: self.sends,
            member: open.place.member.id.clone(),
            deployment: open.place.deployment.clone(),
            incarnation: open.place.incarnation,
            model: self.model(&self.leg).clone(),
            class: verdict.class,
            status: learnt.status,
            latency_ms,
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

    /// Counts the end of a send, where that is asked for, and what a success took; an auxiliary call does other work, and
    /// its time tells nothing of that of an answer.
    fn measure(&self, open: &Open, class: Class, latency_ms: u64) {
        if !self.serving.watches_load {
            return;
        }
        let took = match self.form() {
            Form::Stream => open.first_token_ms,
            Form::Plain => Some(latency_ms),
        };
        let took = took.filter(|_| class == Class::Success && !self.is_auxiliary()).map(|ms| (self.form(), ms));
        self.gateway.traffic.ended(&open.place.deployment, took, Time::wall_clock());
    }

    /// S1.9, S3.13, S3.19: what a success commits, under what was asked for.
    fn preference(&self, place: &Place) -> Option<Event> {
        let sticky = self.context.sticky.as_ref().filter(|_| !self.is_auxiliary())?;
        Some(Event::Preference(Box::new(Preference {
            request: self.request.clone(),
            key: sticky.key.clone(),
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            model: place.upstream_model.clone(),
            pool: self.leg.pool.group.id.clone(),
            path: self.leg.way.path.clone(),
            chains: self.leg.way.chains.clone(),
            base: self.base.clone(),
            ttl_ms: self.serving.sticky_ttl_ms(&self.home.group, sticky.by),
        })))
    }

    fn sticky_key(&self) -> Option<&AffinityKey> {
        self.context.sticky.as_ref().map(|sticky| &sticky.key)
    }
}

impl Landing {
    /// One that is refused here.
    pub(crate) fn refused(refusal: &Refusal) -> Self {
        let (status, code) = (Some(refusal.status().as_u16()), Some(refusal.code()));
        Self { outcome: Outcome::Refused, status, code }
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

/// Records a request that was refused before anybody could be chosen to serve it.
pub(crate) fn grounded(gateway: &Gateway, request: &RequestId, context: Context, landing: Landing, begun: Instant) {
    let latency_ms = millis(begun);
    let endpoint = context.endpoint;
    let event = Event::Request(Box::new(Request {
        request: request.clone(),
        outcome: landing.outcome,
        class: None,
        code: landing.code.map(str::to_owned),
        status: landing.status,
        attempts: 0,
        fallback: false,
        latency_ms,
        context: Some(context),
    }));
    gateway.ledger.record(Time::wall_clock(), vec![event]);
    gateway.metrics.request(endpoint, landing.outcome, latency_ms);
}

/// What a send there cost, where its price and its tokens are known.
fn cost_nano(place: &Place, usage: &Usage, class: Class) -> Option<u64> {
    let price = place.channel.prices.iter().find(|price| price.model == place.upstream_model)?;
    price::cost_nano(price, usage, class)
}

impl Leg {
    fn home(pool: &Arc<Pool>) -> Self {
        Self { pool: pool.clone(), way: Way::default(), pinned: false }
    }
}

fn decide(leg: &Leg, choice: &Choice) -> Option<(Arc<Place>, Reason)> {
    let (index, reason) = select::decide(choice)?;
    let Candidate { member, deployment, .. } = &choice.candidates[index];
    let place = leg.pool.places.iter().find(|place| place.member.id == *member && place.deployment == *deployment);
    Some((place.cloned().expect("every candidate was made from a place of this pool"), reason))
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
