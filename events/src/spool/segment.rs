//! Segment files: how records rest on disk, and how a torn record is told from a damaged one.
//!
//! ```text
//! record  = len u32 le | crc32 u32 le | payload
//! payload = the lines of facts recorded together, each ended by `\n`
//! ```
//! A killed writer leaves a beginning of a record, and nothing behind it. So a bad record behind which a whole one
//! is found was not torn but damaged; it is never skipped.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use waybill_schema::frame::LineHead;

use super::RECORD_BYTES_MAX;

/// The bytes before a record's payload.
pub(super) const HEAD_BYTES: usize = 8;

/// Names a segment; names sort as their facts do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    /// The epoch of all its facts.
    pub(super) epoch: u64,
    /// A number that none of its facts is below and all facts of earlier segments are.
    pub(super) first: u64,
}

impl Name {
    pub(super) fn path(self, dir: &Path) -> PathBuf {
        dir.join(format!("spool-{:06}-{:012}.seg", self.epoch, self.first))
    }

    pub(super) fn parse(file_name: &str) -> Option<Self> {
        let (epoch, first) = file_name.strip_prefix("spool-")?.strip_suffix(".seg")?.split_once('-')?;
        Some(Self { epoch: epoch.parse().ok()?, first: first.parse().ok()? })
    }
}

/// Makes `out` an empty record; lines are then written at its end.
pub(super) fn start_record(out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&[0; HEAD_BYTES]);
}

/// Fills in the head of the record in `out`, whose payload is at most [`RECORD_BYTES_MAX`].
pub(super) fn finish_record(out: &mut [u8]) {
    let (head, payload) = out.split_at_mut(HEAD_BYTES);
    let len = u32::try_from(payload.len()).expect("a record is smaller than 4 GiB");
    head[..4].copy_from_slice(&len.to_le_bytes());
    head[4..].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
}

/// How long the payload is that `head` announces; `None` where no record of ours can be that long.
pub(super) fn payload_len(head: &[u8]) -> Option<usize> {
    let len = u32::from_le_bytes(*head.first_chunk()?) as usize;
    (1..=RECORD_BYTES_MAX).contains(&len).then_some(len)
}

/// The payload of the record at the beginning of `bytes`; `None` where no whole and good one is there.
pub(super) fn payload(bytes: &[u8]) -> Option<&[u8]> {
    let len = payload_len(bytes)?;
    let payload = bytes.get(HEAD_BYTES..HEAD_BYTES + len)?;
    // The ends are looked at first: they cost nothing and spare nearly every sum when a record is searched for.
    let lines = payload.starts_with(b"{") && payload.ends_with(b"\n");
    let good = lines && bytes[4..HEAD_BYTES] == crc32fast::hash(payload).to_le_bytes();
    good.then_some(payload)
}

/// How many lines `payload` has.
pub(super) fn count_lines(payload: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', payload).count() as u64
}

/// What stands before the body on the first line of `payload`.
pub(super) fn first_head(payload: &[u8]) -> Option<LineHead<'_>> {
    let end = memchr::memchr(b'\n', payload).unwrap_or(payload.len());
    LineHead::parse(&payload[..end]).ok()
}

/// What a segment file holds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// The length of its whole and good records.
    pub(super) bytes: u64,
    /// How many facts they hold.
    pub(super) facts: u64,
    /// The number of the last one; `None` where there is none.
    pub(super) last: Option<u64>,
    /// What follows them.
    pub(super) rest: Rest,
}

/// What follows the good records of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Nothing.
    Nothing,
    /// This many bytes in which no record is found: the beginning of one.
    Torn(u64),
    /// A bad record, with good ones behind it.
    Damaged,
}

/// Reads the segment at `path` through. Takes the file into memory, which is a segment's size and freed on return.
pub(super) fn scan(path: &Path) -> io::Result<Scan> {
    let bytes = fs::read(path)?;
    let mut scan = Scan { bytes: 0, facts: 0, last: None, rest: Rest::Nothing };
    let mut rest = &bytes[..];
    let mut newest = None;
    while let Some(payload) = payload(rest) {
        scan.facts += count_lines(payload);
        newest = Some(payload);
        rest = &rest[HEAD_BYTES + payload.len()..];
    }
    scan.bytes = (bytes.len() - rest.len()) as u64;
    scan.last = newest.and_then(|payload| Some(first_head(payload)?.number + count_lines(payload) - 1));
    scan.rest = match rest.len() {
        0 => Rest::Nothing,
        _ if (1..rest.len()).any(|place| payload(&rest[place..]).is_some()) => Rest::Damaged,
        len => Rest::Torn(len as u64),
    };
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_their_numbers_do() {
        let path = Name { epoch: 12, first: 881 }.path(Path::new("d"));
        assert_eq!(path, Path::new("d/spool-000012-000000000881.seg"));
        assert_eq!(Name::parse("spool-000012-000000000881.seg"), Some(Name { epoch: 12, first: 881 }));
        assert_eq!(Name::parse("spool-12.seg"), None);
        assert!(Name { epoch: 9, first: 999 } < Name { epoch: 10, first: 1 });
    }

    /// The sum is the well-known check value of CRC-32 (IEEE) over `123456789`.
    #[test]
    fn a_record_is_length_sum_and_payload() {
        let mut record = Vec::new();
        start_record(&mut record);
        record.extend_from_slice(b"123456789");
        finish_record(&mut record);
        assert_eq!(record, *b"\x09\0\0\0\x26\x39\xf4\xcb123456789");
    }

    #[test]
    fn zeros_are_no_record() {
        assert_eq!(payload(&[0; 64]), None);
    }
}
