//! The shared state in Redis: one script per request under a hard deadline, and the health of all members followed
//! beside it.
//!
//! When requests get no answer, a breaker opens and they no longer ask; the follower, which asks a few times a second
//! anyway, closes it with the first answer it gets. So no request waits for a server that is known to be away.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use ::redis::io::tcp::TcpSettings;
use ::redis::{Client, IntoConnectionInfo, RedisResult, Script};
use tokio::sync::Notify;
use tokio::time::timeout;
use waybill_routing::ownership::{self, Name, Sighting};
use waybill_routing::state::shared::Shown;
use waybill_schema::config::StateSettings;
use waybill_schema::event::Ownedness;
use waybill_schema::id::WriterId;
use waybill_schema::redis::{
    CLAIM_MS, Generation, Keys, OWNER_LIFE_MS, Owner, Pin, Place, SHOWN_MS, Snapshot, VERSION_CHARS, Value, hash,
};
use waybill_schema::time::Time;

use super::{Answer, Asked, Away, Known, Question, SharedState, Showing, Sought};
use crate::ledger::{Ledger, Sight};

/// So many calls in a row without an answer open the breaker.
const FAILURES_MAX: u32 = 3;
/// How often the health is looked at where no request has seen it change.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long that look may take: no request waits for it.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// KEYS: active, the claim. ARGV: what generations begin with, the record's key within one, the health's, this writer's,
/// the time, the claim to take (or nothing), how long it stands in ms, the length of a health version.
const READ_OR_CLAIM: &str = r#"
local generation = redis.call('GET', KEYS[1])
local pin, version, place, claim = false, false, false, false
if generation then
  local prefix = ARGV[1] .. generation .. ':'
  pin = redis.call('GET', prefix .. ARGV[2])
  version = redis.call('GETRANGE', prefix .. ARGV[3], 0, ARGV[8] - 1)
  place = redis.call('GET', prefix .. ARGV[4])
  local ends = pin and tonumber(string.match(pin, '"expires_at":(%d+)'))
  if not ends or ends <= tonumber(ARGV[5]) then pin = false end
end
if not pin then
  claim = redis.call('GET', KEYS[2])
  if not claim and ARGV[6] ~= '' then redis.call('SET', KEYS[2], ARGV[6], 'PX', ARGV[7]) end
end
return {generation, pin, claim, version, place}"#;

/// KEYS: active. ARGV: what generations begin with, the health's key within one, this writer's.
const LOOK: &str = "
local generation = redis.call('GET', KEYS[1])
if not generation then return {false, false} end
local prefix = ARGV[1] .. generation .. ':'
return {redis.call('GET', prefix .. ARGV[2]), redis.call('GET', prefix .. ARGV[3])}";

/// KEYS: active, the owner as it is shown. ARGV: what generations begin with, the owner's key within one, the writers',
/// what a writer's begins with. Only where there is no owner, how far every writer is projected.
const OWNER: &str = "
local generation, shown = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if not generation then return {false, shown, {}} end
local prefix = ARGV[1] .. generation .. ':'
local owner, writers = redis.call('GET', prefix .. ARGV[2]), {}
if not owner then
  for writer in string.gmatch(redis.call('GET', prefix .. ARGV[3]) or '', '%S+') do
    writers[#writers + 1] = {writer, redis.call('GET', prefix .. ARGV[4] .. writer)}
  end
end
return {owner, shown, writers}";

/// KEYS: active, the owner as it is shown. ARGV: what generations begin with, the owner's key within one, the owner, the only
/// value that it may take the place of, its time of death, and how long it is shown in ms.
///
/// An owner that is final is shown beside the generation too: there the projector, which is behind, may yet put that it is
/// provisional, for as long as it takes it to come to the end of the response.
const SHOW: &str = "
if ARGV[3] ~= ARGV[4] then redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[6]) end
local generation = redis.call('GET', KEYS[1])
if not generation then return end
local key = ARGV[1] .. generation .. ':' .. ARGV[2]
local standing = redis.call('GET', key)
if not standing or standing == ARGV[4] then redis.call('SET', key, ARGV[3], 'PXAT', ARGV[5]) end";

/// What [`OWNER`] returns.
type Owning = (Option<String>, Option<String>, Vec<(String, Option<String>)>);

/// What [`READ_OR_CLAIM`] returns.
type Found = (Option<u64>, Option<String>, Option<String>, Option<String>, Option<String>);

/// The shared state in Redis, as one gateway sees it.
#[derive(Debug)]
pub struct RedisState {
    connection: ConnectionManager,
    keys: Keys,
    writer: WriterId,
    deadline: Duration,
    read_or_claim: Script,
    look: Script,
    owner: Script,
    show: Script,
    breaker: Breaker,
    health: Changed,
}

/// Whether it is worth asking.
#[derive(Debug, Default)]
struct Breaker {
    failures: AtomicU32,
    open: AtomicBool,
}

/// Wakes the follower when a request has seen another version of the health.
#[derive(Debug, Default)]
struct Changed {
    version: std::sync::Mutex<String>,
    seen: Notify,
}

impl RedisState {
    /// Begins to connect, on the runtime that it is called on; fails only where the URL is none.
    pub fn new(settings: &StateSettings, writer: WriterId) -> RedisResult<Self> {
        let tcp = TcpSettings::default().set_nodelay(true);
        let client = Client::open(settings.redis.as_str().into_connection_info()?.set_tcp_settings(tcp))?;
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(LOOK_TIMEOUT));
        Ok(Self {
            connection: ConnectionManager::new_lazy_with_config(client, config)?,
            keys: Keys::new(&settings.prefix),
            writer,
            deadline: Duration::from_millis(settings.read_deadline_ms.into()),
            read_or_claim: Script::new(READ_OR_CLAIM),
            look: Script::new(LOOK),
            owner: Script::new(OWNER),
            show: Script::new(SHOW),
            breaker: Breaker::default(),
            health: Changed::default(),
        })
    }

    /// Whether it answers, as of the last calls.
    pub fn answers(&self) -> bool {
        !self.breaker.is_open()
    }

    /// Brings the health of all members into `ledger` whenever it changes, for ever.
    pub async fn follow(&self, ledger: &Ledger) {
        loop {
            match timeout(LOOK_TIMEOUT, self.look()).await {
                Ok(Ok((health, place))) => {
                    self.breaker.answered();
                    self.take_in(health.as_deref(), place.as_deref(), ledger);
                }
                Ok(Err(_)) | Err(_) => self.breaker.failed(),
            }
            let _ = timeout(LOOK_EVERY, self.health.seen.notified()).await;
        }
    }

    async fn look(&self) -> RedisResult<(Option<String>, Option<String>)> {
        let mut call = self.look.key(self.keys.active());
        call.arg(self.keys.generations());
        call.arg(Generation::health_within()).arg(Generation::writer_within(&self.writer));
        call.invoke_async(&mut self.connection.clone()).await
    }

    fn take_in(&self, health: Option<&str>, place: Option<&str>, ledger: &Ledger) {
        let Some((version, snapshot)) = health.and_then(Snapshot::decode) else { return };
        if self.health.is_new(version) {
            ledger.see_health(&snapshot, place.and_then(Place::decode));
        }
    }

    async fn ask(&self, question: &Question<'_>) -> RedisResult<Sight> {
        let mut call = self.read_or_claim.key(self.keys.active());
        call.key(self.keys.claim(question.key));
        let claim = (question.claim)().map(|claim| claim.encode()).unwrap_or_default();
        call.arg(self.keys.generations()).arg(Generation::affinity_within(&hash(question.key)));
        call.arg(Generation::health_within()).arg(Generation::writer_within(&self.writer));
        call.arg(question.now.0).arg(claim).arg(CLAIM_MS).arg(VERSION_CHARS);
        let (generation, pin, claim, version, place): Found = call.invoke_async(&mut self.connection.clone()).await?;
        if version.is_some_and(|version| !version.is_empty() && self.health.differs(&version)) {
            self.health.seen.notify_one();
        }
        let claim = claim.as_deref().and_then(Pin::decode);
        let shown = match (pin.as_deref().and_then(Pin::decode), claim) {
            (Some(pin), _) => Shown::Record(pin),
            (None, claim) if generation.is_none() => Shown::Unfilled(claim),
            (None, Some(claim)) => Shown::Claim(claim),
            (None, None) => Shown::Nothing,
        };
        let covers = place.as_deref().and_then(Place::decode);
        Ok(Sight { key: question.key.clone(), shown, covers })
    }

    async fn seek(&self, name: &Name) -> RedisResult<Sighting> {
        let mut call = self.owner.key(self.keys.active());
        call.key(self.keys.shown(&name.owned()));
        call.arg(self.keys.generations()).arg(Generation::owner_within(&name.owned()));
        call.arg(Generation::writers_within()).arg(Generation::writers_begin_within());
        let (owner, shown, writers): Owning = call.invoke_async(&mut self.connection.clone()).await?;
        let place = |text: Option<String>| text.as_deref().and_then(Place::decode);
        let writers = writers.into_iter().map(|(writer, text)| (writer.as_str().into(), place(text)));
        let [owner, shown] = [owner, shown].map(|text| text.as_deref().and_then(Owner::decode));
        Ok(Sighting { owner: ownership::firmer(owner, shown), writers: writers.collect() })
    }

    async fn put(&self, name: &Name, owner: &Owner, now: Time) -> RedisResult<()> {
        let provisional = Owner { state: Ownedness::Provisional, ..owner.clone() };
        let mut call = self.show.key(self.keys.active());
        call.key(self.keys.shown(&name.owned()));
        call.arg(self.keys.generations()).arg(Generation::owner_within(&name.owned()));
        call.arg(owner.encode()).arg(provisional.encode()).arg(now.plus_ms(OWNER_LIFE_MS).0).arg(SHOWN_MS);
        call.invoke_async(&mut self.connection.clone()).await
    }

    /// A call under the deadline, unless there was no answer for others.
    async fn bounded<T>(&self, call: impl Future<Output = RedisResult<T>>) -> Result<T, Away> {
        if self.breaker.is_open() {
            return Err(Away::Skipped);
        }
        match timeout(self.deadline, call).await {
            Ok(Ok(answer)) => {
                self.breaker.answered();
                Ok(answer)
            }
            Ok(Err(_)) | Err(_) => {
                self.breaker.failed();
                Err(Away::Failed)
            }
        }
    }
}

impl SharedState for RedisState {
    fn read_or_claim<'a>(&'a self, question: Question<'a>) -> Asked<'a> {
        Box::pin(async move {
            match self.bounded(self.ask(&question)).await {
                Ok(sight) => Answer::Read(Box::new(sight)),
                Err(away) => Answer::Away(away),
            }
        })
    }

    fn owner<'a>(&'a self, name: &'a Name) -> Sought<'a> {
        Box::pin(async move { self.bounded(self.seek(name)).await.map_or_else(Known::Away, Known::Read) })
    }

    fn show<'a>(&'a self, name: &'a Name, owner: &'a Owner, now: Time) -> Showing<'a> {
        Box::pin(async move {
            if let Err(away) = self.bounded(self.put(name, owner, now)).await {
                tracing::debug!(?away, "an owner is not shown before it is projected");
            }
        })
    }
}

impl Breaker {
    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    fn answered(&self) {
        self.failures.store(0, Ordering::Relaxed);
        if self.is_open() && self.open.swap(false, Ordering::Relaxed) {
            tracing::info!("the shared state answers again");
        }
    }

    fn failed(&self) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures >= FAILURES_MAX && !self.open.swap(true, Ordering::Relaxed) {
            tracing::warn!("the shared state does not answer: requests go on without it until it does");
        }
    }
}

impl Changed {
    fn differs(&self, version: &str) -> bool {
        *self.lock() != version
    }

    /// Whether it differs from the last one; it is the last one from now on.
    fn is_new(&self, version: &str) -> bool {
        let differs = self.differs(version);
        if differs {
            *self.lock() = version.to_owned();
        }
        differs
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, String> {
        self.version.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
