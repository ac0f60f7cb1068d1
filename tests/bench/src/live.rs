//! A short replay through a real gateway: the hit ratio as a client sees it, in the usage of its answers.
//!
//! Eight simulated providers with prompt caches serve the first requests of the gated trace, once through Waybill and
//! once with the client itself going round. The caches go by a clock that follows the trace, so nothing waits; a block
//! of the trace is sent as 16 characters, which the simulator counts as four tokens.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Clock, Running, Settings, Simulator};

use crate::cache::{DEPLOYMENTS, TTL_MS, read_weka};
use crate::gate::Gate;
use crate::gateway::{Gateways, KEY, MODEL};
use crate::trace::Request;

/// Requests of the replay.
const REQUESTS: usize = 200;
/// The dice of the staggering.
const SEED: u64 = 1;

/// Runs the whole part; it has no gates.
pub(crate) async fn run(traces: &Path, waybill: &Path) -> anyhow::Result<Vec<Gate>> {
    let requests = read_weka(traces, SEED, REQUESTS)?;
    let through = {
        let fleet = Fleet::start().await?;
        let gateway = Gateways::new(waybill)?.start("live", &fleet.addresses()).await?;
        let ratio = fleet.replay(&requests, &|_| gateway.address.clone()).await?;
        gateway.program.stop().await?;
        fleet.stop().await;
        ratio
    };
    let fleet = Fleet::start().await?;
    let addresses = fleet.addresses();
    let round = fleet.replay(&requests, &|n| addresses[n % DEPLOYMENTS].clone()).await?;
    fleet.stop().await;
    println!(
        "Live: the first {REQUESTS} requests of weka over {DEPLOYMENTS} simulated providers, as the client sees it"
    );
    println!("  hit ratio {through:.3} through Waybill, {round:.3} by round robin");
    Ok(Vec::new())
}

/// Simulated providers on one clock.
struct Fleet {
    providers: Vec<Running>,
    clock: Clock,
}

impl Fleet {
    async fn start() -> anyhow::Result<Self> {
        let clock = Clock::manual(0);
        let cache = CacheModel::OpenAi { min_tokens: 128, step_tokens: 128, ttl_ms: TTL_MS, max_rpm_per_key: None };
        let mut providers = Vec::new();
        for n in 0..DEPLOYMENTS {
            let settings = Settings { cache: cache.clone(), keep_bodies: false, ..Settings::named(&format!("d{n}")) };
            let anywhere = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
            providers.push(Simulator::with_clock(settings, clock.clone()).start_at(anywhere).await?);
        }
        Ok(Self { providers, clock })
    }

    fn addresses(&self) -> Vec<String> {
        self.providers.iter().map(|provider| provider.addr.to_string()).collect()
    }

    /// Sends the requests one after the other, each to where `target` says, and returns cached over prompt tokens.
    async fn replay(&self, requests: &[Request], target: &dyn Fn(usize) -> String) -> anyhow::Result<f64> {
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let (mut cached, mut prompt, mut now_ms) = (0, 0, 0);
        for (n, request) in requests.iter().enumerate() {
            self.clock.advance_ms(request.at_ms - now_ms);
            now_ms = request.at_ms;
            let usage = ask(&client, &target(n), request).await?;
            cached += usage["prompt_tokens_details"]["cached_tokens"].as_u64().context("no cached_tokens")?;
            prompt += usage["prompt_tokens"].as_u64().context("no prompt_tokens")?;
        }
        Ok(cached as f64 / prompt as f64)
    }

    async fn stop(&self) {
        for provider in &self.providers {
            provider.stop().await;
        }
    }
}

/// Sends one request and returns the usage of its answer.
async fn ask(client: &Client<HttpConnector, Full<Bytes>>, target: &str, request: &Request) -> anyhow::Result<Value> {
    let mut text = String::with_capacity(request.prefixes.len() * 16);
    for prefix in &request.prefixes {
        write!(text, "{prefix:016x}")?;
    }
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": text}]});
    let chat = hyper::Request::builder()
        .method(Method::POST)
        .uri(format!("http://{target}/v1/chat/completions"))
        .header(CONTENT_TYPE, "application/json")
        .header(AUTHORIZATION, format!("Bearer {KEY}"))
        .header("x-session-id", &request.session)
        .body(Full::from(body.to_string()))?;
    let answer = client.request(chat).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    ensure!(status == StatusCode::OK, "{target} answers {status}: {}", String::from_utf8_lossy(&body));
    Ok(serde_json::from_slice::<Value>(&body)?["usage"].take())
}
