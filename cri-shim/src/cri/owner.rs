//! The lock that gives a state directory to one daemon: a second one would not know the sandboxes
//! of the first, and would end them.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::debug;

use super::error::{CriError, Result};

/// The lock file in the state directory. It contains the PID of the lock's holder.
const NAME: &str = "daemon.lock";

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
    /// Takes the lock of an existing directory.
    pub(super) fn take(dir: &Path) -> Result<Self> {
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
        if let Err(error) = note(&mut file) {
            // It is only used for the message to another daemon.
            debug!(path = %path.display(), %error, "failed to write the owner into daemon.lock");
        }
        Ok(Self { _lock: file })
    }
}

fn note(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())
}

/// Returns the lock's holder, in words, as far as the file says.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(32).read_to_string(&mut text);
    match read.ok().and_then(|_| text.trim().parse::<u32>().ok()) {
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
        let first = StateOwner::take(dir.path()).unwrap();
        let mode = dir.path().join(NAME).metadata().unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let begin = Instant::now();
        let refused = StateOwner::take(dir.path()).unwrap_err().to_string();
        assert!(begin.elapsed() >= LOCK_RETRY_DELAY, "it is tried again");
        for part in [
            dir.path().to_str().unwrap(),
            &format!("process {}", std::process::id()),
            "--state",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        drop(first);
        StateOwner::take(dir.path()).unwrap();
    }

    #[test]
    fn a_state_directory_without_room_is_taken() {
        let disk = SmallDisk::new();
        disk.fill();
        let _first = StateOwner::take(disk.path()).unwrap();
        let refused = StateOwner::take(disk.path()).unwrap_err().to_string();
        assert!(refused.contains("another process"), "{refused}");
    }

    #[test]
    fn an_owner_that_is_about_to_go_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateOwner::take(dir.path()).unwrap();
        let goes = std::thread::spawn(move || {
            sleep(2 * LOCK_RETRY_DELAY);
            drop(first);
        });
        StateOwner::take(dir.path()).unwrap();
        goes.join().unwrap();
    }

    #[test]
    fn programs_that_an_owner_started_do_not_keep_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let owner = StateOwner::take(dir.path()).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        drop(owner);
        let taken = StateOwner::take(dir.path());
        child.kill().unwrap();
        child.wait().unwrap();
        taken.unwrap();
    }
}
