//! Errors in the words of each dialect.

use serde_json::{Value, json};

use crate::endpoint::Endpoint;

/// The error body that the dialect of `endpoint` has for `status`.
pub(crate) fn body(endpoint: Option<Endpoint>, status: u16, message: &str) -> Value {
    if endpoint.is_some_and(Endpoint::is_anthropic) {
        let error = json!({"type": anthropic_type(status), "message": message});
        return json!({"type": "error", "error": error, "request_id": "req_simulator"});
    }
    let (kind, code) = openai_type(status);
    json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
}

/// The message that goes with `status` when there is nothing more to say.
pub(crate) fn message(status: u16) -> &'static str {
    match status {
        400 => "Invalid request.",
        401 => "Incorrect API key provided.",
        403 => "You are not allowed to use this model.",
        404 => "The model does not exist or you do not have access to it.",
        413 => "Request too large.",
        429 => "Rate limit reached for requests.",
        503 => "The server is overloaded or not ready yet.",
        529 => "Overloaded",
        500.. => "The server had an error while processing your request.",
        _ => "Request refused.",
    }
}

fn anthropic_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

fn openai_type(status: u16) -> (&'static str, Option<&'static str>) {
    match status {
        401 => ("invalid_request_error", Some("invalid_api_key")),
        404 => ("invalid_request_error", Some("model_not_found")),
        429 => ("requests", Some("rate_limit_exceeded")),
        503 => ("service_unavailable_error", Some("server_is_overloaded")),
        500.. => ("server_error", None),
        _ => ("invalid_request_error", None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_has_its_own_error() {
        let openai =
            json!({"error": {"message": "m", "type": "requests", "param": null, "code": "rate_limit_exceeded"}});
        assert_eq!(body(Some(Endpoint::Chat), 429, "m"), openai);
        let anthropic = json!({"type": "error", "error": {"type": "overloaded_error", "message": "m"}, "request_id": "req_simulator"});
        assert_eq!(body(Some(Endpoint::Messages), 529, "m"), anthropic);
    }
}
