//! What the log means: pure folds from events to rows.
//!
//! Nothing here does IO or reads a clock; the same facts in the same order give the same rows on any machine. Modules
//! in reading order:

pub mod read;
pub mod gate;
pub mod chain;
pub mod usage;
pub mod sessions;
pub mod changes;
pub mod fold;
pub mod word;
#[cfg(any(test, feature = "story"))]
pub mod story;
