//! A listener that notes the first line of each connection, and either passes the connection on or closes it.
//!
//! Passing on, it shows what a client and the gateway say to each other. Closing, it is the proxy of a program that is
//! to keep off the network: whatever it notes is an attempt to leave.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Enough for the request line and the status line.
const NOTED_BYTES_MAX: usize = 4096;

/// A running tap; dropped, it closes all its connections.
pub(crate) struct Wiretap {
    pub(crate) addr: SocketAddr,
    notes: Arc<Mutex<Vec<String>>>,
    _listening: JoinSet<()>,
}

impl Wiretap {
    /// Notes what is said to `target`, and what `target` says to it.
    pub(crate) async fn on(target: SocketAddr) -> Self {
        Self::start(Some(target)).await
    }

    /// Notes what is said, and says nothing.
    pub(crate) async fn trap() -> Self {
        Self::start(None).await
    }

    /// Request line and status line of each connection, in the order of the answers; of the trap, the request lines.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn start(target: Option<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let notes = Arc::new(Mutex::new(Vec::new()));
        let mut listening = JoinSet::new();
        listening.spawn(listen(listener, target, notes.clone()));
        Self { addr, notes, _listening: listening }
    }
}

async fn listen(listener: TcpListener, target: Option<SocketAddr>, notes: Arc<Mutex<Vec<String>>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let notes = notes.clone();
        connections.spawn(async move {
            // A connection that breaks is the business of its two ends.
            drop(listen_in(stream, target, &notes).await);
        });
    }
}

async fn listen_in(
    mut client: TcpStream,
    target: Option<SocketAddr>,
    notes: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let note = |line: String| notes.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    let request = some(&mut client).await?;
    let Some(target) = target else {
        note(first_line(&request));
        return Ok(());
    };
    let mut server = TcpStream::connect(target).await?;
    server.write_all(&request).await?;
    let head = loop {
        // The rest of a long request goes on until the answer begins.
        tokio::select! {
            more = some(&mut client) => server.write_all(&more?).await?,
            head = some(&mut server) => break head?,
        }
    };
    note(format!("{} -> {}", first_line(&request), first_line(&head)));
    client.write_all(&head).await?;
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}

/// The next bytes; a connection that has ended is an error.
async fn some(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; NOTED_BYTES_MAX];
    let length = stream.read(&mut bytes).await?;
    bytes.truncate(length);
    if bytes.is_empty() { Err(std::io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

fn first_line(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).lines().next().unwrap_or_default().to_owned()
}
