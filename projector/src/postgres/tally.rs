//! Rows as Postgres sends them, and sums of them that are the same whatever their order.
//!
//! A table is compared with a fold without either being held in memory: every row falls into one of [`BUCKETS`] by its
//! key, and a bucket is a count and a sum of hashes. Only the rows of buckets that differ are looked at one by one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};

use bytes::BytesMut;
use chrono::DateTime;
use tokio_postgres::types::{ToSql, Type};
use waybill_projections::sessions::Sessions;
use waybill_schema::secret::sum128;

use super::batch::Batch;
use super::table::{Cell, RESPONSE_OWNERS, SESSIONS, TABLES, Table, fill, session};
use super::text::storable;

/// Into so many buckets the rows of a table fall.
pub(super) const BUCKETS: usize = 1024;
/// The rows of so many buckets of a table are looked at one by one.
const LOOKED_AT_MAX: usize = 64;
/// Where Postgres begins to count microseconds, in milliseconds since 1970: the year 2000.
const EPOCH_MS: i64 = 946_684_800_000;

/// A row as Postgres sends it in binary: each field behind its length, -1 for none; the key's fields come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed(Vec<u8>);

impl Packed {
    /// The row that COPY makes of `cells`.
    pub(super) fn of(table: &Table, cells: &[Cell<'_>]) -> Self {
        let mut bytes = Vec::with_capacity(256);
        let mut buffer = BytesMut::new();
        for (cell, (_, kind)) in cells.iter().zip(table.columns) {
            buffer.clear();
            let null = cell.to_sql(kind, &mut buffer).expect("a cell of ours fits its column");
            let field = matches!(null, tokio_postgres::types::IsNull::No).then_some(&buffer[..]);
            pack(&mut bytes, field);
        }
        Self(bytes)
    }

    /// The row of `fields`, in the order of the columns.
    pub(super) fn of_fields<'a>(fields: impl IntoIterator<Item = Option<&'a [u8]>>) -> Self {
        let mut bytes = Vec::with_capacity(256);
        fields.into_iter().for_each(|field| pack(&mut bytes, field));
        Self(bytes)
    }

    fn fields(&self) -> Vec<Option<&[u8]>> {
        let (mut fields, mut rest) = (Vec::new(), &self.0[..]);
        while let Some((length, behind)) = rest.split_first_chunk::<4>() {
            let length = usize::try_from(i32::from_be_bytes(*length)).ok();
            let (field, behind) = behind.split_at(length.unwrap_or(0));
            fields.push(length.map(|_| field));
            rest = behind;
        }
        fields
    }

    fn key(&self, table: &Table) -> Vec<u8> {
        let fields = self.fields();
        Self::of_fields(fields.into_iter().take(table.n_key)).0
    }

    fn with(&self, index: usize, value: &[u8]) -> Self {
        let mut fields = self.fields();
        fields[index] = Some(value);
        Self::of_fields(fields)
    }

    /// The bucket it falls into, and its own sum.
    fn place(&self, table: &Table) -> (usize, u128) {
        // Both sides are summed up by one process, so any spread that is the same within it will do.
        let mut spread = DefaultHasher::new();
        spread.write(&self.key(table));
        let bucket = usize::try_from(spread.finish() % BUCKETS as u64).expect("there are few buckets");
        (bucket, number(&sum128(&[&self.0])))
    }
}

fn pack(bytes: &mut Vec<u8>, field: Option<&[u8]>) {
    let length = field.map_or(-1, |field| i32::try_from(field.len()).expect("a field is far below 2 GiB"));
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(field.unwrap_or_default());
}

fn number(sum: &str) -> u128 {
    u128::from_str_radix(sum, 16).expect("a sum is hexadecimal")
}

/// Takes rows, one after the other.
pub(super) trait Take {
    /// Takes a row of a table.
    fn put(&mut self, table: &'static Table, row: Packed);
    /// Takes one in place of another of the same key.
    fn replace(&mut self, table: &'static Table, old: &Packed, new: Packed);
}

/// Counts and sums of rows, by table and bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally(BTreeMap<&'static str, Vec<(u64, u128)>>);

impl Tally {
    fn bucket(&mut self, table: &'static Table, index: usize) -> &mut (u64, u128) {
        &mut self.0.entry(table.name).or_insert_with(|| vec![(0, 0); BUCKETS])[index]
    }

    /// How many rows a table has, and the digest of them, as 32 hex digits.
    pub(super) fn sum(&self, table: &Table) -> (u64, String) {
        let buckets = self.0.get(table.name).into_iter().flatten();
        let add = |(n, sum): (u64, u128), bucket: &(u64, u128)| (n + bucket.0, sum.wrapping_add(bucket.1));
        let (n, sum) = buckets.fold((0, 0), add);
        (n, format!("{sum:032x}"))
    }

    /// The buckets in which two tallies differ.
    pub(super) fn differing(&self, other: &Self, table: &Table) -> BTreeSet<usize> {
        let bucket = |of: &Self, index: usize| of.0.get(table.name).map_or((0, 0), |buckets| buckets[index]);
        (0..BUCKETS).filter(|index| bucket(self, *index) != bucket(other, *index)).collect()
    }
}

impl Take for Tally {
    fn put(&mut self, table: &'static Table, row: Packed) {
        let (index, sum) = row.place(table);
        let bucket = self.bucket(table, index);
        *bucket = (bucket.0 + 1, bucket.1.wrapping_add(sum));
    }

    fn replace(&mut self, table: &'static Table, old: &Packed, new: Packed) {
        let (index, sum) = old.place(table);
        let bucket = self.bucket(table, index);
        *bucket = (bucket.0 - 1, bucket.1.wrapping_sub(sum));
        self.put(table, new);
    }
}

/// The rows of some buckets, by key.
#[derive(Debug)]
pub(super) struct Rows {
    wanted: BTreeMap<&'static str, BTreeSet<usize>>,
    rows: BTreeMap<&'static str, BTreeMap<Vec<u8>, Packed>>,
}

impl Rows {
    /// None yet of `wanted`: the buckets by table.
    pub(super) fn of(wanted: &BTreeMap<&'static str, BTreeSet<usize>>) -> Self {
        let bounded = |buckets: &BTreeSet<usize>| buckets.iter().take(LOOKED_AT_MAX).copied().collect();
        let wanted = wanted.iter().map(|(table, buckets)| (*table, bounded(buckets))).collect();
        Self { wanted, rows: BTreeMap::new() }
    }

    /// The rows of `table` by key.
    pub(super) fn of_table(&self, table: &Table) -> BTreeMap<&Vec<u8>, &Packed> {
        self.rows.get(table.name).into_iter().flatten().collect()
    }

    /// Whether these are all the rows of `wanted`.
    pub(super) fn is_all(wanted: &BTreeMap<&'static str, BTreeSet<usize>>) -> bool {
        wanted.values().all(|buckets| buckets.len() <= LOOKED_AT_MAX)
    }
}

impl Take for Rows {
    fn put(&mut self, table: &'static Table, row: Packed) {
        if self.wanted.get(table.name).is_some_and(|buckets| buckets.contains(&row.place(table).0)) {
            self.rows.entry(table.name).or_default().insert(row.key(table), row);
        }
    }

    fn replace(&mut self, table: &'static Table, _: &Packed, new: Packed) {
        self.put(table, new);
    }
}

/// Turns the batches of a fold into the rows that they leave behind: those of owners change once after they were put in,
/// those of sessions with every batch.
#[derive(Debug)]
pub(super) struct Unfold {
    /// Owners by the sum of their key; nothing of one that is final, as that never changes again.
    owners: HashMap<u128, Option<Packed>>,
    /// All sessions so far, some hundred bytes each: what a comparison holds in memory.
    sessions: Sessions,
}

impl Default for Unfold {
    fn default() -> Self {
        Self { owners: HashMap::new(), sessions: Sessions::new(storable) }
    }
}

impl Unfold {
    /// Hands on the rows of sessions, which are what they are only at the end.
    pub(super) fn hand_sessions(&self, to: &mut dyn Take) {
        for cells in self.sessions.rows().filter_map(session) {
            to.put(&SESSIONS, Packed::of(&SESSIONS, &cells));
        }
    }

    /// Hands the rows of `batch` on, but for those of sessions.
    pub(super) fn hand(&mut self, batch: &Batch, to: &mut dyn Take) {
        batch.usage.iter().for_each(|row| self.sessions.take(row));
        let (filled, owners) = fill(batch);
        for filled in &filled {
            for cells in &filled.rows {
                to.put(filled.table, Packed::of(filled.table, cells));
            }
        }
        owners.rows.iter().for_each(|cells| self.owner(Packed::of(owners.table, cells), to));
    }

    /// The first to be seen stands; a later one of the same deployment makes it final.
    fn owner(&mut self, row: Packed, to: &mut dyn Take) {
        let table = &RESPONSE_OWNERS;
        let (state, deployment) = (table.column("state"), table.column("deployment"));
        let is_final = row.fields()[state] == Some(&b"final"[..]);
        let key = number(&sum128(&[&row.key(table)]));
        let Some(standing) = self.owners.get_mut(&key) else {
            self.owners.insert(key, (!is_final).then(|| row.clone()));
            return to.put(table, row);
        };
        let of = |row: &Packed| row.fields()[deployment].map(<[u8]>::to_vec);
        if let Some(first) = standing.take_if(|first| is_final && of(first) == of(&row)) {
            to.replace(table, &first, first.with(state, b"final"));
        }
    }
}

/// The key of a row, for people.
pub(super) fn key_text(table: &Table, key: &[u8]) -> String {
    let fields = Packed(key.to_vec());
    let mut text = String::from("(");
    for (n, (field, (_, kind))) in fields.fields().into_iter().zip(table.columns).enumerate() {
        let separator = if n == 0 { "" } else { ", " };
        write!(text, "{separator}{}", field_text(field.unwrap_or_default(), kind)).expect("a string takes every write");
    }
    text + ")"
}

fn field_text(field: &[u8], kind: &Type) -> String {
    let number = |field: &[u8]| match field.len() {
        4 => field.try_into().ok().map(|bytes| i64::from(i32::from_be_bytes(bytes))),
        _ => field.try_into().ok().map(i64::from_be_bytes),
    };
    match *kind {
        Type::INT4 | Type::INT8 => number(field).map_or_else(String::new, |number| number.to_string()),
        Type::TIMESTAMPTZ => number(field)
            .and_then(|micros| DateTime::from_timestamp_millis(micros.div_euclid(1000) + EPOCH_MS))
            .map_or_else(String::new, |moment| moment.format("%Y-%m-%d %H:%M:%S%.3fZ").to_string()),
        _ => String::from_utf8_lossy(field).into_owned(),
    }
}

/// The columns in which two rows of one key differ.
pub(super) fn columns_apart(table: &Table, left: &Packed, right: &Packed) -> Vec<String> {
    let (left, right) = (left.fields(), right.fields());
    let names = table.columns.iter().zip(left.iter().zip(&right));
    names.filter(|(_, (left, right))| left != right).map(|((name, _), _)| (*name).to_owned()).collect()
}

/// All buckets of all tables in which two tallies differ.
pub(super) fn apart(left: &Tally, right: &Tally) -> BTreeMap<&'static str, BTreeSet<usize>> {
    let of = |table: &&'static Table| (table.name, left.differing(right, table));
    TABLES.iter().map(of).filter(|(_, buckets)| !buckets.is_empty()).collect()
}
