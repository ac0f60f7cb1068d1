//! `waybill sessions [SESSION]`: conversations by latest activity, or the rounds of one.

use anyhow::bail;
use waybill_auditor::moment::moment;
use waybill_auditor::paging::{Page, Paged};
use waybill_auditor::sessions::{self, Filter, Round, Session, Target, Totals};
use waybill_auditor::usage::UsageStore;
use waybill_schema::id::{ScopeId, SessionId};
use waybill_schema::time::Time;

use crate::logs::Place;
use crate::{audit, table};

/// List sessions, or the rounds of one.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The session whose rounds to show
    session: Option<String>,
    /// The scope to look in; a session that only one scope has needs none
    #[arg(long)]
    scope: Option<String>,
    /// Sessions that asked for this model
    #[arg(long, conflicts_with = "session")]
    model: Option<String>,
    /// Sessions whose latest activity was not before this moment (2026-11-30T12:00:00Z)
    #[arg(long, conflicts_with = "session", value_name = "TIME", value_parser = moment)]
    since: Option<Time>,
    /// Sessions whose latest activity was before this moment
    #[arg(long, conflicts_with = "session", value_name = "TIME", value_parser = moment)]
    until: Option<Time>,
    /// How many entries, 1 to 500
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Where to go on: what the page before ended with
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let runtime = audit::runtime()?;
    let mut store = audit::usage(&args.place, &runtime)?;
    let page = Page::new(Some(args.limit), args.cursor.as_deref())?;
    match &args.session {
        None => list(store.as_mut(), args, &page),
        Some(session) => show_rounds(store.as_mut(), args, session, &page),
    }
}

fn list(store: &mut dyn UsageStore, args: &Args, page: &Page) -> anyhow::Result<()> {
    let Args { scope, model, since, until, .. } = args;
    let scope = scope.as_deref().map(ScopeId::from);
    let wanted = Filter { scope, model: model.clone(), since: *since, until: *until };
    let paged = sessions::sessions(store, &wanted, page)?;
    let header = ["session", "scope", "source", "requests", "failed", "deployments", "tokens", "last"];
    print(args, &paged, &header, session_row)
}

fn show_rounds(store: &mut dyn UsageStore, args: &Args, session: &str, page: &Page) -> anyhow::Result<()> {
    let scope = match &args.scope {
        Some(scope) => ScopeId::new(scope.as_str()),
        None => only_scope_of(store, session)?,
    };
    let paged = sessions::rounds(store, &scope, &SessionId::new(session), page)?;
    let header = ["request", "ended", "model", "outcome", "sticky", "sends", "tokens", "USD"];
    print(args, &paged, &header, round_row)
}

fn print<T: serde::Serialize>(
    args: &Args,
    paged: &Paged<T>,
    header: &[&str],
    row: impl Fn(&T) -> Vec<String>,
) -> anyhow::Result<()> {
    if args.place.json {
        return table::json(paged);
    }
    table::print(header, paged.entries.iter().map(row))?;
    match &paged.next {
        Some(next) => table::say(format_args!("more: --cursor {next}")),
        None => Ok(()),
    }
}

/// The one scope that has the session; a client's session id alone names no tenant.
fn only_scope_of(store: &mut dyn UsageStore, session: &str) -> anyhow::Result<ScopeId> {
    let found = sessions::named(store, &SessionId::new(session))?;
    match found.as_slice() {
        [found] => Ok(found.scope.clone()),
        [] => bail!("no session `{session}` is in the rows"),
        found => {
            let names: Vec<&str> = found.iter().map(|found| found.scope.as_str()).collect();
            bail!("several scopes have a session `{session}`: choose with --scope ({})", names.join(", "))
        }
    }
}

fn session_row(session: &Session) -> Vec<String> {
    vec![
        session.session.to_string(),
        session.scope.to_string(),
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
        round.targets.iter().map(|target| dollars(target.totals.cost_nano)).collect::<Vec<_>>().join("\n"),
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

/// Nano-dollars as dollars; a dash where nobody knows.
fn dollars(nano: Option<u64>) -> String {
    const NANO: u64 = 1_000_000_000;
    nano.map_or_else(|| "—".to_owned(), |nano| format!("{}.{:09}", nano / NANO, nano % NANO))
}
