//! How far long work has come, on one line of the terminal; nothing where nobody looks at one.

use std::io::{IsTerminal, Write};

use waybill_events::log::Seq;
use waybill_schema::time::Time;

/// So often a line is drawn anew.
const REDRAW_MS: u64 = 100;

/// The line of one piece of work.
pub(crate) struct Progress {
    what: String,
    drawn: Option<Time>,
    is_seen: bool,
}

impl Progress {
    pub(crate) fn of(what: impl Into<String>) -> Self {
        Self { what: what.into(), drawn: None, is_seen: std::io::stderr().is_terminal() }
    }

    /// Notes that the frame at `seq` is done.
    pub(crate) fn reach(&mut self, seq: Seq) {
        let now = Time::wall_clock();
        if self.is_seen && self.drawn.is_none_or(|drawn| now.ms_since(drawn) >= REDRAW_MS) {
            self.drawn = Some(now);
            self.draw(&format!("{}: frame {seq}", self.what));
        }
    }

    fn draw(&self, line: &str) {
        // A terminal that is gone is no reason to stop.
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            self.draw("");
        }
    }
}
