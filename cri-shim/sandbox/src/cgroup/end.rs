//! The end of what runs in a sandbox's group, where nothing else leads to it.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CGROUP_ROOT, group_of, remove};

/// How long a change is waited for before it is looked again.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Kills what runs in the group of the sandbox `id` below `parent`, a path from the hierarchy's
/// root, and removes the group once that is gone. True when something ran.
///
/// # Errors
/// It cannot be killed, or has not ended within `limit`.
pub fn end_group(parent: &Path, id: &str, limit: Duration) -> io::Result<bool> {
    end_in(Path::new(CGROUP_ROOT), parent, id, limit)
}

fn end_in(root: &Path, parent: &Path, id: &str, limit: Duration) -> io::Result<bool> {
    let parent = root.join(parent.strip_prefix("/").unwrap_or(parent));
    end(&parent.join(id), limit)
}

/// As [`end_group`], for the group of the sandbox in `dir`, whose name begins with the directory's.
///
/// # Errors
/// As [`end_group`].
pub fn end_group_of(dir: &Path, limit: Duration) -> io::Result<bool> {
    match group_of(dir) {
        Some(group) if is_named_like(&group, dir) => end(&group, limit),
        _ => Ok(false),
    }
}

/// Returns whether a group's name begins with the name of a sandbox's directory, so that no group
/// of anything else is killed.
fn is_named_like(group: &Path, dir: &Path) -> bool {
    let name = |path: &Path| Some(path.file_name()?.as_encoded_bytes().to_vec());
    match (name(group), name(dir)) {
        (Some(group), Some(dir)) => group.starts_with(&dir),
        _ => false,
    }
}

fn end(group: &Path, limit: Duration) -> io::Result<bool> {
    let mut events = match File::open(group.join("cgroup.events")) {
        Ok(events) => events,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if !is_populated(&mut events)? {
        return Ok(false);
    }
    fs::write(group.join("cgroup.kill"), "1")?;
    let deadline = Instant::now() + limit;
    while is_populated(&mut events)? {
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        poll(
            &mut [PollFd::new(&events, PollFlags::PRI)],
            Some(&POLL_INTERVAL),
        )?;
    }
    remove(group);
    Ok(true)
}

/// Whether a process is in the group, or below it.
fn is_populated(events: &mut File) -> io::Result<bool> {
    let mut text = String::new();
    events.rewind()?;
    match events.read_to_string(&mut text) {
        // The group was removed.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(error) => Err(error),
        Ok(_) => Ok(text.lines().any(|line| line == "populated 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_that_a_directory_names_must_be_its_sandboxs() {
        let is = |group: &str| is_named_like(Path::new(group), Path::new("/run/sb/0123"));
        assert!(is("/sys/fs/cgroup/pods/012345"));
        for group in [
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/pods/01",
            "/sys/fs/cgroup/0123/..",
            "/",
        ] {
            assert!(!is(group), "{group}");
        }
    }

    #[test]
    fn a_group_is_killed_once_and_only_where_something_runs() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("pods/id");
        let end = || end_in(root.path(), Path::new("/pods"), "id", Duration::ZERO);
        assert!(!end().unwrap());
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        assert!(!end().unwrap());
        assert!(!group.join("cgroup.kill").exists());
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert_eq!(end().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
    }
}
