//! Starts the process of a sandbox.
//!
//! To move a process to another control group, the kernel blocks all forks of the host, and first
//! waits for an RCU grace period: some milliseconds for this sandbox, and for others that start
//! meanwhile. A process that is created in its group does without (`CLONE_INTO_CGROUP`, Linux 5.7).
//! The standard library cannot do this.

mod child;
mod clone;

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::fcntl_dupfd_cloexec;

use super::jail;
pub(super) use child::Child;

/// A program with all that it gets. Its stdout is `/dev/null`, its working directory `/`.
#[derive(Debug)]
pub(super) struct Program<'a> {
    pub(super) path: &'a Path,
    /// The first one is the program's name.
    pub(super) arguments: &'a [&'a str],
    pub(super) environment: Vec<(&'a str, OsString)>,
    pub(super) stdin: OwnedFd,
    pub(super) stderr: OwnedFd,
    /// Whether it is the first process of a new PID namespace.
    pub(super) new_pids: bool,
}

impl Program<'_> {
    /// Starts the program in this process's control group.
    ///
    /// # Errors
    /// The program, or a process, cannot be had.
    pub(super) fn start(&self) -> io::Result<Child> {
        let (name, arguments) = self.arguments.split_first().unwrap_or((&"", &[]));
        let mut command = Command::new(self.path);
        command
            .arg0(name)
            .args(arguments)
            .current_dir("/")
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(self.stdin.try_clone()?))
            .stdout(Stdio::null())
            .stderr(Stdio::from(self.stderr.try_clone()?));
        let started = match self.new_pids {
            true => jail::spawn(|| command.spawn()),
            false => command.spawn(),
        };
        Child::of(started?)
    }

    /// Starts the program in the control group of the directory `group`.
    ///
    /// # Errors
    /// The program, or a process, cannot be had; the kernel is too old; or the call is filtered.
    pub(super) fn start_in(&self, group: BorrowedFd<'_>) -> io::Result<Child> {
        let environment = self.environment.iter().map(|(name, value)| {
            let mut variable = OsString::from(name);
            variable.push("=");
            variable.push(value);
            terminated(&variable)
        });
        let arguments = self.arguments.iter().map(|word| terminated(word.as_ref()));
        let null = std::fs::File::options().write(true).open("/dev/null")?;
        let execution = clone::Execution {
            program: terminated(self.path.as_os_str())?,
            arguments: arguments.collect::<io::Result<_>>()?,
            environment: environment.collect::<io::Result<_>>()?,
            standard: [
                beyond_standard(self.stdin.as_fd())?,
                beyond_standard(null.as_fd())?,
                beyond_standard(self.stderr.as_fd())?,
            ],
        };
        let (pid, process) = execution.clone_into(group, self.new_pids)?;
        Child::new(pid, process)
    }
}

fn terminated(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.as_bytes())?)
}

/// Duplicates a descriptor to one that no standard file replaces.
fn beyond_standard(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(fcntl_dupfd_cloexec(fd, libc::STDERR_FILENO + 1)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read as _, Seek as _};
    use std::os::unix::process::ExitStatusExt as _;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::CGROUP_ROOT;

    /// Reports on what it has been given: also its PID, its open files, and the signals that it
    /// blocks.
    const REPORT: &str = "exec >&2; pwd; echo $0 $VALUE; cat; echo $$; ls /proc/$$/fd; \
        grep SigBlk /proc/self/status; exit 7";

    const PID_LINE: usize = 3;

    fn program<'a>(arguments: &'a [&'a str], new_pids: bool) -> (Program<'a>, File) {
        let output = tempfile::tempfile().unwrap();
        let mut input = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut input, b"input\n").unwrap();
        input.rewind().unwrap();
        let program = Program {
            path: Path::new("/bin/sh"),
            arguments,
            environment: vec![("VALUE", "7 = seven".into())],
            stdin: input.into(),
            stderr: output.try_clone().unwrap().into(),
            new_pids,
        };
        (program, output)
    }

    /// Blocks a signal in this thread.
    #[allow(unsafe_code)]
    fn block(signal: libc::c_int) {
        // SAFETY: changes a set of this function, and which signals this thread takes.
        unsafe {
            let mut signals = std::mem::zeroed();
            libc::sigaddset(&raw mut signals, signal);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
        }
    }

    fn text(mut output: File) -> String {
        let mut text = String::new();
        output.rewind().unwrap();
        output.read_to_string(&mut text).unwrap();
        text
    }

    /// Starts the program that reports, and returns its report.
    async fn report(new_pids: bool, start: impl Fn(&Program<'_>) -> io::Result<Child>) -> String {
        let (program, output) = program(&["name", "-c", REPORT], new_pids);
        block(libc::SIGTERM);
        let mut child = start(&program).unwrap();
        assert_eq!(child.wait().await.unwrap().code(), Some(7));
        let again = child.wait().await.unwrap();
        assert_eq!(again.code(), Some(7), "it is reaped once");
        text(output)
    }

    #[tokio::test]
    async fn a_program_gets_what_it_is_given() {
        let said = report(false, |program| program.start()).await;
        let lines: Vec<&str> = said.lines().take(3).collect();
        assert_eq!(lines, ["/", "name 7 = seven", "input"]);
        assert!(said.ends_with("SigBlk:\t0000000000000000\n"), "{said}");
    }

    #[tokio::test]
    async fn a_directory_that_is_no_group_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (program, _) = program(&["name", "-c", "exit"], false);
        let group = File::open(dir.path()).unwrap();
        program.start_in(group.as_fd()).unwrap_err();
    }

    #[tokio::test]
    async fn a_child_that_cannot_be_watched_is_ended() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        // The event loop does not watch plain files.
        let file = tempfile::tempfile().unwrap();
        Child::new(pid, file.into()).unwrap_err();
        child.wait().expect_err("it is reaped");
    }

    #[tokio::test]
    async fn a_child_that_is_discarded_is_killed_and_reaped() {
        let (program, _) = program(&["name", "-c", "sleep 1000"], false);
        let child = program.start().unwrap();
        let process = format!("/proc/{}", child.id());
        child.discard();
        let is_gone = async {
            while fs::exists(&process).unwrap() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), is_gone).await.unwrap();
    }

    #[tokio::test]
    async fn guest_a_program_starts_in_its_group_as_it_does_outside() {
        let path = Path::new(CGROUP_ROOT).join("podvisor-spawn-test");
        fs::create_dir(&path).unwrap();
        let group = File::open(&path).unwrap();
        for new_pids in [false, true] {
            let inside = report(new_pids, |program| program.start_in(group.as_fd())).await;
            let outside = report(new_pids, |program| program.start()).await;
            let without_pid = |report: &str| -> Vec<String> {
                let lines = report.lines().enumerate();
                let lines = lines.filter(|(number, _)| new_pids || *number != PID_LINE);
                lines.map(|(_, line)| line.to_owned()).collect()
            };
            assert_eq!(without_pid(&inside), without_pid(&outside));
        }
        let (program, _) = program(&["name", "-c", "cat; sleep 1000"], true);
        let mut child = program.start_in(group.as_fd()).unwrap();
        let members = fs::read_to_string(path.join("cgroup.procs")).unwrap();
        assert_eq!(members.trim(), child.id().to_string());
        child.kill();
        let status = child.wait().await.unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
        // The error of the execution, and no process.
        let missing = Program {
            path: Path::new("/missing"),
            ..program
        };
        let error = missing.start_in(group.as_fd()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let members = fs::read_to_string(path.join("cgroup.procs")).unwrap();
        assert_eq!(members, "");
        fs::remove_dir(&path).unwrap();
    }
}
