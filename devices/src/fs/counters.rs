//! The counters of a file system device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fuse_backend_rs::abi::fuse_abi::OutHeader;
use rustix::io::Errno;

use super::tree::{Counters as TreeCounters, Tree};
use crate::GuestRam;
use crate::virtio::{Chain, Count, Counter, Latency, ReadCounters};

/// `struct fuse_out_header`.
pub(super) const REPLY_HEADER_LEN: usize = size_of::<OutHeader>();

/// Errors by which a file system answers questions: about names, attributes and functions that it
/// does not have, and about names that it has already.
const COMMON_ERRORS: [Errno; 4] = [Errno::NOENT, Errno::NODATA, Errno::EXIST, Errno::NOSYS];

/// The counters of a device since it was created.
#[derive(Debug)]
pub(super) struct Counters {
    pub(super) requests: Count,
    pub(super) malformed: Count,
    errors: Count,
    pub(super) latency: Latency,
    tree: Arc<TreeCounters>,
}

impl Counters {
    pub(super) fn of(tree: &Tree) -> Arc<Self> {
        Arc::new(Self {
            requests: Count::default(),
            malformed: Count::default(),
            errors: Count::default(),
            latency: Latency::default(),
            tree: tree.counters(),
        })
    }

    /// Counts the reply of `len` bytes in a chain if it is an error that programs do not meet all
    /// the time. It is read from the guest's memory, since `fuse-backend-rs` does not return it: a
    /// guest can falsify its own counter.
    pub(super) fn note_error(&self, chain: &Chain, mem: &GuestRam, len: usize) {
        // An error has nothing behind its header.
        if len != REPLY_HEADER_LEN {
            return;
        }
        let mut error = [0; 4];
        if chain.read_back(mem, size_of::<u32>(), &mut error).is_err() {
            return;
        }
        let error = i32::from_le_bytes(error).saturating_neg();
        let is_common = COMMON_ERRORS.iter().any(|one| one.raw_os_error() == error);
        if error != 0 && !is_common {
            self.errors.one();
        }
    }
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        let now = |name, count: &AtomicU64| Counter {
            name,
            value: count.load(Ordering::Relaxed),
        };
        let mut all = vec![
            self.requests.named("requests"),
            self.malformed.named("malformed_requests"),
            self.errors.named("errors"),
            self.tree.read_bytes.named("read_bytes"),
            self.tree.written_bytes.named("written_bytes"),
            now("open_objects", &self.tree.objects),
            now("open_handles", &self.tree.handles),
        ];
        all.extend(self.latency.read());
        all
    }
}
