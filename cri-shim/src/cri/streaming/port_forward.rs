//! PortForward: for each connection of its own the client opens a pair of streams, one for
//! bytes and one for errors, with the port and a number that pairs them.

use std::collections::HashMap;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

use super::StreamError;
use super::spdy::{Connection, SpdyStream};
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Node, Pod};

/// The only version.
pub(super) const PROTOCOLS: &[&str] = &["portforward.k8s.io"];

/// Bytes that are read from a pod at once.
const CHUNK: usize = 32 << 10;
/// Streams whose other half has not come yet.
const HALVES: usize = 64;

/// Forwards connections to `pod` until the client ends its own.
pub(super) async fn serve(node: &Arc<Node>, pod: &str, io: TcpStream) -> Result<(), StreamError> {
    let pod = node
        .pod(pod)
        .map_err(|error| StreamError::Cri(Box::new(error)))?;
    let (read, write) = io.into_split();
    let connection = Connection::new(write)?;
    let (sender, mut streams) = mpsc::channel::<SpdyStream>(1);
    let pairing = async {
        let mut halves: HashMap<String, SpdyStream> = HashMap::new();
        let mut tasks = JoinSet::new();
        while let Some(stream) = streams.recv().await {
            // Old clients number nothing, and open one pair at a time.
            let port = stream.header("port").unwrap_or_default();
            let request = stream.header("requestid").unwrap_or_default();
            let key = format!("{port} {request}");
            match halves.remove(&key) {
                Some(other) => {
                    let is_data = |s: &SpdyStream| s.header("streamtype") == Some("data");
                    let (data, error) = if is_data(&stream) {
                        (stream, other)
                    } else {
                        (other, stream)
                    };
                    tasks.spawn(forward(Arc::clone(&pod), data, error));
                }
                None if halves.len() < HALVES => drop(halves.insert(key, stream)),
                None => debug!("a stream without its other half is dropped"),
            }
            while tasks.try_join_next().is_some() {}
        }
    };
    let (served, ()) = tokio::join!(connection.serve(read, sender), pairing);
    Ok(served?)
}

async fn forward(pod: Arc<Pod>, data: SpdyStream, error: SpdyStream) {
    let port = data.header("port").unwrap_or_default().parse::<u16>().ok();
    let port = port.filter(|port| *port > 0);
    let (_, errors) = error.split();
    let forwarded = match port {
        Some(port) => to_port(&pod, port, data).await,
        None => Err(CriError::invalid("port", "it is not from 1 to 65535")),
    };
    if let Err(failure) = forwarded {
        let message = tonic::Status::from(failure).message().to_owned();
        // Gone with the client when that has gone.
        let _ = errors.send(message.as_bytes()).await;
    }
    let _ = errors.close().await;
}

async fn to_port(pod: &Arc<Pod>, port: u16, data: SpdyStream) -> Result<()> {
    let failed = || CriError::host("use the connection to the pod");
    let (mut incoming, outgoing) = data.split();
    let connected = async {
        let socket = pod.client()?.port_forward(port).await?;
        let socket = StdUnixStream::from(socket);
        socket.set_nonblocking(true).map_err(failed())?;
        UnixStream::from_std(socket).map_err(failed())
    };
    let socket = match connected.await {
        Ok(socket) => socket,
        Err(error) => {
            let _ = outgoing.close().await;
            return Err(error);
        }
    };
    let (mut from_pod, mut to_pod) = socket.into_split();
    let inwards = async {
        while let Some(bytes) = incoming.recv().await {
            if to_pod.write_all(&bytes).await.is_err() {
                return;
            }
        }
        let _ = to_pod.shutdown().await;
    };
    let outwards = async {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count) = from_pod.read(&mut buffer).await {
            let bytes = buffer.get(..count).unwrap_or_default();
            if bytes.is_empty() || outgoing.send(bytes).await.is_err() {
                break;
            }
        }
        let _ = outgoing.close().await;
    };
    tokio::join!(inwards, outwards);
    Ok(())
}
