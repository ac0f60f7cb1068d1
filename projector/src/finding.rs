//! What a store holds that the log does not say: by table and key, for people to look at.

use std::fmt;

use serde::Serialize;

/// So many findings are named for a table, or for the keys of a generation; all that were met are counted.
pub const NAMED_MAX: usize = 20;

/// How a row or a key differs from a fresh fold of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The log says it, and it is not there.
    Missing,
    /// It is there, and the log says nothing of it.
    Extra,
    /// The log says another value; of a row, in these columns.
    Changed(Vec<String>),
}

/// One difference between a store and the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The table; the server's kind where there are none.
    pub place: String,
    /// The key.
    pub key: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// The differences that were found.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize)]
pub struct Findings {
    /// How many there are; at least so many where [`Findings::more`] says so.
    pub n: u64,
    /// Whether there may be more.
    pub more: bool,
    /// The first [`NAMED_MAX`] of each place.
    pub named: Vec<Finding>,
}

impl Findings {
    /// Takes in the differences of one place.
    pub(crate) fn extend(&mut self, findings: impl IntoIterator<Item = Finding>) {
        for (n, finding) in findings.into_iter().enumerate() {
            self.n += 1;
            if n < NAMED_MAX {
                self.named.push(finding);
            }
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, key, fault } = self;
        match fault {
            Fault::Missing => write!(f, "{place} {key}: is missing"),
            Fault::Extra => write!(f, "{place} {key}: the log says nothing of it"),
            Fault::Changed(columns) if columns.is_empty() => write!(f, "{place} {key}: the log says another value"),
            Fault::Changed(columns) => write!(f, "{place} {key}: the log says another {}", columns.join(", ")),
        }
    }
}
