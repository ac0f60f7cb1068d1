//! Facts for tests: a writer tells what happens, one numbered fact after the other.

use waybill_schema::event::{
    Affinity, AffinityRead, Attempt, Choice, Class, Context, Effect, Endpoint, Epoch, Event, Fact, KeyType, Outcome,
    Reason, Request, Selection, SessionSource, Started, Sticky, Thresholds, Tokens, Usage,
};
use waybill_schema::id::{MemberId, Revision, WriterId};
use waybill_schema::time::Time;

/// A writer that makes facts.
pub(crate) struct Teller {
    pub(crate) writer: WriterId,
    pub(crate) epoch: u64,
    pub(crate) last: u64,
}

impl Teller {
    pub(crate) fn new(writer: &str) -> Self {
        Self { writer: writer.into(), epoch: 0, last: 0 }
    }

    pub(crate) fn says(&mut self, at: i64, event: Event) -> Fact {
        self.last += 1;
        let revision = Revision { writer: self.writer.clone(), epoch: self.epoch, number: self.last };
        Fact { revision, at: Time(at), event }
    }

    pub(crate) fn starts(&mut self, at: i64) -> Fact {
        let previous = (self.epoch > 0).then_some(Epoch { epoch: self.epoch, last: self.last });
        self.epoch += 1;
        self.last = 0;
        self.says(at, Event::Started(Started { version: "1".into(), secret: "s".into(), previous }))
    }

    pub(crate) fn selects(&mut self, at: i64, request: &str, attempt: u16, deployment: &str) -> Fact {
        self.says(at, Event::Selection(Box::new(selection(request, attempt, deployment))))
    }

    pub(crate) fn ends_send(&mut self, at: i64, request: &str, number: u16, class: Class) -> Fact {
        self.says(at, Event::Attempt(Box::new(attempt(request, number, class))))
    }

    pub(crate) fn ends(&mut self, at: i64, request: &str, outcome: Outcome, class: Class, attempts: u16) -> Fact {
        let request = Request {
            request: request.into(),
            outcome,
            class: Some(class),
            code: None,
            status: Some(200),
            attempts,
            fallback: false,
            latency_ms: 70,
            context: None,
        };
        self.says(at, Event::Request(Box::new(request)))
    }
}

pub(crate) fn context() -> Context {
    Context {
        scope: "acme".into(),
        key: "acme".into(),
        group: "main".into(),
        model: "gpt".into(),
        endpoint: Endpoint::Responses,
        stream: true,
        session: "s-1".into(),
        source: SessionSource::Explicit,
        signal: "header:x-session-id".into(),
        sticky: Some(Sticky { key: "acme|s-1".into(), by: KeyType::Conv }),
    }
}

/// A send of `request`; the first one carries the context and an affinity that was followed.
pub(crate) fn selection(request: &str, attempt: u16, deployment: &str) -> Selection {
    let revision = Revision { writer: "gw".into(), epoch: 1, number: 1 };
    let read = AffinityRead { deployment: deployment.into(), revision, provisional: false };
    let choice = Choice {
        candidates: Vec::new(),
        excluded: Vec::new(),
        draw: 0,
        affinity: Affinity::Hit(read),
        last_resort: false,
        catalogue: 1,
    };
    let first = attempt == 1;
    Selection {
        request: request.into(),
        attempt,
        member: MemberId::new(format!("main/gpt/{deployment}")),
        deployment: deployment.into(),
        incarnation: 1,
        upstream_model: "gpt".into(),
        reason: if first { Reason::Affinity } else { Reason::Next },
        claim: false,
        choice: first.then_some(choice),
        context: first.then(context),
    }
}

/// The end of a send that took 50 ms; a success used 100 tokens in and 20 out for 7 nano-USD.
pub(crate) fn attempt(request: &str, attempt: u16, class: Class) -> Attempt {
    let success = class == Class::Success;
    let usage = Usage { input: Tokens::Reported(100), output: Tokens::Reported(20), ..Usage::default() };
    Attempt {
        request: request.into(),
        attempt,
        member: "main/gpt/a".into(),
        deployment: "a/gpt".into(),
        incarnation: 1,
        model: "gpt".into(),
        class,
        status: Some(if success { 200 } else { 502 }),
        latency_ms: 50,
        first_token_ms: success.then_some(9),
        usage: if success { usage } else { Usage::default() },
        cost_nano: success.then_some(7),
        retry_after_ms: None,
        served_model: None,
        effect: if success { Effect::Recover } else { Effect::Count },
        thresholds: Thresholds {
            failures: 3,
            cooldown_ms: 1000,
            growth_permille: 2000,
            cooldown_ms_max: 60_000,
            block_ms: 1000,
        },
        sticky: None,
    }
}
