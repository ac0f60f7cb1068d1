//! What an upstream says inside a 200 and is no plain answer: errors in anybody's words, refusals without a word, answers
//! that look like failures. The upstreams' logs count the calls, and the gateway's log tells what they were taken for.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use waybill_events::log::Seq;
use waybill_schema::event::Event;
use waybill_simulator::{Action, Step};

use crate::client::Answer;
use crate::corpus::{SETTINGS, calls, effect};
use crate::dialect::{CHAT, DIALECTS, Dialect, MESSAGES, RESPONSES};
use crate::fallbacks::{CHAINS, TEMPLATED, counts, served, since, under};
use crate::follow::ready_when;
use crate::log::facts_after;
use crate::world::{KEY, Plan, World};

/// What a pool was asked and did, as the log tells: `class effect` of its first send.
fn recorded(world: &World, answer: &Answer) -> String {
    let request = answer.header("x-waybill-request-id").expect("every reply names its request");
    let facts = facts_after(&world.data(), Seq::START);
    let mut attempts = facts.into_iter().filter_map(|fact| match fact.event {
        Event::Attempt(attempt) => Some(*attempt),
        _ => None,
    });
    let first = attempts.find(|attempt| attempt.request.as_str() == request).expect("a send has its end");
    format!("{:?} {}", first.class, effect(&first))
}

/// A stream of just these bytes.
pub(crate) fn events(text: &str) -> Action {
    let headers = BTreeMap::from([("content-type".to_owned(), "text/event-stream".to_owned())]);
    Action::Status { status: 200, headers, body: json!(text) }
}

fn object(body: Value) -> Action {
    Action::Status { status: 200, headers: BTreeMap::new(), body }
}

/// Section 10 of the page, after output: nobody else is asked, whatever chains there are; the client is told in its own
/// dialect, by the upstream's event where it is one of it, and the failure counts as what it is.
#[tokio::test]
async fn a_failure_after_output_leads_nowhere_and_is_told_in_the_dialect() {
    let after = |body: Value| Action::ErrorEventAfter { events: 5, body };
    let flat = json!({"code": "upstream_provider_rate_limit",
        "message": r#"{"error":{"type":"server_error","message":"Endpoint is unavailable."}}"#});
    let overloaded =
        json!({"type": "error", "error": {"details": null, "type": "overloaded_error", "message": "Overloaded"}});
    let blocked = json!({"type": "error", "error": {"details": null, "type": "invalid_request_error",
        "message": "Output blocked by content filtering policy"}});
    let slow = json!({"type": "response.failed", "response": {"status": "failed", "error": {"code": "slow_down"}}});
    let gone = json!({"provider": "P", "error": {"code": "server_error", "message": "Provider disconnected unexpectedly"},
        "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]});
    let throttled = json!({"__type": "throttlingException", "message": "Too many requests"});
    let dressed = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hel\"}}]}\n\ndata: [DONE]\n\n";
    let table = [
        ("E01", MESSAGES, after(overloaded), "Upstream5xx count", "overloaded_error"),
        ("E02", RESPONSES, after(slow), "RateLimited count", r#""code":"slow_down""#),
        ("E04", CHAT, after(gone), "Upstream5xx count", r#""finish_reason":"error""#),
        ("E08", CHAT, after(throttled), "RateLimited count", r#"{"error":{"code":"upstream_stream_interrupted""#),
        ("E09", CHAT, after(flat), "Upstream5xx count", r#""message":"Endpoint is unavailable.""#),
        ("E10", CHAT, Action::CutAfterEvents { events: 5 }, "Interrupted count", "upstream_stream_interrupted"),
        ("E14", CHAT, events(dressed), "Interrupted count", "upstream_stream_interrupted"),
        (
            "E15",
            RESPONSES,
            after(json!({"error": {"message": "no", "code": "500"}})),
            "Upstream5xx count",
            "response.failed",
        ),
        ("P05", MESSAGES, after(blocked), "ContentPolicy none", "Output blocked by content filtering policy"),
    ];
    let mut world = World::start(under(CHAINS).settings(SETTINGS)).await;
    let client = world.client_with(TEMPLATED);
    let mut answers = Vec::new();
    for (id, dialect, does, said, shown) in table {
        world.upstream("a").push(does);
        let answer = client.post(dialect.path, &[("x-session-id", id)], &dialect.body("Hello", true)).await;
        assert!(answer.whole && answer.status == 200, "{id}: {}", answer.status);
        assert!(answer.text().contains(shown), "{id}: {}", answer.text());
        assert!(!answer.text().contains(dialect.last), "{id} is shown as a whole answer: {}", answer.text());
        assert_eq!(calls(&world)[id], [1, 0, 0, 0, 0], "{id}");
        answers.push((id, answer, said));
    }
    world.stop().await;
    for (id, answer, said) in answers {
        assert_eq!(recorded(&world, &answer), said, "{id}");
    }
}

/// C07, E12, E13: what looks like a failure and is an answer comes back unchanged after one call.
#[tokio::test]
async fn an_answer_that_looks_like_a_failure_is_one() {
    let message = |stop: &str, output: u64| {
        json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": stop,
               "stop_sequence": null, "usage": {"input_tokens": 9, "output_tokens": output}})
    };
    let message_events = |stop: &str, output: u64| {
        let mut begun = message(stop, 0);
        begun["stop_reason"] = Value::Null;
        let start = json!({"type": "message_start", "message": begun});
        let delta =
            json!({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": output}});
        format!(
            "event: message_start\ndata: {start}\n\nevent: message_delta\ndata: {delta}\n\n\
             event: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\n"
        )
    };
    let choice =
        |part: &str| json!({"index": 0, part: {"role": "assistant", "content": ""}, "finish_reason": "length"});
    let chat = |part: &str| {
        json!({"id": "c", "model": "m", "choices": [choice(part)],
            "usage": {"prompt_tokens": 9, "completion_tokens": 64, "total_tokens": 73}})
    };
    let full = "model_context_window_exceeded";
    let table = [
        ("C07", MESSAGES, false, object(message(full, 3)), "Incomplete recover"),
        ("C07s", MESSAGES, true, events(&message_events(full, 3)), "Incomplete recover"),
        ("E12", MESSAGES, false, object(message("end_turn", 3)), "Success recover"),
        ("E12s", MESSAGES, true, events(&message_events("end_turn", 3)), "Success recover"),
        ("E13", CHAT, false, object(chat("message")), "Incomplete recover"),
        ("E13s", CHAT, true, events(&format!("data: {}\n\ndata: [DONE]\n\n", chat("delta"))), "Incomplete recover"),
    ];
    let mut world = World::start(under(CHAINS).settings(SETTINGS)).await;
    let client = world.client_with(TEMPLATED);
    let mut answers = Vec::new();
    for (id, dialect, stream, does, said) in table {
        let Action::Status { body, .. } = &does else { unreachable!("every line is an answer") };
        let wrote = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
        world.upstream("a").push(does);
        let answer = client.post(dialect.path, &[("x-session-id", id)], &dialect.body("Hello", stream)).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, wrote), "{id}");
        assert_eq!(calls(&world)[id], [1, 0, 0, 0, 0], "{id}");
        answers.push((id, answer, said));
    }
    world.stop().await;
    for (id, answer, said) in answers {
        assert_eq!(recorded(&world, &answer), said, "{id}");
    }
}

/// P06, P17, PITFALLS D11: content that a model refuses without a word is asked of who stands in for that, where there is
/// anybody; with a word, or with nobody, the refusal comes back as it is.
#[tokio::test]
async fn a_silent_refusal_leads_to_the_chain_for_refused_content() {
    let message = |text: &str| {
        json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "refusal",
            "content": if text.is_empty() { json!([]) } else { json!([{"type": "text", "text": text}]) },
            "stop_sequence": null, "usage": {"input_tokens": 9, "output_tokens": 2}})
    };
    let chat = |part: &str, text: &str| {
        json!({"id": "c", "model": "m", "choices": [{"index": 0, part: {"role": "assistant", "content": text},
            "finish_reason": "content_filter"}]})
    };
    let streamed = |text: &str| format!("data: {}\n\ndata: [DONE]\n\n", chat("delta", text));
    let refused = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"refusal\"}}\n\n\
                   event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let response = |text: &str| {
        let output = if text.is_empty() {
            json!([])
        } else {
            json!([{"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": text}]}])
        };
        json!({"id": "resp_1", "object": "response", "status": "incomplete", "model": "m", "output": output,
            "incomplete_details": {"reason": "content_filter"}})
    };
    let incomplete = |text: &str| {
        let event = json!({"type": "response.incomplete", "sequence_number": 0, "response": response(text)});
        format!("event: response.incomplete\ndata: {event}\n\n")
    };
    let table = [
        ("P06r", RESPONSES, false, object(response("")), true),
        ("P06rs", RESPONSES, true, events(&incomplete("")), true),
        ("P06rw", RESPONSES, true, events(&incomplete("I would")), false),
        ("P06", MESSAGES, false, object(message("")), true),
        ("P06s", MESSAGES, true, events(refused), true),
        ("P06w", MESSAGES, false, object(message("I would rather not")), false),
        ("P17", CHAT, false, object(chat("message", "")), true),
        ("P17s", CHAT, true, events(&streamed("")), true),
        ("P17w", CHAT, true, events(&streamed("I would")), false),
    ];
    let mut world = World::start(under(CHAINS).settings(SETTINGS)).await;
    let mut answers = Vec::new();
    for (id, dialect, stream, does, is_silent) in table {
        let Action::Status { body, .. } = &does else { unreachable!("every line is an answer") };
        let wrote = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
        for (key, chained) in [(TEMPLATED, true), (KEY, false)] {
            let session = format!("{id}-{chained}");
            world.upstream("a").push(does.clone());
            let client = world.client_with(key);
            let answer = client.post(dialect.path, &[("x-session-id", &session)], &dialect.body("Hello", stream)).await;
            assert_eq!(answer.status, 200, "{session}");
            let leads = is_silent && chained;
            assert_eq!(answer.text() == wrote, !leads, "{session}: {}", answer.text());
            assert_eq!(calls(&world)[&session], [1, 0, 0, 0, usize::from(leads)], "{session}");
            answers.push((session, answer, if leads { "ContentPolicy none" } else { "ContentPolicy recover" }));
        }
    }
    world.stop().await;
    for (session, answer, said) in answers {
        assert_eq!(recorded(&world, &answer), said, "{session}");
    }
}

/// P06r, S3.9, S3.15: a refusal of which nobody made more is the answer: it comes as it came, is owned, places its session
/// and can be gone on from, whether the bounds allow no other send, nobody is there, or who stands in fails.
#[tokio::test]
async fn a_silent_refusal_is_the_answer_where_nobody_has_a_better_one() {
    let once = "retry: { backoff_ms: 1, sends_max: 1 }\n";
    let calm = "retry: { backoff_ms: 1, max_attempts: 2 }\nhealth: { enabled: false }\n";
    let at_any_cost = "retry: { backoff_ms: 1, all_cooling: best_effort }\n";
    // The settings, whether who stands in is disabled, and how often it is called, in vain.
    let table = [
        ("no further send", once, false, 0),
        ("nobody there", calm, true, 0),
        ("nobody there, at any cost", at_any_cost, true, 0),
        ("a failure", calm, false, 2),
    ];
    for (why, settings, disabled, in_vain) in table {
        let mut world = World::start(under(CHAINS).settings(settings)).await;
        if disabled {
            let text = std::fs::read_to_string(world.config()).expect("the configuration can be read");
            let text = text.replace("{ id: mild, ", "{ id: mild, status: disabled, ");
            std::fs::write(world.config(), text).expect("the configuration can be written");
            ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
        }
        let client = world.client_with(TEMPLATED);
        for stream in [false, true] {
            let (session, id) = (format!("s-{stream}"), format!("resp_{stream}"));
            let refused = json!({"id": id, "object": "response", "status": "incomplete", "model": "m", "output": [],
                "incomplete_details": {"reason": "content_filter"}});
            let event = json!({"type": "response.incomplete", "sequence_number": 0, "response": refused});
            let does = if stream {
                events(&format!("event: response.incomplete\ndata: {event}\n\n"))
            } else {
                object(refused)
            };
            let Action::Status { body, .. } = &does else { unreachable!("it is an answer") };
            let wrote = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
            world.upstream("a").push(does);
            world.upstream("mild").push(Step::new([Action::status(500)]).times(in_vain));
            let before = counts(&world);
            let headers = [("x-session-id", &session[..])];
            let answer = client.post(RESPONSES.path, &headers, &RESPONSES.body("Hello", stream)).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (200, wrote), "{why}");
            assert_eq!(since(&world, before), [1, 0, 0, 0, in_vain as usize], "{why}");
            assert_eq!(served(&answer), format!("a/gpt {} {}", in_vain > 0, 1 + in_vain), "{why}");
            let unsaid = ["x-waybill-owned", "x-should-retry", "retry-after"].map(|name| answer.header(name));
            assert_eq!(unsaid, [None; 3], "{why}");

            let before = counts(&world);
            world
                .upstream("a")
                .push(object(json!({"id": format!("{id}_2"), "object": "response", "status": "completed",
                "model": "m", "output": [{"type": "message", "content": [{"type": "output_text", "text": "Yes."}]}]})));
            let more = json!({"model": "gpt", "input": "And?", "previous_response_id": id});
            assert_eq!(served(&client.post(RESPONSES.path, &[], &more).await), "a/gpt false 1", "{why}");
            assert_eq!(
                served(&client.post(RESPONSES.path, &headers, &RESPONSES.body("Now?", false)).await),
                "a/gpt false 1"
            );
            assert_eq!(since(&world, before), [2, 0, 0, 0, 0], "{why}");
        }
        world.stop().await;
        let requests = "select signal, outcome, error_class, status, count(*) from usage_events group by 1, 2, 3, 4
                        order by 1, 3";
        let expected = [
            "body:previous_response_id|success|-|200|2",
            "header:x-session-id|success|-|200|2",
            "header:x-session-id|success|content_policy|200|2",
        ];
        assert_eq!(world.table(requests), expected, "{why}");
        let placed = "select reason, class, count(*) from usage_attempts where deployment = 'a/gpt' group by 1, 2
                      order by 1";
        let expected = ["affinity|success|2", "draw|content_policy|2", "owner|success|2"];
        assert_eq!(world.table(placed), expected, "{why}");
    }
}

/// Point 3 of the page, PITFALLS B09, E06: in whatever words a stream begins with an error, it is taken for what it is; a
/// client is shown those that are of its dialect, and told all others in its own: of Responses as the stream that it is, else
/// with the status that the error would have had, and as a body.
#[tokio::test]
async fn an_error_in_any_dialects_words_is_understood_in_a_stream() {
    const WORDS: &str = "prompt is too long: 214564 tokens > 200000 maximum";
    let error = json!({"type": "invalid_request_error", "message": WORDS});
    let anthropic = json!({"type": "error", "error": error});
    let google = json!([{"error": {"code": 400, "message": WORDS, "status": "INVALID_ARGUMENT"}}]);
    let flat = json!({"object": "error", "message": WORDS, "type": "BadRequestError", "param": null, "code": 400});
    let failed = json!({"type": "response.failed", "response": {"status": "failed", "error": error}});
    let unnamed = |body: &Value| format!("data: {body}\n\n");
    let named = |name: &str, body: &Value| format!("event: {name}\ndata: {body}\n\n");
    let openai = unnamed(&json!({"error": error}));
    let forms: [(String, &[Dialect]); 7] = [
        (openai, &[CHAT]),
        (named("error", &anthropic), &[CHAT, RESPONSES, MESSAGES]),
        (named("response.failed", &failed), &[RESPONSES]),
        (unnamed(&google), &[]),
        (serde_json::to_string_pretty(&google).expect("JSON can be written"), &[]),
        (unnamed(&flat), &[]),
        (named("validationException", &json!({"message": WORDS})), &[]),
    ];
    let world = World::start(under(CHAINS).settings(SETTINGS)).await;
    for (at, (said, natives)) in forms.into_iter().enumerate() {
        for dialect in DIALECTS {
            for (key, chained) in [(TEMPLATED, true), (KEY, false)] {
                let session = format!("{at} {} {chained}", dialect.path);
                world.upstream("a").push(events(&said));
                let client = world.client_with(key);
                let body = dialect.body("Hello", true);
                let answer = client.post(dialect.path, &[("x-session-id", &session)], &body).await;
                assert_eq!(calls(&world)[&session], [1, 0, 0, usize::from(chained), 0], "{session}: {said}");
                if chained {
                    assert!(answer.text().contains(dialect.last), "{session}: {}", answer.text());
                } else if natives.contains(&dialect) && dialect == RESPONSES {
                    assert_eq!((answer.status.as_u16(), answer.text()), (200, said.clone()), "{session}");
                } else if natives.contains(&dialect) {
                    let (_, data) = said.trim_end().split_once("data: ").expect("it is one event");
                    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (400, data), "{session}");
                    assert_eq!(answer.header("content-type"), Some("application/json"), "{session}");
                } else {
                    let told = answer.json();
                    assert_eq!(
                        (answer.status.as_u16(), &told["error"]["code"]),
                        (400, &json!("context_length_exceeded"))
                    );
                    assert!(told["error"]["message"].as_str().is_some_and(|text| text.contains(WORDS)), "{told}");
                    assert_eq!(told["type"] == "error", dialect.is_anthropic(), "{told}");
                }
            }
        }
    }
}

/// B07: a response that its upstream gives no id is given out as it is, and nobody comes to own it: nothing is made of an
/// empty id, which many could have.
#[tokio::test]
async fn a_response_without_an_id_is_owned_by_nobody() {
    let mut world = World::start(Plan::of(&["a"])).await;
    let client = world.client();
    for stream in [false, true] {
        let body = RESPONSES.body("Hello", stream);
        let named = client.post(RESPONSES.path, &[], &body).await.text();
        let id = named.split('"').find(|text| text.starts_with("resp_")).expect("the upstream names its response");
        for nothing in ["null", "\"\""] {
            let said = named.replace(&format!("\"{id}\""), nothing);
            let does = if stream { events(&said) } else { object(said.clone().into()) };
            world.upstreams[0].push(does);
            let answer = client.post(RESPONSES.path, &[], &body).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (200, said));
        }
    }
    let mut on = RESPONSES.body("And?", false);
    on["previous_response_id"] = json!("");
    let refused = client.post(RESPONSES.path, &[], &on).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (400, &json!("previous_response_not_found"))
    );
    assert_eq!(world.calls().len(), 6);
    world.stop().await;
    assert_eq!(world.table("select outcome, count(*) from usage_events group by 1"), ["refused|1", "success|6"]);
    assert_eq!(world.table("select count(distinct response) from response_owners"), ["2"], "those that have an id");
}

/// PITFALLS E06: a stream that has begun and says nothing before its error is told as an error, not as a beginning, with the
/// signals that the same error has under its status. Anthropic's list of errors gives an overload 529.
#[tokio::test]
async fn a_beginning_without_output_is_no_answer() {
    let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
    let chat =
        json!({"error": {"message": "Rate limit reached. Please try again in 7s.", "code": "rate_limit_exceeded"}});
    let failed = json!({"type": "response.failed", "response": {"status": "failed", "error": chat["error"]}});
    let table = [
        (MESSAGES, error, "529 - false"),
        (CHAT, chat, "429 7 false"),
        // Codex reads `response.failed` and no status.
        (RESPONSES, failed, "200 - false"),
    ];
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let world = World::start(under("fallbacks: []").settings(settings)).await;
    for (dialect, body, expected) in table {
        for name in ["a", "b"] {
            world.upstream(name).push(Action::ErrorEventAfter { events: 1, body: body.clone() });
        }
        let answer = world.client().post(dialect.path, &[("x-session-id", "s")], &dialect.body("Hello", true)).await;
        let header = |name: &str| answer.header(name).unwrap_or("-").to_owned();
        let told = format!("{} {} {}", answer.status.as_u16(), header("retry-after"), header("x-should-retry"));
        assert_eq!(told, expected, "{}: {}", dialect.path, answer.text());
        if dialect == RESPONSES {
            assert!(answer.text().contains("response.created") && answer.text().contains(&body.to_string()));
        } else {
            assert_eq!(answer.json(), body, "{}", dialect.path);
        }
    }
}

/// P06, S3.18: where the kind is disabled for a model, a silent refusal comes back as it is, though a chain of its pattern
/// would lead on.
#[tokio::test]
async fn a_silent_refusal_comes_back_where_its_kind_is_disabled() {
    let mut plan = under("content_policy_fallbacks: [{ 'open-*': [mild] }, { open-1: [] }]").settings(SETTINGS);
    plan.rows.routes.push("{ model: 'open-*', members: [{ channel: a, group: main }] }".to_owned());
    let world = World::start(plan).await;
    let refusal = json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "refusal",
        "content": [], "stop_sequence": null, "usage": {"input_tokens": 9, "output_tokens": 2}});
    for (model, leads) in [("open-1", false), ("open-2", true)] {
        world.upstream("a").push(object(refusal.clone()));
        let mut body = MESSAGES.body("Hello", false);
        body["model"] = json!(model);
        let client = world.client_with(TEMPLATED);
        let answer = client.post(MESSAGES.path, &[("x-session-id", model)], &body).await;
        assert_eq!((answer.status.as_u16(), answer.json() == refusal), (200, !leads), "{model}: {}", answer.text());
        assert_eq!(calls(&world)[model], [1, 0, 0, 0, usize::from(leads)], "{model}");
    }
}

/// P13, P14: Gemini's own dialect is spoken by no endpoint here. In a chat its refusal is no answer and no word of its
/// dialect: a broken upstream, which is tried again, then elsewhere, then by the general chain, and is no refused content.
#[tokio::test]
async fn a_refusal_in_geminis_own_dialect_is_no_answer() {
    let blocked = json!({"promptFeedback": {"blockReason": "SAFETY"}});
    let safety = json!({"candidates": [{"finishReason": "SAFETY", "safetyRatings": [
        {"category": "HARM_CATEGORY_SEXUALLY_EXPLICIT", "probability": "HIGH", "blocked": true}]}]});
    let table = [
        ("P13", false, object(blocked.clone()), "Malformed count"),
        ("P13s", true, events(&format!("data: {blocked}\n\n")), "Interrupted count"),
        ("P14", false, object(safety.clone()), "Malformed count"),
        ("P14s", true, events(&format!("data: {safety}\n\n")), "Interrupted count"),
    ];
    let mut world = World::start(under(CHAINS).settings(SETTINGS)).await;
    let mut answers = Vec::new();
    for (id, stream, does, said) in table {
        for (key, chained) in [(TEMPLATED, true), (KEY, false)] {
            let session = format!("{id}-{chained}");
            for name in ["a", "b"] {
                world.upstream(name).push(Step::new([does.clone()]).times(2));
            }
            let client = world.client_with(key);
            let answer = client.post(CHAT.path, &[("x-session-id", &session)], &CHAT.body("Hello", stream)).await;
            assert_eq!(answer.status, if chained { 200 } else { 502 }, "{session}: {}", answer.text());
            assert_eq!(calls(&world)[&session], [2, 2, usize::from(chained), 0, 0], "{session}");
            answers.push((session, answer, said));
        }
    }
    world.stop().await;
    for (session, answer, said) in answers {
        assert_eq!(recorded(&world, &answer), said, "{session}");
    }
}
