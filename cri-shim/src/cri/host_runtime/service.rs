//! RuntimeService and ImageService of both runtimes: where calls go.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use podvisor_cri_messages::{
    ContainerConfig, CreateContainerRequest, ImageSpec, RunPodSandboxRequest, RuntimeHandler,
    StatusResponse,
};
use prost::Message;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower_service::Service;
use tracing::info;

use super::client::{HostRuntime, optional};
use super::last_lists::Listed;
use super::merge;
use super::message::{Call, answer, answered, decode};
use super::{features, missing_image};
use crate::cri::config::HOST_HANDLER;
use crate::cri::error::{CriError, Result as CriResult};
use crate::cri::node::Node;
use crate::cri::runtime::condition;

/// A field of [`RunPodSandboxRequest`] after the message: an empty `runtime_handler` (tag 2), which
/// replaces an earlier one.
const DEFAULT_HANDLER: [u8; 2] = [0x12, 0];

/// The condition without which a kubelet starts no pod.
const RUNTIME_READY: &str = "RuntimeReady";

/// The reason of a condition that is not met because of the other runtime.
const NOT_READY: &str = "HostRuntimeNotReady";

/// How a call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// By the runtime that has the pod or container, whose id is the first field.
    Pod,
    Container,
    /// Like `Pod`, and the runtime must have the image.
    CreateContainer,
    /// By the runtime that the pod belongs to.
    RunPod,
    /// By both, in one list.
    List(Listed),
    /// Like `List`, but the other runtime's part may be missing.
    Statistics,
    /// By both.
    Descriptors,
    /// By the daemon, if the other runtime's events come.
    Events,
    Status,
    RuntimeConfig,
    UpdateRuntimeConfig,
    PullImage,
    ImageStatus,
    ListImages,
    ImageFsInfo,
    RemoveImage,
}

impl Route {
    /// Returns the route of a method; `None`: it is the daemon's own.
    fn of(path: &str) -> Option<Self> {
        Some(match path.rsplit('/').next()? {
            "StopPodSandbox"
            | "RemovePodSandbox"
            | "PodSandboxStatus"
            | "PortForward"
            | "PodSandboxStats"
            | "UpdatePodSandboxResources" => Self::Pod,
            "StartContainer"
            | "StopContainer"
            | "RemoveContainer"
            | "ContainerStatus"
            | "UpdateContainerResources"
            | "ReopenContainerLog"
            | "ExecSync"
            | "Exec"
            | "Attach"
            | "ContainerStats"
            | "CheckpointContainer" => Self::Container,
            "CreateContainer" => Self::CreateContainer,
            "RunPodSandbox" => Self::RunPod,
            "ListPodSandbox" => Self::List(Listed::Pods),
            "ListContainers" => Self::List(Listed::Containers),
            "ListContainerStats" | "ListPodSandboxStats" | "ListPodSandboxMetrics" => {
                Self::Statistics
            }
            "ListMetricDescriptors" => Self::Descriptors,
            "GetContainerEvents" => Self::Events,
            "Status" => Self::Status,
            "RuntimeConfig" => Self::RuntimeConfig,
            "UpdateRuntimeConfig" => Self::UpdateRuntimeConfig,
            "PullImage" => Self::PullImage,
            "ImageStatus" => Self::ImageStatus,
            "ListImages" => Self::ListImages,
            "ImageFsInfo" => Self::ImageFsInfo,
            "RemoveImage" => Self::RemoveImage,
            _ => return None,
        })
    }
}

/// Returns the part of a request to create a container that names its image.
fn named_by_id(id: String) -> CreateContainerRequest {
    let image = ImageSpec {
        image: id,
        ..ImageSpec::default()
    };
    let config = ContainerConfig {
        image: Some(image),
        ..ContainerConfig::default()
    };
    CreateContainerRequest {
        config: Some(config),
        ..CreateContainerRequest::default()
    }
}

/// The first field of a request about a pod or container.
#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(string, tag = "1")]
    id: String,
}

/// A service of the interface whose pods and images may be in another runtime.
#[derive(Debug, Clone)]
pub(in crate::cri) struct WithHost<S> {
    inner: S,
    node: Arc<Node>,
    host: Option<Arc<HostRuntime>>,
    message_bytes: usize,
}

impl<S> WithHost<S> {
    /// Creates the service; without a `host`, all calls are for `inner`. Messages have at most
    /// `message_bytes` bytes.
    pub(in crate::cri) fn new(
        inner: S,
        node: Arc<Node>,
        host: Option<Arc<HostRuntime>>,
        message_bytes: usize,
    ) -> Self {
        Self {
            inner,
            node,
            host,
            message_bytes,
        }
    }
}

impl<S: NamedService> NamedService for WithHost<S> {
    const NAME: &'static str = S::NAME;
}

type Answered = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S> Service<Request<Body>> for WithHost<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answered;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Answered {
        let route = Route::of(request.uri().path());
        let (Some(host), Some(route)) = (&self.host, route) else {
            return Box::pin(self.inner.call(request));
        };
        let mut both = Both {
            inner: self.inner.clone(),
            node: Arc::clone(&self.node),
            host: Arc::clone(host),
            message_bytes: self.message_bytes,
        };
        Box::pin(async move {
            let answer = both.answer(route, request).await;
            Ok(answer.unwrap_or_else(Status::into_http))
        })
    }
}

/// What a call needs of both runtimes.
pub(super) struct Both<S> {
    inner: S,
    pub(super) node: Arc<Node>,
    pub(super) host: Arc<HostRuntime>,
    message_bytes: usize,
}

impl<S> Both<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    async fn answer(
        &mut self,
        route: Route,
        request: Request<Body>,
    ) -> Result<Response<Body>, Status> {
        let call = Call::read(request, self.message_bytes).await?;
        match route {
            Route::Pod if has(self.node.pod(&id(&call)?)) => self.own(call).await,
            Route::Container if has(self.node.container(&id(&call)?)) => self.own(call).await,
            Route::Pod | Route::Container => self.host.pass(call).await,
            Route::CreateContainer => self.create_container(call).await,
            Route::RunPod => self.run_pod(call).await,
            Route::List(listed) => {
                let own = self.own_message(call.clone()).await?;
                let hosts = self.host.list(listed, call).await?;
                Ok(answered(&merge::concatenated(&own, &hosts)))
            }
            Route::Statistics => {
                let own = self.own_message(call.clone()).await?;
                let hosts = optional(self.host.ask_briefly(call).await);
                Ok(answered(&merge::concatenated(&own, &hosts)))
            }
            Route::Descriptors => {
                let own = self.own_message(call.clone()).await?;
                let hosts = optional(self.host.ask_briefly(call).await);
                Ok(answered(&merge::descriptors(&own, &hosts)?))
            }
            Route::Status => self.status(call).await,
            Route::PullImage => self.pull_image(call).await,
            Route::ImageStatus => self.image_status(call).await,
            Route::ListImages => self.list_images(call).await,
            Route::ImageFsInfo => self.image_fs_info(call).await,
            Route::RemoveImage => self.remove_image(call).await,
            Route::Events => match self.host.events_fault() {
                // A kubelet that gets no events lists more often.
                Some(fault) => Err(fault),
                None => self.own(call).await,
            },
            // The driver of control groups is that of both, and podvisor takes either. A runtime
            // that does not know the call leaves it to the kubelet's own settings.
            Route::RuntimeConfig => self.host.pass(call).await,
            Route::UpdateRuntimeConfig => {
                // A kubelet does not repeat a call that succeeds.
                match self.host.ask(call.clone()).await {
                    Err(error) if error.code() != Code::Unimplemented => Err(error),
                    _ => self.own(call).await,
                }
            }
        }
    }

    pub(super) async fn own(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let answer = self.inner.call(call.into_request()).await;
        Ok(answer.unwrap_or_else(|never| match never {}))
    }

    pub(super) async fn own_message(&mut self, call: Call) -> Result<Bytes, Status> {
        answer(self.own(call).await?, self.message_bytes).await
    }

    async fn run_pod(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let request: RunPodSandboxRequest = call.decode()?;
        if !self
            .host
            .takes(request.config.as_ref(), &request.runtime_handler)
        {
            return self.own(call).await;
        }
        let config = request.config.unwrap_or_default();
        features::check_pod(&self.host, &call, &config).await?;
        let metadata = config.metadata.unwrap_or_default();
        info!(
            pod = metadata.name,
            namespace = metadata.namespace,
            "creating the pod in the host's runtime"
        );
        let message = merge::concatenated(&call.message, &DEFAULT_HANDLER.to_vec().into());
        self.host.pass_making(call.with(message)).await
    }

    /// Creates a container in the runtime that has its pod. A kubelet does not pull an image that
    /// one of the runtimes has, so that the other may have to do so now.
    async fn create_container(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let request: CreateContainerRequest = call.decode()?;
        let config = request.config.clone().unwrap_or_default();
        let is_own = has(self.node.pod(&request.pod_sandbox_id));
        let volumes = config
            .mounts
            .iter()
            .filter_map(|mount| mount.image.as_ref());
        let all = config.image.iter().map(|image| (image, true));
        let mut call = call;
        for (image, is_root) in all.chain(volumes.map(|image| (image, false))) {
            let id = match is_own {
                true => missing_image::pull_here(&self.node, &self.host, &call, image).await?,
                false => {
                    let pod = request.sandbox_config.as_ref();
                    missing_image::pull_there(&self.node, &self.host, &call, image, pod).await?
                }
            };
            match id {
                None => {}
                Some(id) if is_root => {
                    // A message that follows is merged into the one before it; all else stays, also
                    // fields that are unknown here.
                    let named = named_by_id(id).encode_to_vec();
                    call = call.with(merge::concatenated(&call.message, &named.into()));
                }
                Some(id) => {
                    return Err(Status::failed_precondition(format!(
                        "the runtime of the pod knows the image {} of a volume by its id {id} \
                         alone; name it by its digest",
                        image.image
                    )));
                }
            }
        }
        if is_own {
            return self.own(call).await;
        }
        features::check_container(&self.host, &call, &config).await?;
        self.host.pass_making(call).await
    }

    /// Answers the daemon's own status: it serves without the other runtime, too. Its state is a
    /// condition that kubelets only show, unless most pods are its.
    async fn status(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let own = self.own_message(call.clone()).await?;
        let mut status: StatusResponse = decode(&own)?;
        let hosts = self.host.status(&call).await;
        let fault = match &hosts {
            Ok(hosts) => {
                let conditions = hosts.status.iter().flat_map(|status| &status.conditions);
                let mut faults = conditions
                    .filter(|condition| condition.r#type == RUNTIME_READY && !condition.status);
                faults.next().map(|fault| fault.message.clone())
            }
            Err(error) => Some(error.message().to_owned()),
        };
        let conditions = &mut status.status.get_or_insert_default().conditions;
        if let Some(fault) = fault.as_ref().filter(|_| self.host.is_default) {
            let ready = conditions.iter_mut();
            let mut ready = ready.filter(|condition| condition.r#type == RUNTIME_READY);
            if let Some(ready) = ready.next().filter(|ready| ready.status) {
                *ready = condition(RUNTIME_READY, NOT_READY, Some(fault.clone()));
            }
        }
        conditions.push(condition("HostRuntimeReady", NOT_READY, fault));
        if let Ok(hosts) = hosts {
            let default = hosts.runtime_handlers.into_iter();
            let mut default = default.filter(|handler| handler.name.is_empty());
            let features = default.next().and_then(|handler| handler.features);
            let handlers = &mut status.runtime_handlers;
            if self.host.is_default {
                handlers.retain(|handler| !handler.name.is_empty());
                handlers.push(RuntimeHandler {
                    name: String::new(),
                    features,
                });
            }
            handlers.push(RuntimeHandler {
                name: HOST_HANDLER.to_owned(),
                features,
            });
        }
        Ok(answered(&status.encode_to_vec().into()))
    }
}

fn id(call: &Call) -> Result<String, Status> {
    Ok(call.decode::<Named>()?.id)
}

/// Returns whether something is the daemon's. What is wrong with an id is its to say, too.
fn has<T>(found: CriResult<T>) -> bool {
    !matches!(found, Err(CriError::NotFound { .. }))
}
