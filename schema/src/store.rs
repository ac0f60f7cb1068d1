//! Store layouts: migrations in order, as refinery names them, (name, SQL).
//!
//! A migration is never edited once it is on main: a store that has run it holds its checksum and would not open again.
//! Another layout is another migration (`schema/tests/migrations.rs`).

/// The migrations of the embedded store's file.
pub const SQLITE_MIGRATIONS: &[(&str, &str)] = &[
    ("V1__log_and_usage", include_str!("../migrations/V1__log_and_usage.sql")),
    ("V2__sessions", include_str!("../migrations/V2__sessions.sql")),
    ("V3__response_owners", include_str!("../migrations/V3__response_owners.sql")),
    ("V4__spending", include_str!("../migrations/V4__spending.sql")),
    ("V5__usage_as_it_comes", include_str!("../migrations/V5__usage_as_it_comes.sql")),
];

/// The migrations of the Postgres schema [`POSTGRES_SCHEMA`].
pub const POSTGRES_MIGRATIONS: &[(&str, &str)] =
    &[("V1__generations", include_str!("../migrations/postgres/V1__generations.sql"))];

/// The migrations of a generation, each run in that generation's own Postgres schema.
pub const GENERATION_MIGRATIONS: &[(&str, &str)] = &[
    ("V1__usage_and_changes", include_str!("../migrations/generation/V1__usage_and_changes.sql")),
    ("V2__sessions", include_str!("../migrations/generation/V2__sessions.sql")),
    ("V3__owner_key", include_str!("../migrations/generation/V3__owner_key.sql")),
    ("V4__spending", include_str!("../migrations/generation/V4__spending.sql")),
    ("V5__written", include_str!("../migrations/generation/V5__written.sql")),
];

/// The Postgres schema that people and programs read: the list of generations, and views of the live one.
pub const POSTGRES_SCHEMA: &str = "waybill";

/// The tables of a generation; a view of the same name in [`POSTGRES_SCHEMA`] shows the live one's.
pub const GENERATION_TABLES: &[&str] = &[
    "usage_events",
    "usage_attempts",
    "sessions",
    "response_owners",
    "health_changes",
    "catalogue_changes",
    "model_changes",
    "quarantine",
    "checkpoints",
];

/// The Postgres schema of a generation.
pub fn generation_schema(generation: u32) -> String {
    format!("wb_g{generation}")
}
