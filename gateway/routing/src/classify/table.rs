//! The tables of the classifier, in the order in which they are asked; within a table the first match wins.
//!
//! Everything is in lower case. `*` in a text stands for anything. Where an entry comes from is told by the corpus of
//! provider errors in `fixtures/provider_errors.jsonl`, whose ids (C01, Q03 …) stand beside entries that need a reason.

use super::envelope::UpstreamError;

/// What an upstream meant: finer than a class where the next step differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// It will serve in a moment.
    Warming,
    /// The prompt is too long for this provider; another of the same model may take it.
    ContextHere,
    /// This provider's own filter refused the content; another of the same model may not.
    PolicyHere,
    /// The caller's mistake as this provider sees it; another may not.
    CallerHere,
    /// Too many requests or tokens for now.
    Rate,
    /// The same from who lets it end within a minute.
    RateMinute,
    /// The day's share is used up.
    RateDay,
    /// This one request is larger than the rate limit: no wait helps it, and others pass.
    NeverFits,
    /// The day's share is used up, or this one request is larger than that of a minute: the words do not tell.
    RateUntold,
    /// No money or quota is left.
    Quota,
    /// The account lacks what this one request asks for.
    Unentitled,
    /// The credential, the account or the place it is used from is refused.
    Credential,
    /// The model is not served there.
    Model,
    /// The same from who says so now and then of a model that it serves.
    ModelForNow,
    /// The model is served there, but not with what this request needs.
    Capability,
    /// Overloaded or broken.
    Down,
    /// Overloaded with this one model.
    Busy,
    /// The same, and it asks for another model.
    Full,
    /// What stands before it could not reach it.
    Unreached,
    /// It gave up on itself.
    Timeout,
    /// What stands before it gave up waiting, and it may still be at work.
    Unawaited,
    /// Not an answer that a model provider gives.
    Foreign,
    /// The prompt does not fit.
    Context,
    /// The content is refused.
    Policy,
    /// The request is wrong, or its state belongs to another provider.
    Caller,
}

use Meaning::*;

/// Texts that overrule every code, looked for in the message and in the codes.
const OVERRULING: &[(&str, Meaning)] = &[
    // Q03, Q04: the free tier's "retry in 45s" lies when the limit is zero, and so does any for a daily quota.
    ("limit: 0, model", Quota),
    ("perday", Quota),
    // R12.
    ("too many tokens per day", RateDay),
    // R08, R09: a single request above the quota of a minute.
    ("request too large for", NeverFits),
    // R07: Azure's word for the same, and for a day's share.
    ("retry after 86400 seconds", RateUntold),
    // Q15: sent as a rate limit.
    ("extra usage is required for long context", Unentitled),
];

/// Codes, types, reasons and named statuses that mean one thing wherever they are seen.
const CODES: &[(&str, Meaning)] = &[
    ("context_length_exceeded", Context),
    // C23: the limit is Copilot's own, below the model's.
    ("model_max_prompt_tokens_exceeded", ContextHere),
    ("exceeded_context_size_error", Context),
    ("tokens_too_long", Context),
    ("1261", Context),
    ("content_filter", Policy),
    ("responsibleaipolicyviolation", Policy),
    ("invalid_prompt", Policy),
    ("cyber_policy", Policy),
    ("bio_policy", Policy),
    ("misalignment_policy_violation", Policy),
    ("data_inspection_failed", Policy),
    ("datainspectionfailed", Policy),
    // P16: the relay's own filter.
    ("sensitive_words_detected", PolicyHere),
    ("1301", Policy),
    ("openrouter_in_flight_budget", Rate),
    ("credit_balance_exhausted", Quota),
    ("organization_spend_limit_exceeded", Quota),
    ("project_spend_limit_exceeded", Quota),
    ("usage_not_included", Quota),
    ("exceeded_current_quota_error", Quota),
    ("insufficient_user_quota", Quota),
    ("local:insufficient_quota", Quota),
    ("quota_exceeded", Quota),
    ("arrearage", Quota),
    ("base_resp:1008", Quota),
    ("1113", Quota),
    ("1309", Quota),
    ("1311", Quota),
    ("1313", Quota),
    ("invalid_api_key", Credential),
    ("invalidapikey", Credential),
    ("account_deactivated", Credential),
    ("unsupported_country_region_territory", Credential),
    ("consumer_suspended", Credential),
    ("1000", Credential),
    ("1001", Credential),
    ("1002", Credential),
    ("1003", Credential),
    ("1004", Credential),
    ("1110", Credential),
    ("1111", Credential),
    ("1112", Credential),
    ("1121", Credential),
    ("model_not_found", Model),
    // M08: seen to come and go for accounts that have the model.
    ("model_not_supported", ModelForNow),
    ("model_decommissioned", Model),
    ("modelnotfound", Model),
    ("1211", Model),
    ("1212", Model),
    ("1220", Model),
    ("1221", Model),
    ("1222", Model),
    ("overloaded_error", Down),
    ("server_is_overloaded", Down),
    ("engine_overloaded_error", Down),
    ("model_capacity_exhausted", Busy),
    ("provider_unavailable", Down),
    // D11: it is loading the model.
    ("unavailable_error", Warming),
    ("serviceunavailableexception", Down),
    ("internalserverexception", Down),
    ("modelstreamerrorexception", Down),
    ("1305", Busy),
    ("1312", Busy),
    ("modeltimeoutexception", Timeout),
    ("slow_down", Rate),
    ("throttlingexception", Rate),
    // R15: DashScope's, of a minute by its document.
    ("throttling.ratequota", RateMinute),
    ("throttling.allocationquota", RateMinute),
    ("rate_limited", Rate),
    ("rate_limit_reached_error", Rate),
    ("usage_limit_reached", Rate),
    // R13: Google's message reads like an empty account, and is one only where OVERRULING says so.
    ("resource_exhausted", Rate),
    ("1300", Rate),
    ("1302", Rate),
    ("1303", Rate),
    ("1304", RateDay),
    ("1308", RateDay),
    ("1310", RateDay),
    ("string_above_max_length", Caller),
    ("array_above_max_length", Caller),
    ("string_too_long", Caller),
    ("max_tokens_exceeded", Caller),
    // L28: what the credit allows one request, which a smaller one keeps to.
    ("token_limit_exceeded", Caller),
    ("unsupported_parameter", Caller),
    ("invalid_function_parameters", Caller),
    ("request_too_large", Caller),
    ("invalid_encrypted_content", Caller),
    ("previous_response_not_found", Caller),
    ("invalid_function_call", Caller),
];

/// Texts in a message. Money and credentials stand before rates, rates before lengths, limits of one field or of the
/// output before the context: the other way round each is taken for the other.
const TEXTS: &[(&str, Meaning)] = &[
    ("credit balance is too low", Quota),
    ("insufficient balance", Quota),
    ("余额不足", Quota),
    ("used all available credits", Quota),
    ("monthly spending limit", Quota),
    ("user quota is not enough", Quota),
    ("用户额度不足", Quota),
    ("requires more credits", Quota),
    ("you have no quota", Quota),
    ("usage limit for this billing cycle", Quota),
    ("usage limit for this period", Quota),
    ("monthly usage limit", Quota),
    ("verify your membership benefits", Quota),
    // R15: DashScope's word for tokens per minute, under OpenAI's code for an empty account.
    ("allocated quota exceeded", RateMinute),
    ("exceeded your current quota", Quota),
    ("incorrect api key", Credential),
    ("invalid subscription key", Credential),
    ("authentication fails", Credential),
    ("organization has been disabled", Credential),
    ("oauth token has", Credential),
    ("oauth authentication is currently not allowed", Credential),
    ("user location is not supported", Credential),
    ("invalid access token or token expired", Credential),
    ("invalid api-key", Credential),
    ("access to the chat endpoint is denied", Credential),
    ("only available for coding agents", Credential),
    ("access terminated", Credential),
    // A15: a 503 that no wait mends.
    ("this group only allows", Credential),
    ("该令牌状态不可用", Credential),
    ("content management policy", Policy),
    ("flagged as potentially violating", Policy),
    ("output blocked by content filtering", Policy),
    ("content exists risk", Policy),
    ("data may contain inappropriate content", Policy),
    // P10, P11: a 403 under the code of a refused account; a pool of keys was drained by one prompt.
    ("content violates usage guidelines", Policy),
    ("considered high risk", Policy),
    ("requires moderation and your input was flagged", PolicyHere),
    ("contains sensitive words", PolicyHere),
    ("不安全或敏感内容", Policy),
    // S02: a 404 that is not about the model.
    ("items are not persisted", Caller),
    ("only supported in v1/responses", Capability),
    ("not a chat model and thus not supported", Capability),
    ("no endpoints found that support", Capability),
    ("does not support tools", Capability),
    ("does not exist or you do not have access", Model),
    ("does not have access to model", Model),
    ("was not found or your project does not have access", Model),
    ("with on-demand throughput isn't supported", Model),
    ("requested model is not supported", ModelForNow),
    ("model is not supported for this request", ModelForNow),
    // M16: Ollama says so of a model that is loaded.
    ("model '*' not found", ModelForNow),
    ("model '*' is not supported", Model),
    ("is not available for integrator", Model),
    ("has been decommissioned", Model),
    ("no endpoints available matching", Model),
    ("not found the model", Model),
    // M18: a 503 for a model that nobody configured; D14: or for one whose channels all fail just now.
    ("no available channel for model", ModelForNow),
    ("无可用渠道", ModelForNow),
    ("no available accounts", Down),
    ("no available model provider", Down),
    ("selected model is at capacity", Full),
    ("service tier capacity exceeded", Busy),
    ("rate limit", Rate),
    ("too many requests", Rate),
    ("request rate increased too quickly", RateMinute),
    ("please wait before trying again", Rate),
    ("上游负载已饱和", Rate),
    ("completion tokens, whereas you provided", Caller),
    ("maximum allowed number of output tokens", Caller),
    ("maximum tokens you requested exceeds the model limit", Caller),
    ("less than the `context_window`", Caller),
    ("string too long. expected", Caller),
    ("array too long. expected", Caller),
    ("maximum number of items", Caller),
    ("expected maxlength", Caller),
    ("string value length", Caller),
    ("total message size", Caller),
    ("payload size exceeds", Caller),
    // L11: a proxy's limit.
    ("request body size", CallerHere),
    // L25, L30: a role and a tier that this provider, or this account, does not know.
    ("unknown variant `developer`", CallerHere),
    ("requested service tier is not allowed", CallerHere),
    ("exceed max allowed size", Caller),
    ("is allowed for this model", Caller),
    ("unsupported image url", Caller),
    ("function name * is duplicated", Caller),
    // S04, S05, S06, S11, S14, S15: what belongs together was torn apart.
    ("without its required", Caller),
    ("no tool call found for", Caller),
    ("reasoning_content is missing", Caller),
    ("must be followed by tool messages", Caller),
    ("must be a response to a preceding message", Caller),
    // C21: another provider behind OpenRouter may have more room.
    ("maximum context length*middle-out", ContextHere),
    ("maximum context length", Context),
    ("exceeds the context window", Context),
    ("prompt is too long", Context),
    ("exceed context limit", Context),
    ("input token count * exceeds the maximum number of tokens", Context),
    ("input token count exceeds the maximum number of tokens", Context),
    ("input is too long for requested model", Context),
    ("maximum prompt length is", Context),
    ("exceeded model token limit", Context),
    ("input token length too long", Context),
    ("range of input length should be", Context),
    ("prompt exceeds max length", Context),
    ("prompt 超长", Context),
    ("context window exceeds limit", Context),
    ("reduce the length of the messages or completion", Context),
    ("prompt token count of * exceeds the limit of", ContextHere),
    // C26: the default of max_tokens went below zero because the prompt had overrun already.
    ("max_tokens must be at least 1, got -", Context),
    ("longer than the model's context length", Context),
    ("exceeds the available context size", Context),
    ("`inputs` tokens + `max_new_tokens` must be", Context),
    ("total number of tokens (prompt and prediction) cannot exceed", Context),
    ("loaded with context length of only", Context),
    ("prompt tokens too long", Context),
];

/// Codes that some message explains better, and that overrule the status.
const LATE_CODES: &[(&str, Meaning)] = &[
    ("insufficient_quota", Quota),
    ("rate_limit_exceeded", Rate),
    ("rate_limit_error", Rate),
    ("upstream_provider_rate_limit", Rate),
];

/// Statuses, from the most specific.
const STATUSES: &[(std::ops::RangeInclusive<u16>, Meaning)] = &[
    (401..=401, Credential),
    (402..=402, Quota),
    (403..=403, Credential),
    (404..=405, Model),
    (408..=408, Timeout),
    (429..=429, Rate),
    // D16: Cloudflare could not reach the upstream, or waited 100 s for it.
    (520..=523, Unreached),
    (524..=524, Unawaited),
    (400..=499, Caller),
    (500..=599, Down),
    (0..=399, Foreign),
];

/// The status that a type stands for, where an error came without one (Anthropic's list, and the names others use).
const TYPES: &[(&str, u16)] = &[
    ("invalid_request_error", 400),
    ("invalid_argument", 400),
    ("validationexception", 400),
    ("authentication_error", 401),
    ("billing_error", 402),
    ("permission_error", 403),
    ("permission_denied", 403),
    ("permission-denied", 403),
    ("not_found_error", 404),
    ("server_error", 500),
    ("api_error", 500),
    ("internalserverexception", 500),
    ("modelstreamerrorexception", 424),
    ("service_unavailable_error", 503),
    ("server_is_overloaded", 503),
    ("serviceunavailableexception", 503),
    ("timeout_error", 504),
    ("overloaded_error", 529),
];

/// The status that the error would have had as an answer of its own, where its type tells.
pub(super) fn status_of_type(error: &UpstreamError) -> Option<u16> {
    by_code(TYPES, error)
}

/// What `error` under the HTTP status `status` means; without a status it came inside a 200.
pub(super) fn meaning(error: &UpstreamError, status: Option<u16>) -> Meaning {
    let message = normal(&error.message);
    let everything = format!("{}\n{message}", error.codes.join("\n"));
    by_text(OVERRULING, &everything)
        .or_else(|| by_code(CODES, error))
        .or_else(|| by_text(TEXTS, &message))
        .or_else(|| by_code(LATE_CODES, error))
        .or_else(|| error.status.or(status).or_else(|| status_of_type(error)).and_then(by_status))
        .unwrap_or(Down)
}

fn by_text(table: &[(&str, Meaning)], text: &str) -> Option<Meaning> {
    table.iter().find(|(pattern, _)| holds(text, pattern)).map(|(_, meaning)| *meaning)
}

fn by_code<T: Copy>(table: &[(&str, T)], error: &UpstreamError) -> Option<T> {
    error.codes.iter().find_map(|code| table.iter().find(|(known, _)| known == code)).map(|(_, value)| *value)
}

fn by_status(status: u16) -> Option<Meaning> {
    STATUSES.iter().find(|(range, _)| range.contains(&status)).map(|(_, meaning)| *meaning)
}

/// Whether the parts of `pattern` between its stars follow one another in `text`.
fn holds(text: &str, pattern: &str) -> bool {
    let mut rest = text;
    pattern.split('*').all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// Lower case, with straight apostrophes: some vendors write typographic ones.
fn normal(text: &str) -> String {
    text.to_lowercase().replace('\u{2019}', "'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_entry_is_hidden_by_an_earlier_one_or_can_never_match() {
        for table in [OVERRULING, TEXTS] {
            for (at, (pattern, _)) in table.iter().enumerate() {
                assert_eq!(*pattern, normal(pattern));
                let hiding = table[..at].iter().find(|(earlier, _)| holds(pattern, earlier));
                assert_eq!(hiding, None, "hides {pattern:?}");
            }
        }
        let codes: Vec<_> = CODES.iter().chain(LATE_CODES).map(|(code, _)| *code).collect();
        for (at, code) in codes.iter().enumerate() {
            assert_eq!(*code, normal(code));
            assert!(!codes[..at].contains(code), "{code} stands twice");
        }
    }
}
