//! How facts travel: the spool that holds them first, and the log that keeps them.
//!
//! Modules in reading order:

pub mod log;
pub mod shipper;
pub mod spool;
pub mod sqlite;
