//! What is not found, and what is owned by nobody: writers that lag, and answers that came to no end.

use http::Method;
use serde_json::json;
use tokio::task::JoinSet;
use waybill_simulator::{Action, Call, Step};

use crate::client::{Answer, read};
use crate::continuation::{Ask, Kind, PLAINLY, Parent, SERVED, Stage, UNKNOWN, UNREADABLE, plan, until};
use crate::dialect::RESPONSES;
use crate::monitor::eval;
use crate::world::PATIENCE;

/// DESIGN.md section 6: a response is shown to other gateways before it is projected, and one that is not found is
/// unknown only while every writer has been heard of within seconds.
#[tokio::test]
async fn while_a_writer_lags_what_is_not_found_is_not_unknown() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    stage.settled().await;
    stage.cluster().projector.signal("STOP").await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let none = Ask { id: Some("resp_none"), ..PLAINLY };
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
    // It takes some seconds until nothing has been heard of for too long.
    until(async || stage.go_on(&stage.other(), &parents[0], none).await.status == 503).await;
    for parent in &parents {
        stage.check(parent, none, UNREADABLE).await;
        stage.check(parent, PLAINLY, SERVED).await;
    }
    stage.cluster().projector.signal("CONT").await;
    stage.settled().await;
    for parent in &parents {
        stage.check(parent, none, UNKNOWN).await;
        stage.check(parent, PLAINLY, SERVED).await;
    }
}

/// The same where a response was not shown, or that was lost: until it can be told that a writer lags it is as one that
/// never was (docs/adr/0034), and nobody is asked for it; it is its owner's again as soon as it is projected.
#[tokio::test]
async fn a_response_that_nobody_was_shown_is_asked_of_nobody_until_it_is_projected() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    stage.settled().await;
    stage.cluster().projector.signal("STOP").await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let lose = "for _, keys in ipairs({'wb:g*:o:*', 'wb:shown:*'}) do \
                for _, key in ipairs(redis.call('KEYS', keys)) do redis.call('DEL', key) end end";
    eval(&stage.cluster().redis, lose).await;
    let before = stage.upstreams().calls().len();
    let is_untold = async |parent: &Parent| {
        let answer = stage.go_on(&stage.other(), parent, PLAINLY).await;
        let told = (answer.status.as_u16(), answer.json()["error"]["code"].as_str().map(str::to_owned));
        let [unknown, untold] = [UNKNOWN, UNREADABLE].map(|it| (it.status, Some(it.code.to_owned())));
        assert!(told == unknown || told == untold, "{told:?}");
        told == untold
    };
    until(async || is_untold(&parents[0]).await && is_untold(&parents[1]).await).await;
    assert_eq!(stage.upstreams().calls().len(), before);
    for parent in &parents {
        stage.check(parent, PLAINLY, UNREADABLE).await;
    }
    stage.cluster().projector.signal("CONT").await;
    stage.settled().await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
}

/// One gateway that says nothing is enough: it may have made what is asked for.
#[tokio::test]
async fn while_a_gateway_is_not_heard_of_what_is_not_found_is_not_unknown() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    let parents = [stage.make(false).await, stage.make(true).await];
    stage.settled().await;
    stage.cluster().fleet.freeze(0).await;
    let none = Ask { id: Some("resp_none"), ..PLAINLY };
    until(async || stage.go_on(&stage.other(), &parents[0], none).await.status == 503).await;
    for parent in &parents {
        stage.check(parent, none, UNREADABLE).await;
        stage.check(parent, PLAINLY, SERVED).await;
    }
    stage.cluster().fleet.thaw(0).await;
    until(async || stage.go_on(&stage.other(), &parents[0], none).await.status == 400).await;
    for parent in &parents {
        stage.check(parent, none, UNKNOWN).await;
    }
}

/// A projector that is behind comes to the beginning of a response after its end was shown: that takes nothing back.
#[tokio::test]
async fn what_was_shown_to_have_ended_is_not_taken_back_by_a_projector_that_is_behind() {
    let mut stage = Stage::start(Kind::Distributed, plan("")).await;
    stage.settled().await;
    stage.cluster().projector.signal("STOP").await;
    let parents = [stage.make(false).await, stage.make(true).await];
    let behind = "for _, key in ipairs(redis.call('KEYS', 'wb:g*:o:*')) do \
                  local owner = redis.call('GET', key):gsub('\"final\"', '\"provisional\"') \
                  redis.call('SET', key, owner) end";
    eval(&stage.cluster().redis, behind).await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
    stage.cluster().projector.signal("CONT").await;
    stage.settled().await;
    for parent in &parents {
        stage.check(parent, PLAINLY, SERVED).await;
    }
}
/// S3.24: "failed or unfinished streams publish no ownership": what was cut, failed after output or in the background, was
/// left by its client, or went down with its gateway.
#[tokio::test]
async fn what_came_to_no_end_cannot_be_continued() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let mut stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let ended = [
                ("cut", stage.cut(stream).await),
                ("failed", stage.failed(stream).await),
                ("left", stage.left(stream).await),
                ("failed in the background", stage.failed_in_background(stream, "").await),
            ];
            let followed = if stream { Some(stage.failed_in_background(stream, "?stream=true").await) } else { None };
            let ended: Vec<_> = ended.into_iter().chain(followed.map(|parent| ("seen to fail", parent))).collect();
            for _ in 0..2 {
                for (how, parent) in &ended {
                    let answer = stage.check(parent, PLAINLY, UNKNOWN).await;
                    assert_eq!(answer.status, 400, "{how}");
                }
                stage.settled().await;
            }
            let parent = stage.went_down(stream).await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
            stage.settled().await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
        }
    }
}

/// A request whose client waits for the rest of its answer.
struct Standing {
    asking: JoinSet<Answer>,
    /// The place of its call in the owner's log.
    at: usize,
    parent: Parent,
}

impl Stage {
    async fn cut(&self, stream: bool) -> Parent {
        let does = Action::CutAfterEvents { events: 6 };
        let (parent, answer) = self.make_while(does, stream).await;
        // Before output another is asked.
        assert_eq!(answer.text().contains(&parent.id), stream, "{}", answer.text());
        parent
    }

    /// The upstream itself says that it failed: after some output, or as the whole answer.
    async fn failed(&self, stream: bool) -> Parent {
        let error = json!({"code": "server_error", "message": "Out of luck."});
        let response =
            json!({"id": "resp_failed", "object": "response", "status": "failed", "output": [], "error": error});
        let does = if stream {
            Action::ErrorEventAfter { events: 6, body: json!({"type": "response.failed", "response": response}) }
        } else {
            Action::Status { status: 200, headers: Default::default(), body: response }
        };
        let (parent, answer) = self.make_while(does, stream).await;
        assert_eq!(answer.text().contains("Out of luck."), stream, "{}", answer.text());
        if stream { parent } else { Parent { id: "resp_failed".to_owned(), ..parent } }
    }

    /// Makes a response at an owner that does so.
    async fn make_while(&self, does: Action, stream: bool) -> (Parent, Answer) {
        let owner = self.make(stream).await.owner;
        let n_calls = self.upstream(&owner).calls().len();
        self.upstream(&owner).push(Step::new([does]));
        let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
        let answer = self.maker().post(RESPONSES.path, &[("x-session-id", "s")], &body).await;
        let calls = self.upstream(&owner).calls();
        assert_eq!(calls.len(), n_calls + 1);
        let id = calls[n_calls].response_id.clone().unwrap_or_default();
        (Parent { id, owner, stream }, answer)
    }

    /// Begins a response whose upstream stands still, in the middle of a stream or before the body of a plain answer.
    async fn standing(&self, stream: bool) -> Standing {
        let owner = self.make(stream).await.owner;
        let upstream = self.upstream(&owner);
        let (at, events) = (upstream.calls().len(), if stream { 6 } else { 0 });
        upstream.push(Step::new([Action::PauseAfter { events }]));
        let body = json!({"model": "gpt", "input": "Hello", "stream": stream});
        let client = self.maker();
        let mut asking = JoinSet::new();
        asking.spawn(async move {
            let answer = client.open(Method::POST, RESPONSES.path, &[("x-session-id", "s")], body.to_string().into());
            read(answer.await.expect("the gateway answers")).await
        });
        let begun =
            |calls: &[Call]| calls.get(at).is_some_and(|call| call.response_id.is_some() && call.events == events);
        let calls = tokio::time::timeout(PATIENCE, upstream.wait_for(begun)).await.expect("it is called");
        let id = calls[at].response_id.clone().expect("it has an id by now");
        Standing { asking, at, parent: Parent { id, owner, stream } }
    }

    async fn left(&self, stream: bool) -> Parent {
        let Standing { mut asking, at, parent } = self.standing(stream).await;
        asking.shutdown().await;
        let has_ended = |calls: &[Call]| calls[at].end.is_some();
        let ended = self.upstream(&parent.owner).wait_for(has_ended);
        tokio::time::timeout(PATIENCE, ended).await.expect("a client that leaves ends its call");
        parent
    }

    /// The gateway that makes the response is killed, and is there again.
    async fn went_down(&mut self, stream: bool) -> Parent {
        let Standing { mut asking, parent, .. } = self.standing(stream).await;
        match self {
            Self::Embedded(world) => {
                world.kill().await;
                world.restart().await;
            }
            Self::Distributed(cluster) => {
                cluster.fleet.kill(0).await;
                cluster.fleet.restart(0).await;
            }
        }
        asking.shutdown().await;
        self.settled().await;
        parent
    }

    /// A response in the background of which its owner says that it failed, when it is asked so.
    async fn failed_in_background(&self, stream: bool, how: &str) -> Parent {
        let parent = self.begin(stream).await;
        let error = json!({"code": "server_error", "message": "Out of luck."});
        let response = json!({"id": parent.id, "object": "response", "status": "failed", "output": [], "error": error});
        let does = if how.is_empty() {
            Action::Status { status: 200, headers: Default::default(), body: response }
        } else {
            Action::ErrorEventAfter { events: 1, body: json!({"type": "response.failed", "response": response}) }
        };
        self.upstream(&parent.owner).push(Step::new([does]));
        let told = self.about(&parent, Method::GET, how).await;
        assert_eq!((told.status.as_u16(), told.whole), (200, true));
        assert!(told.text().contains("Out of luck."), "{}", told.text());
        parent
    }
}

/// DESIGN.md section 10, "ended streams": `incomplete` is owned as `completed` is.
#[tokio::test]
async fn an_incomplete_answer_can_be_continued() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            stage.upstreams().iter().for_each(|upstream| upstream.push(Step::new([Action::Incomplete])));
            let parent = stage.make(stream).await;
            stage.clear();
            stage.check(&parent, PLAINLY, SERVED).await;
        }
    }
}

/// What the API is asked not to store cannot be continued by its id, by nobody.
#[tokio::test]
async fn an_answer_that_is_not_stored_is_owned_by_nobody() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let body = json!({"model": "gpt", "input": "Hello", "stream": stream, "store": false});
            let parent = stage.make_of(&stage.maker(), body).await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
        }
    }
}
