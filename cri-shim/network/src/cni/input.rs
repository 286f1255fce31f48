//! The input of plugins: their configuration, in a file of the pod that is locked while they run.
//!
//! A plugin continues if the process that runs it is killed. A plugin that undid its work at the
//! same time would find only part of it, so the pod's next plugin waits (CNI specification 1.1,
//! "Lifecycle & Ordering").

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use podvisor_host::stall_timeout::timeout;
use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use rustix::io::Errno;
use tokio::time::sleep;

use super::error::CniError;

/// Least size of the file in bytes, padded with blanks: DEL's configuration is longer than that of
/// an ADD, which has no result yet.
const MIN_FILE_SIZE: usize = 16 << 10;

/// Pauses between attempts to lock the file; each is twice as long as the one before it.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// The input of plugins that run one after the other.
#[derive(Debug)]
pub(super) struct Input {
    file: File,
    /// Whether a plugin may have it open.
    is_lent: bool,
}

impl Input {
    /// Opens a pod's file, and waits up to `limit` until no plugin uses it.
    pub(super) async fn take(path: &Path, limit: Duration) -> Result<Self, CniError> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(0o600).open(path);
        let file = file.map_err(CniError::io("open", path))?;
        let Ok(locked) = timeout(limit, lock(&file)).await else {
            return Err(CniError::StillRuns {
                input: path.to_owned(),
                limit,
            });
        };
        locked.map_err(CniError::io("lock", path))?;
        Ok(Self {
            file,
            is_lent: false,
        })
    }

    /// Creates an input for plugins that do not work on a pod.
    pub(super) fn of_nobody() -> Result<Self, CniError> {
        let file = memfd_create("cni-input", MemfdFlags::CLOEXEC).map_err(io::Error::from);
        let file = file.map_err(CniError::io("make a file for", "a CNI plugin"))?;
        Ok(Self {
            file: file.into(),
            is_lent: false,
        })
    }

    /// Allocates blocks of the disk for configurations of up to `size` bytes.
    pub(super) fn reserve(&mut self, size: usize) -> io::Result<()> {
        let length = self.length()?;
        let missing = size.max(MIN_FILE_SIZE).saturating_sub(length);
        self.file.seek(SeekFrom::Start(length as u64))?;
        self.file.write_all(&vec![b' '; missing])
    }

    fn length(&self) -> io::Result<usize> {
        Ok(usize::try_from(self.file.metadata()?.len()).unwrap_or(0))
    }

    /// Returns the stdin of a plugin that reads `config`. It keeps the lock, even if this value is
    /// dropped, until the plugin has ended or [`Self::returned`] is called.
    pub(super) fn lend(&mut self, config: &[u8]) -> io::Result<Stdio> {
        let length = self.length()?;
        // The file keeps its size, so that DEL's configuration can be written on a full disk, too.
        let mut config = config.to_vec();
        config.resize(config.len().max(length).max(MIN_FILE_SIZE), b' ');
        self.file.rewind()?;
        self.file.write_all(&config)?;
        self.file.rewind()?;
        let stdin = self.file.try_clone()?;
        self.is_lent = true;
        Ok(stdin.into())
    }

    /// Reports that the plugin has ended: processes that it left with its stdin do not keep the
    /// lock.
    pub(super) fn returned(&mut self) {
        self.is_lent = false;
    }
}

/// Waits until the file is locked. A thread that waits for the lock could not be stopped, so the
/// kernel is asked again and again.
async fn lock(file: &File) -> io::Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            done => return Ok(done?),
        }
        sleep(pause).await;
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if !self.is_lent {
            // This releases the lock for all that have the file open.
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use podvisor_host::small_disk::SmallDisk;

    const LONG: Duration = Duration::from_secs(300);

    fn sleeper(input: &mut Input) -> std::process::Child {
        let stdin = input.lend(b"{}").unwrap();
        Command::new("sleep")
            .arg("1000")
            .stdin(stdin)
            .spawn()
            .unwrap()
    }

    #[tokio::test]
    async fn a_plugin_whose_starter_is_gone_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pod0.input");
        let mut input = Input::take(&path, LONG).await.unwrap();
        let mut plugin = sleeper(&mut input);
        drop(input);
        let error = Input::take(&path, Duration::from_millis(20)).await;
        let error = error.unwrap_err();
        assert!(matches!(error, CniError::StillRuns { .. }), "{error}");
        let mut next = std::pin::pin!(Input::take(&path, LONG));
        assert!(futures_util::poll!(&mut next).is_pending());
        plugin.kill().unwrap();
        plugin.wait().unwrap();
        next.await.unwrap();
    }

    #[tokio::test]
    async fn a_wait_in_vain_keeps_neither_a_thread_nor_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pod0.input");
        let mut input = Input::take(&path, LONG).await.unwrap();
        let mut plugin = sleeper(&mut input);
        drop(input);
        for _ in 0..3 {
            let waited = Input::take(&path, Duration::from_millis(20)).await;
            assert!(matches!(waited, Err(CniError::StillRuns { .. })));
        }
        // A thread that still waited would have it open.
        let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = files.filter(|file| fs::read_link(file.path()).is_ok_and(|of| of == path));
        assert_eq!(open.count(), 0);
        plugin.kill().unwrap();
        plugin.wait().unwrap();
    }

    #[tokio::test]
    async fn what_a_plugin_leaves_running_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pod0.input");
        let mut input = Input::take(&path, LONG).await.unwrap();
        let mut left = sleeper(&mut input);
        input.returned();
        drop(input);
        Input::take(&path, Duration::ZERO).await.unwrap();
        left.kill().unwrap();
        left.wait().unwrap();
    }

    #[tokio::test]
    async fn a_plugin_reads_its_configuration_and_nothing_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let of_pod = Input::take(&dir.path().join("pod0.input"), LONG).await;
        for mut input in [of_pod.unwrap(), Input::of_nobody().unwrap()] {
            for config in ["{\"long\": true}", "{}"] {
                let mut cat = Command::new("cat");
                let read = cat.stdin(input.lend(config.as_bytes()).unwrap()).output();
                assert_eq!(read.unwrap().stdout.trim_ascii_end(), config.as_bytes());
            }
        }
    }

    #[tokio::test]
    async fn a_plugin_gets_its_configuration_on_a_disk_that_has_become_full() {
        let disk = SmallDisk::new();
        let path = disk.path().join("pod0.input");
        let mut input = Input::take(&path, LONG).await.unwrap();
        for config in ["{}".to_owned(), format!("[{}0]", "0,".repeat(20 << 10))] {
            input.lend(config.as_bytes()).unwrap();
            drop(input);
            disk.fill();
            input = Input::take(&path, LONG).await.unwrap();
            for other in ["{}", &"7".repeat(MIN_FILE_SIZE), &config] {
                input.lend(other.as_bytes()).unwrap();
                // Another process fills the disk.
                disk.fill();
            }
            disk.clear();
        }
    }
}
