//! Secrets by reference, and the keyed hashes that stand for content in the log.
//!
//! A secret is written `env:NAME` or `file:PATH`; its value is resolved by the shell and is in no event, key, log
//! line or metric. What identifies content (a prompt, a cache key, a response id) is HMAC-SHA256 under the
//! deployment secret, scope first, 128 bits kept (DESIGN.md section 5).

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::id::ScopeId;

/// Where a secret is found; never the secret itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SecretRef {
    /// An environment variable, `env:NAME`.
    Env(String),
    /// A file whose trimmed content is the secret, `file:PATH`.
    File(String),
}

impl SecretRef {
    /// Reads `env:NAME` or `file:PATH`; `None` for anything else, a literal secret included.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, place) = text.split_once(':')?;
        match kind {
            _ if place.is_empty() => None,
            "env" => Some(Self::Env(place.to_owned())),
            "file" => Some(Self::File(place.to_owned())),
            _ => None,
        }
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{path}"),
        }
    }
}

impl Serialize for SecretRef {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SecretRef {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("a secret is written env:NAME or file:PATH"))
    }
}

/// The key of all content hashes of one installation; the same on every instance.
#[derive(Clone)]
pub struct DeploymentSecret(Hmac<Sha256>);

impl DeploymentSecret {
    /// Takes the secret's bytes; any length is accepted, 32 random bytes are right.
    pub fn new(bytes: &[u8]) -> Self {
        Self(<Hmac<Sha256> as KeyInit>::new_from_slice(bytes).expect("HMAC takes a key of any length"))
    }

    /// The secret's public name: the first 32 bits of its own hash, recorded in `started`.
    pub fn id(&self) -> String {
        let mut mac = self.0.clone();
        mac.update(b"secret-id");
        hex::encode(&mac.finalize().into_bytes()[..4])
    }

    /// The keyed hash of `content`, as 32 hex digits; `purpose` keeps hashes of different things apart.
    pub fn hash(&self, scope: &ScopeId, purpose: &str, content: &[u8]) -> String {
        let mut mac = self.0.clone();
        for part in [scope.as_str().as_bytes(), purpose.as_bytes(), content] {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        hex::encode(&mac.finalize().into_bytes()[..16])
    }
}

impl fmt::Debug for DeploymentSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeploymentSecret(…)")
    }
}

/// The first 128 bits of SHA-256 over `parts`, as 32 hex digits: the sums that chain frames.
pub fn sum128(parts: &[&[u8]]) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update(part);
    }
    hex::encode(&sha.finalize()[..16])
}
