//! A connection of one who only reads what the projector wrote.

use tokio_postgres::{Client, Config};

use super::store::{Store, StoreError};

/// A connection for reading.
pub(crate) struct Reader(Store);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[error("postgres cannot be reached")]
pub struct ReaderError(#[source] StoreError);

impl Reader {
    /// Connects under `name`, which the server shows.
    pub(crate) async fn connect(config: &Config, name: &str) -> Result<Self, ReaderError> {
        Store::connect(config, name).await.map(Self).map_err(ReaderError)
    }

    /// Whether the connection still stands, as far as is known.
    pub(crate) fn stands(&self) -> bool {
        self.0.stands()
    }

    /// The connection itself.
    pub(crate) fn client(&mut self) -> &mut Client {
        self.0.client()
    }
}
