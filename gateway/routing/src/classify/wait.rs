//! The wait that an upstream states, in whichever of its many forms.
//!
//! Precedence: `retry-after-ms`, `retry-after`, the provider's reset headers, the body's fields, the message. What
//! cannot be read, and what is not in the future, states nothing.

use std::time::UNIX_EPOCH;

use waybill_schema::time::Time;

use super::Headers;
use super::envelope::UpstreamError;

/// The length of a day, in milliseconds.
const DAY_MS: i64 = 86_400_000;

/// How a reset header is written.
#[derive(Clone, Copy)]
enum Form {
    /// `1m0.052s`
    Duration,
    /// `2024-03-26T20:00:00Z`
    Rfc3339,
    /// Seconds from now.
    Seconds,
}

/// How a gauge shows that its limit is used up.
#[derive(Clone, Copy)]
enum Spent {
    /// It has come down to zero.
    Remaining,
    /// It has reached a hundred.
    Percent,
}

/// Reset headers, each with the gauge that tells whether it is this limit that was hit.
const RESETS: &[(&str, Form, &str, Spent)] = &[
    ("x-ratelimit-reset-requests", Form::Duration, "x-ratelimit-remaining-requests", Spent::Remaining),
    ("x-ratelimit-reset-tokens", Form::Duration, "x-ratelimit-remaining-tokens", Spent::Remaining),
    ("anthropic-ratelimit-requests-reset", Form::Rfc3339, "anthropic-ratelimit-requests-remaining", Spent::Remaining),
    ("anthropic-ratelimit-tokens-reset", Form::Rfc3339, "anthropic-ratelimit-tokens-remaining", Spent::Remaining),
    ("x-codex-primary-reset-after-seconds", Form::Seconds, "x-codex-primary-used-percent", Spent::Percent),
    ("x-codex-secondary-reset-after-seconds", Form::Seconds, "x-codex-secondary-used-percent", Spent::Percent),
];

/// What stands before a wait in a message.
const LEADS: &[&str] = &["try again in ", "retry in ", "retry after ", "try again after ", "reset after "];

/// Units of waits in messages and durations, in milliseconds.
const UNITS: &[(&str, f64)] = &[
    ("ms", 1.0),
    ("milliseconds", 1.0),
    ("s", 1e3),
    ("sec", 1e3),
    ("second", 1e3),
    ("seconds", 1e3),
    ("m", 6e4),
    ("min", 6e4),
    ("minute", 6e4),
    ("minutes", 6e4),
    ("h", 36e5),
    ("hour", 36e5),
    ("hours", 36e5),
    ("d", 864e5),
    ("day", 864e5),
    ("days", 864e5),
];

/// The wait that headers or error state, in milliseconds from `now`.
pub(super) fn stated(headers: Headers<'_>, error: &UpstreamError, now: Time) -> Option<u64> {
    let there = headers("date").and_then(http_date).unwrap_or(now);
    let in_header = headers("retry-after-ms").and_then(|text| number(text).and_then(positive));
    in_header
        .or_else(|| retry_after(headers("retry-after")?, there))
        .or_else(|| resets(headers, there))
        .or_else(|| error.resets_in_seconds.and_then(|seconds| positive(seconds * 1e3)))
        .or_else(|| error.resets_at.and_then(|at| positive(at * 1e3 - there.0 as f64)))
        .or_else(|| error.retry_delay.as_deref().and_then(duration))
        .or_else(|| in_text(&error.message))
}

/// Milliseconds to the next midnight in UTC: when a daily share is taken to be renewed.
pub(super) fn day_end(now: Time) -> u64 {
    DAY_MS.abs_diff(now.0.rem_euclid(DAY_MS))
}

/// Both forms of `Retry-After`; a date counts from the time there.
fn retry_after(text: &str, there: Time) -> Option<u64> {
    match number(text) {
        Some(seconds) => positive(seconds * 1e3),
        None => positive(http_date(text)?.ms_since(there) as f64),
    }
}

/// The longest wait of the limits that are used up; a limit without a gauge counts as used up.
fn resets(headers: Headers<'_>, there: Time) -> Option<u64> {
    let waits = RESETS.iter().filter_map(|(reset, form, gauge, spent)| {
        let text = headers(reset)?;
        let level = headers(gauge).and_then(number);
        let spent = level.is_none_or(|level| match spent {
            Spent::Remaining => level <= 0.0,
            Spent::Percent => level >= 100.0,
        });
        let wait = match form {
            Form::Duration => duration(text),
            Form::Rfc3339 => positive(rfc3339(text)?.ms_since(there) as f64),
            Form::Seconds => positive(number(text)? * 1e3),
        };
        wait.filter(|_| spent)
    });
    waits.max()
}

/// The first wait that a message states.
fn in_text(message: &str) -> Option<u64> {
    let message = message.to_lowercase();
    let starts = LEADS.iter().flat_map(|lead| message.match_indices(lead)).map(|(at, lead)| at + lead.len());
    let mut starts: Vec<_> = starts.collect();
    starts.sort_unstable();
    starts.into_iter().find_map(|start| duration(&message[start..]))
}

/// Reads `1m0.052s`, `40s`, `494ms`, `35 seconds` or `2 hours` at the beginning of `text`.
fn duration(text: &str) -> Option<u64> {
    let (mut rest, mut total) = (text.trim_start(), None);
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let Some(amount) = number(rest[..digits].trim_end_matches('.')) else { break };
        let after = rest[digits..].strip_prefix(' ').unwrap_or(&rest[digits..]);
        let letters = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let Some((_, ms)) = UNITS.iter().find(|(unit, _)| *unit == &after[..letters]) else { break };
        total = Some(total.unwrap_or(0.0) + amount * ms);
        rest = &after[letters..];
    }
    total.and_then(positive)
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|number: &f64| number.is_finite())
}

/// Whole milliseconds, rounded up; nothing that is not in the future.
fn positive(ms: f64) -> Option<u64> {
    (ms > 0.0).then(|| ms.ceil() as u64)
}

fn http_date(text: &str) -> Option<Time> {
    let since = httpdate::parse_http_date(text.trim()).ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Time(i64::try_from(since.as_millis()).ok()?))
}

/// Reads `2024-03-26T20:00:00Z`, with or without a fraction, in any offset.
fn rfc3339(text: &str) -> Option<Time> {
    let text = text.trim();
    let field = |range: std::ops::Range<usize>| text.get(range)?.parse::<i64>().ok();
    let (year, month, day) = (field(0..4)?, field(5..7)?, field(8..10)?);
    let (hour, minute, second) = (field(11..13)?, field(14..16)?, field(17..19)?);
    let zone = text.get(19..)?.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let offset_minutes = match zone.as_bytes() {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), ..] => {
            let minutes = zone.get(1..3)?.parse::<i64>().ok()? * 60 + zone.get(4..6)?.parse::<i64>().ok()?;
            if *sign == b'-' { -minutes } else { minutes }
        }
        _ => return None,
    };
    // Days since 1970 by the civil calendar, its years beginning in March.
    let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = years * 365 + years / 4 - years / 100 + years / 400 + (months * 153 + 2) / 5 + day - 1 - 719_468;
    let seconds = ((days * 24 + hour) * 60 + minute - offset_minutes) * 60 + second;
    (1..=12).contains(&month).then_some(Time(seconds * 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2024-03-26T19:59:00Z, by `date -u -d … +%s`.
    const NOW: Time = Time(1_711_483_140_000);

    #[track_caller]
    fn check(headers: &[(&str, &str)], body: &str, expected: Option<u64>) {
        let find = |name: &str| headers.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        assert_eq!(stated(&find, &UpstreamError::read(body.as_bytes()), NOW), expected);
    }

    #[test]
    fn retry_after_is_read_in_both_forms_and_in_milliseconds() {
        check(&[("retry-after", "1"), ("retry-after-ms", "494")], "", Some(494));
        check(&[("retry-after", "13262")], "", Some(13_262_000));
        check(&[("retry-after", "0.5")], "", Some(500));
        check(&[("retry-after", "Tue, 26 Mar 2024 20:00:00 GMT")], "", Some(60_000));
        let skewed = ("date", "Tue, 26 Mar 2024 19:59:50 GMT");
        check(&[("retry-after", "Tue, 26 Mar 2024 20:00:00 GMT"), skewed], "", Some(10_000));
    }

    #[test]
    fn what_is_junk_or_past_states_nothing() {
        for junk in ["soon", "-5", "0", "nan", "inf", "", "Tue, 26 Mar 2024 19:00:00 GMT", "Tue, 99 Mar"] {
            check(&[("retry-after", junk)], "", None);
        }
        check(&[("retry-after-ms", "x"), ("retry-after", "2")], "", Some(2_000));
        check(&[("anthropic-ratelimit-requests-reset", "2024-13-26T20:00:00Z")], "", None);
        check(&[("anthropic-ratelimit-requests-reset", "é")], "", None);
    }

    #[test]
    fn reset_headers_count_where_their_limit_is_used_up() {
        let requests = ("x-ratelimit-reset-requests", "6ms");
        let tokens = ("x-ratelimit-reset-tokens", "1m0.052s");
        check(&[requests, tokens], "", Some(60_052));
        check(&[requests, tokens, ("x-ratelimit-remaining-tokens", "9")], "", Some(6));
        let reset = ("anthropic-ratelimit-tokens-reset", "2024-03-26T20:00:00Z");
        check(&[reset, ("anthropic-ratelimit-tokens-remaining", "0")], "", Some(60_000));
        check(&[("anthropic-ratelimit-tokens-reset", "2024-03-26T22:00:00.5+02:00")], "", Some(60_000));
        let codex = ("x-codex-primary-reset-after-seconds", "13872");
        check(&[codex, ("x-codex-primary-used-percent", "100")], "", Some(13_872_000));
        check(&[codex, ("x-codex-primary-used-percent", "40")], "", None);
    }

    #[test]
    fn bodies_state_waits_in_fields_and_in_words() {
        check(&[], r#"{"error":{"resets_at":1777936568,"resets_in_seconds":13872}}"#, Some(13_872_000));
        check(&[], r#"{"error":{"resets_at":1711483200}}"#, Some(60_000));
        check(&[], r#"{"error":{"details":[{"@type":"x.RetryInfo","retryDelay":"40s"}]}}"#, Some(40_000));
        for (text, expected) in [
            ("Please try again in 494ms.", Some(494)),
            ("Please try again in 11.054s. Visit", Some(11_054)),
            ("Try again in 35 seconds", Some(35_000)),
            ("Please retry after 86400 seconds.", Some(86_400_000)),
            ("Please retry in 45.578569677s.", Some(45_579)),
            ("please try again after 1 seconds", Some(1_000)),
            ("Please try again in 2 hours.", Some(7_200_000)),
            ("try again in 7m12s", Some(432_000)),
            ("Your quota will reset after 27h41m36s.", Some(99_696_000)),
            ("Please try again later", None),
            ("try again later, or retry in 3s", Some(3_000)),
            ("try again in 5 bananas", None),
        ] {
            check(&[], &format!(r#"{{"error":{{"message":"{text}"}}}}"#), expected);
        }
    }

    #[test]
    fn a_day_ends_at_midnight() {
        assert_eq!(day_end(NOW), (4 * 3600 + 60) * 1000);
        assert_eq!(day_end(Time(0)), 86_400_000);
    }
}
