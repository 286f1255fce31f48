//! Work in progress in this process, so that it is not done twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Digest;

/// A thing that is being fetched or created. A registry decides what an image's digests are, and
/// may give one digest to things of several kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flight {
    /// The root file system of an image. Its holder waits for blobs.
    Rootfs(Digest),
    /// A blob. Its holder waits for no other flight.
    Blob(Digest),
    /// A disk image, by the digest of its URL.
    Disk(Digest),
}

/// A lock for each thing that is being fetched or created.
#[derive(Debug, Default)]
pub(super) struct SingleFlight(Mutex<HashMap<Flight, Weak<tokio::sync::Mutex<()>>>>);

impl SingleFlight {
    /// Returns the lock of a thing; it is forgotten when no one holds it.
    pub(super) fn enter(&self, thing: Flight) -> Arc<tokio::sync::Mutex<()>> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.get(&thing).and_then(Weak::upgrade) {
            return flight;
        }
        flights.retain(|_, flight| flight.strong_count() > 0);
        let flight = Arc::default();
        flights.insert(thing, Arc::downgrade(&flight));
        flight
    }
}
