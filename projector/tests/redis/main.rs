//! The shared state in a real Redis that is killed, emptied, cut and written to by two at once: in the end every key is
//! what a fresh fold of the log gives.

mod rebuild;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use ::redis::{Client, Commands, Connection};
use tempfile::TempDir;
use waybill_events::log::{Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::story::{Teller, attempt, context, selection};
use waybill_projector::redis::{Fold, ProjectError, Projection, RedisProjector, Settings, Standing, Turn, Write};
use waybill_schema::event::{Class, Context, Effect, Event, Fact, KeyType, Preference, Selection, Sticky};
use waybill_schema::frame::Frame;
use waybill_schema::id::{AffinityKey, MemberId, Revision};
use waybill_schema::redis::{Keys, Mark, Pin, Place, Snapshot, Value};
use waybill_schema::time::Time;
use waybill_servers::redis::{Keeps, Options, Redis};

const PREFIX: &str = "wb:";
const RECORDS_MAX: usize = 300;
/// Each append waits for the disk.
const FRAMES_AT_ONCE: usize = 40;

/// A small generator with a seed: the same seed gives the same history.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// A log on disk that some gateways write to.
struct World {
    folder: TempDir,
    log: SqliteLog,
    gateways: Vec<Teller>,
    dice: Dice,
    now: i64,
}

impl World {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let log = Self::open(&folder, "log");
        let gateways = ["gw-a", "gw-b", "gw-c"].map(Teller::new).into();
        let mut world = Self { folder, log, gateways, dice: Dice(seed), now: Time::wall_clock().0 };
        for n in 0..world.gateways.len() {
            let started = world.gateways[n].starts(world.now);
            world.store(n, &[started]);
        }
        world
    }

    fn open(folder: &TempDir, name: &str) -> SqliteLog {
        SqliteLog::open(&folder.path().join(name), Box::new(|_, _| Ok(()))).expect("the log opens")
    }

    fn store(&mut self, gateway: usize, facts: &[Fact]) {
        let frame = self.gateways[gateway].seals(facts);
        append(&mut self.log, &[frame], self.now);
    }

    /// So many frames, some of a gateway at a time, of random facts about few members and some more keys than there may
    /// be records.
    fn lives(&mut self, n_frames: usize) {
        for n in (0..n_frames).step_by(FRAMES_AT_ONCE) {
            let gateway = usize::try_from(self.dice.below(3)).expect("a small number");
            let frames: Vec<Frame> = (n..n_frames.min(n + FRAMES_AT_ONCE))
                .map(|_| {
                    let n_facts = 1 + self.dice.below(12);
                    let facts: Vec<Fact> = (0..n_facts).map(|_| self.fact(gateway)).collect();
                    self.gateways[gateway].seals(&facts)
                })
                .collect();
            append(&mut self.log, &frames, self.now);
        }
    }

    fn fact(&mut self, gateway: usize) -> Fact {
        self.now += 1 + i64::try_from(self.dice.below(20)).expect("a small number");
        let key = format!("acme:lg:main:m:gpt:chat:sess:{}", self.dice.below(400));
        let channel = ["a", "b", "c"][usize::try_from(self.dice.below(3)).expect("a small number")];
        let event = match self.dice.below(10) {
            0..4 => Event::Selection(Box::new(claim(&key, channel))),
            4..7 => Event::Preference(Box::new(preference(&key, channel, None))),
            _ => {
                let class = [Class::Success, Class::Timeout, Class::ModelUnsupported];
                let effect = [Effect::Recover, Effect::Count, Effect::Block];
                let kind = usize::try_from(self.dice.below(3)).expect("a small number");
                let mut attempt = attempt("r", 1, class[kind]);
                attempt.member = MemberId::new(format!("main/gpt/{channel}"));
                attempt.deployment = format!("{channel}/gpt").as_str().into();
                attempt.effect = effect[kind];
                attempt.sticky = Some(key.as_str().into());
                Event::Attempt(Box::new(attempt))
            }
        };
        self.gateways[gateway].says(self.now, event)
    }

    /// What a fresh fold of the log holds in generation `n`, and its mark.
    fn folded(&mut self, n: u64) -> (BTreeMap<String, String>, Mark) {
        let mut fold = Fold::new(RECORDS_MAX);
        loop {
            let frames = self.log.read(Seq(fold.mark().seq), 100).expect("the log can be read");
            if frames.is_empty() {
                break;
            }
            frames.iter().for_each(|frame| fold.take(frame).expect("the frame can be folded"));
        }
        let everything = fold.everything(&Keys::new(PREFIX).generation(n));
        let pairs = everything.into_iter().map(|Write { key, value, .. }| (key, value.expect("it is there")));
        (pairs.collect(), fold.mark().clone())
    }
}

fn append(log: &mut SqliteLog, frames: &[Frame], now: i64) {
    let last = log.last(&frames[0].header.writer).expect("the log can be read");
    log.append(frames, last.map(|last| last.seq), Time(now)).expect("the log takes the frames");
}

fn claim(key: &str, channel: &str) -> Selection {
    let sticky = Some(Sticky { key: key.into(), by: KeyType::Sess });
    let context = Some(Context { sticky, ..context() });
    let deployment = format!("{channel}/gpt").as_str().into();
    let member = MemberId::new(format!("main/gpt/{channel}"));
    Selection { claim: true, context, deployment, member, ..selection("r", 1, channel) }
}

fn preference(key: &str, channel: &str, base: Option<Revision>) -> Preference {
    Preference {
        request: "r".into(),
        key: key.into(),
        member: MemberId::new(format!("main/gpt/{channel}")),
        deployment: format!("{channel}/gpt").as_str().into(),
        incarnation: 1,
        model: "gpt-4.1".into(),
        pool: "main".into(),
        path: Vec::new(),
        chains: Vec::new(),
        base,
        ttl_ms: 7_200_000,
    }
}

fn settings(redis: &Redis) -> Settings {
    Settings { url: redis.url(), prefix: PREFIX.to_owned(), records_max: RECORDS_MAX }
}

fn projector(redis: &Redis) -> RedisProjector {
    RedisProjector::new(&settings(redis)).expect("the URL is one")
}

/// Takes turns, through errors that pass, until Redis holds all that the log does.
fn catch_up(projector: &mut RedisProjector, world: &mut World) {
    for _ in 0..100_000 {
        match projector.turn(&mut world.log, Time(world.now)) {
            Ok(Turn::CaughtUp) => return,
            Ok(_) => {}
            Err(error) => assert!(!error.is_final(), "{error}"),
        }
    }
    panic!("the projector does not catch up");
}

fn connect(redis: &Redis) -> Connection {
    let client = Client::open(redis.url()).expect("the URL is one");
    client.get_connection().expect("the server answers")
}

/// Everything in generation `n` but its meta, and the mark in that.
fn held(redis: &Redis, n: u64) -> (BTreeMap<String, String>, Mark) {
    let (mut connection, generation) = (connect(redis), Keys::new(PREFIX).generation(n));
    let mut keys: Vec<String> = connection.keys(format!("{}*", generation.prefix())).expect("the server answers");
    keys.retain(|key| *key != generation.meta());
    let values: Vec<String> = match keys.len() {
        0 => Vec::new(),
        _ => connection.mget(&keys).expect("the server answers"),
    };
    let mark: Option<String> = connection.hget(generation.meta(), "mark").expect("the server answers");
    let mark = mark.and_then(|mark| Mark::decode(&mark)).unwrap_or_else(Mark::start);
    (keys.into_iter().zip(values).collect(), mark)
}

fn active(redis: &Redis) -> Option<u64> {
    connect(redis).get(Keys::new(PREFIX).active()).expect("the server answers")
}

/// Generation `n` is what a fresh fold gives, key by key, and is the one that is read.
fn check(redis: &Redis, world: &mut World, n: u64) {
    let ((held, held_mark), (folded, mark)) = (held(redis, n), world.folded(n));
    assert_eq!((held_mark, active(redis)), (mark, Some(n)));
    for (key, value) in &folded {
        assert_eq!(held.get(key), Some(value), "{key}");
    }
    let extra: Vec<&String> = held.keys().filter(|key| !folded.contains_key(*key)).collect();
    assert_eq!(extra, Vec::<&String>::new(), "keys that the fold does not have");
}

fn server(keeps: Keeps) -> Redis {
    Redis::start(&Options { keeps })
}

#[test]
fn a_cluster_reads_who_is_bound_and_who_is_ill() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(1));
    let (now, key) = (world.now, "acme:lg:main:m:gpt:chat:sess:s");
    let mut failed = attempt("r", 2, Class::Timeout);
    (failed.thresholds.failures, failed.effect) = (1, Effect::Count);
    let facts = [
        world.gateways[0].says(now + 1, Event::Selection(Box::new(claim(key, "east")))),
        world.gateways[0].says(now + 2, Event::Preference(Box::new(preference(key, "east", None)))),
        world.gateways[0].says(now + 3, Event::Attempt(Box::new(failed))),
    ];
    world.store(0, &facts);
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 1);

    let (held, _) = held(&redis, 1);
    let generation = Keys::new(PREFIX).generation(1);
    let pin = Pin::decode(&held[&generation.affinity(&AffinityKey::from(key))]).expect("it is a pin");
    assert_eq!((pin.route_id.as_str(), pin.shadow_group_id.as_str()), ("east/gpt", "east"));
    assert_eq!((pin.public_model.as_str(), pin.model.as_str(), pin.provisional), ("gpt", "gpt-4.1", false));
    // A frame is stored at `now`, as it was sent: its facts are as old as they say.
    assert_eq!((pin.bound_at, pin.last_ok_at), (Time(now + 1), Some(Time(now + 2))));
    assert_eq!((pin.expires_at, pin.revision.to_string()), (Time(now + 2 + 7_200_000), "gw-a:1:3".to_owned()));
    let cool = &held[&generation.route_cool(&"main/gpt/a".into())];
    let until = now + 3 + 1000;
    assert_eq!(*cool, format!(r#"{{"incarnation":1,"cooldown_until":{until},"reason":"timeout","upstream":false}}"#));
    let (_, snapshot) = Snapshot::decode(&held[&generation.health()]).expect("it is a snapshot");
    assert_eq!(snapshot.members.len(), 1);
    let place = Place::decode(&held[&generation.writer(&"gw-a".into())]);
    assert_eq!(place, Some(Place { epoch: 1, number: 4, at: Time(now + 3) }));
}

#[test]
fn members_that_are_all_well_are_shown_as_well_by_a_fresh_fold_too() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(1));
    let mut succeeded = attempt("r", 1, Class::Success);
    succeeded.effect = Effect::Recover;
    let fact = world.gateways[0].says(world.now + 1, Event::Attempt(Box::new(succeeded)));
    world.store(0, &[fact]);
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 1);
    assert!(held(&redis, 1).0.contains_key(&Keys::new(PREFIX).generation(1).health()));
}

#[test]
fn any_history_ends_in_what_a_fresh_fold_gives() {
    let redis = server(Keeps::Nothing);
    let (mut world, mut projector) = (World::new(2), projector(&redis));
    for _ in 0..8 {
        world.lives(40);
        catch_up(&mut projector, &mut world);
        check(&redis, &mut world, 1);
    }
}

/// Kills at any moment, with whatever the disk has by then; half of what it has cut off at times.
fn killed(keeps: Keeps, seed: u64) {
    let mut redis = server(keeps);
    let (mut world, mut at_work) = (World::new(seed), projector(&redis));
    for round in 0..6 {
        world.lives(120);
        for _ in 0..world.dice.below(8) {
            let _ = at_work.turn(&mut world.log, Time(world.now));
        }
        redis.kill();
        let while_away = at_work.turn(&mut world.log, Time(world.now));
        assert!(while_away.is_err_and(|error| !error.is_final()), "an outage passes");
        if round % 2 == 1 {
            redis.cut_append_file(redis.append_file_bytes() / 2);
        }
        redis.restart();
        if round % 3 == 2 {
            at_work = projector(&redis);
        }
        catch_up(&mut at_work, &mut world);
        check(&redis, &mut world, 1);
    }
}

#[test]
fn a_killed_redis_that_syncs_always_ends_as_a_fresh_fold() {
    killed(Keeps::Always, 3);
}

#[test]
fn a_killed_redis_that_syncs_every_second_ends_as_a_fresh_fold() {
    killed(Keeps::EverySecond, 4);
}

#[test]
fn a_killed_redis_that_never_syncs_ends_as_a_fresh_fold() {
    killed(Keeps::Sometimes, 5);
}

/// The whole as a process runs it, with the server killed and frozen under it while the log grows.
#[test]
fn a_running_projector_comes_through_kills_and_a_freeze_by_itself() {
    let mut redis = server(Keeps::EverySecond);
    let mut world = World::new(11);
    let (stop, settings) = (AtomicBool::new(false), settings(&redis));
    let (tell, told) = sync_channel(1);
    let second = World::open(&world.folder, "log");
    let mut projection = Projection::new(Box::new(second), &settings).expect("the URL is one");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::park_timeout(projection.turn());
                let _ = tell.try_send(projection.standing().clone());
            }
        });
        for round in 0..8 {
            world.lives(100);
            match round % 4 {
                0 => redis.restart(),
                1 => {
                    redis.kill();
                    redis.cut_append_file(redis.append_file_bytes() / 3);
                    redis.restart();
                }
                2 => {
                    redis.stop();
                    world.lives(20);
                    redis.cont();
                }
                _ => redis.flush(),
            }
            let head = world.log.head().expect("the log can be read").0;
            let caught_up = |standing: &Standing| standing.caught_up && standing.seq == head;
            assert!(told.iter().any(|standing| caught_up(&standing)));
            check(&redis, &mut world, 1);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_redis_that_keeps_nothing_is_filled_again() {
    let mut redis = server(Keeps::Nothing);
    let (mut world, mut projector) = (World::new(6), projector(&redis));
    for flushed in [true, false, true] {
        world.lives(150);
        catch_up(&mut projector, &mut world);
        if flushed {
            redis.flush();
        } else {
            redis.restart();
        }
        assert_eq!(active(&redis), None);
        catch_up(&mut projector, &mut world);
        check(&redis, &mut world, 1);
    }
}

#[test]
fn a_batch_whose_answer_was_lost_is_there_once() {
    let redis = server(Keeps::Nothing);
    let (mut world, mut projector) = (World::new(7), projector(&redis));
    catch_up(&mut projector, &mut world);
    world.lives(5);
    redis.stop();
    let error = projector.turn(&mut world.log, Time(world.now)).expect_err("a frozen server does not answer");
    assert!(!error.is_final());
    redis.cont();
    world.lives(60);
    catch_up(&mut projector, &mut world);
    check(&redis, &mut world, 1);
}

#[test]
fn of_two_projectors_the_older_stands_by_and_takes_over_when_the_other_is_gone() {
    let redis = server(Keeps::Nothing);
    let (mut world, mut older) = (World::new(8), projector(&redis));
    world.lives(50);
    catch_up(&mut older, &mut world);
    let mut newer = projector(&redis);
    catch_up(&mut newer, &mut world);
    for _ in 0..10 {
        world.lives(20);
        assert_eq!(older.turn(&mut world.log, Time(world.now)).expect("both answer"), Turn::StandsBy);
        catch_up(&mut newer, &mut world);
        assert_eq!(older.turn(&mut world.log, Time(world.now)).expect("both answer"), Turn::StandsBy);
        check(&redis, &mut world, 1);
    }
    drop(newer);
    world.lives(20);
    let told = |at: i64, older: &mut RedisProjector, world: &mut World| {
        older.turn(&mut world.log, Time(at)).expect("both answer")
    };
    let since = world.now;
    told(since, &mut older, &mut world);
    assert_eq!(told(since + 9_999, &mut older, &mut world), Turn::StandsBy);
    told(since + 10_001, &mut older, &mut world);
    catch_up(&mut older, &mut world);
    check(&redis, &mut world, 1);
}

#[test]
fn a_zombie_writes_nothing_and_what_two_write_at_once_is_one_fold() {
    let redis = server(Keeps::Nothing);
    let (mut world, mut zombie) = (World::new(9), projector(&redis));
    world.lives(50);
    catch_up(&mut zombie, &mut world);
    let mut newer = projector(&redis);
    world.lives(200);
    newer.turn(&mut world.log, Time(world.now)).expect("both answer");
    let before = held(&redis, 1);
    assert_eq!(zombie.turn(&mut world.log, Time(world.now)).expect("both answer"), Turn::StandsBy);
    assert_eq!(held(&redis, 1), before);
    // Both begin where Redis is empty, and neither knows of the other's epoch.
    redis.flush();
    let mut pair = [projector(&redis), newer];
    for n in 0..40 {
        world.lives(10);
        let at_work = &mut pair[n % 2];
        at_work.turn(&mut world.log, Time(world.now)).expect("both answer");
    }
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 1);
}

#[test]
fn a_log_that_lost_its_end_stops_the_projector_and_one_that_grew_again_gets_a_new_generation() {
    let redis = server(Keeps::Nothing);
    let (mut world, mut projector) = (World::new(10), projector(&redis));
    world.lives(100);
    let whole = world.log.read(Seq::START, 1000).expect("the log can be read");
    catch_up(&mut projector, &mut world);

    let mut shorter = World::open(&world.folder, "shorter");
    for frame in &whole[..60] {
        let parsed = Frame::parse(frame.bytes.clone()).expect("it is a frame");
        append(&mut shorter, &[parsed], frame.sent.0);
    }
    world.log = shorter;
    let error = projector.turn(&mut world.log, Time(world.now)).expect_err("the log is behind");
    assert!(matches!(error, ProjectError::LogLost { mark: 103, head: 60 }), "{error}");
    let before = held(&redis, 1);

    // Gateways that were started anew speak on in other epochs.
    world.gateways = ["gw-x", "gw-y", "gw-z"].map(Teller::new).into();
    for n in 0..3 {
        let started = world.gateways[n].starts(world.now);
        world.store(n, &[started]);
    }
    world.lives(80);
    catch_up(&mut projector, &mut world);
    check(&redis, &mut world, 2);
    assert_eq!(held(&redis, 1), before, "the generation before stays for a way back");
}
