//! Measures what an append to the spool costs its caller, and how fast the shipper moves facts into the embedded log.
//!
//! `cargo run --release -p waybill-events --example pace [DIR]`

use std::path::Path;
use std::time::{Duration, Instant};

use waybill_events::shipper::Shipper;
use waybill_events::spool::{Options, Spool};
use waybill_events::sqlite::SqliteLog;
use waybill_schema::event::{Act, Epoch, Event, Operator};
use waybill_schema::frame::Body;
use waybill_schema::time::Time;

const RECORDS: u32 = 100_000;
const LONG: Duration = Duration::from_secs(600);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir_in(std::env::args_os().nth(1).unwrap_or_else(|| std::env::temp_dir().into()))?;
    // Three facts of about 300 bytes: what one request records.
    let text = "x".repeat(200);
    let fact = Event::Operator(Operator { act: Act::Clear, target: text, actor: "pace".into(), reason: String::new() });
    let facts = [(); 3].map(|()| Body::of(&fact, Time(0)));

    let (mut spool, reader, _) = Spool::open(&dir.path().join("spool"), Options::default())?;
    spool.begin(1)?;
    let appended = measure(|| append(&mut spool, &facts));
    report("append alone", appended);
    let shipped = measure(|| ship(&dir.path().join("alone.sqlite"), reader, |_| {}));
    report("ship alone", shipped);
    drop(spool);

    let (mut spool, reader, _) = Spool::open(&dir.path().join("beside"), Options::default())?;
    spool.begin(1)?;
    let shipped = measure(|| {
        ship(&dir.path().join("beside.sqlite"), reader, |_| {
            report("append beside shipping", measure(|| append(&mut spool, &facts)));
        });
    });
    report("append and ship", shipped);
    Ok(())
}

fn append(spool: &mut Spool, facts: &[Body]) {
    for _ in 0..RECORDS {
        spool.append(facts).expect("the spool takes the facts");
    }
}

fn ship(path: &Path, reader: waybill_events::spool::Reader, meanwhile: impl FnOnce(&Shipper)) {
    let log = SqliteLog::open(path, Box::new(|_, _| Ok(()))).expect("the log opens");
    let shipper = Shipper::start("gw-a".into(), reader, Box::new(log)).expect("a thread starts");
    meanwhile(&shipper);
    let standing = shipper.progress().wait_for(Epoch { epoch: 1, last: 3 * u64::from(RECORDS) }, LONG);
    assert_eq!(standing.shipped, Some(Epoch { epoch: 1, last: 3 * u64::from(RECORDS) }), "{standing:?}");
}

#[expect(clippy::disallowed_methods, reason = "this program measures")]
fn measure(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn report(what: &str, took: Duration) {
    let (record, facts) = (took / RECORDS, 3.0 * f64::from(RECORDS) / took.as_secs_f64());
    println!("{what}: {record:?} per record of 3 facts, {facts:.0} facts/s");
}
