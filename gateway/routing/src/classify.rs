//! What a failed send means: one verdict from the status, the headers and the body of an answer, or from their lack.
//!
//! A status says almost nothing: a full context arrives as 400, 413 or 200, an empty account as 400, 402, 403 or 429.
//! So the error is first taken out of its envelopes ([`UpstreamError`]), then read in a fixed order (see `table`):
//! texts that overrule, codes, texts, ambiguous codes, status. What is found gives a [`Verdict`]: the class that goes
//! on record, where the request may be sent again, and what the member's health takes from it. Waits are given as
//! the upstream stated them; how long one is believed is the caller's to say.

mod envelope;
mod table;
mod wait;

use memchr::memmem;
use waybill_schema::event::{Class, Effect, Endpoint};
use waybill_schema::time::Time;

pub use envelope::UpstreamError;
use table::Meaning;

/// The longest stated wait, in milliseconds, that is waited out for the same deployment.
pub const WAIT_HERE_MS_MAX: u64 = 2_000;

/// How long a model is blocked on a member that is overloaded with it, in milliseconds: about what overloads last.
pub const BUSY_MS: u64 = 60_000;
/// How long a model is blocked on a member that says now and then that it has it not, in milliseconds.
pub const DOUBTED_MS: u64 = 180_000;
/// How long a rate limit lasts that is known to be one of a minute, in milliseconds.
pub const MINUTE_MS: u64 = 60_000;
/// The wait that is believed where an upstream states a day for what may be over in a minute, in milliseconds.
pub const UNTOLD_MS: u64 = 60_000;

/// What follows from a failed send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// How the attempt is recorded.
    pub class: Class,
    /// Whether the same deployment may be sent to again.
    pub here: Here,
    /// Whether another deployment of the same model may be tried.
    pub next: bool,
    /// What may stand in for the model where its own pool has no more to offer.
    pub recourse: Recourse,
    /// What the upstream may have done of what it was asked for.
    pub work: Work,
    /// What the member's health takes from it.
    pub effect: Effect,
    /// The wait that the upstream stated, in milliseconds, uncapped.
    pub retry_after_ms: Option<u64>,
    /// How long the model is blocked, in milliseconds, where not as long as the settings say.
    pub block_ms: Option<u64>,
}

impl Verdict {
    /// The verdict on a send that needs no further one.
    pub fn ended(class: Class, effect: Effect) -> Self {
        let (here, recourse, work) = (Here::No, Recourse::None, Work::of(class));
        Self { class, here, next: false, recourse, work, effect, retry_after_ms: None, block_ms: None }
    }

    /// The verdict on one that others may make up for.
    fn open(class: Class, here: Here, effect: Effect) -> Self {
        Self { here, next: true, recourse: Recourse::General, ..Self::ended(class, effect) }
    }
}

/// What an upstream may have done of what it was asked for (DESIGN.md, section 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing: nothing of the request went out.
    Unsent,
    /// Nothing: it refused the request.
    Refused,
    /// Nobody knows.
    Unknown,
}

impl Work {
    /// What an upstream may have done that gave an answer of this class, or none.
    fn of(class: Class) -> Self {
        match class {
            Class::RateLimited
            | Class::InvalidKey
            | Class::QuotaExhausted
            | Class::ModelUnsupported
            | Class::ContextLength
            | Class::ContentPolicy => Self::Refused,
            Class::Success
            | Class::Incomplete
            | Class::Upstream5xx
            | Class::Timeout
            | Class::Unavailable
            | Class::Malformed
            | Class::Interrupted
            | Class::CallerError
            | Class::Cancelled
            | Class::Abandoned => Self::Unknown,
        }
    }
}

/// Which fallback chain a failure leads to (S3.15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recourse {
    /// None: the failure is the caller's, or what the client has been shown of an answer is not taken back.
    None,
    /// The general one.
    General,
    /// That of prompts that do not fit; the general one where there is none.
    Context,
    /// That of prompts that do not fit, and behind it the general one.
    ContextThenGeneral,
    /// That of refused content, and no other.
    Content,
}

/// Whether the same deployment may be sent to again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// It may not.
    No,
    /// After a wait of our own choosing.
    Backoff,
    /// After the stated milliseconds, at most [`WAIT_HERE_MS_MAX`].
    After(u64),
    /// At once, by a request that leaves out what was refused; it is none of the attempts there.
    Repaired,
}

/// A send that ended without an answer that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// No connection could be made: the host is unknown, away or refuses, or TLS failed.
    Connect,
    /// The connection broke before any answer.
    Broken,
    /// Connecting took too long.
    ConnectTimeout,
    /// No meaningful frame came in time.
    FirstTokenTimeout,
    /// The whole took too long.
    TotalTimeout,
    /// Nothing came for too long after the answer had begun.
    IdleTimeout,
    /// The answer ended before its end.
    Cut,
    /// The answer is not of the dialect.
    Malformed,
    /// The answer is complete and holds nothing.
    Empty,
    /// The answer is a web page.
    Html,
}

/// Looks a header of the answer up by its lower-case name.
pub type Headers<'a> = &'a dyn Fn(&str) -> Option<&'a str>;

/// The verdict on an answer with a status other than 2xx: `body` is what was read of it, `now` the time it came.
pub fn head(endpoint: Endpoint, status: u16, headers: Headers<'_>, body: &[u8], now: Time) -> Verdict {
    // L20: a page is the word of a proxy, whose limit stands before one deployment and not before others.
    if status == 413 && body.trim_ascii_start().starts_with(b"<") {
        return verdict(Meaning::CallerHere, None, now);
    }
    let mut error = UpstreamError::read(body);
    if let Some(kind) = headers("x-amzn-errortype") {
        error.add_code(kind.split(':').next().unwrap_or(kind));
    }
    judge(endpoint, &error, Some(status), headers, now)
}

/// The verdict on an error object inside a 200: a JSON answer, or a stream before its first output.
pub fn upstream_error(endpoint: Endpoint, error: &UpstreamError, now: Time) -> Verdict {
    judge(endpoint, error, None, &|_| None, now)
}

/// The verdict on an answer that the provider's own policy left empty (P06): what stands in for refused content may say
/// more.
pub fn refusal() -> Verdict {
    verdict(Meaning::Policy, None, Time(0))
}

/// Whether what was turned down is the question for the usage chunk of a chat stream (PITFALLS E15): an upstream that does
/// not know the field names it.
pub fn refuses_usage(verdict: &Verdict, body: &[u8]) -> bool {
    let names = |field: &str| memmem::find(body, field.as_bytes()).is_some();
    verdict.class == Class::CallerError && ["stream_options", "include_usage"].into_iter().any(names)
}

/// The verdict on a send without a readable answer.
pub fn transport(kind: Transport) -> Verdict {
    let (class, here) = match kind {
        Transport::Connect | Transport::Broken => (Class::Unavailable, Here::Backoff),
        // The work may be done and billed already; the same place would most likely be silent again.
        Transport::ConnectTimeout | Transport::FirstTokenTimeout | Transport::TotalTimeout | Transport::IdleTimeout => {
            (Class::Timeout, Here::No)
        }
        Transport::Cut => (Class::Interrupted, Here::Backoff),
        Transport::Malformed | Transport::Empty | Transport::Html => (Class::Malformed, Here::Backoff),
    };
    let verdict = Verdict::open(class, here, Effect::Count);
    match kind {
        Transport::Connect | Transport::ConnectTimeout => Verdict { work: Work::Unsent, ..verdict },
        Transport::Broken
        | Transport::FirstTokenTimeout
        | Transport::TotalTimeout
        | Transport::IdleTimeout
        | Transport::Cut
        | Transport::Malformed
        | Transport::Empty
        | Transport::Html => verdict,
    }
}

fn judge(endpoint: Endpoint, error: &UpstreamError, status: Option<u16>, headers: Headers<'_>, now: Time) -> Verdict {
    let meaning = match table::meaning(error, status) {
        // A block is for the model, not for the endpoint: an upstream without token counting still serves chats.
        Meaning::Model if matches!(endpoint, Endpoint::CountTokens) => Meaning::Capability,
        // C22, C35: the provider behind the relay has no more room, and there may be another.
        Meaning::Context if error.relayed => Meaning::ContextHere,
        meaning => meaning,
    };
    verdict(meaning, wait::stated(headers, error, now), now)
}

fn verdict(meaning: Meaning, stated: Option<u64>, now: Time) -> Verdict {
    let retryable = |class| Verdict {
        retry_after_ms: stated,
        ..Verdict::open(class, in_time(stated), if stated.is_some() { Effect::Cool } else { Effect::Count })
    };
    let waiting =
        |ms| Verdict { retry_after_ms: Some(ms), ..Verdict::open(Class::RateLimited, Here::No, Effect::Cool) };
    let lasting = |class, effect| Verdict::open(class, Here::No, effect);
    let turned_down = |class, next, recourse| Verdict { next, recourse, ..lasting(class, Effect::None) };
    let busy = |here| Verdict {
        retry_after_ms: stated,
        block_ms: stated.or(Some(BUSY_MS)),
        ..Verdict::open(Class::Upstream5xx, here, Effect::Block)
    };
    match meaning {
        Meaning::Rate => retryable(Class::RateLimited),
        Meaning::RateMinute => verdict(Meaning::Rate, stated.or(Some(MINUTE_MS)), now),
        Meaning::RateDay => waiting(wait::day_end(now)),
        Meaning::RateUntold => waiting(UNTOLD_MS),
        Meaning::NeverFits => turned_down(Class::RateLimited, true, Recourse::ContextThenGeneral),
        Meaning::Down => retryable(Class::Upstream5xx),
        Meaning::Busy => busy(in_time(stated)),
        Meaning::Full => busy(Here::No),
        Meaning::Warming => Verdict { effect: Effect::None, ..retryable(Class::Upstream5xx) },
        Meaning::Timeout => retryable(Class::Timeout),
        Meaning::Unreached => Verdict { here: Here::No, ..retryable(Class::Upstream5xx) },
        Meaning::Unawaited => Verdict { here: Here::No, ..retryable(Class::Timeout) },
        Meaning::Foreign => Verdict { here: Here::Backoff, ..transport(Transport::Malformed) },
        Meaning::Quota => lasting(Class::QuotaExhausted, Effect::Block),
        Meaning::Unentitled => turned_down(Class::QuotaExhausted, true, Recourse::ContextThenGeneral),
        Meaning::Credential => lasting(Class::InvalidKey, Effect::Block),
        Meaning::Model => lasting(Class::ModelUnsupported, Effect::Block),
        Meaning::ModelForNow => {
            Verdict { block_ms: Some(DOUBTED_MS), ..lasting(Class::ModelUnsupported, Effect::Block) }
        }
        Meaning::Capability => lasting(Class::ModelUnsupported, Effect::None),
        Meaning::Context => turned_down(Class::ContextLength, false, Recourse::Context),
        Meaning::ContextHere => turned_down(Class::ContextLength, true, Recourse::Context),
        Meaning::Policy => turned_down(Class::ContentPolicy, false, Recourse::Content),
        Meaning::PolicyHere => turned_down(Class::ContentPolicy, true, Recourse::Content),
        Meaning::Caller => turned_down(Class::CallerError, false, Recourse::None),
        Meaning::CallerHere => turned_down(Class::CallerError, true, Recourse::None),
    }
}

/// Whether a stated wait is waited out where it was stated.
fn in_time(stated: Option<u64>) -> Here {
    match stated {
        None => Here::Backoff,
        Some(ms) if ms <= WAIT_HERE_MS_MAX => Here::After(ms),
        Some(_) => Here::No,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// 2024-03-26T19:59:00Z, a minute before the reset that the corpus shows for R04.
    const NOW: Time = Time(1_711_483_140_000);

    /// A row of the corpus: what an upstream sent, and the class that people gave it by hand.
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Row {
        id: String,
        /// Absent where the source does not show it; 200 where the error came inside an answer.
        status: Option<u16>,
        #[serde(default)]
        headers: BTreeMap<String, String>,
        #[serde(default)]
        body: Option<serde_json::Value>,
        #[serde(default)]
        text: String,
        class: String,
        #[serde(default)]
        wait_ms: Option<u64>,
        /// The row of the page that says what follows, where its own goes by the code.
        #[serde(default, rename = "as")]
        like: Option<String>,
        /// Why the classifier cannot do this row, and the row of the page that it is taken for.
        #[serde(default)]
        exception: Option<String>,
        #[serde(default)]
        taken_for: Option<String>,
    }

    impl Row {
        fn all() -> Vec<Self> {
            let lines = include_str!("../fixtures/provider_errors.jsonl").lines();
            lines.map(|line| serde_json::from_str(line).expect(line)).collect()
        }

        fn page(&self) -> &str {
            self.like.as_deref().unwrap_or(&self.id[..3])
        }

        fn verdict(&self) -> Verdict {
            let body = self.body.as_ref().map_or(self.text.clone(), |body| body.to_string());
            let headers = |name: &str| self.headers.get(name).map(String::as_str);
            match self.status {
                None | Some(200) => upstream_error(Endpoint::Chat, &UpstreamError::read(body.as_bytes()), NOW),
                Some(status) => head(Endpoint::Chat, status, &headers, body.as_bytes(), NOW),
            }
        }

        fn is_right(&self, verdict: Verdict) -> bool {
            let classes: &[Class] = match self.class.as_str() {
                "CTX" => &[Class::ContextLength],
                "POLICY" => &[Class::ContentPolicy],
                "RATE" => &[Class::RateLimited],
                "QUOTA" => &[Class::QuotaExhausted],
                "AUTH" => &[Class::InvalidKey],
                "MODEL" => &[Class::ModelUnsupported],
                "DOWN" => &[Class::Upstream5xx, Class::Timeout],
                "MODEL/DOWN" => &[Class::ModelUnsupported, Class::Upstream5xx],
                "CALLER" | "STATE" => &[Class::CallerError],
                other => panic!("{}: no such class: {other}", self.id),
            };
            classes.contains(&verdict.class) && self.wait_ms.is_none_or(|ms| verdict.retry_after_ms == Some(ms))
        }
    }

    #[test]
    fn every_row_of_the_corpus_but_the_named_exceptions_is_classified_as_people_did() {
        let rows = Row::all();
        assert!(rows.len() >= 200, "{} rows", rows.len());
        for row in &rows {
            let verdict = row.verdict();
            assert_eq!(row.is_right(verdict), row.exception.is_none(), "{} ({}): {verdict:?}", row.id, row.class);
        }
    }

    /// What docs/errors.md says of the rows that no body can tell.
    #[test]
    fn what_cannot_be_told_is_taken_for_another_row() {
        let rows = Row::all();
        let of = |id: &str| rows.iter().find(|row| row.id == id).expect("the row is in the corpus");
        for row in &rows {
            assert_eq!(row.exception.is_some(), row.taken_for.is_some(), "{}", row.id);
            if let Some(taken) = &row.taken_for {
                assert_eq!(row.verdict(), of(taken).verdict(), "{} is as {taken}", row.id);
            }
        }
    }

    /// S1.8, S3.15
    #[test]
    fn what_follows_depends_on_the_class_alone_where_no_wait_is_stated() {
        for row in Row::all().iter().filter(|row| row.wait_ms.is_none()) {
            let verdict = row.verdict();
            let Verdict { class, here, next, effect, .. } = verdict;
            let right = match class {
                Class::RateLimited => next && (here == Here::Backoff || here == Here::No),
                Class::Upstream5xx => next && effect != Effect::Cool && effect != Effect::Recover,
                Class::Timeout => next && effect == Effect::Count,
                Class::InvalidKey => next && here == Here::No && effect == Effect::Block,
                Class::QuotaExhausted | Class::ModelUnsupported => {
                    next && here == Here::No && matches!(effect, Effect::Block | Effect::None)
                }
                Class::ContextLength | Class::ContentPolicy | Class::CallerError => {
                    here == Here::No && effect == Effect::None
                }
                _ => false,
            };
            assert!(right, "{}: {verdict:?}", row.id);
        }
    }

    /// What the page of provider errors says of a row: whether it may go there again, or elsewhere, by which chain, and
    /// what health takes.
    struct Said {
        here: &'static str,
        next: &'static str,
        chain: &'static str,
        health: &'static str,
    }

    /// The page's columns `here | next | chain | health` by the id of their row.
    fn said() -> BTreeMap<&'static str, Said> {
        let row = |line: &'static str| {
            let cells: Vec<&str> = line.split(" | ").collect();
            let [id, here, next, chain, health] = cells[..] else { panic!("{line}") };
            (id, Said { here, next, chain, health })
        };
        include_str!("../fixtures/provider_actions.txt").lines().map(row).collect()
    }

    impl Said {
        /// In what `verdict` differs from the page.
        fn differs(&self, verdict: &Verdict) -> Vec<&'static str> {
            let waits = verdict.retry_after_ms.is_some_and(|ms| ms > WAIT_HERE_MS_MAX);
            // After output there is nowhere to go, whatever the verdict; what it does to health holds.
            let sent = self.next == "no (already sent)";
            let here = match self.here {
                here if here.starts_with("if nothing sent") || sent => verdict.here,
                here if here.starts_with("wait") && waits => Here::No,
                here if here.starts_with("wait") => verdict.retry_after_ms.map_or(Here::Backoff, Here::After),
                here if here.starts_with("backoff") => Here::Backoff,
                // What is repaired elsewhere is sent as it is here, which would fail again.
                _ => Here::No,
            };
            // What is bound to its issuer may go elsewhere only after a repair, which nothing here makes.
            let next = match self.next {
                _ if sent => verdict.next,
                next => next == "yes" || next.starts_with("if nothing sent"),
            };
            let chain = match self.chain {
                _ if sent => verdict.recourse,
                "none" => Recourse::None,
                "general" => Recourse::General,
                "ctx" => Recourse::Context,
                "ctx, then general" => Recourse::ContextThenGeneral,
                "policy" => Recourse::Content,
                chain => panic!("no such chain: {chain}"),
            };
            let asks = verdict.retry_after_ms.is_some();
            let health = match self.health {
                "none" | "remember dialect" => (Effect::None, None),
                "block-model short" | "block-model, short" => (Effect::Block, verdict.block_ms.or(Some(0))),
                "block-model (few minutes)" => (Effect::Block, Some(DOUBTED_MS)),
                "block-model to the delay" => (Effect::Block, verdict.retry_after_ms),
                // No breaker of a key or a channel is here yet, and nothing refreshes a token: the model rests there.
                "none if the refresh works" => (Effect::Block, None),
                health if health.starts_with("break") || health.starts_with("block") => (Effect::Block, None),
                health if health.starts_with("count") => (Effect::Count, None),
                // S1.8: without a stated time a rate limit counts, and cools at the threshold.
                health if health.starts_with("cool") => (if asks { Effect::Cool } else { Effect::Count }, None),
                health => panic!("no such effect: {health}"),
            };
            let differs = [
                ("here", here != verdict.here),
                ("next", next != verdict.next),
                ("chain", chain != verdict.recourse),
                ("health", health != (verdict.effect, verdict.block_ms)),
            ];
            differs.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
        }

        /// Whether its words are taken as they stand where the upstream states a time, or none.
        fn is_taken(&self, states: bool) -> bool {
            let here = match self.here {
                here if here.starts_with("wait") => states,
                here => ["no", "backoff", "if nothing sent"].iter().any(|word| here.starts_with(word)),
            };
            let next = !["issuer only", "yes after repair"].contains(&self.next);
            let health = match self.health {
                health if health.starts_with("cool") => states,
                "none" | "count" | "block-model" | "block-model to the delay" => true,
                "block-model short" | "block-model, short" | "block-model (few minutes)" => true,
                _ => false,
            };
            here && next && health
        }
    }

    /// docs/errors.md lists every row whose word is not taken as it stands, and says why.
    #[test]
    fn every_departure_from_the_page_is_told() {
        let page = include_str!("../../../docs/errors.md");
        let (_, told) = page.split_once("Where its word is not taken as it stands").expect("the page has the list");
        let (told, _) = told.split_once("What else needs saying").expect("the list has an end");
        let ids = told.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
        let ids: BTreeSet<&str> = ids.flat_map(|ids| ids.split(' ')).filter(|id| *id != "rows").collect();
        let (said, rows) = (said(), Row::all());
        let departing = rows.iter().filter(|row| {
            row.exception.is_none() && !said[row.page()].is_taken(row.verdict().retry_after_ms.is_some())
        });
        assert_eq!(ids, departing.map(Row::page).collect::<BTreeSet<&str>>());
    }

    /// S3.15: where else a failure may go, by which chain, and what it does to health: as the page says.
    #[test]
    fn every_row_of_the_corpus_leads_where_the_page_says() {
        let (said, rows) = (said(), Row::all());
        for id in said.keys() {
            assert!(rows.iter().any(|row| row.id.starts_with(id)), "{id} has no body");
        }
        for row in rows.iter().filter(|row| row.exception.is_none()) {
            let verdict = row.verdict();
            assert_eq!(said[row.page()].differs(&verdict), Vec::<&str>::new(), "{}: {verdict:?}", row.id);
        }
    }

    #[track_caller]
    fn check(id: &str, here: Here, effect: Effect, retry_after_ms: Option<u64>) {
        let row = Row::all().into_iter().find(|row| row.id == id).expect("the row is in the corpus");
        let verdict = row.verdict();
        assert_eq!((verdict.here, verdict.effect, verdict.retry_after_ms), (here, effect, retry_after_ms));
    }

    #[test]
    fn a_stated_wait_cools_and_a_short_one_is_waited_out() {
        check("R01", Here::After(494), Effect::Cool, Some(494));
        check("R10", Here::No, Effect::Cool, Some(4_770));
        check("R18", Here::Backoff, Effect::Count, None);
        check("R15", Here::No, Effect::Cool, Some(60_000));
        check("D04", Here::No, Effect::Block, Some(40_000));
    }

    /// D03, D04, D07, M18: an overload of one model is no fault of the others there.
    #[test]
    fn a_model_that_is_busy_rests_for_the_stated_time_or_a_minute() {
        let block_ms =
            |id: &str| Row::all().into_iter().find(|row| row.id == id).and_then(|row| row.verdict().block_ms);
        let expected = [("D03", 60_000), ("D04", 40_000), ("D07", 60_000), ("D09", 60_000), ("M16", 180_000)];
        for (id, ms) in expected {
            assert_eq!(block_ms(id), Some(ms), "{id}");
        }
        // As long as the settings say.
        assert_eq!((block_ms("M01"), block_ms("Q01"), block_ms("A01")), (None, None, None));
    }

    #[test]
    fn hints_that_lie_are_not_believed() {
        check("Q03", Here::No, Effect::Block, None);
        check("Q04", Here::No, Effect::Block, None);
        check("R07", Here::No, Effect::Cool, Some(60_000));
        check("R08", Here::No, Effect::None, None);
        // Until midnight, four hours and a minute from the time of the test.
        check("R12", Here::No, Effect::Cool, Some((4 * 3600 + 60) * 1000));
    }

    #[test]
    fn a_need_of_one_request_does_not_block_the_model_for_others() {
        for id in ["Q15", "M03", "M11", "M17"] {
            check(id, Here::No, Effect::None, None);
        }
        let without_counting = head(Endpoint::CountTokens, 404, &|_| None, b"", NOW);
        assert_eq!((without_counting.class, without_counting.effect), (Class::ModelUnsupported, Effect::None));
        assert_eq!(head(Endpoint::Messages, 404, &|_| None, b"", NOW).effect, Effect::Block);
    }

    #[test]
    fn a_bare_status_is_enough() {
        let expected = [
            (302, Class::Malformed),
            (400, Class::CallerError),
            (401, Class::InvalidKey),
            (402, Class::QuotaExhausted),
            (403, Class::InvalidKey),
            (404, Class::ModelUnsupported),
            (405, Class::ModelUnsupported),
            (408, Class::Timeout),
            (409, Class::CallerError),
            (413, Class::CallerError),
            (422, Class::CallerError),
            (429, Class::RateLimited),
            (500, Class::Upstream5xx),
            (503, Class::Upstream5xx),
            (520, Class::Upstream5xx),
            (524, Class::Timeout),
            (529, Class::Upstream5xx),
            (599, Class::Upstream5xx),
        ];
        for (status, class) in expected {
            assert_eq!(head(Endpoint::Responses, status, &|_| None, b"", NOW).class, class, "{status}");
        }
    }

    #[test]
    fn a_send_without_an_answer_may_go_elsewhere_and_counts() {
        let all = [
            (Transport::Connect, Class::Unavailable, Here::Backoff),
            (Transport::Broken, Class::Unavailable, Here::Backoff),
            (Transport::ConnectTimeout, Class::Timeout, Here::No),
            (Transport::FirstTokenTimeout, Class::Timeout, Here::No),
            (Transport::TotalTimeout, Class::Timeout, Here::No),
            (Transport::IdleTimeout, Class::Timeout, Here::No),
            (Transport::Cut, Class::Interrupted, Here::Backoff),
            (Transport::Malformed, Class::Malformed, Here::Backoff),
            (Transport::Empty, Class::Malformed, Here::Backoff),
            (Transport::Html, Class::Malformed, Here::Backoff),
        ];
        for (kind, class, here) in all {
            let verdict = transport(kind);
            assert_eq!((verdict.class, verdict.here), (class, here), "{kind:?}");
            assert_eq!((verdict.next, verdict.recourse, verdict.effect), (true, Recourse::General, Effect::Count));
            let unsent = matches!(kind, Transport::Connect | Transport::ConnectTimeout);
            assert_eq!(verdict.work, if unsent { Work::Unsent } else { Work::Unknown }, "{kind:?}");
        }
    }
}
