//! `waybill verify`: whether the log is whole and every writer kept its promises, archive and log read as one.

use std::path::PathBuf;

use anyhow::bail;
use waybill_auditor::verify::{Verified, verify};
use waybill_events::archive::{Archive, Archived};
use waybill_events::log::Log;

use crate::logs::Place;
use crate::table;

/// Check sums, chains, numbers and batches of the log.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The folder of the archive, read before the log
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut log: Box<dyn Log> = args.place.open()?;
    if let Some(dir) = &args.archive {
        let archive = Archive::open(dir)?;
        archive.verify()?;
        log = Box::new(Archived::new(archive, log)?);
    }
    let verified = verify(log.as_mut())?;
    match args.place.json {
        true => table::json(&verified)?,
        false => print(&verified)?,
    }
    match verified.n_findings {
        0 => Ok(()),
        n => bail!("the log has {n} fault(s)"),
    }
}

fn print(verified: &Verified) -> anyhow::Result<()> {
    if !verified.findings.is_empty() {
        table::print(&["finding"], verified.findings.iter().map(|finding| vec![finding.clone()]))?;
    }
    let Verified { n_frames, n_facts, duplicates, digest, .. } = verified;
    table::say(format_args!(
        "{n_frames} frames, {n_facts} facts, {duplicates} of them met again; digest of the routing state {digest}"
    ))
}
