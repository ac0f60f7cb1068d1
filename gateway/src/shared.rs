//! The shared state: what gateways know of each other when one of them is to place a session.
//!
//! A request with an affinity key asks once, before its first choice, and goes on without an answer when there is none
//! in time. What comes back is laid under the gateway's own facts ([`crate::ledger::Ledger::decide`]) and verified like
//! any record. There are two: this process alone knows ([`InProcess`]), and Redis ([`redis::RedisState`]).

pub mod redis;

use std::fmt::Debug;
use std::pin::Pin as Pinned;

use waybill_schema::id::AffinityKey;
use waybill_schema::redis::Pin;
use waybill_schema::time::Time;

use crate::ledger::Sight;

/// An answer on its way.
pub type Asked<'a> = Pinned<Box<dyn Future<Output = Answer> + Send + 'a>>;

/// What a request asks for.
pub struct Question<'a> {
    /// Whose record.
    pub key: &'a AffinityKey,
    /// The claim to take where there is neither a record nor a claim; nothing where none is to be taken.
    pub claim: &'a (dyn Fn() -> Option<Pin> + Sync),
    /// The time.
    pub now: Time,
}

/// What there is to know.
#[derive(Debug, PartialEq)]
pub enum Answer {
    /// The process's own state is all there is.
    Own,
    /// Others' records were read.
    Read(Box<Sight>),
    /// Others' records cannot be had: sessions go where all gateways would send them.
    Away(Away),
}

/// Why others' records cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Away {
    /// They are not shared.
    Unshared,
    /// No answer in time.
    Failed,
    /// Not asked: there was none for others.
    Skipped,
}

/// A place where gateways find each other's records.
pub trait SharedState: Debug + Send + Sync {
    /// Reads the record of a key, else the claim on it, else takes that claim; in bounded time, whatever happens.
    fn read_or_claim<'a>(&'a self, question: Question<'a>) -> Asked<'a>;
}

/// The state of this process, which the ledger holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InProcess {
    /// It is the only gateway, and so sees every record.
    Alone,
    /// There are others that it does not see.
    AmongOthers,
}

impl SharedState for InProcess {
    fn read_or_claim<'a>(&'a self, _: Question<'a>) -> Asked<'a> {
        Box::pin(std::future::ready(match self {
            Self::Alone => Answer::Own,
            Self::AmongOthers => Answer::Away(Away::Unshared),
        }))
    }
}
