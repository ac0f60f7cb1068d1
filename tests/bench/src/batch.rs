//! How long a batch of catalogue changes takes to three gateways: from the start of `waybill apply`, the program's own
//! start included, to the moment at which the last of them has it in force.

use std::path::Path;

use tokio::time::Instant;
use waybill_servers::nats::{Nats, Options};

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways};
use crate::stand::median;

const GATEWAYS: usize = 3;
/// Batches, one after the other.
const BATCHES: u64 = 10;
/// Seconds that a batch may take (issue 3).
const SECONDS_MAX: f64 = 1.0;

/// Runs the whole part and returns its gate.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    let nats = tokio::task::spawn_blocking(|| Nats::start(&Options::default())).await?;
    let gateways = Gateways::new(waybill)?;
    let mut running = Vec::new();
    for n in 0..GATEWAYS {
        // Nothing is sent, so the upstream need not be there.
        running.push(gateways.start_on(&nats.url(), &format!("gw-{n}"), &["127.0.0.1:9".to_owned()]).await?);
    }
    let mut times = Vec::new();
    let mut name = "Bench".to_owned();
    for batch in 1..=BATCHES {
        let next = format!("Bench {batch}");
        gateways.rename(&name, &next)?;
        name = next;
        let begun = Instant::now();
        gateways.apply().await?;
        for gateway in &running {
            reaches(gateway, batch + 1).await?;
        }
        times.push(begun.elapsed().as_secs_f64());
    }
    for gateway in running {
        gateway.program.stop().await?;
    }
    let longest = times.iter().copied().fold(0.0, f64::max);
    println!(
        "Batch: {BATCHES} batches reach {GATEWAYS} gateways in {:.3} s (median), {longest:.3} s (longest)",
        median(times)
    );
    Ok(vec![Gate::new("batch/seconds-to-three-gateways", longest, Limit::AtMost(SECONDS_MAX))])
}

async fn reaches(gateway: &Gateway, revision: u64) -> anyhow::Result<()> {
    while gateway.revision().await? < revision {
        tokio::task::yield_now().await;
    }
    Ok(())
}
