//! Requests of a connection that wait for something to happen, until it does or nobody waits for
//! it any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Waits of one connection at once. They keep no other request waiting.
pub(super) const MAX_WAITS: usize = 4096;

/// Those of one connection, by the numbers of their requests.
#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<HashMap<u64, oneshot::Sender<()>>>);

/// One of them, until it is dropped.
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

    /// Cancels the wait of this request. It is no error if it was already answered.
    pub(super) fn abandon(&self, number: u64) {
        self.lock().remove(&number);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wait {
    /// Waits until nobody waits for it any more.
    pub(super) async fn abandoned(&mut self) {
        // Nothing is ever sent.
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
