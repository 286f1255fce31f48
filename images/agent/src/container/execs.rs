//! The additional processes of a container, by the ids that the host gave them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use podvisor_agent_protocol::{ExitStatus, limits};

use super::error::{ContainerError, Result};
use super::limit::TooMany;
use super::lock::lock;
use super::process::Process;

/// The status of a process that SIGKILL ended, and of a shell whose last command it ended.
const KILLED: u8 = 128 + 9;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Execs(Mutex<HashMap<String, Exec>>);

#[derive(Debug)]
enum Exec {
    /// Its place is reserved; the process is being created.
    Making,
    Made {
        process: Arc<Process>,
        /// The container's number of OOM kills before the process was created.
        oom_kills_before: u64,
        /// Whether the host was told its exit status.
        is_told: bool,
    },
}

impl Exec {
    /// Returns whether the host was told its exit status.
    fn is_told(&self) -> bool {
        matches!(self, Self::Made { is_told: true, .. })
    }

    /// Returns whether its last output has been read as well.
    fn is_over(&self) -> bool {
        matches!(self, Self::Made { process, is_told: true, .. } if process.has_no_streams())
    }
}

impl Execs {
    /// Reserves a place. If all are taken, processes that have ended and whose exit status was
    /// reported to the host make room; if possible none whose output is still being sent, which
    /// would be cut off.
    pub(super) fn reserve(&self, id: &str) -> Result<()> {
        let mut execs = lock(&self.0);
        if execs.contains_key(id) {
            return Err(ContainerError::Exists(id.to_owned()));
        }
        if execs.len() >= limits::EXECS {
            execs.retain(|_, exec| !exec.is_over());
        }
        if execs.len() >= limits::EXECS {
            execs.retain(|_, exec| !exec.is_told());
        }
        if execs.len() >= limits::EXECS {
            let (what, limit) = ("execs", limits::EXECS);
            return Err(TooMany { what, limit }.into());
        }
        execs.insert(id.to_owned(), Exec::Making);
        Ok(())
    }

    /// Puts a process into its reserved place. `oom_kills_before` is the container's number of OOM
    /// kills before it was created.
    pub(super) fn made(&self, id: String, process: Process, oom_kills_before: u64) {
        let made = Exec::Made {
            process: Arc::new(process),
            oom_kills_before,
            is_told: false,
        };
        lock(&self.0).insert(id, made);
    }

    /// Frees the place of a process that could not be created.
    pub(super) fn failed(&self, id: &str) {
        lock(&self.0).remove(id);
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<Process>> {
        match lock(&self.0).get(id) {
            Some(Exec::Made { process, .. }) => Ok(Arc::clone(process)),
            Some(Exec::Making) => Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "being created",
            }),
            None => Err(ContainerError::NotFound(id.to_owned())),
        }
    }

    /// Kills a process that the host no longer waits for: its place may be given away.
    pub(super) fn abandon(&self, id: &str) {
        if let Some(Exec::Made {
            process, is_told, ..
        }) = lock(&self.0).get_mut(id)
        {
            if let Err(error) = process.signal(9) {
                tracing::warn!(exec = id, %error, "cannot kill a process that nobody waits for");
            }
            *is_told = true;
        }
    }

    /// Returns whether the OOM killer ended this process, or the one whose status it passed on, if
    /// it ended with `status` and the container has had `oom_kills` so far. The kernel counts by
    /// container: a process that ended otherwise was not killed, whatever the count says.
    pub(super) fn is_oom_killed(&self, id: &str, status: ExitStatus, oom_kills: u64) -> bool {
        let is_killed = status.shell_code() == KILLED;
        let execs = lock(&self.0);
        let made = execs.get(id);
        is_killed
            && matches!(made, Some(Exec::Made { oom_kills_before, .. })
                if oom_kills > *oom_kills_before)
    }

    /// Records that the host was told the exit status of this one.
    pub(super) fn told(&self, id: &str) {
        if let Some(Exec::Made { is_told, .. }) = lock(&self.0).get_mut(id) {
            *is_told = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use podvisor_agent_protocol::ErrorKind;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use tokio::sync::watch;
    use tokio::task::JoinSet;

    use super::*;
    use crate::reaper::{Child, ProcessExit};

    fn process(relays: JoinSet<()>) -> Process {
        let exit = ProcessExit {
            status: ExitStatus::Code(0),
            at_ns: 0,
        };
        let (_, exit) = watch::channel(Some(exit));
        Process::new(Pid::INIT, Child { pidfd: None, exit }, None, relays)
    }

    fn is_there(execs: &Execs, id: &str) -> bool {
        execs.get(id).is_ok()
    }

    #[tokio::test]
    async fn one_that_nobody_waits_for_is_killed_and_makes_room() {
        let execs = Execs::default();
        execs.reserve("late").unwrap();
        let early = execs.get("late").unwrap_err();
        assert_eq!(early.kind(), ErrorKind::WrongState, "{early}");
        assert_eq!(execs.get("more").unwrap_err().kind(), ErrorKind::NotFound);
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let (_sender, exit) = watch::channel(None);
        let pidfd = Some(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        let late = Process::new(pid, Child { pidfd, exit }, None, JoinSet::new());
        execs.made("late".to_owned(), late, 0);
        for number in 1..limits::EXECS {
            execs.reserve(&number.to_string()).unwrap();
        }
        execs.reserve("more").unwrap_err();

        execs.abandon("late");
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        execs.reserve("more").unwrap();
        assert!(!is_there(&execs, "late"));
    }

    #[tokio::test]
    async fn only_what_was_killed_when_memory_ran_out_meanwhile_ran_out_of_memory() {
        let execs = Execs::default();
        for (id, oom_kills_before) in [("first", 0), ("later", 1)] {
            execs.reserve(id).unwrap();
            execs.made(id.to_owned(), process(JoinSet::new()), oom_kills_before);
        }
        let (killed, by_shell) = (ExitStatus::Signal(9), ExitStatus::Code(137));
        assert!(execs.is_oom_killed("first", killed, 1));
        assert!(execs.is_oom_killed("first", by_shell, 1));
        assert!(!execs.is_oom_killed("first", killed, 0));
        // One OOM kill earlier in the container says nothing about this process.
        assert!(!execs.is_oom_killed("later", killed, 1));
        assert!(execs.is_oom_killed("later", killed, 2));
        for status in [
            ExitStatus::Code(0),
            ExitStatus::Code(1),
            ExitStatus::Signal(15),
        ] {
            assert!(!execs.is_oom_killed("first", status, 1), "{status:?}");
        }
        assert!(!execs.is_oom_killed("none", killed, 1));
    }

    #[tokio::test]
    async fn only_those_make_room_whose_end_was_told() {
        let execs = Execs::default();
        for number in 0..limits::EXECS {
            let id = number.to_string();
            execs.reserve(&id).unwrap();
            execs.made(id, process(JoinSet::new()), 0);
        }
        assert!(matches!(
            execs.reserve("more"),
            Err(ContainerError::TooMany { .. })
        ));
        execs.told("7");
        execs.reserve("more").unwrap();
        assert!(!is_there(&execs, "7") && is_there(&execs, "8"));
        assert!(matches!(
            execs.reserve("more"),
            Err(ContainerError::Exists(_))
        ));
        execs.failed("more");
        execs.reserve("more").unwrap();
    }

    #[tokio::test]
    async fn output_on_its_way_is_cut_off_only_for_want_of_room() {
        let execs = Execs::default();
        for number in 0..limits::EXECS {
            let id = number.to_string();
            execs.reserve(&id).unwrap();
            let mut relays = JoinSet::new();
            if number == 0 {
                relays.spawn(std::future::pending());
            }
            execs.made(id, process(relays), 0);
        }
        execs.told("0");
        execs.told("1");
        execs.reserve("a").unwrap();
        assert!(is_there(&execs, "0") && !is_there(&execs, "1"));
        execs.reserve("b").unwrap();
        assert!(!is_there(&execs, "0"));
    }
}
