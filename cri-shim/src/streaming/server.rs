//! The HTTP server that clients open their URLs at.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, AsHeaderName, HeaderMap, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tracing::{debug, warn};

use super::backend::{AttachRequest, Backend, ExecRequest, PortForwardRequest};
use super::command::CommandRequest;
use super::spdy::session;
use super::status::Version;
use super::token::{TokenError, Tokens};
use super::tunnel;
use super::websocket::{self, COMMAND_PROTOCOLS, PORT_PROTOCOLS, PortProtocol};
use crate::connection_limiter::{ConnectionLimiter, ConnectionSlot};

/// Most connections at the same time that have redeemed a token.
const MAX_SESSIONS: usize = 4096;

/// Most connections at the same time that have not: any client that reaches the address can open
/// some.
pub(super) const MAX_UNAUTHENTICATED: usize = 256;

/// How long a client may take to send its request's headers.
const REQUEST_HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// The header with the sub-protocols that clients offer for a SPDY connection.
const OFFERED: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// The header with the supported sub-protocols, if none of the offers is.
const ACCEPTED: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");

/// The versions of a command's channels over SPDY.
const SPDY_VERSIONS: &[(&str, Version)] = &[
    ("v4.channel.k8s.io", Version::V4),
    ("v3.channel.k8s.io", Version::V3),
    ("v2.channel.k8s.io", Version::V2),
    ("channel.k8s.io", Version::V1),
];

const SPDY_PORTS: &str = "portforward.k8s.io";

/// The reason why no URL was created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum StreamingError {
    /// The server's address cannot be used.
    #[error("failed to listen on {address} for streams")]
    Bind {
        /// The address.
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// A request is unusable for any client.
    #[error("{0}")]
    Invalid(&'static str),
    /// No token was created.
    #[error(transparent)]
    Token(#[from] TokenError),
}

/// The request that a token stands for.
#[derive(Debug)]
enum Waiting {
    Command(CommandRequest),
    Ports(PortForwardRequest),
}

struct Shared {
    tokens: Tokens<Waiting>,
    backend: Arc<dyn Backend>,
    places: Arc<Semaphore>,
}

/// A server of streams, which runs until the program's runtime ends.
pub(crate) struct Streaming {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Streaming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streaming")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Streaming {
    /// Listens on `address` (port 0: any free port) and serves clients from now on.
    ///
    /// # Errors
    /// [`StreamingError::Bind`].
    pub(crate) async fn bind(
        address: SocketAddr,
        backend: Arc<dyn Backend>,
    ) -> Result<Self, StreamingError> {
        let failed = |source| StreamingError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            tokens: Tokens::new(),
            backend,
            places: Arc::new(Semaphore::new(MAX_SESSIONS)),
        });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { address, shared })
    }

    /// Returns a URL for a command's streams.
    ///
    /// # Errors
    /// See [`StreamingError`].
    pub(crate) fn exec(&self, request: ExecRequest) -> Result<String, StreamingError> {
        check(request.tty, [request.stdin, request.stdout, request.stderr])?;
        if request.command.is_empty() {
            return Err(StreamingError::Invalid("there is no command to execute"));
        }
        self.url("exec", Waiting::Command(CommandRequest::Exec(request)))
    }

    /// Returns a URL for a container's streams.
    ///
    /// # Errors
    /// See [`StreamingError`].
    pub(crate) fn attach(&self, request: AttachRequest) -> Result<String, StreamingError> {
        check(request.tty, [request.stdin, request.stdout, request.stderr])?;
        self.url("attach", Waiting::Command(CommandRequest::Attach(request)))
    }

    /// Returns a URL for a pod's ports.
    ///
    /// # Errors
    /// See [`StreamingError`].
    pub(crate) fn port_forward(
        &self,
        request: PortForwardRequest,
    ) -> Result<String, StreamingError> {
        self.url("portforward", Waiting::Ports(request))
    }

    fn url(&self, kind: &str, waiting: Waiting) -> Result<String, StreamingError> {
        let token = self.shared.tokens.issue(waiting)?;
        Ok(format!("http://{}/{kind}/{token}", self.address))
    }
}

fn check(tty: bool, [stdin, stdout, stderr]: [bool; 3]) -> Result<(), StreamingError> {
    if tty && stderr {
        let reason =
            "a terminal has no standard error of its own: tty and stderr exclude each other";
        return Err(StreamingError::Invalid(reason));
    }
    if !(stdin || stdout || stderr) {
        return Err(StreamingError::Invalid(
            "one of stdin, stdout and stderr must be asked for",
        ));
    }
    Ok(())
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let strangers = ConnectionLimiter::new(MAX_UNAUTHENTICATED);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let shared = Arc::clone(&shared);
                strangers.spawn(|stranger| serve(stream, shared, stranger));
            }
            Err(error) => {
                // Usually too few descriptors: open connections must end first.
                warn!(%error, "failed to accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>, stranger: ConnectionSlot) {
    // Terminals echo single characters.
    let _ = stream.set_nodelay(true);
    let stranger = Mutex::new(Some(stranger));
    let service = service_fn(move |request| {
        let response = answer(&shared, request, &stranger);
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        debug!(%error, "a client of streams");
    }
}

type Answer = Response<Full<Bytes>>;

/// A response after which the connection is closed: the client can request nothing else.
fn refused(status: StatusCode, why: &'static str) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from_static(why.as_bytes())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The place of a session, until this is dropped.
type Session = OwnedSemaphorePermit;

/// Answers a request. `stranger` is the connection's until it redeems a token.
fn answer(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    stranger: &Mutex<Option<ConnectionSlot>>,
) -> Answer {
    if request.method() != Method::GET && request.method() != Method::POST {
        return refused(StatusCode::METHOD_NOT_ALLOWED, "GET or POST\n");
    }
    let mut parts = request.uri().path().trim_start_matches('/').splitn(2, '/');
    let (kind, token) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let Some(upgrade) = upgrade(request.headers()) else {
        let why = "streams are SPDY/3.1 or a WebSocket: ask for an upgrade to one of them\n";
        return refused(StatusCode::BAD_REQUEST, why);
    };
    let Ok(session) = Arc::clone(&shared.places).try_acquire_owned() else {
        let why = "too many streams are open: end some and try again\n";
        return refused(StatusCode::SERVICE_UNAVAILABLE, why);
    };
    let waiting = shared.tokens.redeem(token);
    if waiting.is_some() {
        let mut stranger = stranger.lock().unwrap_or_else(PoisonError::into_inner);
        *stranger = None;
    }
    match (kind, waiting, upgrade) {
        ("exec" | "attach", Some(Waiting::Command(command)), Upgrade::Spdy) => {
            spdy_command(shared, request, command, session)
        }
        ("portforward", Some(Waiting::Ports(ports)), Upgrade::Spdy) => {
            spdy_ports(shared, request, ports, session)
        }
        ("exec" | "attach", Some(Waiting::Command(command)), Upgrade::WebSocket) => {
            websocket_command(shared, request, command, session)
        }
        ("portforward", Some(Waiting::Ports(ports)), Upgrade::WebSocket) => {
            websocket_ports(shared, request, ports, session)
        }
        _ => {
            let why = "no such stream: its URL is good once, for a minute\n";
            refused(StatusCode::NOT_FOUND, why)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Upgrade {
    Spdy,
    WebSocket,
}

fn upgrade(headers: &HeaderMap) -> Option<Upgrade> {
    let mut wanted = values(headers, header::UPGRADE);
    wanted.find_map(|value| match value.to_ascii_lowercase().as_str() {
        "spdy/3.1" => Some(Upgrade::Spdy),
        "websocket" => Some(Upgrade::WebSocket),
        _ => None,
    })
}

/// Returns the values of all headers of a name, which may be lists themselves.
fn values(headers: &HeaderMap, name: impl AsHeaderName) -> impl Iterator<Item = &str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|value| !value.is_empty())
}

/// Returns the first of the client's offers that the server supports; a client that offers nothing
/// is older than the versions.
fn negotiate<'o, T: Copy>(
    offers: impl Iterator<Item = &'o str>,
    known: &[(&'static str, T)],
    silent: (&'static str, T),
) -> Option<(&'static str, T)> {
    let mut is_silent = true;
    for offer in offers {
        is_silent = false;
        if let Some(found) = known.iter().find(|(name, _)| *name == offer) {
            return Some(*found);
        }
    }
    is_silent.then_some(silent)
}

/// The response that switches a connection to another protocol.
fn switching(protocol: &'static str, extra: Option<(HeaderName, HeaderValue)>) -> Answer {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(protocol));
    if let Some((name, value)) = extra {
        headers.insert(name, value);
    }
    response
}

fn spdy(chosen: &'static str) -> Answer {
    let chosen = HeaderValue::from_static(chosen);
    switching("SPDY/3.1", Some((OFFERED, chosen)))
}

fn unsupported(known: &[&'static str]) -> Answer {
    let why = "none of the offered stream protocols is known here\n";
    let mut response = refused(StatusCode::FORBIDDEN, why);
    for name in known {
        let name = HeaderValue::from_static(name);
        response.headers_mut().append(ACCEPTED, name);
    }
    response
}

/// Runs `work` on the upgraded connection, once the client has got the response.
fn upgraded<W>(
    request: Request<Incoming>,
    session: Session,
    work: impl FnOnce(TokioIo<hyper::upgrade::Upgraded>) -> W + Send + 'static,
) where
    W: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        match hyper::upgrade::on(request).await {
            Ok(io) => work(TokioIo::new(io)).await,
            Err(error) => debug!(%error, "a client did not take its upgrade"),
        }
        drop(session);
    });
}

fn spdy_command(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    command: CommandRequest,
    session: Session,
) -> Answer {
    let offers = values(request.headers(), OFFERED);
    let Some((name, version)) = negotiate(offers, SPDY_VERSIONS, ("", Version::V1)) else {
        let names: Vec<_> = SPDY_VERSIONS.iter().map(|(name, _)| *name).collect();
        return unsupported(&names);
    };
    let backend = Arc::clone(&shared.backend);
    upgraded(request, session, move |io| {
        session::command(io, backend, command, version)
    });
    spdy(name)
}

fn spdy_ports(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    ports: PortForwardRequest,
    session: Session,
) -> Answer {
    let offers = values(request.headers(), OFFERED);
    let known = [(SPDY_PORTS, ())];
    if negotiate(offers, &known, known[0]).is_none() {
        return unsupported(&[SPDY_PORTS]);
    }
    let backend = Arc::clone(&shared.backend);
    upgraded(request, session, move |io| {
        session::port_forward(io, backend, ports)
    });
    spdy(SPDY_PORTS)
}

/// The response of a WebSocket's handshake; `None` if the request is not one.
fn handshake(headers: &HeaderMap, chosen: &'static str) -> Option<Answer> {
    let key = headers.get(header::SEC_WEBSOCKET_KEY)?;
    let accept = HeaderValue::from_str(&derive_accept_key(key.as_bytes())).ok()?;
    let mut response = switching("websocket", Some((header::SEC_WEBSOCKET_ACCEPT, accept)));
    if !chosen.is_empty() {
        let chosen = HeaderValue::from_static(chosen);
        let name = header::SEC_WEBSOCKET_PROTOCOL;
        response.headers_mut().insert(name, chosen);
    }
    Some(response)
}

const NO_HANDSHAKE: &str = "the WebSocket's handshake lacks its key\n";

fn websocket_command(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    command: CommandRequest,
    session: Session,
) -> Answer {
    let known: Vec<_> = COMMAND_PROTOCOLS
        .iter()
        .map(|&(name, version, encoding)| (name, (version, encoding)))
        .collect();
    let offers = values(request.headers(), header::SEC_WEBSOCKET_PROTOCOL);
    let silent = ("", (Version::V1, websocket::Encoding::Binary));
    let Some((name, protocol)) = negotiate(offers, &known, silent) else {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        return unsupported(&names);
    };
    let Some(response) = handshake(request.headers(), name) else {
        return refused(StatusCode::BAD_REQUEST, NO_HANDSHAKE);
    };
    let backend = Arc::clone(&shared.backend);
    upgraded(request, session, move |io| {
        websocket::command(io, backend, command, protocol)
    });
    response
}

fn websocket_ports(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    mut ports: PortForwardRequest,
    session: Session,
) -> Answer {
    let offers = values(request.headers(), header::SEC_WEBSOCKET_PROTOCOL);
    let silent = ("", PortProtocol::Channels(websocket::Encoding::Binary));
    let Some((name, protocol)) = negotiate(offers, PORT_PROTOCOLS, silent) else {
        let names: Vec<_> = PORT_PROTOCOLS.iter().map(|(name, _)| *name).collect();
        return unsupported(&names);
    };
    // Streams of SPDY have their ports in their headers.
    if protocol != PortProtocol::Spdy {
        if ports.ports.is_empty() {
            ports.ports = query_ports(request.uri().query().unwrap_or(""));
        }
        if ports.ports.is_empty() {
            return refused(
                StatusCode::BAD_REQUEST,
                "which ports? (?port=80&port=443)\n",
            );
        }
    }
    let Some(response) = handshake(request.headers(), name) else {
        return refused(StatusCode::BAD_REQUEST, NO_HANDSHAKE);
    };
    let backend = Arc::clone(&shared.backend);
    match protocol {
        PortProtocol::Channels(encoding) => upgraded(request, session, move |io| {
            websocket::port_forward(io, backend, ports, encoding)
        }),
        PortProtocol::Spdy => upgraded(request, session, move |io| {
            tunnel::port_forward(io, backend, ports)
        }),
    }
    response
}

/// Parses `port=80&port=443,8080`.
fn query_ports(query: &str) -> Vec<u16> {
    query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("port="))
        .flat_map(|list| list.split(','))
        .filter_map(|port| port.parse().ok())
        .filter(|port| *port > 0)
        .collect()
}
