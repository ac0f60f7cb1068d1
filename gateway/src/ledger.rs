//! The ledger: one short lock round the spool and the routing state, so that a decision, its record and its effect
//! are one step.
//!
//! Facts are applied to the state in the order in which they are numbered, which is the order they will have in the
//! log. The state of a running gateway is therefore the fold of its log plus its own facts on the way there. Under the
//! lock happen: a selection (some microseconds), the numbering, and one `write()` to the page cache.
//!
//! A fact that must be in the spool before something is sent is noted at once and flushed just before the send, so that
//! requests which are ready together share a write. Should the spool refuse them then, they are declared as dropped;
//! the live state has moved already and is ahead of the log until the next start.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waybill_events::handover::Handover;
use waybill_events::spool::Spool;
use waybill_routing::ownership::{Name, Own, Owners};
use waybill_routing::state::shared::{Shown, Viewer};
use waybill_routing::state::{AFFINITY_RECORDS_MAX, State};
use waybill_schema::event::{Effect, Event, Fact};
use waybill_schema::frame::Body;
use waybill_schema::id::{AffinityKey, Revision, WriterId};
use waybill_schema::redis::{Place, Snapshot};
use waybill_schema::time::Time;

/// At most about so many facts are noted before they are written.
const NOTED_MAX: usize = 256;
/// At most this many own facts about health are kept until the shared state holds them.
const RECENT_MAX: usize = AFFINITY_RECORDS_MAX;

/// The gateway's facts and what follows from them.
#[derive(Debug)]
pub struct Ledger {
    writer: WriterId,
    epoch: u64,
    book: Mutex<Book>,
    lost: AtomicU64,
    /// Those who have asked for the disk so far.
    asked: AtomicU64,
    /// Whose turn it is to wait for the disk, and how the last turn ended.
    synced: tokio::sync::Mutex<Synced>,
}

/// How the disk stands.
#[derive(Debug, Default)]
struct Synced {
    /// It has the facts of so many who asked.
    upto: u64,
    /// Whether it took them.
    took: bool,
}

#[derive(Debug)]
struct Book {
    spool: Spool,
    state: State,
    /// Whether the spool took the last facts.
    takes: bool,
    /// Facts that are numbered and applied, but not in the spool yet.
    noted: Vec<Body>,
    /// Own facts about health that the shared state does not hold yet; nothing is kept where there is none.
    recent: Option<VecDeque<Fact>>,
    /// Where a projector in this process gets the facts.
    handover: Option<Arc<Handover>>,
    /// The owners of the latest own responses.
    owners: Owners,
}

/// What was read of a key in the shared state.
#[derive(Clone, Debug, PartialEq)]
pub struct Sight {
    /// The key.
    pub key: AffinityKey,
    /// What was there.
    pub shown: Shown,
    /// How far this writer's facts are in it.
    pub covers: Option<Place>,
}

/// Where a writer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The last fact that was recorded.
    pub last: Revision,
    /// Facts that could not be recorded since the start.
    pub lost: u64,
    /// Whether the last facts could be recorded.
    pub records: bool,
}

impl Ledger {
    /// Takes over a spool in which `epoch` has begun, and the state that the log folds to.
    pub fn new(writer: WriterId, epoch: u64, spool: Spool, state: State) -> Self {
        Self {
            writer,
            epoch,
            book: Mutex::new(Book {
                spool,
                state,
                takes: true,
                noted: Vec::new(),
                recent: None,
                handover: None,
                owners: Owners::with_capacity(AFFINITY_RECORDS_MAX),
            }),
            lost: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            synced: tokio::sync::Mutex::default(),
        }
    }

    /// Who makes facts here: the revision before the first.
    pub fn life(&self) -> Revision {
        Revision { writer: self.writer.clone(), epoch: self.epoch, number: 0 }
    }

    /// Begins to keep what a shared state will not hold for a moment.
    pub fn share(&self) {
        self.lock().recent.get_or_insert_default();
    }

    /// Begins to hand the facts over to a projector in this process.
    pub fn hand_over(&self, to: Arc<Handover>) {
        self.lock().handover = Some(to);
    }

    /// Lets `look` see the state.
    pub fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.lock().state)
    }

    /// Takes in what was `seen`, lets `make` look at the state and say what happened; notes it, applies it, and returns
    /// what `make` returned with the revision of the first fact (`None` where nothing was, or could be, noted).
    pub fn decide<T>(
        &self,
        now: Time,
        seen: Option<&Sight>,
        make: impl FnOnce(&State) -> (T, Vec<Event>),
    ) -> (T, Option<Revision>) {
        let mut book = self.lock();
        if let Some(Sight { key, shown, covers }) = seen {
            book.state.see(key, shown, &self.viewer(*covers), now);
        }
        let (made, events) = make(&book.state);
        let bodies = events.iter().map(|event| Body::of(event, now)).collect();
        let first = self.take(&mut book, now, events, bodies);
        (made, first)
    }

    /// Takes in the health of all members as of where `covers` says, under own facts that came later.
    pub fn see_health(&self, snapshot: &Snapshot, covers: Option<Place>) {
        let mut book = self.lock();
        let Book { state, recent, .. } = &mut *book;
        let covered = self.viewer(covers).covered;
        let recent = recent.get_or_insert_default();
        while recent.front().is_some_and(|fact| fact.revision.number <= covered) {
            recent.pop_front();
        }
        state.see_health(snapshot, &*recent);
    }

    /// Notes what happened and applies it; the encoding is done before the lock is taken.
    pub fn note(&self, now: Time, events: Vec<Event>) -> Option<Revision> {
        let bodies = events.iter().map(|event| Body::of(event, now)).collect();
        self.take(&mut self.lock(), now, events, bodies)
    }

    /// Notes what happened, and brings it and all that was noted before into the spool.
    pub fn record(&self, now: Time, events: Vec<Event>) -> Option<Revision> {
        let bodies = events.iter().map(|event| Body::of(event, now)).collect();
        let mut book = self.lock();
        let first = self.take(&mut book, now, events, bodies);
        self.write(&mut book);
        first.filter(|_| book.takes)
    }

    /// Brings all that was noted into the spool. Nothing may be sent before.
    pub fn flush(&self) {
        self.write(&mut self.lock());
    }

    /// Brings all that was noted onto the disk, and says whether it is there. Those who ask together wait for the disk
    /// once.
    pub async fn seal(&self) -> bool {
        let turn = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut synced = self.synced.lock().await;
        if synced.upto >= turn {
            return synced.took;
        }
        let upto = self.asked.load(Ordering::Acquire);
        let took = self.sync().await;
        *synced = Synced { upto, took };
        took
    }

    async fn sync(&self) -> bool {
        let syncer = {
            let mut book = self.lock();
            self.write(&mut book);
            book.spool.syncer().filter(|_| book.takes)
        };
        let Some(syncer) = syncer else { return false };
        match tokio::task::spawn_blocking(move || syncer.sync()).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::error!(%error, "the disk under the spool takes nothing");
                false
            }
            Err(_) => false,
        }
    }

    /// Whether the spool took the last facts.
    pub fn records(&self) -> bool {
        self.lock().takes
    }

    /// What this gateway itself knows of a response's owner.
    pub fn own(&self, name: &Name) -> Own {
        let book = self.lock();
        let owner = book.owners.get(name).map(|held| held.owner.clone());
        Own { writer: self.writer.clone(), epoch: self.epoch, owner, forgotten: book.owners.forgotten() }
    }

    /// Forgets an owner whose facts may be lost.
    pub fn disown(&self, name: &Name) {
        self.lock().owners.disown(name);
    }

    /// Brings all that was noted into the spool, and what was lost on record: nothing is recorded after a clean stop.
    pub fn close(&self, now: Time) {
        let mut book = self.lock();
        self.write(&mut book);
        if let Err(error) = book.spool.declare_lost(now) {
            tracing::error!(%error, "facts were lost and are not declared");
        }
    }

    /// Where the writer stands now.
    pub fn standing(&self) -> Standing {
        let mut book = self.lock();
        self.write(&mut book);
        let last = Revision { writer: self.writer.clone(), epoch: self.epoch, number: book.spool.last_number() };
        Standing { last, lost: self.lost.load(Ordering::Relaxed), records: book.takes }
    }

    /// The digest of the routing state. It is worked out under the lock, which takes milliseconds where many sessions
    /// are bound: for verification, not for a path that is polled.
    pub fn digest(&self) -> String {
        self.lock().state.digest()
    }

    fn take(&self, book: &mut Book, now: Time, events: Vec<Event>, bodies: Vec<Body>) -> Option<Revision> {
        if events.is_empty() {
            return None;
        }
        if book.noted.len() >= NOTED_MAX {
            self.write(book);
        }
        let first = if book.takes {
            let first = book.spool.last_number() + book.noted.len() as u64 + 1;
            book.noted.extend(bodies);
            first
        } else {
            // After a loss the spool puts a declaration before the next facts, so only it knows their numbers.
            self.append(book, &bodies)?
        };
        let revision = |number| Revision { writer: self.writer.clone(), epoch: self.epoch, number };
        let facts = (first..).zip(events).map(|(number, event)| Fact { revision: revision(number), at: now, event });
        book.fold(facts);
        Some(revision(first))
    }

    fn viewer(&self, covers: Option<Place>) -> Viewer {
        let covered = covers.filter(|place| place.epoch == self.epoch).map_or(0, |place| place.number);
        Viewer { writer: self.writer.clone(), epoch: self.epoch, covered }
    }

    fn write(&self, book: &mut Book) {
        if !book.noted.is_empty() {
            let mut bodies = std::mem::take(&mut book.noted);
            self.append(book, &bodies);
            bodies.clear();
            book.noted = bodies;
        }
    }

    /// Appends to the spool and gives the number of the first fact; counts the facts where the spool takes none.
    fn append(&self, book: &mut Book, bodies: &[Body]) -> Option<u64> {
        let appended = book.spool.append(bodies);
        book.takes = appended.is_ok();
        match appended {
            Ok(numbers) => Some(*numbers.start()),
            Err(error) => {
                if self.lost.fetch_add(bodies.len() as u64, Ordering::Relaxed) == 0 {
                    tracing::error!(%error, "the spool takes no facts; they will be declared as dropped");
                }
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Folds facts as they are made, and passes them on.
    fn fold(&mut self, facts: impl Iterator<Item = Fact>) {
        let Self { state, owners, recent, handover, .. } = self;
        let facts = facts.inspect(|fact| {
            state.apply(fact);
            if let Event::Ownership(ownership) = &fact.event {
                owners.apply(ownership, fact.revision.number, fact.at);
            }
        });
        match (recent, handover) {
            (Some(recent), _) => facts.filter(is_about_health).for_each(|fact| keep(recent, fact)),
            (None, Some(handover)) => handover.put(facts),
            (None, None) => facts.for_each(drop),
        }
    }
}

fn is_about_health(fact: &Fact) -> bool {
    matches!(&fact.event, Event::Attempt(attempt) if attempt.effect != Effect::None)
}

fn keep(recent: &mut VecDeque<Fact>, fact: Fact) {
    if recent.len() >= RECENT_MAX {
        recent.pop_front();
    }
    recent.push_back(fact);
}

#[cfg(test)]
mod tests {
    use waybill_events::spool::Options;
    use waybill_routing::ownership::{self, Sighting, Unowned};
    use waybill_schema::event::{Alive, Endpoint, Ownedness, Ownership, SessionSource};

    use super::*;

    /// DESIGN.md section 8, "disk full under the spool, log away too": a gateway that loses facts is not ready.
    #[test]
    fn a_ledger_whose_spool_is_full_says_so() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let options = Options { spool_bytes_max: 1, ..Options::default() };
        let (mut spool, _reader, _) = Spool::open(dir.path(), options).expect("a new spool opens");
        spool.begin(1).expect("a first epoch begins");
        let ledger = Ledger::new("gw".into(), 1, spool, State::default());
        let standing = ledger.standing();
        assert_eq!((standing.lost, standing.records), (0, true));
        assert_eq!(ledger.record(Time(0), vec![Event::Alive(Alive { last: 0 })]), None);
        let standing = ledger.standing();
        assert_eq!((standing.lost, standing.records), (1, false));
    }

    fn owns(response: &str) -> Event {
        Event::Ownership(Box::new(Ownership {
            response: response.into(),
            state: Ownedness::Final,
            request: "r".into(),
            scope: "acme".into(),
            model: "gpt".into(),
            endpoint: Endpoint::Responses,
            deployment: "a/gpt".into(),
            channel: "a".into(),
            incarnation: 1,
            session: "s".into(),
            source: SessionSource::Explicit,
        }))
    }

    fn name(response: &str) -> Name {
        Name { scope: "acme".into(), response: response.into() }
    }

    #[tokio::test]
    async fn what_was_noted_before_a_seal_is_in_the_spool_after_it() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let (mut spool, mut reader, _) = Spool::open(dir.path(), Options::default()).expect("a new spool opens");
        spool.begin(1).expect("a first epoch begins");
        let ledger = std::sync::Arc::new(Ledger::new("gw".into(), 1, spool, State::default()));
        let names: Vec<String> = (0..20).map(|n| format!("h{n}")).collect();
        let mut sealed = tokio::task::JoinSet::new();
        for response in &names {
            ledger.note(Time(0), vec![owns(response)]);
            let ledger = ledger.clone();
            sealed.spawn(async move { ledger.seal().await });
        }
        assert_eq!(sealed.join_all().await, [true; 20]);
        let batch = reader.next_batch(100, 1 << 20).expect("the spool can be read").expect("it holds facts");
        assert_eq!(batch.count, 20);
        let own = ledger.own(&name("h7"));
        assert_eq!((own.epoch, own.owner.map(|owner| owner.deployment), own.forgotten), (1, Some("a/gpt".into()), 0));
        assert_eq!(ledger.own(&name("none")).owner, None);
        ledger.disown(&name("h7"));
        assert_eq!(ledger.own(&name("h7")).owner, None);
    }

    /// Issue 5, "writer lagging" of an embedded instance: what one's own memory had to let go only the file knows, and until
    /// it has come that far, what is not found there may be.
    #[test]
    fn what_was_forgotten_before_the_store_has_it_is_not_unknown() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let (mut spool, _reader, _) = Spool::open(dir.path(), Options::default()).expect("a new spool opens");
        spool.begin(1).expect("a first epoch begins");
        let ledger = Ledger::new("gw".into(), 1, spool, State::default());
        let judge = |response: &str, number| {
            let place = Place { epoch: 1, number, at: Time(0) };
            let sighting = Sighting { owner: None, writers: vec![("gw".into(), Some(place))] };
            ownership::judge(sighting, ledger.own(&name(response)), Time(0)).map(|owner| owner.deployment)
        };
        for n in 1..=AFFINITY_RECORDS_MAX {
            ledger.note(Time(0), vec![owns(&format!("h{n}"))]);
        }
        assert_eq!(judge("h1", 0), Ok("a/gpt".into()));
        assert_eq!(judge("none", 0), Err(Unowned::Unknown), "all there is is remembered");
        ledger.note(Time(0), vec![owns("one more")]);
        assert_eq!(judge("h1", 0), Err(Unowned::Unreadable));
        assert_eq!(judge("none", 0), Err(Unowned::Unreadable));
        assert_eq!(judge("none", 1), Err(Unowned::Unknown), "the store has what was forgotten");
    }

    /// DESIGN.md section 4, step 8: "if neither is possible the answer is still delivered, marked unowned".
    #[tokio::test]
    async fn a_seal_on_a_full_spool_is_none() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let options = Options { spool_bytes_max: 1, ..Options::default() };
        let (mut spool, _reader, _) = Spool::open(dir.path(), options).expect("a new spool opens");
        spool.begin(1).expect("a first epoch begins");
        let ledger = Ledger::new("gw".into(), 1, spool, State::default());
        ledger.note(Time(0), vec![owns("h")]);
        assert!(!ledger.seal().await);
        assert!(!ledger.records());
    }
}
