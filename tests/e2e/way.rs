//! The way between a NATS server and its clients, on which a test may let all answers get lost, or reads find nothing.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Bytes led on at once.
const CHUNK: usize = 64 << 10;
/// What stands before the subject in the request for frames.
const OF_WRITER: &[u8] = b"\"next_by_subj\":\"";

/// A port that leads to a server; dropped, it closes every connection.
pub(crate) struct Way {
    addr: SocketAddr,
    loses: watch::Sender<bool>,
    blinds: watch::Sender<bool>,
    _listens: JoinSet<()>,
}

impl Way {
    /// The way to the server at `url`, for now without a fault.
    pub(crate) async fn to(url: &str) -> Self {
        let server = url.trim_start_matches("nats://").parse().expect("a server has an address");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let ((loses, lost), (blinds, blind)) = (watch::channel(false), watch::channel(false));
        let mut listens = JoinSet::new();
        listens.spawn(listen(listener, server, lost, blind));
        Self { addr, loses, blinds, _listens: listens }
    }

    /// Where clients connect.
    pub(crate) fn url(&self) -> String {
        format!("nats://{}", self.addr)
    }

    /// From now on the server hears and is not heard.
    pub(crate) fn lose_answers(&self) {
        self.loses.send_replace(true);
    }

    /// From now on reads of the log find no frame, whatever comes into it; everything else is as it should be.
    pub(crate) fn blind(&self) {
        self.blinds.send_replace(true);
    }

    /// Lets connections that are new from now on read as they should; the others stay blind.
    pub(crate) fn blind_no_more(&self) {
        self.blinds.send_replace(false);
    }

    /// Lets new connections be as they should; those that have lost something end.
    pub(crate) fn lose_nothing(&self) {
        self.loses.send_replace(false);
    }
}

async fn listen(
    listener: TcpListener,
    server: SocketAddr,
    loses: watch::Receiver<bool>,
    blinds: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(connect(client, server, loses.clone(), blinds.clone()));
    }
}

/// Leads a connection to its end, which comes when either side ends it.
async fn connect(
    client: TcpStream,
    server: SocketAddr,
    mut loses: watch::Receiver<bool>,
    blinds: watch::Receiver<bool>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let mut nowhere = sink();
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = server.into_split();
    let back = async {
        tokio::select! {
            _ = copy(&mut from_server, &mut to_client) => return,
            _ = loses.wait_for(|loses| *loses) => {}
        }
        tokio::select! {
            _ = copy(&mut from_server, &mut nowhere) => {}
            _ = loses.wait_for(|loses| !*loses) => {}
        }
    };
    tokio::select! {
        () = ask(from_client, to_server, blinds) => {}
        () = back => {}
    }
}

/// Leads to the server what its client asks, until either side ends; one that was blind once stays so.
async fn ask(mut client: OwnedReadHalf, mut server: OwnedWriteHalf, blinds: watch::Receiver<bool>) {
    let (mut buffer, mut is_blind) = (vec![0; CHUNK], false);
    while let Ok(n @ 1..) = client.read(&mut buffer).await {
        is_blind |= *blinds.borrow();
        if is_blind {
            ask_of_another(&mut buffer[..n]);
        }
        if server.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

/// Lets reads ask for frames of a writer that there is not. A request is written as one, so it comes as one.
fn ask_of_another(bytes: &mut [u8]) {
    let mut from = 0;
    while let Some(at) = bytes[from..].windows(OF_WRITER.len()).position(|window| window == OF_WRITER) {
        from += at + OF_WRITER.len();
        bytes[from] = b'~';
    }
}
