//! The agent of one machine's guest, and the programs that it runs.

use std::sync::Arc;
use std::time::Duration;

use podvisor_guest_agent::{GuestAgent, GuestAgentError};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::super::super::error::SandboxError;
use super::super::super::types::RefusalKind;
use crate::machine::{Machine, MachineError, causes};

/// How long the agent may take for one answer, unless the request says otherwise.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// The agent of a machine's guest.
#[derive(Debug)]
pub(super) struct AgentOfMachine {
    agent: GuestAgent<UnixStream>,
    /// The machine that it belongs to: another one, after a reboot, has another agent.
    machine: Arc<Machine>,
}

impl AgentOfMachine {
    pub(super) async fn connect(machine: Arc<Machine>) -> Result<Self, MachineError> {
        let stream = machine.connect_guest_agent().await?;
        let stream = stream.set_nonblocking(true).map(|()| stream);
        let stream = stream.and_then(UnixStream::from_std);
        Ok(Self {
            agent: GuestAgent::new(stream.map_err(MachineError::Duplicate)?),
            machine,
        })
    }

    /// Whether it belongs to this machine.
    pub(super) fn is_of(&self, machine: &Arc<Machine>) -> bool {
        Arc::ptr_eq(&self.machine, machine)
    }
}

impl std::ops::Deref for AgentOfMachine {
    type Target = GuestAgent<UnixStream>;

    fn deref(&self) -> &Self::Target {
        &self.agent
    }
}

/// A program of the guest, by which it is killed.
#[derive(Debug, Clone)]
pub(super) struct Running {
    pub(super) exec_id: String,
    pub(super) agent: Arc<AgentOfMachine>,
    /// The agent's number for it, once it runs.
    pub(super) number: watch::Receiver<Option<i64>>,
}

/// An error of the agent, for clients.
pub(super) fn refusal(error: &GuestAgentError) -> SandboxError {
    let kind = match error {
        GuestAgentError::Unanswered { .. } | GuestAgentError::Port { .. } => RefusalKind::NoAgent,
        GuestAgentError::NotAllowed { .. } => RefusalKind::NoAgent,
        GuestAgentError::Request { .. } => RefusalKind::InvalidArgument,
        _ => RefusalKind::Internal,
    };
    SandboxError::refused(kind, causes(error))
}
