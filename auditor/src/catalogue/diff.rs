//! What a batch changes, field by field: for people and programs to read before and after it is made.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};
use waybill_schema::catalogue::RowKey;
use waybill_schema::event::{Op, Stored};

/// One row changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// How.
    pub change: Kind,
    /// Which row.
    pub row: RowKey,
    /// The fields that differ; of a row that was made or deleted, those that say something.
    pub fields: Vec<Field>,
}

/// How a row changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It was made.
    Made,
    /// It was changed.
    Changed,
    /// It was deleted.
    Deleted,
}

/// One field changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Field {
    /// Its name.
    pub field: String,
    /// Its value before; absent where the row was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// Its value after; absent where the row was deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// What the ops change, in their order.
pub fn diff(ops: &[Op]) -> Vec<Change> {
    ops.iter().map(change).collect()
}

fn change(op: &Op) -> Change {
    let change = match (&op.before, &op.after) {
        (None, _) => Kind::Made,
        (Some(_), Some(_)) => Kind::Changed,
        (Some(_), None) => Kind::Deleted,
    };
    let [before, after] = [&op.before, &op.after].map(|image| image.as_ref().map(fields));
    let names: BTreeSet<&String> = [&before, &after].into_iter().flatten().flat_map(Map::keys).collect();
    let of =
        |image: &Option<Map<String, Value>>, name: &str| image.as_ref().and_then(|fields| fields.get(name).cloned());
    let fields =
        names.into_iter().map(|name| Field { field: name.clone(), before: of(&before, name), after: of(&after, name) });
    let says_something = |field: &Field| match change {
        Kind::Changed => field.before != field.after,
        Kind::Made | Kind::Deleted => ![&field.before, &field.after].into_iter().flatten().all(is_empty),
    };
    Change { change, row: op.row.clone(), fields: fields.filter(says_something).collect() }
}

/// The fields of a row, without the kind that it is wrapped in.
fn fields(stored: &Stored) -> Map<String, Value> {
    let row = serde_json::to_value(&stored.row).expect("a row is JSON");
    let wrapped = match row {
        Value::Object(row) => row.into_iter().next().map(|(_, fields)| fields),
        _ => None,
    };
    match wrapped {
        Some(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}
