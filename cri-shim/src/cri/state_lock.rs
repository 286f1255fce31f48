//! The lock that gives a state directory to one daemon: a second one would not know the sandboxes
//! of the first, and would end them. So would a later one with another root, which has no records
//! of the pods.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::debug;

use super::error::{CriError, Result};
use super::state::DATABASE;

/// Directory of sandboxes in the state directory. Short, as are the names in it: the path of
/// a socket in it has at most 107 bytes.
pub(super) const SANDBOXES: &str = "sb";

/// The lock file in the state directory. It contains the PID of the lock's holder, and in the
/// second line its root.
const NAME: &str = "daemon.lock";

/// Most of the file that is read.
const MAX_BYTES: u64 = 64 + libc::PATH_MAX as u64;

/// How often the lock is tried: a killed daemon may take a moment to exit, and a child that it was
/// just starting shares its open files until that child's exec.
const LOCK_ATTEMPTS: usize = 20;

/// Delay between two attempts.
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(50);

/// A state directory that this process owns until this is dropped.
#[derive(Debug)]
pub(super) struct StateOwner {
    /// Closed in children, as all files are: the lock is released with this process.
    _lock: File,
}

impl StateOwner {
    /// Takes the lock of an existing directory, for a daemon with an existing root.
    pub(super) fn take(dir: &Path, root: &Path) -> Result<Self> {
        let path = dir.join(NAME);
        // Only root can open it, and so hold the lock.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(0o600).open(&path);
        let mut file = file.map_err(CriError::io("open", &path))?;
        for attempt in 1.. {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if attempt < LOCK_ATTEMPTS => sleep(LOCK_RETRY_DELAY),
                Err(Errno::WOULDBLOCK) => {
                    return Err(CriError::StateOwned {
                        dir: dir.to_owned(),
                        owner: owner(&mut file),
                    });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(CriError::io("lock", &path)(error.into())),
            }
        }
        let root = fs::canonicalize(root).map_err(CriError::io("find", root))?;
        if let Some(other) = noted_root(&mut file)
            && other != root
            // Not where it was moved to this root.
            && other.join(DATABASE).exists()
            && fs::read_dir(dir.join(SANDBOXES)).is_ok_and(|mut pods| pods.next().is_some())
        {
            let dir = dir.to_owned();
            return Err(CriError::StateOfRoot { dir, root: other });
        }
        if let Err(error) = note(&mut file, &root) {
            debug!(path = %path.display(), %error, "failed to write the owner into daemon.lock");
        }
        Ok(Self { _lock: file })
    }
}

fn note(file: &mut File, root: &Path) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    let mut text = format!("{}\n", std::process::id()).into_bytes();
    text.extend_from_slice(root.as_os_str().as_bytes());
    file.write_all(&text)
}

/// Returns the root of the last daemon; `None` if the file does not say, as of an older version.
fn noted_root(file: &mut File) -> Option<PathBuf> {
    let mut text = Vec::new();
    file.rewind().ok()?;
    file.take(MAX_BYTES).read_to_end(&mut text).ok()?;
    let root = text.splitn(2, |byte| *byte == b'\n').nth(1)?.to_owned();
    (!root.is_empty()).then(|| OsString::from_vec(root).into())
}

/// Returns the lock's holder, in words, as far as the file says.
fn owner(file: &mut File) -> String {
    let mut text = Vec::new();
    let read = file.take(MAX_BYTES).read_to_end(&mut text);
    // Its root need not be UTF-8.
    let text = String::from_utf8_lossy(&text);
    let pid = text
        .lines()
        .next()
        .and_then(|line| line.parse::<u32>().ok());
    match pid.filter(|_| read.is_ok()) {
        Some(pid) => format!("process {pid}"),
        None => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;
    use std::time::Instant;

    use super::*;
    use crate::small_disk::SmallDisk;

    #[test]
    fn a_state_directory_has_one_owner_who_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateOwner::take(dir.path(), dir.path()).unwrap();
        let mode = dir.path().join(NAME).metadata().unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let begin = Instant::now();
        let refused = StateOwner::take(dir.path(), dir.path())
            .unwrap_err()
            .to_string();
        assert!(begin.elapsed() >= LOCK_RETRY_DELAY, "it is tried again");
        for part in [
            dir.path().to_str().unwrap(),
            &format!("process {}", std::process::id()),
            "--state",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        drop(first);
        StateOwner::take(dir.path(), dir.path()).unwrap();
    }

    #[test]
    fn a_state_directory_without_room_is_taken() {
        let disk = SmallDisk::new();
        disk.fill();
        let _first = StateOwner::take(disk.path(), disk.path()).unwrap();
        let refused = StateOwner::take(disk.path(), disk.path())
            .unwrap_err()
            .to_string();
        assert!(refused.contains("another process"), "{refused}");
    }

    #[test]
    fn a_daemon_with_another_root_does_not_take_pods_that_it_has_no_records_of() {
        let dir = tempfile::tempdir().unwrap();
        let [state, first, second] = ["state", "first", "second"].map(|name| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        });
        fs::write(first.join(DATABASE), "").unwrap();
        let take = |root: &Path| StateOwner::take(&state, root);
        drop(take(&first).unwrap());
        // It has no pods.
        drop(take(&second).unwrap());
        drop(take(&first).unwrap());
        fs::create_dir_all(state.join(SANDBOXES).join("pod")).unwrap();
        let refused = take(&second).unwrap_err().to_string();
        for part in [state.to_str().unwrap(), first.to_str().unwrap(), "--root"] {
            assert!(refused.contains(part), "{refused}");
        }
        // By another name, and where it was moved.
        std::os::unix::fs::symlink(&first, dir.path().join("link")).unwrap();
        drop(take(&dir.path().join("link")).unwrap());
        fs::rename(first.join(DATABASE), second.join(DATABASE)).unwrap();
        drop(take(&second).unwrap());
        // An older version did not note its root.
        fs::write(state.join(NAME), "7\n").unwrap();
        drop(take(&first).unwrap());
    }

    #[test]
    fn an_owner_that_is_about_to_go_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateOwner::take(dir.path(), dir.path()).unwrap();
        let goes = std::thread::spawn(move || {
            sleep(2 * LOCK_RETRY_DELAY);
            drop(first);
        });
        StateOwner::take(dir.path(), dir.path()).unwrap();
        goes.join().unwrap();
    }

    #[test]
    fn programs_that_an_owner_started_do_not_keep_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let owner = StateOwner::take(dir.path(), dir.path()).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        drop(owner);
        let taken = StateOwner::take(dir.path(), dir.path());
        child.kill().unwrap();
        child.wait().unwrap();
        taken.unwrap();
    }
}
