//! The log of a world, read beside the gateway that writes it and folded afresh from its first frame.

use std::collections::BTreeMap;
use std::path::Path;

use waybill_events::log::{Log, Seq, StoredFrame};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::chain::Chains;
use waybill_projections::fold::Fold;
use waybill_projections::gate::Verdict;
use waybill_projections::read;
use waybill_projections::usage::{Row, UsageAttempt};
use waybill_schema::event::{Class, Event, Fact};
use waybill_schema::frame::{Frame, Header};
use waybill_schema::id::{MemberId, RequestId};

use crate::traffic::Sent;

/// More frames than any test writes.
const FRAMES_MAX: usize = 1_000_000;

/// All that the log says.
pub(crate) struct Told {
    /// The last frame.
    pub(crate) head: Seq,
    pub(crate) facts: Vec<Fact>,
    pub(crate) rows: Vec<Row>,
    pub(crate) fold: Fold,
}

/// Reads and folds the log in the data folder `data`, and checks that it is whole: sums, chains, numbers, lines.
pub(crate) fn told(data: &Path) -> Told {
    told_of(&mut open(data))
}

/// Reads and folds `log`, and checks that it is whole.
pub(crate) fn told_of(log: &mut dyn Log) -> Told {
    let told = told_after_losses(log);
    assert_eq!(told.fold.usage.orphans(), 0);
    told
}

/// The same of a log that may lack facts, as long as it says so.
pub(crate) fn told_after_losses(log: &mut dyn Log) -> Told {
    let (mut chains, mut fold) = (Chains::default(), Fold::default());
    let (mut head, mut facts, mut rows) = (Seq::START, Vec::new(), Vec::new());
    for frame in log.read(Seq::START, FRAMES_MAX).expect("the log can be read") {
        head = frame.seq;
        let header = sealed(&frame);
        assert_eq!(chains.follow(&header), Ok(()), "frame {head}");
        for line in read::facts(&header, &frame.bytes, frame.stored, frame.sent) {
            let fact = line.expect("a line is a fact");
            assert_eq!(fold.apply(&fact, head.0, &mut rows), Verdict::Fold, "{}", fact.revision);
            facts.push(fact);
        }
    }
    assert!(!fold.gate.summary().tainted() && fold.misfits.is_empty());
    Told { head, facts, rows, fold }
}

/// The facts behind frame `head`.
pub(crate) fn facts_after(data: &Path, head: Seq) -> Vec<Fact> {
    let facts = |frame: StoredFrame| -> Vec<Fact> {
        let header = sealed(&frame);
        let lines = read::facts(&header, &frame.bytes, frame.stored, frame.sent);
        lines.map(|line| line.expect("a line is a fact")).collect()
    };
    frames_after(data, head).into_iter().flat_map(facts).collect()
}

/// The header of a frame whose sum fits.
fn sealed(frame: &StoredFrame) -> Header {
    Frame::parse(frame.bytes.clone()).expect("a frame is whole").header
}

fn frames_after(data: &Path, head: Seq) -> Vec<StoredFrame> {
    open(data).read(head, FRAMES_MAX).expect("the log can be read")
}

pub(crate) fn open(data: &Path) -> SqliteLog {
    SqliteLog::open_read_only(&data.join("waybill.db")).expect("the log can be read")
}

impl Told {
    /// The attempt rows of each request that has a row itself, by its session.
    pub(crate) fn attempts_by_session(&self) -> BTreeMap<&str, Vec<&UsageAttempt>> {
        let mut sessions: BTreeMap<&RequestId, &str> = BTreeMap::new();
        for row in &self.rows {
            if let Row::Event(event) = row {
                sessions.insert(&event.request, event.context.session.as_str());
            }
        }
        let mut attempts: BTreeMap<&str, Vec<&UsageAttempt>> =
            sessions.values().map(|session| (*session, Vec::new())).collect();
        for attempt in self.attempts() {
            let session = sessions.get(&attempt.request).expect("a send belongs to a request with a row");
            attempts.entry(session).or_default().push(attempt);
        }
        attempts
    }

    /// The sends of all requests that have a row themselves.
    pub(crate) fn sends(&self) -> Vec<Sent> {
        let attempts = self.attempts_by_session().into_iter();
        let sent = |session: &str, row: &UsageAttempt| Sent {
            session: session.to_owned(),
            attempt: row.attempt,
            channel: channel_of(&row.member).to_owned(),
            class: row.class,
            status: row.status,
            tokens: [row.usage.input, row.usage.output],
            cost_nano: row.cost_nano,
        };
        attempts.flat_map(|(session, rows)| rows.into_iter().map(move |row| sent(session, row))).collect()
    }

    /// The attempt rows.
    pub(crate) fn attempts(&self) -> impl Iterator<Item = &UsageAttempt> {
        self.rows.iter().filter_map(|row| match row {
            Row::Attempt(attempt) => Some(&**attempt),
            Row::Event(_) => None,
        })
    }

    /// How many attempt rows have this class.
    pub(crate) fn n_attempts(&self, class: Class) -> usize {
        self.attempts().filter(|attempt| attempt.class == class).count()
    }

    /// The facts whose event `pick` picks.
    pub(crate) fn pick<T>(&self, pick: impl Fn(&Event) -> Option<&T>) -> Vec<&T> {
        self.facts.iter().filter_map(|fact| pick(&fact.event)).collect()
    }
}

/// The channel of a member: `group/route/channel`.
pub(crate) fn channel_of(member: &MemberId) -> &str {
    member.as_str().rsplit('/').next().unwrap_or_default()
}
