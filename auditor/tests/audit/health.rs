//! Who rests, until when and why.

use waybill_auditor::health::health;
use waybill_auditor::reading;
use waybill_projections::story::attempt;
use waybill_schema::event::{Class, Effect, Event};
use waybill_schema::time::Time;

use crate::House;

#[test]
fn members_are_shown_as_they_stand_at_the_moment_asked_for() {
    let mut house = House::new();
    let mut cooled = attempt("r-1", 1, Class::RateLimited);
    (cooled.effect, cooled.retry_after_ms) = (Effect::Cool, Some(500));
    let mut blocked = attempt("r-2", 1, Class::ModelUnsupported);
    (blocked.effect, blocked.member) = (Effect::Block, "main/gpt/b".into());
    let gw = &mut house.gateway;
    let facts = [
        gw.starts(0),
        gw.says(1000, Event::Attempt(Box::new(cooled))),
        gw.says(1100, Event::Attempt(Box::new(blocked))),
    ];
    house.tell(&facts);
    let house = house.settle();
    let at = |now| {
        let audit = house.audit();
        let fold = reading::fold(audit.connection()).expect("the log can be read");
        let members = health(&fold.state, Time(now));
        members
            .iter()
            .map(|member| {
                let cooldown = member.cooldown.as_ref().map(|rest| (rest.until.0, rest.reason, rest.upstream));
                let blocks: Vec<_> = member.blocks.iter().map(|block| (block.model.as_str(), block.until.0)).collect();
                format!("{} {} {cooldown:?} {blocks:?}", member.member, member.failures)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(at(1200), ["main/gpt/a 1 Some((1500, RateLimited, true)) []", "main/gpt/b 0 None [(\"gpt\", 2100)]"]);
    assert_eq!(at(5000), ["main/gpt/a 1 None []", "main/gpt/b 0 None []"]);
}
