//! The connection to a server: made and made again in the background, asked within a bound.
//!
//! The client keeps what was sent while it was away and never fails a request whose connection went (EVENTLOG.md,
//! C.2). So nothing is sent without a connection, and an answer is awaited no longer than the connection lasts.
//!
//! A connection can stand and be of no use: a server that was cut off from the others of its cluster answers pings, and
//! neither finds the stream's leader nor sees it grow. So a watchdog goes by the work: where none has been done for
//! [`STALL`] though it was tried, the connection is given up for another, to any of the servers.

use std::io;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, HeaderMap, Message, Request, RequestErrorKind, Subscriber};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::log::Cause;

/// How long a call waits for a connection that is not there.
const CONNECT_WAIT: Duration = Duration::from_millis(500);
/// How long a server may take to greet; a frozen one accepts and says nothing.
const GREETING: Duration = Duration::from_secs(2);
/// How often a silent server is asked for a sign of life; without the third in a row another one is tried.
const PING_EVERY: Duration = Duration::from_secs(1);
/// The wait between two tries to connect grows by this with each.
const RETRY_STEP: Duration = Duration::from_millis(50);
/// The longest of these waits.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// How long a connection may stand without being of use before another one is made.
pub const STALL: Duration = Duration::from_secs(5);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No server is connected.
    #[error("not connected to a server")]
    Away,
    /// The connection ended first. What was asked may have been done.
    #[error("the connection was lost before the answer")]
    Lost,
    /// The server is connected and says nothing. What was asked may be done yet.
    #[error("no answer in {} ms", .0.as_millis())]
    Silent(Duration),
    /// Nobody serves the stream: it is gone, or between leaders, or JetStream is off.
    #[error("no server answers for the stream")]
    NoResponders,
    /// The server takes no message of this size.
    #[error("the frame is larger than the server takes")]
    TooLarge(#[source] Cause),
    /// The client failed in another way.
    #[error("the connection failed")]
    Client(#[source] Cause),
}

/// Which connection there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    connected: bool,
    /// How many there have been: it names the connection.
    count: u64,
}

#[derive(Debug)]
pub(super) struct Link {
    servers: Vec<String>,
    client: Client,
    state: watch::Receiver<State>,
    /// The connections of clients before this one.
    earlier: u64,
    /// The connection that is of no use, and since when.
    useless: Option<(State, Instant)>,
}

impl Link {
    /// Begins to connect to one of `servers`; an error is of their URLs.
    pub(super) async fn open(servers: Vec<String>) -> io::Result<Self> {
        let (client, state) = connect(&servers).await?;
        Ok(Self { servers, client, state, earlier: 0, useless: None })
    }

    /// Waits a moment for a connection, and names it: another one has another name.
    pub(super) async fn connected(&mut self) -> Result<u64, LinkError> {
        if self.has_stalled() {
            tracing::warn!("the log's server is connected and of no use: connecting anew");
            self.replace().await?;
        } else if self.state.has_changed().is_err() {
            self.replace().await?;
        }
        let connected = timeout(CONNECT_WAIT, self.state.wait_for(|state| state.connected)).await;
        match connected {
            Ok(Ok(state)) => Ok(self.earlier + state.count),
            Ok(Err(_)) | Err(_) => Err(LinkError::Away),
        }
    }

    /// Notes that the connection did what it is for.
    pub(super) fn worked(&mut self) {
        self.useless = None;
    }

    /// Notes that something was asked of the connection and came to nothing.
    pub(super) fn came_to_nothing(&mut self) {
        let now = *self.state.borrow();
        if self.useless.is_none_or(|(connection, _)| connection != now) {
            self.useless = Some((now, Instant::now()));
        }
    }

    /// Whether the connection that there is has been of no use for [`STALL`].
    pub(super) fn has_stalled(&self) -> bool {
        let now = *self.state.borrow();
        self.useless.is_some_and(|(connection, since)| connection == now && since.elapsed() >= STALL)
    }

    /// Begins again with a new client: the one before gave up for good, as it does when a server turns it away, or is of
    /// no use.
    async fn replace(&mut self) -> Result<(), LinkError> {
        let earlier = self.earlier + self.state.borrow().count;
        let (client, state) = connect(&self.servers).await.map_err(|error| LinkError::Client(error.into()))?;
        let servers = std::mem::take(&mut self.servers);
        *self = Self { servers, client, state, earlier, useless: None };
        Ok(())
    }

    /// The version that the connected server says it has.
    pub(super) fn server_version(&self) -> String {
        self.client.server_info().version
    }

    /// Sends `payload` and waits for one answer, at most for `bound`.
    pub(super) async fn request(
        &mut self,
        subject: String,
        headers: HeaderMap,
        payload: Vec<u8>,
        bound: Duration,
    ) -> Result<Message, LinkError> {
        let request = Request::new().headers(headers).payload(payload.into()).timeout(None);
        let client = self.client.clone();
        self.within(bound, async {
            client.send_request(subject, request).await.map_err(|error| match error.kind() {
                RequestErrorKind::NoResponders => LinkError::NoResponders,
                RequestErrorKind::MaxPayloadExceeded => LinkError::TooLarge(error.into()),
                RequestErrorKind::TimedOut | RequestErrorKind::InvalidSubject | RequestErrorKind::Other => {
                    LinkError::Client(error.into())
                }
            })
        })
        .await
    }

    /// Sends `payload` and gives the place where any number of answers arrive.
    pub(super) async fn ask(
        &mut self,
        subject: String,
        payload: Vec<u8>,
        bound: Duration,
    ) -> Result<Subscriber, LinkError> {
        let failed = |error: Cause| LinkError::Client(error);
        let client = self.client.clone();
        self.within(bound, async {
            let inbox = client.new_inbox();
            let answers = client.subscribe(inbox.clone()).await.map_err(|error| failed(error.into()))?;
            let sent = client.publish_with_reply(subject, inbox, payload.into()).await;
            sent.map_err(|error| failed(error.into()))?;
            Ok(answers)
        })
        .await
    }

    /// What `work` gives, unless the bound passes or the connection ends first.
    pub(super) async fn within<T>(
        &mut self,
        bound: Duration,
        work: impl Future<Output = Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        let mut state = self.state.clone();
        let now = *state.borrow_and_update();
        if !now.connected {
            return Err(LinkError::Away);
        }
        let done = tokio::select! {
            done = timeout(bound, work) => done.unwrap_or(Err(LinkError::Silent(bound))),
            _ = state.wait_for(|state| *state != now) => Err(LinkError::Lost),
        };
        if let Err(LinkError::Silent(_) | LinkError::NoResponders) = &done {
            self.came_to_nothing();
        }
        done
    }
}

async fn connect(servers: &[String]) -> io::Result<(Client, watch::Receiver<State>)> {
    let (tell, state) = watch::channel(State::default());
    let options = ConnectOptions::new()
        .name("waybill")
        .retry_on_initial_connect()
        .connection_timeout(GREETING)
        .ping_interval(PING_EVERY)
        .reconnect_delay_callback(|tries| {
            let waits = u32::try_from(tries).unwrap_or(u32::MAX).saturating_sub(1);
            RETRY_STEP.saturating_mul(waits).min(RETRY_MAX)
        })
        .event_callback(move |event| {
            match event {
                Event::Connected => {
                    tell.send_modify(|state| *state = State { connected: true, count: state.count + 1 })
                }
                Event::Disconnected | Event::Closed => tell.send_modify(|state| state.connected = false),
                _ => {}
            }
            std::future::ready(())
        });
    let client = options.connect(servers).await.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Ok((client, state))
}
