//! Progress events of a pull.

use tokio::sync::mpsc::UnboundedSender;

use crate::Digest;

/// The channel for a pull's events. Sending never blocks, and a dropped receiver is not an error.
pub type PullEvents = UnboundedSender<PullEvent>;

/// One step of a pull, in the order in which things happen; layers interleave.
///
/// `LayerBytes` comes at most once per MiB and layer, so a slow receiver holds little memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PullEvent {
    /// The registry is being asked to resolve the reference.
    Resolving {
        /// The full reference, short forms resolved.
        reference: String,
    },
    /// The manifest is known, and with it the amount of work.
    Resolved {
        /// Digest of the image's manifest (the platform's, when there is an index).
        manifest: Digest,
        /// Each layer's digest and size in bytes as the registry sends it, base first.
        layers: Vec<(Digest, u64)>,
    },
    /// A signature by a trusted key was found; there may be several.
    Verified {
        /// Fingerprint of the key: the SHA-256 of its `SubjectPublicKeyInfo` in DER.
        key: Digest,
    },
    /// The layer need not be fetched: the store has it.
    LayerPresent {
        /// The layer.
        layer: Digest,
    },
    /// Another pull, of this or another process, fetches this layer; this one waits for it.
    LayerWaiting {
        /// The layer.
        layer: Digest,
    },
    /// `done` bytes of a layer have arrived. A retry that cannot resume starts at 0 again.
    LayerBytes {
        /// The layer.
        layer: Digest,
        /// Bytes on disk so far.
        done: u64,
        /// Bytes in total.
        total: u64,
    },
    /// The registry failed with an error that may be temporary; the request is retried.
    Retrying {
        /// What failed, in one line.
        reason: String,
        /// Number of the next attempt, starting at 2.
        attempt: u32,
    },
    /// The layer is complete and its digest is right.
    LayerDone {
        /// The layer.
        layer: Digest,
    },
    /// The layer is being added to the image's file system.
    Unpacking {
        /// The layer.
        layer: Digest,
    },
    /// Another pull or load, of this or another process, makes the image's file system; this one
    /// waits for it. Comes at most once.
    RootfsWaiting,
    /// Another pull, of this or another process, fetches this disk image; this one waits for it.
    DiskWaiting,
    /// `done` bytes of a disk image's file have arrived and were converted or wait for conversion.
    /// A retry that cannot resume starts at 0 again.
    DiskBytes {
        /// Bytes so far.
        done: u64,
        /// Bytes in total, if the server reports it.
        total: Option<u64>,
    },
    /// The image is in the store under its name.
    Done {
        /// The image's id.
        id: Digest,
        /// False if the store had the image, under any name, before this pull.
        new: bool,
    },
}
