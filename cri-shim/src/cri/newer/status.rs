//! ContainerStatus, which tells more.

use std::pin::Pin;
use std::sync::Arc;

use k8s_cri::v1::{ContainerStatusRequest, ContainerStatusResponse};
use prost::Message as _;
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::server::UnaryService;
use tonic_prost::ProstDecoder;

use super::stop_signal;
use crate::cri::node::Node;

/// A container's status, and what the crate of messages does not know of it.
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
    /// Since Kubernetes 1.33: the one that StopContainer sends, whoever chose it.
    #[prost(int32, tag = "19")]
    stop_signal: i32,
}

/// Writes a message twice: whoever reads it joins the two.
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
    let signal = node.stop_signal(id)?;
    Ok(FullStatus {
        known,
        newer: NewerStatusResponse {
            status: Some(NewerStatus {
                stop_signal: stop_signal::to_cri(signal),
            }),
        },
    })
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
    use k8s_cri::v1::ContainerStatus;

    use super::*;

    #[test]
    fn what_is_newer_is_read_beside_the_known_fields() {
        let known = ContainerStatusResponse {
            status: Some(ContainerStatus {
                id: "c".to_owned(),
                ..ContainerStatus::default()
            }),
            ..ContainerStatusResponse::default()
        };
        let newer = NewerStatusResponse {
            status: Some(NewerStatus { stop_signal: 23 }),
        };
        let bytes = [known.encode_to_vec(), newer.encode_to_vec()].concat();
        assert_eq!(ContainerStatusResponse::decode(&*bytes).unwrap(), known);
        assert_eq!(NewerStatusResponse::decode(&*bytes).unwrap(), newer);
    }
}
