//! YAML text as a tree in which every key and value knows its place.
//!
//! The tree holds text only: what a scalar means is for the field that reads it to say, so `"5"` and `5` are the same.
//! What a configuration file has no use for (anchors, tags, several documents) is refused, which also bounds the tree
//! by the size of the text.

use std::collections::HashMap;
use std::fmt;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};

/// The longest text read: far above any catalogue written by hand, far below what would hurt.
const TEXT_BYTES_MAX: usize = 8 << 20;

/// The deepest nesting read; the deepest field (`catalogue.templates[].model_routes[].allocations[].weight`) is at 8.
const DEPTH_MAX: usize = 32;

/// A place in the text; both count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    pub(super) line: u64,
    pub(super) column: u64,
}

impl At {
    /// Where a text begins.
    pub(super) const START: Self = Self { line: 1, column: 1 };

    fn of(span: Span) -> Self {
        Self { line: span.start.line() as u64, column: span.start.col() as u64 + 1 }
    }
}

/// A value and its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: At,
    pub(super) kind: Kind,
}

/// What stands at a node.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// Nothing: an empty value, `~` or `null`.
    Null,
    /// Text, however it was quoted.
    Scalar(String),
    /// A list.
    Seq(Vec<Node>),
    /// A map; no key stands in it twice.
    Map(Vec<(Key, Node)>),
}

/// A map's key and its place.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub(super) at: At,
    pub(super) text: String,
}

/// What is wrong with the text itself.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) at: At,
    pub(super) message: String,
}

impl Node {
    /// The value of `key`, where this is a map that has it.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        let Kind::Map(entries) = &self.kind else { return None };
        entries.iter().find(|(k, _)| k.text == key).map(|(_, node)| node)
    }

    /// The elements, where this is a list.
    pub(super) fn elements(&self) -> &[Node] {
        match &self.kind {
            Kind::Seq(nodes) => nodes,
            _ => &[],
        }
    }

    /// Whether nothing stands here, or a list or map of nothing.
    pub(super) fn is_empty(&self) -> bool {
        match &self.kind {
            Kind::Null => true,
            Kind::Scalar(_) => false,
            Kind::Seq(nodes) => nodes.is_empty(),
            Kind::Map(entries) => entries.is_empty(),
        }
    }

    /// The text, where this is a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Scalar(text) => Some(text),
            _ => None,
        }
    }
}

impl fmt::Display for Kind {
    /// Names the kind for a message; never what stands there, which may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "nothing",
            Self::Scalar(_) => "a single value",
            Self::Seq(_) => "a list",
            Self::Map(_) => "a map",
        })
    }
}

/// Reads the one document in `text`. Faults that leave the rest readable (a key twice) are put in `faults`.
pub(super) fn read(text: &str, faults: &mut Vec<Fault>) -> Result<Node, Fault> {
    if text.len() > TEXT_BYTES_MAX {
        let message = format!("the file is longer than {TEXT_BYTES_MAX} bytes");
        return Err(Fault { at: At::START, message });
    }
    let options = granit_parser::options! { emit_comments: false };
    let parser = Parser::new_from_str_with_options(text, options);
    let mut builder = Builder { parser, faults };
    let mut root = None;
    while let Some((event, span)) = builder.next()? {
        let at = At::of(span);
        match event {
            Event::DocumentStart(..) if root.is_some() => {
                return Err(Fault { at, message: "a second document: the file holds one".to_owned() });
            }
            Event::StreamStart | Event::StreamEnd | Event::DocumentStart(..) | Event::DocumentEnd => {}
            event => root = Some(builder.node(event, at, 0)?),
        }
    }
    Ok(root.unwrap_or(Node { at: At::START, kind: Kind::Null }))
}

struct Builder<'t, 'f> {
    parser: Parser<'t, StrInput<'t>>,
    faults: &'f mut Vec<Fault>,
}

impl<'t> Builder<'t, '_> {
    fn next(&mut self) -> Result<Option<(Event<'t>, Span)>, Fault> {
        self.parser.next().transpose().map_err(|error| syntax(&error))
    }

    /// The node that begins with `event`.
    fn node(&mut self, event: Event<'t>, at: At, depth: usize) -> Result<Node, Fault> {
        let fault = |message: &str| Err(Fault { at, message: message.to_owned() });
        if event.tag().is_some() {
            return fault("tags such as `!!str` are not used in this file");
        }
        if depth > DEPTH_MAX {
            return Err(Fault { at, message: format!("nested deeper than {DEPTH_MAX}") });
        }
        let kind = match event {
            Event::Scalar(text, style, ..) => scalar(&text, style),
            Event::SequenceStart(..) => Kind::Seq(self.elements(depth)?),
            Event::MappingStart(..) => Kind::Map(self.entries(depth)?),
            _ => return fault("anchors and aliases are not used in this file: write the value out"),
        };
        Ok(Node { at, kind })
    }

    fn elements(&mut self, depth: usize) -> Result<Vec<Node>, Fault> {
        let mut nodes = Vec::new();
        while let Some((event, span)) = self.next()? {
            if event == Event::SequenceEnd {
                break;
            }
            nodes.push(self.node(event, At::of(span), depth + 1)?);
        }
        Ok(nodes)
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<(Key, Node)>, Fault> {
        let mut entries = Vec::new();
        let mut seen: HashMap<String, u64> = HashMap::new();
        while let Some((event, span)) = self.next()? {
            let at = At::of(span);
            let text = match event {
                Event::MappingEnd => break,
                Event::Scalar(text, ..) => text.into_owned(),
                _ => return Err(Fault { at, message: "a key must be a single word".to_owned() }),
            };
            let Some((event, span)) = self.next()? else { break };
            let node = self.node(event, At::of(span), depth + 1)?;
            if let Some(line) = seen.insert(text.clone(), at.line) {
                let message = format!("`{}` stands here twice, first on line {line}", super::value::shown(&text));
                self.faults.push(Fault { at, message });
            } else {
                entries.push((Key { at, text }, node));
            }
        }
        Ok(entries)
    }
}

fn scalar(text: &str, style: ScalarStyle) -> Kind {
    match (style, text) {
        (ScalarStyle::Plain, "" | "~" | "null" | "Null" | "NULL") => Kind::Null,
        _ => Kind::Scalar(text.to_owned()),
    }
}

/// The parser's messages name what it expected and at most one character of the text, never a value.
fn syntax(error: &ScanError) -> Fault {
    let at = At { line: error.marker().line() as u64, column: error.marker().col() as u64 + 1 };
    Fault { at, message: format!("not YAML: {}", error.info()) }
}
