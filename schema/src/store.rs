//! Store layouts: the migrations of the embedded SQLite file, as refinery names them.

/// The migrations of the embedded store, in order: (name as refinery wants it, SQL).
pub const SQLITE_MIGRATIONS: &[(&str, &str)] =
    &[("V1__log_and_usage", include_str!("../migrations/V1__log_and_usage.sql"))];
