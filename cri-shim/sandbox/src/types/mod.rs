//! The types of a sandbox's interface: its configuration and its reports. None of them is the
//! agent's or the VMM library's, so that users of a sandbox need neither.
//!
//! | file | contents |
//! | --- | --- |
//! | `launch` | the configuration of a sandbox |
//! | `boot` | the configuration of a machine with an operating system of its own |
//! | `boot_report` | how such a machine was booted, and when it got how far |
//! | `guest_agent` | what QEMU's guest agent is asked |
//! | `migration` | a machine that moves to another sandbox |
//! | `kept` | how the kernel of an image is read from its disk |
//! | `plug` | how a disk was taken from a guest |
//! | `create` | the configuration of a container |
//! | `health` | checks of a container's health |
//! | `process` | users, additional processes and their streams |
//! | `refusal` | why a sandbox refuses a request |
//! | `save` | how a machine is saved in files |
//! | `state` | a container's state, and how its process ended |
//! | `stats` | the resource usage of containers |
//! | `dump` | a dump of a machine's memory |
//! | `exit` | how a sandbox ended |

mod boot;
mod boot_report;
mod create;
mod dump;
mod exit;
mod guest_agent;
mod health;
mod kept;
mod launch;
mod migration;
mod plug;
mod process;
mod refusal;
mod save;
mod state;
mod stats;

pub use podvisor_network::guest::{GuestNetwork, Interface, Neighbour, NicConfig, Route};

pub use boot::BootMachine;
pub use boot_report::{BootEvent, BootPhase, BootReport, BootWay};
pub use create::{
    ContainerDevice, CreateContainer, DeviceSource, GuestContainer, ImageVolume, RestartPolicy,
};
pub use dump::{DumpInfo, DumpMachine, DumpState};
pub use exit::SandboxExit;
pub use guest_agent::{GuestAgentAnswer, GuestAgentCall, Password};
pub use health::{Health, HealthCheck, HealthResult, HealthStatus};
pub use kept::ReadKernel;
pub use launch::{GuestKind, JailLayer, JailMode, LaunchConfig, ShareUsers};
pub use migration::{
    IncomingMachine, MigrationDirection, MigrationInfo, MigrationState, SendMachine,
};
pub use plug::Unplugged;
pub use process::{ContainerUser, Exec, StdioFds, SupplementalGroups, TerminalSize};
pub use refusal::RefusalKind;
pub use save::{AfterSave, SaveMachine};
pub use state::{ContainerInfo, ContainerState, ProcessExit, Started};
pub use stats::{ContainerStats, GuestStats};
