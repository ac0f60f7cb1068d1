//! A request body, read once: what routing needs of it, and the same bytes with only the model exchanged.
//!
//! The body is never built into a tree. One pass finds the fields that matter and borrows them as raw text; all
//! other fields are skipped, unknown ones included, because they are the upstream's business. What goes upstream is
//! the client's own bytes, with splices at places the pass has found: an upstream's prompt cache sees no difference.

use std::borrow::Cow;
use std::ops::Range;

use serde::Deserialize;
use serde::de::Deserializer;
use serde_json::value::RawValue;
use waybill_schema::event::Endpoint;

/// The longest model name, in bytes: above any provider's own (a Bedrock profile's ARN takes some 150), far below what
/// a fact may hold, in which a name that only a pattern matches stands several times.
pub const MODEL_BYTES_MAX: usize = 512;

/// Why a body was refused.
#[derive(Debug, thiserror::Error)]
pub enum BadBody {
    /// It is not JSON, or it names one of our fields twice.
    #[error("the body is not valid JSON")]
    Json(#[source] serde_json::Error),
    /// It is not text in UTF-8.
    #[error("the body is not valid UTF-8")]
    Utf8(#[source] std::str::Utf8Error),
    /// It is JSON, but not an object.
    #[error("the body is not a JSON object")]
    NotAnObject,
    /// There is no `model`, or it is not a string, or it is empty.
    #[error("`model` must be a non-empty string")]
    Model,
    /// `model` is longer than [`MODEL_BYTES_MAX`].
    #[error("`model` must be at most {MODEL_BYTES_MAX} bytes long")]
    ModelTooLong,
    /// `stream` is neither true nor false.
    #[error("`stream` must be true or false")]
    Stream,
    /// A form names no model where it can be seen before its files have come.
    #[error("the form must hold `model` within its first {0} bytes: before its files")]
    ModelNotAhead(usize),
    /// A form names its model twice.
    #[error("the form holds `model` twice")]
    ModelTwice,
    /// `disable_fallbacks` is neither true nor false.
    #[error("`disable_fallbacks` must be true or false")]
    DisableFallbacks,
}

impl BadBody {
    /// The field to blame, for the `param` of an error body.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::Json(_) | Self::Utf8(_) | Self::NotAnObject => None,
            Self::Model | Self::ModelTooLong | Self::ModelNotAhead(_) | Self::ModelTwice => Some("model"),
            Self::Stream => Some("stream"),
            Self::DisableFallbacks => Some("disable_fallbacks"),
        }
    }
}

/// A request body as routing sees it; everything raw is a piece of the client's bytes, a JSON null counts as absent.
#[derive(Debug)]
pub struct Inbound<'a> {
    /// The model the client named.
    pub model: Cow<'a, str>,
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the client wants the response made in the background.
    pub background: bool,
    /// `disable_fallbacks`: whether no other model may stand in (S3.18). It is ours, and no upstream sees it.
    pub disable_fallbacks: bool,
    /// `session_id`: an explicit session (S3.1).
    pub session_id: Option<&'a RawValue>,
    /// `prompt_cache_key`.
    pub prompt_cache_key: Option<&'a RawValue>,
    /// `previous_response_id`.
    pub previous_response_id: Option<&'a RawValue>,
    /// `conversation`, a string or an object with an `id`.
    pub conversation: Option<&'a RawValue>,
    /// `metadata`.
    pub metadata: Option<&'a RawValue>,
    /// `user`.
    pub user: Option<&'a RawValue>,
    /// `safety_identifier`.
    pub safety_identifier: Option<&'a RawValue>,
    /// `messages` of Chat Completions and Messages.
    pub messages: Option<&'a RawValue>,
    /// `system` of Messages.
    pub system: Option<&'a RawValue>,
    /// `instructions` of Responses.
    pub instructions: Option<&'a RawValue>,
    /// `input` of Responses.
    pub input: Option<&'a RawValue>,
    endpoint: Endpoint,
    stored: bool,
    model_at: Range<usize>,
    /// What of the body is for us alone.
    ours_at: Option<Range<usize>>,
    usage: UsageChunk,
}

/// Where `stream_options.include_usage` stands, as byte positions in the body.
#[derive(Debug)]
enum UsageChunk {
    /// The client asks for the chunk.
    Asked,
    /// There is no `stream_options`.
    NoOptions,
    /// `stream_options` is null, here.
    NullOptions(Range<usize>),
    /// `stream_options` is an object without the switch; its first member would stand here.
    NoSwitch { at: usize, empty: bool },
    /// The switch is false or null, here.
    Off(Range<usize>),
    /// Not readable: the upstream may say so.
    Unreadable,
}

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
    #[serde(borrow)]
    background: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "null_too")]
    disable_fallbacks: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "null_too")]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow)]
    store: Option<&'a RawValue>,
    #[serde(borrow)]
    session_id: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_cache_key: Option<&'a RawValue>,
    #[serde(borrow)]
    previous_response_id: Option<&'a RawValue>,
    #[serde(borrow)]
    conversation: Option<&'a RawValue>,
    #[serde(borrow)]
    metadata: Option<&'a RawValue>,
    #[serde(borrow)]
    user: Option<&'a RawValue>,
    #[serde(borrow)]
    safety_identifier: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    system: Option<&'a RawValue>,
    #[serde(borrow)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct StreamOptions<'a> {
    #[serde(borrow, default, deserialize_with = "null_too")]
    include_usage: Option<&'a RawValue>,
}

/// A string of the body; borrowed unless it holds escapes.
#[derive(Deserialize)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// Reads a body; refuses what is not a JSON object with a usable `model` and `stream`.
pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Inbound<'_>, BadBody> {
    let body = std::str::from_utf8(body).map_err(BadBody::Utf8)?;
    let fields = fields(body)?;
    let model = fields.model.ok_or(BadBody::Model)?;
    Ok(Inbound {
        endpoint,
        model: model_name(model)?,
        stream: match fields.stream.map(RawValue::get) {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err(BadBody::Stream),
        },
        background: fields.background.is_some_and(|raw| raw.get() == "true"),
        disable_fallbacks: match fields.disable_fallbacks.map(RawValue::get) {
            None | Some("false" | "null") => false,
            Some("true") => true,
            Some(_) => return Err(BadBody::DisableFallbacks),
        },
        session_id: fields.session_id,
        prompt_cache_key: fields.prompt_cache_key,
        previous_response_id: fields.previous_response_id,
        conversation: fields.conversation,
        metadata: fields.metadata,
        user: fields.user,
        safety_identifier: fields.safety_identifier,
        messages: fields.messages,
        system: fields.system,
        instructions: fields.instructions,
        input: fields.input,
        stored: fields.store.is_none_or(|raw| raw.get() != "false"),
        model_at: place(body, model),
        ours_at: fields.disable_fallbacks.map(|raw| member(body, place(body, raw))),
        usage: usage_chunk(body, fields.stream_options),
    })
}

/// What is known of a form of which only the model was read.
pub fn of_form(endpoint: Endpoint, model: &str) -> Result<Inbound<'_>, BadBody> {
    if model.is_empty() {
        return Err(BadBody::Model);
    }
    if model.len() > MODEL_BYTES_MAX {
        return Err(BadBody::ModelTooLong);
    }
    Ok(Inbound::without_fields(endpoint, model))
}

fn model_name(raw: &RawValue) -> Result<Cow<'_, str>, BadBody> {
    let name = text(raw).filter(|name| !name.is_empty()).ok_or(BadBody::Model)?;
    if name.len() > MODEL_BYTES_MAX { Err(BadBody::ModelTooLong) } else { Ok(name) }
}

impl<'a> Inbound<'a> {
    /// What routing needs of a request about a response that is there, which has no body; its stream is not waited for.
    pub fn about_a_response(model: &'a str, stream: bool) -> Self {
        let known = Self::without_fields(Endpoint::Responses, model);
        Self { stream, background: true, disable_fallbacks: true, ..known }
    }

    /// A request of which nothing but its model is known.
    pub fn without_fields(endpoint: Endpoint, model: &'a str) -> Self {
        Self {
            endpoint,
            model: model.into(),
            stream: false,
            stored: false,
            background: false,
            disable_fallbacks: false,
            session_id: None,
            prompt_cache_key: None,
            previous_response_id: None,
            conversation: None,
            metadata: None,
            user: None,
            safety_identifier: None,
            messages: None,
            system: None,
            instructions: None,
            input: None,
            model_at: 0..0,
            ours_at: None,
            usage: UsageChunk::Unreadable,
        }
    }

    /// Whether the client wants the response forgotten: `store` is false, and nobody can continue it by its id.
    pub fn is_not_stored(&self) -> bool {
        !self.stored
    }

    /// The id of the response that is continued; `None` where it is no text.
    pub fn previous_response_id(&self) -> Option<Cow<'a, str>> {
        text(self.previous_response_id?)
    }

    /// Whether the client itself asked for the usage chunk of a chat stream (`stream_options.include_usage`).
    pub fn asks_usage(&self) -> bool {
        matches!(self.usage, UsageChunk::Asked)
    }

    /// Whether the usage chunk is to be had and the client did not ask for it.
    pub fn lacks_usage(&self) -> bool {
        let is_chat_stream = self.stream && self.endpoint == Endpoint::Chat;
        is_chat_stream && !matches!(self.usage, UsageChunk::Asked | UsageChunk::Unreadable)
    }

    /// The body for an upstream that knows the model as `model`, asking for the usage chunk of a chat stream if
    /// `ask_usage`; `body` is what was parsed. `None` where nothing changes and the client's own bytes can go out.
    pub fn upstream_body(&self, body: &[u8], model: &str, ask_usage: bool) -> Option<Vec<u8>> {
        let mut splices: Vec<(Range<usize>, Cow<'static, str>)> = Vec::with_capacity(2);
        if self.model != model {
            splices.push((self.model_at.clone(), serde_json::json!(model).to_string().into()));
        }
        if ask_usage && self.lacks_usage() {
            splices.extend(self.usage.switched_on(body));
        }
        splices.extend(self.ours_at.clone().map(|place| (place, "".into())));
        splices.sort_unstable_by_key(|(place, _)| place.start);
        (!splices.is_empty()).then(|| splice(body, &splices))
    }
}

impl UsageChunk {
    fn switched_on(&self, body: &[u8]) -> Option<(Range<usize>, Cow<'static, str>)> {
        let (place, new) = match self {
            Self::Asked | Self::Unreadable => return None,
            Self::NoOptions => {
                let end = body.iter().rposition(|byte| *byte == b'}').expect("an object ends with a brace");
                (end..end, r#","stream_options":{"include_usage":true}"#)
            }
            Self::NullOptions(place) => (place.clone(), r#"{"include_usage":true}"#),
            Self::NoSwitch { at, empty: true } => (*at..*at, r#""include_usage":true"#),
            Self::NoSwitch { at, empty: false } => (*at..*at, r#""include_usage":true,"#),
            Self::Off(place) => (place.clone(), "true"),
        };
        Some((place, new.into()))
    }
}

fn fields(body: &str) -> Result<Fields<'_>, BadBody> {
    if body.trim_start().starts_with('{') {
        return serde_json::from_str(body).map_err(BadBody::Json);
    }
    // Serde would read an array as the struct's fields in order.
    match serde_json::from_str::<serde::de::IgnoredAny>(body) {
        Ok(_) => Err(BadBody::NotAnObject),
        Err(error) => Err(BadBody::Json(error)),
    }
}

fn usage_chunk(body: &str, options: Option<&RawValue>) -> UsageChunk {
    let Some(raw) = options else { return UsageChunk::NoOptions };
    if raw.get() == "null" {
        return UsageChunk::NullOptions(place(body, raw));
    }
    let Some(inside) = raw.get().strip_prefix('{') else { return UsageChunk::Unreadable };
    match serde_json::from_str::<StreamOptions<'_>>(raw.get()) {
        Ok(StreamOptions { include_usage: None }) => {
            UsageChunk::NoSwitch { at: place(body, raw).start + 1, empty: inside.trim_start() == "}" }
        }
        Ok(StreamOptions { include_usage: Some(switch) }) => match switch.get() {
            "true" => UsageChunk::Asked,
            "false" | "null" => UsageChunk::Off(place(body, switch)),
            _ => UsageChunk::Unreadable,
        },
        Err(_) => UsageChunk::Unreadable,
    }
}

/// Where `raw`, a borrowed piece of `body`, stands in it.
fn place(body: &str, raw: &RawValue) -> Range<usize> {
    let start = raw.get().as_ptr() as usize - body.as_ptr() as usize;
    start..start + raw.get().len()
}

/// The member of the outermost object whose value stands at `value`, with the comma that its removal makes superfluous.
fn member(body: &str, value: Range<usize>) -> Range<usize> {
    // The name ends before the last quote in front of the value, and holds none itself.
    let (name, _) = body[..value.start].rsplit_once('"').expect("a value follows its name");
    let start = name.rfind('"').expect("a name has two quotes");
    let before = body[..start].trim_end();
    if before.ends_with(',') {
        return before.len() - 1..value.end;
    }
    let behind = body[value.end..].trim_start();
    let end = if behind.starts_with(',') { body.len() - behind.len() + 1 } else { value.end };
    start..end
}

fn splice(body: &[u8], splices: &[(Range<usize>, Cow<'static, str>)]) -> Vec<u8> {
    let added: usize = splices.iter().map(|(_, new)| new.len()).sum();
    let mut spliced = Vec::with_capacity(body.len() + added);
    let mut done = 0;
    for (place, new) in splices {
        spliced.extend_from_slice(&body[done..place.start]);
        spliced.extend_from_slice(new.as_bytes());
        done = place.end;
    }
    spliced.extend_from_slice(&body[done..]);
    spliced
}

/// The string that `raw` is; `None` where it is something else, or names half a surrogate pair.
pub(crate) fn text(raw: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Text<'_>>(raw.get()).ok().map(|text| text.0)
}

fn null_too<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    /// The expected outcome is written `model stream background asks_usage`, or the field to blame and the message.
    fn check(body: &str, expected: &str) {
        let seen = match parse(Endpoint::Chat, body.as_bytes()) {
            Ok(inbound) => {
                format!("{} {} {} {}", inbound.model, inbound.stream, inbound.background, inbound.asks_usage())
            }
            Err(error) => format!("{}: {error}", error.param().unwrap_or("-")),
        };
        assert_eq!(seen, expected, "{body}");
    }

    #[test]
    fn a_body_is_read_with_unknown_fields_left_alone() {
        check(r#"{"model":"m"}"#, "m false false false");
        check(" {\"x\":[1,{\"model\":2}], \"model\" : \"a\\u0062c\" ,\"stream\":true}\n", "abc true false false");
        check(r#"{"model":"m","stream":null,"background":true}"#, "m false true false");
        check(r#"{"mod\u0065l":"m","stream":false,"stream_options":{"include_usage":true}}"#, "m false false true");
        check(r#"{"model":"m","stream_options":{"include_usage":false}}"#, "m false false false");
    }

    #[test]
    fn a_body_without_a_usable_model_or_stream_is_refused() {
        const MODEL: &str = "model: `model` must be a non-empty string";
        check("{}", MODEL);
        check(r#"{"model":""}"#, MODEL);
        check(r#"{"model":null}"#, MODEL);
        check(r#"{"model":7}"#, MODEL);
        check(r#"{"model":["m"]}"#, MODEL);
        check(r#"{"model":"\ud800"}"#, MODEL);
        let longest = "m".repeat(512);
        check(&format!(r#"{{"model":"{longest}"}}"#), &format!("{longest} false false false"));
        check(&format!(r#"{{"model":"{longest}m"}}"#), "model: `model` must be at most 512 bytes long");
        for stream in ["1", "\"true\"", "[]", "{}"] {
            check(&format!(r#"{{"model":"m","stream":{stream}}}"#), "stream: `stream` must be true or false");
        }
    }

    /// S3.18: `disable_fallbacks` is read, and no upstream sees it; everything else stays byte for byte.
    #[test]
    fn a_field_of_ours_is_read_and_taken_out() {
        let cases = [
            (r#"{"model":"m","disable_fallbacks":true}"#, true, r#"{"model":"m"}"#),
            (r#"{"disable_fallbacks":true,"model":"m"}"#, true, r#"{"model":"m"}"#),
            (r#"{ "disable_fallbacks" : false , "model":"m" }"#, false, r#"{  "model":"m" }"#),
            (r#"{"model":"m", "disable_fallbacks": null, "x":1}"#, false, r#"{"model":"m", "x":1}"#),
            (r#"{"model":"m","dis\u0061ble_fallbacks":true,"x":"\",}"}"#, true, r#"{"model":"m","x":"\",}"}"#),
            (
                r#"{"a":"\"disable_fallbacks\":1","model":"m","disable_fallbacks":true}"#,
                true,
                r#"{"a":"\"disable_fallbacks\":1","model":"m"}"#,
            ),
        ];
        for (body, forbids, sent) in cases {
            let inbound = parse(Endpoint::Chat, body.as_bytes()).expect(body);
            assert_eq!(inbound.disable_fallbacks, forbids, "{body}");
            let upstream = inbound.upstream_body(body.as_bytes(), "m", false).expect("something is taken out");
            assert_eq!(String::from_utf8(upstream).expect("it was text"), sent, "{body}");
        }
        let streamed = r#"{"model":"m","stream":true,"disable_fallbacks":true}"#;
        let inbound = parse(Endpoint::Chat, streamed.as_bytes()).expect(streamed);
        let upstream = inbound.upstream_body(streamed.as_bytes(), "other", true).expect("much changes");
        let expected = r#"{"model":"other","stream":true,"stream_options":{"include_usage":true}}"#;
        assert_eq!(String::from_utf8(upstream).expect("it was text"), expected);
        check(r#"{"model":"m","disable_fallbacks":1}"#, "disable_fallbacks: `disable_fallbacks` must be true or false");
    }

    #[test]
    fn what_is_not_one_json_object_is_refused() {
        for body in ["", "{", "nonsense", r#"{"model":"m"} x"#, r#"{"model":"m",}"#, r#"{"model":"a","model":"b"}"#] {
            check(body, "-: the body is not valid JSON");
        }
        for body in ["[]", r#"["m",true]"#, "\"model\"", "null", "7"] {
            check(body, "-: the body is not a JSON object");
        }
        let error = parse(Endpoint::Chat, b"{\"model\":\"m\",\"x\":\"\xff\"}").expect_err("not UTF-8");
        assert_eq!(error.to_string(), "the body is not valid UTF-8");
    }

    #[test]
    fn null_fields_are_absent() {
        let inbound = parse(Endpoint::Responses, br#"{"model":"m","previous_response_id":null,"session_id":null}"#)
            .expect("a good body");
        assert!(inbound.previous_response_id.is_none() && inbound.session_id.is_none());
    }

    fn upstream(endpoint: Endpoint, body: &str, model: &str, ask_usage: bool) -> Option<String> {
        let inbound = parse(endpoint, body.as_bytes()).expect("a good body");
        let bytes = inbound.upstream_body(body.as_bytes(), model, ask_usage)?;
        Some(String::from_utf8(bytes).expect("text"))
    }

    #[test]
    fn a_body_that_needs_no_change_is_not_copied() {
        let stream = r#"{"model":"m","stream":true}"#;
        assert_eq!(upstream(Endpoint::Chat, stream, "m", false), None);
        assert_eq!(upstream(Endpoint::Responses, stream, "m", true), None);
        assert_eq!(upstream(Endpoint::Chat, r#"{"model":"m"}"#, "m", true), None);
        let asked = r#"{"model":"\u006d","stream":true,"stream_options":{"include_usage":true}}"#;
        assert_eq!(upstream(Endpoint::Chat, asked, "m", true), None);
        let odd = r#"{"model":"m","stream":true,"stream_options":"?"}"#;
        assert_eq!(upstream(Endpoint::Chat, odd, "m", true), None);
    }

    #[test]
    fn only_the_model_and_the_usage_switch_are_spliced() {
        let cases = [
            (
                r#" { "model" : "m" , "stream":true } "#,
                r#" { "model" : "a\"b" , "stream":true ,"stream_options":{"include_usage":true}} "#,
            ),
            (
                r#"{"stream_options": { "x":1},"stream":true,"model":"m"}"#,
                r#"{"stream_options": {"include_usage":true, "x":1},"stream":true,"model":"a\"b"}"#,
            ),
            (
                r#"{"stream_options":{ },"stream":true,"model":"m"}"#,
                r#"{"stream_options":{"include_usage":true },"stream":true,"model":"a\"b"}"#,
            ),
            (
                r#"{"model":"m","stream":true,"stream_options":{"include_usage": false}}"#,
                r#"{"model":"a\"b","stream":true,"stream_options":{"include_usage": true}}"#,
            ),
            (
                r#"{"model":"m","stream":true,"stream_options":{"include_usage":null}}"#,
                r#"{"model":"a\"b","stream":true,"stream_options":{"include_usage":true}}"#,
            ),
            (
                r#"{"model":"m","stream":true,"stream_options":null}"#,
                r#"{"model":"a\"b","stream":true,"stream_options":{"include_usage":true}}"#,
            ),
        ];
        for (body, expected) in cases {
            assert_eq!(upstream(Endpoint::Chat, body, "a\"b", true).as_deref(), Some(expected));
        }
    }

    /// Writes `value` with the spaces and escapes that `dice` say: the same JSON in other bytes.
    fn scribble(value: &Value, dice: &mut impl Iterator<Item = u8>) -> String {
        match value {
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, field)| {
                    let name = spaced(scribble(&json!(name), dice), dice);
                    format!("{name}:{}", spaced(scribble(field, dice), dice))
                });
                format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
            }
            Value::Array(items) => {
                let items = items.iter().map(|item| spaced(scribble(item, dice), dice));
                format!("[{}]", items.collect::<Vec<_>>().join(","))
            }
            Value::String(text) => {
                let units = text.chars().map(|unit| {
                    let escaped = dice.next().is_some_and(|die| die % 4 == 0) || unit < ' ' || "\"\\".contains(unit);
                    match escaped {
                        true => unit.encode_utf16(&mut [0; 2]).iter().map(|half| format!("\\u{half:04x}")).collect(),
                        false => unit.to_string(),
                    }
                });
                format!("\"{}\"", units.collect::<String>())
            }
            other => other.to_string(),
        }
    }

    fn spaced(text: String, dice: &mut impl Iterator<Item = u8>) -> String {
        let mut space = || ["", "", " ", "\n\t"][usize::from(dice.next().unwrap_or(0) % 4)];
        format!("{}{text}{}", space(), space())
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("(model|stream|[a-z{}\"]{0,4})", inner, 0..3)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    /// `stream_options` as sent by a client, and as it must go upstream.
    const OPTIONS: [(&str, &str); 7] = [
        ("null", r#"{"include_usage":true}"#),
        ("{}", r#"{"include_usage":true}"#),
        ("{ \n}", "{\"include_usage\":true \n}"),
        (r#"{ "x":{"include_usage":false}}"#, r#"{"include_usage":true, "x":{"include_usage":false}}"#),
        (r#"{"include_usage" : false , "x":[1]}"#, r#"{"include_usage" : true , "x":[1]}"#),
        (r#"{"a":1,"include\u005fusage":null}"#, r#"{"a":1,"include\u005fusage":true}"#),
        (r#"{"include_usage": true }"#, r#"{"include_usage": true }"#),
    ];

    proptest! {
        #[test]
        fn upstream_differs_in_exactly_the_edits(
            others in prop::collection::vec(("x[a-z\"{}é]{0,4}", json_value()), 0..4),
            (model, new) in (".{1,8}", prop_oneof![Just(None), ".{1,8}".prop_map(Some)]),
            options in prop::option::of(prop::sample::select(&OPTIONS[..])),
            (turn, dice) in (0_usize..8, prop::collection::vec(any::<u8>(), 1..200)),
        ) {
            let new = new.unwrap_or(model.clone());
            let dice = &mut dice.into_iter().cycle();
            // Each field as a name, its text, and its text upstream.
            let mut fields: Vec<(String, String, String)> = others
                .iter()
                .map(|(name, value)| (name.clone(), scribble(value, dice)))
                .map(|(name, text)| (name, text.clone(), text))
                .collect();
            let text = scribble(&json!(model), dice);
            let sent = if model == new { text.clone() } else { json!(new).to_string() };
            fields.push(("model".into(), text, sent));
            fields.push(("stream".into(), "true".into(), "true".into()));
            fields.extend(options.map(|(from, to)| ("stream_options".into(), from.into(), to.into())));
            let n_fields = fields.len();
            fields.rotate_left(turn % n_fields);

            let (mut body, mut expected) = (Vec::new(), Vec::new());
            for (name, from, to) in fields {
                let name = spaced(scribble(&json!(name), dice), dice);
                let around = spaced("#".into(), dice);
                let (before, after) = around.split_once('#').expect("one mark");
                body.push(format!("{name}:{before}{from}{after}"));
                expected.push(format!("{name}:{before}{to}{after}"));
            }
            let added = if options.is_none() { r#","stream_options":{"include_usage":true}"# } else { "" };
            let body = format!(" {{{}}}\n", body.join(","));
            let expected = format!(" {{{}{added}}}\n", expected.join(","));

            let sent = upstream(Endpoint::Chat, &body, &new, true);
            prop_assert_eq!(sent.is_none(), body == expected);
            let sent = sent.unwrap_or(body.clone());
            prop_assert_eq!(&sent, &expected);

            let mut edited: Map<String, Value> = serde_json::from_str(&body).expect("JSON");
            edited.insert("model".into(), json!(new));
            match edited.entry("stream_options").or_insert(Value::Null) {
                Value::Object(options) => { options.insert("include_usage".into(), json!(true)); }
                other => *other = json!({"include_usage": true}),
            }
            prop_assert_eq!(serde_json::from_str::<Value>(&sent).expect("still JSON"), Value::Object(edited));
        }
    }
}
