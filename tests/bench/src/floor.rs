//! The floor: a pass-through on hyper that looks into no body and records nothing. No gateway can cost less.

use std::net::{Ipv4Addr, SocketAddr};

use hyper::body::Incoming;
use hyper::http::uri::{PathAndQuery, Scheme};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Idle connections kept to the upstream.
const IDLE_CONNECTIONS_MAX: usize = 4096;

/// Passes requests on to `upstream` until the process is ended; says its own address in its first line.
pub(crate) async fn serve(upstream: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("http://{}", listener.local_addr()?);
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(IDLE_CONNECTIONS_MAX).build(connector);
    let mut connections = JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        connections.spawn(pass(socket, client.clone(), upstream));
    }
}

async fn pass(socket: TcpStream, client: Client<HttpConnector, Incoming>, upstream: SocketAddr) {
    let forward = service_fn(|mut request: Request<Incoming>| {
        *request.uri_mut() = at(upstream, request.uri());
        request.headers_mut().remove(header::HOST);
        request.headers_mut().remove(header::CONNECTION);
        client.request(request)
    });
    if socket.set_nodelay(true).is_ok() {
        // A client that leaves in mid-answer is no matter of the floor's.
        let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), forward).await;
    }
}

fn at(upstream: SocketAddr, uri: &Uri) -> Uri {
    let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let uri = Uri::builder().scheme(Scheme::HTTP).authority(upstream.to_string()).path_and_query(path);
    uri.build().expect("an address and a path make a URI")
}
