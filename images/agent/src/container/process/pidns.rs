//! The pid namespace that containers of the guest share if their specifications request it.
//!
//! Its first process is the agent's own program with [`SUBCOMMAND`], so that the namespace outlives
//! its containers; the process reaps what they leave behind, and does nothing else.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::{DumpableBehavior, Pid, set_dumpable_behavior};

use crate::reaper::{Child, Reaper};

/// First argument of the command line of the namespace's first process.
pub const SUBCOMMAND: &str = "reap";

/// The namespace shared by all containers, created when the first of them requests it.
#[derive(Debug, Default)]
pub struct SharedPids {
    first: Mutex<Option<(Pid, Child)>>,
}

impl SharedPids {
    /// Returns the path with which the namespace is joined.
    ///
    /// # Errors
    ///
    /// If its first process cannot be started.
    pub fn path(&self, reaper: &Reaper) -> io::Result<PathBuf> {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = first
            .as_ref()
            .filter(|(_, child)| child.exit.borrow().is_none());
        let pid = match alive {
            Some((pid, _)) => *pid,
            None => {
                let (pid, child) = start(reaper)?;
                *first = Some((pid, child));
                pid
            }
        };
        Ok(PathBuf::from(format!("/proc/{pid}/ns/pid")))
    }
}

fn start(reaper: &Reaper) -> io::Result<(Pid, Child)> {
    let launch = reaper.launch();
    let process = crate::sys::in_new_pid_namespace(|| {
        Command::new("/proc/self/exe")
            .arg0("pause")
            .arg(SUBCOMMAND)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    })?;
    let pid = Pid::from_child(&process);
    Ok((pid, launch.claim(pid)?))
}

/// Runs the namespace's first process: signals from within do not reach it, and it ends with the
/// guest.
pub fn main() -> ExitCode {
    // The name that container engines use for such a process in a list of processes.
    let _ = rustix::thread::set_name(c"pause");
    // Its root is the guest's, which only a container with CAP_SYS_PTRACE may access through it.
    if set_dumpable_behavior(DumpableBehavior::NotDumpable).is_err() {
        return ExitCode::FAILURE;
    }
    // All containers would end with it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    crate::sys::ignore_children();
    loop {
        std::thread::park();
    }
}
