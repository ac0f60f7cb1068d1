//! What it passes over, what it stops at, and how it starts over.

use waybill_projections::story::Teller;
use waybill_projector::postgres::{Begin, Phase};
use waybill_schema::FOLD_VERSION;
use waybill_schema::frame::Body;
use waybill_schema::id::Revision;

use crate::world::{NIGHT, World, catch_up, requests, same, turn_until};

fn line(fact: &waybill_schema::event::Fact) -> String {
    let mut line = Vec::new();
    Body::of(&fact.event, fact.at).write_line(fact.revision.number, &mut line);
    String::from_utf8(line).expect("a line is text")
}

#[test]
fn a_damaged_line_rests_in_quarantine_and_its_neighbours_live() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let facts =
        [gw.starts(NIGHT), gw.selects(NIGHT, "r1", 1, "a"), gw.selects(NIGHT, "r2", 1, "a"), gw.starts(NIGHT + 1)];
    let damaged = "{\"k\":\"selection\",\"v\":1,\"n\":2,\"t\":0,\"b\":\"\\u0000\\ud800\"}\n";
    let lines = [line(&facts[0]), damaged.to_owned(), line(&facts[2])].concat();
    let first: Revision = facts[0].revision.clone();
    let frame = gw.seals_lines(&first, 3, lines.as_bytes());
    world.append(&gw, &[frame]);
    world.tell(&mut gw, &facts[3..]);
    world.sql_on_log(
        "INSERT INTO frames (seq, writer, epoch, frame, first, last, sum, sent, stored, body)
         VALUES (9, 'x', 1, 1, 1, 1, '', 0, 0, CAST('no frame' AS BLOB))",
    );
    let mut projector = world.projector();
    catch_up(&mut projector);
    let database = world.database();
    assert_eq!(database.rows("SELECT request_id, outcome FROM waybill.usage_events"), ["r2 abandoned"]);
    let sql = "SELECT seq, line, convert_from(bytes, 'UTF8') FROM waybill.quarantine ORDER BY 1";
    assert_eq!(database.rows(sql), [format!("1 2 {}", damaged.trim_end()), "9 0 no frame".to_owned()]);
    assert_eq!(projector.standing().quarantined, 2);
    drop(projector);
    catch_up(&mut world.projector());
    assert_eq!(database.rows(sql).len(), 2);
}

#[test]
fn a_newer_event_stops_it_behind_what_it_could_read_and_loses_nothing() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 3);
    world.append(&gw, &frames);
    let last = gw.selects(NIGHT, "q", 1, "a");
    let newer = line(&last).replacen("\"v\":1", "\"v\":99", 1);
    let frame = gw.seals_lines(&last.revision, 1, newer.as_bytes());
    world.append(&gw, &[frame]);
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
    let trouble = projector.standing().trouble.clone().expect("it says why");
    assert_eq!(trouble, "frame 2 holds event `selection` version 99, which a newer program wrote: upgrade this one");
    assert_eq!(world.database().rows("SELECT count(*) FROM waybill.usage_events"), ["3"]);
    assert_eq!(world.database().rows("SELECT seq FROM waybill.checkpoints"), ["1"]);
}

#[test]
fn a_log_that_lost_its_end_stops_it_until_it_is_told_to_start_over() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 100);
    world.append(&gw, &frames);
    let mut running = world.projector();
    catch_up(&mut running);
    let before = world.database().everything();
    world.sql_on_log("UPDATE sqlite_sequence SET seq = 5; DELETE FROM frames WHERE seq = 6");
    let lost = "the log does not hold frame 6 as it was projected";
    for mut projector in [running, world.projector()] {
        turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
        assert!(projector.standing().trouble.as_ref().is_some_and(|trouble| trouble.starts_with(lost)));
    }
    // It grows past the checkpoint again, by other frames.
    let mut other = Teller::new("other");
    let frames = requests(&mut other, 30);
    world.append(&other, &frames);
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
    same(&world.database().everything(), &before);
    drop(projector);

    let mut over = world.projector_into(&world.url, Begin::NewGeneration);
    catch_up(&mut over);
    turn_until(&mut over, |standing| standing.live);
    let database = world.database();
    same(&database.everything(), &world.fresh_rows());
    let sql = "SELECT generation, live FROM waybill.generations ORDER BY 1";
    assert_eq!(database.rows(sql), ["1 f", "2 t"]);
    assert_eq!(database.rows("SELECT count(*) FROM wb_g1.usage_events"), ["100"]);
    drop(over);
    let mut projector = world.projector();
    catch_up(&mut projector);
    assert_eq!(projector.standing().generation, Some(2));
}

#[test]
fn a_log_that_is_brought_back_is_gone_on_with() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 100);
    world.append(&gw, &frames);
    catch_up(&mut world.projector());
    let before = world.database().everything();
    world.sql_on_log("CREATE TABLE kept AS SELECT * FROM frames WHERE seq > 3; DELETE FROM frames WHERE seq > 3");
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
    world.sql_on_log("INSERT INTO frames SELECT * FROM kept");
    let facts = [gw.selects(NIGHT, "q", 1, "a"), gw.starts(NIGHT + 1)];
    for fact in facts {
        world.tell(&mut gw, &[fact]);
    }
    catch_up(&mut projector);
    drop(projector);
    let after = world.database().everything();
    same(&after, &world.fresh_rows());
    assert_eq!(after.len(), before.len() + 2);
}

#[test]
fn what_the_log_has_let_go_comes_from_its_archive() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 100);
    world.append(&gw, &frames[..4]);
    world.archive();
    world.append(&gw, &frames[4..]);
    let expected = world.fresh_rows();
    world.sql_on_log("DELETE FROM frames WHERE seq < 4");
    // The first one fills the tables, the second one folds again what lies before the checkpoint.
    for _ in 0..2 {
        catch_up(&mut world.archived_projector());
    }
    same(&world.database().everything(), &expected);
}

#[test]
fn rows_of_an_older_fold_stay_live_until_todays_have_caught_up() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 5);
    world.append(&gw, &frames);
    catch_up(&mut world.projector());
    let database = world.database();
    let expected = database.everything();
    database.execute("UPDATE wb_g1.checkpoints SET fold_version = 0; UPDATE wb_g1.usage_attempts SET cost_nano = 1");
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.generation == Some(2));
    assert_eq!(database.rows("SELECT DISTINCT cost_nano FROM waybill.usage_attempts"), ["1"]);
    turn_until(&mut projector, |standing| standing.live);
    same(&database.everything(), &expected);
}

#[test]
fn rows_of_a_newer_fold_are_not_touched() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 5);
    world.append(&gw, &frames);
    catch_up(&mut world.projector());
    let database = world.database();
    database.execute("UPDATE wb_g1.checkpoints SET fold_version = 7");
    let before = database.everything();
    let frames = requests(&mut Teller::new("more"), 5);
    world.append(&Teller::new("more"), &frames);
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
    let expected =
        format!("generation 1 was made by fold version 7, this program has {FOLD_VERSION}: upgrade this one");
    assert_eq!(projector.standing().trouble, Some(expected));
    same(&database.everything(), &before);
}
