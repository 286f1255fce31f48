//! Calls of RuntimeService that are newer than the crate of messages, or have fields that are:
//! they are taken out before the service that it generates.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use k8s_cri::v1::{CreateContainerRequest, CreateContainerResponse, LinuxContainerResources};
use prost::{DecodeError, Message as _};
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic_prost::{ProstCodec, ProstEncoder};
use tower_service::Service;

use super::containers::CreateRequest;
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

/// Since there are image volumes it has further fields.
const CREATE_CONTAINER: &str = "/runtime.v1.RuntimeService/CreateContainer";

/// What is newer in a mount.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerMount {
    /// Since Kubernetes 1.33.
    #[prost(string, tag = "10")]
    image_sub_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerConfig {
    #[prost(message, repeated, tag = "7")]
    mounts: Vec<NewerMount>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerCreateContainerRequest {
    #[prost(message, optional, tag = "2")]
    config: Option<NewerConfig>,
}

/// Reads a message twice: what the crate knows of it, and what it does not.
#[derive(Debug)]
struct CreateCodec;

impl Codec for CreateCodec {
    type Encode = CreateContainerResponse;
    type Decode = CreateRequest;
    type Encoder = ProstEncoder<CreateContainerResponse>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Decoder for CreateCodec {
    type Item = CreateRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<CreateRequest>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        let request = create_request(bytes).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Some(request))
    }
}

fn create_request(bytes: Bytes) -> Result<CreateRequest, DecodeError> {
    let newer = NewerCreateContainerRequest::decode(bytes.clone())?;
    let mounts = newer.config.unwrap_or_default().mounts.into_iter();
    Ok(CreateRequest {
        request: CreateContainerRequest::decode(bytes)?,
        image_sub_paths: mounts.map(|mount| mount.image_sub_path).collect(),
    })
}

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
        let node = Arc::clone(&self.node);
        match request.uri().path() {
            UPDATE_POD => answer(
                ProstCodec::default(),
                self.message_bytes,
                UpdatePod(node),
                request,
            ),
            CREATE_CONTAINER => answer(CreateCodec, self.message_bytes, CreateCall(node), request),
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

/// CreateContainer.
#[derive(Debug)]
struct CreateCall(Arc<Node>);

impl UnaryService<CreateRequest> for CreateCall {
    type Response = CreateContainerResponse;
    type Future =
        Pin<Box<dyn Future<Output = Result<tonic::Response<Self::Response>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<CreateRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let container_id = node.create_container(request.into_inner()).await?;
            Ok(tonic::Response::new(CreateContainerResponse {
                container_id,
            }))
        })
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

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerConfig, Mount};
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    #[test]
    fn a_newer_field_of_a_mount_is_read_beside_the_known_ones() {
        let mount = |container_path: &str| Mount {
            container_path: container_path.to_owned(),
            ..Mount::default()
        };
        let known = CreateContainerRequest {
            pod_sandbox_id: "pod".to_owned(),
            config: Some(ContainerConfig {
                mounts: vec![mount("/a"), mount("/b")],
                ..ContainerConfig::default()
            }),
            sandbox_config: None,
        };
        // What is encoded twice is one message with the fields of both; lists are joined.
        let newer = NewerCreateContainerRequest {
            config: Some(NewerConfig {
                mounts: vec![NewerMount {
                    image_sub_path: "models/small".to_owned(),
                }],
            }),
        };
        let mut bytes = known.encode_to_vec();
        bytes.extend(newer.encode_to_vec());
        let read = create_request(bytes.into()).unwrap();
        assert_eq!(read.image_sub_paths, ["", "", "models/small"]);
        assert_eq!(read.request.pod_sandbox_id, "pod");
        assert_eq!(read.request.config.unwrap().mounts[1].container_path, "/b");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            let _ = create_request(bytes.into());
        }
    }
}
