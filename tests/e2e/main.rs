//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod dialect;
mod log;
mod program;
mod said;
mod wiretap;
mod world;

mod basics;
mod bytes;
mod catalogue;
mod clients;
mod codex;
mod death;
mod doctor;
mod errors;
mod failover;
mod identity;
mod kill;
mod readme;
mod redecide;
mod secrets;
mod shutdown;
mod streams;
