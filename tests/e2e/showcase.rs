//! What the page about the cluster tells a newcomer to type: `deploy/cluster.sh` starts it, each line of the page breaks or
//! mends a part, and a request is answered after each of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::program::{program, run};
use crate::world::{PATIENCE, binary};

/// How long the cluster may take to come up, on a machine that runs other tests.
const UP_SECONDS: u64 = 110;

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace")
}

/// A running cluster; dropped, it is ended by the script that has started it.
struct Showcase {
    home: TempDir,
    /// The request that the greeting shows.
    request: String,
}

impl Showcase {
    async fn up() -> Self {
        let home = TempDir::new().expect("a temporary folder can be made");
        // Postgres runs as a user of its own, who must find its files.
        let opened = Command::new("chmod").arg("755").arg(home.path()).status().await;
        assert!(opened.is_ok_and(|status| status.success()));
        // Curl reads its own settings from its home, so the line runs as it is printed.
        std::fs::write(home.path().join(".curlrc"), "silent\nshow-error\n").expect("curl's settings can be written");
        let mut showcase = Self { home, request: String::new() };
        let up = timeout(Duration::from_secs(UP_SECONDS), run(&mut showcase.script("deploy/cluster.sh up"))).await;
        let greeting = up.expect("the cluster comes up in time");
        let request = greeting.split("\n\n").find(|part| part.contains("curl -i "));
        showcase.request = request.expect("the greeting shows a request").to_owned();
        showcase
    }

    fn folder(&self) -> PathBuf {
        self.home.path().join("cluster")
    }

    /// A line for a shell in the workspace.
    fn script(&self, line: &str) -> Command {
        let mut shell = program(Path::new("bash"), self.home.path());
        shell.args(["-c", line]).current_dir(workspace());
        shell.env("CLUSTER", self.folder()).env("WAYBILL", binary());
        shell
    }

    /// Who answers the request; the answer is a good one.
    async fn served(&self) -> String {
        let answer = run(&mut self.script(&self.request)).await;
        let head = answer.to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 200 "), "{answer}");
        let line = head.lines().find_map(|line| line.strip_prefix("x-waybill-deployment: "));
        line.expect("the key may see who serves").to_owned()
    }
}

impl Drop for Showcase {
    fn drop(&mut self) {
        let mut down = std::process::Command::new("bash");
        down.args(["deploy/cluster.sh", "down"]).current_dir(workspace()).env("CLUSTER", self.folder());
        let ended = down.status();
        assert!(std::thread::panicking() || ended.is_ok_and(|status| status.success()), "the cluster goes down");
    }
}

/// The commands of the page's block that breaks things.
fn lines_of_the_page() -> Vec<String> {
    let text = std::fs::read_to_string(workspace().join("docs/cluster.md")).expect("the page can be read");
    let mut blocks = text.split("```").skip(1).step_by(2).filter(|block| block.contains("deploy/cluster.sh "));
    let block = blocks.next().expect("the page has lines to type");
    block.trim().lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn the_cluster_answers_after_each_line_of_its_page() {
    let lines = lines_of_the_page();
    assert!(lines.len() >= 10, "{lines:?}");
    let showcase = Showcase::up().await;
    let first = showcase.served().await;
    for line in &lines {
        run(&mut showcase.script(line)).await;
        showcase.served().await;
    }
    // All that was broken is whole, and the session is where it was, whichever gateway is asked.
    let back = async { while showcase.served().await != first {} };
    timeout(PATIENCE, back).await.expect("the session is where it was");
    let folder = showcase.folder();
    drop(showcase);
    assert!(!folder.exists(), "the folder is gone with the cluster");
}
