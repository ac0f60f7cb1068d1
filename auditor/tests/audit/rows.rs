//! Rows of a catalogue, said in few words, and a history of batches over them.

use waybill_auditor::catalogue::{self, UndoRefused};
use waybill_schema::catalogue::terms::Terms;
use waybill_schema::catalogue::{
    Allocation, Channel, Group, Key, Member, ModelRoute, Organization, Route, Row, RowKey, Rows, Status, Strategy,
    Team, Template,
};
use waybill_schema::event::Batch;
use waybill_schema::id::ModelName;
use waybill_schema::secret::SecretRef;

pub(crate) fn channel(id: &str, base_url: &str) -> Row {
    Row::Channel(Channel {
        id: id.into(),
        status: Status::Active,
        base_url: base_url.to_owned(),
        dialects: Vec::new(),
        api_keys: Vec::new(),
        models: Vec::new(),
        labels: Default::default(),
        internal_headers: false,
        stream_usage: true,
        prices: Vec::new(),
    })
}

pub(crate) fn group(id: &str, public_models: &[&str]) -> Row {
    Row::Group(Group {
        id: id.into(),
        display_name: id.to_owned(),
        description: String::new(),
        status: Status::Active,
        public_models: models(public_models),
        requestable: false,
        sticky_policy: None,
        failover_policy: None,
    })
}

pub(crate) fn route(model: &str, fallbacks: &[&str]) -> Row {
    let fallbacks = models(fallbacks);
    Row::Route(Route { model: model.into(), fallbacks, sticky_session: true, first_token_seconds: None })
}

/// The member `group/route/channel` with a weight.
pub(crate) fn member(place: &str, weight: u32) -> Row {
    let [group, route, channel] = place.split('/').collect::<Vec<_>>()[..] else { panic!("{place} has three parts") };
    Row::Member(Member {
        id: place.into(),
        status: Status::Active,
        route: route.into(),
        group: group.into(),
        channel: channel.into(),
        priority: 10,
        weight,
        upstream_model: None,
    })
}

/// A template that splits `model` over a deployment, if one is named.
pub(crate) fn template(id: &str, model: &str, deployment: Option<&str>) -> Row {
    let share = |deployment: &str| vec![Allocation { deployment: deployment.into(), weight: 1 }];
    let allocations = deployment.map(share);
    Row::Template(Template {
        id: id.into(),
        max_attempts: None,
        failover_policy: None,
        model_routes: vec![ModelRoute { model: model.into(), strategy: Strategy::TrafficSplit, allocations }],
        fallbacks: Vec::new(),
        context_window_fallbacks: Vec::new(),
        content_policy_fallbacks: Vec::new(),
        expose_route: false,
    })
}

pub(crate) fn organization(id: &str, template: Option<&str>) -> Row {
    Row::Organization(Organization { id: id.into(), template: template.map(Into::into), terms: Terms::default() })
}

pub(crate) fn team(id: &str, organization: Option<&str>) -> Row {
    Row::Team(Team {
        id: id.into(),
        organization: organization.map(Into::into),
        template: None,
        terms: Terms::default(),
    })
}

pub(crate) fn key(id: &str, secret: &str, group: &str, team: Option<&str>) -> Row {
    Row::Key(Key {
        id: id.into(),
        status: Status::Active,
        key: SecretRef::Env(secret.to_owned()),
        team: team.map(Into::into),
        group: group.into(),
        groups: Vec::new(),
        template: None,
        expose_route: false,
        terms: Terms::default(),
    })
}

fn models(names: &[&str]) -> Vec<ModelName> {
    names.iter().map(|name| ModelName::from(*name)).collect()
}

/// A catalogue and the batches that made it.
#[derive(Default)]
pub(crate) struct Past {
    pub(crate) rows: Rows,
    pub(crate) batches: Vec<Batch>,
}

impl Past {
    /// Makes or changes the rows of `put` and deletes those of `gone`, in one batch.
    pub(crate) fn edit(&mut self, put: &[Row], gone: &[Row]) {
        let touched: Vec<RowKey> = put.iter().chain(gone).map(Row::key).collect();
        let kept = self.rows.iter().filter(|(key, _)| !touched.contains(key)).map(|(_, stored)| stored.row.clone());
        let target = kept.chain(put.iter().cloned()).collect();
        self.add(self.rows.batch_to(target, "me", "edit", None));
    }

    /// Undoes a batch.
    pub(crate) fn undo(&mut self, batch: u64) -> Result<(), UndoRefused> {
        let undo = catalogue::undo(&self.batches, &self.rows, batch, "me", "undo")?;
        self.add(undo);
        Ok(())
    }

    pub(crate) fn add(&mut self, batch: Batch) {
        self.rows.apply(&batch).expect("the batch fits");
        self.batches.push(batch);
    }

    /// The rows as bytes.
    pub(crate) fn bytes(&self) -> String {
        let rows: Vec<_> = self.rows.iter().collect();
        serde_json::to_string(&rows).expect("rows are JSON")
    }
}
