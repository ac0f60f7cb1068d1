//! `waybill archive`: closes stretches of the log as verified files, once; an auditor with `--archive` does it all the
//! time.

use std::path::PathBuf;
use std::time::Duration;

use waybill_events::archive::{Archive, ArchiveError};
use waybill_events::log::Log;

use crate::chore::Chore;
use crate::logs::Place;
use crate::table;

/// A stretch that is closed by itself has so many frames at least, or [`waybill_events::archive::STRETCH_BYTES_MAX`]
/// bytes: a small file for each minute would be a burden for years.
const FRAMES_MIN: usize = 4096;
/// The time between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Close what the log holds as verified files.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The folder of the archive, made where it is missing
    #[arg(value_name = "DIR")]
    archive: PathBuf,
    /// Leave a stretch of fewer frames for another day
    #[arg(long, default_value_t = 1, value_name = "N")]
    frames_min: usize,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut log = args.place.open()?;
    let mut archive = Archive::open(&args.archive)?;
    let before = archive.stretches().len();
    extend(&mut archive, log.as_mut(), args.frames_min)?;
    let (closed, last) = (&archive.stretches()[before..], archive.last());
    if args.place.json {
        return table::json(&serde_json::json!({"closed": closed, "last": last}));
    }
    if !closed.is_empty() {
        let row = |stretch: &waybill_events::archive::Stretch| {
            [stretch.first, stretch.last, stretch.frames].iter().map(u64::to_string).collect()
        };
        table::print(&["first", "last", "frames"], closed.iter().map(row))?;
    }
    table::say(format_args!("{} stretch(es) closed; the archive reaches frame {last}", closed.len()))
}

/// Closes one stretch after the other until the log holds less than `frames_min` frames behind them.
fn extend(archive: &mut Archive, log: &mut dyn Log, frames_min: usize) -> Result<(), ArchiveError> {
    let end = log.head()?;
    while let Some(stretch) = archive.extend(log, end, frames_min)? {
        tracing::info!(first = stretch.first, last = stretch.last, "a stretch of the log is archived");
    }
    Ok(())
}

/// Archives `log` into the folder `dir` all the time.
pub(crate) fn keep(dir: PathBuf, mut log: impl Log + 'static) -> anyhow::Result<Chore> {
    let mut archive = Archive::open(&dir)?;
    let mut fails = false;
    let chore = Chore::start("archive", LOOK_EVERY, move || {
        let extended = extend(&mut archive, &mut log, FRAMES_MIN);
        if let Err(error) = &extended
            && !fails
        {
            tracing::error!(error = error as &dyn std::error::Error, "the log cannot be archived; it is tried again");
        }
        fails = extended.is_err();
    })?;
    Ok(chore)
}
