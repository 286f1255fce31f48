//! Limits of the file descriptors that a guest can make this process hold: files of shared
//! directories, and connections.
//!
//! All devices of a guest together may hold fewer descriptors than the process may have (the soft
//! limit of `RLIMIT_NOFILE` when a device is created), so that no guest can bring the process to
//! the point where it cannot open anything. All shared directories together get half of the limit;
//! the socket device of a guest gets a quarter for connections and a sixteenth for host programs
//! that have not yet sent their request. A device that was configured with its own limit uses that
//! one instead.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::process::{Resource, getrlimit};

/// The maximum number of connections of a guest, however many descriptors are available. Each
/// connection takes up to two: the device's end, and that of a program in this process.
pub(crate) const MAX_CONNECTIONS: usize = 1024;
const MIN_CONNECTIONS: usize = 8;

/// The maximum number of host programs that have not sent their line, however many descriptors are
/// available.
pub(crate) const MAX_HANDSHAKES: usize = 256;
const MIN_HANDSHAKES: usize = 4;

const MIN_FILES: usize = 32;

/// The limits of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Objects and handles of all shared directories.
    pub(crate) files: usize,
    /// Connections of a socket device.
    pub(crate) connections: usize,
    /// Host programs that have not yet sent their request.
    pub(crate) handshakes: usize,
}

impl Shares {
    /// Computes them from the current soft limit.
    pub(crate) fn now() -> Self {
        Self::of(getrlimit(Resource::Nofile).current)
    }

    /// Sets the maximum number of connections, and of handshakes if they may be more.
    pub(crate) fn limit_connections(&mut self, limit: usize) {
        self.connections = limit.min(MAX_CONNECTIONS);
        self.handshakes = self.handshakes.min(limit);
    }

    fn of(limit: Option<u64>) -> Self {
        let limit = usize::try_from(limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
        Self {
            files: (limit >> 1).max(MIN_FILES),
            connections: (limit >> 3).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS),
            handshakes: (limit >> 4).clamp(MIN_HANDSHAKES, MAX_HANDSHAKES),
        }
    }
}

/// A limit on descriptors, of one device or shared by several.
#[derive(Clone, Debug)]
pub(crate) struct Quota {
    most: usize,
    taken: Arc<AtomicUsize>,
}

/// One descriptor's share of a [`Quota`], released when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Quota {
    /// Returns a quota of `most` for one device only.
    pub(crate) fn own(most: usize) -> Self {
        Self {
            most,
            taken: Arc::default(),
        }
    }

    /// Returns the quota that all shared directories of this process share.
    pub(crate) fn of_files() -> Self {
        static FILES: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
        Self {
            most: Shares::now().files,
            taken: FILES.get_or_init(Arc::default).clone(),
        }
    }

    /// Returns the maximum number of descriptors.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Whether `count` permits are free now.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        taken.saturating_add(count) <= self.most
    }

    /// Takes one permit; `None` if all are taken.
    pub(crate) fn take(&self) -> Option<Permit> {
        let one_more = |taken: usize| taken.checked_add(1).filter(|taken| *taken <= self.most);
        let order = Ordering::Relaxed;
        self.taken
            .fetch_update(order, order, one_more)
            .ok()
            .map(|_| Permit(self.taken.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_devices_have_less_than_the_process_may_have() {
        for limit in [128, 256, 300, 1024, 4096, 65_536, 1 << 20, u64::MAX] {
            let Shares {
                files,
                connections,
                handshakes,
            } = Shares::of(Some(limit));
            let all = files as u64 + 2 * connections as u64 + handshakes as u64;
            assert!(all <= limit / 8 * 7, "{all} of {limit}");
        }
        let most = Shares::of(None);
        assert_eq!((most.connections, most.handshakes), (1024, 256));
    }

    #[test]
    fn a_quota_is_given_out_once_and_again_when_it_comes_back() {
        let quota = Quota::own(2);
        let (one, two) = (quota.take().unwrap(), quota.clone().take());
        assert!(two.is_some() && quota.take().is_none());
        drop(one);
        let _three = quota.take().unwrap();
        assert!(quota.take().is_none());
        assert!(Quota::own(0).take().is_none());
        let all = Quota::of_files();
        assert!(Arc::ptr_eq(&all.taken, &Quota::of_files().taken));
    }
}
