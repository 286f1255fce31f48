//! What goes over a sandbox's connection: requests that are sent, and answers to who waits for
//! them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::debug;

use crate::types::SandboxExit;
use crate::wire::{Answer, Frame, FrameReader, FrameWriter, Numbered, Refusal, Reply};
use crate::{post_mortem, record};

/// A frame on its way out.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// An answer with its descriptors; an error, where it is one that only a newer podvisor knows.
pub(super) type Answered = Result<(Result<Answer, Refusal>, Vec<OwnedFd>), serde_json::Error>;

/// Pending requests by number; `None` once the connection is lost.
#[derive(Debug)]
pub(super) struct PendingReplies(Mutex<Option<HashMap<u64, oneshot::Sender<Answered>>>>);

impl PendingReplies {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
    }

    pub(super) fn add(&self, number: u64) -> Option<oneshot::Receiver<Answered>> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.as_mut()?.insert(number, sender);
        Some(receiver)
    }

    /// Removes a request. True if it was still pending.
    pub(super) fn forget(&self, number: u64) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asker = waiting.as_mut().and_then(|map| map.remove(&number));
        asker.is_some()
    }

    fn answered(&self, number: u64, answer: Answered) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asker = waiting.as_mut().and_then(|map| map.remove(&number));
        if let Some(asker) = asker {
            // Fails if the caller no longer waits.
            let _ = asker.send(answer);
        }
    }

    fn close(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Ends pending requests when the task that receives answers ends, also with its runtime.
pub(super) struct CloseReplies(pub(super) Arc<PendingReplies>);

impl Drop for CloseReplies {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Sends requests until the connection or the queue ends.
pub(super) async fn send_requests(mut writer: FrameWriter, mut outgoing: mpsc::Receiver<Outgoing>) {
    while let Some(Outgoing { body, fds }) = outgoing.recv().await {
        if let Err(error) = writer.send(&body, &fds).await {
            // Callers get an error when the reader finds the connection closed.
            debug!(%error, "lost the control socket");
            return;
        }
    }
}

/// Dispatches answers until the connection ends, then waits for the process's end. A process that
/// ends in good order writes its record before it closes its connections.
pub(super) async fn receive_answers(
    mut reader: FrameReader,
    waiting: CloseReplies,
    process: Arc<AsyncFd<OwnedFd>>,
    dir: PathBuf,
    machine: watch::Sender<Option<SandboxExit>>,
    exit: watch::Sender<Option<SandboxExit>>,
) {
    loop {
        match reader.next().await {
            Ok(Some(frame)) => match received(frame) {
                Ok((number, answer)) => waiting.0.answered(number, answer),
                Err(error) => {
                    debug!(%error, "failed to decode an answer");
                    break;
                }
            },
            Ok(None) => break,
            Err(error) => {
                debug!(%error, "lost the control socket");
                break;
            }
        }
    }
    drop(reader);
    drop(waiting);
    let left = record::read(&dir).map(|record| record.exit);
    machine.send_replace(left.clone());
    // Fails only when the runtime shuts down.
    if process.readable().await.is_ok() {
        let found = post_mortem::exit_of(&dir);
        // Its directory may be removed by now.
        let ended = left.or(found).unwrap_or(SandboxExit::Died);
        machine.send_replace(Some(ended.clone()));
        exit.send_replace(Some(ended));
    }
}

/// The answer in a frame, and the number of its request.
fn received(frame: Frame) -> Result<(u64, Answered), serde_json::Error> {
    match serde_json::from_slice::<Reply>(&frame.body) {
        Ok(reply) => Ok((reply.number, Ok((reply.answer, frame.fds)))),
        Err(error) => {
            let (number, error) = Numbered::of(&frame.body, error)?;
            Ok((number, Err(error)))
        }
    }
}
