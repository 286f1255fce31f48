//! A limit for unauthenticated connections: a new one evicts the oldest, so that no client can lock
//! out others by holding connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// At most so many connections at the same time; a new one replaces the oldest.
#[derive(Debug)]
pub(crate) struct ConnectionLimiter {
    most: usize,
    /// By number, the oldest first.
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    next: u64,
    all: BTreeMap<u64, oneshot::Sender<()>>,
}

/// A connection that counts towards the limit until this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    strangers: Arc<ConnectionLimiter>,
    number: u64,
}

impl ConnectionLimiter {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            known: Mutex::default(),
        })
    }

    /// Serves a new connection in a task of its own: `serve` runs until it ends, or until another
    /// connection needs the place while the [`ConnectionSlot`] that it is given still exists.
    pub(crate) fn spawn<S>(self: &Arc<Self>, serve: impl FnOnce(ConnectionSlot) -> S)
    where
        S: Future<Output = ()> + Send + 'static,
    {
        let (stranger, has_to_go) = self.enter();
        let served = serve(stranger);
        tokio::spawn(async move {
            tokio::select! {
                () = served => {}
                // Not sent to a connection that no longer counts.
                Ok(()) = has_to_go => {}
            }
        });
    }

    fn enter(self: &Arc<Self>) -> (ConnectionSlot, oneshot::Receiver<()>) {
        let (sender, has_to_go) = oneshot::channel();
        let mut known = self.known();
        while known.all.len() >= self.most
            && let Some((_, oldest)) = known.all.pop_first()
        {
            // Fails if it has just ended by itself.
            let _ = oldest.send(());
        }
        let number = known.next;
        known.next = number.wrapping_add(1);
        known.all.insert(number, sender);
        let stranger = ConnectionSlot {
            strangers: Arc::clone(self),
            number,
        };
        (stranger, has_to_go)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.strangers.known().all.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_stranger_goes_for_a_new_one_and_no_other() {
        let strangers = ConnectionLimiter::new(2);
        let (first, mut first_goes) = strangers.enter();
        let (second, mut second_goes) = strangers.enter();
        // The connection is authenticated now.
        drop(first);
        let (_third, mut third_goes) = strangers.enter();
        assert!(second_goes.try_recv().is_err());
        let (_fourth, mut fourth_goes) = strangers.enter();
        assert_eq!(second_goes.try_recv(), Ok(()));
        drop(second);
        for goes in [&mut first_goes, &mut third_goes, &mut fourth_goes] {
            assert!(goes.try_recv().is_err());
        }
        assert_eq!(strangers.known().all.len(), 2);
    }
}
