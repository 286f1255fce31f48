//! Requests of a connection that wait for an event, until it happens or they are abandoned.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Most waits of one connection at the same time. They do not delay other requests.
pub(super) const MAX_WAITS: usize = 4096;

/// The waits of one connection, by the number of the request.
#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<HashMap<u64, oneshot::Sender<()>>>);

/// A wait that is registered until this is dropped.
#[derive(Debug)]
pub(super) struct Wait {
    waits: Arc<Waits>,
    number: u64,
    abandoned: oneshot::Receiver<()>,
}

impl Waits {
    /// Registers a wait; `None` when there are too many.
    pub(super) fn begin(self: &Arc<Self>, number: u64) -> Option<Wait> {
        let mut waits = self.lock();
        if waits.len() >= MAX_WAITS {
            return None;
        }
        let (sender, abandoned) = oneshot::channel();
        waits.insert(number, sender);
        Some(Wait {
            waits: Arc::clone(self),
            number,
            abandoned,
        })
    }

    /// Cancels the wait of this request. One that was already answered is not an error.
    pub(super) fn abandon(&self, number: u64) {
        self.lock().remove(&number);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wait {
    /// Returns when the wait was abandoned.
    pub(super) async fn abandoned(&mut self) {
        // Nothing is ever sent: this ends when the sender is dropped.
        let _ = (&mut self.abandoned).await;
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.waits.abandon(self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn there_is_a_bound_and_who_is_done_makes_room() {
        let waits = Arc::new(Waits::default());
        let all = (0..MAX_WAITS as u64).map(|number| waits.begin(number).unwrap());
        let mut all: Vec<Wait> = all.collect();
        assert!(waits.begin(MAX_WAITS as u64).is_none());
        assert!(all[3].abandoned().now_or_never().is_none());
        waits.abandon(3);
        assert!(all[3].abandoned().now_or_never().is_some());
        let another = waits.begin(MAX_WAITS as u64).unwrap();
        assert!(waits.begin(0).is_none());
        drop(another);
        assert!(waits.begin(MAX_WAITS as u64).is_some());
    }
}
