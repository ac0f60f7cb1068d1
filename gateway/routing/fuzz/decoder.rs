//! What the fuzzer asks of the SSE decoder. The crate's tests ask it, too (`tests/sse_oracle.rs`), so that it compiles and
//! holds wherever no fuzzer runs.

use bytes::Bytes;
use waybill_routing::sse::Decoder;

/// All raw bytes that came out, and name and data of each event that has data.
pub(crate) type Read = (Vec<u8>, Vec<(Option<String>, Vec<u8>)>);

/// Reads a stream that comes in `chunks`.
pub(crate) fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Read {
    let (mut decoder, mut raw, mut events) = (Decoder::default(), Vec::new(), Vec::new());
    for chunk in chunks {
        decoder.push(Bytes::copy_from_slice(chunk));
        for event in decoder.by_ref() {
            let event = event.expect("inputs are shorter than the bound");
            raw.extend_from_slice(event.raw());
            if let Some(data) = event.data() {
                events.push((event.name().map(str::to_owned), data.to_vec()));
            }
        }
    }
    raw.extend(decoder.finish().map(|tail| tail.into_raw()).unwrap_or_default());
    (raw, events)
}

/// Any bytes in any chunks: the decoder loses no byte and reads what it reads of the whole in one chunk. The first byte is
/// the size of the chunks less one.
pub(crate) fn check(input: &[u8]) {
    let Some((size, stream)) = input.split_first() else { return };
    let (raw, events) = read(stream.chunks(usize::from(*size) + 1));
    assert_eq!(raw, stream);
    assert_eq!(events, read([stream].into_iter()).1);
}
