//! A container's control group: statistics, signals to all processes, removal.
//!
//! libcontainer sets the limits and moves the processes into it.

pub mod devices;
pub mod pressure;
pub mod psi;

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use podvisor_agent_protocol::api::{
    ContainerStatsResponse, CpuStats, IoStats, MemoryStats, PidStats,
};
use protobuf::MessageField;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;

use crate::reaper::now_ns;

/// Where cgroup v2 is mounted.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Parent of all containers' groups, in the form of `linux.cgroupsPath`.
const PARENT: &str = "/podvisor";
/// The kernel's files are far smaller; a container cannot make them exceed this.
const FILE_BYTES: u64 = 256 << 10;
/// Maximum number of groups that a container may nest below its own and still be signalled in.
const MAX_GROUPS: usize = 10_000;
/// Maximum number of groups whose processes are counted.
const COUNTED_GROUPS: usize = 1000;
/// Killed processes end immediately, unless they are in an uninterruptible system call.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(10);

/// A container's control group.
#[derive(Debug, Clone)]
pub struct Cgroup {
    /// As in the specification's `linux.cgroupsPath`.
    relative: PathBuf,
    path: PathBuf,
}

impl Cgroup {
    /// Returns the group of the container with this name; it need not exist yet.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let relative = Path::new(PARENT).join(name);
        let path = Path::new(CGROUP_ROOT).join(relative.strip_prefix("/").unwrap_or(&relative));
        Self { relative, path }
    }

    /// Creates the group, with every controller, before libcontainer uses it.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn create(&self) -> io::Result<()> {
        parent()?;
        fs::create_dir(&self.path)
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the value for the specification's `linux.cgroupsPath`.
    #[must_use]
    pub fn spec_path(&self) -> &Path {
        &self.relative
    }

    /// Kills every process in the group and below it.
    ///
    /// # Errors
    ///
    /// The kernel's error; a group that does not exist is not an error.
    pub fn kill(&self) -> io::Result<()> {
        accept_missing(fs::write(self.path.join("cgroup.kill"), "1"))
    }

    /// Sends a signal to every process in the group and below it.
    ///
    /// A child of a process that forks meanwhile may be missed; only [`Cgroup::kill`] is sure to
    /// reach all.
    ///
    /// # Errors
    ///
    /// Errors of reading the group.
    pub fn signal(&self, signal: u8) -> io::Result<()> {
        for pid in self.processes()? {
            // After the listing the pid may have been reused for another process, so check that it
            // is still in the group once the pidfd holds it.
            let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            if self.contains(pid)
                && let Err(error) = crate::sys::pidfd_send_signal(&pidfd, signal)
                && error.raw_os_error() != Some(libc::ESRCH)
            {
                return Err(error);
            }
        }
        Ok(())
    }

    fn processes(&self) -> io::Result<Vec<Pid>> {
        let mut pids = Vec::new();
        let mut groups = vec![self.path.clone()];
        let mut seen = 0;
        while let Some(group) = groups.pop() {
            seen += 1;
            if seen > MAX_GROUPS {
                return Err(io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    "too many nested groups",
                ));
            }
            pids.extend(listed(&group)?);
            groups.extend(subgroups(&group)?);
        }
        Ok(pids)
    }

    /// Returns the processes in the group and below it, as far as they can be listed in bounded
    /// time.
    #[must_use]
    pub fn countable(&self) -> Vec<Pid> {
        let mut pids = Vec::new();
        let mut groups = vec![self.path.clone()];
        for _ in 0..COUNTED_GROUPS {
            let Some(group) = groups.pop() else {
                break;
            };
            // A threaded group lists none: its processes are those of a group above it. Others may
            // disappear meanwhile.
            pids.extend(listed(&group).into_iter().flatten());
            groups.extend(subgroups(&group).unwrap_or_default());
        }
        pids
    }

    fn contains(&self, pid: Pid) -> bool {
        self.position(pid).is_some()
    }

    /// Returns the group below this one that a process is in; `None` if it is in this one, or
    /// elsewhere.
    #[must_use]
    pub fn nested(&self, pid: Pid) -> Option<String> {
        self.position(pid).filter(|group| !group.is_empty())
    }

    fn position(&self, pid: Pid) -> Option<String> {
        let of_process = read(Path::new(&format!("/proc/{pid}/cgroup"))).ok()?;
        self.position_in(&of_process)
    }

    /// Parses a process's `/proc/PID/cgroup` for its position below this group, which containers
    /// may choose.
    fn position_in(&self, of_process: &str) -> Option<String> {
        // One line, `0::/podvisor/NAME…`.
        let mut groups = of_process
            .lines()
            .filter_map(|line| line.strip_prefix("0::"));
        let below = groups.find_map(|group| Path::new(group).strip_prefix(&self.relative).ok())?;
        let is_name = |part| matches!(part, Component::Normal(_));
        if !below.components().all(is_name) {
            return None;
        }
        below.to_str().map(str::to_owned)
    }

    /// Ends all processes, and removes the groups that they have nested in this one, so that
    /// processes can be put into it as into a new one. Its limits and its rules for devices stay.
    ///
    /// # Errors
    ///
    /// `TimedOut` if processes do not end, otherwise the kernel's error.
    pub async fn reset(&self) -> io::Result<()> {
        self.empty().await?;
        remove_subgroups(&self.path, 0)?;
        // A group that has controllers for groups below it accepts no processes.
        accept_missing(disable_controllers(&self.path))
    }

    /// Kills the remaining processes and waits until they are gone.
    async fn empty(&self) -> io::Result<()> {
        self.kill()?;
        tokio::time::timeout(EMPTY_TIMEOUT, self.emptied())
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Kills the remaining processes, waits until they are gone, and removes the group.
    ///
    /// # Errors
    ///
    /// As [`Self::reset`].
    pub async fn destroy(&self) -> io::Result<()> {
        self.empty().await?;
        remove(&self.path, 0)
    }

    /// Waits until no process is in the group or below it.
    async fn emptied(&self) -> io::Result<()> {
        let events = self.path.join("cgroup.events");
        let file = match File::open(&events) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => OwnedFd::from(other?),
        };
        // The kernel reports a change of the file as an exceptional condition.
        let changes = crate::sys::watch(file, Interest::PRIORITY)?;
        loop {
            if field(&read(&events)?, "populated") == Some(0) {
                return Ok(());
            }
            changes.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }

    /// Returns how often the OOM killer killed a process in the group.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        self.file("memory.events")
            .and_then(|text| field(&text, "oom_kill"))
            .unwrap_or(0)
    }

    /// Returns the memory that the group uses and that the kernel cannot reclaim immediately, in
    /// bytes: all except page cache and reclaimable slab.
    #[must_use]
    pub fn memory_in_use(&self) -> u64 {
        let memory = self.file("memory.stat").unwrap_or_default();
        let reclaimable = ["inactive_file", "active_file", "slab_reclaimable"];
        let figures = reclaimable.map(|name| field(&memory, name).unwrap_or(0));
        let used = self.number("memory.current");
        figures.into_iter().fold(used, u64::saturating_sub)
    }

    /// Returns the group's statistics; those that the kernel does not count are 0, and pressure
    /// that it does not count is left out.
    #[must_use]
    pub fn stats(&self) -> ContainerStatsResponse {
        ContainerStatsResponse {
            timestamp_ns: now_ns(),
            cpu: MessageField::some(self.cpu_stats()),
            memory: MessageField::some(self.memory_stats()),
            pids: MessageField::some(PidStats {
                current: self.number("pids.current"),
                limit: self.number("pids.max"),
                ..Default::default()
            }),
            io: MessageField::some(io_stats(&self.file("io.stat").unwrap_or_default())),
            psi: psi::of(|name| self.file(name)).into(),
            ..Default::default()
        }
    }

    /// Adds the guest's statistics to a container's, which were read before and so never exceed
    /// them.
    pub fn add_guest_stats(stats: &mut ContainerStatsResponse) {
        let parent = Self::parent();
        stats.guest_psi = psi::of(|name| parent.file(name)).into();
        stats.guest_cpu = MessageField::some(parent.cpu_stats());
        stats.guest_memory = MessageField::some(parent.memory_stats());
    }

    /// Returns the parent of all containers' groups.
    fn parent() -> Self {
        Self {
            relative: PathBuf::from(PARENT),
            path: parent_path(),
        }
    }

    fn cpu_stats(&self) -> CpuStats {
        let cpu = self.file("cpu.stat").unwrap_or_default();
        let figure = |name| field(&cpu, name).unwrap_or(0);
        CpuStats {
            usage_us: figure("usage_usec"),
            user_us: figure("user_usec"),
            system_us: figure("system_usec"),
            throttled_us: figure("throttled_usec"),
            periods: figure("nr_periods"),
            throttled_periods: figure("nr_throttled"),
            ..Default::default()
        }
    }

    fn memory_stats(&self) -> MemoryStats {
        let memory = self.file("memory.stat").unwrap_or_default();
        let events = self.file("memory.events").unwrap_or_default();
        let figure = |text: &str, name| field(text, name).unwrap_or(0);
        let usage = self.number("memory.current");
        MemoryStats {
            usage_bytes: usage,
            working_set_bytes: usage.saturating_sub(figure(&memory, "inactive_file")),
            limit_bytes: self.number("memory.max"),
            anon_bytes: figure(&memory, "anon"),
            file_bytes: figure(&memory, "file"),
            page_faults: figure(&memory, "pgfault"),
            major_page_faults: figure(&memory, "pgmajfault"),
            oom_kills: figure(&events, "oom_kill"),
            peak_bytes: self.number("memory.peak"),
            kernel_bytes: figure(&memory, "kernel"),
            mapped_file_bytes: figure(&memory, "file_mapped"),
            limit_hits: figure(&events, "max"),
            ..Default::default()
        }
    }

    fn file(&self, name: &str) -> Option<String> {
        read(&self.path.join(name)).ok()
    }

    /// Reads a file of one number; `max` and a missing file give 0.
    fn number(&self, name: &str) -> u64 {
        self.file(name)
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }
}

/// Returns the parent of all containers' groups, which is created if it is missing.
///
/// # Errors
///
/// The kernel's error.
pub fn parent() -> io::Result<PathBuf> {
    let parent = parent_path();
    if !parent.exists() {
        fs::create_dir(&parent)?;
        enable_controllers(&parent)?;
    }
    Ok(parent)
}

fn parent_path() -> PathBuf {
    Path::new(CGROUP_ROOT).join(PARENT.trim_start_matches('/'))
}

/// Returns the value of `name` in a file of lines `name value`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        line.strip_prefix(name)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

/// Sums up lines `MAJ:MIN rbytes=… wbytes=… rios=… wios=…`.
fn io_stats(text: &str) -> IoStats {
    let mut total = IoStats::new();
    for item in text.split_ascii_whitespace() {
        let Some((name, Ok(value))) = item.split_once('=').map(|(n, v)| (n, v.parse::<u64>()))
        else {
            continue;
        };
        let sum = match name {
            "rbytes" => &mut total.read_bytes,
            "wbytes" => &mut total.write_bytes,
            "rios" => &mut total.read_operations,
            "wios" => &mut total.write_operations,
            _ => continue,
        };
        *sum = sum.saturating_add(value);
    }
    total
}

/// Returns the processes of one group.
fn listed(group: &Path) -> io::Result<Vec<Pid>> {
    let text = read(&group.join("cgroup.procs"))?;
    let pids = text
        .lines()
        .filter_map(|line| Pid::from_raw(line.parse().ok()?));
    Ok(pids.collect())
}

fn subgroups(group: &Path) -> io::Result<Vec<PathBuf>> {
    let mut groups = Vec::new();
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            groups.push(entry.path());
        }
    }
    Ok(groups)
}

/// Removes a group, starting with its leaves; containers may have created groups below theirs.
fn remove(group: &Path, depth: usize) -> io::Result<()> {
    remove_subgroups(group, depth)?;
    accept_missing(fs::remove_dir(group))
}

fn remove_subgroups(group: &Path, depth: usize) -> io::Result<()> {
    // The kernel's default of cgroup.max.depth is unlimited, so this limit protects the stack.
    if depth > 200 {
        return Err(io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "groups are nested too deep",
        ));
    }
    let subgroups = match subgroups(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for subgroup in subgroups {
        remove(&subgroup, depth + 1)?;
    }
    Ok(())
}

/// Enables every controller of `group` for its children.
pub(crate) fn enable_controllers(group: &Path) -> io::Result<()> {
    let available = fs::read_to_string(group.join("cgroup.controllers"))?;
    let wanted: Vec<String> = available
        .split_ascii_whitespace()
        .map(|c| format!("+{c}"))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    fs::write(group.join("cgroup.subtree_control"), wanted.join(" "))
}

/// Disables every controller for the groups below this one, of which there are none any more.
fn disable_controllers(group: &Path) -> io::Result<()> {
    let file = group.join("cgroup.subtree_control");
    let enabled = read(&file)?;
    let unwanted: Vec<String> = enabled
        .split_ascii_whitespace()
        .map(|controller| format!("-{controller}"))
        .collect();
    if unwanted.is_empty() {
        return Ok(());
    }
    fs::write(file, unwanted.join(" "))
}

fn accept_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(FILE_BYTES)
        .read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "low 0\noom 3\noom_kill 2\noom_kill_x 9\n";
        assert_eq!(field(text, "oom_kill"), Some(2));
        assert_eq!(field(text, "oom"), Some(3));
        assert_eq!(field(text, "kill"), None);
    }

    #[test]
    fn figures_are_read_from_the_groups_files_and_processes_from_those_below_it() {
        let dir = tempfile::tempdir().unwrap();
        let group = Cgroup {
            relative: PathBuf::from("/x"),
            path: dir.path().to_owned(),
        };
        let below = dir.path().join("below/further");
        fs::create_dir_all(&below).unwrap();
        for (name, text) in [
            ("cpu.stat", "usage_usec 9\nnr_periods 7\nnr_throttled 2\n"),
            ("memory.current", "500\n"),
            ("memory.peak", "900\n"),
            (
                "memory.stat",
                "file 3\nkernel 40\nkernel_stack 5\nfile_mapped 6\ninactive_file 100\n",
            ),
            ("memory.events", "low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n"),
            ("pids.current", "5\n"),
            (
                "io.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=8\n",
            ),
            ("cgroup.procs", "10\n11\n"),
            ("below/further/cgroup.procs", "12\nodd\n0\n"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let stats = group.stats();
        assert_eq!((stats.cpu.periods, stats.cpu.throttled_periods), (7, 2));
        let memory = &stats.memory;
        assert_eq!((memory.peak_bytes, memory.working_set_bytes), (900, 400));
        assert_eq!((memory.kernel_bytes, memory.mapped_file_bytes), (40, 6));
        assert_eq!(group.memory_in_use(), 400);
        assert_eq!((memory.limit_hits, memory.oom_kills), (4, 1));
        assert_eq!(stats.pids.current, 5);
        assert_eq!(stats.psi.io.some.total_us, 8);
        assert!(stats.psi.cpu.is_none() && stats.psi.memory.is_none());
        // `below` lists none, like a threaded group.
        let pids: Vec<_> = group.countable();
        let pids: Vec<_> = pids.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        assert_eq!(pids, [10, 11, 12]);
        assert_eq!(Cgroup::new("no-such-group").countable(), []);
    }

    #[test]
    fn a_process_is_found_below_the_group_alone() {
        let group = Cgroup::new("c1");
        let place = |text: &str| group.position_in(text);
        assert_eq!(place("0::/podvisor/c1\n").as_deref(), Some(""));
        assert_eq!(place("0::/podvisor/c1/init\n").as_deref(), Some("init"));
        let deeper = "1:name=odd:/\n0::/podvisor/c1/a/b c\n";
        assert_eq!(place(deeper).as_deref(), Some("a/b c"));
        for elsewhere in [
            "",
            "0::/\n",
            "0::/podvisor/c12\n",
            "0::/podvisor/c1/../c2\n",
            "0::/../podvisor/c1/x\n",
            "1:name=x:/podvisor/c1/x\n",
        ] {
            assert_eq!(place(elsewhere), None, "{elsewhere:?}");
        }
        let own = Pid::from_raw(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(group.nested(own), None);
    }

    #[tokio::test]
    async fn a_group_that_is_reset_has_nothing_nested_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let group = Cgroup {
            relative: PathBuf::from("/x"),
            path: dir.path().to_owned(),
        };
        let control = dir.path().join("cgroup.subtree_control");
        fs::create_dir_all(dir.path().join("init/deeper")).unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        fs::write(&control, "cpu memory\n").unwrap();
        remove_subgroups(dir.path(), 0).unwrap();
        disable_controllers(dir.path()).unwrap();
        assert_eq!(subgroups(&group.path).unwrap(), [] as [PathBuf; 0]);
        assert_eq!(fs::read_to_string(&control).unwrap(), "-cpu -memory");
        // If the group has none, the file is not written.
        fs::write(&control, "\n").unwrap();
        disable_controllers(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "\n");
        Cgroup::new("no-such-group").reset().await.unwrap();
    }

    #[test]
    fn io_is_summed_over_devices() {
        let stats = io_stats(
            "254:0 rbytes=10 wbytes=1 rios=2 wios=1 dbytes=5 dios=1\n254:16 rbytes=5 rios=1\nx=y\n",
        );
        assert_eq!(
            (
                stats.read_bytes,
                stats.write_bytes,
                stats.read_operations,
                stats.write_operations
            ),
            (15, 1, 3, 1)
        );
    }

    #[test]
    fn figures_of_a_group_that_does_not_exist_are_zero_or_none() {
        let stats = Cgroup::new("no-such-group").stats();
        assert!(stats.psi.is_none());
        assert_eq!(stats.memory.usage_bytes, 0);
        assert_eq!(stats.pids.current, 0);
    }

    #[tokio::test]
    async fn destroying_a_group_that_does_not_exist_is_no_error() {
        Cgroup::new("no-such-group").destroy().await.unwrap();
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,100}|([a-z]{1,4}[= ][0-9]{0,22}[ \n]){0,9}") {
            let _ = (field(&text, "a"), io_stats(&text));
        }
    }
}
