//! What is done to a VM: each by a request to the process of its pod.

use std::time::Duration;

use podvisor_node_api::messages::{StopRequest, VmName};
use tonic::Status;
use tracing::info;

use crate::cri::error::CriError;
use crate::cri::node::{Node, now};
use crate::sandbox::SandboxError;

/// The signal by which a machine is asked to end: its power button.
const SIGTERM: u32 = 15;

/// Longest grace period: a day.
const MAX_GRACE: u32 = 24 * 60 * 60;

/// The status of a sandbox's refusal.
pub(super) fn status(error: SandboxError) -> Status {
    Status::from(CriError::from(error))
}

pub(super) fn wrong_state(vm: &VmName, state: &str) -> Status {
    let (namespace, name) = (&vm.namespace, &vm.name);
    Status::failed_precondition(format!("the virtual machine {namespace}/{name} {state}"))
}

impl Node {
    /// Pauses a VM that runs and is not paused.
    pub(super) async fn pause_vm(&self, vm: &VmName) -> Result<(), Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let client = pod.client()?;
        if client.is_paused().await.map_err(status)? {
            self.vms.note_found(&container.id, Some(now()));
            return Err(wrong_state(vm, "is paused already"));
        }
        client.pause().await.map_err(status)?;
        self.vms.note_pause(&container.id, Some(now()));
        self.vms.changed();
        info!(pod = pod.id, "the guest is paused");
        Ok(())
    }

    /// Lets a paused VM go on.
    pub(super) async fn unpause_vm(&self, vm: &VmName) -> Result<(), Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let client = pod.client()?;
        if !client.is_paused().await.map_err(status)? {
            return Err(wrong_state(vm, "is not paused"));
        }
        client.resume().await.map_err(status)?;
        self.vms.note_pause(&container.id, None);
        self.vms.changed();
        info!(pod = pod.id, "the guest goes on");
        Ok(())
    }

    /// Asks a VM's guest to reboot.
    pub(super) async fn soft_reboot_vm(&self, vm: &VmName) -> Result<(), Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let client = pod.client()?;
        // It would not hear.
        if client.is_paused().await.map_err(status)? {
            return Err(wrong_state(vm, "is paused"));
        }
        let asked = client.reboot_guest(&container.id).await;
        asked.map_err(status)?;
        info!(pod = pod.id, "the guest is asked to reboot");
        Ok(())
    }

    /// Builds a VM's machine anew. It runs then, if it was paused.
    pub(super) async fn reset_vm(&self, vm: &VmName) -> Result<(), Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let reset = pod.client()?.reset_machine(&container.id).await;
        reset.map_err(status)?;
        self.vms.note_pause(&container.id, None);
        self.vms.changed();
        info!(pod = pod.id, "the machine is reset");
        Ok(())
    }

    /// Asks a VM to end, and has its pod's process kill it after the grace period.
    pub(super) async fn stop_vm(&self, request: StopRequest) -> Result<(), Status> {
        let vm = request
            .vm
            .ok_or_else(|| Status::invalid_argument("vm: the request names no virtual machine"))?;
        let (pod, container) = self.running_vm(&vm).await?;
        let grace = Duration::from_secs(request.grace_seconds.min(MAX_GRACE).into());
        let client = pod.client()?;
        client
            .stop_container(&container.id, SIGTERM, grace)
            .await
            .map_err(status)?;
        // A paused guest goes on, to end.
        self.vms.note_pause(&container.id, None);
        self.vms.changed();
        info!(pod = pod.id, ?grace, "the guest is asked to end");
        Ok(())
    }
}
