//! Reaps every process that becomes a child of PID 1, each exactly once, and reports its exit to
//! the tasks that wait for it.
//!
//! A process is claimed by its pid directly after its creation. Between creation and claim it may
//! already have ended; so while a [`Launch`] is open, the statuses of unclaimed processes are kept.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use podvisor_agent_protocol::ExitStatus;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions, WaitStatus, pidfd_open, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// How and when a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessExit {
    /// By its own exit or by a signal.
    pub status: ExitStatus,
    /// Nanoseconds since 1970-01-01 UTC.
    pub at_ns: u64,
}

/// Fires when a process has ended.
pub type ExitWatch = watch::Receiver<Option<ProcessExit>>;

/// Reports the exits of processes. Clones share one state.
#[derive(Debug, Clone, Default)]
pub struct Reaper {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    claimed: HashMap<Pid, watch::Sender<Option<ProcessExit>>>,
    unclaimed: HashMap<Pid, ProcessExit>,
    launches: usize,
}

/// A period in which children are created; see the module's documentation.
#[derive(Debug)]
pub struct Launch {
    reaper: Reaper,
}

/// A claimed child of this process.
#[derive(Debug)]
pub struct Child {
    /// Refers to the process even after its pid was reused; `None` if it ended before the claim.
    pub pidfd: Option<OwnedFd>,
    /// Fires when it has ended.
    pub exit: ExitWatch,
}

/// Starts listening for `SIGCHLD`; the future reaps, and ends only with an error.
///
/// # Errors
///
/// If the signal handler cannot be installed.
pub fn start() -> io::Result<(Reaper, impl Future<Output = io::Error>)> {
    let reaper = Reaper::default();
    let mut signals = signal(SignalKind::child())?;
    let reaping = {
        let reaper = reaper.clone();
        async move {
            let never: Result<Infallible, io::Error> = async {
                loop {
                    reaper.reap()?;
                    // Several exits may be reported by one signal; `reap` takes them all.
                    signals.recv().await.ok_or(io::ErrorKind::BrokenPipe)?;
                }
            }
            .await;
            let Err(error) = never;
            error
        }
    };
    Ok((reaper, reaping))
}

impl Reaper {
    /// Opens a period in which children are created.
    #[must_use]
    pub fn launch(&self) -> Launch {
        self.lock().launches += 1;
        Launch {
            reaper: self.clone(),
        }
    }

    fn reap(&self) -> io::Result<()> {
        let mut state = self.lock();
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let Some(exit) = ProcessExit::now(status) else {
                        continue;
                    };
                    if let Some(waiter) = state.claimed.remove(&pid) {
                        waiter.send_replace(Some(exit));
                    } else if state.launches > 0 {
                        state.unclaimed.insert(pid, exit);
                    }
                }
                Ok(None) | Err(Errno::CHILD) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    // A panic while the lock is held ends the agent, so the lock is never poisoned.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Launch {
    /// Claims a process that was created since the launch was opened.
    ///
    /// # Errors
    ///
    /// `ESRCH` if no such child exists or has existed, otherwise the error of pidfd_open(2).
    pub fn claim(&self, pid: Pid) -> io::Result<Child> {
        // Under the lock nothing is reaped, so `pid` cannot be reused for another process.
        let mut state = self.reaper.lock();
        if let Some(exit) = state.unclaimed.remove(&pid) {
            let (_, exit) = watch::channel(Some(exit));
            return Ok(Child { pidfd: None, exit });
        }
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let (sender, exit) = watch::channel(None);
        state.claimed.insert(pid, sender);
        Ok(Child {
            pidfd: Some(pidfd),
            exit,
        })
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        let mut state = self.reaper.lock();
        state.launches = state.launches.saturating_sub(1);
        if state.launches == 0 {
            state.unclaimed.clear();
        }
    }
}

impl ProcessExit {
    /// Returns the exit with the current time; `None` for a process that was stopped or continued.
    fn now(status: WaitStatus) -> Option<Self> {
        let status = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => ExitStatus::Code(u8::try_from(code).ok()?),
            (None, Some(signal)) => ExitStatus::Signal(u8::try_from(signal).ok()?),
            (None, None) => return None,
        };
        Some(Self {
            status,
            at_ns: now_ns(),
        })
    }
}

/// Returns the wall-clock time in nanoseconds since 1970-01-01 UTC; 0 before that.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until the process has ended.
///
/// # Errors
///
/// `BrokenPipe` if the reaper is gone, which ends the agent.
pub async fn ended(exit: &mut ExitWatch) -> io::Result<ProcessExit> {
    let exit = exit
        .wait_for(Option::is_some)
        .await
        .map_err(|_| io::ErrorKind::BrokenPipe)?;
    exit.ok_or_else(|| io::ErrorKind::BrokenPipe.into())
}
