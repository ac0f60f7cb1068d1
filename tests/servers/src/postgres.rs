//! PostgreSQL: one server in a folder of its own, which forgets what it holds only when it is dropped.
//!
//! Postgres does not run as root. There it runs as the user `postgres` that its package makes, who owns the folder.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::port;
use crate::process::{Process, StartError, find_among};

const PACKAGE: &str = "postgresql";
const VERSIONS: &str = "/usr/lib/postgresql";
/// The user whom Debian's package makes.
const USER: &str = "postgres";
/// How often it is started again where a port was taken, or where processes of a killed one still hold its files.
const STARTS_MAX: usize = 50;
/// What a server says that finds the files of a killed one still in use.
const STILL_HELD: [&str; 2] = ["pre-existing shared memory block", "lock file \"postmaster.pid\" already exists"];

/// What differs from a plain server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Lines for `postgresql.conf`, such as `max_connections = 20`.
    pub server: &'static str,
}

/// One PostgreSQL server; it trusts every caller from this machine, and syncs nothing to the disk.
#[derive(Debug)]
pub struct Postgres {
    folder: TempDir,
    port: u16,
    n_databases: AtomicU32,
    process: Option<Process>,
}

impl Postgres {
    /// Starts a server and waits until it takes connections.
    ///
    /// # Panics
    /// Where it does not start: the message says why, and what to install.
    pub fn start(options: &Options) -> Self {
        let started = Self::prepare(options).and_then(|mut server| server.run().map(|()| server));
        started.unwrap_or_else(|error| panic!("postgres: {error}"))
    }

    /// Where clients connect: to a database `postgres` without anything in it.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// Makes another database without anything in it, and says where it is.
    ///
    /// # Panics
    /// Where the server does not make it.
    pub fn database(&self) -> String {
        let name = format!("d{}", self.n_databases.fetch_add(1, Ordering::Relaxed));
        let port = self.port.to_string();
        let made = Command::new(binary("createdb").unwrap_or_else(|error| panic!("{error}")))
            .args(["--host=127.0.0.1", "--username=waybill", "--port", &port, &name])
            .status();
        assert!(made.is_ok_and(|status| status.success()), "the database was not made");
        self.url_of(&name)
    }

    /// Kills it at once (SIGKILL) with the processes of all its connections, where it runs.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.signal_family("KILL");
        }
    }

    /// Freezes it (SIGSTOP): its connections stay open and nothing is answered.
    pub fn stop(&self) {
        self.running().signal_family("STOP");
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn cont(&self) {
        self.running().signal_family("CONT");
    }

    /// Starts it again on the same port and files, after killing it where it runs, and waits until it is ready.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn restart(&mut self) {
        self.kill();
        self.run().unwrap_or_else(|error| panic!("postgres: {error}"));
    }

    fn prepare(options: &Options) -> Result<Self, StartError> {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        give_away(folder.path())?;
        let server = Self { folder, port: port::free(), n_databases: AtomicU32::new(0), process: None };
        let data = server.data();
        let args = ["-A", "trust", "-U", "waybill", "--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C"];
        let (program, args) = as_user(binary("initdb")?, ["-D".as_ref(), data.as_os_str()], &args);
        let made = Command::new(&program).args(args).output().map_err(|error| StartError::Run(program, error))?;
        if !made.status.success() {
            return Err(StartError::Ended(String::from_utf8_lossy(&made.stderr).into_owned()));
        }
        let config = format!(
            "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\nfsync = off\nfull_page_writes = off\n\
             synchronous_commit = off\nshared_buffers = 32MB\n{}\n",
            options.server
        );
        std::fs::write(data.join("postgresql.auto.conf"), config).expect("a temporary folder takes a file");
        Ok(server)
    }

    fn run(&mut self) -> Result<(), StartError> {
        let mut started = self.run_once();
        for _ in 1..STARTS_MAX {
            match &started {
                Err(StartError::Ended(said)) if said.contains("Address already in use") => self.port = port::free(),
                Err(StartError::Ended(said)) if STILL_HELD.iter().any(|held| said.contains(held)) => {}
                Ok(()) | Err(_) => break,
            }
            started = self.run_once();
        }
        started
    }

    fn run_once(&mut self) -> Result<(), StartError> {
        let (data, log, port) = (self.data(), self.folder.path().join("postgres.log"), self.port.to_string());
        // What an earlier one said must not be taken for this one's reason to end.
        let _ = std::fs::remove_file(&log);
        let (program, args) = as_user(binary("postgres")?, ["-D".as_ref(), data.as_os_str()], &["-p", &port]);
        let mut process = Process::start(&program, &args, &log)?;
        let ask = binary("pg_isready")?;
        let ready = || {
            let mut asked = Command::new(&ask);
            asked.args(["--quiet", "--host=127.0.0.1", "--dbname=postgres", "--timeout=2", "--port", &port]);
            asked.status().is_ok_and(|status| status.success())
        };
        process.wait_until(ready)?;
        self.process = Some(process);
        Ok(())
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn url_of(&self, database: &str) -> String {
        format!("postgres://waybill@127.0.0.1:{}/{database}", self.port)
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server runs")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The newest installed `name`, else the one in the path: Debian keeps the server's binaries out of it.
fn binary(name: &'static str) -> Result<PathBuf, StartError> {
    let versions = std::fs::read_dir(VERSIONS).into_iter().flatten().filter_map(Result::ok);
    let number = |folder: &Path| folder.file_name().and_then(OsStr::to_str).and_then(|name| name.parse::<u32>().ok());
    let mut folders: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
    folders.sort_by_key(|folder| std::cmp::Reverse(number(folder)));
    find_among(folders.iter().map(|folder| folder.join("bin")), name, PACKAGE)
}

/// Lets the user of the server own `folder`, where we are root.
fn give_away(folder: &Path) -> Result<(), StartError> {
    if !is_root() {
        return Ok(());
    }
    let given = Command::new("chown").arg(USER).arg(folder).status();
    let missing = StartError::Missing { binary: "the user `postgres`", package: PACKAGE };
    given.is_ok_and(|status| status.success()).then_some(()).ok_or(missing)
}

/// How to run `binary` as a user who is not root; the process that starts is its own.
fn as_user(binary: PathBuf, first: [&OsStr; 2], then: &[&str]) -> (PathBuf, Vec<OsString>) {
    let args = first.into_iter().chain(then.iter().map(OsStr::new)).map(OsStr::to_owned);
    if !is_root() {
        return (binary, args.collect());
    }
    let user = [format!("--reuid={USER}"), format!("--regid={USER}"), "--clear-groups".to_owned()];
    let prefix = user.into_iter().map(OsString::from).chain([binary.into_os_string()]);
    (PathBuf::from("setpriv"), prefix.chain(args).collect())
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout == b"0\n")
}
