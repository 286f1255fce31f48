//! The host memory of a machine.

use std::fs;

use serde_json::{Value, json};

use crate::cli::size;

/// Memory of a machine's process, including its guest's, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct HostMemory {
    /// Pages that no other process maps; they are freed when the machine ends.
    pub(super) private: u64,
    /// Pages that others map, too, for example those of a template of several machines.
    pub(super) shared: u64,
    /// Private pages, and a proportional part of each shared one.
    pub(super) proportional: u64,
}

impl HostMemory {
    /// Returns that of a process; `None` if the kernel denies it.
    pub(super) fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut memory = Self::default();
        let mut is_there = false;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some(name), Some(kilobytes)) = (words.next(), words.next()) else {
                continue;
            };
            let sum = match name {
                "Pss:" => {
                    is_there = true;
                    &mut memory.proportional
                }
                "Private_Clean:" | "Private_Dirty:" | "Private_Hugetlb:" => &mut memory.private,
                "Shared_Clean:" | "Shared_Dirty:" | "Shared_Hugetlb:" => &mut memory.shared,
                _ => continue,
            };
            let bytes = kilobytes.parse::<u64>().ok()?.checked_mul(1024)?;
            *sum = sum.saturating_add(bytes);
        }
        is_there.then_some(memory)
    }

    pub(super) fn view(self) -> Value {
        json!({
            "Private": self.private,
            "Shared": self.shared,
            "Proportional": self.proportional,
        })
    }
}

/// Formats private and shared memory for people.
pub(super) fn shown(memory: Option<HostMemory>) -> String {
    memory.map_or_else(
        || "-".to_owned(),
        |memory| {
            format!(
                "{} (+{} shared)",
                size::human(memory.private),
                size::human(memory.shared)
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_and_shared_pages_are_told_apart() {
        let text = "5600-7ffc ---p 00000000 00:00 0  [rollup]\nRss: 100 kB\nPss: 40 kB\n\
                    Pss_Dirty: 1 kB\nShared_Clean: 60 kB\nShared_Dirty: 4 kB\n\
                    Private_Clean: 6 kB\nPrivate_Dirty: 30 kB\nPrivate_Hugetlb: 0 kB\n";
        let memory = HostMemory {
            private: 36 << 10,
            shared: 64 << 10,
            proportional: 40 << 10,
        };
        assert_eq!(HostMemory::parse(text), Some(memory));
        assert_eq!(HostMemory::parse(""), None);
        assert_eq!(HostMemory::parse("Pss: x kB"), None);
    }

    #[test]
    fn a_process_has_memory() {
        let own = HostMemory::of(std::process::id()).unwrap();
        assert!(
            own.private > 0 && own.proportional >= own.private,
            "{own:?}"
        );
    }
}
