//! What a Redis server is asked, by its own account: its `MONITOR`.

use std::collections::BTreeMap;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use waybill_servers::redis::Redis;

use crate::world::PATIENCE;

/// What all keys of a test's shared state begin with.
const PREFIX: &str = "wb:";
/// What marks a place among the commands.
const MARK: &str = "so far";
/// A command that is sent so often while nobody asks for anything is sent again and again.
const IDLE_TIMES: u32 = 4;

/// The commands of all clients of a server, in the order in which it carries them out.
pub(crate) struct Monitor {
    addr: String,
    lines: BufReader<TcpStream>,
    /// The commands, word for word, that are sent whether or not anybody asks for anything.
    idle: Vec<String>,
}

impl Monitor {
    /// Begins to listen, and learns what is sent again and again while nobody asks for anything.
    pub(crate) async fn on(redis: &Redis) -> Self {
        let addr = redis.url().trim_start_matches("redis://").trim_end_matches('/').to_owned();
        let mut lines = BufReader::new(said(&addr, "MONITOR\r\n").await);
        lines.read_line(&mut String::new()).await.expect("the server agrees");
        let mut monitor = Self { addr, lines, idle: Vec::new() };
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        while !seen.values().any(|times| *times >= IDLE_TIMES) {
            if let Some(command) = command(&monitor.next().await) {
                *seen.entry(command).or_default() += 1;
            }
        }
        monitor.idle = seen.into_keys().collect();
        monitor
    }

    /// The commands about the shared state since the last time, whatever they are, but for the idle ones.
    pub(crate) async fn commands(&mut self) -> Vec<String> {
        let _marker = said(&self.addr, &format!("ECHO \"{MARK}\"\r\n")).await;
        let mut commands = Vec::new();
        loop {
            let line = self.next().await;
            if line.contains(MARK) {
                return commands;
            }
            commands.extend(command(&line).filter(|command| !self.idle.contains(command)));
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

/// What a client sent, if it is about the shared state: `TIME [DATABASE ADDRESS] "COMMAND" "WORD" …`. What a script does
/// stands there as a client's of the name `lua`, and is not sent.
fn command(line: &str) -> Option<String> {
    let (client, command) = line.split_once("] ")?;
    (!client.ends_with(" lua") && command.contains(PREFIX)).then(|| command.trim_end().to_owned())
}
