//! ImageService of both runtimes.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use k8s_cri::v1::{ImageSpec, ImageStatusRequest, ImageStatusResponse, PullImageRequest};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tower_service::Service;
use tracing::info;

use super::client::{HostRuntime, is_away};
use super::kept::Listed;
use super::message::{Call, answer, answered, decode};
use super::service::{Answered, optional};
use super::{HOST_HANDLER, lists};
use crate::cri::node::Node;

const IMAGE_STATUS: &str = "/runtime.v1.ImageService/ImageStatus";

/// The methods whose requests begin with an image.
const OF_IMAGES: [&str; 3] = ["PullImage", "ImageStatus", "RemoveImage"];

/// A field after such a request: an image (tag 1) of which only `runtime_handler` (tag 19) is set,
/// to nothing. A message that comes again sets its fields in the first one.
const DEFAULT_HANDLER: [u8; 5] = [0x0a, 3, 0x9a, 0x01, 0];

/// A request that begins with an image.
#[derive(Clone, PartialEq, Message)]
struct OfImage {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
}

/// ImageService whose images may be in another runtime.
#[derive(Debug, Clone)]
pub(in crate::cri) struct WithHostImages<S> {
    inner: S,
    node: Arc<Node>,
    host: Option<Arc<HostRuntime>>,
    message_bytes: usize,
}

impl<S> WithHostImages<S> {
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

impl<S: NamedService> NamedService for WithHostImages<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for WithHostImages<S>
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
        let Some(host) = &self.host else {
            return Box::pin(self.inner.call(request));
        };
        let mut both = Both {
            inner: self.inner.clone(),
            node: Arc::clone(&self.node),
            host: Arc::clone(host),
            message_bytes: self.message_bytes,
        };
        Box::pin(async move {
            let answer = both.answer(request).await;
            Ok(answer.unwrap_or_else(Status::into_http))
        })
    }
}

/// What a call needs of both runtimes.
struct Both<S> {
    inner: S,
    node: Arc<Node>,
    host: Arc<HostRuntime>,
    message_bytes: usize,
}

impl<S> Both<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    async fn answer(&mut self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let call = Call::read(request, self.message_bytes).await?;
        let method = call.path().rsplit('/').next().unwrap_or_default();
        if OF_IMAGES.contains(&method) && handler(&call)? == HOST_HANDLER {
            return self.host.pass(with_default_handler(&call)).await;
        }
        match method {
            "PullImage" => self.pull(call).await,
            "ImageStatus" => {
                let own = self.own(call.clone()).await?;
                if decode::<ImageStatusResponse>(&own)?.image.is_some() {
                    return Ok(answered(&own));
                }
                // An image that is not known to be there is pulled.
                let hosts = optional(self.host.ask_briefly(call).await);
                Ok(answered(&hosts))
            }
            "ListImages" => {
                let own = self.own(call.clone()).await?;
                // A kubelet forgets what it knows of images that are not listed.
                let hosts = self.host.list(Listed::Images, call).await?;
                Ok(answered(&lists::images(&own, &hosts)?))
            }
            "ImageFsInfo" => {
                let own = self.own(call.clone()).await?;
                let hosts = optional(self.host.ask_briefly(call).await);
                // A kubelet looks at the first one only.
                Ok(answered(&match self.host.is_default {
                    true => lists::concatenated(&hosts, &own),
                    false => lists::concatenated(&own, &hosts),
                }))
            }
            "RemoveImage" => self.remove(call).await,
            _ => self.own_answer(call).await,
        }
    }

    async fn own_answer(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let answer = self.inner.call(call.into_request()).await;
        Ok(answer.unwrap_or_else(|never| match never {}))
    }

    async fn own(&mut self, call: Call) -> Result<Bytes, Status> {
        answer(self.own_answer(call).await?, self.message_bytes).await
    }

    /// Removes an image from both. One that only podvisor has does not wait for the other runtime:
    /// a kubelet that is short of space would go on with the next one.
    async fn remove(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let status = ImageStatusRequest {
            image: call.decode::<OfImage>()?.image,
            verbose: false,
        };
        let status = self.own(call.to(IMAGE_STATUS, &status)).await?;
        let had_it = decode::<ImageStatusResponse>(&status)?.image.is_some();
        let own = self.own(call.clone()).await?;
        match self.host.ask(call).await {
            Err(error) if had_it && is_away(&error) => Ok(answered(&own)),
            Err(error) => Err(error),
            Ok(hosts) => Ok(answered(&hosts)),
        }
    }

    /// Pulls an image for the runtime of its pod. Kubelets do not tell its runtime handler, but
    /// pull only after they have created the pod.
    async fn pull(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let request: PullImageRequest = call.decode()?;
        let image = request.image.unwrap_or_default();
        let is_hosts = match &request.sandbox_config {
            None => false,
            Some(pod) => {
                let metadata = pod.metadata.clone().unwrap_or_default();
                let is_own = self.node.pods().iter().any(|pod| pod.is_of(&metadata));
                !is_own
                    && (self.host.takes(Some(pod), &image.runtime_handler)
                        || self.host.has_pod(&call, &metadata).await?)
            }
        };
        if !is_hosts {
            return self.own_answer(call).await;
        }
        info!(image = image.image, "pulling for the host's runtime");
        self.host.pass_making(call).await
    }
}

/// Returns the runtime handler that a request about an image is for.
fn handler(call: &Call) -> Result<String, Status> {
    let image = call.decode::<OfImage>()?.image.unwrap_or_default();
    Ok(image.runtime_handler)
}

/// Returns the call without its runtime handler, which the other runtime does not know.
fn with_default_handler(call: &Call) -> Call {
    let handler = Bytes::from_static(&DEFAULT_HANDLER);
    call.with(lists::concatenated(&call.message, &handler))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_without_its_handler_is_the_same_otherwise() {
        let request = PullImageRequest {
            image: Some(ImageSpec {
                image: "r.example/a".to_owned(),
                runtime_handler: HOST_HANDLER.to_owned(),
                ..ImageSpec::default()
            }),
            ..PullImageRequest::default()
        };
        let empty = Request::new(Body::new(http_body_util::Full::new(vec![0; 5].into())));
        let call = Call::read(empty, 0).await.unwrap();
        let call = call.with(request.encode_to_vec().into());
        assert_eq!(handler(&call).unwrap(), HOST_HANDLER);
        let mut wanted = request;
        wanted.image.as_mut().unwrap().runtime_handler.clear();
        let stripped: PullImageRequest = with_default_handler(&call).decode().unwrap();
        assert_eq!(stripped, wanted);
    }
}
