//! The file system device (§5.11): one directory of the host, shared with the guest.
//!
//! # How data enters and leaves
//!
//! A request of the guest's FUSE client is a chain. The part that is parsed is copied once, into
//! memory that the guest does not see (`exchange`); data of reads and writes is not copied.
//! `fuse-backend-rs` decodes requests and encodes replies, never beyond the chain's writable part;
//! `tree` carries them out on the host's file system.
//!
//! # Protection against a hostile client
//!
//! * Names are single components; `.`, `..` and slashes are refused. Symbolic links are never
//!   followed by the host: the guest resolves them.
//! * Only regular files and directories are ever opened. Devices cannot be created.
//! * The client uses numbers that the device assigned: it cannot refer to objects that it did not
//!   look up, or to handles of other objects.
//! * The number of objects and handles has a limit; forgotten ones leave no state behind.
//! * Mounts below the root appear as mounts, whenever they are created; one that is read-only on
//!   the host is read-only in the guest. If the root consists only of mount points, the client can
//!   be prevented from changing it: then the host mounts on names that only it can move.
//!
//! * Users of the guest are those of the host with the same numbers, or with the numbers that an
//!   [`IdMap`] gives: an unmapped host id appears as `nobody` in the guest, and an unmapped guest
//!   id cannot own a file.
//!
//! # What it must not know
//!
//! Paths: the root is a descriptor, and after that the device opens nothing by an absolute path.

mod counters;
mod device;
mod exchange;
mod tree;

pub use device::{FsDevice, FsDeviceError, MAX_TAG_LEN};
pub use tree::{FsProcess, IdMap};
