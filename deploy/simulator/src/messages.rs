//! Anthropic Messages: reading a request, and an answer as JSON or as named events.

use serde_json::{Value, json};

use crate::answer::{Answer, Part, Question, Tool, Usage, halves};
use crate::event::{Event, Place};
use crate::prompt::{self, Piece, items};

/// Breakpoints one request may carry.
const MARKS_MAX: usize = 4;

/// Reads a request.
pub(crate) fn read(body: Value) -> Question {
    let messages = items(&body["messages"]);
    let tools = items(&body["tools"]);
    let mut pieces: Vec<Piece> = tools.iter().map(|tool| Piece::of_value("tool", tool)).collect();
    pieces.extend(prompt::content("system", &body["system"]));
    pieces.extend(messages.iter().flat_map(|message| prompt::content(role(message), &message["content"])));
    prompt::mark_last(&mut pieces, &body);
    let last_user = messages.iter().rev().find(|message| message["role"] == "user" && !is_tool_result(message));
    Question {
        model: body["model"].as_str().unwrap_or_default().to_owned(),
        stream: body["stream"] == true,
        tools: tools.iter().map(tool_of).collect(),
        last_user: last_user.map(|message| prompt::text(&message["content"])).unwrap_or_default(),
        ends_in_tool_result: messages.last().is_some_and(is_tool_result),
        pieces,
        body,
        ..Question::default()
    }
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or("user")
}

fn is_tool_result(message: &Value) -> bool {
    items(&message["content"]).iter().any(|block| block["type"] == "tool_result")
}

fn tool_of(tool: &Value) -> Tool {
    Tool { name: tool["name"].as_str().unwrap_or_default().to_owned(), schema: tool["input_schema"].clone() }
}

/// What is wrong with a request, in Anthropic's words.
pub(crate) fn fault(question: &Question) -> Option<String> {
    let marks = question.pieces.iter().filter(|piece| piece.mark.is_some()).count();
    let complaint = format!("A maximum of {MARKS_MAX} blocks with cache_control may be provided. Found {marks}.");
    (marks > MARKS_MAX).then_some(complaint)
}

/// The usage object: `input_tokens` is what was neither read from the cache nor written to it.
pub(crate) fn usage(usage: &Usage) -> Value {
    let written = usage.written_5m_tokens + usage.written_1h_tokens;
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.written_5m_tokens,
            "ephemeral_1h_input_tokens": usage.written_1h_tokens,
        },
        "output_tokens": usage.output_tokens,
        "service_tier": "standard",
    })
}

/// The answer as one object.
pub(crate) fn object(answer: &Answer, usage: &Value) -> Value {
    let content: Vec<Value> = answer.parts.iter().map(block).collect();
    message(answer, json!(content), json!(stop_reason(answer)), usage.clone())
}

fn message(answer: &Answer, content: Value, stop_reason: Value, usage: Value) -> Value {
    json!({
        "id": format!("msg_{}", answer.id),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": null,
        "usage": usage,
    })
}

fn block(part: &Part) -> Value {
    match part {
        Part::Text(chunks) => json!({"type": "text", "text": chunks.concat()}),
        Part::Call { id, name, arguments } => {
            let input: Value = serde_json::from_str(arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": format!("toolu_{id}"), "name": name, "input": input})
        }
    }
}

fn stop_reason(answer: &Answer) -> &'static str {
    if answer.has_calls() { "tool_use" } else { "end_turn" }
}

/// The answer as events; the usage of the prompt is in `message_start`, that of the whole in `message_delta`.
pub(crate) fn events(answer: &Answer, usage: &Value) -> Vec<Event> {
    let mut first_usage = usage.clone();
    first_usage["output_tokens"] = json!(1);
    let opening = message(answer, json!([]), Value::Null, first_usage);
    let mut events = vec![frame(json!({"type": "message_start", "message": opening}))];
    for (index, part) in answer.parts.iter().enumerate() {
        let (start, deltas) = start_and_deltas(part);
        events.push(frame(json!({"type": "content_block_start", "index": index, "content_block": start})));
        if index == 0 {
            events.push(frame(json!({"type": "ping"})));
        }
        let delta = |delta| json!({"type": "content_block_delta", "index": index, "delta": delta});
        events.extend(deltas.into_iter().map(|change| Event::typed(&delta(change), Place::Content)));
        events.push(frame(json!({"type": "content_block_stop", "index": index})));
    }
    let delta = json!({"stop_reason": stop_reason(answer), "stop_sequence": null});
    events.push(frame(json!({"type": "message_delta", "delta": delta, "usage": final_usage(usage)})));
    events.push(Event::typed(&json!({"type": "message_stop"}), Place::Terminal));
    events
}

fn frame(data: Value) -> Event {
    Event::typed(&data, Place::Frame)
}

fn start_and_deltas(part: &Part) -> (Value, Vec<Value>) {
    match part {
        Part::Text(chunks) => {
            let delta = |chunk| json!({"type": "text_delta", "text": chunk});
            (json!({"type": "text", "text": ""}), chunks.iter().map(delta).collect())
        }
        Part::Call { arguments, .. } => {
            let mut start = block(part);
            start["input"] = json!({});
            let delta = |text| json!({"type": "input_json_delta", "partial_json": text});
            (start, halves(arguments).into_iter().map(delta).collect())
        }
    }
}

fn final_usage(usage: &Value) -> Value {
    let names = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"];
    names.into_iter().map(|name| (name.to_owned(), usage[name].clone())).collect::<serde_json::Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(parts: Vec<Part>) -> Answer {
        let usage = Usage {
            prompt_tokens: 3000,
            cached_tokens: 1500,
            written_5m_tokens: 200,
            written_1h_tokens: 1000,
            output_tokens: 7,
        };
        Answer { id: "0a".into(), created: 0, model: "claude-sonnet-4-5".into(), parts, usage }
    }

    fn hi() -> Answer {
        answer(vec![Part::Text(vec!["Hi ".into(), "there".into()])])
    }

    #[test]
    fn input_tokens_exclude_what_was_read_and_written() {
        let expected = json!({
            "input_tokens": 300, "cache_creation_input_tokens": 1200, "cache_read_input_tokens": 1500,
            "cache_creation": {"ephemeral_5m_input_tokens": 200, "ephemeral_1h_input_tokens": 1000},
            "output_tokens": 7, "service_tier": "standard"
        });
        assert_eq!(usage(&hi().usage), expected);
    }

    #[test]
    fn an_answer_has_the_official_shape() {
        let call = Part::Call { id: "0a00".into(), name: "f".into(), arguments: r#"{"a":1}"#.into() };
        let found = object(&answer(vec![Part::Text(vec!["Hi".into()]), call]), &json!({"input_tokens": 1}));
        let expected = json!({
            "id": "msg_0a", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "tool_use", "id": "toolu_0a00", "name": "f", "input": {"a": 1}}
            ],
            "stop_reason": "tool_use", "stop_sequence": null, "usage": {"input_tokens": 1}
        });
        assert_eq!(found, expected);
    }

    #[track_caller]
    fn check(answer: &Answer, expected: &[Value]) {
        let events = events(answer, &usage(&answer.usage));
        let found: Vec<Value> = events.iter().map(|event| serde_json::from_str(&event.data).expect("JSON")).collect();
        assert!(events.iter().zip(&found).all(|(event, data)| event.name.as_deref() == data["type"].as_str()));
        assert_eq!(found[0]["type"], "message_start");
        assert_eq!(found[1..], *expected);
    }

    #[test]
    fn text_streams_in_the_official_sequence() {
        check(
            &hi(),
            &[
                json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
                json!({"type": "ping"}),
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi "}}),
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "there"}}),
                json!({"type": "content_block_stop", "index": 0}),
                json!({
                    "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
                    "usage": {
                        "input_tokens": 300, "cache_creation_input_tokens": 1200,
                        "cache_read_input_tokens": 1500, "output_tokens": 7
                    }
                }),
                json!({"type": "message_stop"}),
            ],
        );
    }

    #[test]
    fn message_start_carries_the_prompt_usage_and_no_content() {
        let events = events(&hi(), &usage(&hi().usage));
        let start: Value = serde_json::from_str(&events[0].data).expect("JSON");
        let message = &start["message"];
        assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
        assert_eq!(
            (&message["usage"]["cache_read_input_tokens"], &message["usage"]["output_tokens"]),
            (&json!(1500), &json!(1))
        );
    }

    #[test]
    fn five_marks_are_too_many() {
        let block = json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}});
        let request = |n| read(json!({"messages": [{"role": "user", "content": vec![block.clone(); n]}]}));
        assert_eq!(fault(&request(4)), None);
        let complaint = "A maximum of 4 blocks with cache_control may be provided. Found 5.";
        assert_eq!(fault(&request(5)).as_deref(), Some(complaint));
    }

    #[test]
    fn a_request_is_read_in_the_order_tools_system_messages() {
        let question = read(json!({
            "model": "m", "system": "Be brief.", "cache_control": {"type": "ephemeral"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": "Go"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]}
            ]
        }));
        let text: String = question.pieces.iter().map(|piece| piece.text.as_str()).collect();
        let expected = concat!(
            "tool: {\"input_schema\":{\"type\":\"object\"},\"name\":\"f\"}\nsystem: Be brief.\nuser: Go\n",
            "assistant: {\"input\":{},\"name\":\"f\",\"type\":\"tool_use\"}\n",
            "user: {\"content\":\"done\",\"tool_use_id\":\"t\",\"type\":\"tool_result\"}\n",
        );
        assert_eq!(text, expected);
        assert_eq!((question.last_user.as_str(), question.ends_in_tool_result), ("Go", true));
        let marked: Vec<bool> = question.pieces.iter().map(|piece| piece.mark.is_some()).collect();
        assert_eq!(marked, [false, false, false, false, true], "a top-level mark is one on the last block");
    }
}
