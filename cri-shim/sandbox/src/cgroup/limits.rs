//! The limits of a group, and what else of it changes while its process runs.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Once;

use podvisor_host::blocking::in_place;
use tracing::warn;

use super::{CgroupError, group_of, write};
use crate::machine::causes;

/// Memory of a sandbox's process in addition to that of a guest of up to 7 GiB, in bytes: its own,
/// the kernel's for its page tables, sockets and vCPUs, log output that has not reached the disk
/// yet, and the files of a shared directory that its guest knows (nearly 2 KiB each, usually up to
/// 16,384).
pub const MEMORY_OVERHEAD: u64 = 96 << 20;

/// [`MEMORY_OVERHEAD`] without tables of pages.
const WITHOUT_TABLES: u64 = 64 << 20;

/// Returns the memory of a sandbox's process in addition to its guest's, in bytes. The host's page
/// tables and KVM's take 2 MiB each for a GiB of small pages. On older kernels with
/// `CONFIG_KVM_EXTERNAL_WRITE_TRACKING`, such as Debian 12's, KVM has 2 bytes more for each page,
/// from the start, and also for pages by which the guest may grow. Their groups are charged for all
/// of them.
#[must_use]
pub fn memory_overhead(guest: u64, growth: u64) -> u64 {
    let tables = guest / 256 + guest.saturating_add(growth) / 2048;
    MEMORY_OVERHEAD.max(WITHOUT_TABLES + tables)
}

/// CPU time of a sandbox's process in addition to its guest's vCPUs, in thousandths of a CPU: for
/// its devices and streams.
pub const CPU_OVERHEAD_MILLI: u64 = 500;

/// Most threads of a sandbox's process.
const MAX_THREADS: u64 = 8192;

/// Period of the CPU limit in microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// The limits of a machine's guest. Its control group has an overhead in addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineLimits {
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes that may be added while it runs.
    pub growth: u64,
}

impl MachineLimits {
    /// The limit of the control group, in bytes.
    #[must_use]
    pub fn memory_max(self) -> u64 {
        let overhead = memory_overhead(self.memory, self.growth);
        self.memory.saturating_add(overhead)
    }

    /// The limit of the control group, in thousandths of a CPU.
    pub(crate) fn milli_cpus(self) -> u64 {
        u64::from(self.vcpus) * 1000 + CPU_OVERHEAD_MILLI
    }
}

/// Parses `cpu.max` into thousandths of a CPU; `None` if there is no limit, or it is invalid.
pub fn parse_cpu_max(text: &str) -> Option<u64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    quota.saturating_mul(1000).checked_div(period)
}

/// Returns why the group at `path` has no room for a machine's group; `None` if it has.
pub fn lacks_room(path: &Path, limits: MachineLimits) -> Option<String> {
    let lacks = |name: &str, needed: u64, parse: fn(&str) -> Option<u64>| {
        let text = match fs::read_to_string(path.join(name)) {
            Ok(text) => text,
            Err(error) => return Some(format!("failed to read {name}: {error}")),
        };
        // "max" means no limit.
        let has = parse(text.trim())?;
        (has < needed).then(|| format!("{name} is {}, and {needed} is needed", text.trim()))
    };
    lacks("memory.max", limits.memory_max(), |text| text.parse().ok())
        .or_else(|| lacks("cpu.max", limits.milli_cpus(), parse_cpu_max))
}

/// Sets the limits of a new group. Says which the kernel does not have, without a controller or a
/// part of it.
pub(super) fn set_limits(
    path: &Path,
    limits: MachineLimits,
) -> Result<Vec<&'static str>, CgroupError> {
    let values = [
        ("memory.max", limits.memory_max().to_string()),
        ("memory.oom.group", "1".to_owned()),
        ("cpu.max", cpu_max(limits.milli_cpus())),
        ("pids.max", MAX_THREADS.to_string()),
    ];
    let mut missing = Vec::new();
    for (name, value) in &values {
        match write(&path.join(name), value) {
            Err(CgroupError::Step { source, .. })
                if source.kind() == io::ErrorKind::NotFound && missing.len() + 1 < values.len() =>
            {
                missing.push(*name);
            }
            done => done?,
        }
    }
    Ok(missing)
}

/// Says once which limits sandboxes do not have.
pub(super) fn warn_of_missing(missing: &[&str]) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        warn!(
            ?missing,
            "sandboxes lack limits that this host does not have"
        )
    });
}

/// Sets the limit of the sandbox in `dir` to that of a guest of so many vCPUs.
pub(crate) fn limit_cpus(dir: &Path, vcpus: u8) {
    let limits = MachineLimits {
        vcpus,
        memory: 0,
        growth: 0,
    };
    set(dir, "cpu.max", &cpu_max(limits.milli_cpus()));
}

/// Writes a file of the group of the sandbox in `dir`, if it has one.
fn set(dir: &Path, name: &str, value: &str) {
    if let Some(group) = group_of(dir) {
        set_in(&group, name, value);
    }
}

/// Writes a file of a group. One that the host lacks was named in a warning when the group was
/// created.
fn set_in(group: &Path, name: &str, value: &str) {
    match write(&group.join(name), value) {
        Err(CgroupError::Step { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        Err(error) => warn!(
            name,
            error = causes(&error),
            "failed to set a value of a sandbox's control group"
        ),
        Ok(()) => {}
    }
}

/// Sets the share of CPU time that the sandbox in `dir` gets under contention, in the unit of
/// cgroup v1's `cpu.shares`.
pub(crate) fn set_cpu_weight(dir: &Path, shares: u64) {
    set(dir, "cpu.weight", &cpu_weight(shares).to_string());
}

/// Converts 2 to 262,144 shares to a weight of 1 to 10,000, as kubelets do for the group of a pod.
///
/// For the groups of containers, runc (since 1.3.2), crun (since 1.23) and the agent have a
/// quadratic formula. The two need not agree: weights apply among groups of the same parent.
fn cpu_weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9_999 / 262_142
}

/// Sets how much of the host's swap the sandbox in `dir` may use, in bytes; `None` is no limit.
pub(crate) fn limit_swap(dir: &Path, bytes: Option<u64>) {
    let limit = bytes.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
    set(dir, "memory.swap.max", &limit);
}

fn cpu_max(milli_cpus: u64) -> String {
    format!("{} {CPU_PERIOD_US}", milli_cpus * CPU_PERIOD_US / 1000)
}

/// Raises the limit of the sandbox in `dir` to that of a guest of `memory` bytes, which was
/// launched for `growth`, unless it is higher.
pub(crate) fn allow_memory(dir: &Path, memory: u64, growth: u64) {
    set_memory(dir, memory, growth, |now, wanted| now < wanted);
}

/// Sets the limit of the sandbox in `dir` to that of a guest of `memory` bytes, which was launched
/// for `growth`.
pub(crate) fn limit_memory(dir: &Path, memory: u64, growth: u64) {
    set_memory(dir, memory, growth, |now, wanted| now != wanted);
}

fn set_memory(dir: &Path, memory: u64, growth: u64, is_due: impl FnOnce(u64, u64) -> bool) {
    // A sandbox without a group has no limit.
    let Some(group) = group_of(dir) else { return };
    set_memory_of(&group, memory, growth, is_due);
}

pub(super) fn set_memory_of(
    group: &Path,
    memory: u64,
    growth: u64,
    is_due: impl FnOnce(u64, u64) -> bool,
) {
    let file = group.join("memory.max");
    let wanted = memory.saturating_add(memory_overhead(memory, growth));
    let set = || {
        // "max" means no limit.
        let now = fs::read_to_string(&file).map(|text| text.trim().parse().unwrap_or(u64::MAX));
        match now.is_ok_and(|now| is_due(now, wanted)) {
            true => write(&file, &wanted.to_string()),
            false => Ok(()),
        }
    };
    // The kernel reclaims memory above a limit before the write returns.
    if let Err(error) = in_place(set) {
        warn!(
            error = causes(&error),
            "failed to set a sandbox's cgroup limit"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn shares_become_weights() {
        let weights = [0, 2, 1024, 262_144, u64::MAX].map(cpu_weight);
        assert_eq!(weights, [1, 1, 39, 10_000, 10_000]);
    }

    #[test]
    fn a_large_guests_page_tables_have_room() {
        let gib = 1 << 30;
        let max = |memory, growth| {
            let vcpus = 1;
            MachineLimits {
                vcpus,
                memory,
                growth,
            }
            .memory_max()
        };
        let overhead = |guest| max(guest, 0) - guest;
        assert_eq!([0, gib, 7 * gib].map(overhead), [MEMORY_OVERHEAD; 3]);
        assert_eq!(overhead(128 * gib), (64 << 20) + 128 * (9 << 19));
        // What a guest may grow by takes half a MiB for each GiB from the start.
        assert_eq!(max(5 * gib, 16 * gib) - 5 * gib, MEMORY_OVERHEAD);
        assert_eq!(
            max(gib, 1024 * gib) - gib,
            (64 << 20) + (9 << 19) + (512 << 20)
        );
        assert_eq!([max(u64::MAX, 0), max(u64::MAX, u64::MAX)], [u64::MAX; 2]);
    }

    #[test]
    fn a_new_limit_still_has_room_for_what_the_guest_may_grow_by() {
        let group = tempfile::tempdir().unwrap();
        let file = group.path().join("memory.max");
        let limits = MachineLimits {
            vcpus: 1,
            memory: 1 << 30,
            growth: 1 << 40,
        };
        fs::write(&file, "1\n").unwrap();
        set_memory_of(group.path(), limits.memory, limits.growth, |now, wanted| {
            now < wanted
        });
        let written = fs::read_to_string(&file).unwrap();
        assert_eq!(written, limits.memory_max().to_string());
    }

    #[test]
    fn a_group_without_a_controller_has_the_other_limits() {
        let group = tempfile::tempdir().unwrap();
        let file = |name: &str| group.path().join(name);
        let limits = MachineLimits {
            vcpus: 1,
            memory: 7,
            growth: 0,
        };
        assert!(set_limits(group.path(), limits).is_err());
        for name in ["memory.max", "pids.max"] {
            fs::write(file(name), "max").unwrap();
        }
        let missing = set_limits(group.path(), limits).unwrap();
        assert_eq!(missing, ["memory.oom.group", "cpu.max"]);
        let read = |name| fs::read_to_string(file(name)).unwrap();
        assert_eq!(read("memory.max"), (MEMORY_OVERHEAD + 7).to_string());
        assert_eq!(read("pids.max"), "8192");
        assert!(!file("cpu.max").exists());
    }

    #[test]
    fn a_value_is_set_where_the_host_has_its_file_and_no_file_is_created() {
        let group = tempfile::tempdir().unwrap();
        let file = group.path().join("memory.swap.max");
        set_in(group.path(), "memory.swap.max", "7");
        assert!(!file.exists());
        fs::write(&file, "max").unwrap();
        set_in(group.path(), "memory.swap.max", "7");
        assert_eq!(fs::read_to_string(&file).unwrap(), "7");
    }

    /// A FIFO stands in for a limit that the kernel takes its time for.
    #[test]
    fn other_tasks_go_on_while_the_kernel_takes_memory_back() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().to_owned();
        let limit = group.join("memory.max");
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, &limit, FileType::Fifo, mode, 0).unwrap();
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).build().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let sets = runtime.spawn(async move {
            tokio::spawn(async move { sender.send(()) });
            set_memory_of(&group, 7, 0, |now, wanted| now < wanted);
        });
        let others = receiver.recv_timeout(Duration::from_secs(10));
        // The task reads the present limit, and writes the new one.
        fs::write(&limit, "1\n").unwrap();
        let written = fs::read_to_string(&limit).unwrap();
        runtime.block_on(sets).unwrap();
        others.expect("the only worker waits");
        assert_eq!(written, (MEMORY_OVERHEAD + 7).to_string());
    }

    #[test]
    fn a_group_has_room_for_a_machine_when_it_allows_what_the_machines_own_does() {
        let group = tempfile::tempdir().unwrap();
        let limits = MachineLimits {
            vcpus: 2,
            memory: 256 << 20,
            growth: 0,
        };
        let lacks = |memory: &str, cpu: &str| {
            fs::write(group.path().join("memory.max"), format!("{memory}\n")).unwrap();
            fs::write(group.path().join("cpu.max"), format!("{cpu}\n")).unwrap();
            lacks_room(group.path(), limits)
        };
        let enough = (352u64 << 20).to_string();
        assert_eq!(lacks("max", "max 100000"), None);
        assert_eq!(lacks(&enough, "250000 100000"), None);
        let little = ((352u64 << 20) - 1).to_string();
        let why = lacks(&little, "max 100000").unwrap();
        assert!(
            why.contains("memory.max is 369098751, and 369098752"),
            "{why}"
        );
        let why = lacks("max", "249000 100000").unwrap();
        assert_eq!(why, "cpu.max is 249000 100000, and 2500 is needed");
        fs::remove_file(group.path().join("cpu.max")).unwrap();
        let why = lacks_room(group.path(), limits).unwrap();
        assert!(
            why.starts_with("memory.max") || why.contains("cpu.max"),
            "{why}"
        );
    }
}
