//! Sessions by scope, their rounds, and what they used: the same from both stores.

use std::thread;
use std::time::Duration;

use tokio::runtime::Runtime;
use waybill_auditor::moment::moment;
use waybill_auditor::paging::{Page, PageError};
use waybill_auditor::projections::projections;
use waybill_auditor::sessions::{Filter, ListError, Round, Session, Totals, named, request, rounds, sessions};
use waybill_auditor::usage::{PostgresUsage, SqliteUsage, StoreError, UsageStore};
use waybill_events::log::Seq;
use waybill_projections::story::Teller;
use waybill_projector::postgres::{Begin, Phase, PostgresProjector};
use waybill_schema::event::{Class, Endpoint, Event, Fact, Outcome, SessionSource, Tokens};
use waybill_schema::time::Time;
use waybill_servers::postgres::{Options, Postgres};

use crate::House;

/// More turns than a projector needs here.
const TURNS_MAX: usize = 2000;

/// A request of `scope`'s `session` that ends at `at` after a failure on `a` and an answer from `b`.
pub(crate) fn round(
    gw: &mut Teller,
    at: i64,
    request: &str,
    scope: &str,
    session: &str,
    source: SessionSource,
) -> Vec<Fact> {
    let mut facts = vec![
        gw.selects(at - 100, request, 1, "a"),
        gw.ends_send(at - 60, request, 1, Class::Upstream5xx),
        gw.selects(at - 59, request, 2, "b"),
        gw.ends_send(at - 1, request, 2, Class::Success),
        gw.ends(at, request, Outcome::Success, Class::Success, 2),
    ];
    let Event::Selection(selection) = &mut facts[0].event else { panic!("the first fact selects") };
    let context = selection.context.as_mut().expect("a first selection has a context");
    (context.scope, context.session, context.source) = (scope.into(), session.into(), source);
    let Event::Attempt(attempt) = &mut facts[3].event else { panic!("the fourth fact ends a send") };
    attempt.deployment = "b/gpt".into();
    facts
}

/// Sessions of every source and of two tenants, both of whom call one of theirs `talk`. Of `r-1` the failure cost tokens
/// and money, too; `r-3` asks for another model at another endpoint.
pub(crate) fn house() -> House {
    let mut house = House::new();
    let gw = &mut house.gateway;
    let start = gw.starts(0);
    let mut first = round(gw, 1000, "r-1", "acme", "talk", SessionSource::Explicit);
    let Event::Attempt(attempt) = &mut first[1].event else { panic!("the second fact ends a send") };
    (attempt.usage.input, attempt.usage.cached, attempt.cost_nano) =
        (Tokens::Reported(40), Tokens::Estimated(8), Some(5));
    let second = round(gw, 2000, "r-2", "acme", "prompt:v1:77", SessionSource::Prompt);
    let mut third = round(gw, 3000, "r-3", "acme", "talk", SessionSource::Explicit);
    let Event::Selection(selection) = &mut third[0].event else { panic!("the first fact selects") };
    let context = selection.context.as_mut().expect("a first selection has a context");
    (context.model, context.endpoint) = ("gpt-mini".into(), Endpoint::Chat);
    let rest = [
        round(gw, 4000, "r-4", "rival", "talk", SessionSource::Explicit),
        round(gw, 5000, "r-5", "acme", "gen-1", SessionSource::Generated),
        round(gw, 6000, "r-6", "acme", "gen-2", SessionSource::Generated),
        round(gw, 7000, "r-7", "acme", "cache:1", SessionSource::CacheKey),
        round(gw, 8000, "r-8", "acme", "child", SessionSource::Parent),
    ];
    house.tell(&[vec![start], first, second, third, rest.concat()].concat());
    house.settle()
}

/// One log, and its rows in both stores.
struct Both {
    house: House,
    server: Postgres,
    url: String,
    runtime: Runtime,
}

impl Both {
    fn new() -> Self {
        let server = Postgres::start(&Options::default());
        let url = server.database();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let both = Self { house: house(), server, url, runtime: runtime.expect("a runtime can be made") };
        both.project();
        both
    }

    /// Brings the rows in Postgres to the log's end.
    fn project(&self) {
        let log = Box::new(self.house.audit());
        let mut projector = PostgresProjector::new(log, &self.url, Begin::Checkpoint).expect("a projector can be made");
        for _ in 0..TURNS_MAX {
            let pause = projector.turn();
            let standing = projector.standing();
            if standing.phase == Phase::Projecting && !pause.is_zero() && standing.lag_frames() == 0 {
                return;
            }
            thread::park_timeout(pause.min(Duration::from_millis(50)));
        }
        panic!("it does not catch up: {:?}", projector.standing());
    }

    fn postgres(&self) -> PostgresUsage {
        PostgresUsage::new(&self.url, self.runtime.handle().clone()).expect("the url is good")
    }

    fn stores(&self) -> [Box<dyn UsageStore>; 2] {
        [Box::new(SqliteUsage::new(self.house.audit())), Box::new(self.postgres())]
    }

    /// Appends facts that happened when they say, and projects them.
    fn tell(mut self, tell: impl FnOnce(&mut Teller) -> Vec<Fact>) -> Self {
        let facts = tell(&mut self.house.gateway);
        self.house.tell(&facts);
        self.house = self.house.settle();
        self.project();
        self
    }
}

fn in_text(session: &Session) -> String {
    let Session { scope, session, source, inferred, started, ended, requests, failed, last_request, totals, .. } =
        session;
    let inferred = if *inferred { " inferred" } else { "" };
    let (started, ended, used) = (started.0, ended.0, used(totals));
    format!(
        "{scope}/{session} {source}{inferred} {started}-{ended} {last_request} requests={requests} failed={failed} {used}"
    )
}

fn used(totals: &Totals) -> String {
    let Totals { sends, sends_unknown, sends_estimated, input, output, cached, cost_nano, .. } = totals;
    format!(
        "sends={sends}-{sends_unknown}-{sends_estimated} in={} out={} cached={} nano={}",
        number(*input),
        number(*output),
        number(*cached),
        number(*cost_nano)
    )
}

fn number(known: Option<u64>) -> String {
    known.map_or_else(|| "?".to_owned(), |n| n.to_string())
}

fn names(store: &mut dyn UsageStore, wanted: &Filter) -> Vec<String> {
    let paged = sessions(store, wanted, &Page::default()).expect("the rows can be read");
    paged.entries.iter().map(|session| format!("{}/{}", session.scope, session.session)).collect()
}

/// S3.7, S3.25, S3.26: groups by scope and session, whatever the model and the endpoint; marked where the session was
/// worked out; sessions that nobody named stay apart; every send counts once.
#[test]
fn both_stores_list_sessions_alike() {
    let both = Both::new();
    for mut store in both.stores() {
        let all = sessions(store.as_mut(), &Filter::default(), &Page::default()).expect("the rows can be read");
        let text: Vec<String> = all.entries.iter().map(in_text).collect();
        let one = "requests=1 failed=0 sends=2-1-0 in=100 out=20 cached=? nano=7";
        assert_eq!(
            text,
            [
                format!("acme/child parent 7930-8000 r-8 {one}"),
                format!("acme/cache:1 cache_key inferred 6930-7000 r-7 {one}"),
                format!("acme/gen-2 generated inferred 5930-6000 r-6 {one}"),
                format!("acme/gen-1 generated inferred 4930-5000 r-5 {one}"),
                format!("rival/talk explicit 3930-4000 r-4 {one}"),
                "acme/talk explicit 930-3000 r-3 requests=2 failed=0 sends=4-1-1 in=240 out=40 cached=8 nano=19".into(),
                format!("acme/prompt:v1:77 prompt inferred 1930-2000 r-2 {one}"),
            ],
        );
        assert_eq!((all.next, &all.entries[5].models[..]), (None, &["gpt".to_owned(), "gpt-mini".to_owned()][..]));
        assert_eq!(all.entries[5].deployments, ["a/gpt", "b/gpt"]);
        let both_talk = named(store.as_mut(), &"talk".into()).expect("the rows can be read");
        assert_eq!(both_talk.iter().map(|found| found.scope.as_str()).collect::<Vec<_>>(), ["acme", "rival"]);
        let stand = projections(store.as_mut(), Seq(9)).expect("the rows can be read");
        let covered: Vec<_> = stand.iter().map(|of| (&*of.name, of.checkpoint, of.lag_frames)).collect();
        assert_eq!(covered, [("usage", 1, 8)]);
    }
}

#[test]
fn both_stores_find_sessions_by_scope_model_and_time() {
    let both = Both::new();
    for mut store in both.stores() {
        let scope = |scope: &str| Filter { scope: Some(scope.into()), ..Filter::default() };
        assert_eq!(names(store.as_mut(), &scope("rival")), ["rival/talk"]);
        assert_eq!(names(store.as_mut(), &scope("nobody")), [""; 0]);
        let model = |model: &str| Filter { model: Some(model.to_owned()), ..scope("acme") };
        assert_eq!(names(store.as_mut(), &model("gpt-mini")), ["acme/talk"]);
        assert_eq!(names(store.as_mut(), &model("gpt-m")), [""; 0]);
        let (since, until) = (Some(Time(4000)), moment("1970-01-01T00:00:06Z").ok());
        let between = Filter { since, until, ..Filter::default() };
        assert_eq!(names(store.as_mut(), &between), ["acme/gen-1", "rival/talk"]);
        assert_eq!(names(store.as_mut(), &Filter { since: Some(Time(i64::MAX)), ..Filter::default() }), [""; 0]);
        assert_eq!(names(store.as_mut(), &scope("a\0b")), [""; 0]);
    }
}

/// A reader meets every session that did not change once, though others come and move meanwhile.
#[test]
fn pages_of_both_stores_stand_while_rows_arrive() {
    let mut both = Both::new();
    let mut seen: [Vec<String>; 2] = Default::default();
    let mut cursors: [Option<String>; 2] = Default::default();
    for at in [9000, 9100, 9200] {
        for ((mut store, seen), cursor) in both.stores().into_iter().zip(&mut seen).zip(&mut cursors) {
            let page = Page::new(Some(2), cursor.as_deref()).expect("a cursor survives its text");
            let paged = sessions(store.as_mut(), &Filter::default(), &page).expect("the rows can be read");
            seen.extend(paged.entries.iter().map(|session| format!("{}/{}", session.scope, session.session)));
            *cursor = paged.next.map(|next| next.to_string());
        }
        both = both.tell(|gw| {
            let new = round(gw, at, &format!("n-{at}"), "acme", &format!("new-{at}"), SessionSource::Explicit);
            [new, round(gw, at + 1, &format!("m-{at}"), "acme", "talk", SessionSource::Explicit)].concat()
        });
    }
    // `talk` was active again before its page came, so a reader from the front meets it there.
    let expected = ["acme/child", "acme/cache:1", "acme/gen-2", "acme/gen-1", "rival/talk", "acme/prompt:v1:77"]
        .map(str::to_owned);
    assert_eq!(seen, [expected.to_vec(), expected.to_vec()]);
    assert_eq!(cursors, [None, None]);
}

fn send_texts(round: &Round) -> Vec<String> {
    let text = |target: &waybill_auditor::sessions::Target| {
        let (ended, status) = (target.ended.map(|ended| ended.0), number(target.status.map(u64::from)));
        let (attempt, deployment, class) = (target.attempt, &target.deployment, &target.class);
        format!("{attempt} {}-{ended:?} {deployment} {class} {status} {}", target.started.0, used(&target.totals))
    };
    round.targets.iter().map(text).collect()
}

/// S3.26: each round's real target and failures, and its costs at its sends.
#[test]
fn rounds_of_both_stores_show_where_they_really_went_and_what_failed() {
    let both = Both::new();
    for mut store in both.stores() {
        let mut page = Page::new(Some(1), None).expect("a page may be small");
        let first = rounds(store.as_mut(), &"acme".into(), &"talk".into(), &page).expect("the rows can be read");
        let next = first.next.expect("another round follows").to_string();
        page = Page::new(Some(1), Some(&next)).expect("a cursor survives its text");
        let second = rounds(store.as_mut(), &"acme".into(), &"talk".into(), &page).expect("the rows can be read");
        let ends = |round: &Round| format!("{} {} {} {}", round.request, round.model, round.endpoint, round.ended.0);
        assert_eq!(ends(&first.entries[0]), "r-1 gpt responses 1000");
        assert_eq!((ends(&second.entries[0]), second.next), ("r-3 gpt-mini chat 3000".to_owned(), None));
        assert_eq!(
            send_texts(&first.entries[0]),
            [
                "1 900-Some(940) a/gpt upstream5xx 502 sends=1-0-1 in=40 out=? cached=8 nano=5",
                "2 941-Some(999) b/gpt success 200 sends=1-0-0 in=100 out=20 cached=? nano=7",
            ]
        );
        let none = rounds(store.as_mut(), &"rival".into(), &"prompt:v1:77".into(), &Page::default());
        assert_eq!(none.expect("the rows can be read").entries, []);
        let odd = sessions(store.as_mut(), &Filter::default(), &page).expect_err("a cursor belongs to its list");
        assert!(matches!(odd, ListError::Page(PageError::Cursor)), "{odd}");

        let trail =
            request(store.as_mut(), &"r-1".into()).expect("the rows can be read").expect("the request is known");
        assert_eq!((trail.scope.as_str(), trail.session.as_str(), trail.key.as_str()), ("acme", "talk", "acme"));
        assert_eq!(used(&trail.totals), "sends=2-0-1 in=140 out=20 cached=8 nano=12");
        assert_eq!((trail.seq_first, trail.seq_last, &trail.round), (1, 1, &first.entries[0]));
        assert_eq!(request(store.as_mut(), &"nobody".into()).expect("the rows can be read"), None);
    }
}

#[test]
fn a_page_has_bounds_and_a_cursor_is_not_made_up() {
    assert_eq!(Page::new(Some(0), None).map(drop), Err(PageError::Limit(0)));
    assert_eq!(Page::new(Some(501), None).map(drop), Err(PageError::Limit(501)));
    for odd in ["", "6e6f", "x", "7b7d"] {
        assert_eq!(Page::new(None, Some(odd)).map(drop), Err(PageError::Cursor), "{odd}");
    }
}

/// Issue 4: audit queries say so while Postgres is away, and go on by themselves.
#[test]
fn a_postgres_that_is_away_is_told_and_found_again() {
    let mut both = Both::new();
    let mut store = both.postgres();
    let ask = |store: &mut PostgresUsage| sessions(store, &Filter::default(), &Page::default());
    assert_eq!(ask(&mut store).expect("the rows can be read").entries.len(), 7);
    both.server.kill();
    for _ in 0..2 {
        let error = ask(&mut store).expect_err("postgres is away");
        assert!(matches!(error, ListError::Store(StoreError::Away { .. })), "{error:?}");
        assert_eq!(error.to_string(), "postgres is away");
    }
    both.server.restart();
    // It syncs nothing, so the kill may have cost it the last rows.
    both.project();
    assert_eq!(ask(&mut store).expect("the rows can be read").entries.len(), 7);
    let empty = both.server.database();
    let mut empty = PostgresUsage::new(&empty, both.runtime.handle().clone()).expect("the url is good");
    assert!(matches!(ask(&mut empty), Err(ListError::Store(StoreError::NotProjected))));
}
