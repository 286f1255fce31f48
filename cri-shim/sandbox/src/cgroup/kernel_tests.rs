//! The kernel's treatment of the groups: tests for root on a host with cgroup v2, such as the test
//! host, each below a parent of its own.

use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::limits::set_memory_of;
use super::*;

const LIMITS: MachineLimits = MachineLimits {
    vcpus: 1,
    memory: 64 << 20,
    growth: 0,
};

/// A parent like systemd's slices, and the directory of a sandbox below it.
struct Slice {
    name: &'static str,
    dir: TempDir,
    processes: Vec<Child>,
}

impl Slice {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            dir: tempfile::tempdir().unwrap(),
            processes: Vec::new(),
        }
    }

    fn path(&self) -> PathBuf {
        Path::new(CGROUP_ROOT).join(self.name)
    }

    fn group(&self, id: &str) -> PathBuf {
        self.path().join(id)
    }

    /// Returns the pid of a process that does nothing, and takes memory once its stdin is closed.
    fn process(&mut self) -> u32 {
        let mut program = Command::new("sh");
        program.args(["-c", "read go; exec sleep 1000"]);
        let process = program.stdin(Stdio::piped()).spawn().unwrap();
        let pid = process.id();
        self.processes.push(process);
        pid
    }

    fn create(&mut self, id: &str) -> Cgroup {
        self.create_with(id, &[])
    }

    fn create_with(&mut self, id: &str, io: &[IoMax]) -> Cgroup {
        let pid = self.process();
        let parent = format!("/{}", self.name);
        let mut group = Cgroup::create(&parent, id, LIMITS, io, self.dir.path()).unwrap();
        group.take(pid).unwrap();
        group.unlock();
        group
    }

    /// Creates a group as older versions did: its process is in the group itself.
    fn create_older(&mut self, id: &str) {
        descend(self.name).unwrap();
        let group = self.group(id);
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cgroup.procs"), self.process().to_string()).unwrap();
        let path = group.to_str().unwrap();
        fs::write(self.dir.path().join(NAME), path).unwrap();
    }

    fn kill(&mut self) {
        for mut process in self.processes.drain(..) {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.kill();
        sweep(&self.path());
        remove(&self.path());
    }
}

fn read(file: PathBuf) -> String {
    fs::read_to_string(file).unwrap().trim().to_owned()
}

#[test]
fn guest_limits_hold_when_somebody_takes_the_controllers_that_no_unit_needs() {
    let mut slice = Slice::new("podvisor-slice-test");
    let created = slice.create("id");
    let group = slice.group("id");
    let limits = || ["memory.max", "cpu.max", "pids.max"].map(|name| read(group.join(name)));
    let before = limits();
    assert_eq!(before[0], (LIMITS.memory + MEMORY_OVERHEAD).to_string());
    for name in ["memory", "cpu", "pids"] {
        let controllers = slice.path().join("cgroup.subtree_control");
        let taken = fs::write(controllers, format!("-{name}"));
        let refused = taken.map_err(|error| error.kind());
        assert_eq!(refused, Err(io::ErrorKind::ResourceBusy), "{name}");
    }
    assert_eq!(limits(), before);
    set_memory_of(&group, 128 << 20, 0, |now, wanted| now < wanted);
    let more = (128 << 20) + MEMORY_OVERHEAD;
    assert_eq!(read(group.join("memory.max")), more.to_string());
    // The process is charged to the group, which is below this parent.
    assert!(memory_below(slice.dir.path(), Path::new("/podvisor-slice-test")) > Some(0));
    let pid = slice.processes[0].id().to_string();
    assert_eq!(read(group.join(LEAF).join("cgroup.procs")), pid);
    assert_eq!(read(group.join("cgroup.procs")), "");
    created.keep();
    remove_of(slice.dir.path());
    assert!(group.join(LEAF).exists(), "its process lives");
    slice.kill();
    remove_of(slice.dir.path());
    assert!(!group.exists());
    assert!(!slice.dir.path().join(NAME).exists());
}

#[test]
fn guest_limits_of_io_are_those_of_the_group() {
    // The devices of this module, which need no file to be limited.
    let loaded = Command::new("modprobe").arg("loop").status().unwrap();
    assert!(loaded.success());
    let of = |device: &str| IoLimit {
        device: device.into(),
        ..IoLimit::default()
    };
    let limits = [
        IoLimit {
            read_bps: Some(1 << 20),
            write_iops: Some(9),
            ..of("/dev/loop0")
        },
        IoLimit {
            write_bps: Some(2 << 20),
            ..of("/dev/loop1")
        },
    ];
    let mut lines = resolve_io_limits(&limits).unwrap();
    let mut slice = Slice::new("podvisor-io-test");
    let created = slice.create_with("id", &lines);
    let set = read(slice.group("id").join("io.max"));
    let mut set: Vec<&str> = set.lines().collect();
    set.sort_unstable();
    let expected = [
        "7:0 rbps=1048576 wbps=max riops=max wiops=9",
        "7:1 rbps=max wbps=2097152 riops=max wiops=max",
    ];
    assert_eq!(set, expected);
    let written: Vec<String> = lines.iter().map(ToString::to_string).collect();
    assert_eq!(written, expected);
    drop(created);

    // A device that is gone: nothing is left, and the error says what was written where.
    lines.iter_mut().for_each(IoMax::lose_device);
    let parent = format!("/{}", slice.name);
    let refused = Cgroup::create(&parent, "gone", LIMITS, &lines, slice.dir.path());
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("rbps=1048576"), "{error}");
    assert!(error.contains("podvisor-io-test/gone/io.max"), "{error}");
    assert!(!slice.group("gone").exists());
}

#[test]
fn guest_a_kill_by_the_limit_is_counted_where_the_limit_is() {
    let mut slice = Slice::new("podvisor-kill-test");
    slice.create("id").keep();
    let group = slice.group("id");
    assert_eq!(memory_kill_of(slice.dir.path()), None);
    fs::write(group.join("memory.max"), "0").unwrap();
    for mut process in slice.processes.drain(..) {
        // This closes its stdin.
        process.wait().unwrap();
    }
    let kill = memory_kill_of(slice.dir.path()).unwrap();
    assert_eq!(kill.group.as_deref(), Some(&*group));
    // Sweeping does not remove the record of the cause.
    sweep(&slice.path());
    assert!(group.exists());
    remove_of(slice.dir.path());
    assert!(!group.exists());
}

#[test]
fn guest_a_group_that_is_dropped_or_of_an_older_podvisor_is_removed_and_nothing_that_runs_is() {
    let mut slice = Slice::new("podvisor-sweep-test");
    slice.create_older("older");
    let older = slice.group("older");
    set_memory_of(&older, 1 << 20, 0, |now, wanted| now > wanted);
    assert_eq!(
        read(older.join("memory.max")),
        ((1 << 20) + MEMORY_OVERHEAD).to_string()
    );
    slice.create("newer").keep();
    sweep(&slice.path());
    let newer = slice.group("newer");
    assert!(older.exists() && newer.join(LEAF).exists());
    // A group whose creator gives up.
    let dropped = slice.create("dropped");
    slice.kill();
    drop(dropped);
    assert!(!slice.group("dropped").exists());
    sweep(&slice.path());
    assert!(!older.exists() && !newer.exists());
}

#[test]
fn guest_what_runs_in_a_group_is_killed_and_the_group_removed() {
    let mut slice = Slice::new("podvisor-end-test");
    slice.create("id").keep();
    let parent = Path::new("/podvisor-end-test");
    assert!(end_group(parent, "id", LOCK_TIMEOUT).unwrap());
    assert!(!slice.group("id").exists());
    for mut process in slice.processes.drain(..) {
        assert!(!process.wait().unwrap().success());
    }
    assert!(!end_group(parent, "id", LOCK_TIMEOUT).unwrap());
}
