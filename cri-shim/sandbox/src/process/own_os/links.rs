//! Links of the guest's cards. The plan has them, so that a guest that reboots finds them as they
//! were.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use podvisor_vmm::LinkState;
use tracing::info;

use super::super::super::error::SandboxError;
use super::super::blocking::blocking;
use super::refusals::invalid;
use super::system::OwnOs;
use super::vm::Vm;

impl OwnOs {
    /// Takes the link from the cards of these interfaces, and gives all others one.
    pub(super) async fn set_links(
        &self,
        vm: &Arc<Vm>,
        down: Vec<String>,
    ) -> Result<(), SandboxError> {
        // Nobody saves or moves it meanwhile: the devices' state has the links, too.
        let _turn = self.pausing.lock().await;
        vm.migrations.must_be_over()?;
        vm.must_not_be_saved()?;
        let vm = Arc::clone(vm);
        blocking(move || vm.set_links(&down)).await?
    }
}

impl Vm {
    fn set_links(&self, down: &[String]) -> Result<(), SandboxError> {
        let nics = &self.plan().nics;
        if let Some(name) = down
            .iter()
            .find(|name| nics.iter().all(|nic| nic.name != **name))
        {
            return Err(invalid(format!(
                "the machine has no card of the interface {name:?}"
            )));
        }
        // The next machine begins with them, also one that is built just now.
        let is_down = |name: &String| down.contains(name);
        for nic in nics {
            nic.is_down.store(is_down(&nic.name), Ordering::Relaxed);
        }
        let Ok(machine) = self.machine() else {
            return Ok(());
        };
        for (index, nic) in nics.iter().enumerate() {
            let link = match is_down(&nic.name) {
                true => LinkState::Down,
                false => LinkState::Up,
            };
            machine
                .set_link(index, link)
                .map_err(SandboxError::wrong_state)?;
        }
        info!(container = self.container.id, ?down, "links are set");
        Ok(())
    }
}
