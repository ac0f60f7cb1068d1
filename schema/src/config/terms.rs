//! The terms of keys, teams and organizations, as the catalogue section writes them.

use std::ops::RangeInclusive;

use super::fields::Fields;
use super::names::Names;
use super::rows::{distinct, values};
use super::value;
use crate::catalogue::is_pattern;
use crate::catalogue::terms::{Budget, Guardrails, Hook, OnFailure, Period, Terms, deny_pattern};
use crate::id::ModelName;

/// A limit of a minute: requests or tokens.
const PER_MINUTE: RangeInclusive<u32> = 1..=4_000_000_000;

/// Tokens of a budget.
const TOKENS: RangeInclusive<u32> = 1..=4_000_000_000;

/// Money of a budget, in thousandths of a USD: a cent at least.
const USD_MILLI: RangeInclusive<u32> = 10..=4_000_000_000;

/// The largest request body, in bytes: to what a gateway takes at all.
const REQUEST_BYTES: RangeInclusive<u32> = 1..=64 << 20;

/// A hook's answer, in milliseconds: every request waits for it.
const HOOK_MS: RangeInclusive<u32> = 1..=30_000;

/// Patterns of one list; all of them are looked for in one pass.
const DENY_MAX: usize = 64;

/// Reads what a row says of the requests under it.
pub(super) fn terms(row: &mut Fields<'_>, names: &Names) -> Terms {
    let models = row.field("models");
    if models.is_empty_list() {
        models.here().wrong("an empty list would permit nothing: leave it out to permit every model");
    }
    Terms {
        models: values(distinct(models, |text| permitted(text, names))),
        requests_per_minute: row.field("requests_per_minute").number_if_given(PER_MINUTE),
        tokens_per_minute: row.field("tokens_per_minute").number_if_given(PER_MINUTE),
        budget: row.field("budget").map().map(budget),
        guardrails: row.field("guardrails").map().map(guardrails),
    }
}

/// A pattern may be for models to come; a name is one that something serves.
fn permitted(text: &str, names: &Names) -> Result<ModelName, String> {
    let text = value::pattern(text)?;
    if is_pattern(text) { Ok(text.into()) } else { names.target(text).map(ModelName::from) }
}

fn budget(mut budget: Fields<'_>) -> Budget {
    const PERIODS: [(&str, Period); 2] = [("day", Period::Day), ("month", Period::Month)];
    let read = Budget {
        period: budget.field("period").choice(&PERIODS, Period::Month),
        tokens: budget.field("tokens").number_if_given(TOKENS).map(u64::from),
        usd_milli: budget.field("usd").read(|text| value::permille(text, &USD_MILLI)).map(u64::from),
    };
    if read.tokens.is_none() && read.usd_milli.is_none() {
        budget.here().wrong("names no limit: `tokens` or `usd`");
    }
    read
}

fn guardrails(mut guardrails: Fields<'_>) -> Guardrails {
    let deny = guardrails.field("deny");
    let here = deny.here();
    let patterns = values(distinct(deny, |text| deny_pattern(text).map(|_| text.to_owned())));
    if patterns.len() > DENY_MAX {
        here.wrong(format!("more than {DENY_MAX} patterns: join some with `|`"));
    }
    Guardrails {
        deny: patterns,
        request_bytes_max: guardrails.field("request_bytes_max").number_if_given(REQUEST_BYTES),
        hook: guardrails.field("hook").map().map(hook),
    }
}

fn hook(mut hook: Fields<'_>) -> Hook {
    const ON_FAILURE: [(&str, OnFailure); 2] = [("refuse", OnFailure::Refuse), ("allow", OnFailure::Allow)];
    Hook {
        url: hook.field("url").required().read(hook_url).unwrap_or_default(),
        token: hook.field("token").secret(),
        deadline_ms: hook.field("deadline_ms").number(HOOK_MS, 500),
        // There is no default: whether requests stop with the hook is the operator's to say.
        on_failure: hook.field("on_failure").required().choice(&ON_FAILURE, OnFailure::Refuse),
    }
}

fn hook_url(text: &str) -> Result<String, String> {
    let url = value::server_url(text, &["http", "https"])?;
    if url.contains('@') {
        return Err("a hook's URL holds no credentials: use `token`".to_owned());
    }
    Ok(url.to_owned())
}
