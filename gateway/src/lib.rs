//! The data plane: HTTP in, HTTP out, facts out.
//!
//! The decisions are in `waybill-routing`; here is the shell that asks them and acts. Modules in reading order:

pub mod answer;
pub mod flight;
pub mod ledger;
pub mod metrics;
pub mod models;
pub mod proxy;
pub mod refusal;
pub mod relay;
pub mod server;
pub mod serving;
pub mod upstream;
