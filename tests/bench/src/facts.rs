//! What a fact costs the gateway: its CPU beyond that of the bare pass-through at the same rate, shared out over the facts
//! that it left in the log, on both logs.
//!
//! Beside it stand two baselines over the very lines of that log: only decoding them, and only writing them to a file
//! in the pieces in which a request records them. What a fact costs more than both is making, sealing and shipping it,
//! and, where the log is embedded, folding it into rows.

use std::io::Write;
use std::path::Path;

use anyhow::ensure;
use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::log::{Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_schema::frame::{Frame, Line};
use waybill_servers::nats::{Nats, Options};

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways};
use crate::process::own_cpu;
use crate::stand::{Cost, FACTS_PER_CHAT, Load, Stand, median_of, print_doubt};

/// Requests a second (issue 3).
const RATE: usize = 3000;
/// Alternating passes, and seconds of each.
const PASSES: usize = 3;
const SECONDS: usize = 4;
/// CPU microseconds that a fact may cost the gateway (issue 3).
const FACT_US_MAX: f64 = 20.0;
/// How often the baselines go over the lines: the system counts CPU time in steps of 10 ms.
const ROUNDS: usize = 4;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 64;
/// The stream of a gateway whose configuration names none.
const STREAM: &str = "WAYBILL";
const US_PER_SECOND: f64 = 1e6;

/// Runs the whole part and returns its gates.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    println!("Facts: gateway CPU at {RATE} requests/s, {FACTS_PER_CHAT} facts each, beyond the bare pass-through");
    let (stand, gateways) = (Stand::start().await?, Gateways::new(waybill)?);
    let upstream = std::slice::from_ref(&stand.upstream);

    let ours = gateways.start("facts", upstream).await?;
    let embedded = measure(&stand, ours, "embedded").await?;
    let path = gateways.data("facts").join("waybill.db");
    baselines(&mut SqliteLog::open_read_only(&path)?)?;

    let nats = tokio::task::spawn_blocking(|| Nats::start(&Options::default())).await?;
    let ours = gateways.start_on(&nats.url(), "many", upstream).await?;
    let jetstream = measure(&stand, ours, "JetStream").await?;
    let settings = Settings { servers: vec![nats.url()], stream: STREAM.into(), replicas: 1, bytes_max: 1 << 30 };
    tokio::task::spawn_blocking(move || baselines(&mut JetstreamLog::new(settings)?)).await??;
    stand.stop().await?;
    Ok(vec![
        Gate::new("facts/embedded-us-per-fact", embedded, Limit::AtMost(FACT_US_MAX)),
        Gate::new("facts/jetstream-us-per-fact", jetstream, Limit::AtMost(FACT_US_MAX)),
    ])
}

/// Loads the floor and `ours` in turn, stops `ours`, and gives the microseconds for a fact.
async fn measure(stand: &Stand, ours: Gateway, log: &str) -> anyhow::Result<f64> {
    let load = Load { count: RATE * SECONDS, rate: RATE, ..Load::default() };
    let (mut floor_costs, mut our_costs): (Vec<Cost>, Vec<Cost>) = (Vec::new(), Vec::new());
    for target in [&stand.floor_at, &ours.address] {
        stand.load(target, Load { count: RATE, ..load }).await?;
    }
    for _ in 0..PASSES {
        floor_costs.push(stand.cost(&stand.floor, &stand.floor_at, load).await?);
        our_costs.push(stand.cost(&ours.program, &ours.address, load).await?);
    }
    let rate = median_of(&our_costs, |cost| cost.rate);
    ours.program.stop().await?;
    let facts = (load.count * FACTS_PER_CHAT) as f64;
    let us = |costs: &[Cost]| median_of(costs, |cost| cost.cpu.total()) * US_PER_SECOND / facts;
    let (whole, floor) = (us(&our_costs), us(&floor_costs));
    println!("  {log:<9} {:>5.1} us a fact, of {whole:.1} with the proxying; {rate:.0} requests/s", whole - floor);
    print_doubt(&[floor_costs, our_costs].concat());
    Ok(whole - floor)
}

/// Decodes, and writes, every line of `log`; prints what that takes for a fact.
fn baselines(log: &mut dyn Log) -> anyhow::Result<()> {
    let lines = lines(log)?;
    ensure!(!lines.is_empty(), "the log is empty");
    let per_fact = |cpu: f64| cpu * US_PER_SECOND / (lines.len() * ROUNDS) as f64;
    let before = own_cpu()?;
    for line in lines.iter().cycle().take(lines.len() * ROUNDS) {
        Line::parse(line)?;
    }
    let decoded = per_fact(own_cpu()?.since(before).total());

    let (before, mut file) = (own_cpu()?, tempfile::tempfile()?);
    // A request writes its selection before it sends, and the rest at its end.
    for (place, line) in lines.iter().cycle().take(lines.len() * ROUNDS).enumerate() {
        match place % FACTS_PER_CHAT {
            0 => file.write_all(line)?,
            1 => {
                let rest = (place..place + FACTS_PER_CHAT - 1).map(|place| &lines[place % lines.len()][..]);
                file.write_all(&rest.collect::<Vec<_>>().concat())?;
            }
            _ => {}
        }
    }
    let written = per_fact(own_cpu()?.since(before).total());
    println!("    baselines over its lines: only decoding {decoded:.1} us a fact, only writing {written:.1}");
    Ok(())
}

fn lines(log: &mut dyn Log) -> anyhow::Result<Vec<Vec<u8>>> {
    let (mut lines, mut after) = (Vec::new(), Seq::START);
    loop {
        let frames = log.read(after, READ_FRAMES_MAX)?;
        let Some(newest) = frames.last() else { return Ok(lines) };
        after = newest.seq;
        for stored in frames {
            lines.extend(Frame::parse(stored.bytes)?.lines().map(<[u8]>::to_vec));
        }
    }
}
