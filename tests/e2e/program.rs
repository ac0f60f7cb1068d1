//! Programs that are not ours, as a test runs them: from where they were installed, alone with their environment, and
//! never for ever.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

/// The longest run of one program. The longest of them takes a few seconds on a busy machine.
const RUN_SECONDS: u64 = 120;

/// A file that `tests/install.sh` installs, by its path under `tests/.installed`.
pub(crate) fn installed(path: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(".installed").join(path);
    assert!(file.exists(), "{} is missing: run `make test`, or `bash tests/install.sh` first", file.display());
    file
}

/// A program that sees nothing of this process's environment but where programs are, with `home` as its home.
pub(crate) fn program(file: &Path, home: &Path) -> Command {
    let mut command = Command::new(file);
    let path = std::env::var_os("PATH").expect("this process has a PATH");
    command.env_clear().env("PATH", path).env("HOME", home).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// Runs a program to its end and gives what it printed.
pub(crate) async fn run(command: &mut Command) -> String {
    let run = timeout(Duration::from_secs(RUN_SECONDS), command.output()).await;
    let ended = run.unwrap_or_else(|_| panic!("{command:?} did not end within {RUN_SECONDS} s"));
    let output = ended.unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    stdout
}

/// What a program printed, read as one JSON value a line.
pub(crate) fn facts(printed: &str) -> Vec<Value> {
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    printed.lines().map(read).collect()
}
