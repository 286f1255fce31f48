//! The host memory that pods use: all processes before and after, so that nothing that belongs to a
//! pod is missed.

use std::fmt;
use std::fs;

use anyhow::Result;
use serde::Serialize;

use crate::boot::Memory;

/// The sum over all processes, in KiB.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Total {
    pss: u64,
    guest: u64,
}

/// The mean memory of a pod, in MiB.
#[derive(Debug, Default, Serialize)]
pub(super) struct PodMemory {
    /// Proportional set size of everything that belongs to it.
    pub(super) pss_mib: f64,
    /// The same without the guest's memory.
    pub(super) own_mib: f64,
}

/// Adds up all processes except this one; `guest_kib` is the size of a guest's memory, if there are
/// guests.
pub(super) fn of_all(guest_kib: Option<u64>) -> Result<Total> {
    let mut total = Total::default();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let is_process = path
            .file_name()
            .and_then(|name| name.to_str()?.parse::<u32>().ok())
            .is_some_and(|pid| pid != std::process::id());
        if !is_process {
            continue;
        }
        // A process may end meanwhile; kernel threads have no smaps.
        let Ok(smaps) = fs::read_to_string(path.join("smaps")) else {
            continue;
        };
        let pss = pss(&smaps);
        total.pss += pss;
        let own = guest_kib.and_then(|kib| Memory::of(&smaps, kib).ok());
        total.guest += own.map_or(0, |memory| pss.saturating_sub(memory.pss));
    }
    Ok(total)
}

fn pss(smaps: &str) -> u64 {
    let lines = smaps.lines().filter_map(|line| line.strip_prefix("Pss:"));
    let values = lines.filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    values.sum()
}

impl Total {
    /// Returns what each of `pods` has added since `before`.
    pub(super) fn since(self, before: Self, pods: usize) -> PodMemory {
        let share = 1.0 / (1024.0 * pods as f64);
        let grown = |now: u64, then: u64| now.saturating_sub(then) as f64 * share;
        let pss_mib = grown(self.pss, before.pss);
        PodMemory {
            pss_mib,
            own_mib: pss_mib - grown(self.guest, before.guest),
        }
    }
}

impl fmt::Display for PodMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pss_mib, own_mib } = self;
        write!(
            f,
            "an idle pod takes {pss_mib:.1} MiB PSS, {own_mib:.1} without a guest's memory"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_what_came_with_it() {
        let smaps =
            "Size: 8 kB\nPss:                 3 kB\nPss_Dirty: 1 kB\nPss:                 4 kB\n";
        assert_eq!(pss(smaps), 7);
        let before = Total {
            pss: 1024,
            guest: 0,
        };
        let after = Total {
            pss: 1024 + 8192,
            guest: 6144,
        };
        let memory = after.since(before, 2);
        assert_eq!((memory.pss_mib, memory.own_mib), (4.0, 1.0));
    }
}
