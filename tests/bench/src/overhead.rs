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
use crate::process::{Cpu, Program};

/// The core of the upstream and the load.
const LOAD_CORE: usize = 1;
/// Alternating passes of chats, and chats in each.
const CHAT_PASSES: (usize, usize) = (5, 20_000);
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
    let (_upstream, upstream) = helper("the upstream", LOAD_CORE, &bench, &["upstream"]).await?;
    let (floor_program, floor) = helper("the floor", MEASURED_CORE, &bench, &["floor", &upstream]).await?;
    let mut stand = Stand { bench, gateways, upstream, floor, logged: 0 };
    println!("Overhead: measured on core {MEASURED_CORE}, upstream and load on core {LOAD_CORE}, ratios within this run");

    let cold = stand.cold_starts().await?;
    let (ours, _) = stand.start("data").await?;
    stand.logged = 0;
    let pair = Pair { floor: &floor_program, ours: &ours };
    let chats = stand.chats(&pair).await?;
    let streams = stand.streams(&pair).await?;
    stand.rates(&pair).await?;
    stand.first_content(&pair).await?;
    stand.memory(&pair).await?;
    stand.restart(ours, cold).await?;
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
        let mut program = self.start_load(target, load)?;
        self.finish(target, &mut program).await
    }

    fn start_load(&mut self, target: &str, load: Load) -> anyhow::Result<Program> {
        if target != self.upstream && target != self.floor {
            self.logged += load.count;
        }
        Program::start("the load", LOAD_CORE, &self.bench, &load.args(target), None)
    }

    async fn finish(&self, target: &str, program: &mut Program) -> anyhow::Result<Report> {
        let mut line = program.line().await?;
        if line == ALL_OPEN {
            line = program.line().await?;
        }
        let report: Report = serde_json::from_str(&line)?;
        ensure!(report.failed == 0, "{} of the requests to {target} failed", report.failed);
        Ok(report)
    }

    /// The CPU time that `program` spends on a load, what it does behind its answers included.
    async fn cost(&mut self, program: &Program, target: &str, load: Load) -> anyhow::Result<(Cpu, Report)> {
        let before = program.cpu_at_rest().await?;
        let report = self.load(target, load).await?;
        Ok((program.cpu_at_rest().await?.since(before), report))
    }

    /// Alternating passes; prints one line for each of the two and returns the ratio of the medians.
    async fn compare(&mut self, pair: &Pair<'_>, passes: usize, load: Load, what: &str) -> anyhow::Result<f64> {
        let floor_at = self.floor.clone();
        let (mut floor, mut ours) = (Vec::new(), Vec::new());
        self.load(&floor_at, Load { count: load.count / 10, ..load }).await?;
        self.load(&pair.ours.address, Load { count: load.count / 10, ..load }).await?;
        for _ in 0..passes {
            floor.push(self.cost(pair.floor, &floor_at, load).await?);
            ours.push(self.cost(&pair.ours.program, &pair.ours.address, load).await?);
        }
        let seconds = |costs: &[(Cpu, Report)], of: &dyn Fn(Cpu) -> f64| median(costs.iter().map(|cost| of(cost.0)).collect());
        for (name, costs) in [("floor", &floor), ("Waybill", &ours)] {
            let rate = median(costs.iter().map(|(_, report)| load.count as f64 * 1e3 / report.elapsed_ms as f64).collect());
            println!(
                "  {what}, {name:<7} {:>6.2} CPU s ({:.2} user, {:.2} system), {rate:>6.0} a second",
                seconds(costs, &Cpu::total),
                seconds(costs, &|cpu| cpu.user),
                seconds(costs, &|cpu| cpu.system),
            );
        }
        Ok(seconds(&ours, &Cpu::total) / seconds(&floor, &Cpu::total))
    }

    async fn chats(&mut self, pair: &Pair<'_>) -> anyhow::Result<f64> {
        let (passes, count) = CHAT_PASSES;
        self.compare(pair, passes, Load { count, ..Load::default() }, "20,000 chats").await
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
                let report = self.load(target, load).await?;
                let added = |through: u64, direct: u64| (through as f64 - direct as f64) / 1e3;
                println!(
                    "  {rate} requests/s, {name:<7} adds {:.2} ms (p50), {:.2} ms (p99)",
                    added(report.p50_us, direct.p50_us),
                    added(report.p99_us, direct.p99_us),
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
        println!("  first content of a stream: {:.2} ms direct, {:.2} floor, {:.2} Waybill", times[0], times[1], times[2]);
        Ok(())
    }

    async fn memory(&mut self, pair: &Pair<'_>) -> anyhow::Result<()> {
        let load = Load { count: OPEN_STREAMS, connections: OPEN_STREAMS, chunks: 20, pace_ms: 100, ..Load::default() };
        for (name, program, target) in
            [("floor", pair.floor, self.floor.clone()), ("Waybill", &pair.ours.program, pair.ours.address.clone())]
        {
            let before = program.rss_mib()?;
            let mut open = self.start_load(&target, load)?;
            ensure!(open.line().await? == ALL_OPEN, "the streams were not open at the same time");
            let during = program.rss_mib()?;
            self.finish(&target, &mut open).await?;
            println!("  memory, {name:<7} {before:>6.1} MiB after the loads, {during:>6.1} under {OPEN_STREAMS} streams");
        }
        Ok(())
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
