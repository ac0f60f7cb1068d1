//! S3.1, S3.3, S3.5, S3.6, S3.28: real clients' recorded requests get the sessions that `captures.expected.md` says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use waybill_routing::request::parse;
use waybill_routing::session::{Identity, SessionError, Signals, identify};
use waybill_schema::config::SessionAliases;
use waybill_schema::event::{Endpoint, SessionSource};
use waybill_schema::id::SessionId;
use waybill_schema::secret::DeploymentSecret;

const EXPECTED: &str = include_str!("captures.expected.md");

#[derive(Deserialize)]
struct Capture {
    method: Option<String>,
    path: Option<String>,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body: Option<Box<RawValue>>,
}

impl Capture {
    fn read(series: &str, number: usize) -> Self {
        let path = captures().join(format!("{series}-{number:03}.json"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// The API spoken; `None` where the request has no session.
    fn endpoint(&self) -> Option<Endpoint> {
        let path = self.path.as_deref()?.split('?').next()?;
        match (self.method.as_deref()?, path) {
            ("POST", "/v1/chat/completions") => Some(Endpoint::Chat),
            ("POST", "/v1/responses") => Some(Endpoint::Responses),
            ("POST", "/v1/messages") => Some(Endpoint::Messages),
            ("POST", "/v1/messages/count_tokens") => Some(Endpoint::CountTokens),
            _ => None,
        }
    }

    /// Its session; where it goes on from a response, that of `parent`.
    fn identify(
        &self,
        endpoint: Endpoint,
        aliases: &SessionAliases,
        parent: Option<&SessionId>,
    ) -> Result<Identity, SessionError> {
        let headers = |name: &str| {
            let named = self.headers.iter().filter(|(at, _)| at.eq_ignore_ascii_case(name));
            named.map(|(_, value)| value.as_bytes()).collect()
        };
        let body = self.body.as_ref().expect("a POST has a body").get();
        let inbound = parse(endpoint, body.as_bytes()).expect("clients send good bodies");
        let signals = Signals {
            scope: &"team".into(),
            secret: &DeploymentSecret::new(b"secret"),
            headers: &headers,
            aliases,
            parent,
            fresh: "fresh",
        };
        identify(&signals, &inbound, endpoint)
    }
}

fn captures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures")
}

/// One row of the table: client, series, and for both settings the letters and the signal.
struct Row {
    client: &'static str,
    series: String,
    expected: [(&'static str, &'static str); 2],
}

fn rows() -> Vec<Row> {
    let table = EXPECTED.lines().filter(|line| line.starts_with('|')).skip(2);
    let row = |line: &'static str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, client, series, off, off_by, known, known_by, _, _] = cells[..] else { panic!("bad row: {line}") };
        Row { client, series: format!("{client}/{series}"), expected: [(off, off_by), (known, known_by)] }
    };
    table.map(row).collect()
}

/// Both ways between the letters of one client and the sessions they stand for.
#[derive(Default)]
struct Sessions {
    of_letter: BTreeMap<String, String>,
    letter_of: BTreeMap<String, String>,
}

impl Sessions {
    /// The letter that stands for `session`; `letter` itself where both are new.
    fn letter(&mut self, letter: &str, session: &str) -> String {
        if !self.of_letter.contains_key(letter) && !self.letter_of.contains_key(session) {
            self.of_letter.insert(letter.to_owned(), session.to_owned());
            self.letter_of.insert(session.to_owned(), letter.to_owned());
        }
        self.letter_of.get(session).cloned().unwrap_or_else(|| "(new)".to_owned())
    }
}

fn check(aliases: &SessionAliases, column: usize) {
    let mut clients: BTreeMap<&str, Sessions> = BTreeMap::new();
    for Row { client, series, expected } in rows() {
        let (letters, by) = expected[column];
        let mut seen = Vec::new();
        let mut before: Option<SessionId> = None;
        for (n, letter) in letters.split(' ').enumerate() {
            let capture = Capture::read(&series, n + 1);
            let Some(endpoint) = capture.endpoint() else {
                seen.push(".".to_owned());
                continue;
            };
            let identity = capture.identify(endpoint, aliases, before.as_ref());
            let identity = identity.unwrap_or_else(|error| panic!("{series}: {error}"));
            let by = by.split_once(", ").map_or(by, |(first, then)| if n == 0 { first } else { then });
            assert_eq!(identity.signal, by, "{series}");
            assert_eq!(identity.source, source_of(by), "{series}");
            seen.push(clients.entry(client).or_default().letter(letter, identity.session.as_str()));
            before = Some(identity.session);
        }
        assert_eq!(seen.join(" "), letters, "{series}");
    }
}

fn source_of(signal: &str) -> SessionSource {
    match signal {
        "prompt" => SessionSource::Prompt,
        "body:prompt_cache_key" => SessionSource::CacheKey,
        "body:previous_response_id" => SessionSource::Parent,
        _ => SessionSource::Explicit,
    }
}

#[test]
fn sessions_with_aliases_off() {
    check(&SessionAliases::Off, 0);
}

#[test]
fn sessions_with_aliases_known() {
    check(&SessionAliases::Known, 1);
}

/// S3.3: "unknown or foreign parents are refused as a continuation error, never downgraded to a prompt guess".
#[test]
fn a_response_that_was_not_verified_is_no_parent() {
    for client in ["langchain", "litellm", "openai-agents-python", "openai-node", "openai-python"] {
        let capture = Capture::read(&format!("{client}/responses-prev"), 2);
        let identity = capture.identify(Endpoint::Responses, &SessionAliases::Known, None);
        assert_eq!(identity, Err(SessionError::Parent), "{client}");
    }
}

/// S3.5: the first user item of Codex is the same for all conversations in one directory; the prompt after it counts.
#[test]
fn without_its_cache_key_codex_is_told_apart_by_the_prompt() {
    let session = |series, number| {
        let mut capture = Capture::read(series, number);
        let mut body: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(capture.body.expect("a body").get()).expect("an object");
        body.remove("prompt_cache_key").expect("Codex sends a cache key");
        capture.body = Some(serde_json::value::to_raw_value(&body).expect("JSON"));
        let identity = capture.identify(Endpoint::Responses, &SessionAliases::Off, None).expect("a session");
        assert_eq!(identity.source, SessionSource::Prompt);
        identity.session
    };
    let first = session("codex/responses", 1);
    assert_eq!(session("codex/responses", 3), first);
    assert_eq!(session("codex/responses-compaction", 4), first);
    assert_ne!(session("codex/responses-other-conversation", 1), first);
}

#[test]
fn the_table_names_every_recording_once() {
    let mut named = BTreeSet::new();
    for Row { series, expected: [(off, _), (known, _)], .. } in rows() {
        assert_eq!(off.split(' ').count(), known.split(' ').count(), "{series}");
        for number in 1..=off.split(' ').count() {
            assert!(named.insert(format!("{series}-{number:03}.json")), "{series} is named twice");
        }
    }
    let mut recorded = BTreeSet::new();
    for client in std::fs::read_dir(captures()).expect("the recordings are there") {
        let client = client.expect("a directory");
        for file in std::fs::read_dir(client.path()).expect("a directory") {
            let names = (client.file_name(), file.expect("a file").file_name());
            recorded.insert(format!("{}/{}", names.0.display(), names.1.display()));
        }
    }
    assert_eq!(named, recorded);
}

/// What replaces the model must leave a recorded body as it was, apart from the model.
#[test]
fn recorded_bodies_go_upstream_with_only_the_model_changed() {
    for Row { series, expected: [(letters, _), _], .. } in rows() {
        for number in 1..=letters.split(' ').count() {
            let capture = Capture::read(&series, number);
            let (Some(endpoint), Some(body)) = (capture.endpoint(), &capture.body) else { continue };
            let body = body.get();
            let inbound = parse(endpoint, body.as_bytes()).expect("clients send good bodies");
            let sent = inbound.upstream_body(body.as_bytes(), "other", false).expect("another model");
            let model = format!("\"model\": \"{}\"", inbound.model);
            assert_eq!(
                String::from_utf8(sent).expect("text"),
                body.replacen(&model, "\"model\": \"other\"", 1),
                "{series}"
            );
            assert!(inbound.upstream_body(body.as_bytes(), &inbound.model, false).is_none());
        }
    }
}
