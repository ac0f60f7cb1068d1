//! The shared state: what gateways know of each other when one of them is to place a session.
//!
//! A request with an affinity key asks once, before its first choice, and goes on without an answer when there is none
//! in time. What comes back is laid under the gateway's own facts ([`crate::ledger::Ledger::decide`]) and verified like
//! any record. There are two: the file of a gateway that is alone ([`embedded::Embedded`]), and Redis
//! ([`redis::RedisState`]); gateways among others may also have none ([`Unshared`]).
//!
//! A request that goes on from a response asks who owns it instead, and nothing else: its affinity key is made from the
//! session that only the owner's record names, and it would not follow an affinity (docs/adr/0034).

pub mod embedded;
pub mod redis;

use std::fmt::Debug;
use std::pin::Pin as Pinned;

use waybill_routing::ownership::{Name, Sighting};
use waybill_schema::id::AffinityKey;
use waybill_schema::redis::{Owner, Pin};
use waybill_schema::time::Time;

use crate::ledger::Sight;

/// An answer on its way.
pub type Asked<'a> = Pinned<Box<dyn Future<Output = Answer> + Send + 'a>>;

/// What is known of an owner, on its way.
pub type Sought<'a> = Pinned<Box<dyn Future<Output = Known> + Send + 'a>>;
/// A showing on its way.
pub type Showing<'a> = Pinned<Box<dyn Future<Output = ()> + Send + 'a>>;

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

/// What there is to know of a response's owner.
#[derive(Debug, PartialEq)]
pub enum Known {
    /// The process's own store was read, which is all there is.
    Own(Sighting),
    /// The shared state was read.
    Read(Sighting),
    /// Nothing can be read.
    Away(Away),
}

/// A place where gateways find each other's records.
pub trait SharedState: Debug + Send + Sync {
    /// Reads the record of a key, else the claim on it, else takes that claim; in bounded time, whatever happens.
    fn read_or_claim<'a>(&'a self, question: Question<'a>) -> Asked<'a>;

    /// Reads who owns a response; in bounded time, whatever happens.
    fn owner<'a>(&'a self, name: &'a Name) -> Sought<'a>;

    /// Shows an owner, seen first at `now`, to other gateways before it is projected, if that can be had in bounded time.
    fn show<'a>(&'a self, name: &'a Name, owner: &'a Owner, now: Time) -> Showing<'a>;
}

/// No state to share, though there are other gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unshared;

impl SharedState for Unshared {
    fn read_or_claim<'a>(&'a self, _: Question<'a>) -> Asked<'a> {
        Box::pin(std::future::ready(Answer::Away(Away::Unshared)))
    }

    fn owner<'a>(&'a self, _: &'a Name) -> Sought<'a> {
        Box::pin(std::future::ready(Known::Away(Away::Unshared)))
    }

    fn show<'a>(&'a self, _: &'a Name, _: &'a Owner, _: Time) -> Showing<'a> {
        Box::pin(std::future::ready(()))
    }
}
