//! Calls of RuntimeService that are newer than the crate of messages: they are taken out before the
//! service that it generates.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use k8s_cri::v1::LinuxContainerResources;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::flights::to_the_end;
use super::node::Node;

/// Since Kubernetes 1.33.
const UPDATE_POD: &str = "/runtime.v1.RuntimeService/UpdatePodSandboxResources";

/// What a pod may use from now on.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub(super) pod_sandbox_id: String,
    /// Left out: as before.
    #[prost(message, optional, tag = "2")]
    pub(super) overhead: Option<LinuxContainerResources>,
    /// The sum of its containers' limits. Left out: as before.
    #[prost(message, optional, tag = "3")]
    pub(super) resources: Option<LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct UpdatePodSandboxResourcesResponse {}

/// RuntimeService with these calls.
#[derive(Debug, Clone)]
pub(super) struct Newer<S> {
    inner: S,
    node: Arc<Node>,
    message_bytes: usize,
}

impl<S> Newer<S> {
    /// Messages have at most `message_bytes`.
    pub(super) fn new(inner: S, node: Arc<Node>, message_bytes: usize) -> Self {
        Self {
            inner,
            node,
            message_bytes,
        }
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
        if request.uri().path() != UPDATE_POD {
            return Box::pin(self.inner.call(request));
        }
        let service = UpdatePod(Arc::clone(&self.node));
        let mut grpc =
            Grpc::new(ProstCodec::default()).max_decoding_message_size(self.message_bytes);
        Box::pin(async move { Ok(grpc.unary(service, request).await) })
    }
}

/// UpdatePodSandboxResources.
#[derive(Debug)]
struct UpdatePod(Arc<Node>);

impl UnaryService<UpdatePodSandboxResourcesRequest> for UpdatePod {
    type Response = UpdatePodSandboxResourcesResponse;
    type Future =
        Pin<Box<dyn Future<Output = Result<tonic::Response<Self::Response>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<UpdatePodSandboxResourcesRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let work = async move { node.update_pod_resources(request.into_inner()).await };
            to_the_end(work).await?;
            Ok(tonic::Response::new(UpdatePodSandboxResourcesResponse {}))
        })
    }
}
