//! Moments as people write them.

use chrono::DateTime;
use waybill_schema::time::Time;

/// The text names no moment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no moment: write 2026-11-30T12:00:00Z, or milliseconds since 1970")]
pub struct MomentError(String);

/// The moment that `text` names: RFC 3339, or milliseconds since 1970.
pub fn moment(text: &str) -> Result<Time, MomentError> {
    if let Ok(ms) = text.parse::<i64>() {
        return Ok(Time(ms));
    }
    // In a query string a plus that nobody encoded comes as a space.
    let read = DateTime::parse_from_rfc3339(&text.replace(' ', "+"));
    read.map(|moment| Time(moment.timestamp_millis())).map_err(|_| MomentError(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number is `date -u -d @1796083200`: 2026-12-01T00:00:00Z.
    #[test]
    fn a_moment_is_written_as_people_and_programs_do() {
        for text in ["2026-12-01T00:00:00Z", "2026-12-01T01:00:00+01:00", "2026-12-01T01:00:00 01:00", "1796083200000"]
        {
            assert_eq!(moment(text), Ok(Time(1_796_083_200_000)), "{text}");
        }
        let refused = moment("yesterday").map_err(|error| error.to_string());
        assert_eq!(
            refused,
            Err("`yesterday` is no moment: write 2026-11-30T12:00:00Z, or milliseconds since 1970".to_owned())
        );
    }
}
