//! Tables for people and JSON for programs: how every reading command prints.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{ContentArrangement, Table};
use waybill_schema::time::Time;

/// Prints rows under a header.
pub(crate) fn print(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    table.add_rows(rows);
    println!("{table}");
}

/// Prints a value as one JSON document.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// A moment as UTC text, to the second.
pub(crate) fn moment(time: Time) -> String {
    chrono::DateTime::from_timestamp_millis(time.0)
        .map_or_else(|| "—".to_owned(), |moment| moment.format("%Y-%m-%d %H:%M:%SZ").to_string())
}
