//! Forms: a `multipart/form-data` body (RFC 7578), read from its beginning as far as it has come.
//!
//! Nothing is built from it and nothing is changed: [`Form::parts`] says where each part that is there as a whole stands,
//! so the model can be found before the files have come, and exchanged in place.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memmem;
use sha2::{Digest as _, Sha256};

/// The longest boundary, in bytes (RFC 2046, section 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;
/// The longest headers of a part, in bytes.
const HEADERS_BYTES_MAX: usize = 8 << 10;

/// How the parts of a body are told apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// Two dashes and the boundary.
    delimiter: Vec<u8>,
}

/// A part that is there as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The field it is.
    pub name: Cow<'a, str>,
    /// Whether it is a file.
    pub is_file: bool,
    /// Where its content stands in the body.
    pub content: Range<usize>,
}

impl Form {
    /// The form that a `Content-Type` announces; `None` where it announces none.
    pub fn of(content_type: &str) -> Option<Self> {
        let (media, parameters) = content_type.split_once(';')?;
        if !media.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let boundary = parameter(parameters, "boundary")?;
        let fits = (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len());
        fits.then(|| Self { delimiter: [b"--", boundary.as_bytes()].concat() })
    }

    /// The parts of `body` that are there as a whole, in order; a body that is no form has none.
    pub fn parts<'a>(&'a self, body: &'a [u8]) -> impl Iterator<Item = Part<'a>> {
        let mut at = self.first(body);
        std::iter::from_fn(move || {
            let (part, next) = self.part(body, at?)?;
            at = Some(next);
            Some(part)
        })
    }

    /// Where the headers of the first part begin.
    fn first(&self, body: &[u8]) -> Option<usize> {
        let at = memmem::find(body, &self.delimiter)?;
        let at_line = at == 0 || body[..at].ends_with(b"\r\n");
        self.after_delimiter(body, at).filter(|_| at_line)
    }

    /// The part whose headers begin at `start`, and where the next one's do.
    fn part<'a>(&self, body: &'a [u8], start: usize) -> Option<(Part<'a>, usize)> {
        let rest = body.get(start..)?;
        let window = &rest[..rest.len().min(HEADERS_BYTES_MAX)];
        let headers = memmem::find(window, b"\r\n\r\n")?;
        let content = start + headers + 4;
        // The line end before a delimiter belongs to it; an empty part ends with the one that ends its headers.
        let marker = [b"\r\n", &self.delimiter[..]].concat();
        let end = content - 2 + memmem::find(&body[content - 2..], &marker)?;
        let end = end.max(content);
        let next = memmem::find(&body[end - 2..], &self.delimiter).map(|found| end - 2 + found)?;
        let (name, is_file) = disposition(std::str::from_utf8(&rest[..headers]).ok()?)?;
        let next = self.after_delimiter(body, next).unwrap_or(body.len());
        Some((Part { name, is_file, content: content..end }, next))
    }

    /// What follows the line of the delimiter at `at`; `None` where it is the last, or is not there as a whole.
    fn after_delimiter(&self, body: &[u8], at: usize) -> Option<usize> {
        let rest = &body[at + self.delimiter.len()..];
        let line = memmem::find(&rest[..rest.len().min(HEADERS_BYTES_MAX)], b"\r\n")?;
        let padding = rest[..line].iter().all(|byte| matches!(byte, b' ' | b'\t'));
        padding.then_some(at + self.delimiter.len() + line + 2)
    }
}

/// Watches the rest of a form for another part of a name that must be there once: of two, nobody knows which an
/// upstream reads.
#[derive(Debug)]
pub struct Watch {
    form: Form,
    name: &'static str,
    /// What may be the beginning of a part.
    held: Vec<u8>,
}

impl Watch {
    /// Watches for a part of `name`.
    pub fn new(form: Form, name: &'static str) -> Self {
        Self { form, name, held: Vec::new() }
    }

    /// Takes the next bytes; tells whether they hold the headers of such a part.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        self.held.extend_from_slice(bytes);
        let delimiter = &self.form.delimiter;
        let mut at = 0;
        while let Some(found) = memmem::find(&self.held[at..], delimiter) {
            let headers = &self.held[at + found + delimiter.len()..];
            let window = &headers[..headers.len().min(HEADERS_BYTES_MAX)];
            let Some(end) = memmem::find(window, b"\r\n\r\n") else {
                if headers.len() >= HEADERS_BYTES_MAX {
                    at += found + delimiter.len();
                    continue;
                }
                self.held.drain(..at + found);
                return false;
            };
            if std::str::from_utf8(&window[..end]).ok().is_some_and(|headers| names(headers, self.name)) {
                return true;
            }
            at += found + delimiter.len();
        }
        let kept = self.held.len().saturating_sub(delimiter.len() - 1).max(at);
        self.held.drain(..kept);
        false
    }
}

/// A sum of a form that does not depend on its boundary: clients draw a new one for each request, so of one form that is
/// sent twice no two bodies are equal. What stands between the delimiters is summed, headers and contents, and then the
/// sums in their order.
#[derive(Debug)]
pub struct Digest {
    /// A line end and the delimiter.
    marker: Vec<u8>,
    /// What may be the beginning of a delimiter.
    held: Vec<u8>,
    piece: Sha256,
    pieces: Sha256,
}

/// The sum of a form.
pub type Sum = [u8; 32];

impl Digest {
    /// The digest of a form of which nothing has come yet.
    pub fn new(form: &Form) -> Self {
        let marker = [b"\r\n", &form.delimiter[..]].concat();
        // The first delimiter may stand at the very beginning.
        Self { marker, held: b"\r\n".to_vec(), piece: Sha256::new(), pieces: Sha256::new() }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(found) = memmem::find(&self.held[at..], &self.marker) {
            self.piece.update(&self.held[at..at + found]);
            self.pieces.update(self.piece.finalize_reset());
            at += found + self.marker.len();
        }
        let known = self.held.len().saturating_sub(self.marker.len() - 1).max(at);
        self.piece.update(&self.held[at..known]);
        self.held.drain(..known);
    }

    /// The sum of all that came.
    pub fn finish(mut self) -> Sum {
        self.piece.update(&self.held);
        self.pieces.update(self.piece.finalize());
        self.pieces.finalize().into()
    }
}

/// Whether a part's headers name the field `name`, in any form that some reader takes.
fn names(headers: &str, name: &str) -> bool {
    let is_it = disposition(headers).is_some_and(|(found, _)| found.trim().eq_ignore_ascii_case(name));
    let coded = headers.to_ascii_lowercase().contains("name*");
    is_it || (coded && !headers.to_ascii_lowercase().contains("filename*"))
}

/// The name of a part's field, and whether it is a file.
fn disposition(headers: &str) -> Option<(Cow<'_, str>, bool)> {
    let line = headers.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    let (_, parameters) = line.split_once(';')?;
    let is_file = parameter(parameters, "filename").is_some() || parameter(parameters, "filename*").is_some();
    Some((parameter(parameters, "name")?, is_file))
}

/// The value of one of several parameters, without quotes.
fn parameter<'a>(parameters: &'a str, wanted: &str) -> Option<Cow<'a, str>> {
    let mut rest = parameters;
    loop {
        let (name, after) = rest.split_once('=')?;
        let name = name.trim_matches(|c: char| c == ';' || c.is_ascii_whitespace());
        let (value, further) = match after.trim_start().strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let (value, further) = after.split_once(';').unwrap_or((after, ""));
                (Cow::Borrowed(value.trim()), further)
            }
        };
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = further;
    }
}

/// What stands before the closing quote, and what follows it.
fn unquote(quoted: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut escaped = false;
    let end = quoted.find(|c| match c {
        _ if escaped => {
            escaped = false;
            false
        }
        '\\' => {
            escaped = true;
            false
        }
        c => c == '"',
    })?;
    let value = &quoted[..end];
    let value = if value.contains('\\') { Cow::Owned(value.replace("\\\"", "\"")) } else { Cow::Borrowed(value) };
    Some((value, &quoted[end + 1..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn form() -> Form {
        Form::of("multipart/form-data; boundary=XX").expect("a form")
    }

    /// The parts as `name=content`, files as `name@content`.
    fn parts(body: &str) -> String {
        let form = form();
        let parts = form.parts(body.as_bytes()).map(|part| {
            let sign = if part.is_file { '@' } else { '=' };
            format!("{}{sign}{}", part.name, &body[part.content])
        });
        parts.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_form_is_known_by_its_content_type() {
        let table = [
            ("multipart/form-data; boundary=ab-c", Some("ab-c")),
            ("Multipart/Form-Data; charset=utf-8; Boundary=\"a b\"", Some("a b")),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/mixed; boundary=a", None),
            ("application/json", None),
        ];
        for (text, boundary) in table {
            let expected = boundary.map(|boundary| format!("--{boundary}").into_bytes());
            assert_eq!(Form::of(text).map(|form| form.delimiter), expected, "{text}");
        }
    }

    #[test]
    fn parts_are_found_in_order_as_far_as_they_are_there() {
        let model = "--XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n";
        let file = "--XX\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a;b.mp3\"\r\nContent-Type: audio/mpeg\r\n\r\n\
                    a\r\n--X\r\nb\r\n";
        let empty = "--XX\r\nContent-Disposition: form-data; name=prompt\r\n\r\n\r\n";
        let whole = format!("{model}{file}{empty}--XX--\r\n");
        assert_eq!(parts(&whole), "model=whisper-1 file@a\r\n--X\r\nb prompt=");
        assert_eq!(parts(&format!("preamble\r\n{model}--XX")), "model=whisper-1");
        assert_eq!(parts(model), "", "its end has not come yet");
        assert_eq!(parts(&format!("{file}{model}--XX--")), "file@a\r\n--X\r\nb model=whisper-1");
        for none in ["", "--XX", "--XX--\r\n", "{}", "--XY\r\n\r\n", "--XX\r\nno name\r\n\r\nx\r\n--XX--"] {
            assert_eq!(parts(none), "", "{none:?}");
        }
    }

    /// However a form is cut into pieces, a second model in it is noticed; a file that talks of models is none.
    #[test]
    fn a_second_part_of_a_name_is_noticed() {
        let file =
            "\r\n--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\r\nname=\"model\"";
        let again = "\r\n--XX\r\nContent-Disposition: form-data; name=model\r\n\r\nother\r\n--XX--\r\n";
        for (rest, noticed) in [(file.to_owned(), false), (format!("{file}{again}"), true)] {
            for size in 1..=rest.len() {
                let mut watch = Watch::new(form(), "model");
                let seen = rest.as_bytes().chunks(size).any(|piece| watch.push(piece));
                assert_eq!(seen, noticed, "in pieces of {size}");
            }
        }
    }

    fn sum(boundary: &str, body: &str, size: usize) -> Sum {
        let form = Form::of(&format!("multipart/form-data; boundary={boundary}")).expect("a form");
        let mut digest = Digest::new(&form);
        body.as_bytes().chunks(size).for_each(|piece| digest.push(piece));
        digest.finish()
    }

    /// However it comes and whatever its boundary: the same form has one sum, and another form another.
    #[test]
    fn a_sum_is_of_the_form_and_not_of_its_boundary() {
        let body = |boundary: &str, name: &str, content: &str| {
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name={name}\r\n\r\n{content}\r\n--{boundary}--\r\n"
            )
        };
        let one = body("XX", "a", "x\r\n--Y");
        let expected = sum("XX", &one, one.len());
        for (boundary, same) in [("XX", one.clone()), ("a-much-longer-one", body("a-much-longer-one", "a", "x\r\n--Y"))]
        {
            for size in 1..=same.len() {
                assert_eq!(sum(boundary, &same, size), expected, "{boundary} in pieces of {size}");
            }
        }
        let others = [
            body("XX", "b", "x\r\n--Y"),
            body("XX", "a", "x\r\n--Z"),
            body("XX", "a", "x\r\n--XX\r\n"),
            one[..one.len() - 2].to_owned(),
            format!("\r\n{one}"),
            one.replace("--XX--", "--XX"),
        ];
        for other in others {
            assert_ne!(sum("XX", &other, 7), expected, "{other:?}");
        }
        // What is a delimiter in one body and none in the other makes them two.
        assert_ne!(sum("YY", &one, 7), expected);
    }

    proptest! {
        /// Whatever comes, and however much of it: no panic, and a part once found stays where it is.
        #[test]
        fn a_part_once_found_stays(body in proptest::collection::vec(prop_oneof![
            Just("--XX"), Just("\r\n"), Just("--"), Just("Content-Disposition: form-data; name=\"a\""), Just("x"), Just(":"), Just("\""),
        ], 0..40)) {
            let (form, body) = (form(), body.concat());
            let all: Vec<_> = form.parts(body.as_bytes()).collect();
            for cut in 0..body.len() {
                let found: Vec<_> = form.parts(&body.as_bytes()[..cut]).collect();
                prop_assert!(all.starts_with(&found), "{:?} of {:?}", found, all);
            }
        }
    }
}
