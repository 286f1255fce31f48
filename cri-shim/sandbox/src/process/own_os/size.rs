//! CPUs and memory that come while the guest runs, as many as its machine was built for. The plan
//! has them, so that a guest that reboots keeps them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::RefusalKind;
use super::agent_of_machine::LIMIT;
use super::refusals::{invalid, no_machine};
use super::system::OwnOs;
use super::vm::Vm;
use crate::machine::{Machine, causes};

/// How often, and after how long, the guest's agent is told to use CPUs that the guest may not have
/// found yet. Nothing tells when it has.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(500);

impl OwnOs {
    /// Gives the guest CPUs until it has `count`.
    pub(super) async fn set_cpus(&self, count: u8) -> Result<(), SandboxError> {
        let vm = self.running().ok_or_else(no_machine)?;
        // Nobody pauses, saves or moves it meanwhile.
        let _turn = self.pausing.lock().await;
        vm.migrations.must_be_over()?;
        vm.must_not_be_saved()?;
        let size = &vm.plan().size;
        let (now, most) = (size.cpus(), size.max_cpus);
        if count > most {
            return Err(invalid(format!(
                "{count} CPUs, but the machine was made for {most} at most: stop it first"
            )));
        }
        if count < now {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!(
                    "the guest has {now} CPUs, and none is taken from it while it runs: stop it \
                     first"
                ),
            ));
        }
        if count > now {
            let machine = vm.machine()?;
            let added = machine.add_cpus(count).await;
            // Some may have come before an error.
            size.set_cpus(machine.cpus().max(now));
            added.map_err(SandboxError::wrong_state)?;
            info!(
                container = vm.container.id,
                now, count, "CPUs are plugged in"
            );
        }
        tokio::spawn(async move { vm.use_cpus(count).await });
        Ok(())
    }

    /// Gives the guest `bytes` more than it was asked for at first, or as near to it as it comes
    /// within `patience`; returns what it has more then.
    pub(super) async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, SandboxError> {
        let vm = self.running().ok_or_else(no_machine)?;
        let (machine, wanted) = {
            let _turn = self.pausing.lock().await;
            vm.migrations.must_be_over()?;
            vm.must_not_be_saved()?;
            let size = &vm.plan().size;
            let Some(wanted) = size.to_plug(bytes) else {
                let most = size.memory().saturating_add(size.growth());
                return Err(invalid(format!(
                    "{bytes} more bytes of memory, but the machine was made for {most} in all at \
                     most: stop it first"
                )));
            };
            let machine = vm.machine()?;
            machine
                .grow(wanted, Duration::ZERO)
                .await
                .map_err(SandboxError::wrong_state)?;
            size.set_grown(wanted);
            (machine, wanted)
        };
        // The guest's driver may take a while, or not be there.
        let grown = machine
            .grow(wanted, patience)
            .await
            .map_err(SandboxError::wrong_state)?;
        info!(
            container = vm.container.id,
            wanted, grown, "memory is plugged in"
        );
        Ok(vm.plan().size.beyond_asked(grown))
    }
}

impl Vm {
    /// Asks the guest of a new machine to use what was plugged in before.
    pub(super) fn begin_with_plugged_memory(&self, machine: &Machine) {
        let size = &self.plan().size;
        if size.grown() > 0
            && let Err(error) = machine.request_memory(size.grown())
        {
            let (container, why) = (&self.container.id, causes(&error));
            warn!(container, why, "plugged memory is not given to the guest");
        }
    }

    /// Has the guest's agent bring all CPUs online. A guest without an agent does it itself, or its
    /// user does.
    async fn use_cpus(self: Arc<Self>, count: u8) {
        let container = &self.container.id;
        for _ in 0..ATTEMPTS {
            sleep(PAUSE).await;
            let agent = match self.agent("bring CPUs online").await {
                Ok(agent) => agent,
                Err(error) => {
                    debug!(container, %error, "CPUs are left to the guest");
                    return;
                }
            };
            let online = agent.use_cpus(count.into(), LIMIT).await;
            match self.judged(online).await {
                Ok(true) => {
                    info!(
                        container,
                        count, "the guest's agent has brought CPUs online"
                    );
                    return;
                }
                Ok(false) => {}
                Err(error) => {
                    warn!(container, %error, "the guest's agent does not bring CPUs online");
                    return;
                }
            }
        }
        warn!(container, count, "the guest has not found all of its CPUs");
    }
}
