//! Redis as the projector uses it: look, take an epoch, write a batch; and what a rebuild and a look from outside need.
//! Each is one script, and harmless when it runs twice: an answer that did not come may belong to a script that did run.

use std::time::Duration;

use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use ::redis::io::tcp::TcpSettings;
use ::redis::{
    AsyncCommands, Client, ExistenceCheck, IntoConnectionInfo, RedisError, RedisResult, Script, SetExpiry, SetOptions,
};
use tokio::runtime::{Builder, Runtime};
use waybill_schema::redis::{Keys, Mark, digits};
use waybill_schema::time::Time;

use super::fold::Write;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an answer may take: a batch takes a millisecond or two.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a rebuild may be silent before another one may begin, in milliseconds.
const REBUILD_MS: u64 = 60_000;
/// Keys that a server is asked to look through, or to remove, at once.
const KEYS_AT_ONCE: usize = 1000;

/// Takes an epoch, unless a greater one is held.
const TAKE: &str = "
local held = redis.call('HGET', KEYS[1], 'epoch')
if held and held > ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
return 1";

/// Writes a batch and its mark, or nothing. KEYS: meta, active, then the batch's. ARGV: epoch, from, to, start, the
/// generation if it is to be published, then value and time of death for each key; both may be empty.
///
/// A key that goes is written first: the append file keeps no `DEL` of what is not there, and one that was cut may hold
/// the beginning of a script, which Redis runs, when it loads that file again, in front of the next one.
const WRITE: &str = "
local held = redis.call('HMGET', KEYS[1], 'epoch', 'mark')
if held[1] and held[1] > ARGV[1] then return {-2, false} end
local mark = held[2] or ARGV[4]
if mark ~= ARGV[3] then
  if mark ~= ARGV[2] then return {-1, false} end
  for i = 3, #KEYS do
    local value, death = ARGV[2 * i], ARGV[2 * i + 1]
    if value == '' then
      redis.call('SET', KEYS[i], '')
      redis.call('DEL', KEYS[i])
    elseif death == '' then redis.call('SET', KEYS[i], value)
    else redis.call('SET', KEYS[i], value, 'PXAT', death) end
  end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'mark', ARGV[3])
end
if ARGV[5] ~= '' then
  local read = redis.call('GET', KEYS[2])
  if read and read ~= ARGV[5] then redis.call('HSET', KEYS[1], 'before', read) end
  redis.call('HSET', KEYS[1], 'read', 1)
  redis.call('SET', KEYS[2], ARGV[5])
end
return {mark == ARGV[3] and 0 or 1, redis.call('GET', KEYS[2])}";

/// Names another generation as the one to read. KEYS: active, the generation's meta. ARGV: the one that is named now, the
/// one to name, and the way back from that, which may be empty.
const POINT: &str = "
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], 'before', ARGV[3]) end
redis.call('HSET', KEYS[2], 'read', 1)
redis.call('SET', KEYS[1], ARGV[2])
return 1";

/// The mark, the server's clock and the values of some keys, all of one moment. KEYS: meta, then the keys.
const PEEK: &str = "
local time = redis.call('TIME')
local found = {redis.call('HGET', KEYS[1], 'mark'), time[1] * 1000 + math.floor(time[2] / 1000), {}}
for i = 2, #KEYS do found[3][i - 1] = redis.call('GET', KEYS[i]) end
return found";

/// Lets go of what only its holder holds.
const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end";

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

/// Some keys of a generation at one moment.
#[derive(Debug)]
pub(super) struct Peeked {
    pub(super) mark: Mark,
    /// By the server's clock.
    pub(super) now: Time,
    pub(super) values: Vec<Option<String>>,
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

    /// Who projects into `generation`, and how far.
    pub(super) fn look(&mut self, generation: u64) -> RedisResult<Found> {
        let (key, mut connection) = (self.keys.generation(generation).meta(), self.connection.clone());
        let (epoch, mark): (Option<String>, Option<String>) =
            self.wait(async move { connection.hmget(key, &["epoch", "mark"]).await })?;
        let epoch = epoch.and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(Found { epoch, mark: mark.as_deref().map(mark_of) })
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

    /// The generation that was read before `generation` was, where it is noted.
    pub(super) fn before(&mut self, generation: u64) -> RedisResult<Option<u64>> {
        let (key, mut connection) = (self.keys.generation(generation).meta(), self.connection.clone());
        self.wait(async move { connection.hget(key, "before").await })
    }

    /// Names `to` as the generation to read, if `from` is named now; `back` leads back from there. Says whether it was.
    pub(super) fn point(&mut self, from: Option<u64>, to: u64, back: Option<u64>) -> RedisResult<bool> {
        let mut connection = self.connection.clone();
        let script = Script::new(POINT);
        let mut call = script.key(self.keys.active());
        let text = |generation: Option<u64>| generation.map(|generation| generation.to_string()).unwrap_or_default();
        call.key(self.keys.generation(to).meta()).arg(text(from)).arg(to.to_string()).arg(text(back));
        self.wait(call.invoke_async(&mut connection))
    }

    /// All generations of which anything is there, and whether each has ever been the one to read.
    pub(super) fn generations(&mut self) -> RedisResult<Vec<(u64, bool)>> {
        let prefix = self.keys.generations();
        let metas = self.names(&prefix, ":meta")?;
        let numbers = metas.iter().filter_map(|meta| meta.strip_prefix(&prefix)?.strip_suffix(":meta")?.parse().ok());
        let mut generations = Vec::new();
        for number in numbers {
            let (key, mut connection) = (self.keys.generation(number).meta(), self.connection.clone());
            generations.push((number, self.wait(async move { connection.hexists(key, "read").await })?));
        }
        Ok(generations)
    }

    /// Removes every key of `generation`.
    pub(super) fn remove(&mut self, generation: u64) -> RedisResult<()> {
        let names = self.names(self.keys.generation(generation).prefix(), "")?;
        for names in names.chunks(KEYS_AT_ONCE) {
            let mut connection = self.connection.clone();
            self.wait(async move { connection.unlink::<_, ()>(names).await })?;
        }
        Ok(())
    }

    /// The names of all keys that begin and end so.
    pub(super) fn names(&self, begin: &str, end: &str) -> RedisResult<Vec<String>> {
        let escaped: String =
            begin.chars().flat_map(|c| "*?[]\\^".contains(c).then_some('\\').into_iter().chain([c])).collect();
        let (pattern, mut names, mut cursor) = (format!("{escaped}*{end}"), Vec::new(), 0u64);
        loop {
            let mut connection = self.connection.clone();
            let mut call = ::redis::cmd("SCAN");
            call.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(KEYS_AT_ONCE);
            let (next, some): (u64, Vec<String>) = self.wait(async move { call.query_async(&mut connection).await })?;
            names.extend(some);
            if next == 0 {
                return Ok(names);
            }
            cursor = next;
        }
    }

    /// Some keys of `generation` and its mark, at one moment.
    pub(super) fn peek(&mut self, generation: u64, names: &[&String]) -> RedisResult<Peeked> {
        let mut connection = self.connection.clone();
        let script = Script::new(PEEK);
        let mut call = script.key(self.keys.generation(generation).meta());
        for name in names {
            call.key(name.as_str());
        }
        let (mark, now, values): (Option<String>, i64, Vec<Option<String>>) =
            self.wait(call.invoke_async(&mut connection))?;
        Ok(Peeked { mark: mark.as_deref().map_or_else(Mark::start, mark_of), now: Time(now), values })
    }

    /// Takes the right to rebuild for `who`, or keeps it for longer; says whether `who` has it.
    pub(super) fn lease_rebuild(&mut self, who: &str) -> RedisResult<bool> {
        let (key, mut connection, who) = (self.keys.rebuilding(), self.connection.clone(), who.to_owned());
        self.wait(async move {
            let options =
                SetOptions::default().conditional_set(ExistenceCheck::NX).with_expiration(SetExpiry::PX(REBUILD_MS));
            let taken: bool = connection.set_options(&key, &who, options).await?;
            if taken {
                return Ok(true);
            }
            let held: Option<String> = connection.get(&key).await?;
            let ours = held.is_some_and(|held| held == who);
            if ours {
                connection.pexpire::<_, ()>(&key, REBUILD_MS.cast_signed()).await?;
            }
            Ok(ours)
        })
    }

    /// Lets the next rebuild begin.
    pub(super) fn end_rebuild(&mut self, who: &str) -> RedisResult<()> {
        let mut connection = self.connection.clone();
        let script = Script::new(RELEASE);
        let mut call = script.key(self.keys.rebuilding());
        call.arg(who);
        self.wait(call.invoke_async(&mut connection))
    }

    fn wait<T>(&self, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        self.runtime.as_ref().expect("the runtime lives as long as the store").block_on(call)
    }
}

/// A mark that cannot be read was left by another program: by another fold, then.
fn mark_of(text: &str) -> Mark {
    Mark::decode(text).unwrap_or_else(|| Mark { seq: 0, sum: text.to_owned(), stored: Time(0), fold: 0 })
}

impl Drop for Store {
    fn drop(&mut self) {
        // Waits for nothing: what it was asked for has been answered.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
