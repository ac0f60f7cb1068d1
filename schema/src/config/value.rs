//! What one scalar may say: text to value, with the sentence for the operator when it is not one.
//!
//! The file and the environment are read by the same functions. No message repeats the text of a secret or a URL.

use std::ops::RangeInclusive;

use crate::secret::SecretRef;

/// The longest id, in bytes: ids are parts of keys and of header values.
const ID_BYTES_MAX: usize = 64;

/// The longest model name, in bytes.
const MODEL_BYTES_MAX: usize = 256;

/// The longest URL, in bytes.
const URL_BYTES_MAX: usize = 2048;

/// The longest label, header or name for people, in bytes.
const LINE_BYTES_MAX: usize = 256;

/// The highest price of a million tokens, in USD: far above any, and within what can be counted.
const USD_MAX: u64 = 1_000_000;

/// How much of a misspelt word a message repeats, in characters.
const SHOWN_CHARS_MAX: usize = 64;

/// `text` as a message may repeat it: short and on one line.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown
}

/// A switch, in the forms that YAML files and environments write it.
pub(super) fn flag(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

/// A whole number within `bounds`, written in units of `unit`.
pub(super) fn number(text: &str, bounds: &RangeInclusive<u32>, unit: u32) -> Result<u32, String> {
    let (low, high) = (bounds.start().div_ceil(unit), bounds.end() / unit);
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse::<u32>().ok().filter(|n| digits && (low..=high).contains(n));
    number.map(|n| n * unit).ok_or_else(|| format!("expected a whole number from {low} to {high}"))
}

/// A decimal number within `bounds`, in thousandths.
pub(super) fn permille(text: &str, bounds: &RangeInclusive<u32>) -> Result<u32, String> {
    let (low, high) = (f64::from(*bounds.start()) / 1000.0, f64::from(*bounds.end()) / 1000.0);
    let wrong = || format!("expected a number from {low:.1} to {high:.1}, with three decimals at most");
    let number = fixed(text, 3).and_then(|n| u32::try_from(n).ok());
    number.filter(|n| bounds.contains(n)).ok_or_else(wrong)
}

/// A price in USD, in millionths.
pub(super) fn usd_micro(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected an amount of USD from 0 to {USD_MAX}, with six decimals at most");
    fixed(text, 6).filter(|micro| *micro <= USD_MAX * 1_000_000).ok_or_else(wrong)
}

/// A decimal number in units of its last place, of which there are `places` behind the point.
fn fixed(text: &str, places: usize) -> Option<u64> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(decimals) || decimals.len() > places {
        return None;
    }
    let unit = 10_u64.pow(u32::try_from(places).ok()?);
    let rest = format!("{decimals:0<places$}").parse::<u64>().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(rest)
}

/// One of `words`; `-` and `_` are the same.
pub(super) fn choice<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    let written = text.replace('-', "_");
    let found = words.iter().find(|(word, _)| *word == written);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let all: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
        format!("expected {}{}", all.join(" or "), suggestion(&written, words.iter().map(|(word, _)| *word)))
    })
}

/// A name of our own making.
pub(super) fn id(text: &str) -> Result<&str, String> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if text.is_empty() || text.len() > ID_BYTES_MAX || !text.bytes().all(legal) {
        return Err(format!("expected 1 to {ID_BYTES_MAX} of the characters A-Z a-z 0-9 . _ -"));
    }
    Ok(text)
}

/// A model's name, which is no pattern.
pub(super) fn model(text: &str) -> Result<&str, String> {
    if text.contains('*') {
        return Err("a pattern cannot stand here: name one model".to_owned());
    }
    pattern(text)
}

/// A model's name or a pattern with `*`.
pub(super) fn pattern(text: &str) -> Result<&str, String> {
    if text.is_empty() || text.len() > MODEL_BYTES_MAX || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(format!(
            "expected a model name: 1 to {MODEL_BYTES_MAX} bytes without spaces or control characters"
        ));
    }
    Ok(text)
}

/// One line of text for people or for a header's value.
pub(super) fn line(text: &str) -> Result<&str, String> {
    if text.len() > LINE_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(format!("expected one line of at most {LINE_BYTES_MAX} bytes"));
    }
    Ok(text)
}

/// A request header's name, lower case, that may name a session.
pub(super) fn header(text: &str) -> Result<String, String> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if text.is_empty() || text.len() > LINE_BYTES_MAX || !text.bytes().all(legal) {
        return Err("expected the name of a request header".to_owned());
    }
    match text.to_ascii_lowercase().as_str() {
        // It is new for every request, so it would make every request a session (DESIGN.md section 10).
        "x-client-request-id" => Err("names a request, never a session".to_owned()),
        header => Ok(header.to_owned()),
    }
}

/// A secret's place. A literal is refused without being repeated.
pub(super) fn secret(text: &str) -> Result<SecretRef, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let place = SecretRef::parse(text).filter(|place| match place {
        SecretRef::Env(name) => name.chars().all(legal) && !name.starts_with(|c: char| c.is_ascii_digit()),
        SecretRef::File(path) => !path.chars().any(char::is_control),
    });
    place.ok_or_else(|| "a secret does not stand in this file: write `env:NAME` or `file:PATH`".to_owned())
}

/// Where to listen: `host:port`, an IPv6 host in brackets.
pub(super) fn listen(text: &str) -> Result<&str, String> {
    if is_authority(text, true) { Ok(text) } else { Err("expected `host:port`, such as `127.0.0.1:4000`".to_owned()) }
}

/// An upstream's base URL, without a slash at the end.
pub(super) fn base_url(text: &str) -> Result<&str, String> {
    let rest = url(text, &["http", "https"])?;
    if rest.contains(['?', '#']) {
        return Err("a base URL has no query and no fragment".to_owned());
    }
    if rest.split('/').next().is_some_and(|authority| authority.contains('@')) {
        return Err("a base URL holds no credentials: use `api_keys`".to_owned());
    }
    Ok(text.trim_end_matches('/'))
}

/// The URL of a server of ours, of one of `schemes`, with its password, if any.
pub(super) fn server_url<'t>(text: &'t str, schemes: &[&str]) -> Result<&'t str, String> {
    url(text, schemes).map(|_| text)
}

/// Whether the URL holds a password.
pub(super) fn has_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let query = rest.split_once('?').is_some_and(|(_, query)| query.to_ascii_lowercase().contains("password="));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    query || authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'))
}

/// What follows the scheme in a URL of one of `schemes`.
fn url<'t>(text: &'t str, schemes: &[&str]) -> Result<&'t str, String> {
    let begins: Vec<String> = schemes.iter().map(|scheme| format!("`{scheme}://`")).collect();
    let wrong = || format!("expected a URL that begins with {}", begins.join(" or "));
    let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
    if !schemes.contains(&scheme) {
        return Err(wrong());
    }
    if text.len() > URL_BYTES_MAX || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(format!("expected a URL of at most {URL_BYTES_MAX} bytes without spaces"));
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if is_authority(host, false) { Ok(rest) } else { Err("the URL has no valid host and port".to_owned()) }
}

/// Whether `text` is `host` or `host:port`; a port may be demanded.
fn is_authority(text: &str, port_required: bool) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let host_legal = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)),
    };
    let digits = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    host_legal && port.map_or(!port_required, |port| digits(port) && port.parse::<u16>().is_ok())
}

/// The end of a message that offers the nearest of `words`, or nothing when none is near.
pub(super) fn suggestion<'w>(written: &str, words: impl Iterator<Item = &'w str>) -> String {
    let near = words.filter_map(|word| {
        let limit = word.chars().count().max(written.chars().count()).div_ceil(4);
        let close = written.len().abs_diff(word.len()) <= limit * 4;
        let distance = if close { distance(written, word) } else { usize::MAX };
        (distance <= limit).then_some((distance, word))
    });
    near.min().map(|(_, word)| format!(": did you mean `{}`?", shown(word))).unwrap_or_default()
}

/// Edits between two words: letters put in, left out, changed, or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) =
        (a.chars().take(ID_BYTES_MAX).collect(), b.chars().take(ID_BYTES_MAX).collect());
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let changed = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = changed.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_digits_within_their_bounds() {
        let read = |text, unit| number(text, &(60..=120), unit).ok();
        assert_eq!(
            ["60", "120", "1", "+60", "6_0", "", "60.0", "4294967356"].map(|text| read(text, 1).is_some()),
            [true, true, false, false, false, false, false, false]
        );
        assert_eq!(["0", "1", "2", "3"].map(|text| read(text, 60)), [None, Some(60), Some(120), None]);
    }

    #[test]
    fn decimals_are_read_exactly() {
        let read = |text| permille(text, &(1000..=10_000)).ok();
        assert_eq!(["2.0", "2", "1.005", "10", "1.1"].map(read), [2000, 2000, 1005, 10_000, 1100].map(Some));
        assert_eq!(["0.999", "10.001", "1.0001", "1.", ".5", "2e0", "-2", "4294968.0"].map(read), [None; 8]);
    }

    #[test]
    fn the_nearest_word_is_offered_and_none_when_all_are_far() {
        let offer = |written| suggestion(written, ["priority", "weight", "group"].into_iter());
        assert_eq!(offer("prioritiy"), ": did you mean `priority`?");
        assert_eq!(offer("wieght"), ": did you mean `weight`?");
        assert_eq!(offer("model"), "");
    }

    /// Distances of the Damerau-Levenshtein example pairs found in textbooks.
    #[test]
    fn distance_counts_edits_and_swaps() {
        let pairs =
            [("kitten", "sitting", 3), ("saturday", "sunday", 3), ("ab", "ba", 1), ("", "abc", 3), ("a", "a", 0)];
        for (a, b, edits) in pairs {
            assert_eq!((distance(a, b), distance(b, a)), (edits, edits), "{a} {b}");
        }
    }

    #[test]
    fn a_password_is_seen_where_urls_hide_one() {
        assert!(has_password("redis://:p@h"));
        assert!(has_password("postgres://u:p@h/d"));
        assert!(has_password("postgres://u@h/d?sslmode=require&Password=p"));
        assert!(!has_password("postgres://u@h:5432/d"));
        assert!(!has_password("redis://h:6379/0"));
    }

    #[test]
    fn a_place_to_listen_has_a_host_and_a_port() {
        let good = ["127.0.0.1:4000", "localhost:0", "[::1]:80", "0.0.0.0:65535"];
        assert!(good.iter().all(|text| listen(text).is_ok()));
        let bad = ["4000", ":4000", "h:", "h:65536", "::1:80", "[::1]", "h:+1", "http://h:1", "a b:1"];
        assert_eq!(bad.map(|text| listen(text).is_ok()), [false; 9]);
    }

    #[test]
    fn a_secret_is_a_place_with_a_legal_name() {
        let good = ["env:A", "env:_a9", "file:/run/secrets/x", "file:relative path"];
        assert!(good.iter().all(|text| secret(text).is_ok()));
        let bad = ["sk-1", "env:", "env:9A", "env:sk-1", "file:", "file:a\nb", "vault:x", "Env:A", ""];
        assert_eq!(bad.map(|text| secret(text).is_ok()), [false; 9]);
    }
}
