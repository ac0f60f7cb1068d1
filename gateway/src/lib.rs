//! The data plane: HTTP in, HTTP out, facts out.
//!
//! The decisions are in `waybill-routing`; here is the shell that asks them and acts. Modules in reading order:

pub mod server;
pub mod proxy;
pub mod body;
pub mod limits;
pub mod guardrail;
pub mod gate;
pub mod vault;
pub mod continuation;
pub mod journey;
pub mod failure;
pub mod flight;
pub mod relay;
mod silence;
pub mod answer;
pub mod refusal;
pub mod models;
pub mod upstream;
mod unpacked;
pub mod serving;
pub mod ledger;
pub mod shared;
pub mod traffic;
pub mod metrics;
