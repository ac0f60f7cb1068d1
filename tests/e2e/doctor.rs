//! `waybill doctor` against real servers: what an acknowledgement means, in words and as JSON.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::log::Log;
use waybill_servers::nats::{Nats, NatsCluster, Options};

use super::world::binary;

/// A configuration file whose log is on `servers`.
fn configuration(dir: &TempDir, servers: &[String], replicas: u32) -> PathBuf {
    let file = dir.path().join("waybill.yaml");
    let secret = "deployment_secret: \"env:DOCTOR_SECRET\"";
    let log = format!("log: {{ nats: {servers:?}, stream: WAYBILL, replicas: {replicas} }}");
    std::fs::write(&file, format!("{secret}\n{log}\n")).unwrap();
    file
}

fn doctor(args: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.arg("doctor").args(args).env("DOCTOR_SECRET", "0123456789abcdef0123456789abcdef");
    command.output().unwrap()
}

fn report(args: &[&str]) -> Value {
    let output = doctor(args);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn answer<'a>(report: &'a Value, event: &str) -> &'a Value {
    let rows = report["survives"].as_array().unwrap();
    &rows.iter().find(|row| row["event"] == event).unwrap_or_else(|| panic!("{event}: {report}"))["survives"]
}

fn make_stream(servers: &[String], replicas: u32) {
    let settings = Settings { servers: servers.to_vec(), stream: "WAYBILL".into(), replicas, bytes_max: 1 << 20 };
    JetstreamLog::new(settings).unwrap().head().unwrap();
}

#[test]
fn doctor_says_what_one_server_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(&Options { jetstream: "sync_interval: always", ..Options::default() });
    let servers = [nats.url()];
    let file = configuration(&dir, &servers, 1);
    let monitoring = nats.monitoring_url().replace("http://", "");
    let args = ["--config", file.to_str().unwrap(), "--monitoring", &monitoring, "--json"];
    assert_eq!(report(&args)["server"]["stream"], Value::Null, "doctor makes no stream");
    make_stream(&servers, 1);
    let report = report(&args);
    assert_eq!((&report["log"], &report["server"]["version"]), (&json!("jetstream"), &json!("2.15.1")));
    let stream = &report["server"]["stream"];
    assert_eq!(
        (&stream["replicas"], &stream["discard"], &stream["bytes_max"]),
        (&json!(1), &json!("new"), &json!(1 << 20))
    );
    assert_eq!(report["flush"][0]["flush"], "always");
    assert_eq!(answer(&report, "the end of a server process"), "yes");
    assert_eq!(answer(&report, "a power cut of the machine"), "yes");
    assert_eq!(answer(&report, "the loss of the disk"), "no");
    let output = doctor(&args[..4]);
    let words = String::from_utf8(output.stdout).unwrap();
    for said in ["an acknowledged fact survives", "2.15.1", "before each acknowledgement", "refuses new frames"] {
        assert!(words.contains(said), "{said}: {words}");
    }
}

#[test]
fn doctor_says_what_three_servers_keep_and_what_it_cannot_see() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = NatsCluster::start(3);
    make_stream(&cluster.urls(), 3);
    let file = configuration(&dir, &cluster.urls(), 3);
    // Nothing listens at the port of a server that does not exist.
    let report = report(&["--config", file.to_str().unwrap(), "--monitoring", "127.0.0.1:1", "--json"]);
    assert_eq!(report["server"]["stream"]["replicas"], 3);
    assert_eq!(report["flush"][0]["flush"], Value::Null);
    assert_eq!(answer(&report, "a power cut of one machine"), "yes");
    assert_eq!(answer(&report, "a power cut of all machines at once"), "unknown");
}

#[test]
fn doctor_fails_where_the_stream_is_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(&Options::default());
    make_stream(&[nats.url()], 1);
    let output = doctor(&["--config", configuration(&dir, &[nats.url()], 3).to_str().unwrap()]);
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("num_replicas is 1, and must be at least 3"), "{said}");
}

#[test]
fn doctor_fails_where_no_server_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut nats = Nats::start(&Options::default());
    nats.kill();
    let output = doctor(&["--config", configuration(&dir, &[nats.url()], 1).to_str().unwrap()]);
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("not connected to a server"), "{said}");
}

#[test]
fn doctor_says_what_the_embedded_log_keeps() {
    let report = report(&["--json"]);
    assert_eq!(report["log"], "embedded");
    assert_eq!(answer(&report, "the end of the process"), "yes");
    assert_eq!(answer(&report, "a power cut"), "no");
}
