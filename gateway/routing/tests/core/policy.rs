//! Templates against hand-made tables: how a pool is shared, what stands in for a model, and how a walk ends.
//!
//! A template is written as an operator writes it. The pool of `gpt` has the deployments `a/gpt` (weight 5, tier 1),
//! `b/gpt` (weight 3, tier 2) and `c/gpt` (weight 0, tier 1); `mini` and `large` have one each.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use waybill_routing::classify::Recourse;
use waybill_routing::policy::{Policy, Subject, Walk, Way};
use waybill_routing::select::{self, Ask, Moment, Shares};
use waybill_routing::split::Cursor;
use waybill_routing::state::State;
use waybill_schema::catalogue::{Catalogue, Key, Pool, Rows, Strategy as Sharing};
use waybill_schema::config;
use waybill_schema::event::{ChainKind, Choice, Endpoint, Exclusion, Reason};
use waybill_schema::id::{DeploymentId, ModelName};
use waybill_schema::time::Time;

const CATALOGUE: &str = "
catalogue:
  channels:
    - { id: a, base_url: 'http://a.invalid/v1', dialects: [chat] }
    - { id: b, base_url: 'http://b.invalid/v1', dialects: [chat] }
    - { id: c, base_url: 'http://c.invalid/v1', dialects: [chat] }
  groups:
    - { id: main }
    - { id: pool, public_models: [gpt, mini], requestable: true }
    - { id: shut, public_models: [gpt] }
  routes:
    - { model: gpt, fallbacks: [mini], members: [
        { channel: a, group: main, weight: 5, priority: 1 },
        { channel: b, group: main, weight: 3, priority: 2 },
        { channel: c, group: main, weight: 0, priority: 1 },
        { channel: a, group: pool, weight: 5, priority: 1 },
        { channel: b, group: pool, weight: 3, priority: 2 },
        { channel: b, group: shut } ] }
    - { model: mini, members: [ { channel: a, group: main }, { channel: a, group: pool, weight: 2, priority: 1 } ] }
    - { model: large, members: [ { channel: b, group: main }, { channel: b, group: pool } ] }
    - { model: 'open-*', members: [ { channel: c, group: main } ] }
  keys:
    - { id: k, key: 'env:K', group: main, groups: [pool], template: t }
";

/// A catalogue and the template that holds.
struct Shop {
    catalogue: Catalogue,
    key: Arc<Key>,
    policy: Policy,
}

impl Shop {
    /// The shop under a template with these `fields`.
    fn with(fields: &str) -> Self {
        let text = format!("{CATALOGUE}  templates:\n    - {{ id: t, {fields} }}\n");
        let config = config::parse(&text, "test", &|_| None).unwrap_or_else(|problems| panic!("{problems:?}"));
        assert!(config.warnings.is_empty(), "all of it is in force: {:?}", config.warnings);
        let mut rows = Rows::default();
        rows.apply(&rows.batch_to(config.rows, "me", "test", None)).expect("the batch was made for these rows");
        let catalogue = Catalogue::compile(&rows);
        let key = catalogue.keys["k"].clone();
        let policy = Policy::of(&catalogue.templates["k"]);
        Self { catalogue, key, policy }
    }

    /// What the key asks for, in one of its groups.
    fn pool(&self, group: &str, name: &str) -> Arc<Pool> {
        self.catalogue.asked(&self.key, &group.into(), name).expect("the key may ask for it")
    }

    fn look(&self, pool: &Pool, name: &str, rank: &dyn Fn(&str, u32) -> i32, draw: u64) -> Choice {
        let model = ModelName::from(name);
        let rule = Subject { policy: Some(&self.policy), pool, model: &model }.rule();
        let rank = |place: &waybill_schema::catalogue::Place| {
            rank(place.deployment.as_str(), rule.map_or(0, |rule| rule.weight(place)))
        };
        let ask = Ask {
            pool,
            model: &model,
            endpoint: Endpoint::Chat,
            sticky: None,
            exhausted: &[],
            has_credential: &|_| true,
            last_resort: false,
            catalogue: 1,
            path: &[],
            shares: rule.map(|rule| Shares { rule, rank: &rank }),
        };
        select::look(&ask, &Moment { state: &State::default(), now: Time(0), draw })
    }

    /// What may stand in for a model or group asked for in `main`.
    fn targets(&self, name: &str, recourse: Recourse) -> String {
        let (pool, model) = (self.pool("main", name), ModelName::from(name));
        let subject = Subject { policy: Some(&self.policy), pool: &pool, model: &model };
        let targets: Vec<&str> = subject.targets(recourse).into_iter().map(|(_, target)| target.as_str()).collect();
        targets.join(" ")
    }
}

/// The candidates of `name` under a template: `DEPLOYMENT tier:weight`, `-` for one of weight 0; ranks are 9.
fn check(template: &str, (group, name): (&str, &str), expected: &str) {
    let shop = Shop::with(template);
    let choice = shop.look(&shop.pool(group, name), name, &|_, _| 9, 7);
    let by_name: BTreeMap<&DeploymentId, String> = choice.candidates.iter().map(|c| (&c.deployment, seen(c))).collect();
    let seen: Vec<String> = by_name.iter().map(|(deployment, seen)| format!("{deployment} {seen}")).collect();
    assert_eq!(seen.join(", "), expected, "{template}");
}

fn seen(candidate: &waybill_schema::event::Candidate) -> String {
    match candidate.excluded {
        None => format!("{}:{}", candidate.priority, candidate.weight),
        Some(Exclusion::ZeroWeight) => "-".to_owned(),
        Some(other) => panic!("{other:?}"),
    }
}

const GPT: (&str, &str) = ("main", "gpt");

/// S3.20, S2.3: a model without a rule inherits its members' tiers and weights.
#[test]
fn a_model_without_a_rule_is_shared_as_its_members_say() {
    check("", GPT, "a/gpt 1:5, b/gpt 2:3, c/gpt -");
    check("model_routes: [{ model: mini }]", GPT, "a/gpt 1:5, b/gpt 2:3, c/gpt -");
    check("model_routes: [{ model: gpt }]", GPT, "a/gpt 1:5, b/gpt 2:3, c/gpt -");
    check("model_routes: [{ model: gpt, strategy: traffic_split }]", GPT, "a/gpt 9:5, b/gpt 9:3, c/gpt -");
}

/// S3.20: a split that names nobody is one of equal shares; who is not named in one weighs 1; 0 takes out; who has the
/// weight 0 of his own serves only where he is named.
#[test]
fn a_split_goes_before_the_members_weights() {
    let split =
        |parts: &str| format!("model_routes: [{{ model: gpt, strategy: traffic_split, allocations: [{parts}] }}]");
    check(&split(""), GPT, "a/gpt 9:1, b/gpt 9:1, c/gpt -");
    check(&split("{ deployment: a/gpt, weight: 7 }"), GPT, "a/gpt 9:7, b/gpt 9:1, c/gpt -");
    check(&split("{ deployment: a/gpt, weight: 0 }"), GPT, "a/gpt -, b/gpt 9:1, c/gpt -");
    check(&split("{ deployment: c/gpt, weight: 2 }"), GPT, "a/gpt 9:1, b/gpt 9:1, c/gpt 9:2");
    let within_tiers = "model_routes: [{ model: gpt, allocations: [{ deployment: a/gpt, weight: 7 }] }]";
    check(within_tiers, GPT, "a/gpt 1:7, b/gpt 2:1, c/gpt -");
}

/// S3.20: the exact rule of a model goes before its group's; one that inherits the group's keeps to its own deployments.
#[test]
fn a_models_own_rule_goes_before_its_groups() {
    let group = "{ model: main, strategy: least_busy, allocations: [{ deployment: b/gpt, weight: 4 }] }";
    check(&format!("model_routes: [{group}]"), GPT, "a/gpt 9:1, b/gpt 9:4, c/gpt -");
    check(&format!("model_routes: [{group}, {{ model: gpt }}]"), GPT, "a/gpt 1:5, b/gpt 2:3, c/gpt -");
    check(&format!("model_routes: [{group}]"), ("main", "mini"), "a/mini 9:1");
    let pattern = "model_routes: [{ model: 'open-*', allocations: [{ deployment: c/open-1, weight: 6 }] }]";
    check(pattern, ("main", "open-1"), "c/open-1 10:6");
}

/// S3.20, S3.11: a group asked for as a model is all its models' deployments; its own split counts alone, not times the
/// members' weights. It shows nothing that it does not show by name.
#[test]
fn a_group_is_a_model_with_its_own_split() {
    let pool = ("main", "pool");
    check("", pool, "a/gpt 1:5, a/mini 1:2, b/gpt 2:3");
    let split =
        "model_routes: [{ model: pool, strategy: traffic_split, allocations: [{ deployment: a/gpt, weight: 7 }] }]";
    check(split, pool, "a/gpt 9:7, a/mini 9:1, b/gpt 9:1");
}

/// S3.18, S1.4, PITFALLS H03: a group is a model only for a key that reaches it, and only where that may be asked for; a
/// chain may lead to whatever the key could have asked for, under any spelling, and nowhere else.
#[test]
fn a_name_leads_nowhere_that_the_key_does_not_reach() {
    let shop = Shop::with("");
    let asked = |name| shop.catalogue.asked(&shop.key, &"main".into(), name).map(|pool| pool.group.id.to_string());
    let target =
        |key: &Key, name| shop.catalogue.target(key, &"main".into(), name).map(|pool| pool.group.id.to_string());
    assert_eq!(asked("gpt").as_deref(), Some("main"));
    assert_eq!(asked("pool").as_deref(), Some("pool"));
    assert_eq!((asked("shut"), asked("main"), asked("nobody")), (None, None, None));
    assert_eq!(target(&shop.key, "pool").as_deref(), Some("pool"));
    assert_eq!((target(&shop.key, "shut"), target(&shop.key, "nobody")), (None, None));
    let alone = Key { groups: Vec::new(), ..Key::clone(&shop.key) };
    assert_eq!(target(&alone, "pool"), None);
    let elsewhere = Key { group: "pool".into(), groups: vec!["main".into()], ..Key::clone(&shop.key) };
    let found = shop.catalogue.target(&elsewhere, &"pool".into(), "large").expect("its other group shows it");
    assert_eq!(found.group.id.as_str(), "main", "the group of the request does not show it");
}

/// S3.10: the first template of key, team and organization holds, whole; nothing of the others is mixed in.
#[test]
fn the_first_template_of_key_team_and_organization_holds() {
    let bound = |key: &str, team: &str, organization: &str| {
        let template = |id: &str| if id.is_empty() { String::new() } else { format!(", template: {id}") };
        let text = format!(
            "{}  templates:\n    - {{ id: t, retry: {{ max_attempts: 3 }} }}\n    - {{ id: u, expose_route: true }}\n\
             \x20   - {{ id: v }}\n  organizations: [{{ id: o{} }}]\n  teams: [{{ id: m, organization: o{} }}]\n",
            CATALOGUE.replace(", template: t", &format!(", team: m{}", template(key))),
            template(organization),
            template(team)
        );
        let config = config::parse(&text, "test", &|_| None).unwrap_or_else(|problems| panic!("{problems:?}"));
        let mut rows = Rows::default();
        rows.apply(&rows.batch_to(config.rows, "me", "test", None)).expect("the batch was made for these rows");
        Catalogue::compile(&rows).templates.get("k").map(|template| template.id.to_string())
    };
    assert_eq!(bound("t", "u", "v").as_deref(), Some("t"));
    assert_eq!(bound("", "u", "v").as_deref(), Some("u"));
    assert_eq!(bound("", "", "v").as_deref(), Some("v"));
    assert_eq!(bound("", "", ""), None);
}

/// Makes `n` choices of a split one after another and counts who is chosen.
fn split(weights: &[(&str, u32)], n: u64) -> BTreeMap<String, u32> {
    let parts: Vec<String> = weights.iter().map(|(d, w)| format!("{{ deployment: {d}, weight: {w} }}")).collect();
    let template =
        format!("model_routes: [{{ model: gpt, strategy: traffic_split, allocations: [{}] }}]", parts.join(", "));
    let shop = Shop::with(&template);
    let (pool, mut cursor) = (shop.pool("main", "gpt"), Cursor::default());
    let mut chosen: BTreeMap<String, u32> = BTreeMap::new();
    for draw in 0..n {
        let choice = shop.look(&pool, "gpt", &|name, weight| cursor.rank(&name.into(), weight), draw);
        let (index, reason) = select::decide(&choice).expect("somebody is legal");
        assert_eq!(reason, Reason::Draw);
        let deployment = choice.candidates[index].deployment.clone();
        cursor.advance(&choice, &deployment);
        *chosen.entry(deployment.to_string()).or_default() += 1;
    }
    chosen
}

fn counts<const N: usize>(of: [(&str, u32); N]) -> BTreeMap<String, u32> {
    of.into_iter().map(|(name, n)| (name.to_owned(), n)).collect()
}

/// Issue 5: 7:3 and 7:2:1 are exact over 20 requests.
#[test]
fn splits_are_exact_over_twenty_requests() {
    let weights = [("a/gpt", 7), ("b/gpt", 3)];
    assert_eq!(split(&weights, 20), counts([("a/gpt", 14), ("b/gpt", 6)]));
    let in_hundreds = [("a/gpt", 700), ("b/gpt", 300)];
    assert_eq!(split(&in_hundreds, 20), counts([("a/gpt", 14), ("b/gpt", 6)]));
    let three = [("a/gpt", 7), ("b/gpt", 2), ("c/gpt", 1)];
    assert_eq!(split(&three, 20), counts([("a/gpt", 14), ("b/gpt", 4), ("c/gpt", 2)]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// S3.20: over every full period each is chosen exactly as often as its weight says, whatever the draws.
    #[test]
    fn a_split_is_exact_over_its_period(a in 1..9u32, b in 1..9u32, c in 1..9u32, periods in 1..3u32) {
        let n = u64::from((a + b + c) * periods);
        let expected = counts([("a/gpt", a * periods), ("b/gpt", b * periods), ("c/gpt", c * periods)]);
        prop_assert_eq!(split(&[("a/gpt", a), ("b/gpt", b), ("c/gpt", c)], n), expected);
    }
}

/// A changed weight makes another split: what was owed under the old one is not paid under the new.
#[test]
fn a_changed_split_begins_anew() {
    let mut cursor = Cursor::default();
    let old = Shop::with(
        "model_routes: [{ model: gpt, strategy: traffic_split, allocations: [{ deployment: a/gpt, weight: 900000 }] }]",
    );
    let choice = old.look(&old.pool("main", "gpt"), "gpt", &|_, _| 0, 1);
    cursor.advance(&choice, &"a/gpt".into());
    assert_eq!(cursor.rank(&"b/gpt".into(), 1), -2, "one of before, and one of this turn");
    let new = Shop::with(
        "model_routes: [{ model: gpt, strategy: traffic_split, allocations: [{ deployment: a/gpt, weight: 2 }] }]",
    );
    let choice = new.look(&new.pool("main", "gpt"), "gpt", &|_, _| 0, 1);
    cursor.advance(&choice, &"a/gpt".into());
    assert_eq!((cursor.rank(&"a/gpt".into(), 2), cursor.rank(&"b/gpt".into(), 1)), (-1, -2));
}

/// S3.20: `least_busy` and `latency` take the smallest rank, whatever tiers and weights say; equal ranks are drawn.
#[test]
fn the_least_busy_and_the_fastest_go_first() {
    for strategy in ["least_busy", "latency"] {
        let shop = Shop::with(&format!("model_routes: [{{ model: gpt, strategy: {strategy} }}]"));
        let pool = shop.pool("main", "gpt");
        let chosen = |a: i32, b: i32, draw| {
            let choice = shop.look(&pool, "gpt", &|name, _| if name == "a/gpt" { a } else { b }, draw);
            let (index, _) = select::decide(&choice).expect("somebody is legal");
            choice.candidates[index].deployment.to_string()
        };
        for draw in 0..50 {
            assert_eq!((chosen(3, 2, draw), chosen(2, 3, draw)), ("b/gpt".to_owned(), "a/gpt".to_owned()));
        }
        let to_a = (0..800).filter(|draw| chosen(1, 1, *draw) == "a/gpt").count();
        // 500 of 800 are expected at 5:3; 430 and 570 are five standard deviations away.
        assert!((430..=570).contains(&to_a), "{to_a} of 800");
    }
}

/// S3.20: what is weighed is what the strategies' names say, and only two need to be told of traffic.
#[test]
fn only_two_strategies_watch_the_load() {
    for (strategy, watches) in [("priority", false), ("traffic_split", false), ("least_busy", true), ("latency", true)]
    {
        let shop = Shop::with(&format!("model_routes: [{{ model: gpt, strategy: {strategy} }}]"));
        assert_eq!(shop.policy.watches_load(), watches, "{strategy}");
    }
    let shop = Shop::with("model_routes: [{ model: gpt, strategy: latency }]");
    let (pool, model) = (shop.pool("main", "gpt"), ModelName::from("gpt"));
    let rule = Subject { policy: Some(&shop.policy), pool: &pool, model: &model }.rule().expect("there is one");
    assert_eq!(rule.strategy, Sharing::Latency);
}

/// S3.18, each cell of inherit and disable: what is left out or empty inherits the default, a source that is mapped to
/// nothing has the kind disabled, and another source's chain says nothing of this one.
#[test]
fn chains_inherit_override_and_disable_by_source_and_kind() {
    let general = Recourse::General;
    for inherits in
        ["", "fallbacks: []", "fallbacks: [{ large: [gpt] }]", "context_window_fallbacks: [{ gpt: [large] }]"]
    {
        assert_eq!(Shop::with(inherits).targets("gpt", general), "mini", "{inherits}");
    }
    assert_eq!(Shop::with("fallbacks: [{ gpt: [large, mini] }]").targets("gpt", general), "large mini");
    assert_eq!(Shop::with("fallbacks: [{ gpt: [] }]").targets("gpt", general), "");
    assert_eq!(Shop::with("fallbacks: [{ 'open-*': [gpt] }]").targets("open-1", general), "gpt");
    assert_eq!(Shop::with("fallbacks: [{ 'open-*': [gpt] }, { open-1: [] }]").targets("open-1", general), "");
    assert_eq!(Shop::with("").targets("large", general), "", "a route without fallbacks has none");
    assert_eq!(Shop::with("fallbacks: [{ pool: [large] }]").targets("pool", general), "large");
    assert_eq!(Shop::with("fallbacks: [{ pool: [large] }]").targets("gpt", general), "mini", "a member is no group");
    assert_eq!(Shop::with("fallbacks: [{ gpt: [large] }]").targets("pool", general), "", "a group is no member");
}

/// S3.12, S3.15, PITFALLS D11: the special chains where they are configured; without one a prompt that does not fit
/// falls back as anything does, and refused content not at all. Disabling one kind leaves the others.
#[test]
fn special_failures_have_their_own_chains() {
    let (context, content, both) = (Recourse::Context, Recourse::Content, Recourse::ContextThenGeneral);
    let check = |template: &str, expected: [&str; 4]| {
        let shop = Shop::with(template);
        let recourses = [Recourse::General, context, both, content];
        assert_eq!(recourses.map(|recourse| shop.targets("gpt", recourse)), expected, "{template}");
    };
    check("", ["mini", "mini", "mini", ""]);
    check("context_window_fallbacks: []", ["mini", "mini", "mini", ""]);
    check("context_window_fallbacks: [{ gpt: [large] }]", ["mini", "large", "large mini", ""]);
    check("context_window_fallbacks: [{ gpt: [] }]", ["mini", "", "mini", ""]);
    check("content_policy_fallbacks: [{ gpt: [large] }]", ["mini", "mini", "mini", "large"]);
    check("fallbacks: [{ gpt: [] }], context_window_fallbacks: [{ gpt: [large] }]", ["", "large", "large", ""]);
    assert_eq!(Shop::with("").targets("gpt", Recourse::None), "");
    // Where the chain of a pattern would hold, `[]` is seen to disable and not to inherit.
    for (kind, recourse) in
        [("fallbacks", Recourse::General), ("context_window_fallbacks", context), ("content_policy_fallbacks", content)]
    {
        assert_eq!(
            Shop::with(&format!("{kind}: [{{ 'open-*': [gpt] }}]")).targets("open-1", recourse),
            "gpt",
            "{kind}"
        );
        let disabled = Shop::with(&format!("{kind}: [{{ 'open-*': [gpt] }}, {{ open-1: [] }}]"));
        assert_eq!(
            (disabled.targets("open-1", recourse), disabled.targets("open-2", recourse)),
            ("".into(), "gpt".into()),
            "{kind}"
        );
    }
}

/// S3.19: a target is reached while the chain that led there names it, and no longer, whatever other kinds say; what was
/// recorded without the chain, while any does.
#[test]
fn a_target_is_reached_as_long_as_its_chain_leads_there() {
    use ChainKind::{Content, Context, General};
    let reaches = |template: &str, target: &str| {
        let shop = Shop::with(template);
        let (pool, model) = (shop.pool("main", "gpt"), ModelName::from("gpt"));
        let subject = Subject { policy: Some(&shop.policy), pool: &pool, model: &model };
        [Some(General), Some(Context), Some(Content), None].map(|by| subject.reaches(&target.into(), by))
    };
    assert_eq!(reaches("", "mini"), [true, false, false, true]);
    assert_eq!(reaches("", "large"), [false, false, false, false]);
    assert_eq!(reaches("fallbacks: [{ gpt: [] }]", "mini"), [false, false, false, false]);
    assert_eq!(reaches("fallbacks: [{ gpt: [large] }]", "mini"), [false, false, false, false]);
    assert_eq!(reaches("content_policy_fallbacks: [{ gpt: [large] }]", "large"), [false, false, true, true]);
    assert_eq!(reaches("context_window_fallbacks: [{ gpt: [large] }]", "large"), [false, true, false, true]);
    assert_eq!(reaches("context_window_fallbacks: [{ gpt: [mini] }]", "mini"), [true, true, false, true]);
    let shop = Shop::with("");
    let (pool, model) = (shop.pool("main", "gpt"), ModelName::from("gpt"));
    let untemplated = Subject { policy: None, pool: &pool, model: &model };
    assert!(untemplated.reaches(&"mini".into(), Some(General)) && untemplated.reaches(&"mini".into(), None));
}

/// S3.19: a kept way is followed while each of its steps is one of its chain; a step that is refused refuses the whole.
#[test]
fn a_way_is_followed_to_its_end_or_not_at_all() {
    use ChainKind::{Context, General};
    let follow = |template: &str, path: &[&str], chains: &[ChainKind], refused: &str| {
        let shop = Shop::with(template);
        let (pool, model) = (shop.pool("main", "gpt"), ModelName::from("gpt"));
        let way = Way { path: path.iter().copied().map(ModelName::from).collect(), chains: chains.to_vec() };
        let admit = |target: &ModelName| match target.as_str() {
            name if name == refused => Err(name.to_owned()),
            name => Ok(shop.pool("main", name)),
        };
        let followed = Subject { policy: Some(&shop.policy), pool: &pool, model: &model }.follow(&way, admit);
        followed.map(|pool| pool.map_or_else(String::new, |pool| pool.route.model.to_string()))
    };
    let ok = |model: &str| Ok(model.to_owned());
    let chains = "fallbacks: [{ gpt: [mini] }, { mini: [large] }]";
    for twice in [&[][..], &[General, General]] {
        let once = &twice[..twice.len() / 2];
        assert_eq!(follow(chains, &["mini"], once, ""), ok("mini"));
        assert_eq!(follow(chains, &["mini", "large"], twice, ""), ok("large"));
        assert_eq!(follow(chains, &["large"], once, ""), ok(""), "no chain of `gpt` leads there");
        assert_eq!(follow("fallbacks: [{ gpt: [mini] }]", &["mini", "large"], twice, ""), ok(""));
        assert_eq!(follow("fallbacks: [{ gpt: [] }, { mini: [large] }]", &["mini", "large"], twice, ""), ok(""));
        assert_eq!(follow(chains, &["mini", "large"], twice, "mini"), Err("mini".to_owned()));
        assert_eq!(follow(chains, &["mini", "large"], twice, "large"), Err("large".to_owned()));
        assert_eq!(
            follow("fallbacks: [{ gpt: [] }]", &["mini"], once, "mini"),
            ok(""),
            "what is not reached is not refused"
        );
    }
    let mixed = "context_window_fallbacks: [{ mini: [large] }]";
    assert_eq!(follow(mixed, &["mini", "large"], &[General, Context], ""), ok("large"));
    assert_eq!(follow(mixed, &["mini", "large"], &[], ""), ok("large"));
    assert_eq!(follow(mixed, &["mini", "large"], &[General, General], ""), ok(""), "each step by its own chain");
    assert_eq!(follow(mixed, &["mini", "large"], &[Context, Context], ""), ok(""));
}

/// PITFALLS D01, D03, D18: a walk goes into a target's own chain before the next target, tries none twice, and ends.
#[test]
fn a_walk_tries_every_target_once_and_ends() {
    let chains = [("m1", "m2 m4 m1"), ("m2", "m1 m3"), ("m3", "m1 m2"), ("m4", "m4")];
    let chains: BTreeMap<&str, Vec<ModelName>> =
        chains.into_iter().map(|(from, to)| (from, to.split(' ').map(ModelName::from).collect())).collect();
    let (mut walk, mut way, mut tried) = (Walk::default(), Way::default(), Vec::new());
    loop {
        let at = way.path.last().map_or("m1", ModelName::as_str);
        walk.turn(&"m1".into(), &way, &chains[at].iter().map(|to| (ChainKind::General, to)).collect::<Vec<_>>());
        let Some(next) = walk.step() else { break };
        assert_eq!(next.chains, vec![ChainKind::General; next.path.len()]);
        tried.push(next.path.iter().map(ModelName::as_str).collect::<Vec<_>>().join(">"));
        way = next;
    }
    assert_eq!(tried, ["m2", "m2>m3", "m4"]);
}

/// S3.19: a way says of each step which chain it is one of; one that goes on from a record without them says of none.
#[test]
fn a_way_tells_its_chains_or_none() {
    let (mini, large) = (ModelName::from("mini"), ModelName::from("large"));
    let on = |chains: &[ChainKind]| {
        let mut walk = Walk::default();
        let way = Way { path: vec![mini.clone()], chains: chains.to_vec() };
        walk.turn(&"gpt".into(), &way, &[(ChainKind::Content, &large)]);
        walk.step().expect("there is a target").chains
    };
    assert_eq!(on(&[ChainKind::Context]), [ChainKind::Context, ChainKind::Content]);
    assert_eq!(on(&[]), []);
    let shop = Shop::with("context_window_fallbacks: [{ gpt: [large] }]");
    let (pool, model) = (shop.pool("main", "gpt"), ModelName::from("gpt"));
    let subject = Subject { policy: Some(&shop.policy), pool: &pool, model: &model };
    let expected = [(ChainKind::Context, &large), (ChainKind::General, &mini)];
    assert_eq!(subject.targets(Recourse::ContextThenGeneral), expected);
    let shop = Shop::with("");
    let inherits = Subject { policy: Some(&shop.policy), ..subject };
    assert_eq!(inherits.targets(Recourse::Context), [(ChainKind::General, &mini)]);
}
