//! The control plane: catalogue commands, explain and audit queries over the log.
//!
//! All queries read: they run on a connection beside the process that writes the file. Modules in reading order:

pub mod catalogue;
pub mod reading;
pub mod explain;
pub mod redecide;
pub mod sessions;
pub mod health;
pub mod verify;
