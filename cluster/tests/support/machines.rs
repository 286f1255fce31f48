//! Plays `podvisor serve` on a socket: machines that are paused and resumed, streams that echo.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use podvisor_node_api::messages::{
    CancelMigrationRequest, ConsoleInput, ConsoleMessage, Data, DumpMemoryAnswer,
    DumpMemoryRequest, DumpState, FreezeRequest, GuestInfo, GuestInterface, GuestOs, GuestUser,
    PlugDiskRequest, PortForwardInput, PortForwardMessage, ReceiveMigrationInput,
    ReceiveMigrationMessage, ResizeVmAnswer, ResizeVmRequest, ResolveMigrationRequest,
    SendMigrationInput, SendMigrationMessage, SetLinksRequest, StopRequest, UnplugDiskAnswer,
    UnplugDiskRequest, Vm, VmChange, VmEvent, VmList, VmMigration, VmName, VmPhase, VsockInput,
    VsockMessage,
};
use podvisor_node_api::{AnswerStream, Node, NodeServer};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Status, Streaming};

use super::migrations::{Fault, Migrations};

type Name = (String, String, String);
type Says = mpsc::WeakSender<Result<Data, Status>>;

/// The machines of a node.
#[derive(Clone)]
pub struct StandIn {
    machines: watch::Sender<BTreeMap<Name, Machine>>,
    console: Arc<Mutex<Option<Says>>>,
    directory: Arc<tempfile::TempDir>,
    /// What goes wrong with migrations.
    pub migrations: Migrations,
    /// Why disks are not plugged in, if they are not.
    pub refuses_disks: Arc<Mutex<Option<String>>>,
    /// Why there are no dumps of memory, if there are none.
    pub fails_dumps: Arc<Mutex<Option<String>>>,
}

/// The serial number of a disk that the guest does not release.
pub const STUBBORN: &str = "stubborn";

/// One machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// What it does.
    pub phase: VmPhase,
    /// What its guest's agent says, if it has one.
    pub guest: Option<GuestInfo>,
    /// What was done to it.
    pub done: Vec<String>,
    /// Its latest migration.
    pub migration: Option<VmMigration>,
}

impl StandIn {
    /// Serves a node without machines.
    pub fn serve() -> Self {
        let stand_in = Self {
            machines: watch::Sender::new(BTreeMap::new()),
            console: Arc::default(),
            directory: Arc::new(tempfile::tempdir().expect("a directory")),
            migrations: Migrations::default(),
            refuses_disks: Arc::default(),
            fails_dumps: Arc::default(),
        };
        let listener = UnixListener::bind(stand_in.socket()).expect("a socket");
        let service = NodeServer::new(Arc::new(stand_in.clone()));
        tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let server = tonic::transport::Server::builder().add_service(service);
            server
                .serve_with_incoming(incoming)
                .await
                .expect("it serves");
        });
        stand_in
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("node.sock")
    }

    /// Starts a machine.
    pub fn start(&self, vm: &VmName, guest: Option<GuestInfo>) {
        let machine = Machine {
            phase: VmPhase::Running,
            guest,
            done: Vec::new(),
            migration: None,
        };
        self.machines.send_modify(|machines| {
            machines.insert(key(vm), machine);
        });
    }

    /// Returns a machine.
    pub fn machine(&self, vm: &VmName) -> Machine {
        self.find(vm).expect("the machine exists")
    }

    pub(super) fn update(&self, vm: &VmName, change: impl FnOnce(&mut Machine)) {
        self.machines.send_modify(|machines| {
            change(machines.get_mut(&key(vm)).expect("the machine exists"));
        });
    }

    fn find(&self, vm: &VmName) -> Result<Machine, Status> {
        let machine = self.machines.borrow().get(&key(vm)).cloned();
        machine.ok_or_else(|| Status::not_found("no such machine"))
    }

    fn list(&self) -> VmList {
        let vm = |(name, machine): (&Name, &Machine)| Vm {
            vm: Some(VmName::new(&name.0, &name.1, &name.2)),
            phase: machine.phase.into(),
            migration: machine.migration.clone().map(Box::new),
            ..Vm::default()
        };
        let machines = self.machines.borrow();
        VmList {
            vms: machines.iter().map(vm).collect(),
        }
    }

    fn change(
        &self,
        vm: &VmName,
        what: &str,
        change: impl FnOnce(&mut Machine) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut machine = self.find(vm)?;
        change(&mut machine)?;
        machine.done.push(what.to_owned());
        self.machines.send_modify(|machines| {
            machines.insert(key(vm), machine);
        });
        Ok(())
    }

    /// Says what it is, then repeats what it hears until it hears `exit`.
    fn echo(
        &self,
        what: String,
        mut heard: impl stream::Stream<Item = Bytes> + Send + Unpin + 'static,
    ) -> (Says, AnswerStream<Data>) {
        let (says, answers) = mpsc::channel(8);
        let weak = says.downgrade();
        tokio::spawn(async move {
            let data = |data| Ok(Data { data });
            let _ = says.send(data(Bytes::new())).await;
            let _ = says.send(data(what.into())).await;
            while let Some(bytes) = heard.next().await {
                if bytes.as_ref() == b"exit" || says.send(data(bytes)).await.is_err() {
                    return;
                }
            }
        });
        (weak, answers_of(answers))
    }
}

fn answers_of(answers: mpsc::Receiver<Result<Data, Status>>) -> AnswerStream<Data> {
    AnswerStream::new(stream::unfold(answers, |mut answers| async {
        let answer: Result<Data, Status> = answers.recv().await?;
        Some((answer, answers))
    }))
}

fn key(vm: &VmName) -> Name {
    (vm.namespace.clone(), vm.name.clone(), vm.uid.clone())
}

fn no_agent() -> Status {
    Status::failed_precondition("no agent answers")
}

#[tonic::async_trait]
impl Node for StandIn {
    async fn list_vms(&self) -> Result<VmList, Status> {
        Ok(self.list())
    }

    async fn watch_vms(&self) -> Result<AnswerStream<VmEvent>, Status> {
        let state = (self.clone(), self.machines.subscribe(), true);
        let events = stream::unfold(state, |(machines, mut receiver, first)| async move {
            if !first {
                receiver.changed().await.ok()?;
            }
            receiver.mark_unchanged();
            let change = Some(VmChange::All(machines.list()));
            Some((Ok(VmEvent { change }), (machines, receiver, false)))
        });
        Ok(AnswerStream::new(events))
    }

    async fn pause(&self, vm: VmName) -> Result<(), Status> {
        self.change(&vm, "pause", |machine| {
            if machine.phase != VmPhase::Running {
                return Err(Status::failed_precondition("it does not run"));
            }
            machine.phase = VmPhase::Paused;
            Ok(())
        })
    }

    async fn unpause(&self, vm: VmName) -> Result<(), Status> {
        self.change(&vm, "unpause", |machine| {
            if machine.phase != VmPhase::Paused {
                return Err(Status::failed_precondition("it is not paused"));
            }
            machine.phase = VmPhase::Running;
            Ok(())
        })
    }

    async fn soft_reboot(&self, vm: VmName) -> Result<(), Status> {
        self.change(&vm, "soft reboot", |_| Ok(()))
    }

    async fn reset(&self, vm: VmName) -> Result<(), Status> {
        self.change(&vm, "reset", |_| Ok(()))
    }

    async fn stop(&self, _: StopRequest) -> Result<(), Status> {
        Err(Status::unimplemented("nobody stops it here"))
    }

    async fn console(
        &self,
        mut input: Streaming<ConsoleInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        let opens = input.message().await?.and_then(|input| input.message);
        let Some(ConsoleMessage::Open(vm)) = opens else {
            return Err(Status::invalid_argument("whose console?"));
        };
        self.find(&vm)?;
        let heard = input.filter_map(|input| {
            std::future::ready(match input.ok().and_then(|input| input.message) {
                Some(ConsoleMessage::Data(data)) => Some(data),
                _ => None,
            })
        });
        let (says, answers) = self.echo("console".to_owned(), heard.boxed());
        let before = self.console.lock().expect("no panic").replace(says);
        if let Some(before) = before.and_then(|before| before.upgrade()) {
            let _ = before.try_send(Err(Status::aborted("another one opened it")));
        }
        Ok(answers)
    }

    async fn port_forward(
        &self,
        mut input: Streaming<PortForwardInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        let opens = input.message().await?.and_then(|input| input.message);
        let Some(PortForwardMessage::Open(open)) = opens else {
            return Err(Status::invalid_argument("which port?"));
        };
        self.find(open.vm.as_ref().expect("a name"))?;
        if open.port == 23 {
            return Err(Status::failed_precondition("nothing listens there"));
        }
        let heard = input.filter_map(|input| {
            std::future::ready(match input.ok().and_then(|input| input.message) {
                Some(PortForwardMessage::Data(data)) => Some(data),
                _ => None,
            })
        });
        let what = format!("{:?} {}", open.protocol(), open.port);
        Ok(self.echo(what, heard.boxed()).1)
    }

    async fn vsock(&self, mut input: Streaming<VsockInput>) -> Result<AnswerStream<Data>, Status> {
        let opens = input.message().await?.and_then(|input| input.message);
        let Some(VsockMessage::Open(open)) = opens else {
            return Err(Status::invalid_argument("which port?"));
        };
        let heard = input.filter_map(|input| {
            std::future::ready(match input.ok().and_then(|input| input.message) {
                Some(VsockMessage::Data(data)) => Some(data),
                _ => None,
            })
        });
        Ok(self.echo(format!("Vsock {}", open.port), heard.boxed()).1)
    }

    async fn send_migration(
        &self,
        mut input: Streaming<SendMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        let opens = input.message().await?.and_then(|input| input.message);
        let Some(SendMigrationMessage::Open(open)) = opens else {
            return Err(Status::invalid_argument("which VM?"));
        };
        self.find(open.vm.as_ref().expect("a name"))?;
        if self.migrations.fault() == Fault::Refused {
            return Err(Status::failed_precondition("it has what cannot move"));
        }
        let heard = input.filter_map(|input| {
            std::future::ready(match input.ok().and_then(|input| input.message) {
                Some(SendMigrationMessage::Data(data)) => Some(data),
                _ => None,
            })
        });
        let (says, answers) = mpsc::channel(8);
        tokio::spawn(self.clone().send(open, heard.boxed(), says));
        Ok(answers_of(answers))
    }

    async fn receive_migration(
        &self,
        mut input: Streaming<ReceiveMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        let opens = input.message().await?.and_then(|input| input.message);
        let Some(ReceiveMigrationMessage::Open(open)) = opens else {
            return Err(Status::invalid_argument("which VM?"));
        };
        let vm = open.vm.expect("a name");
        self.find(&vm)?;
        let heard = input.filter_map(|input| {
            std::future::ready(match input.ok().and_then(|input| input.message) {
                Some(ReceiveMigrationMessage::Data(data)) => Some(data),
                _ => None,
            })
        });
        let (says, answers) = mpsc::channel(8);
        tokio::spawn(self.clone().receive(vm, heard.boxed(), says));
        Ok(answers_of(answers))
    }

    async fn cancel_migration(&self, request: CancelMigrationRequest) -> Result<(), Status> {
        self.cancel(&request.vm.expect("a name"))
    }

    async fn resolve_migration(&self, request: ResolveMigrationRequest) -> Result<(), Status> {
        self.resolve(&request.vm.expect("a name"), request.run)
    }

    async fn plug_disk(&self, request: PlugDiskRequest) -> Result<(), Status> {
        let refusal = self.refuses_disks.lock().expect("no panic").clone();
        if let Some(why) = refusal {
            return Err(Status::failed_precondition(why));
        }
        let what = format!("plug {}", request.pod_uid);
        self.change(&request.vm.expect("a name"), &what, |_| Ok(()))
    }

    async fn unplug_disk(&self, request: UnplugDiskRequest) -> Result<UnplugDiskAnswer, Status> {
        let what = format!("unplug {}", request.serial);
        self.change(&request.vm.expect("a name"), &what, |_| Ok(()))?;
        Ok(UnplugDiskAnswer {
            is_forced: request.serial == STUBBORN,
        })
    }

    async fn resize_vm(&self, request: ResizeVmRequest) -> Result<ResizeVmAnswer, Status> {
        let ResizeVmRequest { vm, vcpus, memory } = request;
        let what = format!("{vcpus} CPUs, {memory} bytes");
        self.change(&vm.expect("a name"), &what, |_| Ok(()))?;
        Ok(ResizeVmAnswer { memory })
    }

    async fn set_links(&self, request: SetLinksRequest) -> Result<(), Status> {
        let what = format!("links down: {}", request.down.join(" "));
        self.change(&request.vm.expect("a name"), &what, |_| Ok(()))
    }

    async fn dump_memory(&self, request: DumpMemoryRequest) -> Result<DumpMemoryAnswer, Status> {
        let vm = request.vm.expect("a name");
        let what = format!("dump {} by {}", request.file, request.pod_uid);
        let has_begun = self.find(&vm)?.done.contains(&what);
        self.change(&vm, &what, |_| Ok(()))?;
        let failure = self.fails_dumps.lock().expect("no panic").clone();
        // It takes a while: whoever asks again finds it done.
        let state = match (&failure, has_begun) {
            (Some(_), _) => DumpState::Failed,
            (None, false) => DumpState::Writing,
            (None, true) => DumpState::Done,
        };
        Ok(DumpMemoryAnswer {
            state: state.into(),
            done: 1,
            total: 4,
            message: failure.unwrap_or_default(),
        })
    }

    async fn guest_info(&self, vm: VmName) -> Result<GuestInfo, Status> {
        self.find(&vm)?.guest.ok_or_else(no_agent)
    }

    async fn freeze(&self, request: FreezeRequest) -> Result<(), Status> {
        let what = format!("freeze {}", request.timeout_seconds);
        let vm = request.vm.expect("a name");
        self.change(&vm, &what, |machine| {
            machine.guest.as_ref().map(drop).ok_or_else(no_agent)
        })
    }

    async fn thaw(&self, vm: VmName) -> Result<(), Status> {
        self.change(&vm, "thaw", |machine| {
            machine.guest.as_ref().map(drop).ok_or_else(no_agent)
        })
    }
}

/// What an agent says.
pub fn guest() -> GuestInfo {
    GuestInfo {
        agent_version: "8.2.0".to_owned(),
        host_name: "guest".to_owned(),
        os: Some(GuestOs {
            id: "debian".to_owned(),
            pretty_name: "Debian GNU/Linux 13 (trixie)".to_owned(),
            ..GuestOs::default()
        }),
        users: vec![GuestUser {
            name: "root".to_owned(),
            ..GuestUser::default()
        }],
        interfaces: vec![GuestInterface {
            name: "eth0".to_owned(),
            mac: "0a:00:00:00:00:01".to_owned(),
            addresses: vec!["10.1.0.7/24".to_owned(), "fd00::7/64".to_owned()],
        }],
        ..GuestInfo::default()
    }
}
