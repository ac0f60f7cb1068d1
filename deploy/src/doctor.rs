//! `waybill doctor`: what an acknowledgement of the configured log means now.

use std::path::PathBuf;

use anyhow::{Context, bail};
use serde::Serialize;
use waybill_events::jetstream::{self, Flush, Inspection, JetstreamLog, Standing};
use waybill_schema::config::LogSettings;

use crate::{check, logs, table};

/// Where nats-server listens for its monitoring unless told otherwise.
const MONITORING_PORT: u16 = 8222;
/// How often the log is asked: each time waits half a second for a connection, which may take longer over far TLS.
const TRIES_MAX: usize = 6;
/// What nats-server does unless told otherwise, for those who cannot see it.
const UNSEEN: &str = "sync_interval cannot be seen (nats-server's own default is two minutes)";

/// Tell what an acknowledgement of the log means.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file; without one, the embedded log
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The monitoring address of each server; by default port 8222 of the configured ones
    #[arg(long, value_name = "HOST:PORT")]
    monitoring: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is known, and what follows from it.
#[derive(Debug, Serialize)]
struct Report {
    log: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Inspection>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flush: Vec<Seen>,
    survives: Vec<Survival>,
}

/// When one server writes to its disk; `None` with the reason where that cannot be seen.
#[derive(Debug, Serialize)]
struct Seen {
    monitoring: String,
    flush: Option<Flush>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Whether an acknowledged fact survives something.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Survival {
    event: &'static str,
    survives: Answer,
    because: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Yes,
    No,
    Unknown,
}

/// When a log is on its disks, from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Flushing {
    Always,
    EveryMs(u64),
    Unseen,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let log = match &args.config {
        Some(file) => check::load(file)?.log,
        None => None,
    };
    let report = log.map_or_else(|| Ok(embedded()), |log| jetstream(&log, &args.monitoring))?;
    if args.json {
        table::json(&report)?;
    } else {
        print(&report)?;
    }
    match report.server.and_then(|server| server.unsuitable) {
        Some(reason) => bail!("this log is refused: {reason}"),
        None => Ok(()),
    }
}

fn embedded() -> Report {
    let survives = vec![
        survival("the end of the process", Answer::Yes, "a commit is in the file before it is acknowledged"),
        survival(
            "a power cut",
            Answer::No,
            "the last commits may not be on the disk (SQLite, synchronous = NORMAL); facts that the spool still holds are \
             sent again, others are noticed as a break in the writer's chain",
        ),
        survival("the loss of the disk", Answer::No, "there is one file"),
    ];
    Report { log: "embedded", server: None, flush: Vec::new(), survives }
}

fn jetstream(log: &LogSettings, monitoring: &[String]) -> anyhow::Result<Report> {
    let settings = logs::settings(log);
    let addresses = match monitoring {
        [] => settings.servers.iter().map(|server| usual_monitoring(server)).collect(),
        given => given.to_vec(),
    };
    let replicas = settings.replicas;
    let mut log = JetstreamLog::new(settings).context("the log's servers cannot be used")?;
    let inspected = (1..TRIES_MAX).find_map(|_| log.inspect().ok());
    let server = inspected.map_or_else(|| log.inspect(), Ok)?;
    let flush: Vec<Seen> = addresses.into_iter().map(seen).collect();
    let replicas = server.stream.as_ref().map_or(replicas, |stream| stream.replicas);
    let survives = verdict(replicas, flushing(&flush));
    Ok(Report { log: "jetstream", server: Some(server), flush, survives })
}

/// The usual monitoring address of the server at `url`, whose credentials stay out of it.
fn usual_monitoring(url: &str) -> String {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(host, _)| host);
    format!("{host}:{MONITORING_PORT}")
}

fn seen(monitoring: String) -> Seen {
    match jetstream::flush(&monitoring) {
        Ok(flush) => Seen { monitoring, flush: Some(flush), error: None },
        Err(error) => Seen { monitoring, flush: None, error: Some(error.to_string()) },
    }
}

/// The least that any server promises; one that cannot be seen promises nothing.
fn flushing(seen: &[Seen]) -> Flushing {
    let each = seen.iter().map(|seen| match seen.flush {
        Some(Flush::Always) => Flushing::Always,
        Some(Flush::EveryMs(ms)) => Flushing::EveryMs(ms),
        None => Flushing::Unseen,
    });
    each.max().unwrap_or(Flushing::Unseen)
}

fn verdict(replicas: u32, flushing: Flushing) -> Vec<Survival> {
    let mut rows = vec![survival(
        "the end of a server process",
        Answer::Yes,
        "what is acknowledged was written to the system, which outlives the process",
    )];
    if replicas > 1 {
        rows.push(one_machine_of(replicas, flushing));
        rows.push(all_at_once("a power cut of all machines at once", flushing));
        rows.push(survival("the loss of one disk", Answer::Yes, "other servers hold the frame"));
    } else {
        rows.push(all_at_once("a power cut of the machine", flushing));
        rows.push(survival("the loss of the disk", Answer::No, "one server holds the frame"));
    }
    rows.push(survival(
        "damaged bytes on a disk",
        Answer::No,
        "nats-server may lose frames in the middle (its issue 7549); the chain of sums shows it, an archive mends it",
    ));
    rows
}

fn one_machine_of(replicas: u32, flushing: Flushing) -> Survival {
    let quorum = replicas / 2 + 1;
    let held = format!("at least {quorum} of {replicas} servers hold the frame");
    let because = match flushing {
        Flushing::Always => held,
        Flushing::EveryMs(_) | Flushing::Unseen => {
            held + "; without sync_interval: always, empty that machine's store before it joins again (issue 7567)"
        }
    };
    Survival { event: "a power cut of one machine", survives: Answer::Yes, because }
}

fn all_at_once(event: &'static str, flushing: Flushing) -> Survival {
    let (survives, because) = match flushing {
        Flushing::Always => (Answer::Yes, "sync_interval is always: on the disk before it is acknowledged".to_owned()),
        Flushing::EveryMs(ms) => {
            let lost =
                format!("the last {} s may not be on the disk; sync_interval: always would change that", seconds(ms));
            (Answer::No, lost)
        }
        Flushing::Unseen => (Answer::Unknown, UNSEEN.to_owned()),
    };
    Survival { event, survives, because }
}

fn seconds(ms: u64) -> f64 {
    std::time::Duration::from_millis(ms).as_secs_f64()
}

fn survival(event: &'static str, survives: Answer, because: &str) -> Survival {
    Survival { event, survives, because: because.to_owned() }
}

fn print(report: &Report) -> anyhow::Result<()> {
    match &report.server {
        Some(server) => table::print(&["the log", "JetStream"], server_rows(server, &report.flush))?,
        None => table::say("the log is embedded: one SQLite file of one process")?,
    }
    table::say("an acknowledged fact survives")?;
    table::print(&["what", "", "because"], report.survives.iter().map(survival_row))
}

fn server_rows(server: &Inspection, flush: &[Seen]) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let level = match server.api_level {
        0 => "not told (before 2.11)".to_owned(),
        level => level.to_string(),
    };
    let mut rows = vec![row("nats-server", server.version.clone()), row("API level", level)];
    match &server.stream {
        Some(stream) => rows.extend(stream_rows(stream)),
        None => rows.push(row("stream", "not made yet: the first append makes it".to_owned())),
    }
    rows.extend(flush.iter().map(|seen| row(&format!("flush to disk ({})", seen.monitoring), flush_text(seen))));
    rows
}

fn stream_rows(stream: &Standing) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let full = match stream.bytes_max {
        Some(max) => format!("{} of {max} ({} %)", stream.bytes, stream.bytes.saturating_mul(100) / max.max(1)),
        None => format!("{}, without a limit", stream.bytes),
    };
    let deleting = if stream.deny_delete { "refused" } else { "allowed to whoever may use the stream's API" };
    vec![
        row("replicas", format!("{}, {} up to date", stream.replicas, stream.replicas_current)),
        row("storage", stream.storage.clone()),
        row("when full", if stream.discard == "new" { "refuses new frames" } else { "loses old frames" }.to_owned()),
        row("bytes", full),
        row("frames", format!("{}, the last at sequence {}", stream.frames, stream.head)),
        row("deleting by hand", deleting.to_owned()),
    ]
}

fn flush_text(seen: &Seen) -> String {
    match (seen.flush, &seen.error) {
        (Some(Flush::Always), _) => "before each acknowledgement".to_owned(),
        (Some(Flush::EveryMs(ms)), _) => format!("every {} s", seconds(ms)),
        (None, error) => format!("{UNSEEN}: {}", error.as_deref().unwrap_or("no answer")),
    }
}

fn survival_row(survival: &Survival) -> Vec<String> {
    let answer = match survival.survives {
        Answer::Yes => "yes",
        Answer::No => "no",
        Answer::Unknown => "unknown",
    };
    vec![survival.event.to_owned(), answer.to_owned(), survival.because.clone()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(replicas: u32, flushing: Flushing) -> Vec<(&'static str, Answer)> {
        verdict(replicas, flushing).into_iter().map(|row| (row.event, row.survives)).collect()
    }

    #[test]
    fn one_server_keeps_a_fact_through_a_power_cut_only_if_it_flushes_first() {
        let event = "a power cut of the machine";
        for (flushing, answer) in [
            (Flushing::Always, Answer::Yes),
            (Flushing::EveryMs(120_000), Answer::No),
            (Flushing::Unseen, Answer::Unknown),
        ] {
            assert!(answers(1, flushing).contains(&(event, answer)), "{flushing:?}");
        }
        assert!(answers(1, Flushing::Always).contains(&("the loss of the disk", Answer::No)));
    }

    #[test]
    fn three_servers_keep_a_fact_through_the_end_of_one() {
        for flushing in [Flushing::Always, Flushing::EveryMs(120_000), Flushing::Unseen] {
            let answers = answers(3, flushing);
            assert!(answers.contains(&("a power cut of one machine", Answer::Yes)));
            assert!(answers.contains(&("the loss of one disk", Answer::Yes)));
        }
        assert!(answers(3, Flushing::EveryMs(10)).contains(&("a power cut of all machines at once", Answer::No)));
    }

    #[test]
    fn the_server_that_promises_least_counts() {
        let seen = |flush| Seen { monitoring: String::new(), flush, error: None };
        let (always, minute, unseen) = (Some(Flush::Always), Some(Flush::EveryMs(60_000)), None);
        assert_eq!(flushing(&[seen(always), seen(always)]), Flushing::Always);
        assert_eq!(flushing(&[seen(minute), seen(always), seen(Some(Flush::EveryMs(5)))]), Flushing::EveryMs(60_000));
        assert_eq!(flushing(&[seen(always), seen(unseen), seen(minute)]), Flushing::Unseen);
        assert_eq!(flushing(&[]), Flushing::Unseen);
    }

    #[test]
    fn the_monitoring_address_has_the_host_and_no_credentials() {
        for (url, address) in [
            ("nats://127.0.0.1:4222", "127.0.0.1:8222"),
            ("tls://user:secret@nats.example:4222", "nats.example:8222"),
            ("nats://nats.example", "nats.example:8222"),
            ("nats://[::1]:4222", "[::1]:8222"),
        ] {
            assert_eq!(usual_monitoring(url), address, "{url}");
        }
    }
}
