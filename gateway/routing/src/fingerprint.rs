//! The fingerprint of a prompt's stable beginning: what a conversation without an id is recognised by (S3.5).
//!
//! It covers the instructions (`system`, `instructions`, leading system and developer messages, and the leading user
//! items that a known client fills by itself) and then the first user message; nothing that is said later.
//! The three APIs agree: what reads the same has the same fingerprint, whichever way it was spelt.
//!
//! The canonical bytes are a sequence of tokens, each a tag byte, a length (u64, big endian) and that many bytes:
//!
//! | tag | bytes |
//! |---|---|
//! | `r` | a role begins: `system` or `user` |
//! | `b` | a block begins: `text`, `image`, `audio` or `file` |
//! | `t` | the text of a text block |
//! | `d` | SHA-256 over the data of a medium as it was sent, base64 included |
//! | `u` | the URL of a medium |
//! | `i` | the id of an uploaded file |
//!
//! Dropped as volatile: cache markers, ids, statuses, names and whatever else stands beside role and content (all of
//! which move or change between turns of one conversation), empty text blocks, tool results, and system blocks that a
//! client fills with a counter. What cannot be read with certainty has no fingerprint: a new session is no harm, a
//! wrong guess is.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use waybill_schema::event::Endpoint;

use crate::request::{Inbound, Text, text};

/// How user items begin that Codex writes by itself ahead of the first prompt: they are the same for all
/// conversations in one directory on one day, so the prompt must count too (CLIENTS.md, rule 2).
const PREAMBLES: [&str; 4] =
    ["<environment_context>", "<user_instructions>", "<INSTRUCTIONS>", "# AGENTS.md instructions"];

/// How the system block begins that Claude Code of about 2.1.36 to 2.1.180 changes with every request.
const VOLATILE_SYSTEM: &str = "x-anthropic-billing-header:";

/// The SHA-256 of the canonical beginning of the prompt; `None` where there is no meaningful user content, or
/// something in it cannot be represented.
pub fn fingerprint(inbound: &Inbound<'_>, endpoint: Endpoint) -> Option<[u8; 32]> {
    let mut canonical = Sha256::new();
    write_canonical(inbound, endpoint, &mut |bytes| canonical.update(bytes))?;
    Some(canonical.finalize().into())
}

fn write_canonical(inbound: &Inbound<'_>, endpoint: Endpoint, sink: &mut dyn FnMut(&[u8])) -> Option<()> {
    let (instructions, items) = match endpoint {
        Endpoint::Chat => (None, inbound.messages?),
        Endpoint::Responses => (inbound.instructions, inbound.input?),
        Endpoint::Messages | Endpoint::CountTokens => (inbound.system, inbound.messages?),
        // What these are about has no beginning that a later request shares.
        Endpoint::Embeddings
        | Endpoint::Completions
        | Endpoint::ImageGenerations
        | Endpoint::ImageEdits
        | Endpoint::Speech
        | Endpoint::Transcriptions
        | Endpoint::Translations
        | Endpoint::Videos
        | Endpoint::Music
        | Endpoint::Moderations
        | Endpoint::Rerank => return None,
    };
    let mut beginning = Beginning { sink, part: Part::Instructions, role: None };
    if let Some(instructions) = instructions {
        beginning.instruct(instructions)?;
    }
    match items.get().as_bytes().first() {
        Some(b'"') if endpoint == Endpoint::Responses => beginning.user(items)?,
        Some(b'[') => {
            // The text is known to be JSON: an error means that the walk ended early, or cannot go on.
            let _ = serde_json::Deserializer::from_str(items.get()).deserialize_seq(Walk(&mut beginning));
        }
        _ => return None,
    }
    (beginning.part == Part::Complete).then_some(())
}

/// How far the beginning of the prompt has been read.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// Only instructions so far.
    Instructions,
    /// The last item was a client's preamble: the user's own words must come next.
    Preamble,
    /// Something else came before the first user message: no instructions from here on.
    Conversation,
    /// The first user message has been read.
    Complete,
}

/// The beginning of a prompt on its way into canonical bytes.
struct Beginning<'s> {
    sink: &'s mut dyn FnMut(&[u8]),
    part: Part,
    role: Option<&'static str>,
}

/// A message, or an item of a Responses input.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Text<'a>>,
    #[serde(borrow)]
    role: Option<Text<'a>>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

impl Beginning<'_> {
    /// Reads one item; `None` ends the walk, with or without success.
    fn item(&mut self, item: &Item<'_>) -> Option<()> {
        match item.kind.as_ref().map(|kind| &*kind.0) {
            None | Some("message") => {}
            // It may stand for the first user message, and we cannot look it up.
            Some("item_reference") => return None,
            Some(_) => return self.other(),
        }
        match (&*item.role.as_ref()?.0, item.content) {
            ("system" | "developer", Some(content)) if self.part != Part::Conversation => self.instruct(content),
            ("user", Some(content)) => self.user(content),
            ("system" | "developer" | "user", _) => Some(()),
            _ => self.other(),
        }
    }

    fn other(&mut self) -> Option<()> {
        // After a preamble that nothing followed, a later user message is not the first one.
        let goes_on = self.part != Part::Preamble;
        self.part = Part::Conversation;
        goes_on.then_some(())
    }

    fn instruct(&mut self, content: &RawValue) -> Option<()> {
        for block in blocks(content)? {
            if !matches!(&block, Block::Text(text) if text.0.starts_with(VOLATILE_SYSTEM)) {
                self.block("system", &block);
            }
        }
        Some(())
    }

    fn user(&mut self, content: &RawValue) -> Option<()> {
        let blocks = blocks(content)?;
        if !blocks.iter().any(Block::is_meaningful) {
            return Some(());
        }
        let preamble = self.part != Part::Conversation && blocks.iter().all(Block::is_preamble);
        self.part = if preamble { Part::Preamble } else { Part::Complete };
        self.role = None;
        for block in &blocks {
            self.block("user", block);
        }
        Some(())
    }

    fn block(&mut self, role: &'static str, block: &Block<'_>) {
        if self.role != Some(role) {
            self.token(b'r', role.as_bytes());
            self.role = Some(role);
        }
        match block {
            Block::Text(text) => {
                self.token(b'b', b"text");
                self.token(b't', text.0.as_bytes());
            }
            Block::Medium(kind, medium) => {
                self.token(b'b', kind.as_bytes());
                match medium {
                    Medium::Data(data) => self.token(b'd', &Sha256::digest(data_of(&data.0))),
                    Medium::Url(url) => self.token(b'u', url.0.as_bytes()),
                    Medium::File(id) => self.token(b'i', id.0.as_bytes()),
                }
            }
        }
    }

    fn token(&mut self, tag: u8, bytes: &[u8]) {
        (self.sink)(&[tag]);
        (self.sink)(&(bytes.len() as u64).to_be_bytes());
        (self.sink)(bytes);
    }
}

/// Walks the items up to the first user message; the rest of a long history is not even looked at.
struct Walk<'b, 's>(&'b mut Beginning<'s>);

impl<'de> Visitor<'de> for Walk<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element::<Item<'de>>()? {
            if self.0.item(&item).is_none() || self.0.part == Part::Complete {
                break;
            }
        }
        Ok(())
    }
}

/// One block of content, in the words of no particular API.
enum Block<'a> {
    Text(Text<'a>),
    Medium(&'static str, Medium<'a>),
}

/// What tells a medium from another.
enum Medium<'a> {
    Data(Text<'a>),
    Url(Text<'a>),
    File(Text<'a>),
}

impl Block<'_> {
    fn is_meaningful(&self) -> bool {
        match self {
            Self::Text(text) => !text.0.trim().is_empty(),
            Self::Medium(..) => true,
        }
    }

    fn is_preamble(&self) -> bool {
        match self {
            Self::Text(text) => PREAMBLES.iter().any(|preamble| text.0.trim_start().starts_with(preamble)),
            Self::Medium(..) => false,
        }
    }
}

/// A block as any of the three APIs writes it.
#[derive(Deserialize)]
struct Written<'a> {
    #[serde(borrow, rename = "type")]
    kind: Text<'a>,
    #[serde(borrow)]
    text: Option<Text<'a>>,
    #[serde(borrow)]
    image_url: Option<&'a RawValue>,
    #[serde(borrow)]
    input_audio: Option<Source<'a>>,
    #[serde(borrow)]
    file: Option<Source<'a>>,
    #[serde(borrow)]
    source: Option<Source<'a>>,
    #[serde(borrow)]
    file_id: Option<Text<'a>>,
    #[serde(borrow)]
    file_url: Option<Text<'a>>,
    #[serde(borrow)]
    file_data: Option<Text<'a>>,
}

/// Where a medium comes from, as any of the three APIs writes it.
#[derive(Deserialize)]
struct Source<'a> {
    #[serde(borrow)]
    url: Option<Text<'a>>,
    #[serde(borrow, alias = "file_data")]
    data: Option<Text<'a>>,
    #[serde(borrow)]
    file_id: Option<Text<'a>>,
}

/// The blocks of `content` without empty ones and tool results; `None` where one cannot be represented.
fn blocks(content: &RawValue) -> Option<Vec<Block<'_>>> {
    if content.get() == "null" {
        return Some(Vec::new());
    }
    if content.get().starts_with('"') {
        let text = text(content)?;
        return Some(if text.is_empty() { Vec::new() } else { vec![Block::Text(Text(text))] });
    }
    let written: Vec<Written<'_>> = serde_json::from_str(content.get()).ok()?;
    let mut blocks = Vec::with_capacity(written.len());
    for block in written {
        if block.kind.0 == "tool_result" {
            continue;
        }
        match read(block)? {
            Block::Text(text) if text.0.is_empty() => {}
            block => blocks.push(block),
        }
    }
    Some(blocks)
}

fn read(block: Written<'_>) -> Option<Block<'_>> {
    let named = Source { url: block.file_url, data: block.file_data, file_id: block.file_id };
    match &*block.kind.0 {
        "text" | "input_text" => Some(Block::Text(block.text?)),
        "image" => medium("image", block.source?),
        "image_url" => medium("image", image_source(block.image_url?)?),
        "input_image" => match block.image_url {
            Some(url) => medium("image", image_source(url)?),
            None => medium("image", named),
        },
        "input_audio" => medium("audio", block.input_audio?),
        "document" => medium("file", block.source?),
        "file" => medium("file", block.file?),
        "input_file" => medium("file", named),
        _ => None,
    }
}

fn image_source(raw: &RawValue) -> Option<Source<'_>> {
    match text(raw) {
        Some(url) => Some(Source { url: Some(Text(url)), data: None, file_id: None }),
        None => serde_json::from_str(raw.get()).ok(),
    }
}

fn medium<'a>(kind: &'static str, source: Source<'a>) -> Option<Block<'a>> {
    let medium = match (source.data, source.url, source.file_id) {
        (Some(data), None, None) => Medium::Data(data),
        (None, Some(url), None) if url.0.starts_with("data:") => Medium::Data(url),
        (None, Some(url), None) => Medium::Url(url),
        (None, None, Some(id)) => Medium::File(id),
        _ => return None,
    };
    Some(Block::Medium(kind, medium))
}

/// The payload of a data URL; anything else is a payload already.
fn data_of(data: &str) -> &str {
    match data.strip_prefix("data:").and_then(|rest| rest.split_once(',')) {
        Some((_, payload)) => payload,
        None => data,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::request::parse;

    const CHAT: Endpoint = Endpoint::Chat;
    const RESPONSES: Endpoint = Endpoint::Responses;
    const MESSAGES: Endpoint = Endpoint::Messages;

    /// The canonical bytes as `tag text` per line, data as hex; `-` where there is no fingerprint.
    fn canonical(endpoint: Endpoint, mut body: Value) -> String {
        body["model"] = json!("m");
        let body = body.to_string();
        let inbound = parse(endpoint, body.as_bytes()).expect("a good body");
        let mut bytes = Vec::new();
        let complete = write_canonical(&inbound, endpoint, &mut |part| bytes.extend_from_slice(part));
        assert_eq!(fingerprint(&inbound, endpoint).is_some(), complete.is_some());
        complete.map_or("-".to_owned(), |()| legible(&bytes))
    }

    fn legible(mut bytes: &[u8]) -> String {
        let mut lines = Vec::new();
        while let [tag, rest @ ..] = bytes {
            let (length, rest) = rest.split_first_chunk().expect("a length");
            let (token, rest) = rest.split_at(u64::from_be_bytes(*length) as usize);
            let token = if *tag == b'd' { hex::encode(token) } else { String::from_utf8_lossy(token).into_owned() };
            lines.push(format!("{} {token}", char::from(*tag)));
            bytes = rest;
        }
        lines.join("\n")
    }

    fn check(endpoint: Endpoint, body: Value, expected: &[&str]) {
        assert_eq!(canonical(endpoint, body.clone()), expected.join("\n"), "{endpoint:?} {body}");
    }

    fn digest(endpoint: Endpoint, body: &str) -> Option<String> {
        let inbound = parse(endpoint, body.as_bytes()).expect("a good body");
        fingerprint(&inbound, endpoint).map(hex::encode)
    }

    const NONE: [&str; 1] = ["-"];
    const WEATHER: [&str; 6] = ["r system", "b text", "t You are a test.", "r user", "b text", "t Weather?"];

    /// S3.5. The digests were computed from the table at the head of this file by another program.
    #[test]
    fn golden_digests() {
        let golden = |endpoint, body, expected: &str| assert_eq!(digest(endpoint, body).as_deref(), Some(expected));
        golden(
            CHAT,
            r#"{"model":"m","messages":[{"role":"system","content":"You are a test."},{"role":"user","content":"Weather?"}]}"#,
            "feb1c3ea6d97d8ad2c2368cb6df36e9a715c4d3d62b3ed5bba11eea9b5fe072e",
        );
        golden(
            RESPONSES,
            r#"{"model":"m","input":"Hello"}"#,
            "f006f64671e073634fc25ce7f189520e9d0c46ab51da8ae173749a7a0db47340",
        );
        golden(
            RESPONSES,
            r#"{"model":"m","instructions":"S","input":[{"type":"message","id":"msg_1","role":"user","content":[{"type":"input_text","text":"<environment_context> x"}]},{"role":"user","content":"Say hi"}]}"#,
            "fa4d652c894f36ba178226f16cc03917757fb0b0af303b546ebcea9213c362f4",
        );
        golden(
            RESPONSES,
            r#"{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"What is this?"},{"type":"input_image","image_url":"data:image/png;base64,aGk="},{"type":"input_image","image_url":"https://e.test/a.png"},{"type":"input_file","file_id":"file-1"}]}]}"#,
            "2b37367d6261380831cb92c9975f545832901769afd04effad67234ec083562e",
        );
    }

    /// S3.5, S3.28
    #[test]
    fn the_apis_agree() {
        let user = json!([{"role": "user", "content": "Weather?"}]);
        let block = json!([{"type": "text", "text": "You are a test."}]);
        check(CHAT, json!({"messages": [{"role": "developer", "content": block}, user[0]]}), &WEATHER);
        check(RESPONSES, json!({"instructions": "You are a test.", "input": "Weather?"}), &WEATHER);
        check(RESPONSES, json!({"input": [{"role": "system", "content": "You are a test."}, user[0]]}), &WEATHER);
        for endpoint in [MESSAGES, Endpoint::CountTokens] {
            check(endpoint, json!({"system": "You are a test.", "messages": user}), &WEATHER);
            check(endpoint, json!({"system": block, "messages": user}), &WEATHER);
        }
        check(Endpoint::Embeddings, json!({"input": "Weather?"}), &NONE);
    }

    /// S3.5
    #[test]
    fn what_moves_between_turns_is_dropped() {
        let body = json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.117.bf6; cch=42e81;"},
                {"type": "text", "text": "You are a test.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": ""},
            ],
            "messages": [
                {"role": "user", "id": "msg_1", "status": "completed", "name": "ada", "output_config": {}, "content": [
                    {"type": "text", "text": "Weather?", "cache_control": {}, "prompt_cache_breakpoint": {}, "id": "b"},
                ]},
                {"role": "system", "content": "not leading"},
                {"role": "user", "content": "more"},
            ],
            "tools": [{"name": "a"}],
        });
        check(MESSAGES, body, &WEATHER);
    }

    /// S3.6
    #[test]
    fn a_conversation_keeps_its_fingerprint_and_a_later_message_alone_has_another() {
        let hello = json!({"role": "user", "content": "Hello"});
        let more = json!({"role": "user", "content": "Explain more"});
        let first = canonical(CHAT, json!({"messages": [hello]}));
        let reply = json!({"role": "assistant", "content": "reply"});
        assert_eq!(canonical(CHAT, json!({"messages": [hello, reply, more]})), first);
        assert_ne!(canonical(CHAT, json!({"messages": [more]})), first);
    }

    /// S3.5
    #[test]
    fn a_greeting_before_the_first_user_message_does_not_count() {
        let body = json!({"messages": [
            {"role": "system", "content": "You are a test."},
            {"role": "assistant", "content": "Hi, how can I help?"},
            {"role": "system", "content": "not leading"},
            {"role": "user", "content": "Weather?"},
        ]});
        check(CHAT, body, &WEATHER);
    }

    /// S3.5
    #[test]
    fn a_clients_preamble_counts_as_instructions() {
        let preamble = json!({"role": "user", "content": [
            {"type": "input_text", "text": "# AGENTS.md instructions for /src"},
            {"type": "input_text", "text": "\n<environment_context> x"},
        ]});
        let expected = [
            "r user",
            "b text",
            "t # AGENTS.md instructions for /src",
            "b text",
            "t \n<environment_context> x",
            "r user",
            "b text",
            "t Say hi",
        ];
        let prompt = json!({"role": "user", "content": "Say hi"});
        check(RESPONSES, json!({"input": [preamble, prompt]}), &expected);
        let reply = json!({"role": "assistant", "content": "hi"});
        check(RESPONSES, json!({"input": [preamble]}), &NONE);
        check(RESPONSES, json!({"input": [preamble, reply, prompt]}), &NONE);
        let both = json!({"role": "user", "content": [
            {"type": "text", "text": "<environment_context> x"}, {"type": "text", "text": "Say hi"},
        ]});
        check(
            CHAT,
            json!({"messages": [both, prompt]}),
            &["r user", "b text", "t <environment_context> x", "b text", "t Say hi"],
        );
    }

    /// S3.5
    #[test]
    fn without_meaningful_user_content_there_is_no_fingerprint() {
        for content in [json!(""), json!(" \n"), json!(null), json!([]), json!([{"type": "text", "text": " "}])] {
            check(
                CHAT,
                json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": content}]}),
                &NONE,
            );
        }
        check(CHAT, json!({"messages": []}), &NONE);
        check(CHAT, json!({"messages": [{"role": "assistant", "content": "x"}]}), &NONE);
        check(CHAT, json!({}), &NONE);
        check(RESPONSES, json!({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}), &NONE);
        let result = json!([{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}]);
        check(MESSAGES, json!({"messages": [{"role": "user", "content": result}]}), &NONE);
    }

    /// S3.5
    #[test]
    fn what_cannot_be_represented_has_no_fingerprint() {
        let unknown = json!([{"type": "text", "text": "x"}, {"type": "hologram", "text": "y"}]);
        check(CHAT, json!({"messages": [{"role": "user", "content": unknown}]}), &NONE);
        check(
            CHAT,
            json!({"messages": [{"role": "system", "content": unknown}, {"role": "user", "content": "x"}]}),
            &NONE,
        );
        check(
            RESPONSES,
            json!({"input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}]}),
            &NONE,
        );
        for odd in
            [json!("text"), json!({}), json!([7]), json!([{"role": "user", "content": 7}]), json!([{"content": "x"}])]
        {
            check(MESSAGES, json!({"messages": odd}), &NONE);
        }
        let half = r#"{"model":"m","messages":[{"role":"user","content":"\ud800"}]}"#;
        assert_eq!(digest(CHAT, half), None);
    }

    /// S3.5: media by content digest, URL or id. The digests are `printf aGk= | sha256sum`.
    #[test]
    fn media_count_by_a_stable_reference() {
        const DATA: &str = "d 96e3186af2815065fbc894de1bdadda7830527fffdba6bdd709789cf0ee79a6a";
        let data = |kind| ["r user".to_owned(), format!("b {kind}"), DATA.to_owned()].join("\n");
        let chat = |block: Value| canonical(CHAT, json!({"messages": [{"role": "user", "content": [block]}]}));
        let responses = |block: Value| canonical(RESPONSES, json!({"input": [{"role": "user", "content": [block]}]}));
        let messages = |block: Value| canonical(MESSAGES, json!({"messages": [{"role": "user", "content": [block]}]}));
        let source = |kind: &str, source: Value| messages(json!({"type": kind, "source": source}));
        let url = "data:image/png;base64,aGk=";

        assert_eq!(chat(json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}})), data("image"));
        assert_eq!(responses(json!({"type": "input_image", "image_url": url})), data("image"));
        let base64 = json!({"type": "base64", "media_type": "image/png", "data": "aGk="});
        assert_eq!(source("image", base64.clone()), data("image"));
        assert_eq!(source("document", base64), data("file"));
        assert_eq!(chat(json!({"type": "file", "file": {"filename": "a", "file_data": url}})), data("file"));
        assert_eq!(responses(json!({"type": "input_file", "filename": "a", "file_data": url})), data("file"));
        assert_eq!(
            chat(json!({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}})),
            data("audio")
        );

        let by_url = "r user\nb image\nu https://e.test/a.png";
        assert_eq!(chat(json!({"type": "image_url", "image_url": {"url": "https://e.test/a.png"}})), by_url);
        assert_eq!(source("image", json!({"type": "url", "url": "https://e.test/a.png"})), by_url);
        let by_id = "r user\nb file\ni file-1";
        assert_eq!(responses(json!({"type": "input_file", "file_id": "file-1"})), by_id);
        assert_eq!(source("document", json!({"type": "file", "file_id": "file-1"})), by_id);
        assert_eq!(source("document", json!({"type": "content", "content": []})), "-");
        assert_eq!(responses(json!({"type": "input_file"})), "-");
    }

    /// A chat body with `later` messages after the first one, fields in either order, with or without spaces.
    fn written(system: &str, user: &str, later: &[String], marked: bool, reversed: bool, pretty: bool) -> String {
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            match marked {
                true => {
                    json!({"role": "user", "content": [{"type": "text", "text": user, "cache_control": {"type": "e"}}]})
                }
                false => json!({"role": "user", "content": user}),
            },
        ];
        let roles = ["assistant", "user", "tool", "system"].into_iter().cycle();
        messages.extend(roles.zip(later).map(|(role, text)| json!({"role": role, "content": text})));
        let write = if pretty { serde_json::to_string_pretty } else { serde_json::to_string };
        let mut fields = [
            format!("\"messages\":{}", write(&json!(messages)).expect("JSON")),
            "\"model\": \"m\"".to_owned(),
            format!("\"tools\":[{}]", later.len()),
        ];
        if reversed {
            fields.reverse();
        }
        format!("{{{}}}", fields.join(","))
    }

    proptest! {
        /// S3.5, S3.6
        #[test]
        fn only_the_beginning_counts(
            (system, other_system) in ("[a-z\"é]{1,8}", "[a-z\"é]{1,8}"),
            (user, other_user) in ("[a-z\"é]{1,8}", "[a-z\"é]{1,8}"),
            later in prop::collection::vec(".{0,8}", 0..6),
            (marked, reversed, pretty) in any::<(bool, bool, bool)>(),
        ) {
            let first = digest(CHAT, &written(&system, &user, &[], false, false, false));
            prop_assert!(first.is_some());
            let grown = digest(CHAT, &written(&system, &user, &later, marked, reversed, pretty));
            prop_assert_eq!(&grown, &first);
            let of_other_user = digest(CHAT, &written(&system, &other_user, &later, marked, reversed, pretty));
            prop_assert_eq!(of_other_user == first, other_user == user);
            let of_other_system = digest(CHAT, &written(&other_system, &user, &later, marked, reversed, pretty));
            prop_assert_eq!(of_other_system == first, other_system == system);
        }
    }
}
