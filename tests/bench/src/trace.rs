//! Traces: real requests as block ids, read from their files and laid on one time line.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use crate::draws::Draws;
use crate::prefix;

/// One request of a trace.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The session it belongs to.
    pub(crate) session: String,
    /// When it arrives, in milliseconds from the beginning.
    pub(crate) at_ms: i64,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u64,
    /// Tokens of one block.
    pub(crate) block_tokens: u64,
    /// The chained hashes of its blocks.
    pub(crate) prefixes: Vec<u64>,
}

/// Whether block ids mean the same in all sessions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockIds {
    /// They do.
    Global,
    /// They do not.
    PerSession,
}

/// How the sessions of a file are laid on one time line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrivals {
    /// As the file says.
    Recorded,
    /// The first so many sessions of the file, each of which begins at 0 there, begin at random within two hours.
    Staggered {
        /// How many.
        sessions: usize,
        /// Of the dice.
        seed: u64,
    },
}

/// The span over which sessions are staggered, in milliseconds: two hours.
const STAGGER_MS: u64 = 7_200_000;

/// A line of a file: a request, or a head of a session (`meta`), which has no `b`.
#[derive(Deserialize)]
struct Line {
    s: Option<String>,
    t: Option<f64>,
    #[serde(rename = "in")]
    input: Option<u64>,
    bs: Option<u64>,
    b: Option<Vec<(u64, u64)>>,
}

/// Reads the first `count` requests of `file` in the order of their arrival.
pub(crate) fn read(file: &Path, ids: BlockIds, arrivals: Arrivals, count: usize) -> anyhow::Result<Vec<Request>> {
    let opened = File::open(file).with_context(|| format!("the trace {} cannot be opened", file.display()))?;
    let mut starts = Starts::new(arrivals);
    let mut rows = Vec::new();
    for (n, line) in BufReader::new(opened).lines().enumerate() {
        let row: Line =
            serde_json::from_str(&line?).with_context(|| format!("line {} of {}", n + 1, file.display()))?;
        let Line { s: Some(session), t: Some(t), input: Some(input), bs: Some(bs), b: Some(runs) } = row else {
            continue;
        };
        if let Some(start_ms) = starts.of(&session) {
            rows.push((start_ms + (t * 1000.0).round() as i64, session, input, bs, runs));
        }
    }
    rows.sort_by_key(|row| row.0);
    rows.truncate(count);
    let request = |(at_ms, session, prompt_tokens, block_tokens, runs): (i64, String, u64, u64, Vec<(u64, u64)>)| {
        let scope = if ids == BlockIds::PerSession { session.as_str() } else { "" };
        let prefixes = prefix::chain(scope, runs.iter().flat_map(|(first, n)| *first..first + n));
        Request { session, at_ms, prompt_tokens, block_tokens, prefixes }
    };
    Ok(rows.into_iter().map(request).collect())
}

/// When each session begins.
struct Starts {
    arrivals: Arrivals,
    draws: Draws,
    known: HashMap<String, i64>,
}

impl Starts {
    fn new(arrivals: Arrivals) -> Self {
        let seed = match arrivals {
            Arrivals::Recorded => 0,
            Arrivals::Staggered { seed, .. } => seed,
        };
        Self { arrivals, draws: Draws::new(seed), known: HashMap::new() }
    }

    /// The beginning of `session` in milliseconds; `None` for a session beyond those asked for.
    fn of(&mut self, session: &str) -> Option<i64> {
        let Arrivals::Staggered { sessions, .. } = self.arrivals else { return Some(0) };
        if let Some(start_ms) = self.known.get(session) {
            return Some(*start_ms);
        }
        if self.known.len() == sessions {
            return None;
        }
        let start_ms = i64::try_from(self.draws.next() % STAGGER_MS).expect("two hours fit");
        self.known.insert(session.to_owned(), start_ms);
        Some(start_ms)
    }
}
