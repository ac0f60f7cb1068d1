//! What changed beside usage: members' health, the catalogue, upstreams' model lists, who owns which response. One row a
//! change, made from the fact behind it and from what stood before.

use waybill_routing::state::{Block, Cooldown, Health, State};
use waybill_schema::catalogue::{RowKey, Rows};
use waybill_schema::event::{
    Act, Batch, Class, Endpoint, Event, Fact, Models, ModelsState, OpRef, Operator, Ownedness, Ownership,
    SessionSource, Stored,
};
use waybill_schema::id::{ChannelId, DeploymentId, MemberId, ModelName, RequestId, Revision, ScopeId, SessionId};
use waybill_schema::time::Time;

/// A row for one of the tables of changes.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A member's health, or a hand's act.
    Health(Box<HealthChange>),
    /// A row of the catalogue.
    Catalogue(Box<CatalogueChange>),
    /// A model of an upstream's list.
    Model(Box<ModelChange>),
    /// A response's owner.
    Owner(Box<Owner>),
}

/// What happened to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthKind {
    /// A cooldown began, or became another one.
    Cooldown,
    /// A model was blocked, or its block became another one.
    Block,
    /// A success ended a cooldown or lifted a block.
    Recover,
    /// A hand cleared counters, cooldown and blocks.
    Clear,
    /// A hand took a channel out.
    Disable,
    /// A hand put a channel back.
    Enable,
    /// A hand removed an affinity record.
    Unpin,
}

/// A change of health.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthChange {
    /// The fact behind it.
    pub revision: Revision,
    /// When.
    pub at: Time,
    /// The member; for a hand's act, the member, channel or affinity key it was done to.
    pub target: String,
    /// The member's incarnation; absent for a hand's act.
    pub incarnation: Option<u64>,
    /// What happened.
    pub kind: HealthKind,
    /// The class of the failure behind it.
    pub class: Option<Class>,
    /// The model that was asked for.
    pub model: Option<ModelName>,
    /// Until when the cooldown or block stands.
    pub until: Option<Time>,
    /// Consecutive retryable failures by then.
    pub failures: Option<u32>,
    /// Whose hand.
    pub actor: Option<String>,
    /// Why, as the hand says.
    pub reason: Option<String>,
}

/// A change of one row of the catalogue.
#[derive(Clone, Debug, PartialEq)]
pub struct CatalogueChange {
    /// The fact behind it.
    pub revision: Revision,
    /// When.
    pub at: Time,
    /// The catalogue revision that its batch makes.
    pub catalogue: u64,
    /// Its place in the batch, from 0.
    pub op: u32,
    /// Whether the batch fits the catalogue; one that does not is left out whole.
    pub applied: bool,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// Which row.
    pub row: RowKey,
    /// The row before; absent where it was made.
    pub before: Option<Stored>,
    /// The row after; absent where it was deleted.
    pub after: Option<Stored>,
    /// The op that it reverses.
    pub undoes: Option<OpRef>,
}

/// A model came to an upstream's list or left it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelChange {
    /// The fact behind it.
    pub revision: Revision,
    /// Its place among the models of the fact, from 0, new ones first.
    pub item: u32,
    /// When.
    pub at: Time,
    /// The channel.
    pub channel: ChannelId,
    /// The channel's incarnation.
    pub incarnation: u64,
    /// The model.
    pub model: ModelName,
    /// Whether it is new; gone otherwise.
    pub is_new: bool,
    /// What became of it.
    pub state: ModelsState,
    /// Who decided.
    pub actor: Option<String>,
}

/// Who made a response. The first to be seen stands; a later one of the same deployment may make it final.
#[derive(Clone, Debug, PartialEq)]
pub struct Owner {
    /// The tenant.
    pub scope: ScopeId,
    /// The model the client named.
    pub model: ModelName,
    /// The API spoken.
    pub endpoint: Endpoint,
    /// The keyed hash of the response id.
    pub response: String,
    /// How firmly it is owned.
    pub state: Ownedness,
    /// When its id was seen.
    pub seen: Time,
    /// The request that made it.
    pub request: RequestId,
    /// The deployment that holds it.
    pub deployment: DeploymentId,
    /// The connection that holds it.
    pub channel: ChannelId,
    /// The connection's incarnation.
    pub incarnation: u64,
    /// The session.
    pub session: SessionId,
    /// Where the session came from.
    pub source: SessionSource,
}

/// The fold from facts to changes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ChangesFold {
    /// Of the routing state only what attempts, probes and hands make of it.
    health: State,
    catalogue: Rows,
}

impl ChangesFold {
    /// Folds a fact that passed the gate; puts the changes that it makes at the end of `changes`.
    pub fn apply(&mut self, fact: &Fact, changes: &mut Vec<Change>) {
        match &fact.event {
            Event::Attempt(attempt) => {
                changes.extend(self.health(fact, &attempt.member, attempt.incarnation, &attempt.model));
            }
            Event::Probe(probe) => changes.extend(self.health(fact, &probe.member, probe.incarnation, &probe.model)),
            Event::Operator(operator) => {
                self.health.apply(fact);
                changes.push(Change::Health(Box::new(by_hand(fact, operator))));
            }
            Event::Catalogue(batch) => {
                let applied = self.catalogue.apply(batch).is_ok();
                changes.extend(catalogue(fact, batch, applied));
            }
            Event::Models(models) => changes.extend(list(fact, models)),
            Event::Ownership(ownership) => changes.push(Change::Owner(Box::new(owner(fact, ownership)))),
            Event::Started(_)
            | Event::Alive(_)
            | Event::Selection(_)
            | Event::Request(_)
            | Event::Preference(_)
            | Event::Dropped(_)
            | Event::Vanished(_) => {}
        }
    }

    fn health(&mut self, fact: &Fact, member: &MemberId, incarnation: u64, model: &ModelName) -> Option<Change> {
        let before = self.health.health(member, incarnation).map(|health| Rest::of(health, model)).unwrap_or_default();
        self.health.apply(fact);
        let health = self.health.health(member, incarnation)?;
        let after = Rest::of(health, model);
        let (kind, class, until) = before.becomes(&after)?;
        let (revision, at, target) = (fact.revision.clone(), fact.at, member.to_string());
        Some(Change::Health(Box::new(HealthChange {
            revision,
            at,
            target,
            incarnation: Some(incarnation),
            kind,
            class,
            model: Some(model.clone()),
            until,
            failures: Some(health.failures),
            actor: None,
            reason: None,
        })))
    }
}

/// What keeps a member from serving a model.
#[derive(Default)]
struct Rest {
    cooldown: Option<Cooldown>,
    block: Option<Block>,
}

impl Rest {
    fn of(health: &Health, model: &ModelName) -> Self {
        Self { cooldown: health.cooldown.clone(), block: health.blocks.get(model).cloned() }
    }

    /// What the step from `self` to `after` is called, the class behind it, and how long what began stands.
    fn becomes(&self, after: &Self) -> Option<(HealthKind, Option<Class>, Option<Time>)> {
        if let Some(block) = after.block.as_ref().filter(|_| self.block != after.block) {
            return Some((HealthKind::Block, Some(block.reason), Some(block.until)));
        }
        if let Some(cooldown) = after.cooldown.as_ref().filter(|_| self.cooldown != after.cooldown) {
            return Some((HealthKind::Cooldown, Some(cooldown.reason), Some(cooldown.until)));
        }
        let recovered = self.block != after.block || self.cooldown != after.cooldown;
        recovered.then_some((HealthKind::Recover, None, None))
    }
}

fn by_hand(fact: &Fact, operator: &Operator) -> HealthChange {
    let kind = match operator.act {
        Act::Clear => HealthKind::Clear,
        Act::Disable => HealthKind::Disable,
        Act::Enable => HealthKind::Enable,
        Act::Unpin => HealthKind::Unpin,
    };
    HealthChange {
        revision: fact.revision.clone(),
        at: fact.at,
        target: operator.target.clone(),
        incarnation: None,
        kind,
        class: None,
        model: None,
        until: None,
        failures: None,
        actor: Some(operator.actor.clone()),
        reason: Some(operator.reason.clone()),
    }
}

fn catalogue(fact: &Fact, batch: &Batch, applied: bool) -> impl Iterator<Item = Change> {
    batch.ops.iter().zip(0u32..).map(move |(op, place)| {
        Change::Catalogue(Box::new(CatalogueChange {
            revision: fact.revision.clone(),
            at: fact.at,
            catalogue: batch.revision,
            op: place,
            applied,
            actor: batch.actor.clone(),
            reason: batch.reason.clone(),
            row: op.row.clone(),
            before: op.before.clone(),
            after: op.after.clone(),
            undoes: batch.undo.get(place as usize).copied(),
        }))
    })
}

fn list(fact: &Fact, models: &Models) -> impl Iterator<Item = Change> {
    let added = models.added.iter().map(|model| (model, true));
    let removed = models.removed.iter().map(|model| (model, false));
    added.chain(removed).zip(0u32..).map(move |((model, is_new), item)| {
        Change::Model(Box::new(ModelChange {
            revision: fact.revision.clone(),
            item,
            at: fact.at,
            channel: models.channel.clone(),
            incarnation: models.incarnation,
            model: model.clone(),
            is_new,
            state: models.state,
            actor: models.actor.clone(),
        }))
    })
}

fn owner(fact: &Fact, ownership: &Ownership) -> Owner {
    let ownership = ownership.clone();
    Owner {
        scope: ownership.scope,
        model: ownership.model,
        endpoint: ownership.endpoint,
        response: ownership.response,
        state: ownership.state,
        seen: fact.at,
        request: ownership.request,
        deployment: ownership.deployment,
        channel: ownership.channel,
        incarnation: ownership.incarnation,
        session: ownership.session,
        source: ownership.source,
    }
}
