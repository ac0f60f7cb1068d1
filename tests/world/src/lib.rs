//! A simulated world: gateways, projectors, auditors, the log, Redis and upstreams as values in one thread, under
//! virtual time.
//!
//! The idea. Everything that makes a distributed system hard (delay, loss, doubled messages, kills, frozen processes
//! that come back, cut networks, wrong clocks, a log that forgets its end) is drawn from one seed, so a world can be
//! lived again byte for byte. What decides and what folds is the real code: frames, batches and undo, selection,
//! dispatch, classification, routing state, owners, gate and usage fold. What is files and threads in the real thing (spool,
//! shipper, stores) is a value here that keeps the same rules.
//!
//! After every step the [`invariants`] are checked, against models that share nothing with the code: the upstreams' own
//! call log, the true time, and the [`naive`] reading of the log. That the rules have teeth is shown by the
//! [`mutation`]s: each breaks one rule of the real code at a seam of the world, and each must be noticed.
//!
//! `World::new(seed, None).live()` lives one through; a failure names its seed. What is left out, and what the worlds
//! have shown: docs/adr/0026. The rules are the variants of [`invariants::Rule`]. Modules in reading order:

pub mod world;
pub mod schedule;
pub mod log;
pub mod upstream;
pub mod redis;
pub mod spool;
pub mod shipper;
pub mod gateway;
pub mod projector;
pub mod auditor;
pub mod invariants;
pub mod naive;
pub mod mutation;
