//! Overhead, side by side in one run: Waybill with its full log beside the bare pass-through of [`crate::floor`].
//!
//! What is measured is pinned to one core; the upstream and the load share another. The gates compare CPU seconds,
//! as a ratio within the run: absolute numbers belong to one machine on one day. The passes of both alternate, and
//! medians are taken, so that what disturbs the machine disturbs both.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use tokio::time::Instant;

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways, MEASURED_CORE};
use crate::stand::{FACTS_PER_CHAT, LOAD_CORE, Load, Stand, median, print_costs, print_ratio};

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
/// Starts on an empty log.
const COLD_STARTS: usize = 3;

/// Waybill beside the stand.
struct Comparison {
    stand: Stand,
    gateways: Gateways,
}

/// Runs the whole part and returns its gates.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    let part = Comparison { stand: Stand::start().await?, gateways: Gateways::new(waybill)? };
    println!(
        "Overhead: measured on core {MEASURED_CORE}, upstream and load on core {LOAD_CORE}, ratios within this run"
    );

    let cold = part.cold_starts().await?;
    let (ours, _) = part.start("data").await?;
    part.stand.logged.set(0);
    let chats = part.chats(&ours).await?;
    part.paced_chats(&ours).await?;
    let streams = part.streams(&ours).await?;
    part.rates(&ours).await?;
    part.first_content(&ours).await?;
    part.memory(&ours).await?;
    part.restart(ours, cold).await?;
    part.stand.stop().await?;
    Ok(vec![
        Gate::new("overhead/chat-cpu-over-floor", chats, Limit::AtMost(3.0)),
        Gate::new("overhead/stream-cpu-over-floor", streams, Limit::AtMost(1.3)),
    ])
}

impl Comparison {
    /// Starts Waybill on a data folder, and returns it with the time to its first answer.
    async fn start(&self, data: &str) -> anyhow::Result<(Gateway, Duration)> {
        let begun = Instant::now();
        let gateway = self.gateways.start(data, std::slice::from_ref(&self.stand.upstream)).await?;
        self.stand.load(&gateway.address, Load { connections: 1, ..Load::default() }).await?;
        Ok((gateway, begun.elapsed()))
    }

    /// The median time to the first answer of a first start.
    async fn cold_starts(&self) -> anyhow::Result<Duration> {
        let mut times = Vec::new();
        for n in 0..COLD_STARTS {
            let (gateway, time) = self.start(&format!("cold-{n}")).await?;
            gateway.program.stop().await?;
            times.push(time.as_secs_f64());
        }
        Ok(Duration::from_secs_f64(median(times)))
    }

    /// Stops Waybill and starts it again on all that it has logged.
    async fn restart(&self, ours: Gateway, cold: Duration) -> anyhow::Result<()> {
        let facts = self.stand.logged.get() * FACTS_PER_CHAT;
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

    /// Alternating passes; prints what they cost and returns the ratio of the medians.
    async fn compare(&self, ours: &Gateway, passes: usize, load: Load, what: &str) -> anyhow::Result<f64> {
        let (mut floor_costs, mut our_costs) = (Vec::new(), Vec::new());
        for target in [&self.stand.floor_at, &ours.address] {
            self.stand.load(target, Load { count: load.count / 10, ..load }).await?;
        }
        let threads = ours.program.threads()?;
        for _ in 0..passes {
            floor_costs.push(self.stand.cost(&self.stand.floor, &self.stand.floor_at, load).await?);
            our_costs.push(self.stand.cost(&ours.program, &ours.address, load).await?);
        }
        print_costs(what, "floor", &floor_costs);
        print_costs(what, "Waybill", &our_costs);
        let spent = ours.program.threads()?.into_iter().map(|(name, seconds)| {
            let seconds = seconds - threads.get(&name).copied().unwrap_or(0.0);
            format!("{name} {:.2}", seconds / passes as f64)
        });
        println!("    Waybill's threads, CPU s a pass: {}", spent.collect::<Vec<_>>().join(", "));
        Ok(print_ratio(&floor_costs, &our_costs))
    }

    async fn chats(&self, ours: &Gateway) -> anyhow::Result<f64> {
        let (passes, count) = CHAT_PASSES;
        self.compare(ours, passes, Load { count, ..Load::default() }, "20,000 chats").await
    }

    /// The same at one rate for both. Without a rate the floor keeps the load's core awake and Waybill does not, so that
    /// each of its sends also pays for waking it: the ratio says less about Waybill then.
    async fn paced_chats(&self, ours: &Gateway) -> anyhow::Result<f64> {
        let load = Load { count: PACED_CHATS, rate: PACE, ..Load::default() };
        self.compare(ours, CHAT_PASSES.0, load, &format!("{PACED_CHATS} chats at {PACE} a second")).await
    }

    async fn streams(&self, ours: &Gateway) -> anyhow::Result<f64> {
        let (passes, count) = STREAM_PASSES;
        self.compare(ours, passes, Load { count, chunks: CHUNKS, ..Load::default() }, "1,000 streams").await
    }

    /// What a paced load waits longer than it waits for the upstream itself.
    async fn rates(&self, ours: &Gateway) -> anyhow::Result<()> {
        let targets = [("floor", &self.stand.floor_at), ("Waybill", &ours.address)];
        for rate in RATES {
            let load = Load { rate, count: rate * RATE_SECONDS, ..Load::default() };
            let direct = self.stand.load(&self.stand.upstream, load).await?;
            for (name, target) in &targets {
                let report = self.stand.start_load(target, load)?.report().await?;
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

    async fn first_content(&self, ours: &Gateway) -> anyhow::Result<()> {
        let load = Load { count: 200, connections: 1, chunks: 5, ..Load::default() };
        let targets = [&self.stand.upstream, &self.stand.floor_at, &ours.address];
        let mut times = Vec::new();
        for target in &targets {
            times.push(self.stand.load(target, load).await?.first_content_p50_us as f64 / 1e3);
        }
        println!(
            "  first content of a stream: {:.2} ms direct, {:.2} floor, {:.2} Waybill",
            times[0], times[1], times[2]
        );
        Ok(())
    }

    async fn memory(&self, ours: &Gateway) -> anyhow::Result<()> {
        let load = Load { count: OPEN_STREAMS, connections: OPEN_STREAMS, chunks: 20, pace_ms: 100, ..Load::default() };
        for (name, program, target) in
            [("floor", &self.stand.floor, &self.stand.floor_at), ("Waybill", &ours.program, &ours.address)]
        {
            let before = program.rss_mib()?;
            let mut open = self.stand.start_load(target, load)?;
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
