//! The fold behind the shared state: which keys a stretch of the log touched, and what they hold at its end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

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

/// Of the last frames so many keys are kept in mind, and so many frames: what one script may still write at once.
const IN_MIND_MAX: usize = 8192;

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
#[derive(Clone, Debug)]
pub struct Fold {
    records_max: usize,
    gate: Gate,
    state: State,
    owners: Owners,
    writers: BTreeMap<WriterId, Place>,
    mark: Mark,
    /// Whether anything was ever said of a member: then there is a health snapshot, if only an empty one.
    has_health: bool,
    /// The same of writers and the list of them.
    has_writers: bool,
    /// The last frames: where each began, and what it touched.
    recent: VecDeque<(Mark, Touched)>,
    /// What `recent` weighs.
    n_recent: usize,
    /// What was touched since the last batch.
    touched: Touched,
}

/// What some frames touched.
#[derive(Clone, Debug, Default)]
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
            has_health: false,
            has_writers: false,
            recent: VecDeque::new(),
            n_recent: 0,
            touched: Touched::default(),
        }
    }

    /// The last frame folded.
    pub fn mark(&self) -> &Mark {
        &self.mark
    }

    /// When the last frame folded had been stored, by the log's clock.
    pub fn stored(&self) -> Option<Time> {
        (self.mark.seq > 0).then_some(self.mark.stored)
    }

    /// Folds a frame. What cannot be decoded is passed over: the usage projection keeps its bytes.
    pub fn take(&mut self, frame: &StoredFrame) -> Result<(), Newer> {
        let mut touched = Touched::default();
        each_fact(frame, |read| {
            match read {
                Read::Fact(fact) => self.fold(&fact, &mut touched),
                Read::Unread(unread) => {
                    let verdict = self.gate.pass_over(&unread.revision);
                    self.place(&verdict, &unread.revision, frame.stored, &mut touched);
                }
                Read::NoFrame(_) => {}
            }
            Ok::<_, Newer>(())
        })?;
        self.touched.join(&touched);
        self.n_recent += touched.weight();
        let began = std::mem::replace(&mut self.mark, mark_of(frame)?);
        self.recent.push_back((began, touched));
        while self.n_recent > IN_MIND_MAX
            && let Some((_, forgotten)) = self.recent.pop_front()
        {
            self.n_recent -= forgotten.weight();
        }
        Ok(())
    }

    /// Makes the next batch begin at `mark`, where that is among the last frames: all that they touched since is due
    /// again. Says whether it is.
    pub(super) fn reach_back(&mut self, mark: &Mark) -> bool {
        if self.mark == *mark {
            self.touched = Touched::default();
            return true;
        }
        let Some(place) = self.recent.iter().rposition(|(began, _)| began == mark) else { return false };
        let mut due = Touched::default();
        self.recent.iter().skip(place).for_each(|(_, touched)| due.join(touched));
        self.touched = due;
        true
    }

    /// All keys there are, in `generation`.
    pub fn everything(&self, generation: &Generation) -> Vec<Write> {
        let keys = self.state.records().into_keys().cloned().collect();
        let members = self.state.members().map(|(member, _)| member.clone()).collect();
        let (owners, writers) = (self.owners.names().cloned().collect(), self.writers.keys().cloned().collect());
        let touched = Touched { keys, members, owners, writers, writers_changed: self.has_writers };
        let mut writes = self.writes_of(&touched, self.has_health, generation);
        writes.retain(|write| write.value.is_some());
        writes
    }

    /// How many keys a batch would have, about.
    pub(super) fn n_touched(&self) -> usize {
        self.touched.n_keys()
    }

    /// What was touched since the last batch, as it stands now.
    pub(super) fn writes(&self, generation: Generation) -> Vec<Write> {
        self.writes_of(&self.touched, !self.touched.members.is_empty(), &generation)
    }

    /// Begins a new batch.
    pub(super) fn settle(&mut self) {
        self.touched = Touched::default();
    }

    /// Begins again at the start of the log.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.records_max);
    }

    fn fold(&mut self, fact: &Fact, touched: &mut Touched) {
        let verdict = self.gate.admit(fact);
        if verdict.folds() {
            let told = self.state.apply_telling(fact);
            touched.keys.extend(told.key.into_iter().chain(told.evicted));
            self.has_health |= told.member.is_some();
            touched.members.extend(told.member);
            self.own(fact, touched);
        }
        self.place(&verdict, &fact.revision, fact.at, touched);
        if let (true, Event::Vanished(vanished)) = (verdict.folds(), &fact.event) {
            self.forget(&vanished.writer, touched);
        }
    }

    fn own(&mut self, fact: &Fact, touched: &mut Touched) {
        if let Event::Ownership(ownership) = &fact.event
            && let Some(changed) = self.owners.apply(ownership, fact.revision.number, fact.at)
        {
            touched.owners.extend(changed.evicted.into_iter().chain([changed.name]));
        }
    }

    /// Nothing more is waited for from a writer that is declared gone.
    fn forget(&mut self, writer: &WriterId, touched: &mut Touched) {
        if self.writers.remove(writer).is_some() {
            touched.writers.insert(writer.clone());
            touched.writers_changed = true;
        }
    }

    /// Notes how far a writer has come.
    fn place(&mut self, verdict: &Verdict, revision: &Revision, at: Time, touched: &mut Touched) {
        tell(verdict);
        if verdict.folds() {
            let place = Place { epoch: revision.epoch, number: revision.number, at };
            touched.writers_changed |= self.writers.insert(revision.writer.clone(), place).is_none();
            touched.writers.insert(revision.writer.clone());
            self.has_writers = true;
        }
    }

    fn writes_of(&self, touched: &Touched, health: bool, generation: &Generation) -> Vec<Write> {
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
        if health {
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

impl Touched {
    fn n_keys(&self) -> usize {
        self.keys.len() + 3 * self.members.len() + self.owners.len() + self.writers.len()
    }

    /// Its keys, and one for the frame that touched them.
    fn weight(&self) -> usize {
        1 + self.n_keys()
    }

    fn join(&mut self, other: &Self) {
        self.keys.extend(other.keys.iter().cloned());
        self.members.extend(other.members.iter().cloned());
        self.owners.extend(other.owners.iter().cloned());
        self.writers.extend(other.writers.iter().cloned());
        self.writers_changed |= other.writers_changed;
    }
}

/// The mark of a fold whose last frame is `frame`.
pub(super) fn mark_of(frame: &StoredFrame) -> Result<Mark, Newer> {
    let sum = match Frame::header_of(&frame.bytes) {
        Ok(header) => header.sum,
        Err(FrameError::Newer(format)) => return Err(Newer::Frame { seq: frame.seq.0, format }),
        Err(FrameError::Header | FrameError::Sum) => sum128(&[&frame.bytes]),
    };
    Ok(Mark::at(frame.seq.0, sum, frame.stored))
}

#[cfg(test)]
mod tests {
    use waybill_events::log::Seq;
    use waybill_projections::story::{Teller, selection};
    use waybill_schema::event::{Context, Event, KeyType, Selection, Sticky};
    use waybill_schema::redis::Keys;

    use super::*;

    const RECORDS_MAX: usize = 20;

    /// Frame `seq`, which claims a key of its own for a session that nobody had yet.
    fn frame(gateway: &mut Teller, seq: u64) -> StoredFrame {
        let key = format!("acme:lg:main:m:gpt:chat:sess:{}", seq * 7 % 50);
        let sticky = Some(Sticky { key: key.as_str().into(), by: KeyType::Sess });
        let context = Some(Context { sticky, ..waybill_projections::story::context() });
        let claim = Selection { claim: true, context, ..selection("r", 1, "a") };
        let fact = match seq {
            1 => gateway.starts(1),
            _ => gateway.says(i64::try_from(seq).expect("few frames") * 400_000, Event::Selection(Box::new(claim))),
        };
        StoredFrame { seq: Seq(seq), stored: Time(0), sent: Time(0), bytes: gateway.seals(&[fact]).bytes }
    }

    #[test]
    fn a_batch_that_begins_further_back_leads_to_the_same_keys() {
        let (mut fold, mut gateway, generation) =
            (Fold::new(RECORDS_MAX), Teller::new("gw"), Keys::new("").generation(1));
        let keys = |fold: &Fold| -> BTreeMap<String, Option<String>> {
            fold.everything(&generation).into_iter().map(|write| (write.key, write.value)).collect()
        };
        let mut stood = vec![(fold.mark().clone(), BTreeMap::new())];
        for seq in 1..=120 {
            fold.take(&frame(&mut gateway, seq)).expect("the frame can be folded");
            stood.push((fold.mark().clone(), keys(&fold)));
        }
        for (mark, mut held) in stood {
            assert!(fold.reach_back(&mark), "{mark:?} is in mind");
            for write in fold.writes(generation.clone()) {
                match write.value {
                    Some(value) => drop(held.insert(write.key, Some(value))),
                    None => drop(held.remove(&write.key)),
                }
            }
            assert_eq!(held, keys(&fold), "from {mark:?}");
        }
    }
}
