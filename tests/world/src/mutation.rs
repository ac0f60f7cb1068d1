//! Mutations: real rules of the house, each broken in one place, to prove that this world would notice.
//!
//! Production code carries no switch for this. A mutation is made at a seam of the world: what is handed to the real
//! fold, gate or append is changed just before, so that the real code does what a broken one would have done.

use waybill_projections::fold::Fold;
use waybill_projections::gate::NO_EPOCH;
use waybill_schema::catalogue::RowKind;
use waybill_schema::event::{Act, Alive, Attempt, Effect, Event, Fact, Operator, Ownedness};
use waybill_schema::id::{MemberId, Revision};
use waybill_schema::time::Time;

/// A broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Numbers that are missing and that nobody gave up pass the gate in silence.
    GateAcceptsHole,
    /// The gate takes the first fact of a writer's next epoch for one that it has seen.
    GateDropsStart,
    /// A preference moves a pin although the pin is not at the revision that the preference is based on.
    PreferenceIgnoresBase,
    /// A success on the pinned deployment does not renew the pin once its revision has moved on.
    PreferenceNeverRenews,
    /// A late success of a target that its session has left takes the session back.
    AbandonedTakesBack,
    /// A success during a rest that the upstream asked for ends it.
    SuccessEndsAskedRest,
    /// A success during a rest of our own does not end it.
    SuccessLeavesRest,
    /// A fact counts from when it was stored, so one that waited in a spool starts a late cooldown.
    StoredTime,
    /// A process that finds a foreign epoch in the log sends on behind it.
    ZombieNotFenced,
    /// An auditor appends its batch wherever the catalogue stands.
    EditWithoutExpected,
    /// An undo leaves one of the batch's ops as it is.
    UndoForgetsOp,
    /// Facts about a member that was deleted count for the one that was made again.
    IncarnationIgnored,
    /// An answer that has only begun is owned as one that came to its end.
    BeginningIsOwned,
    /// A continuation goes where its session is.
    ContinuationFollowsSession,
    /// What is not found is unknown, however far behind its writer may be.
    LaggardsHaveNothing,
    /// A projector goes on where the log has a frame at its checkpoint's sequence, whichever frame that is.
    CheckpointBySequence,
}

impl Mutation {
    /// Every mutation.
    pub const ALL: [Self; 16] = [
        Self::GateAcceptsHole,
        Self::GateDropsStart,
        Self::PreferenceIgnoresBase,
        Self::PreferenceNeverRenews,
        Self::AbandonedTakesBack,
        Self::SuccessEndsAskedRest,
        Self::SuccessLeavesRest,
        Self::StoredTime,
        Self::ZombieNotFenced,
        Self::EditWithoutExpected,
        Self::UndoForgetsOp,
        Self::IncarnationIgnored,
        Self::BeginningIsOwned,
        Self::ContinuationFollowsSession,
        Self::LaggardsHaveNothing,
        Self::CheckpointBySequence,
    ];

    /// Changes what a fold is about to be handed; gives whether it is to be handed the fact at all.
    pub fn distort(self, fact: &mut Fact, stored: Time, fold: &mut Fold) -> bool {
        match self {
            Self::GateAcceptsHole => fill_hole(fact, fold),
            Self::GateDropsStart if matches!(fact.event, Event::Started(_)) && fact.revision.epoch > 1 => {
                fold.gate.admit(fact);
                return false;
            }
            Self::PreferenceIgnoresBase => base_on_what_stands(fact, fold),
            Self::PreferenceNeverRenews => renew_like_a_switch(fact, fold),
            Self::AbandonedTakesBack => take_back(fact, fold),
            Self::SuccessEndsAskedRest => end_asked_rest(fact, fold),
            Self::SuccessLeavesRest => leave_rest(fact, fold),
            Self::StoredTime => fact.at = stored,
            Self::IncarnationIgnored => take_for_the_present(fact, fold),
            Self::BeginningIsOwned => take_for_whole(fact),
            Self::ContinuationFollowsSession
            | Self::LaggardsHaveNothing
            | Self::GateDropsStart
            | Self::ZombieNotFenced
            | Self::EditWithoutExpected
            | Self::UndoForgetsOp
            | Self::CheckpointBySequence => {}
        }
        true
    }
}

/// Shows the gate a fact for each number that is missing.
fn fill_hole(fact: &Fact, fold: &mut Fold) {
    let Some(seen) = fold.gate.summary().writers.get(&fact.revision.writer).copied() else { return };
    let (epoch, end) = match &fact.event {
        Event::Started(started) => {
            started.previous.map_or((NO_EPOCH, 0), |previous| (previous.epoch, previous.last + 1))
        }
        _ => (fact.revision.epoch, fact.revision.number),
    };
    for number in (seen.last + 1..end).filter(|_| epoch == seen.epoch) {
        let revision = Revision { writer: fact.revision.writer.clone(), epoch, number };
        fold.gate.admit(&Fact { revision, at: fact.at, event: Event::Alive(Alive { last: 0 }) });
    }
}

fn base_on_what_stands(fact: &mut Fact, fold: &Fold) {
    if let Event::Preference(preference) = &mut fact.event
        && let Some(record) = fold.state.record(&preference.key, fact.at)
    {
        preference.base = Some(record.revision.clone());
    }
}

/// An incarnation that no record has makes the fold judge a renewal by its base alone.
fn renew_like_a_switch(fact: &mut Fact, fold: &Fold) {
    if let Event::Preference(preference) = &mut fact.event
        && let Some(record) = fold.state.record(&preference.key, fact.at)
        && preference.base.as_ref() != Some(&record.revision)
    {
        preference.incarnation = u64::MAX;
    }
}

/// Only what was based on a record that has moved on since is changed; a success without a record is left as it is.
fn take_back(fact: &mut Fact, fold: &Fold) {
    if let Event::Preference(preference) = &mut fact.event
        && let Some(record) = fold.state.record(&preference.key, fact.at)
        && preference.base.is_some()
        && record.deployment != preference.deployment
    {
        preference.base = Some(record.revision.clone());
    }
}

/// A member that a hand has cleared has no rest that a success could leave standing.
fn end_asked_rest(fact: &Fact, fold: &mut Fold) {
    if let Event::Attempt(attempt) = &fact.event
        && attempt.effect == Effect::Recover
        && asked_until(attempt, fold) > Some(fact.at)
    {
        let (target, actor, reason) = (attempt.member.to_string(), String::new(), String::new());
        let event = Event::Operator(Operator { act: Act::Clear, target, actor, reason });
        fold.state.apply(&Fact { event, ..fact.clone() });
    }
}

fn leave_rest(fact: &mut Fact, fold: &Fold) {
    if let Event::Attempt(attempt) = &mut fact.event
        && attempt.effect == Effect::Recover
        && asked_until(attempt, fold) <= Some(fact.at)
        && fold.state.health(&attempt.member, attempt.incarnation).is_some_and(|h| h.cooling(fact.at).is_some())
    {
        attempt.effect = Effect::None;
    }
}

fn asked_until(attempt: &Attempt, fold: &Fold) -> Option<Time> {
    fold.state.health(&attempt.member, attempt.incarnation)?.asked.as_ref().map(|asked| asked.until)
}

fn take_for_the_present(fact: &mut Fact, fold: &Fold) {
    let (member, incarnation) = match &mut fact.event {
        Event::Selection(selection) => (&selection.member, &mut selection.incarnation),
        Event::Attempt(attempt) => (&attempt.member, &mut attempt.incarnation),
        Event::Preference(preference) => (&preference.member, &mut preference.incarnation),
        _ => return,
    };
    if let Some(present) = incarnation_of(member, fold) {
        *incarnation = present;
    }
}

fn take_for_whole(fact: &mut Fact) {
    if let Event::Ownership(ownership) = &mut fact.event {
        ownership.state = Ownedness::Final;
    }
}

fn incarnation_of(member: &MemberId, fold: &Fold) -> Option<u64> {
    let mut rows = fold.rows.iter();
    rows.find(|(key, _)| key.kind == RowKind::Member && key.id == member.as_str()).map(|(_, stored)| stored.incarnation)
}
