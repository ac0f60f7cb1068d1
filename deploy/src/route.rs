//! `waybill route`: where a request would go now, decided by the same functions on the folded log, with no side effect.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use waybill_auditor::reading;
use waybill_projections::fold::Fold;
use waybill_projections::word::Word;
use waybill_routing::policy::{Policy, Subject};
use waybill_routing::request;
use waybill_routing::select::{self, Ask, Moment, Shares};
use waybill_routing::session::{self, Identity, Whose};
use waybill_schema::catalogue::{Catalogue, Key, StickyMode};
use waybill_schema::config::AllCooling;
use waybill_schema::event::{Affinity, Choice, Endpoint, Reason, SessionSource};
use waybill_schema::id::{GroupId, ModelName, ScopeId, SessionId};
use waybill_schema::secret::DeploymentSecret;
use waybill_schema::time::Time;

use crate::{DataDir, check, data, table};

/// Tell where a request would go now.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The model that the request names
    #[arg(long)]
    model: String,
    /// The caller's key, by its name in the catalogue; a catalogue with one key needs none
    #[arg(long)]
    key: Option<String>,
    /// The group, instead of the key's own
    #[arg(long)]
    group: Option<String>,
    /// The session that the request names
    #[arg(long)]
    session: Option<String>,
    /// The API that the request speaks
    #[arg(long, value_enum, default_value_t = Api::Chat)]
    endpoint: Api,
    /// The configuration file, where the platform's sticky and retry settings differ from the defaults
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataDir,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Api {
    Chat,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Completions,
    ImageGenerations,
    ImageEdits,
    Speech,
    Transcriptions,
    Translations,
    Videos,
    Music,
    Moderations,
    Rerank,
}

impl From<Api> for Endpoint {
    fn from(api: Api) -> Self {
        match api {
            Api::Chat => Self::Chat,
            Api::Responses => Self::Responses,
            Api::Messages => Self::Messages,
            Api::CountTokens => Self::CountTokens,
            Api::Embeddings => Self::Embeddings,
            Api::Completions => Self::Completions,
            Api::ImageGenerations => Self::ImageGenerations,
            Api::ImageEdits => Self::ImageEdits,
            Api::Speech => Self::Speech,
            Api::Transcriptions => Self::Transcriptions,
            Api::Translations => Self::Translations,
            Api::Videos => Self::Videos,
            Api::Music => Self::Music,
            Api::Moderations => Self::Moderations,
            Api::Rerank => Self::Rerank,
        }
    }
}

/// Where a request would go.
#[derive(serde::Serialize)]
struct Answer {
    /// The deployment, and why; absent when none is legal.
    deployment: Option<String>,
    reason: Option<Reason>,
    /// The affinity key that was looked up.
    sticky: Option<String>,
    choice: Choice,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = data::open_log(&args.data.data)?;
    let Fold { rows, state, .. } = reading::fold(log.connection())?;
    let catalogue = Catalogue::compile(&rows);
    let key = caller(&catalogue, args.key.as_deref())?;
    let group = args.group.as_deref().map_or_else(|| key.group.clone(), GroupId::from);
    let pool = catalogue.asked(key, &group, &args.model);
    let pool = pool.with_context(|| format!("the group `{group}` shows no model `{}`", args.model))?;
    let endpoint = Endpoint::from(args.endpoint);
    let config = args.config.as_deref().map(check::load).transpose()?;
    let mode = match (&pool.group.sticky_policy, &config) {
        (Some(policy), _) => policy.mode,
        (None, Some(config)) => config.sticky.mode,
        (None, None) => StickyMode::default(),
    };
    let sticks = pool.route.sticky_session && config.as_ref().is_none_or(|config| config.sticky_enabled);
    let sticky = match args.session.as_deref().filter(|_| sticks) {
        Some(session) => sticky_of(session, key, &group, &args.model, endpoint, mode)?,
        None => None,
    };
    let model = ModelName::new(args.model.as_str());
    let policy = catalogue.templates.get(&key.id).map(|template| Policy::of(template));
    // What a gateway has on its way is not known here: a strategy that ranks by it is shown with its weights alone.
    let rule = Subject { policy: policy.as_ref(), pool: &pool, model: &model }.rule();
    let ask = Ask {
        pool: &pool,
        model: &model,
        endpoint,
        sticky: sticky.as_ref(),
        exhausted: &[],
        has_credential: &|place| {
            place.channel.api_keys.is_empty() || place.channel.api_keys.iter().any(|key| data::resolve(key).is_ok())
        },
        last_resort: config.as_ref().is_some_and(|config| config.retry.all_cooling == AllCooling::BestEffort),
        catalogue: catalogue.revision,
        path: &[],
        shares: rule.map(|rule| Shares { rule, rank: &|_| 0 }),
    };
    let draw = select::draw(uuid::Uuid::new_v4().as_u64_pair().1);
    let choice = select::look(&ask, &Moment { state: &state, now: Time::wall_clock(), draw });
    let decided = select::decide(&choice);
    let answer = Answer {
        deployment: decided.map(|(index, _)| choice.candidates[index].deployment.to_string()),
        reason: decided.map(|(_, reason)| reason),
        sticky: sticky.map(|sticky| sticky.key.to_string()),
        choice,
    };
    if args.json { table::json(&answer) } else { print(&answer) }
}

fn caller<'a>(catalogue: &'a Catalogue, named: Option<&str>) -> anyhow::Result<&'a Key> {
    match named {
        Some(name) => catalogue.keys.get(name).map(AsRef::as_ref).ok_or_else(|| anyhow!("there is no key `{name}`")),
        None => match catalogue.keys.values().collect::<Vec<_>>().as_slice() {
            [key] => Ok(key),
            [] => bail!("the catalogue has no key"),
            _ => bail!("the catalogue has several keys: choose with --key"),
        },
    }
}

/// The affinity key that a request with this explicit session would have.
fn sticky_of(
    session: &str,
    key: &Key,
    group: &GroupId,
    model: &str,
    endpoint: Endpoint,
    mode: StickyMode,
) -> anyhow::Result<Option<waybill_schema::event::Sticky>> {
    let body = serde_json::json!({"model": model}).to_string();
    let inbound = request::parse(endpoint, body.as_bytes())?;
    let identity = Identity {
        session: SessionId::new(session),
        source: SessionSource::Explicit,
        signal: "header:x-session-id".into(),
        conversation: None,
    };
    // An explicit session stands in its key as it is: no hash is made, so no secret is needed.
    let secret = DeploymentSecret::new(&[]);
    let scope = ScopeId::new(key.id.as_str());
    let whose = Whose { scope: &scope, secret: &secret, key: Some(&key.id), group, model, endpoint, mode, ip: None };
    Ok(session::sticky(&identity, &inbound, &whose))
}

fn print(answer: &Answer) -> anyhow::Result<()> {
    match (&answer.deployment, &answer.reason) {
        (Some(deployment), Some(reason)) => table::say(format_args!("{deployment} ({})", Word(reason)))?,
        _ => table::say("nowhere: no candidate is legal")?,
    }
    if let Some(sticky) = &answer.sticky {
        table::say(format_args!("affinity {sticky}: {}", read(&answer.choice.affinity)))?;
    }
    table::print(
        &["deployment", "priority", "weight", "failures", "excluded"],
        answer.choice.candidates.iter().map(|candidate| {
            let until = candidate.until.map(|until| format!(" until {}", table::moment(until))).unwrap_or_default();
            vec![
                candidate.deployment.to_string(),
                candidate.priority.to_string(),
                candidate.weight.to_string(),
                candidate.failures.to_string(),
                candidate.excluded.map(|code| format!("{}{until}", Word(code))).unwrap_or_default(),
            ]
        }),
    )
}

fn read(affinity: &Affinity) -> String {
    match affinity {
        Affinity::None => "none is looked up".to_owned(),
        Affinity::Absent => "no record".to_owned(),
        Affinity::Hit(read) => format!("{} is followed", read.deployment),
        Affinity::Skipped(read) => format!("{} is not legal now", read.deployment),
    }
}
