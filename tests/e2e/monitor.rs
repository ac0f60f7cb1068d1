//! What a Redis server is asked, by its own account: its `MONITOR`.

use std::collections::{BTreeMap, BTreeSet};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use waybill_servers::redis::Redis;

use crate::world::PATIENCE;

/// What marks a place among the commands.
const MARK: &str = "so far";
/// A script that is called so often while nobody asks for anything is called again and again.
const IDLE_TIMES: u32 = 4;

/// The commands of all clients of a server, in the order in which it carries them out.
pub(crate) struct Monitor {
    addr: String,
    lines: BufReader<TcpStream>,
    /// The scripts that are called whether or not anybody asks for anything.
    idle: BTreeSet<String>,
}

impl Monitor {
    /// Begins to listen, and learns what is called again and again while nobody asks for anything.
    pub(crate) async fn on(redis: &Redis) -> Self {
        let addr = redis.url().trim_start_matches("redis://").trim_end_matches('/').to_owned();
        let mut lines = BufReader::new(said(&addr, "MONITOR\r\n").await);
        lines.read_line(&mut String::new()).await.expect("the server agrees");
        let mut monitor = Self { addr, lines, idle: BTreeSet::new() };
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        while !seen.values().any(|times| *times >= IDLE_TIMES) {
            if let Some(script) = script(&monitor.next().await) {
                *seen.entry(script).or_default() += 1;
            }
        }
        monitor.idle = seen.into_keys().collect();
        monitor
    }

    /// How many scripts have been called since the last time, but for the idle ones.
    pub(crate) async fn n_calls(&mut self) -> usize {
        let _marker = said(&self.addr, &format!("ECHO \"{MARK}\"\r\n")).await;
        let mut n_calls = 0;
        loop {
            let line = self.next().await;
            if line.contains(MARK) {
                return n_calls;
            }
            n_calls += usize::from(script(&line).is_some_and(|script| !self.idle.contains(&script)));
        }
    }

    async fn next(&mut self) -> String {
        let mut line = String::new();
        let read = tokio::time::timeout(PATIENCE, self.lines.read_line(&mut line)).await;
        read.expect("the server goes on").expect("it can be read");
        line
    }
}

/// Carries a script out at a server.
pub(crate) async fn eval(redis: &Redis, script: &str) {
    let addr = redis.url().trim_start_matches("redis://").trim_end_matches('/').to_owned();
    let command = format!("*3\r\n$4\r\nEVAL\r\n${}\r\n{script}\r\n$1\r\n0\r\n", script.len());
    let mut answer = String::new();
    BufReader::new(said(&addr, &command).await).read_line(&mut answer).await.expect("the server answers");
    assert!(!answer.starts_with('-'), "{answer}");
}

async fn said(addr: &str, command: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.expect("the server accepts");
    stream.write_all(command.as_bytes()).await.expect("it listens");
    stream
}

/// The script that a command calls, by its digest.
fn script(line: &str) -> Option<String> {
    let mut words = line.split('"').skip(1).step_by(2);
    words.next().filter(|command| command.eq_ignore_ascii_case("evalsha"))?;
    words.next().map(str::to_owned)
}
