//! The catalogue's batches as a list: who made each, why, and what became of it.

use std::collections::BTreeSet;

use serde::Serialize;
use waybill_schema::event::OpRef;
use waybill_schema::time::Time;

use super::History;
use super::undo::undone;

/// One batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// The revision that it made.
    pub revision: u64,
    /// When, in milliseconds since 1970, on the log's time scale.
    pub made: Time,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// The hash of the configuration file that it brought the catalogue to.
    pub file: Option<String>,
    /// How many rows it changed.
    pub n_ops: usize,
    /// How many of these changes are undone.
    pub n_undone: usize,
    /// The batches that undid them.
    pub undone_by: BTreeSet<u64>,
    /// The batches that it undid itself.
    pub undoes: BTreeSet<u64>,
}

/// All batches, the newest first.
pub fn list(history: &History) -> Vec<Listed> {
    let undone = undone(&history.batches);
    let listed = history.batches.iter().zip(&history.made).rev().map(|(batch, made)| {
        let ops = OpRef { batch: batch.revision, op: 0 }..=OpRef { batch: batch.revision, op: u32::MAX };
        Listed {
            revision: batch.revision,
            made: *made,
            actor: batch.actor.clone(),
            reason: batch.reason.clone(),
            file: batch.file.clone(),
            n_ops: batch.ops.len(),
            n_undone: undone.range(ops.clone()).count(),
            undone_by: undone.range(ops).map(|(_, by)| *by).collect(),
            undoes: batch.undo.iter().map(|op| op.batch).collect(),
        }
    });
    listed.collect()
}
