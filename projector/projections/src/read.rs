//! From the bytes of a frame to facts, one line at a time: a line that cannot be read never hides its neighbours.

use memchr::memchr;
use waybill_schema::event::Fact;
use waybill_schema::frame::{Header, Line, LineError};
use waybill_schema::id::Revision;
use waybill_schema::time::Time;
use waybill_schema::upcast::DecodeError;

/// A line that is not a fact of ours.
#[derive(Debug)]
pub struct Unread<'a> {
    /// What the fact's revision must be, by its place in the frame.
    pub revision: Revision,
    /// The line in the frame, from 1.
    pub line: u32,
    /// Its bytes, without the line end.
    pub bytes: &'a [u8],
    /// Why.
    pub why: UnreadError,
}

/// Why a line is not a fact of ours.
#[derive(Debug)]
pub enum UnreadError {
    /// It cannot be decoded.
    Line(LineError),
    /// It carries another number than its place in the frame gives it.
    Number(u64),
}

impl UnreadError {
    /// The event's kind and version where a newer program wrote it: no projection may pass it over.
    pub fn newer(&self) -> Option<(&str, u16)> {
        match self {
            Self::Line(LineError::Body(DecodeError::Newer { kind, version })) => Some((kind, *version)),
            Self::Line(LineError::Envelope(_) | LineError::Body(DecodeError::Undecodable { .. })) | Self::Number(_) => {
                None
            }
        }
    }
}

impl std::fmt::Display for UnreadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(error) => {
                write!(f, "{error}")?;
                let mut source = std::error::Error::source(error);
                while let Some(cause) = source {
                    write!(f, ": {cause}")?;
                    source = cause.source();
                }
                Ok(())
            }
            Self::Number(number) => write!(f, "fact number {number} does not stand in its place"),
        }
    }
}

/// The facts of the frame under `header` in order, on the log's time scale: `stored` less the time they waited before
/// they were `sent` (DESIGN.md section 5, "Order").
pub fn facts<'a>(
    header: &'a Header,
    bytes: &'a [u8],
    stored: Time,
    sent: Time,
) -> impl Iterator<Item = Result<Fact, Unread<'a>>> {
    let offset_ms = stored.0.saturating_sub(sent.0);
    let lines = lines(bytes).skip(1).filter(|line| !line.is_empty());
    lines.zip(0u32..).map(move |(bytes, index)| {
        let number = header.first + u64::from(index);
        let revision = Revision { writer: header.writer.clone(), epoch: header.epoch, number };
        let why = match Line::parse(bytes) {
            Ok(line) if line.number == number => {
                return Ok(Fact { revision, at: line.made.plus_ms(offset_ms), event: line.event });
            }
            Ok(line) => UnreadError::Number(line.number),
            Err(error) => UnreadError::Line(error),
        };
        Err(Unread { revision, line: index + 1, bytes, why })
    })
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(bytes);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let end = memchr(b'\n', bytes);
        rest = end.map(|end| &bytes[end + 1..]);
        Some(end.map_or(bytes, |end| &bytes[..end]))
    })
}

#[cfg(test)]
mod tests {
    use waybill_schema::event::{Alive, Event};
    use waybill_schema::frame::{Body, Frame, Link};

    use super::*;

    fn line(number: u64, made: i64) -> String {
        let mut line = Vec::new();
        Body::of(&Event::Alive(Alive { last: 0 }), Time(made)).write_line(number, &mut line);
        String::from_utf8(line).expect("a line is text")
    }

    /// Reads a frame of `lines` whose first fact is number 5, stored at 1100 and sent at 1000.
    fn check(lines: &[String], expected: &[&str]) {
        let count = u32::try_from(lines.len()).expect("few lines");
        let sealed = Frame::seal("a".into(), 2, Link::start(), 5, count, lines.concat().as_bytes());
        let header = Frame::header_of(&sealed.bytes).expect("a sealed frame has a header");
        let text: Vec<String> = facts(&header, &sealed.bytes, Time(1100), Time(1000))
            .map(|read| match read {
                Ok(fact) => format!("{} at {}", fact.revision, fact.at.0),
                Err(unread) => format!("{} line {}: {:?}", unread.revision, unread.line, unread.why.newer()),
            })
            .collect();
        assert_eq!(text, expected);
    }

    #[test]
    fn facts_keep_their_age_on_the_logs_time_scale() {
        check(&[line(5, 400), line(6, 990)], &["a:2:5 at 500", "a:2:6 at 1090"]);
    }

    #[test]
    fn a_damaged_line_leaves_its_neighbours_alone() {
        let damaged = "{\"k\":\"alive\",\"v\":1,\"n\":6,\"t\":1,\"b\":{\"l\n".to_owned();
        check(&[line(5, 1000), damaged, line(7, 1000)], &["a:2:5 at 1100", "a:2:6 line 2: None", "a:2:7 at 1100"]);
        check(&[line(5, 1000), line(9, 1000)], &["a:2:5 at 1100", "a:2:6 line 2: None"]);
    }

    #[test]
    fn a_newer_event_is_told_from_a_damaged_one() {
        let newer = "{\"k\":\"alive\",\"v\":9,\"n\":5,\"t\":1,\"b\":{}}\n".to_owned();
        check(&[newer], &["a:2:5 line 1: Some((\"alive\", 9))"]);
    }
}
