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
mod cgroup;
mod client;
mod error;
mod events;
pub mod jail;
mod launch;
mod log_tail;
pub mod machine;
mod oom;
mod post_mortem;
mod process;
mod provisional_nics;
mod psi;
mod record;
mod run;
mod shared;
mod spawn;
mod spec;
mod stdio;
mod template;
mod types;
mod wire;

use std::io;
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::timeout;
use tracing::{debug, warn};

pub use agent::{Agent, AgentContainer, AgentExit, GuestConfig, LinkError, Mux, Share, etc_hosts};
pub use cgroup::try_device_group;
pub use cgroup::{CGROUP_ROOT, end_group, end_group_of, lacks_room, parse_cpu_max};
pub use cgroup::{
    CPU_OVERHEAD_MILLI, CgroupError, DEFAULT_CGROUP_PARENT, IoLimit, IoLimitError, MEMORY_OVERHEAD,
    MachineLimits, memory_overhead, merge_io_limits, remove_empty_cgroups,
};
pub use client::SandboxClient;
pub use error::{RefusalKind, SandboxError};
pub use events::{Event, EventAction, EventLog};
pub use launch::DIR_MAX;
pub use launch::Launching;
pub use process::image_source;
pub use process::{ProcessError, run as run_process};
pub use provisional_nics::{STREAM_MTU, provisional_nics};
pub use psi::{Psi, PsiData, PsiShare, PsiStats};
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
    AfterSave, BootEvent, BootMachine, BootPhase, BootProgram, BootReport, BootWay,
    ContainerDevice, ContainerInfo, ContainerState, ContainerStats, ContainerUser, ContinueAs,
    CreateContainer, DeviceSource, Exec, GuestAgentAnswer, GuestAgentCall, GuestContainer,
    GuestKind, GuestNetwork, GuestStats, Health, HealthCheck, HealthResult, HealthStatus,
    ImageVolume, IncomingMachine, Interface, JailLayer, JailMode, KeptKernel, LaunchConfig,
    MigrationDirection, MigrationInfo, MigrationState, Neighbour, NicConfig, Password, ProcessExit,
    ReadKernel, RestartPolicy, Route, SandboxExit, SaveMachine, SavedMachine, SendMachine,
    ShareUsers, Started, StdioFds, SupplementalGroups, TerminalSize, Unplugged,
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

use crate::machine::{Boot, BuiltMachine, Machine, MachineConfig, MachineError, MachineExit};
use agent::Ready;

/// How long a guest may take until its agent answers.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);

/// The environment variable that sets another boot timeout, in seconds, where guests boot slowly.
pub const BOOT_TIMEOUT_VARIABLE: &str = "PODVISOR_BOOT_TIMEOUT";

/// How long a guest in the foreground may take to power itself off before it is killed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration of a [`Sandbox`].
#[derive(Debug)]
pub struct SandboxConfig {
    /// The guest's configuration.
    pub guest: GuestConfig,
    /// The virtual machine.
    pub machine: MachineConfig,
}

/// A guest whose agent answers, in this process. When this is dropped, the machine is killed, which
/// blocks the thread for up to 0.8 s if a disk does not answer.
#[derive(Debug)]
pub struct Sandbox {
    machine: Machine,
    agent: Agent,
}

/// A sandbox whose machine is built and has not run yet. Everything that needs a path or a
/// privilege is done.
#[derive(Debug)]
pub struct BuiltSandbox {
    machine: BuiltMachine,
    /// Where a guest that boots reports that it is ready; `None` for a clone, which is ready.
    ready: Option<Ready>,
    guest: GuestConfig,
    /// MAC addresses by which its cards are identified until it is configured.
    macs: Vec<[u8; 6]>,
}

impl BuiltSandbox {
    /// Builds the machine. No thread is started.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub fn new(config: SandboxConfig) -> Result<Self, SandboxError> {
        let (port, ready) = match config.machine.boot {
            Boot::Cold(_) => Some(Ready::listen()).unzip(),
            Boot::Warm(_) | Boot::Template(_) => (None, None),
        };
        let macs = match ready {
            Some(_) => config.machine.nics.iter().map(|nic| nic.mac).collect(),
            None => provisional_nics::macs().collect(),
        };
        let machine = BuiltMachine::new(config.machine, port.into_iter().collect())?;
        Ok(Self {
            machine,
            ready,
            guest: config.guest,
            macs,
        })
    }

    /// Whether the machine may get more vCPUs while it runs.
    #[must_use]
    pub fn may_grow_cpus(&self) -> bool {
        self.machine.may_grow_cpus()
    }

    /// Starts the guest, waits for its agent and configures it.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub async fn start(mut self) -> Result<Sandbox, SandboxError> {
        let network = std::mem::take(&mut self.guest.network);
        self.start_with(async { Ok(network) }).await
    }

    /// As [`Self::start`], with a network that is known only when `network` completes: the guest
    /// runs meanwhile.
    async fn start_with(
        mut self,
        network: impl Future<Output = Result<GuestNetwork, SandboxError>>,
    ) -> Result<Sandbox, SandboxError> {
        let mut guest = std::mem::take(&mut self.guest);
        let macs = std::mem::take(&mut self.macs);
        let sandbox = self.answering().await?;
        let configured = async {
            guest.network = network.await?;
            sandbox.agent.configure(&guest, &macs).await?;
            Ok::<_, SandboxError>(())
        };
        sandbox.unless_ended(configured).await?;
        debug!("the guest is configured");
        Ok(sandbox)
    }

    /// Starts the guest and waits for its agent.
    async fn answering(self) -> Result<Sandbox, SandboxError> {
        let begin = Instant::now();
        let machine = self.machine.start()?;
        debug!(elapsed = ?begin.elapsed(), "the guest runs");
        let mux = Mux::new(machine.ports().clone());
        let answers = async {
            match self.ready {
                Some(ready) => ready.agent(mux).await,
                None => Agent::connect(mux).await,
            }
        };
        let limit = boot_timeout();
        let agent = tokio::select! {
            biased;
            agent = timeout(limit, answers) => match agent {
                Ok(agent) => agent?,
                Err(_) => return Err(SandboxError::Silent(limit)),
            },
            exit = machine.ended() => return Err(match exit {
                MachineExit::PoweredOff => SandboxError::GaveUp,
                exit => exit.into(),
            }),
        };
        debug!(elapsed = ?begin.elapsed(), "the agent answers");
        Ok(Sandbox { machine, agent })
    }
}

impl Sandbox {
    /// Builds and boots a guest in this process, waits for its agent and configures it.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing is left of the machine then.
    pub async fn start(config: SandboxConfig) -> Result<Self, SandboxError> {
        // Creating a VM and reading a kernel block a thread for some ten milliseconds.
        let built = tokio::task::spawn_blocking(|| BuiltSandbox::new(config)).await;
        let built = built.map_err(|error| MachineError::Thread(io::Error::other(error)))??;
        built.start().await
    }

    /// Returns the agent.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Returns the machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Runs `work`, which needs the guest, and fails if the guest ends first.
    ///
    /// # Errors
    /// The error of `work`, or [`SandboxError::Ended`].
    pub async fn unless_ended<T, E>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, SandboxError>
    where
        SandboxError: From<E>,
    {
        tokio::select! {
            biased;
            done = work => Ok(done?),
            exit = self.machine.ended() => Err(exit.into()),
        }
    }

    /// Asks the guest to end its containers, write out its data, and power itself off.
    async fn ask_to_stop(&self) {
        if let Err(error) = self.agent.shutdown().await {
            // The answer may be lost if the machine ends before it is sent.
            debug!(%error, "the agent did not answer to the shutdown");
        }
    }

    /// Lets the guest write out its data and power itself off; kills it if it does not.
    pub async fn shutdown(self) {
        let begin = Instant::now();
        let clean = async {
            self.ask_to_stop().await;
            self.machine.ended().await
        };
        match timeout(SHUTDOWN_TIMEOUT, clean).await {
            Ok(exit) => debug!(elapsed = ?begin.elapsed(), %exit, "the guest is off"),
            Err(_) => warn!("the guest did not power itself off and is killed"),
        }
    }
}

fn boot_timeout() -> Duration {
    let seconds = std::env::var(BOOT_TIMEOUT_VARIABLE).ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    seconds.map_or(BOOT_TIMEOUT, Duration::from_secs)
}

/// Returns bytes from the kernel's random number generator.
fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..)
        && !rest.is_empty()
    {
        filled += getrandom(rest, GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Returns a random id of 64 hexadecimal digits, as docker's containers have.
///
/// # Errors
/// The kernel has no random bytes.
pub fn random_id() -> io::Result<String> {
    let bytes: [u8; 32] = random()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_long_and_differ() {
        let (a, b) = (random_id().unwrap(), random_id().unwrap());
        assert_eq!(a.len(), 64);
        assert!(a.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(a, b);
    }
}
