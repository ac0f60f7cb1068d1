//! One of three upstreams dies in the middle of 20 streams, and comes back.
//!
//! Every upstream says a text of its own, word by word, so that a client's text shows who spoke and where it ended.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};
use http::Method;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use waybill_simulator::{Action, Call, Control, Reply, Step, When};

use crate::client::{Answer, Client};
use crate::said::{DIALECTS, Ending, Said};
use crate::world::{PATIENCE, Plan, World};

const NAMES: [&str; 3] = ["a", "b", "c"];
const CONVERSATIONS: usize = 20;
/// Words of an answer.
const WORDS: usize = 12;
/// Events after which most answers of the dying upstream wait: in every dialect in the middle of the text.
const IN_MID_STREAM: u32 = 8;
/// Events after which some of them wait: before the first word, so that another upstream may still answer.
const BEFORE_THE_TEXT: u32 = 1;

fn words(name: &str) -> String {
    (0..WORDS).map(|n| format!("{name}{n}")).collect::<Vec<_>>().join(" ")
}

fn session(conversation: usize) -> String {
    format!("conversation-{conversation}")
}

/// Every fifth conversation begins with the turn in which the upstream dies.
fn begins_late(conversation: usize) -> bool {
    conversation % 5 == 4
}

/// Every fourth conversation has not seen a word yet when the upstream dies.
fn waits_for_the_text(conversation: usize) -> bool {
    conversation.is_multiple_of(4)
}

/// One turn of a conversation; says so on `begun` when the first word is there.
async fn turn(client: Client, conversation: usize, turn: usize, begun: mpsc::Sender<usize>) -> (usize, Said) {
    let (path, field) = DIALECTS[conversation % DIALECTS.len()];
    let body = json!({
        "model": "gpt", "max_tokens": 64, "stream": true,
        field: [{"role": "user", "content": format!("Turn {turn}")}],
    });
    let (session, turn) = (session(conversation), turn.to_string());
    let headers = [("x-session-id", session.as_str()), ("x-turn", turn.as_str())];
    let response = client.open(Method::POST, path, &headers, Bytes::from(body.to_string())).await;
    let (head, mut body) = response.expect("the gateway answers").into_parts();
    let mut answer = Answer { status: head.status, headers: head.headers, body: Bytes::new(), whole: true };
    let (mut bytes, mut spoke) = (BytesMut::new(), false);
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes.extend_from_slice(frame.data_ref().expect("a body has no trailers")),
            Err(_) => answer.whole = false,
        }
        answer.body = bytes.clone().freeze();
        let speaks = NAMES.iter().any(|name| answer.text().contains(&format!("{name}0")));
        if !std::mem::replace(&mut spoke, speaks) && speaks {
            begun.send(conversation).await.expect("the test listens");
        }
    }
    (conversation, Said::of(&answer))
}

/// The conversations' turns, and what is known of them.
struct Table {
    world: World,
    turns: BTreeMap<usize, Vec<Said>>,
    n_turns: usize,
    /// Conversations that have seen the first word of a turn.
    begun: (mpsc::Sender<usize>, mpsc::Receiver<usize>),
}

impl Table {
    fn begin(&mut self, takes_part: impl Fn(usize) -> bool) -> JoinSet<(usize, Said)> {
        self.n_turns += 1;
        let conversations = (0..CONVERSATIONS).filter(|conversation| takes_part(*conversation));
        let turn = |conversation| turn(self.world.client(), conversation, self.n_turns, self.begun.0.clone());
        conversations.map(turn).collect()
    }

    async fn end(&mut self, turn: JoinSet<(usize, Said)>) {
        let said = tokio::time::timeout(PATIENCE, turn.join_all()).await.expect("every answer ends");
        for (conversation, said) in said {
            self.turns.entry(conversation).or_default().push(said);
        }
        while self.begun.1.try_recv().is_ok() {}
    }

    /// A turn in which every answer must be complete.
    async fn whole_turn(&mut self, takes_part: impl Fn(usize) -> bool) {
        let turn = self.begin(takes_part);
        self.end(turn).await;
        for (conversation, turns) in &self.turns {
            let last = turns.last().expect("a turn was taken");
            assert_eq!(last.ending, Ending::Complete, "conversation {conversation}, turn {}", self.n_turns);
        }
    }

    /// Waits until every stream of the dying upstream that is to be cut in mid-stream has reached its client so far,
    /// the others wait before their text, and all answers elsewhere are over.
    async fn all_wait(&mut self, dying: &str, turn: &str) -> BTreeSet<usize> {
        let here = |call: &Call| call.header("x-turn") == Some(turn);
        let port = self.world.upstream(dying).addr.port().to_string();
        let at = |call: &Call| call.header("host").is_some_and(|host| host.ends_with(&port));
        let calls = self.world.calls_until(|calls| {
            let calls = || calls.iter().filter(|call| here(call));
            calls().count() == CONVERSATIONS
                && calls().all(|call| if at(call) { call.events >= BEFORE_THE_TEXT } else { call.end.is_some() })
        });
        let calls = calls.await;
        let cut = calls.iter().filter(|call| here(call) && at(call)).map(conversation_of).collect::<BTreeSet<_>>();
        let mut silent: BTreeSet<usize> = cut.iter().copied().filter(|c| !waits_for_the_text(*c)).collect();
        while !silent.is_empty() {
            silent.remove(&self.begun.1.recv().await.expect("this table holds a sender"));
        }
        cut
    }
}

fn conversation_of(call: &Call) -> usize {
    let session = call.header("x-session-id").and_then(|session| session.strip_prefix("conversation-"));
    session.and_then(|number| number.parse().ok()).expect("only conversations take turns")
}

/// Who spoke, by the words; `None` for silence. No answer has words of two, and none is other than its upstream's text.
fn speaker(said: &Said) -> Option<&'static str> {
    let name = NAMES.into_iter().find(|name| said.text.starts_with(name));
    match (name, said.ending) {
        (Some(name), Ending::Complete) => assert_eq!(said.text, words(name)),
        (Some(name), Ending::Error | Ending::Broken) => assert!(words(name).starts_with(&said.text), "{said:?}"),
        (None, Ending::Error | Ending::Broken) => assert_eq!(said.text, ""),
        (None, Ending::Complete) | (_, Ending::Short) => panic!("{said:?}"),
    }
    name
}

/// S1.9, S3.13, S3.14: an upstream that dies takes no more than its own answers with it, and moves nobody twice.
#[tokio::test]
async fn an_upstream_that_dies_splices_no_answer_and_moves_each_of_its_conversations_once() {
    let settings = "retry: { backoff_ms: 1 }\nhealth: { cooldown_seconds: 1, cooldown_seconds_max: 2 }\n";
    let world = World::start(Plan::of(&NAMES).settings(settings)).await;
    for name in NAMES {
        world.upstream(name).push(Step::new([Action::Reply(Reply::text(&words(name)))]).standing());
    }
    let mut table = Table { world, turns: BTreeMap::new(), n_turns: 0, begun: mpsc::channel(2 * CONVERSATIONS) };
    table.whole_turn(|conversation| !begins_late(conversation)).await;
    table.whole_turn(|conversation| !begins_late(conversation)).await;

    let dying = most_spoken(&table.turns);
    table.world.upstream(dying).apply(paused(dying));
    let turn = table.begin(|_| true);
    let affected = table.all_wait(dying, "3").await;
    table.world.upstream(dying).apply(Control { clear_steps: true, ..Control::default() });
    table.world.upstream(dying).die().await.expect("the upstream can die");
    table.end(turn).await;
    table.whole_turn(|_| true).await;

    table.world.upstream(dying).push(Step::new([Action::Reply(Reply::text(&words(dying)))]).standing());
    table.world.upstream(dying).revive().await.expect("the upstream can come back");
    serves_again(&table.world, dying).await;
    table.whole_turn(|_| true).await;
    table.whole_turn(|_| true).await;

    check(&table.turns, dying, &affected);
    check_calls(&table, dying);
}

fn most_spoken(turns: &BTreeMap<usize, Vec<Said>>) -> &'static str {
    let spoken = |name: &str| turns.values().filter(|turns| speaker(&turns[0]) == Some(name)).count();
    NAMES.into_iter().max_by_key(|name| spoken(name)).expect("there are three")
}

/// Makes an upstream's answers wait until it dies.
fn paused(name: &str) -> Control {
    let pause = |events| Step::new([Action::PauseAfter { events }, Action::Reply(Reply::text(&words(name)))]);
    let early = (0..CONVERSATIONS).filter(|conversation| waits_for_the_text(*conversation)).map(|conversation| {
        let when = When { session: Some(session(conversation)), ..When::default() };
        pause(BEFORE_THE_TEXT).when(when).standing()
    });
    let steps = early.chain([pause(IN_MID_STREAM).standing()]).collect();
    Control { clear_steps: true, steps, ..Control::default() }
}

/// Begins new sessions until one of them is served by the upstream: its cooldown is over then.
async fn serves_again(world: &World, name: &str) {
    let client = world.client();
    let served = async {
        for n in 0.. {
            let (path, field) = DIALECTS[n % DIALECTS.len()];
            let body = json!({"model": "gpt", "max_tokens": 64, field: [{"role": "user", "content": "Hello"}]});
            let answer = client.post(path, &[("x-session-id", &format!("new-{n}"))], &body).await;
            if speaker(&Said::of(&answer)) == Some(name) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, served).await.expect("the upstream serves again");
}

fn check(turns: &BTreeMap<usize, Vec<Said>>, dying: &str, affected: &BTreeSet<usize>) {
    let mut n_cut = 0;
    for (conversation, turns) in turns {
        let mut speakers: Vec<&str> = turns.iter().filter_map(speaker).collect();
        let after_the_death = &speakers[speakers.len() - 3..];
        assert!(!after_the_death.contains(&dying), "conversation {conversation} went back: {speakers:?}");
        let fatal = &turns[turns.len() - 4];
        match fatal.ending {
            Ending::Complete => assert!(!affected.contains(conversation) || waits_for_the_text(*conversation)),
            Ending::Error | Ending::Broken => n_cut += 1,
            Ending::Short => unreachable!("`speaker` has refused it"),
        }
        speakers.dedup();
        let moves = speakers.len() - 1;
        let knew_it = affected.contains(conversation) && speakers[0] == dying;
        assert_eq!(moves, usize::from(knew_it), "conversation {conversation} was served by {speakers:?}");
    }
    assert!(n_cut >= 1, "no stream was cut: this has tested nothing");
}

/// The upstreams' own logs: one complete answer for every turn that was complete for its client, from who spoke.
fn check_calls(table: &Table, dying: &str) {
    for name in NAMES {
        let calls = table.world.upstream(name).calls();
        let told = calls.iter().filter(|call| call.header("x-turn").is_some() && call.terminal).count();
        let heard = table.turns.values().flatten().filter(|said| said.ending == Ending::Complete);
        assert_eq!(told, heard.filter(|said| speaker(said) == Some(name)).count(), "complete answers of {name}");
        let failed = calls.iter().filter(|call| !call.terminal).count();
        assert!(name == dying || failed == 0, "{failed} answers of {name} were given up");
    }
}
