//! `waybill-bench`: prompt-cache hits on real traces, overhead beside a bare pass-through, a rebuild, and a live replay.
//!
//! Each part prints what it measured; the gates follow at the end, one line each, and a gate that fails makes the
//! exit code 1. The programs that the overhead part needs beside Waybill are further subcommands of this binary.

mod audit;
mod batch;
mod cache;
mod draws;
mod facts;
mod floor;
mod frozen;
mod gate;
mod gateway;
mod live;
mod load;
mod overhead;
mod prefix;
mod process;
mod rebuild;
mod routing;
mod stand;
mod trace;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::gate::Gate;

/// Measures Waybill.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything, then the gates
    All(Where),
    /// Prompt-cache hits on real traces, in virtual time
    Cache(Where),
    /// CPU, latency and memory beside a bare pass-through
    Overhead(Where),
    /// CPU of the gateway for a fact, on both logs, beside only decoding and only writing it
    Facts(Where),
    /// How long a batch of catalogue changes takes to three gateways
    Batch(Where),
    /// Pages of sessions and rounds over a million requests, on both stores, and by which plans
    Audit(Where),
    /// What chats wait for a Redis that is frozen, beside one that is well
    Frozen(Where),
    /// CPU of folding a log of three million facts into Postgres, beside decoding and copying alone
    Rebuild(Where),
    /// A short replay through a real gateway over simulated providers
    Live(Where),
    /// A bare pass-through to UPSTREAM
    #[command(hide = true)]
    Floor { upstream: SocketAddr },
    /// An upstream of fixed answers
    #[command(hide = true)]
    Upstream,
    /// A load of chats or streams
    #[command(hide = true)]
    Load(load::Args),
}

/// Where things lie.
#[derive(clap::Args)]
struct Where {
    /// The folder of the traces
    #[arg(long, default_value = "../shared/traces")]
    traces: PathBuf,
    /// The binary to measure
    #[arg(long, default_value = "target/release/waybill")]
    waybill: PathBuf,
}

/// The longest run of a part; one that hangs is ended, with all that it has started.
const PART_TIME_MAX: Duration = Duration::from_secs(300);

fn main() -> anyhow::Result<ExitCode> {
    let gates = match Cli::parse().command {
        // As many workers as the process may use cores: what Waybill has, too.
        Command::Floor { upstream } => {
            return serve(&Builder::new_multi_thread().enable_all().build()?, floor::serve(upstream));
        }
        Command::Upstream => return serve(&one_core()?, upstream::serve()),
        Command::Load(args) => return serve(&one_core()?, load::run(args)),
        Command::Cache(place) => cache::run(&place.traces)?,
        Command::Live(place) => guarded(live::run(&place.traces, &place.waybill))?,
        Command::Overhead(place) => guarded(overhead::run(&place.waybill))?,
        Command::Facts(place) => guarded(facts::run(&place.waybill))?,
        Command::Batch(place) => guarded(batch::run(&place.waybill))?,
        Command::Audit(_) => audit::run()?,
        Command::Frozen(place) => guarded(frozen::run(&place.waybill))?,
        Command::Rebuild(_) => guarded(rebuild::run())?,
        Command::All(place) => all(&place)?,
    };
    println!();
    gates.iter().for_each(|gate| println!("{gate}"));
    Ok(if gates.iter().all(Gate::holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn all(place: &Where) -> anyhow::Result<Vec<Gate>> {
    let mut gates = cache::run(&place.traces)?;
    println!();
    gates.extend(guarded(live::run(&place.traces, &place.waybill))?);
    println!();
    gates.extend(guarded(overhead::run(&place.waybill))?);
    println!();
    gates.extend(guarded(facts::run(&place.waybill))?);
    println!();
    gates.extend(guarded(batch::run(&place.waybill))?);
    println!();
    gates.extend(audit::run()?);
    println!();
    gates.extend(guarded(frozen::run(&place.waybill))?);
    println!();
    gates.extend(guarded(rebuild::run())?);
    Ok(gates)
}

fn one_core() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn serve(runtime: &Runtime, program: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    runtime.block_on(program).map(|()| ExitCode::SUCCESS)
}

/// Runs a part that starts programs, unless its time is over or a signal comes first: the programs end with it.
fn guarded(part: impl Future<Output = anyhow::Result<Vec<Gate>>>) -> anyhow::Result<Vec<Gate>> {
    one_core()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            gates = part => gates,
            () = tokio::time::sleep_until(Instant::now() + PART_TIME_MAX) => bail!("the bench took too long"),
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    })
}
