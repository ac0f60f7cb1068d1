//! Terms: what the requests of a key, of a team or of an organization may ask for, and how much of it.
//!
//! All three hold at once: a caller may do what its key, its team and its organization permit. A model is judged by the
//! name the caller asks for, without its group; what that name leads to needs no permission of its own.

use std::sync::Arc;

use regex::{Regex, RegexBuilder, RegexSet, RegexSetBuilder};
use serde::{Deserialize, Serialize};

use super::{Catalogue, Key, Organization, RowKind, Team, matches};
use crate::id::{ModelName, TemplateId};
use crate::secret::SecretRef;
use crate::time::Time;

const DAY_MS: i64 = 86_400_000;

/// What holds for the requests of one key, team or organization; nothing is limited where nothing is said.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The model names or patterns that may be asked for; empty permits all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelName>,
    /// Requests admitted in any minute, by each gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u32>,
    /// Tokens spent in any minute, through each gateway, beyond which no request is admitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u32>,
    /// What may be spent in a day or a month, through all gateways together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// What is refused before anything is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guardrails: Option<Guardrails>,
}

/// The most that one pattern may take when it is compiled, in bytes.
const PATTERN_BYTES_MAX: usize = 256 << 10;

impl Terms {
    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether `model` may be asked for.
    pub fn permit(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|permitted| matches(permitted.as_str(), model))
    }
}

/// How much may be spent in a period; one limit at least is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// How long a budget lasts before it begins anew.
    pub period: Period,
    /// Tokens, of prompts and answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Money in thousandths of a USD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd_milli: Option<u64>,
}

/// How long a budget lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Period {
    /// A day in UTC.
    Day,
    /// A calendar month in UTC.
    Month,
}

impl Period {
    /// When the period that `now` is in began.
    pub fn begin(self, now: Time) -> Time {
        let day = now.0.div_euclid(DAY_MS);
        Time(DAY_MS * (day - if self == Self::Day { 0 } else { day_of_month(day) }))
    }

    /// When the period that `now` is in ends.
    pub fn end(self, now: Time) -> Time {
        let begin = self.begin(now);
        match self {
            Self::Day => begin.plus_ms(DAY_MS),
            // No month is longer than 31 days, and none shorter than 28.
            Self::Month => self.begin(begin.plus_ms(31 * DAY_MS)).max(self.begin(begin.plus_ms(28 * DAY_MS))),
        }
    }
}

/// The day of its month, from 0, of a day since 1970, by the civil calendar with years that begin in March.
fn day_of_month(day: i64) -> i64 {
    let of_era = (day + 719_468).rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    of_year - (153 * month + 2) / 5
}

/// What is refused before anything is sent.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guardrails {
    /// Regular expressions that no text of a request may match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// The largest request body, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_bytes_max: Option<u32>,
    /// A service that is asked about each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<Hook>,
}

impl Guardrails {
    /// The patterns of `deny` as one, to be looked for in one pass over a text; `None` where there are none. Errors with
    /// the reason where one of them is no pattern.
    pub fn denied(&self) -> Result<Option<RegexSet>, String> {
        if self.deny.is_empty() {
            return Ok(None);
        }
        let limit = PATTERN_BYTES_MAX.saturating_mul(self.deny.len() + 1);
        RegexSetBuilder::new(&self.deny).size_limit(limit).build().map(Some).map_err(|error| error.to_string())
    }
}

/// Compiles one pattern of `deny`; errors with the reason where it is none, or is too large.
pub fn deny_pattern(text: &str) -> Result<Regex, String> {
    RegexBuilder::new(text).size_limit(PATTERN_BYTES_MAX).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "expected a smaller pattern".to_owned(),
        // The first lines repeat the pattern.
        error => format!("expected a regular expression: {}", error.to_string().lines().last().unwrap_or_default()),
    })
}

/// A service that is asked about each request before it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hook {
    /// Where it is asked, by POST.
    pub url: String,
    /// The bearer token it wants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<SecretRef>,
    /// How long its answer may take, in milliseconds.
    pub deadline_ms: u32,
    /// What happens to requests that it gives no answer about.
    pub on_failure: OnFailure,
}

/// What happens to requests that a hook gives no answer about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// They are refused.
    Refuse,
    /// They pass.
    Allow,
}

/// A caller's rights: the terms of its key, of its team and of its organization.
#[derive(Clone, Debug)]
pub struct Rights {
    key: Arc<Key>,
    team: Option<Arc<Team>>,
    organization: Option<Arc<Organization>>,
}

impl Rights {
    /// Whether the caller may ask for `model`, which is written without a group.
    pub fn may(&self, model: &str) -> bool {
        self.terms().all(|(_, _, terms)| terms.permit(model))
    }

    /// The templates that the rows name, from the key outwards.
    pub(super) fn templates(&self) -> impl Iterator<Item = &TemplateId> {
        let team = self.team.as_ref().and_then(|team| team.template.as_ref());
        let organization = self.organization.as_ref().and_then(|row| row.template.as_ref());
        [self.key.template.as_ref(), team, organization].into_iter().flatten()
    }

    /// The caller's key.
    pub fn key(&self) -> &Arc<Key> {
        &self.key
    }

    /// The terms that hold, each with the row that sets them, from the key outwards.
    pub fn terms(&self) -> impl Iterator<Item = (RowKind, &str, &Terms)> {
        let key = (RowKind::Key, self.key.id.as_str(), &self.key.terms);
        let team = self.team.as_ref().map(|team| (RowKind::Team, team.id.as_str(), &team.terms));
        let organization = self.organization.as_ref().map(|row| (RowKind::Organization, row.id.as_str(), &row.terms));
        [Some(key), team, organization].into_iter().flatten()
    }
}

impl Catalogue {
    /// The rights of whoever holds `key`.
    pub fn rights(&self, key: &Arc<Key>) -> Rights {
        let team = key.team.as_ref().and_then(|team| self.teams.get(team)).cloned();
        let organization = team.as_ref().and_then(|team| team.organization.as_ref());
        let organization = organization.and_then(|id| self.organizations.get(id)).cloned();
        Rights { key: key.clone(), team, organization }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dates by `date -u -d … +%s`.
    #[test]
    fn periods_begin_and_end_by_the_calendar() {
        let table = [
            (1_709_164_800, Period::Day, 1_709_164_800, 1_709_251_200), // 2024-02-29T00:00:00
            (1_709_251_199, Period::Day, 1_709_164_800, 1_709_251_200), // 2024-02-29T23:59:59
            (1_709_251_199, Period::Month, 1_706_745_600, 1_709_251_200), // February 2024
            (1_709_251_200, Period::Month, 1_709_251_200, 1_711_929_600), // March 2024
            (1_677_628_799, Period::Month, 1_675_209_600, 1_677_628_800), // February 2023
            (1_735_689_599, Period::Month, 1_733_011_200, 1_735_689_600), // December 2024
            (0, Period::Month, 0, 2_678_400),
            (-1, Period::Month, -2_678_400, 0),
        ];
        for (now, period, begin, end) in table {
            let now = Time(now * 1000);
            assert_eq!(
                (period.begin(now), period.end(now)),
                (Time(begin * 1000), Time(end * 1000)),
                "{now:?} {period:?}"
            );
        }
    }

    #[test]
    fn what_is_not_named_is_not_permitted_under_any_spelling() {
        let terms = Terms { models: vec!["gpt-5".into(), "claude-*".into()], ..Terms::default() };
        for permitted in ["gpt-5", "claude-", "claude-x"] {
            assert!(terms.permit(permitted), "{permitted}");
        }
        for denied in ["gpt-5 ", "GPT-5", "openai/gpt-5", "gpt-5-mini", "x-claude-x", "main/claude-x", "*", ""] {
            assert!(!terms.permit(denied), "{denied}");
        }
        assert!(Terms::default().permit("anything"));
    }
}
