//! What any log must hold: each fact is a function over a way to open one, and [`suite`] runs them all.
//!
//! `open()` opens the same log again each time it is called, in the beginning an empty one.

use waybill_events::log::{AppendError, Log, Seq};
use waybill_schema::event::{Event, Fact};
use waybill_schema::frame::{CHAIN_START, Frame, Link};
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use super::{MADE, event, line, reading};

/// When every frame of these tests is sent: 1500 ms after its facts were made.
pub(crate) const SENT: Time = Time(1_798_000_001_500);

/// How often a frame is sent to a log that is unavailable.
const TRIES_MAX: usize = 1000;

/// Makes a `#[test]` of every fact for one log; `$world` makes a way to open a new, empty one.
macro_rules! suite {
    ($store:ident, $world:expr) => {
        $crate::conformance::suite!(@ $store, $world;
            frames_are_read_in_the_order_of_their_appends
            frames_are_read_back_byte_for_byte
            several_frames_go_in_one_append
            a_stale_expectation_conflicts_and_stores_nothing
            expecting_no_frame_conflicts_where_there_is_one
            expecting_a_frame_conflicts_where_there_is_none
            writers_interleave_and_expect_their_own_frames_only
            the_last_frame_of_a_writer_is_known
            an_empty_log_says_so
            the_chain_of_a_writer_verifies
            a_frame_of_the_greatest_size_is_stored
            facts_keep_their_age
            a_line_that_is_no_fact_spares_its_neighbours
            reading_goes_on_behind_a_sequence_and_keeps_its_bound
            the_frames_of_one_writer_are_read_alone
            opening_again_keeps_everything
            nothing_appended_changes_nothing
        );
    };
    (@ $store:ident, $world:expr; $($fact:ident)*) => {
        mod $store {
            use super::*;
            $(
                #[test]
                fn $fact() {
                    let mut open = $world;
                    $crate::conformance::$fact(&mut open);
                }
            )*
        }
    };
}
pub(crate) use suite;

/// Seals frames of one writer one behind the other.
struct Chain {
    writer: WriterId,
    link: Link,
    number: u64,
}

impl Chain {
    fn new(writer: &str) -> Self {
        Self { writer: writer.into(), link: Link::start(), number: 0 }
    }

    fn frame(&mut self, texts: &[&str]) -> Frame {
        let first = self.number + 1;
        let lines: String = texts.iter().zip(first..).map(|(text, number)| line(number, text)).collect();
        self.seal(u32::try_from(texts.len()).unwrap(), lines.as_bytes())
    }

    fn seal(&mut self, count: u32, lines: &[u8]) -> Frame {
        let frame = Frame::seal(self.writer.clone(), 1, self.link.clone(), self.number + 1, count, lines);
        (self.link, self.number) = (Link::after(&frame.header), frame.header.last());
        frame
    }
}

fn append(log: &mut impl Log, frames: &[Frame], expected: Option<Seq>) -> Option<Seq> {
    // A log of three servers may be between two leaders, and says so.
    let mut tries = std::iter::repeat_with(|| log.append(frames, expected, SENT)).take(TRIES_MAX);
    let taken = tries.find(|taken| !matches!(taken, Err(AppendError::Unavailable(_))));
    let appended = taken.expect("the log is there in the end").expect("the log takes the frames");
    assert_eq!(appended.len(), frames.len());
    assert!(appended.windows(2).all(|pair| pair[0].seq < pair[1].seq), "sequences grow");
    appended.last().map(|last| last.seq)
}

fn bytes(log: &mut impl Log) -> Vec<Vec<u8>> {
    log.read(Seq::START, 1000).unwrap().into_iter().map(|stored| stored.bytes).collect()
}

fn assert_conflict(log: &mut impl Log, frame: &Frame, expected: Option<Seq>) {
    let before = (bytes(log), log.head().unwrap());
    match log.append(std::slice::from_ref(frame), expected, SENT) {
        Err(AppendError::Conflict { expected: said, .. }) => assert_eq!(said, expected),
        other => panic!("no conflict but {other:?}"),
    }
    assert_eq!((bytes(log), log.head().unwrap()), before, "a conflict stores nothing");
}

pub(crate) fn frames_are_read_in_the_order_of_their_appends<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let mut seq = None;
    let frames: Vec<Frame> = ["one", "two", "three"].iter().map(|text| chain.frame(&[text])).collect();
    for frame in &frames {
        seq = append(&mut log, std::slice::from_ref(frame), seq);
    }
    let read = log.read(Seq::START, 10).unwrap();
    assert!(read.windows(2).all(|pair| pair[0].seq < pair[1].seq));
    assert_eq!(
        read.iter().map(|stored| &stored.bytes).collect::<Vec<_>>(),
        frames.iter().map(|f| &f.bytes).collect::<Vec<_>>()
    );
    assert_eq!(log.head().unwrap(), read[2].seq);
    assert_eq!(seq, Some(read[2].seq));
}

pub(crate) fn frames_are_read_back_byte_for_byte<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-ü:1"));
    let odd: Vec<u8> = (0..=255).filter(|byte| *byte != b'\n').chain([b'\n']).collect();
    let frame = chain.seal(1, &odd);
    append(&mut log, std::slice::from_ref(&frame), None);
    assert_eq!(bytes(&mut log), [frame.bytes]);
}

pub(crate) fn several_frames_go_in_one_append<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let frames = [chain.frame(&["one", "two"]), chain.frame(&["three"]), chain.frame(&["four"])];
    let seq = append(&mut log, &frames, None);
    assert_eq!(bytes(&mut log), frames.map(|frame| frame.bytes));
    append(&mut log, &[chain.frame(&["five"])], seq);
}

pub(crate) fn a_stale_expectation_conflicts_and_stores_nothing<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let first = append(&mut log, &[chain.frame(&["one"])], None);
    let second = append(&mut log, &[chain.frame(&["two"])], first);
    let third = chain.frame(&["three"]);
    assert_conflict(&mut log, &third, first);
    append(&mut log, &[third], second);
}

pub(crate) fn expecting_no_frame_conflicts_where_there_is_one<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let frame = chain.frame(&["one"]);
    append(&mut log, std::slice::from_ref(&frame), None);
    assert_conflict(&mut log, &frame, None);
    assert_conflict(&mut log, &chain.frame(&["two"]), None);
}

pub(crate) fn expecting_a_frame_conflicts_where_there_is_none<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut a) = (open(), Chain::new("gw-a"));
    let seq = append(&mut log, &[a.frame(&["one"])], None);
    assert_conflict(&mut log, &Chain::new("gw-b").frame(&["one"]), seq);
}

pub(crate) fn writers_interleave_and_expect_their_own_frames_only<L: Log>(open: &mut dyn FnMut() -> L) {
    let mut log = open();
    let (mut a, mut b) = (Chain::new("gw-a"), Chain::new("gw-b"));
    let frames = [a.frame(&["a1"]), b.frame(&["b1"]), b.frame(&["b2"]), a.frame(&["a2"])];
    let a1 = append(&mut log, &frames[..1], None);
    let b1 = append(&mut log, &frames[1..2], None);
    append(&mut log, &frames[2..3], b1);
    append(&mut log, &frames[3..], a1);
    assert_eq!(bytes(&mut log), frames.map(|frame| frame.bytes));
}

pub(crate) fn the_last_frame_of_a_writer_is_known<L: Log>(open: &mut dyn FnMut() -> L) {
    let mut log = open();
    let (mut a, mut b) = (Chain::new("gw-a"), Chain::new("gw-b"));
    let frames = [a.frame(&["a1"]), a.frame(&["a2", "a3"])];
    let seq = append(&mut log, &frames, None);
    append(&mut log, &[b.frame(&["b1"])], None);
    let last = log.last(&"gw-a".into()).unwrap().expect("gw-a has frames");
    assert_eq!((Some(last.seq), &last.header), (seq, &frames[1].header));
    assert_eq!((last.epoch().epoch, last.epoch().last), (1, 3));
    assert_eq!(log.last(&"gw-c".into()).unwrap(), None);
}

pub(crate) fn an_empty_log_says_so<L: Log>(open: &mut dyn FnMut() -> L) {
    let mut log = open();
    assert_eq!(log.head().unwrap(), Seq::START);
    assert_eq!(log.read(Seq::START, 10).unwrap(), []);
    assert_eq!(log.last(&"gw-a".into()).unwrap(), None);
}

pub(crate) fn the_chain_of_a_writer_verifies<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    append(&mut log, &[chain.frame(&["one"]), chain.frame(&["two"]), chain.frame(&["three"])], None);
    let mut prev = CHAIN_START.to_owned();
    for (stored, number) in log.read(Seq::START, 10).unwrap().into_iter().zip(1..) {
        let header = Frame::parse(stored.bytes).expect("the sum fits").header;
        assert_eq!((&header.prev, header.frame), (&prev, number));
        prev = header.sum;
    }
}

pub(crate) fn a_frame_of_the_greatest_size_is_stored<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let frame = chain.frame(&["x".repeat(900 * 1024).as_str()]);
    append(&mut log, std::slice::from_ref(&frame), None);
    assert_eq!(bytes(&mut log), [frame.bytes]);
}

pub(crate) fn facts_keep_their_age<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    append(&mut log, &[chain.frame(&["one", "two"])], None);
    let stored = log.read(Seq::START, 10).unwrap().remove(0);
    assert_eq!(stored.sent, SENT);
    let (header, facts) = reading::facts(&stored);
    let facts: Vec<Fact> = facts.into_iter().map(|fact| fact.expect("a good line")).collect();
    assert_eq!((header.first, facts.len()), (1, 2));
    assert_eq!(facts[1].revision.to_string(), "gw-a:1:2");
    assert_eq!(facts[1].event, event("two"));
    assert_eq!(SENT.ms_since(MADE), 1500);
    assert_eq!(facts[1].at, Time(stored.stored.0 - 1500));
}

pub(crate) fn a_line_that_is_no_fact_spares_its_neighbours<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let lines = [line(1, "one").as_bytes(), b"\xff{\n", line(3, "three").as_bytes()].concat();
    append(&mut log, &[chain.seal(3, &lines)], None);
    let (_, facts) = reading::facts(&log.read(Seq::START, 10).unwrap()[0]);
    let bad = facts[1].as_ref().unwrap_err();
    assert_eq!((bad.line, bad.number, &*bad.bytes), (1, 2, &b"\xff{"[..]));
    let good: Vec<&Event> = facts.iter().flatten().map(|fact| &fact.event).collect();
    assert_eq!(good, [&event("one"), &event("three")]);
}

pub(crate) fn reading_goes_on_behind_a_sequence_and_keeps_its_bound<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut chain) = (open(), Chain::new("gw-a"));
    let frames: Vec<Frame> = (0..5).map(|_| chain.frame(&["one"])).collect();
    append(&mut log, &frames, None);
    let mut after = Seq::START;
    for expected in [&frames[..2], &frames[2..4], &frames[4..], &[]] {
        let read = log.read(after, 2).unwrap();
        assert_eq!(
            read.iter().map(|f| &f.bytes).collect::<Vec<_>>(),
            expected.iter().map(|f| &f.bytes).collect::<Vec<_>>()
        );
        after = read.last().map_or(after, |last| last.seq);
    }
    assert_eq!(after, log.head().unwrap());
}

pub(crate) fn the_frames_of_one_writer_are_read_alone<L: Log>(open: &mut dyn FnMut() -> L) {
    let (mut log, mut a, mut b) = (open(), Chain::new("gw-a"), Chain::new("gw-b"));
    let frames = [a.frame(&["a1"]), b.frame(&["b1"]), a.frame(&["a2"]), a.frame(&["a3"])];
    let a1 = append(&mut log, &frames[..1], None);
    append(&mut log, &frames[1..2], None);
    append(&mut log, &frames[2..], a1);
    let mut read = |after, frames_max| {
        let read = log.read_of(&"gw-a".into(), after, frames_max).unwrap();
        (read.iter().map(|f| f.bytes.clone()).collect::<Vec<_>>(), read.last().map(|last| last.seq))
    };
    let (first, last) = read(Seq::START, 2);
    assert_eq!(first, [frames[0].bytes.clone(), frames[2].bytes.clone()]);
    let (rest, last) = read(last.unwrap(), 2);
    assert_eq!(rest, [frames[3].bytes.clone()]);
    assert_eq!(read(last.unwrap(), 2), (Vec::new(), None));
}

pub(crate) fn opening_again_keeps_everything<L: Log>(open: &mut dyn FnMut() -> L) {
    let mut chain = Chain::new("gw-a");
    let mut log = open();
    let seq = append(&mut log, &[chain.frame(&["one"]), chain.frame(&["two"])], None);
    let read = log.read(Seq::START, 10).unwrap();
    drop(log);
    let mut log = open();
    assert_eq!(log.read(Seq::START, 10).unwrap(), read);
    let third = append(&mut log, &[chain.frame(&["three"])], seq);
    assert!(third > seq);
}

pub(crate) fn nothing_appended_changes_nothing<L: Log>(open: &mut dyn FnMut() -> L) {
    let mut log = open();
    assert_eq!(log.append(&[], None, SENT).unwrap(), []);
    assert_eq!(log.head().unwrap(), Seq::START);
}
