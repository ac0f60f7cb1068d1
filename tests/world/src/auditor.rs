//! An auditor as a value: it looks, plans a batch, and appends it later by the real code, against what it saw.

use waybill_auditor::catalogue::{self, WRITER, undo};
use waybill_events::log::{AppendError, Appended, Last, Log, ReadError, Seq, StoredFrame};
use waybill_schema::catalogue::{Channel, Dialect, Group, Member, Route, Row, Rows, Status};
use waybill_schema::event::{Batch, Event};
use waybill_schema::frame::Frame;
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::gateway::Outside;
use crate::log::WorldLog;
use crate::mutation::Mutation;
use crate::schedule::Dice;

/// The one group.
pub const GROUP: &str = "main";
/// The one route.
pub const MODEL: &str = "gpt";
/// The channels, each of which may have a member.
pub const CHANNELS: [&str; 4] = ["a", "b", "c", "d"];

/// The catalogue as somebody has read it from the log.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// The rows.
    pub rows: Rows,
    /// Every batch in them.
    pub history: Vec<Batch>,
    at: Seq,
}

impl Reading {
    /// Reads on to the end of `log` and gives whether anything changed.
    pub fn read(&mut self, log: &WorldLog) -> bool {
        let before = self.rows.revision;
        for kept in log.behind(self.at).iter().filter(|kept| kept.header.writer.as_str() == WRITER) {
            for fact in &kept.facts {
                if let Event::Catalogue(batch) = &fact.event
                    && self.rows.apply(batch).is_ok()
                {
                    self.history.push((**batch).clone());
                }
            }
        }
        self.at = log.end();
        before != self.rows.revision
    }
}

/// A batch that is not appended yet, and the end of the catalogue as it was when it was planned.
#[derive(Clone, Debug)]
struct Planned {
    batch: Batch,
    last: Option<Last>,
}

/// An auditor.
#[derive(Clone, Debug)]
pub struct Auditor {
    name: &'static str,
    reading: Reading,
    planned: Option<Planned>,
}

impl Auditor {
    /// An auditor that has read nothing.
    pub fn new(name: &'static str) -> Self {
        Self { name, reading: Reading::default(), planned: None }
    }

    /// Plans a batch, or appends the one that is planned.
    pub fn step(&mut self, out: &mut Outside<'_>) {
        match self.planned.take() {
            Some(planned) => self.append(planned, out),
            None => self.plan(out),
        }
    }

    fn plan(&mut self, out: &mut Outside<'_>) {
        self.reading.read(out.log);
        let Reading { rows, history, .. } = &self.reading;
        let batch = match history.len() {
            0 => Some(rows.batch_to(first_rows(), self.name, "the beginning", None)),
            n if n > 1 && out.dice.chance(40) => {
                let revision = history[1 + out.dice.below(n - 1)].revision;
                let undone = undo::undo(history, rows, revision, self.name, &format!("undo {revision}"));
                undone.ok().map(|batch| forgetful(batch, out.mutation))
            }
            _ => Some(rows.batch_to(edited(rows, out.dice), self.name, "an edit", None)),
        };
        let last = out.log.last(&WriterId::from(WRITER)).expect("this log can be read");
        self.planned = batch.filter(|batch| !batch.ops.is_empty()).map(|batch| Planned { batch, last });
    }

    fn append(&mut self, planned: Planned, out: &mut Outside<'_>) {
        let mut connection = Connection {
            log: out.log,
            last: planned.last,
            expects: out.mutation != Some(Mutation::EditWithoutExpected),
            answers: !out.dice.chance(10),
        };
        // Whatever else it says, the next look at the log tells what became of the batch.
        if catalogue::append(&mut connection, planned.batch.clone(), out.now).is_ok() {
            out.book.acknowledged.push(planned.batch);
        }
    }
}

/// A connection to the log on which time passes between reading and appending, and answers get lost.
struct Connection<'a> {
    log: &'a mut WorldLog,
    last: Option<Last>,
    expects: bool,
    answers: bool,
}

impl Log for Connection<'_> {
    fn append(&mut self, frames: &[Frame], expected: Option<Seq>, sent: Time) -> Result<Vec<Appended>, AppendError> {
        let actual = self.log.last(&WriterId::from(WRITER)).expect("this log can be read").map(|last| last.seq);
        let appended = self.log.append(frames, if self.expects { expected } else { actual }, sent)?;
        if self.answers { Ok(appended) } else { Err(AppendError::Unavailable("the answer was lost".into())) }
    }

    fn last(&mut self, _: &WriterId) -> Result<Option<Last>, ReadError> {
        Ok(self.last.clone())
    }

    fn read(&mut self, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.log.read(after, frames_max)
    }

    fn read_of(&mut self, writer: &WriterId, after: Seq, frames_max: usize) -> Result<Vec<StoredFrame>, ReadError> {
        self.log.read_of(writer, after, frames_max)
    }

    fn head(&mut self) -> Result<Seq, ReadError> {
        self.log.head()
    }
}

fn forgetful(mut batch: Batch, mutation: Option<Mutation>) -> Batch {
    if mutation == Some(Mutation::UndoForgetsOp) && batch.ops.len() > 1 {
        batch.ops.pop();
        batch.undo.pop();
    }
    batch
}

fn first_rows() -> Vec<Row> {
    let group = Group {
        id: GROUP.into(),
        display_name: GROUP.into(),
        description: String::new(),
        status: Status::Active,
        public_models: Vec::new(),
        requestable: false,
        sticky_policy: None,
        failover_policy: None,
    };
    let route = Route { model: MODEL.into(), fallbacks: Vec::new(), sticky_session: true, first_token_seconds: None };
    let mut rows = vec![Row::Group(group), Row::Route(route)];
    rows.extend(CHANNELS.map(channel));
    rows.extend(CHANNELS[..3].iter().map(|channel| member(channel)));
    rows
}

fn channel(id: &str) -> Row {
    Row::Channel(Channel {
        id: id.into(),
        status: Status::Active,
        base_url: format!("http://{id}/v1"),
        dialects: vec![Dialect::Responses],
        api_keys: Vec::new(),
        models: Vec::new(),
        labels: Default::default(),
        internal_headers: false,
        stream_usage: true,
        prices: Vec::new(),
    })
}

fn member(channel: &str) -> Row {
    let (group, route, channel) = (GROUP.into(), MODEL.into(), channel.into());
    Row::Member(Member {
        id: Member::id_of(&group, &route, &channel, None),
        status: Status::Active,
        route,
        group,
        channel,
        priority: 1,
        weight: 1,
        upstream_model: None,
    })
}

/// The rows after an edit: members come and go, change alone, or together with their channel.
fn edited(rows: &Rows, dice: &mut Dice) -> Vec<Row> {
    let channel = CHANNELS[dice.below(CHANNELS.len())];
    let kind = dice.below(6);
    let mut target: Vec<Row> = rows.iter().map(|(_, stored)| stored.row.clone()).collect();
    let is_member = |row: &Row| matches!(row, Row::Member(row) if row.channel.as_str() == channel);
    if !target.iter().any(is_member) {
        target.push(member(channel));
        return target;
    }
    if kind < 3 && target.iter().filter(|row| matches!(row, Row::Member(_))).count() > 1 {
        target.retain(|row| !is_member(row));
        return target;
    }
    for row in &mut target {
        match row {
            Row::Member(row) if row.channel.as_str() == channel => {
                row.weight = 1 + dice.below(9) as u32;
                row.priority = 1 + dice.below(2) as i32;
            }
            Row::Channel(row) if row.id.as_str() == channel && kind == 5 => {
                row.labels.insert("edit".into(), dice.below(1000).to_string());
            }
            _ => {}
        }
    }
    target
}
