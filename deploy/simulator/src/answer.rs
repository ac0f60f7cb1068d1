//! What the simulator says, before it is put into a dialect: text in chunks, tool calls, and usage.
//!
//! Without a script the words follow from the prompt alone: the same question to the same simulator gives the same
//! answer. `call tool NAME` in the last user text (optionally followed by `with {…}`) asks for a tool call.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::cache::Hit;
use crate::prompt::{self, Piece};
use crate::script::{Plan, ToolCall};
use crate::settings::Settings;

const WORDS: [&str; 12] = [
    "lorem",
    "ipsum",
    "dolor",
    "sit",
    "amet",
    "consectetur",
    "adipiscing",
    "elit",
    "sed",
    "eiusmod",
    "tempor",
    "labore",
];
const MIB: usize = 1 << 20;

/// What a request asks, read from any dialect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Question {
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) wants_usage_chunk: bool,
    pub(crate) cache_key: Option<String>,
    pub(crate) pieces: Vec<Piece>,
    /// How many of the pieces come before the conversation: tools and instructions.
    pub(crate) preamble: usize,
    pub(crate) tools: Vec<Tool>,
    /// The text of the last user message.
    pub(crate) last_user: String,
    /// Whether the history ends in the result of a tool.
    pub(crate) ends_in_tool_result: bool,
    pub(crate) body: Value,
}

/// A tool the request offers: its name and the JSON schema of its arguments.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) schema: Value,
}

/// Tokens of one answer, free of dialect: `prompt_tokens` is the whole prompt, cached or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The whole prompt.
    pub prompt_tokens: u64,
    /// The part of it that was read from the cache.
    pub cached_tokens: u64,
    /// The part written to the cache for five minutes.
    pub written_5m_tokens: u64,
    /// The part written to the cache for an hour.
    pub written_1h_tokens: u64,
    /// The answer: a quarter of its characters, rounded up.
    pub output_tokens: u64,
}

/// One part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    /// Text, in the chunks in which it streams.
    Text(Vec<String>),
    /// A call of a tool, its arguments as JSON text.
    Call { id: String, name: String, arguments: String },
}

/// An answer, ready for a dialect.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Unique over the calls of this simulator and over simulators with other names: 24 hex digits.
    pub(crate) id: String,
    pub(crate) created: i64,
    pub(crate) model: String,
    pub(crate) parts: Vec<Part>,
    pub(crate) usage: Usage,
}

impl Answer {
    /// Composes the answer number `number`, given at `now_ms`.
    pub(crate) fn compose(settings: &Settings, plan: &Plan, question: &Question, number: u64, now_ms: i64) -> Self {
        let id = format!("{}{number:08x}", &digest(&settings.name)[..16]);
        let parts = parts(settings, plan, question, &id);
        let chars: usize = parts.iter().map(Part::chars).sum();
        let usage = Usage { output_tokens: prompt::tokens_of_chars(chars as u64), ..Usage::default() };
        Self { id, created: now_ms / 1000, model: question.model.clone(), parts, usage }
    }

    /// Fills in what the cache says of the prompt.
    pub(crate) fn with_hit(mut self, hit: &Hit) -> Self {
        self.usage.prompt_tokens = hit.prompt_tokens;
        self.usage.cached_tokens = hit.read_tokens;
        self.usage.written_5m_tokens = hit.written_5m_tokens;
        self.usage.written_1h_tokens = hit.written_1h_tokens;
        self
    }

    /// Whether the answer calls a tool.
    pub(crate) fn has_calls(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Call { .. }))
    }

    /// All its text, joined.
    pub(crate) fn text(&self) -> String {
        self.parts
            .iter()
            .filter_map(|part| if let Part::Text(chunks) = part { Some(chunks.concat()) } else { None })
            .collect()
    }
}

impl Part {
    fn chars(&self) -> usize {
        match self {
            Self::Text(chunks) => chunks.iter().map(|chunk| chunk.chars().count()).sum(),
            Self::Call { name, arguments, .. } => name.chars().count() + arguments.chars().count(),
        }
    }
}

/// Cuts the arguments of a call into the two fragments in which they stream.
pub(crate) fn halves(arguments: &str) -> [&str; 2] {
    let middle = (arguments.len() / 2..).find(|at| arguments.is_char_boundary(*at)).unwrap_or(arguments.len());
    let (first, second) = arguments.split_at(middle);
    [first, second]
}

fn parts(settings: &Settings, plan: &Plan, question: &Question, id: &str) -> Vec<Part> {
    let reply = plan.reply.clone().unwrap_or_default();
    let asked = if plan.reply.is_none() { asked_call(question) } else { None };
    let calls: Vec<ToolCall> = reply.tool_calls.into_iter().chain(asked).collect();
    let text = match reply.text {
        Some(text) => Some(text.split_inclusive(' ').map(str::to_owned).collect()),
        None if calls.is_empty() => Some(lorem(settings, plan.chunks.unwrap_or(settings.chunks), question)),
        None => None,
    };
    let text = text.map(|chunks| Part::Text(with_oddities(chunks, plan)));
    let numbered = calls.into_iter().enumerate().map(|(n, call)| Part::Call {
        id: format!("{id}{n:02x}"),
        name: call.name,
        arguments: call.arguments.to_string(),
    });
    text.into_iter().chain(numbered).collect()
}

/// Words chosen by the prompt; the first chunk begins with the simulator's name in brackets.
fn lorem(settings: &Settings, chunks: usize, question: &Question) -> Vec<String> {
    let choice = Sha256::digest(question.last_user.as_bytes());
    let word = |n: usize| WORDS[(usize::from(choice[n % choice.len()]) + n) % WORDS.len()];
    let chunk = |n| if n == 0 { format!("[{}] {} ", settings.name, word(0)) } else { format!("{} ", word(n)) };
    (0..chunks.max(1)).map(chunk).collect()
}

fn with_oddities(mut chunks: Vec<String>, plan: &Plan) -> Vec<String> {
    if plan.framing.splits_utf8 && chunks.iter().all(|chunk| chunk.is_ascii()) {
        chunks.push("naïve 日本語 🦀".to_owned());
    }
    if let Some(mib) = plan.huge_mib {
        chunks.push("x".repeat(mib * MIB));
    }
    chunks
}

fn asked_call(question: &Question) -> Option<ToolCall> {
    if question.ends_in_tool_result {
        return None;
    }
    let (_, wish) = question.last_user.split_once("call tool ")?;
    let name = wish.split_whitespace().next()?.trim_end_matches(['.', ',', ';', '!', '?']);
    let tool = question.tools.iter().find(|tool| tool.name == name)?;
    let arguments = wish.split_once(" with ").and_then(|(_, rest)| first_value(rest));
    Some(ToolCall { name: name.to_owned(), arguments: arguments.unwrap_or_else(|| arguments_for(tool)) })
}

fn first_value(text: &str) -> Option<Value> {
    serde_json::Deserializer::from_str(text).into_iter().next()?.ok()
}

fn arguments_for(tool: &Tool) -> Value {
    match tool.name.as_str() {
        "exec_command" => json!({"cmd": "echo hi"}),
        "shell" => json!({"command": ["echo", "hi"]}),
        _ => filled(&tool.schema),
    }
}

/// The smallest object that has every required property of a schema.
fn filled(schema: &Value) -> Value {
    let value = |property: &Value| match property["type"].as_str() {
        Some("integer" | "number") => json!(1),
        Some("boolean") => json!(true),
        Some("array") => json!([]),
        Some("object") => json!({}),
        _ => property["enum"].get(0).cloned().unwrap_or_else(|| json!("sim")),
    };
    let required = prompt::items(&schema["required"]).iter().filter_map(Value::as_str);
    let fields = required.map(|name| (name.to_owned(), value(&schema["properties"][name])));
    Value::Object(fields.collect::<Map<_, _>>())
}

/// The SHA-256 of a text in hex.
pub(crate) fn digest(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(last_user: &str, ends_in_tool_result: bool) -> Question {
        let schema = json!({"required": ["city", "days"], "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        let tool = |name: &str| Tool { name: name.into(), schema: schema.clone() };
        let tools = vec![tool("get_weather"), tool("exec_command")];
        Question { last_user: last_user.into(), ends_in_tool_result, tools, ..Question::default() }
    }

    #[track_caller]
    fn check(last_user: &str, ends_in_tool_result: bool, call: Option<(&str, &str)>) {
        let question = question(last_user, ends_in_tool_result);
        let answer = Answer::compose(&Settings::default(), &Plan::default(), &question, 1, 0);
        let found = answer.parts.iter().find_map(|part| match part {
            Part::Call { name, arguments, .. } => Some((name.as_str(), arguments.as_str())),
            Part::Text(_) => None,
        });
        assert_eq!(found, call);
        assert_eq!(answer.text().is_empty(), call.is_some());
    }

    #[test]
    fn a_tool_is_called_when_it_is_asked_for_and_offered() {
        check("Please call tool get_weather.", false, Some(("get_weather", r#"{"city":"sim","days":1}"#)));
        check("call tool get_weather with {\"city\":\"Rome\"} now", false, Some(("get_weather", r#"{"city":"Rome"}"#)));
        check("call tool exec_command", false, Some(("exec_command", r#"{"cmd":"echo hi"}"#)));
        check("call tool launch", false, None);
        check("call tool get_weather", true, None);
    }

    #[test]
    fn the_same_question_gets_the_same_words_with_the_name_in_front() {
        let settings = Settings { name: "up-1".into(), chunks: 3, ..Settings::default() };
        let answer = |n| Answer::compose(&settings, &Plan::default(), &question("hi", false), n, 0);
        assert_eq!(answer(1).text(), answer(2).text());
        assert_ne!(answer(1).id, answer(2).id);
        assert!(answer(1).text().starts_with("[up-1] "));
        let [Part::Text(chunks)] = &answer(1).parts[..] else { panic!("one text expected") };
        assert_eq!(chunks.len(), 3);
    }

    #[test]
    fn output_tokens_are_a_quarter_of_the_characters() {
        let plan = Plan { reply: Some(crate::script::Reply::text("nine char")), ..Plan::default() };
        assert_eq!(Answer::compose(&Settings::default(), &plan, &question("", false), 1, 0).usage.output_tokens, 3);
    }
}
