//! ContainerStatus with newer fields.

use std::pin::Pin;
use std::sync::Arc;

use k8s_cri::v1::{ContainerStatusRequest, ContainerStatusResponse, Mount};
use prost::Message as _;
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::server::UnaryService;
use tonic_prost::ProstDecoder;

use super::stop_signal;
use crate::cri::node::Node;
use crate::cri::state::MountedImage;

/// A container's status, with the fields that the message crate does not have.
#[derive(Debug)]
pub(super) struct FullStatus {
    known: ContainerStatusResponse,
    newer: NewerStatusResponse,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<NewerStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerStatus {
    /// Each is a complete encoded message: lists are joined, but their elements are not merged.
    #[prost(bytes = "vec", repeated, tag = "14")]
    mounts: Vec<Vec<u8>>,
    /// Since Kubernetes 1.33: the signal that StopContainer sends, whether the image or the request
    /// set it.
    #[prost(int32, tag = "19")]
    stop_signal: i32,
}

/// Newer fields of a mount.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerMount {
    #[prost(message, optional, tag = "9")]
    image: Option<NewerImage>,
    /// Since Kubernetes 1.33.
    #[prost(string, tag = "10")]
    image_sub_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerImage {
    /// Since Kubernetes 1.35: the mounted image, as PullImage reports it.
    #[prost(string, tag = "20")]
    image_ref: String,
}

impl FullStatus {
    fn new(
        mut known: ContainerStatusResponse,
        stop_signal: u32,
        mounted_images: Vec<MountedImage>,
    ) -> Self {
        let status = known.status.as_mut();
        let mounts = status.map(|status| std::mem::take(&mut status.mounts));
        let mounts = mounts.unwrap_or_default();
        let mut bytes: Vec<_> = mounts.iter().map(Mount::encode_to_vec).collect();
        for MountedImage {
            mount,
            id,
            sub_path,
        } in mounted_images
        {
            let newer = NewerMount {
                image: Some(NewerImage { image_ref: id }),
                image_sub_path: sub_path,
            };
            if let Some(bytes) = bytes.get_mut(mount) {
                bytes.extend(newer.encode_to_vec());
            }
        }
        Self {
            known,
            newer: NewerStatusResponse {
                status: Some(NewerStatus {
                    mounts: bytes,
                    stop_signal: stop_signal::to_cri(stop_signal),
                }),
            },
        }
    }
}

/// Encodes a message in two parts, which the receiver merges.
#[derive(Debug)]
pub(super) struct StatusCodec;

impl Codec for StatusCodec {
    type Encode = FullStatus;
    type Decode = ContainerStatusRequest;
    type Encoder = Self;
    type Decoder = ProstDecoder<ContainerStatusRequest>;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::default()
    }
}

impl Encoder for StatusCodec {
    type Item = FullStatus;
    type Error = Status;

    fn encode(&mut self, status: FullStatus, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let too_long = |error: prost::EncodeError| Status::internal(error.to_string());
        status.known.encode(buffer).map_err(too_long)?;
        status.newer.encode(buffer).map_err(too_long)
    }
}

#[derive(Debug)]
pub(super) struct StatusCall(pub(super) Arc<Node>);

async fn full_status(node: &Node, request: &ContainerStatusRequest) -> Result<FullStatus, Status> {
    let id = &request.container_id;
    let known = node.container_status(id, request.verbose).await?;
    let (stop_signal, mounted_images) = node.newer_status(id)?;
    Ok(FullStatus::new(known, stop_signal, mounted_images))
}

impl UnaryService<ContainerStatusRequest> for StatusCall {
    type Response = FullStatus;
    type Future =
        Pin<Box<dyn Future<Output = Result<tonic::Response<Self::Response>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<ContainerStatusRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let status = full_status(&node, request.get_ref()).await?;
            Ok(tonic::Response::new(status))
        })
    }
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerStatus, ImageSpec};

    use super::*;

    /// The mounts as a current client decodes them.
    #[derive(Clone, PartialEq, prost::Message)]
    struct MountsResponse {
        #[prost(message, optional, tag = "1")]
        status: Option<Mounts>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Mounts {
        #[prost(message, repeated, tag = "14")]
        mounts: Vec<NewerMount>,
    }

    fn written(status: &FullStatus) -> Vec<u8> {
        [status.known.encode_to_vec(), status.newer.encode_to_vec()].concat()
    }

    #[test]
    fn what_is_newer_is_read_beside_the_known_fields() {
        const SIGTERM: u32 = 15;
        let image = |name: &str| Mount {
            container_path: format!("/{name}"),
            readonly: true,
            image: Some(ImageSpec {
                image: name.to_owned(),
                annotations: [("of".to_owned(), "it".to_owned())].into(),
                user_specified_image: "model:1".to_owned(),
                ..ImageSpec::default()
            }),
            ..Mount::default()
        };
        let host = Mount {
            container_path: "/data".to_owned(),
            host_path: "/srv".to_owned(),
            ..Mount::default()
        };
        let known = ContainerStatusResponse {
            status: Some(ContainerStatus {
                id: "c".to_owned(),
                mounts: vec![image("whole"), host, image("part")],
                ..ContainerStatus::default()
            }),
            ..ContainerStatusResponse::default()
        };
        let mounted = |mount, id: &str, sub_path: &str| MountedImage {
            mount,
            id: id.to_owned(),
            sub_path: sub_path.to_owned(),
        };
        let images = vec![mounted(0, "sha256:a", ""), mounted(2, "sha256:b", "etc")];
        let bytes = written(&FullStatus::new(known.clone(), SIGTERM, images));
        assert_eq!(ContainerStatusResponse::decode(&*bytes).unwrap(), known);
        let newer = NewerStatusResponse::decode(&*bytes).unwrap();
        assert_eq!(newer.status.unwrap().stop_signal, 23);
        let mounts = MountsResponse::decode(&*bytes).unwrap().status.unwrap();
        let newer = |image_ref: &str, sub_path: &str| NewerMount {
            image: Some(NewerImage {
                image_ref: image_ref.to_owned(),
            }),
            image_sub_path: sub_path.to_owned(),
        };
        let expected = [
            newer("sha256:a", ""),
            NewerMount::default(),
            newer("sha256:b", "etc"),
        ];
        assert_eq!(mounts.mounts, expected);
    }

    /// The images of a container from an older daemon are unknown.
    #[test]
    fn mounts_whose_images_are_not_known_are_told_as_before() {
        let known = ContainerStatusResponse {
            status: Some(ContainerStatus {
                mounts: vec![Mount {
                    image: Some(ImageSpec::default()),
                    ..Mount::default()
                }],
                ..ContainerStatus::default()
            }),
            ..ContainerStatusResponse::default()
        };
        let bytes = written(&FullStatus::new(known.clone(), 15, Vec::new()));
        assert_eq!(ContainerStatusResponse::decode(&*bytes).unwrap(), known);
    }
}
