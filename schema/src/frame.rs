//! The envelope: facts as lines of JSON, and frames of lines under a header that chains them.
//!
//! ```text
//! {"f":1,"writer":"gw-a","epoch":7,"frame":12,"first":881,"count":2,"prev":"…","sum":"…"}
//! {"k":"selection","v":1,"n":881,"t":1798000000123,"b":{…}}
//! {"k":"attempt","v":1,"n":882,"t":1798000000456,"b":{…}}
//! ```
//! A frame holds consecutive facts of one writer and epoch. `sum` covers the header's other fields and all lines,
//! and `prev` is the sum of the writer's frame before, so the frames of a writer form a hash chain.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::event::Event;
use crate::id::WriterId;
use crate::secret::sum128;
use crate::time::Time;
use crate::upcast::{self, DecodeError};

/// At most this many facts in a frame (EVENTLOG.md, finding 1 and A.4: gains flatten beyond).
pub const FRAME_FACTS_MAX: u32 = 256;
/// At most this many bytes of lines in a frame, unless a single fact is larger.
pub const FRAME_BYTES_MAX: usize = 256 * 1024;
/// The `prev` of a writer's first frame.
pub const CHAIN_START: &str = "00000000000000000000000000000000";

/// The header line of a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The format of the frame itself: 1.
    pub f: u16,
    /// The writer.
    pub writer: WriterId,
    /// The writer's epoch.
    pub epoch: u64,
    /// The frame's number among all frames of the writer, from 1.
    pub frame: u64,
    /// The number of the first fact.
    pub first: u64,
    /// How many facts.
    pub count: u32,
    /// The sum of the writer's frame before, 32 hex digits.
    pub prev: String,
    /// The sum of this frame, 32 hex digits.
    pub sum: String,
}

impl Header {
    /// The number of the last fact.
    pub fn last(&self) -> u64 {
        self.first + u64::from(self.count) - 1
    }

    /// Reads the format first, so that a newer header of another shape is not taken for damage.
    fn parse(line: &[u8]) -> Result<Self, FrameError> {
        #[derive(Deserialize)]
        struct Format {
            f: u16,
        }
        match serde_json::from_slice(line) {
            Ok(Format { f: 1 }) => serde_json::from_slice(line).map_err(|_| FrameError::Header),
            Ok(Format { f }) => Err(FrameError::Newer(f)),
            Err(_) => Err(FrameError::Header),
        }
    }

    fn sum_over(&self, lines: &[u8]) -> String {
        let head =
            format!("{}:{}:{}:{}:{}:{}\n", self.writer, self.epoch, self.frame, self.first, self.count, self.prev);
        sum128(&[head.as_bytes(), lines])
    }
}

/// A frame: its header, and the exact bytes that travel and rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The header.
    pub header: Header,
    /// The header line and the fact lines, each ended by `\n`.
    pub bytes: Vec<u8>,
}

/// The place of a frame in its writer's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The frame's number, from 1.
    pub frame: u64,
    /// The sum of the frame before.
    pub prev: String,
}

impl Link {
    /// The link of a writer's first frame.
    pub fn start() -> Self {
        Self { frame: 1, prev: CHAIN_START.to_owned() }
    }

    /// The link that follows the frame under `header`.
    pub fn after(header: &Header) -> Self {
        Self { frame: header.frame + 1, prev: header.sum.clone() }
    }
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The header line is missing or is not one.
    #[error("frame has no valid header line")]
    Header,
    /// The frame's own format is newer than this program.
    #[error("frame format {0} is newer than this program knows")]
    Newer(u16),
    /// The sum does not match the bytes, or the count does not match the lines.
    #[error("frame does not match its sum")]
    Sum,
}

impl Frame {
    /// Puts `lines` (each ended by `\n`) under a header.
    pub fn seal(writer: WriterId, epoch: u64, link: Link, first: u64, count: u32, lines: &[u8]) -> Self {
        let mut header =
            Header { f: 1, writer, epoch, frame: link.frame, first, count, prev: link.prev, sum: String::new() };
        header.sum = header.sum_over(lines);
        let mut bytes = serde_json::to_vec(&header).expect("a header has only text keys");
        bytes.push(b'\n');
        bytes.extend_from_slice(lines);
        Self { header, bytes }
    }

    /// Reads a frame and checks its sum and count.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, FrameError> {
        let end = bytes.iter().position(|b| *b == b'\n').ok_or(FrameError::Header)?;
        let header = Header::parse(&bytes[..end])?;
        let lines = &bytes[end + 1..];
        let whole = lines.ends_with(b"\n") && lines.iter().filter(|b| **b == b'\n').count() == header.count as usize;
        if !whole || header.sum != header.sum_over(lines) {
            return Err(FrameError::Sum);
        }
        Ok(Self { header, bytes })
    }

    /// Reads the header line of a frame that was checked before; its sum is not worked out again.
    pub fn header_of(bytes: &[u8]) -> Result<Header, FrameError> {
        Header::parse(bytes.split(|b| *b == b'\n').next().unwrap_or_default())
    }

    /// The frames that stand in `bytes` one after the other; the last one is an error where it is cut off.
    pub fn split(bytes: &[u8]) -> impl Iterator<Item = Result<Self, FrameError>> {
        let mut rest = bytes;
        std::iter::from_fn(move || {
            let mut ends = rest.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
            let head = ends.next().unwrap_or(rest.len());
            let count = Header::parse(rest[..head].trim_ascii_end()).map_or(0, |header| header.count as usize);
            let end = ends.take(count).last().unwrap_or(head);
            let (frame, after) = rest.split_at(end);
            rest = after;
            (!frame.is_empty()).then(|| Self::parse(frame.to_vec()))
        })
    }

    /// The fact lines, without their line ends.
    pub fn lines(&self) -> impl Iterator<Item = &[u8]> {
        let body = self.bytes.iter().position(|b| *b == b'\n').map_or(&[][..], |end| &self.bytes[end + 1..]);
        body.split(|b| *b == b'\n').filter(|line| !line.is_empty())
    }
}

/// A fact as its line says it; the writer and epoch stand in the frame's header.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The fact's number in its epoch, from 1.
    pub number: u64,
    /// When it was made, by its writer's clock.
    pub made: Time,
    /// What it says.
    pub event: Event,
}

/// Why a line is not a fact.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The line's envelope is not JSON of ours: it goes to quarantine.
    #[error("fact line has no valid envelope")]
    Envelope(#[source] serde_json::Error),
    /// The envelope is fine, its body is not.
    #[error(transparent)]
    Body(#[from] DecodeError),
}

/// A line with its body unread.
#[derive(Debug, Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, rename = "k")]
    kind: Cow<'a, str>,
    #[serde(rename = "v")]
    version: u16,
    #[serde(rename = "n")]
    number: u64,
    #[serde(rename = "t")]
    made: Time,
    #[serde(borrow, rename = "b", deserialize_with = "raw_text")]
    body: &'a str,
}

fn raw_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<&'de str, D::Error> {
    <&RawValue>::deserialize(deserializer).map(RawValue::get)
}

impl<'a> Envelope<'a> {
    fn parse(line: &'a [u8]) -> Result<Self, LineError> {
        match std::str::from_utf8(line).ok().and_then(Self::as_written) {
            Some(envelope) => Ok(envelope),
            None => serde_json::from_slice(line).map_err(LineError::Envelope),
        }
    }

    /// Reads a line in the exact form in which [`Body::write_line`] writes it, without going through its body.
    fn as_written(line: &'a str) -> Option<Self> {
        let (kind, rest) = line.strip_prefix(r#"{"k":""#)?.split_once('"')?;
        let (version, rest) = rest.strip_prefix(r#","v":"#)?.split_once(',')?;
        let (number, rest) = rest.strip_prefix(r#""n":"#)?.split_once(',')?;
        let (made, rest) = rest.strip_prefix(r#""t":"#)?.split_once(',')?;
        let body = rest.strip_prefix(r#""b":"#)?.strip_suffix('}')?;
        let [version, number] = [version, number].map(|digits| digits.parse::<u64>().ok());
        Some(Self {
            kind: kind.into(),
            version: version?.try_into().ok()?,
            number: number?,
            made: Time(made.parse().ok()?),
            body,
        })
    }
}

/// What stands before the body on a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineHead<'a> {
    /// The kind of the event.
    pub kind: Cow<'a, str>,
    /// The fact's number in its epoch, from 1.
    pub number: u64,
    /// When it was made, by its writer's clock.
    pub made: Time,
}

impl<'a> LineHead<'a> {
    /// Reads the head of a line (without its `\n`), its body unread.
    pub fn parse(line: &'a [u8]) -> Result<Self, LineError> {
        let Envelope { kind, number, made, .. } = Envelope::parse(line)?;
        Ok(Self { kind, number, made })
    }
}

/// Writes the fact on `line` (without its `\n`) once more at the end of `out`, under `number`: the same kind, version,
/// time and body, unread.
pub fn renumber(line: &[u8], number: u64, out: &mut Vec<u8>) -> Result<(), LineError> {
    let Envelope { kind, version, made, body, .. } = Envelope::parse(line)?;
    write_line((&kind, version), number, made, body.as_bytes(), out);
    Ok(())
}

/// Piece by piece: each request writes some four lines, and a formatter takes several times as long.
fn write_line((kind, version): (&str, u16), number: u64, made: Time, body: &[u8], out: &mut Vec<u8>) {
    let (mut version_text, mut number_text, mut made_text) =
        (itoa::Buffer::new(), itoa::Buffer::new(), itoa::Buffer::new());
    let pieces = [
        r#"{"k":""#.as_bytes(),
        kind.as_bytes(),
        br#"","v":"#,
        version_text.format(version).as_bytes(),
        br#","n":"#,
        number_text.format(number).as_bytes(),
        br#","t":"#,
        made_text.format(made.0).as_bytes(),
        br#","b":"#,
        body,
        b"}\n",
    ];
    pieces.into_iter().for_each(|piece| out.extend_from_slice(piece));
}

/// An event's JSON body, encoded before its number is known so that little happens under the numbering lock.
#[derive(Clone, Debug)]
pub struct Body {
    kind: &'static str,
    version: u16,
    made: Time,
    json: Vec<u8>,
}

impl Body {
    /// Encodes `event`, which was `made` then by its writer's clock.
    pub fn of(event: &Event, made: Time) -> Self {
        let (kind, version) = upcast::tag(event);
        let mut json = Vec::with_capacity(1024);
        upcast::encode_body(event, &mut json);
        Self { kind, version, made, json }
    }

    /// When the event was made.
    pub fn made(&self) -> Time {
        self.made
    }

    /// Writes the whole line of fact `number`, ended by `\n`, at the end of `out`.
    pub fn write_line(&self, number: u64, out: &mut Vec<u8>) {
        write_line((self.kind, self.version), number, self.made, &self.json, out);
    }
}

impl Line {
    /// Reads a line (without its `\n`).
    pub fn parse(line: &[u8]) -> Result<Self, LineError> {
        let Envelope { kind, version, number, made, body } = Envelope::parse(line)?;
        Ok(Self { number, made, event: upcast::decode(&kind, version, body)? })
    }
}
