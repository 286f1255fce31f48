//! The states of a VM, and which calls lead where.

use std::fmt;

/// The states of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Built; no guest code has run.
    Created,
    /// vCPUs and devices run.
    Running,
    /// vCPUs and devices are stopped, between two guest instructions.
    Paused,
    /// The guest or the host has ended it.
    Stopped,
    /// KVM failed; the guest cannot continue. [`crate::vm::Vm::wait`] says why.
    Poisoned,
}

/// The calls that need a VM to be in some state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// [`crate::vm::Vm::start`].
    Start,
    /// [`crate::vm::Vm::pause`].
    Pause,
    /// [`crate::vm::Vm::resume`].
    Resume,
    /// [`crate::vm::Vm::snapshot`] and [`crate::vm::Vm::snapshot_difference`].
    Snapshot,
    /// [`crate::vm::Vm::dump_to`].
    Dump,
    /// [`crate::vm::Vm::plug`].
    Plug,
    /// [`crate::vm::Vm::unplug`].
    Unplug,
    /// [`crate::vm::Vm::insert_disk`].
    Insert,
    /// [`crate::vm::Vm::add_vcpus`].
    AddVcpus,
    /// [`crate::vm::Vm::press_power_button`].
    PressPowerButton,
    /// [`crate::vm::Vm::stop`].
    Stop,
}

impl State {
    /// Returns the state that `action` leads to from here; `None` if it is illegal.
    #[must_use]
    pub fn after(self, action: Action) -> Option<Self> {
        use {Action as A, State as S};
        match (self, action) {
            (S::Created, A::Start) => Some(S::Running),
            (S::Running, A::Pause) => Some(S::Paused),
            (S::Paused, A::Resume) => Some(S::Running),
            (S::Paused, A::Snapshot | A::Dump | A::Insert) => Some(S::Paused),
            (S::Running, A::Plug | A::Unplug | A::Insert | A::AddVcpus | A::PressPowerButton) => {
                Some(S::Running)
            }
            (S::Created | S::Running | S::Paused | S::Stopped, A::Stop) => Some(S::Stopped),
            (S::Poisoned, A::Stop) => Some(S::Poisoned),
            _ => None,
        }
    }

    /// Returns whether the VM has ended, in whatever way.
    #[must_use]
    pub fn ended(self) -> bool {
        matches!(self, Self::Stopped | Self::Poisoned)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Poisoned => "poisoned",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Snapshot => "take a snapshot of",
            Self::Dump => "dump the memory of",
            Self::Plug => "plug a device into",
            Self::Unplug => "unplug a device from",
            Self::Insert => "insert a disk into",
            Self::AddVcpus => "add vCPUs to",
            Self::PressPowerButton => "press the power button of",
            Self::Stop => "stop",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_transition_table() {
        use {Action as A, State as S};
        let states = [S::Created, S::Running, S::Paused, S::Stopped, S::Poisoned];
        let legal = [
            (S::Created, A::Start, S::Running),
            (S::Created, A::Stop, S::Stopped),
            (S::Running, A::Pause, S::Paused),
            (S::Running, A::Stop, S::Stopped),
            (S::Paused, A::Resume, S::Running),
            (S::Paused, A::Snapshot, S::Paused),
            (S::Paused, A::Dump, S::Paused),
            (S::Running, A::Plug, S::Running),
            (S::Running, A::Unplug, S::Running),
            (S::Running, A::Insert, S::Running),
            (S::Running, A::AddVcpus, S::Running),
            (S::Running, A::PressPowerButton, S::Running),
            (S::Paused, A::Insert, S::Paused),
            (S::Paused, A::Stop, S::Stopped),
            (S::Stopped, A::Stop, S::Stopped),
            (S::Poisoned, A::Stop, S::Poisoned),
        ];
        for from in states {
            for action in [
                A::Start,
                A::Pause,
                A::Resume,
                A::Snapshot,
                A::Dump,
                A::Plug,
                A::Unplug,
                A::Insert,
                A::AddVcpus,
                A::PressPowerButton,
                A::Stop,
            ] {
                let expected = legal
                    .iter()
                    .find(|(f, a, _)| (*f, *a) == (from, action))
                    .map(|(_, _, to)| *to);
                assert_eq!(from.after(action), expected, "{from} {action}");
            }
        }
    }
}
