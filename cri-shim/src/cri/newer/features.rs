//! Status with newer features of the runtime.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use k8s_cri::v1::{StatusRequest, StatusResponse};
use prost::{DecodeError, Message as _};
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::server::UnaryService;
use tonic_prost::ProstDecoder;

use crate::cri::node::Node;
use crate::cri::runtime::node_status;

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct NewerStatusResponse {
    #[prost(message, optional, tag = "4")]
    features: Option<NewerFeatures>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct NewerFeatures {
    /// Since Kubernetes 1.37: `mount_options` of mounts are applied.
    #[prost(bool, tag = "3")]
    mount_options: bool,
}

/// A runtime's status, with the features that the message crate does not have.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::cri) struct FullNodeStatus {
    pub(in crate::cri) known: StatusResponse,
    pub(in crate::cri) has_mount_options: bool,
}

impl FullNodeStatus {
    /// Returns a status of podvisor's own.
    pub(in crate::cri) fn own(known: StatusResponse) -> Self {
        Self {
            known,
            has_mount_options: true,
        }
    }

    pub(in crate::cri) fn decode(message: Bytes) -> Result<Self, DecodeError> {
        let newer = NewerStatusResponse::decode(message.clone())?;
        Ok(Self {
            known: StatusResponse::decode(message)?,
            has_mount_options: newer.features.unwrap_or_default().mount_options,
        })
    }

    /// Encodes both parts, which the receiver merges.
    pub(in crate::cri) fn encode(&self) -> Bytes {
        let newer = NewerStatusResponse {
            features: Some(NewerFeatures {
                mount_options: self.has_mount_options,
            }),
        };
        [self.known.encode_to_vec(), newer.encode_to_vec()]
            .concat()
            .into()
    }
}

#[derive(Debug)]
pub(super) struct NodeStatusCodec;

impl Codec for NodeStatusCodec {
    type Encode = FullNodeStatus;
    type Decode = StatusRequest;
    type Encoder = Self;
    type Decoder = ProstDecoder<StatusRequest>;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::default()
    }
}

impl Encoder for NodeStatusCodec {
    type Item = FullNodeStatus;
    type Error = Status;

    fn encode(&mut self, status: FullNodeStatus, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put(buffer, status.encode());
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct NodeStatusCall(pub(super) Arc<Node>);

impl UnaryService<StatusRequest> for NodeStatusCall {
    type Response = FullNodeStatus;
    type Future =
        Pin<Box<dyn Future<Output = Result<tonic::Response<Self::Response>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<StatusRequest>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move {
            let known = node_status(&node, request.get_ref().verbose).await;
            Ok(tonic::Response::new(FullNodeStatus::own(known)))
        })
    }
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::RuntimeFeatures;

    use super::*;

    #[test]
    fn newer_features_are_beside_the_known_ones() {
        let known = StatusResponse {
            features: Some(RuntimeFeatures {
                supplemental_groups_policy: true,
            }),
            ..StatusResponse::default()
        };
        let own = FullNodeStatus::own(known.clone());
        // StatusResponse.features: supplemental_groups_policy is field 1, mount_options field 3.
        assert_eq!(&own.encode()[..], [0x22, 2, 0x08, 1, 0x22, 2, 0x18, 1]);
        assert_eq!(FullNodeStatus::decode(own.encode()).unwrap(), own);
        let older = FullNodeStatus::decode(known.encode_to_vec().into()).unwrap();
        assert_eq!((older.known, older.has_mount_options), (known, false));
    }
}
