//! `GET /v1/models` and `/v1/models/{id}`: the names that the caller's group shows and the caller may use, in the dialect of the asker.

use std::collections::BTreeSet;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use serde_json::{Value, json};
use waybill_schema::catalogue::Key;
use waybill_schema::event::Endpoint;
use waybill_schema::id::{GroupId, ModelName};

use crate::answer::{Body, full};
use crate::proxy::authenticate;
use crate::refusal::Refusal;
use crate::serving::Serving;

/// Lists the models, or describes the one named.
pub fn answer(serving: &Serving, headers: &HeaderMap, model: Option<&str>) -> Result<Response<Body>, Refusal> {
    let key = authenticate(serving, headers)?;
    let rights = serving.catalogue.rights(&key);
    let describe: fn(&str) -> Value = match dialect(headers) {
        Some(Endpoint::Messages) => {
            |name| json!({"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"})
        }
        _ => |name| json!({"id": name, "object": "model", "created": 0, "owned_by": "waybill"}),
    };
    let body = match model {
        Some(model) => {
            let known = rights.may(model) && serving.catalogue.asked(&key, &key.group, model).is_some();
            known.then(|| describe(model)).ok_or_else(|| Refusal::ModelNotFound(model.to_owned()))?
        }
        None => {
            let shown = names(serving, &key).into_iter();
            let data: Vec<Value> = shown.filter(|name| rights.may(name)).map(describe).collect();
            let ends = [data.first(), data.last()].map(|end| end.map(|model| model["id"].clone()));
            json!({"object": "list", "data": data, "has_more": false, "first_id": ends[0], "last_id": ends[1]})
        }
    };
    let mut response = Response::new(full(body.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// The models of the key's group, and the groups that it may ask for as models; sorted.
fn names<'a>(serving: &'a Serving, key: &'a Key) -> BTreeSet<&'a str> {
    let models = serving.catalogue.models(&key.group).into_iter().map(ModelName::as_str);
    let groups = key.groups().filter(|group| serving.catalogue.is_requestable(group)).map(GroupId::as_str);
    models.chain(groups).collect()
}

/// Whose dialect errors and lists are written in: Anthropic's clients name their API version.
pub fn dialect(headers: &HeaderMap) -> Option<Endpoint> {
    headers.contains_key("anthropic-version").then_some(Endpoint::Messages)
}
