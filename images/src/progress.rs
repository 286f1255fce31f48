//! What a pull reports while it runs.

use tokio::sync::mpsc::UnboundedSender;

use crate::Digest;

/// Where a pull's events go. Sending never blocks, and a receiver that went away is no error.
pub type PullEvents = UnboundedSender<PullEvent>;

/// One step of a pull, in the order in which things happen; layers interleave.
///
/// `LayerBytes` comes at most once per MiB and layer, so a slow receiver holds little memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PullEvent {
    /// The registry is being asked what the reference stands for.
    Resolving {
        /// The full reference, short forms resolved.
        reference: String,
    },
    /// The manifest is known, and with it how much there is to do.
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
    /// So many bytes of a layer have arrived. A retry that cannot resume starts at 0 again.
    LayerBytes {
        /// The layer.
        layer: Digest,
        /// Bytes on disk so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// The registry failed in a way that may pass; the request is repeated.
    Retrying {
        /// What failed, in one line.
        reason: String,
        /// Number of the coming attempt, from 2.
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
    /// Another pull, of this or another process, fetches this disk image; this one waits for it.
    DiskWaiting,
    /// So many bytes of a disk image's file have arrived, and were converted or wait for it. A
    /// retry that cannot resume starts at 0 again.
    DiskBytes {
        /// Bytes so far.
        done: u64,
        /// Bytes in all, when the server says so.
        total: Option<u64>,
    },
    /// The image is in the store under its name.
    Done {
        /// The image's id.
        id: Digest,
        /// False when the store had the image, whatever its name, before this pull.
        new: bool,
    },
}
