//! `waybill catalogue`: the batches that made the catalogue, and taking one back.

use anyhow::bail;
use waybill_auditor::catalogue::diff::{Change, Field, Kind};
use waybill_auditor::catalogue::listing::Listed;
use waybill_auditor::catalogue::{self, History};
use waybill_events::log::Log;
use waybill_projections::word::Word;
use waybill_schema::event::Batch;
use waybill_schema::time::Time;

use crate::logs::Place;
use crate::table;

/// Longest actor or reason, in bytes: a line that people read.
const LINE_BYTES_MAX: usize = 256;

/// List and undo the batches that made the catalogue.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// List the batches, the newest first
    Log(Place),
    /// Undo a batch, or tell everything that depends on it
    Undo {
        /// The batch, by the revision that it made
        batch: u64,
        /// Show what would change, and change nothing
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        hand: Hand,
        #[command(flatten)]
        place: Place,
    },
}

/// Who makes a batch, and why.
#[derive(clap::Args, Debug)]
pub(crate) struct Hand {
    /// Who makes the change, as the catalogue's log will name them
    #[arg(long, env = "USER", hide_env_values = true, default_value = "operator", value_parser = line)]
    pub(crate) actor: String,
    /// Why, as the catalogue's log will say
    #[arg(long, value_parser = line)]
    pub(crate) reason: Option<String>,
}

/// What became of a batch.
#[derive(serde::Serialize)]
pub(crate) struct Outcome {
    /// The catalogue's revision: the batch's, where there is one.
    pub(crate) revision: u64,
    /// Whether the batch is in the log.
    pub(crate) applied: bool,
    /// What it changes.
    pub(crate) changes: Vec<Change>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Command::Log(place) => list(place),
        Command::Undo { batch, dry_run, hand, place } => {
            let mut log = place.open()?;
            let history = read(log.as_mut())?;
            let reason = hand.reason.clone().unwrap_or_else(|| format!("undo of batch {batch}"));
            let undo = catalogue::undo(&history.batches, &history.rows, *batch, &hand.actor, &reason)?;
            submit(log.as_mut(), undo, *dry_run, place.json)
        }
    }
}

/// Reads the catalogue to build on; one with batches that do not fit is not built on.
pub(crate) fn read(log: &mut dyn Log) -> anyhow::Result<History> {
    let history = catalogue::history(log)?;
    if let Some((seq, why)) = history.misfits.first() {
        bail!("{} catalogue batch(es) in the log do not fit, the first in frame {seq}: {why}", history.misfits.len());
    }
    Ok(history)
}

/// Appends a batch unless it is only to be shown, and prints what it changes.
pub(crate) fn submit(log: &mut dyn Log, batch: Batch, dry_run: bool, json: bool) -> anyhow::Result<()> {
    let changes = catalogue::diff(&batch.ops);
    let revision = batch.revision;
    if !dry_run {
        catalogue::append(log, batch, Time::wall_clock())?;
    }
    let outcome = Outcome { revision, applied: !dry_run, changes };
    if json {
        return table::json(&outcome);
    }
    if !outcome.changes.is_empty() {
        table::print(&["change", "row", "what"], outcome.changes.iter().map(changed))?;
    }
    match (dry_run, outcome.changes.len()) {
        (true, n) => table::say(format_args!("a dry run: {n} row(s) would change, none did")),
        (false, n) => table::say(format_args!("catalogue revision {revision}: {n} row(s) changed")),
    }
}

fn changed(change: &Change) -> Vec<String> {
    let fields: Vec<String> = match change.change {
        Kind::Deleted => Vec::new(),
        Kind::Made | Kind::Changed => change.fields.iter().map(field).collect(),
    };
    vec![Word(change.change).to_string(), change.row.to_string(), fields.join("\n")]
}

fn field(field: &Field) -> String {
    let Field { field, before, after } = field;
    let [before, after] = [before, after].map(|value| value.as_ref().map(ToString::to_string));
    match (before, after) {
        (Some(before), after) => format!("{field}: {before} → {}", after.unwrap_or_default()),
        (None, after) => format!("{field}: {}", after.unwrap_or_default()),
    }
}

fn list(place: &Place) -> anyhow::Result<()> {
    let history = catalogue::history(place.open()?.as_mut())?;
    let listed = catalogue::list(&history);
    match place.json {
        true => table::json(&listed)?,
        false => {
            table::print(&["revision", "made", "actor", "reason", "changes", "undone"], listed.iter().map(listed_row))?;
        }
    }
    // Told last, where it is seen, and beside what a program reads.
    history.misfits.iter().for_each(|(seq, why)| eprintln!("frame {seq} holds a batch that does not fit: {why}"));
    Ok(())
}

fn listed_row(batch: &Listed) -> Vec<String> {
    let by: Vec<String> = batch.undone_by.iter().map(u64::to_string).collect();
    let undone = match batch.n_undone {
        0 => String::new(),
        n if n == batch.n_ops => format!("by {}", by.join(", ")),
        n => format!("{n} of {} by {}", batch.n_ops, by.join(", ")),
    };
    vec![
        batch.revision.to_string(),
        table::moment(batch.made),
        batch.actor.clone(),
        batch.reason.clone(),
        batch.n_ops.to_string(),
        undone,
    ]
}

/// Text that stands on one line.
fn line(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > LINE_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(format!("expected one line of at most {LINE_BYTES_MAX} bytes"));
    }
    Ok(text.to_owned())
}
