//! A process that this one has started.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::thread;

use podvisor_host::watch;
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid,
};
use tokio::io::unix::AsyncFd;

/// A child process, which goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    process: AsyncFd<OwnedFd>,
    /// Set once it was waited for: its PID may be another's by now.
    status: Option<ExitStatus>,
}

impl Child {
    pub(super) fn of(child: std::process::Child) -> io::Result<Self> {
        let pid = Pid::from_child(&child);
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => Self::new(pid, process),
            Err(error) => Err(given_up(pid, error.into())),
        }
    }

    pub(crate) fn new(pid: Pid, process: OwnedFd) -> io::Result<Self> {
        let process = watch::readable(process).map_err(|error| given_up(pid, error))?;
        Ok(Self {
            pid,
            process,
            status: None,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Whether the process has ended and was waited for.
    pub(crate) fn has_ended(&self) -> bool {
        self.status.is_some()
    }

    /// Kills the process, unless it has ended.
    pub(crate) fn kill(&self) {
        // Only fails if it is gone.
        let _ = pidfd_send_signal(self.process.get_ref(), Signal::KILL);
    }

    /// Waits until the process ends, and reaps it.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.status {
                return Ok(status);
            }
            let mut ended = self.process.readable().await?;
            self.status = reap(self.pid, WaitOptions::NOHANG)?;
            ended.clear_ready();
        }
    }

    /// Kills the process, and reaps it later.
    pub(crate) fn discard(self) {
        self.kill();
        let Self { pid, status, .. } = self;
        if status.is_none() {
            // If there is no thread to be had, it is reaped when this process ends.
            let _ = thread::Builder::new().spawn(move || reap(pid, WaitOptions::empty()));
        }
    }
}

/// Ends a child that cannot be watched because of `error`: another one must not find it beside
/// itself.
fn given_up(pid: Pid, error: io::Error) -> io::Error {
    // It is not reaped yet, so it has its PID.
    let _ = kill_process(pid, Signal::KILL);
    let _ = reap(pid, WaitOptions::empty());
    error
}

/// Returns how a child ended, which is not waited for again.
fn reap(pid: Pid, options: WaitOptions) -> io::Result<Option<ExitStatus>> {
    let ended = retry_on_intr(|| waitpid(Some(pid), options))?;
    Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
}
