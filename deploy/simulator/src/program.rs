//! A body as a program: what to write, when to wait, how to end. Pure, so that every fault is a value to look at.

use std::collections::VecDeque;
use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::event::{Event, Place};
use crate::script::{Break, Gzip, Plan};

/// One instruction to the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Writes and flushes.
    Write(Bytes),
    /// Notes that an event has been written whole.
    Wrote { terminal: bool },
    /// Waits for so many milliseconds.
    Wait(u64),
    /// Waits for a release.
    Pause,
    /// Waits until the client goes.
    Stall,
    /// Resets the connection.
    Reset,
}

/// Milliseconds before content.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    pub(crate) first_ms: u64,
    pub(crate) next_ms: u64,
}

/// The program of a stream; `error` is the event of `Break::Error`.
pub(crate) fn stream(
    mut events: Vec<Event>,
    error: Event,
    ping: Option<Event>,
    pace: Pace,
    plan: &Plan,
) -> VecDeque<Op> {
    if plan.no_done {
        events.retain(|event| event.place != Place::Terminal);
    }
    let (kept, end) = match &plan.breaks {
        Some((kept, end)) => (*kept as usize, Some(end)),
        None => (events.len(), None),
    };
    events.truncate(kept);
    if let Some(Break::Error(_)) = end {
        events.push(error);
    }
    let mut ops = VecDeque::new();
    let mut delay_ms = pace.first_ms;
    for (n, event) in events.iter().enumerate() {
        if plan.pause_after == Some(n as u32) {
            ops.push_back(Op::Pause);
        }
        if event.place == Place::Content {
            wait(&mut ops, std::mem::replace(&mut delay_ms, pace.next_ms));
        }
        write(&mut ops, between(plan, n, ping.as_ref()));
        write(&mut ops, plan.framing.writes(event));
        ops.push_back(Op::Wrote { terminal: event.place == Place::Terminal });
    }
    if plan.pause_after.is_some_and(|n| n as usize >= events.len()) {
        ops.push_back(Op::Pause);
    }
    ops.extend(ending(end, plan));
    ops
}

/// The program of a JSON body.
pub(crate) fn json(body: &str, pace: Pace, plan: &Plan) -> VecDeque<Op> {
    let mut ops: VecDeque<Op> = plan.pause_after.map(|_| Op::Pause).into_iter().collect();
    wait(&mut ops, pace.first_ms);
    let end = plan.breaks.as_ref().map(|(_, end)| end);
    let kept = if end.is_some() { &body.as_bytes()[..body.len() / 2] } else { body.as_bytes() };
    let fragment = plan.framing.fragment_bytes.unwrap_or(kept.len()).max(1);
    write(&mut ops, kept.chunks(fragment).map(<[u8]>::to_vec).collect());
    if end.is_none() {
        ops.push_back(Op::Wrote { terminal: true });
    }
    ops.extend(ending(end, plan));
    ops
}

/// The program of a body that is what it is.
pub(crate) fn whole(body: &str) -> VecDeque<Op> {
    let write = (!body.is_empty()).then(|| Op::Write(Bytes::from(body.to_owned())));
    write.into_iter().collect()
}

/// The same program, what it writes packed: with the last write goes the end of the packing, unless that is cut or the
/// body does not end.
pub(crate) fn packed(mut ops: VecDeque<Op>, gzip: Gzip) -> VecDeque<Op> {
    const FITS: &str = "a vector takes every write";
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let ends = !gzip.is_cut && !ops.iter().any(|op| matches!(op, Op::Reset | Op::Stall));
    let mut left = ops.iter().filter(|op| matches!(op, Op::Write(_))).count();
    for op in &mut ops {
        let Op::Write(bytes) = op else { continue };
        left -= 1;
        encoder.write_all(bytes).expect(FITS);
        if left == 0 && ends { encoder.try_finish() } else { encoder.flush() }.expect(FITS);
        *bytes = std::mem::take(encoder.get_mut()).into();
    }
    ops
}

fn wait(ops: &mut VecDeque<Op>, ms: u64) {
    if ms > 0 {
        ops.push_back(Op::Wait(ms));
    }
}

fn write(ops: &mut VecDeque<Op>, writes: Vec<Vec<u8>>) {
    ops.extend(writes.into_iter().map(|bytes| Op::Write(Bytes::from(bytes))));
}

fn between(plan: &Plan, n: usize, ping: Option<&Event>) -> Vec<Vec<u8>> {
    let mut writes = Vec::new();
    if plan.comments {
        writes.extend(plan.framing.comment("SIMULATOR PROCESSING"));
    }
    if plan.pings && n > 0 {
        writes.extend(ping.map_or_else(|| plan.framing.comment("ping"), |ping| plan.framing.writes(ping)));
    }
    writes
}

fn ending(end: Option<&Break>, plan: &Plan) -> Option<Op> {
    match end {
        Some(Break::Cut) => Some(Op::Reset),
        Some(Break::Stall) => Some(Op::Stall),
        Some(Break::End | Break::Error(_)) => None,
        None => plan.holds.then_some(Op::Stall),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::Action;

    /// Plans `actions` for a stream of "a", two deltas and "z", and compares the program, one letter or sign for each op.
    #[track_caller]
    fn check(actions: &[Action], expected: &str) {
        let event = |data: &str, place| Event { name: None, data: data.to_owned(), place };
        let events = vec![
            event("a", Place::Frame),
            event("b", Place::Content),
            event("c", Place::Content),
            event("z", Place::Terminal),
        ];
        let pace = Pace { first_ms: 7, next_ms: 2 };
        let program = stream(events, event("E", Place::Frame), None, pace, &Plan::new(actions));
        let text = program.iter().map(|op| match op {
            Op::Write(bytes) => String::from_utf8_lossy(bytes).trim().trim_start_matches("data: ").to_owned(),
            Op::Wrote { terminal: true } => "!".to_owned(),
            Op::Wrote { terminal: false } => ".".to_owned(),
            Op::Wait(ms) => format!("{ms}ms"),
            Op::Pause => "pause".to_owned(),
            Op::Stall => "stall".to_owned(),
            Op::Reset => "reset".to_owned(),
        });
        assert_eq!(text.collect::<Vec<_>>().join(" "), expected);
    }

    #[test]
    fn every_fault_is_a_program() {
        check(&[], "a . 7ms b . 2ms c . z !");
        check(&[Action::CutAfterEvents { events: 2 }], "a . 7ms b . reset");
        check(&[Action::EndAfterEvents { events: 1 }], "a .");
        check(&[Action::StallAfterEvents { events: 0 }], "stall");
        check(&[Action::PauseAfter { events: 1 }], "a . pause 7ms b . 2ms c . z !");
        check(&[Action::PauseAfter { events: 9 }], "a . 7ms b . 2ms c . z ! pause");
        let error = Action::ErrorEventAfter { events: 1, body: serde_json::Value::Null };
        check(&[error], "a . E .");
        check(&[Action::NoDone], "a . 7ms b . 2ms c .");
        check(&[Action::HoldAfterDone], "a . 7ms b . 2ms c . z ! stall");
        let comment = ": SIMULATOR PROCESSING";
        check(&[Action::Comments, Action::EndAfterEvents { events: 1 }], &format!("{comment} a ."));
        check(&[Action::Pings, Action::EndAfterEvents { events: 2 }], "a . 7ms : ping b .");
        check(&[Action::Fragment { bytes: 7 }, Action::EndAfterEvents { events: 1 }], "a  .");
    }

    #[test]
    fn half_a_json_body_is_written_before_a_break() {
        let half = json("123456", Pace::default(), &Plan::new(&[Action::CutAfterEvents { events: 0 }]));
        assert_eq!(half, [Op::Write(Bytes::from_static(b"123")), Op::Reset]);
        let whole = json("123456", Pace::default(), &Plan::new(&[Action::Fragment { bytes: 4 }]));
        let paused = json("1", Pace::default(), &Plan::new(&[Action::PauseAfter { events: 0 }]));
        assert_eq!(paused, [Op::Pause, Op::Write(Bytes::from_static(b"1")), Op::Wrote { terminal: true }]);
        let written = [Op::Write(Bytes::from_static(b"1234")), Op::Write(Bytes::from_static(b"56"))];
        assert_eq!(whole, [&written[..], &[Op::Wrote { terminal: true }]].concat());
    }
}
