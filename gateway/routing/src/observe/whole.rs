//! An answer in one piece: whether it is one of its dialect, and what it says.

use std::sync::LazyLock;

use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;
use waybill_schema::event::{Endpoint, Usage};
use waybill_schema::id::ModelName;

use super::chat::{Choice, worst};
use super::lenient::{Chars, Count, Text, part};
use super::messages::{self, Message};
use super::responses::Response;
use super::usage;
use super::{Terminal, is_name};
use crate::classify::UpstreamError;

/// What a JSON answer says.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    /// How it ended.
    pub terminal: Terminal,
    /// Whether it holds nothing: no output, no tokens of output, and no reason for it.
    pub empty: bool,
    /// Tokens as the upstream reported them.
    pub usage: Usage,
    /// The model that the upstream named.
    pub served_model: Option<ModelName>,
    /// The id that the upstream gave the response.
    pub response_id: Option<Box<str>>,
    /// Characters of output, to estimate tokens by where none were reported.
    pub output_chars: u64,
}

/// Why the body of a 200 is no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// It is a web page.
    #[error("the answer is a web page")]
    Html,
    /// It is no JSON object, or one of another dialect.
    #[error("the answer is not of the endpoint's dialect")]
    Foreign,
    /// It is an error.
    #[error("the answer is an error")]
    Error(UpstreamError),
}

/// What all dialects have in common.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    status: Text<'a>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    base_resp: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<&'a RawValue>,
}

/// MiniMax's own status, zero in a good answer.
#[derive(Deserialize, Default)]
struct BaseResp {
    #[serde(default)]
    status_code: Count,
}

/// Reads a JSON answer of `endpoint`'s dialect.
pub fn json(endpoint: Endpoint, body: &[u8]) -> Result<Whole, Fault> {
    if body.trim_ascii_start().starts_with(b"<") {
        return Err(Fault::Html);
    }
    // Most answers hold no sign of a failure, and need not be read twice.
    if SIGNS_OF_FAILURE.iter().any(|sign| sign.find(body).is_some()) && reports_failure(body)? {
        return Err(Fault::Error(UpstreamError::read(body)));
    }
    match endpoint {
        Endpoint::Chat | Endpoint::Completions => chat(body),
        Endpoint::Responses => responses(body),
        Endpoint::Messages => messages(body),
        Endpoint::CountTokens => count_tokens(body),
        Endpoint::Embeddings => embeddings(body),
        Endpoint::ImageGenerations
        | Endpoint::ImageEdits
        | Endpoint::Speech
        | Endpoint::Transcriptions
        | Endpoint::Translations
        | Endpoint::Videos
        | Endpoint::Music
        | Endpoint::Moderations
        | Endpoint::Rerank => native(body),
    }
    .ok_or_else(|| foreign(body))
}

/// What is no answer of the dialect may be an error of another.
fn foreign(body: &[u8]) -> Fault {
    let text = std::str::from_utf8(body).unwrap_or_default();
    super::foreign::error(None, text).map_or(Fault::Foreign, Fault::Error)
}

/// What stands somewhere in every answer that reports a failure, and in few others.
static SIGNS_OF_FAILURE: LazyLock<[memmem::Finder<'static>; 3]> =
    LazyLock::new(|| ["\"error\"", "\"failed\"", "\"base_resp\""].map(memmem::Finder::new));

fn reports_failure(body: &[u8]) -> Result<bool, Fault> {
    let envelope: Envelope<'_> = object(body).ok_or_else(|| foreign(body))?;
    let business_error = part::<BaseResp>(envelope.base_resp).status_code.0.unwrap_or(0) != 0;
    let failed = envelope.error.is_some()
        || envelope.kind.get() == Some("error")
        || part::<Vec<Choice<'_>>>(envelope.choices).iter().any(Choice::failed);
    Ok(failed || business_error || envelope.status.get() == Some("failed"))
}

/// Reads an object; a struct would be read from an array too.
fn object<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Option<T> {
    if !body.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    // What is not read of an answer may be no text; most are text as a whole, which is found out faster than by parts.
    match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text).ok(),
        Err(_) => serde_json::from_slice(body).ok(),
    }
}

impl Whole {
    fn new(terminal: Terminal, usage: Usage, output_chars: u64, id: Option<&str>, model: Option<&str>) -> Self {
        Self {
            terminal,
            empty: !terminal.excuses() && output_chars == 0 && usage.output.known().unwrap_or(0) == 0,
            usage,
            served_model: model.filter(|model| is_name(model)).map(Into::into),
            response_id: id.filter(|id| is_name(id)).map(Into::into),
            output_chars,
        }
    }
}

fn chat(body: &[u8]) -> Option<Whole> {
    #[derive(Deserialize)]
    struct Completion<'a> {
        #[serde(borrow, default)]
        id: Text<'a>,
        #[serde(borrow, default)]
        model: Text<'a>,
        #[serde(borrow, default)]
        object: Text<'a>,
        #[serde(borrow, default)]
        choices: Option<Vec<Choice<'a>>>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    let answer: Completion<'_> = object(body)?;
    if answer.choices.is_none() && answer.object.get() != Some("chat.completion") {
        return None;
    }
    let usage = usage::openai(answer.usage).unwrap_or_default();
    let choices = answer.choices.unwrap_or_default();
    let terminal = choices.iter().fold(None, |ended, choice| worst(ended, choice.terminal()));
    let chars = choices.iter().map(Choice::chars).sum();
    Some(Whole::new(terminal.unwrap_or(Terminal::Complete), usage, chars, answer.id.get(), answer.model.get()))
}

fn responses(body: &[u8]) -> Option<Whole> {
    let answer: Response<'_> = object(body)?;
    if answer.object.get() != Some("response") && answer.output.is_none() {
        return None;
    }
    let usage = usage::openai(answer.usage).unwrap_or_default();
    let chars = part::<Chars>(answer.output).0;
    Some(Whole::new(answer.terminal(), usage, chars, answer.id.get(), answer.model.get()))
}

fn messages(body: &[u8]) -> Option<Whole> {
    let answer: Message<'_> = object(body)?;
    if answer.kind.get() != Some("message") && answer.content.is_none() {
        return None;
    }
    let usage = usage::anthropic(Usage::default(), answer.usage);
    let terminal = answer.stop_reason.get().map_or(Terminal::Complete, messages::terminal);
    let chars = part::<Chars>(answer.content).0;
    Some(Whole::new(terminal, usage, chars, answer.id.get(), answer.model.get()))
}

fn count_tokens(body: &[u8]) -> Option<Whole> {
    #[derive(Deserialize)]
    struct Counted {
        #[serde(default)]
        input_tokens: Count,
    }
    let answer: Counted = object(body)?;
    // It is what a prompt would take; the call itself uses nothing.
    answer.input_tokens.0?;
    Some(Whole { empty: false, ..Whole::new(Terminal::Complete, Usage::default(), 0, None, None) })
}

/// An answer that passes as it is: any object, with what it says of usage.
fn native(body: &[u8]) -> Option<Whole> {
    #[derive(Deserialize)]
    struct Native<'a> {
        #[serde(borrow, default)]
        model: Text<'a>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    let answer: Native<'_> = object(body)?;
    let usage = usage::openai(answer.usage).unwrap_or_default();
    Some(Whole { empty: false, ..Whole::new(Terminal::Complete, usage, 0, None, answer.model.get()) })
}

fn embeddings(body: &[u8]) -> Option<Whole> {
    #[derive(Deserialize)]
    struct Embedded<'a> {
        #[serde(borrow, default)]
        model: Text<'a>,
        #[serde(borrow, default)]
        data: Option<&'a RawValue>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    let answer: Embedded<'_> = object(body)?;
    let data = answer.data.filter(|data| data.get().starts_with('['))?;
    let usage = usage::openai(answer.usage).unwrap_or_default();
    let empty = data.get()[1..].trim_start().starts_with(']');
    Some(Whole { empty, ..Whole::new(Terminal::Complete, usage, 0, None, answer.model.get()) })
}
