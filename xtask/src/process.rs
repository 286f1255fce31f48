//! Child processes that never outlive this program, and cleanup when it ends: process groups are
//! killed, temporary directories removed, the terminal restored. This applies to normal exits,
//! errors, and SIGINT, SIGTERM and SIGHUP; after SIGKILL, the kernel kills the children, because
//! each requests it (`setpriv --pdeathsig`).

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal};
use rustix::termios::{OptionalActions, Termios};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

#[derive(Default)]
struct Undo {
    groups: Vec<Pid>,
    directories: Vec<PathBuf>,
    terminal: Option<Termios>,
}

static UNDO: Mutex<Undo> = Mutex::new(Undo {
    groups: Vec::new(),
    directories: Vec::new(),
    terminal: None,
});

fn undo() -> MutexGuard<'static, Undo> {
    UNDO.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes SIGINT, SIGTERM and SIGHUP clean up and end the program.
pub(crate) fn install_signal_handling() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else {
        return;
    };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            clean_up();
            std::process::exit(128 + signal);
        }
    });
}

/// Kills every process group, removes every temporary directory, restores the terminal.
pub(crate) fn clean_up() {
    let mut undo = undo();
    for group in undo.groups.drain(..) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    for directory in undo.directories.drain(..) {
        let _ = std::fs::remove_dir_all(directory);
    }
    if let Some(terminal) = undo.terminal.take() {
        let _ = rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &terminal);
    }
}

/// Sets the terminal on stdin to raw mode until this is dropped.
#[derive(Debug)]
pub(crate) struct RawTerminal(());

impl RawTerminal {
    pub(crate) fn enter() -> Result<Self> {
        let before = rustix::termios::tcgetattr(rustix::stdio::stdin())
            .context("stdin is not a terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        undo().terminal = Some(before);
        rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &raw)
            .context("the terminal cannot be switched to raw mode")?;
        Ok(Self(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(terminal) = undo().terminal.take() {
            let _ =
                rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &terminal);
        }
    }
}

/// A temporary directory that is removed when this is dropped, or the program ends.
#[derive(Debug)]
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    /// Creates one below `/tmp`: its path is short, as paths of unix sockets must be.
    pub(crate) fn new(purpose: &str) -> Result<Self> {
        let nanos = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.subsec_nanos());
        let path = std::env::temp_dir().join(format!(
            "podvisor-{purpose}-{}-{nanos:09}",
            std::process::id()
        ));
        std::fs::create_dir(&path)
            .with_context(|| format!("the directory {} cannot be made", path.display()))?;
        undo().directories.push(path.clone());
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        undo().directories.retain(|directory| *directory != self.0);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a command that the kernel kills when this program dies.
///
/// It is tied to the calling thread: call this from the main thread.
pub(crate) fn tied(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .process_group(0);
    command
}

/// A running child with all its descendants; killed when dropped.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    pid: Pid,
}

impl Group {
    /// Starts a `command` from [`tied`].
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let child = command
            .spawn()
            .with_context(|| format!("{} cannot be started", name(command)))?;
        let pid = Pid::from_child(&child);
        undo().groups.push(pid);
        Ok(Self { child, pid })
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.child.wait()?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        let _ = self.child.wait();
        undo().groups.retain(|group| *group != self.pid);
    }
}

/// Returns the command as the user knows it, without the wrapper of [`tied`].
fn name(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let skip = if words.first().is_some_and(|word| word == "setpriv") {
        4
    } else {
        0
    };
    let shown: Vec<_> = words.iter().skip(skip).take(8).cloned().collect();
    let more = if words.len() > skip + 8 { " …" } else { "" };
    format!("`{}{more}`", shown.join(" "))
}

/// Runs a [`tied`] command to completion; any failure is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = Group::spawn(command)?.wait()?;
    if status.success() {
        return Ok(());
    }
    Err(anyhow!("{} failed ({status})", name(command)))
}

/// Runs a command to completion and returns its stdout, trimmed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{} cannot be started", name(command)))?;
    if !status.success() {
        let text = String::from_utf8_lossy(&stderr);
        let last = text.lines().last().unwrap_or_default();
        bail!("{} failed ({status}): {last}", name(command));
    }
    Ok(String::from_utf8_lossy(&stdout).trim().to_owned())
}

/// Returns the SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let text = output(Command::new("sha256sum").arg("--").arg(path))?;
    text.split_whitespace()
        .next()
        .map(|digest| digest.trim_start_matches('\\').to_owned())
        .context("sha256sum printed nothing")
}

/// Returns the SHA-256 of several strings: the key of a cached result.
pub(crate) fn key(parts: &[&str]) -> Result<String> {
    use std::io::Write;
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("`sha256sum` cannot be started")?;
    if let Some(mut stdin) = child.stdin.take() {
        for part in parts {
            stdin.write_all(format!("{}:", part.len()).as_bytes())?;
            stdin.write_all(part.as_bytes())?;
        }
    }
    let out = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    let digest: String = text.chars().take(32).collect();
    if digest.len() < 32 {
        bail!("`sha256sum` printed no digest");
    }
    Ok(digest)
}

/// Holds a lock file until dropped, so that two processes never build the same result at the same
/// time.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "held, not read")] std::fs::File);

impl Lock {
    pub(crate) fn take(directory: &Path) -> Result<Self> {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        let path = directory.join(".lock");
        let file = std::fs::File::create(&path)
            .with_context(|| format!("{} cannot be opened", path.display()))?;
        if file.try_lock().is_err() {
            crate::report::note(&format!(
                "waiting for another xtask that builds {}",
                crate::paths::display(directory)
            ));
            file.lock()?;
        }
        Ok(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_named_without_its_wrapping() {
        let error = run(tied("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "`sh -c exit 3` failed (exit status: 3)");
    }

    #[test]
    fn dropping_a_group_kills_its_grandchildren() {
        let mut group = Group::spawn(
            tied("sh")
                .args(["-c", "sleep 1000 & echo $!; wait"])
                .stdout(Stdio::piped()),
        )
        .unwrap();
        let mut line = String::new();
        let stdout = group.child().stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        let grandchild = line.trim().to_owned();
        drop(group);
        // Init reaps the orphan; without a reaping init, it stays a zombie.
        let state = || {
            std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
                .ok()
                .and_then(|stat| {
                    stat.rsplit_once(") ")
                        .map(|(_, rest)| rest.starts_with('Z'))
                })
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while state() == Some(false) {
            assert!(std::time::Instant::now() < deadline, "still running");
            std::thread::yield_now();
        }
    }

    #[test]
    fn keys_tell_parts_apart() {
        let key = |parts: &[&str]| super::key(parts).unwrap();
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["a"]), key(&["a"]));
    }

    #[test]
    fn a_temporary_directory_goes_when_dropped() {
        let dir = TempDir::new("test").unwrap();
        let path = dir.path().to_owned();
        std::fs::write(path.join("x"), "x").unwrap();
        drop(dir);
        assert!(!path.exists());
    }
}
