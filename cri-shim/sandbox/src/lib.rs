//! A sandbox: one virtual machine, the agent in it, and the containers that the agent runs.
//!
//! [`ContainerRun`] runs a program in a container in a machine, in a few lines. Below it, a sandbox
//! has two forms:
//!
//! * [`SandboxClient::launch`] starts a sandbox in a process of its own (`process`, which is
//!   `podvisor sandbox`) that keeps the containers' logs and exit codes and outlives its launcher;
//!   [`SandboxClient::connect`] finds it again. The protocol between the two is in `wire`;
//!   docs/sandbox.md describes it.
//! * [`Sandbox`] is the machine and its agent in this process, for a program in the foreground. It
//!   ends when it is dropped.
//!
//! Below both is [`machine`]: one virtual machine and what is plugged into it. It knows no
//! containers and no agent.
//!
//! Nothing here depends on the command line, CRI, the source of images, or KVM.

mod agent;
pub mod bind;
mod boot_timeout;
mod cgroup;
mod client;
mod error;
mod events;
mod in_process;
pub mod jail;
mod launch;
mod log_tail;
pub mod machine;
mod oom;
mod post_mortem;
mod printable;
mod process;
mod provisional_nics;
mod psi;
mod random;
mod record;
mod run;
mod shared;
mod sole_container;
mod spawn;
mod spec;
mod stdio;
mod template;
mod types;
mod wire;

pub use agent::{Agent, AgentContainer, AgentExit, GuestConfig, LinkError, Mux, Share, etc_hosts};
pub use boot_timeout::BOOT_TIMEOUT_VARIABLE;
pub use cgroup::try_device_group;
pub use cgroup::{CGROUP_ROOT, end_group, end_group_of, lacks_room, parse_cpu_max};
pub use cgroup::{
    CPU_OVERHEAD_MILLI, CgroupError, DEFAULT_CGROUP_PARENT, IoLimit, IoLimitError, MEMORY_OVERHEAD,
    MachineLimits, memory_overhead, merge_io_limits, remove_empty_cgroups,
};
pub use client::SandboxClient;
pub use error::SandboxError;
pub use events::{Event, EventAction, EventLog};
pub use in_process::{BuiltSandbox, Sandbox, SandboxConfig};
pub use launch::DIR_MAX;
pub use launch::Launching;
pub use machine::{BootProgram, ContinueAs, KeptKernel, SavedMachine};
pub use process::image_source;
pub use process::{ProcessError, run as run_process};
pub use provisional_nics::{STREAM_MTU, provisional_nics};
pub use psi::{Psi, PsiData, PsiShare, PsiStats};
pub use random::random_id;
pub use record::written_at as exit_recorded_at;
pub use record::{ExitRecord, read as exit_record};
pub use run::ContainerRun;
pub use shared::{AttachError, SharedDirectory};
pub use spec::{
    ContainerOptions, ContainerSpec, RootAccess, SPEC_VERSION, SpecError, container_spec,
};
pub use spec::{
    NamedCapability, all_capabilities, capabilities, default_environment, default_mounts,
    default_rlimits, default_seccomp_profile, device_rules, from_root, further_process,
    image_entrypoint, process_capabilities, set_variable,
};
pub use stdio::{AttachedStreams, BrokenOutput, Outputs, StdioError, StreamSet, Streams};
pub use stdio::{read as read_from, write_all as write_to};
pub use template::SnapshotMaker;
pub use template::{
    Shape, TemplateError, make as make_template, remove_abandoned_templates, snapshot,
};
pub use types::{
    AfterSave, BootEvent, BootMachine, BootPhase, BootReport, BootWay, ContainerDevice,
    ContainerInfo, ContainerState, ContainerStats, ContainerUser, CreateContainer, DeviceSource,
    DumpInfo, DumpMachine, DumpState, Exec, GuestAgentAnswer, GuestAgentCall, GuestContainer,
    GuestKind, GuestNetwork, GuestStats, Health, HealthCheck, HealthResult, HealthStatus,
    ImageVolume, IncomingMachine, Interface, JailLayer, JailMode, LaunchConfig, MigrationDirection,
    MigrationInfo, MigrationState, Neighbour, NicConfig, Password, ProcessExit, ReadKernel,
    RefusalKind, RestartPolicy, Route, SandboxExit, SaveMachine, SendMachine, ShareUsers, Started,
    StdioFds, SupplementalGroups, TerminalSize, Unplugged,
};
pub use wire::FrameError;

/// What a guest with an operating system of its own says and runs by QEMU's guest agent.
pub mod guest {
    pub use podvisor_guest_agent::{
        GuestAddress, GuestFileSystem, GuestInfo, GuestInterface, GuestOs, GuestUser, Program,
        ProgramEnd, ProgramExit,
    };
}

/// Types of the OCI specifications that are part of this interface.
pub mod oci {
    pub use oci_spec::image::Config as ImageConfig;
    pub use oci_spec::runtime::{LinuxResources, Process, Spec};
}
