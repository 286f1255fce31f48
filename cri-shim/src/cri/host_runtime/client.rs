//! The connection to the other runtime.

use std::error::Error;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use podvisor_cri_messages::{
    ListPodSandboxRequest, ListPodSandboxResponse, NamespaceMode, PodSandboxConfig,
    PodSandboxMetadata, StatusRequest, StatusResponse,
};
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::http::Response;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower_service::Service as _;
use tracing::debug;

use super::last_lists::{KeptLists, Listed};
use super::message::{Call, answer, decode};
use crate::cri::config::{HOST_HANDLER, HostSettings};

/// How long an answer is waited for where one can do without it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum size of an answer's headers and trailers, which errors are in, in bytes.
const MAX_HEADERS: u32 = 1 << 20;

const LIST_PODS: &str = "/runtime.v1.RuntimeService/ListPodSandbox";
const STATUS: &str = "/runtime.v1.RuntimeService/Status";

/// The other runtime of the node.
#[derive(Debug)]
pub(in crate::cri) struct HostRuntime {
    socket: PathBuf,
    channel: Channel,
    message_bytes: usize,
    /// Whether pods without a runtime handler are its.
    pub(super) is_default: bool,
    lists: KeptLists,
    /// Why the runtime's events of containers are missing now, if they are.
    events_fault: Mutex<Option<Status>>,
}

impl HostRuntime {
    /// Prepares a connection to a runtime, whose socket need not be there yet. Messages have at
    /// most `message_bytes` bytes.
    pub(in crate::cri) fn new(
        settings: &HostSettings,
        message_bytes: usize,
    ) -> Result<Self, Status> {
        let socket = &settings.socket;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        let endpoint = endpoint.map_err(|error| {
            Status::invalid_argument(format!("{} is no socket's path: {error}", socket.display()))
        })?;
        Ok(Self {
            socket: socket.clone(),
            channel: endpoint
                .http2_max_header_list_size(MAX_HEADERS)
                .connect_lazy(),
            message_bytes,
            is_default: settings.is_default,
            lists: KeptLists::default(),
            events_fault: Mutex::default(),
        })
    }

    /// Returns whether a pod is created in this runtime.
    ///
    /// The handlers of guests stay what they are: who names one wants a virtual machine.
    pub(super) fn takes(&self, pod: Option<&PodSandboxConfig>, handler: &str) -> bool {
        match handler {
            HOST_HANDLER => true,
            "" => self.is_default || pod.is_some_and(needs_node),
            _ => false,
        }
    }

    /// Sets why events are missing; `None`: they come.
    pub(super) fn set_events_fault(&self, fault: Option<Status>) {
        let mut kept = self
            .events_fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *kept = fault;
    }

    pub(super) fn events_fault(&self) -> Option<Status> {
        let kept = self
            .events_fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        kept.clone()
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Passes a call on, and its answer, whatever it is.
    pub(super) async fn pass(&self, call: Call) -> Result<Response<Body>, Status> {
        let mut channel = self.channel.clone();
        let ready = poll_fn(|context| channel.poll_ready(context)).await;
        ready.map_err(|error| self.unreachable(&error))?;
        let response = channel.call(call.into_request()).await;
        response.map_err(|error| self.unreachable(&error))
    }

    /// Passes a call on, and returns the message of its answer.
    pub(super) async fn ask(&self, call: Call) -> Result<Bytes, Status> {
        answer(self.pass(call).await?, self.message_bytes).await
    }

    /// Like [`Self::ask`], for an answer that is not waited for long.
    pub(super) async fn ask_briefly(&self, call: Call) -> Result<Bytes, Status> {
        let asked = timeout(PATIENCE, self.ask(call)).await;
        asked.unwrap_or_else(|_| {
            Err(Status::unavailable(format!(
                "the runtime at {} did not answer within {} s",
                self.socket.display(),
                PATIENCE.as_secs(),
            )))
        })
    }

    /// Asks for a list. While the runtime is away, its last complete list counts: its pods run on,
    /// and to a kubelet a pod that is not listed has ended.
    pub(super) async fn list(&self, listed: Listed, call: Call) -> Result<Bytes, Status> {
        let request = call.message.clone();
        let changes = self.lists.changes();
        match self.ask_briefly(call.clone()).await {
            Ok(list) => {
                self.lists.keep(listed, &request, &list, changes)?;
                Ok(list)
            }
            Err(error) if self.is_away(&call, &error).await => {
                self.lists.answer(listed, &request)?.ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Passes on a call that makes something.
    pub(super) async fn pass_making(&self, call: Call) -> Result<Response<Body>, Status> {
        // Also before: it may have been made when its answer is lost.
        self.lists.change();
        let passed = self.pass(call).await;
        self.lists.change();
        passed
    }

    /// Returns whether the runtime has a pod of this name.
    pub(super) async fn has_pod(
        &self,
        call: &Call,
        pod: &PodSandboxMetadata,
    ) -> Result<bool, Status> {
        let call = call.to(LIST_PODS, &ListPodSandboxRequest::default());
        let list: ListPodSandboxResponse = decode(&self.ask_briefly(call).await?)?;
        let mut found = list.items.iter().filter_map(|item| item.metadata.as_ref());
        Ok(found.any(|found| {
            found.uid == pod.uid && found.namespace == pod.namespace && found.name == pod.name
        }))
    }

    /// Returns the runtime's status.
    pub(super) async fn status(&self, call: &Call) -> Result<StatusResponse, Status> {
        let request = StatusRequest { verbose: false };
        let answer = self.ask_briefly(call.to(STATUS, &request)).await?;
        decode(&answer)
    }

    /// Returns whether a call failed because the runtime serves none now. Servers have no code of
    /// their own for an error while they start: one that cannot even tell its status serves none.
    pub(super) async fn is_away(&self, call: &Call, error: &Status) -> bool {
        match error.code() {
            Code::Unavailable => true,
            Code::Unknown => self.status(call).await.is_err(),
            _ => false,
        }
    }

    fn unreachable(&self, error: &tonic::transport::Error) -> Status {
        let mut reasons = vec![error.to_string()];
        let mut source = error.source();
        while let Some(reason) = source {
            reasons.push(reason.to_string());
            source = reason.source();
        }
        Status::unavailable(format!(
            "the runtime of host pods at {} cannot be reached: {}",
            self.socket.display(),
            reasons.join(": "),
        ))
    }
}

/// Returns whether a pod shares a namespace with the node.
fn needs_node(pod: &PodSandboxConfig) -> bool {
    let security = pod
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref());
    let Some(options) = security.and_then(|security| security.namespace_options.as_ref()) else {
        return false;
    };
    let modes = [options.network, options.ipc, options.pid];
    modes.contains(&i32::from(NamespaceMode::Node))
}

/// Returns what the other runtime answered; nothing if it failed.
pub(super) fn optional(answer: Result<Bytes, Status>) -> Bytes {
    answer.unwrap_or_else(|error| {
        // Older runtimes have not all calls.
        if error.code() != Code::Unimplemented {
            debug!(%error, "the host's runtime gave no answer");
        }
        Bytes::new()
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, Ordering};

    use hyper_util::rt::{TokioExecutor, TokioIo};
    use podvisor_cri_messages::PodSandbox;
    use prost::Message as _;
    use tokio::net::UnixListener;
    use tonic::codegen::http::Request;

    use super::super::message::answered;
    use super::*;

    const RUNS: u8 = 0;
    const STARTS: u8 = 1;
    const FAILS: u8 = 2;
    const LIST: &str = "/runtime.v1.RuntimeService/ListPodSandbox";

    /// A runtime with one pod, which does as `state` says.
    fn serve(listener: UnixListener, state: Arc<AtomicU8>) {
        let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
            let answer = match (state.load(Ordering::SeqCst), request.uri().path()) {
                (STARTS, _) => Status::unknown("not yet").into_http(),
                (FAILS, LIST) => Status::unknown("the list cannot be read").into_http(),
                (_, LIST) => {
                    let items = vec![PodSandbox::default()];
                    answered(&ListPodSandboxResponse { items }.encode_to_vec().into())
                }
                _ => answered(&Bytes::new()),
            };
            async { Ok::<Response<Body>, Infallible>(answer) }
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service.clone());
                tokio::spawn(served);
            }
        });
    }

    #[tokio::test]
    async fn the_last_list_counts_while_the_runtime_starts_and_not_when_it_fails() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let state = Arc::new(AtomicU8::new(RUNS));
        serve(UnixListener::bind(&socket).unwrap(), Arc::clone(&state));
        let settings = HostSettings {
            socket,
            is_default: false,
        };
        let host = HostRuntime::new(&settings, 1 << 20).unwrap();
        let list = async || {
            let request = Request::post(LIST).header("te", "trailers");
            let request = request.body(answered(&Bytes::new()).into_body()).unwrap();
            let call = Call::read(request, 1 << 20).await.unwrap();
            host.list(Listed::Pods, call).await
        };
        let first = list().await.unwrap();
        assert!(!first.is_empty());
        state.store(STARTS, Ordering::SeqCst);
        assert_eq!(list().await.unwrap(), first);
        state.store(FAILS, Ordering::SeqCst);
        assert_eq!(
            list().await.unwrap_err().message(),
            "the list cannot be read"
        );
    }
}
