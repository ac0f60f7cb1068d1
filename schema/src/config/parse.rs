//! From text to [`Config`]: the sections in order, what holds between them, and what is not in force yet.

use std::ops::RangeInclusive;

use super::fields::Fields;
use super::names::Names;
use super::reader::{Reader, Spot};
use super::rows::rows;
use super::yaml::{self, Kind, Node};
use super::{Config, Problem, settings, value};
use crate::catalogue::Row;
use crate::secret::sum128;

/// An hour is longer than any request may take.
const DRAIN_SECONDS: RangeInclusive<u32> = 0..=3600;
const NOTICE_SECONDS: RangeInclusive<u32> = 0..=600;

/// MiB of a request body: to a GiB, which is held in memory unless it is a form. Providers take 32 MiB at most
/// (PROVIDER_ERRORS L09), and files of some hundred.
const BODY_MIB: RangeInclusive<u32> = 1..=1024;

/// Settings that are read and checked but change nothing in this version; whoever brings one into force takes its line
/// out. A line stands for everything under it; `[]` is any element.
const NOT_IN_FORCE: [&str; 8] = [
    "routing.latency_aware",
    "routing.error_aware",
    "routing.concurrency_aware",
    "stable_first.enabled",
    "health.breaker",
    "health.auto_disable_failures",
    "health.probe",
    "catalogue.channels[].discover",
];

/// Parses the configuration `text`, read from `file` (a name for messages), with `env` to look overrides up in.
///
/// `WAYBILL_<PATH>` (such as `WAYBILL_RETRY_MAX_ATTEMPTS`) goes before seed 2's name of the same setting, and that
/// before the file; an empty variable counts as none. On failure every problem of the file and of the environment is
/// returned, by line.
pub fn parse(text: &str, file: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, Vec<Problem>> {
    let reader = Reader::new(file, env);
    let mut faults = Vec::new();
    let tree = yaml::read(text, &mut faults);
    faults.into_iter().for_each(|fault| reader.fault(fault));
    let config = match &tree {
        Ok(Node { at, kind: Kind::Null }) => {
            reader.fault(yaml::Fault { at: *at, message: "the file is empty".to_owned() });
            None
        }
        Ok(root) => Some(config(&reader, root)),
        Err(fault) => {
            reader.fault(yaml::Fault { at: fault.at, message: fault.message.clone() });
            None
        }
    };
    let problems = reader.problems();
    config.filter(|_| problems.is_empty()).ok_or(problems)
}

fn config<'a>(reader: &'a Reader<'a>, root: &'a Node) -> Config {
    let names = Names::gather(reader, root.get("catalogue"));
    let mut fields = Fields::root(reader, root);
    let (sticky_enabled, sticky) = settings::sticky(fields.field("sticky").section());
    let rows = fields.field("catalogue").file_only().map().map(|catalogue| rows(catalogue, &names)).unwrap_or_default();
    let (log, state) = (settings::log(fields.field("log")), settings::state(fields.field("state")));
    let usage = settings::usage(fields.field("usage"));
    let deployment_secret = fields.field("deployment_secret");
    if (log.is_some() || state.is_some() || usage.is_some()) && !deployment_secret.is_given() {
        let message = "is missing: instances that share log, state or usage must make the same hashes";
        deployment_secret.here().wrong(message);
    }
    let listen = fields.field("listen").read(|text| value::listen(text).map(str::to_owned));
    let config = Config {
        listen: listen.unwrap_or("127.0.0.1:4000".to_owned()),
        notice_seconds: fields.field("notice_seconds").number(NOTICE_SECONDS, 0),
        drain_seconds: fields.field("drain_seconds").number(DRAIN_SECONDS, 30),
        client_idle_seconds: fields.field("client_idle_seconds").number(settings::DEADLINE_SECONDS, 300),
        body_mib_max: fields.field("body_mib_max").number(BODY_MIB, 64),
        admin_token: fields.field("admin_token").secret(),
        deployment_secret: deployment_secret.secret(),
        log,
        state,
        usage,
        session: settings::session(fields.field("session").section()),
        routing: settings::routing(fields.field("routing").section()),
        sticky_enabled,
        sticky,
        retry: settings::retry(fields.field("retry").section()),
        health: settings::health(fields.field("health").section()),
        stable_first: settings::stable_first(fields.field("stable_first").section()),
        hash: hash(&rows),
        warnings: Vec::new(),
        rows,
    };
    drop(fields);
    Config { warnings: warnings(reader), ..config }
}

/// One sentence for each line of [`NOT_IN_FORCE`] that the operator relies on, at its first place.
fn warnings(reader: &Reader<'_>) -> Vec<Problem> {
    let in_use: Vec<Spot> = reader.in_use();
    let first = |setting: &&str| in_use.iter().find(|spot| is_under(&any_element(&spot.path), setting));
    let used = NOT_IN_FORCE.iter().filter_map(first);
    let mut warnings: Vec<Problem> =
        used.map(|spot| reader.told(spot, "accepted, not in force in this version".to_owned())).collect();
    warnings.sort_by_key(|warning| (warning.line == 0, warning.line, warning.column));
    warnings
}

/// `path` without the numbers of its elements.
fn any_element(path: &str) -> String {
    let mut in_brackets = false;
    let outside = |c: &char| {
        in_brackets = *c == '[' || (in_brackets && *c != ']');
        *c == '[' || !in_brackets
    };
    path.chars().filter(outside).collect()
}

fn is_under(path: &str, setting: &str) -> bool {
    path.strip_prefix(setting).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The hash of the catalogue: of the rows as JSON, so that comments, spaces and the file's order do not count.
fn hash(rows: &[Row]) -> String {
    sum128(&[&serde_json::to_vec(rows).expect("rows are plain data")])
}
