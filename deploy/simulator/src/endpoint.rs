//! The endpoints a simulator answers at.

use http::{Method, Uri};
use serde::{Deserialize, Serialize};

/// One of the APIs; found by the end of the path, so that any base path is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `POST …/chat/completions`
    Chat,
    /// `POST …/responses`
    Responses,
    /// `GET` and `DELETE …/responses/{id}`, `POST …/responses/{id}/cancel`, `GET …/responses/{id}/input_items`
    Response,
    /// `POST …/messages`
    Messages,
    /// `POST …/messages/count_tokens`
    CountTokens,
    /// `POST …/embeddings`
    Embeddings,
    /// `GET …/models`
    Models,
}

impl Endpoint {
    pub(crate) fn of(method: &Method, uri: &Uri) -> Option<Self> {
        if About::of(method, uri).is_some() {
            return Some(Self::Response);
        }
        let ends: [(&str, Self); 6] = [
            ("/chat/completions", Self::Chat),
            ("/responses", Self::Responses),
            ("/messages", Self::Messages),
            ("/messages/count_tokens", Self::CountTokens),
            ("/embeddings", Self::Embeddings),
            ("/models", Self::Models),
        ];
        let (_, endpoint) = ends.into_iter().find(|(end, _)| uri.path().ends_with(end))?;
        let expected = if endpoint == Self::Models { Method::GET } else { Method::POST };
        (*method == expected).then_some(endpoint)
    }

    pub(crate) fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

/// What is asked about a response that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Get(String),
    /// Its events again, from the one behind this number on.
    Follow(String, Option<u64>),
    Delete(String),
    Cancel(String),
    InputItems(String),
}

impl About {
    pub(crate) fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let (_, rest) = uri.path().rsplit_once("/responses/")?;
        let (id, what) = rest.split_once('/').unwrap_or((rest, ""));
        let asked = |name: &str| {
            let mut pairs = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(found, _)| *found == name).map(|(_, value)| value)
        };
        let about = match (method, what) {
            (&Method::GET, "") if asked("stream") == Some("true") => {
                let after = asked("starting_after").and_then(|number| number.parse().ok());
                return Some(Self::Follow(id.to_owned(), after));
            }
            (&Method::GET, "") => Self::Get,
            (&Method::DELETE, "") => Self::Delete,
            (&Method::POST, "cancel") => Self::Cancel,
            (&Method::GET, "input_items") => Self::InputItems,
            _ => return None,
        };
        Some(about(id.to_owned()))
    }

    pub(crate) fn id(&self) -> &str {
        let (Self::Get(id) | Self::Follow(id, _) | Self::Delete(id) | Self::Cancel(id) | Self::InputItems(id)) = self;
        id
    }
}
