//! `podvisor.node.v1.Node`: what the node says of its virtual machines and does to them, for its
//! part of a control plane. The messages and the service are of `podvisor-node-api`;
//! docs/node-api.md describes the calls.
//!
//! | file | contents |
//! | --- | --- |
//! | `view` | the VMs of the node, as they are reported |
//! | `watch` | the same with every change |
//! | `usage` | what VMs have used |
//! | `control` | pause, unpause, reboot, reset, stop |
//! | `boot` | how VMs were booted |
//! | `agent` | what QEMU's guest agent is asked |
//! | `console` | the serial console |
//! | `migrate` | VMs that move to another node, and come from one |
//! | `plug` | disks that come and go while a VM runs |
//! | `dump` | dumps of a VM's memory |
//! | `links` | links of cards that come and go |
//! | `size` | CPUs and memory that come while a VM runs |
//! | `forward` | connections to ports, and by vsock |
//!
//! All that is asked for is done by the pod's own process, so that another daemon finds it done.

mod agent;
mod boot;
mod console;
mod control;
mod dump;
mod forward;
mod links;
mod migrate;
mod pipe;
mod plug;
mod size;
#[cfg(test)]
mod tests;
mod usage;
mod view;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use podvisor_node_api::messages::{
    AgentExecAnswer, AgentExecRequest, BootInfo, CancelMigrationRequest, ConsoleInput, Data,
    DumpMemoryAnswer, DumpMemoryRequest, FreezeRequest, GuestInfo, PlugDiskRequest,
    PortForwardInput, ReceiveMigrationInput, ResizeVmAnswer, ResizeVmRequest,
    ResolveMigrationRequest, SendMigrationInput, SetLinksRequest, StopRequest, UnplugDiskAnswer,
    UnplugDiskRequest, VmEvent, VmList, VmName, VmUsageList, VsockInput,
};
use podvisor_node_api::{AnswerStream, Node as NodeApi};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::node::Node;

/// How long a client may take to say what a stream is for.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// Messages of a stream that wait for a client.
const STREAM_QUEUE: usize = 16;

/// The service.
#[derive(Debug)]
pub(super) struct VmCalls(pub(super) Arc<Node>);

#[tonic::async_trait]
impl NodeApi for VmCalls {
    async fn list_vms(&self) -> Result<VmList, Status> {
        let vms = self.0.vms().await;
        Ok(VmList { vms })
    }

    async fn watch_vms(&self) -> Result<AnswerStream<VmEvent>, Status> {
        Ok(watch::stream(Arc::clone(&self.0)))
    }

    async fn vm_usage(&self) -> Result<VmUsageList, Status> {
        Ok(self.0.usage_of_vms().await)
    }

    async fn pause(&self, vm: VmName) -> Result<(), Status> {
        self.0.pause_vm(&vm).await
    }

    async fn unpause(&self, vm: VmName) -> Result<(), Status> {
        self.0.unpause_vm(&vm).await
    }

    async fn soft_reboot(&self, vm: VmName) -> Result<(), Status> {
        self.0.soft_reboot_vm(&vm).await
    }

    async fn reset(&self, vm: VmName) -> Result<(), Status> {
        self.0.reset_vm(&vm).await
    }

    async fn stop(&self, request: StopRequest) -> Result<(), Status> {
        self.0.stop_vm(request).await
    }

    async fn console(&self, input: Streaming<ConsoleInput>) -> Result<AnswerStream<Data>, Status> {
        console::stream(&self.0, input).await
    }

    async fn port_forward(
        &self,
        input: Streaming<PortForwardInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        forward::stream(&self.0, input).await
    }

    async fn vsock(&self, input: Streaming<VsockInput>) -> Result<AnswerStream<Data>, Status> {
        forward::vsock(&self.0, input).await
    }

    async fn boot_info(&self, vm: VmName) -> Result<BootInfo, Status> {
        self.0.boot_info_of_vm(&vm).await
    }

    async fn guest_info(&self, vm: VmName) -> Result<GuestInfo, Status> {
        self.0.guest_info_of_vm(&vm).await
    }

    async fn freeze(&self, request: FreezeRequest) -> Result<(), Status> {
        self.0.freeze_vm(request).await
    }

    async fn thaw(&self, vm: VmName) -> Result<(), Status> {
        self.0.thaw_vm(&vm).await
    }

    async fn agent_exec(&self, request: AgentExecRequest) -> Result<AgentExecAnswer, Status> {
        self.0.exec_in_vm(request).await
    }

    async fn send_migration(
        &self,
        input: Streaming<SendMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        migrate::send(&self.0, input).await
    }

    async fn receive_migration(
        &self,
        input: Streaming<ReceiveMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        migrate::receive(&self.0, input).await
    }

    async fn cancel_migration(&self, request: CancelMigrationRequest) -> Result<(), Status> {
        self.0.cancel_migration(request).await
    }

    async fn resolve_migration(&self, request: ResolveMigrationRequest) -> Result<(), Status> {
        self.0.resolve_migration(request).await
    }

    async fn plug_disk(&self, request: PlugDiskRequest) -> Result<(), Status> {
        self.0.plug_disk_into_vm(request).await
    }

    async fn unplug_disk(&self, request: UnplugDiskRequest) -> Result<UnplugDiskAnswer, Status> {
        self.0.unplug_disk_of_vm(request).await
    }

    async fn set_links(&self, request: SetLinksRequest) -> Result<(), Status> {
        self.0.set_links_of_vm(request).await
    }

    async fn resize_vm(&self, request: ResizeVmRequest) -> Result<ResizeVmAnswer, Status> {
        self.0.resize_running_vm(request).await
    }

    async fn dump_memory(&self, request: DumpMemoryRequest) -> Result<DumpMemoryAnswer, Status> {
        self.0.dump_memory_of_vm(request).await
    }
}

/// Returns the first message of a stream, which says what it is for.
async fn first<T>(input: &mut Streaming<T>) -> Result<T, Status> {
    let missing = || Status::invalid_argument("the stream ended before it said what it is for");
    match timeout(OPEN_TIMEOUT, input.message()).await {
        Ok(message) => message?.ok_or_else(missing),
        Err(_) => Err(Status::deadline_exceeded(
            "the stream did not say what it is for",
        )),
    }
}

/// The error about a stream that begins with something else.
fn not_open() -> Status {
    Status::invalid_argument("the first message of a stream must open it")
}
