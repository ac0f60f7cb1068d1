//! The log on JetStream, over real servers: the conformance suite, and what only a server can show.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use waybill_events::jetstream::{ACK_TIMEOUT, ANSWER_TIMEOUT, Flush, JetstreamLog, Settings, flush};
use waybill_events::log::{AppendError, Log, Seq, StoredFrame};
use waybill_events::shipper::{Health, Shipper};
use waybill_events::spool::{Options, Spool};
use waybill_schema::event::Epoch;
use waybill_schema::frame::{CHAIN_START, Frame, Link};
use waybill_schema::time::Time;
use waybill_servers::nats::{self, Nats, NatsCluster, Release};

use super::conformance::SENT;
use super::{body, line, reading};

/// Longer than any wait that ends well.
const LONG: Duration = Duration::from_secs(60);
/// Waits for a connection (half a second), an acknowledgement, and an answer to what stands in its place; and a busy
/// machine.
const BOUND: Duration = Duration::from_millis(500 + 1_000).saturating_add(ACK_TIMEOUT).saturating_add(ANSWER_TIMEOUT);
/// More tries than any wait of these tests needs: each takes 10 ms at least.
const TRIES_MAX: usize = 6_000;

fn server(jetstream: &'static str) -> Nats {
    Nats::start(&nats::Options { jetstream, ..nats::Options::default() })
}

fn settings(servers: Vec<String>, replicas: u32) -> Settings {
    Settings { servers, stream: "WAYBILL".into(), replicas, bytes_max: 64 << 20 }
}

fn open(nats: &Nats) -> JetstreamLog {
    JetstreamLog::new(settings(vec![nats.url()], 1)).unwrap()
}

/// Opens the log on a cluster and waits until its stream has a leader that this connection's server knows of.
fn open_cluster(cluster: &NatsCluster) -> JetstreamLog {
    let mut log = JetstreamLog::new(settings(cluster.urls(), 3)).unwrap();
    until(|| log.head().and_then(|_| log.last(&"nobody".into())).and_then(|_| log.read(Seq::START, 1)).ok());
    log
}

super::conformance::suite!(conforms, {
    let nats = server("");
    move || open(&nats)
});

super::conformance::suite!(conforms_on_the_oldest_server, {
    let nats = Nats::start(&nats::Options { release: Release::Oldest, ..nats::Options::default() });
    move || open(&nats)
});

super::conformance::suite!(conforms_on_three_servers, {
    let cluster = NatsCluster::start(3);
    move || open_cluster(&cluster)
});

/// A frame of `gw-a` with the one fact `number`, of about `bytes` bytes.
fn frame(link: Link, number: u64, bytes: usize) -> Frame {
    Frame::seal("gw-a".into(), 1, link, number, 1, line(number, &"x".repeat(bytes)).as_bytes())
}

/// Frames one behind the other, from the first on.
fn frames(count: u64, bytes: usize) -> Vec<Frame> {
    let mut link = Link::start();
    (1..=count)
        .map(|number| {
            let frame = frame(link.clone(), number, bytes);
            link = Link::after(&frame.header);
            frame
        })
        .collect()
}

/// Tries until the log takes `frame`, as the shipper does: a conflict is resolved by the sum of the last frame.
fn insist(log: &mut JetstreamLog, frame: &Frame, expected: Option<Seq>) -> Seq {
    for _ in 0..TRIES_MAX {
        match log.append(std::slice::from_ref(frame), expected, SENT) {
            Ok(appended) => return appended[0].seq,
            Err(AppendError::Conflict { .. }) => {
                let last = until(|| log.last(&"gw-a".into()).ok()).expect("there is a last frame");
                assert_eq!(last.header, frame.header, "another frame is in this one's place");
                return last.seq;
            }
            Err(AppendError::Unavailable(_)) => pause(),
            Err(refused) => panic!("{refused:?}"),
        }
    }
    panic!("the log does not come back");
}

/// Asks until there is an answer.
fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let answers = std::iter::repeat_with(|| {
        ask().or_else(|| {
            pause();
            None
        })
    })
    .take(TRIES_MAX);
    answers.flatten().next().expect("it comes to pass")
}

fn pause() {
    std::thread::park_timeout(Duration::from_millis(10));
}

fn read_all(log: &mut JetstreamLog) -> Vec<StoredFrame> {
    until(|| log.read(Seq::START, 100_000).ok())
}

/// Checks that the frames are `count` ones of one chain: none lost, none twice.
fn assert_one_chain(stored: Vec<StoredFrame>, count: u64) {
    let mut prev = CHAIN_START.to_owned();
    let numbers: Vec<u64> = stored
        .into_iter()
        .map(|stored| {
            let header = reading::facts(&stored).0;
            assert_eq!(header.prev, prev, "frame {} continues the chain", header.frame);
            prev = header.sum;
            header.frame
        })
        .collect();
    assert_eq!(numbers, (1..=count).collect::<Vec<_>>());
}

fn assert_unavailable<T: std::fmt::Debug>(result: Result<T, AppendError>) -> String {
    match result {
        Err(AppendError::Unavailable(cause)) => cause.to_string(),
        other => panic!("not unavailable but {other:?}"),
    }
}

/// What `call` gives, and a failure where it takes longer than [`BOUND`].
fn bounded<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let (tell, told) = sync_channel(1);
        let thread = scope.spawn(move || {
            let done = call();
            // Nobody listens where the bound has passed already.
            let _ = tell.send(());
            done
        });
        told.recv_timeout(BOUND).expect("the call ends within its bound");
        thread.join().expect("the call does not panic")
    })
}

#[test]
fn a_server_killed_under_a_writer_loses_and_doubles_nothing() {
    let mut nats = server("");
    let mut log = open(&nats);
    let frames = frames(600, 100);
    let (mut seq, mut written) = (None, 0);
    std::thread::scope(|scope| {
        let (tell, told) = sync_channel(0);
        let server = &mut nats;
        scope.spawn(move || {
            // Each message is a moment in the middle of the writing.
            for () in told {
                server.kill();
                server.restart();
            }
        });
        for frame in &frames {
            seq = Some(insist(&mut log, frame, seq));
            written += 1;
            if written % 200 == 100 {
                tell.send(()).unwrap();
            }
        }
    });
    assert_one_chain(read_all(&mut log), 600);
}

#[test]
fn a_server_that_is_away_fails_each_call_in_time_and_is_used_when_it_comes() {
    let mut nats = server("");
    nats.kill();
    let mut log = open(&nats);
    let frames = frames(1, 10);
    assert_unavailable(bounded(|| log.append(&frames, None, SENT)));
    assert!(bounded(|| log.last(&"gw-a".into())).is_err());
    assert!(bounded(|| log.read(Seq::START, 1)).is_err());
    assert!(bounded(|| log.read_of(&"gw-a".into(), Seq::START, 1)).is_err());
    assert!(bounded(|| log.head()).is_err());
    nats.restart();
    insist(&mut log, &frames[0], None);
    assert_one_chain(read_all(&mut log), 1);
}

#[test]
fn a_frozen_server_hangs_no_call_and_what_it_was_sent_is_stored_once() {
    let nats = server("");
    let mut log = open(&nats);
    let frames = frames(3, 10);
    let first = log.append(&frames[..1], None, SENT).unwrap()[0].seq;
    nats.stop();
    assert_unavailable(bounded(|| log.append(&frames[1..2], Some(first), SENT)));
    assert!(bounded(|| log.read(Seq::START, 1)).is_err());
    assert!(bounded(|| log.head()).is_err());
    assert_unavailable(bounded(|| log.append(&frames[1..2], Some(first), SENT)));
    nats.cont();
    let second = insist(&mut log, &frames[1], Some(first));
    insist(&mut log, &frames[2], Some(second));
    assert_one_chain(read_all(&mut log), 3);
}

#[test]
fn a_first_call_to_a_frozen_server_ends_in_time() {
    let nats = server("");
    nats.stop();
    let mut log = open(&nats);
    assert_unavailable(bounded(|| log.append(&frames(1, 10), None, SENT)));
}

#[test]
fn a_server_that_turns_the_log_away_is_tried_again() {
    let closed = nats::Options { server: "authorization { token: other }", ..nats::Options::default() };
    let mut nats = Nats::start(&closed);
    let mut log = open(&nats);
    let frames = frames(2, 10);
    assert_unavailable(bounded(|| log.append(&frames[..1], None, SENT)));
    nats.restart_with(&nats::Options::default());
    let seq = insist(&mut log, &frames[0], None);
    nats.restart_with(&closed);
    until(|| log.append(&frames[1..], Some(seq), SENT).err());
    nats.restart_with(&nats::Options::default());
    insist(&mut log, &frames[1], Some(seq));
    assert_one_chain(read_all(&mut log), 2);
}

#[test]
fn a_full_stream_is_unavailable_and_takes_frames_when_there_is_room() {
    let nats = server("");
    let mut log = JetstreamLog::new(Settings { bytes_max: 64 << 10, ..settings(vec![nats.url()], 1) }).unwrap();
    let frames = frames(10, 20 << 10);
    let mut seq = None;
    let full = frames.iter().position(|frame| match log.append(std::slice::from_ref(frame), seq, SENT) {
        Ok(appended) => {
            seq = Some(appended[0].seq);
            false
        }
        Err(AppendError::Unavailable(cause)) => {
            assert!(cause.to_string().contains("maximum bytes exceeded"), "{cause}");
            true
        }
        Err(other) => panic!("{other:?}"),
    });
    assert_eq!(full, Some(3), "three frames of 20 KiB fit in 64 KiB");
    let mut raw = Raw::connect(&nats);
    let info = raw.ask("$JS.API.STREAM.INFO.WAYBILL", "");
    let mut config = info["config"].clone();
    config["max_bytes"] = (1 << 20).into();
    raw.ask("$JS.API.STREAM.UPDATE.WAYBILL", &config.to_string());
    for frame in &frames[3..] {
        seq = Some(insist(&mut log, frame, seq));
    }
    assert_one_chain(read_all(&mut log), 10);
}

#[test]
fn too_many_requests_are_unavailable_and_pass() {
    let nats = server("max_buffered_msgs: 2\nsync_interval: always");
    let mut log = open(&nats);
    let mut raw = Raw::connect(&nats);
    let frames = frames(100, 10);
    let (mut seq, mut stored) = (None, 0);
    let said = until(|| {
        raw.flood("wb.v1.noise", 2_000);
        match log.append(std::slice::from_ref(&frames[stored]), seq, SENT) {
            Ok(appended) => {
                (seq, stored) = (Some(appended[0].seq), stored + 1);
                None
            }
            refused => Some(assert_unavailable(refused)),
        }
    });
    assert!(said.contains("too many requests"), "{said}");
    insist(&mut log, &frames[stored], seq);
    let of_writer = log.read_of(&"gw-a".into(), Seq::START, 1_000).unwrap();
    assert_one_chain(of_writer, stored as u64 + 1);
}

#[test]
fn a_frame_that_no_server_takes_is_refused() {
    let nats = Nats::start(&nats::Options { server: "max_payload: 64KB", ..nats::Options::default() });
    let error = open(&nats).append(&frames(1, 100 << 10), None, SENT).unwrap_err();
    assert!(matches!(error, AppendError::Refused(_)), "{error:?}");
}

#[test]
fn a_writer_that_was_replaced_conflicts() {
    let nats = server("");
    let (mut zombie, mut successor) = (open(&nats), open(&nats));
    let first = frame(Link::start(), 1, 10);
    let seq = zombie.append(std::slice::from_ref(&first), None, SENT).unwrap()[0].seq;
    let last = successor.last(&"gw-a".into()).unwrap().expect("there is a frame");
    let link = Link::after(&last.header);
    let second = Frame::seal("gw-a".into(), 2, link, 1, 1, line(1, "successor").as_bytes());
    let taken = successor.append(&[second], Some(last.seq), SENT).unwrap()[0].seq;
    match zombie.append(&[frame(Link::after(&first.header), 2, 10)], Some(seq), SENT) {
        Err(AppendError::Conflict { expected, actual }) => assert_eq!((expected, actual), (Some(seq), Some(taken))),
        other => panic!("no conflict but {other:?}"),
    }
    assert_eq!(zombie.last(&"gw-a".into()).unwrap().map(|last| last.epoch()), Some(Epoch { epoch: 2, last: 1 }));
}

#[test]
fn a_sequence_that_was_given_out_twice_is_not_taken_for_the_expected_one() {
    let mut nats = server("");
    let mut log = open(&nats);
    let first = frame(Link::start(), 1, 10);
    let seq = log.append(std::slice::from_ref(&first), None, SENT).unwrap()[0].seq;
    nats.kill();
    std::fs::remove_dir_all(nats.store_dir()).unwrap();
    nats.restart();
    let other = Frame::seal("gw-a".into(), 2, Link::start(), 1, 1, line(1, "other").as_bytes());
    assert_eq!(open(&nats).append(&[other], None, SENT).unwrap()[0].seq, seq);
    let second = frame(Link::after(&first.header), 2, 10);
    let refused = std::iter::repeat_with(|| log.append(std::slice::from_ref(&second), Some(seq), SENT))
        .find(|appended| !matches!(appended, Err(AppendError::Unavailable(_))));
    assert!(matches!(refused, Some(Err(AppendError::Conflict { .. }))), "{refused:?}");
}

#[test]
fn a_stream_that_would_lose_frames_is_refused_by_the_name_of_its_setting() {
    let nats = server("");
    let mut raw = Raw::connect(&nats);
    let unsuitable = [
        (r#""discard":"old""#, "discard"),
        (r#""discard":"new","max_age":60000000000"#, "max_age"),
        (r#""discard":"new","max_msgs_per_subject":5"#, "max_msgs_per_subject"),
        (r#""discard":"new","retention":"workqueue""#, "retention"),
        (r#""discard":"new","storage":"memory""#, "storage"),
        (r#""discard":"new","max_msg_size":1000"#, "max_msg_size"),
        (r#""discard":"new","allow_direct":false"#, "allow_direct"),
    ];
    for (number, (settings_of_it, setting)) in unsuitable.into_iter().enumerate() {
        let stream = format!("S{number}");
        let fine = r#""storage":"file","retention":"limits","allow_direct":true,"num_replicas":1"#;
        // A field that comes twice counts as it comes last.
        let config = format!(r#"{{"name":"{stream}","subjects":["wb.v1.*"],{fine},{settings_of_it}}}"#);
        raw.ask(&format!("$JS.API.STREAM.CREATE.{stream}"), &config);
        let mut log = JetstreamLog::new(Settings { stream: stream.clone(), ..settings(vec![nats.url()], 1) }).unwrap();
        match log.append(&frames(1, 10), None, SENT) {
            Err(AppendError::Refused(cause)) => {
                let said = cause.to_string();
                assert!(said.contains(&format!("{stream} would not keep every frame: {setting} is ")), "{said}");
            }
            other => panic!("{setting}: not refused but {other:?}"),
        }
        assert!(log.read(Seq::START, 1).is_err(), "{setting}");
        raw.ask(&format!("$JS.API.STREAM.DELETE.{stream}"), "");
    }
}

#[test]
fn a_stream_with_too_few_replicas_is_refused() {
    let nats = server("");
    open(&nats).head().unwrap();
    let error = JetstreamLog::new(settings(vec![nats.url()], 3)).unwrap().append(&frames(1, 10), None, SENT);
    match error {
        Err(AppendError::Refused(cause)) => {
            assert!(cause.to_string().contains("num_replicas is 1, and must be at least 3"), "{cause}");
        }
        other => panic!("not refused but {other:?}"),
    }
}

#[test]
fn three_servers_go_on_without_one() {
    let mut cluster = NatsCluster::start(3);
    let mut log = open_cluster(&cluster);
    let frames = frames(60, 100);
    let mut seq = None;
    for (number, frame) in frames.iter().enumerate() {
        if number == 20 {
            cluster.server(0).kill();
        }
        if number == 40 {
            cluster.server(0).restart();
            cluster.server(1).kill();
        }
        seq = Some(insist(&mut log, frame, seq));
    }
    assert_one_chain(until(|| Some(read_all(&mut log)).filter(|read| read.len() == 60)), 60);
}

#[test]
fn a_frozen_server_is_left_for_another_of_its_cluster() {
    let cluster = NatsCluster::start(3);
    let mut log = open_cluster(&cluster);
    // It knows of the other servers from the one alone.
    let mut writer = JetstreamLog::new(settings(vec![cluster.urls().swap_remove(0)], 3)).unwrap();
    let frames = frames(2, 10);
    let first = insist(&mut writer, &frames[0], None);
    cluster.servers()[0].stop();
    insist(&mut writer, &frames[1], Some(first));
    assert_one_chain(until(|| Some(read_all(&mut log)).filter(|read| read.len() == 2)), 2);
}

#[test]
fn a_gap_in_the_sequences_is_read_over() {
    let nats = server("");
    let mut raw = Raw::connect(&nats);
    let config = r#"{"name":"WAYBILL","subjects":["wb.v1.*"],"storage":"file","retention":"limits","discard":"new",
        "allow_direct":true,"num_replicas":1}"#;
    raw.ask("$JS.API.STREAM.CREATE.WAYBILL", config);
    let mut log = open(&nats);
    log.append(&frames(300, 10), None, SENT).unwrap();
    for seq in [1, 2, 7, 255, 256, 257, 300] {
        raw.ask("$JS.API.STREAM.MSG.DELETE.WAYBILL", &format!(r#"{{"seq":{seq}}}"#));
    }
    let read: Vec<u64> = log.read(Seq::START, 1_000).unwrap().iter().map(|stored| stored.seq.0).collect();
    let left = |seq: &u64| ![1, 2, 7, 255, 256, 257, 300].contains(seq);
    assert_eq!(read, (1..=300).filter(left).collect::<Vec<_>>());
    let of_one: Vec<u64> = log.read_of(&"gw-a".into(), Seq(6), 2).unwrap().iter().map(|stored| stored.seq.0).collect();
    assert_eq!(of_one, [8, 9]);
}

#[test]
fn frames_are_stored_by_the_servers_clock_and_sent_by_the_writers() {
    let nats = server("");
    let mut log = open(&nats);
    let before = Time::wall_clock();
    log.append(&frames(1, 10), None, SENT).unwrap();
    let stored = log.read(Seq::START, 1).unwrap().remove(0);
    assert_eq!(stored.sent, SENT);
    assert!((before.0..=Time::wall_clock().0).contains(&stored.stored.0), "{stored:?}");
}

#[test]
fn what_the_spool_holds_arrives_once_though_the_server_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut nats = server("");
    let (mut spool, reader, _) = Spool::open(&dir.path().join("spool"), Options::default()).unwrap();
    spool.begin(1).unwrap();
    let shipper = Shipper::start("gw-a".into(), reader, Box::new(open(&nats))).unwrap();
    for round in 0..3_u64 {
        for n in 0..100 {
            spool.append(&[body(&format!("{}", round * 100 + n))]).unwrap();
        }
        if round == 1 {
            nats.kill();
            spool.append(&[body("away")]).unwrap();
            shipper.progress().wait_until(LONG, |standing| matches!(standing.health, Health::Waiting { .. }));
            nats.restart();
        }
    }
    let standing = shipper.progress().wait_for(Epoch { epoch: 1, last: 301 }, LONG);
    assert_eq!((standing.shipped, standing.health), (Some(Epoch { epoch: 1, last: 301 }), Health::Shipping));
    let mut log = open(&nats);
    let stored = read_all(&mut log);
    let numbers: Vec<u64> = stored
        .iter()
        .flat_map(|stored| reading::facts(stored).1)
        .map(|fact| fact.expect("a good line").revision.number)
        .collect();
    assert_eq!(numbers, (1..=301).collect::<Vec<_>>());
    let count = stored.len() as u64;
    assert_one_chain(stored, count);
}

#[test]
fn a_new_life_of_a_writer_takes_up_where_the_log_stands() {
    let dir = tempfile::tempdir().unwrap();
    let nats = server("");
    for epoch in 1..=2 {
        let (mut spool, reader, _) = Spool::open(&dir.path().join("spool"), Options::default()).unwrap();
        spool.begin(epoch).unwrap();
        spool.append(&[body("one"), body("two")]).unwrap();
        let shipper = Shipper::start("gw-a".into(), reader, Box::new(open(&nats))).unwrap();
        assert_eq!(shipper.stop(LONG).shipped, Some(Epoch { epoch, last: 2 }));
    }
    assert_one_chain(read_all(&mut open(&nats)), 2);
}

#[test]
fn inspection_says_what_an_acknowledgement_stands_on() {
    let nats = server("sync_interval: always");
    let mut log = open(&nats);
    let before = log.inspect().unwrap();
    assert_eq!((before.version.as_str(), before.api_level > 0, &before.stream), ("2.15.1", true, &None));
    log.append(&frames(2, 10), None, SENT).unwrap();
    let standing = log.inspect().unwrap().stream.expect("the first append made the stream");
    assert_eq!((standing.replicas, standing.replicas_current, standing.discard.as_str()), (1, 1, "new"));
    assert_eq!((standing.frames, standing.head, standing.bytes_max), (2, 2, Some(64 << 20)));
    let monitoring = |nats: &Nats| nats.monitoring_url().trim_start_matches("http://").to_owned();
    assert_eq!(flush(&monitoring(&nats)).unwrap(), Flush::Always);
    assert_eq!(flush(&monitoring(&server(""))).unwrap(), Flush::EveryMs(120_000), "two minutes unless told otherwise");
}

/// A connection of another program, in the bare protocol.
struct Raw {
    stream: TcpStream,
}

impl Raw {
    fn connect(nats: &Nats) -> Self {
        let mut stream = TcpStream::connect(nats.url().trim_start_matches("nats://")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(b"CONNECT {\"verbose\":false}\r\nSUB answer 1\r\n").unwrap();
        Self { stream }
    }

    /// Asks and gives the answer, which must be no error.
    fn ask(&mut self, subject: &str, payload: &str) -> serde_json::Value {
        write!(self.stream, "PUB {subject} answer {}\r\n{payload}\r\n", payload.len()).unwrap();
        let length = until(|| {
            let line = self.line();
            line.strip_prefix("MSG ").map(|rest| rest.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
        });
        let mut answer = vec![0; length + 2];
        self.stream.read_exact(&mut answer).unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        assert!(answer.get("error").is_none(), "{subject}: {answer}");
        answer
    }

    /// Publishes without waiting for anything.
    fn flood(&mut self, subject: &str, count: usize) {
        let messages = format!("PUB {subject} 1\r\nx\r\n").repeat(count);
        self.stream.write_all(messages.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap().trim_end().to_owned()
    }
}
