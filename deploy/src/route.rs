//! `waybill route`: where a request would go now, decided by the same functions on the folded log, with no side effect.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use waybill_auditor::reading;
use waybill_projections::fold::Fold;
use waybill_projections::word::Word;
use waybill_routing::policy::{Policy, Subject};
use waybill_routing::request;
use waybill_routing::select::{self, Ask, Moment, Shares};
use waybill_routing::session::{self, Identity, Whose};
use waybill_schema::catalogue::{Catalogue, Key, Pool, StickyMode};
use waybill_schema::config::AllCooling;
use waybill_schema::event::{Affinity, Choice, Endpoint, Reason, SessionSource, Sticky};
use waybill_schema::id::{DeploymentId, GroupId, ModelName, ScopeId, SessionId};
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
    /// The deployment, and why; absent when none is legal, or the caller is refused.
    deployment: Option<String>,
    reason: Option<Reason>,
    /// The affinity key that was looked up.
    sticky: Option<String>,
    /// The fallback that the session was served by last, where it was.
    fallback: Option<Fallback>,
    choice: Choice,
}

/// A session's kept fallback.
#[derive(serde::Serialize)]
struct Fallback {
    /// The targets on the way to it.
    path: Vec<ModelName>,
    deployment: DeploymentId,
    standing: Standing,
}

/// What becomes of a kept fallback now.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum Standing {
    Followed,
    NotLegal,
    ChainGone,
    /// The key may not ask for it.
    Refused,
    /// No group of the key shows it.
    NotShown,
    NotRepeatable,
}

/// What is asked about.
struct Asked<'a> {
    catalogue: &'a Catalogue,
    key: &'a Arc<Key>,
    policy: Option<Policy>,
    pool: Arc<Pool>,
    model: ModelName,
    endpoint: Endpoint,
    sticky: Option<Sticky>,
    /// Whether a failed request may be made again whatever became of it.
    repeatable: bool,
    last_resort: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = data::open_log(&args.data.data)?;
    let Fold { rows, state, .. } = reading::fold(log.connection())?;
    let catalogue = Catalogue::compile(&rows);
    let asked = asked(args, &catalogue)?;
    let draw = select::draw(uuid::Uuid::new_v4().as_u64_pair().1);
    let answer = asked.answer(&Moment { state: &state, now: Time::wall_clock(), draw });
    if args.json { table::json(&answer) } else { print(&answer) }
}

fn asked<'a>(args: &Args, catalogue: &'a Catalogue) -> anyhow::Result<Asked<'a>> {
    let key = caller(catalogue, args.key.as_deref())?;
    let group = args.group.as_deref().map_or_else(|| key.group.clone(), GroupId::from);
    let pool = catalogue.asked(key, &group, &args.model);
    let pool = pool.with_context(|| format!("the group `{group}` shows no model `{}`", args.model))?;
    if !catalogue.rights(key).may(&args.model) {
        bail!("the key `{}` may not ask for `{}`", key.id, args.model);
    }
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
    let once = config.as_ref().is_some_and(|config| config.retry.responses_single_send);
    let sends_once = endpoint.is_native() || (endpoint == Endpoint::Responses && once);
    Ok(Asked {
        catalogue,
        key,
        policy: catalogue.templates.get(&key.id).map(|template| Policy::of(template)),
        pool,
        model: ModelName::new(args.model.as_str()),
        endpoint,
        sticky,
        repeatable: !sends_once,
        last_resort: config.as_ref().is_some_and(|config| config.retry.all_cooling == AllCooling::BestEffort),
    })
}

impl Asked<'_> {
    fn answer(&self, moment: &Moment<'_>) -> Answer {
        let (fallback, followed) = match self.kept(moment) {
            None => (None, None),
            Some((fallback, choice)) => (Some(fallback), choice),
        };
        let choice = followed.unwrap_or_else(|| self.look(&self.pool, &[], moment));
        let is_refused = fallback.as_ref().is_some_and(|fallback| fallback.standing.refuses());
        let decided = if is_refused { None } else { select::decide(&choice) };
        Answer {
            deployment: decided.map(|(index, _)| choice.candidates[index].deployment.to_string()),
            reason: decided.map(|(_, reason)| reason),
            sticky: self.sticky.as_ref().map(|sticky| sticky.key.to_string()),
            fallback,
            choice,
        }
    }

    /// The session's kept fallback, and the choice that follows it, where one does.
    fn kept(&self, moment: &Moment<'_>) -> Option<(Fallback, Option<Choice>)> {
        let record = moment.state.record(&self.sticky.as_ref()?.key, moment.now);
        let record = record.filter(|record| !record.way.path.is_empty())?;
        let path = &record.way.path;
        let rights = self.catalogue.rights(self.key);
        let admit = |target: &ModelName| match self.catalogue.target(self.key, &self.pool.group.id, target.as_str()) {
            _ if !rights.may(target.as_str()) => Err(Standing::Refused),
            pool => pool.ok_or(Standing::NotShown),
        };
        let (standing, choice) = match self.subject(&self.pool, &self.model).follow(&record.way, admit) {
            _ if !self.repeatable => (Standing::NotRepeatable, None),
            Err(standing) => (standing, None),
            Ok(None) => (Standing::ChainGone, None),
            Ok(Some(pool)) => {
                let choice = self.look(&pool, path, moment);
                match choice.affinity {
                    Affinity::Hit(_) => (Standing::Followed, Some(choice)),
                    Affinity::None | Affinity::Absent | Affinity::Skipped(_) => (Standing::NotLegal, None),
                }
            }
        };
        Some((Fallback { path: path.clone(), deployment: record.deployment.clone(), standing }, choice))
    }

    fn subject<'a>(&'a self, pool: &'a Pool, model: &'a ModelName) -> Subject<'a> {
        Subject { policy: self.policy.as_ref(), pool, model }
    }

    /// Looks at the pool to which `path` led. What a gateway has on its way is not known here: a strategy that ranks by
    /// it is shown with its weights alone.
    fn look(&self, pool: &Pool, path: &[ModelName], moment: &Moment<'_>) -> Choice {
        let model = path.last().unwrap_or(&self.model);
        let ask = Ask {
            pool,
            model,
            endpoint: self.endpoint,
            sticky: self.sticky.as_ref(),
            exhausted: &[],
            has_credential: &|place| {
                place.channel.api_keys.is_empty() || place.channel.api_keys.iter().any(|key| data::resolve(key).is_ok())
            },
            last_resort: self.last_resort && path.is_empty(),
            catalogue: self.catalogue.revision,
            path,
            shares: self.subject(pool, model).rule().map(|rule| Shares { rule, rank: &|_| 0 }),
        };
        select::look(&ask, moment)
    }
}

fn caller<'a>(catalogue: &'a Catalogue, named: Option<&str>) -> anyhow::Result<&'a Arc<Key>> {
    match named {
        Some(name) => catalogue.keys.get(name).ok_or_else(|| anyhow!("there is no key `{name}`")),
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
) -> anyhow::Result<Option<Sticky>> {
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
    let standing = answer.fallback.as_ref().map(|fallback| fallback.standing);
    match (&answer.deployment, &answer.reason, standing) {
        (Some(deployment), Some(reason), _) => table::say(format_args!("{deployment} ({})", Word(reason)))?,
        (.., Some(Standing::Refused)) => table::say("nowhere: the key may not use what its session was served by")?,
        (.., Some(Standing::NotShown)) => {
            table::say("nowhere: no group of the key shows what its session was served by")?
        }
        _ => table::say("nowhere: no candidate is legal")?,
    }
    if let Some(sticky) = &answer.sticky {
        table::say(format_args!("affinity {sticky}: {}", read(&answer.choice.affinity)))?;
    }
    if let Some(Fallback { path, deployment, standing }) = &answer.fallback {
        let path: Vec<&str> = path.iter().map(ModelName::as_str).collect();
        table::say(format_args!("fallback {} at {deployment}: {}", path.join(" > "), standing.says()))?;
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

impl Standing {
    /// Whether the request is refused, as one is that asks for the fallback itself.
    fn refuses(self) -> bool {
        match self {
            Self::Refused | Self::NotShown => true,
            Self::Followed | Self::NotLegal | Self::ChainGone | Self::NotRepeatable => false,
        }
    }

    fn says(self) -> &'static str {
        match self {
            Self::Followed => "is followed",
            Self::NotLegal => "is not legal now",
            Self::ChainGone => "no chain leads there any more",
            Self::Refused => "is refused to the key",
            Self::NotShown => "is shown by no group of the key",
            Self::NotRepeatable => "is not reused by a request that may not be repeated",
        }
    }
}

fn read(affinity: &Affinity) -> String {
    match affinity {
        Affinity::None => "none is looked up".to_owned(),
        Affinity::Absent => "no record".to_owned(),
        Affinity::Hit(read) => format!("{} is followed", read.deployment),
        Affinity::Skipped(read) => format!("{} is not legal now", read.deployment),
    }
}
