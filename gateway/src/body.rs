//! A body on its way in: bounded in size, in silence and in time, and unpacked where a client packed it.

use std::io::Read;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, EXPECT};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;
use waybill_routing::classify::Transport;

use crate::refusal::Refusal;

/// How long the rest of a refused body is read.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(10);

/// The logarithm of the largest window of a zstd frame: the 8 MiB that RFC 8878 asks decoders to take. A frame may name
/// any, and the decoder allocates it.
pub(crate) const WINDOW_LOG_MAX: u32 = 23;

/// What a body must keep to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Its size, packed or not.
    pub(crate) bytes_max: usize,
    /// How long it may say nothing.
    pub(crate) silence: Duration,
    /// When all of it must be there, where nothing else says so.
    pub(crate) deadline: Option<Instant>,
}

/// Why a body was not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It was silent for too long, or took too long as a whole.
    Late,
    /// It broke off.
    Broken,
    /// It is too large.
    TooLarge,
}

impl Bounds {
    /// What a client is told whose body did not keep to them.
    pub(crate) fn refusal(&self, stop: Stop) -> Refusal {
        match stop {
            Stop::Late => Refusal::BodyLate,
            Stop::Broken => Refusal::BodyUnread,
            Stop::TooLarge => Refusal::TooLarge { limit_bytes: self.bytes_max },
        }
    }
}

impl From<Stop> for Transport {
    /// What it says of an upstream whose answer it is.
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Late => Self::IdleTimeout,
            Stop::Broken | Stop::TooLarge => Self::Cut,
        }
    }
}

/// How the bytes of a body stand for what is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Plain,
    Zstd,
}

/// Refuses by its head a body that is too large, or packed in a way that is not known here; else says how it is packed.
/// Of the codings only zstd is known: Codex packs with it (CLIENTS.md).
pub(crate) fn admit(body: &Incoming, headers: &HeaderMap, bounds: Bounds) -> Result<Coding, Refusal> {
    if body.size_hint().lower() > bounds.bytes_max as u64 {
        return Err(bounds.refusal(Stop::TooLarge));
    }
    coding(headers)
}

/// Reads `body` to its end, as it was before the client packed it; `headers` then say nothing of packing.
///
/// Errors when it does not keep to its bounds, breaks off, or is not packed as `coding` says.
pub(crate) async fn read(
    body: &mut Incoming,
    headers: &mut HeaderMap,
    coding: Coding,
    bounds: Bounds,
) -> Result<Bytes, Refusal> {
    let bytes = collect(body, bounds).await.map_err(|stop| bounds.refusal(stop))?;
    match coding {
        Coding::Plain => Ok(bytes),
        Coding::Zstd => {
            headers.remove(CONTENT_ENCODING);
            unpacked(&bytes, bounds)
        }
    }
}

fn coding(headers: &HeaderMap) -> Result<Coding, Refusal> {
    let mut coding = Coding::Plain;
    for value in headers.get_all(CONTENT_ENCODING) {
        let named = value.to_str().unwrap_or_default().trim();
        match (coding, named.to_ascii_lowercase().as_str()) {
            (_, "identity" | "") => {}
            (Coding::Plain, "zstd") => coding = Coding::Zstd,
            (Coding::Plain | Coding::Zstd, _) => return Err(Refusal::UnknownCoding(named.to_owned())),
        }
    }
    Ok(coding)
}

/// The next piece of `body`; `None` at its end.
pub(crate) async fn next<B>(body: &mut B, bounds: Bounds) -> Result<Option<Bytes>, Stop>
where
    B: Body<Data = Bytes> + Unpin,
{
    loop {
        let silent = Instant::now() + bounds.silence;
        let until = bounds.deadline.map_or(silent, |deadline| deadline.min(silent));
        let frame = tokio::time::timeout_at(until, body.frame()).await.map_err(|_| Stop::Late)?;
        let Some(frame) = frame else { return Ok(None) };
        if let Ok(data) = frame.map_err(|_| Stop::Broken)?.into_data() {
            return Ok(Some(data));
        }
    }
}

/// All of `body`.
pub(crate) async fn collect<B>(body: &mut B, bounds: Bounds) -> Result<Bytes, Stop>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(data) = next(body, bounds).await? {
        if first.len() + all.len() + data.len() > bounds.bytes_max {
            return Err(Stop::TooLarge);
        }
        // Most bodies come in one piece, which is not copied.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

fn unpacked(packed: &[u8], bounds: Bounds) -> Result<Bytes, Refusal> {
    let decode = || {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
        decoder.window_log_max(WINDOW_LOG_MAX)?;
        let mut plain = Vec::new();
        decoder.take(bounds.bytes_max as u64 + 1).read_to_end(&mut plain)?;
        Ok(plain)
    };
    let plain: Vec<u8> = decode().map_err(|_: std::io::Error| Refusal::BodyPacked)?;
    if plain.len() > bounds.bytes_max {
        return Err(bounds.refusal(Stop::TooLarge));
    }
    Ok(plain.into())
}

/// Leaves a body of which nothing was read: one whose client waits to be told to go on has not been sent, and the first
/// read would tell it.
pub(crate) async fn leave(body: Incoming, headers: &HeaderMap, bounds: Bounds) {
    let waits = headers.get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    if !waits {
        discard(body, bounds).await;
    }
}

/// Reads on past a refusal, as much as a body may have: a client that is still sending when its connection is closed gets a
/// reset instead of the answer.
pub(crate) async fn discard(mut body: Incoming, bounds: Bounds) {
    let rest = async {
        let mut left = bounds.bytes_max;
        while let Some(Ok(frame)) = body.frame().await
            && left > 0
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        }
    };
    // A client that goes on beyond the bounds is cut off.
    let _ = tokio::time::timeout(DISCARD_TIME_MAX, rest).await;
}
