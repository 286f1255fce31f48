//! Programs of the guest that the agent itself runs.

use std::io::{self, Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::protocol::Fault;

/// Where programs are if nobody says it.
pub(super) const DEFAULT_PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most bytes of errors that are said again.
const MAX_ERRORS: usize = 512;

/// How long the errors of a program that has failed are waited for: another one may have its
/// output.
const PATIENCE: Duration = Duration::from_secs(2);

/// What becomes of a program that takes too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AtLimit {
    /// It is killed, and has failed.
    IsKilled,
    /// It goes on, and has not failed so far.
    GoesOn,
}

/// Whether it is a program.
fn is_executable(path: &Path) -> io::Result<bool> {
    let metadata = std::fs::metadata(path)?;
    Ok(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Looks for a program in directories, as a shell does; the error is the one that it has.
pub(super) fn search(
    directories: impl IntoIterator<Item = PathBuf>,
    name: &str,
) -> io::Result<PathBuf> {
    let mut is_forbidden = false;
    for directory in directories {
        let candidate = directory.join(name);
        match is_executable(&candidate) {
            Ok(true) => return Ok(candidate),
            Ok(false) => is_forbidden = true,
            Err(_) => {}
        }
    }
    Err(io::Error::from_raw_os_error(match is_forbidden {
        true => libc::EACCES,
        false => libc::ENOENT,
    }))
}

/// Looks for a program where a system has its own.
pub(super) fn find(root: &Path, name: &str) -> Result<PathBuf, Fault> {
    let directories = DEFAULT_PATH.split(':');
    let directories = directories.map(|directory| root.join(directory.trim_start_matches('/')));
    search(directories, name).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Fault::new(format!("the guest has no program {name}")),
        _ => Fault::io("run", name, &error),
    })
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
    let errors = Arc::new(Mutex::new(Vec::new()));
    let (was_read, is_read) = mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        let errors = Arc::clone(&errors);
        thread::spawn(move || {
            keep_beginning(stderr, &errors);
            let _ = was_read.send(());
        });
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (has_ended, ended) = mpsc::channel();
    thread::spawn(move || {
        // It stays until the other thread waits for it, so that its number is nobody else's.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Some(pid) = pid
            && waitid(WaitId::Pid(pid), options).is_err_and(|it| it == rustix::io::Errno::INTR)
        {
        }
        let _ = has_ended.send(());
    });
    if ended.recv_timeout(limit).is_err() {
        if at_limit == AtLimit::GoesOn {
            return Ok(());
        }
        let _ = child.kill();
        let _ = child.wait();
        let fault = format!("{shown} did not end within {} ms", limit.as_millis());
        return Err(Fault::new(fault));
    }
    let status = child.wait().map_err(failed)?;
    match status.success() {
        true => Ok(()),
        false => {
            let _ = is_read.recv_timeout(PATIENCE);
            let errors = errors.lock().unwrap_or_else(PoisonError::into_inner);
            let errors = String::from_utf8_lossy(&errors);
            let fault = format!("{shown} failed ({status}): {}", errors.trim());
            Err(Fault::new(fault))
        }
    }
}

/// Reads a stream to its end, so that its writer can go on; keeps its beginning.
fn keep_beginning(mut stream: impl Read, kept: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(count @ 1..) => {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                let room = MAX_ERRORS.saturating_sub(kept.len()).min(count);
                kept.extend_from_slice(piece.get(..room).unwrap_or_default());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn shell(script: &str, limit: Duration, at_limit: AtLimit) -> Result<(), Fault> {
        run(Path::new("/bin/sh"), &["-c", script], b"", limit, at_limit)
    }

    #[test]
    fn a_tool_that_writes_more_errors_than_are_kept_ends_by_itself() {
        // More than a pipe holds: neither does it wait, nor is it killed for writing.
        let much = "head -c 300000 /dev/zero | tr '\\0' x >&2 && exit";
        let script = format!("{much} 0; exit 9");
        shell(&script, LIMIT, AtLimit::IsKilled).unwrap();
        let fault = shell(&format!("{much} 3"), LIMIT, AtLimit::IsKilled).unwrap_err();
        assert!(fault.desc.contains("exit status: 3"), "{fault}");
        let kept = fault.desc.bytes().filter(|byte| *byte == b'x').count();
        assert!((MAX_ERRORS..MAX_ERRORS + 16).contains(&kept), "{fault}");
    }

    #[test]
    fn a_tool_that_leaves_another_with_its_errors_has_ended_nevertheless() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join("left");
        let script = format!(
            "sleep 600 & echo $! >{}; echo why >&2; exit 4",
            left.display()
        );
        let fault = shell(&script, LIMIT, AtLimit::IsKilled).unwrap_err();
        let left = std::fs::read_to_string(left).unwrap();
        let left = Pid::from_raw(left.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
        assert!(fault.desc.ends_with("(exit status: 4): why"), "{fault}");
    }

    #[test]
    fn a_tool_that_takes_too_long_is_killed_or_goes_on() {
        let limit = Duration::from_millis(50);
        let fault = shell("exec sleep 600", limit, AtLimit::IsKilled).unwrap_err();
        assert!(fault.desc.contains("did not end within 50 ms"), "{fault}");
        let dir = tempfile::tempdir().unwrap();
        let (awaited, done) = (dir.path().join("awaited"), dir.path().join("done"));
        for path in [&awaited, &done] {
            let made = Command::new("mkfifo").arg(path).status().unwrap();
            assert!(made.success());
        }
        let (awaited, done) = (awaited.display(), done.display());
        let script = format!("read line <{awaited}; echo more >&2; echo done >{done}");
        shell(&script, limit, AtLimit::GoesOn).unwrap();
        std::fs::write(awaited.to_string(), "go\n").unwrap();
        assert_eq!(std::fs::read_to_string(done.to_string()).unwrap(), "done\n");
    }

    #[test]
    fn a_program_is_found_where_it_may_be_run() {
        let root = tempfile::tempdir().unwrap();
        let place = |path: &str, mode| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let said = || find(root.path(), "tool").unwrap_err().desc;
        assert_eq!(said(), "the guest has no program tool");
        place("usr/sbin/tool", 0o644);
        assert_eq!(said(), "failed to run 'tool': Permission denied");
        let found = place("sbin/tool", 0o755);
        assert_eq!(find(root.path(), "tool").unwrap(), found);
    }
}
