//! Tests of volumes in the mount namespace of another process.

use std::fs::File;
use std::io::{Read as _, Write as _};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

use super::*;
use crate::bind::{Extent, Propagation};
use crate::jail::{self, CallFilter, MissingLayer, Share, enter_mounts_of};

/// A directory, and a process that has it in its jail.
struct Rig {
    dir: tempfile::TempDir,
    pid: Pid,
    shared: SharedDirectory,
}

impl Rig {
    fn new() -> Self {
        Self::of(|share| share, |share| enter_mounts_of(share).is_ok())
    }

    /// With the process in its whole jail.
    fn mapped() -> Self {
        jail::try_mapped_users(&std::env::temp_dir()).expect(jail::users::NEEDED);
        Self::of(Share::with_mapped_users, |share| {
            jail::close(Some(share), CallFilter::Absent)
                .is_ok_and(|missing| !missing.contains(&MissingLayer::MappedUsers))
        })
    }

    fn of(prepare: impl FnOnce(Share) -> Share, enter: impl FnOnce(&Share) -> bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["shared", "x", "x/t"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let (ready, told) = rustix::pipe::pipe().unwrap();
        let shared = dir.path().join("shared");
        let share = Share::new(open_root(&shared).unwrap().into()).unwrap();
        // SAFETY: the child makes mounts, waits and never returns.
        let pid = match unsafe { libc::fork() } {
            0 => {
                let is_in = enter(&prepare(share));
                let _ = File::from(told).write_all(&[u8::from(is_in)]);
                loop {
                    // SAFETY: it only waits.
                    unsafe { libc::pause() };
                }
            }
            pid => Pid::from_raw(pid).unwrap(),
        };
        drop(told);
        let mut is_in = [0];
        File::from(ready).read_exact(&mut is_in).unwrap();
        assert_eq!(is_in, [1], "the child is not in its jail");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        let shared = SharedDirectory::of_process(&shared, number, pidfd).unwrap();
        Self { dir, pid, shared }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn mount(&self, at: &str) {
        let at = self.path(at);
        mount("none", &at, "tmpfs", MountFlags::empty(), None).unwrap();
        fs::write(at.join("file"), "x").unwrap();
    }

    fn unmount(&self, at: &str) {
        unmount(self.path(at), UnmountFlags::empty()).unwrap();
    }

    fn share(&self, source: &str, name: &str, propagation: Propagation) {
        self.try_share(&self.path(source), name, propagation)
            .unwrap();
    }

    fn try_share(
        &self,
        source: &Path,
        name: &str,
        propagation: Propagation,
    ) -> Result<(), AttachError> {
        let source = bind::open_source(source).unwrap();
        let tree = DetachedTree::of(source, Extent::Whole, propagation).unwrap();
        self.shared.attach(&tree, name, true)
    }

    fn is_there(&self, name: &str) -> bool {
        self.shared.enter(|dir| dir.join(name).exists()).unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
        for at in ["x/t", "x/late", "x"] {
            let _ = unmount(self.path(at), UnmountFlags::DETACH);
        }
    }
}

#[test]
fn a_mount_below_a_volume_is_unmounted_and_its_directory_removed_while_the_volume_is_in_use() {
    let rig = Rig::new();
    rig.mount("x/t");
    rig.share("x", "v0", Propagation::Private);
    assert!(rig.is_there("v0/t/file"));
    assert!(!rig.path("shared/v0/t").exists(), "the host sees it, too");
    assert_eq!(rig.shared.mounts_at("v0").unwrap(), 2);
    rig.unmount("x/t");
    // What the host unmounts stays in a volume that does not follow it, as with other runtimes.
    assert!(rig.is_there("v0/t/file"));
    fs::remove_dir(rig.path("x/t")).unwrap();
    assert!(!rig.is_there("v0/t"));
    assert_eq!(rig.shared.mounts_at("v0").unwrap(), 1);
}

#[test]
fn what_the_host_mounts_and_unmounts_later_is_seen_in_a_volume_that_follows_it() {
    let rig = Rig::new();
    // In a peer group of its own, so that there is something to follow.
    bind::pass_on_mounts(&rig.path("x")).unwrap();
    rig.share("x", "v0", Propagation::FromSource);
    rig.share("x", "v1", Propagation::Private);
    fs::create_dir(rig.path("x/late")).unwrap();
    rig.mount("x/late");
    assert!(rig.is_there("v0/late/file") && !rig.is_there("v1/late/file"));
    rig.unmount("x/late");
    assert!(!rig.is_there("v0/late/file"));
    fs::remove_dir(rig.path("x/late")).unwrap();
}

#[test]
fn a_volume_goes_with_its_name_and_with_its_process() {
    let rig = Rig::new();
    fs::write(rig.path("x/file"), "x").unwrap();
    rig.share("x", "v0", Propagation::Private);
    rig.share("x", "v1", Propagation::Private);
    let again = bind::open_source(&rig.path("x")).unwrap();
    let again = DetachedTree::of(again, Extent::Whole, Propagation::Private).unwrap();
    let taken = rig.shared.attach(&again, "v1", true).unwrap_err();
    let AttachError::Io(taken) = taken else {
        panic!("{taken:?}");
    };
    assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    let mounted = || rig.shared.mount_points().unwrap();
    assert_eq!(mounted(), ["v0", "v1"].map(PathBuf::from));
    // By the host, which does not see what is mounted on it.
    fs::remove_dir(rig.path("shared/v0")).unwrap();
    assert_eq!(mounted(), ["v1"].map(PathBuf::from));
    assert!(rig.path("x/file").exists());
    kill_process(rig.pid, Signal::KILL).unwrap();
    waitpid(Some(rig.pid), WaitOptions::empty()).unwrap();
    rig.shared.enter(|_| ()).unwrap_err();
    rig.shared.mount_points().unwrap_err();
    fs::remove_dir(rig.path("shared/v1")).unwrap();
    assert!(rig.path("x/file").exists());
}

#[test]
fn volumes_of_a_process_in_a_user_namespace_are_mapped_to_its_users_or_refused() {
    assert!(!Rig::new().shared.has_mapped_users());
    let rig = Rig::mapped();
    assert!(rig.shared.has_mapped_users());
    rig.mount("x/t");
    std::os::unix::fs::chown(rig.path("x/t/file"), Some(1000), None).unwrap();
    rig.share("x", "v0", Propagation::Private);
    // The host's own users, as this thread sees them, are those of no process of the host.
    let owner = |name| {
        let look = |dir: &Path| fs::metadata(dir.join(name)).unwrap().uid();
        rig.shared.enter(look).unwrap()
    };
    assert_eq!(owner("v0/t/file"), (1 << 31) + 1000);
    assert_eq!(
        owner("v0"),
        jail::UID_BASE + rig.pid.as_raw_nonzero().get().unsigned_abs()
    );
    let follows = rig.try_share(&rig.path("x"), "v1", Propagation::FromSource);
    let proc = rig.try_share(Path::new("/proc"), "v1", Propagation::Private);
    for refused in [follows, proc] {
        assert!(refused.unwrap_err().needs_host_users());
    }
    assert_eq!(rig.shared.mounts_at("v1").unwrap(), 0);
    assert!(!rig.path("shared/v1").exists());
}

#[test]
fn a_process_without_a_namespace_of_its_own_has_volumes_where_the_host_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let own = rustix::process::getpid();
    let pidfd = pidfd_open(own, PidfdFlags::empty()).unwrap();
    let shared = SharedDirectory::of_process(dir.path(), std::process::id(), pidfd).unwrap();
    assert_eq!(shared.enter(Path::to_owned).unwrap(), dir.path());
    assert!(shared.mount_points().unwrap().is_empty());
}
