//! Frozen migrations: a store that has run one holds its checksum, and would not open again if it said anything else.
//!
//! Another layout is another migration, and another line here: the first half of what `sha256sum` says of the file.

use waybill_schema::secret::sum128;
use waybill_schema::store::{GENERATION_MIGRATIONS, POSTGRES_MIGRATIONS, SQLITE_MIGRATIONS};

const SQLITE: &[(&str, &str)] = &[
    ("V1__log_and_usage", "14c9f502ef6e7917719a8f8aadb26dd9"),
    ("V2__sessions", "62a3e3c533c029a27af3a4afdeab0caa"),
    ("V3__response_owners", "28944872cd323247e4a28709dcf99089"),
    ("V4__spending", "77d77f183f570e7104d31bd8486889cd"),
    ("V5__usage_as_it_comes", "e23dac7c10d307bc793290e09b9a057e"),
];

const POSTGRES: &[(&str, &str)] = &[("V1__generations", "7a03bb0be7823e1bbb7500e4a50ea68a")];

const GENERATION: &[(&str, &str)] = &[
    ("V1__usage_and_changes", "d71610c6af2af533329e1c5dd191fa0d"),
    ("V2__sessions", "f3e336219f13d0c94b9b626f465fd8b0"),
    ("V3__owner_key", "486b87fabee0e8156e75672585797768"),
    ("V4__spending", "77d77f183f570e7104d31bd8486889cd"),
    ("V5__written", "2e75834fccd9f7abb991494135cbcc59"),
];

#[test]
fn no_migration_is_edited() {
    let stores = [(SQLITE_MIGRATIONS, SQLITE), (POSTGRES_MIGRATIONS, POSTGRES), (GENERATION_MIGRATIONS, GENERATION)];
    for (migrations, frozen) in stores {
        let sums: Vec<_> = migrations.iter().map(|(name, sql)| (*name, sum128(&[sql.as_bytes()]))).collect();
        let frozen: Vec<_> = frozen.iter().map(|(name, sum)| (*name, (*sum).to_owned())).collect();
        assert_eq!(sums, frozen);
    }
}
