//! Disks that grow while their guest runs, and what becomes of their locks after the last machine.

use std::io;
use std::sync::Arc;
use std::thread;

use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::RefusalKind;
use super::system::OwnOs;
use super::vm::Vm;
use crate::machine::{Machine, MachineError, causes};

impl OwnOs {
    /// Makes a disk larger, of which the guest is told.
    pub(super) async fn grow_disk(
        &self,
        vm: &Arc<Vm>,
        serial: String,
        bytes: u64,
    ) -> Result<(), SandboxError> {
        // Nobody saves it meanwhile.
        let _turn = self.pausing.lock().await;
        vm.migrations.must_be_over()?;
        vm.must_not_be_saved()?;
        let (vm, machine) = (Arc::clone(vm), vm.machine().ok());
        let grow = move || {
            let device = vm.plan().grow_disk(&serial, bytes)?;
            // Without one, the next machine sees it.
            if let Some(machine) = machine {
                machine.look_at_disk(&device)?;
            }
            info!(
                container = vm.container.id,
                serial, bytes, "a disk has grown"
            );
            Ok::<_, MachineError>(())
        };
        let grown = match tokio::task::spawn_blocking(grow).await {
            Ok(grown) => grown,
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        };
        grown.map_err(|error| SandboxError::refused(RefusalKind::InvalidArgument, causes(&error)))
    }
}

impl Vm {
    /// Gives back the locks of the disks that the last machine has written, so that another
    /// container may have them: at once, or when the threads that still may write have ended.
    pub(super) fn unlock_disks_after(self: &Arc<Self>, machine: Option<Arc<Machine>>) {
        let Some(machine) = machine.filter(|machine| machine.has_abandoned()) else {
            return self.plan().unlock_disks();
        };
        let vm = Arc::clone(self);
        // Such a thread may never end, and then this one does not, either.
        let waiting = thread::Builder::new().name("vm-disks".to_owned());
        let waiting = waiting.spawn(move || {
            machine.wait_abandoned();
            vm.plan().unlock_disks();
        });
        if let Err(error) = waiting {
            warn!(%error, "the locks of disks stay until the container is removed");
        }
    }
}
