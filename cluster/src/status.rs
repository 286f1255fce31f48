//! Failures, as the API server's `Status` objects, of the subresources and of the nodes.

use http::StatusCode;
use serde_json::json;

use crate::https::{self, Answer};

/// Why a request fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    code: StatusCode,
    reason: &'static str,
    message: String,
}

impl Failure {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
        }
    }

    pub(crate) fn unauthorized() -> Self {
        let message = "the request does not come from the API server";
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    pub(crate) fn not_found(kind: &str, name: &str) -> Self {
        let message = format!("{kind} \"{name}\" not found");
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub(crate) fn not_found_path(path: &str) -> Self {
        let path = podvisor_cluster_types::cause::shown(path);
        let message = format!("the server has no resource at {path}");
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "only GET and PUT are served";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    pub(crate) fn only_post() -> Self {
        let message = "only POST is served";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        let code = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(code, "InternalError", message)
    }

    pub(crate) fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message)
    }

    /// The answer of the API server, passed on where the user can do something about it.
    pub(crate) fn of_api_server(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if matches!(status.code, 404 | 409 | 422) => {
                let (code, reason) = match status.code {
                    404 => (StatusCode::NOT_FOUND, "NotFound"),
                    409 => (StatusCode::CONFLICT, "Conflict"),
                    _ => (StatusCode::UNPROCESSABLE_ENTITY, "Invalid"),
                };
                Self::new(code, reason, status.message.clone())
            }
            error => {
                tracing::error!(%error, "the API server does not answer a request of ours");
                Self::internal("the API server did not answer: try again")
            }
        }
    }

    pub(crate) fn answer(&self) -> Answer {
        https::json(
            self.code,
            &json!({
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "message": self.message,
                "reason": self.reason,
                "code": self.code.as_u16(),
            }),
        )
    }

    /// What is said to people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The HTTP status.
    #[cfg(test)]
    pub(crate) fn code(&self) -> u16 {
        self.code.as_u16()
    }
}
