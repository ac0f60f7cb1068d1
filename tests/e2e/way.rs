//! The way between gateways and a server, on which a test may let all answers get lost.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{copy, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A port that leads to a server; dropped, it closes every connection.
pub(crate) struct Way {
    addr: SocketAddr,
    loses: watch::Sender<bool>,
    _listens: JoinSet<()>,
}

impl Way {
    /// The way to the server at `url`, for now without a fault.
    pub(crate) async fn to(url: &str) -> Self {
        let server = url.trim_start_matches("nats://").parse().expect("a server has an address");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let (loses, lost) = watch::channel(false);
        let mut listens = JoinSet::new();
        listens.spawn(listen(listener, server, lost));
        Self { addr, loses, _listens: listens }
    }

    /// Where clients connect.
    pub(crate) fn url(&self) -> String {
        format!("nats://{}", self.addr)
    }

    /// From now on the server hears and is not heard.
    pub(crate) fn lose_answers(&self) {
        self.loses.send_replace(true);
    }

    /// Lets new connections be as they should; those that have lost something end.
    pub(crate) fn lose_nothing(&self) {
        self.loses.send_replace(false);
    }
}

async fn listen(listener: TcpListener, server: SocketAddr, loses: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(connect(client, server, loses.clone()));
    }
}

/// Leads a connection to its end, which comes when either side ends it.
async fn connect(client: TcpStream, server: SocketAddr, mut loses: watch::Receiver<bool>) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let mut nowhere = sink();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
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
        _ = copy(&mut from_client, &mut to_server) => {}
        () = back => {}
    }
}
