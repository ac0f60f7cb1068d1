//! The upstreams: what was really called. Their call log is the measure of every record that gateways make.

use std::collections::BTreeMap;

use waybill_routing::ownership::Name;
use waybill_schema::id::{DeploymentId, RequestId, Revision};
use waybill_schema::time::Time;

use crate::gateway::SCOPE;
use crate::log::Life;
use crate::schedule::Dice;

/// How long a limited upstream asks to be left alone, in seconds.
pub const RETRY_AFTER_SECONDS: u64 = 41;

/// Clients go on from one of this many latest responses.
const REMEMBERED: usize = 24;
/// A call that was never made, of whose response a client makes up that it knows.
const NEVER_MADE: usize = usize::MAX;

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
    /// The call whose response it goes on from.
    pub parent: Option<usize>,
    /// When it came, in true time.
    pub began: Time,
    /// Whether its response has been named to the client.
    pub named: bool,
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

    /// Whether `call` may begin its answer, which names the response.
    pub fn can_begin(&self, call: usize) -> bool {
        let mood = self.moods.get(&self.calls[call].deployment).copied().unwrap_or_default();
        !self.calls[call].named && mood == Mood::Well
    }

    /// A call whose response some client knows, or says that it does.
    pub fn known(&self, dice: &mut Dice) -> Option<usize> {
        if dice.chance(8) {
            return Some(NEVER_MADE);
        }
        let named = self.calls.iter().enumerate().rev().filter(|(_, call)| call.named);
        dice.pick(&named.map(|(index, _)| index).take(REMEMBERED).collect::<Vec<_>>()).copied()
    }

    /// How `call` would end now. What has begun fails no more.
    pub fn answer(&self, call: usize, dice: &mut Dice) -> Answer {
        match self.moods.get(&self.calls[call].deployment).copied().unwrap_or_default() {
            _ if self.calls[call].named && dice.chance(25) => Answer::Cut,
            _ if self.calls[call].named => Answer::Success,
            Mood::Well if dice.chance(8) => Answer::Cut,
            Mood::Well => Answer::Success,
            Mood::Failing => Answer::Fails,
            Mood::Limited => Answer::Limited,
        }
    }
}

/// What the response of `call` is known by.
pub fn response_of(call: usize) -> Name {
    Name { scope: SCOPE.into(), response: call.to_string() }
}
