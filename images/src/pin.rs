//! Locks that keep the files of images in place while machines run from them.

use std::fs::File;
use std::io;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Number of attempts to take a lock. A process that removes images checks whether they are in use,
/// and holds the lock of each for a moment.
const LOCK_ATTEMPTS: usize = 20;

/// Delay between two attempts.
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(5);

/// Takes a shared lock on a file that others may hold exclusively. Waits for a moment only, because
/// the holder may be a machine's process that holds the lock on purpose.
pub(crate) fn pin(file: &File) -> io::Result<()> {
    for _ in 1..LOCK_ATTEMPTS {
        match flock(file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => sleep(LOCK_RETRY_DELAY),
            done => return Ok(done?),
        }
    }
    Ok(flock(file, FlockOperation::NonBlockingLockShared)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn a_lock_is_waited_for_no_longer_than_a_moment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let holder = open();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let begin = Instant::now();
        let error = pin(&open()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(
            begin.elapsed() >= LOCK_RETRY_DELAY.saturating_mul(19),
            "it waits"
        );
        let later = thread::spawn(move || {
            sleep(LOCK_RETRY_DELAY);
            drop(holder);
        });
        // On a busy machine the moment may be over before the other thread was scheduled.
        while pin(&open()).is_err() && !later.is_finished() {}
        pin(&open()).unwrap();
        later.join().unwrap();
    }
}
