//! `AdmissionReview` of `admission.k8s.io/v1`: what comes in and what goes out.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use podvisor_cluster_types::{Cause, meta::Meta};
use serde::Deserialize;
use serde_json::{Value, json};

/// The version that is understood.
const API_VERSION: &str = "admission.k8s.io/v1";

/// Why a request is no review.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewError {
    /// It is not JSON of that form.
    #[error("the request is not an AdmissionReview")]
    Malformed(#[from] serde_json::Error),
    /// It is of another version, or has no request.
    #[error("the request is not an AdmissionReview of {API_VERSION} with a request")]
    NoRequest,
}

/// What a user asks of the API server.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct Request {
    /// Copied into the answer.
    pub uid: String,
    /// The kind of the object.
    pub kind: Kind,
    /// `status`, where the request is for that part.
    pub sub_resource: Option<String>,
    /// The object's name; empty where the API server makes it.
    pub name: String,
    /// The object's namespace.
    pub namespace: String,
    /// `CREATE`, `UPDATE` or `DELETE`.
    pub operation: String,
    /// Who asks.
    pub user_info: User,
    /// The object as it would be.
    pub object: Value,
    /// The object as it is.
    pub old_object: Value,
    /// Nothing is stored.
    pub dry_run: Option<bool>,
}

/// A kind of object.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Kind {
    /// Group.
    pub group: String,
    /// Version.
    pub version: String,
    /// Name.
    pub kind: String,
}

/// Who asks.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct User {
    /// Name.
    pub username: String,
    /// Groups.
    pub groups: Vec<String>,
    /// What an authenticator says besides.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Response {
    /// The object is taken as it is, with what the user should know.
    Allowed(Vec<String>),
    /// The object is taken with these changes.
    Patched(json_patch::Patch),
    /// The object breaks rules.
    Invalid(Vec<Cause>),
    /// The request is refused for another reason.
    Refused {
        /// HTTP status.
        code: u16,
        /// Reason, as a `Status` names it.
        reason: &'static str,
        /// The reason.
        message: String,
    },
}

impl Response {
    /// Taken as it is.
    #[must_use]
    pub const fn allowed() -> Self {
        Self::Allowed(Vec::new())
    }

    /// Whether the request may go on.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_) | Self::Patched(_))
    }
}

impl Request {
    /// The metadata of the object as it would be.
    #[must_use]
    pub fn meta(&self) -> Meta {
        meta(&self.object)
    }

    /// The metadata of the object as it is.
    #[must_use]
    pub fn old_meta(&self) -> Meta {
        meta(&self.old_object)
    }

    /// Whether deletion of the object was asked for, and only what holds it up changes: an object
    /// that its owner holds up with a finalizer lives on, and its specification is judged.
    #[must_use]
    pub fn is_going(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
            && self.object.get("spec") == self.old_object.get("spec")
    }
}

fn meta(object: &Value) -> Meta {
    let metadata = object.get("metadata").cloned().unwrap_or_default();
    serde_json::from_value(metadata).unwrap_or_default()
}

/// Reads a review.
///
/// # Errors
///
/// It is malformed, or of another version.
pub(super) fn read(body: &[u8]) -> Result<Request, ReviewError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    #[derive(Default)]
    struct Review {
        api_version: String,
        request: Option<Request>,
    }
    let review: Review = serde_json::from_slice(body)?;
    match review.request {
        Some(request) if review.api_version == API_VERSION => Ok(request),
        _ => Err(ReviewError::NoRequest),
    }
}

/// The review that goes back.
#[must_use]
pub fn answer(request: &Request, response: &Response) -> Value {
    let mut answer = json!({ "uid": request.uid, "allowed": response.is_allowed() });
    match response {
        Response::Allowed(warnings) if warnings.is_empty() => {}
        Response::Allowed(warnings) => answer["warnings"] = json!(warnings),
        Response::Patched(patch) => {
            let patch = serde_json::to_vec(patch).unwrap_or_default();
            answer["patchType"] = json!("JSONPatch");
            answer["patch"] = json!(ByteString(patch));
        }
        Response::Invalid(causes) => {
            let messages: Vec<&str> = causes.iter().map(|cause| cause.message.as_str()).collect();
            answer["status"] = json!({
                "status": "Failure",
                "code": 422,
                "reason": "Invalid",
                "message": messages.join("; "),
                "details": {
                    "group": request.kind.group,
                    "kind": request.kind.kind,
                    "name": request.name,
                    "causes": causes,
                },
            });
        }
        Response::Refused {
            code,
            reason,
            message,
        } => {
            answer["status"] = json!({
                "status": "Failure",
                "code": code,
                "reason": reason,
                "message": message,
            });
        }
    }
    json!({ "apiVersion": API_VERSION, "kind": "AdmissionReview", "response": answer })
}

#[cfg(test)]
mod tests {
    use podvisor_cluster_types::{Causes, FieldPath};

    use super::*;

    #[test]
    fn a_review_of_another_version_is_refused() {
        let old = json!({ "apiVersion": "admission.k8s.io/v1beta1", "request": {} }).to_string();
        assert!(matches!(read(old.as_bytes()), Err(ReviewError::NoRequest)));
        for text in ["", "[]", "{\"request\": 3}", "\u{0}"] {
            assert!(read(text.as_bytes()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_refusal_lists_every_cause_by_its_field() {
        let mut causes = Causes::default();
        causes.invalid(&FieldPath::new("spec.a"), "is wrong");
        causes.required(&FieldPath::new("spec.b"), "is required");
        let request = Request {
            uid: "u".to_owned(),
            ..Default::default()
        };
        let answer = answer(&request, &Response::Invalid(causes.into_vec()));
        let response = &answer["response"];
        assert_eq!(response["uid"], "u");
        assert_eq!(response["allowed"], false);
        assert_eq!(response["status"]["code"], 422);
        assert_eq!(
            response["status"]["message"],
            "spec.a is wrong; spec.b is required"
        );
        assert_eq!(
            response["status"]["details"]["causes"][1]["field"],
            "spec.b"
        );
    }
}
