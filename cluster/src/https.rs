//! The HTTPS server that the components share: bounded in connections (`places`), in the size of
//! a request and in its time.

pub(crate) mod places;

use std::{convert::Infallible, future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::{
    body::{Body, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::Client;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    task::JoinSet,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::CertificateDer},
};
use x509_parser::prelude::{FromDer, X509Certificate};

use places::{Place, Places};

/// Connections of those that are known, and of others.
const MAX_KNOWN: usize = 512;
const MAX_UNKNOWN: usize = 128;

/// How long a connection may take until it is known whom it comes from.
const RECOGNIZE: Duration = Duration::from_secs(10);

/// An update carries an object twice, and an object has at most 1.5 MiB.
pub(crate) const MAX_BODY: usize = 8 << 20;

/// Longer bodies are read a few at a time: all connections' together would not fit into memory.
const SMALL_BODY: usize = 256 << 10;
static LARGE_BODIES: Semaphore = Semaphore::const_new(8);

/// How long a handshake, the header of a request or its body may take.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// Where a server of the cluster listens, and where it belongs.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[non_exhaustive]
pub struct Listen {
    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Namespace that the components run in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "podvisor")]
    pub namespace: String,
}

impl Listen {
    /// Finds the API server, and takes the address.
    pub(crate) async fn start(&self) -> anyhow::Result<(Client, TcpListener)> {
        let client = Client::try_default()
            .await
            .context("failed to find an API server")?;
        let listener = TcpListener::bind(self.listen)
            .await
            .with_context(|| format!("failed to listen on {}", self.listen))?;
        Ok((client, listener))
    }
}

/// What handlers answer.
pub(crate) type Answer = Response<Full<Bytes>>;

/// Who is at the other end of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// The certificates that it showed, which are verified.
    pub(crate) certificates: Vec<CertificateDer<'static>>,
    place: Arc<Place>,
}

impl Peer {
    /// The other end is one that is served: its connection is not closed in favour of others.
    pub(crate) fn recognize(&self) {
        self.place.recognize();
    }

    /// One that showed these certificates.
    #[cfg(test)]
    pub(crate) fn with(certificates: Vec<CertificateDer<'static>>) -> Self {
        let (place, _) = Places::new(1, 1).enter(std::net::Ipv4Addr::LOCALHOST.into());
        Self {
            certificates,
            place: Arc::new(place),
        }
    }

    /// The common name of its certificate.
    pub(crate) fn common_name(&self) -> Option<String> {
        let (_, certificate) = X509Certificate::from_der(self.certificates.first()?).ok()?;
        let name = certificate.subject().iter_common_name().next()?;
        name.as_str().ok().map(str::to_owned)
    }
}

/// Serves `handle` until `stop` is ready; then connections may end what they do.
///
/// A connection is closed soon unless `handle` recognizes the peer ([`Peer::recognize`]).
pub(crate) async fn serve<H, F, B>(
    listener: TcpListener,
    tls: ServerConfig,
    handle: H,
    stop: impl Future<Output = ()>,
) where
    H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let places = Places::new(MAX_UNKNOWN, MAX_KNOWN);
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let mut tasks = JoinSet::new();
    tokio::pin!(stop);
    loop {
        let (stream, address) = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    // No descriptors, for example: the next one needs time.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        while tasks.try_join_next().is_some() {}
        let (place, loss) = places.enter(address.ip());
        let connection = connection(acceptor.clone(), stream, address, place, handle.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = loss.wait(RECOGNIZE) => {
                    tracing::debug!(%address, "a connection of nobody known was closed");
                }
            }
        });
    }
    drop(listener);
    let finish = async { while tasks.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(READ_TIMEOUT, finish).await;
}

/// Serves one connection to its end.
async fn connection<H, F, B>(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    place: Place,
    handle: H,
) where
    H: Fn(Request<Incoming>, Peer) -> F,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let handshake = tokio::time::timeout(READ_TIMEOUT, acceptor.accept(stream)).await;
    let Ok(Ok(stream)) = handshake else {
        tracing::debug!(%address, "a TLS handshake failed");
        return;
    };
    let certificates = stream.get_ref().1.peer_certificates();
    let certificates = certificates
        .into_iter()
        .flatten()
        .map(|certificate| certificate.clone().into_owned())
        .collect();
    let peer = Peer {
        certificates,
        place: Arc::new(place),
    };
    let service = service_fn(move |request| {
        let answer = handle(request, peer.clone());
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(READ_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%address, %error, "a connection failed");
    }
}

/// Reads the body of a request, within its bounds of size and time.
pub(crate) async fn read_body(body: Incoming) -> Result<Bytes, Answer> {
    match tokio::time::timeout(READ_TIMEOUT, collect(body)).await {
        Ok(Some(body)) => Ok(body),
        Ok(None) => Err(text(
            StatusCode::PAYLOAD_TOO_LARGE,
            "the request is too large",
        )),
        Err(_) => Err(text(
            StatusCode::REQUEST_TIMEOUT,
            "the request did not arrive in time",
        )),
    }
}

/// Returns a body; `None` if it is too large, or ends early.
async fn collect(mut body: Incoming) -> Option<Bytes> {
    let mut bytes = BytesMut::new();
    let mut turn = None;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else {
            continue;
        };
        let size = bytes.len().saturating_add(data.len());
        if size > MAX_BODY {
            return None;
        }
        if size > SMALL_BODY && turn.is_none() {
            turn = Some(LARGE_BODIES.acquire().await.ok()?);
        }
        bytes.extend_from_slice(&data);
    }
    Some(bytes.freeze())
}

/// A body whose pieces come as they are made, and which ends with their sender. An error breaks the
/// connection off: the other side must not take it for the end.
pub(crate) fn pieces(
    mut pieces: mpsc::Receiver<io::Result<Bytes>>,
) -> impl Body<Data = Bytes, Error = io::Error> + Send + Unpin {
    StreamBody::new(stream::poll_fn(move |context| {
        let piece = pieces.poll_recv(context);
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }))
}

/// How long the rest of a refused body is read, and how much of it.
const LINGER: Duration = Duration::from_secs(10);
const MAX_LINGER: usize = 1 << 30;

/// Reads the rest of a body that was refused, within bounds: a connection that is closed while the
/// other side sends loses the answer that says why.
pub(crate) fn linger(mut body: Incoming) {
    tokio::spawn(tokio::time::timeout(LINGER, async move {
        let mut read = 0;
        while read < MAX_LINGER
            && let Some(Ok(frame)) = body.frame().await
        {
            read += frame.data_ref().map_or(0, Bytes::len);
        }
    }));
}

/// Ends what passes a body on when its rest is not read any longer.
pub(crate) async fn lingered(work: tokio::task::JoinHandle<()>) {
    let end = work.abort_handle();
    if tokio::time::timeout(LINGER, work).await.is_err() {
        end.abort();
    }
}

/// An answer without content: done, or begun.
pub(crate) fn accepted() -> Answer {
    let mut answer = Response::new(Full::new(Bytes::new()));
    *answer.status_mut() = StatusCode::ACCEPTED;
    answer
}

/// An answer of plain text.
pub(crate) fn text(status: StatusCode, text: &str) -> Answer {
    answer(
        status,
        "text/plain",
        Bytes::copy_from_slice(text.as_bytes()),
    )
}

/// An answer of JSON.
pub(crate) fn json(status: StatusCode, value: &serde_json::Value) -> Answer {
    answer(status, "application/json", Bytes::from(value.to_string()))
}

fn answer(status: StatusCode, content_type: &'static str, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(content_type),
    );
    answer
}

/// Is ready when the process is told to end.
pub(crate) async fn told_to_end() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        },
        Err(error) => {
            tracing::warn!(%error, "failed to listen for SIGTERM");
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}

#[cfg(test)]
#[path = "https_tests.rs"]
mod tests;
