//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod dialect;
mod program;
mod wiretap;
mod world;

mod basics;
mod bytes;
mod clients;
mod codex;
mod errors;
mod failover;
mod identity;
mod readme;
mod streams;
