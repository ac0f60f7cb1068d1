//! Pages of a list: by a place in its order, not by a number, so that rows which come meanwhile move nothing.

use serde::{Deserialize, Serialize};

/// How many entries a page has where nothing else is asked for.
pub const PAGE_DEFAULT: u32 = 50;
/// At most this many entries on a page.
pub const PAGE_MAX: u32 = 500;

/// Which part of a list is wanted.
#[derive(Clone, Debug)]
pub struct Page {
    limit: u32,
    after: Option<Cursor>,
}

/// A page that cannot be asked for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// So many entries no page has.
    #[error("a page has 1 to {PAGE_MAX} entries, not {0}")]
    Limit(u32),
    /// The text is no cursor that was given out here.
    #[error("not a cursor of this list")]
    Cursor,
}

impl Default for Page {
    fn default() -> Self {
        Self { limit: PAGE_DEFAULT, after: None }
    }
}

impl Page {
    /// The page of `limit` entries behind the cursor `after`, or at the beginning.
    pub fn new(limit: Option<u32>, after: Option<&str>) -> Result<Self, PageError> {
        let limit = limit.unwrap_or(PAGE_DEFAULT);
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(PageError::Limit(limit));
        }
        Ok(Self { limit, after: after.map(str::parse).transpose()? })
    }

    /// One more than asked for, to see whether another page follows.
    pub(crate) fn fetched(&self) -> i64 {
        i64::from(self.limit) + 1
    }

    /// Where the page begins in `list`; a cursor of another list leads nowhere in this one.
    pub(crate) fn place(&self, list: List) -> Result<Option<&Place>, PageError> {
        match &self.after {
            Some(Cursor(place)) if place.list != list => Err(PageError::Cursor),
            after => Ok(after.as_ref().map(|cursor| &cursor.0)),
        }
    }

    pub(crate) fn cut<T>(&self, mut entries: Vec<T>, place: impl Fn(&T) -> Place) -> Paged<T> {
        let more = entries.len() > self.limit as usize;
        entries.truncate(self.limit as usize);
        let next = entries.last().filter(|_| more).map(|last| Cursor(place(last)));
        Paged { entries, next }
    }
}

/// A place in a list: opaque text for whoever holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(Place);

/// What a cursor names: the entry behind which the next page begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) list: List,
    /// Milliseconds since 1970.
    pub(crate) at: i64,
    pub(crate) key: (String, String),
}

/// The lists that have pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum List {
    Sessions,
    Rounds,
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(serde_json::to_vec(&self.0).expect("a place has only text keys")))
    }
}

impl std::str::FromStr for Cursor {
    type Err = PageError;

    fn from_str(text: &str) -> Result<Self, PageError> {
        let bytes = hex::decode(text).map_err(|_| PageError::Cursor)?;
        serde_json::from_slice(&bytes).map(Self).map_err(|_| PageError::Cursor)
    }
}

impl Serialize for Cursor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Paged<T> {
    /// The entries.
    pub entries: Vec<T>,
    /// Where the next page begins; absent on the last one.
    pub next: Option<Cursor>,
}
