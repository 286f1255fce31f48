//! Calls of RuntimeService that are newer than the message crate, or have newer fields: they are
//! intercepted before the generated service.

mod create;
mod env_values;
mod features;
mod pod_resources;
pub(super) mod stats;
mod status;
mod stop_signal;

pub(super) use create::create_request;
pub(super) use features::FullNodeStatus;
pub(super) use pod_resources::UpdatePodSandboxResourcesRequest;
pub(super) use stop_signal::from_cri as stop_signal_from_cri;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use k8s_cri::v1::{
    ContainerStatsRequest, ListContainerStatsRequest, ListPodSandboxStatsRequest,
    PodSandboxStatsRequest,
};
use prost::Message;
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic_prost::ProstCodec;
use tower_service::Service;

use self::create::{CreateCall, CreateCodec};
use self::features::{NodeStatusCall, NodeStatusCodec};
use self::pod_resources::UpdatePod;
use self::stats::StatsCall;
use self::status::{StatusCall, StatusCodec};
use super::node::Node;

/// Since Kubernetes 1.33.
const UPDATE_POD: &str = "/runtime.v1.RuntimeService/UpdatePodSandboxResources";

/// Has newer fields for volumes and stop signals, and variables whose values are bytes.
const CREATE_CONTAINER: &str = "/runtime.v1.RuntimeService/CreateContainer";

/// Has newer features of the runtime.
const STATUS: &str = "/runtime.v1.RuntimeService/Status";

/// Has a newer field for stop signals.
const CONTAINER_STATUS: &str = "/runtime.v1.RuntimeService/ContainerStatus";

/// Have newer fields for pressure stall information (Kubernetes 1.34).
const CONTAINER_STATS: &str = "/runtime.v1.RuntimeService/ContainerStats";
const LIST_CONTAINER_STATS: &str = "/runtime.v1.RuntimeService/ListContainerStats";
const POD_STATS: &str = "/runtime.v1.RuntimeService/PodSandboxStats";
const LIST_POD_STATS: &str = "/runtime.v1.RuntimeService/ListPodSandboxStats";

/// RuntimeService with these calls added.
#[derive(Debug, Clone)]
pub(super) struct Newer<S> {
    inner: S,
    node: Arc<Node>,
    message_bytes: usize,
}

impl<S> Newer<S> {
    /// Creates the service; messages have at most `message_bytes` bytes.
    pub(super) fn new(inner: S, node: Arc<Node>, message_bytes: usize) -> Self {
        Self {
            inner,
            node,
            message_bytes,
        }
    }

    /// Handles a statistics call with the request message `Q`.
    fn stats<Q>(&self, request: Request<Body>) -> Answered
    where
        Q: Message + Default + 'static,
        StatsCall: UnaryService<Q, Response: Message, Future: Send>,
    {
        let codec = ProstCodec::<<StatsCall as UnaryService<Q>>::Response, Q>::default();
        let call = StatsCall(Arc::clone(&self.node));
        answer(codec, self.message_bytes, call, request)
    }
}

impl<S: NamedService> NamedService for Newer<S> {
    const NAME: &'static str = S::NAME;
}

type Answered = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S> Service<Request<Body>> for Newer<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answered;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Answered {
        let node = Arc::clone(&self.node);
        match request.uri().path() {
            UPDATE_POD => answer(
                ProstCodec::default(),
                self.message_bytes,
                UpdatePod(node),
                request,
            ),
            CREATE_CONTAINER => answer(CreateCodec, self.message_bytes, CreateCall(node), request),
            CONTAINER_STATS => self.stats::<ContainerStatsRequest>(request),
            LIST_CONTAINER_STATS => self.stats::<ListContainerStatsRequest>(request),
            POD_STATS => self.stats::<PodSandboxStatsRequest>(request),
            LIST_POD_STATS => self.stats::<ListPodSandboxStatsRequest>(request),
            STATUS => {
                let call = NodeStatusCall(node);
                answer(NodeStatusCodec, self.message_bytes, call, request)
            }
            CONTAINER_STATUS => answer(StatusCodec, self.message_bytes, StatusCall(node), request),
            _ => Box::pin(self.inner.call(request)),
        }
    }
}

fn answer<C, S>(codec: C, message_bytes: usize, service: S, request: Request<Body>) -> Answered
where
    C: Codec + Send + 'static,
    C::Encode: Sync,
    S: UnaryService<C::Decode, Response = C::Encode> + Send + 'static,
    S::Future: Send,
{
    let mut grpc = Grpc::new(codec).max_decoding_message_size(message_bytes);
    Box::pin(async move { Ok(grpc.unary(service, request).await) })
}
