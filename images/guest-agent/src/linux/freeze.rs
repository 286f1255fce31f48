//! Frozen file systems.
//!
//! All are opened before the first one is frozen, and stay open until they are thawed: thawing
//! needs no look at a directory. Nothing is logged meanwhile, because the log is a file, too.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::kernel::Kernel;
use super::mounts::Mount;
use crate::protocol::Fault;

/// How long file systems stay frozen if nobody thaws them: longer than podvisor lets them.
pub const LONGEST_FREEZE: Duration = Duration::from_secs(15 * 60);

/// How often a file system may have been frozen by others.
const MAX_NESTED: usize = 16;

/// How long thawing waits for its next attempt.
const RETRY: Duration = Duration::from_secs(5);

/// What this agent has frozen.
#[derive(Debug, Default)]
pub(super) struct Freezer {
    frozen: Vec<Frozen>,
    /// When they are thawed at the latest.
    until: Option<Instant>,
}

#[derive(Debug)]
struct Frozen {
    device: String,
    point: String,
    file: File,
}

fn open(root: &Path, mount: &Mount) -> std::io::Result<Frozen> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(root.join(mount.point.trim_start_matches('/')))?;
    Ok(Frozen {
        device: mount.device.clone(),
        point: mount.point.clone(),
        file,
    })
}

impl Freezer {
    pub(super) fn is_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.until
    }

    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// Freezes file systems, or those that are mounted at `points`; returns how many. If one
    /// fails, none stays frozen.
    pub(super) fn freeze(
        &mut self,
        mounts: &[Mount],
        points: Option<&[String]>,
        root: &Path,
        kernel: &impl Kernel,
    ) -> Result<usize, Fault> {
        let is_wanted = |mount: &&Mount| points.is_none_or(|points| points.contains(&mount.point));
        // What lies on others goes before them.
        let wanted = mounts.iter().rev().filter(is_wanted);
        let open = |mount: &Mount| {
            open(root, mount)
                .map_err(|error| Fault::io("open the file system", &mount.point, &error))
        };
        let all = wanted.map(open).collect::<Result<Vec<_>, _>>()?;
        self.until = Some(Instant::now() + LONGEST_FREEZE);
        for each in all {
            match kernel.freeze(&each.file) {
                Ok(()) => self.frozen.push(each),
                // It cannot be frozen, or somebody else has frozen it.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EOPNOTSUPP | libc::EBUSY | libc::ENOTTY)
                    ) => {}
                Err(error) => {
                    let fault = Fault::io("freeze the file system", &each.point, &error);
                    let _ = self.thaw(&[], root, kernel);
                    return Err(fault);
                }
            }
        }
        if self.frozen.is_empty() {
            self.until = None;
        }
        Ok(self.frozen.len())
    }

    /// Thaws what was frozen here, and what `mounts` has that others left frozen, such as an
    /// earlier run of this agent; returns how many. One that fails keeps no other one frozen.
    pub(super) fn thaw(
        &mut self,
        mounts: &[Mount],
        root: &Path,
        kernel: &impl Kernel,
    ) -> Result<usize, Fault> {
        let mut thawed = Vec::new();
        let mut failed = None;
        // In the opposite order.
        for each in std::mem::take(&mut self.frozen).into_iter().rev() {
            match kernel.thaw(&each.file) {
                Ok(()) => thawed.push(each.device),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => {
                    failed = Some(Fault::io("thaw the file system", &each.point, &error));
                    self.frozen.insert(0, each);
                }
            }
        }
        self.until = self.is_frozen().then(|| Instant::now() + RETRY);
        for mount in mounts {
            let Ok(each) = open(root, mount) else {
                continue;
            };
            let mut count = 0;
            while count < MAX_NESTED && kernel.thaw(&each.file).is_ok() {
                count += 1;
            }
            if count > 0 && !thawed.contains(&each.device) {
                thawed.push(each.device);
            }
        }
        match failed {
            Some(fault) => Err(fault),
            None => Ok(thawed.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::io;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    /// File systems by the number of their directory, and how often each is frozen.
    #[derive(Default)]
    struct Disks {
        frozen: RefCell<BTreeMap<u64, u32>>,
        order: RefCell<Vec<u64>>,
        /// What the next freeze of a file system is refused with.
        refused: Cell<Option<(u64, i32)>>,
        is_stuck: Cell<bool>,
    }

    fn number(file: &File) -> u64 {
        file.metadata().unwrap().ino()
    }

    impl Kernel for Disks {
        fn freeze(&self, file: &File) -> io::Result<()> {
            let number = number(file);
            if let Some((refused, errno)) = self.refused.get()
                && refused == number
            {
                return Err(io::Error::from_raw_os_error(errno));
            }
            self.order.borrow_mut().push(number);
            *self.frozen.borrow_mut().entry(number).or_default() += 1;
            Ok(())
        }

        fn thaw(&self, file: &File) -> io::Result<()> {
            if self.is_stuck.get() {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let mut frozen = self.frozen.borrow_mut();
            match frozen.get_mut(&number(file)) {
                Some(count) if *count > 0 => {
                    *count -= 1;
                    Ok(())
                }
                _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            }
        }

        fn set_clock(&self, _: Duration) -> io::Result<()> {
            Ok(())
        }
    }

    impl Disks {
        fn count(&self) -> u32 {
            self.frozen.borrow().values().sum()
        }
    }

    fn mounts(root: &Path, points: &[&str]) -> Vec<Mount> {
        let mount = |point: &&str| {
            std::fs::create_dir_all(root.join(point.trim_start_matches('/'))).unwrap();
            Mount {
                device: format!("8:{}", point.len()),
                point: (*point).to_owned(),
                kind: "ext4".to_owned(),
                source: "/dev/vda".to_owned(),
            }
        };
        points.iter().map(mount).collect()
    }

    fn inode(root: &Path, point: &str) -> u64 {
        let path = root.join(point.trim_start_matches('/'));
        std::fs::metadata(path).unwrap().ino()
    }

    #[test]
    fn what_was_mounted_last_is_frozen_first_and_all_thaw() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disks, mut freezer) = (dir.path(), Disks::default(), Freezer::default());
        let mounts = mounts(root, &["/", "/var", "/var/lib"]);
        let count = freezer.freeze(&mounts, None, root, &disks).unwrap();
        assert_eq!((count, disks.count()), (3, 3));
        let order = ["/var/lib", "/var", "/"].map(|point| inode(root, point));
        assert_eq!(*disks.order.borrow(), order);
        assert!(freezer.is_frozen() && freezer.deadline().is_some());
        assert!(!freezer.is_overdue(Instant::now()));
        assert!(freezer.is_overdue(Instant::now() + LONGEST_FREEZE));
        assert_eq!(freezer.thaw(&mounts, root, &disks).unwrap(), 3);
        assert_eq!((freezer.is_frozen(), disks.count()), (false, 0));
        assert_eq!(freezer.deadline(), None);
    }

    #[test]
    fn only_those_that_are_named_are_frozen() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disks, mut freezer) = (dir.path(), Disks::default(), Freezer::default());
        let mounts = mounts(root, &["/", "/var"]);
        let points = ["/var".to_owned(), "/none".to_owned()];
        let count = freezer.freeze(&mounts, Some(&points), root, &disks);
        assert_eq!(count.unwrap(), 1);
        assert_eq!(*disks.order.borrow(), [inode(root, "/var")]);
    }

    #[test]
    fn one_that_cannot_be_frozen_is_passed_over_and_one_that_fails_thaws_all() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disks, mut freezer) = (dir.path(), Disks::default(), Freezer::default());
        let mounts = mounts(root, &["/", "/var"]);
        disks
            .refused
            .set(Some((inode(root, "/"), libc::EOPNOTSUPP)));
        assert_eq!(freezer.freeze(&mounts, None, root, &disks).unwrap(), 1);
        freezer.thaw(&mounts, root, &disks).unwrap();
        disks.refused.set(Some((inode(root, "/"), libc::EIO)));
        let fault = freezer.freeze(&mounts, None, root, &disks).unwrap_err();
        assert!(fault.desc.contains("'/'"), "{fault}");
        assert_eq!((freezer.is_frozen(), disks.count()), (false, 0));
    }

    #[test]
    fn what_an_earlier_run_or_another_program_froze_thaws_too() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disks) = (dir.path(), Disks::default());
        let mounts = mounts(root, &["/", "/var"]);
        let mut earlier = Freezer::default();
        earlier.freeze(&mounts, None, root, &disks).unwrap();
        let mut freezer = Freezer::default();
        assert_eq!(freezer.thaw(&mounts, root, &disks).unwrap(), 2);
        assert_eq!(disks.count(), 0);
    }

    #[test]
    fn a_thaw_that_fails_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disks, mut freezer) = (dir.path(), Disks::default(), Freezer::default());
        let mounts = mounts(root, &["/", "/var"]);
        freezer.freeze(&mounts, None, root, &disks).unwrap();
        disks.is_stuck.set(true);
        freezer.thaw(&mounts, root, &disks).unwrap_err();
        assert!(freezer.is_frozen());
        assert!(freezer.is_overdue(Instant::now() + RETRY));
        disks.is_stuck.set(false);
        assert_eq!(freezer.thaw(&[], root, &disks).unwrap(), 2);
        assert_eq!((freezer.is_frozen(), disks.count()), (false, 0));
    }
}
