//! The stand: an upstream and a bare pass-through beside Waybill, the loads that they are put under, and what these cost.
//!
//! What is measured is pinned to one core; the upstream and the load share another.

use std::cell::Cell;
use std::path::PathBuf;

use anyhow::ensure;
use tokio::time::Instant;

use crate::gateway::{KEY, MEASURED_CORE, address};
use crate::load::{ALL_OPEN, Report};
use crate::process::{Cpu, Program, busy};

/// The core of the upstream and the load.
pub(crate) const LOAD_CORE: usize = 1;
/// Facts that a chat leaves in the log: selection, attempt, preference, request.
pub(crate) const FACTS_PER_CHAT: usize = 4;
/// The share of the measured core that other programs may take before a comparison is worth nothing.
const OTHERS_MAX: f64 = 0.1;

/// What stands beside Waybill.
pub(crate) struct Stand {
    bench: PathBuf,
    upstream_program: Program,
    /// The bare pass-through.
    pub(crate) floor: Program,
    /// Where the upstream listens.
    pub(crate) upstream: String,
    /// Where the bare pass-through listens.
    pub(crate) floor_at: String,
    /// Chats that went to Waybill's log.
    pub(crate) logged: Cell<usize>,
}

impl Stand {
    /// Starts both programs.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let bench = std::env::current_exe()?;
        let mut upstream_program = Program::start("the upstream", LOAD_CORE, &bench, &["upstream".into()], None)?;
        let upstream = address(&upstream_program.line().await?)?;
        let mut floor = Program::start("the floor", MEASURED_CORE, &bench, &["floor".into(), upstream.clone()], None)?;
        let floor_at = address(&floor.line().await?)?;
        Ok(Self { bench, upstream_program, floor, upstream, floor_at, logged: Cell::new(0) })
    }

    /// Stops both programs.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.floor.stop().await?;
        self.upstream_program.stop().await?;
        Ok(())
    }

    /// Runs a load to its end; every request must be answered.
    pub(crate) async fn load(&self, target: &str, load: Load) -> anyhow::Result<Report> {
        let report = self.start_load(target, load)?.report().await?;
        ensure!(report.failed == 0, "{} of {} requests to {target} failed", report.failed, load.count);
        Ok(report)
    }

    /// Starts a load.
    pub(crate) fn start_load(&self, target: &str, load: Load) -> anyhow::Result<Loading> {
        if target != self.upstream && target != self.floor_at {
            self.logged.set(self.logged.get() + load.count);
        }
        Ok(Loading(Program::start("the load", LOAD_CORE, &self.bench, &load.args(target), None)?))
    }

    /// What `program` spends on a load, what it does behind its answers included.
    pub(crate) async fn cost(&self, program: &Program, target: &str, load: Load) -> anyhow::Result<Cost> {
        let before = program.cpu_at_rest().await?;
        let (begun, busy_before) = (Instant::now(), busy(MEASURED_CORE)?);
        let report = self.load(target, load).await?;
        let cpu = program.cpu_at_rest().await?.since(before);
        let others = (busy(MEASURED_CORE)? - busy_before - cpu.total()) / begun.elapsed().as_secs_f64();
        Ok(Cost { cpu, rate: load.count as f64 * 1e3 / report.elapsed_ms as f64, others })
    }
}

/// What one pass cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// CPU time.
    pub(crate) cpu: Cpu,
    /// Requests a second.
    pub(crate) rate: f64,
    /// The share of the core that others took.
    pub(crate) others: f64,
}

/// The median of one measure of the passes.
pub(crate) fn median_of(costs: &[Cost], of: impl Fn(&Cost) -> f64) -> f64 {
    median(costs.iter().map(of).collect())
}

/// Prints the medians of the passes of one of the compared.
pub(crate) fn print_costs(what: &str, name: &str, costs: &[Cost]) {
    println!(
        "  {what}, {name:<7} {:>6.2} CPU s ({:.2} user, {:.2} system), {:>6.0} a second",
        median_of(costs, |cost| cost.cpu.total()),
        median_of(costs, |cost| cost.cpu.user),
        median_of(costs, |cost| cost.cpu.system),
        median_of(costs, |cost| cost.rate),
    );
}

/// Prints and returns the ratio of the medians, with a word of doubt where the machine was not ours.
pub(crate) fn print_ratio(floor: &[Cost], ours: &[Cost]) -> f64 {
    let total = |cost: &Cost| cost.cpu.total();
    let best = |costs: &[Cost]| costs.iter().map(total).fold(f64::INFINITY, f64::min);
    let ratio = median_of(ours, total) / median_of(floor, total);
    println!("    ratio of the medians {ratio:.2}, of the cheapest passes {:.2}", best(ours) / best(floor));
    print_doubt(&[floor, ours].concat());
    ratio
}

/// Says it where other programs took too much of the measured core.
pub(crate) fn print_doubt(costs: &[Cost]) {
    let others = median_of(costs, |cost| cost.others);
    if others > OTHERS_MAX {
        println!("    other programs took {:.0} % of core {MEASURED_CORE}: do not trust this", others * 1e2);
    }
}

/// A load under way.
pub(crate) struct Loading(Program);

impl Loading {
    /// Waits until every connection has the first content of a stream.
    pub(crate) async fn all_open(&mut self) -> anyhow::Result<()> {
        let line = self.0.line().await?;
        ensure!(line == ALL_OPEN, "the streams were not open at the same time: {line}");
        Ok(())
    }

    /// Waits for the end.
    pub(crate) async fn report(mut self) -> anyhow::Result<Report> {
        let mut line = self.0.line().await?;
        if line == ALL_OPEN {
            line = self.0.line().await?;
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// A load, as the load generator takes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests in all.
    pub(crate) count: usize,
    /// Connections.
    pub(crate) connections: usize,
    /// Requests a second; 0 for as many as get through.
    pub(crate) rate: usize,
    /// Chunks of a stream; 0 for plain answers.
    pub(crate) chunks: usize,
    /// Milliseconds between two chunks.
    pub(crate) pace_ms: usize,
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
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
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
