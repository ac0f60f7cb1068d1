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

    /// What may stand in for the model after a failure, in order (S3.15, S3.18). A full context or a refused content
    /// has its own chain; without one the former falls back as anything does, and the latter not at all.
    pub fn targets(&self, recourse: Recourse) -> Vec<&'a ModelName> {
        let (first, then): (&[ModelName], &[ModelName]) = match recourse {
            Recourse::None => (&[], &[]),
            Recourse::General => (self.general(), &[]),
            Recourse::Context => (self.context().unwrap_or_else(|| self.general()), &[]),
            Recourse::ContextThenGeneral => (self.context().unwrap_or_default(), self.general()),
            Recourse::Content => (self.content().unwrap_or_default(), &[]),
        };
        first.iter().chain(then).collect()
    }

    /// Whether some chain of the model leads to `target` (S3.19).
    pub fn reaches(&self, target: &ModelName) -> bool {
        let chains = [Some(self.general()), self.context(), self.content()];
        chains.into_iter().flatten().any(|targets| targets.contains(target))
    }

    /// The pool at the end of `path`, by which a session was once led to a fallback model, while every step of it is still
    /// one of some chain (S3.19). `admit` gives the pool of a target, or refuses it to the caller.
    pub fn follow<E>(
        &self,
        path: &[ModelName],
        admit: impl Fn(&ModelName) -> Result<Arc<Pool>, E>,
    ) -> Result<Option<Arc<Pool>>, E> {
        let mut reached: Option<(Arc<Pool>, &ModelName)> = None;
        for target in path {
            let leads = match &reached {
                None => self.reaches(target),
                Some((pool, model)) => Subject { policy: self.policy, pool, model }.reaches(target),
            };
            if !leads {
                return Ok(None);
            }
            reached = Some((admit(target)?, target));
        }
        Ok(reached.map(|(pool, _)| pool))
    }

    /// The template's chain for the model, else the model's default, which its route names.
    fn general(&self) -> &'a [ModelName] {
        self.chain(|policy| &policy.general).unwrap_or(&self.pool.route.fallbacks)
    }

    fn context(&self) -> Option<&'a [ModelName]> {
        self.chain(|policy| &policy.context)
    }

    fn content(&self) -> Option<&'a [ModelName]> {
        self.chain(|policy| &policy.content)
    }

    fn chain(&self, of: fn(&Policy) -> &Chains) -> Option<&'a [ModelName]> {
        let chains = of(self.policy?);
        chains.get(self.model).or_else(|| chains.get(&self.pool.route.model)).map(Vec::as_slice)
    }
}

/// The fallback targets that a request has yet to try, the next first. None is tried twice, so a walk ends even where
/// chains lead back.
#[derive(Debug, Default)]
pub struct Walk {
    ahead: Vec<Vec<ModelName>>,
    seen: Vec<ModelName>,
}

impl Walk {
    /// Puts what stands in for the model behind `path` before everything else: `path` is how the request came to that
    /// model, `source` the model, which is no target for itself.
    pub fn turn(&mut self, source: &ModelName, path: &[ModelName], targets: &[&ModelName]) {
        if targets.is_empty() {
            return;
        }
        self.note(source);
        let mut steps: Vec<Vec<ModelName>> = Vec::new();
        for target in targets {
            if self.note(target) {
                steps.push(path.iter().chain([*target]).cloned().collect());
            }
        }
        steps.append(&mut self.ahead);
        self.ahead = steps;
    }

    /// The path to the next target, which is its last element.
    pub fn step(&mut self) -> Option<Vec<ModelName>> {
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
