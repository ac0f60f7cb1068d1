//! Reads the log, folds it, commits rows with their checkpoint.
//!
//! In the embedded store an append and its projection are one transaction, so the rows never lag behind the log and
//! need no process of their own. Beside a shared log a projector reads on from its own checkpoint, which moves in the
//! transaction that stores the rows. Modules in reading order:

pub mod reader;
pub mod finding;
pub mod embedded;
pub mod redis;
mod rows;
pub mod postgres;
