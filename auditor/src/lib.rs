//! The control plane: catalogue commands, explain and audit queries over the log.
//!
//! All queries read, beside the processes that write. Modules in reading order:

pub mod catalogue;
pub mod usage;
pub mod paging;
pub mod sessions;
pub mod reading;
pub mod explain;
pub mod redecide;
pub mod projections;
pub mod moment;
pub mod admin;
pub mod health;
pub mod verify;
pub mod state;
