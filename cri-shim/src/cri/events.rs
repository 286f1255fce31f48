//! Container events for subscribers (the kubelet's evented PLEG).

use std::sync::{Mutex, PoisonError};

use podvisor_cri_messages::ContainerEventResponse;
use tokio::sync::mpsc;
use tonic::Status;
use tracing::warn;

/// Events that are queued for a listener; one that falls behind more is dropped, and has to list
/// again.
const EVENT_QUEUE: usize = 1024;

/// The receiver of a listener.
pub(super) type Listener = mpsc::Receiver<Result<ContainerEventResponse, Status>>;

/// All listeners.
#[derive(Debug, Default)]
pub(super) struct Events {
    listeners: Mutex<Vec<mpsc::Sender<Result<ContainerEventResponse, Status>>>>,
}

impl Events {
    pub(super) fn listen(&self) -> Listener {
        let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.push(sender);
        receiver
    }

    /// Ends all listeners' streams.
    pub(super) fn close(&self) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.clear();
    }

    /// Sends an event, which is only built if there is a listener. Events are delivered in the
    /// order in which they are built.
    pub(super) fn send(&self, event: impl FnOnce() -> ContainerEventResponse) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if listeners.is_empty() {
            return;
        }
        let event = event();
        listeners.retain(|listener| match listener.try_send(Ok(event.clone())) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                warn!("a listener for container events is too slow and is dropped");
                false
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_listener_that_is_too_slow_loses_its_stream_and_not_single_events() {
        let events = Events::default();
        let nobody_listens = || events.send(|| panic!("nobody listens"));
        nobody_listens();
        let mut listener = events.listen();
        for number in 0..=EVENT_QUEUE {
            events.send(|| ContainerEventResponse {
                created_at: i64::try_from(number).unwrap(),
                ..ContainerEventResponse::default()
            });
        }
        nobody_listens();
        let mut got = 0;
        while let Some(event) = listener.recv().await {
            assert_eq!(event.unwrap().created_at, got);
            got += 1;
        }
        assert_eq!(got, i64::try_from(EVENT_QUEUE).unwrap());
    }
}
