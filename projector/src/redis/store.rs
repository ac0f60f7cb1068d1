//! Redis as the projector uses it: look, take an epoch, write a batch. Each is one script, and harmless when it runs
//! twice: an answer that did not come may belong to a script that did run.

use std::time::Duration;

use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use ::redis::io::tcp::TcpSettings;
use ::redis::{AsyncCommands, Client, IntoConnectionInfo, RedisError, RedisResult, Script};
use tokio::runtime::{Builder, Runtime};
use waybill_schema::redis::{Keys, Mark, digits};

use super::fold::Write;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an answer may take: a batch takes a millisecond or two.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Takes an epoch, unless a greater one is held.
const TAKE: &str = "
local held = redis.call('HGET', KEYS[1], 'epoch')
if held and held > ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
return 1";

/// Writes a batch and its mark, or nothing. KEYS: meta, active, then the batch's. ARGV: epoch, from, to, start, the
/// generation if it is to be published, then value and time of death for each key; both may be empty.
const WRITE: &str = "
local held = redis.call('HMGET', KEYS[1], 'epoch', 'mark')
if held[1] and held[1] > ARGV[1] then return {-2, false} end
local mark = held[2] or ARGV[4]
if mark ~= ARGV[3] then
  if mark ~= ARGV[2] then return {-1, false} end
  for i = 3, #KEYS do
    local value, death = ARGV[2 * i], ARGV[2 * i + 1]
    if value == '' then redis.call('DEL', KEYS[i])
    elseif death == '' then redis.call('SET', KEYS[i], value)
    else redis.call('SET', KEYS[i], value, 'PXAT', death) end
  end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'mark', ARGV[3])
end
if ARGV[5] ~= '' then redis.call('SET', KEYS[2], ARGV[5]) end
return {mark == ARGV[3] and 0 or 1, redis.call('GET', KEYS[2])}";

/// A batch of writes from one mark to the next.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    pub(super) epoch: u64,
    pub(super) generation: u64,
    pub(super) from: &'a Mark,
    pub(super) to: &'a Mark,
    pub(super) writes: Vec<Write>,
    /// Whether the generation becomes the one that is read.
    pub(super) publish: bool,
}

/// What became of a batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is there, now or since before; and which generation is read.
    Done { active: Option<u64> },
    /// Redis stands at another mark.
    Elsewhere,
    /// A greater epoch is held.
    Overtaken,
}

/// What a generation says of itself.
#[derive(Debug)]
pub(super) struct Found {
    /// The epoch held; 0 where there is none.
    pub(super) epoch: u64,
    pub(super) mark: Option<Mark>,
}

/// A connection to Redis on a small runtime of its own; its calls block for a bounded time.
#[derive(Debug)]
pub(super) struct Store {
    runtime: Option<Runtime>,
    connection: ConnectionManager,
    keys: Keys,
    take: Script,
    write: Script,
}

impl Store {
    /// Begins to connect; fails where the URL is none.
    pub(super) fn new(url: &str, prefix: &str) -> RedisResult<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("redis").enable_all().build();
        let runtime = runtime.map_err(RedisError::from)?;
        let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(RESPONSE_TIMEOUT));
        let client = Client::open(info)?;
        let connection = {
            let _entered = runtime.enter();
            ConnectionManager::new_lazy_with_config(client, config)?
        };
        let (take, write) = (Script::new(TAKE), Script::new(WRITE));
        Ok(Self { runtime: Some(runtime), connection, keys: Keys::new(prefix), take, write })
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The generation that is read.
    pub(super) fn active(&mut self) -> RedisResult<Option<u64>> {
        let (key, mut connection) = (self.keys.active(), self.connection.clone());
        self.wait(async move { connection.get(key).await })
    }

    /// Who projects into `generation`, and how far; a mark that cannot be read is none.
    pub(super) fn look(&mut self, generation: u64) -> RedisResult<Found> {
        let (key, mut connection) = (self.keys.generation(generation).meta(), self.connection.clone());
        let (epoch, mark): (Option<String>, Option<String>) =
            self.wait(async move { connection.hmget(key, &["epoch", "mark"]).await })?;
        let epoch = epoch.and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(Found { epoch, mark: mark.and_then(|mark| Mark::decode(&mark)) })
    }

    /// Takes `epoch`; says whether it is the greatest.
    pub(super) fn take(&mut self, generation: u64, epoch: u64) -> RedisResult<bool> {
        let mut connection = self.connection.clone();
        let mut call = self.take.key(self.keys.generation(generation).meta());
        call.arg(digits(epoch));
        self.wait(call.invoke_async(&mut connection))
    }

    /// Writes a batch, or nothing.
    pub(super) fn write(&mut self, batch: &Batch<'_>) -> RedisResult<Answer> {
        let mut connection = self.connection.clone();
        let mut call = self.write.key(self.keys.generation(batch.generation).meta());
        call.key(self.keys.active());
        let publish = if batch.publish { batch.generation.to_string() } else { String::new() };
        let (from, to, start) = (batch.from.encode(), batch.to.encode(), Mark::start().encode());
        call.arg(digits(batch.epoch)).arg(from).arg(to).arg(start).arg(publish);
        for Write { key, value, until } in &batch.writes {
            let death = until.map(|until| until.0.to_string()).unwrap_or_default();
            call.key(key).arg(value.as_deref().unwrap_or_default()).arg(death);
        }
        let (code, active): (i64, Option<u64>) = self.wait(call.invoke_async(&mut connection))?;
        Ok(match code {
            -2 => Answer::Overtaken,
            -1 => Answer::Elsewhere,
            _ => Answer::Done { active },
        })
    }

    fn wait<T>(&self, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        self.runtime.as_ref().expect("the runtime lives as long as the store").block_on(call)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Waits for nothing: what it was asked for has been answered.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
