//! Typed reading of the tree: a map hands out its fields by name, a field says what it may be.
//!
//! A reader that finds a fault records it with its place and hands out a stand-in, so that one pass names every fault
//! of the file; with a fault on record no [`Config`](super::Config) is made, so that a stand-in never gets out.
//! A setting's environment variables are looked up where the setting is read: none exists without its override.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use super::Problem;
use super::value;
use super::yaml::{At, Fault, Key, Kind, Node};
use crate::secret::SecretRef;

/// The first part of every override's name.
const PREFIX: &str = "WAYBILL";

/// What a problem with an override names as its file.
const ENVIRONMENT: &str = "environment";

/// Problems named at once; a file with more is another kind of file.
const PROBLEMS_MAX: usize = 200;

/// What one parse reads from, and what it has found.
pub(super) struct Reader<'a> {
    file: &'a str,
    env: &'a dyn Fn(&str) -> Option<String>,
    problems: RefCell<Vec<Problem>>,
    in_use: RefCell<Vec<Spot>>,
}

/// A field and where it is written; the environment has no places.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    pub(super) at: Option<At>,
    /// The path in the file, whether or not it is written there.
    pub(super) path: String,
    variable: Option<String>,
}

impl Spot {
    /// A place in the file.
    pub(super) fn in_file(at: At, path: String) -> Self {
        Self { at: Some(at), path, variable: None }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { file, env, problems: RefCell::default(), in_use: RefCell::default() }
    }

    /// Records a problem.
    pub(super) fn problem(&self, spot: &Spot, message: impl Into<String>) {
        let mut problems = self.problems.borrow_mut();
        if problems.len() < PROBLEMS_MAX {
            problems.push(self.told(spot, message.into()));
        }
    }

    /// Records what is wrong with the text itself.
    pub(super) fn fault(&self, fault: Fault) {
        self.problem(&Spot::in_file(fault.at, String::new()), fault.message);
    }

    /// `message` about `spot`, as the operator reads it.
    pub(super) fn told(&self, spot: &Spot, message: String) -> Problem {
        let (file, field) = match &spot.variable {
            Some(variable) => (ENVIRONMENT, variable),
            None => (self.file, &spot.path),
        };
        let (line, column) = spot.at.map_or((0, 0), |at| (at.line, at.column));
        Problem { file: file.to_owned(), line, column, field: field.clone(), message }
    }

    /// All problems: those of the file by line, then those of the environment.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = self.problems.borrow().clone();
        problems.sort_by(|a, b| {
            let key = |p: &Problem| (p.line == 0, p.line, p.column, p.field.clone(), p.message.clone());
            key(a).cmp(&key(b))
        });
        problems.dedup();
        problems
    }

    /// The settings that were given and say more than "no", in reading order.
    pub(super) fn in_use(&self) -> Vec<Spot> {
        self.in_use.borrow().clone()
    }

    /// The whole document.
    pub(super) fn root(&'a self, node: &'a Node) -> Fields<'a> {
        let spot = Spot::in_file(node.at, String::new());
        let field = Field { reader: self, node: Some(node), spot, variable: Some(PREFIX.to_owned()), seed: None };
        field.section()
    }

    fn variable(&self, name: &str) -> Option<String> {
        // Compose files and unit files pass a variable that is not set as an empty one.
        (self.env)(name).filter(|value| !value.is_empty())
    }
}

/// A map being read. Dropping it names the fields that nobody asked for.
pub(super) struct Fields<'a> {
    reader: &'a Reader<'a>,
    at: At,
    path: String,
    entries: &'a [(Key, Node)],
    variable: Option<String>,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The field `name`, there or not.
    pub(super) fn field(&mut self, name: &'static str) -> Field<'a> {
        self.asked.push(name);
        let entry = self.entries.iter().find(|(key, _)| key.text == name).map(|(_, node)| node);
        let node = entry.filter(|node| !matches!(node.kind, Kind::Null));
        let spot = Spot::in_file(entry.map_or(self.at, |node| node.at), self.child(name));
        if node.is_some_and(says_something) {
            self.reader.in_use.borrow_mut().push(spot.clone());
        }
        let variable = self.variable.as_ref().map(|prefix| format!("{prefix}_{}", name.to_ascii_uppercase()));
        Field { reader: self.reader, node, spot, variable, seed: None }
    }

    /// Where the map itself stands.
    pub(super) fn spot(&self) -> Spot {
        Spot::in_file(self.at, self.path.clone())
    }

    /// Every entry of a map whose keys are the operator's own.
    pub(super) fn entries(mut self) -> Vec<(&'a Key, Field<'a>)> {
        let entries = std::mem::take(&mut self.entries);
        let field = |(key, node): &'a (Key, Node)| {
            let spot = Spot::in_file(node.at, self.child(&value::shown(&key.text)));
            (key, Field { reader: self.reader, node: Some(node), spot, variable: None, seed: None })
        };
        entries.iter().map(field).collect()
    }

    fn child(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

impl Drop for Fields<'_> {
    fn drop(&mut self) {
        for (key, _) in self.entries.iter().filter(|(key, _)| !self.asked.contains(&key.text.as_str())) {
            let suggestion = value::suggestion(&key.text, self.asked.iter().copied());
            let name = value::shown(&key.text);
            let spot = Spot::in_file(key.at, self.child(&name));
            self.reader.problem(&spot, format!("unknown field `{name}`{suggestion}"));
        }
    }
}

/// Whether a value that was given asks for anything.
fn says_something(node: &Node) -> bool {
    match &node.kind {
        Kind::Null => false,
        Kind::Scalar(text) => value::flag(text) != Ok(false),
        Kind::Seq(nodes) => !nodes.is_empty(),
        Kind::Map(entries) => !entries.is_empty(),
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
    pub(super) reader: &'a Reader<'a>,
    node: Option<&'a Node>,
    spot: Spot,
    /// The override's name; none inside the catalogue.
    variable: Option<String>,
    seed: Option<Seed>,
}

/// The text of a scalar, and where it comes from.
struct Written {
    text: String,
    spot: Spot,
    unit: u32,
}

impl<'a> Field<'a> {
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
            self.wrong("is missing");
        }
        self
    }

    /// Whether the field is given, in the file or in the environment.
    pub(super) fn is_given(&self) -> bool {
        self.node.is_some() || self.overridden().is_some()
    }

    /// The value of the variable that overrides the field, if one does.
    pub(super) fn variable(&self) -> Option<(String, String)> {
        let name = self.variable.clone()?;
        self.reader.variable(&name).map(|text| (name, text))
    }

    /// Where the field is written, or would be.
    pub(super) fn spot(&self) -> Spot {
        self.overridden().map_or_else(|| self.spot.clone(), |written| written.spot)
    }

    /// Records a problem with the field.
    pub(super) fn wrong(&self, message: impl Into<String>) {
        self.reader.problem(&self.spot(), message);
    }

    /// A section of settings, whose own fields can be overridden whether it is there or not.
    pub(super) fn section(self) -> Fields<'a> {
        let variable = self.variable.clone();
        let (reader, spot) = (self.reader, self.spot.clone());
        let at = spot.at.unwrap_or(At::START);
        let empty = Fields { reader, at, path: spot.path, entries: &[], variable, asked: Vec::new() };
        self.map().unwrap_or(empty)
    }

    /// The map that stands here.
    pub(super) fn map(self) -> Option<Fields<'a>> {
        let node = self.node?;
        let Kind::Map(entries) = &node.kind else {
            self.wrong(format!("expected a map, found {}", node.kind));
            return None;
        };
        let (path, variable) = (self.spot.path, self.variable);
        Some(Fields { reader: self.reader, at: node.at, path, entries, variable, asked: Vec::new() })
    }

    /// Whether the file is to be read here and holds a map, where a word can stand as well.
    pub(super) fn is_map(&self) -> bool {
        self.overridden().is_none() && matches!(self.node.map(|node| &node.kind), Some(Kind::Map(_)))
    }

    /// Whether the file is to be read here and holds a list, where a word can stand as well.
    pub(super) fn is_list(&self) -> bool {
        self.overridden().is_none() && matches!(self.node.map(|node| &node.kind), Some(Kind::Seq(_)))
    }

    /// The elements of the list that stands here.
    pub(super) fn list(self) -> Vec<Field<'a>> {
        let Some(node) = self.node else { return Vec::new() };
        if !matches!(node.kind, Kind::Seq(_)) {
            self.wrong(format!("expected a list, found {}", node.kind));
        }
        let field = |(i, node): (usize, &'a Node)| {
            let spot = Spot::in_file(node.at, format!("{}[{i}]", self.spot.path));
            Field { reader: self.reader, node: Some(node), spot, variable: None, seed: None }
        };
        node.elements().iter().enumerate().map(field).collect()
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
        let problem = |message| self.reader.problem(&written.spot, message);
        parse(&written.text, written.unit).map_err(problem).ok()
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
    fn written(&self) -> Option<Written> {
        if let Some(written) = self.overridden() {
            if value::flag(&written.text) != Ok(false) {
                self.reader.in_use.borrow_mut().push(written.spot.clone());
            }
            return Some(written);
        }
        let node = self.node?;
        let Some(text) = node.text() else {
            self.wrong(format!("expected a single value, found {}", node.kind));
            return None;
        };
        Some(Written { text: text.to_owned(), spot: self.spot.clone(), unit: 1 })
    }

    fn overridden(&self) -> Option<Written> {
        let written = |text, name: &str, unit| {
            let spot = Spot { at: None, path: self.spot.path.clone(), variable: Some(name.to_owned()) };
            Written { text, spot, unit }
        };
        if let Some((name, text)) = self.variable() {
            return Some(written(text, &name, 1));
        }
        let Seed { name, unit } = self.seed?;
        self.reader.variable(name).map(|text| written(text, name, unit))
    }
}
