//! Large blobs: from a server to a file, resumed after an interruption.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use reqwest::StatusCode;
use sha2::{Digest as _, Sha256};
use tokio::sync::{mpsc, oneshot};

use super::endpoint::Endpoint;
use super::{Client, Descriptor, RegistryError};
use crate::http::resumes_at;
use crate::{Digest, PullEvent};

/// Progress is reported in steps of this many bytes.
const PROGRESS_STEP: u64 = 1 << 20;
/// Pieces queued between the network and the disk.
const QUEUE: usize = 32;

/// Why a blob is not in the file.
#[derive(Debug)]
pub(crate) enum BlobError {
    Registry(RegistryError),
    Write(io::Error),
}

impl From<RegistryError> for BlobError {
    fn from(error: RegistryError) -> Self {
        Self::Registry(error)
    }
}

enum SinkCommand {
    Append(Vec<u8>),
    /// The server cannot resume: discard everything.
    Restart,
    /// Return the digest of everything so far.
    Digest(oneshot::Sender<Digest>),
}

/// A thread that hashes and writes, so that neither delays the network.
struct Sink {
    orders: mpsc::Sender<SinkCommand>,
    thread: tokio::task::JoinHandle<io::Result<()>>,
}

impl Sink {
    fn new(file: File) -> Self {
        let (orders, mut queue) = mpsc::channel(QUEUE);
        let thread = tokio::task::spawn_blocking(move || {
            let mut hasher = Sha256::new();
            let mut at = 0;
            while let Some(order) = queue.blocking_recv() {
                match order {
                    SinkCommand::Append(bytes) => {
                        hasher.update(&bytes);
                        file.write_all_at(&bytes, at)?;
                        at += bytes.len() as u64;
                    }
                    SinkCommand::Restart => {
                        hasher = Sha256::new();
                        file.set_len(0)?;
                        at = 0;
                    }
                    SinkCommand::Digest(answer) => {
                        // Without a receiver the pull was cancelled.
                        let _ = answer.send(Digest::finish(hasher.clone()));
                    }
                }
            }
            Ok(())
        });
        Self { orders, thread }
    }

    /// Sends an order; returns false if the thread has stopped, which means that it failed.
    async fn order(&self, order: SinkCommand) -> bool {
        self.orders.send(order).await.is_ok()
    }

    /// Returns the digest so far; `None` if the thread has stopped.
    async fn digest(&self) -> Option<Digest> {
        let (answer, digest) = oneshot::channel();
        self.order(SinkCommand::Digest(answer)).await;
        digest.await.ok()
    }

    async fn finish(self) -> io::Result<()> {
        drop(self.orders);
        self.thread.await.map_err(io::Error::other)?
    }
}

impl Client {
    /// Fetches a blob into `file`, which must be empty, and verifies it. Nothing is synced to the
    /// disk.
    pub(crate) async fn blob(&self, descriptor: &Descriptor, file: File) -> Result<(), BlobError> {
        let sink = Sink::new(file);
        let fetched = self.blob_into(descriptor, &sink).await;
        sink.finish().await.map_err(BlobError::Write)?;
        Ok(fetched?)
    }

    async fn blob_into(&self, descriptor: &Descriptor, sink: &Sink) -> Result<(), RegistryError> {
        let mut tries = self.tries();
        // The most that this endpoint has sent: one that begins anew each time gets no further.
        let (mut done, mut most) = (0, 0_u64);
        loop {
            let endpoint = tries.endpoint();
            let error = match self.transfer(endpoint, descriptor, sink, &mut done).await {
                Err(error) => error,
                Ok(()) => {
                    // Without a digest the sink has failed, and reports the error itself.
                    let Some(digest) = sink.digest().await else {
                        return Ok(());
                    };
                    match self.verify(endpoint, "layer", descriptor, done, || digest) {
                        Ok(()) => return Ok(()),
                        Err(error) => error,
                    }
                }
            };
            if done >= most.saturating_add(PROGRESS_STEP) {
                most = done;
                tries.start_over();
            }
            let useless = !error.is_retryable();
            tries.after(error).await?;
            // Another source may have the right content, and must not be blamed for what this one
            // sent.
            if useless || !std::ptr::eq(endpoint, tries.endpoint()) {
                (done, most) = (0, 0);
                sink.order(SinkCommand::Restart).await;
            }
        }
    }

    /// Transfers the blob from byte `done` on, with one request.
    async fn transfer(
        &self,
        endpoint: &Endpoint,
        descriptor: &Descriptor,
        sink: &Sink,
        done: &mut u64,
    ) -> Result<(), RegistryError> {
        let Descriptor { digest, size, .. } = *descriptor;
        if *done == size && size > 0 {
            return Ok(());
        }
        let name = digest.to_string();
        let response = endpoint
            .get(self.repository(), "blobs", &name, *done)
            .await?;
        let response = endpoint.check_status(response, self.name()).await;
        let mut response = response.map_err(|error| error.of_blob(digest))?;
        if *done > 0
            && !(response.status() == StatusCode::PARTIAL_CONTENT && resumes_at(&response, *done))
        {
            *done = 0;
            if response.status() == StatusCode::PARTIAL_CONTENT {
                return Err(endpoint.fault("another part of the layer than was asked for"));
            }
            sink.order(SinkCommand::Restart).await;
        }
        let wrong_size = |actual| RegistryError::Size {
            host: endpoint.host().to_owned(),
            what: "layer",
            digest,
            expected: size,
            actual,
        };
        if let Some(length) = response.content_length()
            && length.saturating_add(*done) != size
        {
            return Err(wrong_size(length.saturating_add(*done)));
        }
        let mut told = *done / PROGRESS_STEP;
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| endpoint.failed(error))?
        {
            *done += chunk.len() as u64;
            if *done > size {
                return Err(wrong_size(*done));
            }
            if !sink.order(SinkCommand::Append(chunk.into())).await {
                // The sink's own error is reported instead.
                return Ok(());
            }
            if *done / PROGRESS_STEP != told || *done == size {
                told = *done / PROGRESS_STEP;
                self.emit(PullEvent::LayerBytes {
                    layer: digest,
                    done: *done,
                    total: size,
                });
            }
        }
        Ok(())
    }
}
