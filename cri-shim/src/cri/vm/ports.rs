//! Connections to the ports of a guest, over its network: no agent in it connects them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::cri::error::{CriError, Result};
use crate::cri::node::Pod;

/// How long a guest may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to a port of the pod's first address, which a node reaches like each of its pods'.
pub(in crate::cri) async fn connect(pod: &Pod, port: u16) -> Result<OwnedFd> {
    let address = pod.with_record(|record| record.addresses.first().copied());
    let address = address.ok_or(CriError::NoAddress)?;
    let address = SocketAddr::new(address, port);
    let refused = |source| CriError::GuestPort { address, source };
    let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
    let timed_out = |_| std::io::ErrorKind::TimedOut.into();
    let stream = connected.map_err(timed_out).and_then(|stream| stream);
    let stream = stream.and_then(TcpStream::into_std).and_then(|stream| {
        stream.set_nonblocking(false)?;
        Ok(stream)
    });
    Ok(stream.map_err(refused)?.into())
}
