//! Fallback chains must end: a request that goes round would try its own model again and call it another.

use std::collections::HashMap;

use super::reader::Here;
use super::value::shown;
use crate::catalogue::{is_pattern, matches};
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

/// The general chains that hold under a template: its own, and those of the routes that it says nothing of.
pub(super) fn laid_over<'a>(own: &[Chained<'a>], routes: &[Chained<'a>]) -> Vec<Chained<'a>> {
    let inherited = routes.iter().filter(|route| own.iter().all(|chain| chain.source != route.source));
    own.iter().chain(inherited).cloned().collect()
}

/// Records every target that closes a circle, naming the circle; tells whether there is none.
pub(super) fn refuse_circles(chains: &[Chained<'_>]) -> bool {
    let mut ends = true;
    let index = Index::new(chains);
    let mut seen = vec![Seen::Not; chains.len()];
    for start in 0..chains.len() {
        let mut path = Vec::new();
        if seen[start] == Seen::Not {
            seen[start] = Seen::OnPath;
            path.push((start, 0));
        }
        while let Some((chain, next)) = path.last_mut() {
            let Some((target, here)) = chains[*chain].targets.get(*next) else {
                seen[*chain] = Seen::Done;
                path.pop();
                continue;
            };
            *next += 1;
            match index.chain_of(target) {
                Some(target) if seen[target] == Seen::OnPath => {
                    ends = false;
                    here.wrong(circle(chains, &path, target));
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

/// The sentence that names the circle from `target` along `path` back to it.
fn circle(chains: &[Chained<'_>], path: &[(usize, usize)], target: usize) -> String {
    let from = path.iter().position(|(chain, _)| *chain == target).unwrap_or_default();
    let round = path[from..].iter().map(|(chain, _)| *chain).chain([target]);
    let names: Vec<String> = round.map(|chain| format!("`{}`", shown(chains[chain].source.as_str()))).collect();
    match names.len() {
        2 => format!("{} falls back to itself", names[0]),
        _ => format!("fallbacks go in a circle: {}", names.join(" → ")),
    }
}

/// Finds the chain whose source is a model: by name, else by the pattern with the most literal text.
struct Index<'c> {
    named: HashMap<&'c str, usize>,
    patterns: Vec<(&'c str, usize)>,
}

impl<'c> Index<'c> {
    fn new(chains: &'c [Chained<'_>]) -> Self {
        let all = || chains.iter().enumerate().map(|(i, chain)| (chain.source.as_str(), i));
        let literal = |pattern: &str| pattern.chars().filter(|c| *c != '*').count();
        let mut patterns: Vec<_> = all().filter(|(source, _)| is_pattern(source)).collect();
        patterns.sort_by_key(|(source, _)| std::cmp::Reverse(literal(source)));
        Self { named: all().collect(), patterns }
    }

    fn chain_of(&self, model: &ModelName) -> Option<usize> {
        let matching = || self.patterns.iter().find(|(pattern, _)| matches(pattern, model.as_str()));
        self.named.get(model.as_str()).copied().or_else(|| matching().map(|(_, chain)| *chain))
    }
}
