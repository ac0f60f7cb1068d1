//! Every recorded choice can be made again.

use waybill_auditor::redecide::{Redecided, redecide_all};
use waybill_projections::story::{Teller, attempt, context, selection};
use waybill_routing::select::{Ask, Moment, decide, look};
use waybill_routing::state::State;
use waybill_schema::catalogue::{Catalogue, Channel, Dialect, Group, Member, Pool, Route, Row, Rows, Status};
use waybill_schema::event::{Class, Effect, Endpoint, Event, Fact, KeyType, Outcome, Selection, Sticky};
use waybill_schema::id::ModelName;
use waybill_schema::time::Time;

use crate::House;

fn catalogue(channels: &[(&str, i32, u32)]) -> Catalogue {
    let (group, model) = ("main".into(), ModelName::from("gpt"));
    let mut target = vec![
        Row::Group(Group {
            id: group,
            display_name: String::new(),
            description: String::new(),
            status: Status::Active,
            public_models: Vec::new(),
            requestable: false,
            sticky_policy: None,
            failover_policy: None,
        }),
        Row::Route(Route {
            model: model.clone(),
            fallbacks: Vec::new(),
            sticky_session: true,
            first_token_seconds: None,
        }),
    ];
    for (id, priority, weight) in channels {
        let member = Member::id_of(&"main".into(), &model, &(*id).into(), None);
        target.push(Row::Channel(Channel {
            id: (*id).into(),
            status: Status::Active,
            base_url: String::new(),
            dialects: vec![Dialect::Responses],
            api_keys: Vec::new(),
            models: Vec::new(),
            labels: Default::default(),
            internal_headers: false,
            stream_usage: true,
            prices: Vec::new(),
        }));
        target.push(Row::Member(Member {
            id: member,
            status: Status::Active,
            route: model.clone(),
            group: "main".into(),
            channel: (*id).into(),
            priority: *priority,
            weight: *weight,
            upstream_model: None,
        }));
    }
    let mut rows = Rows::default();
    let batch = rows.batch_to(target, "test", "test", None);
    rows.apply(&batch).expect("a batch made from the rows fits them");
    Catalogue::compile(&rows)
}

/// A decision as a gateway makes it: for one of 300 sessions, on what the facts so far have made of the state.
fn decided(n: u64, pool: &Pool, state: &State) -> Option<Selection> {
    let sticky = Sticky { key: format!("acme|s-{}", n % 300).as_str().into(), by: KeyType::Sess };
    let model = ModelName::from("gpt");
    let ask = Ask {
        pool,
        model: &model,
        endpoint: Endpoint::Responses,
        sticky: Some(&sticky),
        exhausted: &[],
        has_credential: &|_| true,
        last_resort: true,
        catalogue: 1,
        path: &[],
        shares: None,
    };
    // A fixed stream of draws: Knuth's multiplier, upper 53 bits.
    let draw = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407) >> 11;
    let choice = look(&ask, &Moment { state, now: Time(n as i64 * 10), draw });
    let (index, reason) = decide(&choice)?;
    let chosen = choice.candidates[index].clone();
    let request = format!("r-{n}");
    let context = Some(waybill_schema::event::Context { sticky: Some(sticky), ..context() });
    Some(Selection {
        member: chosen.member,
        deployment: chosen.deployment,
        incarnation: chosen.incarnation,
        reason,
        claim: true,
        choice: Some(choice),
        context,
        ..selection(&request, 1, "")
    })
}

/// The three facts of request `n`; every seventh fails and counts against its member.
fn request(gw: &mut Teller, n: u64, selection: Selection) -> [Fact; 3] {
    let at = n as i64 * 10;
    let (class, effect, outcome) = match n % 7 {
        0 => (Class::Upstream5xx, Effect::Count, Outcome::Failed),
        _ => (Class::Success, Effect::Recover, Outcome::Success),
    };
    let request = format!("r-{n}");
    let mut ended = attempt(&request, 1, class);
    (ended.member, ended.deployment) = (selection.member.clone(), selection.deployment.clone());
    (ended.incarnation, ended.effect) = (selection.incarnation, effect);
    (ended.thresholds.failures, ended.thresholds.cooldown_ms) = (1, 300);
    [
        gw.says(at, Event::Selection(Box::new(selection))),
        gw.says(at + 5, Event::Attempt(Box::new(ended))),
        gw.ends(at + 6, &request, outcome, class, 1),
    ]
}

#[test]
fn ten_thousand_choices_come_out_as_recorded() {
    let catalogue = catalogue(&[("a", 1, 70), ("b", 1, 30), ("c", 1, 10), ("d", 2, 100), ("e", 2, 0)]);
    let pool = catalogue.pool(&"main".into(), "gpt").expect("the pool is served");
    let mut house = House::new();
    let mut state = State::default();
    let mut facts = vec![house.gateway.starts(0)];
    let mut reasons = std::collections::BTreeSet::new();
    for n in 1..=10_000 {
        let selection = decided(n, &pool, &state).expect("a last resort is always legal");
        reasons.insert(format!("{:?}", selection.reason));
        let told = request(&mut house.gateway, n, selection);
        told.iter().for_each(|fact| state.apply(fact));
        facts.extend(told);
    }
    house.tell(&facts);
    let redecided = redecide_all(house.audit().connection()).expect("the log can be read");
    assert_eq!(redecided, Redecided { n: 10_000, mismatches: Vec::new() });
    assert_eq!(reasons.into_iter().collect::<Vec<_>>(), ["Affinity", "Draw", "LastResort"]);
}
