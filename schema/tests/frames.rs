//! Golden frames: their sums were computed with Python's `hashlib`, not with this program.
//!
//! ```text
//! hashlib.sha256(f"{writer}:{epoch}:{frame}:{first}:{count}:{prev}\n".encode() + lines).hexdigest()[:32]
//! ```

use waybill_schema::event::{Alive, Dropped, Event};
use waybill_schema::frame::{Body, CHAIN_START, Frame, FrameError, Line, Link};
use waybill_schema::time::Time;

const FIRST: &str = concat!(
    r#"{"f":1,"writer":"gw-a","epoch":7,"frame":12,"first":881,"count":2,"#,
    r#""prev":"00000000000000000000000000000000","sum":"8ef53406c5cd819a01da2469c8b05aaa"}"#,
    "\n",
    r#"{"k":"alive","v":1,"n":881,"t":1798000000123,"b":{"last":880}}"#,
    "\n",
    r#"{"k":"dropped","v":1,"n":882,"t":1798000000456,"b":{"first":870,"last":872,"reason":"spool write failed"}}"#,
    "\n",
);
const SECOND: &str = concat!(
    r#"{"f":1,"writer":"gw-a","epoch":7,"frame":13,"first":883,"count":1,"#,
    r#""prev":"8ef53406c5cd819a01da2469c8b05aaa","sum":"3ff7864490db0b67a6932b668fb60f4c"}"#,
    "\n",
    r#"{"k":"alive","v":1,"n":883,"t":1798000010123,"b":{"last":882}}"#,
    "\n",
);

fn line(number: u64, made: i64, event: &Event) -> Vec<u8> {
    let mut line = Vec::new();
    Body::of(event, Time(made)).write_line(number, &mut line);
    line
}

#[test]
fn sealing_gives_the_golden_bytes() {
    let mut lines = line(881, 1_798_000_000_123, &Event::Alive(Alive { last: 880 }));
    let dropped = Dropped { first: 870, last: 872, reason: "spool write failed".into() };
    lines.extend(line(882, 1_798_000_000_456, &Event::Dropped(dropped)));
    let link = Link { frame: 12, prev: CHAIN_START.into() };
    let first = Frame::seal("gw-a".into(), 7, link, 881, 2, &lines);
    assert_eq!(String::from_utf8_lossy(&first.bytes), FIRST);

    let lines = line(883, 1_798_000_010_123, &Event::Alive(Alive { last: 882 }));
    let second = Frame::seal("gw-a".into(), 7, Link::after(&first.header), 883, 1, &lines);
    assert_eq!(String::from_utf8_lossy(&second.bytes), SECOND);
}

#[test]
fn a_golden_frame_parses_to_its_lines() {
    let frame = Frame::parse(FIRST.into()).unwrap();
    assert_eq!((frame.header.first, frame.header.last(), frame.header.frame), (881, 882, 12));
    let lines: Vec<Line> = frame.lines().map(|line| Line::parse(line).unwrap()).collect();
    assert_eq!(lines[0], Line { number: 881, made: Time(1_798_000_000_123), event: Event::Alive(Alive { last: 880 }) });
    assert_eq!(lines[1].number, 882);
    assert_eq!(lines.len(), 2);
}

#[test]
fn a_changed_byte_anywhere_is_noticed() {
    for place in 0..FIRST.len() {
        let mut bytes = FIRST.as_bytes().to_vec();
        bytes[place] ^= 1;
        assert!(Frame::parse(bytes).is_err(), "byte {place} can change unnoticed");
    }
}

#[test]
fn a_cut_frame_is_noticed_at_every_length() {
    for length in 0..FIRST.len() {
        assert!(Frame::parse(FIRST.as_bytes()[..length].to_vec()).is_err(), "{length} bytes pass for a frame");
    }
}

#[test]
fn a_newer_frame_format_is_told_from_damage_whatever_its_header_says() {
    for header in [r#"{"f":2,"who":"gw-a"}"#, &FIRST.lines().next().unwrap().replace(r#""f":1"#, r#""f":9"#)] {
        let bytes = format!("{header}\n{{}}\n").into_bytes();
        assert!(matches!(Frame::parse(bytes), Err(FrameError::Newer(2 | 9))), "{header}");
    }
    assert!(matches!(Frame::parse(b"{\"f\":1}\n".to_vec()), Err(FrameError::Header)));
}

#[test]
fn lines_that_do_not_end_are_no_frame() {
    let lines = b"{}\n{}";
    let frame = Frame::seal("gw-a".into(), 1, Link::start(), 1, 1, lines);
    assert!(matches!(Frame::parse(frame.bytes), Err(FrameError::Sum)));
}
