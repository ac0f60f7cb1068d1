//! The sockets: accepts connections, plays programs, and can be killed and revived on the same port.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};

use crate::cache::Hit;
use crate::calls::{Call, CallLog, End, Recorder};
use crate::clock::Clock;
use crate::program::Op;
use crate::respond::{Arrival, Reply, State};
use crate::script::{Control, Plan, Step};
use crate::settings::Settings;
use crate::socket::{Line, Socket};

/// The longest request body that is read.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// The pause after a failed accept, so that a lack of file descriptors does not become a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// One simulated upstream, without its port; clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Simulator {
    state: Arc<Mutex<State>>,
    log: Arc<CallLog>,
    clock: Clock,
    releases: watch::Sender<u64>,
    connections: Arc<AtomicU64>,
}

impl Simulator {
    /// A simulator on the wall clock.
    pub fn new(settings: Settings) -> Self {
        Self::with_clock(settings, Clock::Wall)
    }

    /// A simulator whose caches and log go by `clock`; delays always take real time.
    pub fn with_clock(settings: Settings, clock: Clock) -> Self {
        Self {
            state: Arc::new(Mutex::new(State::new(settings))),
            log: Arc::new(CallLog::new()),
            clock,
            releases: watch::Sender::new(0),
            connections: Arc::default(),
        }
    }

    /// Starts a simulator on a free port of 127.0.0.1.
    pub async fn start(settings: Settings) -> io::Result<Running> {
        Self::new(settings).start_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await
    }

    /// Starts this simulator on `addr`.
    pub async fn start_at(self, addr: SocketAddr) -> io::Result<Running> {
        let listener = bound(addr)?.listen(BACKLOG)?;
        let addr = listener.local_addr()?;
        let port = tokio::sync::Mutex::new(Port::open(listener, &self));
        Ok(Running { addr, simulator: self, port })
    }

    /// Carries out a control message.
    pub fn apply(&self, control: Control) {
        if control.clear_calls {
            self.log.clear();
        }
        if control.release {
            self.release();
        }
        self.state().apply(control);
    }

    /// Appends a step to the script.
    pub fn push(&self, step: impl Into<Step>) {
        self.apply(Control { steps: vec![step.into()], ..Control::default() });
    }

    /// Lets every call in the log go on from its `PauseAfter`, whether it waits there already or comes to it later.
    pub fn release(&self) {
        self.releases.send_modify(|n| *n += 1);
    }

    /// The call log, oldest first.
    pub fn calls(&self) -> Vec<Call> {
        self.log.all()
    }

    /// Waits until `holds` is true of the call log, and returns the log of that moment.
    pub async fn wait_for(&self, holds: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        self.log.wait_for(holds).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves `simulator` on `listener` until the future is dropped.
pub async fn serve(listener: TcpListener, simulator: Simulator) -> io::Result<()> {
    let (_mode, watched) = watch::channel(Mode::Serving);
    accept(listener, simulator, watched).await;
    Ok(())
}

/// A simulator on a port; dropped, it closes all its connections.
#[derive(Debug)]
pub struct Running {
    /// Where it listens; kept over `die` and `revive`.
    pub addr: SocketAddr,
    simulator: Simulator,
    port: tokio::sync::Mutex<Port>,
}

#[derive(Debug)]
enum Port {
    Open {
        mode: watch::Sender<Mode>,
        server: JoinSet<()>,
    },
    /// Bound without listening: connections are refused and nobody else gets the port.
    Held(TcpSocket),
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Serving,
    Stopping,
    Dying,
}

impl Port {
    fn open(listener: TcpListener, simulator: &Simulator) -> Self {
        let (mode, watched) = watch::channel(Mode::Serving);
        let mut server = JoinSet::new();
        server.spawn(accept(listener, simulator.clone(), watched));
        Self::Open { mode, server }
    }

    /// Ends the accept loop in `mode` and waits for it and its connections.
    async fn close(&mut self, end: Mode) {
        if let Self::Open { mode, server } = self {
            mode.send_replace(end);
            while server.join_next().await.is_some() {}
            *self = Self::Closed;
        }
    }
}

// A running simulator is one in every respect, and tests say little else: `sim.push(…)`, `sim.calls()`.
impl std::ops::Deref for Running {
    type Target = Simulator;

    fn deref(&self) -> &Simulator {
        &self.simulator
    }
}

impl Running {
    /// `http://ADDR`, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Stops accepting and waits for the answers under way; one that hangs or stalls is waited for until its client goes.
    pub async fn stop(&self) {
        self.port.lock().await.close(Mode::Stopping).await;
    }

    /// Acts as a killed process: the port refuses connections, and all open ones are reset. Its memory stays.
    pub async fn die(&self) -> io::Result<()> {
        let mut port = self.port.lock().await;
        port.close(Mode::Dying).await;
        *port = Port::Held(bound(self.addr)?);
        Ok(())
    }

    /// Listens again on the same port after `die` or `stop`; its caches are as they were (see `Control::forget`).
    pub async fn revive(&self) -> io::Result<()> {
        let mut port = self.port.lock().await;
        let socket = match std::mem::replace(&mut *port, Port::Closed) {
            open @ Port::Open { .. } => {
                *port = open;
                return Ok(());
            }
            Port::Held(socket) => socket,
            Port::Closed => bound(self.addr)?,
        };
        *port = Port::open(socket.listen(BACKLOG)?, &self.simulator);
        Ok(())
    }
}

fn bound(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

async fn accept(listener: TcpListener, simulator: Simulator, mut mode: watch::Receiver<Mode>) {
    let mut connections = JoinSet::new();
    while *mode.borrow_and_update() == Mode::Serving {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, simulator.clone(), mode.clone()));
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
            changed = mode.changed() => if changed.is_err() { break },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, simulator: Simulator, mut mode: watch::Receiver<Mode>) {
    // A socket that refuses the option is slower, not wrong.
    let _ = stream.set_nodelay(true);
    let line = Arc::new(Line::new(simulator.connections.fetch_add(1, Ordering::SeqCst) + 1));
    let socket = Socket { stream, line: line.clone() };
    let answer = |request| simulator.clone().answer(line.clone(), request);
    let mut served = pin!(http1::Builder::new().serve_connection(TokioIo::new(socket), service_fn(answer)));
    loop {
        match *mode.borrow_and_update() {
            Mode::Serving => {}
            Mode::Stopping => served.as_mut().graceful_shutdown(),
            Mode::Dying => return line.reset(),
        }
        tokio::select! {
            _ = served.as_mut() => return,
            changed = mode.changed() => if changed.is_err() { return },
        }
    }
}

impl Simulator {
    async fn answer(self, line: Arc<Line>, request: Request<Incoming>) -> io::Result<Response<Body>> {
        let at_ms = self.clock.now_ms();
        let (head, body) = request.into_parts();
        let body = Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(io::Error::other)?.to_bytes();
        match head.uri.path() {
            "/__control" => return Ok(self.control(&body)),
            "/__calls" => return Ok(self.calls_as_json(head.uri.query())),
            _ => {}
        }
        let arrival = Arrival::read(&head.method, &head.uri, &head.headers, &body);
        let call = entry(&head, &body, &arrival, &line, at_ms);
        // Before the call can be seen in the log: who waits for it there may release it at once.
        let releases = self.releases.subscribe();
        let (recorder, plan) = self.enter(call, &arrival, line.clone());
        if plan.delay_head_ms > 0 {
            tokio::time::sleep(Duration::from_millis(plan.delay_head_ms)).await;
        }
        if plan.hangs {
            // Ends when the client goes: the connection then drops this future, and with it the recorder.
            std::future::pending::<()>().await;
        }
        if plan.resets {
            return Err(reset(recorder, &line));
        }
        let reply = self.state().respond(&arrival, &plan, recorder.number, at_ms);
        let player = Player { ops: VecDeque::new(), hit: None, simulator: self, recorder, line, releases };
        Ok(player.play(reply, &head.method))
    }

    /// Enters a call in the log, with what the script does to it.
    fn enter(&self, mut call: Call, arrival: &Arrival, line: Arc<Line>) -> (Recorder, Plan) {
        // One lock over both, so that the numbers in the log are the order in which steps are taken.
        let mut state = self.state();
        call.did = state.take_actions(arrival);
        if !state.settings.keep_bodies {
            call.body = Bytes::new();
        }
        let plan = Plan::new(&call.did);
        let number = self.log.enter(call, state.settings.calls_max);
        drop(state);
        let (log, clock) = (self.log.clone(), self.clock.clone());
        (Recorder { log, clock, line, number, has_ended: false }, plan)
    }

    fn control(&self, body: &[u8]) -> Response<Body> {
        match serde_json::from_slice::<Control>(body) {
            Ok(control) => {
                self.apply(control);
                plain(200, "ok\n".to_owned())
            }
            Err(error) => plain(400, format!("{error}\n")),
        }
    }

    fn calls_as_json(&self, query: Option<&str>) -> Response<Body> {
        let after = query.and_then(|query| query.strip_prefix("after=")?.parse().ok()).unwrap_or(0);
        match serde_json::to_string(&self.log.after(after)) {
            Ok(calls) => plain(200, calls),
            Err(error) => plain(500, error.to_string()),
        }
    }
}

fn entry(head: &http::request::Parts, body: &Bytes, arrival: &Arrival, line: &Line, at_ms: i64) -> Call {
    let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    Call {
        number: 0,
        at_ms,
        connection: line.number,
        method: head.method.to_string(),
        path: head.uri.to_string(),
        headers: head.headers.iter().map(header).collect(),
        body: body.clone(),
        body_bytes: body.len(),
        body_sha256: hex::encode(Sha256::digest(body)),
        endpoint: arrival.endpoint,
        model: arrival.model().map(str::to_owned),
        stream: arrival.wants_stream(),
        credential: arrival.credential.clone(),
        sessions: arrival.sessions.clone(),
        did: Vec::new(),
        status: None,
        events: 0,
        terminal: false,
        usage: None,
        reported_usage: None,
        response_id: None,
        end: None,
        ended_at_ms: None,
    }
}

fn plain(status: u16, body: String) -> Response<Body> {
    let body = Full::new(Bytes::from(body)).map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response
}

fn reset(mut recorder: Recorder, line: &Line) -> io::Error {
    recorder.end(End::Reset);
    line.reset();
    io::ErrorKind::ConnectionReset.into()
}

/// Plays one program on one connection.
struct Player {
    ops: VecDeque<Op>,
    hit: Option<Hit>,
    simulator: Simulator,
    recorder: Recorder,
    line: Arc<Line>,
    releases: watch::Receiver<u64>,
}

impl Player {
    /// The response whose body this player writes.
    fn play(mut self, reply: Reply, method: &Method) -> Response<Body> {
        self.recorder.update(|call| {
            call.status = Some(reply.status);
            call.usage = reply.usage;
            call.reported_usage = reply.reported_usage;
            call.response_id = reply.response_id;
        });
        if reply.ops.is_empty() || method == Method::HEAD {
            self.recorder.end(End::Finished);
        }
        self.ops = reply.ops;
        self.hit = reply.hit;
        let body = StreamBody::new(stream::unfold(self, Self::next));
        let mut response = Response::builder().status(reply.status);
        for (name, value) in reply.headers {
            response = response.header(name, value);
        }
        if let Some(length) = reply.length {
            response = response.header("content-length", length);
        }
        // A script may name headers or a status that HTTP does not know.
        response.body(body.boxed_unsync()).unwrap_or_else(|error| plain(500, format!("bad script: {error}")))
    }

    /// The next frame of the body; each is a write of its own.
    async fn next(mut self) -> Option<(io::Result<Frame<Bytes>>, Self)> {
        loop {
            // The server flushes what it has when the body is not ready: after this, the write before is on the wire.
            yield_now().await;
            match self.ops.pop_front() {
                Some(Op::Write(bytes)) => {
                    self.before_write();
                    return Some((Ok(Frame::data(bytes)), self));
                }
                Some(Op::Wrote { terminal }) => self.recorder.wrote(terminal),
                Some(Op::Wait(ms)) => tokio::time::sleep(Duration::from_millis(ms)).await,
                Some(Op::Pause) => {
                    // Closed is impossible while the simulator is held here.
                    let _ = self.releases.changed().await;
                }
                Some(Op::Stall) => std::future::pending().await,
                Some(Op::Reset) => {
                    self.recorder.end(End::Reset);
                    self.line.reset();
                    return Some((Err(io::ErrorKind::ConnectionReset.into()), self));
                }
                None => {
                    self.recorder.end(End::Finished);
                    return None;
                }
            }
        }
    }

    fn before_write(&mut self) {
        if let Some(hit) = self.hit.take() {
            self.simulator.state().begin(&hit);
        }
        // A client may leave as soon as it has the terminal event, so this is noted before and not after the write.
        if let Some(Op::Wrote { terminal: true }) = self.ops.front() {
            self.ops.pop_front();
            self.recorder.wrote(true);
        }
        if self.ops.is_empty() {
            self.recorder.end(End::Finished);
        }
    }
}
