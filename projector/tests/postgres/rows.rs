//! What is in the rows.

use waybill_projections::story::{self, Teller};
use waybill_projector::spending::PostgresSpending;
use waybill_schema::FOLD_VERSION;
use waybill_schema::catalogue::terms::Period;
use waybill_schema::catalogue::{Group, Row, Status};
use waybill_schema::event::{
    Act, Batch, Class, Endpoint, Event, Fact, Models, ModelsState, Op, Operator, Outcome, Ownedness, Ownership,
    SessionSource, Stored,
};
use waybill_schema::time::Time;

use crate::world::{NIGHT, World, catch_up, requests, same};

#[test]
fn a_request_that_failed_over_is_one_row_and_each_send_is_one() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let frames = requests(&mut gw, 1);
    world.append(&gw, &frames);
    let open = gw.selects(NIGHT + 7000, "open", 1, "c");
    world.tell(&mut gw, &[open]);
    let started = gw.starts(NIGHT + 9000);
    world.tell(&mut gw, &[started]);
    catch_up(&mut world.projector());
    let database = world.database();
    // A request that took 70 ms began 70 ms before its end.
    let expected = [
        "gw-00000 2026-11-30 23:59:59.93 2026-12-01 00:00:00 acme s-1 explicit success - 2 b 70 1",
        "open 2026-12-01 00:00:06.9 2026-12-01 00:00:06.9 acme s-1 explicit abandoned abandoned 1 c - 2",
    ];
    let sql =
        "SELECT request_id, started AT TIME ZONE 'UTC', ended AT TIME ZONE 'UTC', scope, session_id, session_source,
               outcome, error_class, attempts, deployment, latency_ms, seq_first FROM waybill.usage_events ORDER BY 1";
    assert_eq!(database.rows(sql), expected);
    let expected = [
        "gw-00000 1 2026-11-30 23:59:59.9 a/gpt affinity upstream5xx 502 - - -",
        "gw-00000 2 2026-11-30 23:59:59.95 a/gpt next success 200 100 20 7",
        "open 1 2026-12-01 00:00:06.9 c affinity abandoned - - - -",
    ];
    let sql =
        "SELECT request_id, attempt, started AT TIME ZONE 'UTC', deployment, reason, class, status, input, output,
               cost_nano FROM waybill.usage_attempts ORDER BY 1, 2";
    assert_eq!(database.rows(sql), expected);
    let counts = "SELECT (SELECT count(*) FROM wb_g1.usage_attempts_2026_11),
                  (SELECT count(*) FROM wb_g1.usage_attempts_2026_12), (SELECT count(*) FROM wb_g1.usage_attempts_default)";
    assert_eq!(database.rows(counts), ["2 1 0"]);
    let checkpoint = format!("3 {FOLD_VERSION}");
    assert_eq!(database.rows("SELECT seq, fold_version FROM waybill.checkpoints"), [checkpoint]);
}

/// The row of an abandoned request is written when its writer's end is known, long after others that came later; what it
/// spent counts.
#[test]
fn a_row_that_comes_late_counts() {
    let mut world = World::new();
    let (mut gw, mut other) = (Teller::new("gw"), Teller::new("other"));
    let at = NIGHT + 1000;
    let mut projector = world.projector();
    let mut spending = PostgresSpending::new(&world.url).expect("the address is one");
    let mut spent = |world: &mut World, teller: &mut Teller, facts: &[Fact]| {
        world.tell(teller, facts);
        catch_up(&mut projector);
        let spending = spending.read(Time(at)).expect("postgres answers");
        let used =
            spending.of(Period::Month, Time(at)).map(|(key, used)| (key.to_string(), used.tokens, used.cost_nano));
        used.collect::<Vec<_>>()
    };
    let acme = |tokens, cost_nano| vec![("acme".to_owned(), tokens, cost_nano)];
    // Each send takes 100 tokens and gives 20, for 7 nano-USD.
    let begun = [gw.starts(at), gw.selects(at, "late", 1, "a"), gw.ends_send(at, "late", 1, Class::Success)];
    assert_eq!(spent(&mut world, &mut gw, &begun), []);
    let whole = |teller: &mut Teller, id: &str| {
        let success = Outcome::Success;
        let send = [teller.selects(at, id, 1, "a"), teller.ends_send(at, id, 1, Class::Success)];
        [&send[..], &[teller.ends(at, id, success, Class::Success, 1)]].concat()
    };
    let first = [vec![other.starts(at)], whole(&mut other, "q1")].concat();
    assert_eq!(spent(&mut world, &mut other, &first), acme(120, 7));
    let again = [gw.starts(at + 1)];
    assert_eq!(spent(&mut world, &mut gw, &again), acme(240, 14));
    let second = whole(&mut other, "q2");
    assert_eq!(spent(&mut world, &mut other, &second), acme(360, 21));
    let sql = "SELECT request_id, seq_last, seq_written FROM waybill.usage_events ORDER BY 1";
    assert_eq!(world.database().rows(sql), ["late 1 3", "q1 2 2", "q2 4 4"]);
}

/// Until a projector of today has made all rows anew, those of an earlier one are live, and count.
#[test]
fn spending_is_read_from_rows_of_before_their_frames_were_noted() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let at = NIGHT + 1000;
    let facts = [
        gw.starts(at),
        gw.selects(at, "q", 1, "a"),
        gw.ends_send(at, "q", 1, Class::Success),
        gw.ends(at, "q", Outcome::Success, Class::Success, 1),
    ];
    world.tell(&mut gw, &facts);
    catch_up(&mut world.projector());
    world.database().execute("ALTER VIEW waybill.usage_events RENAME COLUMN seq_written TO unknown");
    let mut spending = PostgresSpending::new(&world.url).expect("the address is one");
    let spending = spending.read(Time(at)).expect("postgres answers");
    let used: Vec<_> = spending.of(Period::Month, Time(at)).map(|(key, used)| (key.to_string(), used.tokens)).collect();
    assert_eq!(used, [("acme".to_owned(), 120)]);
}

#[test]
fn a_time_that_no_sane_clock_says_costs_no_row() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let facts = [
        gw.starts(0),
        gw.selects(i64::MAX, "late", 1, "a"),
        gw.ends_send(i64::MIN, "early", 1, Class::Success),
        gw.selects(NIGHT, "sane", 1, "a"),
        gw.starts(NIGHT),
    ];
    for fact in facts {
        world.tell(&mut gw, &[fact]);
    }
    catch_up(&mut world.projector());
    let sql = "SELECT request_id, started AT TIME ZONE 'UTC' FROM waybill.usage_attempts ORDER BY 1";
    let expected = ["early 1970-01-01 00:00:00", "late 9999-12-31 23:59:59.999", "sane 2026-11-30 23:59:59.9"];
    assert_eq!(world.database().rows(sql), expected);
}

#[test]
fn changes_of_health_stand_beside_usage() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let mut facts = vec![gw.starts(NIGHT)];
    // Three failures are the threshold of the story, and the first cooldown lasts a second.
    for n in 0..3 {
        facts.push(gw.ends_send(NIGHT + n, &format!("r{n}"), 1, Class::Upstream5xx));
    }
    facts.push(gw.ends_send(NIGHT + 2000, "r4", 1, Class::Success));
    let clear = Operator { act: Act::Clear, target: "main/gpt/a".into(), actor: "ann".into(), reason: "fixed".into() };
    facts.push(gw.says(NIGHT + 3000, Event::Operator(clear)));
    world.tell(&mut gw, &facts);
    catch_up(&mut world.projector());
    let sql = "SELECT writer, epoch, number, at AT TIME ZONE 'UTC', target, change, class, until AT TIME ZONE 'UTC', failures,
               actor, reason FROM waybill.health_changes ORDER BY 3";
    let expected = [
        "gw 1 4 2026-11-30 23:59:59.902 main/gpt/a cooldown upstream5xx 2026-12-01 00:00:00.902 3 - -",
        "gw 1 5 2026-12-01 00:00:01.9 main/gpt/a recover - - 0 - -",
        "gw 1 6 2026-12-01 00:00:02.9 main/gpt/a clear - - - ann fixed",
    ];
    assert_eq!(world.database().rows(sql), expected);
}

#[test]
fn a_response_has_the_owner_that_was_seen_first_and_becomes_final_once() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let owns = |response: &str, deployment: &str, state| {
        Event::Ownership(Box::new(Ownership {
            response: response.into(),
            state,
            request: "r".into(),
            scope: "acme".into(),
            model: "gpt".into(),
            endpoint: Endpoint::Responses,
            deployment: deployment.into(),
            channel: "a".into(),
            incarnation: 1,
            session: "s-1".into(),
            source: SessionSource::Explicit,
        }))
    };
    let (provisional, ended) = (Ownedness::Provisional, Ownedness::Final);
    let first = [gw.starts(NIGHT), gw.says(1, owns("h1", "a", provisional)), gw.says(2, owns("h2", "a", provisional))];
    world.tell(&mut gw, &first);
    let mut projector = world.projector();
    catch_up(&mut projector);
    let second = [
        gw.says(3, owns("h1", "a", ended)),
        gw.says(4, owns("h2", "b", ended)),
        gw.says(5, owns("h3", "c", provisional)),
        gw.says(6, owns("h3", "c", ended)),
        gw.says(7, owns("h3", "c", provisional)),
    ];
    world.tell(&mut gw, &second);
    catch_up(&mut projector);
    let sql = "SELECT response, deployment, state FROM waybill.response_owners ORDER BY 1";
    assert_eq!(world.database().rows(sql), ["h1 a final", "h2 a provisional", "h3 c final"]);
    same(&world.database().everything(), &world.fresh_rows());
}

#[test]
fn changes_of_the_catalogue_and_of_model_lists_stand_row_by_row() {
    let mut world = World::new();
    let mut desk = Teller::new("catalogue");
    let group = Group {
        id: "main".into(),
        display_name: String::new(),
        description: String::new(),
        status: Status::Active,
        public_models: Vec::new(),
        requestable: false,
        sticky_policy: None,
        failover_policy: None,
    };
    let made = Stored { incarnation: 1, row: Row::Group(group) };
    let batch = |revision: u64, before: Option<&Stored>, after: Option<&Stored>| {
        let op = Op { row: made.row.key(), before: before.cloned(), after: after.cloned() };
        let (actor, reason) = ("ann".to_owned(), "a\0why".to_owned());
        Event::Catalogue(Box::new(Batch { revision, actor, reason, file: None, ops: vec![op], undo: Vec::new() }))
    };
    let facts = [
        desk.says(1, batch(1, None, Some(&made))),
        desk.says(2, batch(3, None, Some(&made))),
        desk.says(3, batch(2, Some(&made), None)),
    ];
    world.tell(&mut desk, &facts);
    let mut auditor = Teller::new("auditor");
    let list = Models {
        channel: "a".into(),
        incarnation: 1,
        state: ModelsState::Confirmed,
        added: vec!["new".into()],
        removed: vec!["old".into()],
        actor: None,
    };
    let facts = [auditor.starts(1), auditor.says(2, Event::Models(Box::new(list)))];
    world.tell(&mut auditor, &facts);
    catch_up(&mut world.projector());
    let sql = "SELECT revision, op, applied, kind, row_id, before->'row'->'group'->>'id', after->'row'->'group'->>'id'
               FROM waybill.catalogue_changes ORDER BY number";
    assert_eq!(
        world.database().rows(sql),
        ["1 0 t group main - main", "3 0 f group main - main", "2 0 t group main main -"]
    );
    let sql = "SELECT channel, model, change, state FROM waybill.model_changes ORDER BY item";
    assert_eq!(world.database().rows(sql), ["a new added confirmed", "a old removed confirmed"]);
}

#[test]
fn text_that_postgres_refuses_costs_neither_its_row_nor_its_neighbours() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let mut facts = vec![gw.starts(NIGHT)];
    for (request, session) in [("r1", "a\0b".to_owned()), ("r2", "plain 🦀".to_owned()), ("r3", "x".repeat(1 << 20))]
    {
        let mut selection = story::selection(request, 1, "a");
        let context = selection.context.as_mut().expect("a first selection has a context");
        (context.session, context.scope) = (session.as_str().into(), session.as_str().into());
        facts.push(gw.says(NIGHT, Event::Selection(Box::new(selection))));
        facts.push(gw.ends(NIGHT + 70, request, Outcome::Success, Class::Success, 1));
    }
    let mut lone = gw.says(NIGHT, Event::Attempt(Box::new(story::attempt("r4", 1, Class::Success))));
    let Event::Attempt(attempt) = &mut lone.event else { unreachable!("it was just made") };
    attempt.served_model = Some("\0".repeat(3000));
    facts.push(lone);
    for fact in &facts {
        world.tell(&mut gw, std::slice::from_ref(fact));
    }
    catch_up(&mut world.projector());
    let database = world.database();
    let sql = "SELECT request_id, left(session_id, 15), length(session_id) < 513 FROM waybill.usage_events ORDER BY 1";
    assert_eq!(database.rows(sql), ["r1 a\u{fffd}b…[changed: 3 t", "r2 plain 🦀 t", "r3 xxxxxxxxxxxxxxx t"]);
    let sql = "SELECT request_id, right(served_model, 61) FROM waybill.usage_attempts WHERE served_model IS NOT NULL";
    let changed = database.rows(sql);
    assert!(changed[0].contains("[changed: 3000 bytes, sum "), "{changed:?}");
}

/// Requests of three sessions, some of which a restart leaves abandoned and one of whose sends comes home after that.
fn talks(gateway: &mut Teller) -> Vec<Fact> {
    let mut facts = vec![gateway.starts(NIGHT)];
    for n in 0..12 {
        let (at, id) = (NIGHT + n * 100, format!("r{n}"));
        let mut first = gateway.selects(at, &id, 1, "a");
        let Event::Selection(selection) = &mut first.event else { panic!("a send is chosen") };
        selection.context.as_mut().expect("a first selection has a context").session =
            format!("s-{}", n % 3).as_str().into();
        facts.extend([first, gateway.ends_send(at + 40, &id, 1, Class::Upstream5xx)]);
        facts.push(gateway.selects(at + 41, &id, 2, "b"));
        if n % 4 > 0 {
            facts.push(gateway.ends_send(at + 90, &id, 2, Class::Success));
            facts.push(gateway.ends(at + 91, &id, Outcome::Success, Class::Success, 2));
        }
    }
    facts.extend([gateway.starts(NIGHT + 5000), gateway.ends_send(NIGHT + 5001, "r4", 3, Class::Success)]);
    facts
}

/// The rows of sessions, and what the other tables add up to.
fn sessions_and_sums(world: &World) -> (Vec<String>, Vec<String>) {
    let rows = "SELECT session_id, scope, started, ended, last_request, requests, failed, sends, sends_unknown, input,
                    output, cost_nano, models, deployments FROM waybill.sessions ORDER BY 1, 2";
    let sums = "WITH sends AS (
                    SELECT request_id, count(*) AS n, count(*) FILTER (WHERE input IS NULL AND output IS NULL) AS unknown,
                        sum(input) AS input, sum(output) AS output, sum(cost_nano) AS nano
                    FROM waybill.usage_attempts GROUP BY 1)
                SELECT session_id, scope, min(started), max(ended),
                    (array_agg(request_id ORDER BY ended DESC, request_id DESC))[1], count(*),
                    count(*) FILTER (WHERE outcome <> 'success'), sum(n), sum(unknown), sum(input), sum(output), sum(nano),
                    array_agg(DISTINCT model),
                    (SELECT array_agg(DISTINCT a.deployment ORDER BY a.deployment) FROM waybill.usage_attempts a
                     JOIN waybill.usage_events e USING (request_id) WHERE e.session_id = events.session_id)
                FROM waybill.usage_events AS events LEFT JOIN sends USING (request_id) GROUP BY 1, 2 ORDER BY 1, 2";
    let database = world.database();
    (database.rows(rows), database.rows(sums))
}

/// S3.25: sums of a list come from the sends and count each once, however the log was cut into batches.
#[test]
fn a_session_is_what_its_requests_and_sends_add_up_to() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let facts = talks(&mut gw);
    let mut projector = world.projector();
    for fact in &facts {
        world.tell(&mut gw, std::slice::from_ref(fact));
        catch_up(&mut projector);
    }
    let (rows, sums) = sessions_and_sums(&world);
    same(&rows, &sums);
    assert_eq!(rows.len(), 3);
    // Session 1 has r1, r4, r7 and r10: r4 was abandoned after two sends, and its third came home later.
    assert!(rows[1].contains(" 4 1 9 5 400 80 28 {gpt} "), "{}", rows[1]);
    same(&world.database().everything(), &world.fresh_rows());
}

/// The checkpoint is lost by hand, so that every row is written a second time and stands already.
#[test]
fn a_row_that_stands_already_counts_in_its_session_once() {
    let mut world = World::new();
    let mut gw = Teller::new("gw");
    let facts = talks(&mut gw);
    world.tell(&mut gw, &facts[..40]);
    catch_up(&mut world.projector());
    world.database().execute("UPDATE wb_g1.checkpoints SET seq = 0, frame_sum = ''");
    world.tell(&mut gw, &facts[40..]);
    catch_up(&mut world.projector());
    let (rows, sums) = sessions_and_sums(&world);
    same(&rows, &sums);
}
