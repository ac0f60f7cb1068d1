//! Server-sent events as bytes: a push decoder that finds events in a stream and never changes it.
//!
//! Chunks go in, [`Event`]s come out, and the raw bytes of all events and of the tail, one after the other, are the
//! stream itself. Where a whole event lies in one chunk nothing is copied; every byte is looked at once to find the
//! ends of events and once more to read the fields, whatever the size of the chunks.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr2};

/// The longest event, in bytes, that [`Decoder::default`] takes: 64 MiB, above any image a provider inlines.
pub const EVENT_BYTES_MAX: usize = 64 << 20;

/// Finds events in the chunks of one stream.
///
/// It is an iterator over the events that are complete so far: `None` asks for the next chunk.
#[derive(Debug)]
pub struct Decoder {
    /// What is left of the newest chunk.
    chunk: Bytes,
    /// The beginning of an event from earlier chunks, already searched for its end.
    held: BytesMut,
    line: Line,
    /// Whether an event has come out: only the first may begin with a byte order mark.
    begun: bool,
    oversize: bool,
    event_bytes_max: usize,
}

/// Where the search stands in the current line.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Line {
    /// At its beginning.
    Start,
    /// At its beginning, and the line before ended in a CR whose LF may still come.
    AfterCr,
    /// Somewhere inside.
    Inside,
}

/// An event grew beyond the decoder's bound; the stream is of no further use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {event_bytes_max} bytes")]
pub struct Oversize {
    /// The bound, in bytes.
    pub event_bytes_max: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(EVENT_BYTES_MAX)
    }
}

impl Decoder {
    /// A decoder at the beginning of a stream that takes events of at most `event_bytes_max` bytes.
    pub fn new(event_bytes_max: usize) -> Self {
        Self {
            chunk: Bytes::new(),
            held: BytesMut::new(),
            line: Line::Start,
            begun: false,
            oversize: false,
            event_bytes_max,
        }
    }

    /// Takes the next chunk, of any size; its events are then read with `next`.
    pub fn push(&mut self, chunk: Bytes) {
        if self.chunk.is_empty() {
            self.chunk = chunk;
        } else {
            self.chunk = [&self.chunk[..], &chunk[..]].concat().into();
        }
    }

    /// Ends the stream: the tail that no blank line closed, read as if one had; `None` at a clean end.
    ///
    /// Browsers drop such a tail. It is given out because some upstreams end on `data: [DONE]` without a blank line.
    pub fn finish(mut self) -> Option<Event> {
        self.held.extend_from_slice(&self.chunk);
        (!self.held.is_empty()).then(|| Event::read(self.held.freeze(), !self.begun))
    }

    /// The length of the event's rest at the beginning of the chunk, or `None` when it goes on beyond the chunk.
    fn find_end(&mut self) -> Option<usize> {
        let chunk = &self.chunk[..];
        let mut at = 0;
        if self.line == Line::AfterCr && !chunk.is_empty() {
            at = usize::from(chunk[0] == b'\n');
            self.line = Line::Start;
        }
        while let Some(found) = memchr2(b'\n', b'\r', &chunk[at..]) {
            let blank = found == 0 && self.line == Line::Start;
            at += found + 1;
            self.line = Line::Start;
            if chunk[at - 1] == b'\r' {
                match chunk.get(at) {
                    Some(b'\n') => at += 1,
                    Some(_) => {}
                    None => self.line = Line::AfterCr,
                }
            }
            if blank {
                return Some(at);
            }
        }
        if at < chunk.len() {
            self.line = Line::Inside;
        }
        None
    }

    /// Joins the first `length` bytes of the chunk to what is held.
    fn take(&mut self, length: usize) -> Bytes {
        let rest = self.chunk.split_to(length);
        if self.held.is_empty() {
            return rest;
        }
        self.held.extend_from_slice(&rest);
        self.held.split().freeze()
    }
}

impl Iterator for Decoder {
    type Item = Result<Event, Oversize>;

    fn next(&mut self) -> Option<Self::Item> {
        // A blank line that ended in a CR at the end of a chunk has already closed its event; waiting for a possible
        // LF would hold back the last event of a quiet stream. The LF passes as an event of its own, without data.
        if self.line == Line::AfterCr && self.held.is_empty() && self.chunk.first() == Some(&b'\n') {
            self.line = Line::Start;
            return Some(Ok(Event::read(self.chunk.split_to(1), false)));
        }
        if self.oversize {
            return Some(Err(Oversize { event_bytes_max: self.event_bytes_max }));
        }
        let end = self.find_end();
        if self.held.len() + end.unwrap_or(self.chunk.len()) > self.event_bytes_max {
            self.oversize = true;
            return Some(Err(Oversize { event_bytes_max: self.event_bytes_max }));
        }
        let Some(length) = end else {
            self.held.extend_from_slice(&std::mem::take(&mut self.chunk));
            return None;
        };
        let event = Event::read(self.take(length), !self.begun);
        self.begun = true;
        Some(Ok(event))
    }
}

/// One event: its bytes as they came, blank line included, and what its fields say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    raw: Bytes,
    name: Option<Range<usize>>,
    data: Data,
}

/// Where an event's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Data {
    /// There is none: comments, or fields without data.
    Absent,
    /// One line, here in the raw bytes.
    Line(Range<usize>),
    /// Several lines, joined with LF.
    Lines(Vec<u8>),
}

impl Event {
    /// Reads one event from its bytes.
    pub fn of(raw: Bytes) -> Self {
        Self::read(raw, true)
    }

    /// The bytes of the event, blank line included.
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }

    /// The bytes of the event, blank line included.
    pub fn into_raw(self) -> Bytes {
        self.raw
    }

    /// The last `event` field; `None` where it is absent, empty or not UTF-8.
    pub fn name(&self) -> Option<&str> {
        let name = std::str::from_utf8(&self.raw[self.name.clone()?]).ok()?;
        (!name.is_empty()).then_some(name)
    }

    /// The `data` lines joined with LF; `None` where there is none, as in a comment.
    pub fn data(&self) -> Option<&[u8]> {
        match &self.data {
            Data::Absent => None,
            Data::Line(range) => Some(&self.raw[range.clone()]),
            Data::Lines(joined) => Some(joined),
        }
    }

    fn read(raw: Bytes, first: bool) -> Self {
        let mut event = Self { raw, name: None, data: Data::Absent };
        let raw = event.raw.clone();
        let mut at = if first && raw.starts_with("\u{feff}".as_bytes()) { 3 } else { 0 };
        while at < raw.len() {
            let end = memchr2(b'\n', b'\r', &raw[at..]).map_or(raw.len(), |found| at + found);
            event.read_line(&raw, at..end);
            // The LF of a CRLF is passed over as an empty line, which says nothing.
            at = end + 1;
        }
        event
    }

    fn read_line(&mut self, raw: &[u8], line: Range<usize>) {
        let colon = memchr(b':', &raw[line.clone()]).map(|found| line.start + found);
        let field = &raw[line.start..colon.unwrap_or(line.end)];
        let value = match colon.map(|colon| colon + 1) {
            Some(start) if start < line.end && raw[start] == b' ' => start + 1..line.end,
            Some(start) => start..line.end,
            None => line.end..line.end,
        };
        match field {
            b"data" => self.add_data(raw, value),
            b"event" => self.name = Some(value),
            _ => {}
        }
    }

    fn add_data(&mut self, raw: &[u8], value: Range<usize>) {
        match &mut self.data {
            Data::Absent => self.data = Data::Line(value),
            Data::Line(first) => self.data = Data::Lines([&raw[first.clone()], b"\n", &raw[value]].concat()),
            Data::Lines(joined) => {
                joined.push(b'\n');
                joined.extend_from_slice(&raw[value]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per event: `name|data`, `-` for what is absent, then the tail after `+`; checks that no byte is lost.
    fn read(chunks: &[&[u8]]) -> String {
        let (mut decoder, mut raw, mut lines) = (Decoder::default(), Vec::new(), Vec::new());
        let mut say = |event: Event, mark: &str| {
            raw.extend_from_slice(event.raw());
            let data = event.data().map_or("-".into(), |data| String::from_utf8_lossy(data).replace('\n', "\\n"));
            lines.push(format!("{mark}{}|{data}", event.name().unwrap_or("-")));
        };
        for chunk in chunks {
            decoder.push(Bytes::copy_from_slice(chunk));
            for event in decoder.by_ref() {
                say(event.expect("the events are short"), "");
            }
        }
        if let Some(tail) = decoder.finish() {
            say(tail, "+");
        }
        assert_eq!(raw, chunks.concat(), "the bytes that came out are not those that went in");
        lines.join(" ")
    }

    #[track_caller]
    fn check(stream: &str, expected: &str) {
        assert_eq!(read(&[stream.as_bytes()]), expected);
    }

    #[test]
    fn fields_are_read_as_the_standard_says() {
        check("data: a\n\n", "-|a");
        check("data:a\n\n", "-|a");
        check("data:  a\n\n", "-| a");
        check("data\n\n", "-|");
        check("data: a:b\n\n", "-|a:b");
        check("event: x\ndata: 1\ndata: 2\ndata\n\n", "x|1\\n2\\n");
        check("event: x\nevent:\ndata: 1\n\n", "-|1");
        check("event:x\nid: 3\nretry: 5\nodd\ndatax: 1\n\n", "x|-");
        check(" data: 1\n\n", "-|-");
    }

    #[test]
    fn comments_and_blank_lines_pass_as_events_without_data() {
        check(": OPENROUTER PROCESSING\n\ndata: 1\n\n", "-|- -|1");
        check("\n\n\ndata: 1\n\n\n", "-|- -|- -|- -|1 -|-");
    }

    #[test]
    fn all_three_line_ends_end_lines() {
        check("event: a\r\ndata: 1\r\n\r\ndata: 2\r\n\r\n", "a|1 -|2");
        check("event: a\rdata: 1\r\rdata: 2\r\r", "a|1 -|2");
        check("data: 1\r\n\ndata: 2\n\r\ndata: 3\n\rdata: 4\r\n\r", "-|1 -|2 -|3 -|4");
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_field_only() {
        check("\u{feff}data: 1\n\n", "-|1");
        check("\u{feff}\n\ndata: 1\n\n", "-|- -|1");
        check("data: 1\n\n\u{feff}data: 2\n\n", "-|1 -|-");
    }

    #[test]
    fn a_tail_without_a_blank_line_comes_out_at_the_end() {
        check("data: 1\n\ndata: [DONE]", "-|1 +-|[DONE]");
        check("data: [DONE]\n", "+-|[DONE]");
        check("", "");
    }

    #[test]
    fn an_event_that_a_lone_cr_closes_does_not_wait_for_the_next_chunk() {
        let mut decoder = Decoder::default();
        decoder.push(Bytes::from_static(b"data: 1\r\n\r"));
        assert_eq!(decoder.next().unwrap().unwrap().data(), Some(&b"1"[..]));
        decoder.push(Bytes::from_static(b"\n"));
        assert_eq!(&decoder.next().unwrap().unwrap().into_raw()[..], b"\n");
        assert_eq!(decoder.next(), None);
        assert_eq!(decoder.finish(), None);
    }

    #[test]
    fn every_two_cuts_of_a_nasty_stream_give_the_same_events() {
        let nasty = "\u{feff}: hi\r\n\r\nevent: a\r\ndata: é\r\ndata\r\r\n\ndata:x\n\nevent:b\rdata: 2\r\rdata: t\r\n";
        let meaning = |chunks: &[&[u8]]| {
            // Which chunk ends hide an LF behind a CR decides only where dataless events lie.
            read(chunks).split(' ').filter(|event| *event != "-|-").collect::<Vec<_>>().join(" ")
        };
        let nasty = nasty.as_bytes();
        let whole = meaning(&[nasty]);
        assert_eq!(whole, "a|é\\n -|x b|2 +-|t");
        for first in 0..=nasty.len() {
            for second in first..=nasty.len() {
                let chunks = [&nasty[..first], &nasty[first..second], &nasty[second..]];
                assert_eq!(meaning(&chunks), whole, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn an_event_in_one_chunk_is_not_copied() {
        let chunk = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        let mut decoder = Decoder::default();
        decoder.push(chunk.clone());
        let events: Vec<_> = decoder.by_ref().map(|event| event.unwrap().into_raw()).collect();
        assert_eq!(events[0].as_ptr(), chunk.as_ptr());
        assert_eq!(events[1].as_ptr(), chunk[9..].as_ptr());
    }

    #[test]
    fn chunks_may_be_pushed_before_the_last_was_read() {
        let mut decoder = Decoder::default();
        decoder.push(Bytes::from_static(b"data: 1\n\nda"));
        decoder.push(Bytes::from_static(b"ta: 2\n\n"));
        assert_eq!(decoder.by_ref().count(), 2);
    }

    #[test]
    fn an_event_beyond_the_bound_is_an_error_for_good() {
        let mut decoder = Decoder::new(10);
        decoder.push(Bytes::from_static(b"data: 12\n\n"));
        assert!(decoder.next().unwrap().is_ok());
        decoder.push(Bytes::from_static(b"data: "));
        assert_eq!(decoder.next(), None);
        decoder.push(Bytes::from_static(b"12345"));
        assert_eq!(decoder.next(), Some(Err(Oversize { event_bytes_max: 10 })));
        decoder.push(Bytes::from_static(b"\n\ndata: 1\n\n"));
        assert_eq!(decoder.next(), Some(Err(Oversize { event_bytes_max: 10 })));
    }
}
