//! Servers and projectors that end, freeze and meet in the middle of a batch: every row is there once, and the rows are
//! those of a projection that nothing disturbed.

use std::thread;

use waybill_projections::story::Teller;
use waybill_projector::postgres::{Phase, PostgresProjector};

use crate::world::{World, catch_up, requests, same, turn_until};

const N_REQUESTS: usize = 300;

/// Tables that a batch writes to, first to last.
const STATIONS: [&str; 5] = ["checkpoints", "usage_events", "usage_attempts", "quarantine", "sessions"];

/// A query for the projector's session while it waits for a table that somebody else has locked.
const HELD: &str = "SELECT pid FROM pg_stat_activity WHERE application_name = 'waybill projector'
                    AND wait_event_type = 'Lock' AND datname = current_database()";

/// A world in which two gateways' requests are due; one request, in the same months, is in the rows already.
fn world() -> World {
    let mut world = World::new();
    let tells = |world: &mut World, writer: &str, n| {
        let mut gateway = Teller::new(writer);
        let frames = requests(&mut gateway, n);
        world.append(&gateway, &frames);
    };
    tells(&mut world, "gw", 1);
    catch_up(&mut world.projector());
    // Something for quarantine, so that the first batch writes there, too.
    world.sql_on_log(
        "INSERT INTO frames (writer, epoch, frame, first, last, sum, sent, stored, body)
         VALUES ('x', 1, 1, 1, 1, '', 0, 0, CAST('no frame' AS BLOB))",
    );
    tells(&mut world, "gw-a", N_REQUESTS);
    tells(&mut world, "gw-b", N_REQUESTS);
    world
}

/// Each request of the gateways is there once, with two sends, of which the second used 100 tokens for 7 nano-USD.
fn each_row_once(world: &World) {
    let database = world.database();
    let sql = "SELECT count(*), count(DISTINCT request_id) FROM waybill.usage_events";
    assert_eq!(database.rows(sql), ["601 601"]);
    let sql = "SELECT count(*), count(DISTINCT (request_id, attempt)), sum(input), sum(cost_nano) FROM waybill.usage_attempts";
    assert_eq!(database.rows(sql), ["1202 1202 60100 4207"]);
    same(&database.everything(), &world.fresh_rows());
}

/// Runs the projector until it is held where a batch writes to `station`, lets `fault` happen there, and gives it back
/// when it has noticed.
fn struck(
    world: &mut World,
    mut projector: PostgresProjector,
    station: &str,
    fault: fn(&mut World),
) -> PostgresProjector {
    let blocker = world.database();
    blocker.execute(&format!("BEGIN; LOCK TABLE wb_g1.{station} IN ACCESS EXCLUSIVE MODE"));
    let held = thread::spawn(move || {
        turn_until(&mut projector, |standing| standing.trouble.is_some());
        projector
    });
    world.database().wait_for(HELD);
    fault(world);
    held.join().expect("the projector does not panic")
}

fn end_connection(world: &mut World) {
    world.database().execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE application_name = 'waybill projector' AND datname = current_database()",
    );
}

#[test]
fn projectors_that_end_in_the_middle_of_a_batch_cost_and_double_nothing() {
    let mut world = world();
    for station in STATIONS.iter().cycle().take(10) {
        // Each one knows nothing of the one before, as another process does.
        let projector = world.projector();
        drop(struck(&mut world, projector, station, end_connection));
        assert_eq!(world.database().rows("SELECT count(*) FROM waybill.usage_attempts"), ["2"], "at {station}");
    }
    catch_up(&mut world.projector());
    each_row_once(&world);
}

#[test]
fn a_connection_that_ends_in_the_middle_of_a_batch_costs_and_doubles_nothing() {
    let mut world = world();
    let mut projector = world.projector();
    for station in STATIONS {
        projector = struck(&mut world, projector, station, end_connection);
    }
    catch_up(&mut projector);
    drop(projector);
    each_row_once(&world);
}

#[test]
fn a_postgres_killed_in_the_middle_of_a_batch_costs_and_doubles_nothing() {
    let mut world = world();
    let mut projector = world.projector();
    for station in STATIONS {
        projector = struck(&mut world, projector, station, |world| world.postgres.kill());
        assert_eq!(projector.standing().phase, Phase::Connecting);
        world.postgres.restart();
    }
    catch_up(&mut projector);
    drop(projector);
    each_row_once(&world);
}

#[test]
fn a_batch_that_another_one_has_stored_meanwhile_is_not_stored_again() {
    let mut world = world();
    let projector = world.projector();
    let mut first = struck(&mut world, projector, "usage_attempts", end_connection);
    let mut second = world.projector();
    catch_up(&mut second);
    drop(second);
    catch_up(&mut first);
    drop(first);
    each_row_once(&world);
}

#[test]
fn a_postgres_that_is_away_is_waited_for() {
    let mut world = world();
    let mut projector = world.projector();
    world.postgres.kill();
    for n in 1..=3 {
        projector.turn();
        assert!(projector.standing().trouble.is_some(), "turn {n}");
    }
    world.postgres.restart();
    catch_up(&mut projector);
    assert_eq!(projector.standing().trouble, None);
    drop(projector);
    each_row_once(&world);
}

#[test]
fn a_frozen_postgres_goes_on_where_it_was() {
    let world = world();
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.generation.is_some());
    world.postgres.stop();
    let asks = thread::spawn(move || catch_up(&mut projector));
    world.postgres.cont();
    asks.join().expect("the projector does not panic");
    each_row_once(&world);
}

#[test]
fn of_two_projectors_one_writes_and_the_other_waits() {
    let world = world();
    let (mut first, mut second) = (world.projector(), world.projector());
    turn_until(&mut first, |standing| standing.generation.is_some());
    turn_until(&mut second, |standing| standing.phase == Phase::Waiting);
    catch_up(&mut first);
    assert_eq!(second.standing().phase, Phase::Waiting);
    drop(first);
    catch_up(&mut second);
    drop(second);
    each_row_once(&world);
}

#[test]
fn a_projector_that_was_overtaken_without_noticing_is_refused() {
    let world = world();
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.generation.is_some());
    let database = world.database();
    // As one does that has taken the lease meanwhile.
    database.execute("UPDATE wb_g1.checkpoints SET epoch = epoch + 1");
    turn_until(&mut projector, |standing| standing.trouble.is_some());
    assert_eq!(projector.standing().trouble.as_deref(), Some("another projector has taken over"));
    assert_eq!(database.rows("SELECT count(*) FROM waybill.usage_attempts"), ["2"]);
    catch_up(&mut projector);
    drop(projector);
    each_row_once(&world);
}

#[test]
fn a_row_that_stands_already_stays_and_its_batch_is_stored_all_the_same() {
    let world = world();
    let database = world.database();
    database.execute("INSERT INTO wb_g1.quarantine (seq, line, why, bytes) VALUES (2, 0, 'by hand', '')");
    catch_up(&mut world.projector());
    assert_eq!(database.rows("SELECT seq, line, why FROM waybill.quarantine"), ["2 0 by hand"]);
    database.execute("DELETE FROM wb_g1.quarantine");
    let rows = |rows: Vec<String>| rows.into_iter().filter(|row| !row.starts_with("quarantine")).collect::<Vec<_>>();
    same(&rows(database.everything()), &rows(world.fresh_rows()));
}
