//! The prompt caches of the real providers as one plain struct, without HTTP and without a clock.
//!
//! A prompt is a row of blocks. Each block's id is chained with those before it, so that one number names a whole
//! prefix; the cache maps that number to its last use. `lookup` reads, `store` writes once the response has begun:
//! between the two, a parallel request with the same prefix misses, as it does at the providers.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Positions that an Anthropic breakpoint tries, itself included.
const LOOK_BACK_BLOCKS: usize = 20;
/// About how many tokens OpenAI hashes to choose a machine.
const AFFINITY_TOKENS: u64 = 256;
/// The span over which requests per minute are counted.
const MINUTE_MS: i64 = 60_000;
/// Below this number of entries the dead ones are not swept.
const SWEEP_ENTRIES_MIN: usize = 65_536;

/// How an upstream caches prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum CacheModel {
    /// Nothing is ever cached.
    #[default]
    Off,
    /// Automatic; hits of at least `min_tokens`, in steps; one cache for each `prompt_cache_key`.
    OpenAi {
        /// Shortest prefix that can hit; OpenAI documents 1,024.
        #[serde(default = "openai_min")]
        min_tokens: u64,
        /// Hits grow in this step; OpenAI documents 128.
        #[serde(default = "openai_step")]
        step_tokens: u64,
        /// Idle life of a prefix in milliseconds; OpenAI documents 5 to 10 minutes.
        #[serde(default = "five_minutes")]
        ttl_ms: i64,
        /// Requests a minute for one prefix and key before the next ones reach another, cold machine; documented: about 15.
        #[serde(default)]
        max_rpm_per_key: Option<u32>,
    },
    /// Only up to blocks with `cache_control`, with 20 positions looked back from each.
    Anthropic {
        /// Shortest prefix that can be cached; none takes the documented minimum of the request's model.
        #[serde(default)]
        min_tokens: Option<u64>,
    },
    /// Automatic, in whole blocks of 64 tokens.
    Deepseek {
        /// Idle life of a prefix in milliseconds; DeepSeek documents hours to days.
        #[serde(default = "one_day")]
        ttl_ms: i64,
    },
    /// In whole blocks of 64 tokens, for requests with a `prompt_cache_key` only.
    Mistral {
        /// Idle life of a prefix in milliseconds.
        #[serde(default = "one_day")]
        ttl_ms: i64,
    },
}

fn openai_min() -> u64 {
    1024
}
fn openai_step() -> u64 {
    128
}
fn five_minutes() -> i64 {
    Life::FiveMinutes.ms()
}
fn one_day() -> i64 {
    86_400_000
}

impl CacheModel {
    /// OpenAI as documented: minimum 1,024, steps of 128, 5 minutes idle, no limit of requests a minute.
    pub fn open_ai() -> Self {
        Self::OpenAi {
            min_tokens: openai_min(),
            step_tokens: openai_step(),
            ttl_ms: five_minutes(),
            max_rpm_per_key: None,
        }
    }

    /// Anthropic as documented, the minimum taken from the request's model.
    pub fn anthropic() -> Self {
        Self::Anthropic { min_tokens: None }
    }

    /// DeepSeek in its older, 64-token form, a day of life.
    pub fn deepseek() -> Self {
        Self::Deepseek { ttl_ms: one_day() }
    }

    /// Mistral, a day of life.
    pub fn mistral() -> Self {
        Self::Mistral { ttl_ms: one_day() }
    }

    /// Tokens of one block where blocks are cut by length; none where each content block is one.
    pub fn block_tokens(&self) -> Option<u64> {
        match self {
            Self::OpenAi { .. } => Some(128),
            Self::Deepseek { .. } | Self::Mistral { .. } => Some(64),
            Self::Anthropic { .. } | Self::Off => None,
        }
    }
}

/// How long an Anthropic breakpoint lives without being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Life {
    /// `{"type":"ephemeral"}`, written at 1.25 times the price.
    #[serde(rename = "5m")]
    FiveMinutes,
    /// `{"type":"ephemeral","ttl":"1h"}`, written at twice the price.
    #[serde(rename = "1h")]
    OneHour,
}

impl Life {
    /// The life in milliseconds.
    pub fn ms(self) -> i64 {
        match self {
            Self::FiveMinutes => 300_000,
            Self::OneHour => 3_600_000,
        }
    }
}

/// One block of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Names the block's content; a trace's own block ids serve.
    pub id: u64,
    /// Its length in tokens.
    pub tokens: u64,
    /// The breakpoint on it, if any; read in the Anthropic model only.
    pub mark: Option<Life>,
}

/// All that a cache knows of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Whose cache: no credential sees the entries of another.
    pub credential: String,
    /// The upstream model: no model sees the entries of another.
    pub model: String,
    /// The `prompt_cache_key`, if sent.
    pub key: Option<String>,
    /// The prompt in order: tools, system, messages.
    pub blocks: Vec<Block>,
}

/// What a lookup found, and what `store` is to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// Tokens of the whole prompt.
    pub prompt_tokens: u64,
    /// Tokens read from the cache.
    pub read_tokens: u64,
    /// Tokens written for five minutes (Anthropic).
    pub written_5m_tokens: u64,
    /// Tokens written for an hour (Anthropic).
    pub written_1h_tokens: u64,
    /// Whether the request went over `max_rpm_per_key` and so to a cold machine.
    pub overflowed: bool,
    at_ms: i64,
    entries: Vec<(u64, i64)>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    used_ms: i64,
    life_ms: i64,
}

impl Entry {
    fn is_alive(self, now_ms: i64) -> bool {
        now_ms < self.used_ms.saturating_add(self.life_ms)
    }
}

/// The prompt cache of one upstream.
#[derive(Clone, Debug)]
pub struct PromptCache {
    model: CacheModel,
    entries: HashMap<u64, Entry>,
    recent: HashMap<u64, VecDeque<i64>>,
    sweep_at: usize,
}

impl PromptCache {
    /// An empty cache.
    pub fn new(model: CacheModel) -> Self {
        Self { model, entries: HashMap::new(), recent: HashMap::new(), sweep_at: SWEEP_ENTRIES_MIN }
    }

    /// Finds how much of `prompt` is cached at `now_ms`, the start of the request, and refreshes what it read.
    pub fn lookup(&mut self, prompt: &Prompt, now_ms: i64) -> Hit {
        let prompt_tokens = prompt.blocks.iter().map(|block| block.tokens).sum();
        let found = match self.model {
            CacheModel::Off => Hit::default(),
            CacheModel::OpenAi { min_tokens, step_tokens, ttl_ms, max_rpm_per_key } => {
                let seed = seed(prompt, prompt.key.as_deref());
                if max_rpm_per_key.is_some_and(|max| self.overflows(affinity(seed, &prompt.blocks), max, now_ms)) {
                    Hit { overflowed: true, ..Hit::default() }
                } else {
                    self.longest_prefix(seed, &prompt.blocks, Steps { min_tokens, step_tokens, ttl_ms }, now_ms)
                }
            }
            CacheModel::Mistral { .. } if prompt.key.is_none() => Hit::default(),
            CacheModel::Deepseek { ttl_ms } | CacheModel::Mistral { ttl_ms } => {
                let steps = Steps { min_tokens: 64, step_tokens: 64, ttl_ms };
                self.longest_prefix(seed(prompt, None), &prompt.blocks, steps, now_ms)
            }
            CacheModel::Anthropic { min_tokens } => {
                let min = min_tokens.unwrap_or_else(|| anthropic_minimum(&prompt.model));
                self.breakpoints(&prefixes(seed(prompt, None), &prompt.blocks), min, now_ms)
            }
        };
        Hit { prompt_tokens, at_ms: now_ms, ..found }
    }

    /// Writes what `hit` has to leave behind: from now on, since its response has begun, others read it.
    pub fn store(&mut self, hit: &Hit) {
        for &(prefix, life_ms) in &hit.entries {
            let entry = self.entries.entry(prefix).or_insert(Entry { used_ms: hit.at_ms, life_ms });
            entry.used_ms = entry.used_ms.max(hit.at_ms);
            entry.life_ms = life_ms;
        }
        if self.entries.len() > self.sweep_at {
            self.entries.retain(|_, entry| entry.is_alive(hit.at_ms));
            self.recent.retain(|_, times| times.back().is_some_and(|at| *at > hit.at_ms - MINUTE_MS));
            self.sweep_at = SWEEP_ENTRIES_MIN.max(self.entries.len() * 2);
        }
    }

    /// Looks up and stores in one step, for a bench whose requests do not overlap.
    pub fn serve(&mut self, prompt: &Prompt, now_ms: i64) -> Hit {
        let hit = self.lookup(prompt, now_ms);
        self.store(&hit);
        hit
    }

    /// Forgets everything, as a restarted upstream does.
    pub fn clear(&mut self) {
        *self = Self::new(self.model.clone());
    }

    fn is_alive(&self, prefix: u64, now_ms: i64) -> bool {
        self.entries.get(&prefix).is_some_and(|entry| entry.is_alive(now_ms))
    }

    fn overflows(&mut self, affinity: u64, max: u32, now_ms: i64) -> bool {
        let recent = self.recent.entry(affinity).or_default();
        while recent.front().is_some_and(|at| *at <= now_ms - MINUTE_MS) {
            recent.pop_front();
        }
        if recent.len() >= max as usize {
            return true;
        }
        recent.push_back(now_ms);
        false
    }

    fn longest_prefix(&self, seed: u64, blocks: &[Block], steps: Steps, now_ms: i64) -> Hit {
        let prefixes = prefixes(seed, blocks);
        let matched = prefixes.iter().take_while(|prefix| self.is_alive(prefix.hash, now_ms)).last();
        Hit {
            read_tokens: matched.map_or(0, |prefix| steps.round(prefix.tokens)),
            entries: prefixes.iter().map(|prefix| (prefix.hash, steps.ttl_ms)).collect(),
            ..Hit::default()
        }
    }

    fn breakpoints(&mut self, prefixes: &[Prefix], min_tokens: u64, now_ms: i64) -> Hit {
        let marked = |index: &usize| prefixes[*index].mark.is_some() && prefixes[*index].tokens >= min_tokens;
        let marks: Vec<usize> = (0..prefixes.len()).filter(marked).collect();
        let read = marks.iter().rev().find_map(|mark| {
            let window = mark.saturating_sub(LOOK_BACK_BLOCKS - 1)..=*mark;
            window.rev().find(|index| self.is_alive(prefixes[*index].hash, now_ms))
        });
        let read_tokens = read.map_or(0, |index| prefixes[index].tokens);
        let (mut written_1h_tokens, mut written_to, mut entries) = (0, read_tokens, Vec::new());
        if let Some(index) = read {
            self.refresh(prefixes[index].hash, now_ms);
        }
        for index in marks {
            let Prefix { hash, tokens, mark: Some(life) } = prefixes[index] else { continue };
            if read.is_some_and(|read| index <= read) {
                self.refresh(hash, now_ms);
                continue;
            }
            entries.push((hash, life.ms()));
            // An hour's write is paid up to the last mark of an hour, whatever lies between.
            if life == Life::OneHour {
                written_1h_tokens = tokens - read_tokens;
            }
            written_to = tokens;
        }
        let written_5m_tokens = written_to - read_tokens - written_1h_tokens;
        Hit { read_tokens, written_5m_tokens, written_1h_tokens, entries, ..Hit::default() }
    }

    fn refresh(&mut self, prefix: u64, now_ms: i64) {
        if let Some(entry) = self.entries.get_mut(&prefix).filter(|entry| entry.is_alive(now_ms)) {
            entry.used_ms = entry.used_ms.max(now_ms);
        }
    }
}

#[derive(Clone, Copy)]
struct Steps {
    min_tokens: u64,
    step_tokens: u64,
    ttl_ms: i64,
}

impl Steps {
    fn round(self, tokens: u64) -> u64 {
        match tokens.checked_sub(self.min_tokens) {
            None => 0,
            Some(over) => self.min_tokens + over - over % self.step_tokens.max(1),
        }
    }
}

#[derive(Clone, Copy)]
struct Prefix {
    hash: u64,
    tokens: u64,
    mark: Option<Life>,
}

fn prefixes(seed: u64, blocks: &[Block]) -> Vec<Prefix> {
    let next = |state: &mut (u64, u64), block: &Block| {
        *state = (chain(state.0, block.id), state.1 + block.tokens);
        Some(Prefix { hash: state.0, tokens: state.1, mark: block.mark })
    };
    blocks.iter().scan((seed, 0), next).collect()
}

fn affinity(seed: u64, blocks: &[Block]) -> u64 {
    let prefixes = prefixes(seed, blocks);
    prefixes
        .iter()
        .find(|prefix| prefix.tokens >= AFFINITY_TOKENS)
        .or(prefixes.last())
        .map_or(seed, |prefix| prefix.hash)
}

fn seed(prompt: &Prompt, key: Option<&str>) -> u64 {
    let parts = [prompt.credential.as_str(), prompt.model.as_str(), key.unwrap_or("")];
    parts.iter().fold(0, |hash, part| part.bytes().fold(chain(hash, 256), |hash, byte| chain(hash, u64::from(byte))))
}

/// The finaliser of splitmix64 over the two numbers: the same on every machine and in every release of Rust.
fn chain(previous: u64, id: u64) -> u64 {
    let z = previous.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ id;
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The documented minimum of a Claude model in tokens (prompt-caching page, 2026-11); 1,024 for an unknown one.
pub fn anthropic_minimum(model: &str) -> u64 {
    let model = model.replace('.', "-");
    let is = |names: &[&str]| names.iter().any(|name| model.contains(name));
    if is(&["opus-4-5", "opus-4-6", "haiku-4-5"]) {
        4096
    } else if is(&["opus-4-7", "haiku-3-5", "3-5-haiku"]) {
        2048
    } else if is(&["opus-5", "fable", "mythos-5"]) {
        512
    } else {
        1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000;

    fn prompt(blocks: &[(u64, u64, Option<Life>)]) -> Prompt {
        let blocks = blocks.iter().map(|&(id, tokens, mark)| Block { id, tokens, mark }).collect();
        Prompt { credential: "key-a".into(), model: "m".into(), key: None, blocks }
    }

    /// `n` blocks of 128 tokens with the ids 1..=n.
    fn openai_prompt(n: u64) -> Prompt {
        prompt(&(1..=n).map(|id| (id, 128, None)).collect::<Vec<_>>())
    }

    /// `n` blocks of 100 tokens, marked where `marks` says.
    fn anthropic_prompt(n: u64, marks: &[(u64, Life)]) -> Prompt {
        let mark = |id| marks.iter().find(|(at, _)| *at == id).map(|(_, life)| *life);
        prompt(&(1..=n).map(|id| (id, 100, mark(id))).collect::<Vec<_>>())
    }

    /// Serves each prompt at its time and compares (read, written for 5 minutes, written for 1 hour) with hand-made rows.
    #[track_caller]
    fn check(model: CacheModel, steps: &[(i64, Prompt, (u64, u64, u64))]) {
        let mut cache = PromptCache::new(model);
        for (n, (now, prompt, expected)) in steps.iter().enumerate() {
            let hit = cache.serve(prompt, *now);
            assert_eq!((hit.read_tokens, hit.written_5m_tokens, hit.written_1h_tokens), *expected, "step {n}");
        }
    }

    #[test]
    fn openai_hits_begin_at_1024_and_grow_by_128() {
        check(
            CacheModel::open_ai(),
            &[
                (0, openai_prompt(7), (0, 0, 0)),
                (0, openai_prompt(7), (0, 0, 0)),     // 896 tokens: below the minimum
                (0, openai_prompt(10), (0, 0, 0)),    // only 896 are known
                (0, openai_prompt(8), (1024, 0, 0)),  // the minimum
                (0, openai_prompt(12), (1280, 0, 0)), // ten blocks are known
            ],
        );
        let odd = prompt(&[(1, 1000, None), (2, 100, None), (3, 100, None)]);
        check(CacheModel::open_ai(), &[(0, odd.clone(), (0, 0, 0)), (0, odd, (1152, 0, 0))]); // 1200 -> 1024 + 128
    }

    #[test]
    fn openai_prefix_dies_five_idle_minutes_after_its_last_use() {
        let p = openai_prompt(8);
        check(
            CacheModel::open_ai(),
            &[
                (0, p.clone(), (0, 0, 0)),
                (4 * MINUTE, p.clone(), (1024, 0, 0)),
                (8 * MINUTE, p.clone(), (1024, 0, 0)),
                (13 * MINUTE, p, (0, 0, 0)),
            ],
        );
    }

    #[test]
    fn a_changed_first_block_changes_every_prefix() {
        let mut other = openai_prompt(12);
        other.blocks[0].id = 99;
        check(CacheModel::open_ai(), &[(0, openai_prompt(12), (0, 0, 0)), (0, other, (0, 0, 0))]);
    }

    #[test]
    fn credentials_models_and_openai_keys_do_not_share() {
        let base = openai_prompt(8);
        let other_credential = Prompt { credential: "key-b".into(), ..base.clone() };
        let other_model = Prompt { model: "n".into(), ..base.clone() };
        let other_key = Prompt { key: Some("k".into()), ..base.clone() };
        let rows = [(base.clone(), 0), (other_credential, 0), (other_model, 0), (other_key, 0), (base, 1024)];
        check(CacheModel::open_ai(), &rows.map(|(prompt, read)| (0, prompt, (read, 0, 0))));
    }

    #[test]
    fn openai_requests_over_the_rate_reach_a_cold_machine() {
        let model =
            CacheModel::OpenAi { min_tokens: 1024, step_tokens: 128, ttl_ms: 300_000, max_rpm_per_key: Some(2) };
        let mut cache = PromptCache::new(model);
        let p = openai_prompt(8);
        let at = |cache: &mut PromptCache, now| {
            let hit = cache.serve(&p, now);
            (hit.read_tokens, hit.overflowed)
        };
        assert_eq!(at(&mut cache, 0), (0, false));
        assert_eq!(at(&mut cache, 1_000), (1024, false));
        assert_eq!(at(&mut cache, 2_000), (0, true));
        assert_eq!(at(&mut cache, 60_000), (1024, false), "the request of 0 s has left the minute");
        assert_eq!(at(&mut cache, 60_500), (0, true));
        assert_eq!(at(&mut cache, 61_000), (1024, false), "the request of 1 s has left it too");
    }

    #[test]
    fn an_entry_is_readable_only_once_its_response_has_begun() {
        let mut cache = PromptCache::new(CacheModel::open_ai());
        let first = cache.lookup(&openai_prompt(8), 0);
        assert_eq!(cache.lookup(&openai_prompt(8), 0).read_tokens, 0, "the parallel request misses");
        cache.store(&first);
        assert_eq!(cache.lookup(&openai_prompt(8), 0).read_tokens, 1024);
    }

    #[test]
    fn anthropic_caches_nothing_without_a_mark_or_below_the_minimum() {
        use Life::FiveMinutes;
        let unmarked = anthropic_prompt(30, &[]);
        check(CacheModel::anthropic(), &[(0, unmarked.clone(), (0, 0, 0)), (0, unmarked, (0, 0, 0))]);
        let short = anthropic_prompt(10, &[(10, FiveMinutes)]); // 1,000 < 1,024
        check(CacheModel::anthropic(), &[(0, short.clone(), (0, 0, 0)), (0, short, (0, 0, 0))]);
        let long = anthropic_prompt(12, &[(11, FiveMinutes)]);
        check(CacheModel::anthropic(), &[(0, long.clone(), (0, 1100, 0)), (0, long, (1100, 0, 0))]);
    }

    #[test]
    fn anthropic_mark_moves_on_and_reads_what_the_turn_before_wrote() {
        use Life::FiveMinutes;
        check(
            CacheModel::anthropic(),
            &[
                (0, anthropic_prompt(20, &[(20, FiveMinutes)]), (0, 2000, 0)),
                (MINUTE, anthropic_prompt(22, &[(22, FiveMinutes)]), (2000, 200, 0)),
                // The entry at 20 is refreshed at 1 min: it lives until 6 min, the one at 22 too.
                (5 * MINUTE + 1, anthropic_prompt(20, &[(20, FiveMinutes)]), (2000, 0, 0)),
                (6 * MINUTE, anthropic_prompt(22, &[(22, FiveMinutes)]), (2000, 200, 0)),
            ],
        );
    }

    #[test]
    fn anthropic_looks_back_twenty_positions_from_the_mark() {
        use Life::FiveMinutes;
        let first = (0, anthropic_prompt(20, &[(20, FiveMinutes)]), (0, 2000, 0));
        let nineteen_on = (0, anthropic_prompt(39, &[(39, FiveMinutes)]), (2000, 1900, 0));
        let twenty_on = (0, anthropic_prompt(40, &[(40, FiveMinutes)]), (0, 4000, 0));
        check(CacheModel::anthropic(), &[first.clone(), nineteen_on]);
        check(CacheModel::anthropic(), &[first.clone(), twenty_on]);
        let with_second_mark = (0, anthropic_prompt(40, &[(20, FiveMinutes), (40, FiveMinutes)]), (2000, 2000, 0));
        check(CacheModel::anthropic(), &[first, with_second_mark]);
    }

    #[test]
    fn anthropic_splits_the_written_tokens_by_life() {
        use Life::{FiveMinutes, OneHour};
        let p = anthropic_prompt(30, &[(20, OneHour), (30, FiveMinutes)]);
        check(
            CacheModel::anthropic(),
            &[
                (0, p.clone(), (0, 1000, 2000)),
                (5 * MINUTE, p.clone(), (2000, 1000, 0)), // the five minutes are over, the hour is not
                (65 * MINUTE, p, (0, 1000, 2000)),        // an hour after its last read
            ],
        );
    }

    #[test]
    fn deepseek_counts_whole_blocks_of_64_and_mistral_wants_a_key() {
        let p = prompt(&[(1, 64, None), (2, 64, None), (3, 10, None)]);
        check(CacheModel::deepseek(), &[(0, p.clone(), (0, 0, 0)), (0, p.clone(), (128, 0, 0))]);
        check(CacheModel::mistral(), &[(0, p.clone(), (0, 0, 0)), (0, p.clone(), (0, 0, 0))]);
        let keyed = Prompt { key: Some("k".into()), ..p };
        check(CacheModel::mistral(), &[(0, keyed.clone(), (0, 0, 0)), (0, keyed, (128, 0, 0))]);
    }

    #[test]
    fn claude_minimums_follow_the_document() {
        let table = [
            ("claude-opus-5", 512),
            ("claude-opus-5.5", 512),
            ("claude-mythos-5", 512),
            ("claude-opus-4-8", 1024),
            ("claude-sonnet-4-5", 1024),
            ("claude-opus-4-1-20250805", 1024),
            ("claude-opus-4-7", 2048),
            ("claude-3-5-haiku-latest", 2048),
            ("claude-opus-4-5-20251101", 4096),
            ("claude-opus-4-6", 4096),
            ("claude-haiku-4-5", 4096),
        ];
        for (model, tokens) in table {
            assert_eq!(anthropic_minimum(model), tokens, "{model}");
        }
    }
}
