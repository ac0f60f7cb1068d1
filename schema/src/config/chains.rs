//! Fallback chains must end: a request that goes round would try its own model again and call it another.

use std::collections::HashMap;

use super::names::Names;
use super::reader::Here;
use super::value::shown;
use crate::id::ModelName;

/// A source and where it falls back to, each target with its place.
#[derive(Clone)]
pub(super) struct Chained<'a> {
    pub(super) source: ModelName,
    pub(super) targets: Vec<(ModelName, Here<'a>)>,
}

/// How far the search has come with a chain.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    Not,
    /// It is on the path being followed.
    OnPath,
    Done,
}

/// Records every circle among chains, at a target of the first layer that is part of it; tells whether there is none.
/// Of `layers` the first that has a chain of a model holds for it: a kind's own, what it inherits, the routes' defaults.
pub(super) fn refuse_circles(layers: &[&[Chained<'_>]], names: &Names) -> bool {
    let mut ends = true;
    let index = Index::new(layers, names);
    let chains = &index.chains;
    let n_own = layers.first().map_or(0, |own| own.len());
    let mut seen = vec![Seen::Not; chains.len()];
    for start in 0..n_own {
        let mut path = Vec::new();
        if seen[start] == Seen::Not {
            seen[start] = Seen::OnPath;
            path.push((start, 0));
        }
        while let Some((chain, next)) = path.last_mut() {
            let Some((target, _)) = chains[*chain].targets.get(*next) else {
                seen[*chain] = Seen::Done;
                path.pop();
                continue;
            };
            *next += 1;
            match index.chain_of(target) {
                Some(target) if seen[target] == Seen::OnPath => {
                    ends = false;
                    let from = path.iter().position(|(chain, _)| *chain == target).unwrap_or_default();
                    refuse(chains, &path[from..], n_own);
                }
                Some(target) if seen[target] == Seen::Not => {
                    seen[target] = Seen::OnPath;
                    path.push((target, 0));
                }
                Some(_) | None => {}
            }
        }
    }
    ends
}

/// Names the circle whose last target leads back to its first chain, where the last of the own chains on it leads on.
fn refuse(chains: &[&Chained<'_>], circle: &[(usize, usize)], n_own: usize) {
    let round = circle.iter().chain(circle.first()).map(|(chain, _)| *chain);
    let names: Vec<String> = round.map(|chain| format!("`{}`", shown(chains[chain].source.as_str()))).collect();
    let own = circle.iter().rev().find(|(chain, _)| *chain < n_own);
    let Some((_, here)) = own.and_then(|(chain, next)| chains[*chain].targets.get(next - 1)) else { return };
    here.wrong(match names.len() {
        2 => format!("{} falls back to itself", names[0]),
        _ => format!("fallbacks go in a circle: {}", names.join(" → ")),
    });
}

/// Finds the chain that holds for a model, as a request does: in each layer that of its name, else that of its route.
struct Index<'c, 'a> {
    chains: Vec<&'c Chained<'a>>,
    layers: Vec<HashMap<&'c str, usize>>,
    names: &'c Names,
}

impl<'c, 'a> Index<'c, 'a> {
    fn new(layers: &[&'c [Chained<'a>]], names: &'c Names) -> Self {
        let chains: Vec<&Chained<'a>> = layers.iter().copied().flatten().collect();
        let mut numbered = chains.iter().enumerate();
        let layer = |chains: &&'c [Chained<'a>]| -> HashMap<&'c str, usize> {
            numbered.by_ref().take(chains.len()).map(|(n, chain)| (chain.source.as_str(), n)).collect()
        };
        Self { layers: layers.iter().map(layer).collect(), chains, names }
    }

    fn chain_of(&self, model: &ModelName) -> Option<usize> {
        let (model, route) = (model.as_str(), self.names.route_of(model.as_str()));
        self.layers.iter().find_map(|layer| layer.get(model).or_else(|| layer.get(route?)).copied())
    }
}
