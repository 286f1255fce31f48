//! Unary gRPC calls and answers as bytes.

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use prost::{DecodeError, Message};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response, request};
use tonic::{Code, Status};

/// Before each message: whether it is compressed, and its length.
const HEAD: usize = 5;

/// A unary call.
#[derive(Debug, Clone)]
pub(super) struct Call {
    head: request::Parts,
    /// The encoded message.
    pub(super) message: Bytes,
}

impl Call {
    /// Reads a call whose message has at most `limit` bytes.
    pub(super) async fn read(request: Request<Body>, limit: usize) -> Result<Self, Status> {
        let (head, body) = request.into_parts();
        let body = Limited::new(body, limit + HEAD).collect().await;
        let body = body.map_err(|error| {
            Status::out_of_range(format!(
                "cannot read the request, which may have {limit} bytes: {error}"
            ))
        })?;
        let message = unframe(&body.to_bytes())?;
        Ok(Self { head, message })
    }

    pub(super) fn decode<M: Message + Default>(&self) -> Result<M, Status> {
        decode(&self.message)
    }

    /// Returns the call with another message.
    pub(super) fn with(&self, message: Bytes) -> Self {
        Self {
            head: self.head.clone(),
            message,
        }
    }

    /// Returns another call for the same caller.
    pub(super) fn to(&self, path: &'static str, message: &impl Message) -> Self {
        let mut call = self.with(message.encode_to_vec().into());
        call.head.uri = path.parse().unwrap_or_default();
        call
    }

    pub(super) fn into_request(self) -> Request<Body> {
        let body = Body::new(Full::new(frame(&self.message)));
        let mut request = Request::from_parts(self.head, body);
        // That of the body that was read.
        request.headers_mut().remove("content-length");
        request
    }
}

/// Decodes a message, of which unknown fields are skipped.
pub(super) fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(undecodable)
}

fn undecodable(error: DecodeError) -> Status {
    Status::internal(format!("cannot decode a message: {error}"))
}

/// Returns the message of an answer, of at most `limit` bytes.
pub(super) async fn answer(response: Response<Body>, limit: usize) -> Result<Bytes, Status> {
    if let Some(status) = Status::from_header_map(response.headers()) {
        // Without a body, the headers are the trailers.
        if status.code() != Code::Ok {
            return Err(status);
        }
    }
    let body = Limited::new(response.into_body(), limit + HEAD)
        .collect()
        .await;
    let body = body.map_err(|error| match error.is::<LengthLimitError>() {
        true => Status::resource_exhausted(format!("the answer has more than {limit} bytes")),
        false => Status::unavailable(format!("the answer broke off: {error}")),
    })?;
    let status = body.trailers().and_then(Status::from_header_map);
    match status {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => unframe(&body.to_bytes()),
    }
}

/// Returns the answer with this message.
pub(super) fn answered(message: &Bytes) -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let body = Full::new(frame(message)).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut response = Response::new(Body::new(body));
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert("content-type", kind);
    response
}

fn frame(message: &Bytes) -> Bytes {
    let mut framed = BytesMut::with_capacity(HEAD + message.len());
    framed.put_u8(0);
    // Longer messages than the limit of 16 MiB are never read.
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// Returns the one message of a body.
fn unframe(body: &Bytes) -> Result<Bytes, Status> {
    let Some(([compressed, length @ ..], rest)) = body.split_first_chunk::<HEAD>() else {
        return Err(Status::internal("the body has no message"));
    };
    if *compressed != 0 {
        return Err(Status::unimplemented(
            "compressed messages are not supported",
        ));
    }
    if rest.len() != length_of(*length) {
        return Err(Status::internal(
            "the body is not one message of the length that it says",
        ));
    }
    Ok(body.slice(HEAD..))
}

fn length_of(length: [u8; 4]) -> usize {
    usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_message_is_found_in_its_frame_and_in_no_other(
            message in prop::collection::vec(any::<u8>(), 0..64),
            cut in 0..69usize,
        ) {
            let message = Bytes::from(message);
            let framed = frame(&message);
            prop_assert_eq!(unframe(&framed).unwrap(), message);
            if cut < framed.len() {
                prop_assert!(unframe(&framed.slice(..cut)).is_err());
            }
        }

        #[test]
        fn any_body_is_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..32)) {
            if let Ok(message) = unframe(&Bytes::from(body.clone())) {
                prop_assert_eq!(&body[HEAD..], &message[..]);
            }
        }
    }

    #[tokio::test]
    async fn an_answer_is_read_as_it_was_written_and_no_longer_one_than_allowed() {
        let message = Bytes::from_static(b"message");
        assert_eq!(answer(answered(&message), 7).await.unwrap(), message);
        let refused = answer(answered(&message), 6).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        let refused = Status::not_found("no such pod").into_http();
        let refused = answer(refused, 7).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::NotFound, "no such pod")
        );
    }
}
