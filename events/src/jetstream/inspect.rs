//! What an acknowledgement stands on: the server's version, the stream's settings, and when it writes to the disk.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Settings;
use super::shape;
use super::stream::Info;

/// How long the monitoring endpoint may take.
const MONITORING_TIMEOUT: Duration = Duration::from_secs(2);

/// What a server says of itself and of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// The version of the connected server.
    pub version: String,
    /// The level of its JetStream API; 0 before 2.11, which does not say one.
    pub api_level: u32,
    /// The stream; `None` where it is not made yet.
    pub stream: Option<Standing>,
    /// Why the log refuses the server or the stream.
    pub unsuitable: Option<String>,
}

/// How the stream is set up and how full it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// How many servers hold each frame.
    pub replicas: u32,
    /// How many of them are up to date, the leader among them.
    pub replicas_current: u32,
    /// Where frames are kept: `file`.
    pub storage: String,
    /// What happens when it is full: `new` refuses frames, anything else loses old ones.
    pub discard: String,
    /// Whether the server refuses to delete or purge frames by hand.
    pub deny_delete: bool,
    /// The most bytes it holds; `None` for no limit.
    pub bytes_max: Option<u64>,
    /// The bytes it holds.
    pub bytes: u64,
    /// The frames it holds.
    pub frames: u64,
    /// The sequence of its last frame.
    pub head: u64,
}

/// When a server brings what it acknowledged to its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Flush {
    /// Before it acknowledges.
    Always,
    /// So many milliseconds later at most.
    EveryMs(u64),
}

/// The answer of `$JS.API.INFO`, as far as it matters.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Account {
    #[serde(default)]
    api: Api,
}

#[derive(Debug, Default, Deserialize)]
struct Api {
    #[serde(default)]
    level: u32,
}

impl Inspection {
    pub(super) fn new(version: String, account: Account, info: Option<Info>, settings: &Settings) -> Self {
        let checked = shape::check_version(&version);
        let checked = checked.and_then(|()| info.as_ref().map_or(Ok(()), |info| info.config.check(settings)));
        let unsuitable = checked.err().map(|unsuitable| unsuitable.to_string());
        Self { version, api_level: account.api.level, stream: info.map(Standing::from), unsuitable }
    }
}

impl From<Info> for Standing {
    fn from(Info { config, state, cluster }: Info) -> Self {
        let followers = cluster.iter().flat_map(|cluster| &cluster.replicas).filter(|peer| peer.current).count();
        Self {
            replicas: config.num_replicas,
            replicas_current: u32::try_from(followers).unwrap_or(u32::MAX).saturating_add(1),
            storage: config.storage,
            discard: config.discard,
            deny_delete: config.deny_delete && config.deny_purge,
            bytes_max: u64::try_from(config.max_bytes).ok(),
            bytes: state.bytes,
            frames: state.messages,
            head: state.last_seq,
        }
    }
}

/// Asks the monitoring endpoint at `address` (`host:port`) of one server when it writes to its disk.
pub fn flush(address: &str) -> io::Result<Flush> {
    #[derive(Deserialize)]
    struct Jsz {
        config: Config,
    }
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        sync_always: bool,
        sync_interval: u64,
    }
    let answer = get(address, "/jsz")?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    let Config { sync_always, sync_interval } = serde_json::from_str::<Jsz>(body)?.config;
    let interval = Duration::from_nanos(sync_interval).as_millis();
    Ok(if sync_always { Flush::Always } else { Flush::EveryMs(u64::try_from(interval).unwrap_or(u64::MAX)) })
}

fn get(address: &str, path: &str) -> io::Result<String> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("{address} has no address"));
    let socket = address.to_socket_addrs()?.next().ok_or_else(unknown)?;
    let mut stream = TcpStream::connect_timeout(&socket, MONITORING_TIMEOUT)?;
    stream.set_read_timeout(Some(MONITORING_TIMEOUT))?;
    stream.set_write_timeout(Some(MONITORING_TIMEOUT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
