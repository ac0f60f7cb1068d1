//! Facts straight from the embedded log, for queries that need more than rows.

use rusqlite::{Connection, Params};
use waybill_events::log::StoredFrame;
use waybill_events::sqlite::stored_frame;
use waybill_projections::fold::Fold;
use waybill_projections::read;
use waybill_schema::frame::Frame;

/// Frames of the log in the order in which a query wants them.
///
/// `clause` follows `SELECT … FROM frames` and binds `params`; an error of `take` ends the reading.
pub(crate) fn frames<E: From<rusqlite::Error>>(
    connection: &Connection,
    clause: &str,
    params: impl Params,
    mut take: impl FnMut(StoredFrame) -> Result<(), E>,
) -> Result<(), E> {
    let mut statement = connection.prepare(&format!("SELECT seq, stored, sent, body FROM frames {clause}"))?;
    let mut rows = statement.query(params)?;
    while let Some(row) = rows.next()? {
        take(stored_frame(row)?)?;
    }
    Ok(())
}

/// Folds the whole log, as a program that starts does.
pub fn fold(connection: &Connection) -> Result<Fold, rusqlite::Error> {
    let mut fold = Fold::default();
    let mut rows = Vec::new();
    frames(connection, "ORDER BY seq", [], |frame| {
        let Ok(header) = Frame::header_of(&frame.bytes) else { return Ok(()) };
        for fact in read::facts(&header, &frame.bytes, frame.stored, frame.sent).flatten() {
            fold.apply(&fact, frame.seq.0, &mut rows);
            rows.clear();
        }
        Ok::<_, rusqlite::Error>(())
    })?;
    Ok(fold)
}
