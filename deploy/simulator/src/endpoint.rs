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
