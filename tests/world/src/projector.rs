//! A projector as a value: the real folds, rows kept by compare-and-set of a checkpoint, and the shared state.
//!
//! Two of them work on one store. Whoever finds that the store has moved, or that the log no longer has the frame at its
//! checkpoint, begins again from the store; where the store's own checkpoint is not in the log, a new generation is
//! folded from the start and put in its place in one step.

use std::collections::BTreeMap;

use waybill_events::log::Seq;
use waybill_projections::fold::Fold;
use waybill_projections::usage::Row;
use waybill_routing::ownership::Owners;
use waybill_schema::event::{Class, Epoch, Event, Outcome};
use waybill_schema::id::{RequestId, WriterId};
use waybill_schema::time::Time;

use crate::log::{Kept, WorldLog};
use crate::mutation::Mutation;
use crate::redis::{Redis, Shared};
use crate::schedule::Dice;

/// At most this many frames are folded in one step.
const FRAMES_MAX: usize = 6;
/// More owners than a world ever has.
const OWNERS_MAX: usize = 8192;

/// A place in the log, and which frame is there: a log that lost its tail gives a sequence out again, be it to the very
/// same bytes, which are then another time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The sequence; 0 before the first frame.
    pub seq: Seq,
    /// The frame's sum.
    pub sum: String,
    /// When the frame was stored, by the log's clock.
    pub stored: Time,
}

impl Checkpoint {
    /// The checkpoint behind `kept`.
    pub fn behind(kept: &Kept) -> Self {
        Self { seq: kept.frame.seq, sum: kept.header.sum.clone(), stored: kept.frame.stored }
    }

    /// Whether `log` still has it.
    pub fn stands(&self, log: &WorldLog) -> bool {
        self.seq == Seq::START || log.at(self.seq).is_some_and(|kept| Self::behind(kept) == *self)
    }

    fn stands_for(&self, log: &WorldLog, mutation: Option<Mutation>) -> bool {
        match mutation {
            Some(Mutation::CheckpointBySequence) => self.seq <= log.end(),
            _ => self.stands(log),
        }
    }
}

/// The rows of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Ends of sends.
    pub attempts: BTreeMap<(RequestId, u16), Class>,
    /// Ends of requests.
    pub requests: BTreeMap<RequestId, Outcome>,
    /// Rows that were there already.
    pub n_doubles: usize,
}

impl Table {
    fn insert(&mut self, row: Row) {
        let doubled = match row {
            Row::Attempt(row) => self.attempts.insert((row.request, row.attempt), row.class).is_some(),
            Row::Event(row) => self.requests.insert(row.request, row.outcome).is_some(),
        };
        self.n_doubles += usize::from(doubled);
    }
}

/// The store.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// The generation, from 0.
    pub generation: u64,
    /// What its rows cover.
    pub checkpoint: Checkpoint,
    /// Its rows.
    pub table: Table,
    /// The last epoch that a projector took.
    epoch: u64,
}

impl Store {
    /// Takes `rows` with the new checkpoint, if the old one is still there; gives whether it was.
    fn commit(&mut self, generation: u64, from: &Checkpoint, to: &Checkpoint, rows: Vec<Row>) -> bool {
        let stands = self.generation == generation && self.checkpoint == *from;
        if stands {
            rows.into_iter().for_each(|row| self.table.insert(row));
            self.checkpoint = to.clone();
        }
        stands
    }

    fn replace(&mut self, to: &Checkpoint, rows: Vec<Row>) {
        self.generation += 1;
        self.checkpoint = to.clone();
        self.table = Table::default();
        rows.into_iter().for_each(|row| self.table.insert(row));
    }
}

/// A projector; `None` while it is not running.
#[derive(Debug, Default)]
pub struct Projector {
    /// What it has in memory.
    pub memory: Option<Memory>,
}

/// What a running projector has in memory.
#[derive(Debug)]
pub struct Memory {
    epoch: u64,
    generation: u64,
    /// The folds.
    pub fold: Fold,
    /// Who owns which response.
    pub owners: Owners,
    /// How far they go.
    pub at: Checkpoint,
    /// How many facts they took.
    pub n_facts: usize,
    saved: Checkpoint,
    rows: Vec<Row>,
    watermark: BTreeMap<WriterId, (Epoch, Time)>,
}

impl Projector {
    /// Does the next thing: begins, folds on, or saves and publishes. `redis` is absent where it cannot be reached.
    pub fn step(
        &mut self,
        log: &WorldLog,
        store: &mut Store,
        redis: Option<&mut Redis>,
        dice: &mut Dice,
        mutation: Option<Mutation>,
    ) {
        let standing = self.memory.as_mut().filter(|memory| memory.at.stands_for(log, mutation));
        let Some(memory) = standing else { return self.begin(log, store, mutation) };
        if memory.at != memory.saved && dice.chance(60) {
            let rows = std::mem::take(&mut memory.rows);
            if !store.commit(memory.generation, &memory.saved, &memory.at, rows) {
                return self.begin(log, store, mutation);
            }
            memory.saved = memory.at.clone();
            if let Some(redis) = redis {
                memory.publish(store, redis);
            }
        } else {
            let until = Seq(memory.at.seq.0 + 1 + dice.below(FRAMES_MAX) as u64);
            memory.fold_to(until, log, mutation);
        }
    }

    /// Whether all of `log` is folded and saved.
    pub fn is_done(&self, log: &WorldLog) -> bool {
        let end = log.frames().last().map(Checkpoint::behind).unwrap_or_default();
        self.memory.as_ref().is_some_and(|memory| memory.at == end && memory.saved == end)
    }

    /// Folds up to the store's checkpoint, or makes a new generation.
    fn begin(&mut self, log: &WorldLog, store: &mut Store, mutation: Option<Mutation>) {
        store.epoch += 1;
        let mut memory = Memory::new(store.epoch);
        if store.checkpoint.stands_for(log, mutation) {
            memory.fold_to(store.checkpoint.seq, log, mutation);
            memory.rows.clear();
        } else {
            memory.fold_to(log.end(), log, mutation);
            store.replace(&memory.at, std::mem::take(&mut memory.rows));
        }
        memory.generation = store.generation;
        memory.saved = memory.at.clone();
        if mutation == Some(Mutation::CheckpointBySequence) {
            memory.saved = store.checkpoint.clone();
        }
        self.memory = Some(memory);
    }
}

impl Memory {
    /// A fresh fold of all of `log`.
    pub fn of(log: &WorldLog, mutation: Option<Mutation>) -> Self {
        let mut memory = Self::new(0);
        memory.fold_to(log.end(), log, mutation);
        memory
    }

    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            generation: 0,
            fold: Fold::default(),
            owners: Owners::with_capacity(OWNERS_MAX),
            at: Checkpoint::default(),
            n_facts: 0,
            saved: Checkpoint::default(),
            rows: Vec::new(),
            watermark: BTreeMap::new(),
        }
    }

    fn fold_to(&mut self, until: Seq, log: &WorldLog, mutation: Option<Mutation>) {
        for kept in log.behind(self.at.seq).iter().take_while(|kept| kept.frame.seq <= until) {
            for fact in &kept.facts {
                let mut fact = fact.clone();
                let handed =
                    mutation.is_none_or(|mutation| mutation.distort(&mut fact, kept.frame.stored, &mut self.fold));
                if handed && self.fold.apply(&fact, kept.frame.seq.0, &mut self.rows).folds() {
                    self.n_facts += 1;
                    if let Event::Ownership(ownership) = &fact.event {
                        self.owners.apply(ownership, fact.revision.number, fact.at);
                    }
                    let reached = Epoch { epoch: fact.revision.epoch, last: fact.revision.number };
                    self.watermark.insert(fact.revision.writer, (reached, fact.at));
                }
            }
            self.at = Checkpoint::behind(kept);
        }
    }

    /// Publishes the state; one that is refused takes a new epoch and may speak again.
    fn publish(&mut self, store: &mut Store, redis: &mut Redis) {
        let published = redis.publish(Shared {
            generation: self.generation,
            epoch: self.epoch,
            checkpoint: self.at.clone(),
            state: self.fold.state.clone(),
            owners: self.owners.clone(),
            watermark: self.watermark.clone(),
        });
        if !published {
            store.epoch += 1;
            self.epoch = store.epoch;
        }
    }
}
