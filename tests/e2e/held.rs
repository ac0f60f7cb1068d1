//! What keeps a continuation at its owner whatever happens there: no chain, nobody else, and the credential of its parent.

use std::collections::BTreeSet;

use http::Method;
use serde_json::json;
use waybill_simulator::{Action, Step};

use crate::client::Client;
use crate::continuation::{Ask, By, COOLS, Kind, PLAINLY, Parent, Stage, ask, page, plan};
use crate::dialect::RESPONSES;
use crate::fallbacks::{CHAINS, NAMES, TEMPLATED, error, under};

impl Stage {
    /// The calls of every upstream, in the order of [`NAMES`].
    pub(crate) fn counts(&self) -> [usize; 5] {
        NAMES.map(|name| self.upstream(name).calls().len())
    }

    /// Makes a response, or the first of a conversation, at the one that is asked first.
    async fn begun(&self, by: By, stream: bool) -> Parent {
        let mut body = json!({"model": "gpt", "input": "Hello", "stream": stream});
        let conversation = format!("conv_{stream}");
        if by != By::Response {
            body["conversation"] = json!(conversation);
        }
        let parent = self.make_of(&self.maker().with_key(TEMPLATED), body).await;
        assert_eq!(parent.owner, "a");
        if by == By::Response { parent } else { Parent { id: conversation, ..parent } }
    }

    /// Goes on, and holds the status and the calls of [`NAMES`] against what is expected.
    async fn stays(&self, client: &Client, parent: &Parent, by: By, expected: (u16, [usize; 5]), what: &str) {
        let before = self.counts();
        let answer = self.go_on(client, parent, Ask { by, ..PLAINLY }).await;
        let what = format!("{what}: {parent:?} {by:?}: {}", answer.text());
        let now = self.counts();
        let calls: [usize; 5] = std::array::from_fn(|at| now[at] - before[at]);
        assert_eq!((answer.status.as_u16(), calls), expected, "{what}");
        assert_eq!(answer.header("x-waybill-fallback"), Some("false"), "{what}");
    }
}

/// S3.16, S3.24: "a cursor is never handed to another provider": what goes on from a response, or is in a conversation,
/// follows no chain, whatever its owner says.
#[tokio::test]
async fn a_continuation_follows_no_chain() {
    const HERE: [usize; 5] = [1, 0, 0, 0, 0];
    let calm = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let long = "context_length_exceeded";
    let empty = json!({"id": "resp_1", "object": "response", "status": "incomplete", "model": "m", "output": [],
        "incomplete_details": {"reason": "content_filter"}});
    let unsaid = |stream: bool| {
        let event = json!({"type": "response.incomplete", "sequence_number": 0, "response": empty});
        let text = json!(format!("event: response.incomplete\ndata: {event}\n\n"));
        let headers = [("content-type".to_owned(), "text/event-stream".to_owned())].into();
        match stream {
            true => Action::Status { status: 200, headers, body: text },
            false => Action::Status { status: 200, headers: Default::default(), body: empty.clone() },
        }
    };
    // What the owner does, and the status of the answer.
    let table = |stream: bool| {
        [
            ("a wait", Action::status_retry_after(429, 600), 429),
            ("a refused key", Action::status(401), 503),
            ("an outage", Action::status(503), 503),
            ("an overflow", error(RESPONSES, long, "too long", false), 400),
            ("an overflow in a 200", error(RESPONSES, long, "too long", stream), if stream { 200 } else { 400 }),
            ("refused content", error(RESPONSES, "content_filter", "refused", false), 400),
            ("refused content without a word", unsaid(stream), 200),
        ]
    };
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, under(CHAINS).settings(calm)).await;
        let client = stage.other_with(TEMPLATED);
        for (by, stream) in [By::Response, By::Conversation].into_iter().flat_map(|by| [(by, false), (by, true)]) {
            let parent = stage.begun(by, stream).await;
            for (what, does, status) in table(stream) {
                stage.upstream("a").push(does);
                stage.stays(&client, &parent, by, (status, HERE), what).await;
            }
        }
    }
    for kind in [Kind::Embedded, Kind::Distributed] {
        let cooling = format!("retry: {{ backoff_ms: 1, max_attempts: 1 }}\n{COOLS}");
        let stage = Stage::start(kind, under(CHAINS).settings(&cooling)).await;
        let client = stage.other_with(TEMPLATED);
        let mut parents = Vec::new();
        for (by, stream) in [By::Response, By::Conversation].into_iter().flat_map(|by| [(by, false), (by, true)]) {
            parents.push((by, stage.begun(by, stream).await));
        }
        stage.upstream("a").push(Step::new([Action::status_retry_after(429, 600)]));
        let (by, parent) = &parents[0];
        stage.stays(&client, parent, *by, (429, HERE), "a wait begins").await;
        for (by, parent) in &parents {
            stage.stays(&client, parent, *by, (503, [0; 5]), "the owner cools").await;
        }
    }
}

/// ADR 34, "among several credentials of a channel the session chooses": what an upstream keeps belongs to the credential
/// that it was made with, and whatever is asked for is asked with that.
#[tokio::test]
async fn what_is_kept_is_asked_for_with_the_credential_that_it_was_made_with() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        stage.edit(|text| text.replace("['env:UPSTREAM_KEY']", "['env:UPSTREAM_KEY', 'env:BOTH_KEY']")).await;
        let mut used = BTreeSet::new();
        for n in 0..12 {
            let session = format!("s-{n}");
            let body = json!({"model": "gpt", "input": "Hello", "stream": n % 2 == 1});
            let made = stage.maker().post(RESPONSES.path, &[("x-session-id", &session)], &body).await;
            let parent = stage.parent_in(&made, n % 2 == 1);
            let last = || stage.upstream(&parent.owner).calls().pop().expect("the owner was called").credential;
            let credential = last();
            for client in [stage.other(), stage.maker()] {
                assert_eq!(stage.go_on(&client, &parent, PLAINLY).await.status, 200, "{session}");
                assert_eq!(last(), credential, "{session}");
                for (method, rest) in [(Method::GET, ""), (Method::GET, "/input_items"), (Method::POST, "/cancel")] {
                    let answer = ask(&client, method, &format!("{}{rest}", page(&parent))).await;
                    assert_eq!((answer.status.as_u16(), last()), (200, credential.clone()), "{session}: {rest}");
                }
            }
            used.extend(credential);
        }
        assert_eq!(used.into_iter().collect::<Vec<_>>(), ["sk-both", "sk-upstream"]);
    }
}

/// S3.16: a continuation is sent again only where nothing was done, and only to its owner.
#[tokio::test]
async fn a_continuation_is_sent_again_to_its_owner_only_where_nothing_was_done() {
    let retry = "retry: { backoff_ms: 1, max_attempts: 3 }\nhealth: { enabled: false }\n";
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("").settings(retry)).await;
        for stream in [false, true] {
            let parent = stage.make(stream).await;
            let check = async |action: Action, calls: usize, status: u16| {
                stage.upstream(&parent.owner).push(Step::new([action.clone()]));
                let (before, elsewhere) = (stage.upstreams().calls().len(), stage.elsewhere(&parent));
                let answer = stage.go_on(&stage.other(), &parent, PLAINLY).await;
                let made = stage.upstreams().calls().len() - before;
                assert_eq!((answer.status.as_u16(), made), (status, calls), "{action:?} {parent:?}");
                assert_eq!(stage.elsewhere(&parent), elsewhere, "all calls are the owner's");
                stage.clear();
            };
            check(Action::status(429), 2, 200).await;
            check(Action::status(500), 1, 500).await;
            check(Action::Reset, 1, 502).await;
            check(Action::CutAfterEvents { events: 1 }, 1, 502).await;
        }
    }
}

impl Stage {
    /// The calls at all but the owner.
    fn elsewhere(&self, parent: &Parent) -> usize {
        self.upstreams().calls().len() - self.upstream(&parent.owner).calls().len()
    }
}
