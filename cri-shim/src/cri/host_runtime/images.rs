//! ImageService of both runtimes.

use std::convert::Infallible;

use bytes::Bytes;
use podvisor_cri_messages::{ImageSpec, ImageStatusRequest, ImageStatusResponse, PullImageRequest};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower_service::Service;
use tracing::info;

use super::client::optional;
use super::last_lists::Listed;
use super::merge;
use super::message::{Call, answered, decode};
use super::service::Both;
use crate::cri::config::HOST_HANDLER;

const IMAGE_STATUS: &str = "/runtime.v1.ImageService/ImageStatus";

/// A field after a request that begins with an image: an image (tag 1) of which only `runtime_handler` (tag 19) is set,
/// to nothing. A message that comes again sets its fields in the first one.
const DEFAULT_HANDLER: [u8; 5] = [0x0a, 3, 0x9a, 0x01, 0];

/// A request that begins with an image.
#[derive(Clone, PartialEq, Message)]
struct OfImage {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
}

impl<S> Both<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    pub(super) async fn image_status(&mut self, call: Call) -> Result<Response<Body>, Status> {
        if handler(&call)? == HOST_HANDLER {
            return self.host.pass(with_default_handler(&call)).await;
        }
        let own = self.own_message(call.clone()).await?;
        if decode::<ImageStatusResponse>(&own)?.image.is_some() {
            return Ok(answered(&own));
        }
        // An image that is not known to be there is pulled.
        let hosts = optional(self.host.ask_briefly(call).await);
        Ok(answered(&hosts))
    }

    pub(super) async fn list_images(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let own = self.own_message(call.clone()).await?;
        // A kubelet forgets what it knows of images that are not listed.
        let hosts = self.host.list(Listed::Images, call).await?;
        Ok(answered(&merge::images(&own, &hosts)?))
    }

    pub(super) async fn image_fs_info(&mut self, call: Call) -> Result<Response<Body>, Status> {
        let own = self.own_message(call.clone()).await?;
        let hosts = optional(self.host.ask_briefly(call).await);
        // A kubelet looks at the first one only.
        Ok(answered(&match self.host.is_default {
            true => merge::concatenated(&hosts, &own),
            false => merge::concatenated(&own, &hosts),
        }))
    }

    /// Removes an image from both. One that only podvisor has does not wait for the other runtime:
    /// a kubelet that is short of space would go on with the next one.
    pub(super) async fn remove_image(&mut self, call: Call) -> Result<Response<Body>, Status> {
        if handler(&call)? == HOST_HANDLER {
            return self.host.pass(with_default_handler(&call)).await;
        }
        let status = ImageStatusRequest {
            image: call.decode::<OfImage>()?.image,
            verbose: false,
        };
        let status = self.own_message(call.to(IMAGE_STATUS, &status)).await?;
        let had_it = decode::<ImageStatusResponse>(&status)?.image.is_some();
        let own = self.own_message(call.clone()).await?;
        match self.host.ask(call.clone()).await {
            Err(error) if had_it && self.host.is_away(&call, &error).await => Ok(answered(&own)),
            Err(error) => Err(error),
            Ok(hosts) => Ok(answered(&hosts)),
        }
    }

    /// Pulls an image for the runtime of its pod. Kubelets do not tell its runtime handler, but
    /// pull only after they have created the pod.
    pub(super) async fn pull_image(&mut self, call: Call) -> Result<Response<Body>, Status> {
        if handler(&call)? == HOST_HANDLER {
            return self.host.pass_making(with_default_handler(&call)).await;
        }
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
            return self.own(call).await;
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
    call.with(merge::concatenated(&call.message, &handler))
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
