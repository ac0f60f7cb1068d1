//! Programs under measurement: started on one core, looked at through `/proc`, and ended with the bench.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{Instant, interval, timeout};

/// Ticks of `/proc/PID/stat` in a second: USER_HZ, 100 on every Linux that Rust supports.
const TICKS_PER_SECOND: f64 = 100.0;
/// How long a program may take to say its first line, or to end when asked.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a program that works off a backlog is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Looks without any CPU time after which a program counts as at rest.
const QUIET_LOOKS: u32 = 3;
/// Looks after which it is not waited for any longer.
const LOOKS_MAX: u32 = 100;

/// A running program; dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Program {
    name: &'static str,
    child: Child,
    pid: u32,
    lines: Lines<BufReader<ChildStdout>>,
}

/// CPU time of a program and its descendants, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cpu {
    /// In the program itself.
    pub(crate) user: f64,
    /// In the kernel on its behalf.
    pub(crate) system: f64,
}

impl Cpu {
    /// Both.
    pub(crate) fn total(self) -> f64 {
        self.user + self.system
    }

    /// The time since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self { user: self.user - earlier.user, system: self.system - earlier.system }
    }
}

/// The CPU time that this process has used so far.
pub(crate) fn own_cpu() -> anyhow::Result<Cpu> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    parse_stat(&stat).context("/proc/self/stat cannot be read")
}

impl Program {
    /// Starts `binary` on `core`; its error output goes to `log`, or is ours where there is none.
    pub(crate) fn start(
        name: &'static str,
        core: usize,
        binary: &Path,
        args: &[String],
        log: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("taskset");
        command.arg("-c").arg(core.to_string()).arg(binary).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        if let Some(log) = log {
            command.stderr(std::fs::OpenOptions::new().create(true).append(true).open(log)?);
        }
        let mut child = command.spawn().context("taskset cannot be started")?;
        let pid = child.id().context("the program has already ended")?;
        let lines = BufReader::new(child.stdout.take().context("no standard output")?).lines();
        Ok(Self { name, child, pid, lines })
    }

    /// The next line that the program says.
    pub(crate) async fn line(&mut self) -> anyhow::Result<String> {
        let line = timeout(PATIENCE, self.lines.next_line()).await;
        let line = line.with_context(|| format!("{} says nothing", self.name))??;
        line.with_context(|| format!("{} ended without a word", self.name))
    }

    /// The CPU time used so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Cpu> {
        tree(self.pid).into_iter().try_fold(Cpu::default(), |sum, pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
            let cpu = parse_stat(&stat).with_context(|| format!("/proc/{pid}/stat cannot be read"))?;
            Ok(Cpu { user: sum.user + cpu.user, system: sum.system + cpu.system })
        })
    }

    /// Waits until the program has worked off what it does behind its answers, and returns the CPU time by then.
    pub(crate) async fn cpu_at_rest(&self) -> anyhow::Result<Cpu> {
        let mut look = interval(LOOK);
        let (mut last, mut quiet) = (self.cpu()?, 0);
        for _ in 0..LOOKS_MAX {
            look.tick().await;
            let now = self.cpu()?;
            quiet = if now.since(last).total() > 0.0 { 0 } else { quiet + 1 };
            last = now;
            if quiet > QUIET_LOOKS {
                break;
            }
        }
        Ok(last)
    }

    /// The CPU time of each kind of thread of the program itself, in seconds, by the threads' name.
    pub(crate) fn threads(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let mut seconds = BTreeMap::new();
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.pid))? {
            // A thread may end while it is looked at.
            let Ok(stat) = std::fs::read_to_string(thread?.path().join("stat")) else { continue };
            let name = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')).map_or("", |(name, _)| name);
            *seconds.entry(name.to_owned()).or_default() += parse_stat(&stat).map_or(0.0, Cpu::total);
        }
        Ok(seconds)
    }

    /// Resident memory, in MiB.
    pub(crate) fn rss_mib(&self) -> anyhow::Result<f64> {
        tree(self.pid).into_iter().try_fold(0.0, |sum, pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            let kib =
                status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
            Ok(sum + kib.unwrap_or(0.0) / 1024.0)
        })
    }

    /// Asks the program to end, waits for it, and returns how long that took.
    pub(crate) async fn stop(mut self) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        Command::new("kill").arg(self.pid.to_string()).status().await.context("kill cannot be started")?;
        match timeout(PATIENCE, self.child.wait()).await {
            Ok(ended) => ended.map(|_| begun.elapsed()).context("the program cannot be waited for"),
            Err(_) => bail!("{} does not end when asked", self.name),
        }
    }
}

/// The time for which `core` has been busy since the machine started, whoever used it, in seconds.
pub(crate) fn busy(core: usize) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    parse_busy(&stat, core).with_context(|| format!("/proc/stat says nothing of core {core}"))
}

/// User, nice and system time of `core`, which are the first three numbers of its line.
fn parse_busy(stat: &str, core: usize) -> Option<f64> {
    let name = format!("cpu{core}");
    let line = stat.lines().find(|line| line.split_whitespace().next() == Some(&name))?;
    let ticks = line.split_whitespace().skip(1).take(3).map(|ticks| ticks.parse::<f64>().ok());
    Some(ticks.sum::<Option<f64>>()? / TICKS_PER_SECOND)
}

/// `pid` and its descendants.
fn tree(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        next += 1;
    }
    found
}

/// The times in a line of `/proc/PID/stat`: fields 14 and 15, counted behind the name, which may hold anything.
fn parse_stat(stat: &str) -> Option<Cpu> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut ticks = behind_name.split_whitespace().skip(11).map(str::parse::<f64>);
    let mut seconds = || Some(ticks.next()?.ok()? / TICKS_PER_SECOND);
    Some(Cpu { user: seconds()?, system: seconds()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_are_found_behind_any_name() {
        let line = "42 (a) b c) S 1 42 42 0 -1 4194560 100 0 0 0 250 75 0 0 20 0 3 0 12345";
        let cpu = parse_stat(line).expect("a whole line");
        assert_eq!((cpu.user, cpu.system), (2.5, 0.75));
    }
    #[test]
    fn a_core_is_busy_for_others_too() {
        let stat = "cpu  900 0 0 0\ncpu0 100 20 30 5000 7\ncpu1 800 0 1 2\ncpu10 1 1 1 0\n";
        let check = |core, seconds| assert_eq!(parse_busy(stat, core), seconds);
        check(0, Some(1.5));
        check(1, Some(8.01));
        check(2, None);
    }
}
