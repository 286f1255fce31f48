//! A sandbox: one virtual machine, the agent in it, and the programs that the agent runs.
//!
//! A configuration enters (kernel, initramfs, image, size), a `Sandbox` comes out that makes
//! containers and carries their standard streams; when it is shut down or dropped, the
//! machine and its folder of sockets are gone. Nothing here knows the command line, where
//! images come from, or KVM: `vm` holds the only calls to the library.

mod agent;
mod assets;
mod rundir;
mod seccomp;
mod spec;
mod stdio;
mod vm;

use std::io;
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::timeout;
use tracing::{debug, warn};

pub(crate) use agent::{Agent, Ended, LinkError};
pub(crate) use assets::{AssetError, Assets};
pub(crate) use spec::{ContainerOptions, RootAccess, SPEC_VERSION, TerminalSize, container_spec};
pub(crate) use stdio::{Input, StdioError, Streams};
pub(crate) use vm::{Disk, GuestFiles, MachineConfig, VmError};

use agent::{Mux, ReadyListener};
use rundir::{RunDir, RunDirError};
use vm::{Ending, Machine};

/// How long a guest may take until its agent answers.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);

/// Sets another time, in seconds, where guests boot slowly.
pub(crate) const BOOT_TIMEOUT_VARIABLE: &str = "PODVISOR_BOOT_TIMEOUT";

/// How long a guest may take to power itself off before it is switched off.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no sandbox, or no longer one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SandboxError {
    /// The folder for the sockets.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// The virtual machine.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The agent.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A program's standard streams.
    #[error(transparent)]
    Stdio(#[from] StdioError),
    /// The guest is up, but not as far as its agent.
    #[error(
        "the guest's agent did not answer within {} s; run again with --console FILE and read \
         there how far the guest came, or give it more time with {BOOT_TIMEOUT_VARIABLE}=SECONDS",
        .0.as_secs()
    )]
    Silent(Duration),
    /// The agent found that it cannot work.
    #[error(
        "the guest's agent gave up; its kernel may lack a driver that the agent needs \
         (virtio-mmio, virtio-vsock, EROFS, overlayfs): run with --console FILE and read there which"
    )]
    GaveUp,
    /// The guest ended when it should not.
    #[error("the guest {0}; run again with --console FILE and read there why")]
    Ended(Ending),
    /// The host could not run the guest on.
    #[error("{0}; `podvisor check` says whether this machine can run guests")]
    Failed(String),
}

impl From<Ending> for SandboxError {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Failed(why) => Self::Failed(why),
            ending => Self::Ended(ending),
        }
    }
}

/// What a sandbox is made of.
#[derive(Debug)]
pub(crate) struct SandboxConfig {
    /// Names the sandbox's folder; a path component of its own.
    pub(crate) id: String,
    /// The guest's host name.
    pub(crate) hostname: String,
    /// The virtual machine.
    pub(crate) machine: MachineConfig,
}

/// A guest whose agent answers.
#[derive(Debug)]
pub(crate) struct Sandbox {
    // Dropped in this order: the sockets' folder goes after the machine that uses it.
    machine: Machine,
    agent: Agent,
    _run: RunDir,
}

impl Sandbox {
    /// Boots a guest and waits for its agent.
    pub(crate) async fn start(config: SandboxConfig) -> Result<Self, SandboxError> {
        let begin = Instant::now();
        let run = RunDir::create(&config.id)?;
        let mux = Mux::new(&run);
        let ready = ReadyListener::bind(&mux)?;
        let machine = Machine::boot(config.machine, mux.path())?;
        debug!(elapsed = ?begin.elapsed(), "the guest runs");

        let limit = boot_timeout();
        let agent = tokio::select! {
            biased;
            agent = timeout(limit, ready.agent(mux)) => match agent {
                Ok(agent) => agent?,
                Err(_) => return Err(SandboxError::Silent(limit)),
            },
            ending = machine.ended() => return Err(match ending {
                Ending::PoweredOff => SandboxError::GaveUp,
                ending => ending.into(),
            }),
        };
        debug!(elapsed = ?begin.elapsed(), "the agent answers");
        let sandbox = Self {
            machine,
            agent,
            _run: run,
        };
        sandbox
            .unless_ended(sandbox.agent.configure(&config.hostname))
            .await?;
        Ok(sandbox)
    }

    /// The agent.
    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Runs something that needs the guest; when the guest ends first, that is the error.
    pub(crate) async fn unless_ended<T, E>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, SandboxError>
    where
        SandboxError: From<E>,
    {
        tokio::select! {
            biased;
            done = work => Ok(done?),
            ending = self.machine.ended() => Err(ending.into()),
        }
    }

    /// Lets the guest write out what it has and power itself off. One that does not is
    /// switched off.
    pub(crate) async fn shutdown(self) {
        let begin = Instant::now();
        let clean = async {
            if let Err(error) = self.agent.shutdown().await {
                // The answer may be lost when the machine is gone before it is sent.
                debug!(%error, "the agent did not answer to the shutdown");
            }
            self.machine.ended().await
        };
        match timeout(SHUTDOWN_TIMEOUT, clean).await {
            Ok(ending) => debug!(elapsed = ?begin.elapsed(), %ending, "the guest is off"),
            Err(_) => warn!("the guest did not power itself off and is switched off"),
        }
    }
}

fn boot_timeout() -> Duration {
    let seconds = std::env::var(BOOT_TIMEOUT_VARIABLE).ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    seconds.map_or(BOOT_TIMEOUT, Duration::from_secs)
}

/// Bytes from the kernel's random number generator.
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

/// A random id of 64 hexadecimal digits, as docker's containers have.
pub(crate) fn random_id() -> io::Result<String> {
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

#[cfg(test)]
mod exec_tests;
