//! How far the rows are behind the log.

use serde::Serialize;
use waybill_events::log::Seq;

use crate::usage::{StoreError, UsageStore};

/// A projection and the log position that its rows cover.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Projection {
    /// Its name.
    pub name: String,
    /// The last frame whose rows are stored.
    pub checkpoint: u64,
    /// That frame's sum.
    pub frame_sum: String,
    /// The fold that made the rows.
    pub fold_version: u64,
    /// Frames of the log that are not in the rows yet, where its sequence has no holes.
    pub lag_frames: u64,
}

/// The projections in `store`, beside a log whose last frame is at `head`.
pub fn projections(store: &mut dyn UsageStore, head: Seq) -> Result<Vec<Projection>, StoreError> {
    let sql = "SELECT name, seq, frame_sum, fold_version FROM checkpoints ORDER BY name";
    let projection = |mut cells: crate::usage::Cells| {
        let (name, checkpoint) = (cells.text()?, cells.count()?);
        let (frame_sum, fold_version) = (cells.text()?, cells.count()?);
        Ok(Projection { name, checkpoint, frame_sum, fold_version, lag_frames: head.0.saturating_sub(checkpoint) })
    };
    store.rows(sql, &[])?.into_iter().map(projection).collect()
}
