//! Connects the host's streams to TCP ports on the guest's loopback.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use podvisor_agent_protocol::{AgentError, ErrorKind, StreamId, api, limits};
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::causes::with_causes;
use crate::stdio::{StreamClaim, StreamInUse, StreamRegistry};

/// On the loopback, only a listener whose queue is full takes time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that are copied in one piece. Each piece is a packet to the host, and a wake-up there.
const CHUNK_SIZE: usize = 32 << 10;

/// A connection to a port failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(&'static str),
    /// The stream's id is already in use.
    #[error(transparent)]
    StreamInUse(#[from] StreamInUse),
    /// The limit is reached.
    #[error(
        "the guest has {} forwarded connections, its limit",
        limits::PORT_FORWARDS
    )]
    TooMany,
    /// No program listens on the port.
    #[error("nothing listens on port {port} of the guest's loopback")]
    Refused {
        /// The port.
        port: u16,
    },
    /// Any other failure.
    #[error("cannot connect to port {port} of the guest's loopback")]
    Connect {
        /// The port.
        port: u16,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl From<ForwardError> for AgentError {
    fn from(error: ForwardError) -> Self {
        let kind = match error {
            ForwardError::Invalid(_) => ErrorKind::InvalidArgument,
            ForwardError::StreamInUse(_) => ErrorKind::AlreadyExists,
            ForwardError::TooMany => ErrorKind::ResourceExhausted,
            ForwardError::Refused { .. } => ErrorKind::ConnectionRefused,
            ForwardError::Connect { .. } => ErrorKind::Internal,
        };
        Self::new(kind, with_causes(&error))
    }
}

/// Creates forwarded connections, up to a limit.
#[derive(Debug)]
pub struct Forwarder {
    hub: StreamRegistry,
    places: Arc<Semaphore>,
}

impl Forwarder {
    /// Creates a forwarder that takes its streams from `hub`.
    #[must_use]
    pub fn new(hub: StreamRegistry) -> Self {
        Self {
            hub,
            places: Arc::new(Semaphore::new(limits::PORT_FORWARDS)),
        }
    }

    /// Connects a stream to a port; the connection then lives until both sides have ended it.
    ///
    /// # Errors
    ///
    /// [`ForwardError`].
    pub async fn forward(&self, request: &api::PortForwardRequest) -> Result<(), ForwardError> {
        let port = u16::try_from(request.port).ok().filter(|&port| port > 0);
        let port = port.ok_or(ForwardError::Invalid("a port is 1 to 65535"))?;
        let stream =
            StreamId::from_field(&request.stream)
                .ok()
                .flatten()
                .ok_or(ForwardError::Invalid(
                    "a stream id is 16 bytes, not all zero",
                ))?;
        let place = self.places.clone().try_acquire_owned();
        let place = place.map_err(|_| ForwardError::TooMany)?;
        let claim = self.hub.claim(stream)?;
        let socket = connect(port).await?;
        tokio::spawn(join(claim, socket, place));
        Ok(())
    }
}

async fn connect(port: u16) -> Result<TcpStream, ForwardError> {
    let addresses: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let mut failed = ForwardError::Refused { port };
    for address in addresses {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((address, port)));
        match connected.await {
            Ok(Ok(socket)) => {
                // So that a write does not wait for the acknowledgement of the previous one.
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            // A refusal on one address family does not replace an earlier error.
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Ok(Err(source)) => failed = ForwardError::Connect { port, source },
            Err(_) => {
                let source = io::ErrorKind::TimedOut.into();
                failed = ForwardError::Connect { port, source };
            }
        }
    }
    Err(failed)
}

async fn join(claim: StreamClaim, mut socket: TcpStream, _place: OwnedSemaphorePermit) {
    // The host put the id into the call, so its connection either arrives soon or never.
    let claimed = tokio::time::timeout(limits::STREAM_CLAIM_TIMEOUT, claim).await;
    let Ok(Ok(mut connection)) = claimed else {
        return tracing::warn!("no connection for a forwarded port in time");
    };
    let copied =
        copy_bidirectional_with_sizes(&mut connection, &mut socket, CHUNK_SIZE, CHUNK_SIZE);
    if let Err(error) = copied.await {
        tracing::debug!(%error, "a forwarded connection broke");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_piece_does_not_wait_for_the_acknowledgement_of_the_one_before() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let socket = connect(listener.local_addr().unwrap().port()).await;
        assert!(socket.unwrap().nodelay().unwrap());
    }
}
