//! The core of routing from outside: facts in, decisions out.

mod dispatch;
mod facts;
mod ownership;
mod policy;
mod select;
mod shared;
mod state;
