//! How a sandbox ended.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};

use crate::machine::{KernelPanic, MachineExit};
use crate::printable::printable;

/// How a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SandboxExit {
    /// The guest powered itself off, on request or not.
    PoweredOff,
    /// The guest reset itself.
    Reset,
    /// The guest's kernel panicked.
    Panicked(KernelPanic),
    /// A fault that the guest's kernel could not handle.
    TripleFault,
    /// The machine was killed: its guest did not stop within the grace period.
    Killed,
    /// The VMM or the host failed; the error's text.
    Failed(String),
    /// The process is gone without a record: it was killed, or the host restarted.
    Died,
    /// The host's kernel killed the process because memory ran out.
    OutOfMemory {
        /// The control group that was at its limit, the sandbox's own or one above it; `None` if
        /// the host itself was out of memory, or it is unknown.
        group: Option<PathBuf>,
    },
    /// Another way, which only a newer podvisor knows: its name there. The process of a sandbox may
    /// be of a newer version than who asks, and its record is left for any.
    #[serde(untagged, deserialize_with = "unknown_name")]
    Unknown(String),
}

/// Reads the name of an unknown variant, whose fields are ignored.
fn unknown_name<'de, D: Deserializer<'de>>(exit: D) -> Result<String, D::Error> {
    /// A variant, without or with fields.
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Variant {
        Name(String),
        Fields(BTreeMap<String, IgnoredAny>),
    }
    match Variant::deserialize(exit)? {
        Variant::Name(name) => Ok(name),
        Variant::Fields(variant) => {
            let mut names = variant.into_keys();
            let name = names.next().filter(|_| names.len() == 0);
            name.ok_or_else(|| D::Error::custom("expected one way to end"))
        }
    }
}

impl fmt::Display for SandboxExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("the guest powered itself off"),
            Self::Reset => f.write_str("the guest reset itself"),
            Self::Panicked(panic) => write!(f, "the guest ended by a kernel panic: {panic}"),
            Self::TripleFault => f.write_str("the guest ended by a triple fault"),
            Self::Killed => f.write_str("the machine was killed"),
            Self::Failed(why) => f.write_str(why),
            Self::Died => f.write_str("the sandbox's process died"),
            Self::OutOfMemory { group } => {
                f.write_str("the host's kernel killed the machine because ")?;
                match group {
                    Some(group) => {
                        let group = group.display();
                        write!(f, "the control group {group} was at its memory limit")
                    }
                    None => f.write_str("memory ran out"),
                }
            }
            Self::Unknown(name) => write!(
                f,
                "the machine ended in a way that this version of podvisor does not know: {name}"
            ),
        }
    }
}

/// Most characters of the reason why a machine failed, or of a control group's path, that are
/// shown.
const MAX_SHOWN: usize = 4 << 10;

impl SandboxExit {
    /// Makes the texts printable: of bounded length, and without characters that a terminal or a
    /// log would interpret.
    pub(crate) fn printable(self) -> Self {
        match self {
            Self::Panicked(panic) => Self::Panicked(panic.map(printable)),
            Self::Failed(why) => Self::Failed(printable(&why, MAX_SHOWN)),
            Self::OutOfMemory { group } => Self::OutOfMemory {
                group: group.map(|group| printable(&group.to_string_lossy(), MAX_SHOWN).into()),
            },
            Self::Unknown(name) => Self::Unknown(printable(&name, MAX_SHOWN)),
            exit => exit,
        }
    }

    /// The last messages of the guest's kernel if it panicked: the guest's own words.
    #[must_use]
    pub fn kernel_log(&self) -> &[String] {
        match self {
            Self::Panicked(panic) => panic.log(),
            _ => &[],
        }
    }
}

impl From<MachineExit> for SandboxExit {
    fn from(exit: MachineExit) -> Self {
        match exit {
            // What is left here has ended as if it were off.
            MachineExit::PoweredOff | MachineExit::Moved => Self::PoweredOff,
            MachineExit::Reset => Self::Reset,
            MachineExit::Panicked(panic) => Self::Panicked(panic),
            MachineExit::TripleFault => Self::TripleFault,
            MachineExit::Killed => Self::Killed,
            MachineExit::Failed(why) => Self::Failed(why),
        }
    }
}
