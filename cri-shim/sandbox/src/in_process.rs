//! A machine and its agent in this process, for a program in the foreground.

use std::io;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tracing::{debug, warn};

use crate::agent::{Agent, GuestConfig, Mux, Ready};
use crate::boot_timeout::boot_timeout;
use crate::error::SandboxError;
use crate::machine::{Boot, BuiltMachine, Machine, MachineConfig, MachineError, MachineExit};
use crate::provisional_nics;
use crate::types::GuestNetwork;

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
    pub(crate) async fn start_with(
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
    pub(crate) async fn answering(self) -> Result<Sandbox, SandboxError> {
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
    pub(crate) async fn ask_to_stop(&self) {
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
