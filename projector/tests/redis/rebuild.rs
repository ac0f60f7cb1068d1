//! The shared state made anew beside a projector that runs, looked at beside it, and gone back from; and what stops a
//! projection, or begins a new generation.

use ::redis::Commands;
use waybill_events::log::{Log, StoredFrame};
use waybill_projector::finding::Finding;
use waybill_projector::postgres::Swapped;
use waybill_projector::redis::{ProjectError, Rebuild, Verified, WorkError, verify};
use waybill_schema::frame::{Body, Frame};
use waybill_schema::redis::{Generation, Keys};
use waybill_schema::time::Time;
use waybill_servers::redis::{Keeps, Redis};

use crate::{PREFIX, World, append, catch_up, check, connect, held, projector, server, settings};

fn filled(world: &mut World, mut rebuild: Rebuild) -> (Rebuild, Verified) {
    let head = world.log.head().expect("the log can be read");
    rebuild.fill_to(&mut world.log, head, &mut |_| {}).expect("the generation can be filled");
    let verified = rebuild.compare(&mut world.log).expect("what is stored is what was folded");
    (rebuild, verified)
}

fn looked(redis: &Redis, world: &mut World) -> Verified {
    let verified = verify(&mut world.log, &settings(redis), &mut |_| {}).expect("both can be read");
    verified.expect("a generation is read")
}

fn generation(n: u64) -> Generation {
    Keys::new(PREFIX).generation(n)
}

#[test]
fn a_rebuild_beside_a_running_projector_is_the_same_fold_and_the_projector_goes_on_with_it() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(20));
    world.lives(150);
    let mut running = projector(&redis);
    catch_up(&mut running, &mut world);
    let rebuild = Rebuild::begin(&settings(&redis), "one").expect("nobody else rebuilds");
    let (rebuild, first) = filled(&mut world, rebuild);
    let refused = Rebuild::begin(&settings(&redis), "another").expect_err("one rebuild at a time");
    assert!(matches!(refused, WorkError::Rebuilding), "{refused}");
    world.lives(60);
    catch_up(&mut running, &mut world);
    check(&redis, &mut world, 1);

    assert_eq!(rebuild.swap().expect("it can be named"), Swapped { from: Some(1), to: 2 });
    world.lives(10);
    // One turn notices, the next one goes on there.
    running.turn(&mut world.log, Time(world.now)).expect("both answer");
    let stays = held(&redis, 1);
    running.turn(&mut world.log, Time(world.now)).expect("both answer");
    assert_eq!(running.generation(), 2);
    catch_up(&mut running, &mut world);
    check(&redis, &mut world, 2);
    assert_eq!(held(&redis, 1), stays, "the generation before stays");

    let again = Rebuild::begin(&settings(&redis), "two").expect("the one before has ended");
    let (again, second) = filled(&mut world, again);
    assert_eq!((again.generation(), second.findings.n), (3, 0));
    assert!(second.seq > first.seq && second.digest != first.digest);
    again.give_up().expect("it can be removed");
    assert!(held(&redis, 3).0.is_empty());
    check(&redis, &mut world, 2);
}

#[test]
fn two_rebuilds_have_equal_digests() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(21));
    world.lives(200);
    let mut digests = Vec::new();
    for n in 0..2 {
        redis.flush();
        let rebuild = Rebuild::begin(&settings(&redis), &format!("{n}")).expect("nobody else rebuilds");
        let (rebuild, verified) = filled(&mut world, rebuild);
        rebuild.swap().expect("it can be named");
        check(&redis, &mut world, 1);
        digests.push((verified.keys, verified.digest));
    }
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn the_generation_before_is_gone_back_to_and_brought_to_the_logs_end() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(22));
    let refused = Rebuild::go_back(&settings(&redis), "a").expect_err("nothing is read");
    assert_eq!(refused.to_string(), "no generation is read, so there is none before it");
    // It holds the right to rebuild for a minute.
    redis.flush();
    world.lives(100);
    catch_up(&mut projector(&redis), &mut world);
    let (rebuild, _) = filled(&mut world, Rebuild::begin(&settings(&redis), "b").expect("nobody rebuilds"));
    rebuild.swap().expect("it can be named");
    let mut running = projector(&redis);
    world.lives(100);
    catch_up(&mut running, &mut world);

    let back = Rebuild::go_back(&settings(&redis), "c").expect("there is a way back");
    let (back, _) = filled(&mut world, back);
    assert_eq!(back.swap().expect("it can be named"), Swapped { from: Some(2), to: 1 });
    check(&redis, &mut world, 1);
    world.lives(20);
    catch_up(&mut running, &mut world);
    check(&redis, &mut world, 1);
    let refused = Rebuild::go_back(&settings(&redis), "d").expect_err("none was before it");
    assert_eq!(refused.to_string(), "generation 1 is read, and none was before it");
}

#[test]
fn keys_changed_by_hand_are_named_and_others_are_not() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(23));
    world.lives(150);
    let mut running = projector(&redis);
    catch_up(&mut running, &mut world);
    assert_eq!(looked(&redis, &mut world).findings.n, 0);
    let (keys, _) = held(&redis, 1);
    let pins: Vec<&String> = keys.keys().filter(|key| key.starts_with(&format!("{PREFIX}g1:s:"))).collect();
    let changed = keys[pins[0]].replacen("/gpt", "/gpu", 1);
    let mut hand = connect(&redis);
    let _: () = hand.set(pins[0], changed).expect("the server answers");
    let _: () = hand.del(pins[1]).expect("the server answers");
    let _: () = hand.set(generation(1).route_cool(&"main/gpt/zz".into()), "{}").expect("the server answers");
    let verified = looked(&redis, &mut world);
    let mut expected = [
        format!("redis {}: the log says another value", pins[0]),
        format!("redis {}: is missing", pins[1]),
        "redis wb:g1:routecool:main/gpt/zz: the log says nothing of it".to_owned(),
    ];
    expected.sort();
    let mut named: Vec<String> = verified.findings.named.iter().map(Finding::to_string).collect();
    named.sort();
    assert_eq!((named, verified.findings.n), (expected.to_vec(), 3));
}

#[test]
fn keys_are_compared_at_the_mark_of_the_moment_beside_a_projector_that_is_behind() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(24));
    world.lives(200);
    let mut running = projector(&redis);
    catch_up(&mut running, &mut world);
    world.lives(200);
    running.turn(&mut world.log, Time(world.now)).expect("both answer");
    let verified = looked(&redis, &mut world);
    let head = world.log.head().expect("the log can be read");
    assert!(verified.seq < head, "the projector is behind");
    assert_eq!((verified.findings.n, verified.incomparable), (0, None));
}

fn spoil_mark(redis: &Redis, change: impl FnOnce(&str) -> String) {
    let mut hand = connect(redis);
    let mark: String = hand.hget(generation(1).meta(), "mark").expect("the server answers");
    let _: () = hand.hset(generation(1).meta(), "mark", change(&mark)).expect("the server answers");
}

#[test]
fn another_fold_begins_a_new_generation_and_a_newer_one_is_not_touched() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(25));
    world.lives(60);
    catch_up(&mut projector(&redis), &mut world);
    let before = held(&redis, 1).0;
    let fold = |mark: &str, fold: u32| format!("{} {fold}", mark.rsplit_once(' ').expect("a mark has words").0);
    spoil_mark(&redis, |mark| fold(mark, 99));
    let error = projector(&redis).turn(&mut world.log, Time(world.now)).expect_err("a newer program made it");
    assert!(matches!(error, ProjectError::NewerFold { generation: 1, fold: 99 }), "{error}");
    assert_eq!(held(&redis, 1).0, before);
    spoil_mark(&redis, |mark| fold(mark, 0));
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 2);
    assert_eq!(held(&redis, 1).0, before);
}

/// World seeds 379 and 388: a server that lost its end gives the same place to the same bytes, at another time.
#[test]
fn the_same_bytes_at_the_same_place_at_another_time_begin_a_new_generation() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(26));
    world.lives(60);
    let mut running = projector(&redis);
    catch_up(&mut running, &mut world);
    let sql = "UPDATE frames SET stored = stored + 1 WHERE seq = (SELECT max(seq) FROM frames)";
    world.log.connection().execute_batch(sql).expect("the file takes the statement");
    catch_up(&mut running, &mut world);
    check(&redis, &mut world, 2);
}

/// Issue 4: "a newer event version stops a projection without losing anything".
#[test]
fn a_newer_event_stops_it_behind_what_it_could_read_and_an_upgrade_goes_on() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(27));
    world.lives(30);
    catch_up(&mut projector(&redis), &mut world);
    world.lives(10);
    let (before, (folded, mark)) = (world.log.head().expect("the log can be read"), world.folded(1));
    let fact = world.gateways[0].starts(world.now);
    let mut line = Vec::new();
    Body::of(&fact.event, fact.at).write_line(fact.revision.number, &mut line);
    let newer = String::from_utf8(line.clone()).expect("a line is text").replacen("\"v\":1", "\"v\":99", 1);
    let frame = world.gateways[0].seals_lines(&fact.revision, 1, newer.as_bytes());
    append(&mut world.log, &[frame], world.now);
    world.lives(10);
    let mut stopped = projector(&redis);
    let error = (0..100).find_map(|_| stopped.turn(&mut world.log, Time(world.now)).err()).expect("it stops");
    assert!(error.is_final() && error.to_string().contains("event `started` version 99"), "{error}");
    // What lies before is written, or will be: nothing behind is.
    let (_, at) = held(&redis, 1);
    assert!(at.seq <= before.0 && mark.seq == before.0, "{at:?}");
    assert!(!folded.is_empty());
    // An upgraded program reads that version; here the frame becomes one that this one reads.
    let sql = "UPDATE frames SET body = CAST(replace(CAST(body AS TEXT), '\"v\":99', '\"v\":1') AS BLOB)";
    let sql = format!("{sql} WHERE seq = {}", before.0 + 1);
    world.log.connection().execute_batch(&sql).expect("the file takes the statement");
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 1);
}

/// Issue 4: "an undecodable frame is quarantined and its neighbours live"; Postgres keeps the bytes, Redis passes over.
#[test]
fn an_undecodable_frame_is_passed_over_and_its_neighbours_live() {
    let (redis, mut world) = (server(Keeps::Nothing), World::new(28));
    world.lives(30);
    let sql = "INSERT INTO frames (writer, epoch, frame, first, last, sum, sent, stored, body)
               VALUES ('x', 1, 1, 1, 1, '', 0, 0, CAST('no frame' AS BLOB))";
    world.log.connection().execute_batch(sql).expect("the file takes the statement");
    world.lives(30);
    catch_up(&mut projector(&redis), &mut world);
    check(&redis, &mut world, 1);
    let frames: Vec<StoredFrame> = world.log.read(waybill_events::log::Seq::START, 1000).expect("the log can be read");
    let n_writers = held(&redis, 1).0.keys().filter(|key| key.contains(":writer:")).count();
    assert_eq!((frames.iter().filter(|frame| Frame::parse(frame.bytes.clone()).is_err()).count(), n_writers), (1, 3));
}
