//! The catalogue from outside: patterns against a naive reference, batches that fit or change nothing, pools, and what
//! rows refer to.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use waybill_schema::catalogue::reference::dangling;
use waybill_schema::catalogue::{
    BatchError, Catalogue, Channel, Dialect, Group, Member, Route, Row, RowKey, RowKind, Rows, Status, is_pattern,
    matches,
};
use waybill_schema::event::Batch;
use waybill_schema::id::{GroupId, ModelName};
use waybill_schema::secret::SecretRef;

fn channel(id: &str, base_url: &str) -> Row {
    Row::Channel(Channel {
        id: id.into(),
        status: Status::Active,
        base_url: base_url.to_owned(),
        dialects: vec![Dialect::Chat],
        api_keys: Vec::new(),
        models: Vec::new(),
        labels: Default::default(),
        internal_headers: false,
        stream_usage: true,
        prices: Vec::new(),
    })
}

fn group(id: &str, public_models: &[&str]) -> Row {
    Row::Group(Group {
        id: id.into(),
        display_name: String::new(),
        description: String::new(),
        status: Status::Active,
        public_models: public_models.iter().map(|model| ModelName::from(*model)).collect(),
        requestable: false,
        sticky_policy: None,
        failover_policy: None,
    })
}

fn route(model: &str) -> Row {
    Row::Route(Route { model: model.into(), fallbacks: Vec::new(), sticky_session: true, first_token_seconds: None })
}

fn member(group: &str, route: &str, channel: &str, upstream: Option<&str>) -> Row {
    let (group, route, channel) = (group.into(), route.into(), channel.into());
    let upstream_model = upstream.map(ModelName::from);
    let id = Member::id_of(&group, &route, &channel, upstream_model.as_ref());
    Row::Member(Member { id, status: Status::Active, route, group, channel, priority: 1, weight: 1, upstream_model })
}

/// Brings `rows` to `target` and gives the batch that did.
fn bring(rows: &mut Rows, target: &[Row]) -> Batch {
    let batch = rows.batch_to(target.to_vec(), "me", "test", None);
    rows.apply(&batch).expect("the batch was made for these rows");
    batch
}

/// The catalogue of one group `g` with a member on its own channel for each of `routes`.
fn serving(public_models: &[&str], routes: &[&str]) -> Catalogue {
    let mut target = vec![group("g", public_models)];
    for (model, n) in routes.iter().zip(0..) {
        let id = format!("c{n}");
        target.extend([channel(&id, "http://a"), route(model), member("g", model, &id, None)]);
    }
    let mut rows = Rows::default();
    bring(&mut rows, &target);
    Catalogue::compile(&rows)
}

/// The pattern whose pool serves `model`, or `-`.
fn served(catalogue: &Catalogue, model: &str) -> String {
    catalogue.pool(&"g".into(), model).map_or("-".to_owned(), |pool| pool.route.model.to_string())
}

fn shown(catalogue: &Catalogue, group: &str) -> Vec<String> {
    catalogue.models(&GroupId::from(group)).into_iter().map(ToString::to_string).collect()
}

/// S2.1, PITFALLS H03
#[test]
fn a_pattern_matches_the_whole_name_and_nothing_else_is_special() {
    let table = [
        ("gateway/*-chat", "gateway/demo-chat", true),
        ("gateway/*-chat", "gateway/demo-chat-extra", false),
        ("gateway/*-chat", "gateway/-chat", true),
        ("gateway/*", "gateway/", true),
        ("gateway/*", "gateway", false),
        ("*", "", true),
        ("a*a", "a", false),
        ("a*a", "aa", true),
        ("a*b*a", "aba", true),
        ("a*b*a", "abab", false),
        ("*ab*ab", "ab", false),
        ("**", "x", true),
        ("gpt-4.1", "gpt-4x1", false),
        ("gpt-4.1+[x](y)*", "gpt-4.1+[x](y)z", true),
        ("模*型", "模大型", true),
        ("", "", true),
        ("", "a", false),
    ];
    for (pattern, name, expected) in table {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }
}

/// S2.1, PITFALLS H03: exact, then the longest literal, then fewer stars, then the alphabet; never the order of rows.
#[test]
fn the_most_specific_pattern_wins() {
    let patterns = ["*", "gpt-*", "gpt-4*", "*-mini", "gpt-4-mini", "g*t*-mini", "a*bc", "ab*c"];
    let backwards: Vec<&str> = patterns.into_iter().rev().collect();
    for routes in [&patterns[..], &backwards] {
        let catalogue = serving(&[], routes);
        let table = [
            ("gpt-4-mini", "gpt-4-mini"),
            ("gpt-4-nano", "gpt-4*"),
            ("gpt-4-x-mini", "g*t*-mini"),
            ("gpt-3", "gpt-*"),
            ("o3-mini", "*-mini"),
            ("o3", "*"),
            ("abc", "a*bc"),
        ];
        for (model, expected) in table {
            assert_eq!(served(&catalogue, model), expected, "{model}");
        }
    }
    assert_eq!(served(&serving(&[], &["a*b*", "a*b"]), "ab"), "a*b", "fewer stars");
}

/// S1.1
#[test]
fn a_group_serves_only_what_it_shows() {
    let catalogue = serving(&["gpt-*", "claude"], &["*", "gpt-4", "o3"]);
    assert_eq!(served(&catalogue, "gpt-4"), "gpt-4");
    assert_eq!(served(&catalogue, "gpt-5"), "*");
    assert_eq!(served(&catalogue, "claude"), "*");
    assert_eq!(served(&catalogue, "o3"), "-");
    assert!(catalogue.pool(&"other".into(), "gpt-4").is_none());
}

/// S1.1: names, not patterns; what nothing serves is not shown.
#[test]
fn the_models_of_a_group_are_names_that_it_serves() {
    assert_eq!(shown(&serving(&[], &["*", "o3", "gpt-4"]), "g"), ["gpt-4", "o3"]);
    assert_eq!(shown(&serving(&["o3", "gpt-*", "claude"], &["gpt-4", "gpt-*", "o3"]), "g"), ["gpt-4", "o3"]);
    assert_eq!(shown(&serving(&["claude"], &["*", "o3"]), "g"), ["claude"]);
    assert!(shown(&serving(&[], &["o3"]), "other").is_empty());
}

/// S2.1, S2.2
#[test]
fn a_pool_holds_the_members_of_its_group_with_what_they_are_sent() {
    let target = [
        group("east", &[]),
        group("west", &[]),
        channel("a", "http://a"),
        channel("b", "http://b"),
        route("m*"),
        member("east", "m*", "a", None),
        member("east", "m*", "b", Some("vendor/m")),
        member("west", "m*", "b", None),
        member("west", "m*", "missing", None),
        member("west", "missing", "b", None),
    ];
    let mut rows = Rows::default();
    bring(&mut rows, &target);
    let catalogue = Catalogue::compile(&rows);
    let pool = |group: &str| {
        let pool = catalogue.pool(&group.into(), "m1").expect("the pattern serves it");
        let places: Vec<_> =
            pool.places.iter().map(|p| (p.deployment.to_string(), p.upstream_model.to_string())).collect();
        places
    };
    let of = |deployment: &str, model: &str| (deployment.to_owned(), model.to_owned());
    assert_eq!(pool("east"), [of("a/m1", "m1"), of("b/vendor/m", "vendor/m")]);
    assert_eq!(pool("west"), [of("b/m1", "m1")]);
}

/// DESIGN.md section 5: an incarnation is the revision at which the row was made.
#[test]
fn a_change_keeps_the_incarnation_and_a_new_life_gets_its_own() {
    let mut rows = Rows::default();
    let incarnation = |rows: &Rows| rows.iter().next().map(|(_, stored)| stored.incarnation);
    bring(&mut rows, &[channel("a", "http://one")]);
    assert_eq!(incarnation(&rows), Some(1));
    bring(&mut rows, &[channel("a", "http://two")]);
    assert_eq!(incarnation(&rows), Some(1));
    bring(&mut rows, &[]);
    assert_eq!(incarnation(&rows), None);
    bring(&mut rows, &[channel("a", "http://two")]);
    assert_eq!(incarnation(&rows), Some(4));
}

/// What differs from the file is in the batch, and nothing else.
#[test]
fn a_batch_holds_only_what_differs() {
    let mut rows = Rows::default();
    bring(&mut rows, &[channel("a", "http://one"), channel("b", "http://one"), route("m")]);
    let batch = bring(&mut rows, &[channel("a", "http://one"), channel("b", "http://two")]);
    let ids: Vec<(&str, bool)> = batch.ops.iter().map(|op| (op.row.id.as_str(), op.after.is_some())).collect();
    assert_eq!(ids, [("b", true), ("m", false)]);
    let target = vec![channel("a", "http://one"), channel("b", "http://two")];
    assert_eq!(rows.batch_to(target, "me", "test", None).ops, []);
}

/// A batch says what it goes back to.
#[test]
fn a_batch_names_its_file_and_its_before_images() {
    let mut rows = Rows::default();
    let batch = rows.batch_to(vec![channel("a", "http://one")], "me", "test", Some("hash".to_owned()));
    assert!(batch.ops[0].before.is_none());
    rows.apply(&batch).expect("it fits");
    assert_eq!(rows.file.as_deref(), Some("hash"));
    let batch = bring(&mut rows, &[channel("a", "http://two")]);
    assert_eq!(batch.ops[0].before.as_ref().map(|stored| &stored.row), Some(&channel("a", "http://one")));
    assert_eq!(rows.file.as_deref(), Some("hash"), "a batch without a file leaves the file that was applied");
}

/// DESIGN.md section 5, "the catalogue is in the log": whole, or not at all.
#[test]
fn a_batch_that_does_not_fit_changes_nothing() {
    let mut rows = Rows::default();
    bring(&mut rows, &[channel("a", "http://one"), channel("z", "http://one")]);
    let standing = rows.clone();

    let good = rows.batch_to(vec![channel("a", "http://two"), channel("z", "http://two")], "me", "test", None);
    for revision in [0, 1, 3] {
        let wrong = Batch { revision, ..good.clone() };
        assert_eq!(rows.apply(&wrong), Err(BatchError::Revision { batch: revision, catalogue: 1 }));
    }
    let mut wrong = good.clone();
    wrong.ops[1].before = None;
    let z = RowKey { kind: RowKind::Channel, id: "z".to_owned() };
    assert_eq!(rows.apply(&wrong), Err(BatchError::Before(z)));
    assert_eq!(rows, standing, "the first op fits, yet it is not applied");
    rows.apply(&good).expect("it fits");
    assert_eq!(rows.revision, 2);
}

/// The rows of the example file without the one called `without`, and what they then refer to in vain.
fn missed(without: &str) -> BTreeSet<String> {
    let example = include_str!("../../deploy/examples/waybill.yaml");
    let config = waybill_schema::config::parse(example, "example", &|_| None).expect("the example is right");
    let rows = config.rows.iter().map(|row| (row.key(), row));
    let rows: BTreeMap<RowKey, &Row> = rows.filter(|(key, _)| key.to_string() != without).collect();
    assert_eq!(rows.len(), config.rows.len() - usize::from(!without.is_empty()), "{without} is in the example");
    dangling(&rows).into_iter().map(|(by, what)| format!("{by}: {what}")).collect()
}

/// The references of a row are those that a file is checked for: the example, which is right, has none in vain.
#[test]
fn a_row_that_is_gone_is_missed_by_all_that_refer_to_it() {
    let table: [(&str, &[&str]); 9] = [
        ("", &[]),
        ("channel `codex2api`", &["member `gpt-shared/gpt-5.4/codex2api/gpt-5.4-codex`: channel `codex2api`"]),
        (
            "group `gpt-shared`",
            &[
                "member `gpt-shared/gpt-5.4/asxs`: group `gpt-shared`",
                "member `gpt-shared/gpt-5.4/codex2api/gpt-5.4-codex`: group `gpt-shared`",
                "member `gpt-shared/gpt-5.4-mini/asxs`: group `gpt-shared`",
                "key `alice`: group `gpt-shared`",
            ],
        ),
        (
            "route `gpt-5.4-mini`",
            &[
                "route `gpt-5.4`: a route or group for `gpt-5.4-mini`",
                "member `gpt-shared/gpt-5.4-mini/asxs`: route `gpt-5.4-mini`",
                "template `default`: a route or group for `gpt-5.4-mini`",
            ],
        ),
        (
            "member `gpt-shared/gpt-5.4-mini/asxs`",
            &["group `gpt-shared`: a member of group `gpt-shared` that serves `gpt-5.4-mini`"],
        ),
        (
            "member `gpt-shared/gpt-5.4/codex2api/gpt-5.4-codex`",
            &["template `default`: a member that makes deployment `codex2api/gpt-5.4-codex`"],
        ),
        ("template `default`", &["organization `acme`: template `default`"]),
        ("organization `acme`", &["team `research`: organization `acme`"]),
        ("team `research`", &["key `alice`: team `research`"]),
    ];
    for (without, expected) in table {
        let expected: BTreeSet<String> = expected.iter().map(|reference| (*reference).to_owned()).collect();
        assert_eq!(missed(without), expected, "without {without}");
    }
}

/// Whether `pattern` matches `name`, by trying every length of each star.
fn naive(pattern: &[char], name: &[char]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some(('*', rest)) => (0..=name.len()).any(|skipped| naive(rest, &name[skipped..])),
        Some((first, rest)) => name.split_first().is_some_and(|(head, tail)| head == first && naive(rest, tail)),
    }
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = prop_oneof![
        ("[a-c]", "[xy]").prop_map(|(id, url)| channel(&id, &url)),
        ("[a-c]", "[xy]").prop_map(|(id, model)| group(&id, &[&model])),
        "[a-c]".prop_map(|model| route(&model)),
        ("[ab]", "[ab]", "[ab]").prop_map(|(group, route, channel)| member(&group, &route, &channel, None)),
    ];
    proptest::collection::vec(row, 0..12)
}

proptest! {
    /// S2.1, PITFALLS H03
    #[test]
    fn patterns_match_as_the_naive_reference_says(pattern in "[ab*é]{0,7}", name in "[abé]{0,8}") {
        let chars = |text: &str| text.chars().collect::<Vec<_>>();
        prop_assert_eq!(matches(&pattern, &name), naive(&chars(&pattern), &chars(&name)));
        prop_assert_eq!(is_pattern(&pattern), chars(&pattern).contains(&'*'));
    }

    /// A batch, when applied, gives the target; and the next one to the same target is empty.
    #[test]
    fn the_batch_to_a_target_gives_the_target(targets in proptest::collection::vec(rows(), 1..5)) {
        let mut rows = Rows::default();
        for (target, revision) in targets.iter().zip(1..) {
            bring(&mut rows, target);
            prop_assert_eq!(rows.revision, revision);
            let mut expected: Vec<&Row> = Vec::new();
            for row in target {
                expected.retain(|other| other.key() != row.key());
                expected.push(row);
            }
            expected.sort_by_key(|row| row.key());
            prop_assert_eq!(rows.iter().map(|(_, stored)| &stored.row).collect::<Vec<_>>(), expected);
            prop_assert!(rows.batch_to(target.clone(), "me", "test", None).ops.is_empty());
        }
    }
}

/// S3.24: what an upstream keeps is found again only over the connection that it was made over.
#[test]
fn a_connection_is_another_one_when_its_address_or_its_credentials_change_and_when_it_is_made_again() {
    let mut rows = Rows::default();
    let mut connection_after = |target: &[Row]| {
        bring(&mut rows, target);
        let catalogue = Catalogue::compile(&rows);
        ["a", "b"].map(|channel| catalogue.connection(&channel.into()))
    };
    let changed = |change: &dyn Fn(&mut Channel)| {
        let Row::Channel(mut row) = channel("a", "http://a") else { unreachable!("a channel is one") };
        change(&mut row);
        Row::Channel(row)
    };
    let key = |name: &str| vec![SecretRef::Env(name.to_owned())];
    assert_eq!(connection_after(&[channel("a", "http://a")]), [Some(1), None]);
    assert_eq!(connection_after(&[channel("a", "http://a"), channel("b", "http://b")]), [Some(1), Some(2)]);
    let same = |row: &mut Channel| (row.status, row.dialects) = (Status::Disabled, vec![Dialect::Responses]);
    assert_eq!(connection_after(&[changed(&same)]), [Some(1), None]);
    assert_eq!(connection_after(&[changed(&|row| row.base_url = "http://c".to_owned())]), [Some(4), None]);
    assert_eq!(connection_after(&[changed(&|row| row.api_keys = key("A"))]), [Some(5), None]);
    assert_eq!(connection_after(&[changed(&|row| row.api_keys = key("B"))]), [Some(6), None]);
    assert_eq!(connection_after(&[]), [None, None]);
    assert_eq!(connection_after(&[changed(&|row| row.api_keys = key("B"))]), [Some(8), None]);
}
