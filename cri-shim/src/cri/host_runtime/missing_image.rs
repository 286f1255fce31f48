//! Images that only one of the runtimes has when the other needs them.
//!
//! A kubelet asks whether an image is there without telling for which pod, and does not pull one
//! that either runtime has.

use std::sync::Arc;

use podvisor_cri_messages::{
    Image, ImageService as _, ImageSpec, ImageStatusRequest, ImageStatusResponse, PodSandboxConfig,
    PullImageRequest,
};
use podvisor_images::parse_reference;
use tonic::Status;
use tracing::info;

use super::client::{HostRuntime, optional};
use super::message::{Call, decode};
use crate::cri::images::Images;
use crate::cri::node::Node;

const IMAGE_STATUS: &str = "/runtime.v1.ImageService/ImageStatus";
const PULL_IMAGE: &str = "/runtime.v1.ImageService/PullImage";

/// Pulls an image that only the other runtime has. Returns its id if podvisor does not know it by
/// the name that the request has: it is pulled by digest, which gives it no tag.
pub(super) async fn pull_here(
    node: &Arc<Node>,
    host: &HostRuntime,
    call: &Call,
    image: &ImageSpec,
) -> Result<Option<String>, Status> {
    // The call itself answers what is wrong with the request.
    let Ok(None) = own(node, image).await else {
        return Ok(None);
    };
    let hosts = optional(host.ask_briefly(call.to(IMAGE_STATUS, &asked(image))).await);
    let Some(found) = decode::<ImageStatusResponse>(&hosts)?.image else {
        return Ok(None);
    };
    let by_id = named(&found.id);
    if let Ok(Some(same)) = own(node, &by_id).await {
        return Ok(Some(same.id));
    }
    let name = exact(image, &found);
    info!(
        image = name,
        "pulling an image that only the host's runtime has"
    );
    let pull = PullImageRequest {
        image: Some(named(&name)),
        ..PullImageRequest::default()
    };
    let images = Images::new(Arc::clone(node));
    let pulled = images.pull_image(tonic::Request::new(pull)).await;
    pulled.map_err(|error| not_pulled(&name, "podvisor", &error))?;
    match own(node, &by_id).await? {
        Some(same) => Ok(Some(same.id)),
        None => Err(other(&name, &found, "podvisor")),
    }
}

/// Pulls an image that only podvisor has. Returns its id if the other runtime does not know it by
/// the name that the request has.
pub(super) async fn pull_there(
    node: &Arc<Node>,
    host: &HostRuntime,
    call: &Call,
    image: &ImageSpec,
    pod: Option<&PodSandboxConfig>,
) -> Result<Option<String>, Status> {
    if image.image.is_empty() || hosts(host, call, image).await?.is_some() {
        return Ok(None);
    }
    let Ok(Some(found)) = own(node, image).await else {
        return Ok(None);
    };
    let by_id = named(&found.id);
    if let Some(same) = hosts(host, call, &by_id).await? {
        return Ok(Some(same.id));
    }
    let name = exact(image, &found);
    info!(
        image = name,
        "pulling an image that the host's runtime lacks"
    );
    let pull = PullImageRequest {
        image: Some(named(&name)),
        sandbox_config: pod.cloned(),
        ..PullImageRequest::default()
    };
    let pulled = host.ask(call.to(PULL_IMAGE, &pull)).await;
    pulled.map_err(|error| not_pulled(&name, "the host's runtime", &error))?;
    match hosts(host, call, &by_id).await? {
        Some(same) => Ok(Some(same.id)),
        None => Err(other(&name, &found, "the host's runtime")),
    }
}

/// Returns the other runtime's image.
async fn hosts(
    host: &HostRuntime,
    call: &Call,
    image: &ImageSpec,
) -> Result<Option<Image>, Status> {
    let hosts = host.ask(call.to(IMAGE_STATUS, &asked(image))).await?;
    Ok(decode::<ImageStatusResponse>(&hosts)?.image)
}

/// Returns podvisor's own image.
async fn own(node: &Arc<Node>, image: &ImageSpec) -> Result<Option<Image>, Status> {
    let images = Images::new(Arc::clone(node));
    let status = images
        .image_status(tonic::Request::new(asked(image)))
        .await?;
    Ok(status.into_inner().image)
}

fn asked(image: &ImageSpec) -> ImageStatusRequest {
    ImageStatusRequest {
        image: Some(image.clone()),
        verbose: false,
    }
}

fn named(image: &str) -> ImageSpec {
    ImageSpec {
        image: image.to_owned(),
        ..ImageSpec::default()
    }
}

/// Returns a name by which the same image can be pulled that one of the runtimes has, even if its
/// tag has moved: by the digest in the repository that the user has specified. Kubelets give images
/// by the ids that ImageStatus answered, by which nothing can be pulled.
fn exact(image: &ImageSpec, found: &Image) -> String {
    let specified = match image.user_specified_image.is_empty() {
        false => &image.user_specified_image,
        true => &image.image,
    };
    let repository = |name: &str| {
        let name = parse_reference(name).ok()?;
        Some((name.registry().to_owned(), name.repository().to_owned()))
    };
    let wanted = repository(specified);
    let mut digests = found.repo_digests.iter();
    let same = digests.find(|digest| wanted.is_some() && repository(digest) == wanted);
    same.or(found.repo_digests.first())
        .unwrap_or(specified)
        .clone()
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

fn other(image: &str, found: &Image, runtime: &str) -> Status {
    Status::failed_precondition(format!(
        "{image} is not the image {} any more, which {runtime} does not have: pull it anew \
         (imagePullPolicy: Always)",
        found.id
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_image_is_pulled_although_its_tag_has_moved() {
        let digest = |repository: &str| format!("{repository}@sha256:{}", "1".repeat(64));
        let found = Image {
            repo_digests: ["r.example/other", "docker.io/library/nginx"]
                .map(digest)
                .into(),
            ..Image::default()
        };
        let specified = |name: &str| ImageSpec {
            image: "sha256:2".to_owned(),
            user_specified_image: name.to_owned(),
            ..ImageSpec::default()
        };
        for name in ["nginx", "nginx:1.27", "docker.io/library/nginx:1"] {
            let exact = exact(&specified(name), &found);
            assert_eq!(exact, digest("docker.io/library/nginx"), "{name}");
        }
        let exact_of = |name| exact(&specified(name), &found);
        assert_eq!(exact_of("elsewhere.example/a"), digest("r.example/other"));
        let imported = Image::default();
        assert_eq!(exact(&specified("local:1"), &imported), "local:1");
    }
}
