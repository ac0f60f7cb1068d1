//! `waybill`: the one binary. Composition and command line; everything it does is done in the other crates.

mod admin;
mod apply;
mod archive;
mod audit;
mod auditor;
mod catalogue;
mod check;
mod chore;
mod data;
mod demo;
mod doctor;
mod explain;
mod follow;
mod gateway;
mod health;
mod logs;
mod progress;
mod projector;
mod rebuild;
mod route;
mod service;
mod sessions;
mod simulator;
mod state;
mod spending;
mod table;
mod trail;
mod up;
mod verify;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// A request makes some seventy small allocations, and another thread frees what of them are facts a thousand requests
/// later. jemalloc keeps its free lists beside the blocks, which are cold by then.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// An LLM gateway whose every routing decision and outcome is a fact on an append-only log.
#[derive(Parser)]
#[command(name = "waybill", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run everything in one process; without a file, a demo over two simulated providers
    Up(up::Args),
    /// Run one gateway of many, on a log in NATS JetStream
    Gateway(gateway::Args),
    /// Keep the catalogue of many gateways at what a file says
    Auditor(auditor::Args),
    /// Fold the log of many gateways into Postgres
    Projector(projector::Args),
    /// Validate a configuration file: all errors at once, each with its line and field
    Check(check::Args),
    /// Bring the catalogue to a configuration file, and show the difference
    Apply(apply::Args),
    /// List and undo the batches that made the catalogue
    Catalogue(catalogue::Args),
    /// Tell why a request went where it went
    Explain(explain::Args),
    /// Tell where a request would go now, without any side effect
    Route(route::Args),
    /// List sessions, or the rounds of one
    Sessions(sessions::Args),
    /// Show cooldowns and blocks: which members, until when, and why
    Health(health::Args),
    /// Tell what an acknowledgement of the log means: what it survives on this server, and what not
    Doctor(doctor::Args),
    /// Check the log, and what the stores hold against it, row by row and key by key
    Verify(verify::Args),
    /// Make what the stores hold anew from the log, beside what is there, and swap
    Rebuild(rebuild::Args),
    /// Show pins, cooldowns, blocks and digests as the log says they were at a moment
    State(state::Args),
    /// Close what the log holds as verified files
    Archive(archive::Args),
    /// Run a simulated upstream with a prompt cache, scripted faults and a call log
    Simulator(simulator::Args),
    /// Print shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Where the embedded log and its stores are.
#[derive(clap::Args, Clone, Debug)]
struct DataDir {
    /// The folder of the embedded log and its stores
    #[arg(long, env = "WAYBILL_DATA", default_value = "waybill-data", value_name = "DIR")]
    data: PathBuf,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Up(args) => up::run(args),
        Command::Gateway(args) => gateway::run(args),
        Command::Auditor(args) => auditor::run(args),
        Command::Projector(args) => projector::run(args),
        Command::Check(args) => check::run(&args),
        Command::Apply(args) => apply::run(&args),
        Command::Catalogue(args) => catalogue::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Route(args) => route::run(&args),
        Command::Sessions(args) => sessions::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Rebuild(args) => rebuild::run(&args),
        Command::State(args) => state::run(&args),
        Command::Archive(args) => archive::run(&args),
        Command::Simulator(args) => simulator::run(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "waybill", &mut std::io::stdout());
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("waybill: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the reader of our output, such as `head`, has seen enough.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
