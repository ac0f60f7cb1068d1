//! A fleet: many `waybill gateway` and `waybill auditor` as processes of their own, over scripted upstreams and real
//! NATS servers, which belong to the test.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Output};

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use waybill_auditor::verify::{Verified, verify};
use waybill_events::jetstream::{JetstreamLog, Settings};

use crate::client::Client;
use crate::log::{Told, told_of};
use crate::process::{Process, binary};
use crate::upstreams::Upstreams;
use crate::world::{KEY, PATIENCE, Plan, SECRETS};

/// The stream that every fleet uses.
pub(crate) const STREAM: &str = "WAYBILL";
/// The most bytes of a stream that a test makes.
const STREAM_BYTES_MAX: u64 = 256 << 20;

/// Running gateways, their auditors and their upstreams.
pub(crate) struct Fleet {
    pub(crate) folder: TempDir,
    pub(crate) upstreams: Upstreams,
    servers: Vec<String>,
    replicas: u32,
    /// Where gateways listen; those that have no place in it, wherever a port is free.
    pub(crate) doors: Vec<SocketAddr>,
    gateways: Vec<Option<Process>>,
    auditors: Vec<Process>,
}

impl Fleet {
    /// Starts the upstreams of `plan`, an auditor that applies it, and so many gateways, on the log at `servers`.
    pub(crate) async fn start(plan: Plan, n_gateways: usize, servers: &[String]) -> Self {
        Self::start_replicated(plan, n_gateways, servers, 1).await
    }

    /// The same with so many replicas of the stream.
    pub(crate) async fn start_replicated(plan: Plan, n_gateways: usize, servers: &[String], replicas: u32) -> Self {
        let mut fleet = Self::prepare(&plan, servers, replicas).await;
        fleet.start_auditor().await;
        for n in 0..n_gateways {
            fleet.restart(n).await;
        }
        fleet
    }

    /// The upstreams and the configuration alone.
    pub(crate) async fn prepare(plan: &Plan, servers: &[String], replicas: u32) -> Self {
        let (upstreams, folder) =
            (Upstreams::start(plan).await, TempDir::new().expect("a temporary folder can be made"));
        let (servers, doors, gateways) = (servers.to_vec(), Vec::new(), Vec::new());
        let fleet = Self { folder, upstreams, servers, replicas, doors, gateways, auditors: Vec::new() };
        fleet.configure(plan);
        fleet
    }

    /// Writes the configuration, which the auditor follows.
    pub(crate) fn configure(&self, plan: &Plan) {
        let (servers, replicas) = (self.servers.join("', '"), self.replicas);
        let log = format!("log: {{ nats: ['{servers}'], stream: {STREAM}, replicas: {replicas}, mib_max: 256 }}\n");
        let text = format!("{log}deployment_secret: env:DEPLOYMENT_SECRET\n{}", plan.yaml(&self.upstreams));
        std::fs::write(self.config(), text).expect("the configuration can be written");
    }

    /// The configuration file.
    pub(crate) fn config(&self) -> PathBuf {
        self.folder.path().join("waybill.yaml")
    }

    /// Starts an auditor and waits until the log has the catalogue of the file.
    pub(crate) async fn start_auditor(&mut self) {
        let mut command = self.command(&["auditor", "--listen", "127.0.0.1:0"]);
        let auditor = Process::start(&mut command).await;
        ready_when(&Client::new(auditor.addr, KEY), |ready| ready["ready"] == true).await;
        self.auditors.push(auditor);
    }

    /// Kills all auditors.
    pub(crate) async fn kill_auditors(&mut self) {
        for auditor in self.auditors.drain(..) {
            auditor.kill().await;
        }
    }

    /// Starts gateway `n`, again where it has ended.
    pub(crate) async fn restart(&mut self, n: usize) {
        self.start_as(n, n).await;
    }

    /// Starts gateway `n`, on its own data folder but under the name of gateway `of`.
    pub(crate) async fn start_as(&mut self, n: usize, of: usize) {
        let process = Process::start(&mut self.command_gateway(n, of)).await;
        self.gateways.resize_with(self.gateways.len().max(n + 1), || None);
        self.gateways[n] = Some(process);
    }

    /// Starts gateway `n`, again where it has ended, so that it writes what it has to say about itself to `file`.
    pub(crate) async fn restart_talkative(&mut self, n: usize, file: File) {
        let mut command = self.command_gateway(n, n);
        self.gateways[n] = Some(Process::start(command.env("RUST_LOG", "info").stderr(file)).await);
    }

    /// Runs gateway `n` to an end that it comes to by itself, and gives what it said.
    pub(crate) async fn refused(&self, n: usize) -> Output {
        let run = tokio::time::timeout(PATIENCE, self.command_gateway(n, n).output()).await;
        run.expect("the gateway ends").expect("the gateway can be run")
    }

    /// Kills gateway `n` where it stands.
    pub(crate) async fn kill(&mut self, n: usize) {
        self.gateways[n].take().expect("the gateway runs").kill().await;
    }

    /// Ends gateway `n` as an operator would.
    pub(crate) async fn stop(&mut self, n: usize) {
        self.gateway(n).signal("TERM").await;
        let ended = self.ended(n).await;
        assert!(ended.success(), "gateway {n} ended with {ended}");
    }

    /// Ends all gateways as an operator would, so that all their facts are in the log.
    pub(crate) async fn stop_all(&mut self) {
        for n in 0..self.gateways.len() {
            if self.gateways[n].is_some() {
                self.stop(n).await;
            }
        }
    }

    /// Waits for the end of gateway `n`.
    pub(crate) async fn ended(&mut self, n: usize) -> ExitStatus {
        self.gateways[n].take().expect("the gateway runs").ended().await
    }

    /// Freezes gateway `n`.
    pub(crate) async fn freeze(&self, n: usize) {
        self.gateway(n).signal("STOP").await;
    }

    /// Lets a frozen gateway go on.
    pub(crate) async fn thaw(&self, n: usize) {
        self.gateway(n).signal("CONT").await;
    }

    /// Gateway `n`, to be kept by the caller while another takes its place.
    pub(crate) fn take(&mut self, n: usize) -> Process {
        self.gateways[n].take().expect("the gateway runs")
    }

    /// A client of gateway `n`.
    pub(crate) fn client(&self, n: usize) -> Client {
        Client::new(self.gateway(n).addr, KEY)
    }

    /// What gateway `n` says of itself once `holds` is true of it.
    pub(crate) async fn ready_when(&self, n: usize, holds: impl Fn(&Value) -> bool) -> Value {
        ready_when(&self.client(n), holds).await
    }

    /// The data folder of gateway `n`.
    pub(crate) fn data(&self, n: usize) -> PathBuf {
        self.folder.path().join(format!("gateway-{n}"))
    }

    /// All that the log says.
    pub(crate) async fn told(&self) -> Told {
        self.look(|log| told_of(log)).await
    }

    /// What the auditor finds in the log when it looks at every frame and fact.
    pub(crate) async fn verified(&self) -> Verified {
        self.look(|log| verify(log).expect("the log can be read")).await
    }

    /// What `look` makes of the log, on a thread where it may wait.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&mut JetstreamLog) -> T + Send + 'static,
    ) -> T {
        let (servers, stream, replicas) = (self.servers.clone(), STREAM.to_owned(), self.replicas);
        let settings = Settings { servers, stream, replicas, bytes_max: STREAM_BYTES_MAX };
        let looked = move || look(&mut JetstreamLog::new(settings).expect("a log can be made"));
        tokio::task::spawn_blocking(looked).await.expect("the log is whole")
    }

    /// Gateway `n` as a process.
    pub(crate) fn gateway(&self, n: usize) -> &Process {
        self.gateways[n].as_ref().expect("the gateway runs")
    }

    fn command_gateway(&self, n: usize, of: usize) -> Command {
        let door = self.doors.get(n).map_or("127.0.0.1:0".to_owned(), SocketAddr::to_string);
        let mut command = self.command(&["gateway", "--listen", &door, "--data"]);
        command.arg(self.data(n)).arg("--writer").arg(format!("gw-{of}"));
        command
    }

    /// A command of the binary with the fleet's configuration.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command
            .args(args)
            .env("WAYBILL_CONFIG", self.config())
            .envs(SECRETS)
            .env("RUST_LOG", "warn")
            .kill_on_drop(true);
        command
    }
}

/// What the process behind `client` says of itself once `holds` is true of it.
pub(crate) async fn ready_when(client: &Client, holds: impl Fn(&Value) -> bool) -> Value {
    let held = async {
        loop {
            let ready = client.get("/readyz", &[]).await.json();
            if holds(&ready) {
                return ready;
            }
        }
    };
    tokio::time::timeout(PATIENCE, held).await.expect("the process comes to be so")
}
