//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod dialect;
mod fleet;
mod log;
mod process;
mod program;
mod said;
mod upstreams;
mod wiretap;
mod world;

mod archive;
mod basics;
mod bytes;
mod catalogue;
mod clients;
mod codex;
mod death;
mod doctor;
mod errors;
mod failover;
mod follow;
mod identity;
mod kill;
mod processes;
mod projector;
mod readme;
mod redecide;
mod secrets;
mod shutdown;
mod streams;
