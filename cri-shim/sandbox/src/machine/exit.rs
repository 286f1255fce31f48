//! How machines end.

use std::fmt;

use podvisor_vmm::VmExit;

use super::KernelPanic;

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineExit {
    /// The guest powered itself off.
    PoweredOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel panicked, and asked for a reset.
    Panicked(KernelPanic),
    /// A fault that the guest could not handle.
    TripleFault,
    /// The host killed it.
    Killed,
    /// It runs on another host.
    Moved,
    /// The library or the host failed; the error's text.
    Failed(String),
}

impl fmt::Display for MachineExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("powered itself off"),
            Self::Reset => f.write_str("reset itself"),
            Self::Panicked(panic) => write!(f, "ended by a kernel panic: {panic}"),
            Self::TripleFault => f.write_str("ended by a triple fault"),
            Self::Killed => f.write_str("was killed"),
            Self::Moved => f.write_str("runs on another host"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl From<VmExit> for MachineExit {
    fn from(exit: VmExit) -> Self {
        match exit {
            VmExit::Shutdown => Self::PoweredOff,
            VmExit::Reset => Self::Reset,
            VmExit::TripleFault { .. } => Self::TripleFault,
            VmExit::Moved => Self::Moved,
            _ => Self::Killed,
        }
    }
}
