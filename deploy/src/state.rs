//! `waybill state`: pins, cooldowns, blocks, counters and digests, as the log says they were at a moment.

use std::str::FromStr;

use waybill_auditor::state::{At, Bound, StateAt, state};
use waybill_events::log::Seq;
use waybill_projector::redis::RECORDS_MAX;
use waybill_routing::state::AFFINITY_RECORDS_MAX;
use waybill_schema::time::Time;

use crate::logs::Whole;
use crate::{health, table};

/// Show what the log says of a moment.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The moment: the sequence of a frame, or a time such as 2026-11-30T12:00:00Z; without it, the log's end
    #[arg(long, value_name = "SEQ|TIME")]
    at: Option<Moment>,
    #[command(flatten)]
    whole: Whole,
}

#[derive(Clone, Copy, Debug)]
struct Moment(At);

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(seq) = text.parse() {
            return Ok(Self(At::Seq(Seq(seq))));
        }
        let moment = chrono::DateTime::parse_from_rfc3339(text)
            .map_err(|_| "neither the number of a frame nor a time such as 2026-11-30T12:00:00Z".to_owned())?;
        Ok(Self(At::Time(Time(moment.timestamp_millis()))))
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let place = &args.whole.place;
    let is_shared = place.config()?.is_some_and(|config| config.state.is_some());
    let records_max = if is_shared { RECORDS_MAX } else { AFFINITY_RECORDS_MAX };
    let at = args.at.map_or(At::End, |Moment(at)| at);
    let said = state(args.whole.open()?.as_mut(), at, records_max)?;
    match place.json {
        true => table::json(&said),
        false => print(&said),
    }
}

fn print(said: &StateAt) -> anyhow::Result<()> {
    table::print(&["session or user", "bound to", "since", "until", "failures"], said.pins.iter().map(pin))?;
    table::print(&health::HEADER, said.members.iter().map(health::row))?;
    let writers = said.writers.iter();
    let writers = writers.map(|(writer, at)| vec![writer.to_string(), at.epoch.to_string(), at.last.to_string()]);
    table::print(&["writer", "epoch", "last fact"], writers)?;
    let StateAt { seq, at, n_frames, n_facts, duplicates, violations, log_digest, digest, .. } = said;
    table::say(format_args!(
        "at frame {seq}, {}: {n_frames} frames, {n_facts} facts, {duplicates} met again, {violations} promises broken\n\
         digest of the log {log_digest}\ndigest of the routing state {digest}",
        table::moment(*at)
    ))
}

fn pin(Bound { key, pin }: &Bound) -> Vec<String> {
    let provisional = if pin.provisional { " (claimed)" } else { "" };
    vec![
        key.to_string(),
        format!("{}{provisional}", pin.route_id),
        table::moment(pin.bound_at),
        table::moment(pin.expires_at),
        pin.fail_count.to_string(),
    ]
}
