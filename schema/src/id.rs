//! Identifiers: each idea has its own type, so that one cannot stand where another is meant.
//!
//! All are immutable shared text: cloning one on the request path copies a pointer, not bytes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! text_id {
    ($(#[doc = $doc:literal] $name:ident;)*) => {$(
        #[doc = $doc]
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(SharedText).map(Self)
            }
        }

        impl $name {
            /// Wraps text that the caller has already validated where validation is due.
            pub fn new(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )*};
}

/// Reads text straight into shared text: a fact holds some ten ids, and the way through a `String` allocates twice.
struct SharedText;

impl serde::de::Visitor<'_> for SharedText {
    type Value = Arc<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Arc<str>, E> {
        Ok(text.into())
    }
}

text_id! {
    /// One connection to an upstream, as named in the catalogue.
    ChannelId;
    /// One upstream model on one channel, `channel/upstream-model`: where a prompt cache lives.
    DeploymentId;
    /// A channel's place in a route, `group/route/channel` and, where it maps the model, `/upstream-model`.
    MemberId;
    /// A named pool with the public models it shows.
    GroupId;
    /// A model name as a client or an upstream writes it.
    ModelName;
    /// A caller's key as named in the catalogue (never its secret).
    KeyId;
    /// A team as named in the catalogue.
    TeamId;
    /// An organization as named in the catalogue.
    OrganizationId;
    /// A routing policy as named in the catalogue.
    TemplateId;
    /// The authenticated tenant of a request: the first part of every key about sessions.
    ScopeId;
    /// One conversation, as S3.1 identifies it; at most 256 bytes.
    SessionId;
    /// One request to the gateway: a UUIDv7 made here, never a client's or a provider's id.
    RequestId;
    /// One writer of the log: a gateway instance or an auditor.
    WriterId;
    /// The key of an affinity record, scope first (S1.5 with DESIGN.md section 10).
    AffinityKey;
}

impl DeploymentId {
    /// The deployment that `upstream_model` on `channel` is.
    pub fn of(channel: &ChannelId, upstream_model: &ModelName) -> Self {
        Self(format!("{channel}/{upstream_model}").into())
    }
}

/// A fact's identity, known when it is made: writer, epoch and number within the epoch (from 1).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision {
    /// Who made the fact.
    pub writer: WriterId,
    /// The writer's life in which it was made, from 1.
    pub epoch: u64,
    /// Its number in that epoch, dense from 1.
    pub number: u64,
}

impl Revision {
    fn text(&self) -> String {
        let (mut epoch, mut number) = (itoa::Buffer::new(), itoa::Buffer::new());
        [self.writer.as_str(), ":", epoch.format(self.epoch), ":", number.format(self.number)].concat()
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl Serialize for Revision {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text())
    }
}

impl<'de> Deserialize<'de> for Revision {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let parsed = (|| {
            let (rest, number) = text.rsplit_once(':')?;
            let (writer, epoch) = rest.rsplit_once(':')?;
            Some(Self { writer: writer.into(), epoch: epoch.parse().ok()?, number: number.parse().ok()? })
        })();
        parsed.ok_or_else(|| serde::de::Error::custom("a revision is written writer:epoch:number"))
    }
}
