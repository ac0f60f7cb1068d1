//! redis-server: one of our own, whatever else runs on the machine.

use std::fs::File;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::port;
use crate::process::{Process, StartError, find};

const PACKAGE: &str = "redis-server of the system";
/// How often other ports are tried where one was taken between its choice and its use.
const STARTS_MAX: usize = 5;

/// What it keeps over its death, and when that reaches the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeps {
    /// Nothing.
    #[default]
    Nothing,
    /// Every command that it had answered (`appendfsync always`).
    Always,
    /// All but the last second (`appendfsync everysec`).
    EverySecond,
    /// What the system got round to write (`appendfsync no`).
    Sometimes,
}

/// What differs from a plain server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// What it keeps.
    pub keeps: Keeps,
}

/// One redis-server.
#[derive(Debug)]
pub struct Redis {
    binary: PathBuf,
    port: u16,
    options: Options,
    folder: TempDir,
    process: Option<Process>,
}

impl Redis {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// Where it does not start: the message says why, and what to install.
    pub fn start(options: &Options) -> Self {
        let mut started = Self::try_start(options);
        for _ in 1..STARTS_MAX {
            let is_taken = matches!(&started, Err(StartError::Ended(said)) if said.contains("Address already in use"));
            if !is_taken {
                break;
            }
            started = Self::try_start(options);
        }
        started.unwrap_or_else(|error| panic!("redis-server: {error}"))
    }

    fn try_start(options: &Options) -> Result<Self, StartError> {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let binary = find("redis-server", PACKAGE)?;
        let mut redis = Self { binary, port: port::free(), options: *options, folder, process: None };
        redis.run()?;
        Ok(redis)
    }

    fn run(&mut self) -> Result<(), StartError> {
        let (append, fsync) = match self.options.keeps {
            Keeps::Nothing => ("no", "no"),
            Keeps::Always => ("yes", "always"),
            Keeps::EverySecond => ("yes", "everysec"),
            Keeps::Sometimes => ("yes", "no"),
        };
        let (port, folder) = (self.port.to_string(), self.folder.path().display().to_string());
        let args = [
            ["--bind", "127.0.0.1"],
            ["--port", &port],
            ["--dir", &folder],
            ["--save", ""],
            ["--appendonly", append],
            ["--appendfsync", fsync],
            ["--aof-load-truncated", "yes"],
            ["--aof-use-rdb-preamble", "no"],
        ];
        let log = self.folder.path().join("redis.log");
        let process = self.process.insert(Process::start(&self.binary, args.as_flattened(), &log)?);
        process.wait_until(|| crate::process::answers(self.port, b"PING\r\n", b"+PONG"))
    }

    /// Where clients connect.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Kills it at once (SIGKILL), where it runs.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Freezes it (SIGSTOP): its connections stay open and nothing is answered.
    pub fn stop(&self) {
        self.running().signal("STOP");
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn cont(&self) {
        self.running().signal("CONT");
    }

    /// Starts it again on the same port and files, after killing it where it runs, and waits until it answers.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn restart(&mut self) {
        self.kill();
        self.run().unwrap_or_else(|error| panic!("redis-server: {error}"));
    }

    /// Forgets everything (FLUSHALL).
    ///
    /// # Panics
    /// Where it does not say that it has.
    pub fn flush(&self) {
        assert!(crate::process::answers(self.port, b"FLUSHALL\r\n", b"+OK"), "the server does not forget");
    }

    /// Ends every client's connection but the one that asks for it.
    ///
    /// # Panics
    /// Where it does not say that it has.
    pub fn drop_clients(&self) {
        assert!(crate::process::answers(self.port, b"CLIENT KILL TYPE normal\r\n", b":"), "the clients stay");
    }

    /// Cuts `bytes` off the end of the file of commands that a killed server left, all of it where it is shorter.
    ///
    /// # Panics
    /// Where there is no such file.
    pub fn cut_append_file(&self, bytes: u64) {
        let folder = self.folder.path().join("appendonlydir");
        let files = std::fs::read_dir(folder).expect("the server keeps a file of commands");
        let mut paths = files.map(|entry| entry.expect("the folder can be read").path());
        let path = paths.find(|path| path.to_string_lossy().ends_with(".incr.aof")).expect("the file is there");
        let file = File::options().write(true).open(path).expect("the file can be opened");
        let len = file.metadata().expect("the file has a length").len();
        file.set_len(len.saturating_sub(bytes)).expect("the file can be cut");
    }

    /// The length in bytes of what [`cut_append_file`](Self::cut_append_file) cuts.
    ///
    /// # Panics
    /// Where there is no such file.
    pub fn append_file_bytes(&self) -> u64 {
        let folder = self.folder.path().join("appendonlydir");
        let files = std::fs::read_dir(folder).expect("the server keeps a file of commands");
        let sizes = files.map(|entry| entry.expect("the folder can be read"));
        let incremental = sizes.filter(|entry| entry.file_name().to_string_lossy().ends_with(".incr.aof"));
        incremental.map(|entry| entry.metadata().expect("the file has a length").len()).sum()
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server runs")
    }
}
