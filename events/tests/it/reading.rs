//! Frames read back the plain way: the tests' own reader, beside the one in the projections.

use waybill_events::log::StoredFrame;
use waybill_schema::event::Fact;
use waybill_schema::frame::{Frame, Header, Line, LineError};
use waybill_schema::id::Revision;

/// A line of a good frame that is not a fact: it goes to quarantine, its neighbours live.
#[derive(Debug)]
pub(crate) struct BadLine {
    /// Its place in the frame, from 0.
    pub(crate) line: u32,
    /// The number that a fact at its place has.
    pub(crate) number: u64,
    /// Its bytes, without the line end.
    pub(crate) bytes: Vec<u8>,
}

/// Checks the frame's sum and decodes each of its lines.
pub(crate) fn facts(stored: &StoredFrame) -> (Header, Vec<Result<Fact, BadLine>>) {
    let frame = Frame::parse(stored.bytes.clone()).expect("the sum fits");
    let facts = frame.lines().zip(0..).map(|(line, place)| fact(stored, &frame.header, line, place)).collect();
    (frame.header, facts)
}

fn fact(stored: &StoredFrame, header: &Header, line: &[u8], place: u32) -> Result<Fact, BadLine> {
    let bad = |_: LineError| BadLine { line: place, number: header.first + u64::from(place), bytes: line.to_vec() };
    let Line { number, made, event } = Line::parse(line).map_err(bad)?;
    let at = made.plus_ms(stored.stored.0.saturating_sub(stored.sent.0));
    Ok(Fact { revision: Revision { writer: header.writer.clone(), epoch: header.epoch, number }, at, event })
}
