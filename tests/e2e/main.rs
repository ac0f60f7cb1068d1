//! Worlds: the real binary, real sockets, scripted upstreams. Expected values come from the upstreams' own call logs.

mod client;
mod log;
mod said;
mod world;

mod basics;
mod death;
mod kill;
mod redecide;
mod shutdown;
