//! Kept fallbacks: how long a session stays with the model that stood in for its own, on one file and among gateways that
//! share Redis, where every turn is taken at the other gateway. The upstreams' logs count.

use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, Client};
use crate::continuation::{Kind, Stage};
use crate::dialect::CHAT;
use crate::fallbacks::{CHAINS, TEMPLATED, ask, error, served, under};
use crate::world::Plan;

const KINDS: [Kind; 2] = [Kind::Embedded, Kind::Distributed];

impl Stage {
    /// Changes the catalogue to that of `plan`, and waits until every gateway serves by it.
    async fn configure(&self, plan: &Plan) {
        let yaml = plan.yaml(self.upstreams());
        let (_, catalogue) = yaml.split_once("\ncatalogue:").expect("a plan has a catalogue");
        self.edit(|text| {
            let (settings, _) = text.split_once("\ncatalogue:").expect("the file has a catalogue");
            format!("{settings}\ncatalogue:{catalogue}")
        })
        .await;
    }

    fn fails(&self, names: &[&str], does: &Action, times: u32) {
        for name in names {
            self.upstream(name).push(Step::new([does.clone()]).times(times));
        }
    }

    /// A turn of a session at the one gateway.
    async fn turn(&self, session: &str) -> Answer {
        self.taken(ask(&self.one(), CHAT, session, false).await).await
    }

    /// The next one at the other.
    async fn next(&self, session: &str) -> Answer {
        self.taken(ask(&self.another(), CHAT, session, false).await).await
    }

    /// What has been answered is where the others look.
    async fn taken(&self, answer: Answer) -> Answer {
        self.settled().await;
        answer
    }

    fn one(&self) -> Client {
        self.maker().with_key(TEMPLATED)
    }

    fn another(&self) -> Client {
        self.other().with_key(TEMPLATED)
    }
}

/// S3.18, S3.17: with fallbacks disabled for a request the pool is tried as ever, no chain is followed, and a session's
/// fallback is not reused; the field is ours and no upstream sees it.
#[tokio::test]
async fn a_request_may_forbid_other_models() {
    for kind in KINDS {
        let stage = Stage::start(kind, under(CHAINS)).await;
        let forbidding = async |client: Client, session: &str| {
            let mut body = CHAT.body("Hello", false);
            body["disable_fallbacks"] = json!(true);
            stage.taken(client.post(CHAT.path, &[("x-session-id", session)], &body).await).await
        };
        stage.fails(&["a", "b"], &Action::status(503), 2);
        let answer = forbidding(stage.one(), "s").await;
        assert_eq!((answer.status.as_u16(), stage.counts()), (503, [2, 2, 0, 0, 0]), "{kind:?}");
        stage.fails(&["a"], &Action::status(503), 1);
        let again = forbidding(stage.another(), "s").await;
        assert_eq!(served(&again), "a/gpt false 2", "{kind:?}: its own deployment is still tried again");
        stage.fails(&["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&stage.turn("t").await), "spare/spare true 5", "{kind:?}");
        assert_eq!(served(&forbidding(stage.another(), "t").await), "a/gpt false 1", "{kind:?}");
        for call in stage.upstreams().calls() {
            let body: Value = serde_json::from_slice(&call.body).expect("the upstream is sent JSON");
            assert_eq!(body.get("disable_fallbacks"), None);
        }
        let mut body = CHAT.body("Hello", false);
        body["disable_fallbacks"] = json!("yes");
        assert_eq!(stage.one().post(CHAT.path, &[], &body).await.status, 400);
    }
}

/// S3.19, issue 5: a session's fallback ends the moment its chain is edited away, though its deployment is as sound as
/// ever; with the chain back, a new failure leads there again.
#[tokio::test]
async fn a_fallback_ends_with_its_chain() {
    for kind in KINDS {
        let stage = Stage::start(kind, under(CHAINS)).await;
        stage.fails(&["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&stage.turn("s").await), "spare/spare true 5", "{kind:?}");
        assert_eq!(served(&stage.next("s").await), "spare/spare true 1", "{kind:?}");
        stage.configure(&under("fallbacks: [{ gpt: [mild] }]")).await;
        assert_eq!(served(&stage.turn("s").await), "a/gpt false 1", "{kind:?}");
        stage.fails(&["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&stage.next("s").await), "mild/mild true 5", "{kind:?}");
    }
}

/// S3.15, S3.19: what stood in after a failure of one kind is kept by the chain of that kind: with it edited away the next
/// turn goes home, whether or not chains of the other kinds name the same model.
#[tokio::test]
async fn a_fallback_ends_with_the_chain_of_its_kind() {
    let special = |code: &str| error(CHAT, code, "it is refused", false);
    let kinds = [
        ("fallbacks", Action::status(503), &["a", "b"][..], 2, 5),
        ("context_window_fallbacks", special("context_length_exceeded"), &["a"], 1, 2),
        ("content_policy_fallbacks", special("content_filter"), &["a"], 1, 2),
    ];
    for kind in KINDS {
        let stage = Stage::start(kind, under("expose_route: true")).await;
        for (n, (chain, failure, on, times, sends)) in kinds.iter().enumerate() {
            let naming = |names: &[&str]| {
                let chains: Vec<String> = names.iter().map(|chain| format!("{chain}: [{{ gpt: [large] }}]")).collect();
                under(&format!("expose_route: true, {}", chains.join(", ")))
            };
            let others: Vec<&str> = kinds.iter().map(|(other, ..)| *other).filter(|other| other != chain).collect();
            for (left, edited) in [("nothing", naming(&[])), ("the other kinds", naming(&others))] {
                let (session, what) = (format!("s-{n}-{left}"), format!("{kind:?}: {chain}, then {left}"));
                stage.configure(&naming(&[*chain])).await;
                stage.fails(on, failure, *times);
                assert_eq!(served(&stage.turn(&session).await), format!("large/large true {sends}"), "{what}");
                assert_eq!(served(&stage.next(&session).await), "large/large true 1", "{what}");
                stage.configure(&edited).await;
                assert_eq!(served(&stage.turn(&session).await), "a/gpt false 1", "{what}");
            }
        }
    }
}

/// S3.18, S3.19, PITFALLS H03: a chain never leads where the caller may not go. On the way such a target is passed over;
/// where a session was led before the right was taken away, the refusal is returned, not widened.
#[tokio::test]
async fn a_chain_never_widens_what_the_caller_may_use() {
    let shown = |models: &str, chain: &str| Plan {
        group: format!("public_models: [{models}]"),
        ..under(&format!("fallbacks: [{{ gpt: [{chain}] }}]"))
    };
    for kind in KINDS {
        let stage = Stage::start(kind, shown("gpt, mild, large", "spare, mild")).await;
        stage.fails(&["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&stage.turn("s").await), "mild/mild true 5", "{kind:?}: `spare` is passed over");
        assert_eq!(served(&stage.next("s").await), "mild/mild true 1", "{kind:?}");
        stage.configure(&shown("gpt, large", "spare, mild")).await;
        let before = stage.counts();
        for answer in [stage.turn("s").await, stage.next("s").await] {
            assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (404, &json!("model_not_found")));
        }
        assert_eq!(stage.counts(), before, "{kind:?}");
        assert_eq!(served(&stage.turn("t").await), "a/gpt false 1", "{kind:?}");
        stage.fails(&["a", "b"], &Action::status(503), 2);
        let answer = stage.turn("u").await;
        assert_eq!((answer.status.as_u16(), stage.counts()[2]), (503, 0), "{kind:?}: no target is left to it");
    }
}

/// S3.19: a session's fallback that fails leads back to what was asked for, and what serves then is its new place.
#[tokio::test]
async fn a_failing_fallback_leads_back_home() {
    for kind in KINDS {
        let stage = Stage::start(kind, under(CHAINS)).await;
        stage.fails(&["a", "b"], &Action::status(503), 2);
        assert_eq!(served(&stage.turn("s").await), "spare/spare true 5", "{kind:?}");
        stage.fails(&["spare"], &Action::status(503), 2);
        assert_eq!(served(&stage.next("s").await), "a/gpt true 3", "{kind:?}");
        assert_eq!(served(&stage.turn("s").await), "a/gpt false 1", "{kind:?}");
    }
}
