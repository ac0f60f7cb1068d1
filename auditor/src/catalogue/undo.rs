//! Undo: the batch that takes back an earlier one, or everything that stands against it.
//!
//! Any batch can be undone, an undo too. A batch may be taken back where nothing later depends on it: no later batch
//! changed its rows, and no row is left referring to one that is gone. Images are exact, incarnations included, so a
//! member that comes back is the member it was. What counts as later: ADR 25.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use waybill_schema::catalogue::reference::{Reference, dangling};
use waybill_schema::catalogue::{BatchError, Row, RowKey, Rows};
use waybill_schema::event::{Batch, Op, OpRef, Stored};

/// Why a batch cannot be undone.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UndoRefused {
    /// The log holds no such batch.
    #[error("there is no batch {batch}, the catalogue is at revision {revision}")]
    Unknown {
        /// The batch that was asked for.
        batch: u64,
        /// The catalogue's revision.
        revision: u64,
    },
    /// It changed no row: it only recorded that a file was applied.
    #[error("batch {0} changed no row: there is nothing to undo")]
    Empty(u64),
    /// All its changes are undone already.
    #[error("batch {batch} is undone already, by {}", listed(.by))]
    Undone {
        /// The batch that was asked for.
        batch: u64,
        /// The batches that undid it.
        by: BTreeSet<u64>,
    },
    /// Something later depends on it: all of it, in order.
    #[error("batch {batch} cannot be undone:{}", .obstacles.iter().map(|one| format!("\n  {one}")).collect::<String>())]
    Depended {
        /// The batch that was asked for.
        batch: u64,
        /// What stands against it.
        obstacles: BTreeSet<Obstacle>,
    },
    /// The rows are not what the history gives.
    #[error("the history and the catalogue's rows do not belong together")]
    Foreign(#[source] BatchError),
}

/// One thing that depends on a batch, and the later batch that made it so.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// The row was changed again.
    Changed {
        /// The row.
        row: RowKey,
        /// By which batch.
        batch: u64,
    },
    /// A row that stays would refer to something that the undo takes away.
    Needed {
        /// What it refers to.
        what: Reference,
        /// The row that refers to it.
        by: RowKey,
        /// The batch that made it depend on this.
        batch: u64,
    },
    /// A row that the undo brings back would refer to something that is gone.
    Gone {
        /// What it refers to.
        what: Reference,
        /// The row that the undo brings back.
        by: RowKey,
        /// The batch that took it away.
        batch: u64,
    },
    /// A key that the undo brings back has the secret of another key.
    Taken {
        /// The key that the undo brings back.
        row: RowKey,
        /// The key that has its secret now.
        by: RowKey,
        /// The batch that gave it.
        batch: u64,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed { row, batch } => write!(f, "batch {batch} changed {row} since"),
            Self::Needed { what, by, batch } => {
                write!(f, "{by} needs {what} since batch {batch}, and the undo would take that away")
            }
            Self::Gone { what, by, batch } => {
                write!(f, "the undo would bring back {by}, which needs {what}: batch {batch} took that away")
            }
            Self::Taken { row, by, batch } => {
                write!(f, "the undo would bring back {row}, whose secret batch {batch} gave to {by}")
            }
        }
    }
}

/// The ops that are undone, each with the batch that undid it last.
///
/// An op is undone when a later op that names it is not undone itself.
pub fn undone(history: &[Batch]) -> BTreeMap<OpRef, u64> {
    let mut undone = BTreeMap::new();
    // Whether an op stands depends on later ones only.
    for batch in history.iter().rev() {
        for (at, target) in ops_of(batch).zip(&batch.undo) {
            if !undone.contains_key(&at) {
                undone.insert(*target, batch.revision);
            }
        }
    }
    undone
}

/// The batch that undoes batch `revision` of `history`, for the catalogue that the history gives as `rows`.
pub fn undo(history: &[Batch], rows: &Rows, revision: u64, actor: &str, reason: &str) -> Result<Batch, UndoRefused> {
    let past = Past { history, undone: undone(history) };
    let batch = past.batch(revision).ok_or(UndoRefused::Unknown { batch: revision, revision: rows.revision })?;
    let undo = past.standing_ops(batch)?;
    let ops = undo.iter().map(|at| reversed(&batch.ops[at.op as usize])).collect();
    let (actor, reason) = (actor.to_owned(), reason.to_owned());
    let undo = Batch { revision: rows.revision + 1, actor, reason, file: None, ops, undo };
    let mut obstacles = past.changes_since(batch, &undo);
    obstacles.extend(past.broken_by(&undo, rows));
    if !obstacles.is_empty() {
        return Err(UndoRefused::Depended { batch: revision, obstacles });
    }
    rows.clone().apply(&undo).map_err(UndoRefused::Foreign)?;
    Ok(undo)
}

fn reversed(op: &Op) -> Op {
    Op { row: op.row.clone(), before: op.after.clone(), after: op.before.clone() }
}

/// The names of the batch's ops, in order.
fn ops_of(batch: &Batch) -> impl DoubleEndedIterator<Item = OpRef> {
    let n_ops = u32::try_from(batch.ops.len()).expect("a batch fits in a frame");
    let batch = batch.revision;
    (0..n_ops).map(move |op| OpRef { batch, op })
}

/// The batches so far, and which of their ops are undone.
struct Past<'a> {
    history: &'a [Batch],
    undone: BTreeMap<OpRef, u64>,
}

impl Past<'_> {
    fn batch(&self, revision: u64) -> Option<&Batch> {
        self.history.iter().find(|batch| batch.revision == revision)
    }

    /// The ops of `batch` that are not undone, the last first.
    fn standing_ops(&self, batch: &Batch) -> Result<Vec<OpRef>, UndoRefused> {
        if batch.ops.is_empty() {
            return Err(UndoRefused::Empty(batch.revision));
        }
        let standing: Vec<OpRef> = ops_of(batch).rev().filter(|at| !self.undone.contains_key(at)).collect();
        if standing.is_empty() {
            let by = ops_of(batch).filter_map(|at| self.undone.get(&at).copied()).collect();
            return Err(UndoRefused::Undone { batch: batch.revision, by });
        }
        Ok(standing)
    }

    /// The standing changes that batches after `batch` made to the rows of `undo`.
    ///
    /// A change that was made and undone again since is none: the undo of something older is one.
    fn changes_since(&self, batch: &Batch, undo: &Batch) -> BTreeSet<Obstacle> {
        let mut changes = BTreeSet::new();
        for later in self.history.iter().filter(|later| later.revision > batch.revision) {
            for (at, op) in ops_of(later).zip(&later.ops) {
                let target = later.undo.get(at.op as usize);
                let stands = !self.undone.contains_key(&at) && target.is_none_or(|t| t.batch <= batch.revision);
                if stands && undo.ops.iter().any(|undoing| undoing.row == op.row) {
                    changes.insert(Obstacle::Changed { row: op.row.clone(), batch: later.revision });
                }
            }
        }
        changes
    }

    /// What would not fit together any more after `undo`, which need not fit `rows` itself.
    fn broken_by(&self, undo: &Batch, rows: &Rows) -> BTreeSet<Obstacle> {
        let now: BTreeMap<RowKey, &Row> = rows.iter().map(|(key, stored)| (key.clone(), &stored.row)).collect();
        let mut then = now.clone();
        for op in &undo.ops {
            match &op.after {
                Some(after) => then.insert(op.row.clone(), &after.row),
                None => then.remove(&op.row),
            };
        }
        let brought: BTreeSet<&RowKey> = undo.ops.iter().map(|op| &op.row).collect();
        let standing = dangling(&now);
        let broken = dangling(&then).into_iter().filter(|unmet| !standing.contains(unmet));
        let mut obstacles: BTreeSet<Obstacle> = broken
            .map(|(by, what)| {
                let taken = self.taken_away(&what);
                match brought.contains(&by) {
                    true => Obstacle::Gone { what, by, batch: taken },
                    false => Obstacle::Needed { what, batch: taken.max(self.last_change(&by)), by },
                }
            })
            .collect();
        obstacles.extend(self.shared_secrets(&brought, &then));
        obstacles
    }

    /// The keys that `brought` would bring back beside another of the same secret: no caller could tell them apart.
    fn shared_secrets(&self, brought: &BTreeSet<&RowKey>, then: &BTreeMap<RowKey, &Row>) -> Vec<Obstacle> {
        let secret = |row: &Row| match row {
            Row::Key(key) => Some(key.key.clone()),
            _ => None,
        };
        let standing = then.iter().filter(|(key, _)| !brought.contains(key));
        let owners: BTreeMap<_, _> = standing.filter_map(|(key, row)| Some((secret(row)?, key))).collect();
        let shared = then.iter().filter(|(key, _)| brought.contains(key)).filter_map(|(key, row)| {
            let by = (*owners.get(&secret(row)?)?).clone();
            let batch = self.last_change(&by);
            Some(Obstacle::Taken { row: key.clone(), by, batch })
        });
        shared.collect()
    }

    /// The last batch that changed the row; 0 where none has.
    fn last_change(&self, row: &RowKey) -> u64 {
        let mut changes = self.history.iter().rev().filter(|batch| batch.ops.iter().any(|op| op.row == *row));
        changes.next().map_or(0, |batch| batch.revision)
    }

    /// The last batch that took away a row that met the reference; 0 where none ever did.
    fn taken_away(&self, what: &Reference) -> u64 {
        let met = |image: &Option<Stored>| image.as_ref().is_some_and(|stored| what.is_met_by(&stored.row));
        let takes = |op: &Op| met(&op.before) && !met(&op.after);
        let mut changes = self.history.iter().rev().filter(|batch| batch.ops.iter().any(takes));
        changes.next().map_or(0, |batch| batch.revision)
    }
}

fn listed(batches: &BTreeSet<u64>) -> String {
    let names: Vec<String> = batches.iter().map(|batch| format!("batch {batch}")).collect();
    names.join(" and ")
}
