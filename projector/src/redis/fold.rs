//! The fold behind the shared state: which keys a stretch of the log touched, and what they hold at its end.

use std::collections::{BTreeMap, BTreeSet};

use waybill_events::log::StoredFrame;
use waybill_projections::gate::{Gate, NO_EPOCH, Verdict};
use waybill_routing::ownership::{Name, Owners};
use waybill_routing::state::State;
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::{Frame, FrameError};
use waybill_schema::id::{AffinityKey, MemberId, Revision, WriterId};
use waybill_schema::redis::{Generation, Mark, OWNER_LIFE_MS, Place, TIDY_AFTER_MS, Value};
use waybill_schema::secret::sum128;
use waybill_schema::time::Time;

use crate::reader::{Newer, Read, each_fact, tell};

/// A key and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: String,
    /// The value; without one, the key is not there.
    pub value: Option<String>,
    /// When Redis may tidy it up.
    pub until: Option<Time>,
}

/// The state of a cluster as a fold of the log.
#[derive(Debug)]
pub struct Fold {
    records_max: usize,
    gate: Gate,
    state: State,
    owners: Owners,
    writers: BTreeMap<WriterId, Place>,
    mark: Mark,
    touched: Touched,
}

/// What was touched since the last batch.
#[derive(Debug, Default)]
struct Touched {
    keys: BTreeSet<AffinityKey>,
    members: BTreeSet<MemberId>,
    owners: BTreeSet<Name>,
    writers: BTreeSet<WriterId>,
    /// Whether there is a writer more or less.
    writers_changed: bool,
}

impl Fold {
    /// A fold of nothing that keeps at most `records_max` affinity records, and as many owners.
    pub fn new(records_max: usize) -> Self {
        Self {
            records_max,
            gate: Gate::default(),
            state: State::with_capacity(records_max),
            owners: Owners::with_capacity(records_max),
            writers: BTreeMap::new(),
            mark: Mark::start(),
            touched: Touched::default(),
        }
    }

    /// The last frame folded.
    pub fn mark(&self) -> &Mark {
        &self.mark
    }

    /// Folds a frame. What cannot be decoded is passed over: the usage projection keeps its bytes.
    pub fn take(&mut self, frame: &StoredFrame) -> Result<(), Newer> {
        let sum = each_fact(frame, |read| {
            match read {
                Read::Fact(fact) => self.fold(&fact),
                Read::Unread(unread) => {
                    let verdict = self.gate.pass_over(&unread.revision);
                    self.place(&verdict, &unread.revision, frame.stored);
                }
                Read::NoFrame(_) => {}
            }
            Ok::<_, Newer>(())
        })?;
        self.mark = Mark::at(frame.seq.0, sum.unwrap_or_else(|| sum128(&[&frame.bytes])));
        Ok(())
    }

    /// All keys there are, in `generation`.
    pub fn everything(&self, generation: &Generation) -> Vec<Write> {
        let keys = self.state.records().into_keys().cloned().collect();
        let members = self.state.members().map(|(member, _)| member.clone()).collect();
        let (owners, writers) = (self.owners.names().cloned().collect(), self.writers.keys().cloned().collect());
        let touched = Touched { keys, members, owners, writers, writers_changed: true };
        let mut writes = self.writes_of(&touched, generation);
        writes.retain(|write| write.value.is_some());
        writes
    }

    /// How many keys a batch would have, about.
    pub(super) fn n_touched(&self) -> usize {
        let Touched { keys, members, owners, writers, .. } = &self.touched;
        keys.len() + 3 * members.len() + owners.len() + writers.len()
    }

    /// What was touched since the last batch, as it stands now.
    pub(super) fn writes(&self, generation: Generation) -> Vec<Write> {
        self.writes_of(&self.touched, &generation)
    }

    /// Begins a new batch.
    pub(super) fn settle(&mut self) {
        self.touched = Touched::default();
    }

    /// Begins again at the start of the log.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.records_max);
    }

    fn fold(&mut self, fact: &Fact) {
        let verdict = self.gate.admit(fact);
        if verdict.folds() {
            let touched = self.state.apply_telling(fact);
            self.touched.keys.extend(touched.key.into_iter().chain(touched.evicted));
            self.touched.members.extend(touched.member);
            self.own(fact);
        }
        self.place(&verdict, &fact.revision, fact.at);
        if let (true, Event::Vanished(vanished)) = (verdict.folds(), &fact.event) {
            self.forget(&vanished.writer);
        }
    }

    fn own(&mut self, fact: &Fact) {
        if let Event::Ownership(ownership) = &fact.event
            && let Some(changed) = self.owners.apply(ownership, fact.revision.number, fact.at)
        {
            self.touched.owners.extend(changed.evicted.into_iter().chain([changed.name]));
        }
    }

    /// Nothing more is waited for from a writer that is declared gone.
    fn forget(&mut self, writer: &WriterId) {
        if self.writers.remove(writer).is_some() {
            self.touched.writers.insert(writer.clone());
            self.touched.writers_changed = true;
        }
    }

    /// Notes how far a writer has come.
    fn place(&mut self, verdict: &Verdict, revision: &Revision, at: Time) {
        tell(verdict);
        if verdict.folds() {
            let place = Place { epoch: revision.epoch, number: revision.number, at };
            self.touched.writers_changed |= self.writers.insert(revision.writer.clone(), place).is_none();
            self.touched.writers.insert(revision.writer.clone());
        }
    }

    fn writes_of(&self, touched: &Touched, generation: &Generation) -> Vec<Write> {
        let lasting = |key, value| Write { key, value, until: None };
        let mut writes: Vec<Write> = Vec::with_capacity(self.n_touched() + 1);
        writes.extend(touched.keys.iter().map(|key| {
            let pin = self.state.pin(key);
            let until = pin.as_ref().map(|pin| pin.expires_at.plus_ms(TIDY_AFTER_MS));
            Write { key: generation.affinity(key), value: pin.map(|pin| pin.encode()), until }
        }));
        for member in &touched.members {
            let health = self.state.newest(member);
            let fail = health.and_then(|health| health.route_fail()).map(|value| value.encode());
            let cool = health.and_then(|health| health.route_cool()).map(|value| value.encode());
            let block = health.and_then(|health| health.route_block()).map(|value| value.encode());
            writes.push(lasting(generation.route_fail(member), fail));
            writes.push(lasting(generation.route_cool(member), cool));
            writes.push(lasting(generation.route_block(member), block));
        }
        if !touched.members.is_empty() {
            writes.push(lasting(generation.health(), Some(self.state.snapshot().encode())));
        }
        writes.extend(touched.owners.iter().map(|name| {
            let held = self.owners.get(name);
            let until = held.map(|held| held.seen.plus_ms(OWNER_LIFE_MS));
            Write { key: generation.owner(&name.owned()), value: held.map(|held| held.owner.encode()), until }
        }));
        writes.extend(touched.writers.iter().map(|writer| {
            let place = self.writers.get(writer).map(Place::encode);
            lasting(generation.writer(writer), place)
        }));
        if touched.writers_changed {
            writes.push(lasting(generation.writers(), Some(self.names())));
        }
        writes
    }

    /// The writers that live in epochs: gateways, which own responses.
    fn names(&self) -> String {
        let gateways = self.writers.iter().filter(|(_, place)| place.epoch != NO_EPOCH);
        gateways.map(|(writer, _)| writer.as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// The sum by which a mark names `frame`.
pub(super) fn sum_of(frame: &StoredFrame) -> Result<String, Newer> {
    match Frame::header_of(&frame.bytes) {
        Ok(header) => Ok(header.sum),
        Err(FrameError::Newer(format)) => Err(Newer::Frame { seq: frame.seq.0, format }),
        Err(FrameError::Header | FrameError::Sum) => Ok(sum128(&[&frame.bytes])),
    }
}
