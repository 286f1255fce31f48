//! Programs of the guest that the agent itself runs.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::protocol::Fault;

/// Where programs are if nobody says it.
pub(super) const DEFAULT_PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most bytes of errors that are said again.
const MAX_ERRORS: u64 = 512;

/// What becomes of a program that takes too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AtLimit {
    /// It is killed, and has failed.
    IsKilled,
    /// It goes on, and has not failed so far.
    GoesOn,
}

/// Whether it is a program.
pub(super) fn is_executable(path: &Path) -> io::Result<bool> {
    let metadata = std::fs::metadata(path)?;
    Ok(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Looks for a program where a system has its own.
pub(super) fn find(root: &Path, name: &str) -> Result<PathBuf, Fault> {
    let mut candidates = DEFAULT_PATH
        .split(':')
        .map(|directory| root.join(directory.trim_start_matches('/')).join(name));
    candidates
        .find(|path| is_executable(path).unwrap_or(false))
        .ok_or_else(|| Fault::new(format!("the guest has no program {name}")))
}

/// Runs a program with an input that fits into a pipe; waits for its end, so long at most.
pub(super) fn run(
    path: &Path,
    words: &[&str],
    input: &[u8],
    limit: Duration,
    at_limit: AtLimit,
) -> Result<(), Fault> {
    let shown = path.display().to_string();
    let failed = |error: std::io::Error| Fault::io("run", &shown, &error);
    let mut child = Command::new(path)
        .args(words)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that reads none of it may have done without.
        let _ = stdin.write_all(input);
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (sender, ended) = mpsc::channel();
    let stderr = child.stderr.take();
    thread::spawn(move || {
        let mut errors = Vec::new();
        if let Some(stderr) = stderr {
            let _ = stderr.take(MAX_ERRORS).read_to_end(&mut errors);
        }
        // It stays until the other thread waits for it, so that its number is nobody else's.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Some(pid) = pid
            && waitid(WaitId::Pid(pid), options).is_err_and(|it| it == rustix::io::Errno::INTR)
        {
        }
        let _ = sender.send(errors);
    });
    let errors = match ended.recv_timeout(limit) {
        Ok(errors) => errors,
        Err(_) if at_limit == AtLimit::GoesOn => return Ok(()),
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            let fault = format!("{shown} did not end within {} ms", limit.as_millis());
            return Err(Fault::new(fault));
        }
    };
    let status = child.wait().map_err(failed)?;
    match status.success() {
        true => Ok(()),
        false => {
            let errors = String::from_utf8_lossy(&errors);
            let fault = format!("{shown} failed ({status}): {}", errors.trim());
            Err(Fault::new(fault))
        }
    }
}
