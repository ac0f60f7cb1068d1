//! Whether the shared state in Redis is what the log says, key by key, beside a projector that goes on.
//!
//! Keys are read some at a time, each time with the mark of that very moment, and compared with the fold at that mark: so
//! the fold follows where Redis goes, and every comparison is of one sequence.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use waybill_events::log::{Log, Seq};
use waybill_schema::FOLD_VERSION;
use waybill_schema::redis::{Generation, Keys, Mark};
use waybill_schema::secret::sum128;
use waybill_schema::time::Time;

use super::fold::{Fold, Write};
use super::store::Store;
use super::{FRAMES_MAX, ProjectError, Settings};
use crate::finding::{Fault, Finding, Findings};

/// Keys read at one moment: a millisecond of the server's.
const KEYS_AT_ONCE: usize = 500;
/// What findings name as their place.
const PLACE: &str = "redis";

/// What a look at a generation found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The generation.
    pub generation: u64,
    /// The last frame that it covered when the last keys were read.
    pub seq: Seq,
    /// Why it was not compared, where it was not.
    pub incomparable: Option<String>,
    /// Keys of the fold there.
    pub keys: u64,
    /// The digest of the keys and values as they are folded, as 32 hex digits; all are stored so where nothing was found.
    pub digest: String,
    /// The keys that differ.
    pub findings: Findings,
}

/// Compares the generation that is read with a fresh fold of `log`, and tells `progress` how far that has come; nothing
/// where none is read.
pub fn verify(
    log: &mut dyn Log,
    settings: &Settings,
    progress: &mut dyn FnMut(Seq),
) -> Result<Option<Verified>, ProjectError> {
    let mut store = Store::new(&settings.url, &settings.prefix)?;
    let Some(generation) = store.active()? else { return Ok(None) };
    let mut mirror = Mirror::new(Fold::new(settings.records_max), store.keys(), generation);
    let mark = store.look(generation)?.mark.unwrap_or_else(Mark::start);
    if mark.fold != FOLD_VERSION {
        return Ok(Some(mirror.incomparable(format!("fold {} made it, this program has {FOLD_VERSION}", mark.fold))));
    }
    match mirror.follow(log, &mark, progress) {
        Ok(true) => mirror.compare(&mut store, log, progress).map(Some),
        Ok(false) => {
            Ok(Some(mirror.incomparable(format!("the log holds another frame {} than was projected", mark.seq))))
        }
        Err(ProjectError::LogLost { mark, .. }) => {
            Ok(Some(mirror.incomparable(format!("the log ends before frame {mark}"))))
        }
        Err(error) => Err(error),
    }
}

/// What a generation should hold at a mark.
pub(super) struct Mirror {
    fold: Fold,
    number: u64,
    generation: Generation,
    values: BTreeMap<String, Write>,
}

impl Mirror {
    /// What `fold` says of generation `number` where it stands.
    pub(super) fn new(mut fold: Fold, keys: &Keys, number: u64) -> Self {
        fold.settle();
        let generation = keys.generation(number);
        let values = fold.everything(&generation).into_iter().map(|write| (write.key.clone(), write)).collect();
        Self { fold, number, generation, values }
    }

    /// Compares all keys that are there with all that should be.
    pub(super) fn compare(
        mut self,
        store: &mut Store,
        log: &mut dyn Log,
        progress: &mut dyn FnMut(Seq),
    ) -> Result<Verified, ProjectError> {
        let mut names: BTreeSet<String> = store.names(self.generation.prefix(), "")?.into_iter().collect();
        names.remove(&self.generation.meta());
        names.extend(self.values.keys().cloned());
        let names: Vec<&String> = names.iter().collect();
        let mut found = Vec::new();
        for names in names.chunks(KEYS_AT_ONCE) {
            let peeked = store.peek(self.number, names)?;
            if !self.follow(log, &peeked.mark, progress)? {
                return Err(ProjectError::Restless { generation: self.number });
            }
            let held = names.iter().zip(&peeked.values);
            found.extend(held.filter_map(|(name, value)| self.finding(name, value.as_deref(), peeked.now)));
        }
        let mut verified = self.verified();
        verified.findings.extend(found);
        Ok(verified)
    }

    /// Folds on to `mark`; says whether the log leads there.
    fn follow(&mut self, log: &mut dyn Log, mark: &Mark, progress: &mut dyn FnMut(Seq)) -> Result<bool, ProjectError> {
        while self.fold.mark().seq < mark.seq {
            let at = self.fold.mark().seq;
            let frames = log.read(Seq(at), FRAMES_MAX)?;
            for frame in frames.iter().take_while(|frame| frame.seq.0 <= mark.seq) {
                self.fold.take(frame)?;
            }
            if self.fold.mark().seq == at {
                return Err(ProjectError::LogLost { mark: mark.seq, head: log.head()?.0 });
            }
            progress(Seq(self.fold.mark().seq));
        }
        for write in self.fold.writes(self.generation.clone()) {
            match write.value {
                Some(_) => drop(self.values.insert(write.key.clone(), write)),
                None => drop(self.values.remove(&write.key)),
            }
        }
        self.fold.settle();
        Ok(self.fold.mark() == mark)
    }

    /// What is wrong with a key that holds `value` at `now`.
    fn finding(&self, name: &str, value: Option<&str>, now: Time) -> Option<Finding> {
        let due = self.values.get(name);
        let fault = match (due, value) {
            (Some(due), Some(_)) if due.value.as_deref() == value => return None,
            (Some(_), Some(_)) => Fault::Changed(Vec::new()),
            // Redis has tidied it up.
            (Some(due), None) if due.until.is_some_and(|until| until <= now) => return None,
            (Some(_), None) => Fault::Missing,
            // A gateway writes an owner before its fact is projected.
            (None, Some(_)) if self.generation.is_owner(name) => return None,
            (None, Some(_)) => Fault::Extra,
            (None, None) => return None,
        };
        Some(Finding { place: PLACE.to_owned(), key: name.to_owned(), fault })
    }

    fn verified(&self) -> Verified {
        let within = |key: &str| key.strip_prefix(self.generation.prefix()).unwrap_or(key).to_owned();
        let lines: Vec<String> = self
            .values
            .values()
            .map(|write| format!("{} {}\n", within(&write.key), write.value.as_deref().unwrap_or_default()))
            .collect();
        let parts: Vec<&[u8]> = lines.iter().map(String::as_bytes).collect();
        Verified {
            generation: self.number,
            seq: Seq(self.fold.mark().seq),
            incomparable: None,
            keys: self.values.len() as u64,
            digest: sum128(&parts),
            findings: Findings::default(),
        }
    }

    fn incomparable(&self, why: String) -> Verified {
        Verified { incomparable: Some(why), ..self.verified() }
    }
}
