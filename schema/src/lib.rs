//! What Waybill says: ids, time, events and their envelope, the catalogue and its configuration file.
//!
//! Nothing here does IO. Modules in reading order:

pub mod id;
pub mod time;
pub mod secret;
pub mod event;
mod json;
pub mod upcast;
pub mod frame;
pub mod catalogue;
pub mod config;
pub mod store;
pub mod redis;

/// The version of the folds: a checkpoint written under another one is not continued but rebuilt.
///
/// Raise it whenever the same log would fold to another state or to other rows.
pub const FOLD_VERSION: u32 = 4;
