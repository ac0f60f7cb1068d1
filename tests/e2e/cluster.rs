//! A cluster as it is meant to be run: three gateways behind HAProxy, three NATS servers, Redis, Postgres, an auditor,
//! and two projectors, of which one stands by.

use std::collections::BTreeMap;

use ::redis::{Commands, Connection};
use serde_json::Value;
use tokio::time::timeout;
use waybill_events::log::{Log, Seq};
use waybill_projector::redis::{Fold, RECORDS_MAX, Write};
use waybill_schema::event::{Class, Tokens};
use waybill_schema::redis::{Keys, Mark};
use waybill_servers::haproxy::Haproxy;
use waybill_servers::nats::NatsCluster;
use waybill_servers::postgres::{self, Postgres};
use waybill_servers::redis::{Keeps, Options, Redis};

use crate::client::Client;
use crate::fleet::Fleet;
use crate::log::channel_of;
use crate::process::Process;
use crate::projector::Database;
use crate::said::Ending;
use crate::traffic::{self, Chat, Compared, Sent};
use crate::world::{KEY, PATIENCE, Plan};

pub(crate) const GATEWAYS: usize = 3;
const REPLICAS: u32 = 3;
const PREFIX: &str = "wb:";
/// Frames read at once.
const FRAMES: usize = 256;

/// Everything, running.
pub(crate) struct Cluster {
    pub(crate) fleet: Fleet,
    pub(crate) redis: Redis,
    pub(crate) postgres: Postgres,
    /// The database of the rows.
    pub(crate) url: String,
    pub(crate) haproxy: Haproxy,
    pub(crate) projectors: Vec<Process>,
    _nats: NatsCluster,
}

impl Cluster {
    /// Starts all of it over the upstreams of `plan`; a gateway waits at most so many milliseconds for Redis.
    pub(crate) async fn start(mut plan: Plan, deadline_ms: u32) -> Self {
        let (nats, haproxy) = (NatsCluster::start(REPLICAS as usize), Haproxy::start());
        let redis = Redis::start(&Options { keeps: Keeps::EverySecond });
        let postgres = Postgres::start(&postgres::Options::default());
        let url = postgres.database();
        let stores = format!(
            "state: {{ redis: '{}', prefix: '{PREFIX}', read_deadline_ms: {deadline_ms} }}\n\
             usage: {{ postgres: '{url}' }}\n",
            redis.url()
        );
        plan.settings.insert_str(0, &stores);
        let mut fleet = Fleet::prepare(&plan, &nats.urls(), REPLICAS).await;
        fleet.doors = (0..GATEWAYS).map(|n| haproxy.gateway(n)).collect();
        fleet.start_auditor().await;
        for n in 0..GATEWAYS {
            fleet.restart(n).await;
        }
        let mut cluster = Self { fleet, redis, postgres, url, haproxy, projectors: Vec::new(), _nats: nats };
        for _ in 0..2 {
            let projector = cluster.projector().await;
            cluster.projectors.push(projector);
        }
        cluster.settled().await;
        cluster
    }

    /// A further projector.
    pub(crate) async fn projector(&self) -> Process {
        Process::start(&mut self.fleet.command(&["projector", "--listen", "127.0.0.1:0"])).await
    }

    /// A client of whichever gateway HAProxy chooses.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.haproxy.addr(), KEY)
    }

    /// What `projector` says of itself.
    pub(crate) async fn standing(projector: &Process) -> Value {
        Client::new(projector.addr, KEY).get("/readyz", &[]).await.json()
    }

    /// Waits until one of the projectors writes to Postgres, and says which.
    pub(crate) async fn writer(&self) -> usize {
        let found = async {
            loop {
                for (n, projector) in self.projectors.iter().enumerate() {
                    if Self::standing(projector).await["detail"]["postgres"]["phase"] == "projecting" {
                        return n;
                    }
                }
            }
        };
        timeout(PATIENCE, found).await.expect("a projector projects")
    }

    /// Waits until all that the gateways have said is in both stores.
    pub(crate) async fn settled(&self) {
        for n in 0..GATEWAYS {
            self.fleet.ready_when(n, |ready| ready["detail"]["log"]["lag_facts"] == 0).await;
        }
        let head = self.fleet.look(|log| log.head().expect("the log answers").0).await;
        let covers = |store: &Value| store["trouble"].is_null() && store["checkpoint"].as_u64() >= Some(head);
        let covered = async {
            let (mut postgres, mut redis) = (false, false);
            while !(postgres && redis) {
                for projector in &self.projectors {
                    let detail = &Self::standing(projector).await["detail"];
                    postgres |= covers(&detail["postgres"]);
                    redis |= covers(&detail["redis"]);
                }
            }
        };
        timeout(PATIENCE, covered).await.expect("the projectors catch up");
    }

    /// Checks, after these chats were all there are, that nobody was failed and that log, rows and shared state are what the
    /// upstreams' own call logs and a fresh fold say.
    pub(crate) async fn check(&self, chats: &[Chat]) -> Compared {
        self.settled().await;
        for chat in chats.iter().filter(|chat| !chat.is_scripted) {
            assert_eq!(chat.ending, Ending::Complete, "{}", chat.session);
        }
        let told = self.fleet.told().await;
        let in_log = traffic::compare(&told, &self.fleet.upstreams, chats);
        let rows = self.rows(chats.len()).await;
        let in_rows = traffic::compare_sends(&rows, &self.fleet.upstreams, chats);
        assert_eq!((in_rows, in_log.n_abandoned, in_log.n_cancelled), (in_log, 0, 0));
        assert_eq!(in_log.n_calls, in_log.n_sends);
        self.check_shared_state().await;
        in_log
    }

    /// The sends in Postgres, of so many requests, whose rows are all there are.
    async fn rows(&self, n_requests: usize) -> Vec<Sent> {
        let database = Database::open(&self.url).await;
        let sql = "SELECT session_id, attempt, member, class, a.status, input, output, estimated, cost_nano
                   FROM waybill.usage_attempts a JOIN waybill.usage_events e USING (request_id)";
        let rows: Vec<Sent> = database.rows(sql).await.iter().map(sent).collect();
        let counted = "SELECT (SELECT count(*) FROM waybill.usage_attempts), count(*), count(DISTINCT request_id),
                              (SELECT count(*) FROM waybill.quarantine) FROM waybill.usage_events";
        let [n_attempts, n_requests] = [rows.len(), n_requests].map(|n| i64::try_from(n).expect("few rows"));
        assert_eq!(database.numbers(counted).await, [n_attempts, n_requests, n_requests, 0]);
        rows
    }

    /// Checks that pins, deadlines and flags in Redis are those of a fresh fold, key by key.
    async fn check_shared_state(&self) {
        let (keys, mark) = self.held();
        let (generation, at) = (active(&mut self.connection()), mark.clone());
        let (folded, folded_mark) = self.fleet.look(move |log| folded(log, generation, &at)).await;
        assert_eq!(mark, folded_mark);
        for (key, value) in &folded {
            assert_eq!(keys.get(key), Some(value), "{key}");
        }
        assert_eq!(keys.len(), folded.len(), "there are keys that the fold does not have");
    }

    /// Everything in the generation that is read but its meta, and the mark in that; both of one moment.
    fn held(&self) -> (BTreeMap<String, String>, Mark) {
        let mut connection = self.connection();
        let generation = Keys::new(PREFIX).generation(active(&mut connection));
        loop {
            let mark = mark(&mut connection, &generation.meta());
            let mut keys: Vec<String> =
                connection.keys(format!("{}*", generation.prefix())).expect("the server answers");
            keys.retain(|key| *key != generation.meta());
            let values: Vec<String> = connection.mget(&keys).expect("the server answers");
            if self::mark(&mut connection, &generation.meta()) == mark {
                return (keys.into_iter().zip(values).collect(), mark);
            }
        }
    }

    fn connection(&self) -> Connection {
        let client = ::redis::Client::open(self.redis.url()).expect("the URL is one");
        client.get_connection().expect("the server answers")
    }

    /// How much memory each process of ours holds, in KiB, by its number.
    pub(crate) fn memory_kib(&self) -> BTreeMap<u32, u64> {
        let gateways = (0..GATEWAYS).map(|n| self.fleet.gateway(n));
        gateways.chain(&self.projectors).map(|process| (process.id(), process.memory_kib())).collect()
    }
}

/// A row as a send.
fn sent(row: &tokio_postgres::Row) -> Sent {
    let tokens = |column: &str, bit: i32| match row.get::<_, Option<i64>>(column).map(i64::unsigned_abs) {
        None => Tokens::Unknown,
        Some(n) if row.get::<_, i32>("estimated") & bit != 0 => Tokens::Estimated(n),
        Some(n) => Tokens::Reported(n),
    };
    let class = Value::String(row.get("class"));
    Sent {
        session: row.get("session_id"),
        attempt: u16::try_from(row.get::<_, i32>("attempt")).expect("few sends"),
        channel: channel_of(&row.get::<_, &str>("member").into()).to_owned(),
        class: serde_json::from_value::<Class>(class).expect("rows spell classes as the log does"),
        status: row.get::<_, Option<i32>>("status").map(|status| u16::try_from(status).expect("a status")),
        tokens: [tokens("input", 1), tokens("output", 2)],
        cost_nano: row.get::<_, Option<i64>>("cost_nano").map(i64::unsigned_abs),
    }
}

fn active(connection: &mut Connection) -> u64 {
    connection.get(Keys::new(PREFIX).active()).expect("a generation is read")
}

fn mark(connection: &mut Connection, meta: &str) -> Mark {
    let mark: Option<String> = connection.hget(meta, "mark").expect("the server answers");
    mark.and_then(|mark| Mark::decode(&mark)).expect("the generation has a mark")
}

/// What a fresh fold of `log` up to `at` holds in `generation`, and its mark.
fn folded(log: &mut dyn Log, generation: u64, at: &Mark) -> (BTreeMap<String, String>, Mark) {
    let mut fold = Fold::new(RECORDS_MAX);
    while fold.mark().seq < at.seq {
        let frames = log.read(Seq(fold.mark().seq), FRAMES).expect("the log can be read");
        let frames = frames.iter().take_while(|frame| frame.seq.0 <= at.seq);
        frames.for_each(|frame| fold.take(frame).expect("the frame can be folded"));
    }
    let everything = fold.everything(&Keys::new(PREFIX).generation(generation));
    let pairs = everything.into_iter().map(|Write { key, value, .. }| (key, value.expect("it is there")));
    (pairs.collect(), fold.mark().clone())
}
