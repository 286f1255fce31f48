//! Names the calls that nobody serves, as gRPC servers in Go do.
//!
//! The generated services answer an unknown method with UNIMPLEMENTED and no message. Clients tell
//! by the name in the message which call a runtime lacks: tests of nodes skip what it is for.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use k8s_cri::v1::image_service_server::SERVICE_NAME as IMAGES;
use k8s_cri::v1::runtime_service_server::SERVICE_NAME as RUNTIME;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower_layer::Layer;
use tower_service::Service;

/// Returns grpc-go's message for a call of `path`, which is `/SERVICE/METHOD`.
fn message(path: &str) -> String {
    let Some((service, method)) = path
        .strip_prefix('/')
        .and_then(|path| path.rsplit_once('/'))
    else {
        return format!("malformed method name: {path:?}");
    };
    match service {
        RUNTIME | IMAGES => format!("unknown method {method} for service {service}"),
        _ => format!("unknown service {service}"),
    }
}

/// Returns whether a call is not implemented, without a message that says which.
fn is_unnamed<B>(response: &Response<B>) -> bool {
    let status = Status::from_header_map(response.headers());
    status.is_some_and(|status| status.code() == Code::Unimplemented && status.message().is_empty())
}

/// A tower layer that names the calls that the inner services do not have.
#[derive(Debug, Clone, Copy)]
pub(super) struct NameUnknown;

impl<S> Layer<S> for NameUnknown {
    type Service = Named<S>;

    fn layer(&self, inner: S) -> Named<S> {
        Named(inner)
    }
}

/// See [`NameUnknown`].
#[derive(Debug, Clone)]
pub(super) struct Named<S>(S);

impl<S, B, R> Service<Request<B>> for Named<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: Default,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let uri = request.uri().clone();
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(match is_unnamed(&answer) {
                true => Status::unimplemented(message(uri.path())).into_http(),
                false => answer,
            })
        })
    }
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
        let response = |status: Status| status.into_http::<()>();
        assert!(is_unnamed(&response(Status::unimplemented(""))));
        assert!(!is_unnamed(&response(Status::unimplemented("why"))));
        assert!(!is_unnamed(&response(Status::not_found(""))));
        assert!(!is_unnamed(&Response::new(())));
    }
}
