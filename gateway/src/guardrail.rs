//! Guardrails: what is refused before anything is sent, by its size, by what its texts say, or by a service that is asked.
//!
//! Content is looked at here and kept nowhere: a refusal names the row whose guardrail refused, never what it found, and
//! a hook's own words go to the client alone. What a text says is what its reader will see: a pattern is looked for in
//! the strings of the body after their escapes, each by itself.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Limited};
use regex::RegexSet;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use waybill_schema::catalogue::RowKey;
use waybill_schema::catalogue::terms::{Guardrails, OnFailure};
use waybill_schema::event::{Context, Endpoint};
use waybill_schema::id::RequestId;

use crate::refusal::Refusal;
use crate::upstream::Upstream;

/// The largest answer of a hook, in bytes.
const VERDICT_BYTES_MAX: usize = 64 << 10;
/// How much of a hook's reason a client is told, in characters.
const REASON_CHARS_MAX: usize = 500;

/// The guardrails of one row, ready for use.
#[derive(Debug)]
pub struct Guard {
    whose: RowKey,
    deny: Deny,
    request_bytes_max: Option<usize>,
    hook: Option<Ready>,
}

/// What no text may say.
#[derive(Debug)]
enum Deny {
    Nothing,
    Patterns(RegexSet),
    /// The patterns of the row cannot be used by this program: nothing passes that they might refuse.
    Everything,
}

/// A hook with its token.
#[derive(Debug)]
struct Ready {
    url: Option<Uri>,
    token: Option<HeaderValue>,
    deadline: Duration,
    on_failure: OnFailure,
}

/// What a hook is asked.
#[derive(Serialize)]
struct Question<'a> {
    request: &'a str,
    key: &'a str,
    group: &'a str,
    model: &'a str,
    endpoint: Endpoint,
    session: &'a str,
    body: &'a RawValue,
}

/// What a hook says.
#[derive(Deserialize)]
struct Verdict {
    allow: bool,
    #[serde(default)]
    reason: Option<String>,
}

/// A request that guardrails look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) request: &'a RequestId,
    pub(crate) context: &'a Context,
    /// The body, or the texts of a form, as JSON.
    pub(crate) body: &'a [u8],
}

impl Guard {
    /// Compiles the guardrails of `whose`. `token` is the resolved secret of the hook, where it names one and it can be had.
    pub fn new(whose: RowKey, guardrails: &Guardrails, token: Option<&str>) -> Self {
        let deny = match guardrails.denied() {
            Ok(None) => Deny::Nothing,
            Ok(Some(patterns)) => Deny::Patterns(patterns),
            Err(why) => {
                tracing::error!(%whose, why, "a guardrail's patterns cannot be used; its requests are refused");
                Deny::Everything
            }
        };
        let hook = guardrails.hook.as_ref().map(|hook| Ready {
            // Without its token the hook cannot be asked, which is a failure like any other.
            url: hook.url.parse().ok().filter(|_| hook.token.is_none() || token.is_some()),
            token: token.and_then(|token| {
                let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
                value.set_sensitive(true);
                Some(value)
            }),
            deadline: Duration::from_millis(hook.deadline_ms.into()),
            on_failure: hook.on_failure,
        });
        let request_bytes_max = guardrails.request_bytes_max.and_then(|bytes| usize::try_from(bytes).ok());
        Self { whose, deny, request_bytes_max, hook }
    }

    /// Whether it must know the whole of a request.
    pub(crate) fn looks(&self) -> bool {
        self.request_bytes_max.is_some() || self.hook.is_some() || !matches!(self.deny, Deny::Nothing)
    }

    /// Looks at the size of a body, and at its texts.
    pub(crate) fn inspect(&self, length: usize, body: &[u8]) -> Result<(), Refusal> {
        if let Some(limit_bytes) = self.request_bytes_max.filter(|limit| length > *limit) {
            return Err(Refusal::TooLarge { limit_bytes });
        }
        let denied = match &self.deny {
            Deny::Nothing => false,
            Deny::Patterns(patterns) => says(body, patterns),
            Deny::Everything => true,
        };
        if denied { Err(self.denies(None)) } else { Ok(()) }
    }

    /// Asks the hook, where there is one.
    pub(crate) async fn ask(&self, upstream: &Upstream, subject: Subject<'_>) -> Result<(), Refusal> {
        let Some(hook) = &self.hook else { return Ok(()) };
        match tokio::time::timeout(hook.deadline, hook.verdict(upstream, subject)).await.ok().flatten() {
            Some(Verdict { allow: true, .. }) => Ok(()),
            Some(Verdict { allow: false, reason }) => Err(self.denies(reason)),
            None if hook.on_failure == OnFailure::Allow => {
                tracing::warn!(whose = %self.whose, "a guardrail's hook gave no answer; the request passes");
                Ok(())
            }
            None => Err(Refusal::GuardrailSilent { whose: self.whose.clone() }),
        }
    }

    fn denies(&self, reason: Option<String>) -> Refusal {
        let reason = reason.map(|reason| format!(": {}", reason.chars().take(REASON_CHARS_MAX).collect::<String>()));
        Refusal::GuardrailDenied { whose: self.whose.clone(), reason: reason.unwrap_or_default() }
    }
}

impl Ready {
    /// What the hook says; `None` where it says nothing that can be understood.
    async fn verdict(&self, upstream: &Upstream, subject: Subject<'_>) -> Option<Verdict> {
        let context = subject.context;
        let question = Question {
            request: subject.request.as_str(),
            key: context.key.as_str(),
            group: context.group.as_str(),
            model: context.model.as_str(),
            endpoint: context.endpoint,
            session: context.session.as_str(),
            body: serde_json::from_slice(subject.body).ok()?,
        };
        let mut request = Request::new(Bytes::from(serde_json::to_vec(&question).ok()?).into());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.url.clone()?;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        let response = upstream.send(request).await.ok().filter(|response| response.status().is_success())?;
        let body = Limited::new(response.into_body(), VERDICT_BYTES_MAX).collect().await.ok()?.to_bytes();
        serde_json::from_slice(&body).ok()
    }
}

/// Whether a string anywhere in `body` matches. What cannot be read to its end, such as a body that is nested beyond
/// reason, counts as a match.
fn says(body: &[u8], patterns: &RegexSet) -> bool {
    let mut found = false;
    let texts = Texts { look: &mut |text: &str| found |= patterns.is_match(text) };
    let read = texts.deserialize(&mut serde_json::Deserializer::from_slice(body)).is_ok();
    found || !read
}

/// Shows every string of a value, names of fields included, to `look`.
struct Texts<'a, F> {
    look: &'a mut F,
}

impl<'de, F: FnMut(&str)> DeserializeSeed<'de> for Texts<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, F: FnMut(&str)> Visitor<'de> for Texts<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        (self.look)(text);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Texts { look: self.look })?.is_some() {
            map.next_value_seed(Texts { look: self.look })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Texts { look: self.look })?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(deny: &[&str], body: &str, denied: bool) {
        let patterns = RegexSet::new(deny).expect("patterns");
        assert_eq!(says(body.as_bytes(), &patterns), denied, "{deny:?} in {body}");
    }

    #[test]
    fn a_pattern_is_looked_for_in_what_a_reader_sees() {
        let deny = ["(?i)project\\s+sphinx", "^\\d{16}$"];
        check(&deny, r#"{"messages":[{"content":"on Project  Sphinx today"}]}"#, true);
        check(&deny, r#"{"messages":[{"content":"Project\nSphinx"}]}"#, true);
        check(&deny, r#"{"x":["pro\u006aect sphin\u0078"]}"#, true);
        check(&deny, r#"{"project sphinx":1}"#, true);
        check(&deny, r#"{"a":{"b":[null,true,-1,2,1e3,"4111111111111111"]}}"#, true);
        check(&deny, r#"{"a":{"b":[null,true,-1,2,1e3,"41111111111111112"]},"n":4111111111111111}"#, false);
        check(&deny, r#"{"a":"project","b":"sphinx"}"#, false);
    }

    #[test]
    fn what_cannot_be_read_to_its_end_does_not_pass() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(1000), "]".repeat(1000));
        check(&["x"], &deep, true);
    }

    #[test]
    fn patterns_that_cannot_be_used_refuse_everything() {
        let guardrails = Guardrails { deny: vec!["(".to_owned()], ..Guardrails::default() };
        let whose = RowKey { kind: waybill_schema::catalogue::RowKind::Key, id: "k".to_owned() };
        let refusal = Guard::new(whose, &guardrails, None).inspect(2, b"{}").expect_err("nothing passes");
        assert_eq!(
            (refusal.code(), refusal.to_string()),
            ("guardrail_denied", "a guardrail of key `k` refuses this request".to_owned())
        );
    }
}
