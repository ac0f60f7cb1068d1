//! Dispatch against hand-made tables: verdicts in, the sends they lead to out.

use std::fmt::Write;

use proptest::prelude::*;
use waybill_routing::classify::{Here, Recourse, Transport, Verdict, transport};
use waybill_routing::dispatch::{Attempt, End, Limits, Next, Replay, Search, begin};
use waybill_schema::event::{Class, Effect};
use waybill_schema::id::DeploymentId;
use waybill_schema::time::Time;

const POOL: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Every send takes a second.
const SEND_MS: i64 = 1000;
const LIMITS: Limits = Limits {
    max_attempts: 2,
    retry_times: 2,
    sends_max: 10,
    backoff_ms: 100,
    deadline: Time(600_000),
    replay: Replay::Free,
};

/// Plays `script`, the verdicts of the sends in turn, against a pool of five: the sends with the pauses before them in
/// milliseconds, and how it ended.
fn check(limits: Limits, script: &str, expected: &str) {
    assert_eq!(play(limits, script.split_whitespace().map(verdict)).0, expected, "{script}");
}

/// The sends as text, and their number; `|` stands where they go on in another pool, of the same five. A pool or script
/// that runs out ends it; `None` commits.
fn play(limits: Limits, verdicts: impl Iterator<Item = Option<Verdict>>) -> (String, u16) {
    let (mut out, mut now) = (String::new(), Time(0));
    let Some(mut attempt) = take(begin(limits), &mut out) else { return (out, 0) };
    let mut sends = 1;
    for verdict in verdicts {
        assert_eq!(attempt.number(), sends);
        now = now.plus_ms(SEND_MS);
        let Some(verdict) = verdict else {
            assert_eq!(attempt.commit().sends(), sends);
            return (out + " ok", sends);
        };
        match attempt.fail(&verdict, now) {
            Next::Same { attempt: again, after_ms } => {
                write!(out, " +{after_ms}").expect("text");
                now = now.plus_ms(i64::try_from(after_ms).expect("a pause is short"));
                attempt = again;
            }
            Next::Other(search) => {
                assert_eq!(search.sends(), sends);
                let Some(other) = take(search, &mut out) else { return (out + " no more", sends) };
                attempt = other;
            }
            Next::Spent { search, .. } => {
                out.push_str(" |");
                let Some(other) = take(search.enter_pool(), &mut out) else { return (out + " no more", sends) };
                attempt = other;
            }
            Next::End(end) => return (format!("{out} {end:?}"), sends),
        }
        sends += 1;
    }
    (out, sends)
}

/// Takes the first deployment that is not exhausted.
fn take(search: Search, out: &mut String) -> Option<Attempt> {
    let spent = |name: &&str| search.exhausted().contains(&DeploymentId::from(*name));
    let name = POOL.into_iter().find(|name| !spent(name))?;
    let space = if out.is_empty() { "" } else { " " };
    write!(out, "{space}{name}").expect("text");
    Some(search.take(name.into()))
}

/// A verdict by its word; one that ends in `>` may lead to another pool.
fn verdict(word: &str) -> Option<Verdict> {
    let (word, recourse) = match word.strip_suffix('>') {
        Some(word) => (word, Recourse::General),
        None => (word, Recourse::None),
    };
    let (class, here, next) = match word {
        "ok" => return None,
        "dead" => return Some(Verdict { recourse, here: Here::No, ..transport(Transport::Connect) }),
        "5xx" => (Class::Upstream5xx, Here::Backoff, true),
        "429" => (Class::RateLimited, Here::Backoff, true),
        "429:30s" => (Class::RateLimited, Here::After(30_000), true),
        "key" => (Class::InvalidKey, Here::No, true),
        "context" => (Class::ContextLength, Here::No, false),
        "stay" => (Class::Upstream5xx, Here::Backoff, false),
        "timeout" => (Class::Timeout, Here::Backoff, true),
        "field" => (Class::CallerError, Here::Repaired, false),
        "broken" => (Class::Unavailable, Here::No, true),
        _ => panic!("unknown verdict {word}"),
    };
    Some(Verdict { here, next, recourse, ..Verdict::ended(class, Effect::None) })
}

/// S3.12, PITFALLS A03, A04
#[test]
fn each_deployment_gets_its_attempts_and_then_others_do() {
    check(LIMITS, "ok", "a ok");
    check(LIMITS, "5xx ok", "a +100 ok");
    check(LIMITS, "5xx 5xx ok", "a +100 b ok");
    check(LIMITS, "5xx 5xx 5xx 5xx 5xx 5xx", "a +100 b +100 c +100 Exhausted");
}

/// PITFALLS E15: what is sent again without what was refused is none of the attempts, but one of the sends.
#[test]
fn a_repaired_request_is_sent_to_the_same_deployment_beside_its_attempts() {
    check(Limits { max_attempts: 1, retry_times: 0, ..LIMITS }, "field ok", "a +0 ok");
    check(LIMITS, "field 5xx 5xx ok", "a +0 +100 b ok");
    check(Limits { sends_max: 1, ..LIMITS }, "field", "a Exhausted");
    check(Limits { replay: Replay::Never, ..LIMITS }, "field", "a Final");
}

/// S3.12: `max_attempts` counts the first call; 0 further deployments means one.
#[test]
fn the_smallest_limits_send_once() {
    check(Limits { max_attempts: 1, retry_times: 0, ..LIMITS }, "5xx ok", "a Exhausted");
    check(Limits { max_attempts: 1, ..LIMITS }, "5xx 5xx 5xx", "a b c Exhausted");
    check(Limits { retry_times: 0, ..LIMITS }, "5xx 5xx", "a +100 Exhausted");
}

/// S1.8, PITFALLS C18: no retry on that deployment, the next at once.
#[test]
fn a_refused_credential_goes_to_the_next_at_once() {
    check(LIMITS, "key 5xx ok", "a b +100 ok");
    check(LIMITS, "5xx key ok", "a +100 b ok");
}

/// S3.12, PITFALLS D06
#[test]
fn a_failure_that_no_send_mends_ends_it() {
    check(LIMITS, "context ok", "a Final");
    check(LIMITS, "5xx 5xx context", "a +100 b Final");
    check(LIMITS, "stay stay ok", "a +100 Exhausted");
}

/// PITFALLS D05
#[test]
fn the_sends_in_all_are_bounded() {
    check(Limits { sends_max: 3, ..LIMITS }, "5xx 5xx 5xx ok", "a +100 b Exhausted");
    check(Limits { sends_max: 1, ..LIMITS }, "5xx ok", "a Exhausted");
    check(Limits { sends_max: 2, ..LIMITS }, "key key ok", "a b Exhausted");
}

/// A pool that ends before the limits do.
#[test]
fn a_pool_is_walked_once() {
    check(Limits { retry_times: 99, ..LIMITS }, "key key key key key key", "a b c d e no more");
}

/// 100, 200, 400 ms; another deployment starts again; 2^10 at most.
#[test]
fn the_pause_doubles_on_the_same_deployment() {
    let patient = Limits { max_attempts: 4, ..LIMITS };
    check(patient, "5xx 5xx 5xx 5xx 5xx ok", "a +100 +200 +400 b +100 ok");
    check(patient, "429:30s 5xx ok", "a +30000 +200 ok");
    let stubborn = Limits { max_attempts: 14, sends_max: 14, backoff_ms: 1, ..LIMITS };
    let script = ["5xx"; 14].join(" ");
    let expected = "a +1 +2 +4 +8 +16 +32 +64 +128 +256 +512 +1024 +1024 +1024 Exhausted";
    check(stubborn, &script, expected);
}

/// A pause past every clock is no pause that could be taken.
#[test]
fn a_pause_beyond_all_time_is_not_taken() {
    let endless = Limits { backoff_ms: u64::MAX / 2, max_attempts: 9, ..LIMITS };
    check(endless, "5xx key ok", "a b c ok");
}

/// PITFALLS D05: a retry must begin before the deadline; here each send takes a second.
#[test]
fn nothing_starts_at_or_after_the_deadline() {
    let until = |ms| Limits { deadline: Time(ms), ..LIMITS };
    check(until(1101), "5xx ok", "a +100 ok");
    check(until(1100), "5xx ok", "a b ok");
    check(until(1000), "5xx ok", "a Deadline");
    check(until(1000), "key ok", "a Deadline");
    check(until(20_000), "429:30s ok", "a b ok");
    check(until(1100), "stay ok", "a Deadline");
}

/// DESIGN.md section 10, "`/v1/responses` retries"; PITFALLS D12
#[test]
fn what_may_have_been_done_is_not_repeated() {
    let once = Limits { replay: Replay::RefusedOnly, ..LIMITS };
    check(once, "429 429 key ok", "a +100 b c ok");
    check(once, "5xx ok", "a Unrepeatable");
    check(once, "timeout ok", "a Unrepeatable");
    check(once, "broken ok", "a Unrepeatable");
    check(once, "dead dead ok", "a b c ok");
    check(once, "dead broken ok", "a b Unrepeatable");
    check(once, "429 5xx ok", "a +100 Unrepeatable");
    check(once, "context ok", "a Final");
}

/// DESIGN.md section 10: "refused-before-work failures may always be retried except for images".
#[test]
fn what_is_sent_once_is_never_repeated() {
    let never = Limits { replay: Replay::Never, ..LIMITS };
    check(never, "429 ok", "a Unrepeatable");
    check(never, "key ok", "a Unrepeatable");
    check(never, "dead ok", "a Unrepeatable");
    check(never, "context ok", "a Final");
}

/// What is gone once it is sent goes elsewhere only where nothing of it was.
#[test]
fn what_went_out_is_gone() {
    let gone = Limits { replay: Replay::UnsentOnly, ..LIMITS };
    check(gone, "dead dead ok", "a b c ok");
    check(gone, "dead 429 ok", "a b Unrepeatable");
    check(gone, "5xx ok", "a Unrepeatable");
    check(Limits { max_attempts: 1, retry_times: 0, ..gone }, "dead> ok", "a | b ok");
}

/// S3.12, S3.18, PITFALLS D05: another pool has its own further deployments; what was tried stays tried, and the sends of
/// all pools count together.
#[test]
fn a_pool_that_is_spent_leads_to_another_within_the_same_bounds() {
    check(LIMITS, "5xx> 5xx> 5xx> 5xx> 5xx> 5xx> ok", "a +100 b +100 c +100 | d ok");
    let few = Limits { max_attempts: 1, retry_times: 0, ..LIMITS };
    check(few, "5xx> 5xx> 5xx> ok", "a | b | c | d ok");
    check(few, "5xx> 5xx ok", "a | b Exhausted");
    check(Limits { sends_max: 2, ..few }, "5xx> 5xx> ok", "a | b Exhausted");
    check(Limits { deadline: Time(2_000), ..few }, "5xx> 5xx> ok", "a | b Deadline");
    check(LIMITS, "context> ok", "a | b ok");
    check(LIMITS, "context ok", "a Final");
}

/// S3.16: what may have been done is not done elsewhere either.
#[test]
fn what_may_not_be_repeated_leads_to_no_other_pool() {
    let once = Limits { replay: Replay::RefusedOnly, max_attempts: 1, retry_times: 0, ..LIMITS };
    check(once, "5xx> ok", "a Unrepeatable");
    check(once, "429> ok", "a | b ok");
}

/// PITFALLS A04
#[test]
fn an_exhausted_deployment_is_named_for_the_rest_of_the_request() {
    let key = verdict("key").expect("a failure");
    let Next::Other(search) = begin(LIMITS).take("a".into()).fail(&key, Time(1)) else { panic!("others are left") };
    let Next::Other(search) = search.take("b".into()).fail(&key, Time(2)) else { panic!("others are left") };
    assert_eq!(search.exhausted(), [DeploymentId::from("a"), DeploymentId::from("b")]);
    let Next::End(end) = search.take("c".into()).fail(&key, Time(3)) else { panic!("two were retried") };
    assert_eq!(end, End::Exhausted);
}

fn any_verdict() -> impl Strategy<Value = Verdict> {
    let class = prop_oneof![Just(Class::Upstream5xx), Just(Class::RateLimited), Just(Class::InvalidKey)];
    let here = prop_oneof![1 => Just(Here::No), 3 => Just(Here::Backoff), 1 => (0..5000u64).prop_map(Here::After)];
    let recourse = prop_oneof![Just(Recourse::None), Just(Recourse::General)];
    (class, here, proptest::bool::weighted(0.9), recourse).prop_map(|(class, here, next, recourse)| Verdict {
        here,
        next,
        recourse,
        ..Verdict::ended(class, Effect::None)
    })
}

fn any_limits() -> impl Strategy<Value = Limits> {
    let numbers = (1..5u32, 0..7u32, 1..20u32, 0..2000u64, 0..60_000i64, any::<bool>());
    numbers.prop_map(|(max_attempts, retry_times, sends_max, backoff_ms, deadline, free)| {
        let replay = if free { Replay::Free } else { Replay::RefusedOnly };
        Limits { max_attempts, retry_times, sends_max, backoff_ms, deadline: Time(deadline), replay }
    })
}

proptest! {
    /// S3.12, PITFALLS D05, A04: sends are bounded in all and per deployment, and none is met twice.
    #[test]
    fn sends_stay_within_their_bounds(limits in any_limits(), verdicts in proptest::collection::vec(any_verdict(), 60)) {
        let (text, sends) = play(limits, verdicts.into_iter().map(Some));
        let n_pools = text.matches('|').count() as u32 + 1;
        let bound = limits.sends_max.min(limits.max_attempts * (1 + limits.retry_times) * n_pools);
        prop_assert!(u32::from(sends) <= bound, "{} sends: {}", sends, text);
        let mut taken: Vec<(&str, u32)> = Vec::new();
        for word in text.split(' ') {
            match taken.last_mut() {
                Some((_, n)) if word.starts_with('+') => *n += 1,
                _ if POOL.contains(&word) => taken.push((word, 1)),
                _ => {}
            }
        }
        for (index, (name, n)) in taken.iter().enumerate() {
            prop_assert!(*n <= limits.max_attempts, "{}", text);
            prop_assert!(taken[..index].iter().all(|(before, _)| before != name), "{}", text);
        }
    }
}
