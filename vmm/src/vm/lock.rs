//! The locks of a VM.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what no panic leaves in an inconsistent state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves what it guards consistent, even one that panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
