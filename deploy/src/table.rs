//! Tables for people and JSON for programs: how every reading command prints.

use std::fmt::Display;
use std::io::Write;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{ContentArrangement, Table};
use waybill_schema::time::Time;

/// Prints a line or a whole text. A reader that has seen enough closes the pipe: that comes back as an error, which
/// `main` takes for a good end.
pub(crate) fn say(text: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// Prints rows under a header.
pub(crate) fn print(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> anyhow::Result<()> {
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    table.add_rows(rows);
    say(table)
}

/// Prints a value as one JSON document.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    say(serde_json::to_string_pretty(value)?)
}

/// A moment as UTC text, to the second.
pub(crate) fn moment(time: Time) -> String {
    chrono::DateTime::from_timestamp_millis(time.0)
        .map_or_else(|| "—".to_owned(), |moment| moment.format("%Y-%m-%d %H:%M:%SZ").to_string())
}
