//! The rows made anew: a generation filled from the log's start beside the one that is live, compared with the fold, and
//! made live by one transaction. Gateways, projectors and queries go on meanwhile.

use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_postgres::Config;
use waybill_events::log::{Log, Seq};

use super::MakeError;
use super::batch::Fold;
use super::generation::Wanted;
use super::snapshot::Snapshot;
use super::store::{Generation, Store, StoreError};
use super::tally::{Tally, Unfold};
use super::verify::{TableSum, Verified, WorkError, compare, gather, sums};

/// Which generations a swap was between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Swapped {
    /// The one that was live; none where there was none.
    pub from: Option<u64>,
    /// The one that is.
    pub to: u64,
}

/// A generation that is being brought to the log's end, to become the live one.
pub struct Rebuild {
    config: Config,
    runtime: Runtime,
    store: Store,
    generation: Generation,
    way: Way,
    fold: Fold,
    folded: (Unfold, Tally),
}

/// Where a swap leads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To a generation that was begun for it.
    Forward,
    /// To the one that was live before.
    Back,
}

impl Rebuild {
    /// Begins a new generation; one rebuild at a time does.
    pub fn begin(url: &str) -> Result<Self, WorkError> {
        Self::take(url, Way::Forward)
    }

    /// Takes up the generation that was live before the one that is.
    pub fn go_back(url: &str) -> Result<Self, WorkError> {
        Self::take(url, Way::Back)
    }

    fn take(url: &str, way: Way) -> Result<Self, WorkError> {
        let config: Config = url.parse().map_err(MakeError::Url)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(MakeError::Runtime)?;
        let mut store = runtime.block_on(Store::connect(&config, "waybill rebuild"))?;
        runtime.block_on(store.lease_rebuild())?;
        let wanted = match way {
            Way::Forward => {
                runtime.block_on(store.drop_abandoned())?;
                Wanted::New
            }
            Way::Back => Wanted::This(runtime.block_on(store.way_back())?),
        };
        let generation = runtime.block_on(store.take_over(wanted))?.ok_or(StoreError::Rebuilding)?;
        let (fold, folded) = Default::default();
        Ok(Self { config, runtime, store, generation, way, fold, folded })
    }

    /// The generation that it fills.
    pub fn generation(&self) -> u64 {
        self.generation.number.into()
    }

    /// What the live generation looks like beside a fresh fold; nothing where there is none.
    pub fn verify_live(&self, log: &mut dyn Log, progress: &mut dyn FnMut(Seq)) -> Result<Option<Verified>, WorkError> {
        compare(&self.runtime, &self.config, log, progress)
    }

    /// Folds `log` up to frame `end`, and writes what the generation does not hold yet.
    pub fn fill_to(&mut self, log: &mut dyn Log, end: Seq, progress: &mut dyn FnMut(Seq)) -> Result<(), WorkError> {
        let stands = self.generation.at.clone();
        if stands.seq > end {
            return Err(WorkError::LogLost(stands.seq));
        }
        while self.fold.at.seq < end {
            let due = if self.fold.at.seq < stands.seq { stands.seq.min(end) } else { end };
            let batch = gather(log, &mut self.fold, due)?;
            self.folded.0.hand(&batch, &mut self.folded.1);
            if batch.to.seq == stands.seq && batch.to != stands {
                return Err(WorkError::LogLost(stands.seq));
            }
            if batch.to.seq > stands.seq {
                self.runtime.block_on(self.store.commit(&mut self.generation, &batch))?;
            }
            progress(self.fold.at.seq);
        }
        Ok(())
    }

    /// Compares what is stored with what was folded, table by table, at the place that both have come to.
    pub fn compare(&self) -> Result<Vec<TableSum>, WorkError> {
        let mut stored = Tally::default();
        let snapshot = self.runtime.block_on(Snapshot::take(&self.config, Some(self.generation.number)))?;
        let snapshot = snapshot.filter(|snapshot| snapshot.at == self.fold.at);
        let snapshot = snapshot.ok_or(WorkError::from(StoreError::Overtaken))?;
        self.runtime.block_on(snapshot.rows(&mut stored))?;
        let (unfold, mut folded) = (&self.folded.0, self.folded.1.clone());
        unfold.hand_sessions(&mut folded);
        let tables = sums(&stored, &folded);
        let apart: Vec<&str> = tables.iter().filter(|sum| sum.digest != sum.folded).map(|sum| sum.table).collect();
        if apart.is_empty() { Ok(tables) } else { Err(WorkError::Differs(apart.join(", "))) }
    }

    /// Makes the generation the live one. The one that was live stays, and is the way back from one that is new.
    pub fn swap(mut self) -> Result<Swapped, WorkError> {
        let from = self.runtime.block_on(self.store.live())?;
        match self.way {
            Way::Forward => self.runtime.block_on(self.store.go_live(&mut self.generation))?,
            Way::Back => self.runtime.block_on(self.store.point_to(self.generation.number, ""))?,
        }
        Ok(Swapped { from: from.map(u64::from), to: self.generation() })
    }

    /// Drops what was begun.
    pub fn give_up(mut self) -> Result<(), WorkError> {
        if self.way == Way::Forward {
            self.runtime.block_on(self.store.drop_generation(self.generation.number))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rebuild").field("generation", &self.generation.number).finish_non_exhaustive()
    }
}
