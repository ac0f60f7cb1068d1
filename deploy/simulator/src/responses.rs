//! OpenAI Responses: reading a request, and an answer as a response object or as numbered events.

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Part, Question, Tool, Usage, halves};
use crate::event::{Event, Place};
use crate::prompt::{self, Piece, items};

/// Reads a request; the pieces of a `previous_response_id` are not among its own.
pub(crate) fn read(body: Value) -> Question {
    let tools = items(&body["tools"]);
    let mut pieces: Vec<Piece> = tools.iter().map(|tool| Piece::of_value("tool", tool)).collect();
    if body["text"]["format"]["schema"].is_object() {
        pieces.push(Piece::of_value("response_format", &body["text"]["format"]));
    }
    pieces.extend(prompt::content("system", &body["instructions"]));
    let preamble = pieces.len();
    let input = &body["input"];
    pieces.extend(prompt::content("user", if input.is_string() { input } else { &Value::Null }));
    pieces.extend(items(input).iter().flat_map(item));
    Question {
        model: body["model"].as_str().unwrap_or_default().to_owned(),
        stream: body["stream"] == true,
        cache_key: body["prompt_cache_key"].as_str().map(str::to_owned),
        tools: tools.iter().flat_map(offered).collect(),
        last_user: last_user(input),
        ends_in_tool_result: items(input).last().is_some_and(is_tool_result),
        pieces,
        preamble,
        body,
        ..Question::default()
    }
}

/// The pieces that an answer adds to the conversation when it is continued by its id.
pub(crate) fn pieces(answer: &Answer) -> Vec<Piece> {
    (0..answer.parts.len()).flat_map(|index| item(&output_item(answer, index, "completed"))).collect()
}

fn item(item: &Value) -> Vec<Piece> {
    match item["role"].as_str() {
        Some(role) => prompt::content(role, &item["content"]),
        None => vec![Piece::of_value("item", item)],
    }
}

fn last_user(input: &Value) -> String {
    let message = items(input).iter().rev().find(|item| item["role"] == "user");
    prompt::text(message.map_or(input, |message| &message["content"]))
}

fn is_tool_result(item: &Value) -> bool {
    item["type"].as_str().is_some_and(|kind| kind.ends_with("_call_output"))
}

/// A function, or the functions in a namespace.
fn offered(tool: &Value) -> Vec<Tool> {
    if tool["type"] == "namespace" {
        return items(&tool["tools"]).iter().flat_map(offered).collect();
    }
    vec![Tool { name: tool["name"].as_str().unwrap_or_default().to_owned(), schema: tool["parameters"].clone() }]
}

/// The usage object.
pub(crate) fn usage(usage: &Usage) -> Value {
    let written = usage.written_5m_tokens + usage.written_1h_tokens;
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    })
}

/// The id by which a conversation goes on.
pub(crate) fn id(answer: &Answer) -> String {
    format!("resp_{}", answer.id)
}

/// What was put in, as the list that the API gives.
pub(crate) fn input_items(input: &Value) -> Value {
    let text =
        |text: &str| json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]});
    let data = input.as_str().map_or_else(|| items(input).to_vec(), |input| vec![text(input)]);
    json!({"object": "list", "data": data, "has_more": false})
}

/// The object of a response that is made in the background.
pub(crate) fn queued(answer: &Answer, request: &Value) -> Value {
    let mut response = opening(answer, request);
    response["status"] = json!("queued");
    response
}

/// The answer as one object; an `incomplete` one has stopped at a limit.
pub(crate) fn object(answer: &Answer, usage: &Value, request: &Value, incomplete: bool) -> Value {
    let output: Vec<Value> = (0..answer.parts.len()).map(|index| output_item(answer, index, "completed")).collect();
    let mut response = opening(answer, request);
    response["status"] = json!("completed");
    response["completed_at"] = json!(answer.created);
    response["output"] = json!(output);
    response["usage"] = usage.clone();
    if incomplete {
        response["status"] = json!("incomplete");
        response["completed_at"] = Value::Null;
        response["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    response
}

/// The response object at its beginning: in progress, without output and usage.
fn opening(answer: &Answer, request: &Value) -> Value {
    let or =
        |name: &str, default: Value| Some(&request[name]).filter(|value| !value.is_null()).cloned().unwrap_or(default);
    json!({
        "id": id(answer),
        "object": "response",
        "created_at": answer.created,
        "completed_at": null,
        "status": "in_progress",
        "background": or("background", json!(false)),
        "error": null,
        "incomplete_details": null,
        "instructions": request["instructions"],
        "max_output_tokens": request["max_output_tokens"],
        "max_tool_calls": request["max_tool_calls"],
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
        "previous_response_id": request["previous_response_id"],
        "prompt_cache_key": request["prompt_cache_key"],
        "presence_penalty": or("presence_penalty", json!(0.0)),
        "frequency_penalty": or("frequency_penalty", json!(0.0)),
        "reasoning": {"effort": request["reasoning"]["effort"], "summary": request["reasoning"]["summary"]},
        "safety_identifier": request["safety_identifier"],
        "service_tier": "default",
        "store": or("store", json!(true)),
        "temperature": or("temperature", json!(1.0)),
        "text": or("text", json!({"format": {"type": "text"}, "verbosity": "medium"})),
        "tool_choice": or("tool_choice", json!("auto")),
        "tools": items(&request["tools"]).iter().map(echoed_tool).collect::<Vec<_>>(),
        "top_logprobs": or("top_logprobs", json!(0)),
        "top_p": or("top_p", json!(1.0)),
        "truncation": or("truncation", json!("disabled")),
        "usage": null,
        "user": request["user"],
        "metadata": or("metadata", json!({})),
    })
}

/// A tool as the response repeats it: the official schema wants the optional fields of a function spelled out.
fn echoed_tool(tool: &Value) -> Value {
    let mut tool = tool.clone();
    if tool["type"] == "function"
        && let Some(fields) = tool.as_object_mut()
    {
        for (name, default) in [("description", Value::Null), ("parameters", json!({})), ("strict", json!(true))] {
            fields.entry(name).or_insert(default);
        }
    }
    tool
}

fn output_item(answer: &Answer, index: usize, status: &str) -> Value {
    match &answer.parts[index] {
        Part::Text(chunks) => json!({
            "id": item_id(answer, index), "type": "message", "status": status, "role": "assistant",
            "content": if status == "completed" { json!([output_text(&chunks.concat())]) } else { json!([]) },
        }),
        Part::Call { id, name, arguments } => json!({
            "id": item_id(answer, index), "type": "function_call", "status": status, "call_id": format!("call_{id}"),
            "name": name, "arguments": if status == "completed" { arguments } else { "" },
        }),
    }
}

fn item_id(answer: &Answer, index: usize) -> String {
    let prefix = if matches!(answer.parts[index], Part::Text(_)) { "msg" } else { "fc" };
    format!("{prefix}_{}{index:02x}", answer.id)
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// The answer as events in the official sequence, numbered from 0.
pub(crate) fn events(answer: &Answer, usage: &Value, request: &Value, incomplete: bool) -> Vec<Event> {
    let mut events = Numbered::default();
    events.push("response.created", json!({"response": opening(answer, request)}), Place::Frame);
    events.push("response.in_progress", json!({"response": opening(answer, request)}), Place::Frame);
    for (index, part) in answer.parts.iter().enumerate() {
        let item = json!({"output_index": index, "item": output_item(answer, index, "in_progress")});
        events.push("response.output_item.added", item, Place::Frame);
        let at = json!({"item_id": item_id(answer, index), "output_index": index});
        match part {
            Part::Text(chunks) => events.text(&at, chunks),
            Part::Call { name, arguments, .. } => events.call(&at, name, arguments),
        }
        let item = json!({"output_index": index, "item": output_item(answer, index, "completed")});
        events.push("response.output_item.done", item, Place::Frame);
    }
    let last = if incomplete { "response.incomplete" } else { "response.completed" };
    events.push(last, json!({"response": object(answer, usage, request, incomplete)}), Place::Terminal);
    events.0
}

/// The event of an answer that failed after `sequence` events.
pub(crate) fn failed(answer: &Answer, request: &Value, sequence: usize) -> Value {
    let mut response = opening(answer, request);
    response["status"] = json!("failed");
    response["error"] =
        json!({"code": "server_error", "message": "The server had an error while processing your request."});
    json!({"type": "response.failed", "sequence_number": sequence, "response": response})
}

#[derive(Default)]
struct Numbered(Vec<Event>);

impl Numbered {
    fn push(&mut self, kind: &str, fields: Value, place: Place) {
        let data = merged(&json!({"type": kind, "sequence_number": self.0.len()}), &fields);
        self.0.push(Event::typed(&data, place));
    }

    fn text(&mut self, at: &Value, chunks: &[String]) {
        let at = merged(at, &json!({"content_index": 0}));
        let text = chunks.concat();
        self.push("response.content_part.added", merged(&at, &json!({"part": output_text("")})), Place::Frame);
        for chunk in chunks {
            let delta = merged(&at, &json!({"delta": chunk, "logprobs": []}));
            self.push("response.output_text.delta", delta, Place::Content);
        }
        self.push("response.output_text.done", merged(&at, &json!({"text": text, "logprobs": []})), Place::Frame);
        self.push("response.content_part.done", merged(&at, &json!({"part": output_text(&text)})), Place::Frame);
    }

    fn call(&mut self, at: &Value, name: &str, arguments: &str) {
        for half in halves(arguments) {
            let delta = merged(at, &json!({"delta": half}));
            self.push("response.function_call_arguments.delta", delta, Place::Content);
        }
        let done = merged(at, &json!({"name": name, "arguments": arguments}));
        self.push("response.function_call_arguments.done", done, Place::Frame);
    }
}

fn merged(first: &Value, second: &Value) -> Value {
    let fields = [first, second].into_iter().filter_map(Value::as_object).flatten();
    fields.map(|(name, value)| (name.clone(), value.clone())).collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(parts: Vec<Part>) -> Answer {
        let usage = Usage { prompt_tokens: 1200, cached_tokens: 1024, output_tokens: 3, ..Usage::default() };
        Answer { id: "0a".into(), created: 1_700_000_000, model: "gpt-5.4".into(), parts, usage }
    }

    fn hi() -> Answer {
        answer(vec![Part::Text(vec!["Hi ".into(), "there".into()])])
    }

    fn echo() -> Answer {
        answer(vec![Part::Call {
            id: "0a00".into(),
            name: "exec_command".into(),
            arguments: r#"{"cmd":"echo hi"}"#.into(),
        }])
    }

    #[test]
    fn a_response_has_every_field_of_the_official_object() {
        let request = json!({"tools": [{"type": "function", "name": "f"}], "store": false, "prompt_cache_key": "k"});
        let answer = hi();
        let expected = json!({
            "id": "resp_0a", "object": "response", "created_at": 1_700_000_000, "completed_at": 1_700_000_000,
            "status": "completed", "background": false, "error": null, "incomplete_details": null,
            "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "model": "gpt-5.4",
            "output": [{
                "id": "msg_0a00", "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}]
            }],
            "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": "k",
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "reasoning": {"effort": null, "summary": null},
            "safety_identifier": null, "service_tier": "default", "store": false, "temperature": 1.0,
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
            "tools": [{"type": "function", "name": "f", "description": null, "parameters": {}, "strict": true}],
            "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled",
            "usage": {
                "input_tokens": 1200, "input_tokens_details": {"cached_tokens": 1024, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 1203
            },
            "user": null, "metadata": {}
        });
        assert_eq!(object(&answer, &usage(&answer.usage), &request, false), expected);
    }

    /// Compares the events between `in_progress` and `completed`, their sequence numbers checked and taken off.
    #[track_caller]
    fn check(answer: &Answer, expected: &[Value]) {
        let events = events(answer, &usage(&answer.usage), &json!({}), false);
        let mut found: Vec<Value> =
            events.iter().map(|event| serde_json::from_str(&event.data).expect("JSON")).collect();
        for (n, data) in found.iter_mut().enumerate() {
            assert_eq!(events[n].name.as_deref(), data["type"].as_str());
            assert_eq!(data.as_object_mut().and_then(|data| data.remove("sequence_number")), Some(json!(n)));
        }
        let last = found.len() - 1;
        let kinds = [&found[0]["type"], &found[1]["type"], &found[last]["type"]];
        assert_eq!(kinds, ["response.created", "response.in_progress", "response.completed"]);
        assert_eq!(found[last]["response"], object(answer, &usage(&answer.usage), &json!({}), false));
        assert_eq!(found[2..last], *expected);
    }

    #[test]
    fn text_streams_in_the_official_sequence() {
        let item = |status: &str, content: Value| json!({"id": "msg_0a00", "type": "message", "status": status, "role": "assistant", "content": content});
        let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
        let event = |kind: &str, fields: Value| {
            merged(&json!({"type": kind, "item_id": "msg_0a00", "output_index": 0, "content_index": 0}), &fields)
        };
        check(
            &hi(),
            &[
                json!({"type": "response.output_item.added", "output_index": 0, "item": item("in_progress", json!([]))}),
                event("response.content_part.added", json!({"part": part("")})),
                event("response.output_text.delta", json!({"delta": "Hi ", "logprobs": []})),
                event("response.output_text.delta", json!({"delta": "there", "logprobs": []})),
                event("response.output_text.done", json!({"text": "Hi there", "logprobs": []})),
                event("response.content_part.done", json!({"part": part("Hi there")})),
                json!({"type": "response.output_item.done", "output_index": 0, "item": item("completed", json!([part("Hi there")]))}),
            ],
        );
    }

    #[test]
    fn a_function_call_streams_in_the_official_sequence() {
        let item = |status: &str, arguments: &str| {
            json!({
                "id": "fc_0a00", "type": "function_call", "status": status, "call_id": "call_0a00",
                "name": "exec_command", "arguments": arguments
            })
        };
        let event = |kind: &str, fields: Value| {
            merged(&json!({"type": kind, "item_id": "fc_0a00", "output_index": 0}), &fields)
        };
        check(
            &echo(),
            &[
                json!({"type": "response.output_item.added", "output_index": 0, "item": item("in_progress", "")}),
                event("response.function_call_arguments.delta", json!({"delta": "{\"cmd\":\""})),
                event("response.function_call_arguments.delta", json!({"delta": "echo hi\"}"})),
                event(
                    "response.function_call_arguments.done",
                    json!({"name": "exec_command", "arguments": "{\"cmd\":\"echo hi\"}"}),
                ),
                json!({"type": "response.output_item.done", "output_index": 0, "item": item("completed", "{\"cmd\":\"echo hi\"}")}),
            ],
        );
    }

    #[test]
    fn a_request_is_read_in_the_order_tools_instructions_input() {
        let question = read(json!({
            "model": "gpt-5.4", "stream": true, "instructions": "Be brief.",
            "tools": [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]}],
            "input": [
                {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
                {"type": "function_call", "id": "fc_1", "status": "completed", "name": "wait", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "done"}
            ]
        }));
        let text: String = question.pieces.iter().map(|piece| piece.text.as_str()).collect();
        let expected = concat!(
            "tool: {\"name\":\"agents\",\"tools\":[{\"name\":\"wait\",\"type\":\"function\"}],\"type\":\"namespace\"}\n",
            "system: Be brief.\nuser: Go\n",
            "item: {\"arguments\":\"{}\",\"call_id\":\"c\",\"name\":\"wait\",\"type\":\"function_call\"}\n",
            "item: {\"call_id\":\"c\",\"output\":\"done\",\"type\":\"function_call_output\"}\n",
        );
        assert_eq!(text, expected);
        assert_eq!((question.last_user.as_str(), question.ends_in_tool_result), ("Go", true));
        assert_eq!(question.tools[0].name, "wait");
        assert_eq!(read(json!({"input": "Go"})).last_user, "Go");
    }
}
