//! The service: what a node implements, and how calls reach it.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use prost::Message;
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{Grpc, NamedService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_service::Service;

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

/// A stream of answers. It is dropped when its client goes.
pub struct AnswerStream<T>(Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>);

impl<T> AnswerStream<T> {
    /// Makes one of any stream.
    #[must_use]
    pub fn new(stream: impl Stream<Item = Result<T, Status>> + Send + 'static) -> Self {
        Self(Box::pin(stream))
    }
}

impl<T> Stream for AnswerStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> fmt::Debug for AnswerStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerStream").finish_non_exhaustive()
    }
}

/// What a node does for its clients. Statuses are those of the crate's table; calls that are not
/// implemented are answered so.
#[tonic::async_trait]
pub trait Node: Send + Sync + 'static {
    /// Returns all VMs.
    async fn list_vms(&self) -> Result<VmList, Status>;

    /// Returns all VMs, then every change.
    async fn watch_vms(&self) -> Result<AnswerStream<VmEvent>, Status>;

    /// Returns what the VMs that run have used.
    async fn vm_usage(&self) -> Result<VmUsageList, Status> {
        Err(unimplemented("VmUsage"))
    }

    /// Pauses a machine between two instructions.
    async fn pause(&self, vm: VmName) -> Result<(), Status>;

    /// Lets a paused machine go on.
    async fn unpause(&self, vm: VmName) -> Result<(), Status>;

    /// Asks the guest to shut down, and boots its machine again.
    async fn soft_reboot(&self, _vm: VmName) -> Result<(), Status> {
        Err(unimplemented("SoftReboot"))
    }

    /// Boots a machine again without asking its guest.
    async fn reset(&self, _vm: VmName) -> Result<(), Status> {
        Err(unimplemented("Reset"))
    }

    /// Asks the guest to power off; its machine is killed after the grace period. Returns at once.
    async fn stop(&self, request: StopRequest) -> Result<(), Status>;

    /// Connects to a serial console.
    async fn console(&self, input: Streaming<ConsoleInput>) -> Result<AnswerStream<Data>, Status>;

    /// Connects to a port of a guest.
    async fn port_forward(
        &self,
        input: Streaming<PortForwardInput>,
    ) -> Result<AnswerStream<Data>, Status>;

    /// Returns how the VM was booted.
    async fn boot_info(&self, _vm: VmName) -> Result<BootInfo, Status> {
        Err(unimplemented("BootInfo"))
    }

    /// Returns what the guest's agent says of its system.
    async fn guest_info(&self, _vm: VmName) -> Result<GuestInfo, Status> {
        Err(unimplemented("GuestInfo"))
    }

    /// Freezes the guest's file systems.
    async fn freeze(&self, _request: FreezeRequest) -> Result<(), Status> {
        Err(unimplemented("Freeze"))
    }

    /// Thaws the guest's file systems.
    async fn thaw(&self, _vm: VmName) -> Result<(), Status> {
        Err(unimplemented("Thaw"))
    }

    /// Runs a program in the guest.
    async fn agent_exec(&self, _request: AgentExecRequest) -> Result<AgentExecAnswer, Status> {
        Err(unimplemented("AgentExec"))
    }

    /// Connects to a vsock port of a guest.
    async fn vsock(&self, _input: Streaming<VsockInput>) -> Result<AnswerStream<Data>, Status> {
        Err(unimplemented("Vsock"))
    }

    /// Sends a VM to another node.
    async fn send_migration(
        &self,
        _input: Streaming<SendMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        Err(unimplemented("SendMigration"))
    }

    /// Receives a VM from another node.
    async fn receive_migration(
        &self,
        _input: Streaming<ReceiveMigrationInput>,
    ) -> Result<AnswerStream<Data>, Status> {
        Err(unimplemented("ReceiveMigration"))
    }

    /// Ends a migration that was not given away.
    async fn cancel_migration(&self, _request: CancelMigrationRequest) -> Result<(), Status> {
        Err(unimplemented("CancelMigration"))
    }

    /// Says what becomes of a VM whose migration is in doubt.
    async fn resolve_migration(&self, _request: ResolveMigrationRequest) -> Result<(), Status> {
        Err(unimplemented("ResolveMigration"))
    }

    /// Plugs a claim into a VM.
    async fn plug_disk(&self, _request: PlugDiskRequest) -> Result<(), Status> {
        Err(unimplemented("PlugDisk"))
    }

    /// Takes a disk from a VM.
    async fn unplug_disk(&self, _request: UnplugDiskRequest) -> Result<UnplugDiskAnswer, Status> {
        Err(unimplemented("UnplugDisk"))
    }

    /// Gives a VM more CPUs or memory.
    async fn resize_vm(&self, _request: ResizeVmRequest) -> Result<ResizeVmAnswer, Status> {
        Err(unimplemented("ResizeVm"))
    }

    /// Dumps a VM's memory to a claim, or says how far that is.
    async fn dump_memory(&self, _request: DumpMemoryRequest) -> Result<DumpMemoryAnswer, Status> {
        Err(unimplemented("DumpMemory"))
    }

    /// Takes the link from cards of a VM, and gives all others one.
    async fn set_links(&self, _request: SetLinksRequest) -> Result<(), Status> {
        Err(unimplemented("SetLinks"))
    }
}

fn unimplemented(method: &str) -> Status {
    Status::unimplemented(format!(
        "this node's version has no call {method} for virtual machines: use a newer podvisor"
    ))
}

/// The gRPC service of a [`Node`], for a server of `tonic`.
pub struct NodeServer<N> {
    node: Arc<N>,
}

impl<N: Node> NodeServer<N> {
    /// Serves a node.
    #[must_use]
    pub fn new(node: Arc<N>) -> Self {
        Self { node }
    }
}

impl<N> Clone for NodeServer<N> {
    fn clone(&self) -> Self {
        Self {
            node: Arc::clone(&self.node),
        }
    }
}

impl<N> fmt::Debug for NodeServer<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeServer").finish_non_exhaustive()
    }
}

impl<N> NamedService for NodeServer<N> {
    const NAME: &'static str = paths::SERVICE;
}

type Answered = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl<N: Node> Service<http::Request<Body>> for NodeServer<N> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answered;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: http::Request<Body>) -> Answered {
        let node = Arc::clone(&self.node);
        match call.uri().path() {
            paths::LIST_VMS => unary(
                call,
                |_: ListVmsRequest| async move { node.list_vms().await },
            ),
            paths::WATCH_VMS => watch(call, node),
            paths::VM_USAGE => unary(
                call,
                |_: VmUsageRequest| async move { node.vm_usage().await },
            ),
            paths::PAUSE => of_vm(call, |vm| async move { node.pause(vm).await }),
            paths::UNPAUSE => of_vm(call, |vm| async move { node.unpause(vm).await }),
            paths::SOFT_REBOOT => of_vm(call, |vm| async move { node.soft_reboot(vm).await }),
            paths::RESET => of_vm(call, |vm| async move { node.reset(vm).await }),
            paths::STOP => unary(
                call,
                |request| async move { done(node.stop(request).await) },
            ),
            paths::CONSOLE => streams(call, |input| async move { node.console(input).await }),
            paths::PORT_FORWARD => {
                streams(call, |input| async move { node.port_forward(input).await })
            }
            paths::BOOT_INFO => unary(call, |request: VmRequest| async move {
                node.boot_info(named(request)?).await
            }),
            paths::GUEST_INFO => unary(call, |request: VmRequest| async move {
                node.guest_info(named(request)?).await
            }),
            paths::FREEZE => unary(
                call,
                |request| async move { done(node.freeze(request).await) },
            ),
            paths::THAW => of_vm(call, |vm| async move { node.thaw(vm).await }),
            paths::AGENT_EXEC => unary(
                call,
                |request| async move { node.agent_exec(request).await },
            ),
            paths::VSOCK => streams(call, |input| async move { node.vsock(input).await }),
            paths::SEND_MIGRATION => {
                streams(
                    call,
                    |input| async move { node.send_migration(input).await },
                )
            }
            paths::RECEIVE_MIGRATION => {
                streams(
                    call,
                    |input| async move { node.receive_migration(input).await },
                )
            }
            paths::CANCEL_MIGRATION => unary(call, |request| async move {
                done(node.cancel_migration(request).await)
            }),
            paths::RESOLVE_MIGRATION => unary(call, |request| async move {
                done(node.resolve_migration(request).await)
            }),
            paths::PLUG_DISK => unary(call, |request| async move {
                done(node.plug_disk(request).await)
            }),
            paths::UNPLUG_DISK => unary(
                call,
                |request| async move { node.unplug_disk(request).await },
            ),
            paths::SET_LINKS => unary(call, |request| async move { node.set_links(request).await }),
            paths::RESIZE_VM => unary(call, |request| async move { node.resize_vm(request).await }),
            paths::DUMP_MEMORY => unary(
                call,
                |request| async move { node.dump_memory(request).await },
            ),
            path => {
                let shown: String = path.chars().take(128).collect();
                let status = Status::unimplemented(format!("unknown method {shown:?}"));
                Box::pin(ready(Ok(status.into_http())))
            }
        }
    }
}

/// Names the VM of a request, which must name one.
fn named(request: VmRequest) -> Result<VmName, Status> {
    request
        .vm
        .ok_or_else(|| Status::invalid_argument("vm: the request names no virtual machine"))
}

fn done(result: Result<(), Status>) -> Result<Done, Status> {
    result.map(|()| Done {})
}

fn of_vm<F, W>(call: http::Request<Body>, work: F) -> Answered
where
    F: FnOnce(VmName) -> W + Send + 'static,
    W: Future<Output = Result<(), Status>> + Send + 'static,
{
    unary(
        call,
        |request| async move { done(work(named(request)?).await) },
    )
}

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

type Work<Q, A> = Box<dyn FnOnce(Request<Q>) -> Boxed<Result<Response<A>, Status>> + Send>;

/// A function as a service that is called once.
struct Once<Q, A>(Option<Work<Q, A>>);

impl<Q, A> Once<Q, A> {
    fn new<F, W>(work: F) -> Self
    where
        F: FnOnce(Q) -> W + Send + 'static,
        W: Future<Output = Result<A, Status>> + Send + 'static,
    {
        Self(Some(Box::new(|request| {
            let answer = work(request.into_inner());
            Box::pin(async move { answer.await.map(Response::new) })
        })))
    }
}

impl<Q, A: Send + 'static> Service<Request<Q>> for Once<Q, A> {
    type Response = Response<A>;
    type Error = Status;
    type Future = Boxed<Result<Response<A>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        match self.0.take() {
            Some(work) => work(request),
            None => Box::pin(ready(Err(Status::internal("a call was answered twice")))),
        }
    }
}

fn grpc<A, Q>() -> Grpc<ProstCodec<A, Q>>
where
    A: Message + 'static,
    Q: Message + Default + 'static,
{
    Grpc::new(ProstCodec::default())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// A request and an answer.
fn unary<Q, A, F, W>(call: http::Request<Body>, work: F) -> Answered
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    F: FnOnce(Q) -> W + Send + 'static,
    W: Future<Output = Result<A, Status>> + Send + 'static,
{
    let work = Once::new(work);
    Box::pin(async move { Ok(grpc::<A, Q>().unary(work, call).await) })
}

/// A request and a stream of answers.
fn watch<N: Node>(call: http::Request<Body>, node: Arc<N>) -> Answered {
    let work = Once::new(|_: WatchVmsRequest| async move { node.watch_vms().await });
    let mut grpc = grpc::<VmEvent, WatchVmsRequest>();
    Box::pin(async move { Ok(grpc.server_streaming(work, call).await) })
}

/// Two streams.
fn streams<Q, F, W>(call: http::Request<Body>, work: F) -> Answered
where
    Q: Message + Default + 'static,
    F: FnOnce(Streaming<Q>) -> W + Send + 'static,
    W: Future<Output = Result<AnswerStream<Data>, Status>> + Send + 'static,
{
    let work = Once::new(work);
    Box::pin(async move { Ok(grpc::<Data, Q>().streaming(work, call).await) })
}
