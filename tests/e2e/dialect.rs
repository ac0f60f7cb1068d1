//! The three dialects as the tests speak them.

use bytes::BytesMut;
use http::{Method, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use waybill_simulator::Endpoint;

use crate::client::Client;

/// One of the APIs that generate text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dialect {
    pub(crate) path: &'static str,
    pub(crate) endpoint: Endpoint,
    /// The field in which the conversation is.
    pub(crate) field: &'static str,
    /// What only the last event of a whole stream holds.
    pub(crate) last: &'static str,
}

pub(crate) const CHAT: Dialect =
    Dialect { path: "/v1/chat/completions", endpoint: Endpoint::Chat, field: "messages", last: "[DONE]" };
pub(crate) const RESPONSES: Dialect =
    Dialect { path: "/v1/responses", endpoint: Endpoint::Responses, field: "input", last: "event: response.completed" };
pub(crate) const MESSAGES: Dialect =
    Dialect { path: "/v1/messages", endpoint: Endpoint::Messages, field: "messages", last: "event: message_stop" };
pub(crate) const DIALECTS: [Dialect; 3] = [CHAT, RESPONSES, MESSAGES];

impl Dialect {
    /// A request of one user message.
    pub(crate) fn body(self, text: &str, stream: bool) -> Value {
        self.turns(&[("user", text)], stream)
    }

    /// A request of a conversation.
    pub(crate) fn turns(self, turns: &[(&str, &str)], stream: bool) -> Value {
        let turns: Vec<Value> = turns.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
        json!({"model": "gpt", "max_tokens": 64, "stream": stream, self.field: turns})
    }

    pub(crate) fn is_anthropic(self) -> bool {
        self.endpoint == Endpoint::Messages
    }

    /// Asks for a stream and reads until `wanted` has come, leaving the rest unread.
    pub(crate) async fn read_until(self, client: &Client, body: &Value, wanted: &str) -> Response<Incoming> {
        let body = body.to_string().into();
        let mut response = client.open(Method::POST, self.path, &[], body).await.expect("the gateway answers");
        assert_eq!(response.status(), 200);
        let mut read = BytesMut::new();
        while !String::from_utf8_lossy(&read).contains(wanted) {
            let frame = response.body_mut().frame().await.expect("the stream goes on").expect("and is not broken");
            read.extend_from_slice(frame.data_ref().expect("a stream has no trailers"));
        }
        response
    }
}
