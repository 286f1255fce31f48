//! UploadTokenRequests: a request that is answered, and not stored.

use std::time::SystemTime;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use k8s_openapi::api::{authorization::v1::ResourceAttributes, core::v1::PersistentVolumeClaim};
use kube::Api;
use serde_json::{Value, json};

use super::{State, authorize};
use crate::{
    discovery,
    front_proxy::User,
    https::{self, Answer},
    status::Failure,
    upload::{GROUP, Grant, PHASE, RESOURCE, TARGET, VERSION},
};

/// The kind's name.
const KIND: &str = "UploadTokenRequest";

/// The namespace in a path of requests for tokens.
pub(super) fn namespace(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
    let rest = rest.strip_prefix('/')?.strip_prefix(VERSION)?;
    let rest = rest.strip_prefix("/namespaces/")?;
    let namespace = rest.strip_suffix(RESOURCE)?.strip_suffix('/')?;
    let is_plain = !namespace.is_empty() && !namespace.contains(['/', '%']);
    is_plain.then_some(namespace)
}

/// Answers a request for a token with the token.
pub(super) async fn answer(
    request: Request<Incoming>,
    state: &State,
    user: &User,
    namespace: &str,
) -> Result<Answer, Failure> {
    if request.method() != Method::POST {
        return Err(Failure::only_post());
    }
    let wanted = ResourceAttributes {
        group: Some(GROUP.to_owned()),
        version: Some(VERSION.to_owned()),
        namespace: Some(namespace.to_owned()),
        resource: Some(RESOURCE.to_owned()),
        verb: Some("create".to_owned()),
        ..Default::default()
    };
    if !authorize::is_allowed(&state.client, user, wanted).await? {
        return Err(Failure::forbidden(format!(
            "{RESOURCE}.{GROUP} is forbidden: user \"{}\" cannot create resource \"{RESOURCE}\" in \
             API group \"{GROUP}\" in the namespace \"{namespace}\"",
            user.name
        )));
    }
    let body = match https::read_body(request.into_body()).await {
        Ok(body) => body,
        Err(answer) => return Ok(answer),
    };
    let (mut object, name) = parse(&body, namespace)?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(state.client.clone(), namespace);
    let claim = claims
        .get_opt(&name)
        .await
        .map_err(|error| Failure::of_api_server(&error))?
        .ok_or_else(|| Failure::not_found("persistentvolumeclaims", &name))?;
    let grant = Grant {
        uid: waiting(&claim)?,
        namespace: namespace.to_owned(),
        name,
    };
    let key = state.keys.key_or_new().await.map_err(|error| {
        let error = &error as &dyn std::error::Error;
        tracing::error!(error, "tokens cannot be signed");
        Failure::internal("the token cannot be signed: try again")
    })?;
    object["status"] = json!({ "token": key.sign(grant, SystemTime::now()) });
    object["metadata"]["namespace"] = json!(namespace);
    Ok(https::json(StatusCode::CREATED, &object))
}

/// The request, and the name of the claim that it is for.
fn parse(body: &[u8], namespace: &str) -> Result<(Value, String), Failure> {
    let bad = |why: &str| Failure::bad_request(format!("the {KIND} is invalid: {why}"));
    let given: Value = serde_json::from_slice(body).map_err(|error| bad(&error.to_string()))?;
    if given["kind"].as_str() != Some(KIND)
        || given["apiVersion"].as_str() != Some(&format!("{GROUP}/{VERSION}"))
    {
        return Err(bad(&format!("it must be a {KIND} of {GROUP}/{VERSION}")));
    }
    let meta = &given["metadata"];
    if meta["namespace"]
        .as_str()
        .is_some_and(|given| !given.is_empty() && given != namespace)
    {
        return Err(bad("metadata.namespace is not the namespace of the path"));
    }
    let name = given["spec"]["pvcName"].as_str().unwrap_or_default();
    if !podvisor_cluster_types::names::is_dns_subdomain(name) {
        return Err(bad("spec.pvcName must be the name of a claim"));
    }
    // What it does not know is not sent back.
    let object = json!({
        "kind": KIND,
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "metadata": { "name": meta["name"].as_str().unwrap_or_default() },
        "spec": { "pvcName": name },
    });
    Ok((object, name.to_owned()))
}

/// The unique id of a claim that waits for an upload.
fn waiting(claim: &PersistentVolumeClaim) -> Result<String, Failure> {
    let annotations = claim.metadata.annotations.as_ref();
    let annotation = |name: &str| {
        annotations
            .and_then(|all| all.get(name))
            .map(String::as_str)
    };
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    if annotation(TARGET).is_none() {
        return Err(Failure::bad_request(format!(
            "PersistentVolumeClaim {name} waits for no upload: create a DataVolume with the source \
             upload"
        )));
    }
    if annotation(PHASE) == Some("Succeeded") {
        return Err(Failure::conflict(format!(
            "PersistentVolumeClaim {name} is filled already"
        )));
    }
    Ok(claim.metadata.uid.clone().unwrap_or_default())
}

/// The lists that clients read first.
pub(super) fn discovery(path: &str) -> Option<Value> {
    let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
    match rest.strip_prefix('/') {
        None if rest.is_empty() => Some(group()),
        Some(VERSION) => {
            let resource = json!({
                "name": RESOURCE,
                "singularName": "uploadtokenrequest",
                "namespaced": true,
                "kind": KIND,
                "shortNames": ["utr", "utrs"],
                "verbs": ["create"],
            });
            Some(discovery::resources(GROUP, VERSION, &[resource]))
        }
        _ => None,
    }
}

/// The group, as lists of groups have it.
pub(super) fn group() -> Value {
    discovery::group(GROUP, &[VERSION])
}

/// The path of requests for tokens, described.
pub(super) fn openapi(parameter: &Value, answer: &Value) -> (String, Value) {
    let path = format!("/apis/{GROUP}/{VERSION}/namespaces/{{namespace}}/{RESOURCE}");
    let post = json!({
        "operationId": "createUploadTokenRequest",
        "parameters": [parameter],
        "responses": { "201": answer, "401": { "description": "Unauthorized" } },
        "x-kubernetes-action": "post",
        "x-kubernetes-group-version-kind": { "group": GROUP, "kind": KIND, "version": VERSION },
    });
    (path, json!({ "post": post }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_the_namespace() {
        let base = "/apis/upload.cdi.kubevirt.io/v1beta1/namespaces";
        let of = |rest: &str| namespace(&format!("{base}{rest}")).map(str::to_owned);
        assert_eq!(of("/a/uploadtokenrequests").as_deref(), Some("a"));
        for rest in [
            "//uploadtokenrequests",
            "/a/b/uploadtokenrequests",
            "/a%2fb/uploadtokenrequests",
            "/a/uploadtokenrequests/x",
            "/auploadtokenrequests",
            "/a",
        ] {
            assert_eq!(of(rest), None, "{rest}");
        }
    }

    #[test]
    fn a_request_names_a_claim_of_its_namespace() {
        let request = |more: Value| {
            let mut request = json!({
                "kind": KIND, "apiVersion": "upload.cdi.kubevirt.io/v1beta1",
                "metadata": { "name": "x", "labels": { "a": "b" } }, "spec": { "pvcName": "a" },
            });
            json_patch::merge(&mut request, &more);
            parse(request.to_string().as_bytes(), "n")
        };
        let (object, name) = request(json!({})).unwrap();
        assert_eq!(
            (name.as_str(), &object["metadata"]),
            ("a", &json!({ "name": "x" }))
        );
        for wrong in [
            json!({ "kind": "Pod" }),
            json!({ "apiVersion": "v1" }),
            json!({ "metadata": { "namespace": "m" } }),
            json!({ "spec": { "pvcName": "../a" } }),
            json!({ "spec": null }),
        ] {
            assert_eq!(request(wrong.clone()).unwrap_err().code(), 400, "{wrong}");
        }
        assert_eq!(parse(b"x", "n").unwrap_err().code(), 400);
    }

    #[test]
    fn only_a_claim_that_waits_gets_a_token() {
        let of = |annotations: Value| {
            let claim = json!({ "metadata": { "uid": "u", "annotations": annotations } });
            waiting(&serde_json::from_value(claim).unwrap())
        };
        assert_eq!(of(json!({ TARGET: "" })).unwrap(), "u");
        assert_eq!(of(json!({})).unwrap_err().code(), 400);
        let filled = json!({ TARGET: "", PHASE: "Succeeded" });
        assert_eq!(of(filled).unwrap_err().code(), 409);
    }
}
