//! Mixed traffic over any number of gateways, and the comparison of what the log says of it with the upstreams' calls.
//!
//! Each request carries a session of its own, which stands in the upstreams' call logs and in the facts: so calls and
//! facts can be joined send by send. Conversations (another header) are shared by requests of all gateways, so that
//! pins are made and followed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use waybill_schema::event::{Class, Event, Tokens};
use waybill_simulator::{Action, Call, Control, End, Settings, Simulator, Step, When};

use crate::client::{Client, read};
use crate::log::Told;
use crate::said::{DIALECTS, Ending, Said};
use crate::upstreams::Upstreams;
use crate::world::{PATIENCE, Plan};

/// Requests under way at any time.
pub(crate) const WORKERS: usize = 16;
/// The upstreams of [`plan`].
pub(crate) const NAMES: [&str; 3] = ["a", "b", "c"];
const CONVERSATIONS: u64 = 40;
/// USD per million tokens of prompt and answer.
const PRICES: &str = "prices: { gpt: { input: 3, output: 15 } }";
/// The same in nano-USD per token.
const NANO_USD: [u64; 2] = [3_000, 15_000];
pub(crate) const SESSION: &str = "x-session-id";

/// Three upstreams that take so many milliseconds to begin an answer, and to go on with it.
pub(crate) fn plan(first_token_ms: u64, chunk_ms: u64) -> Plan {
    let settings = "retry: { backoff_ms: 1, all_cooling: best_effort }\nsession: { aliases: known }\n\
                    health: { failure_threshold: 3, cooldown_seconds: 1, cooldown_seconds_max: 2 }\n";
    let mut plan = Plan { channel: PRICES.to_owned(), ..Plan::of(&NAMES) }.settings(settings);
    for upstream in &mut plan.upstreams {
        *upstream = Settings { first_token_delay_ms: first_token_ms, chunk_delay_ms: chunk_ms, ..upstream.clone() };
    }
    plan
}

/// One request as its client saw it.
#[derive(Clone, Debug)]
pub(crate) struct Chat {
    /// Its own session.
    pub(crate) session: String,
    /// Whether an upstream was told to fail it.
    pub(crate) is_scripted: bool,
    /// How its answer ended; [`Ending::Broken`] where there was none.
    pub(crate) ending: Ending,
    /// How long it took.
    pub(crate) took: Duration,
}

/// One send as a store has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    /// The session of its request.
    pub(crate) session: String,
    /// Its number in the request.
    pub(crate) attempt: u16,
    /// Where it went.
    pub(crate) channel: String,
    /// How it ended.
    pub(crate) class: Class,
    /// The upstream's status.
    pub(crate) status: Option<u16>,
    /// Tokens of prompt and answer.
    pub(crate) tokens: [Tokens; 2],
    /// Money in nano-USD.
    pub(crate) cost_nano: Option<u64>,
}

/// Traffic that begins and ends as its test says.
pub(crate) struct Traffic {
    shared: Arc<Shared>,
    workers: JoinSet<()>,
}

/// What the workers share.
struct Shared {
    upstreams: Vec<Simulator>,
    clients: RwLock<Vec<Client>>,
    chats: watch::Sender<Vec<Chat>>,
    n_requests: AtomicU64,
    ends: AtomicBool,
    /// Whether no failure is scripted that lets a conversation move.
    stays: bool,
}

impl Traffic {
    /// None yet, on gateways in front of `upstreams`.
    pub(crate) fn over(upstreams: &Upstreams) -> Self {
        Self::with(upstreams, false)
    }

    /// The same, in which upstreams fail no request so often that its conversation moves to another.
    pub(crate) fn that_stays(upstreams: &Upstreams) -> Self {
        Self::with(upstreams, true)
    }

    fn with(upstreams: &Upstreams, stays: bool) -> Self {
        let shared = Shared {
            upstreams: upstreams.iter().map(|running| Simulator::clone(running)).collect(),
            clients: RwLock::default(),
            chats: watch::Sender::default(),
            n_requests: AtomicU64::default(),
            ends: AtomicBool::default(),
            stays,
        };
        Self { shared: Arc::new(shared), workers: JoinSet::new() }
    }

    /// Sends what begins from now on to these gateways in turn.
    pub(crate) fn lead_to(&self, clients: Vec<Client>) {
        *self.shared.clients.write().expect("no worker panics with the clients") = clients;
    }

    /// Begins, or begins again.
    pub(crate) fn begin(&mut self) {
        self.shared.ends.store(false, Ordering::SeqCst);
        for _ in 0..WORKERS {
            self.workers.spawn(self.shared.clone().work());
        }
    }

    /// Lets every worker finish what it does; steps of the script that nobody came to are forgotten.
    pub(crate) async fn end(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        while let Some(ended) = self.workers.join_next().await {
            ended.expect("no worker panics");
        }
        let forget = || Control { clear_steps: true, ..Control::default() };
        self.shared.upstreams.iter().for_each(|upstream| upstream.apply(forget()));
    }

    /// All chats that have ended, in the order of their ends.
    pub(crate) fn chats(&self) -> Vec<Chat> {
        self.shared.chats.borrow().clone()
    }

    /// Lets the traffic go on for so long.
    pub(crate) async fn lasts(&self, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time {
            self.more(WORKERS).await;
        }
    }

    /// Waits until so many more chats have ended, and gives those that have.
    pub(crate) async fn more(&self, count: usize) -> Vec<Chat> {
        let mut chats = self.shared.chats.subscribe();
        let before = chats.borrow().len();
        let came = tokio::time::timeout(PATIENCE, chats.wait_for(|chats| chats.len() >= before + count)).await;
        came.expect("the traffic goes on").expect("the sender is held here")[before..].to_vec()
    }
}

impl Shared {
    /// Sends one request after the other until it is told to end.
    async fn work(self: Arc<Self>) {
        while !self.ends.load(Ordering::SeqCst) {
            let chat = self.chat(self.n_requests.fetch_add(1, Ordering::SeqCst)).await;
            self.chats.send_modify(|chats| chats.push(chat));
        }
    }

    async fn chat(&self, n: u64) -> Chat {
        let session = format!("request-{n}");
        let is_scripted = self.script(n, &session);
        let (path, field) = DIALECTS[(n % 3) as usize];
        let body = json!({
            "model": "gpt", "max_tokens": 64, "stream": n.is_multiple_of(2),
            field: [{"role": "user", "content": format!("Hello from {session}")}],
        });
        let conversation = format!("conversation-{}", n % CONVERSATIONS);
        let headers = [(SESSION, session.as_str()), ("conversation_id", conversation.as_str())];
        let began = Instant::now();
        let opened = self.client(n).open(Method::POST, path, &headers, Bytes::from(body.to_string())).await;
        let ending = match opened {
            Ok(response) => Said::of(&read(response).await).ending,
            Err(_) => Ending::Broken,
        };
        Chat { session, is_scripted, ending, took: began.elapsed() }
    }

    /// The gateway of request `n`: each meets all dialects and all conversations.
    fn client(&self, n: u64) -> Client {
        let clients = self.clients.read().expect("no holder of the clients panics");
        clients[n as usize / DIALECTS.len() % clients.len()].clone()
    }

    /// Lets some requests fail: once, until another deployment serves them, or in the middle of their answer.
    fn script(&self, n: u64, session: &str) -> bool {
        let (times, does) = match n % 15 {
            3 => (1, Action::status(503)),
            7 if !self.stays => (2, Action::status(503)),
            11 => (1, Action::CutAfterEvents { events: 6 }),
            _ => return false,
        };
        let when = When { session: Some(session.to_owned()), ..When::default() };
        for upstream in &self.upstreams {
            upstream.push(Step::new([does.clone()]).when(when.clone()).times(times));
        }
        true
    }
}

/// How many sends and calls were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compared {
    pub(crate) n_calls: usize,
    pub(crate) n_sends: usize,
    /// Sends whose gateway was killed before it recorded their end.
    pub(crate) n_abandoned: usize,
    /// Sends that their gateway cut off when it had to end.
    pub(crate) n_cancelled: usize,
    /// Those of them that the upstream never saw.
    pub(crate) n_without_call: usize,
}

/// Compares the log with the upstreams' calls and with what the clients saw: every call is one send on record, and every
/// send is one call, of the same outcome, tokens and money; only one that was abandoned may have stayed without a call.
pub(crate) fn compare(told: &Told, upstreams: &Upstreams, chats: &[Chat]) -> Compared {
    check_facts(told);
    compare_sends(&told.sends(), upstreams, chats)
}

/// The same of the sends that any store has.
pub(crate) fn compare_sends(sent: &[Sent], upstreams: &Upstreams, chats: &[Chat]) -> Compared {
    let sends = by_place(sent);
    let mut calls: BTreeMap<(String, &str), Vec<Call>> = BTreeMap::new();
    for name in NAMES {
        for call in upstreams.named(name).calls() {
            let session = call.header(SESSION).expect("every request names one").to_owned();
            calls.entry((session, name)).or_default().push(call);
        }
    }
    for (place, calls) in &calls {
        assert!(sends.contains_key(&(place.0.as_str(), place.1)), "no send of {place:?} is on record: {calls:?}");
    }
    let mut compared = Compared { n_calls: 0, n_sends: 0, n_abandoned: 0, n_cancelled: 0, n_without_call: 0 };
    for ((session, channel), sends) in &sends {
        let calls = calls.get(&((*session).to_owned(), *channel)).map_or(&[][..], Vec::as_slice);
        compared.n_calls += calls.len();
        compared.n_sends += sends.len();
        let n_ended = |class| sends.iter().filter(|send| send.class == class).count();
        compared.n_abandoned += n_ended(Class::Abandoned);
        compared.n_cancelled += n_ended(Class::Cancelled);
        compared.n_without_call += join(session, sends, calls);
    }
    check_answers(sent, chats);
    check_mixture(sent, calls.values().flatten());
    println!("{compared:?} of {} chats", chats.len());
    compared
}

/// Joins the sends of one request to one upstream with the calls it has seen, both in their order; gives how many sends
/// stayed without a call.
fn join(session: &str, sends: &[&Sent], calls: &[Call]) -> usize {
    for (send, call) in sends.iter().zip(calls) {
        assert!(agree(send, call), "{session}: the log says {send:?} of {call:?}");
    }
    let without = sends.get(calls.len()..).unwrap_or_else(|| panic!("{session}: calls {calls:?}, sends {sends:?}"));
    // A request has one send at a time, and a gateway that is killed ends it.
    let is_lost = without.iter().all(|send| send.class == Class::Abandoned);
    assert!(without.len() <= 1 && is_lost, "{session} was never sent: {without:?}");
    without.len()
}

/// Whether an upstream's own account of a call fits the row of its send.
fn agree(send: &Sent, call: &Call) -> bool {
    let usage = call.usage.unwrap_or_default();
    match (send.class, call.did.first(), call.end) {
        (Class::Abandoned, ..) => true,
        (Class::Cancelled, _, end) => end.is_some(),
        (Class::Upstream5xx, Some(Action::Status { status, .. }), _) => send.status == Some(*status),
        (Class::Interrupted, Some(Action::CutAfterEvents { .. }), Some(End::Reset)) => send.status == call.status,
        // A gateway that ends between the last content and the protocol's last word has the whole answer.
        (Class::Success, None | Some(Action::PauseAfter { .. }), Some(end @ (End::Finished | End::ClientGone))) => {
            let tokens = [usage.prompt_tokens, usage.output_tokens];
            let money: u64 = tokens.iter().zip(NANO_USD).map(|(tokens, price)| tokens * price).sum();
            let is_paid = send.tokens == tokens.map(Tokens::Reported) && send.cost_nano == Some(money);
            let is_whole = call.terminal || (end == End::ClientGone && call.stream);
            is_whole && send.status == call.status && is_paid
        }
        _ => false,
    }
}

/// A chat that its client saw complete has one successful send; no client was shown half an answer as if it were whole.
fn check_answers(sent: &[Sent], chats: &[Chat]) {
    let succeeded = sent.iter().filter(|send| send.class == Class::Success);
    let mut n_successes: BTreeMap<&str, usize> = BTreeMap::new();
    succeeded.for_each(|send| *n_successes.entry(&send.session).or_default() += 1);
    for Chat { session, ending, .. } in chats {
        assert_ne!(*ending, Ending::Short, "{session}");
        if *ending == Ending::Complete {
            assert_eq!(n_successes.get(session.as_str()), Some(&1), "{session} was answered in full");
        }
    }
}

/// All dialects, whole and streamed, have been called; some sends failed at once and some in their middle.
fn check_mixture<'a>(sent: &[Sent], calls: impl Iterator<Item = &'a Call>) {
    let shapes: BTreeSet<(&str, bool)> = calls.map(|call| (call.path.as_str(), call.stream)).collect();
    assert_eq!(shapes.len(), 2 * DIALECTS.len(), "{shapes:?}");
    for class in [Class::Upstream5xx, Class::Interrupted] {
        assert!(sent.iter().any(|send| send.class == class), "{class:?}");
    }
}

/// Checks that each send is on record once and has one end.
fn check_facts(told: &Told) {
    let (mut selections, mut ends, mut rows) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for fact in &told.facts {
        match &fact.event {
            Event::Selection(send) => insert(&mut selections, (&send.request, send.attempt), &fact.revision),
            Event::Attempt(end) => insert(&mut ends, (&end.request, end.attempt), &fact.revision),
            _ => {}
        }
    }
    told.attempts().for_each(|row| insert(&mut rows, (&row.request, row.attempt), row));
    assert!(selections.keys().eq(rows.keys()), "a send has no end, or an end no send");
    for (send, end) in ends {
        let selection = selections.get(&send).unwrap_or_else(|| panic!("{end} ends what was never begun"));
        assert_eq!(selection.writer, end.writer, "{send:?}");
    }
}

fn insert<K: Ord + Debug, V: Debug>(map: &mut BTreeMap<K, V>, key: K, value: V) {
    let twice = map.insert(key, value);
    assert!(twice.is_none(), "twice on record: {twice:?}");
}

/// The sends of every session to every channel, in order; each session's are numbered without a gap.
fn by_place(sent: &[Sent]) -> BTreeMap<(&str, &str), Vec<&Sent>> {
    let mut sessions: BTreeMap<&str, Vec<&Sent>> = BTreeMap::new();
    sent.iter().for_each(|send| sessions.entry(&send.session).or_default().push(send));
    let mut places: BTreeMap<(&str, &str), Vec<&Sent>> = BTreeMap::new();
    for (session, mut sends) in sessions {
        sends.sort_by_key(|send| send.attempt);
        let numbers = sends.iter().map(|send| send.attempt);
        assert!(numbers.eq(1..=sends.len() as u16), "{session} has sends {sends:?}");
        sends.into_iter().for_each(|send| places.entry((session, &send.channel)).or_default().push(send));
    }
    places
}
