//! The decisions of this crate, seen from outside.

mod captures;
