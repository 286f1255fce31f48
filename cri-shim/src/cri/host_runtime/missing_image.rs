//! Images that only one of the runtimes has when the other needs them.
//!
//! A kubelet asks whether an image is there without telling for which pod, and does not pull one
//! that either runtime has.

use std::sync::Arc;

use k8s_cri::v1::image_service_server::ImageService as _;
use k8s_cri::v1::{
    ImageSpec, ImageStatusRequest, ImageStatusResponse, PodSandboxConfig, PullImageRequest,
};
use tonic::Status;
use tracing::info;

use super::client::HostRuntime;
use super::message::{Call, decode};
use super::service::optional;
use crate::cri::images::Images;
use crate::cri::node::Node;

const IMAGE_STATUS: &str = "/runtime.v1.ImageService/ImageStatus";
const PULL_IMAGE: &str = "/runtime.v1.ImageService/PullImage";

/// Pulls an image that only the other runtime has.
pub(super) async fn pull_here(
    node: &Arc<Node>,
    host: &HostRuntime,
    call: &Call,
    image: ImageSpec,
) -> Result<(), Status> {
    let images = Images::new(Arc::clone(node));
    let asked = ImageStatusRequest {
        image: Some(image.clone()),
        verbose: false,
    };
    let own = images
        .image_status(tonic::Request::new(asked.clone()))
        .await;
    // The call itself answers what is wrong with the request.
    if own.is_err() || own.is_ok_and(|own| own.into_inner().image.is_some()) {
        return Ok(());
    }
    let hosts = optional(host.ask_briefly(call.to(IMAGE_STATUS, &asked)).await);
    let hosts: ImageStatusResponse = decode(&hosts)?;
    if hosts.image.is_none() {
        return Ok(());
    }
    let name = as_specified(&image);
    info!(
        image = name,
        "pulling an image that only the host's runtime has"
    );
    let pull = PullImageRequest {
        image: Some(ImageSpec {
            image: name.clone(),
            ..ImageSpec::default()
        }),
        ..PullImageRequest::default()
    };
    let pulled = images.pull_image(tonic::Request::new(pull)).await;
    pulled
        .map(drop)
        .map_err(|error| not_pulled(&name, "podvisor", &error))
}

/// Pulls an image that the other runtime does not have.
pub(super) async fn pull_there(
    host: &HostRuntime,
    call: &Call,
    image: ImageSpec,
    pod: Option<PodSandboxConfig>,
) -> Result<(), Status> {
    let asked = ImageStatusRequest {
        image: Some(image.clone()),
        verbose: false,
    };
    let hosts = host.ask(call.to(IMAGE_STATUS, &asked)).await?;
    let hosts: ImageStatusResponse = decode(&hosts)?;
    if hosts.image.is_some() {
        return Ok(());
    }
    let name = as_specified(&image);
    info!(
        image = name,
        "pulling an image that the host's runtime lacks"
    );
    let pull = PullImageRequest {
        image: Some(ImageSpec {
            image: name.clone(),
            ..ImageSpec::default()
        }),
        sandbox_config: pod,
        ..PullImageRequest::default()
    };
    let pulled = host.ask(call.to(PULL_IMAGE, &pull)).await;
    pulled
        .map(drop)
        .map_err(|error| not_pulled(&name, "the host's runtime", &error))
}

/// Returns the name of an image that a user has specified. Kubelets give images by the ids that
/// ImageStatus answered, by which nothing can be pulled.
fn as_specified(image: &ImageSpec) -> String {
    match image.user_specified_image.is_empty() {
        false => image.user_specified_image.clone(),
        true => image.image.clone(),
    }
}

fn not_pulled(image: &str, runtime: &str, error: &Status) -> Status {
    Status::new(
        error.code(),
        format!(
            "{runtime} does not have the image {image}, and cannot pull it without credentials \
             (imagePullPolicy: Always pulls it with those of the pod): {}",
            error.message()
        ),
    )
}
