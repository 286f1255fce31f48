//! A process created by the agent: signals, its exit, its terminal. `launch` creates it, in its
//! turn (`turns`); `notify` starts one that is a container's own.

pub mod launch;
pub mod notify;
pub mod pidns;
pub mod turns;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::process::Pid;
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::task::JoinSet;

use crate::reaper::{Child, ExitWatch};
use crate::stdio::fd::Endpoint;

/// A process of a container. Dropping it closes its streams.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: Option<OwnedFd>,
    exit: ExitWatch,
    terminal: Option<Endpoint>,
    relays: Mutex<JoinSet<()>>,
}

impl Process {
    pub(in crate::container) fn new(
        pid: Pid,
        child: Child,
        terminal: Option<Endpoint>,
        relays: JoinSet<()>,
    ) -> Self {
        Self {
            pid,
            pidfd: child.pidfd,
            exit: child.exit,
            terminal,
            relays: Mutex::new(relays),
        }
    }

    /// Returns its id in the guest's pid namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns a watch that fires when it has ended.
    #[must_use]
    pub fn exit(&self) -> ExitWatch {
        self.exit.clone()
    }

    /// Returns whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Returns whether no stream between it and the host is open any more: it has ended, and so
    /// have the processes that inherited its streams.
    pub(in crate::container) fn has_no_streams(&self) -> bool {
        let mut relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        while relays.try_join_next().is_some() {}
        relays.is_empty()
    }

    /// Sends a signal, 1 to 64; returns `false` if the process has ended.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn signal(&self, signal: u8) -> io::Result<bool> {
        let Some(pidfd) = &self.pidfd else {
            return Ok(false);
        };
        match crate::sys::pidfd_send_signal(pidfd, signal) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sets the size of its terminal; returns `false` if it has none.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn resize(&self, size: (u16, u16)) -> io::Result<bool> {
        let Some(terminal) = &self.terminal else {
            return Ok(false);
        };
        resize(terminal, size).map(|()| true)
    }
}

/// Sets the size of the terminal of `master`.
pub(in crate::container) fn resize(
    master: &Endpoint,
    (columns, rows): (u16, u16),
) -> io::Result<()> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(master, size)?)
}
