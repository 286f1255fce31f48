//! What this process is working on, so that nobody does it twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Digest;

/// A thing that is being fetched or made. A registry says what an image's digests are, and may give
/// one digest to things of several kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flight {
    /// The root file system of an image. Whoever makes it waits for blobs.
    Rootfs(Digest),
    /// A blob. Whoever fetches it waits for nothing else here.
    Blob(Digest),
    /// A disk image, by the digest of its address.
    Disk(Digest),
}

/// A lock for each thing that is being fetched or made.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<Flight, Weak<tokio::sync::Mutex<()>>>>);

impl Flights {
    /// The lock of a thing; it is forgotten when nobody has it.
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
