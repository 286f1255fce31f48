//! The connections to a guest's ports, and the line by which its agent reports that it is up.

use std::fmt;
use std::future::pending;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::Arc;

use podvisor_agent_protocol::{
    AgentError, InvalidReadyLine, MissingExitStatus, READY_PORT, parse_ready_line,
};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::Agent;
use crate::machine::{MachineError, Ports, VsockPort};

/// Most connections of the guest to the port of the ready line that wait to be read. An agent opens
/// one after the other.
const READY_BACKLOG: usize = 4;

/// Why the agent cannot be reached, or what it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// Reading the ready line failed.
    #[error("lost the guest's agent while it was starting")]
    ReadyLost(#[source] io::Error),
    /// The ready line is invalid.
    #[error(transparent)]
    NotReady(#[from] InvalidReadyLine),
    /// A port in the guest cannot be connected to.
    #[error("failed to connect to port {port} of the guest's agent")]
    Connect {
        /// The vsock port.
        port: u32,
        /// The machine's error.
        #[source]
        source: MachineError,
    },
    /// A connection to the guest cannot be used.
    #[error("failed to set up a connection to the guest's agent")]
    Stream(#[source] io::Error),
    /// The connection for calls ended, most likely because the guest did.
    #[error("lost the guest's agent: {0}")]
    Lost(ttrpc::Error),
    /// A call was not answered in time, or not in the agent's protocol.
    #[error("call to the guest's agent failed: {0}")]
    Unanswered(ttrpc::Error),
    /// The agent refused a call.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The agent's answer is invalid.
    #[error(transparent)]
    Answer(#[from] MissingExitStatus),
    /// A specification cannot be written as JSON.
    #[error("cannot write the container's specification as JSON")]
    Json(#[source] serde_json::Error),
    /// The host has no random bytes.
    #[error("cannot get random bytes from the kernel")]
    Random(#[source] io::Error),
}

impl From<ttrpc::Error> for LinkError {
    fn from(error: ttrpc::Error) -> Self {
        match error {
            ttrpc::Error::RpcStatus(_) => Self::Agent(error.into()),
            ttrpc::Error::Others(_) => Self::Unanswered(error),
            lost => Self::Lost(lost),
        }
    }
}

impl LinkError {
    /// Whether the guest can no longer be reached, as opposed to a refusal.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::ReadyLost(_) | Self::Connect { .. } | Self::Stream(_) | Self::Lost(_)
        )
    }
}

type Connecting =
    Pin<Box<dyn Future<Output = Result<StdUnixStream, MachineError>> + Send + 'static>>;

/// Connects to the guest's vsock ports.
#[derive(Clone)]
pub struct Mux(Arc<dyn Fn(u32) -> Connecting + Send + Sync>);

impl fmt::Debug for Mux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mux")
    }
}

impl Mux {
    /// Uses the ports of a machine's guest.
    pub(crate) fn new(ports: Ports) -> Self {
        Self(Arc::new(move |port| {
            let ports = ports.clone();
            Box::pin(async move { ports.connect(port).await })
        }))
    }

    /// For tests: the guest is the other end of a connection.
    #[cfg(test)]
    pub(crate) fn to(connection: StdUnixStream) -> Self {
        Self(Arc::new(move |_| {
            let connection = connection.try_clone();
            Box::pin(async { Ok(connection.expect("a descriptor")) })
        }))
    }

    /// Connects to a port in the guest. If nothing listens there, the stream ends immediately.
    pub(crate) async fn connect(&self, port: u32) -> Result<UnixStream, LinkError> {
        let connected = (self.0)(port).await;
        let stream = connected.map_err(|source| LinkError::Connect { port, source })?;
        into_tokio(stream).map_err(LinkError::Stream)
    }
}

fn into_tokio(stream: StdUnixStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Waits for the agent's report that it accepts calls.
#[derive(Debug)]
pub(crate) struct Ready {
    connections: mpsc::Receiver<StdUnixStream>,
}

impl Ready {
    /// Returns the port of the host for the agent's report, and its receiver.
    pub(crate) fn listen() -> (VsockPort, Self) {
        let (sender, connections) = mpsc::channel(READY_BACKLOG);
        let port = VsockPort {
            port: READY_PORT,
            on_connect: Box::new(move |stream| {
                // Closed if it is not taken: there are too many, or the agent is up already.
                let _ = sender.try_send(stream);
            }),
        };
        (port, Self { connections })
    }

    /// Connects to the agent once its ready line has come; never returns if the machine has ended.
    pub(crate) async fn agent(mut self, mux: Mux) -> Result<Agent, LinkError> {
        loop {
            let Some(stream) = self.connections.recv().await else {
                // The device is gone with its machine, which reports how it ended.
                return pending().await;
            };
            let mut stream = into_tokio(stream).map_err(LinkError::ReadyLost)?;
            let mut received = Vec::new();
            loop {
                if parse_ready_line(&received)?.is_some() {
                    return Agent::connect(mux).await;
                }
                let read = stream.read_buf(&mut received).await;
                if read.map_err(LinkError::ReadyLost)? == 0 {
                    // Closed too early: the agent has to start again.
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use podvisor_agent_protocol::{RPC_PORT, ready_line};
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// A guest that accepts connections to any port, and records the ports.
    fn guest() -> (Mux, Arc<Mutex<Vec<u32>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let mux = Mux(Arc::new({
            let asked = Arc::clone(&asked);
            move |port| {
                asked.lock().unwrap().push(port);
                Box::pin(async { Ok(StdUnixStream::pair().unwrap().0) })
            }
        }));
        (mux, asked)
    }

    /// The guest's end of a connection to the port.
    fn connect(port: &mut VsockPort) -> UnixStream {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        (port.on_connect)(ours);
        into_tokio(theirs).unwrap()
    }

    #[tokio::test]
    async fn a_ready_line_may_come_in_pieces_and_after_a_lost_connection() {
        let (mux, asked) = guest();
        let (mut port, ready) = Ready::listen();
        assert_eq!(port.port, READY_PORT);
        drop(connect(&mut port));
        let mut stream = connect(&mut port);
        let speak = tokio::spawn(async move {
            for byte in ready_line().bytes() {
                stream.write_all(&[byte]).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        ready.agent(mux).await.unwrap();
        speak.await.unwrap();
        assert_eq!(*asked.lock().unwrap(), [RPC_PORT]);
    }

    #[tokio::test]
    async fn another_line_than_the_agents_is_refused() {
        let (mux, _) = guest();
        let (mut port, ready) = Ready::listen();
        let mut stream = connect(&mut port);
        stream.write_all(b"HTTP/1.1 200 OK\n").await.unwrap();
        let refused = ready.agent(mux).await;
        assert!(matches!(refused, Err(LinkError::NotReady(_))));
    }

    #[tokio::test]
    async fn connections_that_nobody_reads_are_closed() {
        let (mut port, ready) = Ready::listen();
        let kept: Vec<_> = (0..READY_BACKLOG).map(|_| connect(&mut port)).collect();
        assert_eq!(connect(&mut port).read(&mut [0]).await.unwrap(), 0);
        drop((ready, kept));
        assert_eq!(connect(&mut port).read(&mut [0]).await.unwrap(), 0);
    }
}
