//! The simulator seen from a socket: shapes, faults, caches, the call log, death and revival.

mod answers;
mod caches;
mod client;
mod faults;
mod life;
