//! Whether the rows in Postgres are what the log says: a generation at one moment against a fresh fold up to its place.
//!
//! Nothing is written anywhere. Both sides are summed up bucket by bucket ([`super::tally`]); where buckets differ, their
//! rows are read and folded once more, and the keys that differ are named.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_postgres::Config;
use waybill_events::log::{Cause, Log, ReadError, Seq};
use waybill_schema::FOLD_VERSION;

use super::batch::{Batch, Fold, Place, ROWS_UNSEEN};
use super::snapshot::Snapshot;
use super::store::StoreError;
use super::table::{TABLES, Table};
use super::tally::{Rows, Take, Tally, Unfold, apart, columns_apart, key_text};
use super::{MakeError, READ_FRAMES_MAX};
use crate::finding::{Fault, Finding, Findings};
use crate::reader::Newer;

/// Why rows cannot be compared with the log, or made anew from it.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// The URL or the machine does not allow it.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// Postgres fails, or refuses.
    #[error("the rows in postgres cannot be worked with")]
    Store(#[source] Cause),
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] ReadError),
    /// A newer program wrote to the log.
    #[error(transparent)]
    Newer(#[from] Newer),
    /// The log does not go as far as it did.
    #[error("the log ends before frame {0}: it has lost its end")]
    LogLost(Seq),
    /// What was stored is not what was folded.
    #[error("the generation does not hold what the log says: {0} differ")]
    Differs(String),
    /// There is nothing that could be live instead.
    #[error("nothing to go back to")]
    NoWayBack(#[source] Cause),
}

impl From<StoreError> for WorkError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NoWayBack(error) => Self::NoWayBack(error.into()),
            other => Self::Store(other.into()),
        }
    }
}

/// A table of a generation beside the fold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableSum {
    /// The table.
    pub table: &'static str,
    /// Its rows.
    pub rows: u64,
    /// The digest of them, whatever their order, as 32 hex digits.
    pub digest: String,
    /// The same of the fold: both are equal exactly when the rows are.
    pub folded: String,
}

/// What a look at a generation found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The generation.
    pub generation: u32,
    /// The last frame that it covers.
    pub seq: Seq,
    /// Why it was not compared, where it was not.
    pub incomparable: Option<String>,
    /// Its tables.
    pub tables: Vec<TableSum>,
    /// The rows that differ.
    pub findings: Findings,
}

/// Compares the live generation with a fresh fold of `log`, and tells `progress` how far that has come; nothing where no
/// generation is live.
pub fn verify(log: &mut dyn Log, url: &str, progress: &mut dyn FnMut(Seq)) -> Result<Option<Verified>, WorkError> {
    let config: Config = url.parse().map_err(MakeError::Url)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(MakeError::Runtime)?;
    compare(&runtime, &config, log, progress)
}

pub(super) fn compare(
    runtime: &Runtime,
    config: &Config,
    log: &mut dyn Log,
    progress: &mut dyn FnMut(Seq),
) -> Result<Option<Verified>, WorkError> {
    let Some(snapshot) = runtime.block_on(Snapshot::take(config, None))? else { return Ok(None) };
    let (generation, seq) = (snapshot.generation, snapshot.at.seq);
    let incomparable = |why| {
        let (tables, findings) = (Vec::new(), Findings::default());
        Ok(Some(Verified { generation, seq, incomparable: Some(why), tables, findings }))
    };
    if snapshot.fold_version != FOLD_VERSION {
        return incomparable(format!("fold {} made it, this program has {FOLD_VERSION}", snapshot.fold_version));
    }
    let mut stored = Tally::default();
    runtime.block_on(snapshot.rows(&mut stored))?;
    let mut folded = Tally::default();
    match fold_into(log, seq, &mut folded, progress) {
        Ok(at) if at == snapshot.at => {}
        Ok(_) => return incomparable(format!("the log holds another frame {seq} than was projected")),
        Err(WorkError::LogLost(_)) => return incomparable(format!("the log ends before frame {seq}")),
        Err(error) => return Err(error),
    }
    let wanted = apart(&stored, &folded);
    let tables = sums(&stored, &folded);
    let mut findings = Findings { more: !Rows::is_all(&wanted), ..Findings::default() };
    if !wanted.is_empty() {
        name(runtime, &snapshot, log, &wanted, &mut findings)?;
    }
    Ok(Some(Verified { generation, seq, incomparable: None, tables, findings }))
}

/// Each table's rows and digest, stored and folded.
pub(super) fn sums(stored: &Tally, folded: &Tally) -> Vec<TableSum> {
    let sum = |table: &Table| {
        let ((rows, digest), (_, folded)) = (stored.sum(table), folded.sum(table));
        TableSum { table: table.name, rows, digest, folded }
    };
    TABLES.into_iter().map(sum).collect()
}

fn name(
    runtime: &Runtime,
    snapshot: &Snapshot,
    log: &mut dyn Log,
    wanted: &BTreeMap<&'static str, BTreeSet<usize>>,
    findings: &mut Findings,
) -> Result<(), WorkError> {
    let (mut stored, mut folded) = (Rows::of(wanted), Rows::of(wanted));
    runtime.block_on(snapshot.rows(&mut stored))?;
    fold_into(log, snapshot.at.seq, &mut folded, &mut |_| {})?;
    for table in TABLES {
        findings.extend(differences(table, &stored, &folded));
    }
    Ok(())
}

fn differences(table: &Table, stored: &Rows, folded: &Rows) -> Vec<Finding> {
    let (stored, folded) = (stored.of_table(table), folded.of_table(table));
    let keys: BTreeSet<&Vec<u8>> = stored.keys().chain(folded.keys()).copied().collect();
    let fault = |key: &Vec<u8>| match (stored.get(key), folded.get(key)) {
        (Some(stored), Some(folded)) if stored == folded => None,
        (Some(stored), Some(folded)) => Some(Fault::Changed(columns_apart(table, stored, folded))),
        (Some(_), None) => Some(Fault::Extra),
        (None, _) => Some(Fault::Missing),
    };
    let finding = |key: &Vec<u8>| {
        fault(key).map(|fault| Finding { place: table.name.to_owned(), key: key_text(table, key), fault })
    };
    keys.into_iter().filter_map(finding).collect()
}

/// Folds `log` up to frame `end` and hands the rows on; gives the place it came to.
fn fold_into(
    log: &mut dyn Log,
    end: Seq,
    to: &mut dyn Take,
    progress: &mut dyn FnMut(Seq),
) -> Result<Place, WorkError> {
    let (mut fold, mut unfold) = (Fold::default(), Unfold::default());
    while fold.at.seq < end {
        let batch = gather(log, &mut fold, end)?;
        unfold.hand(&batch, to);
        progress(fold.at.seq);
    }
    unfold.hand_sessions(to);
    Ok(fold.at)
}

/// Folds on until a batch is full or the fold is at `end`, and no further.
pub(super) fn gather(log: &mut dyn Log, fold: &mut Fold, end: Seq) -> Result<Batch, WorkError> {
    let mut batch = Batch::behind(&fold.at);
    while !batch.is_full(ROWS_UNSEEN) && fold.at.seq < end {
        let frames = log.read(fold.at.seq, READ_FRAMES_MAX)?;
        let before = fold.at.seq;
        frames.iter().take_while(|frame| frame.seq <= end).try_for_each(|frame| fold.take(frame, &mut batch))?;
        if fold.at.seq == before {
            return Err(WorkError::LogLost(end));
        }
    }
    Ok(batch)
}
