//! Frozen fixtures: every line ever written must decode, and today's encoder must give the same bytes.
//!
//! `fixtures/v1/<kind>.json` is an array of lines, written by hand from the documentation of the events; what a kind came
//! to say later without a new shape, such as another value or a field that is absent where it says nothing, has a file
//! of its own beside it.

use serde_json::value::RawValue;
use waybill_schema::event::{Affinity, Endpoint, Event, Tokens};
use waybill_schema::frame::{Body, Line, LineError};
use waybill_schema::upcast::DecodeError;

const FIXTURES: &[(&str, &str)] = &[
    ("started", include_str!("../fixtures/v1/started.json")),
    ("alive", include_str!("../fixtures/v1/alive.json")),
    ("selection", include_str!("../fixtures/v1/selection.json")),
    ("attempt", include_str!("../fixtures/v1/attempt.json")),
    ("request", include_str!("../fixtures/v1/request.json")),
    ("preference", include_str!("../fixtures/v1/preference.json")),
    ("preference", include_str!("../fixtures/v1/preference_chains.json")),
    ("ownership", include_str!("../fixtures/v1/ownership.json")),
    ("catalogue", include_str!("../fixtures/v1/catalogue.json")),
    ("catalogue", include_str!("../fixtures/v1/catalogue_terms.json")),
    ("catalogue", include_str!("../fixtures/v1/catalogue_stream_usage.json")),
    ("catalogue", include_str!("../fixtures/v1/catalogue_template_failover.json")),
    ("request", include_str!("../fixtures/v1/request_endpoints.json")),
    ("probe", include_str!("../fixtures/v1/probe.json")),
    ("models", include_str!("../fixtures/v1/models.json")),
    ("operator", include_str!("../fixtures/v1/operator.json")),
    ("dropped", include_str!("../fixtures/v1/dropped.json")),
    ("vanished", include_str!("../fixtures/v1/vanished.json")),
];

fn lines(kind: &str) -> Vec<&'static str> {
    let (_, text) = FIXTURES.iter().find(|(name, _)| *name == kind).expect("the kind has a fixture");
    lines_of(text)
}

fn lines_of(text: &'static str) -> Vec<&'static str> {
    let lines: Vec<&RawValue> = serde_json::from_str(text).expect("a fixture is an array of lines");
    lines.into_iter().map(RawValue::get).collect()
}

fn event(kind: &str, place: usize) -> Event {
    Line::parse(lines(kind)[place].as_bytes()).expect("a fixture decodes").event
}

#[test]
fn every_fixture_decodes_and_encodes_to_the_same_bytes() {
    for (kind, text) in FIXTURES {
        for text in lines_of(text) {
            let line = Line::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{kind}: {error:?}: {text}"));
            let mut again = Vec::new();
            Body::of(&line.event, line.made).write_line(line.number, &mut again);
            assert_eq!(String::from_utf8(again).unwrap(), format!("{text}\n"));
            assert_eq!(text.split('"').nth(3), Some(*kind), "a fixture file holds its own kind only");
        }
    }
}

#[test]
fn an_unknown_field_in_a_body_is_undecodable() {
    let line = br#"{"k":"alive","v":1,"n":1,"t":0,"b":{"last":1,"more":2}}"#;
    let error = Line::parse(line).unwrap_err();
    assert!(matches!(&error, LineError::Body(DecodeError::Undecodable { kind, version: 1, .. }) if kind == "alive"));
}

#[test]
fn an_unknown_kind_and_a_newer_version_are_newer() {
    for (line, kind, version) in [
        (&br#"{"k":"teleported","v":1,"n":1,"t":0,"b":{}}"#[..], "teleported", 1),
        (&br#"{"k":"alive","v":2,"n":1,"t":0,"b":{"last":[1]}}"#[..], "alive", 2),
    ] {
        match Line::parse(line).unwrap_err() {
            LineError::Body(DecodeError::Newer { kind: k, version: v }) => assert_eq!((&*k, v), (kind, version)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_line_without_an_envelope_is_told_from_a_bad_body() {
    for line in [&b"not json"[..], br#"{"k":"alive","v":1,"n":1,"b":{"last":1}}"#, br#"{"k":"alive","v":1}"#, b""] {
        assert!(matches!(Line::parse(line), Err(LineError::Envelope(_))), "{}", String::from_utf8_lossy(line));
    }
}

#[test]
fn tokens_are_reported_estimated_or_unknown() {
    let Event::Attempt(attempt) = event("attempt", 0) else { panic!("not an attempt") };
    assert_eq!(attempt.usage.input, Tokens::Reported(1200));
    assert_eq!(attempt.usage.output, Tokens::Estimated(80));
    assert_eq!(attempt.usage.cache_write, Tokens::Reported(0));
    let Event::Attempt(attempt) = event("attempt", 1) else { panic!("not an attempt") };
    assert_eq!(attempt.usage.input, Tokens::Unknown);
}

#[test]
fn a_revision_keeps_a_writer_whose_name_holds_colons() {
    let Event::Selection(selection) = event("selection", 2) else { panic!("not a selection") };
    let Some(Affinity::Skipped(read)) = selection.choice.map(|choice| choice.affinity) else { panic!("not skipped") };
    assert_eq!((read.revision.writer.as_str(), read.revision.epoch, read.revision.number), ("host:8080", 7, 12));
}

#[test]
fn an_endpoint_has_one_word() {
    for endpoint in Endpoint::ALL {
        assert_eq!(serde_json::to_value(endpoint).expect("a word is JSON"), endpoint.word());
    }
}
