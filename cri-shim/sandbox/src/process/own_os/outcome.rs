//! How a machine's end is reported as its container's.

use super::super::super::types::SandboxExit;
use crate::machine::MachineExit;

/// The exit code of a container whose guest ended in another way than by powering itself off.
const FAILED: i32 = 1;

/// The exit code of a container whose machine was killed, as if by SIGKILL.
const KILLED: i32 = 137;

/// What the loader writes before the reason why it cannot boot a disk.
const LOADER_ERROR: &str = "podvisor-loader: error: ";

/// Longest reason of the loader's that is passed on, in characters.
const MAX_REASON: usize = 1024;

/// How a container's last machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MachineOutcome {
    exit: MachineExit,
    /// Why the guest's own system was never reached.
    loader: Option<String>,
    was_asked: bool,
}

impl MachineOutcome {
    /// Judges a machine's end by the end of its console's output.
    pub(super) fn new(exit: MachineExit, console: &str, was_asked: bool) -> Self {
        let reason = |line: &str| {
            let (_, reason) = line.split_once(LOADER_ERROR)?;
            let shown = reason.trim().chars().filter(|c| !c.is_control());
            Some(shown.take(MAX_REASON).collect())
        };
        let loader = match exit {
            MachineExit::PoweredOff => console.lines().rev().find_map(reason),
            _ => None,
        };
        Self {
            exit,
            loader,
            was_asked,
        }
    }

    /// The end of a machine that is saved and goes on from its files.
    pub(super) fn saved() -> Self {
        Self {
            exit: MachineExit::PoweredOff,
            loader: None,
            was_asked: true,
        }
    }

    /// The container's exit code.
    pub(super) fn code(&self) -> i32 {
        match &self.exit {
            MachineExit::PoweredOff if self.loader.is_some() => FAILED,
            MachineExit::PoweredOff | MachineExit::Moved => 0,
            // Instead of a restart that it was not to do any more.
            MachineExit::Reset if self.was_asked => 0,
            MachineExit::Killed => KILLED,
            _ => FAILED,
        }
    }

    /// What the exit code does not say.
    pub(super) fn message(&self) -> Option<String> {
        match (&self.exit, &self.loader) {
            (MachineExit::PoweredOff, Some(reason)) => {
                Some(format!("the disk cannot be booted: {reason}"))
            }
            (MachineExit::PoweredOff | MachineExit::Moved, None) => None,
            (MachineExit::Reset, _) if self.was_asked => None,
            (MachineExit::Failed(why), _) => Some(why.clone()),
            (exit, _) => Some(format!("the guest {exit}")),
        }
    }

    /// How the sandbox ended that was asked to.
    pub(super) fn of_sandbox(&self) -> SandboxExit {
        match &self.exit {
            MachineExit::Reset if self.was_asked => SandboxExit::PoweredOff,
            exit => exit.clone().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_zero_only_for_a_guest_that_powered_itself_off() {
        let failed = MachineExit::Failed("no disk".to_owned());
        for (exit, was_asked, code, said) in [
            (MachineExit::PoweredOff, false, 0, None),
            (MachineExit::PoweredOff, true, 0, None),
            (MachineExit::Reset, true, 0, None),
            (MachineExit::Killed, true, 137, Some("killed")),
            (MachineExit::Moved, false, 0, None),
            (MachineExit::TripleFault, false, 1, Some("triple fault")),
            (failed, false, 1, Some("no disk")),
        ] {
            let outcome = MachineOutcome::new(exit, "login: \nPower down\n", was_asked);
            assert_eq!(outcome.code(), code, "{outcome:?}");
            let message = outcome.message();
            assert_eq!(message.is_some(), said.is_some(), "{outcome:?}");
            assert!(message.is_none_or(|it| it.contains(said.unwrap_or_default())));
        }
    }

    #[test]
    fn a_disk_that_the_loader_cannot_boot_is_a_failure_with_its_reason() {
        let console = "podvisor-loader: disk vda: ext4\r\n\
                       podvisor-loader: error: no boot entry on vda\u{1b}[0m\r\nreboot: Power down";
        let outcome = MachineOutcome::new(MachineExit::PoweredOff, console, false);
        assert_eq!(outcome.code(), 1);
        let said = outcome.message().unwrap();
        assert!(
            said.ends_with("cannot be booted: no boot entry on vda[0m"),
            "{said}"
        );
        // A console that ends otherwise says nothing of the exit.
        let killed = MachineOutcome::new(MachineExit::Killed, console, false);
        assert_eq!(killed.code(), 137);
    }
}
