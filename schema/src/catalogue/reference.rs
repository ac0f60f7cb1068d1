//! What the rows of a catalogue refer to: the references that a configuration file is checked for, read from rows.
//!
//! Some name a row; others name what rows make together, such as a model that some route serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Chain, Group, Key, Member, Row, RowKey, RowKind, Template, is_pattern, matches};
use crate::id::{DeploymentId, GroupId, ModelName};

/// Something that a row needs other rows for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reference {
    /// A row.
    Row(RowKey),
    /// A model or pattern that some route serves, or a group.
    Target(ModelName),
    /// A deployment that some member makes.
    Deployment(DeploymentId),
    /// A model or pattern that a member of the group serves.
    Shown(GroupId, ModelName),
}

impl Reference {
    fn row(kind: RowKind, id: &str) -> Self {
        Self::Row(RowKey { kind, id: id.to_owned() })
    }

    /// Whether `row` gives what is referred to; one such row is enough.
    pub fn is_met_by(&self, row: &Row) -> bool {
        match (self, row) {
            (Self::Row(key), row) => row.key() == *key,
            (Self::Target(target), Row::Route(route)) => {
                route.model == *target || matches(route.model.as_str(), target.as_str())
            }
            (Self::Target(target), Row::Group(group)) => group.id.as_str() == target.as_str(),
            (Self::Deployment(deployment), Row::Member(member)) => makes(member, deployment.as_str()),
            (Self::Shown(group, model), Row::Member(member)) => {
                let (route, model) = (member.route.as_str(), model.as_str());
                member.group == *group && (matches(route, model) || matches(model, route))
            }
            (Self::Target(_) | Self::Deployment(_) | Self::Shown(..), _) => false,
        }
    }

    fn is_met(&self, rows: &BTreeMap<RowKey, &Row>) -> bool {
        match self {
            Self::Row(key) => rows.contains_key(key),
            Self::Target(_) | Self::Deployment(_) | Self::Shown(..) => rows.values().any(|row| self.is_met_by(row)),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(key) => key.fmt(f),
            Self::Target(model) => write!(f, "a route or group for `{model}`"),
            Self::Deployment(deployment) => write!(f, "a member that makes deployment `{deployment}`"),
            Self::Shown(group, model) => write!(f, "a member of group `{group}` that serves `{model}`"),
        }
    }
}

/// Whether the member makes `deployment`; one behind a pattern makes whatever name matches, unless it maps it.
fn makes(member: &Member, deployment: &str) -> bool {
    let Some(model) = deployment.strip_prefix(member.channel.as_str()).and_then(|rest| rest.strip_prefix('/')) else {
        return false;
    };
    match &member.upstream_model {
        Some(upstream) => upstream.as_str() == model,
        None if is_pattern(member.route.as_str()) => matches(member.route.as_str(), model),
        None => member.route.as_str() == model,
    }
}

impl Row {
    /// What the row refers to.
    pub fn references(&self) -> Vec<Reference> {
        match self {
            Self::Channel(_) => Vec::new(),
            Self::Group(group) => shown(group),
            Self::Route(route) => route.fallbacks.iter().cloned().map(Reference::Target).collect(),
            Self::Member(member) => vec![
                Reference::row(RowKind::Route, member.route.as_str()),
                Reference::row(RowKind::Group, member.group.as_str()),
                Reference::row(RowKind::Channel, member.channel.as_str()),
            ],
            Self::Template(template) => ruled(template),
            Self::Organization(row) => policy(row.template.as_ref().map(|id| id.as_str())).collect(),
            Self::Team(team) => {
                let organization = team.organization.as_ref();
                let organization = organization.map(|id| Reference::row(RowKind::Organization, id.as_str()));
                organization.into_iter().chain(policy(team.template.as_ref().map(|id| id.as_str()))).collect()
            }
            Self::Key(key) => called(key),
        }
    }
}

fn policy(template: Option<&str>) -> impl Iterator<Item = Reference> {
    template.map(|id| Reference::row(RowKind::Template, id)).into_iter()
}

fn shown(group: &Group) -> Vec<Reference> {
    group.public_models.iter().map(|model| Reference::Shown(group.id.clone(), model.clone())).collect()
}

fn called(key: &Key) -> Vec<Reference> {
    let groups = std::iter::once(&key.group).chain(&key.groups);
    let team = key.team.iter().map(|id| Reference::row(RowKind::Team, id.as_str()));
    let groups = groups.map(|id| Reference::row(RowKind::Group, id.as_str()));
    team.chain(groups).chain(policy(key.template.as_ref().map(|id| id.as_str()))).collect()
}

fn ruled(template: &Template) -> Vec<Reference> {
    let chains = [&template.fallbacks, &template.context_window_fallbacks, &template.content_policy_fallbacks];
    let chained =
        |chain: &Chain| -> Vec<ModelName> { std::iter::once(&chain.source).chain(&chain.targets).cloned().collect() };
    let models = template.model_routes.iter().map(|rule| rule.model.clone());
    let allocations = template.model_routes.iter().flat_map(|rule| rule.allocations.iter().flatten());
    let targets = models.chain(chains.into_iter().flatten().flat_map(chained)).map(Reference::Target);
    targets.chain(allocations.map(|part| Reference::Deployment(part.deployment.clone()))).collect()
}

/// The references of `rows` that none of them meets, each with the row that refers.
pub fn dangling(rows: &BTreeMap<RowKey, &Row>) -> BTreeSet<(RowKey, Reference)> {
    let unmet = |(key, row): (&RowKey, &&Row)| -> Vec<(RowKey, Reference)> {
        let references = row.references().into_iter().filter(|reference| !reference.is_met(rows));
        references.map(|reference| (key.clone(), reference)).collect()
    };
    rows.iter().flat_map(unmet).collect()
}
