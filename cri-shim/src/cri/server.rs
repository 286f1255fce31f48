//! The gRPC socket and its server.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use podvisor_cri_messages::{ImageServiceServer, RuntimeServiceServer};
use podvisor_node_api::NodeServer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing::info;

use super::call_layer::{AroundCalls, Calls};
use super::config::ServeConfig;
use super::error::CriError;
use super::health;
use super::host_runtime::{HostRuntime, WithHost, forward_events};
use super::images::Images;
use super::node::Node;
use super::node_api::VmCalls;
use super::runtime::Runtime;
use super::streaming_backend::Streams;
use crate::path_authority::PathAuthority;
use crate::streaming::{Streaming, StreamingError};

/// Maximum message size in both directions: the kubelet's own limit.
const MESSAGE_BYTES: usize = 16 << 20;

/// How long calls under way may take when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Error of [`serve`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// Another daemon serves the socket.
    #[error(
        "{} is served already; stop the other daemon, or use another --listen and --node-api",
        .0.display()
    )]
    Served(std::path::PathBuf),
    /// The socket cannot be bound.
    #[error("cannot listen on {}", .path.display())]
    Listen {
        /// Its path.
        path: std::path::PathBuf,
        #[source]
        source: io::Error,
    },
    /// The socket of the host's runtime.
    #[error("cannot use the host's runtime: {}; choose another --host-runtime", .0.message())]
    HostRuntime(tonic::Status),
    /// The address of health and metrics.
    #[error("cannot serve metrics on {address}; choose another --metrics")]
    Metrics {
        /// The address.
        address: std::net::SocketAddr,
        #[source]
        source: io::Error,
    },
    /// The server for streams.
    #[error(transparent)]
    Streams(#[from] StreamingError),
    /// The state on the disk.
    #[error(transparent)]
    Node(#[from] CriError),
    /// The server.
    #[error("cannot serve")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `stop` completes, and lets running calls end. Pods keep running. `ready` is called
/// when clients can connect.
pub(crate) async fn serve(
    config: ServeConfig,
    stop: impl Future<Output = ()>,
    ready: impl FnOnce(),
) -> Result<(), ServeError> {
    let path = config.listen.clone();
    let metrics = config.metrics;
    let host = config.host_runtime.as_ref();
    let host = host.map(|settings| HostRuntime::new(settings, MESSAGE_BYTES));
    let host = host.transpose().map_err(ServeError::HostRuntime)?;
    let host = host.map(Arc::new);
    let node_path = config.node_api.clone();
    if UnixStream::connect(&path).await.is_ok() {
        return Err(ServeError::Served(path));
    }
    let node = Arc::new(Node::open(config)?);
    // Later: who has the state directory is said first.
    if UnixStream::connect(&node_path).await.is_ok() {
        return Err(ServeError::Served(node_path));
    }
    node.recover().await?;
    // The URLs are opened by the kubelet, which is on this machine.
    let backend = Arc::new(Streams(Arc::clone(&node)));
    let streaming = Streaming::bind((Ipv4Addr::LOCALHOST, 0).into(), backend).await?;
    let listen = |path: &Path| {
        bind(path).map_err(|source| ServeError::Listen {
            path: path.to_owned(),
            source,
        })
    };
    let listener = listen(&path)?;
    let node_listener = listen(&node_path)?;
    let calls = Arc::new(Calls::default());
    if let Some(address) = metrics {
        let served = health::serve(address, Arc::clone(&node), Arc::clone(&calls)).await;
        served.map_err(|source| ServeError::Metrics { address, source })?;
    }
    info!(socket = %path.display(), "serving");
    ready();
    let runtime = RuntimeServiceServer::new(Runtime::new(Arc::clone(&node), Arc::new(streaming)))
        .max_decoding_message_size(MESSAGE_BYTES);
    let runtime = WithHost::new(runtime, Arc::clone(&node), host.clone(), MESSAGE_BYTES);
    let images = ImageServiceServer::new(Images::new(Arc::clone(&node)))
        .max_decoding_message_size(MESSAGE_BYTES);
    let images = WithHost::new(images, Arc::clone(&node), host.clone(), MESSAGE_BYTES);
    let vms = Server::builder()
        .add_service(NodeServer::new(Arc::new(VmCalls(Arc::clone(&node)))))
        // Its streams end with the daemon, and lose nothing then.
        .serve_with_incoming(UnixListenerStream::new(node_listener));
    let (stopping, stopped) = oneshot::channel();
    let incoming = UnixListenerStream::new(listener).map(|stream| stream.map(PathAuthority::new));
    let server = Server::builder()
        .layer(AroundCalls::new(calls))
        .add_service(runtime)
        .add_service(images)
        .serve_with_incoming_shutdown(incoming, async {
            // Without a sender there is nothing to wait for either.
            let _ = stopped.await;
        });
    let limit = async {
        stop.await;
        info!("stopping");
        // Event streams do not end by themselves.
        node.events.close();
        let _ = stopping.send(());
        tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
    };
    let events = async {
        if let Some(host) = host {
            forward_events(host, Arc::clone(&node)).await;
        }
        std::future::pending().await
    };
    let served = tokio::select! {
        served = server => served,
        served = vms => served,
        () = events => Ok(()),
        // Unfinished work is finished or undone by the next daemon.
        () = limit => Ok(()),
    };
    // A socket without a server would only mislead.
    for path in [&path, &node_path] {
        let _ = fs::remove_file(path);
    }
    Ok(served?)
}

/// Binds the socket, for root only. A socket that an earlier daemon left is replaced.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
