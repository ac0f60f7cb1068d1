//! The catalogue in the log: what has been said of it, the next batch, and batches taken back.

pub mod desk;
pub mod undo;

pub use desk::{BatchError, FILE_ACTOR, WRITER, append, plan};
pub use undo::{UndoRefused, undo};
