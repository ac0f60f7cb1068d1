//! What the README tells a newcomer to type is answered by the demo.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::client::Client;
use crate::program::{facts, program, run};
use crate::world::binary;

/// Where `make up` listens.
const DOOR: &str = "127.0.0.1:4000";
/// How long the demo may take to come up.
const UP_SECONDS: u64 = 60;

/// A running demo, as `make up` starts it but for its port and folder.
struct Demo {
    folder: TempDir,
    addr: String,
    key: String,
    _process: Child,
    _greeting: Lines<BufReader<ChildStdout>>,
}

impl Demo {
    async fn up() -> Self {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let mut process = command(&folder).env("RUST_LOG", "warn").spawn().expect("the demo starts");
        let mut lines = BufReader::new(process.stdout.take().expect("stdout is piped")).lines();
        let (mut addr, mut key) = (None, None);
        while addr.is_none() || key.is_none() {
            let line =
                timeout(Duration::from_secs(UP_SECONDS), lines.next_line()).await.expect("the demo greets in time");
            let line = line.expect("the greeting can be read").expect("the greeting has an address and a key");
            addr = addr.or_else(|| line.strip_prefix("waybill is up at http://").map(str::to_owned));
            let after = line.split_once("Bearer ").map(|(_, rest)| rest);
            key = key.or_else(|| after.and_then(|rest| rest.split('\'').next()).map(str::to_owned));
        }
        let (addr, key) = (addr.expect("just found"), key.expect("just found"));
        Self { folder, addr, key, _process: process, _greeting: lines }
    }

    /// Runs a line of the README in a shell; gives the body of the answer after its status was 200.
    async fn answer(&self, line: &str) -> String {
        let home = self.folder.path();
        let door = format!("http://{DOOR}");
        assert!(line.contains(&door), "the README asks elsewhere than at {door}: {line}");
        let line = line.replace(&door, &format!("http://{}", self.addr));
        // Curl reads its own settings from its home, so the line runs as it is written.
        std::fs::write(home.join(".curlrc"), "silent\nshow-error\nwrite-out = \"\\n%{http_code}\"\n")
            .expect("curl's settings can be written");
        let mut shell = program(Path::new("sh"), home);
        let printed = run(shell.arg("-c").arg(&line).env("KEY", &self.key)).await;
        let (body, status) = printed.rsplit_once('\n').expect("curl writes the status last");
        assert_eq!(status, "200", "{line}: {body}");
        body.to_owned()
    }
}

fn command(folder: &TempDir) -> Command {
    let mut command = Command::new(binary());
    command.args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(folder.path().join("data"));
    command.stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// The commands of the README's one block with curl in it.
fn lines_of_the_readme() -> Vec<String> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").join("README.md");
    let text = std::fs::read_to_string(file).expect("the README can be read");
    let mut blocks = text.split("```").skip(1).step_by(2).filter(|block| block.contains("curl "));
    let block = blocks.next().expect("the README has curl lines");
    block.trim().split("\n\n").map(str::to_owned).collect()
}

/// The names of a stream's events, and the data of its lines that are JSON.
fn stream(body: &str) -> (Vec<&str>, String) {
    let names = body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    (names, data.join("\n"))
}

/// Each line as it stands, and in the other form: the README says how `"stream":true` makes one of the other.
#[tokio::test]
async fn the_curl_lines_of_the_readme_are_answered() {
    let curl = Command::new("curl").arg("--version").output().await;
    assert!(curl.is_ok(), "curl is missing: install the package `curl`, or run `make test` as root");
    let lines = lines_of_the_readme();
    let [chat, responses, messages] = lines.as_slice() else { panic!("the README has not three lines: {lines:#?}") };
    let demo = Demo::up().await;

    let answer = demo.answer(chat).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("the first line asks for the head");
    let head = head.to_ascii_lowercase();
    assert!(head.contains("x-waybill-deployment: ") && head.contains("x-session-id: "), "{head}");
    says_something(body, "/choices/0/message/content");
    let streamed = demo.answer(&chat.replace("{\"model\"", "{\"stream\":true,\"model\"")).await;
    let (_, body) = streamed.split_once("\r\n\r\n").expect("the first line asks for the head");
    let (_, data) = stream(body);
    let chunks = data.strip_suffix("\n[DONE]").expect("the stream has its end");
    assert!(facts(chunks).len() > 1, "{body}");

    let whole = |line: &str| line.replace(",\"stream\":true", "");
    let answer = demo.answer(responses).await;
    let (names, data) = stream(&answer);
    assert_eq!((names.first(), names.last()), (Some(&"response.created"), Some(&"response.completed")));
    assert_eq!(facts(&data).len(), names.len());
    says_something(&demo.answer(&whole(responses)).await, "/output/0/content/0/text");

    let answer = demo.answer(messages).await;
    let (names, data) = stream(&answer);
    assert_eq!((names.first(), names.last()), (Some(&"message_start"), Some(&"message_stop")));
    assert_eq!(facts(&data).len(), names.len());
    says_something(&demo.answer(&whole(messages)).await, "/content/0/text");
}

/// Checks that the answer is one JSON object with a text at `pointer`.
#[track_caller]
fn says_something(body: &str, pointer: &str) {
    let answer = &facts(body)[0];
    assert!(answer.pointer(pointer).and_then(|text| text.as_str()).is_some_and(|text| !text.is_empty()), "{body}");
}

#[tokio::test]
async fn the_demo_serves_though_nobody_reads_its_greeting() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let mut process = command(&folder)
        .envs([("RUST_LOG", "info"), ("NO_COLOR", "1")])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the demo starts");
    drop(process.stdout.take());
    let mut log = BufReader::new(process.stderr.take().expect("stderr is piped")).lines();
    let addr = loop {
        let line = timeout(Duration::from_secs(UP_SECONDS), log.next_line()).await.expect("the demo starts in time");
        let line = line.expect("the log can be read").expect("the demo says where it listens before it ends");
        if let Some((_, addr)) = line.split_once("serving listen=") {
            break addr.to_owned();
        }
    };
    let answer = Client::new(addr.parse().expect("an address"), "").get("/healthz", &[]).await;
    assert_eq!(answer.status, 200);
}
