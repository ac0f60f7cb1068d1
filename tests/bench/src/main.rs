//! `waybill-bench`: prompt-cache hits on real traces, overhead beside a bare pass-through, and a live replay.
//!
//! Each part prints what it measured; the gates follow at the end, one line each, and a gate that fails makes the
//! exit code 1. The programs that the overhead part needs beside Waybill are further subcommands of this binary.

mod cache;
mod core;
mod draws;
mod floor;
mod gate;
mod prefix;
mod trace;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::runtime::Builder;

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
    /// A bare pass-through to UPSTREAM
    #[command(hide = true)]
    Floor {
        upstream: SocketAddr,
    },
    /// An upstream of fixed answers
    #[command(hide = true)]
    Upstream,
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

fn main() -> anyhow::Result<ExitCode> {
    let gates = match Cli::parse().command {
        Command::All(place) | Command::Cache(place) => cache::run(&place.traces)?,
        Command::Floor { upstream } => {
            Builder::new_multi_thread().enable_all().build()?.block_on(floor::serve(upstream))?;
            Vec::new()
        }
        Command::Upstream => {
            Builder::new_current_thread().enable_all().build()?.block_on(upstream::serve())?;
            Vec::new()
        }
    };
    println!();
    gates.iter().for_each(|gate| println!("{gate}"));
    Ok(if gates.iter().all(Gate::holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
