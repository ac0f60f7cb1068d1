//! The catalogue in the log: what it holds ([`mod@history`]), the next batch ([`desk`]), batches taken back
//! ([`mod@undo`]).
//!
//! All auditors share one writer, ordered by expected sequence alone.

pub mod history;
pub mod desk;
pub mod undo;
pub mod diff;
pub mod listing;

pub use desk::{BatchError, FILE_ACTOR, append, plan};
pub use diff::diff;
pub use history::{History, HistoryError, history};
pub use listing::list;
pub use undo::{UndoRefused, undo};

/// The writer of all catalogue batches.
pub const WRITER: &str = "catalogue";
