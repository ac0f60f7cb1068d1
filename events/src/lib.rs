//! How facts travel: the spool that holds them first, and the log that keeps them.
//!
//! A request thread appends its facts to the [`spool`], one `write()` each time. One thread, the [`shipper`], takes
//! what has gathered, seals it into frames and appends these to the [`log`]: the embedded one ([`sqlite`]) or the one
//! that many machines share ([`jetstream`]); a projector in the same process may get them by [`handover`]. The
//! [`archive`] keeps what the log may forget. Nothing here is async to its callers, and nothing waits for the log but the
//! shipper.
//!
//! Modules in reading order:

pub mod spool;
pub mod log;
pub mod sqlite;
pub mod jetstream;
pub mod archive;
pub mod shipper;
pub mod handover;
