//! `podvisor serve`, as this node's part asks it: its gRPC service, with failures that say what
//! they mean for a client of the cluster.

use std::path::Path;

use bytes::Bytes;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use podvisor_node_api::{
    NodeClient,
    messages::{
        ConsoleInput, ConsoleMessage, Data, DumpMemoryRequest, DumpState as Dumped, GuestInfo,
        PortForwardInput, PortForwardMessage, PortForwardOpen, PortProtocol, ReceiveMigrationInput,
        ReceiveMigrationMessage, ReceiveMigrationOpen, SendMigrationInput, SendMigrationMessage,
        SendMigrationOpen, VmChange, VmMigration, VmName, VmPhase, VmUsage, VsockInput,
        VsockMessage, VsockOpen,
    },
};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use crate::contact::disks::{DumpAnswer, DumpRequest, DumpState};

/// Messages of a client that wait for the guest.
const QUEUE: usize = 16;

/// A VM of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Vm {
    pub(super) name: VmName,
    pub(super) phase: VmPhase,
    /// Since when, in nanoseconds since 1970.
    pub(super) since_ns: i64,
}

/// What became known of VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// These are all VMs.
    All(Vec<Vm>),
    /// This one is new, or is now as given.
    One(Vm),
    /// This one is no more.
    Gone(VmName),
}

/// What is done to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Pause,
    Unpause,
    SoftReboot,
    Reset,
    /// Freezes the file systems, at most for so many seconds.
    Freeze(u32),
    Thaw,
}

/// A stream of bytes to something in a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Console,
    Tcp(u16),
    /// Each message is a datagram.
    Udp(u16),
    Vsock(u32),
}

/// Both directions of a stream. It ends for the guest when the sender is dropped.
pub(super) struct Pipe {
    pub(super) to_guest: mpsc::Sender<Bytes>,
    /// An error is the last item.
    pub(super) from_guest: BoxStream<'static, Result<Bytes, Refusal>>,
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(super) enum Refusal {
    /// The node has no such VM.
    #[error("the node has no such VM")]
    NotFound,
    /// The VM is in a state in which that is impossible.
    #[error("{0}")]
    State(String),
    /// A part of the request is wrong.
    #[error("{0}")]
    Invalid(String),
    /// Somebody else took the stream over.
    #[error("somebody else took the stream over")]
    TakenOver,
    /// This version of podvisor cannot do that.
    #[error("{0}")]
    Unsupported(String),
    /// `podvisor serve` failed, or cannot be reached.
    #[error("podvisor on the node failed: {0}")]
    Failed(String),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let words = super::guest::cut(status.message());
        match status.code() {
            Code::NotFound => Self::NotFound,
            Code::FailedPrecondition | Code::AlreadyExists | Code::ResourceExhausted => {
                Self::State(words)
            }
            Code::InvalidArgument => Self::Invalid(words),
            Code::Aborted => Self::TakenOver,
            Code::Unimplemented => Self::Unsupported(words),
            _ => Self::Failed(words),
        }
    }
}

/// The VMs of the node.
#[derive(Debug, Clone)]
pub(super) struct Machines(NodeClient);

impl Machines {
    /// The VMs of the `podvisor serve` that listens on a socket; it is connected to when it is
    /// asked.
    pub(super) fn new(socket: &Path) -> Result<Self, Refusal> {
        Ok(Self(NodeClient::new(socket)?))
    }

    /// All VMs at once, then every change. After the end of the stream it is asked for again.
    pub(super) async fn watch(&self) -> Result<BoxStream<'static, Change>, Refusal> {
        let events = self.0.clone().watch_vms().await?;
        let changes = events
            .take_while(|event| std::future::ready(event.is_ok()))
            .filter_map(|event| std::future::ready(event.ok().and_then(|event| event.change)))
            .filter_map(|change| std::future::ready(read(change)));
        Ok(changes.boxed())
    }

    /// What the VMs that run have used.
    pub(super) async fn usage(&self) -> Result<Vec<VmUsage>, Refusal> {
        Ok(self.0.clone().vm_usage().await?.vms)
    }

    /// Does something to a VM.
    pub(super) async fn act(&self, vm: &VmName, action: Action) -> Result<(), Refusal> {
        let (mut client, vm) = (self.0.clone(), vm.clone());
        match action {
            Action::Pause => client.pause(vm).await,
            Action::Unpause => client.unpause(vm).await,
            Action::SoftReboot => client.soft_reboot(vm).await,
            Action::Reset => client.reset(vm).await,
            Action::Freeze(seconds) => client.freeze(vm, seconds).await,
            Action::Thaw => client.thaw(vm).await,
        }
        .map_err(Refusal::from)
    }

    /// What the guest's agent says of the guest.
    pub(super) async fn guest(&self, vm: &VmName) -> Result<GuestInfo, Refusal> {
        Ok(self.0.clone().guest_info(vm.clone()).await?)
    }

    /// The latest migration of each VM of this name; none at all if there is no such VM. There may
    /// be two: one that left, and whose pod is not removed, and one that comes back.
    pub(super) async fn migrations(
        &self,
        vm: &VmName,
    ) -> Result<Vec<Option<VmMigration>>, Refusal> {
        let vms = self.0.clone().list_vms().await?.vms;
        let those = vms
            .into_iter()
            .filter(|found| found.vm.as_ref() == Some(vm));
        Ok(those
            .map(|found| found.migration.map(|migration| *migration))
            .collect())
    }

    /// Sends a VM to another node.
    pub(super) async fn send_migration(&self, open: SendMigrationOpen) -> Result<Pipe, Refusal> {
        let input = |message| SendMigrationInput {
            message: Some(message),
        };
        let (to_guest, bytes) = channel();
        let bytes = bytes.map(move |bytes| input(SendMigrationMessage::Data(bytes)));
        let open = input(SendMigrationMessage::Open(open));
        let answers = self
            .0
            .clone()
            .send_migration(first(open).chain(bytes))
            .await?;
        Ok(Pipe {
            to_guest,
            from_guest: opened(answers).await?,
        })
    }

    /// Receives a VM from another node.
    pub(super) async fn receive_migration(
        &self,
        vm: VmName,
        migration: &str,
    ) -> Result<Pipe, Refusal> {
        let input = |message| ReceiveMigrationInput {
            message: Some(message),
        };
        let (to_guest, bytes) = channel();
        let bytes = bytes.map(move |bytes| input(ReceiveMigrationMessage::Data(bytes)));
        let open = input(ReceiveMigrationMessage::Open(ReceiveMigrationOpen {
            vm: Some(vm),
            migration: migration.to_owned(),
        }));
        let answers = self
            .0
            .clone()
            .receive_migration(first(open).chain(bytes))
            .await?;
        Ok(Pipe {
            to_guest,
            from_guest: opened(answers).await?,
        })
    }

    /// Ends a migration that was not given away.
    pub(super) async fn cancel_migration(
        &self,
        vm: &VmName,
        migration: &str,
    ) -> Result<(), Refusal> {
        let cancelled = self.0.clone().cancel_migration(vm.clone(), migration).await;
        cancelled.map_err(Refusal::from)
    }

    /// Says whether a VM in doubt runs here.
    pub(super) async fn resolve_migration(
        &self,
        vm: &VmName,
        migration: &str,
        run: bool,
    ) -> Result<(), Refusal> {
        let mut client = self.0.clone();
        let resolved = client.resolve_migration(vm.clone(), migration, run).await;
        resolved.map_err(Refusal::from)
    }

    /// Plugs the claim that a pod keeps into a VM.
    pub(super) async fn plug_disk(&self, vm: &VmName, pod_uid: &str) -> Result<(), Refusal> {
        let mut client = self.0.clone();
        let plugged = client.plug_disk(vm.clone(), pod_uid).await;
        plugged.map_err(Refusal::from)
    }

    /// Takes a disk from a VM; returns whether its guest did not release it.
    pub(super) async fn unplug_disk(
        &self,
        vm: &VmName,
        serial: &str,
        limit_seconds: u32,
    ) -> Result<bool, Refusal> {
        let mut client = self.0.clone();
        let unplugged = client.unplug_disk(vm.clone(), serial, limit_seconds).await;
        unplugged.map_err(Refusal::from)
    }

    /// Dumps a VM's memory to the claim that a pod keeps, or says how far that is.
    pub(super) async fn dump(&self, vm: &VmName, with: DumpRequest) -> Result<DumpAnswer, Refusal> {
        let mut client = self.0.clone();
        let request = DumpMemoryRequest {
            vm: Some(vm.clone()),
            pod_uid: with.pod_uid,
            file: with.file,
            limit_seconds: 0,
        };
        let answer = client.dump_memory(request).await?;
        let state = match answer.state() {
            Dumped::Done => DumpState::Done,
            Dumped::Failed => DumpState::Failed,
            // Of a state that only a newer node knows the next answer says more.
            Dumped::Writing | Dumped::Unknown => DumpState::Writing,
        };
        Ok(DumpAnswer {
            state,
            done: answer.done,
            total: answer.total,
            message: answer.message,
        })
    }

    /// Gives a VM CPUs and memory, 0 for what stays as it is; returns the memory of its guest.
    pub(super) async fn resize(
        &self,
        vm: &VmName,
        vcpus: u32,
        memory: u64,
    ) -> Result<u64, Refusal> {
        let mut client = self.0.clone();
        let resized = client.resize_vm(vm.clone(), vcpus, memory).await;
        resized.map_err(Refusal::from)
    }

    /// Takes the link from cards of a VM, and gives all others one.
    pub(super) async fn set_links(&self, vm: &VmName, down: Vec<String>) -> Result<(), Refusal> {
        let mut client = self.0.clone();
        let set = client.set_links(vm.clone(), down).await;
        set.map_err(Refusal::from)
    }

    /// Opens a stream; done when the other end says that it is open.
    pub(super) async fn open(&self, vm: &VmName, stream: Stream) -> Result<Pipe, Refusal> {
        let (to_guest, typed) = channel();
        let vm = vm.clone();
        let mut client = self.0.clone();
        let answers = match stream {
            Stream::Console => {
                let input = |message| ConsoleInput {
                    message: Some(message),
                };
                let open = input(ConsoleMessage::Open(vm));
                let typed = typed.map(move |bytes| input(ConsoleMessage::Data(bytes)));
                client.console(first(open).chain(typed)).await
            }
            Stream::Tcp(port) | Stream::Udp(port) => {
                let input = |message| PortForwardInput {
                    message: Some(message),
                };
                let protocol = match stream {
                    Stream::Udp(_) => PortProtocol::Udp,
                    _ => PortProtocol::Tcp,
                };
                let open = input(PortForwardMessage::Open(PortForwardOpen {
                    vm: Some(vm),
                    port: port.into(),
                    protocol: protocol.into(),
                }));
                let typed = typed.map(move |bytes| input(PortForwardMessage::Data(bytes)));
                client.port_forward(first(open).chain(typed)).await
            }
            Stream::Vsock(port) => {
                let input = |message| VsockInput {
                    message: Some(message),
                };
                let open = VsockOpen { vm: Some(vm), port };
                let open = input(VsockMessage::Open(open));
                let typed = typed.map(move |bytes| input(VsockMessage::Data(bytes)));
                client.vsock(first(open).chain(typed)).await
            }
        };
        Ok(Pipe {
            to_guest,
            from_guest: opened(answers?).await?,
        })
    }
}

/// Bytes on their way to a guest.
fn channel() -> (mpsc::Sender<Bytes>, BoxStream<'static, Bytes>) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let bytes = stream::unfold(receiver, |mut receiver| async {
        let bytes: Bytes = receiver.recv().await?;
        Some((bytes, receiver))
    });
    (sender, bytes.boxed())
}

fn first<T: Send>(message: T) -> impl futures_util::Stream<Item = T> + Send {
    stream::once(std::future::ready(message))
}

/// What a guest says, once its stream is open: the first message says so, and is empty.
async fn opened(
    mut answers: Streaming<Data>,
) -> Result<BoxStream<'static, Result<Bytes, Refusal>>, Refusal> {
    let early = answers.message().await?.map(|first| first.data);
    let early = early.filter(|bytes| !bytes.is_empty());
    let rest = answers.map(|answer| Ok(answer?.data));
    Ok(stream::iter(early.map(Ok)).chain(rest).boxed())
}

fn read(change: VmChange) -> Option<Change> {
    let vm = |vm: podvisor_node_api::messages::Vm| {
        let phase = vm.phase();
        Some(Vm {
            name: vm.vm?,
            phase,
            since_ns: vm.since_ns,
        })
    };
    Some(match change {
        VmChange::All(list) => Change::All(list.vms.into_iter().filter_map(vm).collect()),
        VmChange::Changed(changed) => Change::One(vm(changed)?),
        VmChange::Removed(name) => Change::Gone(name),
    })
}
