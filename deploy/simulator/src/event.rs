//! One server-sent event, and the ways in which servers put it on the wire.

use serde_json::Value;

/// The place of an event in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Opens or closes something; comes without delay.
    Frame,
    /// Carries output; comes at the pace of the model.
    Content,
    /// Says that the answer is whole.
    Terminal,
}

/// A server-sent event: its `event:` name if the dialect has one, and its one line of data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) name: Option<String>,
    pub(crate) data: String,
    pub(crate) place: Place,
}

impl Event {
    /// An event without a name, as in Chat Completions.
    pub(crate) fn unnamed(data: &Value, place: Place) -> Self {
        Self { name: None, data: data.to_string(), place }
    }

    /// An event named by its data's `type`, as in Responses and Messages.
    pub(crate) fn typed(data: &Value, place: Place) -> Self {
        Self { name: data["type"].as_str().map(str::to_owned), data: data.to_string(), place }
    }
}

/// How lines end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LineEnd {
    /// `\n`, as all providers do.
    #[default]
    Lf,
    /// `\r\n`, allowed by the standard.
    Crlf,
    /// `\r`, allowed by the standard and loved by nobody.
    Cr,
}

/// The framing of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Framing {
    pub(crate) line_end: LineEnd,
    pub(crate) fragment_bytes: Option<usize>,
    pub(crate) splits_utf8: bool,
}

impl Framing {
    /// The writes of one event, one element for each.
    pub(crate) fn writes(self, event: &Event) -> Vec<Vec<u8>> {
        let name = event.name.iter().map(|name| format!("event: {name}"));
        self.lines(name.chain([format!("data: {}", event.data)]))
    }

    /// The writes of a comment.
    pub(crate) fn comment(self, text: &str) -> Vec<Vec<u8>> {
        self.lines([format!(": {text}")].into_iter())
    }

    fn lines(self, lines: impl Iterator<Item = String>) -> Vec<Vec<u8>> {
        let end = match self.line_end {
            LineEnd::Lf => "\n",
            LineEnd::Crlf => "\r\n",
            LineEnd::Cr => "\r",
        };
        let text: String = lines.map(|line| line + end).chain([end.to_owned()]).collect();
        let pieces = if self.splits_utf8 { inside_characters(text.as_bytes()) } else { vec![text.into_bytes()] };
        let cut = |piece: Vec<u8>| match self.fragment_bytes {
            Some(bytes) => piece.chunks(bytes.max(1)).map(<[u8]>::to_vec).collect(),
            None => vec![piece],
        };
        pieces.into_iter().flat_map(cut).collect()
    }
}

/// Cuts after the first byte of every character of more than one byte.
fn inside_characters(text: &[u8]) -> Vec<Vec<u8>> {
    text.split_inclusive(|byte| *byte >= 0xc0).map(<[u8]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(framing: Framing, expected: &[&[u8]]) {
        let event = Event::typed(&json!({"type": "a", "é": 1}), Place::Frame);
        assert_eq!(framing.writes(&event), expected);
    }

    #[test]
    fn framing_variants_are_what_they_say() {
        let whole = "event: a\ndata: {\"type\":\"a\",\"é\":1}\n\n";
        check(Framing::default(), &[whole.as_bytes()]);
        let crlf = Framing { line_end: LineEnd::Crlf, ..Framing::default() };
        check(crlf, &["event: a\r\ndata: {\"type\":\"a\",\"é\":1}\r\n\r\n".as_bytes()]);
        let cr = Framing { line_end: LineEnd::Cr, ..Framing::default() };
        check(cr, &["event: a\rdata: {\"type\":\"a\",\"é\":1}\r\r".as_bytes()]);
        let split = Framing { splits_utf8: true, ..Framing::default() };
        check(split, &[b"event: a\ndata: {\"type\":\"a\",\"\xc3", b"\xa9\":1}\n\n"]);
        let fragments = Framing { fragment_bytes: Some(20), ..Framing::default() };
        check(fragments, &[b"event: a\ndata: {\"typ", b"e\":\"a\",\"\xc3\xa9\":1}\n\n"]);
        assert_eq!(Framing::default().comment("ping"), [b": ping\n\n"]);
    }
}
