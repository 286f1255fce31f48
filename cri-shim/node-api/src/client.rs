//! The client.

use std::path::Path;

use prost::Message;
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{IntoStreamingRequest, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::limits::MAX_MESSAGE_BYTES;
use crate::messages::{
    AgentExecAnswer, AgentExecRequest, BootInfo, CancelMigrationRequest, ConsoleInput, Data, Done,
    DumpMemoryAnswer, DumpMemoryRequest, FreezeRequest, GuestInfo, ListVmsRequest, PlugDiskRequest,
    PortForwardInput, ReceiveMigrationInput, ResizeVmAnswer, ResizeVmRequest,
    ResolveMigrationRequest, SendMigrationInput, SetLinksRequest, StopRequest, UnplugDiskAnswer,
    UnplugDiskRequest, VmEvent, VmList, VmName, VmRequest, VmUsageList, VmUsageRequest, VsockInput,
    WatchVmsRequest,
};
use crate::paths;

/// A client of a node. Clones share their connection.
#[derive(Debug, Clone)]
pub struct NodeClient {
    grpc: Grpc<Channel>,
}

impl NodeClient {
    /// Makes a client of the node that serves on a socket. It connects with its first call, and
    /// again after the node's daemon was restarted.
    ///
    /// # Errors
    /// The path is not UTF-8.
    pub fn new(socket: &Path) -> Result<Self, Status> {
        let invalid = || {
            Status::invalid_argument(format!(
                "the path of the node's socket is not valid: {}",
                socket.display()
            ))
        };
        let path = socket.to_str().ok_or_else(invalid)?;
        let endpoint = Endpoint::from_shared(format!("unix:{path}")).map_err(|_| invalid())?;
        Ok(Self::over(endpoint.connect_lazy()))
    }

    /// Makes a client over a channel.
    #[must_use]
    pub fn over(channel: Channel) -> Self {
        let grpc = Grpc::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self { grpc }
    }

    /// Returns all VMs of the node.
    ///
    /// # Errors
    /// The node cannot be reached; this holds for all calls.
    pub async fn list_vms(&mut self) -> Result<VmList, Status> {
        self.unary(paths::LIST_VMS, ListVmsRequest {}).await
    }

    /// Returns all VMs of the node, then every change.
    ///
    /// # Errors
    /// As [`Self::list_vms`].
    pub async fn watch_vms(&mut self) -> Result<Streaming<VmEvent>, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static(paths::WATCH_VMS);
        let request = Request::new(WatchVmsRequest {});
        let codec = ProstCodec::default();
        let answer = self.grpc.server_streaming(request, path, codec).await?;
        Ok(answer.into_inner())
    }

    /// Returns what the VMs that run have used.
    ///
    /// # Errors
    /// As [`Self::list_vms`].
    pub async fn vm_usage(&mut self) -> Result<VmUsageList, Status> {
        self.unary(paths::VM_USAGE, VmUsageRequest {}).await
    }

    /// Pauses a VM.
    ///
    /// # Errors
    /// It does not run, or is paused already.
    pub async fn pause(&mut self, vm: VmName) -> Result<(), Status> {
        self.of_vm(paths::PAUSE, vm).await
    }

    /// Lets a paused VM go on.
    ///
    /// # Errors
    /// It is not paused.
    pub async fn unpause(&mut self, vm: VmName) -> Result<(), Status> {
        self.of_vm(paths::UNPAUSE, vm).await
    }

    /// Asks a guest to shut down, and boots it again.
    ///
    /// # Errors
    /// It does not run, or is paused.
    pub async fn soft_reboot(&mut self, vm: VmName) -> Result<(), Status> {
        self.of_vm(paths::SOFT_REBOOT, vm).await
    }

    /// Boots a VM again without asking its guest.
    ///
    /// # Errors
    /// It does not run.
    pub async fn reset(&mut self, vm: VmName) -> Result<(), Status> {
        self.of_vm(paths::RESET, vm).await
    }

    /// Asks a guest to power off, and has its machine killed after the grace period.
    ///
    /// # Errors
    /// It does not run.
    pub async fn stop(&mut self, vm: VmName, grace_seconds: u32) -> Result<(), Status> {
        let vm = Some(vm);
        let request = StopRequest { vm, grace_seconds };
        let Done {} = self.unary(paths::STOP, request).await?;
        Ok(())
    }

    /// Opens a console: the first message names the VM, the others are typed.
    ///
    /// # Errors
    /// The VM has no console that could be opened.
    pub async fn console(
        &mut self,
        input: impl Stream<Item = ConsoleInput> + Send + 'static,
    ) -> Result<Streaming<Data>, Status> {
        self.streams(paths::CONSOLE, input).await
    }

    /// Connects to a port of a guest: the first message says which.
    ///
    /// # Errors
    /// Nothing listens there.
    pub async fn port_forward(
        &mut self,
        input: impl Stream<Item = PortForwardInput> + Send + 'static,
    ) -> Result<Streaming<Data>, Status> {
        self.streams(paths::PORT_FORWARD, input).await
    }

    /// Returns how a VM was booted.
    ///
    /// # Errors
    /// It does not run, or its process is of an older version.
    pub async fn boot_info(&mut self, vm: VmName) -> Result<BootInfo, Status> {
        self.unary(paths::BOOT_INFO, VmRequest::from(vm)).await
    }

    /// Returns what a guest's agent says of its system.
    ///
    /// # Errors
    /// There is no agent.
    pub async fn guest_info(&mut self, vm: VmName) -> Result<GuestInfo, Status> {
        self.unary(paths::GUEST_INFO, VmRequest::from(vm)).await
    }

    /// Freezes a guest's file systems for so many seconds at most.
    ///
    /// # Errors
    /// There is no agent, or it refuses.
    pub async fn freeze(&mut self, vm: VmName, timeout_seconds: u32) -> Result<(), Status> {
        let request = FreezeRequest {
            vm: Some(vm),
            timeout_seconds,
        };
        let Done {} = self.unary(paths::FREEZE, request).await?;
        Ok(())
    }

    /// Thaws a guest's file systems.
    ///
    /// # Errors
    /// There is no agent, or it refuses.
    pub async fn thaw(&mut self, vm: VmName) -> Result<(), Status> {
        self.of_vm(paths::THAW, vm).await
    }

    /// Runs a program in a guest by its agent.
    ///
    /// # Errors
    /// There is no agent, or it refuses.
    pub async fn agent_exec(
        &mut self,
        request: AgentExecRequest,
    ) -> Result<AgentExecAnswer, Status> {
        self.unary(paths::AGENT_EXEC, request).await
    }

    /// Connects to a vsock port of a guest: the first message says which.
    ///
    /// # Errors
    /// Nothing listens there.
    pub async fn vsock(
        &mut self,
        input: impl Stream<Item = VsockInput> + Send + 'static,
    ) -> Result<Streaming<Data>, Status> {
        self.streams(paths::VSOCK, input).await
    }

    /// Sends a VM to another node: the first message says which and how, the others are what the
    /// other side says. The answers are bytes for it; the first one is empty. They end when the
    /// migration does, and [`watch_vms`](Self::watch_vms) tells how.
    ///
    /// # Errors
    /// The VM does not run, moves already, or has what cannot move.
    pub async fn send_migration(
        &mut self,
        input: impl Stream<Item = SendMigrationInput> + Send + 'static,
    ) -> Result<Streaming<Data>, Status> {
        self.streams(paths::SEND_MIGRATION, input).await
    }

    /// Receives a VM from another node: the first message says which, the others are what the
    /// other side says. The answers are bytes for it; the first one is empty.
    ///
    /// # Errors
    /// The VM does not wait for that migration.
    pub async fn receive_migration(
        &mut self,
        input: impl Stream<Item = ReceiveMigrationInput> + Send + 'static,
    ) -> Result<Streaming<Data>, Status> {
        self.streams(paths::RECEIVE_MIGRATION, input).await
    }

    /// Ends a migration that was not given away.
    ///
    /// # Errors
    /// There is none of that id, or it was given away.
    pub async fn cancel_migration(&mut self, vm: VmName, migration: &str) -> Result<(), Status> {
        let request = CancelMigrationRequest {
            vm: Some(vm),
            migration: migration.to_owned(),
        };
        let Done {} = self.unary(paths::CANCEL_MIGRATION, request).await?;
        Ok(())
    }

    /// Lets a VM whose migration is in doubt go on (`run`), or ends it. Only who has asked the
    /// other side may say so: two copies run if it is wrong.
    ///
    /// # Errors
    /// The migration is in any other state.
    pub async fn resolve_migration(
        &mut self,
        vm: VmName,
        migration: &str,
        run: bool,
    ) -> Result<(), Status> {
        let request = ResolveMigrationRequest {
            vm: Some(vm),
            migration: migration.to_owned(),
            run,
        };
        let Done {} = self.unary(paths::RESOLVE_MIGRATION, request).await?;
        Ok(())
    }

    /// Plugs a claim into a VM that runs: that of the pod with this unique id. It may be repeated.
    ///
    /// # Errors
    /// The pod does not keep a claim for this VM, the claim is in use, or the VM has no room.
    pub async fn plug_disk(&mut self, vm: VmName, pod_uid: &str) -> Result<(), Status> {
        let request = PlugDiskRequest {
            vm: Some(vm),
            pod_uid: pod_uid.to_owned(),
        };
        let Done {} = self.unary(paths::PLUG_DISK, request).await?;
        Ok(())
    }

    /// Takes a disk that was plugged in from a VM, when its guest has released it or after so many
    /// seconds; returns whether the guest did not. It may be repeated.
    ///
    /// # Errors
    /// The VM does not run, or was booted with the disk.
    pub async fn unplug_disk(
        &mut self,
        vm: VmName,
        serial: &str,
        limit_seconds: u32,
    ) -> Result<bool, Status> {
        let request = UnplugDiskRequest {
            vm: Some(vm),
            serial: serial.to_owned(),
            limit_seconds,
        };
        let answer: UnplugDiskAnswer = self.unary(paths::UNPLUG_DISK, request).await?;
        Ok(answer.is_forced)
    }

    /// Gives a VM that runs more CPUs or memory, as far as it was made for them; 0 leaves either as
    /// it is. It may be repeated. Returns the memory that the guest has then, in bytes; 0 if none
    /// was asked for.
    ///
    /// # Errors
    /// The VM does not run, moves, or was not made for as much.
    pub async fn resize_vm(&mut self, vm: VmName, vcpus: u32, memory: u64) -> Result<u64, Status> {
        let request = ResizeVmRequest {
            vm: Some(vm),
            vcpus,
            memory,
        };
        let answer: ResizeVmAnswer = self.unary(paths::RESIZE_VM, request).await?;
        Ok(answer.memory)
    }

    /// Has the memory of a VM dumped to a claim, or says how far that is: who wants the file asks
    /// again until it is there, or has failed.
    ///
    /// # Errors
    /// The pod does not keep a claim for dumps of this VM, the file cannot be made, another dump is
    /// being written, or the VM does not run.
    pub async fn dump_memory(
        &mut self,
        request: DumpMemoryRequest,
    ) -> Result<DumpMemoryAnswer, Status> {
        self.unary(paths::DUMP_MEMORY, request).await
    }

    /// Takes the link from the cards of a VM that are named, as the instance's specification names
    /// them, and gives all others one. It may be repeated.
    ///
    /// # Errors
    /// The VM does not run, moves, or has no such card.
    pub async fn set_links(&mut self, vm: VmName, down: Vec<String>) -> Result<(), Status> {
        let request = SetLinksRequest { vm: Some(vm), down };
        let Done {} = self.unary(paths::SET_LINKS, request).await?;
        Ok(())
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.grpc.ready().await;
        ready.map_err(|error| Status::from_error(Box::new(error)))
    }

    async fn of_vm(&mut self, path: &'static str, vm: VmName) -> Result<(), Status> {
        let Done {} = self.unary(path, VmRequest::from(vm)).await?;
        Ok(())
    }

    async fn unary<Q, A>(&mut self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.ready().await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::default();
        let answer = self.grpc.unary(Request::new(request), path, codec).await?;
        Ok(answer.into_inner())
    }

    async fn streams<Q>(
        &mut self,
        path: &'static str,
        input: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<Data>, Status>
    where
        Q: Message + 'static,
    {
        self.ready().await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::default();
        let request = input.into_streaming_request();
        let answer = self.grpc.streaming(request, path, codec).await?;
        Ok(answer.into_inner())
    }
}
