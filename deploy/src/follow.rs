//! Following the catalogue: a gateway looks at the log five times a second, and what is new is swapped in while requests
//! run. A request took its snapshot when it came and never sees half a batch.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use waybill_auditor::catalogue::WRITER;
use waybill_events::log::{Log, Seq};
use waybill_gateway::proxy::Gateway;
use waybill_gateway::serving::Serving;
use waybill_schema::catalogue::Catalogue;
use waybill_schema::config::Config;
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::chore::{Chore, Shared};
use crate::data;
use crate::trail::Trail;

/// The time between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Of so many looks, one makes sure that the log still ends where the trail does.
const LOOKS_PER_CHECK: u32 = 25;
/// Frames read at once.
const READ_FRAMES_MAX: usize = 64;

/// The trail of the catalogue, and how far it has been followed through a log.
#[derive(Debug)]
pub(crate) struct Follower<L> {
    /// The log that is followed.
    pub(crate) log: L,
    trail: Trail,
    /// The last frame of the trail in the log; `None` while the two have not been compared.
    after: Option<Seq>,
    looks: u32,
}

impl<L: Log> Follower<L> {
    /// Follows `log`, with a trail that may come from elsewhere.
    pub(crate) fn new(log: L, trail: Trail) -> Self {
        Self { log, trail, after: None, looks: 0 }
    }

    /// The trail so far.
    pub(crate) fn trail(&self) -> &Trail {
        &self.trail
    }

    /// Forgets the trail, so that the next look reads all that the log holds and nothing else.
    pub(crate) fn forget(&mut self) {
        (self.trail, self.after) = (Trail::default(), None);
    }

    /// Brings the trail to what the log holds now.
    pub(crate) fn look(&mut self) -> anyhow::Result<()> {
        self.looks = self.looks.wrapping_add(1);
        let Some(mut after) = self.after.filter(|_| !self.looks.is_multiple_of(LOOKS_PER_CHECK)) else {
            return self.compare();
        };
        loop {
            let frames = self.log.read_of(&WriterId::from(WRITER), after, READ_FRAMES_MAX)?;
            let Some(last) = frames.last() else { return Ok(()) };
            after = last.seq;
            if frames.into_iter().try_for_each(|frame| self.trail.take(frame)).is_err() {
                return self.start_over();
            }
            self.after = Some(after);
        }
    }

    /// Makes sure that the log ends where the trail does: one that has lost its end may have gone on from there.
    fn compare(&mut self) -> anyhow::Result<()> {
        let last = self.log.last(&WriterId::from(WRITER))?;
        if last.as_ref().map(|last| last.header.sum.as_str()) != self.trail.sum() {
            return self.start_over();
        }
        self.after = Some(last.map_or(Seq::START, |last| last.seq));
        Ok(())
    }

    /// Reads the whole trail anew. The log is the truth, except that one which only lacks the last batches has lost them:
    /// they stay in force until it holds others.
    fn start_over(&mut self) -> anyhow::Result<()> {
        let (mut trail, mut after) = (Trail::default(), Seq::START);
        loop {
            let frames = self.log.read_of(&WriterId::from(WRITER), after, READ_FRAMES_MAX)?;
            let Some(last) = frames.last() else { break };
            after = last.seq;
            frames.into_iter().try_for_each(|frame| trail.take(frame))?;
        }
        self.after = Some(after);
        if trail.is_start_of(&self.trail) {
            let (log, in_force) = (trail.rows().revision, self.trail.rows().revision);
            tracing::warn!(log, in_force, "the log has lost batches of the catalogue, which stay in force");
        } else {
            self.trail = trail;
        }
        Ok(())
    }
}

/// What is known of the log, for `/readyz`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sight {
    /// The last time that it could be read.
    pub(crate) seen: Option<Time>,
    /// Why it cannot be read now.
    pub(crate) trouble: Option<String>,
}

/// The chore that keeps a gateway's snapshot at what the log holds.
pub(crate) struct Following {
    sight: Shared<Sight>,
    _chore: Chore,
}

impl Following {
    /// Begins to follow for `gateway`; every new trail is kept at `copy`, where one is wanted.
    pub(crate) fn start(
        gateway: Arc<Gateway>,
        follower: Follower<impl Log + 'static>,
        copy: Option<PathBuf>,
    ) -> std::io::Result<Self> {
        let sight = Shared::default();
        sight.change(|sight: &mut Sight| sight.seen = follower.after.map(|_| Time::wall_clock()));
        let in_force = follower.trail.sum().map(str::to_owned);
        let mut turn = Turn { gateway, follower, copy, in_force, sight: sight.clone() };
        let chore = Chore::start("catalogue", LOOK_EVERY, move || turn.take())?;
        Ok(Self { sight, _chore: chore })
    }

    /// How the log was seen last, to be asked at any time.
    pub(crate) fn sight(&self) -> Shared<Sight> {
        self.sight.clone()
    }
}

struct Turn<L> {
    gateway: Arc<Gateway>,
    follower: Follower<L>,
    copy: Option<PathBuf>,
    /// The sum of the trail in force.
    in_force: Option<String>,
    sight: Shared<Sight>,
}

impl<L: Log> Turn<L> {
    fn take(&mut self) {
        match self.follower.look() {
            Ok(()) => self.saw(),
            Err(error) => self.saw_nothing(format!("{error:#}")),
        }
        if self.follower.trail.sum() != self.in_force.as_deref() {
            self.swap();
        }
    }

    fn swap(&mut self) {
        let trail = &self.follower.trail;
        let config = self.gateway.serving.load().config.clone();
        self.gateway.serving.store(Arc::new(serving(trail, config)));
        tracing::info!(revision = trail.rows().revision, "another catalogue is in force");
        if let Some(copy) = &self.copy {
            keep(trail, copy);
        }
        self.in_force = trail.sum().map(str::to_owned);
    }

    fn saw(&self) {
        if self.sight.look().trouble.is_some() {
            tracing::info!("the catalogue in the log can be read again");
        }
        self.gateway.metrics.catalogue_followed.set(1);
        self.sight.change(|sight| *sight = Sight { seen: Some(Time::wall_clock()), trouble: None });
    }

    fn saw_nothing(&self, trouble: String) {
        if self.sight.look().trouble.is_none() {
            tracing::warn!(trouble, "the catalogue in the log cannot be read; the one in force stays");
        }
        self.gateway.metrics.catalogue_followed.set(0);
        self.sight.change(|sight| sight.trouble = Some(trouble));
    }
}

/// Keeps a trail that is in force for a start without the log.
pub(crate) fn keep(trail: &Trail, copy: &Path) {
    if let Err(error) = trail.write(copy) {
        tracing::error!(%error, copy = %copy.display(), "the local copy of the catalogue cannot be written");
    }
}

/// The snapshot of a trail. What of its secrets cannot be had is logged.
pub(crate) fn serving(trail: &Trail, config: Arc<Config>) -> Serving {
    let (serving, unresolved) = Serving::new(Catalogue::compile(trail.rows()), config, &data::resolve);
    unresolved.iter().for_each(|missing| tracing::error!("{missing}"));
    serving
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use waybill_auditor::catalogue;
    use waybill_events::sqlite::SqliteLog;
    use waybill_schema::catalogue::{Route, Row, Rows};

    use super::*;

    /// A log of the catalogue with one batch for each route, which it makes the only one.
    fn log(folder: &TempDir, routes: &[&str]) -> SqliteLog {
        let path = folder.path().join(routes.join("-"));
        let mut log = SqliteLog::open(&path, Box::new(|_, _| Ok(()))).expect("a log can be made");
        let mut rows = Rows::default();
        for model in routes {
            let model = (*model).into();
            let route = Route { model, fallbacks: Vec::new(), sticky_session: true, first_token_seconds: None };
            let batch = rows.batch_to(vec![Row::Route(route)], "somebody", "some reason", None);
            rows.apply(&batch).expect("the batch fits");
            catalogue::append(&mut log, batch, Time(0)).expect("the log takes the batch");
        }
        log
    }

    fn followed(follower: &mut Follower<SqliteLog>) -> String {
        for _ in 0..LOOKS_PER_CHECK {
            follower.look().expect("the log can be read");
        }
        let rows = follower.trail().rows();
        let ids: Vec<&str> = rows.iter().map(|(key, _)| key.id.as_str()).collect();
        format!("{} {}", rows.revision, ids.join(" "))
    }

    #[test]
    fn a_log_that_lost_its_end_is_followed_again_once_it_goes_on() {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let mut follower = Follower::new(log(&folder, &["a", "b", "c"]), Trail::default());
        assert_eq!(followed(&mut follower), "3 c");
        follower.log = log(&folder, &["a", "b"]);
        assert_eq!(followed(&mut follower), "3 c", "what was in force stays");
        follower.log = log(&folder, &["a", "b", "d"]);
        assert_eq!(followed(&mut follower), "3 d", "the log is the truth");
        follower.log = log(&folder, &["x"]);
        assert_eq!(followed(&mut follower), "1 x");
    }

    #[test]
    fn a_trail_from_elsewhere_is_compared_with_the_log_at_the_first_look() {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let mut before = Follower::new(log(&folder, &["a", "b"]), Trail::default());
        before.look().expect("the log can be read");
        let mut follower = Follower::new(log(&folder, &["a", "b", "c"]), before.trail);
        follower.look().expect("the log can be read");
        assert_eq!(follower.trail().rows().revision, 3);
    }
}
