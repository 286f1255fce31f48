//! The agent's sockets, which accept the host's calls and streams.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use podvisor_agent_protocol::api::{Agent, create_agent};
use podvisor_agent_protocol::{HOST_CID, READY_PORT, RPC_PORT, STDIO_PORT, ready_line};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};
use ttrpc::asynchronous::{Server, transport};

use crate::stdio::{Connection, StreamRegistry};

/// How long to wait if a connection cannot be accepted for lack of resources.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The sockets that the host connects to.
#[derive(Debug)]
pub struct Listeners {
    rpc: Listener,
    stdio: Listener,
}

#[derive(Debug)]
enum Listener {
    Vsock(VsockListener),
    Unix(UnixListener),
}

impl Listeners {
    /// Listens on the guest's vsock ports.
    ///
    /// # Errors
    ///
    /// If the guest has no vsock device, or the ports are in use.
    pub fn vsock() -> io::Result<Self> {
        let listen = |port| VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port));
        Ok(Self {
            rpc: Listener::Vsock(listen(RPC_PORT)?),
            stdio: Listener::Vsock(listen(STDIO_PORT)?),
        })
    }

    /// Uses Unix sockets instead of vsock ports, for an agent that does not run in a guest.
    #[must_use]
    pub fn unix(rpc: UnixListener, stdio: UnixListener) -> Self {
        Self {
            rpc: Listener::Unix(rpc),
            stdio: Listener::Unix(stdio),
        }
    }
}

impl Listener {
    /// Accepts the next connection of the host.
    async fn accept(&self) -> io::Result<Connection> {
        loop {
            match self.accept_once().await {
                Err(error) if is_temporary(&error) => {
                    tracing::warn!(%error, "cannot take a connection");
                    // Nothing notifies us when descriptors or memory become available again.
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
                result => return result,
            }
        }
    }

    /// Containers can open vsock connections too; those from within the guest are closed.
    async fn accept_once(&self) -> io::Result<Connection> {
        loop {
            match self {
                Self::Unix(listener) => {
                    let (stream, _) = listener.accept().await?;
                    return Ok(Box::new(stream));
                }
                Self::Vsock(listener) => {
                    let (stream, peer) =
                        std::future::poll_fn(|cx| listener.poll_accept(cx)).await?;
                    if peer.cid() == HOST_CID {
                        return Ok(Box::new(stream));
                    }
                    tracing::warn!(
                        cid = peer.cid(),
                        "rejected a connection that is not from the host"
                    );
                }
            }
        }
    }
}

/// Errors that do not concern the listener: accept(2) also reports errors of a connection that is
/// gone, and of a process with too many open files.
fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNABORTED
                | libc::ECONNRESET
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOBUFS
                | libc::ENOMEM
        )
    )
}

/// Serves calls and streams; ends only with an error.
pub async fn serve(
    listeners: Listeners,
    agent: Arc<dyn Agent + Send + Sync>,
    hub: StreamRegistry,
) -> io::Error {
    let Listeners { rpc, stdio } = listeners;
    let calls = stream::unfold(rpc, |rpc| async move {
        let accepted = rpc.accept().await;
        Some((accepted, rpc))
    });
    let mut server = Server::new()
        .add_listener(transport::Listener::new(calls))
        .register_service(create_agent(agent));
    if let Err(error) = server.start().await {
        return io::Error::other(error);
    }
    loop {
        match stdio.accept().await {
            Ok(connection) => {
                let hub = hub.clone();
                tokio::spawn(async move { hub.greet(connection).await });
            }
            Err(error) => return error,
        }
    }
}

/// Tells the host that the guest accepts connections.
///
/// # Errors
///
/// If the host does not listen.
pub async fn announce() -> io::Result<()> {
    let mut host = VsockStream::connect(VsockAddr::new(HOST_CID, READY_PORT)).await?;
    host.write_all(ready_line().as_bytes()).await
}
