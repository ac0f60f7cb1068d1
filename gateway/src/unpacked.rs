//! An upstream's answer, unpacked where the upstream packed it: it was asked not to, and some do it all the same
//! (PITFALLS G06). What it says must be read, and no client was promised a packed answer.

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use zstd::stream::raw::{DParameter, Decoder, Operation};

use crate::body::WINDOW_LOG_MAX;

/// So many packed bytes are unpacked at a time: they become half a MiB of gzip at most, and 16 MiB of zstd. How much all of
/// an answer may become is for its readers to bound, who count what comes out here.
const PIECE_BYTES: usize = 512;

/// A body, unpacked as it comes: what has come is handed on without a wait for more. A body that ends before its packing
/// does is an error.
#[derive(Debug)]
pub struct Unpacked<B = Incoming> {
    body: B,
    unpacking: Option<Box<Unpacking>>,
}

#[derive(Debug)]
struct Unpacking {
    coding: Coding,
    packed: Bytes,
    has_begun: bool,
}

/// How a body is packed.
enum Coding {
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    /// The decoder, and whether what it was given ends with a frame.
    Zstd(Decoder<'static>, bool),
}

impl<B> Unpacked<B> {
    /// The body that came with `headers`, which then say nothing of packing. In a coding that is not known here it stays as
    /// it is.
    pub(crate) fn of(headers: &mut HeaderMap, body: B) -> Self {
        let coding = if headers.contains_key(CONTENT_ENCODING) { coding(headers) } else { None };
        let unpacking = coding.map(|coding| {
            headers.remove(CONTENT_ENCODING);
            headers.remove(CONTENT_LENGTH);
            Box::new(Unpacking { coding, packed: Bytes::new(), has_begun: false })
        });
        Self { body, unpacking }
    }
}

/// The one coding that `headers` name, where it is known here.
fn coding(headers: &HeaderMap) -> Option<Coding> {
    let values = headers.get_all(CONTENT_ENCODING).iter().map(|value| value.to_str().unwrap_or("?"));
    let mut names = values.flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty());
    let name = names.next().filter(|_| names.next().is_none())?;
    match name.to_ascii_lowercase().as_str() {
        "gzip" | "x-gzip" => Some(Coding::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))),
        "zstd" => {
            let mut decoder = Decoder::new().ok()?;
            decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).ok()?;
            Some(Coding::Zstd(decoder, false))
        }
        _ => None,
    }
}

impl<B> Body for Unpacked<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Self { body, unpacking } = self.get_mut();
        let Some(unpacking) = unpacking else { return Pin::new(body).poll_frame(cx).map_err(io::Error::other) };
        loop {
            match unpacking.next() {
                Ok(plain) if plain.is_empty() => {}
                other => return Poll::Ready(Some(other.map(Frame::data))),
            }
            match ready!(Pin::new(&mut *body).poll_frame(cx)) {
                Some(Ok(frame)) => unpacking.packed = frame.into_data().unwrap_or_default(),
                Some(Err(error)) => return Poll::Ready(Some(Err(io::Error::other(error)))),
                None => return Poll::Ready(unpacking.end().err().map(Err)),
            }
        }
    }
}

impl Unpacking {
    /// What comes of the next pieces; nothing where there are none.
    fn next(&mut self) -> io::Result<Bytes> {
        while !self.packed.is_empty() {
            self.has_begun = true;
            let piece = self.packed.split_to(PIECE_BYTES.min(self.packed.len()));
            let plain = self.coding.unpack(&piece)?;
            if !plain.is_empty() {
                return Ok(plain.into());
            }
        }
        Ok(Bytes::new())
    }

    /// Errors unless the packing has come to its end; nothing at all is an empty body.
    fn end(&mut self) -> io::Result<()> {
        if self.has_begun { self.coding.end() } else { Ok(()) }
    }
}

impl Coding {
    fn unpack(&mut self, packed: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip(decoder) => {
                decoder.write_all(packed)?;
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
            Self::Zstd(decoder, is_whole) => {
                let (mut plain, mut at, mut piece) = (Vec::new(), 0, [0; 16 << 10]);
                loop {
                    let status = decoder.run_on_buffers(&packed[at..], &mut piece)?;
                    plain.extend_from_slice(&piece[..status.bytes_written]);
                    at += status.bytes_read;
                    *is_whole = status.remaining == 0;
                    if at == packed.len() && (*is_whole || status.bytes_written < piece.len()) {
                        return Ok(plain);
                    }
                }
            }
        }
    }

    fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Gzip(decoder) => decoder.try_finish(),
            Self::Zstd(_, true) => Ok(()),
            Self::Zstd(_, false) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl fmt::Debug for Coding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip(_) => "gzip",
            Self::Zstd(..) => "zstd",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::task::Waker;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use http::HeaderValue;
    use http_body_util::{BodyExt, Full, Limited};

    use super::*;
    use crate::journey::ANSWER_BYTES_MAX;

    /// A body that comes piece by piece; behind the last one it is silent, or ends.
    struct Pieces(VecDeque<Bytes>, bool);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
                None if self.1 => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn headers(coding: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(coding))])
    }

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(plain).and_then(|()| encoder.finish()).expect("a vector takes every write")
    }

    fn zstd(plain: &[u8]) -> Vec<u8> {
        zstd::stream::encode_all(plain, 1).expect("a slice can be read")
    }

    /// All that comes of a body until it waits or ends, and how it stands then.
    fn read(coding: &'static str, pieces: &[&[u8]], ends: bool) -> (Vec<u8>, &'static str) {
        let pieces = pieces.iter().map(|piece| Bytes::copy_from_slice(piece)).collect();
        let mut headers = headers(coding);
        let mut body = Unpacked::of(&mut headers, Pieces(pieces, ends));
        let mut plain = Vec::new();
        loop {
            match Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => return (plain, "waits"),
                Poll::Ready(None) => return (plain, "ended"),
                Poll::Ready(Some(Err(_))) => return (plain, "broken"),
                Poll::Ready(Some(Ok(frame))) => plain.extend(frame.into_data().expect("there are no trailers")),
            }
        }
    }

    /// Both codings, whole, byte by byte, in two members, and cut.
    #[test]
    fn what_was_packed_comes_out_as_it_was_and_what_is_cut_is_broken() {
        let plain: Vec<u8> = (0..100_000u32).flat_map(|n| n.to_le_bytes()).collect();
        for (coding, pack) in [("gzip", gzip as fn(&[u8]) -> Vec<u8>), ("X-GZip", gzip), ("zstd", zstd)] {
            let packed = pack(&plain);
            assert_eq!(read(coding, &[&packed], true), (plain.clone(), "ended"), "{coding}");
            let bytes: Vec<&[u8]> = packed.chunks(1).collect();
            assert_eq!(read(coding, &bytes, true), (plain.clone(), "ended"), "{coding}");
            let twice = [&packed[..], &packed].concat();
            assert_eq!(read(coding, &[&twice], true), ([&plain[..], &plain].concat(), "ended"), "{coding}");
            for cut in [1, packed.len() / 2, packed.len() - 1] {
                assert_eq!(read(coding, &[&packed[..cut]], true).1, "broken", "{coding} of {cut} bytes");
            }
            assert_eq!(read(coding, &[b"no such thing, as it is plain"], true).1, "broken", "{coding}");
            assert_eq!(read(coding, &[], true), (Vec::new(), "ended"), "{coding}: an empty body has no packing");
        }
        let mut wrong = gzip(&plain);
        let at = wrong.len() - 8;
        wrong[at] ^= 1;
        assert_eq!(read("gzip", &[&wrong], true).1, "broken", "its sum is another");
    }

    #[test]
    fn what_was_flushed_comes_out_before_more_comes() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(b"data: 1\n\n").and_then(|()| encoder.flush()).expect("a vector takes every write");
        let first = encoder.get_ref().clone();
        assert_eq!(read("gzip", &[&first], false), (b"data: 1\n\n".to_vec(), "waits"));
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("there is memory");
        encoder.write_all(b"data: 1\n\n").and_then(|()| encoder.flush()).expect("a vector takes every write");
        assert_eq!(read("zstd", &[encoder.get_ref()], false), (b"data: 1\n\n".to_vec(), "waits"));
    }

    #[test]
    fn a_coding_that_is_not_known_stays_and_one_that_is_known_goes() {
        for (coding, stays) in [("gzip", false), ("br", true), ("gzip, br", true), ("gzip, gzip", true)] {
            let mut headers = headers(coding);
            headers.insert(CONTENT_LENGTH, HeaderValue::from_static("7"));
            let _ = Unpacked::of(&mut headers, ());
            assert_eq!((headers.contains_key(CONTENT_ENCODING), headers.len()), (stays, if stays { 2 } else { 0 }));
        }
        assert_eq!(read("br", &[b"as it came"], true), (b"as it came".to_vec(), "ended"));
    }

    /// Members of a MiB of nothing each, a thousand times what they are packed.
    #[tokio::test]
    async fn what_becomes_larger_than_an_answer_may_be_is_not_read_on() {
        let member = gzip(&vec![0; 1 << 20]);
        let packed = member.repeat((ANSWER_BYTES_MAX >> 20) + 1);
        assert!(packed.len() < 1 << 20);
        let body = Unpacked::of(&mut headers("gzip"), Full::new(Bytes::from(packed)));
        assert!(Limited::new(body, ANSWER_BYTES_MAX).collect().await.is_err());
    }
}
