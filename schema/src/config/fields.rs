//! Typed reading of the tree: a map hands out its fields by name, a field says what it may be.
//!
//! A reader that finds a fault records it with its place and hands out a stand-in, so that one pass names every fault
//! of the file; with a fault on record no [`Config`](super::Config) is made, so that a stand-in never gets out.
//! A setting's environment variables are looked up where the setting is read: none exists without its override.

use std::ops::RangeInclusive;

use super::reader::{Here, Reader};
use super::value;
use super::yaml::{Key, Kind, Node};
use crate::secret::SecretRef;

/// The first part of every override's name.
const PREFIX: &str = "WAYBILL";

/// A map being read. Dropping it names the fields that nobody asked for.
pub(super) struct Fields<'a> {
    here: Here<'a>,
    entries: &'a [(Key, Node)],
    /// The first part of the names of its fields' overrides; none inside the catalogue.
    prefix: Option<String>,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The whole document.
    pub(super) fn root(reader: &'a Reader<'a>, node: &'a Node) -> Self {
        let here = reader.here(node.at, String::new());
        Field { here, node: Some(node), variable: Some(PREFIX.to_owned()), seed: None }.section()
    }

    /// The field `name`, there or not.
    pub(super) fn field(&mut self, name: &'static str) -> Field<'a> {
        self.asked.push(name);
        let entry = self.entries.iter().find(|(key, _)| key.text == name).map(|(_, node)| node);
        let here = self.here.elsewhere(entry.map_or(self.here.at(), |node| node.at), self.child(name));
        let variable = self.prefix.as_ref().map(|prefix| format!("{prefix}_{}", name.to_ascii_uppercase()));
        let node = entry.filter(|node| !matches!(node.kind, Kind::Null));
        if node.is_some_and(|node| node.text().is_none() && !node.is_empty()) {
            here.note_in_use();
        }
        Field { here, node, variable, seed: None }
    }

    /// Where the map itself stands.
    pub(super) fn here(&self) -> Here<'a> {
        self.here.clone()
    }

    /// Every entry of a map whose keys are the operator's own: where the key stands, the key, the value.
    pub(super) fn entries(mut self) -> Vec<(Here<'a>, &'a str, Field<'a>)> {
        let entries = std::mem::take(&mut self.entries);
        let entry = |(key, node): &'a (Key, Node)| {
            let path = self.child(&value::shown(&key.text));
            let value = Field::element(self.here.elsewhere(node.at, path.clone()), node);
            (self.here.elsewhere(key.at, path), key.text.as_str(), value)
        };
        entries.iter().map(entry).collect()
    }

    fn child(&self, name: &str) -> String {
        let path = &self.here.spot.path;
        if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
    }
}

impl Drop for Fields<'_> {
    fn drop(&mut self) {
        for (key, _) in self.entries.iter().filter(|(key, _)| !self.asked.contains(&key.text.as_str())) {
            let mut hint = value::suggestion(&key.text, self.asked.iter().copied());
            if hint.is_empty() && !self.asked.is_empty() {
                hint = format!(": expected one of {}", self.asked.join(", "));
            }
            let name = value::shown(&key.text);
            let message = format!("unknown field `{name}`{hint}");
            self.here.elsewhere(key.at, self.child(&name)).wrong(message);
        }
    }
}

/// A variable of seed 2 that stands for a setting of ours.
#[derive(Clone, Copy)]
struct Seed {
    name: &'static str,
    /// How many of our units one of its units is.
    unit: u32,
}

/// One field, there or not.
pub(super) struct Field<'a> {
    /// Its place in the file, whether or not the file is what counts.
    here: Here<'a>,
    node: Option<&'a Node>,
    /// The override's name; none inside the catalogue.
    variable: Option<String>,
    seed: Option<Seed>,
}

/// The text of a scalar, and where it comes from.
struct Written<'a> {
    text: String,
    here: Here<'a>,
    unit: u32,
}

impl<'a> Field<'a> {
    /// An element of a list, or the value of a key of the operator's own.
    fn element(here: Here<'a>, node: &'a Node) -> Self {
        Self { here, node: Some(node), variable: None, seed: None }
    }

    /// Lets seed 2's variable `name` override the field, below our own.
    pub(super) fn seed(mut self, name: &'static str) -> Self {
        self.seed = Some(Seed { name, unit: 1 });
        self
    }

    /// Lets seed 2's variable `name`, in minutes, override the field, in seconds.
    pub(super) fn seed_minutes(mut self, name: &'static str) -> Self {
        self.seed = Some(Seed { name, unit: 60 });
        self
    }

    /// Takes the field from the file alone: the catalogue is the same on every instance.
    pub(super) fn file_only(mut self) -> Self {
        self.variable = None;
        self
    }

    /// Refuses that the field is missing.
    pub(super) fn required(self) -> Self {
        if self.node.is_none() && self.overridden().is_none() {
            self.here.wrong("is missing");
        }
        self
    }

    /// Whether the field is given, in the file or in the environment.
    pub(super) fn is_given(&self) -> bool {
        self.node.is_some() || self.overridden().is_some()
    }

    /// Whether the field stands in the file.
    pub(super) fn is_in_file(&self) -> bool {
        self.node.is_some()
    }

    /// Whether our own variable overrides the field.
    pub(super) fn is_overridden(&self) -> bool {
        self.variable().is_some()
    }

    /// Where the field is written, or would be.
    pub(super) fn here(&self) -> Here<'a> {
        self.overridden().map_or_else(|| self.here.clone(), |written| written.here)
    }

    /// A section of settings, whose own fields can be overridden whether it is there or not.
    pub(super) fn section(self) -> Fields<'a> {
        let empty = Fields { here: self.here.clone(), entries: &[], prefix: self.variable.clone(), asked: Vec::new() };
        self.map().unwrap_or(empty)
    }

    /// The map that stands here.
    pub(super) fn map(self) -> Option<Fields<'a>> {
        let node = self.node?;
        let Kind::Map(entries) = &node.kind else {
            self.here.wrong(format!("expected a map, found {}", node.kind));
            return None;
        };
        Some(Fields { here: self.here, entries, prefix: self.variable, asked: Vec::new() })
    }

    /// Whether the file is to be read here and holds a map, where a word can stand as well.
    pub(super) fn is_map(&self) -> bool {
        self.overridden().is_none() && matches!(self.node.map(|node| &node.kind), Some(Kind::Map(_)))
    }

    /// Whether the file is to be read here and holds a list, where a word can stand as well.
    pub(super) fn is_list(&self) -> bool {
        self.overridden().is_none() && matches!(self.node.map(|node| &node.kind), Some(Kind::Seq(_)))
    }

    /// Whether a list of nothing stands here.
    pub(super) fn is_empty_list(&self) -> bool {
        self.is_list() && self.node.is_some_and(Node::is_empty)
    }

    /// The elements of the list that stands here.
    pub(super) fn list(self) -> Vec<Field<'a>> {
        let Some(node) = self.node else { return Vec::new() };
        if !matches!(node.kind, Kind::Seq(_)) {
            self.here.wrong(format!("expected a list, found {}", node.kind));
        }
        let path = &self.here.spot.path;
        let element =
            |(i, node): (usize, &'a Node)| Field::element(self.here.elsewhere(node.at, format!("{path}[{i}]")), node);
        node.elements().iter().enumerate().map(element).collect()
    }

    /// The maps of the list that stands here.
    pub(super) fn rows(self) -> Vec<Fields<'a>> {
        self.list().into_iter().filter_map(Field::map).collect()
    }

    /// The scalar that stands here, as `parse` understands it.
    pub(super) fn read<T>(self, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        self.read_in_units(|text, _| parse(text))
    }

    fn read_in_units<T>(self, parse: impl FnOnce(&str, u32) -> Result<T, String>) -> Option<T> {
        let written = self.written()?;
        parse(&written.text, written.unit).map_err(|message| written.here.wrong(message)).ok()
    }

    /// A switch.
    pub(super) fn flag(self, default: bool) -> bool {
        self.read(value::flag).unwrap_or(default)
    }

    /// A whole number within `bounds`, if one is given.
    pub(super) fn number_if_given(self, bounds: RangeInclusive<u32>) -> Option<u32> {
        self.read_in_units(|text, unit| value::number(text, &bounds, unit))
    }

    /// A whole number within `bounds`.
    pub(super) fn number(self, bounds: RangeInclusive<u32>, default: u32) -> u32 {
        self.number_if_given(bounds).unwrap_or(default)
    }

    /// A decimal number, in thousandths.
    pub(super) fn permille(self, bounds: RangeInclusive<u32>, default: u32) -> u32 {
        self.read(|text| value::permille(text, &bounds)).unwrap_or(default)
    }

    /// One of `words`.
    pub(super) fn choice<T: Copy>(self, words: &[(&str, T)], default: T) -> T {
        self.read(|text| value::choice(text, words)).unwrap_or(default)
    }

    /// A name of our own making.
    pub(super) fn id<T: for<'t> From<&'t str>>(self) -> T {
        self.read(|text| value::id(text).map(T::from)).unwrap_or_else(|| T::from(""))
    }

    /// A place of a secret. The variable that overrides it holds the secret itself, so it becomes its place.
    pub(super) fn secret(self) -> Option<SecretRef> {
        match self.variable() {
            Some((name, text)) => Some(value::secret(&text).unwrap_or(SecretRef::Env(name))),
            None => self.read(value::secret),
        }
    }

    /// The text of the scalar that is in force: our variable's, else the seed's, else the file's.
    fn written(&self) -> Option<Written<'a>> {
        let written = self.overridden().or_else(|| self.written_in_file())?;
        if value::flag(&written.text) != Ok(false) {
            written.here.note_in_use();
        }
        Some(written)
    }

    fn written_in_file(&self) -> Option<Written<'a>> {
        let node = self.node?;
        let text = node.text().map(str::to_owned);
        if text.is_none() {
            self.here.wrong(format!("expected a single value, found {}", node.kind));
        }
        Some(Written { text: text?, here: self.here.clone(), unit: 1 })
    }

    fn overridden(&self) -> Option<Written<'a>> {
        let written = |text, name: &str, unit| Written { text, here: self.here.in_environment(name), unit };
        if let Some((name, text)) = self.variable() {
            return Some(written(text, &name, 1));
        }
        let Seed { name, unit } = self.seed?;
        self.here.variable(name).map(|text| written(text, name, unit))
    }

    /// Our own variable, if it is set: its name and its value.
    fn variable(&self) -> Option<(String, String)> {
        let name = self.variable.clone()?;
        self.here.variable(&name).map(|text| (name, text))
    }
}
