//! Versions: turns the body of an event of any known version into today's [`Event`].
//!
//! An old event is never edited in the log. When a shape changes, its kind gets a new version number here, an arm
//! that lifts the old body to the new shape, and a new frozen fixture beside the old ones.

use crate::event::Event;
use crate::json;

/// Why a body is not an event of ours.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Written by a newer program: a projection stops here and waits for its upgrade.
    #[error("event `{kind}` has version {version}, newer than this program knows")]
    Newer {
        /// The kind.
        kind: String,
        /// Its version.
        version: u16,
    },
    /// Not an event at all: it goes to quarantine with its bytes, its neighbours live.
    #[error("event `{kind}` version {version} cannot be decoded")]
    Undecodable {
        /// The kind.
        kind: String,
        /// Its version.
        version: u16,
        /// What the decoder said.
        #[source]
        source: serde_json::Error,
    },
}

/// The tag and today's version of an event.
pub fn tag(event: &Event) -> (&'static str, u16) {
    match event {
        Event::Started(_) => ("started", 1),
        Event::Alive(_) => ("alive", 1),
        Event::Selection(_) => ("selection", 1),
        Event::Attempt(_) => ("attempt", 1),
        Event::Request(_) => ("request", 1),
        Event::Preference(_) => ("preference", 1),
        Event::Ownership(_) => ("ownership", 1),
        Event::Catalogue(_) => ("catalogue", 1),
        Event::Probe(_) => ("probe", 1),
        Event::Models(_) => ("models", 1),
        Event::Operator(_) => ("operator", 1),
        Event::Dropped(_) => ("dropped", 1),
        Event::Vanished(_) => ("vanished", 1),
    }
}

/// Writes the body of `event` as JSON at the end of `out`.
pub fn encode_body(event: &Event, out: &mut Vec<u8>) {
    let written = match event {
        Event::Started(e) => json::write(e, out),
        Event::Alive(e) => json::write(e, out),
        Event::Selection(e) => json::write(e, out),
        Event::Attempt(e) => json::write(e, out),
        Event::Request(e) => json::write(e, out),
        Event::Preference(e) => json::write(e, out),
        Event::Ownership(e) => json::write(e, out),
        Event::Catalogue(e) => json::write(e, out),
        Event::Probe(e) => json::write(e, out),
        Event::Models(e) => json::write(e, out),
        Event::Operator(e) => json::write(e, out),
        Event::Dropped(e) => json::write(e, out),
        Event::Vanished(e) => json::write(e, out),
    };
    written.expect("an event has only text keys and a vector takes every write");
}

/// Reads a body of `kind` and `version`, lifting an old version to today's shape.
pub fn decode(kind: &str, version: u16, body: &str) -> Result<Event, DecodeError> {
    let event = match (kind, version) {
        ("started", 1) => serde_json::from_str(body).map(Event::Started),
        ("alive", 1) => serde_json::from_str(body).map(Event::Alive),
        ("selection", 1) => serde_json::from_str(body).map(Event::Selection),
        ("attempt", 1) => serde_json::from_str(body).map(Event::Attempt),
        ("request", 1) => serde_json::from_str(body).map(Event::Request),
        ("preference", 1) => serde_json::from_str(body).map(Event::Preference),
        ("ownership", 1) => serde_json::from_str(body).map(Event::Ownership),
        ("catalogue", 1) => serde_json::from_str(body).map(Event::Catalogue),
        ("probe", 1) => serde_json::from_str(body).map(Event::Probe),
        ("models", 1) => serde_json::from_str(body).map(Event::Models),
        ("operator", 1) => serde_json::from_str(body).map(Event::Operator),
        ("dropped", 1) => serde_json::from_str(body).map(Event::Dropped),
        ("vanished", 1) => serde_json::from_str(body).map(Event::Vanished),
        _ => return Err(DecodeError::Newer { kind: kind.to_owned(), version }),
    };
    event.map_err(|source| DecodeError::Undecodable { kind: kind.to_owned(), version, source })
}
