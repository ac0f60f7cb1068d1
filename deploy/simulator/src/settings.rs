//! What one simulator is like when no script says otherwise.

use serde::{Deserialize, Serialize};

use crate::cache::CacheModel;

/// The standing character of a simulator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The marker in every answer; two simulators of one test need two names, or their response ids are the same.
    pub name: String,
    /// The models it lists; it answers for any.
    pub models: Vec<String>,
    /// Chunks of an answer's text, at least 1.
    pub chunks: usize,
    /// Milliseconds before the first chunk, or before the body of a JSON answer.
    pub first_token_delay_ms: u64,
    /// Milliseconds before each later chunk.
    pub chunk_delay_ms: u64,
    /// How it caches prompts.
    pub cache: CacheModel,
    /// The one credential it accepts; none accepts all.
    pub require_key: Option<String>,
    /// Calls kept in the log; older ones are dropped.
    pub calls_max: usize,
    /// Whether the log keeps bodies; their hash and length it always keeps.
    pub keep_bodies: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "sim".to_owned(),
            models: vec!["sim-model".to_owned()],
            chunks: 5,
            first_token_delay_ms: 0,
            chunk_delay_ms: 0,
            cache: CacheModel::Off,
            require_key: None,
            calls_max: 100_000,
            keep_bodies: true,
        }
    }
}

impl Settings {
    /// The defaults under a name.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }
}
