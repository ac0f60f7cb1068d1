//! Continuations: requests that are held to what an upstream keeps (S3.3, S3.9, S3.16, S3.24).
//!
//! A request that goes on from a response, or is about one, goes to the response's owner over the owner's connection, or
//! nowhere. Who owns what is made here is recorded when its id is seen, and again at its end, before the last bytes go
//! out: so nobody can name a response whose owner nobody knows (docs/adr/0034).

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use http::{Method, Response};
use tokio::time::Instant;
use waybill_routing::ownership::{self, Name, Unowned};
use waybill_routing::request::Inbound;
use waybill_routing::session;
use waybill_schema::catalogue::{Catalogue, Place, Pool};
use waybill_schema::event::{Context, Endpoint, Ownedness, Ownership, SessionSource};
use waybill_schema::id::{RequestId, SessionId};
use waybill_schema::redis::Owner;
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::answer::Body;
use crate::flight::{Crossing, Departure, Flight, Seen};
use crate::journey::Journey;
use crate::proxy::{Arrived, Gateway};
use crate::refusal::Refusal;
use crate::shared::{Away, Known};
use crate::upstream::Errand;

/// The longest id of a response that is looked for, in bytes.
const ID_BYTES_MAX: usize = 256;

/// What holds a request to one owner.
#[derive(Clone, Debug)]
pub struct Hold {
    /// Who.
    pub owner: Owner,
    /// What is asked of a response that is there; nothing where the request goes on from it.
    pub errand: Option<Errand>,
    name: Name,
}

impl Hold {
    /// The refusal where the owner can serve no more.
    pub(crate) fn gone(&self) -> Refusal {
        match self.errand {
            Some(_) => Refusal::Response(Unowned::Gone),
            None => Refusal::Parent(Unowned::Gone),
        }
    }
}

/// What an upstream keeps of a request, and what of it is not sealed yet.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// Whether it keeps the response under its id.
    response: bool,
    /// The conversation that the request is a part of, where nobody owns it yet.
    conversation: Option<Name>,
    /// Whether the request may not be sent without a record of it.
    strict: bool,
    /// Whether the response is made in the background.
    background: bool,
    unsealed: Vec<(Name, Owner)>,
}

/// A send whose response is owned by where it went.
pub(crate) struct Made<'a> {
    pub(crate) secret: &'a DeploymentSecret,
    pub(crate) request: &'a RequestId,
    pub(crate) context: &'a Context,
    pub(crate) hold: Option<&'a Hold>,
    pub(crate) place: &'a Place,
    pub(crate) connection: u64,
}

impl Kept {
    /// Whether the request continues something or leaves something behind, so that it needs a record.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether the response is made in the background, whoever listens.
    pub fn in_background(&self) -> bool {
        self.background
    }

    /// The facts about ownership that follow from what was `seen` of the response.
    pub(crate) fn facts(&mut self, made: &Made<'_>, seen: &Seen) -> Vec<Ownership> {
        let scope = &made.context.scope;
        let facts = match made.hold {
            Some(Hold { owner, errand: Some(_), name }) => {
                let became_final = seen.ended && owner.state == Ownedness::Provisional;
                became_final.then(|| (name.clone(), owner.clone())).into_iter().collect()
            }
            Some(_) | None => {
                let owner = made.owner();
                let response = self.response.then(|| Name::of_response(made.secret, scope, &seen.id));
                let conversation = if seen.ended { self.conversation.clone() } else { None };
                response.into_iter().chain(conversation).map(|name| (name, owner.clone())).collect::<Vec<_>>()
            }
        };
        let state = if seen.ended { Ownedness::Final } else { Ownedness::Provisional };
        facts.into_iter().map(|(name, owner)| self.own(name, Owner { state, ..owner }, made.request)).collect()
    }

    /// What is to be sealed.
    pub(crate) fn take_unsealed(&mut self) -> Vec<(Name, Owner)> {
        std::mem::take(&mut self.unsealed)
    }

    fn own(&mut self, name: Name, owner: Owner, request: &RequestId) -> Ownership {
        self.unsealed.retain(|(known, _)| *known != name);
        self.unsealed.push((name.clone(), owner.clone()));
        Ownership {
            response: name.response,
            state: owner.state,
            request: request.clone(),
            scope: name.scope,
            model: owner.model,
            endpoint: owner.endpoint,
            deployment: owner.deployment,
            channel: owner.channel,
            incarnation: owner.incarnation,
            session: owner.session,
            source: owner.source,
        }
    }
}

impl Made<'_> {
    fn owner(&self) -> Owner {
        Owner {
            deployment: self.place.deployment.clone(),
            channel: self.place.channel.id.clone(),
            incarnation: self.connection,
            model: self.context.model.clone(),
            endpoint: self.context.endpoint,
            session: self.context.session.clone(),
            source: self.context.source,
            state: Ownedness::Provisional,
        }
    }
}

/// The wait until who owns a response is on the disk and shown to other gateways; tells whether it is on the disk.
pub struct Seal(Pin<Box<dyn Future<Output = bool> + Send>>);

impl Seal {
    /// Seals `owned`; nothing where there is nothing to seal.
    pub(crate) fn of(gateway: Arc<Gateway>, owned: Vec<(Name, Owner)>) -> Option<Self> {
        (!owned.is_empty()).then(|| Self(Box::pin(async move { seal(&gateway, &owned).await })))
    }
}

impl Future for Seal {
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<bool> {
        self.0.as_mut().poll(task)
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seal(…)")
    }
}

async fn seal(gateway: &Gateway, owned: &[(Name, Owner)]) -> bool {
    if !gateway.ledger.seal().await {
        tracing::error!("a response is given out whose owner could not be recorded: it cannot be continued");
        gateway.metrics.unowned();
        owned.iter().for_each(|(name, _)| gateway.ledger.disown(name));
        return false;
    }
    let now = Time::wall_clock();
    for (name, owner) in owned {
        gateway.shared.show(name, owner, now).await;
    }
    true
}

/// What a request for a new response is tied to.
pub(crate) struct Tie {
    pub(crate) hold: Option<Hold>,
    pub(crate) kept: Kept,
    /// Whether the hold is a parent, whose session is inherited; else it is a conversation.
    by_parent: bool,
}

impl Tie {
    /// Looks up what the request goes on from, if it does.
    pub(crate) async fn find(
        gateway: &Gateway,
        arrived: &Arrived,
        inbound: &Inbound<'_>,
        model: &str,
    ) -> Result<Self, Refusal> {
        let endpoint = arrived.endpoint;
        let scope = &arrived.scope;
        let conversation = session::conversation_object(inbound).filter(|_| endpoint == Endpoint::Responses);
        let by_parent = inbound.previous_response_id.is_some();
        let strict = by_parent || conversation.is_some() || inbound.background;
        if strict && !gateway.ledger.records() {
            return Err(Refusal::NoRecord);
        }
        let response = endpoint == Endpoint::Responses && !inbound.is_not_stored();
        let mut kept = Kept { response, strict, background: inbound.background, ..Kept::default() };
        let hold = if by_parent {
            let id = inbound.previous_response_id().ok_or(Refusal::Parent(Unowned::Unknown))?;
            let name = Name::of_response(&gateway.secret, scope, &id);
            let owner = owner_of(gateway, &name).await.map_err(Refusal::Parent)?;
            ownership::continues(&owner, model, endpoint).map_err(Refusal::Parent)?;
            Some(Hold { owner, errand: None, name })
        } else if let Some(id) = conversation {
            let name = Name::of_conversation(&gateway.secret, scope, &id);
            match owner_of(gateway, &name).await {
                Ok(owner) => Some(Hold { owner, errand: None, name }),
                // Conversations are made elsewhere: whoever answers its first request has it.
                Err(Unowned::Unknown) => {
                    kept.conversation = Some(name);
                    None
                }
                Err(why) => return Err(Refusal::Parent(why)),
            }
        } else {
            None
        };
        Ok(Self { hold, kept, by_parent })
    }

    /// The session that is inherited.
    pub(crate) fn parent(&self) -> Option<&SessionId> {
        self.hold.as_ref().filter(|_| self.by_parent).map(|hold| &hold.owner.session)
    }

    /// What of `pool` the request is held to: the parent's deployment, or what lies behind the conversation's connection.
    /// Where another model stood in (S3.19), the owner is outside the pool, among what else the caller reaches.
    pub(crate) fn narrow(&self, pool: Arc<Pool>, arrived: &Arrived) -> Result<Arc<Pool>, Refusal> {
        let Some(hold) = &self.hold else { return Ok(pool) };
        let catalogue = &arrived.serving.catalogue;
        let here = |place: &Place| !self.by_parent || place.deployment == hold.owner.deployment;
        let narrowed = held(&pool, catalogue, &hold.owner, here).or_else(|| reached(arrived, &hold.owner));
        narrowed.map(Arc::new).ok_or_else(|| hold.gone())
    }
}

/// The owner's deployment, wherever the caller reaches it.
fn reached(arrived: &Arrived, owner: &Owner) -> Option<Pool> {
    let catalogue = &arrived.serving.catalogue;
    let here = |place: &Place| place.deployment == owner.deployment;
    arrived.key.groups().find_map(|group| held(catalogue.whole(group)?, catalogue, owner, here))
}

/// The places of `pool` behind the owner's connection for which `holds`; `None` where there is none, or the connection is
/// another one by now.
fn held(pool: &Pool, catalogue: &Catalogue, owner: &Owner, holds: impl Fn(&Place) -> bool) -> Option<Pool> {
    if catalogue.connection(&owner.channel) != Some(owner.incarnation) {
        return None;
    }
    let here = pool.places.iter().filter(|place| place.channel.id == owner.channel && holds(place));
    let places: Vec<_> = here.cloned().collect();
    (!places.is_empty()).then(|| Pool { group: pool.group.clone(), route: pool.route.clone(), places })
}

/// Who owns a response, or why that cannot be told. What is read is counted.
async fn owner_of(gateway: &Gateway, name: &Name) -> Result<Owner, Unowned> {
    let known = gateway.shared.owner(name).await;
    let own = gateway.ledger.own(name);
    let sighting = match known {
        Known::Own(sighting) => sighting,
        Known::Read(sighting) => {
            gateway.metrics.state_read("answered");
            sighting
        }
        // Here own facts are all there is to know.
        Known::Away(Away::Unshared) => return own.owner.ok_or(Unowned::Unreadable),
        Known::Away(away) => {
            gateway.metrics.state_read(if away == Away::Skipped { "skipped" } else { "failed" });
            return Err(Unowned::Unreadable);
        }
    };
    ownership::judge(sighting, own, Time::wall_clock())
}

impl Errand {
    /// What is asked of a response by a path behind `/v1/responses/`; `None` for anything else, and for an id that no
    /// upstream gives.
    pub(crate) fn read(method: &Method, path: &str) -> Option<Self> {
        let (id, rest) = path.find('/').map_or((path, ""), |at| path.split_at(at));
        let rest = match (method, rest) {
            (&Method::GET | &Method::DELETE, "") => "",
            (&Method::POST, "/cancel") => "/cancel",
            (&Method::GET, "/input_items") => "/input_items",
            _ => return None,
        };
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        let good = !id.is_empty() && id.len() <= ID_BYTES_MAX && id.bytes().all(is_plain);
        good.then(|| Self { method: method.clone(), id: id.to_owned(), rest })
    }

    /// Whether the answer is to be a stream.
    fn streams(&self, query: Option<&str>) -> bool {
        let asks = query.is_some_and(|query| query.split('&').any(|pair| pair == "stream=true"));
        asks && self.method == Method::GET && self.rest.is_empty()
    }
}

/// Asks a response's owner what the client asks of the response; `DELETE`, `cancel` and `GET` need its id alone (S3.9).
pub(crate) async fn ask(gateway: &Arc<Gateway>, arrived: &Arrived, errand: Errand) -> Result<Response<Body>, Refusal> {
    let Arrived { key, scope, serving, endpoint, .. } = arrived;
    let name = Name::of_response(&gateway.secret, scope, &errand.id);
    let owner = owner_of(gateway, &name).await.map_err(Refusal::Response)?;
    let catalogue = &serving.catalogue;
    let asked = key.groups().find_map(|group| {
        let pool = catalogue.asked(key, group, owner.model.as_str())?;
        held(&pool, catalogue, &owner, |place| place.deployment == owner.deployment)
    });
    let pool = asked.or_else(|| reached(arrived, &owner)).ok_or(Refusal::Response(Unowned::Gone))?;
    let pool = Arc::new(pool);
    let model = owner.model.clone();
    let inbound = Inbound::about_a_response(model.as_str(), errand.streams(arrived.query.as_deref()));
    let context = Context {
        scope: scope.clone(),
        key: key.id.clone(),
        group: pool.group.id.clone(),
        model: model.clone(),
        endpoint: *endpoint,
        stream: inbound.stream,
        session: owner.session.clone(),
        source: SessionSource::Parent,
        signal: "path:response_id".to_owned(),
        sticky: None,
    };
    let flight = Flight::new(Departure {
        gateway: gateway.clone(),
        serving: serving.clone(),
        pool,
        crossing: Crossing::Never,
        request: arrived.request.clone(),
        context,
        rights: serving.catalogue.rights(&arrived.key),
        hold: Some(Hold { owner, errand: Some(errand), name }),
        kept: Kept::default(),
        begun: arrived.begun,
    });
    let deadline = Instant::now() + Duration::from_secs(serving.config.retry.timeout_seconds.into());
    Ok(Journey { gateway, arrived, inbound, deadline, asks_usage: false, bodies: Vec::new() }.travel(flight).await)
}
