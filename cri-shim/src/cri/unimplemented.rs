//! Names the calls that nobody serves, as gRPC servers in Go do.
//!
//! The services answer a method that is unknown, or that podvisor does not implement, with
//! UNIMPLEMENTED and no message. Clients tell by the name in the message which call a runtime lacks:
//! tests of nodes skip what it is for.

use podvisor_cri_messages::{ImageServiceServer, RuntimeServiceServer};
use tonic::codegen::http::Response;
use tonic::{Code, Status};

/// Returns the answer to a call of `path`; one that says only that the call is not implemented gets
/// a message that names the call.
pub(super) fn named<R: Default>(path: &str, answer: Response<R>) -> Response<R> {
    match is_unnamed(&answer) {
        true => Status::unimplemented(message(path)).into_http(),
        false => answer,
    }
}

/// Returns grpc-go's message for a call of `path`, which is `/SERVICE/METHOD`.
fn message(path: &str) -> String {
    let Some((service, method)) = path
        .strip_prefix('/')
        .and_then(|path| path.rsplit_once('/'))
    else {
        return format!("malformed method name: {path:?}");
    };
    match service {
        RuntimeServiceServer::<()>::NAME | ImageServiceServer::<()>::NAME => {
            format!("unknown method {method} for service {service}")
        }
        _ => format!("unknown service {service}"),
    }
}

/// Returns whether a call is not implemented, without a message that says which.
fn is_unnamed<B>(response: &Response<B>) -> bool {
    let status = Status::from_header_map(response.headers());
    status.is_some_and(|status| status.code() == Code::Unimplemented && status.message().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_are_unknown_are_named_as_by_servers_in_go() {
        for (path, expected) in [
            (
                "/runtime.v1.RuntimeService/CheckpointPod",
                "unknown method CheckpointPod for service runtime.v1.RuntimeService",
            ),
            (
                "/runtime.v1.ImageService/StreamImages",
                "unknown method StreamImages for service runtime.v1.ImageService",
            ),
            (
                "/runtime.v1alpha2.RuntimeService/Version",
                "unknown service runtime.v1alpha2.RuntimeService",
            ),
            ("/Version", "malformed method name: \"/Version\""),
        ] {
            assert_eq!(message(path), expected);
        }
    }

    #[test]
    fn an_answer_that_has_a_message_is_left_as_it_is() {
        let path = "/runtime.v1.RuntimeService/CheckpointPod";
        let said = |status: Status| {
            let answer = named(path, status.into_http::<()>());
            let status = Status::from_header_map(answer.headers()).unwrap();
            status.message().to_owned()
        };
        assert_eq!(said(Status::unimplemented("")), message(path));
        assert_eq!(said(Status::unimplemented("why")), "why");
        assert_eq!(said(Status::not_found("")), "");
        let answer = named(path, Response::new(()));
        assert!(Status::from_header_map(answer.headers()).is_none());
    }
}
