//! Real servers for tests: each on free ports of this machine, in a folder of its own, ended when it is dropped.
//!
//! Everything blocks, so that tests with and without a runtime use it alike. A test that needs a server and does not
//! find its binary fails and says what to install; it is never skipped.
//!
//! A disk that can be full is one of them.
//!
//! Modules in reading order:

pub mod disk;
pub mod haproxy;
pub mod nats;
pub mod postgres;
pub mod redis;
mod port;
mod process;

pub use process::StartError;
