//! `waybill sessions [SESSION]`: conversations by latest activity, or the rounds of one.

use anyhow::{Context, bail};
use waybill_auditor::sessions::{self, Page, Round, Session, Target, Totals};
use waybill_schema::id::{ScopeId, SessionId};

use crate::{DataDir, data, table};

/// List sessions, or the rounds of one.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The session whose rounds to show
    session: Option<String>,
    /// The scope to look in; a session that only one scope has needs none
    #[arg(long)]
    scope: Option<String>,
    /// How many entries
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Where to go on: the cursor that the page before ended with
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataDir,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = data::open_log(&args.data.data)?;
    let connection = log.connection();
    let after = args.after.as_deref().map(str::parse).transpose().context("--after")?;
    let page = Page { limit: args.limit, after };
    let scope = args.scope.as_deref().map(ScopeId::from);
    let next = match &args.session {
        None => {
            let paged = sessions::sessions(connection, scope.as_ref(), &page)?;
            show(args, &paged, &["session", "source", "requests", "failed", "deployments", "tokens", "last"], |s| {
                session_row(s)
            })?;
            paged.next
        }
        Some(session) => {
            let scope = match scope {
                Some(scope) => scope,
                None => only_scope_of(connection, session)?,
            };
            let paged = sessions::rounds(connection, &scope, &SessionId::new(session.as_str()), &page)?;
            show(args, &paged, &["request", "ended", "model", "outcome", "sticky", "sends", "tokens"], round_row)?;
            paged.next
        }
    };
    if let Some(next) = next.filter(|_| !args.json) {
        table::say(format_args!("more: --after {next}"))?;
    }
    Ok(())
}

fn show<T: serde::Serialize>(
    args: &Args,
    paged: &sessions::Paged<T>,
    header: &[&str],
    row: impl Fn(&T) -> Vec<String>,
) -> anyhow::Result<()> {
    if args.json {
        return table::json(paged);
    }
    table::print(header, paged.entries.iter().map(row))
}

/// The one scope that has the session; a client's session id alone names no tenant.
fn only_scope_of(connection: &rusqlite::Connection, session: &str) -> anyhow::Result<ScopeId> {
    let scopes = sessions::scopes(connection, &SessionId::new(session))?;
    match scopes.as_slice() {
        [scope] => Ok(scope.clone()),
        [] => bail!("no session `{session}` is in the log"),
        scopes => {
            let names: Vec<&str> = scopes.iter().map(ScopeId::as_str).collect();
            bail!("several scopes have a session `{session}`: choose with --scope ({})", names.join(", "))
        }
    }
}

fn session_row(session: &Session) -> Vec<String> {
    vec![
        session.session.to_string(),
        if session.inferred { format!("{} (inferred)", session.source) } else { session.source.clone() },
        session.requests.to_string(),
        session.failed.to_string(),
        session.deployments.join(", "),
        tokens(&session.totals),
        table::moment(session.ended),
    ]
}

fn round_row(round: &Round) -> Vec<String> {
    vec![
        round.request.clone(),
        table::moment(round.ended),
        round.model.clone(),
        round.outcome.clone(),
        if round.sticky_hit { "hit".to_owned() } else { "—".to_owned() },
        round.targets.iter().map(send).collect::<Vec<_>>().join("\n"),
        round.targets.iter().map(|target| tokens(&target.totals)).collect::<Vec<_>>().join("\n"),
    ]
}

fn send(target: &Target) -> String {
    let status = target.status.map(|status| format!(" {status}")).unwrap_or_default();
    format!("{}: {}{status}", target.deployment, target.class)
}

/// `input (cached) → output`; a dash for what nobody knows.
fn tokens(totals: &Totals) -> String {
    let number = |n: Option<u64>| n.map_or_else(|| "—".to_owned(), |n| n.to_string());
    format!("{} ({} cached) → {}", number(totals.input), number(totals.cached), number(totals.output))
}
