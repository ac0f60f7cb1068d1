//! The envelopes that errors come in, and what is inside.
//!
//! OpenAI nests an object under `error`, Anthropic does so beside a `type`, vLLM is flat, Google's compatible answers
//! are arrays, xAI's `error` is a string, OpenRouter keeps the provider's body as a string in `metadata.raw`, and
//! relays put whole bodies into messages. The innermost envelope is the one that knows; what it leaves open is filled
//! from those around it.

use std::fmt;

use serde_json::{Map, Value};

use super::table;

/// How many envelopes are opened: real ones stop at three.
const DEPTH_MAX: usize = 6;

/// An upstream's error out of its envelopes.
///
/// The message can quote the caller's content and even a credential; `Debug` does not show it.
#[derive(Clone, Default, PartialEq)]
pub struct UpstreamError {
    /// Codes, types, reasons and named statuses in lower case, the most telling first.
    pub codes: Vec<String>,
    /// The upstream's words.
    pub message: String,
    /// The HTTP status that the body names, 400 to 599.
    pub status: Option<u16>,
    /// Whether it came through OpenRouter, which has other providers of the same model.
    pub(super) relayed: bool,
    /// Google's `retryDelay`.
    pub(super) retry_delay: Option<String>,
    /// Seconds until the limit resets.
    pub(super) resets_in_seconds: Option<f64>,
    /// When the limit resets, in seconds since 1970.
    pub(super) resets_at: Option<f64>,
}

impl fmt::Debug for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamError")
            .field("codes", &self.codes)
            .field("status", &self.status)
            .field("message_bytes", &self.message.len())
            .finish_non_exhaustive()
    }
}

impl UpstreamError {
    /// Takes the error out of a body or an event's data; a web page gives an empty one.
    pub fn read(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
            Ok(value) => Self::open(&value, 0),
            Err(_) if text.trim_start().starts_with('<') => Self::default(),
            Err(_) => Self::open(&Value::String(text.into_owned()), 0),
        }
    }

    /// The same of one that is named beside its body.
    pub fn named(name: &str, body: &[u8]) -> Self {
        let mut error = Self::read(body);
        error.add_code(name);
        error
    }

    /// The HTTP status that it would have had as an answer of its own, where the body or its type tells.
    pub fn status_meant(&self) -> Option<u16> {
        self.status.or_else(|| table::status_of_type(self))
    }

    pub(super) fn add_code(&mut self, code: &str) {
        if !code.is_empty() && code != "error" {
            self.codes.push(code.to_lowercase());
        }
    }

    fn open(value: &Value, depth: usize) -> Self {
        match value {
            _ if depth > DEPTH_MAX => Self::default(),
            Value::Array(items) => items.first().map(|item| Self::open(item, depth + 1)).unwrap_or_default(),
            Value::String(text) => match embedded(text) {
                Some(inner) => Self::open(&inner, depth + 1).or(Self { message: text.clone(), ..Self::default() }),
                None => Self { message: text.clone(), ..Self::default() },
            },
            Value::Object(object) => match inner(object) {
                Some(inner) => Self::open(inner, depth + 1).or(Self::of_object(object, depth)),
                None => Self::of_object(object, depth),
            },
            Value::Null | Value::Bool(_) | Value::Number(_) => Self::default(),
        }
    }

    /// What an object says itself, its message opened where that is a body again.
    fn of_object(object: &Map<String, Value>, depth: usize) -> Self {
        let mut error = Self::default();
        for key in ["code", "type", "__type", "status", "status_code", "reason", "error_type", "limit_source"] {
            error.add_key(object.get(key));
        }
        error.relayed = object.get("metadata").is_some_and(Value::is_object);
        for part in ["innererror", "metadata"] {
            if let Some(Value::Object(part)) = object.get(part) {
                error.codes.extend(Self::of_object(part, DEPTH_MAX).codes);
            }
        }
        if error.codes.iter().any(|code| code == "bad_response_status_code") {
            error.add_key(object.get("param"));
        }
        if let Some(code) = object.get("base_resp").and_then(|base| base.get("status_code")) {
            error.add_code(&format!("base_resp:{code}"));
        }
        error.read_details(object.get("details"));
        error.resets_in_seconds = object.get("resets_in_seconds").and_then(Value::as_f64);
        error.resets_at = object.get("resets_at").and_then(Value::as_f64);
        let words = ["message", "Message", "detail", "status_msg"].iter().find_map(|key| object.get(*key));
        let words = words.or_else(|| object.get("base_resp")?.get("status_msg"));
        match words {
            Some(words) if depth < DEPTH_MAX => Self::open(words, depth + 1).or(error),
            _ => error,
        }
    }

    /// Takes a number from 400 to 599 as the status, anything else as a code.
    fn add_key(&mut self, value: Option<&Value>) {
        let text = match value {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Number(number)) => number.to_string(),
            _ => return,
        };
        match text.parse() {
            Ok(status @ 400..=599) => self.status = self.status.or(Some(status)),
            _ => self.add_code(text.rsplit('#').next().unwrap_or(&text)),
        }
    }

    /// Google's `details`: reasons, violated quotas, and the delay.
    fn read_details(&mut self, details: Option<&Value>) {
        let details = details.and_then(Value::as_array).into_iter().flatten();
        for detail in details {
            self.add_key(detail.get("reason"));
            let violations = detail.get("violations").and_then(Value::as_array).into_iter().flatten();
            violations.for_each(|violation| self.add_key(violation.get("quotaId")));
            if let Some(delay) = detail.get("retryDelay").and_then(Value::as_str) {
                self.retry_delay = Some(delay.to_owned());
            }
        }
    }

    /// This error, with what it leaves open taken from the envelope around it.
    fn or(mut self, outer: Self) -> Self {
        if self.codes.is_empty() {
            self.codes = outer.codes;
        }
        if self.message.is_empty() {
            self.message = outer.message;
        }
        self.status = self.status.or(outer.status);
        self.relayed |= outer.relayed;
        self.retry_delay = self.retry_delay.or(outer.retry_delay);
        self.resets_in_seconds = self.resets_in_seconds.or(outer.resets_in_seconds);
        self.resets_at = self.resets_at.or(outer.resets_at);
        self
    }
}

/// The envelope inside an object.
fn inner(object: &Map<String, Value>) -> Option<&Value> {
    let raw = object.get("metadata").and_then(|metadata| metadata.get("raw"));
    let failed = object.get("response").and_then(|response| response.get("error"));
    let mut choices = object.get("choices").and_then(Value::as_array).into_iter().flatten();
    let of_a_choice = choices.find_map(|choice| choice.get("error").filter(|error| !error.is_null()));
    let candidates = [object.get("error"), failed, of_a_choice, raw];
    candidates.into_iter().flatten().find(|value| match value {
        Value::Object(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    })
}

/// The body that a text holds: the whole of it, or what stands between its outermost braces.
fn embedded(text: &str) -> Option<Value> {
    let (start, end) = (text.find(['{', '['])?, text.rfind(['}', ']'])?);
    let value: Value = serde_json::from_str(text.get(start..=end)?).ok()?;
    let speaks = |object: &Map<String, Value>| ["error", "message", "code"].iter().any(|key| object.contains_key(*key));
    let body = value.as_array().and_then(|items| items.first()).unwrap_or(&value);
    body.as_object().is_some_and(speaks).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(body: &str, expected: &str) {
        let error = UpstreamError::read(body.as_bytes());
        let status = error.status.map(|status| status.to_string()).unwrap_or_default();
        assert_eq!(format!("{} {status} {}", error.codes.join(","), error.message), expected);
    }

    #[test]
    fn each_envelope_is_opened() {
        check(r#"{"error":{"message":"m","type":"t","param":null,"code":"c"}}"#, "c,t  m");
        check(r#"{"type":"error","error":{"type":"t","message":"m"},"request_id":"r"}"#, "t  m");
        check(r#"{"object":"error","message":"m","type":"T","param":null,"code":400}"#, "t 400 m");
        check(r#"[{"error":{"code":429,"status":"S","message":"m"}}]"#, "s 429 m");
        check(r#"{"code":"c","error":"m"}"#, "c  m");
        check(r#""m""#, "  m");
        check("m", "  m");
        check(r#"{"detail":"m"}"#, "  m");
        check(
            r#"{"type":"response.failed","response":{"status":"failed","error":{"code":"c","message":"m"}}}"#,
            "c  m",
        );
        check(r#"{"choices":[{"error":null},{"error":{"code":"c","message":"m"}}]}"#, "c  m");
        check(r#"{"base_resp":{"status_code":1008,"status_msg":"m"}}"#, "base_resp:1008  m");
        check(r#"{"success":false,"error":{"code":"C","status":500,"message":"m"}}"#, "c 500 m");
        check(r#"{"__type":"com.amazon#ThrottlingException","message":"m"}"#, "throttlingexception  m");
    }

    #[test]
    fn the_innermost_envelope_wins() {
        check(
            r#"{"error":{"message":"Provider returned error","code":502,"metadata":{"raw":"{\"error\":{\"message\":\"m\",\"code\":429}}","provider_name":"P"}}}"#,
            " 429 m",
        );
        check(
            r#"{"code":"rate","message":"{\"error\":{\"type\":\"server_error\",\"message\":\"m\"}}"}"#,
            "server_error  m",
        );
        check(
            r#"{"error":{"message":"upstream 400: {\"error\":{\"code\":\"c\",\"message\":\"m\"}} (relay)"}}"#,
            "c  m",
        );
        check(r#"{"error":{"message":"failed for {\"name\":\"x\"}","code":"c"}}"#, r#"c  failed for {"name":"x"}"#);
    }

    #[test]
    fn a_web_page_and_a_deep_nest_say_nothing() {
        check("<!DOCTYPE html><title>x</title>", "  ");
        check(&format!("{}1{}", r#"{"error":"#.repeat(50), "}".repeat(50)), "  ");
        check("", "  ");
    }

    #[test]
    fn a_message_is_not_shown_by_debug() {
        let error = UpstreamError::read(br#"{"error":{"message":"Consumer 'api_key:secret' has been suspended."}}"#);
        assert!(!format!("{error:?}").contains("secret"));
    }
}
