//! (in progress)
pub mod catalogue;
