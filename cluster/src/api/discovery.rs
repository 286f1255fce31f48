//! What the group has: the lists that `kubectl` and `virtctl` read first.

use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};

use super::{
    GROUP, VERSIONS, expand, openapi,
    subresources::{SUBRESOURCES, VM},
    upload,
};
use crate::{
    https::{self, Answer},
    status::Failure,
};

/// The answer where the path is one of discovery.
pub(super) fn answer(path: &str, accept: Option<&HeaderValue>) -> Option<Answer> {
    let path = path.strip_suffix('/').unwrap_or(path);
    if path == "/apis" && accept.is_some_and(wants_aggregated) {
        return Some(https::text(StatusCode::NOT_ACCEPTABLE, "not served"));
    }
    let value = match path {
        "/apis" => {
            json!({
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [group(), upload::group()],
            })
        }
        "/openapi/v2" => openapi::v2(),
        "/openapi/v3" => openapi::v3_list(),
        _ if path.starts_with("/openapi/v3/") => openapi::v3(path)?,
        _ if path.starts_with("/apis/upload.") => upload::discovery(path)?,
        _ => {
            let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
            match rest.strip_prefix('/') {
                None if rest.is_empty() => group(),
                None => return None,
                Some(rest)
                    if rest
                        .split_once('/')
                        .is_some_and(|(_, rest)| rest == "guestfs") =>
                {
                    return Some(no_guestfs());
                }
                Some(rest) => of_version(rest)?,
            }
        }
    };
    Some(https::json(StatusCode::OK, &value))
}

/// Whether nothing but discovery of everything at once is accepted. It is not served; whoever asked
/// asks again for each version.
fn wants_aggregated(accept: &HeaderValue) -> bool {
    accept.to_str().is_ok_and(|accept| {
        accept
            .split(',')
            .all(|kind| kind.contains("as=APIGroupDiscoveryList"))
    })
}

fn group() -> Value {
    let version =
        |version: &str| json!({ "groupVersion": format!("{GROUP}/{version}"), "version": version });
    let versions: Vec<Value> = VERSIONS.iter().map(|name| version(name)).collect();
    json!({
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "preferredVersion": versions.first(),
        "versions": versions,
    })
}

/// `virtctl guestfs` asks for the image of a pod with libguestfs: there is none.
fn no_guestfs() -> Answer {
    Failure::not_found("image", "libguestfs").answer()
}

fn of_version(rest: &str) -> Option<Value> {
    let (version, rest) = rest
        .split_once('/')
        .map_or((rest, None), |(v, rest)| (v, Some(rest)));
    if !VERSIONS.contains(&version) {
        return None;
    }
    match rest {
        None => Some(resources(version)),
        Some("version") => Some(json!({
            "gitVersion": crate::installation::VERSION,
            "gitCommit": "",
            "gitTreeState": "",
            "buildDate": "",
            "goVersion": "",
            "compiler": "rustc",
            "platform": "linux/amd64",
        })),
        Some("healthz") => Some(json!({ "apiserver": { "connectivity": "ok" } })),
        _ => None,
    }
}

fn resources(version: &str) -> Value {
    let subresources = SUBRESOURCES.iter().map(|subresource| {
        let kind = match subresource.resource {
            VM => "VirtualMachine",
            _ => "VirtualMachineInstance",
        };
        json!({
            "name": format!("{}/{}", subresource.resource, subresource.name),
            "singularName": "",
            "namespaced": true,
            "kind": kind,
            "verbs": [subresource.verb],
        })
    });
    let expand = json!({
        "name": expand::RESOURCE,
        "singularName": expand::RESOURCE,
        "namespaced": true,
        "kind": "VirtualMachine",
        "verbs": ["update"],
    });
    let resources: Vec<Value> = [expand].into_iter().chain(subresources).collect();
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/{version}"),
        "resources": resources,
    })
}
