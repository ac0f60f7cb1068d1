//! State: who was bound where, who rested and who was blocked, as the log has it at a moment of the past.

use std::collections::BTreeMap;

use serde::Serialize;
use waybill_events::log::{Log, ReadError, Seq};
use waybill_projections::gate::Gate;
use waybill_projections::read;
use waybill_routing::state::State;
use waybill_schema::event::Epoch;
use waybill_schema::frame::Frame;
use waybill_schema::id::{AffinityKey, WriterId};
use waybill_schema::redis::Pin;
use waybill_schema::secret::sum128;
use waybill_schema::time::Time;

use crate::health::{self, MemberHealth};

/// Frames read at once.
const READ_FRAMES_MAX: usize = 256;

/// Up to where the log is folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// To its end.
    End,
    /// To this frame, which is folded too.
    Seq(Seq),
    /// To the last frame before the first one that was stored later.
    Time(Time),
}

/// A binding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// The affinity key.
    pub key: AffinityKey,
    /// Where it leads.
    #[serde(flatten)]
    pub pin: Pin,
}

/// What the log says of a moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StateAt {
    /// The last frame that is folded.
    pub seq: Seq,
    /// When that frame was stored: what stands is what has not passed by then.
    pub at: Time,
    /// Frames folded.
    pub n_frames: u64,
    /// Facts folded.
    pub n_facts: u64,
    /// Facts met again.
    pub duplicates: u64,
    /// Promises that writers broke.
    pub violations: u64,
    /// The last number of every writer.
    pub writers: BTreeMap<WriterId, Epoch>,
    /// The bindings that stand, by key.
    pub pins: Vec<Bound>,
    /// Every member on record.
    pub members: Vec<MemberHealth>,
    /// The sum over all frames, in order, as 32 hex digits.
    pub log_digest: String,
    /// The digest of the routing state, as 64 hex digits.
    pub digest: String,
}

/// Folds `log` up to `at`, with room for so many affinity records: their number is part of the fold.
pub fn state(log: &mut dyn Log, at: At, records_max: usize) -> Result<StateAt, ReadError> {
    let mut look = Look { state: State::with_capacity(records_max), ..Look::default() };
    loop {
        let frames = log.read(look.seq, READ_FRAMES_MAX)?;
        if frames.is_empty() {
            return Ok(look.conclude());
        }
        for frame in frames {
            let is_beyond = match at {
                At::End => false,
                At::Seq(end) => frame.seq > end,
                At::Time(end) => frame.stored > end,
            };
            if is_beyond {
                return Ok(look.conclude());
            }
            look.take(&frame);
        }
    }
}

/// What is carried from frame to frame.
#[derive(Default)]
struct Look {
    gate: Gate,
    state: State,
    seq: Seq,
    at: Time,
    n_frames: u64,
    n_facts: u64,
    log_digest: String,
}

impl Look {
    fn take(&mut self, frame: &waybill_events::log::StoredFrame) {
        self.n_frames += 1;
        (self.seq, self.at) = (frame.seq, frame.stored);
        self.log_digest = sum128(&[self.log_digest.as_bytes(), &frame.seq.0.to_be_bytes(), &frame.bytes]);
        let Ok(header) = Frame::header_of(&frame.bytes) else { return };
        for read in read::facts(&header, &frame.bytes, frame.stored, frame.sent) {
            match read {
                Ok(fact) if self.gate.admit(&fact).folds() => {
                    self.n_facts += 1;
                    self.state.apply(&fact);
                }
                Ok(_) => {}
                Err(unread) => drop(self.gate.pass_over(&unread.revision)),
            }
        }
    }

    fn conclude(self) -> StateAt {
        let summary = self.gate.summary();
        let keys: Vec<&AffinityKey> = self.state.records().into_keys().collect();
        let pin = |key: &AffinityKey| {
            self.state.record(key, self.at)?;
            Some(Bound { key: key.clone(), pin: self.state.pin(key)? })
        };
        StateAt {
            seq: self.seq,
            at: self.at,
            n_frames: self.n_frames,
            n_facts: self.n_facts,
            duplicates: summary.duplicates,
            violations: summary.n_violations,
            writers: summary.writers,
            pins: keys.into_iter().filter_map(pin).collect(),
            members: health::health(&self.state, self.at),
            log_digest: self.log_digest,
            digest: self.state.digest(),
        }
    }
}
