//! The corpus of provider errors, each sent by a whole pool: how often it is called, and who answers then.
//!
//! What is expected is the page's: its columns `here | next | chain` (`gateway/routing/fixtures/provider_actions.txt`), but
//! for the rows that `provider_deviations.txt` gives reasons for.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use waybill_simulator::{Action, Control, Step};

use crate::dialect::{CHAT, Dialect, MESSAGES, RESPONSES};
use crate::fallbacks::{CHAINS, TEMPLATED, ask, counts, since, under};
use crate::world::World;

/// What an upstream sent, and how long it asked to be left alone, as people read it.
struct Row {
    id: String,
    /// Absent where the source does not show it; 200 where the error came inside an answer.
    status: Option<u64>,
    headers: BTreeMap<String, String>,
    body: Option<Value>,
    text: String,
    wait_ms: Option<u64>,
    /// Whether the classifier cannot do this row.
    is_exception: bool,
}

impl Row {
    /// All rows in which the page and the gateway agree.
    fn all() -> Vec<Self> {
        let rows = include_str!("../../gateway/routing/fixtures/provider_errors.jsonl").lines();
        let rows = rows.map(|line| Self::of(&serde_json::from_str(line).expect(line)));
        let deviations = include_str!("../../gateway/routing/fixtures/provider_deviations.txt").lines();
        let deviating: BTreeSet<&str> = deviations.filter_map(|line| line.split(' ').next()).collect();
        rows.filter(|row| !row.is_exception && !deviating.contains(row.id.as_str())).collect()
    }

    fn of(line: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let headers = line["headers"].as_object().into_iter().flatten();
        Self {
            id: text(&line["id"]),
            status: line["status"].as_u64(),
            headers: headers.map(|(name, value)| (name.clone(), text(value))).collect(),
            body: line.get("body").cloned(),
            text: text(&line["text"]),
            wait_ms: line["wait_ms"].as_u64(),
            is_exception: line.get("exception").is_some(),
        }
    }

    /// Whether it came inside an answer.
    fn is_in_stream(&self) -> bool {
        self.status == Some(200)
            && self.body.as_ref().is_some_and(|body| self.dialect() != CHAT || body.get("error").is_some())
    }

    fn dialect(&self) -> Dialect {
        let body = self.body.as_ref();
        let kind = body.and_then(|body| body["type"].as_str()).unwrap_or_default();
        match kind {
            "error" if body.is_some_and(|body| body.get("sequence_number").is_none()) => MESSAGES,
            "error" => RESPONSES,
            kind if kind.starts_with("response.") => RESPONSES,
            _ => CHAT,
        }
    }

    /// The bytes of its body.
    fn said(&self) -> String {
        self.body.as_ref().map_or_else(|| self.text.clone(), Value::to_string)
    }

    fn does(&self) -> Action {
        match (self.status, &self.body) {
            (Some(200), Some(body)) => Action::ErrorEventAfter { events: 0, body: body.clone() },
            (status, _) => {
                let status = status.map_or(400, |status| u16::try_from(status).expect("a status is small"));
                Action::Status { status, headers: self.headers.clone(), body: json!(self.said()) }
            }
        }
    }

    /// The calls of a pool of two and of the chains' targets, by the page; `None` where it leaves the first open.
    fn calls(&self, page: &[&str]) -> (Option<usize>, bool, [usize; 3]) {
        let short = self.wait_ms.is_none_or(|ms| ms <= 2000);
        // A moment that is named by its date has passed by now.
        let dated = self.headers.keys().any(|name| name.ends_with("-reset"));
        let here = match page[0] {
            here if here.starts_with("by") || here.starts_with("if") || here == "wait / no" || dated => None,
            here if here.starts_with("wait") => Some(if short { 2 } else { 1 }),
            here if here.starts_with("backoff") => Some(2),
            _ => Some(1),
        };
        let chain = match page[2] {
            "general" => [1, 0, 0],
            "ctx" | "ctx, then general" => [0, 1, 0],
            "policy" => [0, 0, 1],
            _ => [0, 0, 0],
        };
        (here, page[1] == "yes" || page[1].starts_with("if"), chain)
    }
}

fn page() -> BTreeMap<&'static str, Vec<&'static str>> {
    let lines = include_str!("../../gateway/routing/fixtures/provider_actions.txt").lines();
    lines.map(|line| (&line[..3], line.split(" | ").skip(1).collect())).collect()
}

/// S3.12, S3.15, issue 5: every row, as JSON or in the stream as it came: sends, next target and chain as the page says;
/// look-alikes come back unchanged.
#[tokio::test]
async fn every_provider_error_leads_where_the_page_says() {
    let world = World::start(under(CHAINS)).await;
    let client = world.client_with(TEMPLATED);
    let page = page();
    let (mut n, mut wrong) = (0, Vec::new());
    // Where the page goes by the inner code, the rows of that code tell; where the form is of no dialect here, the
    // classifier's own test does.
    let rows = Row::all().into_iter().filter(|row| !page[&row.id[..3]][2].starts_with("by"));
    for row in rows.filter(|row| row.status != Some(200) || row.is_in_stream()) {
        for name in ["a", "b"] {
            world.upstream(name).push(Step::new([row.does()]).times(2));
        }
        let before = counts(&world);
        let answer = ask(&client, row.dialect(), &row.id, row.is_in_stream()).await;
        let [a, b, chains @ ..] = since(&world, before);
        let (here, next, chain) = row.calls(&page[&row.id[..3]]);
        let right = here.is_none_or(|here| here == a) && b == if next { a } else { 0 } && chains == chain;
        let comes_back = row.status.is_some_and(|status| status >= 400) && chain == [0; 3];
        let unchanged = row.body.is_none() || answer.text() == row.said();
        if !right || (comes_back && !unchanged) {
            wrong.push(format!("{}: {a} {b} {chains:?} {}", row.id, answer.status));
        }
        n += 1;
        // What was not done is no fault of the next row.
        for name in ["a", "b"] {
            world.upstream(name).apply(Control { clear_steps: true, ..Control::default() });
        }
    }
    assert!(n > 200, "{n} rows");
    assert!(wrong.is_empty(), "{} of {n}: {wrong:#?}", wrong.len());
}
