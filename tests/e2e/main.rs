//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod program;
mod wiretap;
mod world;

mod basics;
mod clients;
mod codex;
mod readme;
