//! The vault: a request with an `Idempotency-Key` is made once, and the same request gets the same answer (D13).

use bytes::Bytes;
use futures_util::future::join;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use waybill_servers::nats::{self, Nats};
use waybill_servers::redis::{Options, Redis};
use waybill_simulator::{Action, Step};

use crate::client::{Answer, Client};
use crate::continuation::{self, Kind, Stage};
use crate::dialect::RESPONSES;
use crate::fleet::Fleet;
use crate::follow::ready_when;
use crate::gate::{FORM, by_hand, form, read_at_least, read_to_end, send_form};
use crate::limits;
use crate::world::{PATIENCE, Plan, Rows, World};

const SPEECH: &str = "/v1/audio/speech";

fn says(content_type: &str, text: &str) -> Action {
    let headers = [("content-type".to_owned(), content_type.to_owned())];
    Action::Status { status: 200, headers: headers.into(), body: json!(text) }
}

fn plan() -> Plan {
    Plan::of(&["a"]).settings("retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n")
}

async fn ask(client: &Client, path: &str, key: &str, text: &str) -> Answer {
    client.post(path, &[("idempotency-key", key)], &json!({"model": "gpt", "input": text})).await
}

#[track_caller]
fn check(answer: &Answer, status: u16, code: &str, retry: (Option<&str>, Option<&str>)) {
    let error: Value = answer.json()["error"].clone();
    assert_eq!((answer.status.as_u16(), &error["code"]), (status, &json!(code)), "{error}");
    assert_eq!((answer.header("retry-after"), answer.header("x-should-retry")), retry, "{error}");
}

const NEVER: (Option<&str>, Option<&str>) = (None, Some("false"));

/// Asks until the answer says something else than that the request is under way.
async fn settled(client: &Client, key: &str, text: &str) -> Answer {
    let settled = async {
        loop {
            let answer = ask(client, SPEECH, key, text).await;
            if answer.status == 200 || answer.json()["error"]["code"] != "idempotency_in_progress" {
                return answer;
            }
        }
    };
    tokio::time::timeout(PATIENCE, settled).await.expect("the outcome comes to be known")
}

/// Same key and body: the outcome, whatever it is, also after a restart; another body or path of the key, another
/// caller: as they should. What rests in the file cannot be read there.
#[tokio::test]
async fn the_same_request_gets_the_same_answer_once() {
    let mut world = World::start(plan()).await;
    let client = world.client();
    world.upstreams[0].push(says("audio/mpeg", "ID3 the sphinx speaks"));
    let first = ask(&client, SPEECH, "k-1", "Hello").await;
    assert_eq!((first.status.as_u16(), first.header("x-waybill-repeated")), (200, None));
    let same = |answer: &Answer| {
        assert_eq!((answer.status.as_u16(), &answer.body), (200, &first.body), "{}", answer.text());
        assert_eq!(answer.header("content-type"), Some("audio/mpeg"));
        assert_eq!(
            (answer.header("x-waybill-repeated"), answer.header("x-waybill-attempts")),
            (Some("true"), Some("0"))
        );
    };
    same(&settled(&client, "k-1", "Hello").await);
    check(&ask(&client, SPEECH, "k-1", "Other").await, 409, "idempotency_key_reused", NEVER);
    let long = "k".repeat(256);
    check(&ask(&client, SPEECH, &long, "Hello").await, 400, "invalid_idempotency_key", NEVER);
    assert_eq!(world.calls().len(), 1);

    world.upstreams[0].push(Step::new([says("application/json", "{\"id\": 1}")]).standing());
    assert_eq!(ask(&client, "/v1/rerank", "k-1", "Hello").await.text(), "{\"id\": 1}");
    assert_eq!(ask(&world.client_with("sk-other"), SPEECH, "k-1", "Hello").await.text(), "{\"id\": 1}");
    for _ in 0..2 {
        assert_eq!(ask(&client, "/v1/images/generations", "k-1", "Hello").await.status, 200);
    }
    assert_eq!(world.calls().len(), 5, "an image is made whenever it is asked for");
    world.stop().await;
    let rows = "select outcome, status, attempts, count(*) from usage_events group by 1, 2, 3 order by 3, 1";
    let rows = world.table(rows);
    assert!(rows.contains(&"success|200|1|5".to_owned()), "{rows:?}");

    world.restart().await;
    same(&ask(&world.client(), SPEECH, "k-1", "Hello").await);
    assert_eq!(world.calls().len(), 5);
    world.stop().await;
    for file in ["vault.db", "vault.db-wal", "waybill.db"] {
        let bytes = std::fs::read(world.data().join(file)).unwrap_or_default();
        assert!(!bytes.windows(6).any(|six| six == b"sphinx"), "{file}");
    }
}

/// While it is under way: 409 with a time to ask again. Where its client left, where nobody knows what the upstream did,
/// and where its gateway died, it is not made again. Where the upstream said no, it is.
#[tokio::test]
async fn an_unknown_outcome_is_not_repeated_and_a_known_failure_is() {
    let mut world = World::start(plan()).await;
    let client = world.client();
    world.upstreams[0].push(Action::Hang);
    let under_way = ask(&client, SPEECH, "left", "Hello");
    let meanwhile = async {
        world.calls_until(|calls| calls.len() == 1).await;
        ask(&world.client(), SPEECH, "left", "Hello").await
    };
    let refused = tokio::select! {
        answer = under_way => panic!("the upstream hangs: {}", answer.text()),
        refused = meanwhile => refused,
    };
    check(&refused, 409, "idempotency_in_progress", (Some("2"), None));
    check(&settled(&client, "left", "Hello").await, 409, "idempotency_outcome_unknown", NEVER);

    world.upstreams[0].push(Action::Reset);
    assert_eq!(ask(&client, SPEECH, "reset", "Hello").await.status, 502);
    check(&settled(&client, "reset", "Hello").await, 409, "idempotency_outcome_unknown", NEVER);
    assert_eq!(world.calls().len(), 2);

    world.upstreams[0].push(Action::status(500));
    assert_eq!(ask(&client, SPEECH, "failed", "Hello").await.status, 500);
    world.upstreams[0].push(says("audio/mpeg", "ID3"));
    assert_eq!(settled(&client, "failed", "Hello").await.text(), "ID3");
    assert_eq!(world.calls().len(), 4);

    world.upstreams[0].push(Action::Hang);
    let dies = ask(&client, SPEECH, "died", "Hello");
    tokio::select! {
        answer = dies => panic!("the upstream hangs: {}", answer.text()),
        _ = world.calls_until(|calls| calls.len() == 5) => {}
    }
    world.kill().await;
    world.restart().await;
    let refused = ask(&world.client(), SPEECH, "died", "Hello").await;
    assert_eq!(refused.status, 409, "{}", refused.text());
    assert_eq!(world.calls().len(), 5);
}

/// S3.18: a request that was refused after a send because its budget was spent meanwhile has an unknown outcome where
/// that send has one.
#[tokio::test]
async fn a_budget_spent_after_a_send_makes_no_outcome_known() {
    let budget = |tokens: u32| {
        let budget = format!("budget: {{ tokens: {tokens}, period: day }}");
        let keys = vec![format!("{{ id: limited, key: 'env:LIMITED_KEY', group: main, {budget} }}")];
        let members = ["priority: 1", "priority: 2"].map(str::to_owned).to_vec();
        Plan { members, rows: Rows { keys, ..Rows::default() }, ..Plan::of(&["a", "b"]) }
            .settings("retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n")
    };
    let world = World::start(budget(1)).await;
    let client = world.client_with("sk-limited");
    world.upstreams[0].push(Action::Hang);
    let meanwhile = async {
        world.calls_until(|calls| calls.len() == 1).await;
        limits::spend(&client).await;
        world.upstreams[0].die().await.expect("an upstream can die");
    };
    let (refused, ()) = join(ask(&client, SPEECH, "k", "Hello"), meanwhile).await;
    assert_eq!((refused.status.as_u16(), refused.header("x-waybill-attempts")), (402, Some("1")));
    world.configure(&budget(1_000_000));
    ready_when(&world, |detail| detail["catalogue"]["revision"] == 2).await;
    let calls = world.calls().len();
    check(&settled(&client, "k", "Hello").await, 409, "idempotency_outcome_unknown", NEVER);
    assert_eq!(world.calls().len(), calls);
}

/// The requests for a response that have an outcome to keep, and what the whole of it ends in.
fn responses() -> [Value; 4] {
    let body = |stream: bool, background: bool| json!({"model": "gpt", "input": "Hello", "stream": stream, "background": background});
    [body(false, false), body(true, false), body(false, true), body(true, true)]
}

async fn ask_for(client: &Client, key: &str, body: &Value) -> Answer {
    let headers = [("idempotency-key", key)];
    let asked = tokio::time::timeout(PATIENCE, client.post(RESPONSES.path, &headers, body)).await;
    asked.expect("the gateway answers")
}

/// Asks until the answer says something else than that the request is under way.
async fn settled_for(client: &Client, key: &str, body: &Value) -> Answer {
    let settled = async {
        loop {
            let answer = ask_for(client, key, body).await;
            if answer.status != 409 || answer.json()["error"]["code"] != "idempotency_in_progress" {
                return answer;
            }
        }
    };
    tokio::time::timeout(PATIENCE, settled).await.expect("the outcome comes to be known")
}

/// Issue 5, item 7: a response is made once, as JSON, as a stream and in the background; whoever asks again with the same
/// body, at whichever gateway, gets it byte for byte, and can go on from it and ask about it.
#[tokio::test]
async fn a_response_is_made_once_under_a_key() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, continuation::plan("health: { enabled: false }\n")).await;
        for (n, body) in responses().iter().enumerate() {
            let (key, before) = (format!("k-{n}"), stage.upstreams().calls().len());
            let first = ask_for(&stage.maker(), &key, body).await;
            assert_eq!((first.status.as_u16(), first.header("x-waybill-repeated")), (200, None), "{}", first.text());
            for client in [stage.other(), stage.maker()] {
                let again = settled_for(&client, &key, body).await;
                assert_eq!((again.status.as_u16(), &again.body), (200, &first.body), "{body}: {}", again.text());
                assert_eq!(again.header("content-type"), first.header("content-type"));
                assert_eq!(again.header("x-waybill-repeated"), Some("true"));
                assert_eq!(again.header("x-waybill-attempts"), Some("0"));
            }
            let other = json!({"model": "gpt", "input": "Other", "stream": body["stream"]});
            check(&ask_for(&stage.other(), &key, &other).await, 409, "idempotency_key_reused", NEVER);
            let mut turned = body.clone();
            turned["stream"] = json!(body["stream"] != true);
            check(&ask_for(&stage.other(), &key, &turned).await, 409, "idempotency_key_reused", NEVER);
            assert_eq!(stage.upstreams().calls().len() - before, 1, "{body}");

            let id = continuation::id_in(&first);
            let about = stage.other().get(&format!("{}/{id}", RESPONSES.path), &[]).await;
            assert_eq!((about.status.as_u16(), about.json()["id"].as_str()), (200, Some(id.as_str())));
            let next = json!({"model": "gpt", "input": "And?", "previous_response_id": id});
            assert_eq!(ask_for(&stage.other(), &format!("next-{n}"), &next).await.status, 200);
            let again = settled_for(&stage.maker(), &format!("next-{n}"), &next).await;
            assert_eq!(
                again.header("x-waybill-repeated"),
                Some("true"),
                "a continuation is one like any: {}",
                again.text()
            );
            assert_eq!(stage.upstreams().calls().len() - before, 3);
        }
    }
}

/// The same while it is under way, where it broke off or its client left, and where no upstream made it.
#[tokio::test]
async fn a_response_whose_outcome_is_unknown_is_not_made_again() {
    for kind in [Kind::Embedded, Kind::Distributed] {
        let stage = Stage::start(kind, continuation::plan("health: { enabled: false }\n")).await;
        let all_do = |action: Action| {
            stage.upstreams().iter().for_each(|upstream| upstream.push(Step::new([action.clone()]).standing()));
        };
        for (n, body) in responses().iter().enumerate() {
            let (stream, calls) = (body["stream"] == true, || stage.upstreams().calls().len());
            let key = |what: &str| format!("{what}-{n}");
            let before = calls();

            all_do(Action::PauseAfter { events: if stream { 8 } else { 0 } });
            let maker = stage.maker();
            let (under_way, left) = (key("under-way"), key("left"));
            let meanwhile = async {
                stage.upstreams().calls_until(|calls| calls.len() == before + 1).await;
                let refused = ask_for(&stage.other(), &under_way, body).await;
                check(&refused, 409, "idempotency_in_progress", (Some("2"), None));
                stage.upstreams().iter().for_each(|upstream| upstream.release());
            };
            let (first, ()) = join(ask_for(&maker, &under_way, body), meanwhile).await;
            assert_eq!(settled_for(&stage.other(), &under_way, body).await.body, first.body);
            assert_eq!(calls(), before + 1);

            let leaves = ask_for(&maker, &left, body);
            tokio::select! {
                answer = leaves => panic!("the upstream stands still: {}", answer.text()),
                _ = stage.upstreams().calls_until(|calls| calls.len() == before + 2) => {}
            }
            let refused = settled_for(&stage.other(), &left, body).await;
            check(&refused, 409, "idempotency_outcome_unknown", NEVER);
            stage.upstreams().iter().for_each(|upstream| upstream.release());
            stage.clear();

            // A stream that broke off after its first word; of a plain answer nobody knows either.
            let n_calls = if stream || body["background"] == true { 1 } else { 3 };
            all_do(Action::CutAfterEvents { events: 8 });
            ask_for(&maker, &key("cut"), body).await;
            check(&settled_for(&stage.other(), &key("cut"), body).await, 409, "idempotency_outcome_unknown", NEVER);
            assert_eq!(calls(), before + 2 + n_calls, "{body}");
            stage.clear();

            all_do(Action::status(500));
            assert_eq!(ask_for(&maker, &key("failed"), body).await.status, 500);
            stage.clear();
            let made = settled_for(&stage.other(), &key("failed"), body).await;
            assert_eq!((made.status.as_u16(), made.header("x-waybill-repeated")), (200, None), "{}", made.text());
        }
    }
}

/// What is asked of an endpoint under a key: its headers but the key, and its body.
struct Asked {
    path: &'static str,
    content_type: &'static str,
    body: Bytes,
}

impl Asked {
    fn json(path: &'static str, text: &str) -> Self {
        let body = json!({"model": "gpt", "input": text}).to_string().into();
        Self { path, content_type: "application/json", body }
    }

    fn form(path: &'static str, body: Bytes) -> Self {
        Self { path, content_type: FORM.1, body }
    }

    /// The same form as a client would write it the next time: with another boundary.
    fn again(&self) -> Self {
        let end = self.body.len() - b"--XX--\r\n".len();
        if self.content_type != FORM.1 {
            return Self { body: self.body.clone(), ..*self };
        }
        let mut body = Vec::new();
        let mut rest = &self.body[..end];
        while let Some(at) = rest.windows(4).position(|four| four == b"--XX") {
            body.extend_from_slice(&rest[..at]);
            body.extend_from_slice(b"--a-boundary-of-its-own");
            rest = &rest[at + 4..];
        }
        body.extend_from_slice(rest);
        body.extend_from_slice(b"--a-boundary-of-its-own--\r\n");
        Self { content_type: "multipart/form-data; boundary=a-boundary-of-its-own", body: body.into(), ..*self }
    }

    async fn ask(&self, client: &Client, key: &str) -> Answer {
        let headers = [("idempotency-key", key), ("content-type", self.content_type)];
        client.post_bytes(self.path, &headers, self.body.clone()).await
    }

    async fn settled(&self, client: &Client, key: &str) -> Answer {
        let settled = async {
            loop {
                let answer = self.ask(client, key).await;
                if answer.status == 200 || answer.json()["error"]["code"] != "idempotency_in_progress" {
                    return answer;
                }
            }
        };
        tokio::time::timeout(PATIENCE, settled).await.expect("the outcome comes to be known")
    }
}

/// What is kept, each asked for in one way and in another: JSON, forms that are read whole, and forms that pass.
fn all_kept() -> Vec<(Asked, Asked)> {
    let json = [SPEECH, "/v1/music", "/v1/moderations", "/v1/rerank"];
    let json = json.map(|path| (Asked::json(path, "Hello"), Asked::json(path, "Other")));
    let forms = ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/videos"];
    let forms = forms.into_iter().flat_map(|path| {
        [100, 2 << 20].map(|size| {
            let (one, mut other) = (form("gpt", size, true), form("gpt", size, true).to_vec());
            // A byte near the end of the file.
            let at = other.len() - 20;
            other[at] ^= 1;
            (Asked::form(path, one), Asked::form(path, other.into()))
        })
    });
    json.into_iter().chain(forms).collect()
}

/// Issue 5, item 7: whatever is behind the gate but images, small or large: the same again is answered by the same, though
/// its boundary is another; another file is refused; what is under way, was reset or was left is not made again.
#[tokio::test]
async fn the_same_form_gets_the_same_answer_once() {
    let world = World::start(plan()).await;
    let client = world.client();
    for (n, (asked, other)) in all_kept().into_iter().enumerate() {
        let what = format!("{} of {} bytes", asked.path, asked.body.len());
        let key = |word: &str| format!("{word}-{n}");
        let calls = || world.calls().len();
        let before = calls();
        world.upstreams[0].push(says("application/json", "{\"id\": 1}"));
        let first = asked.ask(&client, &key("k")).await;
        assert_eq!(
            (first.status.as_u16(), first.header("x-waybill-repeated")),
            (200, None),
            "{what}: {}",
            first.text()
        );
        for same in [asked.again(), asked.again().again(), asked.again()] {
            let again = same.settled(&client, &key("k")).await;
            assert_eq!((again.status.as_u16(), &again.body), (200, &first.body), "{what}: {}", again.text());
            assert_eq!(again.header("x-waybill-repeated"), Some("true"), "{what}");
        }
        check(&other.ask(&client, &key("k")).await, 409, "idempotency_key_reused", NEVER);
        check(&other.again().ask(&client, &key("k")).await, 409, "idempotency_key_reused", NEVER);
        assert_eq!(calls() - before, 1, "{what}");

        world.upstreams[0].push(Action::Reset);
        assert_eq!(asked.ask(&client, &key("reset")).await.status, 502, "{what}");
        check(&asked.again().settled(&client, &key("reset")).await, 409, "idempotency_outcome_unknown", NEVER);

        world.upstreams[0].push(Action::Hang);
        let left = key("left");
        let under_way = asked.ask(&client, &left);
        let meanwhile = async {
            world.calls_until(|calls| calls.len() == before + 3).await;
            asked.again().ask(&world.client(), &left).await
        };
        let refused = tokio::select! {
            answer = under_way => panic!("the upstream hangs: {}", answer.text()),
            refused = meanwhile => refused,
        };
        check(&refused, 409, "idempotency_in_progress", (Some("2"), None));
        check(&asked.settled(&client, &left).await, 409, "idempotency_outcome_unknown", NEVER);

        world.upstreams[0].push(Action::status(500));
        assert_eq!(asked.ask(&client, &key("failed")).await.status, 500, "{what}");
        world.upstreams[0].push(says("application/json", "{\"id\": 2}"));
        assert_eq!(asked.again().settled(&client, &key("failed")).await.text(), "{\"id\": 2}", "{what}");
        assert_eq!(calls() - before, 5, "{what}");
    }
    let twice = [form("gpt", 2 << 20, true), form("other", 10, true)].concat();
    let refused = Asked::form("/v1/videos", twice.into());
    assert_eq!(refused.ask(&client, "twice").await.status, 400);
    check(&refused.settled(&client, "twice").await, 409, "idempotency_outcome_unknown", NEVER);
}

/// A key whose request nobody took is free again; one whose first send may have done its work is not, whatever the second
/// was answered with.
#[tokio::test]
async fn a_key_is_free_where_nothing_was_sent() {
    let members = ["priority: 1", "priority: 2"].map(str::to_owned).to_vec();
    let settings = "retry: { backoff_ms: 1, max_attempts: 1 }\nhealth: { enabled: false }\n";
    let world = World::start(Plan { members, ..Plan::of(&["a", "b"]) }.settings(settings)).await;
    let client = world.client();
    for upstream in world.upstreams.iter() {
        upstream.die().await.expect("an upstream can die");
    }
    let large = Asked::form("/v1/videos", form("gpt", 2 << 20, true));
    let all = [Asked::json(SPEECH, "Hello"), large];
    for asked in &all {
        let answer = asked.ask(&client, "k-1").await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("x-waybill-attempts")),
            (502, Some("2")),
            "{}",
            answer.text()
        );
    }
    for upstream in world.upstreams.iter() {
        upstream.revive().await.expect("an upstream can come back");
    }
    for asked in &all {
        world.upstreams[0].push(says("application/json", "{\"id\": 1}"));
        assert_eq!(asked.settled(&client, "k-1").await.text(), "{\"id\": 1}");
        assert_eq!(asked.again().settled(&client, "k-1").await.header("x-waybill-repeated"), Some("true"));
    }
    world.upstreams[0].push(Action::Reset);
    world.upstreams[1].push(Action::status(500));
    assert_eq!(all[0].ask(&client, "k-2").await.status, 500);
    check(&all[0].settled(&client, "k-2").await, 409, "idempotency_outcome_unknown", NEVER);
}

/// A form that is still coming: its client leaves, the upstream breaks off, or answers before its end. What became of it is
/// known only where the upstream said no.
#[tokio::test]
async fn a_form_that_did_not_pass_whole_leaves_a_truthful_outcome() {
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    const REFUSAL: &[u8] =
        b"HTTP/1.1 500 Oops\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{\"error\": 1}";
    let mut world = World::start(plan()).await;
    let upstream = by_hand(&mut world).await;
    let body = form("gpt", 4 << 20, true);
    let asked = Asked::form("/v1/audio/transcriptions", body.clone());
    let table = [
        ("left", None, "idempotency_outcome_unknown"),
        ("reset", None, "idempotency_outcome_unknown"),
        ("answered", Some(ANSWER), "idempotency_outcome_unknown"),
        ("refused", Some(REFUSAL), ""),
    ];
    for (what, answers, code) in table {
        let mut client = send_form(&world, &format!("idempotency-key: {what}\r\n"), &body).await;
        client.write_all(&body[..2 << 20]).await.expect("half can be sent");
        let (mut call, _) = upstream.accept().await.expect("the gateway calls");
        read_at_least(&mut call, 1 << 20).await;
        if let Some(answer) = answers {
            call.write_all(answer).await.expect("the gateway reads");
        }
        let told = if what == "left" {
            drop(client);
            read_to_end(&mut call).await;
            None
        } else {
            if answers.is_none() {
                drop(call);
            }
            Some(read_at_least(&mut client, 12).await)
        };
        let told = told.map(|told| String::from_utf8_lossy(&told[9..12]).into_owned());
        let expected = [("reset", "502"), ("answered", "200"), ("refused", "500")];
        let expected = expected.into_iter().find(|(word, _)| *word == what).map(|(_, status)| status.to_owned());
        assert_eq!(told, expected, "{what}");
        let client = world.client();
        if code.is_empty() {
            let serve = async {
                let (mut call, _) = upstream.accept().await.expect("the gateway calls again");
                read_at_least(&mut call, body.len()).await;
                call.write_all(ANSWER).await.expect("the gateway reads");
                call
            };
            let (again, _) = join(asked.settled(&client, what), serve).await;
            assert_eq!((again.status.as_u16(), again.header("x-waybill-repeated")), (200, None), "{what}");
        } else {
            check(&asked.settled(&client, what).await, 409, code, NEVER);
        }
    }
}

/// Gateways that share a Redis share outcomes; without it nothing is made under a key, and all else goes on.
#[tokio::test]
async fn outcomes_are_shared_through_redis() {
    let (nats, mut redis) = (Nats::start(&nats::Options::default()), Redis::start(&Options::default()));
    let settings = format!("retry: {{ max_attempts: 1 }}\nstate: {{ redis: '{}' }}\n", redis.url());
    let fleet = Fleet::start(plan().settings(&settings), 2, &[nats.url()]).await;
    fleet.upstreams[0].push(says("audio/mpeg", "ID3"));
    assert_eq!(ask(&fleet.client(0), SPEECH, "k-1", "Hello").await.text(), "ID3");
    assert_eq!(settled(&fleet.client(1), "k-1", "Hello").await.text(), "ID3");
    check(&ask(&fleet.client(1), SPEECH, "k-1", "Other").await, 409, "idempotency_key_reused", NEVER);
    redis.kill();
    check(&ask(&fleet.client(0), SPEECH, "k-2", "Hello").await, 503, "vault_unavailable", (None, None));
    assert_eq!(fleet.upstreams.calls().len(), 1);
    let chat = json!({"model": "gpt", "messages": [{"role": "user", "content": "Hello"}]});
    assert_eq!(fleet.client(0).post("/v1/chat/completions", &[], &chat).await.status, 200);
}
