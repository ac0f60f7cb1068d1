//! A client's body on its way in: bounded in size and in silence, and unpacked where the client packed it.

use std::io::Read;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use crate::refusal::Refusal;

/// The largest request body, packed or not, in bytes: 64 MiB, twice what the largest provider takes (PROVIDER_ERRORS
/// L09).
pub const REQUEST_BYTES_MAX: usize = 64 << 20;

/// How long the rest of a refused body is read.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(10);

/// The logarithm of the largest window of a zstd frame: the 8 MiB that RFC 8878 asks decoders to take. A frame may name
/// any, and the decoder allocates it.
pub(crate) const WINDOW_LOG_MAX: u32 = 23;

/// How the bytes of a body stand for what is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Plain,
    Zstd,
}

/// Reads `body` to its end, as it was before the client packed it; `headers` then say nothing of packing.
///
/// Errors when it is too large, breaks off, says nothing for `silence`, or is packed in a way that is not known here. Of
/// the codings only zstd is: Codex packs with it (CLIENTS.md).
pub(crate) async fn read(body: &mut Incoming, headers: &mut HeaderMap, silence: Duration) -> Result<Bytes, Refusal> {
    let coding = coding(headers)?;
    let bytes = collect(body, silence).await?;
    match coding {
        Coding::Plain => Ok(bytes),
        Coding::Zstd => {
            headers.remove(CONTENT_ENCODING);
            unpacked(&bytes)
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

/// The next piece of `body`; `None` at its end. Errors when it breaks off, or says nothing for `silence`.
pub(crate) async fn next(body: &mut Incoming, silence: Duration) -> Result<Option<Bytes>, Refusal> {
    loop {
        let frame = tokio::time::timeout(silence, body.frame()).await.map_err(|_| Refusal::BodySilent)?;
        let Some(frame) = frame else { return Ok(None) };
        if let Ok(data) = frame.map_err(|_| Refusal::BodyUnread)?.into_data() {
            return Ok(Some(data));
        }
    }
}

async fn collect(body: &mut Incoming, silence: Duration) -> Result<Bytes, Refusal> {
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(data) = next(body, silence).await? {
        if first.len() + all.len() + data.len() > REQUEST_BYTES_MAX {
            return Err(Refusal::TooLarge { limit_bytes: REQUEST_BYTES_MAX });
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

fn unpacked(packed: &[u8]) -> Result<Bytes, Refusal> {
    let decode = || {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
        decoder.window_log_max(WINDOW_LOG_MAX)?;
        let mut plain = Vec::new();
        decoder.take(REQUEST_BYTES_MAX as u64 + 1).read_to_end(&mut plain)?;
        Ok(plain)
    };
    let plain: Vec<u8> = decode().map_err(|_: std::io::Error| Refusal::BodyPacked)?;
    if plain.len() > REQUEST_BYTES_MAX {
        return Err(Refusal::TooLarge { limit_bytes: REQUEST_BYTES_MAX });
    }
    Ok(plain.into())
}

/// Reads on past a refusal, within bounds: a client that is still sending when its connection is closed gets a reset
/// instead of the answer.
pub(crate) async fn discard(mut body: Incoming) {
    let rest = async {
        let mut left = REQUEST_BYTES_MAX;
        while let Some(Ok(frame)) = body.frame().await
            && left > 0
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        }
    };
    // A client that goes on beyond the bounds is cut off.
    let _ = tokio::time::timeout(DISCARD_TIME_MAX, rest).await;
}
