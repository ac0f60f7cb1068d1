//! The binary under test as a process of its own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::world::PATIENCE;

/// A process of the binary that has said where it listens.
pub(crate) struct Process {
    child: Child,
    /// Where it listens.
    pub(crate) addr: SocketAddr,
}

impl Process {
    /// Starts `command` and waits until it listens.
    pub(crate) async fn start(command: &mut Command) -> Self {
        Self::meet(command.stdout(Stdio::piped()).spawn().expect("the binary starts")).await
    }

    /// Waits until a process that was started listens.
    async fn meet(mut child: Child) -> Self {
        let stdout = child.stdout.take().expect("stdout is piped");
        let mut lines = BufReader::new(stdout).lines();
        let addr = loop {
            let line = lines.next_line().await.expect("the binary's output can be read");
            let line = line.expect("the binary says where it listens before it ends");
            if let Some((_, addr)) = line.split_once(" is up at http://") {
                break addr.parse().expect("the binary names its address");
            }
        };
        Self { child, addr }
    }

    /// Its number on this machine.
    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("the process runs")
    }

    /// How much memory it holds now, in KiB.
    pub(crate) fn memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process holds memory");
        let number = line.split_whitespace().next().and_then(|number| number.parse().ok());
        number.expect("the system says how much")
    }

    /// Sends the signal called `name`, such as `TERM`.
    pub(crate) async fn signal(&self, name: &str) {
        let pid = self.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().await.expect("kill runs");
        assert!(sent.success());
    }

    /// Kills it where it stands.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("the process can be killed");
    }

    /// Waits for its end.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("the process ends");
        ended.expect("the process can be waited for")
    }
}

/// The binary under test: built by `make test` beside the test binaries.
pub(crate) fn binary() -> PathBuf {
    let tests = std::env::current_exe().expect("a test knows its own file");
    let binary = tests.parent().and_then(std::path::Path::parent).expect("tests lie in deps/").join("waybill");
    assert!(binary.exists(), "{} is missing: run `make test`, or `cargo build -p waybill` first", binary.display());
    binary
}
