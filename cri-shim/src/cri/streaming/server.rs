//! The HTTP server: one connection is one exec, attach or port-forward.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::http::{self, Request};
use super::tokens::Tokens;
use super::{StreamError, Target, port_forward, remote_command};
use crate::cri::error::{CriError, Result};
use crate::cri::node::Node;
use crate::sandbox::random_id;

/// How long a client may take for its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The server's address and the URLs that are good for something.
#[derive(Debug)]
pub(in crate::cri) struct StreamingServer {
    address: SocketAddr,
    tokens: Tokens,
}

impl StreamingServer {
    /// Binds to a free port of the loopback: who streams is on this node.
    pub(in crate::cri) async fn bind() -> io::Result<(Self, TcpListener)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let server = Self {
            address: listener.local_addr()?,
            tokens: Tokens::default(),
        };
        Ok((server, listener))
    }

    /// A URL that is good for `target`, once.
    pub(in crate::cri) fn url(&self, target: Target) -> Result<String> {
        let kind = match target {
            Target::Exec(_) => "exec",
            Target::Attach(_) => "attach",
            Target::PortForward { .. } => "portforward",
        };
        let token = random_id().map_err(CriError::host("make up a token"))?;
        let url = format!("http://{}/{kind}/{token}", self.address);
        match self.tokens.add(token, target) {
            true => Ok(url),
            false => Err(CriError::TooManyStreams),
        }
    }
}

/// Serves connections until dropped.
pub(in crate::cri) async fn serve(node: Arc<Node>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((io, _)) => {
                let node = Arc::clone(&node);
                tokio::spawn(async move {
                    if let Err(error) = connection(&node, io).await {
                        debug!(%error, "a stream ended early");
                    }
                });
            }
            Err(error) => {
                warn!(%error, "no connection can be accepted for now");
                // Out of descriptors: some are closed meanwhile.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(node: &Arc<Node>, mut io: TcpStream) -> Result<(), StreamError> {
    io.set_nodelay(true)?;
    let request = match timeout(REQUEST_TIMEOUT, Request::read(&mut io)).await {
        Ok(request) => request?,
        Err(_) => return Err(StreamError::Http("it did not come in time")),
    };
    let refuse = async |mut io: TcpStream, status: &str, message: &str| {
        http::refuse(&mut io, status, "", message).await?;
        Ok(())
    };
    if !matches!(request.method.as_str(), "GET" | "POST") {
        return refuse(io, "405 Method Not Allowed", "GET or POST").await;
    }
    if !request.upgrades_to("SPDY/3.1") {
        return refuse(
            io,
            "400 Bad Request",
            "the request must upgrade to SPDY/3.1",
        )
        .await;
    }
    let token = request.path.rsplit('/').next().unwrap_or_default();
    let Some(target) = node.streams.tokens.take(token) else {
        return refuse(io, "404 Not Found", "the URL is used, expired or unknown").await;
    };
    let known = match target {
        Target::PortForward { .. } => port_forward::PROTOCOLS,
        _ => remote_command::PROTOCOLS,
    };
    let mut offered = request.values("x-stream-protocol-version").peekable();
    let chosen = match offered.peek() {
        // Clients that say nothing speak the oldest.
        None => known.last().copied(),
        Some(_) => offered.find_map(|name| known.iter().copied().find(|k| *k == name)),
    };
    let Some(protocol) = chosen else {
        let accepted: String = known
            .iter()
            .map(|name| format!("X-Accepted-Stream-Protocol-Versions: {name}\r\n"))
            .collect();
        let message = format!(
            "none of the protocols is known; known are {}",
            known.join(", ")
        );
        return Ok(http::refuse(&mut io, "403 Forbidden", &accepted, &message).await?);
    };
    http::switch(&mut io, protocol).await?;
    match target {
        Target::Exec(request) => remote_command::exec(node, request, protocol, io).await,
        Target::Attach(request) => remote_command::attach(node, request, protocol, io).await,
        Target::PortForward { pod } => port_forward::serve(node, &pod, io).await,
    }
}
