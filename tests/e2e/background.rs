//! Responses that are made in the background: they go on whoever listens, and their owner is asked how they stand.

use http::Method;
use serde_json::{Value, json};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, read};
use crate::continuation::{FOREIGN, Kind, PLAINLY, Parent, SERVED, Stage, UNKNOWN, ask, id_in, page, plan};
use crate::dialect::RESPONSES;
use crate::world::{KEY, PATIENCE};

/// S3.9: a response in the background is found by its id from the beginning, and can be continued once it has ended.
#[tokio::test]
async fn a_background_response_is_asked_for_at_its_owner_and_continued_once_it_has_ended() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let parent = stage.make_of(&stage.maker(), background(false)).await;
        stage.check(&parent, PLAINLY, UNKNOWN).await;
        let got = stage.about(&parent, Method::GET, "").await;
        assert_eq!((got.status.as_u16(), &got.json()["status"]), (200, &json!("completed")));
        stage.check(&parent, PLAINLY, SERVED).await;

        let streamed = stage.make_of(&stage.maker(), background(true)).await;
        stage.check(&streamed, PLAINLY, SERVED).await;
    }
}

/// The same of one that is made as a stream, and of one that is not: its input and its end are the owner's to tell. One that
/// was cancelled came to no end that can be gone on from (DESIGN.md section 10, "ended streams").
#[tokio::test]
async fn a_background_response_is_cancelled_and_read_at_its_owner() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        for stream in [false, true] {
            let parent = stage.begin(stream).await;
            let items = stage.about(&parent, Method::GET, "/input_items?limit=2").await;
            assert_eq!((items.status.as_u16(), &items.json()["data"][0]["role"]), (200, &json!("user")));
            let cancelled = stage.about(&parent, Method::POST, "/cancel").await;
            assert_eq!((cancelled.status.as_u16(), &cancelled.json()["status"]), (200, &json!("cancelled")));
            stage.check(&parent, PLAINLY, UNKNOWN).await;
            let got = stage.about(&parent, Method::GET, "").await;
            assert_eq!((got.status.as_u16(), &got.json()["status"]), (200, &json!("cancelled")));
            stage.settled().await;
            stage.check(&parent, PLAINLY, UNKNOWN).await;
            stage.upstream(&parent.owner).release();
        }
    }
}

/// OpenAI's way to go on with a stream that broke: `GET …?stream=true&starting_after=N`, at whichever gateway. Until an end
/// has been shown there is nothing to continue.
#[tokio::test]
async fn a_background_stream_that_broke_is_followed_at_its_owner_from_where_it_broke() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("")).await;
        let whole = stage.maker().post(RESPONSES.path, &[("x-session-id", "s")], &background(true)).await;
        let n_events = whole.text().matches("event: ").count();
        stage.upstreams().iter().for_each(|upstream| upstream.push(Step::new([Action::CutAfterEvents { events: 6 }])));
        let cut = stage.maker().post(RESPONSES.path, &[("x-session-id", "s")], &background(true)).await;
        assert_eq!((cut.whole, cut.text().matches("event: ").count()), (false, 6), "it did not fail, it goes on");
        let parent = Parent { id: id_in(&cut), ..stage.parent_in(&whole, true) };
        stage.clear();
        stage.check(&parent, PLAINLY, UNKNOWN).await;

        stage.upstream(&parent.owner).push(Step::new([Action::CutAfterEvents { events: 2 }]));
        let again = stage.about(&parent, Method::GET, "?stream=true&starting_after=5").await;
        assert_eq!((again.status.as_u16(), again.whole, events(&again)), (200, false, (6..8).collect()));
        stage.check(&parent, PLAINLY, UNKNOWN).await;

        let rest = stage.about(&parent, Method::GET, "?starting_after=7&stream=true").await;
        assert_eq!(rest.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!((rest.status.as_u16(), rest.whole, events(&rest)), (200, true, (8..n_events).collect()));
        let all = stage.about(&parent, Method::GET, "?stream=true").await;
        assert_eq!([&cut.body[..], &again.body, &rest.body].concat(), all.body, "no byte is missing, and none is new");
        let beyond = stage.about(&parent, Method::GET, &format!("?stream=true&starting_after={}", n_events - 1)).await;
        assert_eq!((beyond.status.as_u16(), beyond.whole, beyond.text().as_str()), (200, true, ""));
        stage.check(&parent, PLAINLY, SERVED).await;
    }
}

/// What is no event of the dialect says nothing of the response: it breaks the stream, and the response is followed, and
/// followed again, to its end.
#[tokio::test]
async fn a_background_stream_with_words_of_another_dialect_breaks_and_its_response_goes_on() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, plan("health: { enabled: false }\n")).await;
        let foreign = |events: u32| {
            let body = json!({"error": {"message": "no", "code": "500"}});
            stage.upstreams().iter().for_each(|upstream| {
                upstream.push(Step::new([Action::ErrorEventAfter { events, body: body.clone() }]));
            });
        };
        foreign(6);
        let begun = stage.maker().post(RESPONSES.path, &[("x-session-id", "s")], &background(true)).await;
        let parent = stage.parent_in(&begun, true);
        stage.clear();
        assert_eq!((begun.whole, events(&begun)), (false, (0..6).collect()), "{}", begun.text());
        stage.check(&parent, PLAINLY, UNKNOWN).await;

        foreign(2);
        let again = stage.about(&parent, Method::GET, "?stream=true&starting_after=5").await;
        stage.clear();
        assert_eq!((again.whole, events(&again)), (false, vec![6, 7]), "{}", again.text());
        stage.check(&parent, PLAINLY, UNKNOWN).await;

        let rest = stage.about(&parent, Method::GET, "?stream=true&starting_after=7").await;
        assert!(rest.whole && rest.text().contains("response.completed"), "{}", rest.text());
        let all = stage.about(&parent, Method::GET, "?stream=true").await;
        assert_eq!(
            [&begun.body[..], &again.body, &rest.body].concat(),
            all.body,
            "no byte is missing, and none is new"
        );
        stage.check(&parent, PLAINLY, SERVED).await;
    }
}

/// What is followed may be silent for long, may be told to have failed, or may not be offered: that is the owner's to say.
#[tokio::test]
async fn what_an_owner_says_of_a_background_stream_is_passed_on_as_it_is_said() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let settings = "retry: { backoff_ms: 1, first_token_seconds: 1 }\nhealth: { failure_threshold: 1 }\n";
        let mut stage = Stage::start(kind, plan("").settings(settings)).await;
        let parent = stage.make_of(&stage.maker(), background(true)).await;
        let follow = format!("{}?stream=true", page(&parent));
        for (key, path) in [(FOREIGN, follow.clone()), (KEY, follow.replace(&parent.id, "resp_none"))] {
            let answer = ask(&stage.other_with(key), Method::GET, &path).await;
            let code = answer.json()["error"]["code"].clone();
            assert_eq!((answer.status.as_u16(), code), (404, json!("previous_response_not_found")));
        }
        let owner = stage.upstream(&parent.owner);
        owner.push(Step::new([Action::PauseAfter { events: 0 }]));
        let client = stage.other();
        let begun = client.open(Method::GET, &follow, &[], Default::default());
        let begun = tokio::time::timeout(PATIENCE, begun).await.expect("it begins before a word").expect("it is there");
        owner.release();
        assert!(read(begun).await.text().contains("response.completed"));

        let failed = json!({"type": "response.failed", "sequence_number": 1, "response": {"id": parent.id,
            "status": "failed", "error": {"code": "server_error", "message": "Out of luck."}}});
        owner.push(Step::new([Action::ErrorEventAfter { events: 1, body: failed.clone() }]));
        let answer = stage.about(&parent, Method::GET, "?stream=true").await;
        assert_eq!((answer.status.as_u16(), answer.whole), (200, true));
        assert!(answer.text().ends_with(&format!("event: response.failed\ndata: {failed}\n\n")), "{}", answer.text());

        let plain = stage.make(false).await;
        let answer = stage.about(&plain, Method::GET, "?stream=true").await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!("stream")));
        let got = stage.about(&parent, Method::GET, "").await;
        assert_eq!(got.status, 200);
        // None of it is held against the owner.
        stage.check(&parent, PLAINLY, SERVED).await;
        if let Stage::Embedded(world) = &mut stage {
            world.stop().await;
            // What it was told, be it of a failure, was told; what could not be asked was the caller's mistake.
            let sql = "SELECT outcome, coalesce(error_class, '-'), class, usage_events.status, count(*)
                       FROM usage_events JOIN usage_attempts USING (request_id) WHERE signal = 'path:response_id'
                       GROUP BY 1, 2, 3, 4 ORDER BY 1";
            assert_eq!(world.table(sql), ["failed|caller_error|caller_error|400|1", "success|-|success|200|3"]);
        }
    }
}

/// PITFALLS: a stream in the background may take minutes to its first word; its id is passed on at once.
#[tokio::test]
async fn a_background_stream_names_its_response_before_it_says_anything() {
    let stage = Stage::start(Kind::Embedded, plan("")).await;
    let begun = tokio::time::timeout(PATIENCE, stage.begin(true)).await.expect("the first event is passed on");
    stage.upstream(&begun.owner).release();
}

/// A request for a response in the background.
pub(crate) fn background(stream: bool) -> Value {
    json!({"model": "gpt", "input": "Hello", "background": true, "stream": stream})
}

/// The numbers of the events in an answer.
fn events(answer: &Answer) -> Vec<usize> {
    let text = answer.text();
    let numbers = text.split("\"sequence_number\":").skip(1).map(|rest| rest.split([',', '}']).next());
    numbers.map(|number| number.expect("split gives one").parse().expect("a number")).collect()
}

impl Stage {
    /// Makes a response in the background; a stream stands still after its first event, and its client leaves.
    pub(crate) async fn begin(&self, stream: bool) -> Parent {
        if !stream {
            return self.make_of(&self.maker(), background(false)).await;
        }
        self.upstreams().iter().for_each(|upstream| upstream.push(Step::new([Action::PauseAfter { events: 1 }])));
        let begun = RESPONSES.read_until(&self.maker(), &background(true), "response.created").await;
        let owner = begun.headers()["x-waybill-deployment"].to_str().expect("it is text");
        let owner = owner.split('/').next().expect("a deployment names its channel").to_owned();
        let id = self.upstream(&owner).calls().pop().and_then(|call| call.response_id);
        self.clear();
        Parent { id: id.expect("the upstream gave it an id"), owner, stream }
    }
}
