//! A server's process: found, started, asked whether it is ready, signalled, ended.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// How often a server is asked whether it is ready, and how long apart: half a minute in all.
const POLLS_MAX: u32 = 6_000;
const POLL_EVERY: Duration = Duration::from_millis(5);
/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its binary is neither in the path nor installed for the tests.
    #[error("{binary} is missing: run `bash tests/install.sh`, which installs the package {package}")]
    Missing {
        /// The file that was looked for.
        binary: &'static str,
        /// What installs it.
        package: &'static str,
    },
    /// The system does not run it.
    #[error("{0} cannot be run")]
    Run(PathBuf, #[source] std::io::Error),
    /// It ended before it was ready.
    #[error("the server ended before it was ready; it said:\n{0}")]
    Ended(String),
    /// It did not become ready in time.
    #[error("the server did not become ready; it said:\n{0}")]
    NotReady(String),
}

/// The path of `binary`: as `tests/install.sh` installed it, else as the path has it.
pub(crate) fn find(binary: &'static str, package: &'static str) -> Result<PathBuf, StartError> {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.installed/bin");
    find_among(std::iter::once(installed), binary, package)
}

/// The path of `binary` in the first of `folders` that has it, else as the path has it.
pub(crate) fn find_among(
    folders: impl Iterator<Item = PathBuf>,
    binary: &'static str,
    package: &'static str,
) -> Result<PathBuf, StartError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folders.chain(std::env::split_paths(&path));
    let mut files = folders.map(|folder| folder.join(binary));
    let found = files.find(|file| file.is_file());
    found.ok_or(StartError::Missing { binary, package })
}

/// A running process; dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `binary`, whose output goes to the end of the file `log`.
    pub(crate) fn start<S: AsRef<OsStr>>(binary: &Path, args: &[S], log: &Path) -> Result<Self, StartError> {
        Self::start_with(binary, args, &[], log)
    }

    /// The same with further variables in its environment.
    pub(crate) fn start_with<S: AsRef<OsStr>>(
        binary: &Path,
        args: &[S],
        env: &[(String, String)],
        log: &Path,
    ) -> Result<Self, StartError> {
        let failed = |error| StartError::Run(binary.to_owned(), error);
        let output = File::options().create(true).append(true).open(log).map_err(failed)?;
        let errors = output.try_clone().map_err(failed)?;
        let mut command = Command::new(binary);
        command
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        Ok(Self { child: command.spawn().map_err(failed)?, log: log.to_owned() })
    }

    /// Waits until `GET path` at `port` answers 200.
    pub(crate) fn wait_until_healthy(&mut self, port: u16, path: &str) -> Result<(), StartError> {
        self.wait_until(|| get(port, path).is_some_and(|answer| answer.split(' ').nth(1) == Some("200")))
    }

    /// Waits until it is `ready`, or has ended.
    pub(crate) fn wait_until(&mut self, ready: impl Fn() -> bool) -> Result<(), StartError> {
        for _ in 0..POLLS_MAX {
            if ready() {
                return Ok(());
            }
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Err(StartError::Ended(self.said()));
            }
            thread::park_timeout(POLL_EVERY);
        }
        Err(StartError::NotReady(self.said()))
    }

    /// Sends the signal called `name`, such as `STOP`.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the signal {name} was not sent");
    }

    /// Sends the signal called `name` to it first and then to the processes that it has started.
    pub(crate) fn signal_family(&self, name: &str) {
        let listed = Command::new("pgrep").args(["-P", &self.child.id().to_string()]).output();
        let children = listed.map(|listed| listed.stdout).unwrap_or_default();
        self.signal(name);
        for child in String::from_utf8_lossy(&children).split_whitespace() {
            // One that has ended meanwhile needs no signal.
            let _ = Command::new("kill").args(["-s", name, child]).stderr(Stdio::null()).status();
        }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Where it has ended by itself there is nothing to kill, and its end stands in its log.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether what listens at `port` answers `ask` with what begins with `answer`.
pub(crate) fn answers(port: u16, ask: &[u8], answer: &[u8]) -> bool {
    let mut said = vec![0; answer.len()];
    let asked = connect(port).and_then(|mut stream| {
        stream.write_all(ask).ok()?;
        stream.read_exact(&mut said).ok()
    });
    asked.is_some() && said == answer
}

fn connect(port: u16) -> Option<TcpStream> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    Some(stream)
}

/// The answer to `GET path`; nothing where there is none.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = connect(port)?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}
