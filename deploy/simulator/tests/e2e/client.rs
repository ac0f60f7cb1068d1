//! A raw HTTP client over one socket: it shows chunks, ends and resets as they are on the wire.

use std::io::ErrorKind;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use waybill_simulator::Running;

/// How the connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    Closed,
    Reset,
}

/// Everything that came.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) status: u16,
    /// The head in lower case.
    pub(crate) head: String,
    /// One element for each chunk, or one for a body with a length.
    pub(crate) chunks: Vec<Vec<u8>>,
    /// Whether the body was ended properly: by its last chunk or its length.
    pub(crate) whole: bool,
    pub(crate) last: Last,
}

impl Received {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.chunks.concat()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text()).expect("JSON")
    }

    /// The data of each event.
    pub(crate) fn data(&self) -> Vec<String> {
        self.text().lines().filter_map(|line| line.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// The data of the nth event from the end, as JSON.
    pub(crate) fn event_from_end(&self, n: usize) -> Value {
        let data = self.data();
        serde_json::from_str(&data[data.len() - 1 - n]).expect("JSON")
    }
}

/// A request under way.
pub(crate) struct Exchange {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Exchange {
    pub(crate) async fn send(to: &Running, line: &str, headers: &str, body: &str) -> Self {
        let mut stream = TcpStream::connect(to.addr).await.expect("it listens");
        let length = body.len();
        let request = format!(
            "{line} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.expect("it reads");
        Self { stream, bytes: Vec::new() }
    }

    /// Reads until `text` has come.
    pub(crate) async fn read_until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.bytes).contains(text) {
            let mut buffer = [0; 4096];
            let n = self.stream.read(&mut buffer).await.expect("more comes");
            assert_ne!(n, 0, "the stream ended before {text:?}");
            self.bytes.extend_from_slice(&buffer[..n]);
        }
    }

    /// Reads to the end of the connection; none when not even a head came.
    pub(crate) async fn finish(mut self) -> (Option<Received>, Last) {
        let last = match self.stream.read_to_end(&mut self.bytes).await {
            Ok(_) => Last::Closed,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Last::Reset,
            Err(error) => panic!("unexpected end: {error}"),
        };
        let Some(at) = self.bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return (None, last) };
        let head = String::from_utf8_lossy(&self.bytes[..at]).to_lowercase();
        let body = &self.bytes[at + 4..];
        let status = head[9..12].parse().expect("a status");
        let (chunks, whole) =
            if head.contains("transfer-encoding: chunked") { dechunk(body) } else { by_length(&head, body) };
        (Some(Received { status, head, chunks, whole, last }), last)
    }
}

fn dechunk(mut body: &[u8]) -> (Vec<Vec<u8>>, bool) {
    let mut chunks = Vec::new();
    loop {
        let Some(at) = body.windows(2).position(|window| window == b"\r\n") else { return (chunks, false) };
        let size = std::str::from_utf8(&body[..at]).expect("a size");
        let size = usize::from_str_radix(size, 16).expect("a size");
        if size == 0 {
            return (chunks, true);
        }
        chunks.push(body[at + 2..at + 2 + size].to_vec());
        body = &body[at + 4 + size..];
    }
}

fn by_length(head: &str, body: &[u8]) -> (Vec<Vec<u8>>, bool) {
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let whole = length.is_some_and(|length| length.parse() == Ok(body.len()));
    (vec![body.to_vec()], whole)
}

/// Posts a body and reads to the end.
pub(crate) async fn post(to: &Running, path: &str, headers: &str, body: &Value) -> Received {
    let exchange = Exchange::send(to, &format!("POST {path}"), headers, &body.to_string()).await;
    exchange.finish().await.0.expect("a head")
}

/// Gets a path and reads to the end.
pub(crate) async fn get(to: &Running, path: &str, headers: &str) -> Received {
    Exchange::send(to, &format!("GET {path}"), headers, "").await.finish().await.0.expect("a head")
}
