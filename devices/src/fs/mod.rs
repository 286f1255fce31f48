//! The file system device (§5.11): one directory of the host, shared with the guest.
//!
//! # How data enters and leaves
//!
//! A request of the guest's FUSE client is a chain. What is parsed of it is copied once, into
//! memory that the guest does not see (`exchange`); data of reads and writes stay where they
//! are. `fuse-backend-rs` decodes requests and encodes replies, never beyond the chain's
//! writable part; `tree` carries them out on the host's file system.
//!
//! # What holds against a hostile client
//!
//! * Names are single components; `.`, `..` and slashes are refused. Symbolic links are never
//!   followed by the host: the guest resolves them.
//! * Only regular files and directories are ever opened. Devices cannot be created.
//! * The client works with numbers that the device gave out: objects it did not look up, and
//!   handles of other objects, do not exist for it.
//! * The number of objects and handles has a limit; nothing is kept of forgotten ones.
//! * Mounts below the root are seen as mounts, at any time; one that is read-only on the host
//!   is read-only. Where the root is made of mount points alone, the client can be kept from
//!   changing it: the host mounts on names that nobody else moves.
//!
//! * Users of the guest are those of the host with the same numbers, or with the numbers that
//!   an [`IdMap`] gives: an unmapped host id appears as `nobody` in the guest, and an unmapped guest id cannot own a file.
//!
//! # What it must not know
//!
//! Paths: the root is a descriptor, and after that the device opens nothing by an absolute path.

mod device;
mod exchange;
mod tree;

pub use device::{FsDevice, FsDeviceError, MAX_TAG_LEN};
pub use tree::IdMap;
