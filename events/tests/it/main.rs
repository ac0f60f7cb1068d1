//! Spool, log and shipper over real files.

mod archiving;
mod conformance;
mod jetstream;
mod orphans;
mod reading;
mod shipping;
mod spooling;
mod sqlite;

use waybill_events::log::{Last, Seq};
use waybill_schema::event::{Act, Event, Operator};
use waybill_schema::frame::{Body, Frame, Link};
use waybill_schema::time::Time;

/// When every fact of these tests is made.
const MADE: Time = Time(1_798_000_000_000);

/// A fact that says `text`.
fn event(text: &str) -> Event {
    Event::Operator(Operator { act: Act::Clear, target: text.into(), actor: "test".into(), reason: String::new() })
}

fn body(text: &str) -> Body {
    Body::of(&event(text), MADE)
}

/// A frame of gw-a at the end of the log, which ends with fact `last` of `epoch`.
fn logged(epoch: u64, last: u64) -> Last {
    let frame = Frame::seal("gw-a".into(), epoch, Link::start(), last, 1, line(last, "x").as_bytes());
    Last { seq: Seq(last), header: frame.header }
}

/// The line of fact `number`, made at [`MADE`], that says `text`: written out by hand.
fn line(number: u64, text: &str) -> String {
    format!(
        r#"{{"k":"operator","v":1,"n":{number},"t":1798000000000,"b":{{"act":"clear","target":"{text}","actor":"test","reason":""}}}}"#
    ) + "\n"
}
