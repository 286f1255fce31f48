//! Limit on the number of images that are unpacked at the same time: each may take much memory
//! (`Limits::metadata_bytes`), and a client that may pull may pull many.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a waiting pull checks whether it was cancelled.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Number of images that are unpacked at the same time.
const MAX_CONCURRENT_UNPACKS: usize = 3;

/// The places of a store, one for each image that is being unpacked.
#[derive(Debug)]
pub(super) struct UnpackSlots {
    free: Mutex<usize>,
    freed: Condvar,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub(super) struct UnpackSlot<'a>(&'a UnpackSlots);

impl Default for UnpackSlots {
    fn default() -> Self {
        Self {
            free: Mutex::new(MAX_CONCURRENT_UNPACKS),
            freed: Condvar::new(),
        }
    }
}

impl UnpackSlots {
    /// Waits for a place; `None` if `cancelled` is set meanwhile. The holder of one must not wait
    /// for another.
    pub(super) fn take(&self, cancelled: &AtomicBool) -> Option<UnpackSlot<'_>> {
        let mut free = self.free();
        loop {
            if cancelled.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(rest) = free.checked_sub(1) {
                *free = rest;
                return Some(UnpackSlot(self));
            }
            let waited = self.freed.wait_timeout(free, CANCEL_POLL_INTERVAL);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    #[cfg(test)]
    pub(super) fn are_all_free(&self) -> bool {
        *self.free() == MAX_CONCURRENT_UNPACKS
    }

    fn free(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnpackSlot<'_> {
    fn drop(&mut self) {
        *self.0.free() += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::{sleep, spawn};

    use super::super::work::WorkFile;
    use super::super::{PullOptions, Store};
    use super::*;
    use crate::error::Error;
    use crate::layer::LayerError;
    use crate::{Digest, Result};

    /// Unpacks an image whose only layer is missing.
    fn unpack(store: &Store, cancelled: &Arc<AtomicBool>) -> Result<()> {
        let inner = &store.inner;
        let id = Digest::of(b"id");
        let work = WorkFile::acquire(&inner.layout.rootfs_work(&id, None)).unwrap();
        let (options, cancelled) = (PullOptions::default(), Arc::clone(cancelled));
        inner.unpack(&work, id, &[(id, id)], |_| Ok(0), cancelled, &options)
    }

    #[test]
    fn an_image_is_unpacked_when_there_is_a_place_or_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (runs, cancelled) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let mut taken: Vec<_> = (0..MAX_CONCURRENT_UNPACKS)
            .map(|_| store.inner.places.take(&runs).unwrap())
            .collect();
        let waiting = spawn({
            let (store, cancelled) = (store.clone(), Arc::clone(&cancelled));
            move || unpack(&store, &cancelled)
        });
        sleep(CANCEL_POLL_INTERVAL * 4);
        assert!(!waiting.is_finished());
        cancelled.store(true, Ordering::Relaxed);
        let Err(Error::Layer { source, .. }) = waiting.join().unwrap() else {
            panic!("it was to be cancelled");
        };
        assert!(matches!(source, LayerError::Cancelled));
        // With a place, the unpacking gets as far as the missing layer; the place is free then.
        taken.pop();
        for _ in 0..2 {
            let missing = unpack(&store, &runs).unwrap_err();
            assert!(matches!(missing, Error::Io { .. }), "{missing}");
        }
        assert_eq!(*store.inner.places.free(), 1);
    }
}
