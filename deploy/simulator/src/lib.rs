//! Simulated upstream providers: the APIs, prompt caches and failures of the real ones, and a log of every call.
//!
//! Tests take their expected values from here, so this crate knows nothing of the gateway: it depends on no other
//! crate of ours and shares no code with what it tests. A simulator is started on a port of its own, is told by a
//! script how to misbehave, and tells afterwards what it was asked and what it did.
//!
//! Reading order: `settings` and `script` are the inputs, `calls` the output, `cache` the model of a prompt cache.
//! `prompt` and `answer` are free of dialect; `chat`, `responses`, `messages` and `embeddings` are the dialects.
//! `respond` turns a call into a reply, `program` the reply into instructions, `serve` carries them out.

pub mod cache;
pub mod calls;
pub mod clock;
pub mod script;
pub mod settings;

mod answer;
mod chat;
mod embeddings;
mod endpoint;
mod event;
mod messages;
mod program;
mod prompt;
mod refusal;
mod respond;
mod responses;
mod serve;
mod socket;

pub use answer::Usage;
pub use calls::{Call, End};
pub use clock::Clock;
pub use endpoint::Endpoint;
pub use script::{Action, Control, Reply, Step, When};
pub use serve::{Running, Simulator, serve};
pub use settings::Settings;
