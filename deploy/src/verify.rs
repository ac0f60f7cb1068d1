//! `waybill verify`: whether the log is whole and every writer kept its promises, archive and log read as one; and
//! whether the stores hold what the log says, row by row and key by key. Nothing is changed, no upstream is called.

use anyhow::bail;
use serde::Serialize;
use waybill_auditor::verify::{Verified, verify};
use waybill_events::log::Log;
use waybill_projector::finding::Findings;
use waybill_projector::{embedded, postgres, redis};
use waybill_schema::config::Config;

use crate::logs::Whole;
use crate::progress::Progress;
use crate::{data, projector, table};

/// Check the log, and the stores against it.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    whole: Whole,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let place = &args.whole.place;
    let config = place.config()?;
    let mut whole = args.whole.open()?;
    let log = verify(whole.as_mut())?;
    let stores = match &config {
        Some(config) if config.log.is_some() => shared(whole.as_mut(), config)?,
        Some(_) | None => vec![Look::Embedded(embedded::verify(&data::existing_log_file(place.data())?)?)],
    };
    let report = Report { log, stores };
    match place.json {
        true => table::json(&report)?,
        false => report.print()?,
    }
    match report.n_faults() {
        0 => Ok(()),
        n => bail!("{n} fault(s) found"),
    }
}

/// The stores of many gateways, as far as the configuration names them.
fn shared(log: &mut dyn Log, config: &Config) -> anyhow::Result<Vec<Look>> {
    let mut looks = Vec::new();
    if let Some(usage) = &config.usage {
        let mut progress = Progress::of("postgres");
        let found = postgres::verify(log, &usage.postgres, &mut |seq| progress.reach(seq))?;
        looks.push(found.map_or(Look::None { missing: "postgres" }, Look::Postgres));
    }
    if let Some(state) = &config.state {
        let mut progress = Progress::of("redis");
        let settings = projector::shared_state(state);
        let found = redis::verify(log, &settings, &mut |seq| progress.reach(seq))?;
        looks.push(found.map_or(Look::None { missing: "redis" }, Look::Redis));
    }
    Ok(looks)
}

/// What was found in a store.
#[derive(Serialize)]
#[serde(rename_all = "snake_case", tag = "store")]
pub(crate) enum Look {
    Embedded(embedded::Verified),
    Postgres(postgres::Verified),
    Redis(redis::Verified),
    /// Nothing was projected into it yet.
    None {
        missing: &'static str,
    },
}

impl Look {
    fn findings(&self) -> Option<&Findings> {
        match self {
            Self::Embedded(verified) => Some(&verified.findings),
            Self::Postgres(verified) => Some(&verified.findings),
            Self::Redis(verified) => Some(&verified.findings),
            Self::None { .. } => None,
        }
    }

    /// Whether there was nothing to look at.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None { .. })
    }

    /// Why it was not compared.
    fn incomparable(&self) -> Option<String> {
        match self {
            Self::Embedded(verified) => verified.incomparable.as_ref().map(|why| format!("rows: {why}")),
            Self::Postgres(verified) => verified.incomparable.as_ref().map(|why| format!("postgres: {why}")),
            Self::Redis(verified) => verified.incomparable.as_ref().map(|why| format!("redis: {why}")),
            Self::None { missing } => Some(format!("{missing}: nothing is projected into it yet")),
        }
    }

    /// Every fault in words.
    pub(crate) fn faults(&self) -> Vec<String> {
        let findings = self.findings();
        let named = findings.into_iter().flat_map(|findings| &findings.named).map(ToString::to_string);
        let rest = findings.map_or(0, |findings| findings.n - findings.named.len() as u64);
        let more = findings.is_some_and(|findings| findings.more);
        let rest = (rest > 0 || more).then(|| format!("… and {}{rest} more", if more { "at least " } else { "" }));
        self.incomparable().into_iter().chain(named).chain(rest).collect()
    }

    fn n_faults(&self) -> u64 {
        self.findings().map_or(0, |findings| findings.n) + u64::from(self.incomparable().is_some())
    }

    /// Its tables with their rows and digests, as rows of ours.
    fn sums(&self) -> Vec<Vec<String>> {
        let row = |store: &str, seq: String, table: &str, rows: u64, digest: &str| {
            vec![store.to_owned(), seq, table.to_owned(), rows.to_string(), digest.to_owned()]
        };
        match self {
            Self::Embedded(verified) => verified
                .tables
                .iter()
                .map(|sum| row("embedded", verified.seq.to_string(), sum.table, sum.rows, &sum.digest))
                .collect(),
            Self::Postgres(verified) => verified
                .tables
                .iter()
                .map(|sum| row("postgres", verified.seq.to_string(), sum.table, sum.rows, &sum.digest))
                .collect(),
            Self::Redis(verified) => {
                vec![row("redis", verified.seq.to_string(), "keys", verified.keys, &verified.digest)]
            }
            Self::None { .. } => Vec::new(),
        }
    }
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    log: Verified,
    stores: Vec<Look>,
}

impl Report {
    fn n_faults(&self) -> u64 {
        self.log.n_findings + self.stores.iter().map(Look::n_faults).sum::<u64>()
    }

    fn print(&self) -> anyhow::Result<()> {
        let faults = self.log.findings.iter().cloned().chain(self.stores.iter().flat_map(Look::faults));
        let faults: Vec<Vec<String>> = faults.map(|fault| vec![fault]).collect();
        if !faults.is_empty() {
            table::print(&["finding"], faults)?;
        }
        table::print(&["store", "at frame", "of", "count", "digest"], self.stores.iter().flat_map(Look::sums))?;
        let Verified { n_frames, n_facts, duplicates, digest, .. } = &self.log;
        table::say(format_args!(
            "{n_frames} frames, {n_facts} facts, {duplicates} of them met again; digest of the routing state {digest}"
        ))
    }
}
