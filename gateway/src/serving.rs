//! What is in force: the catalogue, the settings and the resolved secrets, as one immutable snapshot.
//!
//! A request takes the snapshot once and keeps it to its end; a change swaps in a new one.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderValue;
use sha2::{Digest, Sha256};
use waybill_routing::policy::Policy;
use waybill_schema::catalogue::terms::{Guardrails, Rights};
use waybill_schema::catalogue::{Catalogue, Group, Key, Place, RowKey, Status, StickyPolicy};
use waybill_schema::config::Config;
use waybill_schema::event::{KeyType, Thresholds};
use waybill_schema::id::{ChannelId, KeyId};
use waybill_schema::secret::SecretRef;

use crate::guardrail::Guard;

const MS_PER_SECOND: u64 = 1000;

/// The snapshot that a request reads.
#[derive(Debug)]
pub struct Serving {
    /// The catalogue.
    pub catalogue: Catalogue,
    /// The settings of this machine.
    pub config: Arc<Config>,
    /// Whether some rule ranks by what is in flight, or how fast: only then is it counted.
    pub watches_load: bool,
    callers: HashMap<[u8; 32], Arc<Key>>,
    credentials: HashMap<ChannelId, Vec<Credential>>,
    guards: HashMap<RowKey, Guard>,
    policies: HashMap<KeyId, Arc<Policy>>,
}

/// A resolved upstream credential, ready to be sent; it is never logged.
#[derive(Clone)]
pub struct Credential {
    /// `Bearer …`, for the OpenAI dialects.
    pub bearer: HeaderValue,
    /// The bare secret, for Anthropic's `x-api-key`.
    pub plain: HeaderValue,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credential(…)")
    }
}

/// A secret that could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{owner}: the secret {reference} cannot be read: {why}")]
pub struct Unresolved {
    /// The row that names it.
    pub owner: String,
    /// The reference.
    pub reference: SecretRef,
    /// Why not.
    pub why: String,
}

impl Serving {
    /// Compiles the snapshot; `resolve` fetches a secret. What cannot be resolved is returned beside it: its channel
    /// is no candidate, its key lets nobody in.
    pub fn new(
        catalogue: Catalogue,
        config: Arc<Config>,
        resolve: &dyn Fn(&SecretRef) -> Result<String, String>,
    ) -> (Self, Vec<Unresolved>) {
        let mut unresolved = Vec::new();
        let mut fetch = |owner: String, reference: &SecretRef| match resolve(reference) {
            Ok(secret) => Some(secret),
            Err(why) => {
                unresolved.push(Unresolved { owner, reference: reference.clone(), why });
                None
            }
        };
        let mut callers = HashMap::new();
        for key in catalogue.keys.values().filter(|key| key.status == Status::Active) {
            if let Some(secret) = fetch(format!("key `{}`", key.id), &key.key) {
                callers.insert(digest(secret.as_bytes()), key.clone());
            }
        }
        let mut credentials = HashMap::new();
        for channel in catalogue.channels.values() {
            let secrets = channel.api_keys.iter().filter_map(|key| fetch(format!("channel `{}`", channel.id), key));
            credentials.insert(channel.id.clone(), secrets.filter_map(|secret| Credential::new(&secret)).collect());
        }
        let mut guards = HashMap::new();
        for rights in catalogue.keys.values().map(|key| catalogue.rights(key)) {
            for (whose, guardrails) in guarded(&rights) {
                let token = guardrails.hook.as_ref().and_then(|hook| hook.token.as_ref());
                guards.entry(whose).or_insert_with_key(|whose| {
                    let token = token.and_then(|token| fetch(whose.to_string(), token));
                    Guard::new(whose.clone(), guardrails, token.as_deref())
                });
            }
        }
        let policies = policies(&catalogue);
        let watches_load = policies.values().any(|policy| policy.watches_load());
        (Self { catalogue, config, watches_load, callers, credentials, guards, policies }, unresolved)
    }

    /// The policy of a key, where a template is bound to it (S3.10).
    pub fn policy(&self, key: &KeyId) -> Option<&Arc<Policy>> {
        self.policies.get(key)
    }

    /// The caller whose secret this is. The lookup is by digest: it takes no longer for a nearly right secret.
    pub fn caller(&self, secret: &[u8]) -> Option<&Arc<Key>> {
        self.callers.get(&digest(secret))
    }

    /// The guardrails that a caller's requests must pass, its own first.
    pub fn guards(&self, rights: &Rights) -> Vec<&Guard> {
        guarded(rights).filter_map(|(whose, _)| self.guards.get(&whose)).collect()
    }

    /// Whether `place` can be sent to: its channel wants no credential, or has one.
    pub fn has_credential(&self, place: &Place) -> bool {
        place.channel.api_keys.is_empty() || self.credentials.get(&place.channel.id).is_some_and(|all| !all.is_empty())
    }

    /// The credential for a send: the same one for the same `spread`, since a prompt cache belongs to a credential.
    pub fn credential(&self, channel: &ChannelId, spread: &[u8]) -> Option<&Credential> {
        let all = self.credentials.get(channel).filter(|all| !all.is_empty())?;
        let index =
            u64::from_be_bytes(digest(spread)[..8].try_into().expect("a digest has 32 bytes")) % all.len() as u64;
        all.get(usize::try_from(index).unwrap_or(0))
    }

    /// How requests of `group` stick.
    pub fn sticky_policy<'a>(&'a self, group: &'a Group) -> &'a StickyPolicy {
        group.sticky_policy.as_ref().unwrap_or(&self.config.sticky)
    }

    /// How long an affinity made by a key of this type holds, in milliseconds.
    pub fn sticky_ttl_ms(&self, group: &Group, by: KeyType) -> u64 {
        let policy = self.sticky_policy(group);
        let seconds = match by {
            KeyType::Conv | KeyType::Sess => policy.conversation_ttl_seconds,
            KeyType::User => policy.user_model_ttl_seconds,
            KeyType::Bucket => policy.bucket_ttl_seconds,
        };
        u64::from(seconds) * MS_PER_SECOND
    }

    /// The thresholds in force for a send to a member of `group` under `policy`.
    pub fn thresholds(&self, group: &Group, policy: Option<&Policy>) -> Thresholds {
        let health = &self.config.health;
        let of_template = policy.and_then(|policy| policy.failover.as_ref());
        let failover = of_template.or(group.failover_policy.as_ref()).unwrap_or(&health.failover);
        let cooldown_ms_max = u64::from(health.cooldown_seconds_max) * MS_PER_SECOND;
        Thresholds {
            failures: failover.consecutive_retryable_failures,
            cooldown_ms: u64::from(failover.cooldown_seconds) * MS_PER_SECOND,
            growth_permille: health.growth_permille,
            cooldown_ms_max,
            // A blocked model rests as long as the longest cooldown.
            block_ms: cooldown_ms_max,
        }
    }
}

impl Credential {
    fn new(secret: &str) -> Option<Self> {
        let sensitive = |text: &str| {
            let mut value = HeaderValue::from_str(text).ok()?;
            value.set_sensitive(true);
            Some(value)
        };
        Some(Self { bearer: sensitive(&format!("Bearer {secret}"))?, plain: sensitive(secret)? })
    }
}

/// The guardrails of a caller, each with the row that sets them.
fn guarded(rights: &Rights) -> impl Iterator<Item = (RowKey, &Guardrails)> {
    rights
        .terms()
        .filter_map(|(kind, id, terms)| Some((RowKey { kind, id: id.to_owned() }, terms.guardrails.as_ref()?)))
}

/// The policies by key; keys of one template share one.
fn policies(catalogue: &Catalogue) -> HashMap<KeyId, Arc<Policy>> {
    let mut compiled: HashMap<_, Arc<Policy>> = HashMap::new();
    let mut policy = |(key, template): (&KeyId, &Arc<waybill_schema::catalogue::Template>)| {
        let policy = compiled.entry(template.id.clone()).or_insert_with(|| Arc::new(Policy::of(template)));
        (key.clone(), policy.clone())
    };
    catalogue.templates.iter().map(&mut policy).collect()
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}
