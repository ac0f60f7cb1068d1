//! `waybill-bench`: prompt-cache hits on real traces, overhead beside a bare pass-through, and a live replay.
//!
//! Each part prints what it measured; the gates follow at the end, one line each, and a gate that fails makes the
//! exit code 1. The programs that the overhead part needs beside Waybill are further subcommands of this binary.

mod cache;
mod core;
mod draws;
mod floor;
mod gate;
mod gateway;
mod live;
mod load;
mod overhead;
mod prefix;
mod process;
mod trace;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::{Parser, Subcommand};
use tokio::runtime::Builder;
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

/// The longest run of all parts; a bench that hangs is ended, with all that it has started.
const RUN_TIME_MAX: Duration = Duration::from_secs(360);

fn main() -> anyhow::Result<ExitCode> {
    let one_core = || Builder::new_current_thread().enable_all().build();
    let gates = match Cli::parse().command {
        // As many workers as the process may use cores: what Waybill has, too.
        Command::Floor { upstream } => {
            Builder::new_multi_thread().enable_all().build()?.block_on(floor::serve(upstream))?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Upstream => {
            one_core()?.block_on(upstream::serve())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Load(args) => {
            one_core()?.block_on(load::run(args))?;
            return Ok(ExitCode::SUCCESS);
        }
        command => one_core()?.block_on(measure(command))?,
    };
    println!();
    gates.iter().for_each(|gate| println!("{gate}"));
    Ok(if gates.iter().all(Gate::holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the parts, unless the time is over or a signal comes first: either way the programs end with the bench.
async fn measure(command: Command) -> anyhow::Result<Vec<Gate>> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        gates = parts(command) => gates,
        () = tokio::time::sleep_until(Instant::now() + RUN_TIME_MAX) => bail!("the bench took too long"),
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

async fn parts(command: Command) -> anyhow::Result<Vec<Gate>> {
    match command {
        Command::Cache(place) => cache::run(&place.traces),
        Command::Overhead(place) => overhead::run(&place.waybill).await,
        Command::Live(place) => live::run(&place.traces, &place.waybill).await.map(|()| Vec::new()),
        Command::All(place) => {
            let mut gates = cache::run(&place.traces)?;
            println!();
            live::run(&place.traces, &place.waybill).await?;
            println!();
            gates.extend(overhead::run(&place.waybill).await?);
            Ok(gates)
        }
        Command::Floor { .. } | Command::Upstream | Command::Load(_) => Ok(Vec::new()),
    }
}
