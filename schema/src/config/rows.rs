//! The catalogue section as rows.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::chains::{Chained, refuse_circles};
use super::fields::{Field, Fields};
use super::names::Names;
use super::reader::Here;
use super::settings::{ATTEMPTS, failover_policy, first_token, sticky_policy};
use super::terms::terms;
use super::value;
use crate::catalogue::{
    Allocation, Chain, Channel, Dialect, Group, Key, Member, ModelRoute, Organization, Price, Route, Row, Status,
    Strategy, Team, Template, matches,
};
use crate::id::{ChannelId, GroupId, KeyId, MemberId, ModelName};
use crate::secret::SecretRef;

/// A member's tier, smaller first; room for any numbering an operator likes.
const PRIORITY: std::ops::RangeInclusive<u32> = 0..=1_000_000;

/// A weight; sums of any catalogue's weights stay far below what the arithmetic holds.
const WEIGHT: std::ops::RangeInclusive<u32> = 0..=1_000_000;

/// A member's tier when it names none: room on both sides.
const PRIORITY_DEFAULT: u32 = 10;

/// A member's weight when it names none: room to be halved.
const WEIGHT_DEFAULT: u32 = 100;

/// The longest description, in bytes.
const DESCRIPTION_BYTES_MAX: usize = 4096;

/// The labels a channel may carry.
const LABELS_MAX: usize = 64;

const DIALECTS: [(&str, Dialect); 11] = [
    ("chat", Dialect::Chat),
    ("responses", Dialect::Responses),
    ("messages", Dialect::Messages),
    ("embeddings", Dialect::Embeddings),
    ("completions", Dialect::Completions),
    ("images", Dialect::Images),
    ("audio", Dialect::Audio),
    ("videos", Dialect::Videos),
    ("music", Dialect::Music),
    ("moderations", Dialect::Moderations),
    ("rerank", Dialect::Rerank),
];

const STRATEGIES: [(&str, Strategy); 4] = [
    ("priority", Strategy::Priority),
    ("traffic_split", Strategy::TrafficSplit),
    ("least_busy", Strategy::LeastBusy),
    ("latency", Strategy::Latency),
];

/// Reads the catalogue. The rows are in the order of their keys, so that the file's own order does not count.
pub(super) fn rows(mut catalogue: Fields<'_>, names: &Names) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    rows.extend(catalogue.field("channels").rows().into_iter().map(|row| Row::Channel(channel(row))));
    let (members, defaults) = routes(catalogue.field("routes"), names, &mut rows);
    rows.extend(catalogue.field("groups").rows().into_iter().map(|row| Row::Group(group(row, &members))));
    rows.extend(members.into_iter().map(Row::Member));
    let templates = catalogue.field("templates").rows();
    rows.extend(templates.into_iter().map(|row| Row::Template(template(row, names, &defaults))));
    let organizations = catalogue.field("organizations").rows();
    rows.extend(organizations.into_iter().map(|row| Row::Organization(organization(row, names))));
    rows.extend(catalogue.field("teams").rows().into_iter().map(|row| Row::Team(team(row, names))));
    rows.extend(keys(catalogue.field("keys"), names).into_iter().map(Row::Key));
    rows.sort_by_cached_key(Row::key);
    rows
}

fn channel(mut row: Fields<'_>) -> Channel {
    let dialects = row.field("dialects").required();
    let empty = dialects.is_empty_list().then(|| dialects.here());
    let channel = Channel {
        id: row.field("id").required().id(),
        status: status(&mut row),
        base_url: row
            .field("base_url")
            .required()
            .read(|text| value::base_url(text).map(str::to_owned))
            .unwrap_or_default(),
        dialects: values(distinct(dialects, |text| value::choice(text, &DIALECTS))),
        api_keys: values(distinct(row.field("api_keys"), value::secret)),
        models: values(distinct(row.field("models"), model)),
        labels: labels(row.field("labels")),
        internal_headers: row.field("internal_headers").flag(false),
        stream_usage: row.field("stream_usage").flag(true),
        prices: prices(row.field("prices")),
    };
    // Read for its form alone: nothing discovers models yet.
    row.field("discover").flag(false);
    if let Some(here) = empty {
        here.wrong("a channel must speak at least one dialect");
    }
    channel
}

fn labels(field: Field<'_>) -> BTreeMap<String, String> {
    let here = field.here();
    let entries = field.map().map(Fields::entries).unwrap_or_default();
    if entries.len() > LABELS_MAX {
        here.wrong(format!("more than {LABELS_MAX} labels"));
    }
    let label = |(here, name, field): (Here<'_>, &str, Field<'_>)| {
        let name = value::id(name).map_err(|message| here.wrong(message)).unwrap_or_default();
        (name.to_owned(), field.read(line).unwrap_or_default())
    };
    entries.into_iter().map(label).collect()
}

/// What upstream models cost, in USD per million tokens, by model.
fn prices(field: Field<'_>) -> Vec<Price> {
    let entries = field.map().map(Fields::entries).unwrap_or_default();
    let price = |(here, name, field): (Here<'_>, &str, Field<'_>)| {
        let name = value::model(name).map_err(|message| here.wrong(message)).unwrap_or_default();
        let mut price = field.map()?;
        Some(Price {
            model: ModelName::new(name),
            input: price.field("input").required().read(value::usd_micro).unwrap_or_default(),
            output: price.field("output").required().read(value::usd_micro).unwrap_or_default(),
            cached: price.field("cached").read(value::usd_micro),
            cache_write: price.field("cache_write").read(value::usd_micro),
        })
    };
    entries.into_iter().filter_map(price).collect()
}

/// Reads routes with their members; a route's row goes to `rows`, the members come back with the routes' fallbacks, if
/// those end.
fn routes<'a>(field: Field<'a>, names: &Names, rows: &mut Vec<Row>) -> (Vec<Member>, Vec<Chained<'a>>) {
    let (mut members, mut chains) = (Vec::new(), Vec::new());
    let mut lines: HashMap<MemberId, u64> = HashMap::new();
    for mut row in field.rows() {
        let source = row.field("model").required().read(pattern).unwrap_or_else(|| "".into());
        let targets = distinct(row.field("fallbacks"), |text| target(text, names));
        rows.push(Row::Route(Route {
            model: source.clone(),
            fallbacks: targets.iter().map(|(target, _)| target.clone()).collect(),
            sticky_session: row.field("sticky_session").flag(true),
            first_token_seconds: first_token(row.field("first_token_seconds")),
        }));
        for (member, here) in self::members(&mut row, &source, names) {
            let first = lines.insert(member.id.clone(), here.at().line);
            if let Some(first) = first.filter(|_| ![member.channel.as_str(), member.group.as_str()].contains(&"")) {
                here.wrong(format!("duplicate member `{}`, first on line {first}", member.id));
            }
            members.push(member);
        }
        chains.push(Chained { source, targets });
    }
    let ends = refuse_circles(&[&chains], names);
    (members, if ends { chains } else { Vec::new() })
}

fn members<'a>(route: &mut Fields<'a>, model: &ModelName, names: &Names) -> Vec<(Member, Here<'a>)> {
    let field = route.field("members").required();
    if field.is_empty_list() {
        field.here().wrong("a route must have at least one member");
    }
    let placed = field.rows().into_iter().map(|row| (row.here(), row));
    placed.map(|(here, row)| (member(row, model, names), here)).collect()
}

fn member(mut row: Fields<'_>, route: &ModelName, names: &Names) -> Member {
    let channel = names.channels.refer(row.field("channel").required()).unwrap_or_else(|| ChannelId::new(""));
    let group = group_or_only(row.field("group"), names);
    let upstream_model = row.field("upstream_model").read(model);
    let priority = row.field("priority").number(PRIORITY, PRIORITY_DEFAULT);
    Member {
        id: Member::id_of(&group, route, &channel, upstream_model.as_ref()),
        status: status(&mut row),
        route: route.clone(),
        group,
        channel,
        priority: i32::try_from(priority).expect("a priority's bound fits"),
        weight: row.field("weight").number(WEIGHT, WEIGHT_DEFAULT),
        upstream_model,
    }
}

fn group(mut row: Fields<'_>, members: &[Member]) -> Group {
    let id: GroupId = row.field("id").required().id();
    let public = distinct(row.field("public_models"), pattern);
    for (model, here) in &public {
        if let Err(message) = served(model, &id, members) {
            here.wrong(message);
        }
    }
    Group {
        display_name: row.field("display_name").read(line).unwrap_or_else(|| id.to_string()),
        description: row.field("description").read(description).unwrap_or_default(),
        status: status(&mut row),
        public_models: values(public),
        requestable: row.field("requestable").flag(false),
        sticky_policy: row.field("sticky_policy").map().map(sticky_policy),
        failover_policy: row.field("failover_policy").map().map(failover_policy),
        id,
    }
}

/// Whether a name or pattern that a group shows is served by one of the group's members.
fn served(model: &ModelName, group: &GroupId, members: &[Member]) -> Result<(), String> {
    let model = model.as_str();
    let meets = |route: &str| matches(route, model) || matches(model, route);
    let mut members = members.iter().filter(|member| meets(member.route.as_str())).peekable();
    if members.peek().is_none() {
        return Err(format!("no route serves `{}`", value::shown(model)));
    }
    let here = members.any(|member| member.group == *group);
    here.then_some(()).ok_or_else(|| format!("no route of `{}` has a member in this group", value::shown(model)))
}

fn template<'a>(mut row: Fields<'a>, names: &Names, defaults: &[Chained<'a>]) -> Template {
    let retry = row.field("retry").map();
    let [general, context, content] = ["fallbacks", "context_window_fallbacks", "content_policy_fallbacks"]
        .map(|kind| template_chains(row.field(kind), names));
    // Each kind as its failures follow it (`Subject::targets`); a circle among the general ones is told of once.
    if refuse_circles(&[&general, defaults], names) {
        refuse_circles(&[&context, &general, defaults], names);
    } else {
        refuse_circles(&[&context], names);
    }
    refuse_circles(&[&content], names);
    let chain = |Chained { source, targets }: Chained<'_>| Chain { source, targets: values(targets) };
    let [fallbacks, context_window_fallbacks, content_policy_fallbacks] =
        [general, context, content].map(|chains| chains.into_iter().map(chain).collect());
    Template {
        id: row.field("id").required().id(),
        max_attempts: retry.and_then(|mut retry| retry.field("max_attempts").number_if_given(ATTEMPTS)),
        failover_policy: row.field("failover_policy").map().map(failover_policy),
        model_routes: row.field("model_routes").rows().into_iter().map(|row| model_route(row, names)).collect(),
        fallbacks,
        context_window_fallbacks,
        content_policy_fallbacks,
        expose_route: row.field("expose_route").flag(false),
    }
}

fn model_route(mut row: Fields<'_>, names: &Names) -> ModelRoute {
    let model = row.field("model").required().read(|text| source(text, names)).unwrap_or_else(|| "".into());
    let strategy = row.field("strategy").choice(&STRATEGIES, Strategy::Priority);
    let allocations = row.field("allocations");
    let given = allocations.is_given();
    let allocations = allocations.rows().into_iter().map(|mut row| Allocation {
        deployment: row
            .field("deployment")
            .required()
            .read(|text| names.deployment(text).map(Into::into))
            .unwrap_or_else(|| "".into()),
        weight: row.field("weight").required().number(WEIGHT, 0),
    });
    let allocations: Vec<Allocation> = allocations.collect();
    ModelRoute { model, strategy, allocations: given.then_some(allocations) }
}

/// A list of maps from a source to its targets.
fn template_chains<'a>(field: Field<'a>, names: &Names) -> Vec<Chained<'a>> {
    let mut chains: Vec<Chained<'a>> = Vec::new();
    for (here, key, targets) in field.rows().into_iter().flat_map(Fields::entries) {
        let source = source(key, names).map_err(|message| here.wrong(message)).unwrap_or_else(|()| "".into());
        if !source.as_str().is_empty() && chains.iter().any(|chain| chain.source == source) {
            here.wrong(format!("a second chain of `{}`", value::shown(key)));
        }
        chains.push(Chained { source, targets: distinct(targets, |text| target(text, names)) });
    }
    chains
}

fn organization(mut row: Fields<'_>, names: &Names) -> Organization {
    Organization {
        id: row.field("id").required().id(),
        template: names.templates.refer(row.field("template")),
        terms: terms(&mut row, names),
    }
}

fn team(mut row: Fields<'_>, names: &Names) -> Team {
    Team {
        id: row.field("id").required().id(),
        organization: names.organizations.refer(row.field("organization")),
        template: names.templates.refer(row.field("template")),
        terms: terms(&mut row, names),
    }
}

/// Reads keys; two with one secret could not be told apart.
fn keys(field: Field<'_>, names: &Names) -> Vec<Key> {
    let mut owners: HashMap<SecretRef, KeyId> = HashMap::new();
    let mut keys = Vec::new();
    for mut row in field.rows() {
        let secret = row.field("key").required();
        let here = secret.here();
        let secret = secret.secret();
        let id: KeyId = row.field("id").required().id();
        if let Some(owner) = secret.clone().and_then(|secret| owners.insert(secret, id.clone())) {
            here.wrong(format!("the same secret as key `{owner}`"));
        }
        keys.push(Key {
            id,
            status: status(&mut row),
            key: secret.unwrap_or(SecretRef::Env(String::new())),
            team: names.teams.refer(row.field("team")),
            group: group_or_only(row.field("group"), names),
            groups: values(distinct(row.field("groups"), |text| names.groups.known(text).map(GroupId::from))),
            template: names.templates.refer(row.field("template")),
            expose_route: row.field("expose_route").flag(false),
            terms: terms(&mut row, names),
        });
    }
    keys
}

/// The group named, or the only one there is.
fn group_or_only(field: Field<'_>, names: &Names) -> GroupId {
    let only = names.groups.only().filter(|_| !field.is_given());
    if let Some(only) = only {
        return only.into();
    }
    names.groups.refer(field.required()).unwrap_or_else(|| "".into())
}

fn status(row: &mut Fields<'_>) -> Status {
    row.field("status").choice(&[("active", Status::Active), ("disabled", Status::Disabled)], Status::Active)
}

fn model(text: &str) -> Result<ModelName, String> {
    value::model(text).map(ModelName::from)
}

fn pattern(text: &str) -> Result<ModelName, String> {
    value::pattern(text).map(ModelName::from)
}

/// What a template has a rule for: a model, a group, or a route's whole pattern.
fn source(text: &str, names: &Names) -> Result<ModelName, String> {
    value::pattern(text).and_then(|text| names.target(text)).map(ModelName::from)
}

fn target(text: &str, names: &Names) -> Result<ModelName, String> {
    value::model(text).and_then(|text| names.target(text)).map(ModelName::from)
}

fn line(text: &str) -> Result<String, String> {
    value::line(text).map(str::to_owned)
}

fn description(text: &str) -> Result<String, String> {
    if text.len() > DESCRIPTION_BYTES_MAX {
        return Err(format!("expected at most {DESCRIPTION_BYTES_MAX} bytes"));
    }
    Ok(text.to_owned())
}

/// The elements of a list, each with its place; none may stand there twice.
pub(super) fn distinct<'a, T: Clone + Eq + Hash>(
    field: Field<'a>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Vec<(T, Here<'a>)> {
    let mut lines: HashMap<T, u64> = HashMap::new();
    let mut elements = Vec::new();
    for element in field.list() {
        let here = element.here();
        let Some(value) = element.read(&parse) else { continue };
        if let Some(first) = lines.insert(value.clone(), here.at().line) {
            here.wrong(format!("stands in the list twice, first on line {first}"));
        }
        elements.push((value, here));
    }
    elements
}

pub(super) fn values<T>(elements: Vec<(T, Here<'_>)>) -> Vec<T> {
    elements.into_iter().map(|(value, _)| value).collect()
}
