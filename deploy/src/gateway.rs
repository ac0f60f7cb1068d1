//! `waybill gateway`: one gateway of many, which share a log on NATS JetStream.
//!
//! The order of a start: the spool is opened; the log is asked, for some seconds at most, what the catalogue is, where
//! this writer stands and what of the spool it has overtaken; a new epoch begins, with that in it; then the door opens. A
//! log that is away is waited for no longer: the copy of the catalogue beside the spool serves until the log answers
//! (docs/adr/0027), and what the shipper finds overtaken then waits for the next start (docs/adr/0024).

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use axum::Router;
use waybill_auditor::catalogue;
use waybill_events::jetstream::{JetstreamLog, Settings};
use waybill_events::shipper::Shipper;
use waybill_events::spool::{self, Orphans, Reader, Spool};
use waybill_gateway::ledger::Ledger;
use waybill_gateway::shared::redis::RedisState;
use waybill_routing::state::State;
use waybill_schema::config::Config;
use waybill_schema::id::WriterId;
use waybill_schema::time::Time;

use crate::follow::{self, Follower};
use crate::service::{self, Parts, Shared};
use crate::trail::Trail;
use crate::{DataDir, data, logs};

/// How long a start waits for the log.
const LOG_WAIT: Duration = Duration::from_secs(5);
/// The pause between two tries to reach it.
const LOG_PAUSE: Duration = Duration::from_millis(100);
/// How long the last facts may take to reach the log; the spool keeps what has not.
const SHIP_TIME: Duration = Duration::from_secs(5);
/// The longest name of a writer.
const WRITER_CHARS_MAX: usize = 64;

/// Run one gateway of many, on a log in NATS JetStream.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(long, env = "WAYBILL_CONFIG", value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    data: DataDir,
    /// Where to listen, instead of what the configuration says
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// This gateway's name in the log, used by no other; without one, the name that its first start made up
    #[arg(long, env = "WAYBILL_WRITER", value_name = "NAME")]
    writer: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = service::runtime()?;
    let config = service::load(&args.config)?;
    let settings = settings(&config, &args.config)?;
    let data = args.data.data;
    std::fs::create_dir_all(&data).with_context(|| format!("the data folder {} cannot be made", data.display()))?;
    let writer = writer(args.writer, &data)?;
    let secret = service::secret(&config, &data)?;
    let listener = runtime.block_on(service::bind(args.listen, &config))?;
    let listen = listener.local_addr()?;

    let (mut spool, mut reader, recovered) = Spool::open(&data::spool_folder(&data), spool::Options::default())?;
    let copy = data.join("catalogue");
    let mut follower = Follower::new(JetstreamLog::new(settings.clone())?, copied(&copy));
    let orphans = match first_look(&mut follower, &reader, &writer) {
        Ok(orphans) => orphans,
        Err(why) if follower.trail().sum().is_some() => {
            tracing::warn!("the log is away: the local copy of the catalogue is served by until it answers: {why:#}");
            Orphans::default()
        }
        Err(why) => {
            let servers = settings.servers.join(", ");
            let copy = copy.display();
            return Err(why).with_context(|| {
                format!("there is no catalogue to serve by: the log at {servers} is away, and {copy} holds no copy yet")
            });
        }
    };
    if follower.trail().sum().is_none() {
        bail!("the log holds no catalogue yet: `waybill auditor` or `waybill apply FILE` brings one there");
    }
    follow::keep(follower.trail(), &copy);
    let epoch = service::begin(&mut spool, &mut reader, orphans, recovered.last, &secret)?;
    tracing::info!(%writer, epoch, "begins");
    let shipper = Shipper::start(writer.clone(), reader, Box::new(JetstreamLog::new(settings)?))?;
    let ledger = Ledger::new(writer.clone(), epoch, spool, State::default());
    let shared = match &config.state {
        None => Shared::Unshared,
        Some(state) => {
            let _on_the_runtime = runtime.enter();
            let redis = RedisState::new(state, writer.clone()).context("state.redis is no server to be asked")?;
            Shared::Redis(Arc::new(redis))
        }
    };
    let parts = Parts {
        listener,
        config: Arc::new(config),
        secret,
        ledger,
        shipper,
        follower,
        watch: None,
        copy: Some(copy),
        more: Router::new(),
        shared,
        ship_time: SHIP_TIME,
    };
    runtime.block_on(service::serve(parts, &format!("waybill gateway {writer} is up at http://{listen}")))
}

/// Where the log is; a configuration without one is for a single machine.
pub(crate) fn settings(config: &Config, file: &Path) -> anyhow::Result<Settings> {
    let Some(log) = &config.log else {
        bail!(
            "{} names no `log`, which is for a single machine: use `waybill up`, or name the servers",
            file.display()
        );
    };
    Ok(logs::settings(log))
}

/// The name of this gateway in the log: the one given, or else the one that the first start made up.
fn writer(named: Option<String>, data: &Path) -> anyhow::Result<WriterId> {
    let path = data.join("writer");
    let name = match named {
        Some(name) => name,
        None => match std::fs::read_to_string(&path) {
            Ok(name) => name.trim().to_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let name = format!("gw-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
                std::fs::write(&path, format!("{name}\n"))?;
                name
            }
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        },
    };
    let is_plain = |char: char| char.is_ascii_alphanumeric() || char == '-' || char == '_';
    if name.is_empty() || name.len() > WRITER_CHARS_MAX || !name.chars().all(is_plain) || name == catalogue::WRITER {
        bail!("`{name}` cannot be a gateway's name: at most {WRITER_CHARS_MAX} letters, digits, `-` and `_`");
    }
    Ok(WriterId::from(name.as_str()))
}

/// The copy of the catalogue as it was in force last; one that is damaged is none.
fn copied(path: &Path) -> Trail {
    Trail::read(path).unwrap_or_else(|error| {
        tracing::error!("the local copy of the catalogue is not used: {error:#}");
        Trail::default()
    })
}

/// Asks the log, for [`LOG_WAIT`] at most, for the catalogue and for what it has of `writer`.
fn first_look(follower: &mut Follower<JetstreamLog>, reader: &Reader, writer: &WriterId) -> anyhow::Result<Orphans> {
    let deadline = Time::wall_clock().plus_ms(LOG_WAIT.as_millis() as i64);
    loop {
        let looked = follower.look().and_then(|()| Ok(Orphans::find(reader, &mut follower.log, writer)?));
        match looked {
            Ok(orphans) => return Ok(orphans),
            Err(error) if Time::wall_clock() >= deadline => return Err(error),
            Err(_) => std::thread::park_timeout(LOG_PAUSE),
        }
    }
}
