//! A gateway as a value: requests on their way, decided by the real routing code, recorded in its spool.
//!
//! It sees the shared state with its own facts laid on top, follows the catalogue in the log, and calls upstreams only
//! after the selection is in its spool. A kill takes everything but the spool.

use std::sync::Arc;

use waybill_routing::classify::{self, Verdict};
use waybill_routing::dispatch::{self, Limits, Next, Replay, Search};
use waybill_routing::ownership::{self, Name, Own, Owners, Unowned};
use waybill_routing::select::{self, Ask, Moment};
use waybill_routing::state::State;
use waybill_schema::catalogue::{Catalogue, Place, Pool};
use waybill_schema::event::{
    Affinity, AffinityRead, Alive, Attempt, Choice, Class, Context, Effect, Endpoint, Epoch, Event, KeyType, Outcome,
    Ownedness, Ownership, Preference, Reason, Request, Selection, SessionSource, Started, Sticky, Thresholds, Usage,
};
use waybill_schema::id::{AffinityKey, DeploymentId, RequestId, Revision, WriterId};
use waybill_schema::redis::Owner;
use waybill_schema::time::Time;

use crate::auditor::{GROUP, MODEL, Reading};
use crate::invariants::{Book, Denial};
use crate::log::{Kept, Life, Message, Says, Wire, WorldLog};
use crate::mutation::Mutation;
use crate::redis::Redis;
use crate::schedule::Dice;
use crate::shipper::{FRAME_FACTS_MAX, Found, Shipper};
use crate::spool::{Spool, Spooled, Stamp, place_of};
use crate::upstream::{Answer, Call, RETRY_AFTER_SECONDS, Upstreams, response_of};

/// The thresholds of this world.
pub const THRESHOLDS: Thresholds =
    Thresholds { failures: 2, cooldown_ms: 17_000, growth_permille: 1_700, cooldown_ms_max: 120_000, block_ms: 23_000 };
/// How long a pin holds, in milliseconds.
pub const STICKY_TTL_MS: u64 = 300_000;
/// Sessions there are.
pub const SESSIONS: usize = 6;
/// The one tenant.
pub const SCOPE: &str = "acme";
/// The API that all requests speak.
const ENDPOINT: Endpoint = Endpoint::Responses;
/// More responses than a life of a process makes.
const OWNERS_MAX: usize = 8192;

/// What lies outside a gateway.
#[derive(Debug)]
pub struct Outside<'a> {
    /// The true time.
    pub now: Time,
    /// The log.
    pub log: &'a mut WorldLog,
    /// The wire to it.
    pub wire: &'a mut Wire,
    /// Redis.
    pub redis: &'a mut Redis,
    /// The upstreams.
    pub upstreams: &'a mut Upstreams,
    /// The book of what was made.
    pub book: &'a mut Book,
    /// The dice.
    pub dice: &'a mut Dice,
    /// The rule that is broken.
    pub mutation: Option<Mutation>,
}

/// A gateway: a machine with a disk, and at most one process.
#[derive(Debug)]
pub struct Gateway {
    /// Its place among all gateways.
    pub index: usize,
    /// Its name as a writer.
    pub writer: WriterId,
    /// How far its clock is ahead of the true time, in milliseconds.
    pub skew_ms: i64,
    /// Its disk.
    pub spool: Spool,
    /// Whether the log is known to have its name from this disk: before, the disk says nothing about its past.
    pub anchored: bool,
    /// What runs.
    pub process: Option<Process>,
    /// How many lives it had.
    pub lives: u64,
    /// Whether its process is frozen.
    pub frozen: bool,
    /// Whether another machine has taken over its name: what ends here is not started again.
    pub superseded: bool,
    /// Whether it took its name over from a machine that may still run.
    pub succeeds: bool,
    /// Whether the log cannot be reached.
    pub no_log: bool,
    /// Whether Redis cannot be reached.
    pub no_redis: bool,
}

/// A running process.
#[derive(Debug)]
pub struct Process {
    shipper: Shipper,
    /// Whether it takes requests.
    serves: bool,
    reading: Reading,
    catalogue: Arc<Catalogue>,
    flights: Vec<Flight>,
    /// Who owns what it has made.
    owners: Owners,
    /// What its clock is behind the log's time scale, as learnt from its own projected facts, in milliseconds.
    behind_log_ms: i64,
}

/// A request on its way.
#[derive(Debug)]
struct Flight {
    request: RequestId,
    context: Context,
    pool: Arc<Pool>,
    /// The call whose response it goes on from.
    parent: Option<usize>,
    base: Option<Revision>,
    begun: Time,
    sends: u16,
    open: Option<Open>,
    last_class: Option<Class>,
}

/// A send that has not ended.
#[derive(Debug)]
struct Open {
    attempt: dispatch::Attempt,
    place: Arc<Place>,
    sent: Time,
    call: usize,
}

impl Gateway {
    /// A machine without a past.
    pub fn new(index: usize, writer: &str, skew_ms: i64) -> Self {
        let writer = WriterId::from(writer);
        Self {
            index,
            spool: Spool::new(writer.clone()),
            writer,
            skew_ms,
            anchored: false,
            process: None,
            lives: 0,
            frozen: false,
            superseded: false,
            succeeds: false,
            no_log: false,
            no_redis: false,
        }
    }

    /// Whether its process runs and is not frozen.
    pub fn acts(&self) -> bool {
        self.process.is_some() && !self.frozen
    }

    /// Whether everything on its disk is in the log, as far as it knows.
    pub fn is_done(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.shipper.is_done(&self.spool))
    }

    /// The place of the last fact that the log is known to have.
    pub fn acknowledged(&self) -> (u64, u64) {
        self.process.as_ref().map_or((0, 0), |process| process.shipper.known)
    }

    /// Whether all facts in `kept` come back should the log lose it, or are declared. Not so the first of a name that
    /// was taken over: it is what fences the machine before, which would go on behind the frames that are left.
    pub fn can_bring_back(&self, kept: &Kept) -> bool {
        let place = |number| (kept.header.epoch, number);
        let first = self.spool.facts().first().map(Spooled::place);
        let fences = self.succeeds && first == Some(place(kept.header.first));
        let mut numbers = kept.header.first..=kept.header.last();
        self.anchored && !fences && numbers.all(|number| self.spool.answers_for(place(number)))
    }

    /// The life it leads, or led last.
    pub fn life(&self) -> Life {
        Life { gateway: self.index, number: self.lives }
    }

    /// Starts a process. Its epoch is one more than the greatest of log and spool; a disk that does not know its past
    /// needs the log for that, and must see its `started` stored before it serves.
    pub fn start(&mut self, out: &mut Outside<'_>) {
        if !self.anchored {
            self.spool = Spool::new(self.writer.clone());
        }
        if self.spool.full || self.superseded || (self.no_log && !self.anchored) {
            return;
        }
        let mut shipper = Shipper::new(self.writer.clone(), u64::MAX);
        if !self.no_log {
            shipper.take_up(out.log);
        }
        let in_log = (shipper.known != (0, 0)).then_some(Epoch { epoch: shipper.known.0, last: shipper.known.1 });
        let previous = in_log.max_by_place(self.spool.last());
        let epoch = previous.map_or(1, |past| past.epoch + 1);
        self.spool.begin(epoch);
        let started = Started { version: "1".into(), secret: "s".into(), previous };
        self.record(vec![Event::Started(started)], out.now, out.book);
        self.lives += 1;
        self.anchored |= previous.is_none();
        shipper.write_in(epoch);
        self.process = Some(Process::new(shipper, self.anchored));
        self.follow(out);
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.process = None;
        self.frozen = false;
    }

    /// Says that it is there.
    pub fn alive(&mut self, out: &mut Outside<'_>) {
        if self.process.is_none() {
            return;
        }
        let last = self.spool.last().map_or(0, |last| last.last);
        self.record(vec![Event::Alive(Alive { last })], out.now, out.book);
    }

    /// Reads the catalogue on.
    pub fn follow(&mut self, out: &mut Outside<'_>) {
        let Some(process) = self.process.as_mut().filter(|_| !self.no_log) else { return };
        if process.reading.read(out.log) {
            process.catalogue = Arc::new(Catalogue::compile(&process.reading.rows));
        }
    }

    /// Does the shipper's next thing.
    pub fn ship(&mut self, out: &mut Outside<'_>) {
        let Some(process) = self.process.as_mut().filter(|_| !self.no_log) else { return };
        let shipper = &mut process.shipper;
        let found = if !shipper.has_taken_up() {
            shipper.take_up(out.log)
        } else if shipper.in_doubt(out.now) {
            shipper.reconcile(out.log, &self.spool)
        } else {
            Found::Ours
        };
        let known = shipper.known;
        match found {
            Found::Ours => self.acknowledge(known),
            Found::Moved => {
                // An append under way expects a sequence that may soon be given to an older frame that is sent again.
                out.wire.reconnect(self.life());
                self.spool.declare_released(known, self.stamp(out.now), out.book);
            }
            Found::Foreign if out.mutation == Some(Mutation::ZombieNotFenced) && self.anchored => {
                shipper.send_on_behind(out.log);
            }
            Found::Foreign => return self.end_fenced(),
        }
        let (life, sent) = (self.life(), self.clock(out.now));
        let process = self.process.as_mut().expect("a process that is fenced has returned");
        let facts_max = 1 + out.dice.below(FRAME_FACTS_MAX);
        if let Some(says) = process.shipper.next(&self.spool, facts_max, out.now, sent) {
            out.wire.send(Message { life, left: out.now, says });
        }
    }

    /// Loses its connection to the log.
    pub fn disconnect(&mut self) {
        if let Some(process) = &mut self.process {
            process.shipper.reconnect();
        }
    }

    /// Hears an answer of the log.
    pub fn hear(&mut self, says: &Says) {
        let Some(process) = &mut self.process else { return };
        match says {
            Says::Append { .. } => {}
            Says::Conflict { sum } => process.shipper.conflict(sum),
            Says::Stored { sum, seq } => {
                if process.shipper.stored(sum, *seq) {
                    let known = process.shipper.known;
                    self.acknowledge(known);
                }
            }
        }
    }

    fn acknowledge(&mut self, known: (u64, u64)) {
        let Some(process) = &mut self.process else { return };
        if self.spool.facts().first().is_some_and(|held| held.place() <= known) {
            self.anchored = true;
            process.serves = true;
        }
    }

    /// Another process writes under this name. A disk that the log knows has been replaced; one that it does not know
    /// yet was only too slow, and starts anew.
    fn end_fenced(&mut self) {
        self.kill();
        self.superseded |= self.anchored;
    }

    /// A request of `session` comes in, or one that goes on from the response of the call `parent`.
    pub fn ask(&mut self, session: usize, parent: Option<usize>, request: RequestId, out: &mut Outside<'_>) {
        let now = self.log_time(out.now);
        let Some(process) = self.process.as_ref().filter(|process| process.serves && !self.spool.full) else { return };
        let Some(pool) = process.catalogue.pool(&GROUP.into(), MODEL) else { return };
        let asked = match parent {
            None => Some((pool, format!("s-{session}"))),
            Some(parent) => self.held_to_owner(&pool, parent, out),
        };
        let Some((pool, session)) = asked else {
            out.book.n_refused += 1;
            return;
        };
        let flight = Flight {
            request,
            context: context(&session),
            pool,
            parent,
            base: None,
            begun: self.clock(out.now),
            sends: 0,
            open: None,
            last_class: None,
        };
        let limits = Limits {
            max_attempts: 2,
            retry_times: if parent.is_some() { 0 } else { 2 },
            sends_max: 5,
            backoff_ms: 100,
            deadline: now.plus_ms(120_000),
            replay: if parent.is_some() { Replay::RefusedOnly } else { Replay::Free },
        };
        self.search(flight, dispatch::begin(limits), out);
    }

    /// What of `pool` owns the response of the call `parent`, and the session that is inherited; nothing where that
    /// cannot be told, is not whole, or is gone.
    fn held_to_owner(&self, pool: &Arc<Pool>, parent: usize, out: &mut Outside<'_>) -> Option<(Arc<Pool>, String)> {
        let owner = match self.owner(&response_of(parent), out) {
            Ok(owner) => owner,
            Err(why) => {
                let known = out.redis.shared().map(|shared| shared.watermark.keys().cloned().collect());
                let denial = Denial { parent, at: out.now, known: known.unwrap_or_default() };
                out.book.denials.extend((why == Unowned::Unknown).then_some(denial));
                return None;
            }
        };
        ownership::continues(&owner, MODEL, ENDPOINT).ok()?;
        let session = owner.session.to_string();
        if out.mutation == Some(Mutation::ContinuationFollowsSession) {
            return Some((pool.clone(), session));
        }
        let connection = self.process.as_ref()?.catalogue.connection(&owner.channel);
        let here = |place: &&Arc<Place>| place.deployment == owner.deployment && connection == Some(owner.incarnation);
        let places: Vec<_> = pool.places.iter().filter(here).cloned().collect();
        let pool = Pool { group: pool.group.clone(), route: pool.route.clone(), places };
        (!pool.places.is_empty()).then(|| (Arc::new(pool), session))
    }

    /// Who owns a response, by the shared state and by what this process has made.
    fn owner(&self, name: &Name, out: &Outside<'_>) -> Result<Owner, Unowned> {
        let process = self.process.as_ref().filter(|_| !self.no_redis).ok_or(Unowned::Unreadable)?;
        let own = Own {
            writer: self.writer.clone(),
            epoch: self.spool.last().map_or(0, |last| last.epoch),
            owner: process.owners.get(name).map(|held| held.owner.clone()),
            forgotten: process.owners.forgotten(),
        };
        let mut sighting = out.redis.sight(name);
        if out.mutation == Some(Mutation::LaggardsHaveNothing) {
            sighting.writers.retain(|(writer, _)| *writer == self.writer);
        }
        ownership::judge(sighting, own, self.log_time(out.now))
    }

    /// Chooses a deployment, records the choice, and sends; or ends the request where nothing is legal.
    fn search(&mut self, mut flight: Flight, search: Search, out: &mut Outside<'_>) {
        let state = self.view(out.redis, out.now);
        let process = self.process.as_ref().expect("only a running process searches");
        let now = self.log_time(out.now);
        let mut choice = select::look(
            &Ask {
                pool: &flight.pool,
                model: &flight.context.model,
                endpoint: flight.context.endpoint,
                sticky: flight.context.sticky.as_ref(),
                exhausted: search.exhausted(),
                has_credential: &|_| true,
                last_resort: false,
                catalogue: process.reading.rows.revision,
                path: &[],
                shares: None,
            },
            &Moment { state: &state, now, draw: select::draw(out.dice.roll()) },
        );
        if flight.parent.is_none() {
            self.read_claim(&mut choice, &flight.context, out);
        }
        let Some((index, reason)) = select::decide(&choice) else {
            return self.land(flight, Vec::new(), Outcome::Failed, out);
        };
        let candidate = &choice.candidates[index];
        let place = flight.pool.places.iter().find(|place| place.member.id == candidate.member);
        let place = place.expect("every candidate is a place of the pool").clone();
        let claim = flight.sends == 0 && choice.affinity == Affinity::Absent && flight.parent.is_none();
        // A continuation moves no session.
        let read = base_of(&choice.affinity).filter(|_| flight.parent.is_none());
        let selection = Selection { claim, ..flight.selection(&place, reason, Some(choice)) };
        let Some(revision) = self.record(vec![Event::Selection(Box::new(selection))], out.now, out.book) else {
            return;
        };
        flight.base = if claim { Some(revision.clone()) } else { read.or(flight.base.take()) };
        if claim && !self.no_redis {
            let key = sticky_key(&flight.context).clone();
            out.redis.set_claim(key, place.deployment.clone(), revision.clone(), out.now);
        }
        let attempt = search.take(place.deployment.clone());
        self.send(flight, attempt, place, revision, out);
    }

    /// S3.11: a session without a pin goes where another gateway has just said that it goes.
    fn read_claim(&self, choice: &mut Choice, context: &Context, out: &Outside<'_>) {
        let claim = out.redis.claim(sticky_key(context), out.now).filter(|_| !self.no_redis);
        let Some(claim) = claim.filter(|_| choice.affinity == Affinity::Absent) else { return };
        let legal = |deployment: &DeploymentId| {
            choice.candidates.iter().any(|c| c.excluded.is_none() && c.deployment == *deployment)
        };
        if legal(&claim.deployment) {
            let (deployment, revision) = (claim.deployment.clone(), claim.revision.clone());
            choice.affinity = Affinity::Hit(AffinityRead { deployment, revision, provisional: true });
        }
    }

    fn send(
        &mut self,
        mut flight: Flight,
        attempt: dispatch::Attempt,
        place: Arc<Place>,
        selection: Revision,
        out: &mut Outside<'_>,
    ) {
        flight.sends += 1;
        let call = out.upstreams.take(Call {
            request: flight.request.clone(),
            attempt: flight.sends,
            deployment: place.deployment.clone(),
            selection,
            life: self.life(),
            parent: flight.parent,
            named: false,
            began: out.now,
            ended: None,
        });
        flight.open = Some(Open { attempt, place, sent: self.clock(out.now), call });
        let process = self.process.as_mut().expect("only a running process sends");
        process.flights.push(flight);
    }

    /// Notes who makes the response that an upstream has named at the beginning of its answer to `call`.
    pub fn began(&mut self, call: usize, out: &mut Outside<'_>) {
        let fact = self.ownership(call, Ownedness::Provisional);
        self.record(fact.into_iter().collect(), out.now, out.book);
    }

    fn ownership(&self, call: usize, state: Ownedness) -> Option<Event> {
        let process = self.process.as_ref()?;
        let flight =
            process.flights.iter().find(|flight| flight.open.as_ref().is_some_and(|open| open.call == call))?;
        let Open { place, .. } = flight.open.as_ref()?;
        let Name { scope, response } = response_of(call);
        Some(Event::Ownership(Box::new(Ownership {
            response,
            state,
            request: flight.request.clone(),
            scope,
            model: flight.context.model.clone(),
            endpoint: ENDPOINT,
            deployment: place.deployment.clone(),
            channel: place.channel.id.clone(),
            incarnation: process.catalogue.connection(&place.channel.id)?,
            session: flight.context.session.clone(),
            source: flight.context.source,
        })))
    }

    /// Takes what an upstream, or the client, made of `call`.
    pub fn answered(&mut self, call: usize, answer: Answer, out: &mut Outside<'_>) {
        let owned = self.ownership(call, Ownedness::Final);
        let Some(process) = &mut self.process else { return };
        let mine = |flight: &Flight| flight.open.as_ref().is_some_and(|open| open.call == call);
        let Some(index) = process.flights.iter().position(mine) else { return };
        let mut flight = process.flights.swap_remove(index);
        let open = flight.open.take().expect("the flight was found by its open send");
        let verdict = verdict(answer, self.clock(out.now));
        let ended = flight.ended(&open, &verdict, self.clock(out.now));
        match answer {
            Answer::Success => {
                let events = [ended, flight.preference(&open.place)].into_iter().chain(owned).collect();
                open.attempt.commit();
                self.land(flight, events, Outcome::Success, out);
                self.show(&response_of(call), out);
            }
            Answer::Cut => {
                open.attempt.commit();
                self.land(flight, vec![ended], Outcome::Interrupted, out);
            }
            Answer::Left => self.land(flight, vec![ended], Outcome::Cancelled, out),
            Answer::Fails | Answer::Limited => {
                self.record(vec![ended], out.now, out.book);
                self.go_on(flight, open, &verdict, out);
            }
        }
    }

    fn go_on(&mut self, flight: Flight, open: Open, verdict: &Verdict, out: &mut Outside<'_>) {
        match open.attempt.fail(verdict, self.log_time(out.now)) {
            Next::Spent { .. } | Next::End(_) => self.land(flight, Vec::new(), Outcome::Failed, out),
            Next::Other(search) => self.search(flight, search, out),
            Next::Same { attempt, .. } => {
                let selection = flight.selection(&open.place, Reason::Same, None);
                let recorded = self.record(vec![Event::Selection(Box::new(selection))], out.now, out.book);
                if let Some(revision) = recorded {
                    self.send(flight, attempt, open.place, revision, out);
                }
            }
        }
    }

    fn land(&mut self, flight: Flight, mut events: Vec<Event>, outcome: Outcome, out: &mut Outside<'_>) {
        events.push(Event::Request(Box::new(Request {
            request: flight.request,
            outcome,
            class: flight.last_class,
            code: None,
            status: None,
            attempts: flight.sends,
            fallback: false,
            latency_ms: self.clock(out.now).ms_since(flight.begun),
            context: (flight.sends == 0).then_some(flight.context),
        })));
        self.record(events, out.now, out.book);
    }

    /// Shows the others who owns a response, where that is on the disk.
    fn show(&self, name: &Name, out: &mut Outside<'_>) {
        let owner = self.process.as_ref().and_then(|process| process.owners.get(name)).map(|held| &held.owner);
        let owner = owner.filter(|owner| owner.state == Ownedness::Final && !self.no_redis);
        if let Some(owner) = owner.cloned() {
            out.redis.show(name.clone(), owner);
        }
    }

    /// The shared state, and on top of it every fact of its own that the watermark does not cover.
    fn view(&mut self, redis: &Redis, now: Time) -> State {
        let shared = redis.shared().filter(|_| !self.no_redis);
        let covered = shared.and_then(|shared| shared.watermark.get(&self.writer));
        let (place, at) = covered.map_or(((0, 0), now), |(epoch, at)| (place_of(*epoch), *at));
        if let (Some(held), Some(process)) = (self.spool.at(place), &mut self.process) {
            process.behind_log_ms = at.0 - held.made.0;
        }
        let mut state = shared.map(|shared| shared.state.clone()).unwrap_or_default();
        for held in self.spool.behind(place) {
            state.apply(&held.fact);
        }
        state
    }

    fn record(&mut self, events: Vec<Event>, now: Time, book: &mut Book) -> Option<Revision> {
        let stamp = self.stamp(now);
        let owned = |event: &Event| match event {
            Event::Ownership(ownership) => Some(ownership.clone()),
            _ => None,
        };
        let owned: Vec<Box<Ownership>> = events.iter().filter_map(owned).collect();
        let first = self.spool.append(events, stamp, book)?;
        if let Some(process) = &mut self.process {
            owned.iter().for_each(|ownership| drop(process.owners.apply(ownership, first.number, now)));
        }
        Some(first)
    }

    fn stamp(&self, now: Time) -> Stamp {
        Stamp { truly: now, made: self.clock(now), at: self.log_time(now) }
    }

    fn clock(&self, now: Time) -> Time {
        now.plus_ms(self.skew_ms)
    }

    fn log_time(&self, now: Time) -> Time {
        self.clock(now).plus_ms(self.process.as_ref().map_or(0, |process| process.behind_log_ms))
    }
}

impl Process {
    fn new(shipper: Shipper, serves: bool) -> Self {
        Self {
            shipper,
            serves,
            reading: Reading::default(),
            catalogue: Arc::default(),
            flights: Vec::new(),
            owners: Owners::with_capacity(OWNERS_MAX),
            behind_log_ms: 0,
        }
    }
}

impl Flight {
    fn selection(&self, place: &Place, reason: Reason, choice: Option<Choice>) -> Selection {
        let first = self.sends == 0;
        Selection {
            request: self.request.clone(),
            attempt: self.sends + 1,
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            upstream_model: place.upstream_model.clone(),
            reason: match reason {
                Reason::Draw | Reason::Affinity if self.parent.is_some() => Reason::Owner,
                Reason::Draw if !first => Reason::Next,
                other => other,
            },
            claim: false,
            choice,
            context: first.then(|| self.context.clone()),
        }
    }

    fn ended(&mut self, open: &Open, verdict: &Verdict, now: Time) -> Event {
        self.last_class = Some(verdict.class);
        Event::Attempt(Box::new(Attempt {
            request: self.request.clone(),
            attempt: self.sends,
            member: open.place.member.id.clone(),
            deployment: open.place.deployment.clone(),
            incarnation: open.place.incarnation,
            model: self.context.model.clone(),
            class: verdict.class,
            status: None,
            latency_ms: now.ms_since(open.sent),
            first_token_ms: None,
            usage: Usage::default(),
            cost_nano: None,
            retry_after_ms: verdict.retry_after_ms,
            served_model: None,
            effect: verdict.effect,
            thresholds: THRESHOLDS,
            sticky: Some(sticky_key(&self.context).clone()),
        }))
    }

    fn preference(&self, place: &Place) -> Event {
        Event::Preference(Box::new(Preference {
            request: self.request.clone(),
            key: sticky_key(&self.context).clone(),
            member: place.member.id.clone(),
            deployment: place.deployment.clone(),
            incarnation: place.incarnation,
            model: place.upstream_model.clone(),
            pool: self.context.group.clone(),
            path: Vec::new(),
            chains: Vec::new(),
            base: self.base.clone(),
            ttl_ms: STICKY_TTL_MS,
        }))
    }
}

/// The later of two epochs.
trait Later {
    fn max_by_place(self, other: Option<Epoch>) -> Option<Epoch>;
}

impl Later for Option<Epoch> {
    fn max_by_place(self, other: Option<Epoch>) -> Option<Epoch> {
        if self.map(place_of) < other.map(place_of) { other } else { self }
    }
}

fn base_of(affinity: &Affinity) -> Option<Revision> {
    match affinity {
        Affinity::Hit(read) | Affinity::Skipped(read) => Some(read.revision.clone()),
        Affinity::None | Affinity::Absent => None,
    }
}

fn sticky_key(context: &Context) -> &AffinityKey {
    &context.sticky.as_ref().expect("every session of this world sticks").key
}

fn context(session: &str) -> Context {
    Context {
        scope: SCOPE.into(),
        key: SCOPE.into(),
        group: GROUP.into(),
        model: MODEL.into(),
        endpoint: ENDPOINT,
        stream: true,
        session: session.into(),
        source: SessionSource::Explicit,
        signal: "header:x-session-id".into(),
        sticky: Some(Sticky { key: AffinityKey::new(format!("{SCOPE}|{session}")), by: KeyType::Conv }),
    }
}

fn verdict(answer: Answer, now: Time) -> Verdict {
    let seconds = RETRY_AFTER_SECONDS.to_string();
    match answer {
        Answer::Success => Verdict::ended(Class::Success, Effect::Recover),
        Answer::Cut => Verdict::ended(Class::Interrupted, Effect::Count),
        Answer::Left => Verdict::ended(Class::Cancelled, Effect::None),
        Answer::Fails => classify::head(ENDPOINT, 503, &|_| None, b"{}", now),
        Answer::Limited => {
            let headers = |name: &str| (name == "retry-after").then_some(seconds.as_str());
            classify::head(ENDPOINT, 429, &headers, b"{}", now)
        }
    }
}
