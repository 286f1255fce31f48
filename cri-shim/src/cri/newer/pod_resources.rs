//! UpdatePodSandboxResources.

use std::pin::Pin;
use std::sync::Arc;

use k8s_cri::v1::LinuxContainerResources;
use tonic::Status;
use tonic::server::UnaryService;

use crate::cri::flights::to_the_end;
use crate::cri::node::Node;

/// New resource limits of a pod.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::cri) struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub(in crate::cri) pod_sandbox_id: String,
    /// If omitted, it is unchanged.
    #[prost(message, optional, tag = "2")]
    pub(in crate::cri) overhead: Option<LinuxContainerResources>,
    /// The sum of its containers' limits. If omitted, it is unchanged.
    #[prost(message, optional, tag = "3")]
    pub(in crate::cri) resources: Option<LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::cri) struct UpdatePodSandboxResourcesResponse {}

#[derive(Debug)]
pub(super) struct UpdatePod(pub(super) Arc<Node>);

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
