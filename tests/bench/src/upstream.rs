//! A lean upstream: fixed answers of Chat Completions, written by hand so that it costs its core little.
//!
//! What it answers stands in the request: `stream`, `max_tokens` (the chunks of a stream), and `pace_ms`, the pause
//! between two chunks. Every chunk is a write of its own, as a real provider's is.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Interval, MissedTickBehavior, interval};

/// The longest request that is read, in bytes.
const REQUEST_BYTES_MAX: usize = 1 << 20;
/// About how long the text of a plain answer is, in bytes: with its envelope it makes about 1 KB.
const TEXT_BYTES: usize = 600;
/// What marks a chunk with text; the first chunk of a stream has a role only.
pub(crate) const CONTENT_MARK: &str = r#""delta":{"content":"token"#;

/// Answers until the process is ended; says its address in its first line.
pub(crate) async fn serve() -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("http://{}", listener.local_addr()?);
    let mut connections = JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            // A client that leaves ends its connection; there is nothing to tell it.
            let _ = converse(socket).await;
        });
    }
}

async fn converse(mut socket: TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let plain = plain_answer();
    let mut received = Vec::new();
    loop {
        let Some(request) = Asked::read(&mut socket, &mut received).await? else { return Ok(()) };
        if request.stream {
            stream(&mut socket, &request).await?;
        } else {
            socket.write_all(plain.as_bytes()).await?;
        }
    }
}

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    stream: bool,
    chunks: u64,
    pace_ms: u64,
}

impl Asked {
    /// Reads one request; `None` when the client has closed. What follows the request stays in `received`.
    async fn read(socket: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<Option<Self>> {
        loop {
            if let Some(end) = end_of_request(received) {
                let asked = Self::of(&received[..end]);
                received.drain(..end);
                return Ok(Some(asked));
            }
            if received.len() > REQUEST_BYTES_MAX {
                return Err(io::Error::other("the request is too long"));
            }
            if socket.read_buf(received).await? == 0 {
                return Ok(None);
            }
        }
    }

    fn of(request: &[u8]) -> Self {
        Self {
            stream: memmem::find(request, br#""stream":true"#).is_some(),
            chunks: number_after(request, br#""max_tokens":"#).unwrap_or(1),
            pace_ms: number_after(request, br#""pace_ms":"#).unwrap_or(0),
        }
    }
}

/// Where the first request in `received` ends; `None` while it is not whole. Bodies have a length, never chunks.
fn end_of_request(received: &[u8]) -> Option<usize> {
    let head = memmem::find(received, b"\r\n\r\n")? + 4;
    let lines = received[..head].split(|byte| *byte == b'\n');
    let name = b"content-length:";
    let length =
        lines.filter_map(|line| line.split_at_checked(name.len())).find(|(start, _)| start.eq_ignore_ascii_case(name));
    let length = length.and_then(|(_, value)| number(value.trim_ascii())).unwrap_or(0);
    let end = head + usize::try_from(length).ok()?;
    (received.len() >= end).then_some(end)
}

fn number_after(text: &[u8], name: &[u8]) -> Option<u64> {
    number(&text[memmem::find(text, name)? + name.len()..])
}

fn number(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

fn plain_answer() -> String {
    let text = "lorem ipsum dolor sit amet ".repeat(TEXT_BYTES / 27);
    let body = format!(
        r#"{{"id":"chatcmpl-bench","object":"chat.completion","created":1700000000,"model":"bench-model","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}","refusal":null}},"logprobs":null,"finish_reason":"stop"}}],"usage":{{"prompt_tokens":256,"completion_tokens":100,"total_tokens":356,"prompt_tokens_details":{{"cached_tokens":128}}}},"system_fingerprint":"fp_bench"}}"#
    );
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn stream(socket: &mut TcpStream, asked: &Asked) -> io::Result<()> {
    let mut pace = (asked.pace_ms > 0).then(|| {
        let mut pace = interval(Duration::from_millis(asked.pace_ms));
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pace
    });
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let role = event(r#"{"role":"assistant","content":""}"#, "null");
    socket.write_all(format!("{head}{}", chunk(&role)).as_bytes()).await?;
    let content = chunk(&event(r#"{"content":"token "}"#, "null"));
    for _ in 0..asked.chunks {
        wait(pace.as_mut()).await;
        socket.write_all(content.as_bytes()).await?;
    }
    wait(pace.as_mut()).await;
    let usage = format!(
        "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench-model\",\"choices\":[],\"usage\":{{\"prompt_tokens\":256,\"completion_tokens\":{n},\"total_tokens\":{total},\"prompt_tokens_details\":{{\"cached_tokens\":128}}}}}}\n\n",
        n = asked.chunks,
        total = asked.chunks + 256,
    );
    let end = chunk(&event("{}", "\"stop\"")) + &chunk(&usage) + &chunk("data: [DONE]\n\n") + "0\r\n\r\n";
    socket.write_all(end.as_bytes()).await
}

/// Waits for the next beat, or just lets others go first.
async fn wait(pace: Option<&mut Interval>) {
    match pace {
        Some(pace) => drop(pace.tick().await),
        None => yield_now().await,
    }
}

fn event(delta: &str, finish: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench-model\",\"system_fingerprint\":\"fp_bench\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
    )
}

/// `data` as one chunk of HTTP's chunked coding.
fn chunk(data: &str) -> String {
    format!("{:x}\r\n{data}\r\n", data.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_where_its_length_says() {
        let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n";
        let check =
            |rest: &str, end: Option<usize>| assert_eq!(end_of_request(format!("{head}{rest}").as_bytes()), end);
        check("1234", None);
        check("12345", Some(head.len() + 5));
        check("12345POST", Some(head.len() + 5));
        assert_eq!(end_of_request(b"GET / HTTP/1.1\r\n\r\n"), Some(18));
    }

    #[test]
    fn what_is_asked_stands_in_the_body() {
        let stream = Asked::of(br#"{"stream":true,"max_tokens":100,"pace_ms":20}"#);
        assert_eq!(stream, Asked { stream: true, chunks: 100, pace_ms: 20 });
        assert_eq!(Asked::of(br#"{"model":"m"}"#), Asked { stream: false, chunks: 1, pace_ms: 0 });
    }

    #[test]
    fn a_plain_answer_is_about_a_kilobyte() {
        assert!((900..1200).contains(&plain_answer().len()), "{}", plain_answer().len());
    }

    #[test]
    fn content_chunks_carry_the_mark_and_the_first_chunk_does_not() {
        assert!(event(r#"{"content":"token "}"#, "null").contains(CONTENT_MARK));
        assert!(!event(r#"{"role":"assistant","content":""}"#, "null").contains(CONTENT_MARK));
    }
}
