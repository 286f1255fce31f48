//! CreateContainer with newer fields.

use std::pin::Pin;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use k8s_cri::v1::CreateContainerResponse;
use prost::{DecodeError, Message as _};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::server::UnaryService;
use tonic_prost::ProstEncoder;

use super::env_values::decode_create;
use crate::cri::containers::CreateRequest;
use crate::cri::node::Node;

/// Newer fields of a mount.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerMount {
    /// Since Kubernetes 1.33.
    #[prost(string, tag = "10")]
    image_sub_path: String,
    /// Since Kubernetes 1.37.
    #[prost(string, repeated, tag = "11")]
    mount_options: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerConfig {
    #[prost(message, repeated, tag = "7")]
    mounts: Vec<NewerMount>,
    /// Since Kubernetes 1.33.
    #[prost(int32, tag = "18")]
    stop_signal: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NewerCreateContainerRequest {
    #[prost(message, optional, tag = "2")]
    config: Option<NewerConfig>,
}

/// Decodes a message twice: as the message crate's type, and as the type with the newer fields.
#[derive(Debug)]
pub(super) struct CreateCodec;

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

/// Decodes a request with newer fields.
pub(in crate::cri) fn create_request(bytes: Bytes) -> Result<CreateRequest, DecodeError> {
    let newer = NewerCreateContainerRequest::decode(bytes.clone())?;
    let NewerConfig {
        mounts,
        stop_signal,
    } = newer.config.unwrap_or_default();
    let mounts = mounts.into_iter();
    let mounts = mounts.map(|mount| (mount.image_sub_path, mount.mount_options));
    let (image_sub_paths, mount_options) = mounts.unzip();
    Ok(CreateRequest {
        request: decode_create(bytes)?,
        image_sub_paths,
        mount_options,
        stop_signal,
    })
}

#[derive(Debug)]
pub(super) struct CreateCall(pub(super) Arc<Node>);

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

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerConfig, CreateContainerRequest, Mount};
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    #[test]
    fn newer_fields_are_read_beside_the_known_ones() {
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
        // Two concatenated encodings are one message with the fields of both; lists are joined.
        let newer = NewerCreateContainerRequest {
            config: Some(NewerConfig {
                mounts: vec![NewerMount {
                    image_sub_path: "models/small".to_owned(),
                    mount_options: vec!["noexec".to_owned(), "nodev".to_owned()],
                }],
                stop_signal: 29,
            }),
        };
        let mut bytes = known.encode_to_vec();
        bytes.extend(newer.encode_to_vec());
        let read = create_request(bytes.into()).unwrap();
        assert_eq!(read.image_sub_paths, ["", "", "models/small"]);
        assert_eq!(read.mount_options[2], ["noexec", "nodev"]);
        assert_eq!(
            read.mount_options[..2],
            [vec![], vec![]] as [Vec<String>; 2]
        );
        assert_eq!(read.stop_signal, 29);
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
