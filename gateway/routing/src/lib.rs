//! Where a request goes, as plain functions of their arguments: no IO, no clock, no dice.
//!
//! Modules in reading order:

pub mod request;
pub mod form;
pub mod session;
pub mod fingerprint;
pub mod state;
pub mod policy;
pub mod split;
pub mod ownership;
pub mod select;
pub mod dispatch;
pub mod rate;
pub mod classify;
pub mod observe;
pub mod price;
pub mod sse;
