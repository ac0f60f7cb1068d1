//! `waybill explain REQUEST`: why a request went where it went, from its own facts.

use waybill_auditor::explain;
use waybill_schema::id::RequestId;

use crate::{DataDir, data, table};

/// Tell why a request went where it went.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The request: what the reply named in X-Waybill-Request-Id
    request: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataDir,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = data::open_log(&args.data.data)?;
    let explanation = explain::explain(log.connection(), &RequestId::new(args.request.as_str()))?;
    if args.json {
        return table::json(&explanation);
    }
    table::say(explanation)
}
