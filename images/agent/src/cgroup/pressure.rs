//! Detects that the guest runs short of memory before its OOM killer runs.
//!
//! While the host waits for that, the containers together have a limit (`memory.high` of the parent
//! of their groups), called the mark. The kernel slows down processes that exceed it, and reclaims
//! caches; the group's `memory.events` change, so nothing has to poll. Then the host is notified,
//! and adds memory while they are slowed down. A host that does not ask again soon has no memory to
//! add: the mark is removed, and the kernel handles the shortage as it always does.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::sync::watch;

use crate::cgroup;

/// Memory that must be left when the host is notified: an eighth, within bounds.
const MIN_RESERVE: u64 = 32 << 20;
const MAX_RESERVE: u64 = 256 << 20;

/// How long containers may be slowed down while the host adds memory.
const THROTTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Delay before the next check if the memory above the mark was only cache.
const RECHECK_DELAY: Duration = Duration::from_secs(1);

/// The mark of the guest's containers. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Pressure {
    /// The request that set the mark last.
    turn: Arc<watch::Sender<u64>>,
}

/// The memory of a guest, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    total: u64,
    /// Unused.
    free: u64,
    /// Available to programs: caches can be reclaimed.
    available: u64,
}

impl Memory {
    fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        Self::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses lines `NAME: NUMBER kB`.
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
            kib.checked_mul(1 << 10)
        };
        Some(Self {
            total: field("MemTotal:")?,
            free: field("MemFree:")?,
            available: field("MemAvailable:")?,
        })
    }

    fn reserve(self) -> u64 {
        (self.total / 8).clamp(MIN_RESERVE, MAX_RESERVE)
    }

    /// Returns whether the host should add memory: besides the reserve, which the mark keeps free,
    /// less than the same amount is available in caches.
    fn is_short(self) -> bool {
        self.available < self.reserve().saturating_mul(2)
    }

    /// Returns the mark for containers that use `current` bytes, caches included.
    fn mark(self, current: u64) -> u64 {
        let most = current.saturating_add(self.free);
        most.saturating_sub(self.reserve())
    }
}

impl Pressure {
    /// Waits until the guest is short of memory. Containers that need more are slowed down then
    /// until this is called again, for some seconds at most.
    ///
    /// # Errors
    ///
    /// The kernel's error; no mark is set then.
    pub async fn wait(&self) -> io::Result<()> {
        let group = cgroup::parent()?;
        let mut turn = 0;
        self.turn.send_modify(|last| {
            *last += 1;
            turn = *last;
        });
        let waited = self.short(&group, turn).await;
        let (pressure, held) = (self.clone(), waited.is_ok());
        tokio::spawn(async move {
            if held {
                tokio::time::sleep(THROTTLE_TIMEOUT).await;
            }
            pressure.release(&group, turn);
        });
        waited
    }

    async fn short(&self, group: &Path, turn: u64) -> io::Result<()> {
        let events = OwnedFd::from(File::open(group.join("memory.events"))?);
        let changes = crate::sys::watch(events, Interest::PRIORITY)?;
        let mut turns = self.turn.subscribe();
        let mut is_first = true;
        while self.is_last(turn) {
            let memory = Memory::read()?;
            if memory.is_short() {
                return Ok(());
            }
            let current = fs::read_to_string(group.join("memory.current"))?;
            let current = current.trim().parse().map_err(io::Error::other)?;
            // Caches beyond it are reclaimed before this returns.
            fs::write(group.join("memory.high"), memory.mark(current).to_string())?;
            tokio::select! {
                ready = changes.ready(Interest::PRIORITY) => ready?.clear_ready(),
                _ = turns.wait_for(|last| *last != turn) => break,
            }
            // The first event only says that the file was never read.
            if !is_first && !Memory::read()?.is_short() {
                tokio::time::sleep(RECHECK_DELAY).await;
            }
            is_first = false;
        }
        // Another request waits instead of this one.
        Err(io::ErrorKind::Interrupted.into())
    }

    fn is_last(&self, turn: u64) -> bool {
        *self.turn.borrow() == turn
    }

    /// Removes the mark, unless another request has set it again.
    fn release(&self, group: &Path, turn: u64) {
        if self.is_last(turn)
            && let Err(error) = fs::write(group.join("memory.high"), "max")
        {
            tracing::warn!(%error, "failed to reset memory.high");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(total: u64, free: u64, cached: u64) -> Memory {
        Memory {
            total: total * MIB,
            free: free * MIB,
            available: (free + cached) * MIB,
        }
    }

    #[test]
    fn a_guests_memory_is_read_from_the_kernels_words() {
        let text = "MemTotal:         230000 kB\nMemFree:  5 kB\nMemAvailable:   1000 kB\n";
        let read = Memory::parse(text).unwrap();
        assert_eq!((read.total, read.available), (230_000 << 10, 1000 << 10));
        assert_eq!(read.free, 5 << 10);
        assert_eq!(Memory::parse("MemTotal: x kB\n"), None);
        assert!(Memory::read().unwrap().available > 0);
    }

    #[test]
    fn the_mark_keeps_an_eighth_free_within_bounds() {
        let mark = |memory: Memory, current: u64| memory.mark(current * MIB) / MIB;
        assert_eq!(mark(memory(224, 150, 0), 50), 50 + 150 - 32);
        assert_eq!(mark(memory(1024, 500, 100), 300), 300 + 500 - 128);
        assert_eq!(mark(memory(8192, 500, 0), 1), 500 - 256 + 1);
        // That much of the caches is reclaimed.
        assert_eq!(mark(memory(224, 2, 150), 180), 180 + 2 - 32);
        assert_eq!(mark(memory(224, 0, 0), 0), 0);
    }

    #[test]
    fn a_guest_with_a_cache_is_not_short() {
        assert!(!memory(224, 32, 32).is_short());
        assert!(memory(224, 32, 31).is_short());
    }
}
