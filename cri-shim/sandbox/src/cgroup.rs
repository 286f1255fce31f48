//! The control group (v2) of a sandbox's process: created by its launcher, with the limits of the
//! machine and an overhead for the process itself.
//!
//! `PARENT/ID` has the limits. The process is in `PARENT/ID/machine`, which has the controllers,
//! too, but no limits. The kernel does not disable a group's controller while a descendant has it
//! enabled. In a leaf it does, and the limits are lost: systemd disables controllers that none of
//! its units needs in its slices whenever it reloads its units. A process that an older podvisor
//! launched is in `PARENT/ID` itself.
//!
//! An empty group is removed by the process that sees the sandbox exit, and by the next launch
//! under the same parent. After an OOM kill only the former removes it, once it has read the cause.

mod devices;
mod end;
mod io_limits;
#[cfg(test)]
mod kernel_tests;
mod kill;
mod limits;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Once;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, statfs};
use rustix::io::Errno;
use tracing::{debug, info, warn};

use crate::machine::causes;

use devices::deny_devices;
pub use devices::try_device_group;
pub use end::{end_group, end_group_of};
use io_limits::set_io_limits;
pub use io_limits::{IoLimit, IoLimitError, merge_io_limits};
pub(super) use io_limits::{IoMax, resolve as resolve_io_limits};
pub(super) use kill::MemoryKill;
pub use limits::{CPU_OVERHEAD_MILLI, MEMORY_OVERHEAD, MachineLimits, memory_overhead};
pub(super) use limits::{allow_memory, limit_cpus, limit_memory, limit_swap, set_cpu_weight};
pub use limits::{lacks_room, parse_cpu_max};
use limits::{set_limits, warn_of_missing};

/// The default parent of sandboxes' groups.
pub const DEFAULT_CGROUP_PARENT: &str = "/podvisor";

/// The mount point of the hierarchy.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// `CGROUP2_SUPER_MAGIC`.
const CGROUP2: i64 = 0x6367_7270;

/// The controllers that limit or count resources.
const CONTROLLERS: [&str; 4] = ["cpu", "memory", "pids", "io"];

/// The name of the process's group, below the group with its limits.
const LEAF: &str = "machine";

/// How long to wait for other processes that create groups.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of attempts to get the lock.
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(5);

/// The file in a sandbox's directory that names the group.
const NAME: &str = "cgroup";

/// The reason why a sandbox has no control group.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// The host has no cgroup v2 hierarchy.
    #[error("{CGROUP_ROOT} is not a cgroup v2 hierarchy")]
    NotThere,
    /// The path is not below the hierarchy's root.
    #[error("`{0}` is not the path of a control group")]
    Path(String),
    /// The host's hierarchy has no such controller.
    #[error("{CGROUP_ROOT}/cgroup.controllers does not list the controller `{0}`")]
    NoController(&'static str),
    /// A group does not enable a controller for the groups below it, and cannot be made to.
    #[error(
        "{}/cgroup.subtree_control does not enable the controller `{controller}`",
        .group.display()
    )]
    NotEnabled {
        /// The controller.
        controller: &'static str,
        /// The group.
        group: PathBuf,
    },
    /// The group has the controller, but not this file of it.
    #[error("the kernel has no {}", .0.display())]
    NoFile(PathBuf),
    /// The kernel refused a value.
    #[error("failed to write `{value}` to {}", .path.display())]
    Value {
        /// The value.
        value: String,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a step.
    #[error("failed to {step} {}", .path.display())]
    Step {
        /// What was tried.
        step: &'static str,
        /// The group or file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// A group that was created; it is removed when this is dropped, unless it is kept.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: Option<PathBuf>,
    /// The group of the process.
    leaf: PathBuf,
    /// Whether its process may open only the devices that a machine needs.
    denies_devices: bool,
    /// Held until the group has its process: a group without one may be swept. If another process
    /// holds the lock, which any process can, nothing is swept.
    lock: Option<File>,
}

impl Cgroup {
    /// Creates the group `id` below `parent`, a path from the hierarchy's root, with the limits of
    /// a process that is not in it yet. Of `limits` it may lack some, of `io` none. `dir` is the
    /// sandbox's directory.
    pub(super) fn create(
        parent: &str,
        id: &str,
        limits: MachineLimits,
        io: &[IoMax],
        dir: &Path,
    ) -> Result<Self, CgroupError> {
        let is_v2 = statfs(CGROUP_ROOT).is_ok_and(|stat| stat.f_type == CGROUP2);
        if !is_v2 {
            return Err(CgroupError::NotThere);
        }
        let parent = descend(parent)?;
        let lock = lock(&parent)?.inspect(|_| sweep(&parent));
        let path = parent.join(id);
        fs::create_dir(&path).map_err(step("create the control group", &path))?;
        // First of all: from here on the controllers cannot be disabled from outside.
        let leaf = make_leaf(&path);
        let denies_devices = match deny_devices(&path) {
            Ok(()) => true,
            Err(error) => {
                devices_are_open(&error, id);
                false
            }
        };
        let group = Self {
            path: Some(path.clone()),
            leaf,
            denies_devices,
            lock,
        };
        set_io_limits(Path::new(CGROUP_ROOT), &path, io)?;
        let missing = set_limits(&path, limits)?;
        if !missing.is_empty() {
            warn_of_missing(&missing);
        }
        let note = dir.join(NAME);
        fs::write(&note, path.as_os_str().as_encoded_bytes())
            .map_err(step("note the control group in", &note))?;
        kill::note_before(dir, Path::new(CGROUP_ROOT), &path)
            .map_err(step("note the events of the control groups in", dir))?;
        Ok(group)
    }

    /// Whether its process may open only the devices that a machine needs.
    pub(super) fn denies_devices(&self) -> bool {
        self.denies_devices
    }

    /// Opens the directory of the group that its process belongs in.
    pub(super) fn open(&self) -> io::Result<File> {
        File::open(&self.leaf)
    }

    /// Moves its process to the group.
    pub(super) fn take(&self, pid: u32) -> Result<(), CgroupError> {
        write(&self.leaf.join("cgroup.procs"), &pid.to_string())
    }

    /// Lets others create groups: this one has its process.
    pub(super) fn unlock(&mut self) {
        self.lock = None;
    }

    /// Leaves the group to its process: it is not removed when this is dropped.
    pub(super) fn keep(mut self) {
        self.path = None;
    }
}

#[cfg(test)]
impl Cgroup {
    /// A group whose process cannot be moved to it.
    pub(super) fn unusable() -> Self {
        Self {
            path: None,
            leaf: "/no/such/group".into(),
            denies_devices: false,
            lock: None,
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            remove(path);
        }
    }
}

/// Logs once at a higher level that sandboxes' groups do not deny devices.
fn devices_are_open(error: &io::Error, id: &str) {
    static SAID: Once = Once::new();
    SAID.call_once(|| info!(%error, "the control groups of sandboxes deny no devices"));
    debug!(id, %error, "the sandbox's control group denies no devices");
}

/// What the sandbox in `dir` takes of the host's memory, in bytes, if its group is below `parent`,
/// which is a path from the hierarchy's root.
pub(super) fn memory_below(dir: &Path, parent: &Path) -> Option<u64> {
    let group = group_of(dir)?;
    let parent = Path::new(CGROUP_ROOT).join(parent.strip_prefix("/").unwrap_or(parent));
    let text = match group.starts_with(parent) {
        true => fs::read_to_string(group.join("memory.current")).ok()?,
        false => return None,
    };
    text.trim().parse().ok()
}

/// Returns the group with the limits of the sandbox in `dir`, if it has one.
fn group_of(dir: &Path) -> Option<PathBuf> {
    let path = PathBuf::from(fs::read_to_string(dir.join(NAME)).ok()?);
    // The file's contents are not trusted to point elsewhere.
    path.starts_with(CGROUP_ROOT).then_some(path)
}

/// Returns how the process of the sandbox in `dir`, which is gone, was killed because memory ran
/// out; `None` if it was not, or its group was removed already.
pub(super) fn memory_kill_of(dir: &Path) -> Option<MemoryKill> {
    kill::of(dir, Path::new(CGROUP_ROOT), &group_of(dir)?)
}

/// Removes the group of the sandbox in `dir`, once its process is gone.
pub(super) fn remove_of(dir: &Path) {
    if group_of(dir).is_some_and(|group| remove(&group)) {
        let _ = fs::remove_file(dir.join(NAME));
    }
}

/// Removes the groups below `parent` that no process is in: those of sandboxes whose kill was not
/// noticed. While a sandbox is being launched there, this is left to its launcher.
pub fn remove_empty_cgroups(parent: &str) {
    let path = Path::new(CGROUP_ROOT).join(parent.trim_start_matches('/'));
    let Ok(dir) = File::open(&path) else {
        return;
    };
    if flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok() {
        sweep(&path);
    }
}

/// Removes a group that has no process. True if it is gone.
fn remove(path: &Path) -> bool {
    let is_gone = |path: &Path| match fs::remove_dir(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => {
            debug!(
                path = %path.display(),
                %error,
                "failed to remove the control group; will retry"
            );
            false
        }
    };
    is_gone(&path.join(LEAF)) && is_gone(path)
}

/// Removes the groups below `parent` that no process is in, unless they record a kill.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !kill::has_killed(&path) {
            remove(&path);
        }
    }
}

/// Creates the groups on the path to `parent`, and enables the controllers of each for the next
/// one.
fn descend(parent: &str) -> Result<PathBuf, CgroupError> {
    let mut path = PathBuf::from(CGROUP_ROOT);
    enable_controllers(&path)?;
    for part in Path::new(parent).components() {
        match part {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => path.push(name),
            Component::ParentDir | Component::Prefix(_) => {
                return Err(CgroupError::Path(parent.to_owned()));
            }
        }
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(step("create the control group", &path)(error));
            }
            _ => enable_controllers(&path)?,
        }
    }
    Ok(path)
}

/// Creates the group for the process of the group at `path`, and enables the available controllers
/// for it. If it cannot be created (`cgroup.max.depth`), the process goes into `path` itself.
fn make_leaf(path: &Path) -> PathBuf {
    let leaf = path.join(LEAF);
    let made = fs::create_dir(&leaf).map_err(step("create the control group", &leaf));
    let is_made = made.is_ok();
    if let Err(error) = made.and_then(|()| enable_controllers(path)) {
        let why = causes(&error);
        debug!(
            why,
            "a sandbox has limits until somebody takes the controllers of its group"
        );
    }
    match is_made {
        true => leaf,
        false => path.to_owned(),
    }
}

/// Enables all controllers of the group at `path` for the groups below it.
fn enable_controllers(path: &Path) -> Result<(), CgroupError> {
    let read = |name: &str| {
        let file = path.join(name);
        fs::read_to_string(&file).map_err(step("read", &file))
    };
    let (there, enabled) = (read("cgroup.controllers")?, read("cgroup.subtree_control")?);
    let has = |list: &str, name: &str| list.split_whitespace().any(|one| one == name);
    let missing = |name: &&str| has(&there, name) && !has(&enabled, name);
    let missing = CONTROLLERS.into_iter().filter(missing);
    let missing: Vec<String> = missing.map(|name| format!("+{name}")).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let file = path.join("cgroup.subtree_control");
    match enable(&missing, |value| write(&file, value)) {
        Err(_) if CONTROLLERS.into_iter().any(|name| has(&enabled, name)) => Ok(()),
        done => done,
    }
}

/// Enables what the kernel accepts of `missing`, by `write`. An error when that is nothing.
fn enable(
    missing: &[String],
    write: impl Fn(&str) -> Result<(), CgroupError>,
) -> Result<(), CgroupError> {
    // All at once: older kernels stop everything that forks for each write.
    let Err(refused) = write(&missing.join(" ")) else {
        return Ok(());
    };
    // One that is refused, such as `cpu` while realtime processes run, takes the others with it.
    let mut is_any = false;
    for one in missing {
        match write(one) {
            Ok(()) => is_any = true,
            Err(error) => debug!(why = causes(&error), "a controller cannot be enabled"),
        }
    }
    match is_any {
        true => Ok(()),
        false => Err(refused),
    }
}

/// Locks a directory that any process may open and lock; `None` if that takes too long.
fn lock(path: &Path) -> Result<Option<File>, CgroupError> {
    let failed = step("lock the control group", path);
    let file = File::open(path).map_err(step("open the control group", path))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(LOCK_RETRY_DELAY),
            Err(Errno::WOULDBLOCK) => {
                warn!(path = %path.display(), "timed out locking the control group");
                return Ok(None);
            }
            Err(error) => return Err(failed(error.into())),
        }
    }
}

/// Writes to a file that is there.
fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    let opened = OpenOptions::new().write(true).truncate(true).open(path);
    let written = opened.and_then(|mut file| file.write_all(value.as_bytes()));
    written.map_err(step("write", path))
}

fn step(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Step { step, path, source }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_controller_that_is_refused_takes_no_other_with_it() {
        let missing = ["+cpu", "+memory", "+pids"].map(str::to_owned);
        let written = RefCell::new(Vec::new());
        let enable_but = |refused: &str| {
            enable(&missing, |value| {
                written.borrow_mut().push(value.to_owned());
                match value.contains(refused) {
                    true => Err(step("write", Path::new("x"))(Errno::INVAL.into())),
                    false => Ok(()),
                }
            })
        };
        enable_but("+cpu").unwrap();
        let all = "+cpu +memory +pids";
        assert_eq!(written.take(), [all, "+cpu", "+memory", "+pids"]);
        enable_but("nothing").unwrap();
        assert_eq!(written.take(), [all]);
        enable_but("+").unwrap_err();
    }

    #[test]
    fn a_lock_that_somebody_keeps_is_done_without() {
        let dir = tempfile::tempdir().unwrap();
        let held = File::open(dir.path()).unwrap();
        flock(&held, FlockOperation::LockShared).unwrap();
        assert!(lock(dir.path()).unwrap().is_none());
        drop(held);
        assert!(lock(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_parent_that_leads_elsewhere_is_refused() {
        for parent in ["..", "/a/../../b"] {
            // Without such a hierarchy, a step fails.
            let refused = descend(parent);
            assert!(
                matches!(
                    refused,
                    Err(CgroupError::Path(_) | CgroupError::Step { .. })
                ),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn what_nobody_is_in_is_swept_with_the_group_of_its_process() {
        let parent = tempfile::tempdir().unwrap();
        let group = |name: &str| parent.path().join(name);
        // The last one is not empty: a directory with files cannot be removed either.
        for name in ["ended/machine", "older", "runs/machine/process"] {
            fs::create_dir_all(group(name)).unwrap();
        }
        sweep(parent.path());
        let left = ["ended", "older", "runs/machine/process"].map(|name| group(name).exists());
        assert_eq!(left, [false, false, true]);
    }

    #[test]
    fn a_process_whose_group_has_no_room_for_another_is_in_it_itself() {
        let parent = tempfile::tempdir().unwrap();
        let group = parent.path().join("gone");
        assert_eq!(make_leaf(&group), group);
    }

    #[test]
    fn a_note_of_a_group_elsewhere_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(dir.path().join(NAME), victim.to_str().unwrap()).unwrap();
        remove_of(dir.path());
        assert!(victim.exists());
    }
}
