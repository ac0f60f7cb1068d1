//! Rows made anew beside a projector that runs, looked at beside it, and gone back from.

use waybill_events::log::{Log, Seq};
use waybill_events::sqlite::SqliteLog;
use waybill_projections::story::Teller;
use waybill_projector::postgres::{Phase, Rebuild, Swapped, TableSum, Verified, verify};
use waybill_schema::event::{Endpoint, Event, Ownedness, Ownership, SessionSource};

use crate::world::{NIGHT, World, catch_up, requests, same, turn_until};

/// The log's head, and the log itself for a second reader.
fn log(world: &World) -> (Seq, SqliteLog) {
    let mut log = SqliteLog::open_read_only(&world.log_file()).expect("the log opens for reading");
    (log.head().expect("the log can be read"), log)
}

fn filled(world: &World, mut rebuild: Rebuild) -> (Rebuild, Vec<TableSum>) {
    let (head, mut log) = log(world);
    rebuild.fill_to(&mut log, head, &mut |_| {}).expect("the generation can be filled");
    let sums = rebuild.compare().expect("what is stored is what was folded");
    (rebuild, sums)
}

fn tells(world: &mut World, writer: &str, n: usize) {
    let mut gateway = Teller::new(writer);
    let frames = requests(&mut gateway, n);
    world.append(&gateway, &frames);
}

/// A world with 60 requests in its rows, and one response that became final after it was seen.
fn world() -> World {
    let mut world = World::new();
    tells(&mut world, "gw", 60);
    let mut gw = Teller::new("owner");
    let owns = |state| {
        Event::Ownership(Box::new(Ownership {
            response: "h".into(),
            state,
            request: "r".into(),
            scope: "acme".into(),
            model: "gpt".into(),
            endpoint: Endpoint::Responses,
            deployment: "a".into(),
            channel: "a".into(),
            incarnation: 1,
            session: "s-1".into(),
            source: SessionSource::Explicit,
        }))
    };
    let facts = [gw.starts(NIGHT), gw.says(1, owns(Ownedness::Provisional)), gw.says(2, owns(Ownedness::Final))];
    world.tell(&mut gw, &facts);
    catch_up(&mut world.projector());
    world
}

fn looked(world: &World) -> Verified {
    let (_, mut log) = log(world);
    let verified = verify(&mut log, &world.url, &mut |_| {}).expect("both can be read");
    verified.expect("a generation is live")
}

fn findings(verified: &Verified) -> Vec<String> {
    verified.findings.named.iter().map(ToString::to_string).collect()
}

/// DESIGN.md, section 7: a new generation beside the live one, which stays; whoever projects follows the pointer.
#[test]
fn a_rebuild_beside_a_running_projector_ends_in_the_same_rows_and_the_projector_follows() {
    let mut world = world();
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.generation == Some(1));
    let (rebuild, sums) = filled(&world, Rebuild::begin(&world.url).expect("nobody else rebuilds"));
    let rows: Vec<(&str, u64)> = sums.iter().map(|sum| (sum.table, sum.rows)).collect();
    let expected = [
        ("usage_events", 60),
        ("usage_attempts", 120),
        ("sessions", 1),
        ("response_owners", 1),
        ("health_changes", 0),
        ("catalogue_changes", 0),
    ];
    assert_eq!(rows[..6], expected);
    let refused = Rebuild::begin(&world.url).expect_err("one rebuild at a time");
    assert!(format!("{refused:?}").contains("Rebuilding"), "{refused:?}");

    // The projector goes on meanwhile, and what it stored there stays there.
    tells(&mut world, "later", 10);
    catch_up(&mut projector);
    assert_eq!(rebuild.swap().expect("it can go live"), Swapped { from: Some(1), to: 2 });
    let database = world.database();
    assert_eq!(database.rows("SELECT count(*) FROM waybill.usage_events"), ["60"]);
    projector.turn();
    assert_eq!(projector.standing().generation, Some(2), "it notices with its next turn");
    catch_up(&mut projector);
    same(&database.everything(), &world.fresh_rows());
    assert_eq!(database.rows("SELECT count(*) FROM wb_g1.usage_events"), ["70"]);
    assert_eq!(looked(&world).findings.n, 0);
}

#[test]
fn two_rebuilds_have_equal_digests() {
    let world = world();
    let mut twice = (0..2).map(|_| {
        let (rebuild, sums) = filled(&world, Rebuild::begin(&world.postgres.database()).expect("nobody else rebuilds"));
        rebuild.swap().expect("it can go live");
        sums
    });
    let (first, second) = (twice.next(), twice.next());
    assert!(first.is_some() && first == second);
}

#[test]
fn rows_changed_by_hand_are_named_and_others_are_not() {
    let world = world();
    assert_eq!(looked(&world).findings.n, 0);
    world.database().execute(
        "UPDATE wb_g1.usage_attempts SET cost_nano = 8, output = NULL WHERE request_id = 'gw-00003' AND attempt = 2;
         DELETE FROM wb_g1.usage_events WHERE request_id = 'gw-00007';
         INSERT INTO wb_g1.quarantine (seq, line, why, bytes) VALUES (99, 2, 'by hand', '');
         UPDATE wb_g1.response_owners SET state = 'provisional'",
    );
    let before = world.database().everything();
    let verified = looked(&world);
    let expected = [
        "usage_events (gw-00007, 2026-11-30 23:59:59.937Z): is missing",
        "usage_attempts (gw-00003, 2, 2026-11-30 23:59:59.953Z): the log says another output, cost_nano",
        "response_owners (acme, gpt, responses, h): the log says another state",
        "quarantine (99, 2): the log says nothing of it",
    ];
    assert_eq!(findings(&verified), expected);
    assert_eq!((verified.findings.n, verified.findings.more, verified.incomparable), (4, false, None));
    let apart: Vec<&str> = verified.tables.iter().filter(|sum| sum.digest != sum.folded).map(|sum| sum.table).collect();
    assert_eq!(apart, ["usage_events", "usage_attempts", "response_owners", "quarantine"]);
    same(&world.database().everything(), &before);
}

#[test]
fn rows_of_another_log_are_told_apart_before_they_are_compared() {
    let mut world = world();
    let last = looked(&world).seq;
    world.sql_on_log(&format!("UPDATE frames SET sum = 'x', stored = stored + 1 WHERE seq = {last}"));
    let why = looked(&world).incomparable;
    assert_eq!(why, Some(format!("the log holds another frame {last} than was projected")));
    world.sql_on_log(&format!("DELETE FROM frames WHERE seq = {last}"));
    assert_eq!(looked(&world).incomparable, Some(format!("the log ends before frame {last}")));
    world.database().execute("UPDATE wb_g1.checkpoints SET fold_version = 0");
    assert_eq!(looked(&world).incomparable, Some("fold 0 made it, this program has 3".to_owned()));
}

#[test]
fn the_generation_before_is_gone_back_to_and_brought_to_the_logs_end() {
    let mut world = world();
    let no_way_back = |world: &World| {
        let error = Rebuild::go_back(&world.url).expect_err("there is no way back");
        std::error::Error::source(&error).map(ToString::to_string)
    };
    assert_eq!(no_way_back(&world).as_deref(), Some("generation 1 is live, and none was before it"));
    let (rebuild, _) = filled(&world, Rebuild::begin(&world.url).expect("nobody else rebuilds"));
    rebuild.swap().expect("it can go live");
    let mut projector = world.projector();
    tells(&mut world, "later", 10);
    catch_up(&mut projector);
    let database = world.database();
    let expected = database.everything();

    database.execute("UPDATE wb_g1.checkpoints SET fold_version = 0");
    let other = "generation 1, which was live before 2, was made by another fold than this program's";
    assert_eq!(no_way_back(&world).as_deref(), Some(other));
    database.execute("UPDATE wb_g1.checkpoints SET fold_version = 3");
    let (back, _) = filled(&world, Rebuild::go_back(&world.url).expect("there is a way back"));
    assert_eq!(back.swap().expect("it can go live"), Swapped { from: Some(2), to: 1 });
    same(&database.everything(), &expected);
    catch_up(&mut projector);
    assert_eq!(projector.standing().generation, Some(1));
    assert_eq!(no_way_back(&world).as_deref(), Some("generation 1 is live, and none was before it"));
}

#[test]
fn what_a_killed_rebuild_left_behind_is_gone_with_the_next_one() {
    let world = world();
    let (killed, _) = filled(&world, Rebuild::begin(&world.url).expect("nobody else rebuilds"));
    assert_eq!(killed.generation(), 2);
    drop(killed);
    let (next, _) = filled(&world, Rebuild::begin(&world.url).expect("the killed one is out of the way"));
    let database = world.database();
    let sql = "SELECT generation FROM waybill.generations ORDER BY 1";
    assert_eq!(database.rows(sql), ["1".to_owned(), next.generation().to_string()]);
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'wb\\_g%'";
    assert_eq!(database.rows(schemas), ["2"]);
    next.give_up().expect("it can be dropped");
    assert_eq!((database.rows(sql), database.rows(schemas)), (vec!["1".to_owned()], vec!["1".to_owned()]));
}

#[test]
fn a_row_that_was_changed_while_it_was_made_keeps_the_generation_from_going_live() {
    let world = world();
    let (head, mut log) = log(&world);
    let mut rebuild = Rebuild::begin(&world.url).expect("nobody else rebuilds");
    rebuild.fill_to(&mut log, head, &mut |_| {}).expect("the generation can be filled");
    world.database().execute("UPDATE wb_g2.usage_attempts SET class = 'success' WHERE attempt = 1");
    let error = rebuild.compare().expect_err("it is not what was folded");
    let expected = "the generation does not hold what the log says: usage_attempts differ";
    assert_eq!(error.to_string(), expected);
}

/// World seeds 379 and 388: a server that lost its end gives the same place to the same bytes, at another time.
#[test]
fn the_same_bytes_at_the_same_place_at_another_time_are_another_log() {
    let mut world = world();
    let mut projector = world.projector();
    turn_until(&mut projector, |standing| standing.phase == Phase::Projecting);
    world.sql_on_log("UPDATE frames SET stored = stored + 1 WHERE seq = (SELECT max(seq) FROM frames)");
    turn_until(&mut projector, |standing| standing.phase == Phase::Stopped);
    let trouble = projector.standing().trouble.clone().expect("it says why");
    assert!(trouble.contains("as it was projected: it has lost its end"), "{trouble}");
}
