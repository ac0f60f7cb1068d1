//! `waybill health`: who cools down or is blocked, until when, and why.

use std::collections::BTreeSet;

use waybill_auditor::health::{self, MemberHealth};
use waybill_auditor::reading;
use waybill_projections::fold::Fold;
use waybill_projections::word::Word;
use waybill_schema::time::Time;

use crate::{DataDir, data, table};

/// Show cooldowns and blocks.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataDir,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = data::open_log(&args.data.data)?;
    let Fold { state, rows, .. } = reading::fold(log.connection())?;
    let mut members = health::health(&state, Time::wall_clock());
    // The state remembers members that have left the catalogue.
    let standing: BTreeSet<(&str, u64)> = rows.iter().map(|(key, row)| (key.id.as_str(), row.incarnation)).collect();
    members.retain(|health| standing.contains(&(health.member.as_str(), health.incarnation)));
    if args.json {
        return table::json(&members);
    }
    table::print(&HEADER, members.iter().map(row))
}

/// What stands over [`row`].
pub(crate) const HEADER: [&str; 5] = ["member", "failures", "last failure", "cooling", "blocked models"];

/// A member's health in words.
pub(crate) fn row(member: &MemberHealth) -> Vec<String> {
    let failure = member.last_failure.as_ref();
    let blocks = member.blocks.iter();
    vec![
        member.member.to_string(),
        member.failures.to_string(),
        failure.map(|failure| format!("{} {}", Word(failure.class), table::moment(failure.at))).unwrap_or_default(),
        member.cooldown.as_ref().map_or_else(
            || "no".to_owned(),
            |rest| {
                let by = if rest.upstream { ", as the upstream asked" } else { "" };
                format!("until {} ({}{by})", table::moment(rest.until), Word(rest.reason))
            },
        ),
        blocks
            .map(|block| format!("{} until {} ({})", block.model, table::moment(block.until), Word(block.reason)))
            .collect::<Vec<_>>()
            .join("\n"),
    ]
}
