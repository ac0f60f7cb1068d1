//! Verify: whether the log is whole, and whether every writer kept its promises.

use std::collections::HashMap;

use serde::Serialize;
use waybill_events::log::{Log, ReadError, Seq, StoredFrame};
use waybill_projections::chain::Chains;
use waybill_projections::fold::Fold;
use waybill_projections::read;
use waybill_schema::event::{Event, Fact, Ownership};
use waybill_schema::frame::Frame;
use waybill_schema::id::DeploymentId;
use waybill_schema::secret::sum128;

/// At most this many findings are listed; all are counted.
pub const FINDINGS_MAX: usize = 100;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 256;

/// What a look at every frame and fact found.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize)]
pub struct Verified {
    /// Frames in the log.
    pub n_frames: u64,
    /// Facts in them.
    pub n_facts: u64,
    /// Facts met again.
    pub duplicates: u64,
    /// Whether a writer broke a promise: what is folded may lack facts.
    pub tainted: bool,
    /// Findings in all.
    pub n_findings: u64,
    /// The first [`FINDINGS_MAX`] of them, in words.
    pub findings: Vec<String>,
    /// The digest of the routing state: two machines agree exactly when theirs are equal.
    pub digest: String,
}

/// Checks every frame's sum, every writer's chain and numbers, every line and every batch of the log.
pub fn verify(log: &mut dyn Log) -> Result<Verified, ReadError> {
    let mut look = Look::default();
    let mut after = Seq::START;
    loop {
        let frames = log.read(after, READ_FRAMES_MAX)?;
        let Some(newest) = frames.last() else { return Ok(look.conclude()) };
        after = newest.seq;
        frames.into_iter().for_each(|frame| look.at(frame));
    }
}

/// What is carried from frame to frame.
#[derive(Default)]
struct Look {
    verified: Verified,
    chains: Chains,
    fold: Fold,
    owners: Owners,
}

/// The deployment of every response, by a sum of what a response is known by.
#[derive(Default)]
struct Owners {
    numbers: HashMap<DeploymentId, u32>,
    owners: HashMap<String, u32>,
}

impl Owners {
    /// Notes who owns a response; says whether another deployment owned it before.
    fn is_another(&mut self, owned: &Ownership) -> bool {
        let Ownership { scope, model, endpoint, response, deployment, .. } = owned;
        let known_by = serde_json::to_vec(&(scope, model, endpoint, response)).expect("ids are text");
        let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX);
        let number = *self.numbers.entry(deployment.clone()).or_insert(next);
        *self.owners.entry(sum128(&[&known_by])).or_insert(number) != number
    }
}

impl Look {
    fn at(&mut self, stored: StoredFrame) {
        let Self { verified, chains, fold, owners } = self;
        verified.n_frames += 1;
        let (seq, mut rows) = (stored.seq, Vec::new());
        if let Err(error) = Frame::parse(stored.bytes.clone()) {
            verified.finds(format!("frame {seq}: {error}"));
        }
        let Ok(header) = Frame::header_of(&stored.bytes) else { return };
        if let Err(broken) = chains.follow(&header) {
            verified.finds(format!("frame {seq} does not continue the chain of `{}`: {broken:?}", header.writer));
        }
        for read in read::facts(&header, &stored.bytes, stored.stored, stored.sent) {
            verified.n_facts += 1;
            match read {
                Ok(fact) => {
                    fold.apply(&fact, seq.0, &mut rows);
                    if let Fact { event: Event::Ownership(owned), .. } = &fact
                        && owners.is_another(owned)
                    {
                        let Ownership { response, deployment, .. } = &**owned;
                        verified.finds(format!(
                            "frame {seq}, fact {}: response {response} has another owner than {deployment}",
                            fact.revision
                        ));
                    }
                }
                Err(unread) => {
                    fold.gate.pass_over(&unread.revision);
                    verified.finds(format!("frame {seq} line {}: {}", unread.line, unread.why));
                }
            }
        }
    }

    fn conclude(self) -> Verified {
        let Self { mut verified, fold, .. } = self;
        verified.conclude(&fold);
        verified
    }
}

impl Verified {
    fn conclude(&mut self, fold: &Fold) {
        let summary = fold.gate.summary();
        for violation in &summary.violations {
            self.finds(format!("fact {}: {:?}", violation.at, violation.broken));
        }
        self.n_findings += summary.n_violations - summary.violations.len() as u64;
        for (revision, error) in &fold.misfits {
            self.finds(format!("fact {revision}: {error}"));
        }
        self.duplicates = summary.duplicates;
        self.tainted = summary.tainted();
        self.digest = fold.state.digest();
    }

    fn finds(&mut self, finding: String) {
        self.n_findings += 1;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }
}
