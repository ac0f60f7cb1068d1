//! The catalogue: the rows that say where a request may go, as they stand in the log, and the lookups over them.
//!
//! [`Rows`] is the fold of `catalogue` batches; [`Catalogue`] is its compiled, immutable form that a request reads.

pub mod reference;
pub mod terms;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::event::{Batch, Endpoint, Op, Stored};
use crate::id::{ChannelId, DeploymentId, GroupId, KeyId, MemberId, ModelName, OrganizationId, TeamId, TemplateId};
use crate::secret::SecretRef;
use terms::Terms;

/// Whether a row takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It does.
    #[default]
    Active,
    /// It does not.
    Disabled,
}

/// An API that an upstream speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// OpenAI Chat Completions.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// Anthropic Messages, with `count_tokens`.
    Messages,
    /// OpenAI Embeddings.
    Embeddings,
    /// OpenAI Completions, the older API.
    Completions,
    /// OpenAI Images: generations and edits.
    Images,
    /// OpenAI Audio: speech, transcriptions and translations.
    Audio,
    /// OpenAI Videos.
    Videos,
    /// Music, at `/music`.
    Music,
    /// OpenAI Moderations.
    Moderations,
    /// Rerank, as Cohere and Jina have it.
    Rerank,
}

impl Endpoint {
    /// The dialect an upstream must speak to serve this endpoint.
    pub fn dialect(self) -> Dialect {
        match self {
            Self::Chat => Dialect::Chat,
            Self::Responses => Dialect::Responses,
            Self::Messages | Self::CountTokens => Dialect::Messages,
            Self::Embeddings => Dialect::Embeddings,
            Self::Completions => Dialect::Completions,
            Self::ImageGenerations | Self::ImageEdits => Dialect::Images,
            Self::Speech | Self::Transcriptions | Self::Translations => Dialect::Audio,
            Self::Videos => Dialect::Videos,
            Self::Music => Dialect::Music,
            Self::Moderations => Dialect::Moderations,
            Self::Rerank => Dialect::Rerank,
        }
    }
}

/// One connection to an upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// Its name.
    pub id: ChannelId,
    /// Whether it takes part.
    pub status: Status,
    /// The base URL, ending before the endpoint (`https://host/v1`), without a slash at the end.
    pub base_url: String,
    /// The APIs it speaks.
    pub dialects: Vec<Dialect>,
    /// Its credentials, used in turn; none for an upstream that wants none.
    pub api_keys: Vec<SecretRef>,
    /// The upstream models it is known to serve; for people and for matching.
    pub models: Vec<ModelName>,
    /// Free labels; `shadow_group` and `host` are sent upstream where `internal_headers` is set (S1.10).
    pub labels: BTreeMap<String, String>,
    /// Whether `X-Relay-Logical-Group`, `X-Relay-Route-ID` and `X-Relay-Shadow-Group` go upstream.
    pub internal_headers: bool,
    /// Whether its chat streams are asked for their usage where the client does not ask. One that refuses the field is
    /// sent to twice each time.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub stream_usage: bool,
    /// What its upstream models cost, at most one entry a model; a model without one has no known price.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prices: Vec<Price>,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_yes(flag: &bool) -> bool {
    *flag
}

/// What an upstream model costs, in nano-USD per thousand tokens: a millionth of the usual USD per million.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// The upstream model.
    pub model: ModelName,
    /// Tokens of the prompt.
    pub input: u64,
    /// Tokens of the answer.
    pub output: u64,
    /// Prompt tokens read from the upstream's cache; absent costs as `input`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
    /// Prompt tokens written to the upstream's cache; absent costs as `input`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write: Option<u64>,
}

impl Channel {
    /// Whether both lead to the same account: what an upstream keeps under an id is found again through either.
    pub fn connects_like(&self, other: &Self) -> bool {
        self.base_url == other.base_url && self.api_keys == other.api_keys
    }
}

/// How a group's requests stick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StickyPolicy {
    /// What a generated session sticks by.
    pub mode: StickyMode,
    /// Life of a conversation or session key, in seconds.
    pub conversation_ttl_seconds: u32,
    /// Life of a user key, in seconds.
    pub user_model_ttl_seconds: u32,
    /// Life of a bucket key, in seconds.
    pub bucket_ttl_seconds: u32,
}

/// What a request whose session is generated sticks by (S1.5 as reconciled with S3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StickyMode {
    /// Nothing.
    #[default]
    Session,
    /// The user, then a bucket.
    ConversationPreferred,
}

/// When the members of a pool cool down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailoverPolicy {
    /// Consecutive retryable failures that start a cooldown.
    pub consecutive_retryable_failures: u32,
    /// The first cooldown, in seconds.
    pub cooldown_seconds: u32,
}

/// A named pool with the public models it shows (S1.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Its name.
    pub id: GroupId,
    /// Its name for people.
    pub display_name: String,
    /// What it is for.
    pub description: String,
    /// Whether it takes part.
    pub status: Status,
    /// The model names or patterns it shows; empty shows every route that has a member in it.
    pub public_models: Vec<ModelName>,
    /// Whether it can be asked for as a model.
    pub requestable: bool,
    /// How its requests stick; absent inherits the platform's.
    pub sticky_policy: Option<StickyPolicy>,
    /// When its members cool down; absent inherits the platform's.
    pub failover_policy: Option<FailoverPolicy>,
}

/// A public model name or pattern.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The name, or a pattern in which `*` stands for any text.
    pub model: ModelName,
    /// The models to try when its own pool is used up.
    pub fallbacks: Vec<ModelName>,
    /// Whether its requests stick at all (S2.6).
    pub sticky_session: bool,
    /// The first-token deadline of this route, in seconds; absent inherits the platform's.
    pub first_token_seconds: Option<u32>,
}

/// A channel's place in a route.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Its name.
    pub id: MemberId,
    /// Whether it takes part.
    pub status: Status,
    /// The route, by its name or pattern.
    pub route: ModelName,
    /// The group it serves.
    pub group: GroupId,
    /// The channel.
    pub channel: ChannelId,
    /// Its tier, smaller first.
    pub priority: i32,
    /// Its weight in the tier; 0 takes it out.
    pub weight: u32,
    /// The model name the upstream is sent; absent sends the name that was asked for.
    pub upstream_model: Option<ModelName>,
}

impl Member {
    /// The id of the member with this place.
    pub fn id_of(group: &GroupId, route: &ModelName, channel: &ChannelId, upstream: Option<&ModelName>) -> MemberId {
        let mut id = format!("{group}/{route}/{channel}");
        if let Some(upstream) = upstream {
            id.push('/');
            id.push_str(upstream.as_str());
        }
        MemberId::new(id)
    }
}

/// How the legal candidates of a pool share requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Tiers by priority, weights inside a tier.
    Priority,
    /// By the allocations alone.
    TrafficSplit,
    /// The fewest requests in flight first.
    LeastBusy,
    /// The fastest first.
    Latency,
}

/// A deployment's share in a split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allocation {
    /// The deployment.
    pub deployment: DeploymentId,
    /// Its weight; 0 takes it out.
    pub weight: u32,
}

/// A template's rule for one model or group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRoute {
    /// The model or group.
    pub model: ModelName,
    /// How its pool shares requests.
    pub strategy: Strategy,
    /// The split; absent inherits the members' weights, empty means equal shares.
    pub allocations: Option<Vec<Allocation>>,
}

/// The fallback chain of one source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// The model or group that failed.
    pub source: ModelName,
    /// What to try, in order; empty disables this kind for the source.
    pub targets: Vec<ModelName>,
}

/// The routing policy bound to a key, team or organization.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// Its name.
    pub id: TemplateId,
    /// Sends to one deployment, the first included; absent inherits the platform's.
    pub max_attempts: Option<u32>,
    /// When what its requests are sent to cools down; absent inherits the group's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failover_policy: Option<FailoverPolicy>,
    /// Rules for single models and groups.
    pub model_routes: Vec<ModelRoute>,
    /// General fallback chains.
    pub fallbacks: Vec<Chain>,
    /// Chains for prompts that do not fit.
    pub context_window_fallbacks: Vec<Chain>,
    /// Chains for content-policy refusals.
    pub content_policy_fallbacks: Vec<Chain>,
    /// Whether replies name the deployment that served.
    pub expose_route: bool,
}

/// An organization.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Organization {
    /// Its name.
    pub id: OrganizationId,
    /// Its policy.
    pub template: Option<TemplateId>,
    /// What its teams' requests may do.
    #[serde(default, skip_serializing_if = "Terms::is_empty")]
    pub terms: Terms,
}

/// A team of an organization.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Team {
    /// Its name.
    pub id: TeamId,
    /// The organization it belongs to.
    pub organization: Option<OrganizationId>,
    /// Its policy.
    pub template: Option<TemplateId>,
    /// What its keys' requests may do.
    #[serde(default, skip_serializing_if = "Terms::is_empty")]
    pub terms: Terms,
}

/// A caller's key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Its name; it is also the scope of its sessions.
    pub id: KeyId,
    /// Whether it is accepted.
    pub status: Status,
    /// Where its secret is found.
    pub key: SecretRef,
    /// The team it belongs to.
    pub team: Option<TeamId>,
    /// The group its requests go to.
    pub group: GroupId,
    /// Further groups it may ask for.
    pub groups: Vec<GroupId>,
    /// Its policy.
    pub template: Option<TemplateId>,
    /// Whether replies name the deployment that served.
    pub expose_route: bool,
    /// What its requests may do.
    #[serde(default, skip_serializing_if = "Terms::is_empty")]
    pub terms: Terms,
}

impl Key {
    /// The group of this name, where the key reaches it (S1.4).
    pub fn group_named(&self, name: &str) -> Option<&GroupId> {
        self.groups().find(|group| group.as_str() == name)
    }

    /// All groups that the key reaches, its own first.
    pub fn groups(&self) -> impl Iterator<Item = &GroupId> {
        std::iter::once(&self.group).chain(&self.groups)
    }
}

/// A row of the catalogue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Row {
    /// A channel.
    Channel(Channel),
    /// A group.
    Group(Group),
    /// A route.
    Route(Route),
    /// A member.
    Member(Member),
    /// A template.
    Template(Template),
    /// An organization.
    Organization(Organization),
    /// A team.
    Team(Team),
    /// A key.
    Key(Key),
}

/// The kinds of row, in the order in which they are made (and, reversed, deleted).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A channel.
    Channel,
    /// A group.
    Group,
    /// A route.
    Route,
    /// A member.
    Member,
    /// A template.
    Template,
    /// An organization.
    Organization,
    /// A team.
    Team,
    /// A key.
    Key,
}

/// Names a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowKey {
    /// Its kind.
    pub kind: RowKind,
    /// Its id within the kind.
    pub id: String,
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Channel => "channel",
            Self::Group => "group",
            Self::Route => "route",
            Self::Member => "member",
            Self::Template => "template",
            Self::Organization => "organization",
            Self::Team => "team",
            Self::Key => "key",
        })
    }
}

impl fmt::Display for RowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.kind, self.id)
    }
}

impl Row {
    /// The row's name.
    pub fn key(&self) -> RowKey {
        let (kind, id) = match self {
            Self::Channel(row) => (RowKind::Channel, row.id.as_str()),
            Self::Group(row) => (RowKind::Group, row.id.as_str()),
            Self::Route(row) => (RowKind::Route, row.model.as_str()),
            Self::Member(row) => (RowKind::Member, row.id.as_str()),
            Self::Template(row) => (RowKind::Template, row.id.as_str()),
            Self::Organization(row) => (RowKind::Organization, row.id.as_str()),
            Self::Team(row) => (RowKind::Team, row.id.as_str()),
            Self::Key(row) => (RowKind::Key, row.id.as_str()),
        };
        RowKey { kind, id: id.to_owned() }
    }
}

/// The rows of the catalogue at one revision: the fold of its batches.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Rows {
    /// The revision of the last batch; 0 before the first.
    pub revision: u64,
    /// The hash of the last configuration file that was applied.
    pub file: Option<String>,
    rows: BTreeMap<RowKey, Stored>,
    /// The revision at which each channel's connection came to be what it is.
    connections: BTreeMap<ChannelId, u64>,
}

/// Why a batch does not fit the rows.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// It was made against another revision.
    #[error("batch makes revision {batch}, the catalogue is at {catalogue}")]
    Revision {
        /// The revision the batch makes.
        batch: u64,
        /// The revision the rows have.
        catalogue: u64,
    },
    /// A before-image is not what stands there.
    #[error("the before-image of {0} is not what the catalogue holds")]
    Before(RowKey),
}

impl Rows {
    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = (&RowKey, &Stored)> {
        self.rows.iter()
    }

    /// Applies a batch whole, or not at all.
    pub fn apply(&mut self, batch: &Batch) -> Result<(), BatchError> {
        if batch.revision != self.revision + 1 {
            return Err(BatchError::Revision { batch: batch.revision, catalogue: self.revision });
        }
        let mut rows = self.rows.clone();
        for op in &batch.ops {
            if rows.get(&op.row) != op.before.as_ref() {
                return Err(BatchError::Before(op.row.clone()));
            }
            match &op.after {
                Some(after) => rows.insert(op.row.clone(), after.clone()),
                None => rows.remove(&op.row),
            };
        }
        self.rows = rows;
        self.revision = batch.revision;
        batch.ops.iter().for_each(|op| self.connect(op));
        if batch.file.is_some() {
            self.file.clone_from(&batch.file);
        }
        Ok(())
    }

    /// Notes where an op makes a connection another one.
    fn connect(&mut self, op: &Op) {
        let channel = |stored: &Option<Stored>| match stored {
            Some(Stored { incarnation, row: Row::Channel(channel) }) => Some((*incarnation, channel.clone())),
            _ => None,
        };
        match (channel(&op.before), channel(&op.after)) {
            (Some((before, old)), Some((after, new))) if before == after && old.connects_like(&new) => {}
            (_, Some((_, new))) => drop(self.connections.insert(new.id, self.revision)),
            (Some((_, old)), None) => drop(self.connections.remove(&old.id)),
            (None, None) => {}
        }
    }

    /// The batch that brings these rows to `target`; its `ops` are empty when nothing differs.
    ///
    /// A changed row keeps its incarnation, a new one gets the revision of the batch.
    pub fn batch_to(&self, target: Vec<Row>, actor: &str, reason: &str, file: Option<String>) -> Batch {
        let revision = self.revision + 1;
        let target: BTreeMap<RowKey, Row> = target.into_iter().map(|row| (row.key(), row)).collect();
        let mut ops = Vec::new();
        for (key, row) in &target {
            let before = self.rows.get(key);
            if before.is_none_or(|stored| stored.row != *row) {
                let incarnation = before.map_or(revision, |stored| stored.incarnation);
                let after = Some(Stored { incarnation, row: row.clone() });
                ops.push(Op { row: key.clone(), before: before.cloned(), after });
            }
        }
        for (key, stored) in self.rows.iter().rev().filter(|(key, _)| !target.contains_key(*key)) {
            ops.push(Op { row: key.clone(), before: Some(stored.clone()), after: None });
        }
        Batch { revision, actor: actor.to_owned(), reason: reason.to_owned(), file, ops, undo: Vec::new() }
    }
}

/// A member with everything a selection needs to know of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// The member.
    pub member: Arc<Member>,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its channel.
    pub channel: Arc<Channel>,
    /// The deployment it stands for, for the model asked.
    pub deployment: DeploymentId,
    /// The model name the upstream is sent.
    pub upstream_model: ModelName,
}

/// The deployments that may serve one model of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The group.
    pub group: Arc<Group>,
    /// The route whose pattern won.
    pub route: Arc<Route>,
    /// Its members in this group, by id.
    pub places: Vec<Arc<Place>>,
}

/// The catalogue as a request reads it: compiled from [`Rows`], immutable.
#[derive(Debug, Default)]
pub struct Catalogue {
    /// The revision it was compiled from.
    pub revision: u64,
    /// All keys by id.
    pub keys: BTreeMap<KeyId, Arc<Key>>,
    /// All channels by id.
    pub channels: BTreeMap<ChannelId, Arc<Channel>>,
    teams: HashMap<TeamId, Arc<Team>>,
    organizations: HashMap<OrganizationId, Arc<Organization>>,
    /// The template of each key that has one: the first of its own, its team's and its organization's, whole (S3.10).
    pub templates: HashMap<KeyId, Arc<Template>>,
    connections: BTreeMap<ChannelId, u64>,
    groups: HashMap<GroupId, Served>,
}

/// What one group serves.
#[derive(Debug)]
struct Served {
    group: Arc<Group>,
    /// Routes with a member in the group, the most specific first.
    routes: Vec<ServedRoute>,
    /// Pools of the names that need no pattern.
    exact: HashMap<ModelName, Arc<Pool>>,
    /// All deployments behind the names that need no pattern: what the group is as a model.
    whole: Option<Arc<Pool>>,
}

#[derive(Debug)]
struct ServedRoute {
    route: Arc<Route>,
    members: Vec<ServedMember>,
}

#[derive(Clone, Debug)]
struct ServedMember {
    member: Arc<Member>,
    incarnation: u64,
    channel: Arc<Channel>,
}

impl Catalogue {
    /// Compiles `rows`; members whose group, route or channel is missing are left out (`check` names them).
    pub fn compile(rows: &Rows) -> Self {
        let (revision, connections) = (rows.revision, rows.connections.clone());
        let mut catalogue = Self { revision, connections, ..Self::default() };
        let mut routes: Vec<Arc<Route>> = Vec::new();
        let mut members: Vec<(Arc<Member>, u64)> = Vec::new();
        let mut templates: HashMap<TemplateId, Arc<Template>> = HashMap::new();
        for (_, stored) in rows.iter() {
            match stored.row.clone() {
                Row::Channel(row) => drop(catalogue.channels.insert(row.id.clone(), Arc::new(row))),
                Row::Group(row) => {
                    let (routes, exact, whole) = Default::default();
                    let served = Served { group: Arc::new(row), routes, exact, whole };
                    catalogue.groups.insert(served.group.id.clone(), served);
                }
                Row::Route(row) => routes.push(Arc::new(row)),
                Row::Member(row) => members.push((Arc::new(row), stored.incarnation)),
                Row::Key(row) => drop(catalogue.keys.insert(row.id.clone(), Arc::new(row))),
                Row::Organization(row) => drop(catalogue.organizations.insert(row.id.clone(), Arc::new(row))),
                Row::Team(row) => drop(catalogue.teams.insert(row.id.clone(), Arc::new(row))),
                Row::Template(row) => drop(templates.insert(row.id.clone(), Arc::new(row))),
            }
        }
        let bound = |key: &Arc<Key>| {
            let template = catalogue.rights(key).templates().find_map(|id| templates.get(id)).cloned();
            template.map(|template| (key.id.clone(), template))
        };
        catalogue.templates = catalogue.keys.values().filter_map(bound).collect();
        routes.sort_by_key(|route| specificity(route.model.as_str()));
        for served in catalogue.groups.values_mut() {
            served.mount(&routes, &members, &catalogue.channels);
        }
        catalogue
    }

    /// The group with this id.
    pub fn group(&self, group: &GroupId) -> Option<&Arc<Group>> {
        self.groups.get(group).map(|served| &served.group)
    }

    /// The incarnation of a channel's connection: the revision at which the channel was made, or its base URL or its
    /// credentials changed last.
    pub fn connection(&self, channel: &ChannelId) -> Option<u64> {
        self.connections.get(channel).copied()
    }

    /// The pool that serves `model` in `group`: that of the most specific route with a member there.
    pub fn pool(&self, group: &GroupId, model: &str) -> Option<Arc<Pool>> {
        let served = self.groups.get(group)?;
        match served.exact.get(model) {
            Some(pool) => Some(pool.clone()),
            None => served.expand(model).map(Arc::new),
        }
    }

    /// What a client's `name` leads to: a model that `group` shows, or a group that can be asked for and that the key
    /// reaches. A name that stands in the group as it is goes before a group, and that before a pattern.
    pub fn asked(&self, key: &Key, group: &GroupId, name: &str) -> Option<Arc<Pool>> {
        self.named(group, name, || key.group_named(name).filter(|named| self.is_requestable(named)))
    }

    /// What the target `name` of a fallback chain leads to for the caller, in the group `home` of its request, else in
    /// another that the key reaches: never more than the key could have asked for by one spelling or another (S3.18).
    pub fn target(&self, key: &Key, home: &GroupId, name: &str) -> Option<Arc<Pool>> {
        let mut groups = std::iter::once(home).chain(key.groups());
        groups.find_map(|group| self.named(group, name, || key.group_named(name)))
    }

    /// Whether the group can be asked for as a model.
    pub fn is_requestable(&self, group: &GroupId) -> bool {
        self.group(group).is_some_and(|group| group.requestable)
    }

    /// All deployments behind the names that `group` shows, patterns aside; `None` where there are none.
    pub fn whole(&self, group: &GroupId) -> Option<&Arc<Pool>> {
        self.groups.get(group)?.whole.as_ref()
    }

    fn named<'k>(
        &self,
        group: &GroupId,
        name: &str,
        as_group: impl FnOnce() -> Option<&'k GroupId>,
    ) -> Option<Arc<Pool>> {
        let served = self.groups.get(group)?;
        let exact = served.exact.get(name).cloned();
        let whole = || self.whole(as_group()?).cloned();
        exact.or_else(whole).or_else(|| served.expand(name).map(Arc::new))
    }

    /// The model names that `group` shows, sorted: its public models, or its routes; patterns are not names.
    pub fn models(&self, group: &GroupId) -> Vec<&ModelName> {
        let mut names: Vec<_> = self.groups.get(group).map(|g| g.exact.keys().collect()).unwrap_or_default();
        names.sort();
        names
    }
}

impl Served {
    fn mount(
        &mut self,
        routes: &[Arc<Route>],
        members: &[(Arc<Member>, u64)],
        channels: &BTreeMap<ChannelId, Arc<Channel>>,
    ) {
        for route in routes {
            let here = members.iter().filter(|(m, _)| m.group == self.group.id && m.route == route.model);
            let members: Vec<ServedMember> = here
                .filter_map(|(member, incarnation)| {
                    let channel = channels.get(&member.channel)?.clone();
                    Some(ServedMember { member: member.clone(), incarnation: *incarnation, channel })
                })
                .collect();
            if !members.is_empty() {
                self.routes.push(ServedRoute { route: route.clone(), members });
            }
        }
        let names = self.routes.iter().map(|served| &served.route.model).chain(&self.group.public_models);
        let names: Vec<ModelName> = names.filter(|name| !is_pattern(name.as_str())).cloned().collect();
        for name in names {
            if let Some(pool) = self.expand(name.as_str()) {
                self.exact.insert(name, Arc::new(pool));
            }
        }
        self.whole = self.join();
    }

    /// All pools as one, in the order of their names; a deployment that several of them hold stands there once.
    fn join(&self) -> Option<Arc<Pool>> {
        if self.exact.is_empty() {
            return None;
        }
        let names: BTreeMap<&ModelName, &Arc<Pool>> = self.exact.iter().collect();
        let mut known = HashSet::new();
        let places = names.values().flat_map(|pool| &pool.places).filter(|place| known.insert(&place.deployment));
        let places = places.cloned().collect();
        let model = ModelName::new(self.group.id.as_str());
        let route = Route { model, fallbacks: Vec::new(), sticky_session: true, first_token_seconds: None };
        Some(Arc::new(Pool { group: self.group.clone(), route: Arc::new(route), places }))
    }

    fn expand(&self, model: &str) -> Option<Pool> {
        if !self.shows(model) {
            return None;
        }
        let served = self.routes.iter().find(|served| matches(served.route.model.as_str(), model))?;
        let places = served.members.iter().map(|served| {
            let upstream_model = served.member.upstream_model.clone().unwrap_or_else(|| model.into());
            Arc::new(Place {
                deployment: DeploymentId::of(&served.channel.id, &upstream_model),
                upstream_model,
                member: served.member.clone(),
                incarnation: served.incarnation,
                channel: served.channel.clone(),
            })
        });
        Some(Pool { group: self.group.clone(), route: served.route.clone(), places: places.collect() })
    }

    fn shows(&self, model: &str) -> bool {
        let public = &self.group.public_models;
        public.is_empty() || public.iter().any(|shown| matches(shown.as_str(), model))
    }
}

/// Whether `name` is a pattern: it holds a `*`.
pub fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Whether `pattern`, in which each `*` stands for any text, matches the whole of `name`.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Sorts names and patterns so that the most specific comes first: plain names, then more literal text, then fewer
/// stars, then the alphabet.
pub(crate) fn specificity(pattern: &str) -> (bool, std::cmp::Reverse<usize>, usize, String) {
    let stars = pattern.matches('*').count();
    (stars > 0, std::cmp::Reverse(pattern.len() - stars), stars, pattern.to_owned())
}
