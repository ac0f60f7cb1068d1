//! (in progress)
use waybill_schema::event::{Class, Effect};
/// (in progress)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// (in progress)
    No,
    /// (in progress)
    Backoff,
    /// (in progress)
    After(u64),
}
/// (in progress)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// (in progress)
    pub class: Class,
    /// (in progress)
    pub here: Here,
    /// (in progress)
    pub next: bool,
    /// (in progress)
    pub effect: Effect,
    /// (in progress)
    pub retry_after_ms: Option<u64>,
}
