//! A generation as it stands at one moment: its checkpoint and its rows, seen in one read-only transaction, so that
//! whoever writes meanwhile is neither disturbed nor seen.

use std::pin::pin;

use futures_util::StreamExt;
use tokio_postgres::Config;
use tokio_postgres::binary_copy::BinaryCopyOutStream;
use tokio_postgres::types::{FromSql, Type};
use waybill_schema::store::{POSTGRES_SCHEMA, generation_schema};

use super::batch::Place;
use super::store::{ANSWER_TIMEOUT, NAME, Store, StoreError, columns, place, within};
use super::table::{TABLES, Table};
use super::tally::{Packed, Take};

/// One moment of a generation.
pub(super) struct Snapshot {
    store: Store,
    schema: String,
    pub(super) generation: u32,
    pub(super) at: Place,
    pub(super) fold_version: u32,
}

impl Snapshot {
    /// The generation `wanted`, else the live one, as it is now; nothing where there is none that says how far it goes.
    pub(super) async fn take(config: &Config, wanted: Option<u32>) -> Result<Option<Self>, StoreError> {
        let store = Store::connect(config, "waybill verify").await?;
        within(ANSWER_TIMEOUT, store.client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")).await?;
        within(ANSWER_TIMEOUT, Self::find(store, wanted)).await
    }

    async fn find(store: Store, wanted: Option<u32>) -> Result<Option<Self>, StoreError> {
        let listed = format!("{POSTGRES_SCHEMA}.generations");
        if !store.has_table(&listed).await? {
            return Ok(None);
        }
        let number = match wanted {
            Some(number) => Some(number),
            None => store.live().await?,
        };
        let Some(generation) = number else { return Ok(None) };
        let schema = generation_schema(generation);
        if !store.has_table(&format!("{schema}.checkpoints")).await? {
            return Ok(None);
        }
        let sql =
            format!("SELECT seq, frame_sum, frame_stored, fold_version FROM {schema}.checkpoints WHERE name = $1");
        let Some(row) = store.client.query_opt(&sql, &[&NAME]).await? else { return Ok(None) };
        let fold_version = u32::try_from(row.get::<_, i64>(3)).unwrap_or(u32::MAX);
        Ok(Some(Self { store, schema, generation, at: place(&row), fold_version }))
    }

    /// Hands on every row of every table.
    pub(super) async fn rows(&self, to: &mut dyn Take) -> Result<(), StoreError> {
        for table in TABLES {
            self.rows_of(table, to).await?;
        }
        Ok(())
    }

    async fn rows_of(&self, table: &'static Table, to: &mut dyn Take) -> Result<(), StoreError> {
        // A partitioned table is not copied but through a query.
        let sql = format!("COPY (SELECT {} FROM {}.{table}) TO STDOUT (FORMAT binary)", columns(table), self.schema);
        let copied = within(ANSWER_TIMEOUT, self.store.client.copy_out(&sql)).await?;
        let types: Vec<Type> = table.columns.iter().map(|(_, kind)| kind.clone()).collect();
        let mut rows = pin!(BinaryCopyOutStream::new(copied, &types));
        while let Some(row) = within(ANSWER_TIMEOUT, async { rows.next().await.transpose() }).await? {
            let fields: Result<Vec<Raw<'_>>, _> = (0..types.len()).map(|index| row.try_get(index)).collect();
            to.put(table, Packed::of_fields(fields?.into_iter().map(|Raw(field)| field)));
        }
        Ok(())
    }
}

/// A field as it comes.
struct Raw<'a>(Option<&'a [u8]>);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(Some(raw)))
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(None))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}
