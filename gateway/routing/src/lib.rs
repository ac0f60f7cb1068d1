//! Where a request goes, as plain functions of their arguments: no IO, no clock, no dice.
//!
//! Modules in reading order:

pub mod classify;
pub mod dispatch;
pub mod fingerprint;
pub mod observe;
pub mod request;
pub mod select;
pub mod session;
pub mod sse;
pub mod state;
