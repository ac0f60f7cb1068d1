//! A world: one `waybill up` with a configuration of the test's own, over scripted upstreams, in a temporary folder.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use waybill_simulator::{Call, Running, Settings};

use crate::client::Client;
use crate::process::Process;
pub(crate) use crate::process::binary;
use crate::upstreams::Upstreams;

/// How long anything that must happen may take before a test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// What every channel of a world speaks.
pub(crate) const EVERY_DIALECT: &str =
    "chat, responses, messages, embeddings, completions, images, audio, videos, music, moderations, rerank";
/// The secret of the one key of every world.
pub(crate) const KEY: &str = "sk-world";

/// The operator's token, where a world's settings name it.
pub(crate) const ADMIN_TOKEN: &str = "sk-admin";

/// The environment of the binary.
pub(crate) const SECRETS: [(&str, &str); 7] = [
    ("ADMIN_TOKEN", ADMIN_TOKEN),
    ("TESTER_KEY", KEY),
    ("OTHER_KEY", "sk-other"),
    ("BOTH_KEY", "sk-both"),
    ("LIMITED_KEY", "sk-limited"),
    ("UPSTREAM_KEY", "sk-upstream"),
    ("DEPLOYMENT_SECRET", "a secret of all gateways"),
];

/// A running gateway and its upstreams.
pub(crate) struct World {
    pub(crate) folder: TempDir,
    pub(crate) upstreams: Upstreams,
    config: PathBuf,
    gateway: Option<Process>,
}

/// What a world is made of.
pub(crate) struct Plan {
    /// The upstreams, each a channel of the same name.
    pub(crate) upstreams: Vec<Settings>,
    /// The configuration's text before `catalogue:`.
    pub(crate) settings: String,
    /// What a member of the route `gpt` says beside its channel and group, by upstream; `-` for none.
    pub(crate) members: Vec<String>,
    /// Further fields of the route `gpt`.
    pub(crate) route: String,
    /// Further fields of the group.
    pub(crate) group: String,
    /// Further fields of every channel.
    pub(crate) channel: String,
    /// Further rows of the catalogue, each one line of YAML.
    pub(crate) rows: Rows,
}

/// Rows of a catalogue beside those that every world has.
#[derive(Default)]
pub(crate) struct Rows {
    pub(crate) channels: Vec<String>,
    pub(crate) groups: Vec<String>,
    pub(crate) routes: Vec<String>,
    pub(crate) keys: Vec<String>,
    pub(crate) teams: Vec<String>,
    pub(crate) organizations: Vec<String>,
    pub(crate) templates: Vec<String>,
}

impl Plan {
    /// Upstreams with equal weights and quick retries.
    pub(crate) fn of(names: &[&str]) -> Self {
        Self {
            upstreams: names.iter().map(|name| Settings::named(name)).collect(),
            settings: "retry: { backoff_ms: 1 }\n".to_owned(),
            members: names.iter().map(|_| "priority: 10".to_owned()).collect(),
            route: String::new(),
            group: String::new(),
            channel: String::new(),
            rows: Rows::default(),
        }
    }

    /// The same with other settings.
    pub(crate) fn settings(self, settings: &str) -> Self {
        Self { settings: settings.to_owned(), ..self }
    }

    /// The configuration's text over these upstreams.
    pub(crate) fn yaml(&self, upstreams: &[Running]) -> String {
        let mut channels = String::new();
        let mut members = String::new();
        for ((settings, running), member) in self.upstreams.iter().zip(upstreams).zip(&self.members) {
            let name = &settings.name;
            channels.push_str(&format!(
                "    - {{ id: {name}, base_url: 'http://{}/v1', dialects: [{EVERY_DIALECT}], \
                 api_keys: ['env:UPSTREAM_KEY'], models: [gpt], {} }}\n",
                running.addr, self.channel
            ));
            if member != "-" {
                members.push_str(&format!("        - {{ channel: {name}, group: main, {member} }}\n"));
            }
        }
        let lines = |rows: &[String]| rows.iter().map(|row| format!("    - {row}\n")).collect::<String>();
        let Rows { channels: more, groups, routes, keys, templates, teams, organizations } = &self.rows;
        let section = |name: &str, rows: &[String]| match rows {
            [] => String::new(),
            rows => format!("  {name}:\n{}", lines(rows)),
        };
        channels.push_str(&lines(more));
        let route = if self.route.is_empty() { String::new() } else { format!("      {}\n", self.route) };
        format!(
            "{}\ncatalogue:\n  channels:\n{channels}  groups:\n    - {{ id: main, {} }}\n{}  routes:\n    - \
             model: gpt\n{route}      members:\n{members}{}{}  keys:\n    - {{ id: tester, key: 'env:TESTER_KEY', group: main, expose_route: true }}\n    \
             - {{ id: other, key: 'env:OTHER_KEY', group: main, expose_route: true }}\n{}{}{}",
            self.settings,
            self.group,
            lines(groups),
            lines(routes),
            section("templates", templates),
            lines(keys),
            section("teams", teams),
            section("organizations", organizations)
        )
    }
}

impl World {
    /// Starts the upstreams, writes the configuration and starts the gateway.
    pub(crate) async fn start(plan: Plan) -> Self {
        let upstreams = Upstreams::start(&plan).await;
        let folder = TempDir::new().expect("a temporary folder can be made");
        let config = folder.path().join("waybill.yaml");
        let mut world = Self { folder, upstreams, config, gateway: None };
        world.configure(&plan);
        world.restart().await;
        world
    }

    /// Writes the configuration that the next start reads.
    pub(crate) fn configure(&self, plan: &Plan) {
        self.write(plan, &self.config);
    }

    /// Writes a configuration to `file`.
    pub(crate) fn write(&self, plan: &Plan, file: &Path) {
        std::fs::write(file, plan.yaml(&self.upstreams)).expect("the configuration can be written");
    }

    /// Starts the gateway, again after a kill.
    pub(crate) async fn restart(&mut self) {
        self.gateway = Some(Process::start(&mut self.command_up()).await);
    }

    /// Starts the gateway so that it writes all it has to say about itself to `file`.
    pub(crate) async fn restart_talkative(&mut self, file: File) {
        let mut command = self.command_up();
        self.gateway = Some(Process::start(command.env("RUST_LOG", "trace").stderr(file)).await);
    }

    /// Starts the gateway and kills it after so many looks at its spool (some microseconds each), ready or not.
    pub(crate) async fn kill_while_it_starts(&self, n_looks: u64) {
        let mut child = self.command_up().stdout(Stdio::piped()).spawn().expect("the gateway starts");
        for _ in 0..n_looks {
            std::fs::read_dir(self.data().join("spool")).expect("the spool stays where it is");
        }
        child.kill().await.expect("the gateway can be killed");
    }

    fn command_up(&self) -> Command {
        let mut command = Command::new(binary());
        command
            .args(["up", "--listen", "127.0.0.1:0", "--config"])
            .arg(&self.config)
            .arg("--data")
            .arg(self.data())
            .envs(SECRETS)
            .env("RUST_LOG", "warn")
            .kill_on_drop(true);
        command
    }

    /// Kills the gateway where it stands.
    pub(crate) async fn kill(&mut self) {
        self.gateway.take().expect("the gateway runs").kill().await;
    }

    /// Ends the gateway as an operator would, so that all its facts are in the log.
    pub(crate) async fn stop(&mut self) {
        self.ask_to_stop().await;
        self.stopped().await;
    }

    /// Asks the gateway to end, as an operator would.
    pub(crate) async fn ask_to_stop(&self) {
        self.gateway.as_ref().expect("the gateway runs").signal("TERM").await;
    }

    /// Waits for the end of a gateway that was asked to.
    pub(crate) async fn stopped(&mut self) {
        let mut process = self.gateway.take().expect("the gateway runs");
        let ended = process.ended().await;
        assert!(ended.success(), "the gateway ended with {ended}");
    }

    /// Where the gateway listens.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.gateway.as_ref().expect("the gateway runs").addr
    }

    /// A client with the world's key.
    pub(crate) fn client(&self) -> Client {
        self.client_with(KEY)
    }

    /// A client with another key.
    pub(crate) fn client_with(&self, key: &str) -> Client {
        Client::new(self.addr(), key)
    }

    /// Waits until the log has every fact of the gateway, which must be at rest; gives the digest of its live state.
    pub(crate) async fn digest(&self) -> String {
        self.settled().await;
        self.live_digest().await
    }

    /// The digest of the gateway's live state, whatever the log has of it.
    pub(crate) async fn live_digest(&self) -> String {
        self.client().get("/debug/state-digest", &[]).await.text()
    }

    /// Waits until the log has every fact of the gateway, which must be at rest; gives what `/readyz` says then.
    pub(crate) async fn settled(&self) -> Value {
        let client = self.client();
        let settled = async {
            loop {
                let mut ready = client.get("/readyz", &[]).await.json();
                if ready["detail"]["log"]["lag_facts"] == 0 {
                    return ready["detail"].take();
                }
            }
        };
        tokio::time::timeout(PATIENCE, settled).await.expect("the facts reach the log")
    }

    /// Waits until `holds` is true of the calls of all upstreams together.
    pub(crate) async fn calls_until(&self, holds: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        self.upstreams.calls_until(holds).await
    }

    /// An upstream, by its name.
    pub(crate) fn upstream(&self, name: &str) -> &Running {
        self.upstreams.named(name)
    }

    /// The calls of all upstreams.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.upstreams.calls()
    }

    /// Holds the log as another process that writes to it would, until the connection is dropped.
    pub(crate) fn holds_the_log(&self) -> rusqlite::Connection {
        let holder = rusqlite::Connection::open(self.data().join("waybill.db")).expect("the log can be opened");
        holder.busy_timeout(PATIENCE).expect("a time-out can be set");
        holder.execute_batch("BEGIN IMMEDIATE").expect("the log can be held");
        holder
    }

    /// The gateway's data folder.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The log.
    pub(crate) fn database(&self) -> rusqlite::Connection {
        let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
        rusqlite::Connection::open_with_flags(self.data().join("waybill.db"), flags).expect("the log can be opened")
    }

    /// What a query of the log's database gives: a line a row, its columns joined by `|`. All facts are in it once the
    /// gateway has been stopped.
    pub(crate) fn table(&self, sql: &str) -> Vec<String> {
        use rusqlite::types::Value;
        let database = self.database();
        let mut statement = database.prepare(sql).expect("the query is valid");
        let columns = statement.column_count();
        let text = |value| match value {
            Value::Null => "-".to_owned(),
            Value::Integer(number) => number.to_string(),
            Value::Text(text) => text,
            Value::Real(_) | Value::Blob(_) => panic!("the tables under test hold integers and texts"),
        };
        let line = |row: &rusqlite::Row<'_>| {
            let cells: rusqlite::Result<Vec<String>> = (0..columns).map(|at| row.get(at).map(text)).collect();
            Ok(cells?.join("|"))
        };
        let rows = statement.query_map([], line).expect("the query runs");
        rows.collect::<rusqlite::Result<_>>().expect("the rows can be read")
    }

    /// Runs a command of the binary on the world's data and gives its standard output.
    pub(crate) async fn command(&self, args: &[&str]) -> String {
        self.ended(args, true).await.0
    }

    /// Runs a command of the binary that must fail, and gives what it says of it.
    pub(crate) async fn refused(&self, args: &[&str]) -> String {
        self.ended(args, false).await.1
    }

    /// The same, and gives what it prints.
    pub(crate) async fn told_by_failing(&self, args: &[&str]) -> String {
        self.ended(args, false).await.0
    }

    /// Runs a command to its end, which must be as expected; gives its output and its errors.
    async fn ended(&self, args: &[&str], success: bool) -> (String, String) {
        let mut command = Command::new(binary());
        command.args(args).arg("--data").arg(self.data()).envs(SECRETS);
        let output = command.output().await.expect("the command runs");
        let [said, errors] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("the output is text"));
        assert_eq!(output.status.success(), success, "{args:?}: {said}\n{errors}");
        (said, errors)
    }

    /// The file of the configuration.
    pub(crate) fn config(&self) -> &str {
        self.config.to_str().expect("a temporary folder has a plain name")
    }
}
