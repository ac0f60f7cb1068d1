//! The projector into a real Postgres, out of a real embedded log.

mod faults;
mod rebuild;
mod rows;
mod stops;
mod world;
