//! The catalogue section as rows.

use std::collections::HashMap;
use std::hash::Hash;

use super::chains::{Chained, refuse_circles};
use super::fields::{Field, Fields, Spot};
use super::names::Names;
use super::settings::{ATTEMPTS, failover_policy, first_token, sticky_policy};
use super::value;
use crate::catalogue::{
    Allocation, Chain, Channel, Dialect, Group, Key, Member, ModelRoute, Organization, Route, Row, Status, Strategy,
    Team, Template, matches,
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

const DIALECTS: [(&str, Dialect); 4] = [
    ("chat", Dialect::Chat),
    ("responses", Dialect::Responses),
    ("messages", Dialect::Messages),
    ("embeddings", Dialect::Embeddings),
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
    let members = routes(catalogue.field("routes"), names, &mut rows);
    rows.extend(catalogue.field("groups").rows().into_iter().map(|row| Row::Group(group(row, &members))));
    rows.extend(members.into_iter().map(Row::Member));
    rows.extend(catalogue.field("templates").rows().into_iter().map(|row| Row::Template(template(row, names))));
    let organizations = catalogue.field("organizations").rows();
    rows.extend(organizations.into_iter().map(|row| Row::Organization(organization(row, names))));
    rows.extend(catalogue.field("teams").rows().into_iter().map(|row| Row::Team(team(row, names))));
    rows.extend(keys(catalogue.field("keys"), names).into_iter().map(Row::Key));
    rows.sort_by_cached_key(Row::key);
    rows
}

fn channel(mut row: Fields<'_>) -> Channel {
    let dialects = row.field("dialects").required();
    let no_dialect = dialects.is_list().then(|| (dialects.reader, dialects.spot()));
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
    };
    row.field("discover").flag(false);
    if let Some((reader, spot)) = no_dialect.filter(|(_, spot)| channel.dialects.is_empty() && spot.at.is_some()) {
        reader.problem(&spot, "a channel must speak at least one dialect");
    }
    channel
}

fn labels(field: Field<'_>) -> std::collections::BTreeMap<String, String> {
    let (reader, spot) = (field.reader, field.spot());
    let entries = field.map().map(Fields::entries).unwrap_or_default();
    if entries.len() > LABELS_MAX {
        reader.problem(&spot, format!("more than {LABELS_MAX} labels"));
    }
    let label = |(key, field): (&super::yaml::Key, Field<'_>)| {
        let spot = Spot::in_file(key.at, field.spot().path);
        let name =
            value::id(&key.text).map_err(|message| reader.problem(&spot, message)).unwrap_or_default().to_owned();
        (name, field.read(|text| value::line(text).map(str::to_owned)).unwrap_or_default())
    };
    entries.into_iter().map(label).collect()
}

/// Reads routes with their members; a route's row goes to `rows`, the members come back.
fn routes(field: Field<'_>, names: &Names, rows: &mut Vec<Row>) -> Vec<Member> {
    let reader = field.reader;
    let (mut members, mut chains) = (Vec::new(), Vec::new());
    let mut places: HashMap<MemberId, Option<u64>> = HashMap::new();
    for mut row in field.rows() {
        let source = row.field("model").required().read(pattern).unwrap_or_else(|| "".into());
        let targets = distinct(row.field("fallbacks"), |text| target(text, names));
        rows.push(Row::Route(Route {
            model: source.clone(),
            fallbacks: targets.iter().map(|(target, _)| target.clone()).collect(),
            sticky_session: row.field("sticky_session").flag(true),
            first_token_seconds: first_token(row.field("first_token_seconds")),
        }));
        for (member, spot) in self::members(&mut row, &source, names) {
            let line = spot.at.map(|at| at.line);
            if let Some(first) = places.insert(member.id.clone(), line).flatten() {
                reader.problem(&spot, format!("duplicate member `{}`, first on line {first}", member.id));
            }
            members.push(member);
        }
        chains.push(Chained { source, targets });
    }
    refuse_circles(reader, &chains);
    members
}

fn members(route: &mut Fields<'_>, model: &ModelName, names: &Names) -> Vec<(Member, Spot)> {
    let field = route.field("members").required();
    let (reader, spot, is_list) = (field.reader, field.spot(), field.is_list());
    let rows = field.list();
    if is_list && rows.is_empty() {
        reader.problem(&spot, "a route must have at least one member");
    }
    rows.into_iter()
        .filter_map(Field::map)
        .map(|row| (row.spot(), row))
        .map(|(spot, row)| (member(row, model, names), spot))
        .collect()
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
    let public = row.field("public_models");
    let reader = public.reader;
    let public = distinct(public, pattern);
    for (shown, spot) in &public {
        let meets = |route: &str| matches(route, shown.as_str()) || matches(shown.as_str(), route);
        let mut routes = members.iter().filter(|member| meets(member.route.as_str())).peekable();
        if routes.peek().is_none() {
            reader.problem(spot, format!("no route serves `{}`", value::shown(shown.as_str())));
        } else if routes.all(|member| member.group != id) {
            reader.problem(spot, format!("no route of `{}` has a member in this group", value::shown(shown.as_str())));
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

fn template(mut row: Fields<'_>, names: &Names) -> Template {
    let retry = row.field("retry").map();
    Template {
        id: row.field("id").required().id(),
        max_attempts: retry.and_then(|mut retry| retry.field("max_attempts").number_if_given(ATTEMPTS)),
        model_routes: row.field("model_routes").rows().into_iter().map(|row| model_route(row, names)).collect(),
        fallbacks: template_chains(row.field("fallbacks"), names),
        context_window_fallbacks: template_chains(row.field("context_window_fallbacks"), names),
        content_policy_fallbacks: template_chains(row.field("content_policy_fallbacks"), names),
        expose_route: row.field("expose_route").flag(false),
    }
}

fn model_route(mut row: Fields<'_>, names: &Names) -> ModelRoute {
    let model = row.field("model").required().read(|text| target(text, names)).unwrap_or_else(|| "".into());
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
fn template_chains(field: Field<'_>, names: &Names) -> Vec<Chain> {
    let reader = field.reader;
    let mut chains: Vec<Chained> = Vec::new();
    for (key, targets) in field.rows().into_iter().flat_map(Fields::entries) {
        let spot = Spot::in_file(key.at, targets.spot().path);
        let source = target(&key.text, names).map_err(|message| reader.problem(&spot, message));
        let source = source.unwrap_or_else(|()| "".into());
        if chains.iter().any(|chain| chain.source == source) && !source.as_str().is_empty() {
            reader.problem(&spot, format!("a second chain of `{}`", value::shown(source.as_str())));
        }
        chains.push(Chained { source, targets: distinct(targets, |text| target(text, names)) });
    }
    refuse_circles(reader, &chains);
    let chain = |Chained { source, targets }| Chain { source, targets: values(targets) };
    chains.into_iter().map(chain).collect()
}

fn organization(mut row: Fields<'_>, names: &Names) -> Organization {
    Organization { id: row.field("id").required().id(), template: names.templates.refer(row.field("template")) }
}

fn team(mut row: Fields<'_>, names: &Names) -> Team {
    Team {
        id: row.field("id").required().id(),
        organization: names.organizations.refer(row.field("organization")),
        template: names.templates.refer(row.field("template")),
    }
}

/// Reads keys; two with one secret could not be told apart.
fn keys(field: Field<'_>, names: &Names) -> Vec<Key> {
    let reader = field.reader;
    let mut owners: HashMap<SecretRef, KeyId> = HashMap::new();
    let mut keys = Vec::new();
    for mut row in field.rows() {
        let secret = row.field("key").required();
        let spot = secret.spot();
        let secret = secret.secret();
        let id: KeyId = row.field("id").required().id();
        let owner = secret.clone().and_then(|secret| owners.insert(secret, id.clone()));
        if let Some(owner) = owner {
            reader.problem(&spot, format!("the same secret as key `{owner}`"));
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

fn target(text: &str, names: &Names) -> Result<ModelName, String> {
    value::pattern(text).and_then(|text| names.target(text)).map(ModelName::from)
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
fn distinct<T: Clone + Eq + Hash>(field: Field<'_>, parse: impl Fn(&str) -> Result<T, String>) -> Vec<(T, Spot)> {
    let reader = field.reader;
    let mut lines: HashMap<T, u64> = HashMap::new();
    let mut elements = Vec::new();
    for element in field.list() {
        let spot = element.spot();
        let Some(value) = element.read(&parse) else { continue };
        let line = spot.at.map_or(0, |at| at.line);
        if let Some(first) = lines.insert(value.clone(), line) {
            reader.problem(&spot, format!("stands in the list twice, first on line {first}"));
        }
        elements.push((value, spot));
    }
    elements
}

fn values<T>(elements: Vec<(T, Spot)>) -> Vec<T> {
    elements.into_iter().map(|(value, _)| value).collect()
}
