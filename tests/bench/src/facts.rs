//! What a fact costs the gateway, at 3,000 requests a second, on both logs.
//!
//! The facts of a real run are recorded again, at that rate, by the parts that record them in a gateway: the ledger (with
//! the routing state), the spool and the shipper, over the embedded log with its rows and over JetStream. Of the CPU of
//! this process what the pacing itself takes is subtracted, and the rest is shared out over the facts. Beside it stand
//! two baselines over the same lines: only decoding them, and only writing them to a file in the pieces in which a
//! request records them; and, from the real run, what the whole gateway spends beyond the bare pass-through.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::time::{MissedTickBehavior, interval};
use waybill_events::handover::Handover;
use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::log::{Log, Seq};
use waybill_events::shipper::Shipper;
use waybill_events::spool::{self, Spool};
use waybill_events::sqlite::SqliteLog;
use waybill_gateway::ledger::Ledger;
use waybill_projections::usage::request_of;
use waybill_projector::embedded;
use waybill_routing::state::State;
use waybill_schema::event::{Event, Started};
use waybill_schema::frame::{Frame, Line};
use waybill_schema::id::RequestId;
use waybill_schema::time::Time;
use waybill_servers::nats::{Nats, Options};

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways};
use crate::process::own_cpu;
use crate::stand::{Cost, FACTS_PER_CHAT, Load, Stand, median_of, print_doubt};

/// Requests a second (issue 3).
const RATE: usize = 3000;
/// Alternating passes of the real run, and seconds of each.
const PASSES: usize = 3;
const SECONDS: usize = 4;
/// CPU microseconds that a fact may cost the gateway (issue 3).
const FACT_US_MAX: f64 = 20.0;
/// How often the baselines go over the lines: the system counts CPU time in steps of 10 ms.
const ROUNDS: usize = 4;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 64;
/// The time between two steps of the paced recording.
const STEP: Duration = Duration::from_millis(2);
/// How long the last facts may take to the log.
const SHIP_TIME: Duration = Duration::from_secs(30);
const MS_PER_SECOND: usize = 1000;
const US_PER_SECOND: f64 = 1e6;

/// What one request recorded: before its send, and at its end.
#[derive(Default)]
struct Recorded {
    before: Vec<Event>,
    after: Vec<Event>,
}

/// Runs the whole part and returns its gates.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    println!("Facts: CPU at {RATE} requests/s, {FACTS_PER_CHAT} facts each");
    let (stand, gateways) = (Stand::start().await?, Gateways::new(waybill)?);
    let ours = gateways.start("facts", std::slice::from_ref(&stand.upstream)).await?;
    whole_gateway(&stand, ours).await?;
    stand.stop().await?;
    let lines = lines(&mut SqliteLog::open_read_only(&gateways.data("facts").join("waybill.db"))?)?;
    baselines(&lines)?;
    let requests = requests(&lines)?;

    let pacing = paced(&requests, |_| {}).await?;
    let folder = tempfile::tempdir()?;
    let (log, start) = embedded::open(&folder.path().join("waybill.db"))?;
    let embedded = record(&requests, &folder.path().join("embedded"), log, Some(start.handover)).await? - pacing;
    println!("  embedded  {embedded:>5.1} us a fact");
    let nats = tokio::task::spawn_blocking(|| Nats::start(&Options::default())).await?;
    let settings =
        Settings { servers: vec![nats.url()], stream: "WAYBILL".to_owned(), replicas: 1, bytes_max: 1 << 30 };
    let log = tokio::task::spawn_blocking(|| JetstreamLog::new(settings)).await??;
    let jetstream = record(&requests, &folder.path().join("jetstream"), log, None).await? - pacing;
    println!("  JetStream {jetstream:>5.1} us a fact; the pacing took {pacing:.1}, which is subtracted");
    Ok(vec![
        Gate::new("facts/embedded-us-per-fact", embedded, Limit::AtMost(FACT_US_MAX)),
        Gate::new("facts/jetstream-us-per-fact", jetstream, Limit::AtMost(FACT_US_MAX)),
    ])
}

/// Loads the floor and `ours` in turn, prints what `ours` spends beyond the floor for a fact, and stops it.
async fn whole_gateway(stand: &Stand, ours: Gateway) -> anyhow::Result<()> {
    let load = Load { count: RATE * SECONDS, rate: RATE, ..Load::default() };
    let (mut floor_costs, mut our_costs): (Vec<Cost>, Vec<Cost>) = (Vec::new(), Vec::new());
    for _ in 0..PASSES {
        floor_costs.push(stand.cost(&stand.floor, &stand.floor_at, load).await?);
        our_costs.push(stand.cost(&ours.program, &ours.address, load).await?);
    }
    ours.program.stop().await?;
    let facts = (load.count * FACTS_PER_CHAT) as f64;
    let us = |costs: &[Cost]| median_of(costs, |cost| cost.cpu.total()) * US_PER_SECOND / facts;
    let (whole, floor) = (us(&our_costs), us(&floor_costs));
    println!("  the whole gateway spends {whole:.1} us a fact, the bare pass-through {floor:.1}");
    print_doubt(&[floor_costs, our_costs].concat());
    Ok(())
}

/// Decodes, and writes, every line; prints what that takes for a fact.
fn baselines(lines: &[Vec<u8>]) -> anyhow::Result<()> {
    ensure!(!lines.is_empty(), "the log is empty");
    let per_fact = |cpu: f64| cpu * US_PER_SECOND / (lines.len() * ROUNDS) as f64;
    let before = own_cpu()?;
    for line in lines.iter().cycle().take(lines.len() * ROUNDS) {
        Line::parse(line)?;
    }
    let decoded = per_fact(own_cpu()?.since(before).total());

    let (before, mut file) = (own_cpu()?, tempfile::tempfile()?);
    // A request writes its selection before it sends, and the rest at its end.
    for chat in lines.iter().cycle().take(lines.len() * ROUNDS).collect::<Vec<_>>().chunks(FACTS_PER_CHAT) {
        let (first, rest) = chat.split_at(1);
        file.write_all(first[0])?;
        file.write_all(&rest.iter().map(|line| &line[..]).collect::<Vec<_>>().concat())?;
    }
    let written = per_fact(own_cpu()?.since(before).total());
    println!("  baselines over its lines: only decoding {decoded:.1} us a fact, only writing {written:.1}");
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

/// What each request recorded, in the order of their first facts.
fn requests(lines: &[Vec<u8>]) -> anyhow::Result<Vec<Recorded>> {
    let mut places: HashMap<RequestId, usize> = HashMap::new();
    let mut requests: Vec<Recorded> = Vec::new();
    for line in lines {
        let event = Line::parse(line)?.event;
        let Some(request) = request_of(&event) else { continue };
        let place = *places.entry(request.clone()).or_insert_with(|| {
            requests.push(Recorded::default());
            requests.len() - 1
        });
        let Recorded { before, after } = &mut requests[place];
        if matches!(event, Event::Selection(_)) { before.push(event) } else { after.push(event) }
    }
    ensure!(requests.len() >= RATE, "the real run has left only {} requests", requests.len());
    Ok(requests)
}

/// Records `requests` as a gateway does, until `log` has all of them; gives the CPU microseconds for a fact.
async fn record(
    requests: &[Recorded],
    folder: &Path,
    log: impl Log + 'static,
    handover: Option<Arc<Handover>>,
) -> anyhow::Result<f64> {
    let options = spool::Options { retention: Duration::ZERO, ..spool::Options::default() };
    let (mut spool, reader, _) = Spool::open(folder, options)?;
    spool.begin(1)?;
    let ledger = Ledger::new("bench".into(), 1, spool, State::default());
    handover.into_iter().for_each(|handover| ledger.hand_over(handover));
    let started = Started { version: "bench".to_owned(), secret: "bench".to_owned(), previous: None };
    ledger.record(Time::wall_clock(), vec![Event::Started(started)]).context("the spool takes no facts")?;
    let shipper = Shipper::start("bench".into(), reader, Box::new(log))?;
    let spent = paced(requests, |request| {
        ledger.decide(Time::wall_clock(), None, |_| ((), request.before.clone()));
        ledger.flush();
        ledger.record(Time::wall_clock(), request.after.clone());
    })
    .await?;
    let before = own_cpu()?;
    let standing = tokio::task::spawn_blocking(move || shipper.stop(SHIP_TIME)).await?;
    ensure!(standing.shipped.is_some_and(|place| place.last == ledger.standing().last.number), "{standing:?}");
    Ok(spent + per_fact(requests, own_cpu()?.since(before).total()))
}

/// Takes a `turn` with each request at [`RATE`]; gives the CPU microseconds for a fact.
async fn paced(requests: &[Recorded], mut turn: impl FnMut(&Recorded)) -> anyhow::Result<f64> {
    let before = own_cpu()?;
    let mut steps = interval(STEP);
    steps.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let a_step = RATE * usize::try_from(STEP.as_millis())? / MS_PER_SECOND;
    for some in requests.chunks(a_step) {
        steps.tick().await;
        some.iter().for_each(&mut turn);
    }
    Ok(per_fact(requests, own_cpu()?.since(before).total()))
}

fn per_fact(requests: &[Recorded], cpu_seconds: f64) -> f64 {
    let facts: usize = requests.iter().map(|request| request.before.len() + request.after.len()).sum();
    cpu_seconds * US_PER_SECOND / facts as f64
}
