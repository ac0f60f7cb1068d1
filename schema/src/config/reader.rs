//! What one parse has found: problems and settings in use, each with its place.

use std::cell::RefCell;

use super::Problem;
use super::yaml::{At, Fault};

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

/// A field and where it is written.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    /// The path in the file, whether or not it is written there.
    pub(super) path: String,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    File(At),
    /// The variable's name; the environment has no lines.
    Environment(String),
}

/// A spot that can be found fault with.
#[derive(Clone)]
pub(super) struct Here<'a> {
    reader: &'a Reader<'a>,
    pub(super) spot: Spot,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { file, env, problems: RefCell::default(), in_use: RefCell::default() }
    }

    /// A place in the file.
    pub(super) fn here(&'a self, at: At, path: String) -> Here<'a> {
        Here { reader: self, spot: Spot { path, place: Place::File(at) } }
    }

    /// Records what is wrong with the text itself.
    pub(super) fn fault(&'a self, fault: Fault) {
        self.here(fault.at, String::new()).wrong(fault.message);
    }

    /// `message` about `spot`, as the operator reads it.
    pub(super) fn told(&self, spot: &Spot, message: String) -> Problem {
        let (file, at, field) = match &spot.place {
            Place::File(at) => (self.file, (at.line, at.column), &spot.path),
            Place::Environment(variable) => (ENVIRONMENT, (0, 0), variable),
        };
        Problem { file: file.to_owned(), line: at.0, column: at.1, field: field.clone(), message }
    }

    /// All problems: those of the file by line, then those of the environment.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = self.problems.borrow().clone();
        let key = |p: &Problem| (p.line == 0, p.line, p.column, p.field.clone(), p.message.clone());
        problems.sort_by_cached_key(key);
        problems.dedup();
        if self.problems.borrow().len() == PROBLEMS_MAX {
            let message = "there are more problems than these".to_owned();
            problems.push(Problem { file: self.file.to_owned(), line: 0, column: 0, field: String::new(), message });
        }
        problems
    }

    /// The settings that were given and say more than "no", in reading order.
    pub(super) fn in_use(&self) -> Vec<Spot> {
        self.in_use.borrow().clone()
    }
}

impl<'a> Here<'a> {
    /// Records a problem.
    pub(super) fn wrong(&self, message: impl Into<String>) {
        let mut problems = self.reader.problems.borrow_mut();
        if problems.len() < PROBLEMS_MAX {
            problems.push(self.reader.told(&self.spot, message.into()));
        }
    }

    /// Records that the setting is relied on.
    pub(super) fn note_in_use(&self) {
        self.reader.in_use.borrow_mut().push(self.spot.clone());
    }

    /// The same field as the environment's `variable` gives it.
    pub(super) fn in_environment(&self, variable: &str) -> Self {
        let spot = Spot { path: self.spot.path.clone(), place: Place::Environment(variable.to_owned()) };
        Self { reader: self.reader, spot }
    }

    /// Another place in the file.
    pub(super) fn elsewhere(&self, at: At, path: String) -> Self {
        self.reader.here(at, path)
    }

    /// The value of a variable of the environment.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
        // Compose files and unit files pass a variable that is not set as an empty one.
        (self.reader.env)(name).filter(|value| !value.is_empty())
    }

    /// Where this is in the file, or the file's start.
    pub(super) fn at(&self) -> At {
        match self.spot.place {
            Place::File(at) => at,
            Place::Environment(_) => At::START,
        }
    }
}
