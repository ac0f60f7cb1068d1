//! The upstreams: what was really called. Their call log is the measure of every record that gateways make.

use std::collections::BTreeMap;

use waybill_schema::id::{DeploymentId, RequestId, Revision};
use waybill_schema::time::Time;

use crate::log::Life;
use crate::schedule::Dice;

/// How long a limited upstream asks to be left alone, in seconds.
pub const RETRY_AFTER_SECONDS: u64 = 41;

/// A call as its upstream saw it.
#[derive(Clone, Debug)]
pub struct Call {
    /// The request that it belongs to.
    pub request: RequestId,
    /// Its number in the request, from 1.
    pub attempt: u16,
    /// Where it went.
    pub deployment: DeploymentId,
    /// The fact that announced it.
    pub selection: Revision,
    /// The life that made it.
    pub life: Life,
    /// When it came, in true time.
    pub began: Time,
    /// When and how it ended, in true time; absent while it is open or where nobody is left to hear.
    pub ended: Option<(Time, Answer)>,
}

/// How a call ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// With a complete answer.
    Success,
    /// With a 503 before anything else.
    Fails,
    /// With a 429 that asks for [`RETRY_AFTER_SECONDS`].
    Limited,
    /// In the middle of its answer.
    Cut,
    /// Because its client left.
    Left,
}

/// How an upstream is disposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Well,
    Failing,
    Limited,
}

/// All upstreams.
#[derive(Clone, Debug, Default)]
pub struct Upstreams {
    /// Every call ever made.
    pub calls: Vec<Call>,
    moods: BTreeMap<DeploymentId, Mood>,
}

impl Upstreams {
    /// Takes a call and gives its place in the call log.
    pub fn take(&mut self, call: Call) -> usize {
        self.moods.entry(call.deployment.clone()).or_default();
        self.calls.push(call);
        self.calls.len() - 1
    }

    /// Changes the mood of one upstream.
    pub fn change_mood(&mut self, dice: &mut Dice) {
        let deployments: Vec<DeploymentId> = self.moods.keys().cloned().collect();
        if let Some(deployment) = dice.pick(&deployments) {
            let moods = [Mood::Well, Mood::Well, Mood::Failing, Mood::Limited];
            self.moods.insert(deployment.clone(), moods[dice.below(moods.len())]);
        }
    }

    /// Makes every upstream well.
    pub fn cheer_up(&mut self) {
        self.moods.clear();
    }

    /// How `call` would end now.
    pub fn answer(&self, call: usize, dice: &mut Dice) -> Answer {
        match self.moods.get(&self.calls[call].deployment).copied().unwrap_or_default() {
            Mood::Well if dice.chance(8) => Answer::Cut,
            Mood::Well => Answer::Success,
            Mood::Failing => Answer::Fails,
            Mood::Limited => Answer::Limited,
        }
    }
}
