//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod dialect;
mod world;

mod basics;
mod bytes;
mod errors;
mod failover;
mod identity;
mod streams;
