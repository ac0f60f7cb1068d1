//! What an answer says to a client, read from its bytes by this file alone: the text, and how it came to its end.

use serde_json::Value;

use crate::client::Answer;

/// The three dialects of conversations: their path, and the field that holds the prompt.
pub(crate) const DIALECTS: [(&str, &str); 3] =
    [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")];

/// How an answer ended, as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As the protocol says that a complete answer ends.
    Complete,
    /// With an error in the protocol.
    Error,
    /// With a broken connection.
    Broken,
    /// As if it were complete, without the protocol's last word: what no client may ever see.
    Short,
}

/// An answer as its client understands it.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) ending: Ending,
}

impl Said {
    /// Understands an answer of any dialect, JSON or SSE.
    pub(crate) fn of(answer: &Answer) -> Self {
        let streams = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        let body = answer.text();
        let (text, complete, error) = if streams { stream(&body) } else { whole(&body) };
        let ending = match (answer.whole, complete, error) {
            (_, true, false) => Ending::Complete,
            (_, false, true) => Ending::Error,
            (false, false, false) => Ending::Broken,
            (true, false, false) => Ending::Short,
            (_, true, true) => panic!("an answer is complete and an error: {body}"),
        };
        Self { text, ending }
    }
}

fn whole(body: &str) -> (String, bool, bool) {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let places = ["/choices/0/message/content", "/output/0/content/0/text", "/content/0/text"];
    let text = places.iter().find_map(|place| body.pointer(place)?.as_str());
    let error = body.get("error").is_some_and(|error| !error.is_null());
    (text.unwrap_or_default().to_owned(), text.is_some(), error)
}

fn stream(body: &str) -> (String, bool, bool) {
    let (mut text, mut complete, mut error) = (String::new(), false, false);
    for data in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
        assert!(!complete && !error, "an event follows the last one: {data}");
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        let kind = event["type"].as_str().unwrap_or_default();
        let delta = match kind {
            "response.output_text.delta" => event["delta"].as_str(),
            "content_block_delta" => event.pointer("/delta/text").and_then(Value::as_str),
            _ => event.pointer("/choices/0/delta/content").and_then(Value::as_str),
        };
        text.push_str(delta.unwrap_or_default());
        complete = data == "[DONE]" || ["response.completed", "message_stop"].contains(&kind);
        error = ["error", "response.failed"].contains(&kind) || event.get("error").is_some_and(|e| !e.is_null());
    }
    (text, complete, error)
}
