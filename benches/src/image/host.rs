//! The host's memory statistics, in KiB.

use std::fs;

use anyhow::{Context, Result};

/// The host's memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostMemory {
    /// Memory that is available without swapping.
    pub(super) available: u64,
    /// Page tables of processes, and of KVM.
    pub(super) tables: u64,
}

/// The private memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Private {
    pub(super) kib: u64,
}

impl HostMemory {
    pub(super) fn now() -> Result<Self> {
        Self::of(&fs::read_to_string("/proc/meminfo")?)
    }

    fn of(meminfo: &str) -> Result<Self> {
        Ok(Self {
            available: sum(meminfo, &["MemAvailable:"]).context("no MemAvailable")?,
            tables: sum(meminfo, &["PageTables:", "SecPageTables:"]).context("no PageTables")?,
        })
    }
}

impl Private {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kib = sum(&smaps, &["Private_Clean:", "Private_Dirty:"]);
        Ok(Self {
            kib: kib.context("no private memory")?,
        })
    }
}

/// Returns the sum of the existing fields; `None` if there are none.
fn sum(text: &str, fields: &[&str]) -> Option<u64> {
    let values = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let field = words.next()?;
        fields
            .contains(&field)
            .then(|| words.next()?.parse::<u64>().ok())?
    });
    values.reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_added_and_must_be_there() {
        let text = "MemFree: 5 kB\nMemAvailable:  70 kB\nPageTables: 3 kB\nSecPageTables: 4 kB\n";
        let memory = HostMemory::of(text).unwrap();
        assert_eq!((memory.available, memory.tables), (70, 7));
        assert!(HostMemory::of("PageTables: 3 kB\n").is_err());
        assert_eq!(sum(text, &["Swap:"]), None);
    }

    #[test]
    fn a_process_has_private_memory() {
        assert!(Private::of(std::process::id()).unwrap().kib > 0);
    }
}
