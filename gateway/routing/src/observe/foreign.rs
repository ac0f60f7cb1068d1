//! Errors in the words of another dialect, or of none: a relay hands on what its own upstream said, and a client of the
//! stream's dialect would take it for nothing and the end behind it for a good one.
//!
//! Only what cannot be an event of the dialect is asked about, so nothing here is on the way of an answer.

use serde_json::{Map, Value};

use crate::classify::UpstreamError;

/// The error that an event of no known kind reports, if it is one.
pub(super) fn error(name: Option<&str>, data: &str) -> Option<UpstreamError> {
    if let Some(name) = name.filter(|name| *name == "error" || is_exception(name)) {
        return Some(UpstreamError::named(name, data.as_bytes()));
    }
    if !data.trim_ascii_start().starts_with(['{', '[']) {
        return None;
    }
    let value: Value = serde_json::from_str(data).ok()?;
    // Google's answers in OpenAI's dialect are arrays.
    let object = value.as_array().and_then(|items| items.first()).unwrap_or(&value).as_object()?;
    if let Some((name, inner)) = object.iter().find(|(name, inner)| is_exception(name) && inner.is_object()) {
        return Some(UpstreamError::named(name, inner.to_string().as_bytes()));
    }
    reports_error(object).then(|| UpstreamError::read(data.as_bytes()))
}

/// Bedrock names its events so: `throttlingException`.
fn is_exception(name: &str) -> bool {
    name.len() > "exception".len() && name.to_ascii_lowercase().ends_with("exception")
}

fn reports_error(object: &Map<String, Value>) -> bool {
    let says = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
    let is_error = |key: &str| object.get(key).is_some_and(|value| value == "error" || value == "response.failed");
    // Some say so of every answer: `{"code":0,"message":"success"}`.
    let fails = object.get("code").is_some_and(|code| !code.is_null() && code != 0 && code != "0");
    let business = object.get("base_resp").and_then(|base| base.get("status_code")).and_then(Value::as_i64);
    // vLLM and SGLang mark theirs by `object`, Bedrock by `__type`; others have but a code and a message, or only that.
    says("error")
        || is_error("object")
        || is_error("type")
        || object.contains_key("__type")
        || (says("message") && fails)
        || (object.len() == 1 && ["message", "detail"].iter().any(|key| object.get(*key).is_some_and(Value::is_string)))
        || business.is_some_and(|code| code != 0)
}
