//! The names a catalogue defines, gathered before its rows are read: a reference may stand before what it names.

use std::collections::{BTreeMap, BTreeSet};

use super::fields::Field;
use super::reader::Reader;
use super::value::{shown, suggestion};
use super::yaml::Node;
use crate::catalogue::{is_pattern, matches, specificity};

/// Everything that can be referred to.
pub(super) struct Names {
    pub(super) channels: Named,
    pub(super) groups: Named,
    pub(super) routes: Named,
    pub(super) templates: Named,
    pub(super) organizations: Named,
    pub(super) teams: Named,
    deployments: Deployments,
}

/// The names of one kind.
pub(super) struct Named {
    kind: &'static str,
    lines: BTreeMap<String, u64>,
}

/// The deployments that members make.
#[derive(Default)]
struct Deployments {
    named: BTreeSet<String>,
    /// Channels that send on whatever name matched a pattern: channel and pattern.
    open: Vec<(String, String)>,
}

impl Names {
    /// Gathers the names of `catalogue` and records those defined twice.
    pub(super) fn gather<'a>(reader: &'a Reader<'a>, catalogue: Option<&Node>) -> Self {
        let named = |kind, list, key| Named::gather(reader, catalogue, kind, list, key);
        let names = Self {
            channels: named("channel", "channels", "id"),
            groups: named("group", "groups", "id"),
            routes: named("route", "routes", "model"),
            templates: named("template", "templates", "id"),
            organizations: named("organization", "organizations", "id"),
            teams: named("team", "teams", "id"),
            deployments: Deployments::gather(elements(catalogue, "routes")),
        };
        // Keys are referred to by nothing; they only must not be two of one name.
        named("key", "keys", "id");
        names
    }

    /// A model that some route serves, or a group.
    pub(super) fn target<'t>(&self, text: &'t str) -> Result<&'t str, String> {
        let routes = self.routes.lines.keys();
        let served = routes.clone().any(|route| route == text || matches(route, text));
        if served || self.groups.contains(text) {
            return Ok(text);
        }
        let words = routes.filter(|route| !is_pattern(route)).chain(self.groups.lines.keys());
        Err(format!("no route serves `{}`{}", shown(text), suggestion(text, words.map(String::as_str))))
    }

    /// The route that serves a model, by its name or the most specific pattern; a group's name goes before patterns.
    pub(super) fn route_of(&self, model: &str) -> Option<&str> {
        let routes = self.routes.lines.keys().map(String::as_str);
        let patterns = routes.filter(|route| matches(route, model)).min_by_key(|route| specificity(route));
        match self.routes.lines.get_key_value(model) {
            Some((route, _)) => Some(route),
            None if self.groups.contains(model) => None,
            None => patterns,
        }
    }

    /// A deployment that some member makes.
    pub(super) fn deployment<'t>(&self, text: &'t str) -> Result<&'t str, String> {
        let Deployments { named, open } = &self.deployments;
        let is_open = |(channel, model): (&str, &str)| open.iter().any(|(c, p)| c == channel && matches(p, model));
        if named.contains(text) || text.split_once('/').is_some_and(is_open) {
            return Ok(text);
        }
        let suggestion = suggestion(text, named.iter().map(String::as_str));
        Err(format!("no member makes the deployment `{}`, written channel/upstream-model{suggestion}", shown(text)))
    }
}

impl Named {
    fn gather<'a>(reader: &'a Reader<'a>, catalogue: Option<&Node>, kind: &'static str, list: &str, key: &str) -> Self {
        let mut lines = BTreeMap::new();
        for (i, row) in elements(catalogue, list).iter().enumerate() {
            let Some((at, text)) = row.get(key).and_then(|node| Some((node.at, node.text()?))) else { continue };
            match lines.get(text) {
                None => drop(lines.insert(text.to_owned(), at.line)),
                Some(first) => {
                    let message = format!("duplicate {kind} `{}`, first on line {first}", shown(text));
                    reader.here(at, format!("catalogue.{list}[{i}].{key}")).wrong(message);
                }
            }
        }
        Self { kind, lines }
    }

    /// Whether the name is defined.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.lines.contains_key(name)
    }

    /// The name, where there is but one.
    pub(super) fn only(&self) -> Option<&str> {
        let mut names = self.lines.keys();
        names.next().filter(|_| names.next().is_none()).map(String::as_str)
    }

    /// The name that `field` refers to, if it is given.
    pub(super) fn refer<T: for<'t> From<&'t str>>(&self, field: Field<'_>) -> Option<T> {
        field.read(|text| self.known(text).map(T::from))
    }

    /// `text`, if it is a name of this kind.
    pub(super) fn known<'t>(&self, text: &'t str) -> Result<&'t str, String> {
        if self.contains(text) {
            return Ok(text);
        }
        let suggestion = suggestion(text, self.lines.keys().map(String::as_str));
        Err(format!("unknown {} `{}`{suggestion}", self.kind, shown(text)))
    }
}

impl Deployments {
    fn gather(routes: &[Node]) -> Self {
        let mut deployments = Self::default();
        for route in routes {
            let Some(model) = route.get("model").and_then(Node::text) else { continue };
            for member in route.get("members").map(Node::elements).unwrap_or_default() {
                let Some(channel) = member.get("channel").and_then(Node::text) else { continue };
                match member.get("upstream_model").and_then(Node::text) {
                    Some(upstream) => drop(deployments.named.insert(format!("{channel}/{upstream}"))),
                    None if is_pattern(model) => deployments.open.push((channel.to_owned(), model.to_owned())),
                    None => drop(deployments.named.insert(format!("{channel}/{model}"))),
                }
            }
        }
        deployments
    }
}

fn elements<'n>(catalogue: Option<&'n Node>, list: &str) -> &'n [Node] {
    catalogue.and_then(|node| node.get(list)).map(Node::elements).unwrap_or_default()
}
