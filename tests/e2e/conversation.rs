//! Conversations: they are made elsewhere, whoever answers the first request of one has it, and what follows goes there with
//! the refusals of any continuation.

use http::Method;
use serde_json::json;
use waybill_simulator::{Action, Step};

use crate::client::Client;
use crate::continuation::{
    Ask, By, Expected, FOREIGN, GONE, Kind, PLAINLY, Parent, SERVED, Stage, UNREADABLE, delete, disable, exchange_key,
    plan, redirect, until,
};
use crate::dialect::{CHAT, RESPONSES};
use crate::world::{KEY, Plan};

const BY_NAME: Ask = Ask { by: By::Conversation, ..PLAINLY };
const BY_OBJECT: Ask = Ask { by: By::Object, ..PLAINLY };

/// `a` is asked first, and serves a second model by the same deployment and a third by another.
fn first_a() -> Plan {
    let mut plan = plan("health: { enabled: false }\n");
    plan.members = ["priority: 1", "priority: 2", "priority: 2"].map(str::to_owned).to_vec();
    let members = ["a", "b", "c"].map(|name| format!("{{ channel: {name}, group: main, upstream_model: large }}"));
    plan.rows.routes.push(format!("{{ model: large, members: [{}] }}", members.join(", ")));
    plan
}

impl Stage {
    /// Asks the first of a conversation, which is of the name of its form.
    async fn converse(&self, client: &Client, stream: bool) -> Parent {
        let id = if stream { "conv_sse" } else { "conv_json" };
        let body = json!({"model": "gpt", "input": "Hello", "conversation": id, "stream": stream});
        Parent { id: id.to_owned(), ..self.make_of(client, body).await }
    }

    /// Begins a conversation as JSON and one as a stream.
    async fn conversations(&self) -> [Parent; 2] {
        let begun = [self.converse(&self.maker(), false).await, self.converse(&self.maker(), true).await];
        assert_eq!([&begun[0].owner, &begun[1].owner], ["a", "a"]);
        begun
    }
}

/// Begins conversations in every kind of world, lets `happen` what may, and goes on in both, by both ways to name one.
async fn table(happen: impl AsyncFn(&mut Stage, &str), ask: Ask, expected: Expected) {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let mut stage = Stage::start(kind, first_a()).await;
        let begun = stage.conversations().await;
        happen(&mut stage, "a").await;
        for parent in &begun {
            for by in [By::Conversation, By::Object] {
                stage.check(parent, Ask { by, ..ask }, expected).await;
            }
        }
    }
}

/// ADR 34: "owned like a response, by whoever answered its first request"; another model and another session do not move
/// it, nor does another deployment behind its connection.
#[tokio::test]
async fn a_conversation_stays_with_the_connection_that_has_it() {
    let demote = async |stage: &mut Stage, owner: &str| {
        let of = |priority: u8| format!("{{ channel: {owner}, group: main, priority: {priority} }}");
        stage.edit(|text| text.replace(&of(1), &of(3))).await;
    };
    for ask in [
        BY_NAME,
        Ask { session: Some("other"), ..BY_NAME },
        Ask { model: "gpt-2", ..BY_NAME },
        Ask { model: "large", ..BY_NAME },
    ] {
        table(demote, ask, SERVED).await;
    }
    let stage = Stage::start(Kind::Distributed, first_a()).await;
    for parent in stage.conversations().await {
        let answer = stage.go_on(&stage.other(), &parent, Ask { model: "large", ..BY_NAME }).await;
        assert_eq!(answer.header("x-waybill-deployment"), Some("a/large"));
        stage.upstream("a").push(Step::new([Action::status(503)]));
        let before = stage.upstreams().calls().len();
        let failed = stage.go_on(&stage.other(), &parent, BY_OBJECT).await;
        assert_eq!((failed.status.as_u16(), stage.upstreams().calls().len() - before), (503, 1), "nobody stands in");
    }
}

/// A name is a name within its scope alone: another key's conversation of the same is its own.
#[tokio::test]
async fn a_conversation_of_another_key_is_another() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, first_a()).await;
        let own = stage.conversations().await;
        for parent in &own {
            // Refused before any work, the first request of one may go elsewhere.
            stage.upstream("a").push(Step::new([Action::status(429)]));
            let theirs = stage.converse(&stage.other_with(FOREIGN), parent.stream).await;
            assert_ne!(theirs.owner, "a");
            for by in [By::Conversation, By::Object] {
                stage.check(&theirs, Ask { key: FOREIGN, by, ..PLAINLY }, SERVED).await;
                stage.check(parent, Ask { key: KEY, by, ..PLAINLY }, SERVED).await;
            }
        }
    }
}

/// S3.24
#[tokio::test]
async fn a_conversation_whose_owner_is_gone_is_refused() {
    table(disable, BY_NAME, GONE).await;
    table(delete, BY_NAME, GONE).await;
    table(redirect, BY_NAME, GONE).await;
    table(exchange_key, BY_NAME, GONE).await;
}

/// DESIGN.md section 8, S3.23: what cannot be told is not guessed, a conversation that may be new is not begun either; chats
/// go on.
#[tokio::test]
async fn while_nobody_can_say_who_has_a_conversation_it_is_refused() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let mut stage = Stage::start(kind, first_a()).await;
        let begun = stage.conversations().await;
        stage.settled().await;
        let hand = match &mut stage {
            Stage::Embedded(world) => {
                let hand = world.holds_the_log();
                let hide = "ALTER TABLE response_owners RENAME TO hidden; COMMIT";
                hand.execute_batch(hide).expect("a table can be renamed");
                Some(hand)
            }
            Stage::Distributed(cluster) => {
                cluster.redis.stop();
                None
            }
        };
        for parent in &begun {
            for ask in [BY_NAME, BY_OBJECT, Ask { id: Some("conv_new"), ..BY_NAME }] {
                stage.check(parent, ask, UNREADABLE).await;
            }
            let answer = stage.other().post(CHAT.path, &[("x-session-id", "s")], &CHAT.body("Hello", false)).await;
            assert_eq!(answer.status, 200);
        }
        match &mut stage {
            Stage::Embedded(_) => {
                let show = "BEGIN IMMEDIATE; ALTER TABLE hidden RENAME TO response_owners; COMMIT";
                hand.expect("it is held").execute_batch(show).expect("a table can be renamed");
            }
            Stage::Distributed(cluster) => {
                cluster.redis.cont();
                cluster.fleet.ready_when(1, |ready| ready["detail"]["state"]["reachable"] == true).await;
            }
        }
        for parent in &begun {
            stage.check(parent, BY_NAME, SERVED).await;
        }
    }
}

/// DESIGN.md section 6: while a writer lags, one that is found goes to its owner, and one that is not may be another's.
#[tokio::test]
async fn while_a_writer_lags_no_conversation_is_begun() {
    let mut stage = Stage::start(Kind::Distributed, first_a()).await;
    stage.settled().await;
    stage.cluster().projector.signal("STOP").await;
    let begun = stage.conversations().await;
    let new = Ask { id: Some("conv_new"), ..BY_NAME };
    until(async || stage.other().get(&format!("{}/resp_none", RESPONSES.path), &[]).await.status == 503).await;
    for parent in &begun {
        stage.check(parent, new, UNREADABLE).await;
        stage.check(parent, BY_OBJECT, SERVED).await;
    }
    stage.cluster().projector.signal("CONT").await;
    stage.settled().await;
    assert_eq!(stage.go_on(&stage.other(), &begun[0], new).await.status, 200);
}

/// S3.24: "failed or unfinished streams publish no ownership": what was cut leaves the conversation to whoever answers next.
#[tokio::test]
async fn a_conversation_whose_first_answer_was_cut_is_nobodys() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, first_a()).await;
        for stream in [false, true] {
            let id = format!("conv_cut_{stream}");
            let body = json!({"model": "gpt", "input": "Hello", "conversation": id, "stream": stream});
            stage.upstream("a").push(Step::new([Action::CutAfterEvents { events: 6 }]));
            let before = stage.upstreams().calls().len();
            let cut = stage.maker().post(RESPONSES.path, &[], &body).await;
            assert_eq!(
                (cut.status.as_u16(), cut.text().contains(RESPONSES.last)),
                (if stream { 200 } else { 502 }, false)
            );
            assert_eq!(stage.upstreams().calls().len() - before, 1);
            for settles in [false, true] {
                if settles {
                    stage.settled().await;
                }
                // Were it owned, nobody else would be asked.
                stage.upstreams().iter().for_each(|upstream| upstream.push(Step::new([Action::status(429)])));
                let before = stage.upstreams().calls().len();
                let answer = stage.other().post(RESPONSES.path, &[], &body).await;
                assert_eq!((answer.status.as_u16(), stage.upstreams().calls().len() - before), (429, 3), "{id}");
                stage.clear();
            }
            stage.upstream("a").push(Step::new([Action::status(429)]));
            let answer = stage.other().post(RESPONSES.path, &[], &body).await;
            let parent = Parent { id, ..stage.parent_in(&answer, stream) };
            assert_ne!(parent.owner, "a");
            stage.check(&parent, BY_NAME, SERVED).await;
        }
    }
}

/// S3.9: what is asked of a response of a conversation needs its id alone.
#[tokio::test]
async fn a_response_of_a_conversation_is_asked_for_at_its_owner() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, first_a()).await;
        for stream in [false, true] {
            let body = json!({"model": "gpt", "input": "Hello", "conversation": "conv_1", "stream": stream});
            let parent = stage.make_of(&stage.maker(), body).await;
            for (method, rest) in [(Method::GET, ""), (Method::GET, "/input_items"), (Method::DELETE, "")] {
                assert_eq!(stage.about(&parent, method, rest).await.status, 200);
            }
        }
    }
}
