//! `waybill explain REQUEST`: why a request went where it went, from its own facts.

use waybill_auditor::explain;
use waybill_schema::id::RequestId;

use crate::logs::Place;
use crate::{audit, table};

/// Tell why a request went where it went.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The request: what the reply named in X-Waybill-Request-Id
    request: String,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let runtime = audit::runtime()?;
    let mut store = audit::usage(&args.place, &runtime)?;
    let mut log = args.place.read()?;
    let explanation = explain::explain(log.as_mut(), store.as_mut(), &RequestId::new(args.request.as_str()))?;
    if args.place.json {
        return table::json(&explanation);
    }
    table::say(explanation)
}
