//! The scripted upstreams of a world, by their place in the plan or by name.

use std::ops::Deref;

use waybill_simulator::{Call, Running, Simulator};

use crate::world::{PATIENCE, Plan};

/// Running upstreams.
pub(crate) struct Upstreams {
    running: Vec<Running>,
    names: Vec<String>,
}

impl Deref for Upstreams {
    type Target = [Running];

    fn deref(&self) -> &[Running] {
        &self.running
    }
}

impl Upstreams {
    /// Starts those of `plan`.
    pub(crate) async fn start(plan: &Plan) -> Self {
        let mut running = Vec::new();
        for settings in &plan.upstreams {
            running.push(Simulator::start(settings.clone()).await.expect("an upstream starts"));
        }
        Self { running, names: plan.upstreams.iter().map(|settings| settings.name.clone()).collect() }
    }

    /// One of them, by its name.
    pub(crate) fn named(&self, name: &str) -> &Running {
        let named = self.names.iter().zip(&self.running).find(|(known, _)| *known == name);
        named.expect("the plan names it").1
    }

    /// The calls of all.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.iter().flat_map(|upstream| upstream.calls()).collect()
    }

    /// Waits until `holds` is true of the calls of all together.
    pub(crate) async fn calls_until(&self, holds: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        let held = async {
            loop {
                let logs: Vec<Vec<Call>> = self.iter().map(|upstream| upstream.calls()).collect();
                let calls = logs.concat();
                if holds(&calls) {
                    return calls;
                }
                let moved = self.iter().zip(&logs).map(|(upstream, log)| {
                    let seen = progress(log);
                    Box::pin(upstream.wait_for(move |calls| progress(calls) != seen))
                });
                futures_util::future::select_all(moved).await;
            }
        };
        tokio::time::timeout(PATIENCE, held).await.expect("the upstreams are called")
    }
}

/// How far calls have come: how many there are, the events they have written, and how many have ended.
fn progress(calls: &[Call]) -> (usize, u32, usize) {
    let events = calls.iter().map(|call| call.events).sum();
    (calls.len(), events, calls.iter().filter(|call| call.end.is_some()).count())
}
