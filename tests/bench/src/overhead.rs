//! Overhead, side by side in one run: Waybill with its full log beside the bare pass-through of [`crate::floor`].
//!
//! What is measured is pinned to one core; the upstream and the load share another. The gates compare CPU seconds,
//! as a ratio within the run: absolute numbers belong to one machine on one day. The passes of both alternate, and
//! medians are taken, so that what disturbs the machine disturbs both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use tokio::time::Instant;

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways, KEY, MEASURED_CORE, address};
use crate::load::{ALL_OPEN, Report};
use crate::process::{Cpu, Program, busy};

/// The core of the upstream and the load.
const LOAD_CORE: usize = 1;
/// Alternating passes of chats, and chats in each.
const CHAT_PASSES: (usize, usize) = (5, 20_000);
/// Chats of a pass at one rate, and the rate in requests a second.
const PACED_CHATS: usize = 4000;
const PACE: usize = 1000;
/// Alternating passes of streams, and streams in each.
const STREAM_PASSES: (usize, usize) = (3, 1000);
/// Chunks of a stream.
const CHUNKS: usize = 100;
/// Rates of the paced load, in requests a second.
const RATES: [usize; 2] = [500, 2000];
/// How long each paced load lasts, in seconds.
const RATE_SECONDS: usize = 3;
/// Streams open at once when memory is looked at.
const OPEN_STREAMS: usize = 256;
/// Facts that a chat leaves in the log: selection, attempt, preference, request.
const FACTS_PER_CHAT: usize = 4;
/// The share of the measured core that other programs may take before a comparison is worth nothing.
const OTHERS_MAX: f64 = 0.1;
/// Starts on an empty log.
const COLD_STARTS: usize = 3;

/// The addresses of the programs, and what Waybill's log has seen.
struct Stand {
    bench: PathBuf,
    gateways: Gateways,
    upstream: String,
    floor: String,
    /// Chats that went to Waybill's log.
    logged: usize,
}

/// The two that are compared.
struct Pair<'a> {
    floor: &'a Program,
    ours: &'a Gateway,
}

/// Runs the whole part and returns its gates.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    let gateways = Gateways::new(waybill)?;
    let bench = std::env::current_exe()?;
    let (upstream_program, upstream) = helper("the upstream", LOAD_CORE, &bench, &["upstream"]).await?;
    let (floor_program, floor) = helper("the floor", MEASURED_CORE, &bench, &["floor", &upstream]).await?;
    let mut stand = Stand { bench, gateways, upstream, floor, logged: 0 };
    println!(
        "Overhead: measured on core {MEASURED_CORE}, upstream and load on core {LOAD_CORE}, ratios within this run"
    );

    let cold = stand.cold_starts().await?;
    let (ours, _) = stand.start("data").await?;
    stand.logged = 0;
    let pair = Pair { floor: &floor_program, ours: &ours };
    let chats = stand.chats(&pair).await?;
    stand.paced_chats(&pair).await?;
    let streams = stand.streams(&pair).await?;
    stand.rates(&pair).await?;
    stand.first_content(&pair).await?;
    stand.memory(&pair).await?;
    stand.restart(ours, cold).await?;
    floor_program.stop().await?;
    upstream_program.stop().await?;
    Ok(vec![
        Gate::new("overhead/chat-cpu-over-floor", chats, Limit::AtMost(3.0)),
        Gate::new("overhead/stream-cpu-over-floor", streams, Limit::AtMost(1.3)),
    ])
}

/// Starts a program of this binary, and returns it with its address.
async fn helper(name: &'static str, core: usize, bench: &Path, args: &[&str]) -> anyhow::Result<(Program, String)> {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let mut program = Program::start(name, core, bench, &args, None)?;
    let address = address(&program.line().await?)?;
    Ok((program, address))
}

impl Stand {
    /// Starts Waybill on a data folder, and returns it with the time to its first answer.
    async fn start(&mut self, data: &str) -> anyhow::Result<(Gateway, Duration)> {
        let begun = Instant::now();
        let gateway = self.gateways.start(data, std::slice::from_ref(&self.upstream)).await?;
        self.load(&gateway.address, Load { connections: 1, ..Load::default() }).await?;
        Ok((gateway, begun.elapsed()))
    }

    /// The median time to the first answer of a first start.
    async fn cold_starts(&mut self) -> anyhow::Result<Duration> {
        let mut times = Vec::new();
        for n in 0..COLD_STARTS {
            let (gateway, time) = self.start(&format!("cold-{n}")).await?;
            gateway.program.stop().await?;
            times.push(time.as_secs_f64());
        }
        Ok(Duration::from_secs_f64(median(times)))
    }

    /// Stops Waybill and starts it again on all that it has logged.
    async fn restart(&mut self, ours: Gateway, cold: Duration) -> anyhow::Result<()> {
        let facts = self.logged * FACTS_PER_CHAT;
        let stopped = ours.program.stop().await?;
        let (again, restart) = self.start("data").await?;
        again.program.stop().await?;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!("  start: {:.0} ms to the first answer on an empty log", ms(cold));
        println!(
            "  start: {:.0} ms on a log of {facts} facts, {:.0} ms more for every million; the stop before took {:.0} ms",
            ms(restart),
            (ms(restart) - ms(cold)) / (facts as f64 / 1e6),
            ms(stopped),
        );
        Ok(())
    }

    /// Runs a load to its end; every request must be answered.
    async fn load(&mut self, target: &str, load: Load) -> anyhow::Result<Report> {
        let report = self.start_load(target, load)?.report().await?;
        ensure!(report.failed == 0, "{} of {} requests to {target} failed", report.failed, load.count);
        Ok(report)
    }

    fn start_load(&mut self, target: &str, load: Load) -> anyhow::Result<Loading> {
        if target != self.upstream && target != self.floor {
            self.logged += load.count;
        }
        Ok(Loading(Program::start("the load", LOAD_CORE, &self.bench, &load.args(target), None)?))
    }

    /// What `program` spends on a load, what it does behind its answers included.
    async fn cost(&mut self, program: &Program, target: &str, load: Load) -> anyhow::Result<Cost> {
        let before = program.cpu_at_rest().await?;
        let (begun, busy_before) = (Instant::now(), busy(MEASURED_CORE)?);
        let report = self.load(target, load).await?;
        let cpu = program.cpu_at_rest().await?.since(before);
        let others = (busy(MEASURED_CORE)? - busy_before - cpu.total()) / begun.elapsed().as_secs_f64();
        Ok(Cost { cpu, rate: load.count as f64 * 1e3 / report.elapsed_ms as f64, others })
    }

    /// Alternating passes; prints what they cost and returns the ratio of the medians.
    async fn compare(&mut self, pair: &Pair<'_>, passes: usize, load: Load, what: &str) -> anyhow::Result<f64> {
        let (floor_at, ours_at) = (self.floor.clone(), pair.ours.address.clone());
        let (mut floor, mut ours) = (Vec::new(), Vec::new());
        for target in [&floor_at, &ours_at] {
            self.load(target, Load { count: load.count / 10, ..load }).await?;
        }
        let threads = pair.ours.program.threads()?;
        for _ in 0..passes {
            floor.push(self.cost(pair.floor, &floor_at, load).await?);
            ours.push(self.cost(&pair.ours.program, &ours_at, load).await?);
        }
        print_costs(what, "floor", &floor);
        print_costs(what, "Waybill", &ours);
        let spent = pair.ours.program.threads()?.into_iter().map(|(name, seconds)| {
            let seconds = seconds - threads.get(&name).copied().unwrap_or(0.0);
            format!("{name} {:.2}", seconds / passes as f64)
        });
        println!("    Waybill's threads, CPU s a pass: {}", spent.collect::<Vec<_>>().join(", "));
        Ok(print_ratio(&floor, &ours))
    }

    async fn chats(&mut self, pair: &Pair<'_>) -> anyhow::Result<f64> {
        let (passes, count) = CHAT_PASSES;
        self.compare(pair, passes, Load { count, ..Load::default() }, "20,000 chats").await
    }

    /// The same at one rate for both. Without a rate the floor keeps the load's core awake and Waybill does not, so that
    /// each of its sends also pays for waking it: the ratio says less about Waybill then.
    async fn paced_chats(&mut self, pair: &Pair<'_>) -> anyhow::Result<f64> {
        let load = Load { count: PACED_CHATS, rate: PACE, ..Load::default() };
        self.compare(pair, CHAT_PASSES.0, load, &format!("{PACED_CHATS} chats at {PACE} a second")).await
    }

    async fn streams(&mut self, pair: &Pair<'_>) -> anyhow::Result<f64> {
        let (passes, count) = STREAM_PASSES;
        self.compare(pair, passes, Load { count, chunks: CHUNKS, ..Load::default() }, "1,000 streams").await
    }

    /// What a paced load waits longer than it waits for the upstream itself.
    async fn rates(&mut self, pair: &Pair<'_>) -> anyhow::Result<()> {
        let targets = [("floor", self.floor.clone()), ("Waybill", pair.ours.address.clone())];
        for rate in RATES {
            let load = Load { rate, count: rate * RATE_SECONDS, ..Load::default() };
            let direct = self.load(&self.upstream.clone(), load).await?;
            for (name, target) in &targets {
                let report = self.start_load(target, load)?.report().await?;
                let added = |through: u64, direct: u64| (through as f64 - direct as f64) / 1e3;
                println!(
                    "  {rate} requests/s, {name:<7} adds {:.2} ms (p50), {:.2} ms (p99); {} did not get through",
                    added(report.p50_us, direct.p50_us),
                    added(report.p99_us, direct.p99_us),
                    report.failed,
                );
            }
        }
        Ok(())
    }

    async fn first_content(&mut self, pair: &Pair<'_>) -> anyhow::Result<()> {
        let load = Load { count: 200, connections: 1, chunks: 5, ..Load::default() };
        let targets = [self.upstream.clone(), self.floor.clone(), pair.ours.address.clone()];
        let mut times = Vec::new();
        for target in &targets {
            times.push(self.load(target, load).await?.first_content_p50_us as f64 / 1e3);
        }
        println!(
            "  first content of a stream: {:.2} ms direct, {:.2} floor, {:.2} Waybill",
            times[0], times[1], times[2]
        );
        Ok(())
    }

    async fn memory(&mut self, pair: &Pair<'_>) -> anyhow::Result<()> {
        let load = Load { count: OPEN_STREAMS, connections: OPEN_STREAMS, chunks: 20, pace_ms: 100, ..Load::default() };
        for (name, program, target) in
            [("floor", pair.floor, self.floor.clone()), ("Waybill", &pair.ours.program, pair.ours.address.clone())]
        {
            let before = program.rss_mib()?;
            let mut open = self.start_load(&target, load)?;
            open.all_open().await?;
            let during = program.rss_mib()?;
            let report = open.report().await?;
            ensure!(report.failed == 0, "{} of the open streams to {name} broke", report.failed);
            println!(
                "  memory, {name:<7} {before:>6.1} MiB after the loads, {during:>6.1} under {OPEN_STREAMS} streams"
            );
        }
        Ok(())
    }
}

/// What one pass cost.
#[derive(Clone, Copy, Debug)]
struct Cost {
    cpu: Cpu,
    /// Requests a second.
    rate: f64,
    /// The share of the core that others took.
    others: f64,
}

fn median_of(costs: &[Cost], of: impl Fn(&Cost) -> f64) -> f64 {
    median(costs.iter().map(of).collect())
}

fn print_costs(what: &str, name: &str, costs: &[Cost]) {
    println!(
        "  {what}, {name:<7} {:>6.2} CPU s ({:.2} user, {:.2} system), {:>6.0} a second",
        median_of(costs, |cost| cost.cpu.total()),
        median_of(costs, |cost| cost.cpu.user),
        median_of(costs, |cost| cost.cpu.system),
        median_of(costs, |cost| cost.rate),
    );
}

/// Prints and returns the ratio of the medians, with a word of doubt where the machine was not ours.
fn print_ratio(floor: &[Cost], ours: &[Cost]) -> f64 {
    let total = |cost: &Cost| cost.cpu.total();
    let best = |costs: &[Cost]| costs.iter().map(total).fold(f64::INFINITY, f64::min);
    let ratio = median_of(ours, total) / median_of(floor, total);
    println!("    ratio of the medians {ratio:.2}, of the cheapest passes {:.2}", best(ours) / best(floor));
    let others = median_of(&[floor, ours].concat(), |cost| cost.others);
    if others > OTHERS_MAX {
        println!("    other programs took {:.0} % of core {MEASURED_CORE}: do not trust this", others * 1e2);
    }
    ratio
}

/// A load under way.
struct Loading(Program);

impl Loading {
    /// Waits until every connection has the first content of a stream.
    async fn all_open(&mut self) -> anyhow::Result<()> {
        let line = self.0.line().await?;
        ensure!(line == ALL_OPEN, "the streams were not open at the same time: {line}");
        Ok(())
    }

    /// Waits for the end.
    async fn report(mut self) -> anyhow::Result<Report> {
        let mut line = self.0.line().await?;
        if line == ALL_OPEN {
            line = self.0.line().await?;
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// A load, as the load generator takes it.
#[derive(Clone, Copy, Debug)]
struct Load {
    count: usize,
    connections: usize,
    rate: usize,
    chunks: usize,
    pace_ms: usize,
}

impl Default for Load {
    fn default() -> Self {
        Self { count: 1, connections: 16, rate: 0, chunks: 0, pace_ms: 0 }
    }
}

impl Load {
    fn args(&self, target: &str) -> Vec<String> {
        let Self { count, connections, rate, chunks, pace_ms } = self;
        let numbers =
            [("count", count), ("connections", connections), ("rate", rate), ("chunks", chunks), ("pace-ms", pace_ms)];
        let options = numbers.into_iter().map(|(name, number)| format!("--{name}={number}"));
        ["load".to_owned(), target.to_owned(), format!("--key={KEY}")].into_iter().chain(options).collect()
    }
}

/// The median; no number where there are none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }
}
