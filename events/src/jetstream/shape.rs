//! What the stream is: how it is made, and what an existing one must not be.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use waybill_schema::id::WriterId;

use super::Settings;

/// The oldest server that is used: earlier ones could lose a stream when they were killed (EVENTLOG.md, A.2).
pub const OLDEST: [u32; 3] = [2, 10, 23];
/// The largest message: a frame is smaller by far, unless one fact is large.
pub const MESSAGE_BYTES_MAX: u32 = 1 << 20;
/// The subjects of all writers.
const SUBJECTS: &str = "wb.v1.*";
/// How long the server itself knows a frame again. Nothing rests on it: each frame expects the one before.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

/// Why a server or a stream is not used for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// The server is too old, or does not say its version.
    #[error("nats-server {0} is older than 2.10.23, the first that keeps a stream whole when it is killed")]
    Version(String),
    /// A setting of the existing stream.
    #[error("the stream {stream} would not keep every frame: {setting} is {found}, and must be {wanted}")]
    Setting {
        /// The stream's name.
        stream: String,
        /// The setting, by its name in the server's configuration of a stream.
        setting: &'static str,
        /// What it is.
        found: String,
        /// What it must be.
        wanted: String,
    },
}

/// Refuses a server older than [`OLDEST`].
pub(super) fn check_version(version: &str) -> Result<(), Unsuitable> {
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let parts: Result<Vec<u32>, _> = release.split('.').map(str::parse).collect();
    match parts {
        Ok(parts) if parts.as_slice() >= OLDEST.as_slice() => Ok(()),
        _ => Err(Unsuitable::Version(version.to_owned())),
    }
}

/// The subject of a writer.
pub(super) fn subject(writer: &WriterId) -> String {
    format!("wb.v1.{}", token(writer))
}

/// A writer's id as part of a subject: every byte but ASCII letters, digits, `-` and `_` as `%` and two digits.
pub(super) fn token(writer: &WriterId) -> String {
    let part = |byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    writer.as_str().bytes().map(part).collect()
}

/// The configuration of a new stream.
pub(super) fn wanted(settings: &Settings) -> Value {
    json!({
        "name": settings.stream,
        "subjects": [SUBJECTS],
        "storage": "file",
        "num_replicas": settings.replicas,
        "retention": "limits",
        "discard": "new",
        "max_bytes": i64::try_from(settings.bytes_max).unwrap_or(i64::MAX),
        "max_age": 0,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": MESSAGE_BYTES_MAX,
        "max_consumers": -1,
        "deny_delete": true,
        "deny_purge": true,
        "allow_direct": true,
        "compression": "s2",
        "duplicate_window": u64::try_from(DUPLICATE_WINDOW.as_nanos()).expect("two minutes fit"),
    })
}

/// What matters of a stream's configuration, as the server tells it.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub(super) struct Shape {
    subjects: Vec<String>,
    pub(super) storage: String,
    pub(super) num_replicas: u32,
    retention: String,
    pub(super) discard: String,
    pub(super) max_bytes: i64,
    max_age: u64,
    max_msgs_per_subject: i64,
    max_msg_size: i64,
    no_ack: bool,
    sealed: bool,
    allow_direct: bool,
    allow_rollup_hdrs: bool,
    allow_msg_ttl: bool,
    persist_mode: String,
    subject_transform: Option<Value>,
    pub(super) deny_delete: bool,
    pub(super) deny_purge: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            subjects: Vec::new(),
            storage: String::new(),
            num_replicas: 1,
            retention: String::new(),
            discard: String::new(),
            max_bytes: -1,
            max_age: 0,
            max_msgs_per_subject: -1,
            max_msg_size: -1,
            no_ack: false,
            sealed: false,
            allow_direct: false,
            allow_rollup_hdrs: false,
            allow_msg_ttl: false,
            persist_mode: String::new(),
            subject_transform: None,
            deny_delete: false,
            deny_purge: false,
        }
    }
}

impl Shape {
    /// Refuses what would lose or hide frames. Limits that only refuse new ones, and more replicas, are the operator's.
    pub(super) fn check(&self, settings: &Settings) -> Result<(), Unsuitable> {
        let large_enough = u32::try_from(self.max_msg_size).map_or(true, |max| max >= MESSAGE_BYTES_MAX);
        let is_synchronous = matches!(self.persist_mode.as_str(), "" | "default");
        let all_bytes = || format!("at least {MESSAGE_BYTES_MAX}");
        let text = |text: &str| text.to_owned();
        let wrong = [
            (self.subjects != [SUBJECTS], "subjects", self.subjects.join(", "), text(SUBJECTS)),
            (self.storage != "file", "storage", self.storage.clone(), text("file")),
            (self.retention != "limits", "retention", self.retention.clone(), text("limits")),
            (self.discard != "new", "discard", self.discard.clone(), text("new")),
            (self.max_age != 0, "max_age", format!("{:?}", Duration::from_nanos(self.max_age)), text("0")),
            (
                self.max_msgs_per_subject > 0,
                "max_msgs_per_subject",
                self.max_msgs_per_subject.to_string(),
                text("unlimited"),
            ),
            (!large_enough, "max_msg_size", self.max_msg_size.to_string(), all_bytes()),
            (
                self.num_replicas < settings.replicas,
                "num_replicas",
                self.num_replicas.to_string(),
                format!("at least {}", settings.replicas),
            ),
            (self.no_ack, "no_ack", text("true"), text("false")),
            (self.sealed, "sealed", text("true"), text("false")),
            (!self.allow_direct, "allow_direct", text("false"), text("true")),
            (self.allow_rollup_hdrs, "allow_rollup_hdrs", text("true"), text("false")),
            (self.allow_msg_ttl, "allow_msg_ttl", text("true"), text("false")),
            (!is_synchronous, "persist_mode", self.persist_mode.clone(), text("default")),
            (self.subject_transform.is_some(), "subject_transform", text("set"), text("absent")),
        ];
        let wrong = wrong.into_iter().find(|(is_wrong, ..)| *is_wrong);
        wrong.map_or(Ok(()), |(_, setting, found, wanted)| {
            Err(Unsuitable::Setting { stream: settings.stream.clone(), setting, found, wanted })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_before_2_10_23_are_refused() {
        for refused in ["2.9.10", "2.10.22", "2.10", "1.99.99", "", "unknown"] {
            assert_eq!(check_version(refused), Err(Unsuitable::Version(refused.to_owned())), "{refused}");
        }
        for taken in ["2.10.23", "2.10.25", "2.11.0-preview.1", "2.15.1", "3.0.0"] {
            assert_eq!(check_version(taken), Ok(()), "{taken}");
        }
    }

    #[test]
    fn a_writer_of_any_name_has_a_subject_of_its_own() {
        assert_eq!(subject(&"gw-a_1".into()), "wb.v1.gw-a_1");
        assert_eq!(subject(&"gw-ü:1".into()), "wb.v1.gw-%C3%BC%3A1");
        assert_eq!(subject(&"a.b*>% ".into()), "wb.v1.a%2Eb%2A%3E%25%20");
    }
}
