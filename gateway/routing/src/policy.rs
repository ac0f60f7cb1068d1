//! Policy: how a pool shares requests, and which models stand in for one that fails, as a template says it.
//!
//! A request without a template has no [`Policy`], and its pool is shared as its members say. Everything here is a
//! lookup; a policy is compiled with the catalogue, when that changes.

use std::collections::HashMap;
use std::sync::Arc;

use waybill_schema::catalogue::{Chain, FailoverPolicy, Place, Pool, Strategy, Template};
use waybill_schema::event::ChainKind;
use waybill_schema::id::{DeploymentId, ModelName};

use crate::classify::Recourse;

/// A template, compiled.
#[derive(Debug)]
pub struct Policy {
    /// Sends to one deployment, the first included; absent inherits the platform's.
    pub max_attempts: Option<u32>,
    /// When what its requests are sent to cools down; absent inherits the group's.
    pub failover: Option<FailoverPolicy>,
    /// Whether replies name the deployment that served.
    pub expose_route: bool,
    rules: HashMap<ModelName, Rule>,
    general: Chains,
    context: Chains,
    content: Chains,
}

type Chains = HashMap<ModelName, Vec<ModelName>>;

/// How a pool shares requests.
#[derive(Debug)]
pub struct Rule {
    /// What goes first.
    pub strategy: Strategy,
    /// The split; absent inherits the members' weights.
    split: Option<HashMap<DeploymentId, u32>>,
}

/// A pool as its policy sees it: what was asked for, and where that leads.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The policy of the caller, where there is one.
    pub policy: Option<&'a Policy>,
    /// The pool.
    pub pool: &'a Pool,
    /// The model or group that was asked of it.
    pub model: &'a ModelName,
}

impl Policy {
    /// Compiles a template.
    pub fn of(template: &Template) -> Self {
        let chains = |chains: &[Chain]| chains.iter().map(|c| (c.source.clone(), c.targets.clone())).collect();
        let rules = template.model_routes.iter().map(|route| {
            let split = route.allocations.as_ref();
            let split = split.map(|parts| parts.iter().map(|part| (part.deployment.clone(), part.weight)).collect());
            (route.model.clone(), Rule { strategy: route.strategy, split })
        });
        Self {
            max_attempts: template.max_attempts,
            failover: template.failover_policy.clone(),
            expose_route: template.expose_route,
            rules: rules.collect(),
            general: chains(&template.fallbacks),
            context: chains(&template.context_window_fallbacks),
            content: chains(&template.content_policy_fallbacks),
        }
    }

    /// Whether any of its rules ranks by what the gateway has on its way.
    pub fn watches_load(&self) -> bool {
        self.rules.values().any(|rule| rule.strategy.watches_load())
    }
}

/// What a strategy needs to know.
trait Watches {
    fn watches_load(self) -> bool;
}

impl Watches for Strategy {
    fn watches_load(self) -> bool {
        match self {
            Self::LeastBusy | Self::Latency => true,
            Self::Priority | Self::TrafficSplit => false,
        }
    }
}

impl Rule {
    /// The weight of `place`: that of the split, in which who is not listed weighs 1, else the member's own (S3.20). A
    /// member whose own weight is 0 serves only where the split names it.
    pub fn weight(&self, place: &Place) -> u32 {
        match &self.split {
            None => place.member.weight,
            Some(split) => split.get(&place.deployment).copied().unwrap_or(place.member.weight.min(1)),
        }
    }
}

impl<'a> Subject<'a> {
    /// The rule for the pool: that of the model by its name, of the route by its pattern, of the group, in this order
    /// (S3.20). The default is no rule.
    pub fn rule(&self) -> Option<&'a Rule> {
        let rules = &self.policy?.rules;
        let of_model = rules.get(self.model).or_else(|| rules.get(&self.pool.route.model));
        of_model.or_else(|| rules.get(self.pool.group.id.as_str()))
    }

    /// What may stand in for the model after a failure, in order (S3.15, S3.18), each with the chain that names it. A full
    /// context or a refused content has its own chain; without one the former falls back as anything does, and the latter
    /// not at all.
    pub fn targets(&self, recourse: Recourse) -> Vec<(ChainKind, &'a ModelName)> {
        use ChainKind::{Content, Context, General};
        let kinds: &[ChainKind] = match recourse {
            Recourse::None => &[],
            Recourse::General => &[General],
            Recourse::Context if self.context().is_some() => &[Context],
            Recourse::Context => &[General],
            Recourse::ContextThenGeneral => &[Context, General],
            Recourse::Content => &[Content],
        };
        kinds.iter().flat_map(|kind| self.chain(*kind).iter().map(|target| (*kind, target))).collect()
    }

    /// Whether the chain leads to `target` (S3.19); where it is not known which, whether any does.
    pub fn reaches(&self, target: &ModelName, by: Option<ChainKind>) -> bool {
        let any = &[ChainKind::General, ChainKind::Context, ChainKind::Content][..];
        let kinds = by.as_ref().map_or(any, std::slice::from_ref);
        kinds.iter().any(|kind| self.chain(*kind).contains(target))
    }

    /// The pool at the end of `way`, by which a session was once led to a fallback model, while every step of it is still
    /// one of the chain that it was (S3.19). `admit` gives the pool of a target, or refuses it to the caller.
    pub fn follow<E>(
        &self,
        way: &Way,
        admit: impl Fn(&ModelName) -> Result<Arc<Pool>, E>,
    ) -> Result<Option<Arc<Pool>>, E> {
        let mut reached: Option<(Arc<Pool>, &ModelName)> = None;
        for (at, target) in way.path.iter().enumerate() {
            let by = way.chains.get(at).copied();
            let leads = match &reached {
                None => self.reaches(target, by),
                Some((pool, model)) => Subject { policy: self.policy, pool, model }.reaches(target, by),
            };
            if !leads {
                return Ok(None);
            }
            reached = Some((admit(target)?, target));
        }
        Ok(reached.map(|(pool, _)| pool))
    }

    /// The template's chain of the kind for the model, else its default: for general failures the one that its route names.
    fn chain(&self, kind: ChainKind) -> &'a [ModelName] {
        let of_template = self.own(|policy| match kind {
            ChainKind::General => &policy.general,
            ChainKind::Context => &policy.context,
            ChainKind::Content => &policy.content,
        });
        of_template.unwrap_or(match kind {
            ChainKind::General => &self.pool.route.fallbacks,
            ChainKind::Context | ChainKind::Content => &[],
        })
    }

    fn context(&self) -> Option<&'a [ModelName]> {
        self.own(|policy| &policy.context)
    }

    fn own(&self, of: impl Fn(&Policy) -> &Chains) -> Option<&'a [ModelName]> {
        let chains = of(self.policy?);
        chains.get(self.model).or_else(|| chains.get(&self.pool.route.model)).map(Vec::as_slice)
    }
}

/// How a request came to a fallback model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// The fallback targets on the way; empty at home.
    pub path: Vec<ModelName>,
    /// The chain that each of them is one of; empty where a record does not say.
    pub chains: Vec<ChainKind>,
}

impl Way {
    /// One step further.
    fn to(&self, kind: ChainKind, target: &ModelName) -> Self {
        let mut way = self.clone();
        if way.chains.len() == way.path.len() {
            way.chains.push(kind);
        }
        way.path.push(target.clone());
        way
    }
}

/// The fallback targets that a request has yet to try, the next first. None is tried twice, so a walk ends even where
/// chains lead back.
#[derive(Debug, Default)]
pub struct Walk {
    ahead: Vec<Way>,
    seen: Vec<ModelName>,
}

impl Walk {
    /// Puts what stands in for the model behind `way` before everything else: `way` is how the request came to that
    /// model, `source` the model, which is no target for itself.
    pub fn turn(&mut self, source: &ModelName, way: &Way, targets: &[(ChainKind, &ModelName)]) {
        if targets.is_empty() {
            return;
        }
        self.note(source);
        let mut steps: Vec<Way> = Vec::new();
        for (kind, target) in targets {
            if self.note(target) {
                steps.push(way.to(*kind, target));
            }
        }
        steps.append(&mut self.ahead);
        self.ahead = steps;
    }

    /// The way to the next target, which is the last on it.
    pub fn step(&mut self) -> Option<Way> {
        (!self.ahead.is_empty()).then(|| self.ahead.remove(0))
    }

    fn note(&mut self, model: &ModelName) -> bool {
        let new = !self.seen.contains(model);
        if new {
            self.seen.push(model.clone());
        }
        new
    }
}
