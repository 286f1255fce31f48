//! The virtual CPUs and the memory of a machine, of which some may be plugged in.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The size of a machine, and of those that follow its guest's reboots: what was plugged in they
/// begin with. One that comes from elsewhere may have been smaller at its boot.
#[derive(Debug)]
pub(crate) struct MachineSize {
    /// Most CPUs that there may be.
    pub(crate) max_cpus: u8,
    /// CPUs at the first boot.
    first_cpus: u8,
    /// Memory that was asked for, and bytes that may be asked for in addition.
    asked: (u64, u64),
    now: Mutex<Now>,
}

#[derive(Debug, Clone, Copy)]
struct Now {
    cpus: u8,
    /// Memory at boot.
    memory: u64,
    /// Bytes that may be plugged in.
    growth: u64,
    /// Bytes of them that are plugged in, or are to be.
    grown: u64,
}

impl MachineSize {
    /// The size of a machine that boots. `growth` bytes may be plugged in, of which `grown` are
    /// from the start.
    pub(crate) fn new(cpus: u8, max_cpus: u8, memory: u64, growth: u64, grown: u64) -> Self {
        Self {
            max_cpus: max_cpus.max(cpus),
            first_cpus: cpus,
            asked: (memory, growth),
            now: Mutex::new(Now {
                cpus,
                memory,
                growth,
                grown: grown.min(growth),
            }),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the CPUs.
    pub(crate) fn cpus(&self) -> u8 {
        self.now().cpus
    }

    /// Returns whether there may be more CPUs than now, or than at the first boot.
    pub(crate) fn may_get_cpus(&self) -> bool {
        self.max_cpus > self.first_cpus.min(self.cpus())
    }

    /// Sets the CPUs, of which some were plugged in.
    pub(crate) fn set_cpus(&self, count: u8) {
        self.now().cpus = count;
    }

    /// Returns the memory at boot, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.now().memory
    }

    /// Returns the bytes that may be plugged in.
    pub(crate) fn growth(&self) -> u64 {
        self.now().growth
    }

    /// Returns the bytes that are plugged in, or are to be.
    pub(crate) fn grown(&self) -> u64 {
        self.now().grown
    }

    /// Returns all memory, in bytes.
    pub(crate) fn all_memory(&self) -> u64 {
        let now = self.now();
        now.memory.saturating_add(now.grown)
    }

    /// Returns the most memory that there may be, in bytes.
    pub(crate) fn most_memory(&self) -> u64 {
        let (memory, growth) = self.asked;
        memory.saturating_add(growth)
    }

    /// Sets the bytes that are to be plugged in.
    pub(crate) fn set_grown(&self, bytes: u64) {
        self.now().grown = bytes;
    }

    /// Returns the bytes to be plugged in for `bytes` more than was asked for at first; `None` if
    /// there cannot be as many.
    pub(crate) fn to_plug(&self, bytes: u64) -> Option<u64> {
        let (memory, _) = self.asked;
        let now = self.now();
        let wanted = memory.checked_add(bytes)?.saturating_sub(now.memory);
        (wanted <= now.growth).then_some(wanted)
    }

    /// Returns how many bytes there are more than was asked for at first, if `plugged` are plugged
    /// in.
    pub(crate) fn beyond_asked(&self, plugged: u64) -> u64 {
        let (memory, _) = self.asked;
        let all = self.now().memory.saturating_add(plugged);
        all.saturating_sub(memory)
    }

    /// Takes the size of a machine that has come from elsewhere.
    pub(crate) fn arrives(&self, cpus: u8, memory: u64, growth: u64) {
        let (asked, _) = self.asked;
        *self.now() = Now {
            cpus,
            memory,
            growth,
            // It was not asked for more than it had.
            grown: asked.saturating_sub(memory).min(growth),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_is_plugged_in_beyond_what_was_asked_for() {
        let size = MachineSize::new(2, 1, GIB, 3 * GIB, 0);
        assert_eq!((size.cpus(), size.max_cpus), (2, 2));
        assert!(!size.may_get_cpus());
        assert_eq!(size.to_plug(2 * GIB), Some(2 * GIB));
        assert_eq!(size.to_plug(4 * GIB), None);
        assert_eq!(size.to_plug(u64::MAX), None);
        size.set_grown(2 * GIB);
        assert_eq!((size.all_memory(), size.most_memory()), (3 * GIB, 4 * GIB));
        assert_eq!(size.beyond_asked(GIB), GIB);
        let all = MachineSize::new(1, 1, GIB, GIB, 9 * GIB);
        assert_eq!(all.grown(), GIB, "no more than there may be");
    }

    #[test]
    fn a_machine_that_came_may_have_been_smaller_at_boot() {
        // It booted with one GiB and two are plugged in: another node is asked for three.
        let size = MachineSize::new(1, 8, 3 * GIB, GIB, 0);
        size.arrives(4, GIB, 3 * GIB);
        assert_eq!(
            (size.cpus(), size.memory(), size.grown()),
            (4, GIB, 2 * GIB)
        );
        assert_eq!(size.to_plug(0), Some(2 * GIB));
        assert_eq!(size.to_plug(GIB), Some(3 * GIB));
        assert_eq!(size.to_plug(2 * GIB), None);
        assert_eq!(size.beyond_asked(3 * GIB), GIB);
        assert_eq!(size.beyond_asked(0), 0);
    }
}
