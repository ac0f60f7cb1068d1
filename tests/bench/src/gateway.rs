//! Waybill as its users run it: `waybill up` on a configuration of its own, everything embedded, full log.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::process::Program;

/// The caller's secret.
pub(crate) const KEY: &str = "sk-bench";
/// The model that every upstream serves.
pub(crate) const MODEL: &str = "bench-model";
/// The core that whatever is measured is pinned to.
pub(crate) const MEASURED_CORE: usize = 0;

/// A binary and the folder in which its instances keep their things.
#[derive(Debug)]
pub(crate) struct Gateways {
    binary: PathBuf,
    folder: tempfile::TempDir,
}

/// A running instance.
#[derive(Debug)]
pub(crate) struct Gateway {
    /// The process.
    pub(crate) program: Program,
    /// Where it listens, `host:port`.
    pub(crate) address: String,
}

impl Gateway {
    /// The catalogue's revision in force, as `/readyz` tells it.
    pub(crate) async fn revision(&self) -> anyhow::Result<u64> {
        let told = self.told().await?;
        told["catalogue"]["revision"].as_u64().with_context(|| format!("no revision in {told}"))
    }

    /// Whether the shared state answers, as `/readyz` tells it.
    pub(crate) async fn shares(&self) -> anyhow::Result<bool> {
        let told = self.told().await?;
        told["state"]["reachable"].as_bool().with_context(|| format!("no shared state in {told}"))
    }

    /// The detail of `/readyz`.
    async fn told(&self) -> anyhow::Result<serde_json::Value> {
        let mut stream = TcpStream::connect(&self.address).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("the answer has no body")?;
        Ok(serde_json::from_str::<serde_json::Value>(body)?["detail"].take())
    }
}

impl Gateways {
    /// A new folder for instances of `binary`.
    pub(crate) fn new(binary: &Path) -> anyhow::Result<Self> {
        ensure!(binary.is_file(), "{} is not there: build it, or name it with --waybill", binary.display());
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("caller.key"), KEY)?;
        Ok(Self { binary: binary.to_owned(), folder })
    }

    /// Starts an instance over equal `upstreams`, each `host:port`; the same `data` name finds the same log again.
    pub(crate) async fn start(&self, data: &str, upstreams: &[String]) -> anyhow::Result<Gateway> {
        self.configure("", upstreams)?;
        self.run("up", data).await
    }

    /// Starts one gateway of many, over the log at the NATS server `url`, and brings the catalogue there before.
    pub(crate) async fn start_on(&self, url: &str, data: &str, upstreams: &[String]) -> anyhow::Result<Gateway> {
        self.start_with(&self.log(url), data, upstreams).await
    }

    /// The same, with the shared state in the Redis at `redis`, for which a request waits so many milliseconds at most.
    pub(crate) async fn start_sharing(
        &self,
        url: &str,
        (redis, deadline_ms): (&str, u32),
        data: &str,
        upstreams: &[String],
    ) -> anyhow::Result<Gateway> {
        let state = format!("state: {{ redis: '{redis}', read_deadline_ms: {deadline_ms} }}\n");
        self.start_with(&(self.log(url) + &state), data, upstreams).await
    }

    async fn start_with(&self, stores: &str, data: &str, upstreams: &[String]) -> anyhow::Result<Gateway> {
        self.configure(stores, upstreams)?;
        self.apply().await?;
        self.run("gateway", data).await
    }

    fn log(&self, url: &str) -> String {
        let secret = self.folder.path().join("caller.key");
        format!("log: {{ nats: ['{url}'], mib_max: 1024 }}\ndeployment_secret: file:{}\n", secret.display())
    }

    /// Brings the catalogue in the log to what the configuration says.
    pub(crate) async fn apply(&self) -> anyhow::Result<()> {
        let applied = Command::new(&self.binary).arg("apply").arg(self.config()).output().await?;
        ensure!(applied.status.success(), "the catalogue is not applied: {}", String::from_utf8_lossy(&applied.stderr));
        Ok(())
    }

    /// Changes the name of the group, which makes a batch of one row.
    pub(crate) fn rename(&self, from: &str, to: &str) -> anyhow::Result<()> {
        let [from, to] = [from, to].map(|name| format!("display_name: {name},"));
        let text = std::fs::read_to_string(self.config())?.replace(&from, &to);
        Ok(std::fs::write(self.config(), text)?)
    }

    /// The data folder of that name.
    pub(crate) fn data(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("waybill.yaml")
    }

    fn configure(&self, stores: &str, upstreams: &[String]) -> anyhow::Result<()> {
        let text = stores.to_owned() + &yaml(upstreams, &self.folder.path().join("caller.key"));
        Ok(std::fs::write(self.config(), text)?)
    }

    async fn run(&self, command: &str, data: &str) -> anyhow::Result<Gateway> {
        let log = self.folder.path().join("waybill.err");
        let text = |path: &Path| path.display().to_string();
        let (config, data) = (text(&self.config()), text(&self.data(data)));
        let args = [command, "--config", &config, "--data", &data, "--listen", "127.0.0.1:0"].map(str::to_owned);
        let mut program = Program::start("waybill", MEASURED_CORE, &self.binary, &args, Some(&log))?;
        let said = program.line().await;
        let said = said.with_context(|| std::fs::read_to_string(&log).unwrap_or_default())?;
        Ok(Gateway { program, address: address(&said)? })
    }
}

/// The `host:port` of the URL at the end of a program's first line.
pub(crate) fn address(line: &str) -> anyhow::Result<String> {
    let (_, address) = line.rsplit_once("http://").with_context(|| format!("no address in `{line}`"))?;
    Ok(address.trim().trim_end_matches('/').to_owned())
}

fn yaml(upstreams: &[String], key: &Path) -> String {
    const TAKES: &str = "a string takes every write";
    let mut text = String::from("catalogue:\n  channels:\n");
    for (n, upstream) in upstreams.iter().enumerate() {
        writeln!(text, "    - {{ id: d{n}, base_url: 'http://{upstream}/v1', dialects: [chat] }}").expect(TAKES);
    }
    writeln!(text, "  groups: [{{ id: bench, display_name: Bench, public_models: [{MODEL}] }}]").expect(TAKES);
    writeln!(text, "  routes:\n    - model: {MODEL}\n      members:").expect(TAKES);
    for n in 0..upstreams.len() {
        writeln!(text, "        - {{ channel: d{n}, group: bench, priority: 10, weight: 100 }}").expect(TAKES);
    }
    writeln!(text, "  keys: [{{ id: bench, key: 'file:{}', group: bench }}]", key.display()).expect(TAKES);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_at_the_end_of_a_line() {
        let check = |line: &str| assert_eq!(address(line).expect("an address"), "127.0.0.1:4000");
        check("waybill is up at http://127.0.0.1:4000");
        check("http://127.0.0.1:4000/");
        assert!(address("nothing").is_err());
    }
}
