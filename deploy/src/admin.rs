//! The admin interface of a process: it is there where the configuration has an `admin_token`.

use std::sync::Arc;

use axum::Router;
use waybill_auditor::admin::{self, Admin, Sources};
use waybill_auditor::usage::UsageStore;
use waybill_events::log::Log;
use waybill_schema::config::Config;

use crate::data;

/// The pages of the interface over these rows and this log; none without a token, so that each is answered 404.
pub(crate) fn pages(
    config: &Config,
    usage: Option<Box<dyn UsageStore>>,
    log: impl FnOnce() -> anyhow::Result<Box<dyn Log>>,
) -> anyhow::Result<Router> {
    let Some(reference) = &config.admin_token else { return Ok(Router::new()) };
    match data::resolve(reference) {
        Ok(token) => Ok(admin::router(Arc::new(Admin::new(&token, Sources { usage, log: log()? })))),
        Err(why) => {
            tracing::warn!(why, "the admin_token cannot be had: there is no admin interface");
            Ok(Router::new())
        }
    }
}
