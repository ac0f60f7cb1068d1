//! Streams and answers as providers document or send them, and what they say.

use waybill_schema::event::{Class, Endpoint, Tokens};

use super::*;

/// Reads a stream, one event a line, `name data` or ` data`; one letter a frame: `l`ifecycle, `m`eaningful,
/// `u`sage only, `t`erminal, `e`rror; then the end in words.
fn read(endpoint: Endpoint, stream: &str) -> (Observer, String) {
    let mut observer = Observer::new(endpoint);
    let mut frames = String::new();
    for line in stream.lines().map(str::trim_start).filter(|line| !line.is_empty()) {
        let (name, data) = line.split_once(['|']).expect("each line is name|data");
        let name = (!name.is_empty()).then_some(name);
        frames.push(match observer.event(name, data.as_bytes()) {
            Frame::Lifecycle => 'l',
            Frame::Meaningful => 'm',
            Frame::UsageOnly => 'u',
            Frame::Terminal(_) => 't',
            Frame::Error(_) => 'e',
            Frame::Foreign(_) => 'f',
        });
    }
    (observer, frames)
}

#[track_caller]
fn check(endpoint: Endpoint, stream: &str, frames: &str, end: Option<Terminal>) -> Observer {
    let (observer, seen) = read(endpoint, stream);
    assert_eq!((seen.as_str(), observer.at_eof()), (frames, end));
    observer
}

/// Input, output, cached, written, reasoning; `-` for what is unknown.
fn tokens(usage: Usage) -> String {
    let parts = [usage.input, usage.output, usage.cached, usage.cache_write, usage.reasoning];
    let parts = parts.map(|tokens| match tokens {
        Tokens::Reported(n) => n.to_string(),
        Tokens::Estimated(n) => format!("~{n}"),
        Tokens::Unknown => "-".into(),
    });
    parts.join(" ")
}

/// The model and the id are recorded: what is longer than a name counts as absent, as if it were of another type.
#[test]
fn an_upstream_cannot_blow_up_a_fact_by_its_names() {
    let long = "m".repeat(513);
    let body = format!(r#"{{"id":"{long}","model":"{long}","choices":[{{"message":{{"content":"Hi"}}}}]}}"#);
    let whole = json(Endpoint::Chat, body.as_bytes()).expect("the answer is one");
    assert_eq!((whole.response_id, whole.served_model), (None, None));
    let mut observer = Observer::new(Endpoint::Chat);
    assert_eq!(observer.event(None, body.as_bytes()), Frame::Meaningful);
    assert_eq!((observer.response_id(), observer.served_model()), (None, None));
}

const CHAT: &str = r#"
    |{"id":"c1","object":"chat.completion.chunk","model":"gpt-5.6","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"finish_reason":null}],"usage":null}
    |{"id":"c1","model":"gpt-5.6","choices":[{"index":0,"delta":{"content":"Hé\nllo"},"finish_reason":null}],"usage":null}
    |{"id":"c1","model":"gpt-5.6","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}
    |{"id":"c1","model":"gpt-5.6","choices":[],"usage":{"prompt_tokens":1117,"completion_tokens":46,"total_tokens":1163,"prompt_tokens_details":{"cached_tokens":1024,"cache_write_tokens":64},"completion_tokens_details":{"reasoning_tokens":20}}}
    |[DONE]
"#;

#[test]
fn a_chat_stream_is_read_from_role_to_marker() {
    let observer = check(Endpoint::Chat, CHAT, "lmlut", Some(Terminal::Complete));
    assert_eq!(tokens(observer.usage()), "1117 46 1024 64 20");
    assert_eq!(observer.response_id(), Some("c1"));
    assert_eq!(observer.served_model().unwrap().as_str(), "gpt-5.6");
    assert_eq!(observer.output_chars(), 6);
    assert!(!observer.is_empty());
}

/// PITFALLS E02, E14, E23
#[test]
fn a_chat_stream_may_close_after_its_finish_reason_but_not_before() {
    let lines: Vec<_> = CHAT.trim().lines().collect();
    check(Endpoint::Chat, &lines[..2].join("\n"), "lm", None);
    check(Endpoint::Chat, &lines[..3].join("\n"), "lml", Some(Terminal::Complete));
    let dressed = format!("{}\n|[DONE]", lines[..2].join("\n"));
    check(Endpoint::Chat, &dressed, "lmt", Some(Terminal::Unfinished));
}

#[test]
fn whatever_a_chat_delta_holds_besides_its_role_is_output() {
    let deltas = [
        (r#"{"role":"assistant"}"#, "l"),
        (r#"{"role":"assistant","content":null}"#, "l"),
        (r#"{"content":" "}"#, "m"),
        (r#"{"reasoning_content":"Hm"}"#, "m"),
        (r#"{"content":"","reasoning_details":[{"type":"reasoning.text","text":"Hm"}]}"#, "m"),
        (r#"{"refusal":"I"}"#, "m"),
        (r#"{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}"#, "m"),
        (r#"{"tool_calls":[{"index":0,"function":{"arguments":""}}]}"#, "l"),
        (r#"{"content":7}"#, "l"),
    ];
    for (delta, frame) in deltas {
        let stream = format!(r#"|{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#);
        check(Endpoint::Chat, &stream, frame, None);
    }
}

#[test]
fn odd_chat_events_pass_as_lifecycle() {
    // Azure begins with a chunk without choices, id and model; others ping, or send what is not JSON.
    let stream = r#"
        |{"id":"","model":"","object":"","choices":[],"prompt_filter_results":[{"prompt_index":0}]}
        |
        |ping
        |{"choices":null,"usage":null}
        |[]
        |{"id":7,"model":null,"choices":[{"delta":{"content":"a"}}],"usage":"none"}
    "#;
    let observer = check(Endpoint::Chat, stream, "lllllm", None);
    assert_eq!((observer.response_id(), observer.served_model()), (None, None));
    assert_eq!(tokens(observer.usage()), "- - - - -");
}

#[test]
fn finish_reasons_tell_how_a_chat_ended() {
    for (reason, end) in [
        ("stop", Terminal::Complete),
        ("tool_calls", Terminal::Complete),
        ("length", Terminal::Incomplete),
        ("content_filter", Terminal::Refused),
    ] {
        let stream = format!("|{{\"choices\":[{{\"delta\":{{}},\"finish_reason\":\"{reason}\"}}]}}\n|[DONE]");
        check(Endpoint::Chat, &stream, "lt", Some(end));
    }
}

/// Corpus E04 to E06, E15
#[test]
fn an_error_inside_a_stream_is_an_error_in_every_dialect() {
    for stream in [
        r#"|{"provider":"P","error":{"code":"server_error","message":"gone"},"choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}]}"#,
        r#"|{"choices":[],"error":{"code":502,"message":"limit reached (33/32)"}}"#,
        r#"|{"choices":[{"delta":{"content":""},"finish_reason":"error"}]}"#,
        r#"|{"choices":[{"delta":{"content":"Hel"},"finish_reason":null,"error":{"code":502,"message":"gone"}}]}"#,
        r#"error|{"error":{"message":"m","code":"500"}}"#,
    ] {
        check(Endpoint::Chat, stream, "e", None);
    }
    for stream in [
        r#"error|{"type":"error","sequence_number":2,"error":{"code":"context_length_exceeded","message":"m"}}"#,
        r#"|{"type":"error","code":"server_error","message":"m","param":null,"sequence_number":1}"#,
        r#"response.failed|{"type":"response.failed","response":{"status":"failed","error":{"code":"slow_down"}}}"#,
    ] {
        check(Endpoint::Responses, stream, "e", None);
    }
    let overloaded = r#"error|{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
    check(Endpoint::Messages, overloaded, "e", None);
    let Frame::Error(error) = Observer::new(Endpoint::Messages).event(Some("error"), &overloaded.as_bytes()[6..])
    else {
        panic!("no error")
    };
    assert_eq!((error.codes, error.message), (vec!["overloaded_error".to_owned()], "Overloaded".to_owned()));
}

/// Corpus C09, C25, E08, E09, E15, Q17: what a relay hands on of another dialect.
#[test]
fn an_error_in_words_that_clients_would_not_understand_is_told_apart() {
    for stream in [
        r#"|[{"error":{"code":400,"message":"m","status":"INVALID_ARGUMENT"}}]"#,
        r#"|{"object":"error","message":"m","type":"BadRequestError","param":null,"code":400}"#,
        r#"|{"code":"upstream_provider_rate_limit","message":"{\"error\":{\"message\":\"m\"}}"}"#,
        r#"|{"__type":"throttlingException","message":"m"}"#,
        r#"|{"throttlingException":{"message":"m"}}"#,
        r#"throttlingException|{"message":"m"}"#,
        r#"|{"base_resp":{"status_code":1008,"status_msg":"m"}}"#,
        r#"|{"detail":"m"}"#,
        r#"|{"code":"1","message":"m"}"#,
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Responses, Endpoint::Messages] {
            check(endpoint, stream, "f", None);
        }
    }
    // Chat's error object in the dialects whose clients go by types or names.
    for stream in [r#"|{"error":{"message":"m","code":"500"}}"#, r#"|{"type":"error","error":{"message":"m"}}"#] {
        check(Endpoint::Messages, stream, "f", None);
    }
    check(Endpoint::Responses, r#"|{"error":{"message":"m","code":"500"}}"#, "f", None);
    check(Endpoint::Responses, r#"error|{"error":{"message":"m","code":"500"}}"#, "f", None);
    for stream in [
        r#"|{"message":{"role":"assistant"}}"#,
        r#"|{"code":7}"#,
        r#"|[{"text":"m"}]"#,
        r#"|{"base_resp":{"status_code":0}}"#,
        r#"|{"code":0,"message":"success"}"#,
        r#"|{"code":"0","message":"success"}"#,
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Responses, Endpoint::Messages] {
            check(endpoint, stream, "l", None);
        }
    }
    let stray = |raw: &str| matches!(Observer::new(Endpoint::Chat).stray(raw.as_bytes()), Frame::Foreign(_));
    assert!(stray("[{\n  \"error\": {\n    \"code\": 503\n  }\n}\n]\n"));
    assert!(stray(r#"{"error":"an error was encountered while running the model"}"#));
    assert!(!stray(": a comment\n\n") && !stray("retry: 3000\n\n") && !stray("{\"done\":true}"));
}

/// An event that is named an error is one, whatever its data lacks; clients of Responses go by the type in it.
#[test]
fn an_event_that_is_named_an_error_is_one() {
    let now = waybill_schema::time::Time(0);
    let said = r#"{"message":"Rate limit reached, try again in 20s","code":null,"param":null}"#;
    for endpoint in [Endpoint::Chat, Endpoint::Responses] {
        let Frame::Foreign(error) = Observer::new(endpoint).event(Some("error"), said.as_bytes()) else {
            panic!("{endpoint:?}: it passes for something else")
        };
        let verdict = crate::classify::upstream_error(endpoint, &error, now);
        assert_eq!((verdict.class, verdict.retry_after_ms), (Class::RateLimited, Some(20_000)), "{endpoint:?}");
    }
    check(Endpoint::Messages, &format!("error|{said}"), "e", None);
    check(Endpoint::Responses, "error|upstream gone", "f", None);
    check(Endpoint::Responses, r#"error|{"type":"error","code":"server_error","message":"m"}"#, "e", None);
}

const RESPONSES: &str = r#"
    response.created|{"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response","created_at":1740000000,"status":"in_progress","model":"gpt-5.6","output":[],"usage":null}}
    response.in_progress|{"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1","status":"in_progress"}}
    response.output_item.added|{"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"msg_1","type":"message","status":"in_progress","role":"assistant","content":[]}}
    response.content_part.added|{"type":"response.content_part.added","sequence_number":3,"part":{"type":"output_text","text":"","annotations":[]}}
    response.output_text.delta|{"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hello","logprobs":[],"obfuscation":"xyz"}
    response.output_item.done|{"type":"response.output_item.done","sequence_number":5,"output_index":0,"item":{"id":"msg_1","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello"}]}}
    response.completed|{"type":"response.completed","sequence_number":6,"response":{"id":"resp_1","object":"response","status":"completed","model":"gpt-5.6","output":[],"error":null,"incomplete_details":null,"usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64,"cache_write_tokens":0},"output_tokens":5,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":105}}}
"#;

#[test]
fn a_responses_stream_is_read_from_created_to_completed() {
    let observer = check(Endpoint::Responses, RESPONSES, "llllmmt", Some(Terminal::Complete));
    assert_eq!(tokens(observer.usage()), "100 5 64 0 0");
    assert_eq!(observer.response_id(), Some("resp_1"));
    assert_eq!(observer.served_model().unwrap().as_str(), "gpt-5.6");
    assert_eq!((observer.sequence_number(), observer.output_chars()), (Some(6), 5));
}

/// PITFALLS E21
#[test]
fn a_responses_stream_without_its_last_event_is_cut_whatever_marker_it_has() {
    let lines: Vec<_> = RESPONSES.trim().lines().collect();
    let cut = lines[..5].join("\n");
    check(Endpoint::Responses, &cut, "llllm", None);
    check(Endpoint::Responses, &format!("{cut}\n|[DONE]"), "llllmt", Some(Terminal::Unfinished));
    check(Endpoint::Responses, &format!("{RESPONSES}\n|[DONE]"), "llllmmtl", Some(Terminal::Complete));
}

#[test]
fn responses_end_incomplete_or_refused_as_their_details_say() {
    let end = |details: &str| {
        let response = format!(r#"{{"id":"r","status":"incomplete","incomplete_details":{details}}}"#);
        format!(r#"response.incomplete|{{"type":"response.incomplete","response":{response}}}"#)
    };
    check(Endpoint::Responses, &end(r#"{"reason":"max_output_tokens"}"#), "t", Some(Terminal::Incomplete));
    check(Endpoint::Responses, &end(r#"{"reason":"content_filter"}"#), "t", Some(Terminal::Refused));
}

#[test]
fn an_item_without_deltas_is_output_and_an_empty_one_is_not() {
    let done = |item: &str| format!(r#"|{{"type":"response.output_item.done","item":{item}}}"#);
    let call = done(r#"{"type":"function_call","id":"fc_1","call_id":"call_1","name":"f","arguments":"{}"}"#);
    check(Endpoint::Responses, &call, "m", None);
    let empty = done(r#"{"type":"message","id":"msg_1","status":"completed","role":"assistant","content":[]}"#);
    check(Endpoint::Responses, &empty, "l", None);
}

const MESSAGES: &str = r#"
    message_start|{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"claude-opus-5","content":[],"stop_reason":null,"usage":{"input_tokens":8,"cache_creation_input_tokens":16,"cache_read_input_tokens":64,"output_tokens":1}}}
    content_block_start|{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}
    ping|{"type":"ping"}
    content_block_delta|{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}
    content_block_stop|{"type":"content_block_stop","index":0}
    message_delta|{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":12}}
    message_stop|{"type":"message_stop"}
"#;

#[test]
fn a_messages_stream_is_read_and_its_input_includes_the_cache() {
    let observer = check(Endpoint::Messages, MESSAGES, "lllmllt", Some(Terminal::Complete));
    assert_eq!(tokens(observer.usage()), "88 12 64 16 -");
    assert_eq!(observer.response_id(), Some("msg_1"));
    assert_eq!(observer.served_model().unwrap().as_str(), "claude-opus-5");
    assert_eq!(observer.output_chars(), 5);
}

#[test]
fn a_messages_stream_without_its_last_event_is_cut() {
    let lines: Vec<_> = MESSAGES.trim().lines().collect();
    check(Endpoint::Messages, &lines[..6].join("\n"), "lllmll", None);
    check(Endpoint::Messages, &format!("{}\n{}", lines[0], lines[6]), "lt", Some(Terminal::Unfinished));
}

#[test]
fn later_zeros_take_no_anthropic_usage_back() {
    let stream = r#"
        |{"type":"message_start","message":{"usage":{"input_tokens":0,"output_tokens":0}}}
        |{"type":"message_delta","delta":{},"usage":{"input_tokens":8,"cache_read_input_tokens":64,"output_tokens":12}}
        |{"type":"message_delta","delta":{},"usage":{"input_tokens":0,"output_tokens":0}}
    "#;
    assert_eq!(tokens(read(Endpoint::Messages, stream).0.usage()), "72 12 64 - -");
    let without = r#"|{"type":"message_start","message":{"usage":null}}"#;
    assert_eq!(tokens(read(Endpoint::Messages, without).0.usage()), "- - - - -");
}

#[test]
fn blocks_that_begin_with_content_are_output() {
    let start = |block: &str| format!(r#"|{{"type":"content_block_start","index":0,"content_block":{block}}}"#);
    check(Endpoint::Messages, &start(r#"{"type":"tool_use","id":"toolu_1","name":"f","input":{}}"#), "m", None);
    check(Endpoint::Messages, &start(r#"{"type":"redacted_thinking","data":"x"}"#), "m", None);
    check(Endpoint::Messages, &start(r#"{"type":"thinking","thinking":"","signature":""}"#), "l", None);
    let delta = r#"|{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":""}}"#;
    check(Endpoint::Messages, delta, "l", None);
}

#[test]
fn stop_reasons_tell_how_a_message_ended() {
    for (reason, end) in [
        ("end_turn", Terminal::Complete),
        ("tool_use", Terminal::Complete),
        ("pause_turn", Terminal::Complete),
        ("max_tokens", Terminal::Incomplete),
        ("model_context_window_exceeded", Terminal::Incomplete),
        ("refusal", Terminal::Refused),
    ] {
        let delta = format!(r#"|{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
        check(Endpoint::Messages, &format!("{delta}\n|{{\"type\":\"message_stop\"}}"), "lt", Some(end));
    }
}

/// PITFALLS D15; corpus E12, E13
#[test]
fn an_empty_stream_is_one_without_output_tokens_and_excuse() {
    let chat = |finish: &str, usage: &str| {
        let chunk = format!(r#"|{{"choices":[{{"delta":{{}},"finish_reason":{finish}}}],"usage":{usage}}}"#);
        read(Endpoint::Chat, &format!("{chunk}\n|[DONE]")).0.is_empty()
    };
    assert!(read(Endpoint::Chat, "|[DONE]").0.is_empty());
    assert!(chat(r#""stop""#, "null"));
    assert!(chat(r#""stop""#, r#"{"prompt_tokens":0,"completion_tokens":0}"#));
    assert!(!chat(r#""stop""#, r#"{"completion_tokens":3}"#));
    assert!(!chat(r#""length""#, "null"));
    assert!(!chat(r#""content_filter""#, "null"));
    let whole_at_once = r#"|{"type":"response.completed","response":{"status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"Hi"}]}]}}"#;
    assert!(!read(Endpoint::Responses, whole_at_once).0.is_empty());
}

#[test]
fn a_broken_stream_is_told_in_a_type_that_clients_retry() {
    let told =
        |endpoint, stream| String::from_utf8(read(endpoint, stream).0.broken_stream_event("cut \"off\"")).unwrap();
    assert_eq!(
        told(Endpoint::Chat, CHAT),
        "data: {\"error\":{\"code\":\"upstream_stream_interrupted\",\"message\":\"cut \\\"off\\\"\",\"param\":null,\"type\":\"server_error\"}}\n\n"
    );
    assert_eq!(
        told(Endpoint::Messages, MESSAGES),
        "event: error\ndata: {\"error\":{\"message\":\"cut \\\"off\\\"\",\"type\":\"api_error\"},\"type\":\"error\"}\n\n"
    );
    let lines: Vec<_> = RESPONSES.trim().lines().collect();
    let failed = told(Endpoint::Responses, &lines[..5].join("\n"));
    let data =
        failed.strip_prefix("event: response.failed\ndata: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!((&data["type"], &data["sequence_number"]), (&"response.failed".into(), &5.into()));
    let response = &data["response"];
    assert_eq!((&response["id"], &response["model"]), (&"resp_1".into(), &"gpt-5.6".into()));
    assert_eq!((&response["status"], &response["created_at"]), (&"failed".into(), &1_740_000_000.into()));
    assert_eq!(response["error"], serde_json::json!({ "code": "server_error", "message": "cut \"off\"" }));
    // CLIENTS.md, rule 13: official models fail without these.
    for field in ["completed_at", "presence_penalty", "frequency_penalty", "top_logprobs", "max_tool_calls", "tools"] {
        assert!(response.get(field).is_some(), "{field}");
    }
}

/// What a JSON answer says in one line: end, emptiness, tokens, model, id; or the fault.
#[track_caller]
fn check_json(endpoint: Endpoint, body: &str, expected: &str) {
    let seen = match json(endpoint, body.as_bytes()) {
        Ok(whole) => {
            let empty = if whole.empty { "empty" } else { "full" };
            let model = whole.served_model.as_ref().map_or("-", |model| model.as_str());
            let id = whole.response_id.as_deref().unwrap_or("-");
            format!("{:?} {empty} [{}] {model} {id}", whole.terminal, tokens(whole.usage))
        }
        Err(Fault::Error(error)) => format!("error {} {}", error.codes.join(","), error.message),
        Err(fault) => fault.to_string(),
    };
    assert_eq!(seen, expected);
}

#[test]
fn a_chat_answer_is_read_whole() {
    let answer = |message: &str, finish: &str, usage: &str| {
        format!(
            r#"{{"id":"c1","object":"chat.completion","model":"m","choices":[{{"index":0,"message":{message},"finish_reason":"{finish}"}}],"usage":{usage}}}"#
        )
    };
    let none = r#"{"prompt_tokens":9,"completion_tokens":0}"#;
    let check =
        |message, finish, usage, expected| check_json(Endpoint::Chat, &answer(message, finish, usage), expected);
    check(r#"{"role":"assistant","content":"Hi"}"#, "stop", "null", "Complete full [- - - - -] m c1");
    check(r#"{"role":"assistant","content":"Hi"}"#, "length", none, "Incomplete full [9 0 - - -] m c1");
    check(r#"{"role":"assistant","content":"","refusal":null}"#, "stop", none, "Complete empty [9 0 - - -] m c1");
    check(r#"{"content":""}"#, "stop", r#"{"completion_tokens":3}"#, "Complete full [- 3 - - -] m c1");
    check(r#"{"content":"Hi"}"#, "error", none, "error  ");
    check(r#"{"content":""}"#, "length", none, "Incomplete full [9 0 - - -] m c1");
    check(r#"{"content":null}"#, "content_filter", "null", "Refused full [- - - - -] m c1");
    check(r#"{"content":"","reasoning_content":"Hm"}"#, "stop", none, "Complete full [9 0 - - -] m c1");
    let call =
        r#"{"content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]}"#;
    check(call, "tool_calls", none, "Complete full [9 0 - - -] m c1");
    let bare = r#"{"id":"c1","object":"chat.completion","usage":{"prompt_tokens":0,"completion_tokens":0}}"#;
    check_json(Endpoint::Chat, bare, "Complete empty [0 0 - - -] - c1");
}

#[test]
fn vendors_cache_fields_are_read() {
    let usage = |usage: &str| format!(r#"{{"choices":[{{"message":{{"content":"x"}}}}],"usage":{usage}}}"#);
    let check = |object, expected: &str| {
        check_json(Endpoint::Chat, &usage(object), &format!("Complete full [{expected}] - -"));
    };
    check(
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_cache_hit_tokens":4,"prompt_cache_miss_tokens":5}"#,
        "9 2 4 - -",
    );
    check(r#"{"prompt_tokens":9,"completion_tokens":2,"cached_tokens":4}"#, "9 2 4 - -");
    check(
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,"cache_creation_input_tokens":7}}"#,
        "9 2 0 7 -",
    );
    let both =
        r#"{"prompt_tokens":9,"completion_tokens":2,"input_tokens":0,"output_tokens":0,"input_tokens_details":null}"#;
    check(both, "9 2 - - -");
    check(r#"{"prompt_tokens":9.0,"completion_tokens":-1}"#, "9 - - - -");
    // PITFALLS F08: a zero that is there hides no count.
    check(
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0},"prompt_cache_hit_tokens":4}"#,
        "9 2 4 - -",
    );
    check(
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_cache_hit_tokens":0,"prompt_tokens_details":{"cached_tokens":4}}"#,
        "9 2 4 - -",
    );
    check(
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"input_tokens_details":{"cached_tokens":4,"cache_creation_input_tokens":3},"completion_tokens_details":{"reasoning_tokens":0},"output_tokens_details":{"reasoning_tokens":1}}"#,
        "9 2 4 3 1",
    );
}

#[test]
fn answers_of_the_other_endpoints_are_read_whole() {
    let response = r#"{"id":"resp_1","object":"response","status":"completed","error":null,"model":"m","output":[{"type":"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"Hi"}]}],"usage":{"input_tokens":4,"output_tokens":2}}"#;
    check_json(Endpoint::Responses, response, "Complete full [4 2 - - -] m resp_1");
    let empty = r#"{"id":"resp_1","object":"response","status":"completed","output":[{"type":"message","id":"msg_1","role":"assistant","status":"completed","content":[]}]}"#;
    check_json(Endpoint::Responses, empty, "Complete empty [- - - - -] - resp_1");
    let queued = r#"{"id":"resp_1","object":"response","status":"queued","output":[]}"#;
    check_json(Endpoint::Responses, queued, "Pending full [- - - - -] - resp_1");
    let message = r#"{"id":"msg_1","type":"message","model":"m","content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn","usage":{"input_tokens":8,"cache_read_input_tokens":64,"output_tokens":2}}"#;
    check_json(Endpoint::Messages, message, "Complete full [72 2 64 - -] m msg_1");
    let refusal = r#"{"id":"msg_1","type":"message","content":[],"stop_reason":"refusal"}"#;
    check_json(Endpoint::Messages, refusal, "Refused full [- - - - -] - msg_1");
    let short = r#"{"id":"msg_1","type":"message","content":[],"stop_reason":"end_turn","usage":{"output_tokens":3}}"#;
    check_json(Endpoint::Messages, short, "Complete full [- 3 - - -] - msg_1");
    check_json(Endpoint::CountTokens, r#"{"input_tokens":14}"#, "Complete full [- - - - -] - -");
    let vector =
        r#"{"object":"list","data":[{"embedding":[0.5]}],"model":"m","usage":{"prompt_tokens":5,"total_tokens":5}}"#;
    check_json(Endpoint::Embeddings, vector, "Complete full [5 - - - -] m -");
    check_json(Endpoint::Embeddings, r#"{"data":[ ],"model":"m"}"#, "Complete empty [- - - - -] m -");
}

/// Corpus D18, Q17
#[test]
fn a_200_that_is_no_answer_is_a_fault() {
    let endpoints =
        [Endpoint::Chat, Endpoint::Responses, Endpoint::Messages, Endpoint::CountTokens, Endpoint::Embeddings];
    for endpoint in endpoints {
        check_json(endpoint, r#"{"error":{"code":502,"message":"m","type":"t"}}"#, "error t m");
        check_json(endpoint, r#"{"error":"m"}"#, "error  m");
        check_json(endpoint, " <!DOCTYPE html><html></html>", "the answer is a web page");
        for foreign in ["", "null", "[]", "[{}]", "{}", "data: {}\n\n", r#"{"ok":true}"#, "{\"choices\":[{"] {
            check_json(endpoint, foreign, "the answer is not of the endpoint's dialect");
        }
    }
    let broke = r#"{"base_resp":{"status_code":1008,"status_msg":"insufficient balance"}}"#;
    check_json(Endpoint::Chat, broke, "error base_resp:1008 insufficient balance");
    let fine = r#"{"choices":[{"message":{"content":"x"}}],"base_resp":{"status_code":0,"status_msg":""}}"#;
    check_json(Endpoint::Chat, fine, "Complete full [- - - - -] - -");
    // PITFALLS D15, E08: part of an answer, and what became of the rest.
    let broken = r#"{"object":"chat.completion","choices":[{"message":{"content":"Hel"},"finish_reason":"error","error":{"code":"c","message":"m"}}]}"#;
    check_json(Endpoint::Chat, broken, "error c m");
    check_json(Endpoint::Chat, &broken.replace(r#""finish_reason":"error","#, ""), "error c m");
    let failed = r#"{"object":"response","status":"failed","error":{"code":"server_error","message":"m"},"output":[]}"#;
    check_json(Endpoint::Responses, failed, "error server_error m");
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config { failure_persistence: None, ..Default::default() })]

    #[test]
    fn nothing_that_an_upstream_sends_makes_a_reader_panic(
        parts in proptest::collection::vec(
            proptest::sample::select(vec![
                "{", "}", "[", "]", ",", ":", "\"", "\\", "null", "1", "-1e9", "\"error\":", "\"message\":", "\"choices\":",
                "\"delta\":", "\"content\":", "\"usage\":", "\"prompt_tokens\":", "\"type\":", "\"message_start\"", "\"é\"",
                "\"code\":", "\"metadata\":{\"raw\":", "try again in ", "1m2.5s", "retry after ", "<html>", "[DONE]",
            ]),
            0..24,
        ),
    ) {
        let text = parts.concat();
        for endpoint in [Endpoint::Chat, Endpoint::Responses, Endpoint::Messages, Endpoint::CountTokens] {
            let mut observer = Observer::new(endpoint);
            observer.event(None, text.as_bytes());
            let _ = json(endpoint, text.as_bytes());
            let header = |_: &str| Some(text.as_str());
            crate::classify::head(endpoint, 429, &header, text.as_bytes(), waybill_schema::time::Time(0));
        }
    }
}
