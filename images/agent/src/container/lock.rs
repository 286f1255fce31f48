//! Locks of the containers' tables.

use std::sync::{Mutex, MutexGuard, PoisonError};

// A panic while a lock is held ends the agent, so locks are never poisoned.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
