//! `AdmissionReview` of `admission.k8s.io/v1`: what comes in and what goes out.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use podvisor_cluster_types::{Cause, meta::Meta};
use serde::Deserialize;
use serde_json::{Value, json};

/// The version that is understood.
const API_VERSION: &str = "admission.k8s.io/v1";

/// So many values a review may have, in lists and objects of all depths: a few times what large
/// objects have. Two bytes of an object can be a kilobyte once it is read by its type.
const MOST: usize = 20_000;

/// Reviews with more values are judged a few at a time.
const MANY: usize = 4_000;

/// Why a request is no review.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewError {
    /// It is not JSON of that form.
    #[error("the request is not an AdmissionReview")]
    Malformed(#[from] serde_json::Error),
    /// It is of another version, or has no request.
    #[error("the request is not an AdmissionReview of {API_VERSION} with a request")]
    NoRequest,
    /// It would take too much memory.
    #[error("the object has too many values: a request has at most {MOST}, with what was before")]
    TooLarge,
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

    /// Taken as it is, unless there are causes to refuse it.
    #[must_use]
    pub(super) fn of(causes: Vec<Cause>) -> Self {
        if causes.is_empty() {
            Self::allowed()
        } else {
            Self::Invalid(causes)
        }
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

/// How much there is to read in a review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// As in most.
    Usual,
    /// It takes much memory.
    Large,
}

/// Returns how much there is to read, without reading it.
///
/// # Errors
///
/// It is too much.
pub(super) fn extent(body: &[u8]) -> Result<Extent, ReviewError> {
    match values(body) {
        count if count > MOST => Err(ReviewError::TooLarge),
        count if count > MANY => Ok(Extent::Large),
        _ => Ok(Extent::Usual),
    }
}

/// Counts what begins a value or follows one, outside of texts: no fewer than there are values.
fn values(body: &[u8]) -> usize {
    let (mut count, mut is_text, mut is_escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_text,
            b'"' => is_text = !is_text,
            b',' | b'[' | b'{' if !is_text => count += 1,
            _ => {}
        }
    }
    count
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
    fn values_are_counted_before_they_are_read() {
        assert_eq!(values(br#"{"a": [1, {"b": "x,[{\"],"}], "c": 2}"#), 5);
        let of = |count: usize| {
            let disks = vec![json!({}); count];
            let spec = json!({ "spec": { "domain": { "devices": { "disks": disks } } } });
            extent(spec.to_string().as_bytes())
        };
        assert!(matches!(of(50), Ok(Extent::Usual)));
        assert!(matches!(of(5_000), Ok(Extent::Large)));
        // Less than a megabyte, and hundreds of them in memory.
        assert!(matches!(of(300_000), Err(ReviewError::TooLarge)));
        let text = json!({ "userData": ",[{\"".repeat(100_000) }).to_string();
        assert!(matches!(extent(text.as_bytes()), Ok(Extent::Usual)));
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
