//! The way to an instance's node: `podvisor-cluster node` there, found by the Node object.
//!
//! Its address is the kubelet's; its port, and the digest of the only certificate that is accepted
//! from it, are in an annotation that nobody but that node and administrators can write. We show a
//! certificate of our own authority. An answer is passed on as it is, a stream byte by byte: it is
//! the node that speaks WebSocket.

pub(crate) mod pinned;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{
    TlsConnector,
    rustls::{client::ResolvesClientCert, pki_types::ServerName},
};

use crate::{
    contact::{ANNOTATION, Contact},
    https::Answer,
    shares::Shares,
    status::Failure,
};

/// How long a node may take to be connected to, and to begin its answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest answer that is passed on: lists of users and file systems are bounded by the node.
const MAX_ANSWER: usize = 1 << 20;

/// Streams beyond this are refused; and those of one namespace.
const MAX_STREAMS: usize = 1024;
const MAX_OF_NAMESPACE: usize = 256;

/// What of a WebSocket's handshake is passed on.
const TO_NODE: [HeaderName; 3] = [
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
    header::SEC_WEBSOCKET_PROTOCOL,
];
const FROM_NODE: [HeaderName; 4] = [
    header::CONNECTION,
    header::UPGRADE,
    header::SEC_WEBSOCKET_ACCEPT,
    header::SEC_WEBSOCKET_PROTOCOL,
];

/// What is asked of a node, by the end of the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    /// An action, with its options.
    Put(String, Bytes),
    /// A question.
    Get(String),
    /// A WebSocket.
    Stream(String),
}

impl Call {
    pub(crate) fn path(&self) -> String {
        match self {
            Self::Put(path, _) | Self::Get(path) | Self::Stream(path) => path.clone(),
        }
    }
}

/// A path of the node's API.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) rest: &'a str,
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            name,
            uid,
            rest,
        } = self;
        write!(f, "/v1/{namespace}/{name}/{uid}/{rest}")
    }
}

/// All nodes.
pub(crate) struct Nodes {
    client: Client,
    certificate: Arc<dyn ResolvesClientCert>,
    streams: Shares,
}

impl Nodes {
    pub(crate) fn new(client: Client, certificate: Arc<dyn ResolvesClientCert>) -> Self {
        Self {
            client,
            certificate,
            streams: Shares::new(MAX_STREAMS, MAX_OF_NAMESPACE),
        }
    }

    /// Asks a node.
    pub(crate) async fn get(&self, node: &str, path: &Path<'_>) -> Result<Answer, Failure> {
        self.call(node, Method::GET, path, Bytes::new()).await
    }

    /// Has a node do something.
    pub(crate) async fn put(
        &self,
        node: &str,
        path: &Path<'_>,
        body: Bytes,
    ) -> Result<Answer, Failure> {
        self.call(node, Method::PUT, path, body).await
    }

    async fn call(
        &self,
        node: &str,
        method: Method,
        path: &Path<'_>,
        body: Bytes,
    ) -> Result<Answer, Failure> {
        let mut connection = self.connect(node).await?;
        let answer = send(node, &mut connection, request(method, path, body)?).await?;
        pass_on(node, answer).await
    }

    /// Connects a WebSocket with a node.
    pub(crate) async fn stream(
        &self,
        node: &str,
        path: &Path<'_>,
        mut from: Request<Incoming>,
    ) -> Result<Answer, Failure> {
        let share = self.streams.take(path.namespace).ok_or_else(|| {
            Failure::too_many(format!(
                "{MAX_OF_NAMESPACE} streams are open to the namespace, or {MAX_STREAMS} \
                 altogether: try again later"
            ))
        })?;
        let mut connection = self.connect(node).await?;
        let mut to = request(Method::GET, path, Bytes::new())?;
        for (name, value) in [
            (header::CONNECTION, "Upgrade"),
            (header::UPGRADE, "websocket"),
        ] {
            to.headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        copy_headers(from.headers(), to.headers_mut(), &TO_NODE);
        let mut answer = send(node, &mut connection, to).await?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return pass_on(node, answer).await;
        }
        let mut switched = Response::new(Full::new(Bytes::new()));
        *switched.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        copy_headers(answer.headers(), switched.headers_mut(), &FROM_NODE);
        let ends = (
            hyper::upgrade::on(&mut from),
            hyper::upgrade::on(&mut answer),
        );
        tokio::spawn(async move {
            let _share = share;
            let (client, node) = match tokio::try_join!(ends.0, ends.1) {
                Ok(ends) => ends,
                Err(error) => {
                    tracing::debug!(%error, "a stream did not begin");
                    return;
                }
            };
            let (mut client, mut node) = (TokioIo::new(client), TokioIo::new(node));
            if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut node).await {
                tracing::debug!(%error, "a stream failed");
            }
        });
        Ok(switched)
    }

    async fn connect(&self, node: &str) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let (address, contact) = self.find(node).await?;
        let connection = timeout(CONNECT_TIMEOUT, self.connect_to(address, &contact)).await;
        connection
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .map_err(|error| unreachable(node, &format!("{address}: {error}")))
    }

    async fn connect_to(
        &self,
        address: SocketAddr,
        contact: &Contact,
    ) -> std::io::Result<SendRequest<Full<Bytes>>> {
        let tls = pinned::config(&contact.certificate, Arc::clone(&self.certificate))
            .map_err(std::io::Error::other)?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::IpAddress(address.ip().into());
        let stream = TlsConnector::from(Arc::new(tls))
            .connect(name, stream)
            .await?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(std::io::Error::other)?;
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    /// Where a node listens, and by what it is known.
    pub(crate) async fn find(&self, name: &str) -> Result<(SocketAddr, Contact), Failure> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = nodes
            .get_opt(name)
            .await
            .map_err(|error| Failure::of_api_server(&error))?
            .ok_or_else(|| unreachable(name, "it does not exist"))?;
        let annotations = node.metadata.annotations.unwrap_or_default();
        let contact = annotations.get(ANNOTATION).ok_or_else(|| {
            let hint = format!("it has no annotation {ANNOTATION}: start podvisor-node there");
            unreachable(name, &hint)
        })?;
        let contact: Contact = serde_json::from_str(contact)
            .map_err(|_| unreachable(name, &format!("its annotation {ANNOTATION} is invalid")))?;
        let addresses = node.status.and_then(|status| status.addresses);
        let address = addresses
            .into_iter()
            .flatten()
            .find(|address| address.type_ == "InternalIP")
            .and_then(|address| address.address.parse::<IpAddr>().ok())
            .ok_or_else(|| unreachable(name, "it has no InternalIP"))?;
        Ok((SocketAddr::new(address, contact.port), contact))
    }
}

fn unreachable(node: &str, why: &str) -> Failure {
    let node = podvisor_cluster_types::cause::shown(node);
    Failure::internal(format!("node {node} cannot be reached: {why}"))
}

fn request(method: Method, path: &Path<'_>, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
    Request::builder()
        .method(method)
        .uri(path.to_string())
        .header(header::HOST, "node")
        .body(Full::new(body))
        .map_err(|_| Failure::bad_request("the path is invalid"))
}

async fn send(
    node: &str,
    connection: &mut SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Failure> {
    match timeout(ANSWER_TIMEOUT, connection.send_request(request)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(unreachable(node, &error.to_string())),
        Err(_) => Err(unreachable(node, "it does not answer in time")),
    }
}

async fn pass_on(node: &str, answer: Response<Incoming>) -> Result<Answer, Failure> {
    let (parts, body) = answer.into_parts();
    let body = timeout(ANSWER_TIMEOUT, Limited::new(body, MAX_ANSWER).collect()).await;
    let Ok(Ok(body)) = body else {
        return Err(unreachable(node, "its answer is too long, or ends early"));
    };
    let mut answer = Response::new(Full::new(body.to_bytes()));
    *answer.status_mut() = parts.status;
    copy_headers(
        &parts.headers,
        answer.headers_mut(),
        &[header::CONTENT_TYPE],
    );
    Ok(answer)
}

fn copy_headers(from: &http::HeaderMap, to: &mut http::HeaderMap, names: &[HeaderName]) {
    for name in names {
        for value in from.get_all(name) {
            to.append(name.clone(), value.clone());
        }
    }
}
