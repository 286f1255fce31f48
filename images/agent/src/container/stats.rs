//! Statistics of a container: those of its control group, and those that have to be counted, of its
//! processes and of what it has written.
//!
//! The agent has one thread, and a container determines how much there is to count, so the counting
//! is limited.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use podvisor_agent_protocol::api;
use protobuf::MessageField;
use rustix::process::Pid;

use crate::cgroup::Cgroup;
use crate::container::error::{ContainerError, Result};
use crate::container::lock::lock;
use crate::container::table::Containers;

/// Maximum number of processes that are examined; the others only count as processes.
const MAX_PROCESSES: usize = 1024;
/// Maximum number of descriptors of all of them.
const MAX_DESCRIPTORS: usize = 8192;
/// Maximum number of threads of all of them.
const MAX_TASKS: usize = 4096;
/// The kernel's files are far smaller.
const FILE_BYTES: u64 = 4 << 10;

impl Containers {
    /// Returns the statistics of a container; if `brief`, without those of descriptors, threads and
    /// the guest.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `NotFound`; of kind `WrongState` for one that was released.
    pub fn stats(&self, id: &str, brief: bool) -> Result<api::ContainerStatsResponse> {
        let container = self.get(id)?;
        if container.init.has_ended() && lock(&container.rootfs).is_none() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "not running any more",
            });
        }
        let mut stats = container.cgroup.stats();
        let processes = container.cgroup.countable();
        let pids = stats.pids.mut_or_insert_default();
        pids.processes = processes.len() as u64;
        if !brief {
            count(&processes, pids);
            pids.descriptor_limit = descriptor_limit(&of_process(container.init.pid()));
            Cgroup::add_guest_stats(&mut stats);
        }
        // A container that is being deleted has none.
        if let Some(rootfs) = &*lock(&container.rootfs) {
            stats.writable = MessageField::some(rootfs.writable()?);
        }
        Ok(stats)
    }
}

fn of_process(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

/// Counts descriptors, sockets and threads of processes. A process that ends meanwhile has none.
fn count(pids: &[Pid], stats: &mut api::PidStats) {
    let (mut descriptors, mut tasks) = (MAX_DESCRIPTORS, MAX_TASKS);
    for pid in pids.iter().take(MAX_PROCESSES) {
        let process = of_process(pid.as_raw_nonzero().get().unsigned_abs());
        for entry in fs::read_dir(process.join("fd")).into_iter().flatten() {
            let Some(left) = descriptors.checked_sub(1) else {
                break;
            };
            descriptors = left;
            stats.descriptors += 1;
            let target = entry.and_then(|entry| fs::read_link(entry.path()));
            // `socket:[INODE]`; the name of a file starts with a slash.
            if target.is_ok_and(|target| target.as_os_str().as_bytes().starts_with(b"socket:")) {
                stats.sockets += 1;
            }
        }
        for entry in fs::read_dir(process.join("task")).into_iter().flatten() {
            let Some(left) = tasks.checked_sub(1) else {
                break;
            };
            tasks = left;
            let state = entry.ok().and_then(|entry| {
                let text = read(&entry.path().join("stat"))?;
                state(&text)
            });
            match state {
                Some(b'R') => stats.running += 1,
                // Idle kernel threads, too.
                Some(b'S' | b'I') => stats.sleeping += 1,
                Some(b'T' | b't') => stats.stopped += 1,
                Some(b'D') => stats.uninterruptible += 1,
                _ => {}
            }
        }
    }
}

/// Returns a thread's state in `PID (NAME) STATE …`; a name may contain anything.
fn state(text: &[u8]) -> Option<u8> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    text.get(end..)?
        .iter()
        .skip(1)
        .copied()
        .find(|byte| *byte != b' ')
}

/// Returns the soft limit of a process's descriptors.
fn descriptor_limit(process: &Path) -> u64 {
    let text = read(&process.join("limits")).unwrap_or_default();
    soft_limit(&String::from_utf8_lossy(&text), "Max open files").unwrap_or(0)
}

/// Parses lines `NAME SOFT HARD UNIT`.
fn soft_limit(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .ok()?
        .take(FILE_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn states_and_limits_are_read_whatever_a_program_is_called() {
        assert_eq!(state(b"7 (sh) S 1 7"), Some(b'S'));
        assert_eq!(state(b"7 (a) R (\xff) D 1 7"), Some(b'D'));
        assert_eq!(state(b"7 (a"), None);
        assert_eq!(state(b"7 (a)"), None);
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max processes             unlimited            unlimited      processes\n\
                    Max open files            1024                 4096           files\n";
        assert_eq!(soft_limit(text, "Max open files"), Some(1024));
        assert_eq!(soft_limit(text, "Max processes"), Some(u64::MAX));
        assert_eq!(soft_limit(text, "Max locks"), None);
        assert_eq!(soft_limit("Max open files", "Max open files"), None);
    }

    #[test]
    fn a_process_is_counted_with_its_threads_descriptors_and_sockets() {
        let _sockets: Vec<_> = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
        let own = rustix::process::getpid();
        let mut stats = api::PidStats::new();
        // The second pid does not exist.
        count(&[own, Pid::from_raw(i32::MAX).unwrap()], &mut stats);
        assert!(stats.sockets >= 3, "{stats:?}");
        assert!(stats.descriptors >= stats.sockets + 3, "{stats:?}");
        assert!(stats.running >= 1 && stats.running + stats.sleeping >= 2);
        assert!(descriptor_limit(&of_process(std::process::id())) >= stats.descriptors);
    }

    #[test]
    fn no_more_is_looked_at_than_the_bounds_say() {
        let own = rustix::process::getpid();
        let many = vec![own; MAX_DESCRIPTORS];
        let mut stats = api::PidStats::new();
        count(&many, &mut stats);
        assert!(stats.descriptors <= MAX_DESCRIPTORS as u64);
        let tasks = stats.running + stats.sleeping + stats.stopped + stats.uninterruptible;
        assert!(tasks <= MAX_TASKS as u64);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,60}|([0-9()a-zA-Z ]{0,20}\n){0,4}") {
            let _ = (state(text.as_bytes()), soft_limit(&text, "M"));
        }
    }
}
