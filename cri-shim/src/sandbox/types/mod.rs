//! What a sandbox is made of and what it tells: the types of its interface. None of them is the
//! agent's or the library's, so that users of a sandbox need neither.
//!
//! | file | what for |
//! | --- | --- |
//! | `launch` | what a sandbox is made of |
//! | `network` | the guest's interfaces, addresses and routes |
//! | `create` | what a container is made of |
//! | `process` | users, further processes and their streams |
//! | `state` | where a container is in its life, and how its process ended |
//! | `stats` | what containers use |
//! | `exit` | how a sandbox ended |

mod create;
mod exit;
mod launch;
mod network;
mod process;
mod state;
mod stats;

pub use create::{ContainerDevice, CreateContainer, DeviceSource, ImageVolume, RestartPolicy};
pub use exit::SandboxExit;
pub use launch::{JailMode, LaunchConfig, NicConfig};
pub use network::{GuestNetwork, Interface, Neighbour, Route};
pub use process::{ContainerUser, Exec, StdioFds, SupplementalGroups, TerminalSize};
pub use state::{ContainerInfo, ContainerState, ProcessExit, Started};
pub use stats::{ContainerStats, GuestStats};
