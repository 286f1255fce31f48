//! What QEMU's guest agent is asked, if the guest has one.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use podvisor_guest_agent::{GuestAgentError, ShutdownMode};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::{GuestAgentAnswer, GuestAgentCall, RefusalKind};
use super::agent_of_machine::{AgentOfMachine, LIMIT, refusal};
use super::vm::Vm;
use crate::machine::{Machine, MachineError, causes};

/// How long a freeze may take: the guest writes all that its programs have written.
const FREEZE_LIMIT: Duration = Duration::from_secs(90);

/// Delay between two attempts to thaw file systems.
const THAW_RETRY: Duration = Duration::from_secs(2);

/// How long thawing is tried. An agent that does not answer for so long never will.
const THAW_PATIENCE: Duration = Duration::from_secs(1800);

/// How to get an agent.
const ADVICE: &str = ", and no other agent answers: wait until it has booted if it has \
                      qemu-guest-agent, else install that and start it, or let cloud-init install \
                      podvisor's own: by `podvisor vm run --agent`, or by the pod's annotation \
                      podvisor.io/guest-agent: install; or attach to its console, or log in over \
                      its network";

impl Vm {
    /// Returns the guest's agent.
    ///
    /// # Errors
    /// No program in the guest has its port open, or the machine does not run. `request` is what
    /// needs it.
    pub(super) async fn agent(
        &self,
        request: &'static str,
    ) -> Result<Arc<AgentOfMachine>, SandboxError> {
        let machine = self.machine()?;
        if !machine.has_guest_agent().await? {
            return Err(SandboxError::NoAgent {
                request,
                advice: ADVICE,
            });
        }
        Ok(self.agent_of(machine).await?)
    }

    /// Returns what speaks to the agent of this machine, whether or not there is one.
    async fn agent_of(&self, machine: Arc<Machine>) -> Result<Arc<AgentOfMachine>, MachineError> {
        let mut known = self.agent.lock().await;
        if let Some(agent) = known.as_ref()
            && agent.is_of(&machine)
        {
            return Ok(Arc::clone(agent));
        }
        let agent = Arc::new(AgentOfMachine::connect(machine).await?);
        let current = self.lock().clone();
        if current.is_some_and(|machine| agent.is_of(&machine)) {
            *known = Some(Arc::clone(&agent));
        }
        Ok(agent)
    }

    /// Connects the host's end of the agent's port, and keeps it so: an agent without another end
    /// looks for one ten times a second, which is most of what an idle guest would cost.
    pub(super) fn holds_agent_port(self: &Arc<Self>, machine: Arc<Machine>) {
        let vm = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = vm.agent_of(machine).await {
                debug!(why = causes(&error), "the agent's port is not connected");
            }
        });
    }

    /// Forgets the agent of a machine that has ended, or whose port failed.
    pub(super) async fn forget_agent(&self) {
        *self.agent.lock().await = None;
    }

    /// Carries out a request to the agent, within this time unless it is zero.
    pub(super) async fn ask_agent(
        self: &Arc<Self>,
        request: &'static str,
        call: GuestAgentCall,
        limit: Duration,
    ) -> Result<GuestAgentAnswer, SandboxError> {
        let agent = self.agent(request).await?;
        let each = match limit.is_zero() {
            true => LIMIT,
            false => limit.min(LIMIT),
        };
        let answer = self.carry_out(&agent, call, each);
        let answer = match limit.is_zero() {
            true => answer.await,
            false => match timeout(limit, answer).await {
                Ok(answer) => answer,
                Err(_) => {
                    return Err(SandboxError::refused(
                        RefusalKind::Internal,
                        format!("cannot {request}: not done within {} ms", limit.as_millis()),
                    ));
                }
            },
        };
        self.judged(answer).await
    }

    /// Returns an answer of the agent; one whose port failed is connected to anew.
    pub(super) async fn judged<T>(
        self: &Arc<Self>,
        answer: Result<T, GuestAgentError>,
    ) -> Result<T, SandboxError> {
        if let Err(GuestAgentError::Port { .. }) = answer {
            self.forget_agent().await;
            if let Ok(machine) = self.machine() {
                self.holds_agent_port(machine);
            }
        }
        answer.map_err(|error| refusal(&error))
    }

    async fn carry_out(
        self: &Arc<Self>,
        agent: &AgentOfMachine,
        call: GuestAgentCall,
        limit: Duration,
    ) -> Result<GuestAgentAnswer, GuestAgentError> {
        match call {
            GuestAgentCall::Ping => agent.ping(limit).await?,
            GuestAgentCall::Info => {
                let info = agent.info(limit).await?;
                return Ok(GuestAgentAnswer::Info(Box::new(info)));
            }
            GuestAgentCall::Run(program) => {
                let number = agent.start_program(&program, limit).await?;
                let mut end = agent.program_end(number, limit).await?;
                for output in [&mut end.stdout, &mut end.stderr] {
                    if output.len() > GuestAgentCall::MAX_OUTPUT {
                        output.truncate(GuestAgentCall::MAX_OUTPUT);
                        end.is_truncated = true;
                    }
                }
                return Ok(GuestAgentAnswer::Ended(end));
            }
            GuestAgentCall::Freeze(longest) => {
                // First: it may freeze them and not say so.
                self.thaws_within(longest.min(GuestAgentCall::LONGEST_FREEZE));
                let count = agent.freeze(FREEZE_LIMIT).await?;
                return Ok(GuestAgentAnswer::FileSystems(count));
            }
            GuestAgentCall::Thaw => {
                let count = agent.thaw(limit).await?;
                self.set_thaw(None);
                return Ok(GuestAgentAnswer::FileSystems(count));
            }
            GuestAgentCall::SetTime => agent.set_time(SystemTime::now(), limit).await?,
            GuestAgentCall::AddKeys { user, keys } => {
                agent.add_authorized_keys(&user, &keys, limit).await?;
            }
            GuestAgentCall::SetPassword { user, password } => {
                agent.set_password(&user, password.reveal(), limit).await?;
            }
        }
        Ok(GuestAgentAnswer::Done)
    }

    /// Thaws the guest's file systems after this time, whoever froze them and is gone.
    fn thaws_within(self: &Arc<Self>, longest: Duration) {
        let vm = Arc::clone(self);
        let machine = self.machine().ok();
        let thaw = tokio::spawn(async move {
            sleep(longest).await;
            let begin = Instant::now();
            while begin.elapsed() < THAW_PATIENCE && vm.is_running() {
                let agent = match vm.agent("thaw the guest's file systems").await {
                    // After a reboot nothing is frozen.
                    Ok(agent) if machine.as_ref().is_none_or(|it| !agent.is_of(it)) => return,
                    agent => agent,
                };
                let thawed = match agent {
                    Ok(agent) => vm.judged(agent.thaw(LIMIT).await).await,
                    Err(error) => Err(error),
                };
                match thawed {
                    Ok(count) => {
                        return info!(count, "the guest's file systems were frozen for too long");
                    }
                    Err(error) => warn!(%error, "the guest's file systems stay frozen"),
                }
                sleep(THAW_RETRY).await;
            }
        });
        self.set_thaw(Some(thaw.abort_handle()));
    }

    /// Sets the guest's clock, which stood still, if there is an agent.
    pub(super) fn set_clock(self: &Arc<Self>) {
        let vm = Arc::clone(self);
        tokio::spawn(async move {
            let call = GuestAgentCall::SetTime;
            if let Err(error) = vm.ask_agent("set the guest's clock", call, LIMIT).await {
                debug!(%error, "the guest's clock is not set");
            }
        });
    }

    /// Asks the agent to power the guest off, or to reboot it.
    pub(super) async fn shut_down_by_agent(
        self: &Arc<Self>,
        mode: ShutdownMode,
    ) -> Result<(), SandboxError> {
        let request = match mode {
            ShutdownMode::PowerDown => "power the guest off",
            ShutdownMode::Reboot => "reboot the guest",
        };
        let agent = self.agent(request).await?;
        self.judged(agent.shutdown(mode, LIMIT).await).await
    }
}
