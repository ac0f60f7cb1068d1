//! Facts for tests: a writer tells what happens, one numbered fact after the other, and seals it into frames.

use waybill_schema::event::{
    Affinity, AffinityRead, Attempt, Choice, Class, Context, Effect, Endpoint, Epoch, Event, Fact, KeyType, Outcome,
    Reason, Request, Selection, SessionSource, Started, Sticky, Thresholds, Tokens, Usage,
};
use waybill_schema::frame::{Body, Frame, Link};
use waybill_schema::id::{MemberId, Revision, WriterId};
use waybill_schema::time::Time;

/// A writer that makes facts.
#[derive(Debug)]
pub struct Teller {
    /// Its name.
    pub writer: WriterId,
    /// Its epoch; 0 before it has started.
    pub epoch: u64,
    /// Its last number.
    pub last: u64,
    link: Link,
}

impl Teller {
    /// A writer that has said nothing.
    pub fn new(writer: &str) -> Self {
        Self { writer: writer.into(), epoch: 0, last: 0, link: Link::start() }
    }

    /// Seals consecutive facts into the writer's next frame.
    pub fn seals(&mut self, facts: &[Fact]) -> Frame {
        let mut lines = Vec::new();
        for fact in facts {
            Body::of(&fact.event, fact.at).write_line(fact.revision.number, &mut lines);
        }
        self.seals_lines(&facts[0].revision, facts.len(), &lines)
    }

    /// Seals `count` lines, whatever they hold, into the writer's next frame; `first` names the fact in the first.
    pub fn seals_lines(&mut self, first: &Revision, count: usize, lines: &[u8]) -> Frame {
        let count = u32::try_from(count).expect("a frame holds few facts");
        let frame = Frame::seal(self.writer.clone(), first.epoch, self.link.clone(), first.number, count, lines);
        self.link = Link::after(&frame.header);
        frame
    }

    /// The next fact: `event`, at `at`.
    pub fn says(&mut self, at: i64, event: Event) -> Fact {
        self.last += 1;
        let revision = Revision { writer: self.writer.clone(), epoch: self.epoch, number: self.last };
        Fact { revision, at: Time(at), event }
    }

    /// The first fact of the next epoch.
    pub fn starts(&mut self, at: i64) -> Fact {
        let previous = (self.epoch > 0).then_some(Epoch { epoch: self.epoch, last: self.last });
        self.epoch += 1;
        self.last = 0;
        self.says(at, Event::Started(Started { version: "1".into(), secret: "s".into(), previous }))
    }

    /// A [`selection`].
    pub fn selects(&mut self, at: i64, request: &str, attempt: u16, deployment: &str) -> Fact {
        self.says(at, Event::Selection(Box::new(selection(request, attempt, deployment))))
    }

    /// An [`attempt`].
    pub fn ends_send(&mut self, at: i64, request: &str, number: u16, class: Class) -> Fact {
        self.says(at, Event::Attempt(Box::new(attempt(request, number, class))))
    }

    /// A request ended after 70 ms with status 200.
    pub fn ends(&mut self, at: i64, request: &str, outcome: Outcome, class: Class, attempts: u16) -> Fact {
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

/// Who asks for what in every request here: session `s-1` of `acme` wants `gpt` from `main`.
pub fn context() -> Context {
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
pub fn selection(request: &str, attempt: u16, deployment: &str) -> Selection {
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
pub fn attempt(request: &str, attempt: u16, class: Class) -> Attempt {
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
