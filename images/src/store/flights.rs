//! What this process is working on, so that nobody does it twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Digest;

/// A lock for each thing that is being fetched or made.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>);

impl Flights {
    /// The lock of a thing; it is forgotten when nobody has it.
    pub(super) fn enter(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.get(&digest).and_then(Weak::upgrade) {
            return flight;
        }
        flights.retain(|_, flight| flight.strong_count() > 0);
        let flight = Arc::default();
        flights.insert(digest, Arc::downgrade(&flight));
        flight
    }
}
