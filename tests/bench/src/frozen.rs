//! What chats wait for a Redis that is frozen, beside the same gateway with Redis well: the first ones until the deadline
//! of the read, and then nobody, since the breaker is open.

use std::path::Path;

use waybill_servers::nats::{self, Nats};
use waybill_servers::redis::{self, Redis};

use crate::gate::{Gate, Limit};
use crate::gateway::{Gateway, Gateways};
use crate::stand::{Load, Stand, median};

/// Times that Redis is frozen.
const ROUNDS: usize = 5;
/// The first chats after that, one by one; as many are sent just before, in the same way.
const FIRST: usize = 5;
/// Chats on one connection, with Redis well and after the first ones.
const CHATS: usize = 300;
const DEADLINE_MS: u32 = 20;
/// Deadlines that may be added to the longest of them: a timer is late by a millisecond, and its thread by another.
const DEADLINES_MAX: f64 = 1.25;
/// What a chat may take then, beside one with Redis well.
const RATIO_MAX: f64 = 1.1;

/// The times of one round, in milliseconds.
struct Round {
    well: f64,
    longest_well: f64,
    longest_frozen: f64,
    then: f64,
}

/// Runs the whole part and returns its gates.
pub(crate) async fn run(waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    let nats = tokio::task::spawn_blocking(|| Nats::start(&nats::Options::default())).await?;
    let redis = tokio::task::spawn_blocking(|| Redis::start(&redis::Options::default())).await?;
    let (stand, gateways) = (Stand::start().await?, Gateways::new(waybill)?);
    let state = (&*redis.url(), DEADLINE_MS);
    let gateway = gateways.start_sharing(&nats.url(), state, "frozen", std::slice::from_ref(&stand.upstream)).await?;
    stand.load(&gateway.address, Load { count: CHATS, connections: 1, ..Load::default() }).await?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push(round(&stand, &gateway, &redis).await?);
    }
    gateway.program.stop().await?;
    stand.stop().await?;
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let waited = |round: &Round| (round.longest_frozen - round.longest_well) / f64::from(DEADLINE_MS);
    let (deadlines, ratio) = (of(waited), of(|round| round.then / round.well));
    println!(
        "Frozen: a chat takes {:.2} ms with Redis well and {:.2} ms with Redis frozen; the longest of the first {FIRST} \
         takes {:.2} ms instead of {:.2} ms (medians of {ROUNDS} times)",
        of(|round| round.well),
        of(|round| round.then),
        of(|round| round.longest_frozen),
        of(|round| round.longest_well),
    );
    Ok(vec![
        Gate::new("frozen/read-deadlines-added-to-the-first", deadlines, Limit::AtMost(DEADLINES_MAX)),
        Gate::new("frozen/time-of-a-chat-then", ratio, Limit::AtMost(RATIO_MAX)),
    ])
}

/// Freezes Redis once, and lets it go on at the end.
async fn round(stand: &Stand, gateway: &Gateway, redis: &Redis) -> anyhow::Result<Round> {
    let chats = async |count| {
        let load = Load { count, connections: 1, ..Load::default() };
        anyhow::Ok(stand.load(&gateway.address, load).await?.p50_us as f64 / 1e3)
    };
    let first = async || {
        let mut longest: f64 = 0.0;
        for _ in 0..FIRST {
            longest = longest.max(chats(1).await?);
        }
        anyhow::Ok(longest)
    };
    let (well, longest_well) = (chats(CHATS).await?, first().await?);
    redis.stop();
    let longest_frozen = first().await?;
    until(gateway, false).await?;
    let then = chats(CHATS).await?;
    redis.cont();
    until(gateway, true).await?;
    Ok(Round { well, longest_well, longest_frozen, then })
}

/// Waits until the gateway says that the shared state answers, or that it does not.
async fn until(gateway: &Gateway, shares: bool) -> anyhow::Result<()> {
    while gateway.shares().await? != shares {
        tokio::task::yield_now().await;
    }
    Ok(())
}
