//! Deciding again: a recorded choice must give the recorded deployment, today as on the day it was made.

use rusqlite::Connection;
use serde::Serialize;
use waybill_projections::gate::Gate;
use waybill_projections::read;
use waybill_routing::select::decide;
use waybill_schema::event::{Event, Selection};
use waybill_schema::frame::Frame;
use waybill_schema::id::{MemberId, RequestId, Revision};

use crate::reading;

/// What comes of deciding again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Redecision {
    /// The recorded member.
    Same,
    /// Another member than the recorded one, or none.
    Mismatch {
        /// The member that deciding again gives.
        member: Option<MemberId>,
    },
}

/// Decides again from the record alone; `None` where nothing was chosen: the same deployment was sent to again.
pub fn redecide(selection: &Selection) -> Option<Redecision> {
    let choice = selection.choice.as_ref()?;
    let chosen = decide(choice).map(|(index, _)| &choice.candidates[index]);
    let same = chosen.is_some_and(|chosen| {
        chosen.member == selection.member
            && chosen.deployment == selection.deployment
            && chosen.incarnation == selection.incarnation
    });
    Some(if same { Redecision::Same } else { Redecision::Mismatch { member: chosen.map(|c| c.member.clone()) } })
}

/// All choices of a log, decided again.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize)]
pub struct Redecided {
    /// How many choices there were.
    pub n: u64,
    /// Those that came out otherwise.
    pub mismatches: Vec<Mismatch>,
}

/// A choice that came out otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// The selection.
    pub revision: Revision,
    /// Its request.
    pub request: RequestId,
    /// The recorded member.
    pub recorded: MemberId,
    /// The member that deciding again gives.
    pub redecided: Option<MemberId>,
}

/// Decides every recorded choice of the log again.
pub fn redecide_all(connection: &Connection) -> Result<Redecided, rusqlite::Error> {
    let mut redecided = Redecided::default();
    let mut gate = Gate::default();
    reading::frames(connection, "ORDER BY seq", [], |frame| {
        let Ok(header) = Frame::header_of(&frame.bytes) else { return Ok(()) };
        for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent).flatten() {
            if let (true, Event::Selection(selection)) = (gate.admit(&fact).folds(), &fact.event) {
                redecided.count(&fact.revision, selection);
            }
        }
        Ok::<_, rusqlite::Error>(())
    })?;
    Ok(redecided)
}

impl Redecided {
    fn count(&mut self, revision: &Revision, selection: &Selection) {
        let Some(redecision) = redecide(selection) else { return };
        self.n += 1;
        if let Redecision::Mismatch { member } = redecision {
            self.mismatches.push(Mismatch {
                revision: revision.clone(),
                request: selection.request.clone(),
                recorded: selection.member.clone(),
                redecided: member,
            });
        }
    }
}
