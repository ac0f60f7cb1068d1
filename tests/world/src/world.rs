//! A world: all actors side by side, moved by the schedule, watched after every step.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use waybill_events::log::{AppendError, Log};
use waybill_routing::state::State;
use waybill_schema::event::{Class, Event};
use waybill_schema::id::RequestId;
use waybill_schema::time::Time;

use crate::auditor::Auditor;
use crate::gateway::{Gateway, Outside, SESSIONS};
use crate::invariants::{Book, Rule, Violation, Watch, hold};
use crate::log::{Kept, LEADER_SKEW_MS_MAX, Message, Says, Wire, WorldLog};
use crate::mutation::Mutation;
use crate::projector::{Memory, Projector, Store};
use crate::redis::Redis;
use crate::schedule::{Action, Dice, Menu};
use crate::upstream::{Answer, Upstreams};

/// Steps between two rests.
const STEPS: usize = 200;
/// How often a world comes to rest.
const RESTS: usize = 3;
/// How often everything may be moved before a rest counts as none.
const ROUNDS_MAX: usize = 400;
/// How much of its last days a failing world tells.
const DIARY_MAX: usize = 24;
/// Gateways' clocks are wrong by at most this much, in milliseconds.
const SKEW_MS_MAX: usize = 600_000;
const MORNING: Time = Time(1_800_000_000_000);

/// Why a world failed, and how to see it fail again.
#[derive(Debug, thiserror::Error)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The step, from 1.
    pub step: usize,
    /// What did not hold.
    pub violation: Violation,
    /// The last things that happened.
    pub diary: Vec<(Time, Action)>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} fails at step {}: {}", self.seed, self.step, self.violation)?;
        self.diary.iter().try_for_each(|(at, action)| writeln!(f, "  {:>9} ms {action:?}", at.ms_since(MORNING)))
    }
}

/// A world that held to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lived {
    /// The bytes of its log.
    pub log: Vec<u8>,
    /// What there was of each kind of event that a world should have.
    pub seen: BTreeMap<&'static str, usize>,
}

/// A world.
#[derive(Debug)]
pub struct World {
    seed: u64,
    step: usize,
    mutation: Option<Mutation>,
    dice: Dice,
    menu: Menu,
    now: Time,
    log: WorldLog,
    wire: Wire,
    redis: Redis,
    upstreams: Upstreams,
    gateways: Vec<Gateway>,
    projectors: [Projector; 2],
    store: Store,
    auditors: [Auditor; 2],
    n_requests: usize,
    n_frames_lost: usize,
    book: Book,
    watch: Watch,
    diary: VecDeque<(Time, Action)>,
}

impl World {
    /// The world of `seed`, with one rule broken where `mutation` says so.
    pub fn new(seed: u64, mutation: Option<Mutation>) -> Self {
        let mut dice = Dice::new(seed);
        let menu = Menu::draw(&mut dice);
        let names = ["gw-a", "gw-b", "gw-c"];
        let skew_ms = |dice: &mut Dice| dice.below(2 * SKEW_MS_MAX) as i64 - SKEW_MS_MAX as i64;
        let gateways = names.iter().enumerate().map(|(index, name)| Gateway::new(index, name, skew_ms(&mut dice)));
        Self {
            gateways: gateways.collect(),
            seed,
            step: 0,
            mutation,
            dice,
            menu,
            now: MORNING,
            log: WorldLog::default(),
            wire: Wire::default(),
            redis: Redis::default(),
            upstreams: Upstreams::default(),
            projectors: Default::default(),
            store: Store::default(),
            auditors: [Auditor::new("ann"), Auditor::new("bob")],
            n_requests: 0,
            n_frames_lost: 0,
            book: Book::default(),
            watch: Watch::default(),
            diary: VecDeque::new(),
        }
    }

    /// Lives through its days and comes to rest a few times.
    pub fn live(mut self) -> Result<Lived, Box<Failure>> {
        match self.days() {
            Ok(()) => {
                let log = self.log.frames().iter().flat_map(|kept| kept.frame.bytes.iter().copied()).collect();
                Ok(Lived { log, seen: self.seen() })
            }
            Err(violation) => {
                let Self { seed, step, diary, .. } = self;
                Err(Box::new(Failure { seed, step, violation, diary: diary.into() }))
            }
        }
    }

    fn seen(&self) -> BTreeMap<&'static str, usize> {
        let facts = || self.log.frames().iter().flat_map(|kept| &kept.facts);
        let n_facts = |is_it: fn(&Event) -> bool| facts().filter(|fact| is_it(&fact.event)).count();
        let fenced = self.gateways.iter().filter(|gateway| gateway.superseded && gateway.process.is_none());
        let abandoned = self.store.table.attempts.values().filter(|class| **class == Class::Abandoned);
        BTreeMap::from([
            ("calls", self.upstreams.calls.len()),
            ("continuations", self.upstreams.calls.iter().filter(|call| call.parent.is_some()).count()),
            ("continuations refused", self.book.n_refused),
            ("responses called unknown", self.book.denials.len()),
            ("fenced processes", fenced.count()),
            ("abandoned sends", abandoned.count()),
            ("frames lost by the log", self.n_frames_lost),
            ("generations begun anew", self.store.generation as usize),
            ("holes reported", self.watch.n_missing()),
            ("holes declared", n_facts(|event| matches!(event, Event::Dropped(_)))),
            ("lives", n_facts(|event| matches!(event, Event::Started(_)))),
            ("edits", n_facts(|event| matches!(event, Event::Catalogue(_)))),
            ("undos", n_facts(|event| matches!(event, Event::Catalogue(batch) if !batch.undo.is_empty()))),
        ])
    }

    fn days(&mut self) -> Result<(), Violation> {
        self.log.now = self.now;
        // The first batch is planned, and appended.
        for _ in 0..2 {
            self.with_auditor(0);
        }
        for index in 0..self.gateways.len() {
            self.with(index, Gateway::start);
        }
        for _ in 0..RESTS {
            for _ in 0..STEPS {
                self.step += 1;
                self.now = self.now.plus_ms(self.dice.lull_ms());
                self.log.now = self.now;
                let action = self.menu.next(&mut self.dice);
                self.happen(action);
                self.diary.push_back((self.now, action));
                if self.diary.len() > DIARY_MAX {
                    self.diary.pop_front();
                }
                self.check()?;
            }
            self.rest()?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Violation> {
        self.watch.log(&self.log, &self.book)?;
        self.watch.calls(&self.upstreams, &self.gateways)?;
        self.watch.denials(&self.book, &self.upstreams, &self.gateways)?;
        for (index, projector) in self.projectors.iter().enumerate() {
            if let Some(memory) = &projector.memory {
                self.watch.projection(index, memory, &self.store, &self.log)?;
            }
        }
        Ok(())
    }

    fn happen(&mut self, action: Action) {
        match action {
            Action::Ask => self.ask(),
            Action::Leave => self.answer(Some(Answer::Left)),
            Action::Begin => self.begin(),
            Action::Answer => self.answer(None),
            Action::Mood => self.upstreams.change_mood(&mut self.dice),
            Action::Ship => self.with_one(Gateway::acts, Gateway::ship),
            Action::Deliver => self.deliver(),
            Action::Alive => self.with_one(Gateway::acts, Gateway::alive),
            Action::Follow => self.with_one(Gateway::acts, Gateway::follow),
            Action::Project => self.project(),
            Action::Edit => {
                let index = self.dice.below(self.auditors.len());
                self.with_auditor(index);
            }
            Action::Kill => self.with_one(|gateway| gateway.process.is_some(), |gateway, _| gateway.kill()),
            Action::Start => self.with_one(|gateway| gateway.process.is_none(), Gateway::start),
            Action::Replace => self.replace(),
            Action::Thaw => self.with_one(|gateway| gateway.frozen, |gateway, _| gateway.frozen = false),
            Action::Partition => self.partition(),
            Action::EmptyRedis => self.redis.empty(),
            Action::LoseTail => self.lose_tail(),
            Action::Leader => {
                self.log.skew_ms = self.dice.below(2 * LEADER_SKEW_MS_MAX as usize) as i64 - LEADER_SKEW_MS_MAX;
            }
            Action::FillDisk => self.with_one(Gateway::acts, |gateway, _| gateway.spool.full ^= true),
            Action::Damage => self.with_one(Gateway::acts, damage),
            Action::Release => self.with_one(Gateway::acts, release),
            Action::KillProjector => {
                let index = self.dice.below(self.projectors.len());
                self.projectors[index].memory = None;
            }
        }
    }

    fn with(&mut self, index: usize, act: impl FnOnce(&mut Gateway, &mut Outside<'_>)) {
        let (gateways, _, mut out) = self.parts();
        act(&mut gateways[index], &mut out);
    }

    fn with_auditor(&mut self, index: usize) {
        let (_, auditors, mut out) = self.parts();
        auditors[index].step(&mut out);
    }

    /// Those who act, and what lies outside of each.
    fn parts(&mut self) -> (&mut [Gateway], &mut [Auditor], Outside<'_>) {
        let out = Outside {
            now: self.now,
            log: &mut self.log,
            wire: &mut self.wire,
            redis: &mut self.redis,
            upstreams: &mut self.upstreams,
            book: &mut self.book,
            dice: &mut self.dice,
            mutation: self.mutation,
        };
        (&mut self.gateways, &mut self.auditors, out)
    }

    fn with_one(&mut self, can: impl Fn(&Gateway) -> bool, act: impl FnOnce(&mut Gateway, &mut Outside<'_>)) {
        let able: Vec<usize> =
            self.gateways.iter().filter(|gateway| can(gateway)).map(|gateway| gateway.index).collect();
        if let Some(&index) = self.dice.pick(&able) {
            self.with(index, act);
        }
    }

    fn ask(&mut self) {
        self.n_requests += 1;
        let request = RequestId::new(format!("r-{}", self.n_requests));
        let session = self.dice.below(SESSIONS);
        let parent = if self.dice.chance(30) { self.upstreams.known(&mut self.dice) } else { None };
        self.with_one(Gateway::acts, |gateway, out| gateway.ask(session, parent, request, out));
    }

    /// A call's answer begins, in the ears of a process that still lives and hears.
    fn begin(&mut self) {
        let calls = 0..self.upstreams.calls.len();
        let open: Vec<usize> = calls.filter(|call| self.is_heard(*call) && self.upstreams.can_begin(*call)).collect();
        if let Some(&call) = self.dice.pick(&open) {
            self.upstreams.calls[call].named = true;
            let gateway = self.upstreams.calls[call].life.gateway;
            self.with(gateway, |gateway, out| gateway.began(call, out));
        }
    }

    /// A call ends, by `answer` or as its upstream is disposed, in the ears of a process that still lives and hears.
    fn answer(&mut self, answer: Option<Answer>) {
        let open: Vec<usize> = (0..self.upstreams.calls.len()).filter(|call| self.is_heard(*call)).collect();
        if let Some(&call) = self.dice.pick(&open) {
            self.end_call(call, answer);
        }
    }

    fn is_heard(&self, call: usize) -> bool {
        let call = &self.upstreams.calls[call];
        let gateway = &self.gateways[call.life.gateway];
        call.ended.is_none() && gateway.acts() && gateway.life() == call.life
    }

    fn end_call(&mut self, call: usize, answer: Option<Answer>) {
        let answer = answer.unwrap_or_else(|| self.upstreams.answer(call, &mut self.dice));
        self.upstreams.calls[call].ended = Some((self.now, answer));
        self.upstreams.calls[call].named |= answer == Answer::Success;
        let gateway = self.upstreams.calls[call].life.gateway;
        self.with(gateway, |gateway, out| gateway.answered(call, answer, out));
    }

    fn deliver(&mut self) {
        if let Some(message) = self.wire.take(&mut self.dice, self.now) {
            self.arrive(message);
        }
    }

    fn arrive(&mut self, Message { life, says, .. }: Message) {
        let gateway = &mut self.gateways[life.gateway];
        if gateway.no_log {
            return;
        }
        let Says::Append { frame, expected, sent } = says else {
            if gateway.acts() && gateway.life() == life {
                gateway.hear(&says);
            }
            return;
        };
        let sum = frame.header.sum.clone();
        let says = match self.log.append(&[frame], expected, sent) {
            Ok(appended) => Says::Stored { sum, seq: appended[0].seq },
            Err(AppendError::Conflict { .. } | AppendError::Unavailable(_) | AppendError::Refused(_)) => {
                Says::Conflict { sum }
            }
        };
        self.wire.send(Message { life, left: self.now, says });
    }

    fn project(&mut self) {
        let index = self.dice.below(self.projectors.len());
        let redis = Some(&mut self.redis).filter(|_| self.dice.chance(90));
        self.projectors[index].step(&self.log, &mut self.store, redis, &mut self.dice, self.mutation);
    }

    /// A gateway is frozen, and its name is started on another machine, with a clock and a disk of its own.
    fn replace(&mut self) {
        let able: Vec<usize> = (0..self.gateways.len()).filter(|index| self.can_be_replaced(*index)).collect();
        let Some(&index) = self.dice.pick(&able) else { return };
        self.gateways[index].frozen = true;
        self.gateways[index].superseded = true;
        let writer = self.gateways[index].writer.clone();
        let skew_ms = self.dice.below(SKEW_MS_MAX) as i64;
        let successor = Gateway::new(self.gateways.len(), writer.as_str(), skew_ms);
        self.gateways.push(Gateway { succeeds: true, ..successor });
        self.with(self.gateways.len() - 1, Gateway::start);
    }

    fn can_be_replaced(&self, index: usize) -> bool {
        let gateway = &self.gateways[index];
        gateway.acts() && !gateway.superseded && self.log.last_of(&gateway.writer).is_some()
    }

    fn partition(&mut self) {
        let of_log = self.dice.chance(60);
        self.with_one(
            |_| true,
            |gateway, _| {
                if of_log {
                    gateway.no_log ^= true;
                } else {
                    gateway.no_redis ^= true;
                }
            },
        );
    }

    /// The log loses some last frames, of which its writers can bring everything back or declare it (docs/adr/0026).
    fn lose_tail(&mut self) {
        let n_frames_max = 1 + self.dice.below(6);
        let can_come_back = |kept: &&Kept| {
            let owner = self.gateways.iter().rev().find(|gateway| gateway.writer == kept.header.writer);
            owner.is_some_and(|owner| owner.can_bring_back(kept))
        };
        let n_lost = self.log.frames().iter().rev().take(n_frames_max).take_while(can_come_back).count();
        if n_lost > 0 {
            self.n_frames_lost += n_lost;
            self.log.lose(n_lost);
            self.wire.break_connections();
            self.gateways.iter_mut().for_each(Gateway::disconnect);
            self.watch.log_was_cut();
        }
    }

    /// All troubles end: whatever waits is sent, read and folded, and then all must agree.
    fn rest(&mut self) -> Result<(), Violation> {
        self.upstreams.cheer_up();
        for gateway in &mut self.gateways {
            (gateway.frozen, gateway.no_log, gateway.no_redis, gateway.spool.full) = (false, false, false, false);
        }
        // What a log has lost is noticed by whoever appends next.
        for index in 0..self.gateways.len() {
            self.with(index, Gateway::alive);
        }
        for round in 0..ROUNDS_MAX {
            if round % 8 == 0 && self.is_at_rest() {
                return self.agree();
            }
            self.move_all();
            self.check()?;
        }
        Err(Violation {
            rule: Rule::ComesToRest,
            seen: format!("something is still under way after {ROUNDS_MAX} rounds"),
        })
    }

    fn is_at_rest(&self) -> bool {
        let shipped = |gateway: &Gateway| gateway.superseded && gateway.process.is_none() || gateway.is_done();
        self.gateways.iter().all(shipped) && self.projectors.iter().all(|projector| projector.is_done(&self.log))
    }

    fn move_all(&mut self) {
        self.now = self.now.plus_ms(600);
        self.log.now = self.now;
        let open: Vec<usize> = (0..self.upstreams.calls.len()).filter(|call| self.is_heard(*call)).collect();
        open.into_iter().for_each(|call| self.end_call(call, None));
        for index in 0..self.gateways.len() {
            if self.gateways[index].process.is_none() {
                self.with(index, Gateway::start);
            }
            self.with(index, Gateway::ship);
        }
        for _ in 0..self.gateways.len() {
            self.deliver();
        }
        for _ in 0..self.projectors.len() {
            self.project();
        }
    }

    fn agree(&mut self) -> Result<(), Violation> {
        self.watch.at_rest(&self.log, &self.upstreams, &self.gateways)?;
        let fresh = Memory::of(&self.log, self.mutation);
        let shared = self.redis.shared().filter(|shared| shared.checkpoint == fresh.at).map(|shared| &shared.state);
        let folded = self.projectors.iter().filter_map(|projector| projector.memory.as_ref());
        let digests: Vec<String> = folded.map(|memory| &memory.fold.state).chain(shared).map(State::digest).collect();
        let astray = self.projectors.iter().filter_map(|projector| projector.memory.as_ref());
        let astray = astray.map(|memory| &memory.owners).find(|owners| **owners != fresh.owners);
        hold(Rule::SameDigest, astray.is_none(), || format!("{astray:?} own responses, due {:?}", fresh.owners))?;
        let due = fresh.fold.state.digest();
        hold(Rule::SameDigest, digests.iter().all(|digest| *digest == due), || format!("{digests:?}, due {due}"))
    }
}

fn damage(gateway: &mut Gateway, _: &mut Outside<'_>) {
    let acknowledged = gateway.acknowledged();
    gateway.spool.damage(acknowledged);
}

fn release(gateway: &mut Gateway, out: &mut Outside<'_>) {
    let acknowledged = gateway.acknowledged();
    let from = 1 + out.dice.below(acknowledged.1.max(1) as usize) as u64;
    gateway.spool.release(from, 1 + out.dice.below(5) as u64, acknowledged);
}
