//! Reads the log, folds it, commits rows with their checkpoint.
//!
//! In the embedded store an append and its projection are one transaction, so the rows never lag behind the log and
//! need no process of their own. Modules in reading order:

pub mod embedded;
pub mod redis;
mod rows;
