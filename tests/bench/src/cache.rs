//! Prompt-cache hits on real traces: Waybill's core beside round robin and an oracle, in virtual time.
//!
//! The oracle sees into every cache and sends each request to the one that holds most of it: no placement that does
//! not copy caches can do better by much. What Waybill loses to it is the price of knowing sessions only.

use std::path::Path;

use waybill_schema::time::Time;

use crate::gate::{Gate, Limit};
use crate::prefix::PrefixCache;
use crate::routing::Core;
use crate::trace::{self, Arrivals, BlockIds, Request};

/// Deployments of the fleet.
pub(crate) const DEPLOYMENTS: usize = 8;
/// The idle life of a cached prefix: five minutes, the shortest that providers document (CLIENTS.md).
pub(crate) const TTL_MS: i64 = 300_000;
/// The dice of Waybill's draws.
const SEED: u64 = 7;
/// The deployment that dies in the second run.
const VICTIM: usize = 3;
/// Requests of the gated trace.
const WEKA_REQUESTS: usize = 4000;
/// Sessions of the gated trace.
const WEKA_SESSIONS: usize = 148;
/// The gated trace.
const WEKA: &str = "weka_claude_code.jsonl";
/// Staggerings of the gated trace: round robin's ratio lies between 0.45 and 0.49 by the dice, so several are pooled.
const STAGGERINGS: u64 = 5;

/// Who chooses the deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Waybill,
    RoundRobin,
    Oracle,
}

/// From which request on [`VICTIM`] is dead.
type DeadFrom = Option<usize>;

/// What one run came to.
#[derive(Clone, Debug, Default)]
struct Tally {
    prompt_tokens: u64,
    cached_tokens: u64,
    load: [u64; DEPLOYMENTS],
    /// Sends beyond the first.
    further_sends: u64,
    unserved: u64,
}

impl Tally {
    fn hit_ratio(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens as f64
    }

    fn add(&mut self, other: &Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.further_sends += other.further_sends;
        self.unserved += other.unserved;
        self.load.iter_mut().zip(other.load).for_each(|(sum, tokens)| *sum += tokens);
    }

    /// The busiest deployment's prompt tokens over the mean.
    fn imbalance(&self) -> f64 {
        let total: u64 = self.load.iter().sum();
        let busiest = self.load.iter().copied().max().unwrap_or(0);
        busiest as f64 * DEPLOYMENTS as f64 / total as f64
    }
}

/// Runs the whole part and returns its gates.
pub(crate) fn run(traces: &Path) -> anyhow::Result<Vec<Gate>> {
    println!("Prompt-cache hits: {DEPLOYMENTS} deployments, prefixes live {} s, virtual time", TTL_MS / 1000);
    println!("  {:<36} {:>11} {:>7} {:>8} {:>13}", "", "round robin", "oracle", "Waybill", "its max/mean");
    let (mut whole, mut bereft) = (Compared::default(), Compared::default());
    for seed in 1..=STAGGERINGS {
        let weka = read_weka(traces, seed, WEKA_REQUESTS)?;
        whole.add(&Compared::of(&weka, None)?);
        bereft.add(&Compared::of(&weka, Some(weka.len() / 2))?);
    }
    whole.print(&format!("weka, 4,000 requests, {STAGGERINGS} staggerings"));
    println!("  {:<36} {:>11} {:>7}", "  CLIENTS.md, one staggering", "0.457", "0.907");
    bereft.print("  the same, 1 of 8 dead from half time");
    println!("    {} further sends, {} requests unserved", bereft.waybill.further_sends, bereft.waybill.unserved);
    for (file, name) in OTHERS {
        let requests = trace::read(&traces.join(file), BlockIds::Global, Arrivals::Recorded, usize::MAX)?;
        Compared::of(&requests, None)?.print(name);
    }
    let ratio = |of: &Tally, to: &Tally| of.hit_ratio() / to.hit_ratio();
    Ok(vec![
        Gate::new("cache/over-oracle", ratio(&whole.waybill, &whole.oracle), Limit::AtLeast(0.99)),
        Gate::new("cache/over-round-robin", ratio(&whole.waybill, &whole.round_robin), Limit::AtLeast(1.9)),
        Gate::new("cache/one-dead-over-oracle", ratio(&bereft.waybill, &bereft.oracle), Limit::AtLeast(0.95)),
    ])
}

/// The traces that are shown as information.
const OTHERS: [(&str, &str); 3] = [
    ("mooncake_conversation.jsonl", "Mooncake conversation"),
    ("mooncake_synthetic.jsonl", "Mooncake synthetic"),
    ("lmcache_agents.jsonl", "LMCache agents"),
];

/// The first `count` requests of the gated trace, staggered by the dice of `seed`.
pub(crate) fn read_weka(traces: &Path, seed: u64, count: usize) -> anyhow::Result<Vec<Request>> {
    let arrivals = Arrivals::Staggered { sessions: WEKA_SESSIONS, seed };
    trace::read(&traces.join(WEKA), BlockIds::PerSession, arrivals, count)
}

/// The same requests under each policy.
#[derive(Debug, Default)]
struct Compared {
    round_robin: Tally,
    oracle: Tally,
    waybill: Tally,
}

impl Compared {
    fn of(requests: &[Request], dead_from: DeadFrom) -> anyhow::Result<Self> {
        let replay = |policy| replay(requests, policy, dead_from);
        Ok(Self {
            round_robin: replay(Policy::RoundRobin)?,
            oracle: replay(Policy::Oracle)?,
            waybill: replay(Policy::Waybill)?,
        })
    }

    fn add(&mut self, other: &Self) {
        self.round_robin.add(&other.round_robin);
        self.oracle.add(&other.oracle);
        self.waybill.add(&other.waybill);
    }

    fn print(&self, name: &str) {
        let Self { round_robin, oracle, waybill } = self;
        println!(
            "  {name:<36} {:>11.3} {:>7.3} {:>8.3} {:>13.2}",
            round_robin.hit_ratio(),
            oracle.hit_ratio(),
            waybill.hit_ratio(),
            waybill.imbalance(),
        );
    }
}

fn replay(requests: &[Request], policy: Policy, dead_from: DeadFrom) -> anyhow::Result<Tally> {
    let mut caches = vec![PrefixCache::new(TTL_MS); DEPLOYMENTS];
    let mut core = Core::new(DEPLOYMENTS, SEED)?;
    let mut tally = Tally::default();
    for (n, request) in requests.iter().enumerate() {
        let lives = |deployment: usize| deployment != VICTIM || dead_from.is_none_or(|from| n < from);
        tally.prompt_tokens += request.prompt_tokens;
        let chosen = match policy {
            Policy::RoundRobin => (n..n + DEPLOYMENTS).map(|n| n % DEPLOYMENTS).find(|deployment| lives(*deployment)),
            Policy::Oracle => oracle(request, &caches, &tally.load, &lives),
            Policy::Waybill => {
                let served = core.serve(&request.session, Time(request.at_ms), &lives)?;
                tally.further_sends += u64::from(served.sends.saturating_sub(1));
                served.by
            }
        };
        let Some(deployment) = chosen else {
            tally.unserved += 1;
            continue;
        };
        let live = caches[deployment].live_blocks(&request.prefixes, request.at_ms) as u64;
        // The last block may be a part of one.
        tally.cached_tokens += (live * request.block_tokens).min(request.prompt_tokens);
        tally.load[deployment] += request.prompt_tokens;
        caches[deployment].store(&request.prefixes, request.at_ms);
    }
    Ok(tally)
}

/// The living deployment with the longest live prefix; among equals the one with the fewest prompt tokens so far.
fn oracle(request: &Request, caches: &[PrefixCache], load: &[u64], lives: &dyn Fn(usize) -> bool) -> Option<usize> {
    let live = |deployment: &usize| caches[*deployment].live_blocks(&request.prefixes, request.at_ms);
    let living = (0..DEPLOYMENTS).filter(|deployment| lives(*deployment));
    living.max_by_key(|deployment| (live(deployment), std::cmp::Reverse(load[*deployment])))
}
