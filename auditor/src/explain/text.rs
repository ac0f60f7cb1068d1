//! An explanation in words, for people.

use std::fmt::{self, Display, Formatter};

use chrono::{DateTime, SecondsFormat};
use waybill_projections::word::Word;
use waybill_schema::event::{
    Affinity, AffinityRead, Attempt, Candidate, Choice, Context, Effect, Preference, Reason, Request, Selection,
    Tokens, Usage,
};
use waybill_schema::time::Time;

use super::{Committed, End, Explanation, NotCommitted, Noted, Send};
use crate::redecide::Redecision;

impl Display for Explanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "request {}", self.request)?;
        match &self.context {
            Some(context) => asked(f, context, self.inferred)?,
            None => writeln!(f, "  who asked for what cannot be read")?,
        }
        if self.sends.is_empty() {
            writeln!(f, "nothing was sent upstream")?;
        }
        self.sends.iter().try_for_each(|send| sent(f, send))?;
        match &self.preference {
            Committed::By(noted) => committed(f, noted)?,
            Committed::Not(why) => writeln!(f, "affinity not committed: {}", not_committed(*why))?,
        }
        for Noted { says, .. } in &self.ownerships {
            writeln!(f, "response {} owned by {} ({})", says.response, says.deployment, Word(says.state))?;
        }
        for place in &self.unread {
            writeln!(f, "a fact in frame {} line {} cannot be read", place.seq, place.line)?;
        }
        match &self.end {
            End::Ended(noted) => ended(f, &noted.says, noted.at),
            End::Abandoned => writeln!(f, "outcome abandoned: its gateway died and nobody recorded an end"),
            End::UnderWay => writeln!(f, "outcome open: the request is under way"),
        }
    }
}

fn asked(f: &mut Formatter<'_>, context: &Context, inferred: bool) -> fmt::Result {
    let Context { scope, key, group, model, endpoint, session, source, signal, .. } = context;
    let stream = if context.stream { ", streamed" } else { "" };
    let model = if model.as_str().is_empty() { "(none named)" } else { model.as_str() };
    writeln!(f, "  scope {scope}, key {key}, group {group}, model {model}, {}{stream}", Word(endpoint))?;
    let inferred = if inferred { ", inferred" } else { "" };
    writeln!(f, "  session {session} ({}{inferred}) from {signal}", Word(source))?;
    match &context.sticky {
        Some(sticky) => writeln!(f, "  affinity key {} by {}", sticky.key, Word(sticky.by)),
        None => writeln!(f, "  no affinity key"),
    }
}

fn sent(f: &mut Formatter<'_>, send: &Send) -> fmt::Result {
    match &send.selection {
        Some(noted) => selected(f, send, &noted.says, noted.at)?,
        None => writeln!(f, "send {}: its selection cannot be read", send.attempt)?,
    }
    match &send.end {
        Some(noted) => attempted(f, &noted.says, noted.at),
        None => writeln!(f, "  no end on record"),
    }
}

fn selected(f: &mut Formatter<'_>, send: &Send, selection: &Selection, at: Time) -> fmt::Result {
    let Selection { member, deployment, upstream_model, reason, .. } = selection;
    writeln!(f, "send {} at {}: {deployment} because {}", send.attempt, Clock(at), because(*reason))?;
    let claim = if selection.claim { ", takes the affinity for an hour" } else { "" };
    writeln!(f, "  member {member} (incarnation {}), model {upstream_model}{claim}", selection.incarnation)?;
    let Some(choice) = &selection.choice else { return Ok(()) };
    chosen_from(f, choice)?;
    match &send.redecided {
        Some(Redecision::Same) => writeln!(f, "  re-decided: same"),
        Some(Redecision::Mismatch { member: Some(member) }) => writeln!(f, "  re-decided: MISMATCH, {member}"),
        Some(Redecision::Mismatch { member: None }) => writeln!(f, "  re-decided: MISMATCH, nothing is legal"),
        None => Ok(()),
    }
}

fn chosen_from(f: &mut Formatter<'_>, choice: &Choice) -> fmt::Result {
    match &choice.affinity {
        Affinity::None => {}
        Affinity::Absent => writeln!(f, "  affinity: no live record")?,
        Affinity::Hit(read) => writeln!(f, "  affinity: {}, followed", Record(read))?,
        Affinity::Skipped(read) => writeln!(f, "  affinity: {}, not legal now", Record(read))?,
    }
    writeln!(f, "  catalogue revision {}, draw {}", choice.catalogue, choice.draw)?;
    choice.candidates.iter().try_for_each(|candidate| weighed(f, candidate))?;
    let shown = choice.candidates.iter().filter(|candidate| candidate.excluded.is_some()).count();
    let all: usize = choice.excluded.iter().map(|count| count.n as usize).sum();
    if all > shown {
        let counts = choice.excluded.iter().map(|count| format!("{} {}", count.n, Word(count.code)));
        writeln!(f, "  excluded in all: {}", counts.collect::<Vec<_>>().join(", "))?;
    }
    Ok(())
}

fn weighed(f: &mut Formatter<'_>, candidate: &Candidate) -> fmt::Result {
    let Candidate { member, deployment, priority, weight, failures, .. } = candidate;
    write!(f, "  - {deployment} ({member}): tier {priority}, weight {weight}, failures {failures}")?;
    match (candidate.excluded, candidate.until) {
        (Some(code), Some(until)) => writeln!(f, ", excluded: {} until {}", Word(code), Clock(until)),
        (Some(code), None) => writeln!(f, ", excluded: {}", Word(code)),
        (None, _) => writeln!(f, ", legal"),
    }
}

fn attempted(f: &mut Formatter<'_>, attempt: &Attempt, at: Time) -> fmt::Result {
    write!(f, "  ended {}", Word(attempt.class))?;
    if let Some(status) = attempt.status {
        write!(f, ", status {status}")?;
    }
    write!(f, ", after {} ms", attempt.latency_ms)?;
    if let Some(ms) = attempt.first_token_ms {
        write!(f, ", first token after {ms} ms")?;
    }
    writeln!(f, ", at {}", Clock(at))?;
    let served = attempt.served_model.as_ref().map(|model| format!(", served by {model}")).unwrap_or_default();
    writeln!(f, "  usage: {}{served}", Used(&attempt.usage, attempt.cost_nano))?;
    writeln!(f, "  health: {}", effect(attempt))
}

fn effect(attempt: &Attempt) -> String {
    let thresholds = &attempt.thresholds;
    match attempt.effect {
        Effect::None => "unchanged".to_owned(),
        Effect::Recover => "recovered".to_owned(),
        Effect::Count => format!("a failure that counts, {} start a cooldown", thresholds.failures),
        Effect::Cool => match attempt.retry_after_ms {
            Some(ms) => format!("cools down for the {ms} ms that the upstream asked for"),
            None => format!("a failure that counts, {} start a cooldown", thresholds.failures),
        },
        Effect::Block => format!("blocked for {} for {} ms", attempt.model, thresholds.block_ms),
    }
}

fn committed(f: &mut Formatter<'_>, noted: &Noted<Preference>) -> fmt::Result {
    let Preference { key, deployment, base, ttl_ms, .. } = &noted.says;
    write!(f, "affinity committed: {key} to {deployment} for {ttl_ms} ms, ")?;
    match base {
        Some(base) => writeln!(f, "based on {base}: a switch stands only if the record had not moved on"),
        None => writeln!(f, "based on no record"),
    }
}

fn not_committed(why: NotCommitted) -> &'static str {
    match why {
        NotCommitted::NoKey => "the request has no affinity key",
        NotCommitted::UnderWay => "nothing has succeeded yet",
        NotCommitted::NoSuccess => "no send succeeded",
        NotCommitted::NotRecorded => "a send succeeded, but no preference was recorded for it",
    }
}

fn ended(f: &mut Formatter<'_>, request: &Request, at: Time) -> fmt::Result {
    write!(f, "outcome {}", Word(request.outcome))?;
    if let Some(status) = request.status {
        write!(f, ", status {status}")?;
    }
    if let Some(code) = &request.code {
        write!(f, ", code {code}")?;
    }
    let fallback = if request.fallback { ", fallback used" } else { "" };
    let n = request.attempts;
    writeln!(f, ", {n} send(s){fallback}, {} ms, at {}", request.latency_ms, Clock(at))
}

fn because(reason: Reason) -> &'static str {
    match reason {
        Reason::Affinity => "the affinity record names it",
        Reason::Draw => "the draw fell on it",
        Reason::Rendezvous => "rendezvous hashing on the affinity key named it",
        Reason::Same => "the same deployment is tried again",
        Reason::Next => "the one before failed and this is the next of the pool",
        Reason::Fallback => "a fallback chain led to it",
        Reason::Owner => "it owns the response that is continued",
        Reason::LastResort => "every candidate is cooling and this one is free soonest",
    }
}

struct Record<'a>(&'a AffinityRead);

impl Display for Record<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let AffinityRead { deployment, revision, provisional } = self.0;
        let provisional = if *provisional { ", provisional" } else { "" };
        write!(f, "{deployment} (revision {revision}{provisional})")
    }
}

struct Used<'a>(&'a Usage, Option<u64>);

impl Display for Used<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Usage { input, output, cached, cache_write, reasoning } = self.0;
        let named = [("input", input), ("output", output), ("cached", cached)];
        let rare = [("cache write", cache_write), ("reasoning", reasoning)];
        let parts = named.into_iter().chain(rare.into_iter().filter(|(_, tokens)| !tokens.is_unknown()));
        for (name, tokens) in parts {
            match tokens {
                Tokens::Reported(n) => write!(f, "{name} {n}, ")?,
                Tokens::Estimated(n) => write!(f, "{name} about {n}, ")?,
                Tokens::Unknown => write!(f, "{name} unknown, ")?,
            }
        }
        match self.1 {
            Some(nano) => write!(f, "{nano} nano-USD"),
            None => write!(f, "not priced"),
        }
    }
}

/// A moment as people write it, in UTC.
struct Clock(Time);

impl Display for Clock {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match DateTime::from_timestamp_millis(self.0.0) {
            Some(at) => f.write_str(&at.to_rfc3339_opts(SecondsFormat::Millis, true)),
            None => write!(f, "{:?}", self.0),
        }
    }
}
