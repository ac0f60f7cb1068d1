//! Chat Completions: reading a request, and an answer as JSON or as chunks.

use serde_json::{Value, json};

use crate::answer::{Answer, Part, Question, Tool, Usage, halves};
use crate::cache::CacheModel;
use crate::event::{Event, Place};
use crate::prompt::{self, Piece, items};

/// Reads a request.
pub(crate) fn read(body: Value) -> Question {
    let messages = items(&body["messages"]);
    let tools = items(&body["tools"]);
    let mut pieces: Vec<Piece> = tools.iter().map(|tool| Piece::of_value("tool", tool)).collect();
    if body["response_format"].is_object() {
        pieces.push(Piece::of_value("response_format", &body["response_format"]));
    }
    pieces.extend(messages.iter().flat_map(message));
    let last_user = messages.iter().rev().find(|message| message["role"] == "user");
    Question {
        model: body["model"].as_str().unwrap_or_default().to_owned(),
        stream: body["stream"] == true,
        wants_usage_chunk: body["stream_options"]["include_usage"] == true,
        cache_key: body["prompt_cache_key"].as_str().map(str::to_owned),
        tools: tools.iter().map(|tool| tool_of(&tool["function"])).collect(),
        last_user: last_user.map(|message| prompt::text(&message["content"])).unwrap_or_default(),
        ends_in_tool_result: messages.last().is_some_and(|last| last["role"] == "tool"),
        pieces,
        body,
        ..Question::default()
    }
}

fn message(message: &Value) -> Vec<Piece> {
    let role = message["role"].as_str().unwrap_or("user");
    let calls = items(&message["tool_calls"]).iter().map(|call| Piece::of_value(role, call));
    prompt::content(role, &message["content"]).into_iter().chain(calls).collect()
}

fn tool_of(function: &Value) -> Tool {
    Tool { name: function["name"].as_str().unwrap_or_default().to_owned(), schema: function["parameters"].clone() }
}

/// The usage object; the DeepSeek cache adds its own two fields.
pub(crate) fn usage(usage: &Usage, cache: &CacheModel) -> Value {
    let mut object = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
        },
    });
    if let CacheModel::Deepseek { .. } = cache {
        object["prompt_cache_hit_tokens"] = json!(usage.cached_tokens);
        object["prompt_cache_miss_tokens"] = json!(usage.prompt_tokens - usage.cached_tokens);
    }
    object
}

/// The answer as one object.
pub(crate) fn object(answer: &Answer, usage: &Value) -> Value {
    let text = answer.text();
    let calls = answer.parts.iter().filter_map(call).collect::<Vec<_>>();
    let content = if text.is_empty() && !calls.is_empty() { Value::Null } else { json!(text) };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null, "annotations": []});
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    json!({
        "id": format!("chatcmpl-{}", answer.id),
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason(answer)}],
        "usage": usage,
        "service_tier": "default",
        "system_fingerprint": "fp_simulator",
    })
}

fn call(part: &Part) -> Option<Value> {
    let Part::Call { id, name, arguments } = part else { return None };
    let function = json!({"name": name, "arguments": arguments});
    Some(json!({"id": format!("call_{id}"), "type": "function", "function": function}))
}

fn finish_reason(answer: &Answer) -> &'static str {
    if answer.has_calls() { "tool_calls" } else { "stop" }
}

/// The answer as chunks: role, deltas, finish, usage if it was asked for, `[DONE]`.
pub(crate) fn events(answer: &Answer, usage: &Value, wants_usage: bool) -> Vec<Event> {
    let chunk = |choices: Value, usage: Value| {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", answer.id),
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "service_tier": "default",
            "system_fingerprint": "fp_simulator",
            "choices": choices,
        });
        if wants_usage {
            chunk["usage"] = usage;
        }
        chunk
    };
    let delta = |delta: Value, finish: Value| {
        chunk(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]), Value::Null)
    };
    let opening = json!({"role": "assistant", "content": if answer.has_calls() { Value::Null } else { json!("") }, "refusal": null});
    let mut events = vec![Event::unnamed(&delta(opening, Value::Null), Place::Frame)];
    events.extend(
        deltas(answer).iter().map(|change| Event::unnamed(&delta(change.clone(), Value::Null), Place::Content)),
    );
    events.push(Event::unnamed(&delta(json!({}), json!(finish_reason(answer))), Place::Frame));
    if wants_usage {
        events.push(Event::unnamed(&chunk(json!([]), usage.clone()), Place::Frame));
    }
    events.push(Event { name: None, data: "[DONE]".to_owned(), place: Place::Terminal });
    events
}

fn deltas(answer: &Answer) -> Vec<Value> {
    let mut deltas = Vec::new();
    let mut index = 0;
    for part in &answer.parts {
        match part {
            Part::Text(chunks) => deltas.extend(chunks.iter().map(|chunk| json!({"content": chunk}))),
            Part::Call { id, name, arguments } => {
                let function = json!({"name": name, "arguments": ""});
                let head =
                    json!({"index": index, "id": format!("call_{id}"), "type": "function", "function": function});
                deltas.push(json!({"tool_calls": [head]}));
                // Later fragments carry the index and nothing else to know the call by.
                let fragment = |text: &str| json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]});
                deltas.extend(halves(arguments).map(fragment));
                index += 1;
            }
        }
    }
    deltas
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(parts: Vec<Part>) -> Answer {
        let usage = Usage { prompt_tokens: 1200, cached_tokens: 1024, output_tokens: 3, ..Usage::default() };
        Answer { id: "0a".into(), created: 1_700_000_000, model: "gpt-4o".into(), parts, usage }
    }

    fn hi() -> Answer {
        answer(vec![Part::Text(vec!["Hi ".into(), "there".into()])])
    }

    fn weather() -> Answer {
        answer(vec![Part::Call { id: "0a00".into(), name: "get_weather".into(), arguments: r#"{"a":1}"#.into() }])
    }

    #[test]
    fn an_answer_of_text_has_the_official_shape() {
        let answer = hi();
        let expected = json!({
            "id": "chatcmpl-0a", "object": "chat.completion", "created": 1_700_000_000, "model": "gpt-4o",
            "choices": [{
                "index": 0, "logprobs": null, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Hi there", "refusal": null, "annotations": []}
            }],
            "usage": {
                "prompt_tokens": 1200, "completion_tokens": 3, "total_tokens": 1203,
                "prompt_tokens_details": {"cached_tokens": 1024, "audio_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0, "audio_tokens": 0,
                    "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
                }
            },
            "service_tier": "default", "system_fingerprint": "fp_simulator"
        });
        assert_eq!(object(&answer, &usage(&answer.usage, &CacheModel::open_ai())), expected);
    }

    #[test]
    fn deepseek_tells_hits_and_misses() {
        let usage = usage(&hi().usage, &CacheModel::deepseek());
        assert_eq!(
            (&usage["prompt_cache_hit_tokens"], &usage["prompt_cache_miss_tokens"]),
            (&json!(1024), &json!(176))
        );
    }

    #[test]
    fn a_tool_call_leaves_the_content_null() {
        let choice = &object(&weather(), &json!({}))["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = json!([{"id": "call_0a00", "type": "function", "function": {"name": "get_weather", "arguments": "{\"a\":1}"}}]);
        assert_eq!(choice["message"]["tool_calls"], call);
    }

    /// Compares the `choices` of each chunk, then `[DONE]`.
    #[track_caller]
    fn check(answer: &Answer, expected: &[Value]) {
        let events = events(answer, &json!({}), false);
        let (done, chunks) = events.split_last().expect("a stream has events");
        assert_eq!(done.data, "[DONE]");
        let chunks: Vec<Value> = chunks.iter().map(|event| serde_json::from_str(&event.data).expect("JSON")).collect();
        assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk.get("usage").is_none()));
        let found: Vec<Value> = chunks
            .iter()
            .map(|chunk| json!([chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]]))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn streams_begin_with_the_role_and_end_in_a_reason() {
        check(
            &hi(),
            &[
                json!([{"role": "assistant", "content": "", "refusal": null}, null]),
                json!([{"content": "Hi "}, null]),
                json!([{"content": "there"}, null]),
                json!([{}, "stop"]),
            ],
        );
        check(
            &weather(),
            &[
                json!([{"role": "assistant", "content": null, "refusal": null}, null]),
                json!([{"tool_calls": [{"index": 0, "id": "call_0a00", "type": "function", "function": {"name": "get_weather", "arguments": ""}}]}, null]),
                json!([{"tool_calls": [{"index": 0, "function": {"arguments": "{\"a"}}]}, null]),
                json!([{"tool_calls": [{"index": 0, "function": {"arguments": "\":1}"}}]}, null]),
                json!([{}, "tool_calls"]),
            ],
        );
    }

    #[test]
    fn the_usage_chunk_comes_only_when_asked_for_and_the_others_carry_null() {
        let events = events(&hi(), &json!({"total_tokens": 9}), true);
        let chunks: Vec<Value> =
            events[..5].iter().map(|event| serde_json::from_str(&event.data).expect("JSON")).collect();
        assert!(chunks[..4].iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
        assert_eq!((&chunks[4]["choices"], &chunks[4]["usage"]), (&json!([]), &json!({"total_tokens": 9})));
    }

    #[test]
    fn a_request_is_read_in_the_order_tools_then_messages() {
        let question = read(json!({
            "model": "gpt-4o", "stream": true, "stream_options": {"include_usage": true}, "prompt_cache_key": "k",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Go"}]},
                {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "done"}
            ]
        }));
        let text: String = question.pieces.iter().map(|piece| piece.text.as_str()).collect();
        let expected = concat!(
            "tool: {\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\"}},\"type\":\"function\"}\n",
            "system: Be brief.\nuser: Go\n",
            "assistant: {\"function\":{\"name\":\"f\"},\"type\":\"function\"}\ntool: done\n",
        );
        assert_eq!(text, expected);
        assert_eq!((question.last_user.as_str(), question.ends_in_tool_result), ("Go", true));
        assert!(question.stream && question.wants_usage_chunk && question.tools[0].name == "f");
    }
}
