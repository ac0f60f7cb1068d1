//! The projectors against real stores.

mod redis;
