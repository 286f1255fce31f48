//! Channels of bytes, independent of the protocol that carries them.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};

/// Most pieces of input that wait for their reader; the connection is not read from beyond that.
pub(super) const INPUT_PIECES: usize = 32;

/// Most pieces of output that wait for the connection.
pub(super) const OUTPUT_PIECES: usize = 32;

/// The most bytes in one piece.
pub(super) const CHUNK_SIZE: usize = 32 << 10;

/// How long a client may take to close its side, after the server has closed its own.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The client's input on a channel; ends when the client has closed it.
pub(super) type Input = mpsc::Receiver<Bytes>;

/// A piece for the client.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// A SPDY stream's id, or a WebSocket channel's number.
    pub(super) channel: u32,
    pub(super) data: Bytes,
    /// Whether this is the last piece on its channel.
    pub(super) last: bool,
}

/// The client's connection is gone, or it has reset the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

/// The output to the client on one channel.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) channel: u32,
    pub(super) pieces: mpsc::Sender<Outgoing>,
    /// Becomes true when the client resets the channel; `None` if the protocol has no resets.
    pub(super) is_reset: Option<watch::Receiver<bool>>,
}

impl Output {
    /// Sends bytes, once the connection has accepted earlier ones.
    pub(super) async fn write(&self, data: Bytes) -> Result<(), Gone> {
        self.send(data, false).await
    }

    /// Ends the channel, after `data`.
    pub(super) async fn finish(self, data: Bytes) -> Result<(), Gone> {
        self.send(data, true).await
    }

    /// Completes when the client resets the channel: it neither sends nor reads there any more.
    pub(super) fn reset(&self) -> impl Future<Output = ()> + use<> {
        let is_reset = self.is_reset.clone();
        async move {
            let Some(mut is_reset) = is_reset else {
                return std::future::pending().await;
            };
            if is_reset.wait_for(|is_reset| *is_reset).await.is_err() {
                // The connection is no longer read.
                std::future::pending().await
            }
        }
    }

    async fn send(&self, data: Bytes, last: bool) -> Result<(), Gone> {
        let piece = Outgoing {
            channel: self.channel,
            data,
            last,
        };
        tokio::select! {
            biased;
            () = self.reset() => Err(Gone),
            sent = self.pieces.send(piece) => sent.map_err(|_| Gone),
        }
    }
}
