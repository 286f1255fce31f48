//! Connects the standard streams of processes to the host's connections.
//!
//! The host opens a connection per stream and names it by a [`StreamId`]; a request names the same
//! id. The [`StreamRegistry`] brings the two together, in whichever order they arrive, and
//! [`relay`] then moves the bytes. [`fd`] is a pipe or terminal in the event loop.
//!
//! Knows nothing about containers and vsock: a [`Connection`] is anything that carries bytes.

pub mod fd;
pub mod relay;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use podvisor_agent_protocol::{StreamId, limits};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::sync::oneshot;

/// How long a connection may take to send its stream id.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// A transport for a stream's bytes: half-close is `poll_shutdown`.
pub trait Carrier: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Carrier for T {}

/// The host's end of one stream.
pub type Connection = Box<dyn Carrier>;

/// A stream id was named twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("stream id is in use: draw a fresh one for each stream")]
pub struct StreamInUse;

/// Pairs connections with the requests that name them. Clones share one state.
#[derive(Clone, Default)]
pub struct StreamRegistry {
    streams: Arc<Mutex<HashMap<StreamId, Waiting>>>,
}

/// The one of the two that came first and waits for the other.
enum Waiting {
    Connection(Connection, Arc<()>),
    StreamClaim(oneshot::Sender<Connection>, Arc<()>),
}

impl StreamRegistry {
    /// Creates an empty hub.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the stream id that a new connection starts with, and stores the connection.
    ///
    /// A connection with an invalid id, one that comes too late, exceeds the limit or repeats an id
    /// is closed: only the host can connect, and an answer to its mistake would be read as the
    /// stream's bytes.
    pub async fn greet(&self, mut connection: Connection) {
        let mut id = [0; StreamId::LEN];
        match tokio::time::timeout(GREETING_TIMEOUT, connection.read_exact(&mut id)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return tracing::debug!(%error, "stdio connection without an id"),
            Err(_) => return tracing::warn!("stdio connection that sent no id in time"),
        }
        match StreamId::new(id) {
            Ok(id) => self.offer(id, connection).await,
            Err(error) => tracing::warn!(%error, "stdio connection with a bad id"),
        }
    }

    async fn offer(&self, id: StreamId, connection: Connection) {
        let Some(token) = self.insert(id, connection) else {
            return;
        };
        tokio::time::sleep(limits::STREAM_CLAIM_TIMEOUT).await;
        let mut streams = self.lock();
        // The id may have been claimed in the meantime, and even be in use again.
        if let Some(Waiting::Connection(_, waiting)) = streams.get(&id)
            && Arc::ptr_eq(waiting, &token)
        {
            streams.remove(&id);
            tracing::warn!(?id, "no request named a stdio connection in time");
        }
    }

    /// Passes the connection to its claim, or keeps it under the returned token.
    fn insert(&self, id: StreamId, connection: Connection) -> Option<Arc<()>> {
        let mut streams = self.lock();
        let waiting = streams
            .values()
            .filter(|w| matches!(w, Waiting::Connection(..)))
            .count();
        match streams.entry(id) {
            Entry::Vacant(_) if waiting >= limits::UNCLAIMED_STREAMS => {
                tracing::warn!("too many stdio connections that no request named");
                None
            }
            Entry::Vacant(vacant) => {
                let token = Arc::new(());
                vacant.insert(Waiting::Connection(connection, token.clone()));
                Some(token)
            }
            Entry::Occupied(occupied) if matches!(occupied.get(), Waiting::StreamClaim(..)) => {
                if let Waiting::StreamClaim(claim, _) = occupied.remove() {
                    // A claim that was cancelled in this instant needs no connection.
                    drop(claim.send(connection));
                }
                None
            }
            Entry::Occupied(_) => {
                tracing::warn!(?id, "second stdio connection with one id");
                None
            }
        }
    }

    /// Claims the connection named `id`; the claim resolves when it arrives.
    ///
    /// # Errors
    ///
    /// [`StreamInUse`] while another claim of that id waits.
    pub fn claim(&self, id: StreamId) -> Result<StreamClaim, StreamInUse> {
        let (sender, receiver) = oneshot::channel();
        let token = Arc::new(());
        match self.lock().entry(id) {
            Entry::Vacant(vacant) => {
                vacant.insert(Waiting::StreamClaim(sender, token.clone()));
            }
            Entry::Occupied(occupied) if matches!(occupied.get(), Waiting::Connection(..)) => {
                if let Waiting::Connection(connection, _) = occupied.remove() {
                    // The receiver is in this very function, so this cannot fail.
                    drop(sender.send(connection));
                }
            }
            Entry::Occupied(_) => return Err(StreamInUse),
        }
        Ok(StreamClaim {
            id,
            token,
            hub: self.clone(),
            receiver,
        })
    }

    // A panic while the lock is held ends the agent, so the lock is never poisoned.
    fn lock(&self) -> MutexGuard<'_, HashMap<StreamId, Waiting>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for StreamRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub")
            .field("waiting", &self.lock().len())
            .finish()
    }
}

/// A request's wait for its connection; dropping it releases the id.
#[derive(Debug)]
pub struct StreamClaim {
    id: StreamId,
    token: Arc<()>,
    hub: StreamRegistry,
    receiver: oneshot::Receiver<Connection>,
}

impl std::fmt::Debug for dyn Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

impl Future for StreamClaim {
    type Output = io::Result<Connection>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver)
            .poll(cx)
            .map(|connection| connection.map_err(|_| io::ErrorKind::BrokenPipe.into()))
    }
}

impl Drop for StreamClaim {
    fn drop(&mut self) {
        let mut streams = self.hub.lock();
        // The id may have been used again since this claim was answered.
        if let Some(Waiting::StreamClaim(_, token)) = streams.get(&self.id)
            && Arc::ptr_eq(token, &self.token)
        {
            streams.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};

    fn id(n: u8) -> StreamId {
        StreamId::new([n; 16]).unwrap()
    }

    async fn greeted(
        hub: &StreamRegistry,
        id: StreamId,
    ) -> (DuplexStream, tokio::task::JoinHandle<()>) {
        let (mut host, guest) = duplex(64);
        let hub = hub.clone();
        let task = tokio::spawn(async move { hub.greet(Box::new(guest)).await });
        // The pipe's buffer is longer than an id, so this does not wait.
        host.write_all(id.as_bytes()).await.unwrap();
        (host, task)
    }

    async fn speaks(mut connection: Connection, host: &mut DuplexStream) {
        connection.write_all(b"hi").await.unwrap();
        let mut heard = [0; 2];
        host.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hi");
    }

    #[tokio::test]
    async fn a_connection_before_its_claim_is_found() {
        let hub = StreamRegistry::new();
        let (mut host, _task) = greeted(&hub, id(1)).await;
        while hub.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        speaks(hub.claim(id(1)).unwrap().await.unwrap(), &mut host).await;
        assert!(hub.lock().is_empty());
    }

    #[tokio::test]
    async fn a_claim_before_its_connection_is_answered() {
        let hub = StreamRegistry::new();
        let claim = hub.claim(id(1)).unwrap();
        let (mut host, _task) = greeted(&hub, id(1)).await;
        speaks(claim.await.unwrap(), &mut host).await;
        assert!(hub.lock().is_empty());
    }

    #[tokio::test]
    async fn an_id_can_wait_for_one_claim_only_and_is_free_after_it() {
        let hub = StreamRegistry::new();
        let first = hub.claim(id(1)).unwrap();
        assert_eq!(hub.claim(id(1)).unwrap_err(), StreamInUse);
        drop(first);
        hub.claim(id(1)).unwrap();
    }

    #[tokio::test]
    async fn an_answered_claim_does_not_take_its_successor_along() {
        let hub = StreamRegistry::new();
        let mut first = hub.claim(id(1)).unwrap();
        let (_host, _task) = greeted(&hub, id(1)).await;
        (&mut first).await.unwrap();
        let second = hub.claim(id(1)).unwrap();
        drop(first);
        let (mut host, _task) = greeted(&hub, id(1)).await;
        speaks(second.await.unwrap(), &mut host).await;
    }

    #[tokio::test]
    async fn a_second_connection_with_one_id_is_closed() {
        let hub = StreamRegistry::new();
        let (_first, _task) = greeted(&hub, id(1)).await;
        while hub.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let (mut second, task) = greeted(&hub, id(1)).await;
        task.await.unwrap();
        assert_eq!(second.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_nobody_names_is_closed_in_time() {
        let hub = StreamRegistry::new();
        let (mut host, _task) = greeted(&hub, id(1)).await;
        assert_eq!(host.read(&mut [0]).await.unwrap(), 0);
        assert!(hub.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_says_nothing_is_closed_in_time() {
        let hub = StreamRegistry::new();
        let (mut host, guest) = duplex(64);
        hub.greet(Box::new(guest)).await;
        assert_eq!(host.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn waiting_connections_are_bounded() {
        let hub = StreamRegistry::new();
        let mut kept = Vec::new();
        for n in 1..=limits::UNCLAIMED_STREAMS + 1 {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&n.to_ne_bytes());
            let (host, guest) = duplex(1);
            kept.push(host);
            hub.insert(StreamId::new(bytes).unwrap(), Box::new(guest));
        }
        assert_eq!(hub.lock().len(), limits::UNCLAIMED_STREAMS);
    }
}
