//! The SSE decoder against an independent implementation, `sse-stream`, over streams and cuts of any kind.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use proptest::collection::vec;
use proptest::prelude::*;
use sse_stream::SseByteStream;

#[path = "../fuzz/decoder.rs"]
mod decoder;

/// Name and data of each event that has data.
type Meaning = Vec<(Option<String>, String)>;

fn ours(chunks: &[Bytes]) -> Meaning {
    let (raw, events) = decoder::read(chunks.iter().map(|chunk| &chunk[..]));
    assert_eq!(raw, chunks.concat(), "the bytes that came out are not those that went in");
    let text = |data| String::from_utf8(data).expect("the streams are UTF-8");
    events.into_iter().map(|(name, data)| (name, text(data))).collect()
}

fn theirs(chunks: &[Bytes]) -> Meaning {
    let events = SseByteStream::new(stream::iter(chunks.to_vec()).map(Ok::<_, Infallible>)).collect::<Vec<_>>();
    let events = events.now_or_never().expect("all chunks are there");
    let events = events.into_iter().map(|event| event.expect("the streams are valid"));
    events.filter_map(|event| Some((event.event.filter(|name| !name.is_empty()), event.data?))).collect()
}

/// `stream` cut at `places`, each taken modulo its length.
fn cut(stream: &str, places: &[usize]) -> Vec<Bytes> {
    let mut places: Vec<_> = places.iter().map(|place| place % (stream.len() + 1)).collect();
    places.extend([0, stream.len()]);
    places.sort_unstable();
    let bytes = Bytes::copy_from_slice(stream.as_bytes());
    places.windows(2).map(|pair| bytes.slice(pair[0]..pair[1])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn both_decoders_read_the_same_events_however_the_stream_is_cut(
        parts in vec(
            prop::sample::select(vec![
                "data", "event", "id", "retry", ":", ": ", " ", "\n", "\r", "\r\n", "\n\n", "\r\n\r\n", "\r\r", "x",
                "é", "{\"a\":1}", "[DONE]", "data: ", "event: ping", ": comment", "\u{feff}", "\0",
            ]),
            0..40,
        ),
        places in vec(any::<usize>(), 0..8),
    ) {
        let stream = parts.concat();
        let chunks = cut(&stream, &places);
        prop_assert_eq!(ours(&chunks), theirs(&chunks));
        let bytes: Vec<_> = (0..stream.len()).collect();
        prop_assert_eq!(ours(&cut(&stream, &bytes)), theirs(&chunks));
    }

    #[test]
    fn any_bytes_are_read_alike_in_any_chunks(
        size in any::<u8>(),
        pieces in vec(prop_oneof![any::<u8>(), prop::sample::select(b"\n\r:data event".to_vec())], 0..200),
    ) {
        decoder::check(&[vec![size], pieces].concat());
    }
}

#[test]
fn both_decoders_read_a_long_stream_in_single_bytes() {
    let stream = "event: response.output_text.delta\r\ndata: {\"delta\":\"é\"}\r\n\r\n: ping\n\n".repeat(1000);
    let bytes: Vec<_> = (0..stream.len()).collect();
    let chunks = cut(&stream, &bytes);
    let expected = (Some("response.output_text.delta".to_owned()), "{\"delta\":\"é\"}".to_owned());
    assert_eq!(ours(&chunks), vec![expected; 1000]);
    assert_eq!(theirs(&chunks), ours(&chunks));
}
