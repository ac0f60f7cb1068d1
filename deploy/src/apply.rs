//! `waybill apply FILE`: brings the catalogue in the log to what a configuration file says, and shows the difference.

use std::path::PathBuf;

use waybill_auditor::catalogue::{self, History};
use waybill_schema::config::Config;
use waybill_schema::event::Batch;

use crate::catalogue::{Hand, Outcome, read, submit};
use crate::{DataDir, check, logs, table};

/// Bring the catalogue to a configuration file.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Apply the file although it was the last one applied, over edits made since
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    hand: Hand,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataDir,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let config = check::load(&args.file)?;
    let mut log = logs::open(Some(&config), &args.data.data)?;
    let history = read(log.as_mut())?;
    let Some(batch) = plan(&history, config, args.force) else { return unchanged(args, history.rows.revision) };
    let reason = format!("apply {}", args.file.display());
    let batch = Batch { actor: args.hand.actor.clone(), reason: args.hand.reason.clone().unwrap_or(reason), ..batch };
    submit(log.as_mut(), batch, args.dry_run, args.json)
}

/// The batch to make; none where the file was the last one applied, unless it is forced over edits made since.
fn plan(history: &History, config: Config, force: bool) -> Option<Batch> {
    let Config { rows, hash, .. } = config;
    let forced = || history.rows.batch_to(rows.clone(), catalogue::FILE_ACTOR, "", Some(hash.clone()));
    let planned = catalogue::plan(&history.rows, rows.clone(), &hash);
    planned.or_else(|| force.then(forced).filter(|batch| !batch.ops.is_empty()))
}

fn unchanged(args: &Args, revision: u64) -> anyhow::Result<()> {
    if args.json {
        return table::json(&Outcome { revision, applied: false, changes: Vec::new() });
    }
    let hint = if args.force { "nothing differs" } else { "--force applies it again, over edits made since" };
    let file = args.file.display();
    table::say(format_args!("{file} was the last file applied; the catalogue stays at revision {revision} ({hint})"))
}
