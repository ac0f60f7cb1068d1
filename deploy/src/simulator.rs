//! `waybill simulator`: one simulated upstream on an address, told by a script how to misbehave.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use tokio::net::TcpListener;
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Control, Settings, Simulator};

/// Run a simulated upstream.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Where to listen
    #[arg(long, default_value = "127.0.0.1:4001", value_name = "ADDR")]
    listen: SocketAddr,
    /// The name that its answers carry
    #[arg(long, default_value = "sim")]
    name: String,
    /// A script: the JSON that `POST /__control` takes
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(simulate(args))
}

async fn simulate(args: &Args) -> anyhow::Result<()> {
    let simulator = Simulator::new(Settings { cache: CacheModel::open_ai(), ..Settings::named(&args.name) });
    if let Some(file) = &args.script {
        let text = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let control: Control = serde_json::from_slice(&text).with_context(|| format!("{}", file.display()))?;
        simulator.apply(control);
    }
    let listener = TcpListener::bind(args.listen).await.context("the listening address cannot be had")?;
    println!("simulator {} is up at http://{}; its call log is at /__calls", args.name, listener.local_addr()?);
    tokio::select! {
        served = waybill_simulator::serve(listener, simulator) => served?,
        _ = tokio::signal::ctrl_c() => {}
    }
    Ok(())
}
