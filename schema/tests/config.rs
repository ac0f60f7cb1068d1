//! The configuration file from outside: what an example says, and what every fault is told as.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;
use waybill_schema::catalogue::terms::{Budget, Guardrails, Hook, OnFailure, Period, Terms};
use waybill_schema::catalogue::{
    Allocation, Chain, Channel, Dialect, FailoverPolicy, Group, Key, Member, ModelRoute, Organization, Price, Route,
    Row, Status, StickyMode, StickyPolicy, Strategy as Sharing, Team, Template,
};
use waybill_schema::config::{
    AllCooling, Config, HealthSettings, Problem, RetrySettings, RoutingSettings, SessionAliases, StableFirstSettings,
    parse,
};
use waybill_schema::secret::SecretRef;

const EXAMPLE: &str = include_str!("../../deploy/examples/waybill.yaml");

/// Stands in every secret place of the faulty files.
const SENTINEL: &str = "SENTINEL";

/// A file without settings: everything has its default.
const MINIMAL: &str = "catalogue: {}\n";

fn read(text: &str, variables: &[(&str, &str)]) -> Result<Config, Vec<Problem>> {
    let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
    parse(text, "waybill.yaml", &|name| variables.get(name).map(|value| (*value).to_owned()))
}

fn good(text: &str, variables: &[(&str, &str)]) -> Config {
    read(text, variables).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

/// Compares the problems of `text` with `expected`: line, field, and a part of the message, in order.
#[track_caller]
fn check(text: &str, variables: &[(&str, &str)], expected: &[(u64, &str, &str)]) {
    let problems = read(text, variables).expect_err("the file is faulty");
    let shown: Vec<String> = problems.iter().map(Problem::to_string).collect();
    for (problem, (line, field, part)) in problems.iter().zip(expected) {
        assert_eq!((problem.line, problem.field.as_str()), (*line, *field), "in {shown:#?}");
        assert!(problem.message.contains(part), "{part:?} is not in {problem}");
    }
    assert_eq!(problems.len(), expected.len(), "{shown:#?}");
    assert!(shown.iter().all(|problem| !problem.contains(SENTINEL)), "a secret in {shown:#?}");
}

#[test]
fn every_fault_of_the_settings_is_named_at_once() {
    check(
        include_str!("config/settings.yaml"),
        &[],
        &[
            (1, "listen", "expected `host:port`"),
            (2, "admin_token", "`env:NAME` or `file:PATH`"),
            (3, "deployment_secret", "`env:NAME` or `file:PATH`"),
            (4, "unknwon", "unknown field `unknwon`"),
            (5, "session.aliases[1]", "never a session"),
            (5, "session.aliases[2]", "name of a request header"),
            (6, "routing.latency_awrae", "did you mean `latency_aware`?"),
            (6, "routing.concurrency_limit", "from 1 to 100000"),
            (7, "sticky.enabled", "true or false"),
            (7, "sticky.mode", "did you mean `session`?"),
            (7, "sticky.bucket_ttl_seconds", "from 1 to 2592000"),
            (9, "retry.max_attempts", "from 1 to 10"),
            (10, "retry.retry_times", "from 0 to 20"),
            (12, "retry.first_token_seconds", "longer than timeout_seconds, 30"),
            (13, "retry.all_cooling.wait", "from 1 to 7200"),
            (14, "retry.backoff_ms", "expected a single value, found a list"),
            (16, "health.cooldown_growth", "from 1.0 to 10.0"),
            (17, "health.cooldown_seconds", "longer than cooldown_seconds_max, 300"),
            (19, "health.breaker", "expected a map, found a single value"),
            (20, "health.probe.intervall_seconds", "did you mean `interval_seconds`?"),
            (21, "stable_first.denominator", "whole number"),
            (22, "", "`listen` stands here twice, first on line 1"),
            (23, "log.nats[0]", "`nats://` or `tls://`"),
            (23, "log.replicas", "from 1 to 5"),
            (24, "state.redis", "a password does not stand in this file"),
            (25, "usage.postgres", "is missing"),
        ],
    );
}

#[test]
fn every_fault_of_the_catalogue_is_named_at_once() {
    check(
        include_str!("config/catalogue.yaml"),
        &[],
        &[
            (5, "catalogue.channels[0].dialects[1]", "stands in the list twice, first on line 5"),
            (5, "catalogue.channels[0].dialects[2]", "did you mean `messages`?"),
            (6, "catalogue.channels[0].api_keys[0]", "a secret does not stand in this file"),
            (7, "catalogue.channels[0].labels.host", "one line"),
            (7, "catalogue.channels[0].labels.b d", "of the characters"),
            (8, "catalogue.channels[1].id", "of the characters"),
            (9, "catalogue.channels[1].base_url", "`http://` or `https://`"),
            (10, "catalogue.channels[1].dialects", "at least one dialect"),
            (11, "catalogue.channels[2].id", "duplicate channel `alpha`, first on line 3"),
            (12, "catalogue.channels[2].base_url", "no credentials"),
            (14, "catalogue.channels[3].dialects", "is missing"),
            (14, "catalogue.channels[3].id", "is missing"),
            (14, "catalogue.channels[3].base_url", "no query"),
            (15, "catalogue.channels[3].dialect", "did you mean `dialects`?"),
            (18, "catalogue.groups[0].public_models[1]", "no route serves `nothing-*`"),
            (20, "catalogue.groups[1].public_models[0]", "no route of `small` has a member in this group"),
            (21, "catalogue.groups[1].sticky_policy.ttl", "unknown field `ttl`"),
            (24, "catalogue.routes[0].fallbacks[0]", "no route serves `smal`: did you mean `small`?"),
            (24, "catalogue.routes[0].fallbacks[1]", "`small` falls back to itself"),
            (26, "catalogue.routes[0].members[0].priority", "from 0 to 1000000"),
            (26, "catalogue.routes[0].members[0].weight", "from 0 to 1000000"),
            (27, "catalogue.routes[0].members[1]", "duplicate member `first/small/alpha`, first on line 26"),
            (28, "catalogue.routes[0].members[2].channel", "unknown channel `alhpa`: did you mean `alpha`?"),
            (28, "catalogue.routes[0].members[2].group", "unknown group `frist`: did you mean `first`?"),
            (28, "catalogue.routes[0].members[2].prioritiy", "did you mean `priority`?"),
            (29, "catalogue.routes[0].members[3].group", "is missing"),
            (30, "catalogue.routes[1].model", "expected a model name"),
            (31, "catalogue.routes[1].members", "at least one member"),
            (32, "catalogue.routes[2].members", "is missing"),
            (35, "catalogue.templates[0].retry.max_attempts", "from 1 to 10"),
            (36, "catalogue.templates[0].failover_policy.consecutive_retryable_failures", "from 1 to 1000"),
            (36, "catalogue.templates[0].failover_policy.cooldown", "unknown field `cooldown`"),
            (36, "catalogue.templates[0].failover_policy.cooldown_seconds", "from 1 to 86400"),
            (38, "catalogue.templates[0].model_routes[0].strategy", "did you mean `traffic_split`?"),
            (38, "catalogue.templates[0].model_routes[0].allocations[0].deployment", "did you mean `alpha/small`?"),
            (39, "catalogue.templates[0].model_routes[1].model", "no route serves `huge`"),
            (39, "catalogue.templates[0].model_routes[1].allocations[0].weight", "is missing"),
            (40, "catalogue.templates[0].fallbacks[0].tiny", "no route serves `tiny`"),
            (40, "catalogue.templates[0].fallbacks[1]", "expected a map, found a single value"),
            (42, "catalogue.organizations[0].template", "unknown template `usaul`: did you mean `usual`?"),
            (44, "catalogue.teams[0].organization", "unknown organization `amce`: did you mean `acme`?"),
            (46, "catalogue.keys[0].key", "a secret does not stand in this file"),
            (46, "catalogue.keys[0].team", "unknown team `reserach`: did you mean `research`?"),
            (47, "catalogue.keys[1].group", "is missing"),
            (48, "catalogue.keys[2].key", "the same secret as key `bob`"),
            (48, "catalogue.keys[2].groups[0]", "unknown group `third`"),
            (48, "catalogue.keys[2].statsu", "did you mean `status`?"),
        ],
    );
}

/// Issue 5, S3.12: a template's general chains stand over the routes' own, and its chains for prompts that do not fit over
/// both: what holds together must end together. Content that is refused inherits nothing.
#[test]
fn a_template_that_closes_a_circle_with_the_routes_is_refused() {
    let text = |template: &str| {
        format!(
            "catalogue:
  channels: [{{ id: x, base_url: 'http://x', dialects: [chat] }}]
  groups: [{{ id: p-g }}]
  routes:
    - {{ model: a, fallbacks: [b], members: [{{ channel: x }}] }}
    - {{ model: b, members: [{{ channel: x }}] }}
    - {{ model: 'p-*', fallbacks: [p-g, p-2], members: [{{ channel: x }}] }}
    - {{ model: p-2, members: [{{ channel: x }}] }}
  templates:
    - {{ id: t, {template} }}
"
        )
    };
    let refused = |template: &str, field: &str, circle: &str| {
        let problems = parse(&text(template), "test", &|_| None).expect_err(template);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].field, format!("catalogue.templates[0].{field}"), "{problems:?}");
        assert!(problems[0].message.contains(circle), "{problems:?}");
    };
    refused("fallbacks: [{ b: [a] }]", "fallbacks[0].b[0]", "in a circle: `b` → `a` → `b`");
    good(&text("fallbacks: [{ b: [a] }, { a: [] }]"), &[]);
    let context = "context_window_fallbacks[0].b[0]";
    refused("context_window_fallbacks: [{ b: [a] }]", context, "in a circle: `b` → `a` → `b`");
    let both = "fallbacks: [{ a: [p-g] }, { p-g: [b] }], context_window_fallbacks: [{ b: [a] }]";
    refused(both, context, "in a circle: `b` → `a` → `p-g` → `b`");
    good(&text("context_window_fallbacks: [{ b: [a] }, { a: [] }]"), &[]);
    good(&text("content_policy_fallbacks: [{ b: [a] }]"), &[]);
    refused(
        "context_window_fallbacks: [{ p-2: [p-3] }]",
        "context_window_fallbacks[0].p-2[0]",
        "`p-2` → `p-*` → `p-2`",
    );
}

#[test]
fn fallbacks_that_go_in_a_circle_are_refused_by_name() {
    check(
        include_str!("config/circles.yaml"),
        &[],
        &[
            (11, "catalogue.routes[2].fallbacks[1]", "in a circle: `a` → `b` → `c-*` → `a`"),
            (14, "catalogue.routes[4].fallbacks[0]", "`e-*` falls back to itself"),
            (20, "catalogue.templates[0].context_window_fallbacks[1].b[0]", "in a circle: `d` → `b` → `d`"),
            (21, "catalogue.templates[0].context_window_fallbacks[2].a", "a second chain of `a`"),
            (24, "catalogue.templates[1].context_window_fallbacks[0].b[0]", "in a circle: `b` → `d` → `b`"),
            (25, "catalogue.templates[1].content_policy_fallbacks[1].d[1]", "in a circle: `a` → `d` → `a`"),
            (27, "catalogue.templates[2].fallbacks[1].all[1]", "in a circle: `a` → `all` → `a`"),
        ],
    );
}

#[test]
fn servers_that_are_shared_need_a_name_and_a_shared_secret() {
    check(
        "log: { nats: [] }\n",
        &[],
        &[(1, "deployment_secret", "must make the same hashes"), (1, "log.nats", "at least one server")],
    );
}

#[test]
fn what_is_not_one_yaml_document_of_plain_values_is_refused() {
    check("", &[], &[(1, "", "the file is empty")]);
    check("# only a comment\n", &[], &[(1, "", "the file is empty")]);
    check("listen: [\n", &[], &[(1, "", "not YAML: unclosed bracket")]);
    check("a: 1\n b: 2\n", &[], &[(2, "", "not YAML")]);
    check("- listen\n", &[], &[(1, "", "expected a map, found a list")]);
    check("listen: &a 127.0.0.1:1\nadmin_token: *a\n", &[], &[(2, "", "anchors and aliases are not used")]);
    check("listen: *SENTINEL\n", &[], &[(1, "", "not YAML")]);
    check("listen: !!str 127.0.0.1:1\n", &[], &[(1, "", "tags")]);
    check("listen: 127.0.0.1:1\n---\nlisten: 127.0.0.1:1\n", &[], &[(2, "", "a second document")]);
    check("? [a]\n: b\n", &[], &[(1, "", "a key must be a single word")]);
    check(&format!("x: {}{}", "[".repeat(40), "]".repeat(40)), &[], &[(1, "", "nested deeper than 32")]);
}

/// S2.4-S2.13: the defaults are those of the example and of the seeds.
#[test]
fn a_setting_left_out_has_its_default() {
    let config = good(MINIMAL, &[]);
    assert_eq!((config.listen.as_str(), config.admin_token, config.deployment_secret), ("127.0.0.1:4000", None, None));
    assert_eq!((config.log, config.state, config.usage, config.rows), (None, None, None, vec![]));
    assert_eq!(config.body_mib_max, 64);
    assert_eq!((config.session.aliases, config.sticky_enabled), (SessionAliases::Off, true));
    assert_eq!(
        config.sticky,
        StickyPolicy {
            mode: StickyMode::Session,
            conversation_ttl_seconds: 7200,
            user_model_ttl_seconds: 1800,
            bucket_ttl_seconds: 600,
        }
    );
    assert_eq!(
        config.routing,
        RoutingSettings { latency_aware: false, error_aware: false, concurrency_aware: false, concurrency_limit: 64 }
    );
    assert_eq!(
        config.retry,
        RetrySettings {
            max_attempts: 2,
            retry_times: 2,
            cross_channel: true,
            responses_single_send: false,
            sends_max: 12,
            timeout_seconds: 600,
            first_token_seconds: 60,
            plain_seconds: None,
            idle_seconds: 300,
            connect_ms: 5000,
            backoff_ms: 100,
            all_cooling: AllCooling::Refuse,
        }
    );
    assert_eq!(
        config.health,
        HealthSettings {
            enabled: true,
            failover: FailoverPolicy { consecutive_retryable_failures: 2, cooldown_seconds: 600 },
            growth_permille: 2000,
            cooldown_seconds_max: 3600,
            breaker_hard_failures: 5,
            breaker_window_seconds: 60,
            breaker_per_key: false,
            auto_disable_failures: 5,
            probe_enabled: true,
            probe_interval_seconds: 600,
        }
    );
    let stable_first = StableFirstSettings { enabled: true, denominator: 25, promote_requests: 100 };
    assert_eq!((config.stable_first, config.warnings), (stable_first, vec![]));
}

#[test]
fn the_example_says_the_defaults_and_these_rows() {
    let (config, defaults) = (good(EXAMPLE, &[]), good(MINIMAL, &[]));
    assert_eq!(config.admin_token, Some(SecretRef::Env("WAYBILL_ADMIN_TOKEN".to_owned())));
    assert_eq!(config.deployment_secret, Some(SecretRef::File("/run/secrets/waybill".to_owned())));
    assert_eq!((config.retry, config.health), (defaults.retry, defaults.health));
    assert_eq!((config.sticky, config.routing), (defaults.sticky, defaults.routing));
    let log = config.log.expect("the example has a log");
    assert_eq!((log.nats, log.stream.as_str(), log.replicas), (vec!["nats://127.0.0.1:4222".to_owned()], "WAYBILL", 1));
    let state = config.state.expect("the example has a state");
    let expected = ("redis://127.0.0.1:6379", "waybill:", 20);
    assert_eq!((state.redis.as_str(), state.prefix.as_str(), state.read_deadline_ms), expected);
    assert_eq!(config.usage.expect("the example has a usage store").postgres, "postgres://waybill@127.0.0.1/waybill");
    assert_eq!(config.rows, example_rows());
}

fn example_rows() -> Vec<Row> {
    let labels = [("host", "remote43-route-lab"), ("shadow_group", "gpt-shared__asxs")];
    let channel = |id: &str, url: &str, dialects: &[Dialect], key, models: &[&str]| Channel {
        id: id.into(),
        status: Status::Active,
        base_url: url.to_owned(),
        dialects: dialects.to_vec(),
        api_keys: vec![key],
        models: models.iter().map(|model| (*model).into()).collect(),
        labels: BTreeMap::new(),
        internal_headers: false,
        stream_usage: true,
        prices: Vec::new(),
    };
    let member = |id: &str, route: &str, channel: &str, priority, upstream: Option<&str>| Member {
        id: id.into(),
        status: Status::Active,
        route: route.into(),
        group: "gpt-shared".into(),
        channel: channel.into(),
        priority,
        weight: 100,
        upstream_model: upstream.map(Into::into),
    };
    let route = |model: &str, fallbacks: Vec<_>| Route {
        model: model.into(),
        fallbacks,
        sticky_session: true,
        first_token_seconds: None,
    };
    use Dialect::{Chat, Embeddings, Messages, Responses};
    let asxs_key = SecretRef::Env("ASXS_KEY".to_owned());
    let asxs = channel(
        "asxs",
        "https://asxs.example/v1",
        &[Chat, Responses, Messages, Embeddings],
        asxs_key,
        &["gpt-5.4", "gpt-5.4-mini"],
    );
    let codex_key = SecretRef::File("/run/secrets/codex2api".to_owned());
    let codex = channel("codex2api", "https://codex2api.example/v1", &[Responses, Chat], codex_key, &["gpt-5.4-codex"]);
    vec![
        Row::Channel(Channel {
            labels: labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            prices: vec![Price {
                model: "gpt-5.4".into(),
                input: 1_250_000,
                output: 10_000_000,
                cached: Some(125_000),
                cache_write: None,
            }],
            ..asxs
        }),
        Row::Channel(codex),
        Row::Group(Group {
            id: "gpt-shared".into(),
            display_name: "GPT Shared".to_owned(),
            description: String::new(),
            status: Status::Active,
            public_models: vec!["gpt-5.4".into(), "gpt-5.4-mini".into()],
            requestable: false,
            sticky_policy: Some(StickyPolicy {
                mode: StickyMode::ConversationPreferred,
                conversation_ttl_seconds: 7200,
                user_model_ttl_seconds: 1800,
                bucket_ttl_seconds: 600,
            }),
            failover_policy: Some(FailoverPolicy { consecutive_retryable_failures: 2, cooldown_seconds: 600 }),
        }),
        Row::Route(route("gpt-5.4", vec!["gpt-5.4-mini".into()])),
        Row::Route(route("gpt-5.4-mini", vec![])),
        Row::Member(member("gpt-shared/gpt-5.4-mini/asxs", "gpt-5.4-mini", "asxs", 10, None)),
        Row::Member(member("gpt-shared/gpt-5.4/asxs", "gpt-5.4", "asxs", 10, None)),
        Row::Member(member(
            "gpt-shared/gpt-5.4/codex2api/gpt-5.4-codex",
            "gpt-5.4",
            "codex2api",
            20,
            Some("gpt-5.4-codex"),
        )),
        Row::Template(Template {
            id: "default".into(),
            max_attempts: Some(3),
            failover_policy: Some(FailoverPolicy { consecutive_retryable_failures: 3, cooldown_seconds: 300 }),
            model_routes: vec![ModelRoute {
                model: "gpt-5.4".into(),
                strategy: Sharing::TrafficSplit,
                allocations: Some(vec![
                    Allocation { deployment: "asxs/gpt-5.4".into(), weight: 7 },
                    Allocation { deployment: "codex2api/gpt-5.4-codex".into(), weight: 3 },
                ]),
            }],
            fallbacks: vec![Chain { source: "gpt-5.4".into(), targets: vec!["gpt-5.4-mini".into()] }],
            context_window_fallbacks: vec![],
            content_policy_fallbacks: vec![],
            expose_route: false,
        }),
        Row::Organization(Organization {
            id: "acme".into(),
            template: Some("default".into()),
            terms: Terms::default(),
        }),
        Row::Team(Team {
            id: "research".into(),
            organization: Some("acme".into()),
            template: None,
            terms: Terms {
                models: vec!["gpt-5.4".into(), "gpt-5.4-*".into()],
                requests_per_minute: Some(600),
                tokens_per_minute: Some(4_000_000),
                budget: Some(Budget { period: Period::Month, tokens: Some(900_000_000), usd_milli: None }),
                guardrails: Some(Guardrails {
                    deny: vec!["(?i)internal use only".to_owned()],
                    request_bytes_max: Some(8 << 20),
                    hook: None,
                }),
            },
        }),
        Row::Key(Key {
            id: "alice".into(),
            status: Status::Active,
            key: SecretRef::Env("ALICE_KEY".to_owned()),
            team: Some("research".into()),
            group: "gpt-shared".into(),
            groups: vec![],
            template: None,
            expose_route: false,
            terms: Terms::default(),
        }),
    ]
}

#[test]
fn the_example_for_many_machines_is_all_in_force() {
    let config = good(include_str!("../../deploy/examples/many.yaml"), &[]);
    assert_eq!(config.warnings, []);
    let log = config.log.expect("it names the log's servers");
    assert_eq!((log.nats.len(), log.replicas, log.mib_max, config.drain_seconds), (3, 3, 10240, 30));
}

#[test]
fn settings_that_change_nothing_yet_are_named() {
    let warned = |text: &str, variables: &[(&str, &str)]| -> Vec<(u64, String)> {
        good(text, variables).warnings.into_iter().map(|warning| (warning.line, warning.field)).collect()
    };
    let expected = [
        (38, "health.breaker"),
        (39, "health.auto_disable_failures"),
        (40, "health.probe"),
        (41, "stable_first.enabled"),
    ];
    assert_eq!(warned(EXAMPLE, &[]), expected.map(|(line, field)| (line, field.to_owned())));
    let off = "routing: { latency_aware: false, error_aware: no }\nstable_first: { enabled: off }\n";
    assert_eq!(warned(off, &[]), []);
    let variables = [("ROUTING_ERROR_AWARE", "1"), ("STABLE_FIRST_ENABLED", "true"), ("WAYBILL_LOG_NATS", "")];
    let expected = [(0, "ROUTING_ERROR_AWARE".to_owned()), (0, "STABLE_FIRST_ENABLED".to_owned())];
    assert_eq!(warned(off, &variables), expected);
}

#[test]
fn a_setting_that_the_environment_switches_off_is_not_warned_of() {
    let warnings = good("routing: { error_aware: true }\n", &[("ROUTING_ERROR_AWARE", "off")]).warnings;
    assert_eq!(warnings, []);
    assert_eq!(good("listen: 127.0.0.1:1\n", &[("WAYBILL_LOG", "debug")]).log, None);
}

#[test]
fn comments_spaces_and_order_do_not_change_the_hash() {
    let hash = |text: &str| good(text, &[]).hash;
    let example = hash(EXAMPLE);
    let without_comments: Vec<&str> = EXAMPLE.lines().map(|line| line.split(" #").next().unwrap_or(line)).collect();
    assert_eq!(hash(&without_comments.join("\n\n")), example);
    assert_eq!(hash(&EXAMPLE.replace("max_attempts: 2", "max_attempts: 4")), example, "a setting is no row");
    assert_ne!(hash(&EXAMPLE.replace("weight: 100", "weight: 99")), example);
    assert_eq!((example.len(), example.bytes().all(|byte| byte.is_ascii_hexdigit())), (32, true));
}

#[test]
fn our_variable_goes_before_the_seeds_and_that_before_the_file() {
    let file = "retry: { retry_times: 3 }\n";
    let retry_times = |variables: &[(&str, &str)]| good(file, variables).retry.retry_times;
    assert_eq!(retry_times(&[]), 3);
    assert_eq!(retry_times(&[("RETRY_TIMES", "4")]), 4);
    assert_eq!(retry_times(&[("RETRY_TIMES", "4"), ("WAYBILL_RETRY_RETRY_TIMES", "5")]), 5);
    assert_eq!(retry_times(&[("RETRY_TIMES", "4"), ("WAYBILL_RETRY_RETRY_TIMES", "")]), 4, "empty counts as none");
}

/// S2.4-S2.13: seed 2's names are accepted as they are.
#[test]
fn the_seeds_variables_set_what_they_name() {
    let config = good(
        MINIMAL,
        &[
            ("ROUTING_LATENCY_AWARE", "TRUE"),
            ("ROUTING_ERROR_AWARE", "yes"),
            ("ROUTING_CONCURRENCY_AWARE", "on"),
            ("ROUTING_CONCURRENCY_LIMIT", "8"),
            ("STABLE_FIRST_ENABLED", "no"),
            ("STABLE_FIRST_DENOMINATOR", "10"),
            ("STABLE_FIRST_PROMOTE_REQUESTS", "11"),
            ("STICKY_ENABLED", "0"),
            ("STICKY_TTL_MINUTES", "30"),
            ("RETRY_TIMES", "7"),
            ("CROSS_CHANNEL_FAILOVER_ENABLED", "off"),
            ("COOLDOWN_SECONDS", "90"),
            ("CHANNEL_AUTO_DISABLE_THRESHOLD", "9"),
            ("RECOVERY_PROBE_ENABLED", "false"),
            ("RECOVERY_PROBE_INTERVAL_SECONDS", "61"),
            ("FAULT_PROTECTION_ENABLED", "False"),
        ],
    );
    let routing =
        RoutingSettings { latency_aware: true, error_aware: true, concurrency_aware: true, concurrency_limit: 8 };
    assert_eq!(config.routing, routing);
    assert_eq!(config.stable_first, StableFirstSettings { enabled: false, denominator: 10, promote_requests: 11 });
    let StickyPolicy { conversation_ttl_seconds, user_model_ttl_seconds, bucket_ttl_seconds, .. } = config.sticky;
    let lives = (conversation_ttl_seconds, user_model_ttl_seconds, bucket_ttl_seconds);
    assert_eq!((config.sticky_enabled, lives), (false, (1800, 1800, 1800)));
    assert_eq!((config.retry.retry_times, config.retry.cross_channel), (7, false));
    let health = config.health;
    assert_eq!((health.enabled, health.failover.cooldown_seconds, health.auto_disable_failures), (false, 90, 9));
    assert_eq!((health.probe_enabled, health.probe_interval_seconds), (false, 61));
}

#[test]
fn every_setting_has_a_variable_of_its_path() {
    let config = good(
        MINIMAL,
        &[
            ("WAYBILL_LISTEN", "[::1]:80"),
            ("WAYBILL_ADMIN_TOKEN", "SENTINEL itself"),
            ("WAYBILL_DEPLOYMENT_SECRET", "file:/run/secret"),
            ("WAYBILL_LOG_NATS", "nats://a:1, tls://b"),
            ("WAYBILL_STATE_REDIS", "redis://:SENTINEL@c:2/0"),
            ("WAYBILL_STATE_READ_DEADLINE_MS", "5"),
            ("WAYBILL_USAGE_POSTGRES", "postgres://d/e"),
            ("WAYBILL_SESSION_ALIASES", "known"),
            ("WAYBILL_STICKY_MODE", "conversation-preferred"),
            ("WAYBILL_RETRY_MAX_ATTEMPTS", "1"),
            ("WAYBILL_RETRY_ALL_COOLING", "wait:20"),
            ("WAYBILL_HEALTH_COOLDOWN_GROWTH", "1.25"),
            ("WAYBILL_HEALTH_BREAKER_HARD_FAILURES", "6"),
            // A section has no variable; this one is what operators set the log filter with.
            ("WAYBILL_LOG", "debug"),
            ("WAYBILL_CATALOGUE_CHANNELS", "nothing"),
        ],
    );
    assert_eq!(config.listen, "[::1]:80");
    assert_eq!(config.admin_token, Some(SecretRef::Env("WAYBILL_ADMIN_TOKEN".to_owned())));
    assert_eq!(config.deployment_secret, Some(SecretRef::File("/run/secret".to_owned())));
    assert_eq!(config.log.map(|log| log.nats), Some(vec!["nats://a:1".to_owned(), "tls://b".to_owned()]));
    let state = config.state.map(|state| (state.redis, state.read_deadline_ms));
    assert_eq!(state, Some(("redis://:SENTINEL@c:2/0".to_owned(), 5)));
    assert_eq!(config.usage.map(|usage| usage.postgres), Some("postgres://d/e".to_owned()));
    assert_eq!(
        (config.session.aliases, config.sticky.mode),
        (SessionAliases::Known, StickyMode::ConversationPreferred)
    );
    assert_eq!((config.retry.max_attempts, config.retry.all_cooling), (1, AllCooling::Wait(20)));
    assert_eq!((config.health.growth_permille, config.health.breaker_hard_failures), (1250, 6));
}

#[test]
fn a_fault_in_the_environment_names_the_variable() {
    let variables = [
        ("STICKY_TTL_MINUTES", "43201"),
        ("WAYBILL_LISTEN", "SENTINEL"),
        ("WAYBILL_LOG_NATS", "SENTINEL"),
        ("WAYBILL_RETRY_CROSS_CHANNEL", "SENTINEL"),
        ("RETRY_TIMES", "many"),
    ];
    check(
        MINIMAL,
        &variables,
        &[
            (1, "deployment_secret", "is missing"),
            (0, "RETRY_TIMES", "from 0 to 20"),
            (0, "STICKY_TTL_MINUTES", "from 1 to 43200"),
            (0, "WAYBILL_LISTEN", "`host:port`"),
            (0, "WAYBILL_LOG_NATS", "`nats://`"),
            (0, "WAYBILL_RETRY_CROSS_CHANNEL", "true or false"),
        ],
    );
    let problems = read("listen: 1\n", &[("RETRY_TIMES", "many")]).expect_err("both are faulty");
    let shown: Vec<String> = problems.iter().map(Problem::to_string).collect();
    assert_eq!(
        shown,
        [
            "waybill.yaml:1:9: listen: expected `host:port`, such as `127.0.0.1:4000`",
            "environment: RETRY_TIMES: expected a whole number from 0 to 20",
        ]
    );
}

#[test]
fn a_word_may_be_quoted_and_a_list_may_be_a_block() {
    let text =
        "retry:\n  max_attempts: \"3\"\n  all_cooling: best_effort\nsession:\n  aliases:\n    - X-Session-Affinity\n";
    let config = good(text, &[]);
    assert_eq!((config.retry.max_attempts, config.retry.all_cooling), (3, AllCooling::BestEffort));
    assert_eq!(config.session.aliases, SessionAliases::Headers(vec!["x-session-affinity".to_owned()]));
    let wait = good("retry: { all_cooling: { wait: 9 } }", &[]);
    assert_eq!(wait.retry.all_cooling, AllCooling::Wait(9));
}

/// The smallest catalogue with one key, whose row says `terms` as well.
fn key_with(terms: &str) -> String {
    format!(
        "catalogue:\n  channels: [{{ id: a, base_url: http://a, dialects: [chat] }}]\n  groups: [{{ id: g }}]\n  \
         routes: [{{ model: gpt, members: [{{ channel: a }}] }}]\n  keys:\n    - {{ id: k, key: env:K, {terms} }}\n"
    )
}

/// S3.11: what a key, a team or an organization may do.
#[test]
fn terms_are_read_and_their_faults_are_told() {
    let hook = "{ url: 'https://h/x', token: env:T, deadline_ms: 9, on_failure: allow }";
    let text = key_with(&format!("models: ['*'], budget: {{ usd: 1.5, period: day }}, guardrails: {{ hook: {hook} }}"));
    let config = good(&text, &[]);
    let terms = config.rows.iter().find_map(|row| match row {
        Row::Key(key) => Some(&key.terms),
        _ => None,
    });
    let expected = Terms {
        models: vec!["*".into()],
        budget: Some(Budget { period: Period::Day, tokens: None, usd_milli: Some(1500) }),
        guardrails: Some(Guardrails {
            hook: Some(Hook {
                url: "https://h/x".to_owned(),
                token: Some(SecretRef::Env("T".to_owned())),
                deadline_ms: 9,
                on_failure: OnFailure::Allow,
            }),
            ..Guardrails::default()
        }),
        ..Terms::default()
    };
    assert_eq!(terms, Some(&expected));
    assert_eq!(config.warnings, vec![]);

    let field = |name: &str| format!("catalogue.keys[0].{name}");
    let faults = [
        ("models: []", field("models"), "would permit nothing"),
        ("models: [gtp]", field("models[0]"), "did you mean `gpt`"),
        ("requests_per_minute: 0", field("requests_per_minute"), "from 1 to"),
        ("budget: { period: day }", field("budget"), "names no limit"),
        ("budget: { tokens: 1, period: week }", field("budget.period"), "`day` or `month`"),
        ("guardrails: { deny: ['('] }", field("guardrails.deny[0]"), "regular expression: error: unclosed group"),
        ("guardrails: { deny: ['(\\w{50}){50}{50}'] }", field("guardrails.deny[0]"), "smaller"),
        ("guardrails: { hook: { url: 'http://h' } }", field("guardrails.hook.on_failure"), "is missing"),
        (
            "guardrails: { hook: { url: 'http://u:SENTINEL@h', on_failure: allow } }",
            field("guardrails.hook.url"),
            "token",
        ),
    ];
    for (terms, field, part) in faults {
        check(&key_with(terms), &[], &[(6, &field, part)]);
    }
}

#[test]
fn a_base_url_keeps_no_slash_at_its_end() {
    let text = "catalogue: { channels: [{ id: a, base_url: 'http://h:8080/v1//', dialects: [chat] }] }";
    let rows = good(text, &[]).rows;
    assert!(matches!(&rows[..], [Row::Channel(channel)] if channel.base_url == "http://h:8080/v1"), "{rows:?}");
}

/// The file's JSON Schema, for editors.
const SCHEMA: &str = include_str!("../waybill.schema.json");

/// A document with everything the schema knows, filled by `leaf` where the schema goes no deeper.
fn document(schema: &Value, leaf: &dyn Fn(&Value) -> Value) -> Value {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        let stray = ("qqqqqqqqqqqqqqqqqqqqqqqqqqqq".to_owned(), Value::Null);
        let known = properties.iter().map(|(name, schema)| (name.clone(), document(schema, leaf)));
        return Value::Object(known.chain([stray]).collect());
    }
    match schema.get("items") {
        Some(items) if items.get("properties").is_some() => Value::Array(vec![document(items, leaf)]),
        _ => leaf(schema),
    }
}

/// The sorted field names of every map that the schema describes.
fn known_fields(schema: &Value, found: &mut Vec<Vec<String>>) {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        found.push(properties.keys().cloned().collect());
        properties.values().for_each(|schema| known_fields(schema, found));
    }
    if let Some(items) = schema.get("items") {
        known_fields(items, found);
    }
}

#[test]
fn the_schema_has_the_fields_that_are_read_and_no_others() {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let text = document(&schema, &|_| Value::Null).to_string();
    let problems = read(&text, &[]).expect_err("it has strays");
    let told = problems.iter().filter_map(|problem| problem.message.split_once("expected one of "));
    let unknown = told.clone().filter(|(message, _)| message.starts_with("unknown field")).count();
    let strays = problems.iter().filter(|problem| problem.message.starts_with("unknown field")).count();
    assert_eq!(unknown, strays, "{problems:#?}");
    let sorted = |names: &str| {
        let mut names: Vec<String> = names.split(", ").map(str::to_owned).collect();
        names.sort();
        names
    };
    let mut read: Vec<Vec<String>> = told.map(|(_, names)| sorted(names)).collect();
    let mut described = Vec::new();
    known_fields(&schema, &mut described);
    read.sort();
    described.iter_mut().for_each(|names| names.sort());
    described.sort();
    assert_eq!(read, described);
}

#[test]
fn the_schema_has_the_bounds_that_are_checked() {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let is_integer = |schema: &Value| schema.get("minimum").is_some() && schema["type"] == "integer";
    let text = document(&schema, &|schema| if is_integer(schema) { Value::from(-1) } else { Value::Null }).to_string();
    let problems = read(&text, &[]).expect_err("every number is out of bounds");
    let told = problems.iter().filter_map(|p| p.message.strip_prefix("expected a whole number ")).map(str::to_owned);
    let mut checked: Vec<String> = told.collect();
    let mut described: Vec<String> = Vec::new();
    bounds(&schema, &mut described);
    checked.sort();
    described.sort();
    assert_eq!(checked, described);
}

fn bounds(schema: &Value, found: &mut Vec<String>) {
    if let (Some(low), Some(high), "integer") =
        (schema.get("minimum"), schema.get("maximum"), schema["type"].as_str().unwrap_or_default())
    {
        found.push(format!("from {low} to {high}"));
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.iter().flat_map(|properties| properties.values()).for_each(|schema| bounds(schema, found));
    if let Some(items) = schema.get("items") {
        bounds(items, found);
    }
}

#[test]
fn the_schema_has_the_defaults_that_hold() {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let mut text = document(&schema, &|schema| schema.get("default").cloned().unwrap_or(Value::Null));
    let root = text.as_object_mut().expect("the document is a map");
    for absent in ["log", "state", "usage", "catalogue"] {
        root.remove(absent);
    }
    let text = text.to_string().replace(",\"qqqqqqqqqqqqqqqqqqqqqqqqqqqq\":null", "");
    assert_eq!(Config { warnings: vec![], ..good(&text, &[]) }, good(MINIMAL, &[]));
}

#[test]
fn the_example_shows_every_field_of_the_schema() {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let mut described = Vec::new();
    known_fields(&schema, &mut described);
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let shown: Vec<&str> = EXAMPLE.split(':').filter_map(|before| before.rsplit(|c| !is_part(c)).next()).collect();
    let missing: Vec<String> = described.concat().into_iter().filter(|name| !shown.contains(&&**name)).collect();
    assert!(missing.is_empty(), "deploy/examples/waybill.yaml lacks {missing:?}");
}

/// A piece of text that might stand anywhere in a file.
fn scrap() -> impl Strategy<Value = String> {
    let words =
        ["[", "]", "{", "}", ": ", "- ", "\n", "\n  ", "&a ", "*a ", "!!x ", "|", ">", "\"", "'", "#", "---\n", "~"];
    prop_oneof![proptest::sample::select(words.to_vec()).prop_map(str::to_owned), ".{0,4}", "[a-z0-9_.*/-]{0,6}"]
}

proptest! {
    #[test]
    fn no_text_panics(text in "(?s).{0,200}") {
        drop(read(&text, &[]));
    }

    #[test]
    fn no_damage_to_a_file_panics_or_goes_unplaced(
        cuts in proptest::collection::vec((any::<proptest::sample::Index>(), 0_usize..40, scrap()), 1..6),
    ) {
        let mut text: Vec<char> = EXAMPLE.chars().collect();
        for (at, length, scrap) in cuts {
            let from = at.index(text.len());
            let to = (from + length).min(text.len());
            text.splice(from..to, scrap.chars());
            text.push('\n');
        }
        let text: String = text.into_iter().collect();
        if let Err(problems) = read(&text, &[]) {
            let lines = text.split('\n').count() as u64 + 1;
            prop_assert!(!problems.is_empty());
            prop_assert!(problems.iter().all(|p| (1..=lines).contains(&p.line)), "{:?}", problems);
            prop_assert!(problems.is_sorted_by_key(|p| p.line));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_secret_written_out_is_never_repeated(secret in "[A-Za-z0-9_-]{12,60}") {
        let places = ["env:WAYBILL_ADMIN_TOKEN", "file:/run/secrets/waybill", "env:ASXS_KEY", "env:ALICE_KEY"];
        for place in places {
            for text in [secret.clone(), format!("env:-{secret}"), format!("[{secret}]"), format!("{{ {secret} }}")] {
                let problems = read(&EXAMPLE.replace(place, &text), &[]).expect_err("a literal secret");
                let told = problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n");
                prop_assert!(!told.contains(&secret), "{}", told);
            }
        }
    }
}
