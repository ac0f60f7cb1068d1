//! A request's prompt as text, in pieces that keep their order: tools, system, messages.
//!
//! The text leaves out what providers ignore and clients change from turn to turn (ids, status, cache marks), so that
//! the prompt of turn 1 is a prefix of the prompt of turn 2. Four characters are one token.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::cache::{Block, CacheModel, Life};

const CHARS_PER_TOKEN: u64 = 4;
const VOLATILE: [&str; 4] = ["cache_control", "prompt_cache_breakpoint", "id", "status"];

/// One piece of the prompt: a tool, a system block, a content block of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) mark: Option<Life>,
}

impl Piece {
    /// A piece whose text is `role: content` and a line end; `source` is where a cache mark may sit.
    pub(crate) fn new(role: &str, content: &str, source: &Value) -> Self {
        Self { text: format!("{role}: {content}\n"), mark: mark(source) }
    }

    /// A piece for a value that is no text: its JSON without the volatile fields.
    pub(crate) fn of_value(role: &str, value: &Value) -> Self {
        Self::new(role, &canonical(value), value)
    }
}

/// The pieces of a message's content: a string, or an array of blocks.
pub(crate) fn content(role: &str, content: &Value) -> Vec<Piece> {
    match content {
        Value::String(text) => vec![Piece::new(role, text, &Value::Null)],
        Value::Array(blocks) => blocks.iter().map(|block| content_block(role, block)).collect(),
        _ => Vec::new(),
    }
}

fn content_block(role: &str, block: &Value) -> Piece {
    match block["text"].as_str() {
        Some(text) => Piece::new(role, text, block),
        None => Piece::of_value(role, block),
    }
}

/// The text of a message's content, its blocks joined.
pub(crate) fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    }
}

/// The values of an array; none when `value` is something else.
pub(crate) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// How many tokens `chars` characters are: a quarter, rounded up.
pub(crate) fn tokens_of_chars(chars: u64) -> u64 {
    chars.div_ceil(CHARS_PER_TOKEN)
}

/// How many tokens a text is.
pub(crate) fn tokens(text: &str) -> u64 {
    tokens_of_chars(text.chars().count() as u64)
}

/// Cuts a prompt into the blocks of a cache: of equal length, or one for each piece.
pub(crate) fn blocks(pieces: &[Piece], model: &CacheModel) -> Vec<Block> {
    match model.block_tokens() {
        Some(block_tokens) => blocks_of_length(pieces, block_tokens),
        None => blocks_of_pieces(pieces),
    }
}

fn blocks_of_length(pieces: &[Piece], block_tokens: u64) -> Vec<Block> {
    let text: Vec<char> = pieces.iter().flat_map(|piece| piece.text.chars()).collect();
    let cut = text.chunks((block_tokens * CHARS_PER_TOKEN) as usize);
    cut.map(|chars| {
        let text: String = chars.iter().collect();
        Block { id: id(&text), tokens: tokens(&text), mark: None }
    })
    .collect()
}

fn blocks_of_pieces(pieces: &[Piece]) -> Vec<Block> {
    let mut chars = 0;
    let block = |piece: &Piece| {
        let before = tokens_of_chars(chars);
        chars += piece.text.chars().count() as u64;
        // The difference of two prefixes, so that the blocks add up to the prompt.
        Block { id: id(&piece.text), tokens: tokens_of_chars(chars) - before, mark: piece.mark }
    };
    pieces.iter().map(block).collect()
}

fn id(text: &str) -> u64 {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(8).fold(0, |id, byte| id << 8 | u64::from(*byte))
}

fn mark(source: &Value) -> Option<Life> {
    let mark = source.get("cache_control").filter(|mark| mark.is_object())?;
    Some(if mark["ttl"] == "1h" { Life::OneHour } else { Life::FiveMinutes })
}

/// Puts the automatic mark of a top-level `cache_control` on the last piece.
pub(crate) fn mark_last(pieces: &mut [Piece], body: &Value) {
    if let (Some(last), Some(life)) = (pieces.last_mut(), mark(body)) {
        last.mark = last.mark.or(Some(life));
    }
}

fn canonical(value: &Value) -> String {
    let Value::Object(fields) = value else { return value.to_string() };
    let kept = fields.iter().filter(|(name, _)| !VOLATILE.contains(&name.as_str()));
    Value::Object(kept.map(|(name, value)| (name.clone(), value.clone())).collect::<Map<_, _>>()).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn piece(chars: usize) -> Piece {
        Piece { text: "x".repeat(chars), mark: None }
    }

    #[test]
    fn text_and_text_blocks_are_the_same_prompt() {
        let plain = content("user", &json!("Say hi"));
        let block = content("user", &json!([{"type": "input_text", "text": "Say hi", "id": "b1"}]));
        assert_eq!(plain, block);
        assert_eq!(plain[0].text, "user: Say hi\n");
    }

    #[test]
    fn blocks_add_up_to_a_quarter_of_the_characters_rounded_up() {
        let pieces = [piece(5), piece(5), piece(600)];
        let lengths = |model| blocks(&pieces, &model).iter().map(|block| block.tokens).collect::<Vec<_>>();
        assert_eq!(lengths(CacheModel::anthropic()), [2, 1, 150]); // prefixes of 2, 3 and 153
        assert_eq!(lengths(CacheModel::open_ai()), [128, 25]); // 512 characters, then 98
        assert_eq!(lengths(CacheModel::deepseek()), [64, 64, 25]);
    }

    #[test]
    fn marks_carry_their_life_and_leave_the_text_alone() {
        let block = json!([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]);
        assert_eq!(content("user", &block), [Piece { text: "user: a\n".into(), mark: Some(Life::OneHour) }]);
        let tool = json!({"name": "f", "cache_control": {"type": "ephemeral"}});
        let expected = Piece { text: "tool: {\"name\":\"f\"}\n".into(), mark: Some(Life::FiveMinutes) };
        assert_eq!(Piece::of_value("tool", &tool), expected);
    }
}
