//! The data folder: where the embedded log, its spool and its secret lie.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use waybill_events::sqlite::SqliteLog;
use waybill_schema::secret::SecretRef;

/// The log and its projections, one SQLite file.
pub(crate) fn log_file(data: &Path) -> PathBuf {
    data.join("waybill.db")
}

/// The outcomes that are kept under an `Idempotency-Key`, sealed.
pub(crate) fn vault_file(data: &Path) -> PathBuf {
    data.join("vault.db")
}

/// The folder of the gateway's spool.
pub(crate) fn spool_folder(data: &Path) -> PathBuf {
    data.join("spool")
}

/// Reads the secret file `name` of the data folder; makes one of 32 random bytes, readable by its owner alone, on
/// first start.
pub(crate) fn secret(data: &Path, name: &str, prefix: &str) -> anyhow::Result<String> {
    let path = data.join(name);
    if !path.exists() {
        let random = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(|id| id.simple().to_string()).concat();
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(format!("{prefix}{random}\n").as_bytes())?;
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    if text.trim().is_empty() {
        // A start that was killed before it had written leaves this; an empty key would hash for nobody.
        bail!("{} is empty: remove it, and the next start makes one", path.display());
    }
    Ok(text.trim().to_owned())
}

/// Fetches the secret behind a reference; the error says where it was looked for, never what was found.
pub(crate) fn resolve(reference: &SecretRef) -> Result<String, String> {
    let found = match reference {
        SecretRef::Env(name) => std::env::var(name).map_err(|_| format!("the environment has no `{name}`"))?,
        SecretRef::File(path) => std::fs::read_to_string(path).map_err(|error| error.to_string())?,
    };
    let secret = found.trim();
    if secret.is_empty() { Err("it is empty".to_owned()) } else { Ok(secret.to_owned()) }
}

/// Opens the log beside its writer, for reading.
pub(crate) fn open_log(data: &Path) -> anyhow::Result<SqliteLog> {
    Ok(SqliteLog::open_read_only(&existing_log_file(data)?)?)
}

/// The log's file, which must be there: a command makes none.
pub(crate) fn existing_log_file(data: &Path) -> anyhow::Result<PathBuf> {
    let path = log_file(data);
    if !path.exists() {
        bail!("{} holds no log: `waybill up` makes one there, --data names another folder", data.display());
    }
    Ok(path)
}
