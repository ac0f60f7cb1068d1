//! The load generator: keep-alive connections that send prepared chats and time the answers.
//!
//! HTTP is read by hand, so that the generator costs its core little. A connection has one request open at a time and
//! the answers are known, so the end of a chunked answer is found by its last bytes.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use memchr::memmem;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use crate::upstream::CONTENT_MARK;

/// Sessions that the chats belong to, in turn.
const SESSIONS: usize = 64;
/// Connections of a paced load beyond which its requests fail.
const PACED_CONNECTIONS_MAX: usize = 256;
/// Connections that a paced load opens before it begins.
const PACED_CONNECTIONS: usize = 32;
/// The beat of a paced load: what is due is sent at every beat.
const BEAT: Duration = Duration::from_millis(1);
/// No answer takes longer than this.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

/// What to send, where and how.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Where to
    pub(crate) target: SocketAddr,
    /// The caller's secret
    #[arg(long, default_value = "sk-bench")]
    pub(crate) key: String,
    /// Requests in all
    #[arg(long, default_value_t = 1000)]
    pub(crate) count: usize,
    /// Connections, each with one request at a time
    #[arg(long, default_value_t = 16)]
    pub(crate) connections: usize,
    /// Requests a second, whatever the answers do; 0 sends as fast as the connections allow
    #[arg(long, default_value_t = 0)]
    pub(crate) rate: u64,
    /// Chunks of a stream; 0 asks for plain answers
    #[arg(long, default_value_t = 0)]
    pub(crate) chunks: u64,
    /// Milliseconds between two chunks
    #[arg(long, default_value_t = 0)]
    pub(crate) pace_ms: u64,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Whole answers with status 200.
    pub(crate) answered: usize,
    /// Everything else.
    pub(crate) failed: usize,
    /// From the first request to the last answer, in milliseconds.
    pub(crate) elapsed_ms: u64,
    /// The median time of a whole answer, in microseconds.
    pub(crate) p50_us: u64,
    /// Its 99th percentile.
    pub(crate) p99_us: u64,
    /// The median time to the first content of a stream, in microseconds; 0 for plain answers.
    pub(crate) first_content_p50_us: u64,
}

/// How long one answer took.
#[derive(Clone, Copy, Debug)]
struct Timing {
    whole: Duration,
    first_content: Option<Duration>,
}

/// The line that is printed when every connection of a load has its first content.
pub(crate) const ALL_OPEN: &str = "all open";

/// Sends the load and prints the report as one line of JSON.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let requests: Arc<Vec<Vec<u8>>> = Arc::new((0..SESSIONS).map(|session| args.request(session)).collect());
    let begun = Instant::now();
    let outcomes = if args.rate > 0 { paced(&args, &requests).await? } else { closed(&args, &requests).await? };
    let elapsed_ms = u64::try_from(begun.elapsed().as_millis())?;
    println!("{}", serde_json::to_string(&report(&outcomes, elapsed_ms))?);
    Ok(())
}

impl Args {
    /// A chat of about 1 KB; the prompt is the same in all sessions, the session stands in the header.
    fn request(&self, session: usize) -> Vec<u8> {
        let text = "Answer the question of the user in plain words. ".repeat(19);
        let Self { chunks, pace_ms, key, target, .. } = self;
        let stream = match chunks {
            0 => String::new(),
            chunks => format!(r#","stream":true,"max_tokens":{chunks},"pace_ms":{pace_ms}"#),
        };
        let body = format!(r#"{{"model":"bench-model","messages":[{{"role":"user","content":"{text}"}}]{stream}}}"#);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {target}\r\nauthorization: Bearer {key}\r\n\
             content-type: application/json\r\nx-session-id: session-{session}\r\ncontent-length: {}\r\n\r\n",
            body.len(),
        );
        (head + &body).into_bytes()
    }
}

/// Every connection sends its next request when it has its answer.
async fn closed(args: &Args, requests: &Arc<Vec<Vec<u8>>>) -> anyhow::Result<Vec<io::Result<Timing>>> {
    let next = Arc::new(AtomicUsize::new(0));
    let (opened, mut opens) = watch::channel(0usize);
    let mut clients = JoinSet::new();
    for _ in 0..args.connections {
        let (next, requests, opened) = (next.clone(), requests.clone(), opened.clone());
        let (target, count) = (args.target, args.count);
        clients.spawn(async move {
            let mut outcomes = Vec::new();
            let mut connection = None;
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return outcomes;
                }
                let opens = || opened.send_modify(|n| *n += 1);
                let outcome = once(&mut connection, target, &requests[n % SESSIONS], &opens).await;
                outcomes.push(outcome);
            }
        });
    }
    drop(opened);
    if args.chunks > 0 && opens.wait_for(|n| *n >= args.connections).await.is_ok() {
        println!("{ALL_OPEN}");
    }
    Ok(clients.join_all().await.into_iter().flatten().collect())
}

/// Sends at a fixed rate. A request is timed from the beat at which it was due, so waiting for a connection counts.
async fn paced(args: &Args, requests: &Arc<Vec<Vec<u8>>>) -> anyhow::Result<Vec<io::Result<Timing>>> {
    let mut idle = VecDeque::new();
    for _ in 0..PACED_CONNECTIONS {
        idle.push_back(Connection::open(args.target).await?);
    }
    let mut open: JoinSet<(io::Result<Timing>, Option<Connection>)> = JoinSet::new();
    let mut outcomes = Vec::with_capacity(args.count);
    let mut beat = interval(BEAT);
    let begun = Instant::now();
    let mut sent = 0;
    while sent < args.count {
        let now = beat.tick().await;
        let due = (now - begun).as_secs_f64() * args.rate as f64;
        while sent < args.count && (sent as f64) < due {
            if open.len() >= PACED_CONNECTIONS_MAX {
                outcomes.push(Err(io::Error::other("the target is too slow for this rate")));
            } else {
                let (connection, requests, target) = (idle.pop_front(), requests.clone(), args.target);
                open.spawn(async move {
                    let mut connection = connection;
                    let outcome = once(&mut connection, target, &requests[sent % SESSIONS], &|| ()).await;
                    (outcome, connection)
                });
            }
            sent += 1;
        }
        while let Some(done) = open.try_join_next() {
            let (outcome, connection) = done?;
            outcomes.push(outcome);
            idle.extend(connection);
        }
    }
    outcomes.extend(open.join_all().await.into_iter().map(|(outcome, _)| outcome));
    Ok(outcomes)
}

/// One request on `connection`, which is opened when there is none and closed when it fails.
async fn once(
    connection: &mut Option<Connection>,
    target: SocketAddr,
    request: &[u8],
    opens: &(dyn Fn() + Sync),
) -> io::Result<Timing> {
    let begun = Instant::now();
    let mut taken = match connection.take() {
        Some(taken) => taken,
        None => Connection::open(target).await?,
    };
    let timing = timeout(ANSWER_TIME_MAX, taken.exchange(request, begun, opens)).await??;
    *connection = Some(taken);
    Ok(timing)
}

/// One keep-alive connection.
struct Connection {
    socket: TcpStream,
    answer: Vec<u8>,
}

impl Connection {
    async fn open(target: SocketAddr) -> io::Result<Self> {
        let socket = TcpStream::connect(target).await?;
        socket.set_nodelay(true)?;
        Ok(Self { socket, answer: Vec::with_capacity(64 * 1024) })
    }

    /// Sends `request` and reads its whole answer; `opens` is called at the first content of a stream.
    async fn exchange(&mut self, request: &[u8], begun: Instant, opens: &(dyn Fn() + Sync)) -> io::Result<Timing> {
        self.answer.clear();
        self.socket.write_all(request).await?;
        let (mut head, mut first_content) = (None, None);
        loop {
            let seen = self.answer.len().saturating_sub(CONTENT_MARK.len());
            if self.socket.read_buf(&mut self.answer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if head.is_none() {
                head = Head::read(&self.answer)?;
            }
            if first_content.is_none() && memmem::find(&self.answer[seen..], CONTENT_MARK.as_bytes()).is_some() {
                first_content = Some(begun.elapsed());
                opens();
            }
            if head.as_ref().is_some_and(|head| head.is_whole(&self.answer)) {
                return Ok(Timing { whole: begun.elapsed(), first_content });
            }
        }
    }
}

/// What the head of an answer says about its end.
struct Head {
    body_at: usize,
    /// The body's length; a chunked one has none.
    length: Option<usize>,
}

impl Head {
    /// Reads the head once it is whole; any status but 200 is an error.
    fn read(answer: &[u8]) -> io::Result<Option<Self>> {
        let Some(end) = memmem::find(answer, b"\r\n\r\n") else { return Ok(None) };
        let text = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
        if !text.starts_with("http/1.1 200") {
            return Err(io::Error::other(text.lines().next().unwrap_or_default().to_owned()));
        }
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        Ok(Some(Self { body_at: end + 4, length }))
    }

    fn is_whole(&self, answer: &[u8]) -> bool {
        match self.length {
            Some(length) => answer.len() >= self.body_at + length,
            None => answer.ends_with(b"\r\n0\r\n\r\n"),
        }
    }
}

fn report(outcomes: &[io::Result<Timing>], elapsed_ms: u64) -> Report {
    if let Some(error) = outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
        eprintln!("the first failure of this load: {error}");
    }
    let timings: Vec<&Timing> = outcomes.iter().flatten().collect();
    let mut whole: Vec<Duration> = timings.iter().map(|timing| timing.whole).collect();
    let mut first: Vec<Duration> = timings.iter().filter_map(|timing| timing.first_content).collect();
    whole.sort_unstable();
    first.sort_unstable();
    Report {
        answered: timings.len(),
        failed: outcomes.len() - timings.len(),
        elapsed_ms,
        p50_us: percentile(&whole, 50),
        p99_us: percentile(&whole, 99),
        first_content_p50_us: percentile(&first, 50),
    }
}

/// The nearest-rank percentile of sorted durations, in microseconds; 0 where there are none.
fn percentile(sorted: &[Duration], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).map_or(0, |duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let sorted: Vec<Duration> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!((percentile(&sorted, 50), percentile(&sorted, 99), percentile(&[], 50)), (100, 198, 0));
    }

    #[test]
    fn an_answer_is_whole_by_its_length_or_its_last_chunk() {
        let check = |answer: &str, whole: bool| {
            let head = Head::read(answer.as_bytes()).expect("status 200").expect("a whole head");
            assert_eq!(head.is_whole(answer.as_bytes()), whole, "{answer:?}");
        };
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n1", false);
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n12", true);
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n12\r\n", false);
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n12\r\n0\r\n\r\n", true);
        assert!(Head::read(b"HTTP/1.1 503 Service Unavailable\r\n\r\n").is_err());
    }
}
